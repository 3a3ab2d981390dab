"""Runs on nodes that this machine stands for: their connections, and what ends them."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from credit_dp.config import ParallelConfig
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.process_groups import (
    FEW_FILES,
    OWN_FILES,
    agent_files,
    files_needed,
    store_connections,
)
from tests.distributed.processes import (
    ROOT,
    SOON,
    TORCHRUN,
    children,
    ends,
    free_port,
    until,
    voices,
)
from tests.tier_cases import tiers

LONG_PATIENCE = 1200.0  # seconds; on a busy machine 24 ranks take minutes to start


def begin_on_nodes(
    size: int, per_node: int, program: list[str], files: int | None = None, **environment: str
) -> subprocess.Popen[str]:
    """Start a program on ranks; `files` limits how many files each process may open."""
    limits = (resource.RLIMIT_NOFILE, (files or 0, files or 0))
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.distributed.nodes_program",
            *map(str, (size, per_node)),
            *program,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(resource.setrlimit, *limits) if files else None,
    )


def launch_program(function: str, folder: Path, size: int) -> list[str]:
    """Arguments of a program whose ranks, all in one domain, call one of `rank_functions`."""
    for rank in range(size):
        (folder / f"of-rank-{rank}").mkdir()
    return ["tests.distributed.launch_program", function, str(size), "1", "1", str(folder)]


def finish_on_nodes(program: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Wait for a program, and return the exit codes of its ranks, and their stderr."""
    out, err = program.communicate(timeout=LONG_PATIENCE)
    return json.loads(out.splitlines()[-1]), err  # after what the program wrote


class Run:
    """Six ranks on three nodes, which communicate until a process is killed."""

    def __init__(self, folder: Path, agent: str) -> None:
        self.folder, self.agent = folder, agent
        self.program = begin_on_nodes(
            6, 2, launch_program("communicate", folder, 6), SEEN=str(folder), AGENT=agent
        )

    def start(self) -> None:
        files = [self.folder / f"pid{rank}" for rank in range(6)]
        until(
            lambda: all(file.exists() for file in files) or self.program.poll() is not None,
            LONG_PATIENCE,
        )
        self.ranks = [int(file.read_text()) for file in files]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(tmp_path, getattr(request, "param", "0"))
    yield run
    with suppress(ProcessLookupError):  # with the ranks
        os.killpg(run.program.pid, signal.SIGKILL)
    run.program.communicate()


@pytest.mark.parametrize(
    ("victim", "run"),
    tiers([], [("agent", "1")], [("rank 0", "0"), ("rank 3", "0"), ("rank 0", "1")]),
    indirect=["run"],
)
def test_whatever_is_killed_ends_all_ranks_with_one_line(run: Run, victim: str) -> None:
    """With the store in rank 0, or in an agent of torchrun; if it is lost, each node has a line."""
    run.start()
    if victim == "agent":
        killed = children(run.program.pid)[0]
        line = r"error: torchrun's agent at 127\.0\.0\.1:\d+ ended, or its machine"
    else:
        killed = run.ranks[int(victim[-1])]
        line = rf"error: {victim} \(.* ended(, or its machine| without a message)"
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    codes, output = finish_on_nodes(run.program)
    assert time.monotonic() - died < SOON
    assert all(code != 0 for code in codes)
    spoken = voices(output)
    serves_store = victim == ("rank 0" if run.agent == "0" else "agent")
    assert 1 <= len(spoken) <= (3 if serves_store else 1), output
    assert all(re.match(line, each) for each in spoken), output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "per_node"), [(3, 1), (6, 2)])
def test_rank_0_is_named_though_the_others_wait_for_each_other(
    tmp_path: Path, size: int, per_node: int
) -> None:
    """One rank of another node notices the death of rank 0 in its collective; then others do."""
    arguments = launch_program("wait_in_ring", tmp_path, size)
    program = begin_on_nodes(size, per_node, arguments, SEEN=str(tmp_path))
    files = [tmp_path / f"pid{rank}" for rank in range(size)]
    until(lambda: all(file.exists() for file in files) or program.poll() is not None, LONG_PATIENCE)
    os.kill(int(files[0].read_text()), signal.SIGKILL)
    codes, output = finish_on_nodes(program)
    assert all(code != 0 for code in codes)
    spoken = voices(output)
    assert 1 <= len(spoken) <= size // per_node, output
    line = r"error: rank 0 \(.*\) ended(, or its machine| without a message)"
    assert all(re.match(line, each) for each in spoken), output


