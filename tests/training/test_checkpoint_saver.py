"""The checkpoints of a run: written in the background, and which of them are kept."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from credit_dp.config import TrainerConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training import checkpoint_shards
from credit_dp.training.checkpoint import (
    CheckpointSaver,
    find_checkpoint,
    load_checkpoint,
)
from credit_dp.training.checkpoint_files import list_checkpoints
from credit_dp.training.checkpoint_shards import TensorPart
from credit_dp.training.state import TrainingState
from tests.full_disk import full_disk
from tests.ranks import on_processes
from tests.training.states import (
    file_names,
    full_tensors,
    same_tensors,
    small_state,
    state_on,
    take_step,
)


def trainer(**changes: Any) -> TrainerConfig:
    return TrainerConfig(steps=10, **changes)


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Block writes of other threads, before their first byte, until the event is set."""
    ready, write_shard = threading.Event(), checkpoint_shards.write_shard

    def late(path: Path, parts: Sequence[TensorPart]) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            assert ready.wait(60)
        return write_shard(path, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.training.checkpoint.write_shard", late)
        try:
            yield ready
        finally:
            ready.set()


def test_a_state_is_saved_as_it_was_while_training_goes_on(tmp_path):
    state, then, loaded = small_state(seed=1), small_state(seed=1), small_state(seed=2)
    take_step(state)
    take_step(then)
    with slow_disk() as ready, CheckpointSaver(tmp_path, trainer()) as checkpoints:
        checkpoints.save(state, "seed: 1\n")
        for _ in range(3):
            take_step(state)
        assert not same_tensors(state, then)
        assert find_checkpoint("auto", tmp_path) is None  # the disk is not done
        ready.set()
    assert file_names(tmp_path) == ["step-00000001"]
    load_checkpoint(tmp_path, loaded)
    assert same_tensors(loaded, then)
    assert (loaded.step, loaded.sampler.value) == (1, 3)
    assert loaded.schedule.state_dict() == then.schedule.state_dict()


def test_the_next_save_waits_for_the_one_before(tmp_path):
    state = small_state()
    order = []
    with (
        slow_disk() as ready,
        CheckpointSaver(tmp_path, trainer(keep_checkpoints=2)) as checkpoints,
    ):
        checkpoints.save(state, "")
        take_step(state)
        late = threading.Timer(0.2, lambda: (order.append("disk"), ready.set()))
        late.start()
        checkpoints.save(state, "")
        order.append("saved")
        late.join()
        assert list_checkpoints(tmp_path)[0] == tmp_path / "step-00000000"
    assert order == ["disk", "saved"]
    assert file_names(tmp_path) == ["step-00000000", "step-00000001"]


def test_the_newest_stay_and_a_later_past_goes(tmp_path):
    for behind in (False, True):
        folder = tmp_path / str(behind)
        config = trainer(keep_checkpoints=2, checkpoint_async=behind)
        with CheckpointSaver(folder, config) as checkpoints:
            for number in (2, 4, 6, 8):
                checkpoints.save(state_at(number), "")
        assert kept_steps(folder) == [6, 8], behind
        with CheckpointSaver(folder, config, 6) as checkpoints:  # resumed from the older one
            checkpoints.save(state_at(6), "")
            assert kept_steps(folder) == [6, 8], behind  # nothing was learnt since
            checkpoints.save(state_at(7), "")
        assert kept_steps(folder) == [6, 7], behind


def state_at(number: int) -> TrainingState:
    """Return a state at this step."""
    state = small_state(seed=number)
    state.step = number
    return state


def kept_steps(folder: Path) -> list[int]:
    """Return the steps in a folder of checkpoints and links alone."""
    steps = [int(path.name[5:]) for path in list_checkpoints(folder)]
    assert len([path for path in folder.iterdir() if not path.is_symlink()]) == len(steps)
    return steps


def test_the_best_stays_and_is_known_after_a_resume(tmp_path):
    config = trainer(keep_best=True, validate_every=1)
    with CheckpointSaver(tmp_path, config) as checkpoints:
        for number, error in ((1, None), (2, 0.5), (3, 0.25), (4, float("nan")), (5, 0.75)):
            checkpoints.save(state_at(number), "", error)
    assert kept_steps(tmp_path) == [3, 5]
    assert json.loads((tmp_path / "step-00000005" / "state.json").read_text())["validation"] == 0.75
    with CheckpointSaver(tmp_path, config, 5) as checkpoints:
        checkpoints.save(state_at(6), "", 0.5)
        checkpoints.save(state_at(7), "", 0.25)  # as good as the best: the first one stays
    assert kept_steps(tmp_path) == [3, 7]
    best = find_checkpoint(str(tmp_path / "best"), tmp_path)
    loaded = small_state()
    load_checkpoint(best, loaded)
    assert loaded.step == 3
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step-00000007"
    with CheckpointSaver(tmp_path, config, 7) as checkpoints:
        checkpoints.save(state_at(8), "", 0.125)
    assert kept_steps(tmp_path) == [8]
    assert os.readlink(tmp_path / "best") == "step-00000008"
    with CheckpointSaver(tmp_path, trainer(), 8) as checkpoints:
        checkpoints.save(state_at(9), "", 0.5)
    assert file_names(tmp_path) == ["step-00000009"]


def test_errors_of_other_scores_are_not_compared(tmp_path):
    config = trainer(keep_best=True, validate_every=1)
    with CheckpointSaver(tmp_path, config) as checkpoints:
        checkpoints.save(state_at(1), "", 0.25)
    config = replace(config, validation_scores={"rmse": 4.0})
    with CheckpointSaver(tmp_path, config, 1) as checkpoints:
        checkpoints.save(state_at(2), "", 1.0)
        checkpoints.save(state_at(3), "", 2.0)
    assert kept_steps(tmp_path) == [2, 3]
    assert os.readlink(tmp_path / "best") == "step-00000002"


def test_without_links_the_best_stays_all_the_same(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    with CheckpointSaver(tmp_path, trainer(keep_best=True, validate_every=1)) as checkpoints:
        for number, error in ((1, 0.5), (2, 0.75), (3, 1.0)):
            checkpoints.save(state_at(number), "", error)
    assert kept_steps(tmp_path) == [1, 3]


def test_a_full_disk_ends_the_run_with_the_previous_checkpoint(tmp_path):
    state = small_state()
    with CheckpointSaver(tmp_path, trainer()) as checkpoints:
        checkpoints.save(state, "")
    take_step(state)

    def train(at_the_end: bool) -> None:
        with CheckpointSaver(tmp_path, trainer()) as checkpoints:
            checkpoints.save(state, "")
            if not at_the_end:
                checkpoints.save(state, "")
                pytest.fail("goes on")

    for at_the_end in (False, True):
        with full_disk(5000), pytest.raises(UserError, match="step 1 could not be") as error:
            train(at_the_end)
        assert "\n" not in str(error.value)
        assert file_names(tmp_path) == ["step-00000000"], at_the_end


def test_what_is_being_written_is_completed_when_training_fails(tmp_path):
    for error in (UserError("diverged"), ValueError("a bug")):
        folder = tmp_path / type(error).__name__
        with slow_disk() as ready, pytest.raises(type(error), match=str(error)):
            fail_after_a_save(folder, error, lambda go=ready.set: threading.Timer(0.1, go).start())
        assert file_names(folder) == ["step-00000001"], error


def test_the_newest_includes_the_one_being_written(tmp_path):
    with slow_disk() as ready, CheckpointSaver(tmp_path, trainer()) as checkpoints:
        assert checkpoints.newest_checkpoint() is None
        checkpoints.save(state_at(1), "")
        threading.Timer(0.1, ready.set).start()
        checkpoints.save(state_at(2), "")  # when it is whole, the one before goes
        assert checkpoints.newest_checkpoint() == tmp_path / "step-00000002"
    assert file_names(tmp_path) == ["step-00000002"]


def fail_after_a_save(folder: Path, error: BaseException, then: Callable[[], None]) -> None:
    """Save, then raise an error as training may."""
    with CheckpointSaver(folder, trainer()) as checkpoints:
        checkpoints.save(state_at(1), "")
        then()
        raise error


def test_the_error_of_training_is_raised_and_not_that_of_the_disk(tmp_path):
    with full_disk(100), pytest.raises(UserError, match="diverged"):
        fail_after_a_save(tmp_path, UserError("diverged"), lambda: None)
    assert file_names(tmp_path) == []


def test_an_interrupt_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("credit_dp.training.checkpoint.INTERRUPT_TIMEOUT", 0.05)
    with slow_disk():
        with pytest.raises(KeyboardInterrupt):
            fail_after_a_save(tmp_path, KeyboardInterrupt(), lambda: None)
        assert find_checkpoint("auto", tmp_path) is None
    thread = next((t for t in threading.enumerate() if t.name == "checkpoint"), None)
    if thread is not None:
        thread.join(60)


def on_the_way(manager: DomainParallelManager, folder: Path, full: bool) -> dict[str, torch.Tensor]:
    """Save, train while the disk is slow, and return the tensors at the time of the save."""
    state = state_on(manager, "unet", 1, True)
    for number, parameter in enumerate(state.parameters.values()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    state.optimizer.step()
    state.step = 1
    then = {name: tensor.clone() for name, tensor in full_tensors(state).items()}
    with slow_disk() as ready, CheckpointSaver(folder, trainer()) as checkpoints:
        checkpoints.save(state, "")
        for _ in range(3):
            state.optimizer.step()
            full_tensors(state)  # collectives meanwhile, on the groups of training
        ready.set()
        checkpoints.wait()
        if full and manager.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", no_space)
                return {"error": refused(checkpoints, state)}
        return {"error": refused(checkpoints, state)} if full else then


def refused(checkpoints: CheckpointSaver, state: TrainingState) -> Any:
    """Return the error on this rank when a save fails on another."""
    state.step = 2
    checkpoints.save(state, "")
    with pytest.raises(UserError) as error:
        checkpoints.wait()
    return str(error.value)


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_shares_of_parameters_are_saved_as_they_were(tmp_path):
    found = on_processes(2, on_the_way, tmp_path, False, domain=1)
    loaded = state_on(DomainParallelManager(1, 1), "unet", 2, False)
    load_checkpoint(tmp_path, loaded)
    for name, tensor in loaded.tensors().items():
        assert torch.equal(tensor, found[0][name]), name


@pytest.mark.slow
def test_a_rank_whose_disk_is_full_ends_all_alike(tmp_path):
    first, second = on_processes(2, on_the_way, tmp_path, True, domain=1)
    assert first == second
    assert "step 2 could not be written (No space left on device)" in first["error"]
    assert file_names(tmp_path) == ["step-00000001"]
