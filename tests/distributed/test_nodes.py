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

from credit_dp.distributed.process_groups import FEW_FILES
from credit_dp.domain_parallel.local_messages import MOST_DISTANT
from tests.distributed.processes import ROOT, SOON, TORCHRUN, ends, free_port, gone, until, voices

pytestmark = pytest.mark.slow

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


def store_processes(ranks: list[int]) -> dict[str, dict[int, int]]:
    """The processes of the store that ranks have started: kind -> rank -> process id."""
    found: dict[str, dict[int, int]] = {"server": {}, "relay": {}}
    for rank, pid in enumerate(ranks):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if any(word.endswith("store_process.py") for word in words):
                kind = "server" if "server" in words else "relay"
                found[kind][rank] = int(child)
    return found


class Run:
    """Six ranks on three nodes, which communicate until a process is killed."""

    def __init__(self, folder: Path, agent: str) -> None:
        self.folder = folder
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
        self.processes = store_processes(self.ranks)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(tmp_path, getattr(request, "param", "0"))
    yield run
    with suppress(ProcessLookupError):  # with the ranks
        os.killpg(run.program.pid, signal.SIGKILL)
    run.program.communicate()


@pytest.mark.parametrize(
    ("victim", "run"),
    [
        *((victim, "0") for victim in ("rank 0", "starter", "other", "server", "relay")),
        *((victim, "1") for victim in ("agent", "rank 0", "server", "relay")),
    ],
    indirect=["run"],
)
def test_whatever_is_killed_ends_all_ranks_with_one_line(run: Run, victim: str) -> None:
    """Of a node's two ranks one has started the relay, which does not end with it.

    With or without an agent of torchrun.
    """
    run.start()
    starters = run.processes["relay"]
    assert len(starters) == 3
    assert list(run.processes["server"]) == [0]
    starter = next(rank for rank in starters if rank > 1)
    other = starter ^ 1
    first = Path(f"/proc/{run.program.pid}/task/{run.program.pid}/children").read_text().split()[0]
    killed, line = {
        "agent": (int(first), r"error: torchrun's agent at 127\.0\.0\.1:\d+ ended"),
        "rank 0": (run.ranks[0], r"error: rank 0 \(.* ended without a message"),
        "starter": (run.ranks[starter], rf"error: rank {starter} \("),
        "other": (run.ranks[other], rf"error: rank {other} \("),
        "server": (run.processes["server"][0], "error: the process that keeps the store of the"),
        "relay": (starters[starter], "error: the process that connects this node to the store"),
    }[victim]
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    codes, output = finish_on_nodes(run.program)
    assert time.monotonic() - died < SOON
    assert all(code != 0 for code in codes)
    spoken = voices(output)
    assert len(spoken) == 1, output
    assert re.match(line, spoken[0]), codes
    helpers = [pid for kind in run.processes.values() for pid in kind.values()]
    until(lambda: all(map(gone, helpers)))


@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize(
    ("size", "per_node", "line"),
    [
        (6, 2, r"error: rank 0 \(.*\) ended without a message"),
        (3, 1, r"error: rank 0 \(.*\) ended, or its machine or the network to it was lost"),
    ],
)
def test_rank_0_is_named_though_the_others_wait_for_each_other(
    tmp_path: Path, size: int, per_node: int, line: str, shared: str
) -> None:
    """One rank of another node notices the death of rank 0 in its collective; then others do."""
    arguments = launch_program("wait_in_ring", tmp_path, size)
    program = begin_on_nodes(
        size, per_node, arguments, SEEN=str(tmp_path), CREDIT_DP_SHARED_STORE=shared
    )
    files = [tmp_path / f"pid{rank}" for rank in range(size)]
    until(lambda: all(file.exists() for file in files) or program.poll() is not None, LONG_PATIENCE)
    os.kill(int(files[0].read_text()), signal.SIGKILL)
    codes, output = finish_on_nodes(program)
    assert all(code != 0 for code in codes)
    [spoken] = voices(output)
    assert re.match(line, spoken), output


def served_connections(nodes: int) -> int:
    """The connections of the store's process: a relay of each node, and those of rank 0."""
    return nodes + CONNECTIONS_TO_STORE


def agent_connections(nodes: int) -> int:
    """The connections that the agent of torchrun beside rank 0 serves: of all agents, and one of
    the store's process.
    """
    return nodes + 1


CONNECTIONS_TO_STORE = 3  # torch's, that of reports, and that of the lowest rank of a node