def counts(folder: Path, ranks: int) -> list[dict[str, int]]:
    """What each rank has counted."""
    return [
        json.loads(next(folder.glob(f"of-rank-*/counted{rank}")).read_text())
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("size", "per_node", "agent"),
    tiers([], [(4, 2, "0")], [(9, 3, "0"), (12, 3, "0"), (12, 12, "0"), (9, 3, "1")]),
)
def test_connections_are_those_that_are_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, per_node: int, agent: str
) -> None:
    arguments = launch_program("count_connections", tmp_path, size)
    program = begin_on_nodes(size, per_node, arguments, files=FEW_FILES, AGENT=agent)
    codes, output = finish_on_nodes(program)
    assert codes == [0] * size, output
    counted = counts(tmp_path, size)
    all_ranks = [RankInfo(n, size, n % per_node, per_node, n // per_node) for n in range(size)]
    # The agent is a client of its own store.
    expected = store_connections(all_ranks[0]) + int(agent)
    assert {count["served"] for count in counted} == {expected}
    if agent == "1":
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    parallel = ParallelConfig(domain=size)
    rest = {
        files_needed(parallel, ranks, gloo=True, launched=True) - count["files"]
        for ranks, count in zip(all_ranks, counted, strict=True)
    }
    # Those of a node without a connection that waits for the end of the run have one fewer.
    assert max(rest) - min(rest) <= 1
    assert max(rest) <= OWN_FILES
    assert min(rest) >= 15  # for the files that training reads and writes at once


@pytest.mark.exhaustive
def test_agents_of_torchrun_serve_the_store(tmp_path: Path) -> None:
    """Four agents, each of which stands for a node; one has the connections of all ranks."""
    nodes, per_node = 4, 2
    ranks = RankInfo(0, nodes * per_node, 0, per_node)
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    sizes = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
    program = ["-m", *launch_program("count_connections", tmp_path, ranks.world_size)]

    def run(files: int) -> list[tuple[int, str]]:
        agents = [
            subprocess.Popen(
                [sys.executable, *TORCHRUN, *sizes, *meeting, "--node-rank", str(node), *program],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, 4096)),
            )
            for node in range(nodes)
        ]
        return ends(agents, LONG_PATIENCE)

    needed = agent_files(ranks)
    refused = run(needed - 1)
    assert all(code != 0 for code, _ in refused)
    [line] = voices(refused[0][1])
    assert re.match(rf"error: ulimit -n: torchrun on \S+ .* needs {needed} open files", line)
    for _, text in refused[1:]:  # they notice that the agent has ended
        assert all(line.startswith("error: MASTER_ADDR: ") for line in voices(text)), text
    results = run(needed)
    assert [code for code, _ in results] == [0] * nodes, results
    expected = store_connections(ranks) + nodes  # one of each agent
    assert {count["served"] for count in counts(tmp_path, ranks.world_size)} == {expected}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.exhaustive
def test_24_ranks_train_and_save_with_the_files_that_they_need(tmp_path: Path, cache: Path) -> None:
    """On four nodes, over gloo; with one fewer they are refused before they meet."""
    keys = ["experiment=fast", "device=cpu", "trainer.steps=1", "data.batch_size=24"]
    keys += ["trainer.evaluate_hours=[6]"]
    environment = {"CREDIT_DP_CACHE": str(cache), "FILES_SEEN": str(tmp_path)}
    first = [sys.executable, str(ROOT / "train.py"), *keys, "parallel.domain=1"]
    subprocess.run(
        [*first, f"run.dir={tmp_path / 'alone'}"],  # computes the statistics
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        check=True,
        timeout=600,
    )
    run = tmp_path / "run"
    mesh = ParallelConfig(data=24)
    keys += ["parallel.domain=1", "parallel.data=24", f"run.dir={run}"]
    all_ranks = [RankInfo(n, 24, n % 6, 6, n // 6) for n in range(24)]
    needed = [files_needed(mesh, ranks, gloo=True, launched=True) for ranks in all_ranks]
    few = begin_on_nodes(24, 6, ["train.py", *keys], files=needed[0] - 1, **environment)
    assert any("error: ulimit -n: rank 0 of 24" in line for line in few.stderr)
    os.killpg(few.pid, signal.SIGKILL)  # as a launcher ends the ranks that wait for rank 0
    few.communicate()
    assert not (run / "metrics.csv").exists()
    program = begin_on_nodes(24, 6, ["train.py", *keys], files=needed[0], **environment)
    codes, output = finish_on_nodes(program)
    assert codes == [0] * 24, output
    assert (run / "metrics.csv").exists()
    assert list(run.glob("checkpoint/*"))
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(24)]
    seen = [most for most, *_ in found]
    assert all(most <= enough for most, enough in zip(seen, needed, strict=True)), (seen, needed)
    assert min(seen) > 23 + 3  # the others, and the standard streams: they have been counted
    # More threads of zarr's pool would open more files at once, but not in every run.
    pools = [[name for name in threads if "pool" in name] for _, *threads in found]
    assert pools == [["zarr_pool_0"]] * 24
