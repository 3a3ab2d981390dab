"""Nodes that can't be reached any more: each node says so in one line, and ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, SOON, Programs, until
from tests.ranks import TIMEOUT
from tests.tier_cases import tiers

GROUP_SECONDS = 10  # a collective's; 10 minutes in a run
INTERFACE = "veth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=TIMEOUT)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces with a link between them."""
    names = [f"credit_dp-{os.getpid()}-{node}" for node in (0, 1)]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in names:
            ip("netns", "add", name)
        peer = ["peer", "name", INTERFACE, "netns", names[1]]
        ip("-n", names[0], "link", "add", INTERFACE, "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", INTERFACE, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def programs(tmp_path: Path, nodes: list[str]) -> Iterator[Programs]:
    """A rank on each node, which communicate."""
    programs: Programs = []
    for rank, node in enumerate(nodes):
        (tmp_path / f"of-rank-{rank}").mkdir()
        words = ["-m", "tests.distributed.launch_program", "communicate", "2", "1", "1"]
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        programs.append(
            subprocess.Popen(
                ["ip", "netns", "exec", node, sys.executable, *words, str(tmp_path)],
                cwd=ROOT,
                env={
                    **os.environ,
                    **place,
                    **sizes,
                    **meeting,
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "GROUP_SECONDS": str(GROUP_SECONDS),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                    "SEEN": str(tmp_path),
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    files = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() for file in files) or programs[0].poll() is not None)
    yield programs
    for program in programs:
        program.kill()  # `ip` has become the rank
        program.communicate()


def take_link_down(node: int, nodes: list[str], programs: Programs) -> None:
    ip("-n", nodes[node], "link", "set", INTERFACE, "down")


def power_off(node: int, nodes: list[str], programs: Programs) -> None:
    """As others see it: no answer, and no end of a connection either."""
    take_link_down(node, nodes, programs)
    programs[node].kill()


def freeze(node: int, nodes: list[str], programs: Programs) -> None:
    programs[node].send_signal(signal.SIGSTOP)


LOSSES: dict[str, Callable[[int, list[str], Programs], None]] = {
    "link": take_link_down,
    "power": power_off,
    "frozen": freeze,
}
RANK_0 = (
    r"rank 0 \(pipeline 0, data 0, domain 0\) ended, or its machine or the network to it was lost"
)
RANK_1 = (
    r"rank 1 \(pipeline 0, data 0, domain 1\) gave no answer: its process, its machine or the "
    r"network to it was lost"
)


@pytest.mark.parametrize(
    ("loss", "node", "surviving"),
    tiers(
        [],
        [("power", 0, (1,))],
        [
            ("link", 0, (0, 1)),
            ("link", 1, (0, 1)),
            ("power", 1, (0,)),
            ("frozen", 0, (1,)),
            ("frozen", 1, (0,)),
        ],
    ),
)
def test_each_node_that_is_left_says_in_one_line_what_was_lost(
    nodes: list[str],
    programs: Programs,
    loss: str,
    node: int,
    surviving: tuple[int, ...],
) -> None:
    LOSSES[loss](node, nodes, programs)
    lost = time.monotonic()
    for left in surviving:
        _, said = programs[left].communicate(timeout=TIMEOUT)
        assert time.monotonic() - lost < GROUP_SECONDS + SOON
        assert programs[left].returncode == 1, said
        lines = [line for line in said.splitlines() if " WARNING " not in line]
        assert len(lines) == 1, said
        line = rf"error: {(RANK_1, RANK_0)[left]}; all ranks were stopped\. .*resume=auto"
        assert re.match(line, lines[0]), said