def descriptors(rank: int, ranks: int, nodes: int, gloo: bool) -> int:
    """What a rank has open that depends on the size of the run, after its first checkpoint.

    Args:
        rank: 0, or another one: rank 1 has most connections to others.
        ranks, nodes: of the run.
        gloo: whether a group of all ranks is over gloo, as on CPUs.
    """
    lowest_of_node = rank % (ranks // nodes) == 0
    neighbours = ranks // nodes - 1  # to which the lowest rank of a node reports a failure
    to_store = CONNECTIONS_TO_STORE - (not lowest_of_node) + 1  # and one to the store's process
    if gloo:
        # All ranks are in one domain, and on one machine whatever their variables say.
        near = sum(0 < abs(other - rank) <= MOST_DISTANT for other in range(ranks))
        others = ranks - 1 + near
    else:
        depth = (ranks - 1).bit_length()  # of the tree along which checkpoints gather
        # The children of a rank in it have one bit more in front, and rank 0 has no parent.
        children = sum(rank + (1 << bit) < ranks for bit in range(rank.bit_length(), depth))
        others = children + (rank > 0)
    return to_store + (neighbours if lowest_of_node else 1) + others


def counts(folder: Path, ranks: int) -> list[dict[str, int]]:
    """What each rank has counted."""
    return [
        json.loads(next(folder.glob(f"of-rank-*/counted{rank}")).read_text())
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "per_node", "agent"), [(4, 2, "0"), (9, 3, "0"), (12, 3, "0"), (9, 3, "1")]
)
def test_connections_are_those_of_the_model(
    tmp_path: Path, ranks: int, per_node: int, agent: str
) -> None:
    nodes = ranks // per_node
    arguments = launch_program("count_connections", tmp_path, ranks)
    program = begin_on_nodes(ranks, per_node, arguments, files=FEW_FILES + 1, AGENT=agent)
    codes, output = finish_on_nodes(program)
    assert codes == [0] * ranks, output
    counted = counts(tmp_path, ranks)
    assert {count["served"] for count in counted} == {served_connections(nodes)}
    # One of the agent itself, and one of the process that keeps the store.
    assert {count.get("agent") for count in counted} == {
        agent_connections(1) if agent == "1" else None
    }
    rest = {
        count["files"] - descriptors(rank, ranks, nodes, gloo=True)
        for rank, count in enumerate(counted)
    }
    # Standard streams, logs, events and sockets that listen: the same on all ranks.
    assert len(rest) == 1
    assert rest.pop() <= OWN_FILES


# Of them 4 of a gloo group: that of all ranks, or with nccl that of checkpoints. A training run has
# 5 more than counted here, and 4 of another group if ranks share the reading of a store.
OWN_FILES = 20
NCCL_FILES = 140  # of a rank, at most: not counted, since nothing here runs nccl


@pytest.mark.parametrize("nodes", [128, 256])
def test_of_1024_ranks_none_has_more_than_200_descriptors(nodes: int) -> None:
    of_ranks = [descriptors(rank, 1024, nodes, gloo=False) for rank in range(1024)]
    assert max(of_ranks) + OWN_FILES + NCCL_FILES <= 200
    # Where rank 0 is: of the process beside it, and of the agent of torchrun if there is one.
    assert served_connections(nodes) + agent_connections(nodes) == 2 * nodes + 4


def test_agents_of_torchrun_serve_each_other_alone(tmp_path: Path) -> None:
    """Four agents, each of which stands for a node, and none of which may open many files."""
    nodes, per_node = 4, 2
    ranks = nodes * per_node
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    sizes = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
    program = ["-m", *launch_program("count_connections", tmp_path, ranks)]
    agents = [
        subprocess.Popen(
            [sys.executable, *TORCHRUN, *sizes, *meeting, "--node-rank", str(node), *program],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "CREDIT_DP_SHARED_STORE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64)),
        )
        for node in range(nodes)
    ]
    results = ends(agents, LONG_PATIENCE)
    assert [code for code, _ in results] == [0] * nodes, results
    expected = (served_connections(nodes), agent_connections(nodes))
    found = {(count["served"], count["agent"]) for count in counts(tmp_path, ranks)}
    assert found == {expected}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_24_ranks_train_and_save_with_64_files_each(tmp_path: Path, cache: Path) -> None:
    """On four nodes, over gloo, which needs 23 connections of each rank for itself."""
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
    program = ["train.py", *keys, "parallel.domain=1", "parallel.data=24", f"run.dir={run}"]
    codes, output = finish_on_nodes(begin_on_nodes(24, 6, program, files=64, **environment))
    assert codes == [0] * 24, output
    assert (run / "metrics.csv").exists()
    assert list(run.glob("checkpoint/*"))
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(24)]
    seen = [most for most, *_ in found]
    assert max(seen) <= SEEN_FILES, seen
    assert max(seen[1:]) <= SEEN_BY_OTHERS, seen
    assert min(seen) > 23 + 3  # the others, and the standard streams: they have been counted
    # More threads of zarr's pool would open more files at once, but not in every run.
    pools = [[name for name in threads if "pool" in name] for _, *threads in found]
    assert pools == [["zarr_pool_0"]] * 24


# At once. Rank 0 has 47 all the time, and 5 for the process that finds out the code's version.
SEEN_FILES = 54
# The first rank of a node has 46 all the time; its main thread and two of zarr's open a file each.
SEEN_BY_OTHERS = 50
