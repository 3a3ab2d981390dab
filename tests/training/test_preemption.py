"""A signal stops training after a step that is saved, and the same run folder goes on."""

import csv
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from credit_dp.config import Config
from credit_dp.distributed import signals
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.signals import EXIT_PREEMPTED, handle_stop
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.checkpoint import CheckpointSaver
from credit_dp.training.run import Preemption, run
from credit_dp.training.trainer import AgreedStep, Trainer, reduce_step
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers
from tests.training.runs import alone, make_config, make_store

ASKED = 3  # the step in which the signal arrives


@pytest.fixture
def config(tmp_path):
    store = make_store(tmp_path, 12)
    return make_config(store, tmp_path / "run", steps=6, checkpoint_every=5, log_every=2)


@pytest.fixture(autouse=True)
def fresh():
    """Clear the request to stop after each test."""
    yield
    for kind in signals.STOP_SIGNALS:
        signal.signal(kind, signal.SIG_DFL)
    signals._router.handler = None


def train_run(manager: DomainParallelManager, config: Config) -> int:
    """Train a whole run on these ranks, and return its exit code."""
    parallel = replace(config.parallel, domain=manager.domain_world_size)
    return run(
        replace(config, parallel=parallel),
        RankInfo(manager.rank, manager.world_size, manager.rank, manager.world_size),
    )


def interrupted(manager: DomainParallelManager, config: Config, sent: int) -> int:
    """Train a run whose last rank gets a signal in the middle of a step."""
    train_step = Trainer.train_step

    def interrupted_step(self: Trainer, *arguments: Any) -> Any:
        if self.state.step == ASKED - 1 and manager.rank == manager.world_size - 1:
            os.kill(os.getpid(), sent)
        return train_step(self, *arguments)

    Trainer.train_step = interrupted_step  # type: ignore[method-assign]
    try:
        return train_run(manager, config)
    finally:
        Trainer.train_step = train_step  # type: ignore[method-assign]


def on_ranks(ranks: int, fn: Callable[..., int], *args: Any) -> list[int]:
    return [fn(alone(), *args)] if ranks == 1 else on_processes(ranks, fn, *args, domain=ranks)


def leaves(config: Config) -> tuple[list[dict[str, str]], Any]:
    """Return the log without times, and the scores."""
    folder = Path(config.run.dir)
    with (folder / "metrics.csv").open() as file:
        log = [
            {key: row[key] for key in ("step", "loss", "grad_norm", "lr")}
            for row in csv.DictReader(file)
        ]
    return log, json.loads((folder / "metrics.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sent"),
    [(1, signal.SIGTERM), (2, signal.SIGUSR1)],
)
def test_the_same_run_folder_resumes(config, capfd, ranks, sent):
    config = replace(config, run=replace(config.run, dir=f"{config.run.dir}, lr=1"))
    undisturbed = replace(config, run=replace(config.run, dir=f"{config.run.dir}-undisturbed"))
    assert on_ranks(ranks, train_run, undisturbed) == [0] * ranks
    capfd.readouterr()
    assert on_ranks(ranks, interrupted, config, sent) == [EXIT_PREEMPTED] * ranks
    folder = Path(config.run.dir)
    if ranks == 1:
        output = " ".join(capfd.readouterr().out.split())
        assert f"{sent.name}: stopped after step {ASKED}, which is saved in" in output
        # The run has no name, so that the same command alone would choose another folder.
        keys = f"""'run.dir="{config.run.dir}"' resume=auto"""
        assert f"the same command with {keys} continues" in output
    saved = [path.name for path in (folder / "checkpoint").iterdir() if path.is_dir()]
    assert saved == [f"step-{ASKED:08}"]
    assert not (folder / "metrics.json").exists()
    assert 'class="state">stopped<' in (folder / "run.html").read_text()
    assert on_ranks(ranks, train_run, replace(config, resume="auto")) == [0] * ranks
    assert leaves(config) == leaves(undisturbed)


@pytest.mark.slow
def test_a_signal_while_the_last_checkpoint_is_written_stops_the_run(config, monkeypatch, capfd):
    wait = CheckpointSaver.wait

    def waited(self: CheckpointSaver) -> None:
        if self._pending_write is not None and self._saved_step == config.trainer.steps:
            os.kill(os.getpid(), signal.SIGUSR1)
        wait(self)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointSaver, "wait", waited)
        assert train_run(alone(), config) == EXIT_PREEMPTED
    assert "stopped after step 6" in " ".join(capfd.readouterr().out.split())
    scores = Path(config.run.dir) / "metrics.json"
    assert not scores.exists()
    assert train_run(alone(), replace(config, resume="auto")) == 0
    assert scores.exists()


def agreed_signals(manager: DomainParallelManager) -> list[int]:
    """Return the signal that ranks agree on at each step; the last rank gets one at step 2."""
    heard = []
    with Preemption(manager) as preemption:
        for step in range(4):
            if step == 2 and manager.rank == manager.world_size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            heard.append(preemption.agree_on_signal())
        assert preemption.stop_message(heard[-1], 2, Path("here"), "resume=auto").startswith(
            "SIGUSR1: stopped after step 2, "
        )
    return heard


@pytest.mark.parametrize("ranks", tiers([(3,)], [], [(1,)]))
def test_all_ranks_hear_of_a_signal_to_one(ranks):
    found = (
        [agreed_signals(alone())] if ranks == 1 else on_processes(ranks, agreed_signals, domain=1)
    )
    assert found == [[0, 0, signal.SIGUSR1, signal.SIGUSR1]] * ranks


def test_a_signal_to_one_rank_travels_with_the_loss_of_a_step():
    def agreed(manager: DomainParallelManager, sent: int) -> AgreedStep:
        pending = sent if manager.rank == 1 else 0
        numbers = reduce_step(torch.tensor(2.0), torch.tensor(3.0), pending, manager)
        return AgreedStep.read(numbers.tolist())

    # Losses are shares of a sum, norms are equal.
    for sent in (0, *signals.STOP_SIGNALS):
        assert on_threads(3, agreed, int(sent)) == [(6.0, 3.0, sent)] * 3, sent


def test_signals_are_as_before_afterwards_and_ignored_if_one_has_come():
    before = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)]
    with Preemption(alone()):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)] == before
    with Preemption(alone()):
        os.kill(os.getpid(), signal.SIGTERM)
    for kind in signals.STOP_SIGNALS:
        os.kill(os.getpid(), kind)


def test_the_innermost_one_gets_the_signal():
    outer: list[int] = []
    inner: list[int] = []
    with handle_stop(outer.append):
        with handle_stop(inner.append):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (outer, inner) == ([signal.SIGUSR1], [signal.SIGTERM])
