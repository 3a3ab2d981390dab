"""Let the ranks of a node reach the rendezvous store over one connection.

torch's store costs the process that serves it a connection to every rank, and one more for each
copy of a store that a rank has: thousands, in rank 0. With many ranks on several nodes the store is
therefore kept by a process of its own, which rank 0 starts, and a relay process on each node
carries the requests of the ranks there (`store_process`). A rank still uses torch's own `TCPStore`,
which only connects to the relay's port, so that nothing that torch does with it changes.

The first rank of a node that binds a name of this run starts the relay. The others find the name
in use, and request the port from the relay. Where that can't work, a rank connects to rank 0
itself: both may be mixed in a run.

Under torchrun an agent serves a store at MASTER_PORT, which has a connection of each agent. The
process beside rank 0 then listens at another port (`port_beside_agent`), and ends with the agent:
so ranks notice its end as they would if they used its store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol, cast, final

from credit_dp.distributed import store_process
from credit_dp.distributed.launcher import (
    FIRST_PORT,
    JOB_VARIABLES,
    PORT_COUNT,
    RankInfo,
    bind_problems,
)
from credit_dp.distributed.process_groups import GROUP_TIMEOUT
from credit_dp.distributed.signals import STOP_SIGNALS, block_signals
from credit_dp.errors import UserError

log = logging.getLogger(__name__)

# The first and the last release whose store has the protocol of `store_process`.
KNOWN_TORCH = ((2, 11), (2, 13))
# With 0, each rank connects to rank 0 itself; with 1, connections are shared in smaller runs, too.
SWITCH = "CREDIT_DP_SHARED_STORE"
# Ranks of a run whose connections are many: with fewer, torch's own store needs no more than 300.
MANY_RANKS = 64
# Set if an agent of torchrun serves a store at MASTER_ADDR and MASTER_PORT.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# These differ between runs on the same nodes, and between attempts of a run.
RUN_VARIABLES = (*JOB_VARIABLES, "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
ATTEMPTS = 3
# Ranks report a death within milliseconds, and on a busy machine within seconds.
REPORT_SECONDS = 10.0
# The name is in use, but no relay listens yet: the rank that has bound it is starting one.
CONNECT_SECONDS = 10.0
# A relay gives up after `GROUP_TIMEOUT`; its answer may take so much longer.
ANSWER_SECONDS = 60.0
STORE_PROCESS = "the process that keeps the store of the run"
RELAY_PROCESS = "the process that connects this node to the store of the run"


class RendezvousStore(Protocol):
    """The key-value store that all ranks share; `torch.distributed.Store` has no complete stub.

    Its methods raise a RuntimeError if the process that serves it has ended.
    """

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""

    def get(self, key: str) -> bytes:
        """Wait until a key exists, and return its value."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys exist, and return their values."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set for how long reading waits."""

    def clone(self) -> RendezvousStore:
        """Return the same store over another connection, for another thread."""


@final
@dataclass(frozen=True)
class StoreLink:
    """What ties a rank to the processes of its store: kept until the rank ends.

    Attributes:
        connection: to a process that ends soon after the last rank has closed it.
        process: that this rank has started; None: another rank of the node has.
        name: of that process, for messages.
        server: host and port of the process that keeps the store; None: rank 0 or torchrun's agent
            serves it.
    """

    connection: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    name: str = ""
    server: tuple[str, int] | None = None


def uses_shared_store(ranks: RankInfo, environment: Mapping[str, str]) -> bool:
    """Whether the ranks of this run share connections; the same on all ranks.

    On one machine, and in small runs, the store's connections are few.
    """
    switch = environment.get(SWITCH, "")
    return (
        sys.platform == "linux"
        and ranks.on_several_nodes
        and switch != "0"
        and (ranks.world_size >= MANY_RANKS or switch == "1")
        and is_known_torch()
    )


def is_known_torch() -> bool:
    """Whether the protocol of this torch's store is known here."""
    import torch  # takes seconds

    release = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return release is not None and (
        KNOWN_TORCH[0] <= (int(release[1]), int(release[2])) <= KNOWN_TORCH[1]
    )


