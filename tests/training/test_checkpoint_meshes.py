"""A checkpoint of any mesh is one of every other: read there, written again, still the same."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.checkpoint import (
    find_checkpoint,
    load_checkpoint,
)
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.training.runs import alone
from tests.training.states import COLUMNS, FIELDS, ROWS, full_tensors, state_on

Mesh = tuple[int, int, int, bool]  # pipeline, data, domain, whether parameters are shared out

FAST: list[tuple[str, Mesh, Mesh]] = [("unet", (2, 1, 2, False), (1, 4, 1, True))]
LONG: list[tuple[str, Mesh, Mesh]] = [
    ("crossformer", (1, 1, 2, True), (2, 2, 1, True)),
    ("unet", (2, 1, 3, False), (1, 2, 2, False)),
]


def pass_on(
    manager: DomainParallelManager, model: str, shared: bool, source: Path, target: Path
) -> dict[str, torch.Tensor]:
    """Go on from a checkpoint, leave another one, and tell what was in it."""
    state = state_on(manager, model, 2, shared)
    before = {name: id(tensor) for name, tensor in state.parameters.items()}
    load_checkpoint(source, state)
    assert {name: id(tensor) for name, tensor in state.parameters.items()} == before
    assert (state.step, state.seed, state.sampler.value) == (1, 1, 5)
    save_checkpoint(target, state, "")
    return {name: tensor.clone() for name, tensor in full_tensors(state).items()}


def start(model: str, folder: Path) -> dict[str, torch.Tensor]:
    """Leave a checkpoint of one process after a step."""
    state = state_on(alone(), model, 1, False)
    inputs = torch.randn(2, FIELDS.inputs, ROWS, COLUMNS, dtype=torch.float64)
    state.parts[0](inputs).square().sum().backward()
    state.optimizer.step()
    state.step, state.sampler.value = 1, 5
    save_checkpoint(folder, state, "")
    return state.tensors()


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
)
def test_a_checkpoint_goes_round_all_meshes(tmp_path, model, first, second):
    wanted = start(model, tmp_path / "0")
    for number, (pipeline, data, domain, shared) in enumerate((first, second)):
        folders = tmp_path / str(number), tmp_path / str(number + 1)
        ranks = pipeline * data * domain
        found = on_processes(
            ranks, pass_on, model, shared, *folders, domain=domain, pipeline=pipeline
        )
        seen = {name for tensors in found for name in tensors}
        assert seen == set(wanted)
        for tensors in found:
            for name, tensor in tensors.items():
                assert torch.equal(tensor, wanted[name]), name
    end = state_on(alone(), model, 3, False)
    load_checkpoint(tmp_path / "2", end)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in end.tensors().items())
    assert end.tensors().keys() == wanted.keys()


def refusals(manager: DomainParallelManager, source: Path, model: str) -> str:
    """Return the error of one rank."""
    with pytest.raises(UserError) as error:
        load_checkpoint(source, state_on(manager, model, 2, False))
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal(source: Path, model: str = "unet", **mesh: int) -> str:
    """Return the error, which is the same on all ranks of a mesh."""
    found = on_processes(2, refusals, source, model, **mesh)
    assert len(set(found)) == 1
    return found[0]


def test_another_model_is_refused_by_all_stages_alike(tmp_path):
    start("unet", tmp_path)
    line = refusal(tmp_path, "crossformer", domain=1, pipeline=2)
    assert "which the model has. Change the model" in line


@pytest.mark.slow
def test_a_damaged_shard_is_refused_by_all_ranks_alike(tmp_path):
    start("unet", tmp_path)
    (shard,) = tmp_path.glob("*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "not a readable checkpoint" in refusal(tmp_path)


def one_rank_fails(manager: DomainParallelManager, folder: Path, call: str) -> tuple[str, Any]:
    """Save where one of the ranks can't write."""
    state = state_on(manager, "unet", 1, True)
    save_checkpoint(folder, state, "")
    state.step = 1
    with pytest.MonkeyPatch.context() as patch:
        if manager.rank == 1:
            patch.setattr(os, call, no_space)
        with pytest.raises(UserError) as error:
            save_checkpoint(folder, state, "")
    loaded = state_on(manager, "unet", 2, True)
    load_checkpoint(folder, loaded)
    return str(error.value), loaded.step


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rank_that_cannot_write_ends_all_with_the_previous_checkpoint(tmp_path):
    found = on_processes(2, one_rank_fails, tmp_path, "fsync", domain=1)
    assert len(set(found)) == 1
    line, step = found[0]
    assert "step 1 could not be written (No space left on device)" in line
    assert step == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def own_disk(manager: DomainParallelManager, folder: Path, resume: str) -> list[str]:
    """Save, and look for a checkpoint, where each rank has a disk of its own."""
    own = folder / str(manager.rank)
    own.mkdir()
    (own / "step-00000003").mkdir()
    if manager.rank == 0:
        (own / "step-00000003" / "state.json").touch()
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        with pytest.raises(UserError) as error:
            save_checkpoint(Path("here"), state_on(manager, "unet", 1, False), "")
        lines.append(str(error.value))
        with pytest.raises(UserError) as error:
            find_checkpoint(resume, Path())
        lines.append(str(error.value))
    return lines


@pytest.mark.parametrize("resume", ["auto", "step-00000003"])
def test_ranks_that_do_not_share_a_disk_are_all_told(tmp_path, resume):
    found = on_processes(2, own_disk, tmp_path, resume)
    assert found[0] == found[1]
    assert "has to be on a disk that all machines share, but rank 1" in found[0][0]
    assert "resume: " in found[0][1]
    assert not list(tmp_path.glob("*/here/step*"))
