"""A checkpoint of any mesh is one of every other: read there, written again, still the same."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from credit_dp.config import TrainerConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training import checkpoint
from credit_dp.training.checkpoint import (
    CheckpointSaver,
    TensorTable,
    digest_of,
    find_checkpoint,
    load_checkpoint,
)
from credit_dp.training.checkpoint_shards import Shape, TensorPart
from tests.checkpoints import save_checkpoint
from tests.ranks import on_processes
from tests.tier_cases import tiers
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
    tiers(FAST, LONG[:1], LONG[1:]),
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


COLLECTIVES = ("all_gather_object", "run_on_rank_0", "gather_on_rank_0")


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count bytes copied to the host's memory, collectives on objects, and listings of folders."""

    def count(owner: Any, name: str, amount: Callable[..., int] = lambda *_, **__: 1) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += amount(*args, **kwargs)
            return original(*args, **kwargs)

        patch.setattr(owner, name, counting)

    with pytest.MonkeyPatch.context() as patch:
        count(TensorPart, "cpu_copy", lambda part: part.tensor.nbytes)
        for name, owner in zip(COLLECTIVES, (dist, checkpoint, checkpoint), strict=True):
            count(owner, name)
        for name in ("listdir", "scandir"):
            count(os, name)
        yield


def count_what_a_save_takes(
    manager: DomainParallelManager, folder: Path, shared: bool
) -> tuple[int, list[Counter[str]]]:
    """Return the bytes of a state, and what its first and second save and its loading took."""
    state = state_on(manager, "unet", 1, shared)
    found = [Counter[str]() for _ in range(3)]
    with CheckpointSaver(folder, TrainerConfig()) as saver:
        for state.step, counts in enumerate(found[:2]):
            with counted(counts):
                saver.save(state, "")
                saver.wait()
    with counted(found[2]):
        path = find_checkpoint("auto", folder)
        load_checkpoint(path, state)
    return sum(tensor.nbytes for tensor in full_tensors(state).values()), found


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_only_writers_copy_and_only_the_first_rank_lists(tmp_path, shared):
    ranks = on_processes(2, count_what_a_save_takes, tmp_path, shared, domain=1 if shared else 2)
    total = ranks[0][0]
    for save in (0, 1):
        copied = [found[save]["cpu_copy"] for _, found in ranks]
        assert sum(copied) == total
        assert (0.4 * total < copied[1] < 0.6 * total) if shared else copied[1] == 0
    for rank, (_, found) in enumerate(ranks):
        # Digests; folder and end; names of files.
        assert [found[1][name] for name in COLLECTIVES] == [1, 2, 1]
        # Constant fields are read once, for all checkpoints.
        assert [found[0][name] for name in COLLECTIVES] == [2, 2, 1]
        listings = [counts["listdir"] + counts["scandir"] for counts in found]
        assert all(listings) if rank == 0 else not any(listings)


def test_a_thousand_ranks_agree_on_digests_and_one_table_for_each_stage(monkeypatch):
    stages = [{f"stage{p}.{n}": (64, 64, 3, 3) for n in range(1200)} for p in range(2)]
    tables = [{**stages[rank // 512], "shared": (2,)} for rank in range(1024)]
    digests = [digest for stage in stages for digest in [digest_of(stage)] * 512]
    sent: list[int] = []

    def broadcast(table: dict[str, Shape], rank: int) -> dict[str, Shape]:
        sent.append(rank)
        return tables[rank]

    monkeypatch.setattr("credit_dp.training.checkpoint.broadcast_object", broadcast)
    of_rank = {rank: TensorTable.agree(tables[rank], digests) for rank in (0, 1, 512, 1023)}
    assert sent == [0, 512] * 4
    assert all(w.shapes == stages[0] | stages[1] | {"shared": (2,)} for w in of_rank.values())
    tensor = torch.zeros(2)
    for rank, written in of_rank.items():
        stage = rank // 512
        assert written.is_written_by(rank, f"stage{stage}.7", tensor) == (rank in (0, 512))
        assert written.is_written_by(rank, "shared", tensor) == (rank == 0)
    sent.clear()
    TensorTable.agree(stages[0], [digests[0]] * 1024)  # without a pipeline
    assert sent == []


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
    assert f"{shard.name} has " in refusal(tmp_path)


def save_steps(manager: DomainParallelManager, folder: Path, shared: bool) -> None:
    """Save two steps in the background."""
    state = state_on(manager, "unet", 1, shared)
    with CheckpointSaver(folder, TrainerConfig(keep_checkpoints=2)) as saver:
        for state.step in (1, 2):
            with torch.no_grad():
                for parameter in state.parameters.values():
                    parameter += state.step
            saver.save(state, "")


@pytest.mark.parametrize(
    ("domain", "pipeline", "shared"),
    [(1, 1, True), pytest.param(1, 2, False, marks=pytest.mark.exhaustive)],
)
def test_the_shard_of_one_rank_from_another_step_is_refused(tmp_path, domain, pipeline, shared):
    on_processes(2, save_steps, tmp_path, shared, domain=domain, pipeline=pipeline)
    first, second = (sorted(path.glob("*.safetensors")) for path in sorted(tmp_path.iterdir()))
    assert len(first) == len(second) == 2
    for damage in (lambda: shutil.copy(first[1], second[1]), lambda: exchange(*second)):
        whole = [file.read_bytes() for file in second]
        damage()
        line = refusal(tmp_path)
        assert "is damaged: " in line
        assert "written with its state.json" in line
        assert f"Use {first[0].parent}, the checkpoint before it." in line
        for file, content in zip(second, whole, strict=True):
            file.write_bytes(content)
    load_checkpoint(tmp_path, state_on(alone(), "unet", 2, False))


def exchange(one: Path, other: Path) -> None:
    """Give two files each other's names."""
    aside = one.rename(one.with_suffix(".aside"))
    other.rename(one)
    aside.rename(other)


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


def own_disk(manager: DomainParallelManager, folder: Path) -> list[str]:
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
        for resume in ("auto", "step-00000003"):
            with pytest.raises(UserError) as error:
                find_checkpoint(resume, Path())
            lines.append(str(error.value))
    return lines


def test_ranks_that_do_not_share_a_disk_are_all_told(tmp_path):
    first, second = on_processes(2, own_disk, tmp_path)
    assert first == second
    assert "has to be on a disk that all machines share, but rank 1" in first[0]
    assert all(line.startswith("resume: ") for line in first[1:])
    assert not list(tmp_path.glob("*/here/step*"))
