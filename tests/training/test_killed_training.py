"""Runs that are killed repeatedly end like an undisturbed run."""

import csv
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from credit_dp.cli.folders import lock_folder
from credit_dp.config import Config, ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.worker import run_rank
from credit_dp.training import run
from credit_dp.training.build_training import Training
from credit_dp.training.checkpoint import find_checkpoint, load_checkpoint
from credit_dp.training.checkpoint_files import list_checkpoints, step_of
from credit_dp.training.run_folder import RunFolder
from tests.ranks import warm_context
from tests.training.runs import alone, built, make_config, make_store

ROWS, STEPS = 12, 24
KILLS = 4
MOST = 3  # steps that a life may take, so that nothing is finished before the last kill
RUN = f"{run.__name__}:run"  # imported here, so that no life has to
LONGEST = 600.0  # seconds until something that does not come is given up
COLUMNS = ("step", "loss", "lr", "grad_norm")
SEEN = "seen"  # in what an earlier life has left unfinished
LATE = 0.01  # seconds that a slow disk takes for each file


def live(config: Config, ranks: RankInfo, init_method: str, late: float) -> None:
    """One life of one rank: until the end of training, or until it is killed."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(late)
        fsync(descriptor)

    os.fsync = slow
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if ranks.rank == 0:
        with lock_folder(folder):
            run_rank(config, ranks, RUN, init_method)
    else:
        run_rank(config, ranks, RUN, init_method)
    os._exit(0)


@contextmanager
def lives(config: Config, folder: Path, late: float = 0.0) -> Iterator[list[ForkServerProcess]]:
    """The ranks of one life, forked from a process that has imported everything; killed at last."""
    context = warm_context()
    world = config.parallel.domain
    init_method = f"file://{folder}/store-{time.monotonic_ns()}"
    processes = []
    for rank in range(world):
        arguments = (config, RankInfo(rank, world, rank, world), init_method, late)
        processes.append(context.Process(target=live, args=arguments, daemon=True))
        processes[-1].start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def finish(config: Config, folder: Path) -> None:
    """Run to the end without a kill."""
    with lives(config, folder) as processes:
        for process in processes:
            process.join(LONGEST)
        assert [process.exitcode for process in processes] == [0] * len(processes)


def wait_for_a_save(checkpoints: Path, processes: list[ForkServerProcess]) -> bool:
    """Wait until another folder is being written; return whether all ranks live that long."""
    before = parts(checkpoints)
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline and all(process.is_alive() for process in processes):
        if parts(checkpoints) - before:
            return True
        time.sleep(0.002)
    return False


def parts(checkpoints: Path) -> set[Path]:
    """Return the folders that are being written, or were when the last life ended."""
    found = checkpoints.glob(".step-*.partial")
    return {path for path in found if not (path / SEEN).exists()}


def wait_for_a_moment(checkpoints: Path, seconds: float) -> None:
    """Wait this long, or until some steps were taken."""
    first, deadline = newest(checkpoints), time.monotonic() + seconds
    while time.monotonic() < deadline and newest(checkpoints) < first + MOST:
        time.sleep(0.002)


def newest(checkpoints: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((step_of(path) for path in list_checkpoints(checkpoints)), default=0)


def kill_once(
    config: Config, folder: Path, chance: random.Random, saving: bool
) -> tuple[list[int | None], bool]:
    """Kill all ranks of a life at a random moment, of a save or of any kind.

    Returns:
        How the ranks ended, and whether that left a checkpoint unfinished.
    """
    checkpoints = RunFolder(Path(config.run.dir)).checkpoints
    with lives(config, folder, LATE) as processes:
        if saving:
            for _ in range(chance.randint(1, MOST)):
                wait_for_a_save(checkpoints, processes)
            time.sleep(chance.uniform(0.0, 3 * LATE))
        else:
            wait_for_a_moment(checkpoints, chance.uniform(0.0, 1.0))
        for process in chance.sample(processes, len(processes)):
            process.kill()
        for process in processes:
            process.join()
    unfinished = parts(checkpoints)
    for part in unfinished:
        (part / SEEN).touch()
    return [process.exitcode for process in processes], bool(unfinished)


class Loads:
    """Checks after every kill that there is a checkpoint to go on from, never an earlier one."""

    def __init__(self, config: Config) -> None:
        self.training: Training = built(config, alone())
        self.checkpoints = RunFolder(Path(config.run.dir)).checkpoints
        self.step = 0

    def __call__(self) -> None:
        path = find_checkpoint("auto", self.checkpoints)
        if path is None:
            assert self.step == 0
            return
        load_checkpoint(path, self.training.trainer.state)
        found = self.training.trainer.state.step
        assert found >= self.step
        self.step = found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the newest checkpoint."""
        self()
        return {name: t.clone() for name, t in self.training.trainer.state.tensors().items()}


def rows(config: Config) -> list[list[str]]:
    """Return the log of a run without the columns that depend on speed."""
    with RunFolder(Path(config.run.dir)).log.open() as file:
        return [[row[name] for name in COLUMNS] for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Config:
    """Train a run that is not killed, and return its config."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = make_config(
        make_store(folder, ROWS),
        folder / "run",
        steps=STEPS,
        checkpoint_every=1,
        log_every=1,
        evaluate_stride_hours=48,
    )
    finish(config, folder)
    return config


def killed(config: Config, folder: Path) -> Config:
    """The same run in another folder, going on from wherever it was killed."""
    return replace(config, run=replace(config.run, dir=str(folder / "run")), resume="auto")


@pytest.mark.slow
def test_kills_change_no_bit(undisturbed, tmp_path):
    chance = random.Random(5)
    config = killed(undisturbed, tmp_path)
    loads = Loads(config)
    kills = in_a_save = 0
    while kills < KILLS or 2 * in_a_save < KILLS:
        saving = 2 * in_a_save <= kills
        codes, unfinished = kill_once(config, tmp_path, chance, saving)
        assert codes == [-signal.SIGKILL]  # none had ended before
        kills, in_a_save = kills + 1, in_a_save + unfinished
        loads()
    assert kills < 2 * KILLS
    assert 0 < loads.step < STEPS
    finish(config, tmp_path)
    assert rows(config) == rows(undisturbed)
    assert len(rows(config)) == STEPS
    ours, theirs = loads.tensors(), Loads(undisturbed).tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    scores = [RunFolder(Path(c.run.dir)).scores.read_text() for c in (config, undisturbed)]
    assert scores[0] == scores[1]


@pytest.mark.exhaustive
def test_kills_on_changing_meshes_change_next_to_nothing(undisturbed, tmp_path):
    chance = random.Random(6)
    config = killed(undisturbed, tmp_path)
    meshes = [replace(config, parallel=ParallelConfig(domain=domain)) for domain in (2, 1)]
    loads = Loads(config)
    for number in range(4):  # each mesh, in a save and at another moment
        kill_once(meshes[number // 2], tmp_path, chance, number % 2 == 0)
        loads()
    assert 0 < loads.step < STEPS
    finish(meshes[0], tmp_path)
    for ours, theirs in zip(rows(config), rows(undisturbed), strict=True):
        assert list(map(float, ours)) == pytest.approx(list(map(float, theirs)), rel=1e-10, abs=0)
    wanted, found = Loads(undisturbed).tensors(), loads.tensors()
    for name, tensor in wanted.items():
        if name.startswith("model."):
            assert (found[name] - tensor).norm() <= 1e-10 * tensor.norm(), name
