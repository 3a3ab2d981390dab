"""Memory that runs out: one line, with what the plan expects and a change that it says fits."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from credit_dp.config import Config
from credit_dp.distributed import RankInfo, launch
from credit_dp.errors import UserError
from credit_dp.training.out_of_memory import (
    candidate_changes,
    explain_out_of_memory,
    out_of_memory_message,
    planned_memory,
    smallest_change_message,
)
from tests.training.runs import make_config, make_store, tiny_unet

ROOT = Path(__file__).parents[2]
TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("store"), 32)
    model = tiny_unet(activation_checkpointing=True)
    return make_config(store, tmp_path_factory.mktemp("run"), model, dtype="float32")


@pytest.mark.slow
def test_the_first_change_that_fits_is_the_one_that_is_named(config):
    whole = planned_memory(config)
    half = [
        change
        for change in candidate_changes(config)
        if change.description == "trainer.autocast=bfloat16"
    ]
    two = [
        change
        for change in candidate_changes(config)
        if change.description.startswith("parallel.domain=2,")
    ]
    autocast, domain = planned_memory(half[0].config).held, planned_memory(two[0].config).held
    assert domain < autocast < whole.held
    assert "fits: trainer.autocast=bfloat16 (" in smallest_change_message(config, autocast)
    assert "fits: parallel.domain=2, which makes 2 ranks (" in smallest_change_message(
        config, autocast - 1
    )
    assert "lower data.batch_size" in smallest_change_message(config, 1.0)


@pytest.mark.slow
def test_rollouts_keep_all_their_steps_unless_these_are_computed_again(config):
    longer = replace(config, trainer=replace(config.trainer, rollout={0: 1, 5: 4}))
    assert planned_memory(longer).activations == 4 * planned_memory(config).activations
    words = [change.description for change in candidate_changes(longer)]
    assert words[0] == "trainer.checkpoint_activations=true"
    assert smallest_change_message(longer, planned_memory(config).held).startswith(
        "The smallest change that fits: trainer.checkpoint_activations=true ("
    )


@pytest.mark.slow
def test_the_line_says_who_and_how_much(config):
    said = out_of_memory_message(config, RankInfo(), (78 * 10**9, 80 * 10**9), TOLD)
    assert said.startswith(
        "rank 0 (pipeline 0, data 0, domain 0): out of memory (78.0 GB of 80.0 GB in use); the "
    )
    size = r"[\d.]+ [kM]B"
    assert re.search(
        f"the plan expects {size}, of it {size} activations. The smallest change", said
    )


def test_a_run_that_can_not_be_planned_is_told_of_the_keys(config):
    unknown = replace(config, data=replace(config.data, prognostic=["nothing"]))
    said = out_of_memory_message(unknown, RankInfo(), None, TOLD)
    assert "(CUDA out of memory)" in said
    assert "parallel.domain" in said


@pytest.mark.slow
def test_other_errors_pass(config):
    with pytest.raises(RuntimeError, match="else"), explain_out_of_memory(config, RankInfo()):
        raise RuntimeError("something else")
    with pytest.raises(UserError, match="out of memory"), explain_out_of_memory(config, RankInfo()):
        raise torch.OutOfMemoryError(TOLD)


class Full(torch.nn.Module):
    """A layer that finds no room."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(TOLD)


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
    code = f"import sys; from {__name__} import main; sys.exit(main(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: rank 1 (pipeline 0, data 0, domain 1): out of memory (")
    assert done.stderr.count("\n") == 1