def join_shared_store(
    ranks: RankInfo, address: str, port: int, environment: Mapping[str, str]
) -> tuple[RendezvousStore, StoreLink]:
    """Return the store of the run and what this rank has to keep; rank 0 starts its process.

    Args:
        ranks: this rank.
        address, port: MASTER_ADDR and MASTER_PORT, the same on all ranks.
        environment: by which runs on one machine differ, and whether an agent of torchrun listens
            at that port.

    Raises:
        UserError: rank 0 can't be reached.
    """
    agent = (address, port) if environment.get(AGENT_STORE) == "True" else None
    server = (address, port_beside_agent(port) if agent else port)
    if ranks.rank == 0:
        # On its machine other ranks report the death of rank 0. If there are none, the store ends
        # at once, which ranks on other machines notice.
        grace = REPORT_SECONDS if ranks.local_world_size > 1 else 0.0
        link = start_server(server[1], grace, agent)
        return connect("127.0.0.1", server[1]), replace(link, server=server)
    # The relay of a rank that is alone, too, notices the end of an agent before rank 0 listens.
    if ranks.local_world_size > 1 or agent:
        name = relay_name(ranks, address, port, environment)
        local_port, link = find_relay(name, server, agent)
        if local_port is not None:
            return connect("127.0.0.1", local_port), replace(link, server=server)
        log.warning(
            "this rank connects to the store at %s:%d itself, since no relay serves its node",
            *server,
        )
    return connect(*server), StoreLink(server=server)


def port_beside_agent(port: int) -> int:
    """Return the port of the store's process where torchrun's agent listens at `port`.

    The same on all ranks, and another one for each of the agents at nearby ports. Like the ports of
    other launchers it is below the ports that Linux gives to outgoing connections.
    """
    return FIRST_PORT + (port + PORT_COUNT // 2) % PORT_COUNT


def connect(address: str, port: int, timeout: timedelta = GROUP_TIMEOUT) -> RendezvousStore:
    """Return a client of the store at an address."""
    from torch import distributed

    store = distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return cast(RendezvousStore, store)


def start_server(port: int, grace: float, agent: tuple[str, int] | None = None) -> StoreLink:
    """Start the process that keeps the store; it listens on all interfaces, as torch's does.

    Args:
        port: at which it listens.
        grace: seconds that it outlives this rank while others are connected.
        agent: host and port of torchrun's agent, which it does not outlive; None: there is none.

    Raises:
        UserError: the port is in use, the agent does not answer, or the process can't be started or
            ends at once.
    """
    lifelines = [] if agent is None else [connect_agent(*agent)]
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen_on_all_interfaces(port))
            ours, others = socket.socketpair()
            for lifeline in (others, *lifelines):
                stack.enter_context(lifeline)
            process = start_process(["server"], [listener, others, *lifelines], [str(grace)])
    except OSError as error:
        raise UserError(
            f"MASTER_PORT: rank 0 can't keep the store of the run at port {port} "
            f"({error.strerror}). Set MASTER_PORT to a free port, the same on all ranks, or "
            f"{SWITCH}=0."
        ) from error
    # Otherwise this rank would try for `GROUP_TIMEOUT` to connect to a process that has ended.
    ours.settimeout(ANSWER_SECONDS)
    with contextlib.suppress(OSError):
        if ours.recv(1) == store_process.STARTED:
            return StoreLink(ours, process, STORE_PROCESS)
    ours.close()
    process.kill()
    raise UserError(
        f"{SWITCH}: {STORE_PROCESS} does not start; its exit code is {process.wait()}. Set "
        f"{SWITCH}=0, the same on all ranks, so that rank 0 keeps the store itself."
    )


def connect_agent(address: str, port: int) -> socket.socket:
    """Return a connection to torchrun's agent on this host, which closes when the agent ends.

    Raises:
        UserError: the agent is on another host, or does not answer.
    """
    problems = {error.errno for error in bind_problems(address, 0)} - {errno.EAFNOSUPPORT}
    if problems == {errno.EADDRNOTAVAIL}:
        raise UserError(
            f"MASTER_ADDR: rank 0 runs on {socket.gethostname()}, which has no address {address}: "
            "other nodes may not reach the store of the run beside it. "
            f"Set {SWITCH}=0, the same on all ranks, so that torchrun's agent keeps the store."
        )
    try:
        return socket.create_connection((address, port), timeout=ANSWER_SECONDS)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR: no torchrun answers rank 0 at {address}:{port} "
            f"({error.strerror or error}). Start the run again."
        ) from error


