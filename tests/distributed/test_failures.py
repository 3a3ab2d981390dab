"""One rank of a mesh fails: all others end soon, and one voice says which it was.

Ranks that we start are those of a 2 x 2 x 2 mesh. A launcher starts four of them, each of which
takes seconds of imports: on 2 x 2 of pipeline, data and domain.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from credit_dp.distributed.signals import EXIT_PREEMPTED
from tests.distributed.processes import (
    ROOT,
    SOON,
    TORCHRUN,
    VICTIMS,
    Programs,
    begin,
    ends,
    free_port,
    gone,
    until,
    voices,
)
from tests.distributed.rank_functions import connections
from tests.tier_cases import tiers

RANKS = 4  # of a launcher


@contextmanager
def failing(folder: Path, victim: int, way: str) -> Iterator[dict[str, str]]:
    """The environment of a run in which one rank fails; checks afterwards how soon all ended."""
    seen = folder / "seen"
    yield {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VICTIM": str(victim),
        "WAY": way,
        "SEEN": str(seen),
    }
    assert time.time() - float(seen.read_text()) < SOON


def start(
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    function: Sequence[str],
) -> subprocess.Popen[str]:
    """A program whose output is read at its end."""
    return subprocess.Popen(
        [
            sys.executable,
            *arguments,
            "-m",
            "tests.distributed.launch_program",
            *function,
            str(folder),
        ],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Ranks along domain, data and pipeline.
BANDS_AND_STAGES = ("2", "1", "2")
BANDS_AND_SAMPLES = ("2", "2", "1")
FAILING = ("step_until_one_fails", *BANDS_AND_STAGES)


def one_machine(
    folder: Path, environment: dict[str, str], function: Sequence[str] = FAILING
) -> Programs:
    arguments = [*TORCHRUN, "--standalone", "--nproc-per-node", str(RANKS)]
    return [start(arguments, folder, environment, function)]


def two_machines(
    folder: Path, environment: dict[str, str], function: Sequence[str] = FAILING
) -> Programs:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    sizes = ["--nnodes", "2", "--nproc-per-node", str(RANKS // 2)]
    return [
        start(
            [*TORCHRUN, *sizes, *meeting, "--node-rank", str(node)], folder, environment, function
        )
        for node in (0, 1)
    ]


def srun(folder: Path, environment: dict[str, str], function: Sequence[str] = FAILING) -> Programs:
    """Tasks as srun starts them, where no launcher ends the remaining ones."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_STEP_TASKS_PER_NODE": str(RANKS),
        "SLURM_NODEID": "0",
        "MASTER_PORT": environment.get("MASTER_PORT", str(free_port())),
    }
    places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(RANKS)]
    return [start([], folder, {**environment, **step, **place}, function) for place in places]


LAUNCHERS: dict[str, Callable[..., Programs]] = {
    "torchrun": one_machine,
    "two agents": two_machines,
    "srun": srun,
}


@pytest.mark.parametrize(("victim", "name"), tiers([], VICTIMS[:1], VICTIMS[1:]))
def test_a_killed_rank_ends_all_that_we_started(tmp_path: Path, victim: int, name: str) -> None:
    with failing(tmp_path, victim, "kill") as environment:
        program = begin("step_until_one_fails", tmp_path, 2, 2, 2, **environment)
        [(code, said)] = ends([program])
    line = f"error: {name} was killed by SIGKILL (out of memory?); the other ranks were stopped\n"
    assert (code, said) == (1, line)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "mesh", "victim", "place"),
    [
        ("two agents", BANDS_AND_STAGES, 2, "pipeline 1, data 0, domain 0"),
        ("torchrun", BANDS_AND_SAMPLES, 2, "pipeline 0, data 1, domain 0"),
        ("srun", BANDS_AND_STAGES, 0, "pipeline 0, data 0, domain 0"),
    ],
)
def test_a_killed_rank_ends_a_launchers_ranks(
    tmp_path: Path, launcher: str, mesh: Sequence[str], victim: int, place: str
) -> None:
    """The ranks agree on who says it, also where the one that kept the store was killed."""
    with failing(tmp_path, victim, "kill") as environment:
        results = ends(LAUNCHERS[launcher](tmp_path, environment, ("step_until_one_fails", *mesh)))
    assert all(code != 0 for code, _ in results)
    [said] = voices("\n".join(text for _, text in results))
    assert said.startswith(f"error: rank {victim} ({place}) ended without a message")


