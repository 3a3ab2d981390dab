"""Out of memory: one line with the rank, the sizes, and the keys to change."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from credit_dp.config import Config
from credit_dp.costs.budget import training_memory
from credit_dp.distributed.launch import launch
from credit_dp.distributed.launcher import RankInfo
from credit_dp.errors import UserError
from credit_dp.training.run import explain_out_of_memory, out_of_memory_message
from tests import commands
from tests.training.runs import make_config, make_store, tiny_unet

ROOT = Path(__file__).parents[2]
ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("store"), 32)
    return make_config(store, tmp_path_factory.mktemp("run"), tiny_unet(), dtype="float32")


def test_rollouts_keep_all_their_steps_unless_these_are_computed_again(config):
    held = {"activations": 100, "weights": 10}
    longer = replace(config, trainer=replace(config.trainer, rollout={0: 1, 5: 4}))
    again = replace(longer, trainer=replace(longer.trainer, checkpoint_activations=True))
    assert training_memory(held, longer)["activations"] == 400
    memory = training_memory({"activations": 5, "recomputed": 95}, again)
    assert memory == {"activations": 20, "recomputed": 95}
    half = replace(config, trainer=replace(config.trainer, autocast="bfloat16"))
    assert training_memory(held, half) == {
        "activations": 50,
        "weights": 10,
        "weights in bfloat16": 5,
    }


def test_the_line_says_who_and_names_the_keys_that_help(config):
    line = out_of_memory_message(config, RankInfo(), ERROR)
    assert line.startswith(
        "rank 0 (pipeline 0, data 0, domain 0): out of memory (CUDA out of memory). Set "
        "model.activation_checkpointing=true or trainer.autocast=bfloat16, or set parallel.domain "
        "above 1"
    )
    trainer = replace(config.trainer, rollout={0: 4}, autocast="bfloat16")
    line = out_of_memory_message(replace(config, trainer=trainer), RankInfo(), ERROR)
    assert "trainer.checkpoint_activations=step" in line
    assert "autocast" not in line
    # Without such keys more ranks are left.
    trainer = replace(config.trainer, dtype="float64")
    model = tiny_unet(activation_checkpointing=True)
    line = out_of_memory_message(replace(config, trainer=trainer, model=model), RankInfo(), ERROR)
    assert "(CUDA out of memory). Set parallel.domain above 1, or a smaller data.batch" in line


def test_other_errors_pass(config):
    with pytest.raises(RuntimeError, match="else"), explain_out_of_memory(config, RankInfo()):
        raise RuntimeError("something else")
    with pytest.raises(UserError, match="out of memory"), explain_out_of_memory(config, RankInfo()):
        raise torch.OutOfMemoryError(ERROR)


class Full(torch.nn.Module):
    """A layer that runs out of memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(ERROR)


def run(config: Config, ranks: RankInfo) -> int:
    """The last rank runs out of memory, the other one waits for it."""
    with explain_out_of_memory(config, ranks):
        if ranks.rank == ranks.world_size - 1:
            Full()(torch.zeros(1))
        torch.distributed.all_reduce(torch.zeros(1))
    return 0


def main(folder: str) -> int:
    """Launch two ranks."""
    store = make_store(Path(folder), 16)
    config = make_config(store, Path(folder) / "run", dtype="float32")
    parallel = replace(config.parallel, domain=2, data=1)
    return launch(replace(config, parallel=parallel), f"{__name__}:run")


@pytest.mark.slow
def test_all_ranks_end_with_one_line(tmp_path):
    code = f"from {__name__} import main\n"
    # The ranks import what starts them, as a file of the name __mp_main__.
    code += f"if __name__ == '__main__':\n    raise SystemExit(main({str(tmp_path)!r}))"
    done = commands.run(["python", "-W", "error", "-c", code], ROOT, os.environ)
    assert done.returncode == 2
    assert done.stderr.startswith("error: rank 1 (pipeline 0, data 0, domain 1): out of memory (")
    assert done.stderr.count("\n") == 1