def listen_on_all_interfaces(port: int) -> socket.socket:
    """Return a socket that listens on a port, for IPv4 and, if there is one, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
            )
    return socket.create_server(("", port), backlog=4096)


def relay_name(ranks: RankInfo, address: str, port: int, environment: Mapping[str, str]) -> str:
    """Return the name of the relay of this node in Linux's list of sockets that are no files.

    Containers of one machine may not share folders. The same on all ranks of the node, and another
    one for other runs, users and nodes.
    """
    job = [environment.get(name, "") for name in RUN_VARIABLES]
    text = "\n".join([address, str(port), str(ranks.node), str(os.getuid()), *job])
    return f"\0credit_dp-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def find_relay(
    name: str, server: tuple[str, int], agent: tuple[str, int] | None
) -> tuple[int | None, StoreLink]:
    """Return the port of this node's relay, which this rank starts if none has done so.

    Without a relay the port is None.

    Args:
        name: of the relay.
        server: host and port of the process that keeps the store.
        agent: those of torchrun's agent; None: there is none.

    Raises:
        UserError: rank 0 can't be reached.
    """
    process = None
    for _ in range(ATTEMPTS):
        started = start_relay(name, server, agent)
        process = started or process
        answer, connection = request_port(name)
        if answer.startswith("port "):
            return int(answer.removeprefix("port ")), StoreLink(connection, process, RELAY_PROCESS)
        if connection is not None:
            connection.close()
        if answer.startswith("error "):
            if process is not None:
                process.wait(ANSWER_SECONDS)  # it has answered all ranks, and ends
            cure = (
                "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port"
                if agent is None
                else f"If nothing may listen at that port, set {SWITCH}=0"
            )
            raise UserError(
                f"MASTER_ADDR: this node can't reach rank 0 at {server[0]}:{server[1]} "
                f"({answer.removeprefix('error ')}). {cure}, the same on all ranks."
            )
        if answer == "direct":
            break
    return None, StoreLink(process=process)


def start_relay(
    name: str, server: tuple[str, int], agent: tuple[str, int] | None
) -> subprocess.Popen[bytes] | None:
    """Start a relay of this name; None if there is one, or if it can't be started."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(name)
            listener.listen(1024)
            arguments = [*server, GROUP_TIMEOUT.total_seconds(), *(agent or ())]
            return start_process(["relay"], [listener], list(map(str, arguments)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                log.warning("no relay for the store of the run: %s", error)
            return None


def request_port(name: str) -> tuple[str, socket.socket | None]:
    """Return the relay's answer, and the connection to it; an empty answer if it has ended."""
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(name)
            break
        except OSError:
            connection.close()
            if time.monotonic() > end:
                return "", None
            time.sleep(0.01)
    if store_process.peer_user(connection) != os.getuid():
        connection.close()  # another user's program has this name
        return "direct", None
    connection.settimeout(GROUP_TIMEOUT.total_seconds() + ANSWER_SECONDS)
    answer = b""
    with contextlib.suppress(OSError):
        while not answer.endswith(b"\n") and len(answer) < 1024:
            part = connection.recv(1024)
            if not part:
                break
            answer += part
    return (answer.decode().strip() if answer.endswith(b"\n") else ""), connection


def start_process(
    kind: Sequence[str], sockets: Sequence[socket.socket], arguments: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a process of `store_process`, which takes over the sockets.

    It does not end with the rank, and leaves it to the ranks what a signal does.
    """
    numbers = [opened.fileno() for opened in sockets]
    command = [sys.executable, "-I", "-S", store_process.__file__, *kind, *map(str, numbers)]
    # Until the process has decided to ignore them.
    with block_signals((*STOP_SIGNALS, signal.SIGINT)):
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=numbers,
            cwd="/",
            start_new_session=True,
        )