@pytest.mark.parametrize("launcher", tiers([], [("torchrun",)], [("srun",)]))
def test_a_killed_rank_ends_ranks_that_notice_nothing(tmp_path: Path, launcher: str) -> None:
    """As ranks on GPUs, which wait for ever; to them, torchrun's SIGTERM asks for a checkpoint."""
    folder = tmp_path if launcher == "srun" else tmp_path / "of-rank-0"
    folder.mkdir(exist_ok=True)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    programs = LAUNCHERS[launcher](tmp_path, environment, ("train_for_ever", *BANDS_AND_STAGES))
    files = [folder / f"pid{rank}" for rank in range(RANKS)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[2], signal.SIGKILL)
    began = time.monotonic()
    results = ends(programs)
    assert time.monotonic() - began < SOON
    assert all(code != 0 for code, _ in results)
    [said] = voices("\n".join(text for _, text in results))
    assert said.startswith("error: rank 2 (pipeline 1, data 0, domain 0) ended without a message")
    assert all(gone(pid) for pid in pids)


@pytest.mark.exhaustive
def test_rank_0_is_killed_before_all_ranks_have_met(tmp_path: Path) -> None:
    """Nothing is wrong with the address at which the others wait."""
    port = free_port()
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    programs = srun(tmp_path, environment)
    programs[3].kill()
    until(lambda: connections(port) == 5)  # one of rank 0, two of each other rank
    programs[0].kill()
    results = ends(programs)
    assert all(code != 0 for code, _ in results)
    [said] = voices("\n".join(text for _, text in results))
    assert said.startswith("error: rank 0 (pipeline 0, data 0, domain 0) ended, or its machine")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "victim", "place"),
    [
        ("srun", 0, "pipeline 0, data 0, domain 0"),  # the rank that keeps the store
        ("two agents", 3, "pipeline 1, data 0, domain 1"),
    ],
)
def test_a_rank_that_raises_speaks_for_a_launchers_ranks(
    tmp_path: Path, launcher: str, victim: int, place: str
) -> None:
    with failing(tmp_path, victim, "raise") as environment:
        results = ends(LAUNCHERS[launcher](tmp_path, environment))
    assert all(code != 0 for code, _ in results)
    said = "\n".join(text for _, text in results)
    assert voices(said) == [f"rank {victim} ({place}) failed:"]
    assert said.count("RuntimeError: a mistake of ours") == 1


@pytest.mark.parametrize(("sent", "said"), tiers([], [(signal.SIGINT, 1)], [(signal.SIGTERM, 0)]))
def test_a_stopped_launcher_ends_ranks_that_wait_in_a_collective(
    tmp_path: Path, sent: signal.Signals, said: int
) -> None:
    """No line names ranks that a signal ended."""
    environment = {"PYTHONPATH": str(ROOT), "SEEN": str(tmp_path / "waiting")}
    arguments = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    program = start(arguments, tmp_path, environment, ["wait_for_rank_0", "2", "0", "1"])
    until(lambda: (tmp_path / "waiting").exists())
    began = time.monotonic()
    program.send_signal(sent)
    [(code, text)] = ends([program])
    assert time.monotonic() - began < SOON
    assert code != 0
    assert voices(text) == []
    assert text.count("interrupted") == said, text


def training(folder: Path, begin: Callable[[Path, dict[str, str]], Programs]) -> Programs:
    """Programs whose ranks train until a signal stops them."""
    seen = folder / "seen"
    seen.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SEEN": str(seen)}
    programs = begin(folder, environment)
    until(lambda: len(list(seen.glob("pid*"))) == RANKS)
    return programs


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "sent", "to"),
    [
        ("srun", signal.SIGTERM, "launcher"),
        ("torchrun", signal.SIGTERM, "launcher"),
        ("two agents", signal.SIGUSR1, "rank"),
    ],
)
def test_a_launchers_ranks_that_train_stop_after_the_same_step(
    tmp_path: Path,
    launcher: str,
    sent: signal.Signals,
    to: str,
) -> None:
    programs = training(
        tmp_path, partial(LAUNCHERS[launcher], function=("train", *BANDS_AND_STAGES))
    )
    seen = tmp_path / "seen"
    if to == "rank":
        os.kill(int((seen / "pid3").read_text()), sent)
    else:
        for program in programs:
            program.send_signal(sent)
    results = ends(programs)
    assert all(code != 0 for code, _ in results)
    if launcher == "srun":
        assert {code for code, _ in results} == {EXIT_PREEMPTED}
    steps = [path.read_text() for path in seen.glob("steps*")]
    assert len(steps) == RANKS
    assert len(set(steps)) == 1
    assert voices("\n".join(text for _, text in results)) == []
