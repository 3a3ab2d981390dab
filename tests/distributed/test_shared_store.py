"""The store that ranks of several nodes share: what torch's does, over few connections."""

import os
import signal
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore

from credit_dp.distributed import RankInfo, shared_store, store_process
from credit_dp.distributed.shared_store import (
    KNOWN_TORCH,
    StoreLink,
    is_known_torch,
    join_shared_store,
    uses_shared_store,
)
from credit_dp.errors import UserError
from tests.distributed.processes import free_port, gone, until
from tests.distributed.rank_functions import connections

VALID = bytes([store_process.VALIDATE]) + struct.pack("<I", store_process.MAGIC_NUMBER)
UNDER_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
TWO_NODES = [RankInfo(rank, 4, rank % 2, 2, rank // 2) for rank in range(4)]


class Stores:
    """The stores of four ranks on two nodes, all of them in this process, and their links."""

    def __init__(self, environment: dict[str, str] | None = None, port: int = 0) -> None:
        self.port = port or free_port()
        self.environment = environment or {}
        self.links: list[StoreLink] = []
        self.stores: list[TCPStore] = []
        for ranks in TWO_NODES:
            self.join(ranks)

    def join(self, ranks: RankInfo) -> None:
        store, link = join_shared_store(ranks, "127.0.0.1", self.port, self.environment)
        store.set_timeout(timedelta(seconds=60))
        self.stores.append(store)
        self.links.append(link)

    @property
    def pids(self) -> list[int]:
        """The processes that keep the store, of the server first."""
        return [link.process.pid for link in self.links if link.process is not None]

    def close(self) -> None:
        """End as ranks do: their connections close."""
        self.stores.clear()
        for link in self.links:
            if link.connection is not None:
                link.connection.close()
        for link in self.links:
            if link.process is not None:
                link.process.wait(30)


@pytest.fixture(scope="module")
def shared() -> Iterator[Stores]:
    stores = Stores()
    yield stores
    stores.close()


@pytest.fixture
def fresh() -> Iterator[Stores]:
    stores = Stores()
    yield stores
    stores.close()


MANY = RankInfo(1, 64, 1, 8, 0)


def test_the_store_of_the_installed_torch_is_known() -> None:
    """Otherwise compare torch's TCPStoreBackend.hpp with `store_process`, and add the release."""
    assert is_known_torch(), (torch.__version__, KNOWN_TORCH)


def test_a_torch_of_another_protocol_keeps_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_shared_store(TWO_NODES[0], {"CREDIT_DP_SHARED_STORE": "1"})
    for version in ("2.10.1", "2.14.0a0", "3.0.0", "unknown"):
        monkeypatch.setattr(torch, "__version__", version)
        assert not uses_shared_store(TWO_NODES[0], {"CREDIT_DP_SHARED_STORE": "1"})


@pytest.mark.parametrize(
    ("ranks", "environment"),
    [
        pytest.param(RankInfo(1, 64, 1, 64, 0), {}, id="one machine"),
        pytest.param(RankInfo(1, 63, 1, 8, 0), {}, id="few ranks"),
        pytest.param(MANY, {"CREDIT_DP_SHARED_STORE": "0"}, id="switched off"),
    ],
)
def test_other_runs_keep_torchs_store(ranks: RankInfo, environment: dict[str, str]) -> None:
    assert not uses_shared_store(ranks, environment)


@pytest.mark.parametrize("environment", [{}, UNDER_TORCHRUN], ids=["srun", "torchrun"])
def test_many_ranks_on_several_nodes_share_connections(environment: dict[str, str]) -> None:
    assert uses_shared_store(MANY, environment)


def outcomes(store: TCPStore, other: TCPStore) -> list[object]:
    """What every method returns, of two clients of one store."""
    seen: list[object] = []

    def call(method: str, *arguments: object) -> None:
        for client in (store, other):
            try:
                seen.append(getattr(client, method)(*arguments))
            except RuntimeError as error:
                seen.append((type(error), str(error).splitlines()[0]))
            client.check(
                []
            )  # the server has no answer to some requests, and may serve another first

    short = timedelta(milliseconds=50)
    call("num_keys")
    call("set", "a", "1")
    call("get", "a")
    call("set", "", b"\0\xff")
    call("get", "")
    call("set", "empty", b"")
    call("get", "empty")
    call("set", "ü", "ä" * 1000)
    call("get", "ü")
    call("add", "n", 5)
    call("add", "n", -7)
    call("get", "n")
    call("add", "a", 2**40)
    call("check", ["a", "n"])
    call("check", ["a", "absent"])
    call("check", [])
    call("compare_set", "c", "", "first")
    call("compare_set", "c", "other", "second")
    call("compare_set", "c", "first", "third")
    call("compare_set", "absent", "expected", "x")
    call("compare_set", "empty", "", "full")
    call("multi_set", ["m1", "m2"], ["x", "y" * 5000])
    call("multi_get", ["m2", "m1", "a"])
    call("multi_get", [])
    call("append", "m1", "z")
    call("append", "new", "z")
    call("multi_get", ["m1", "new"])
    call("delete_key", "m1")
    call("check", ["m1"])
    call("num_keys")
    call("wait", ["a", "n"])
    call("wait", ["a", "absent"], short)
    call("wait", ["a"], short)
    call("queue_push", "q", "1")
    call("queue_push", "q", "2")
    call("queue_len", "q")
    call("check", ["q"])
    call("queue_pop", "q")
    call("queue_len", "q")
    call("queue_pop", "q", False)
    call("queue_pop", "q", False)
    call("queue_len", "no queue")
    call("has_extended_api")
    if hasattr(store, "barrier"):
        call("barrier", "alone", 1)
        call("barrier", "never", 9, short)
    if hasattr(store, "list_keys"):
        seen.append(sorted(store.list_keys()))
    copy = other.clone()
    seen.append(copy.get("a"))
    seen.append(copy.add("n", 1))
    # Keys of 8 KiB and values of 8 MiB are the longest that torch's server takes.
    longest = b"v" * (8 * 1024 * 1024)
    store.set("k" * (8 * 1024 - 1), longest)
    seen.append(other.get("k" * (8 * 1024 - 1)) == longest)
    call("set_timeout", short)
    call("get", "absent")
    call("set_timeout", timedelta(seconds=60))
    return seen


@pytest.mark.parametrize("ranks", [(2, 3), (1, 0)])
def test_every_method_does_what_torchs_does(ranks: tuple[int, int], fresh: Stores) -> None:
    """Of ranks that connect themselves or through a relay, on one node or two."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    expected = outcomes(server, client)
    assert outcomes(*(fresh.stores[rank] for rank in ranks)) == expected
    assert len(expected) > 90


def test_many_threads_wait_while_others_write(shared: Stores) -> None:
    """A rank that waits for a key does not hold up the others of its node."""
    found: list[bytes] = []
    clients = [shared.stores[rank].clone() for rank in (0, 1, 2, 3) for _ in range(10)]
    waiting = [
        threading.Thread(
            target=lambda client=client, n=n: found.append(client.get(f"later/{n % 5}"))
        )
        for n, client in enumerate(clients)
    ]
    for thread in waiting:
        thread.start()
    for n in range(100):
        assert shared.stores[n % 4].add("while others wait", 1) == n + 1
    for n in range(5):
        shared.stores[n % 4].set(f"later/{n}", str(n))
    for thread in waiting:
        thread.join(60)
    assert Counter(found) == {str(n).encode(): 8 for n in range(5)}


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(b"\0\1\2\3\4", id="another number"),
        pytest.param(VALID + b"\xee", id="unknown request"),
        pytest.param(VALID + b"\1" + struct.pack("<Q", 2**40), id="long key"),
        pytest.param(VALID + b"\1" + struct.pack("<QBQ", 1, 0, 2**40), id="long value"),
        pytest.param(VALID + b"\6" + struct.pack("<Q", 2**40), id="many keys"),
        pytest.param(VALID + b"\3" + struct.pack("<q", -1), id="negative length"),
        pytest.param(store_process.HELLO + struct.pack("<II", 1, 2**31), id="long frame"),
    ],
)
def test_what_the_protocol_does_not_have_ends_that_connection_alone(
    shared: Stores, sent: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60) as stranger:
        stranger.sendall(sent)
        with suppress(ConnectionResetError):
            while stranger.recv(1024):
                pass
    assert shared.stores[3].add("still there", 0) == 0


def test_a_request_may_arrive_in_any_pieces(shared: Stores) -> None:
    request = VALID + b"\1" + struct.pack("<Q", 4) + b"/abc" + struct.pack("<Q", 3) + b"xyz"
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60) as client:
        for byte in request:
            client.sendall(bytes([byte]))
        assert shared.stores[2].get("abc") == b"xyz"


def test_a_relay_ends_with_the_last_of_its_ranks_and_the_server_with_rank_0() -> None:
    stores = Stores()
    server, *relays = stores.pids
    assert len(relays) == 2
    stores.stores[2].set("a", "1")
    for rank in (1, 2, 3):
        stores.stores[rank] = stores.stores[0]
        stores.links[rank].connection.close()
        if rank != 2:
            until(lambda rank=rank: sum(map(gone, relays)) == (rank + 1) // 2)
    assert stores.stores[0].get("a") == b"1"
    assert not gone(server)
    stores.close()
    assert gone(server)


def test_ranks_that_wait_notice_when_the_server_is_killed(fresh: Stores) -> None:
    errors = []

    def wait(rank: int) -> None:
        with pytest.raises(RuntimeError) as error:
            fresh.stores[rank].wait(["never"], timedelta(hours=1))
        errors.append(error.type)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    os.kill(fresh.pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert errors == [distributed.DistNetworkError] * 4
    assert [link.process.wait(60) for link in fresh.links if link.process] == [-9, 0, 0]


def test_signals_of_a_job_leave_the_processes_to_the_ranks(shared: Stores) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        for pid in shared.pids:
            os.kill(pid, number)
    assert shared.stores[3].add("still there", 0) == 0


def test_ranks_of_a_node_connect_themselves_where_rank_0_serves_torchs_store() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # torch's server waits for the rest of what it takes for the beginning of a request.
    seconds, store_process.HELLO_SECONDS = store_process.HELLO_SECONDS, 0.1
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0credit_dp-test-{os.getpid()}")
    listener.listen()
    try:
        relay = store_process.Relay(listener, ("127.0.0.1", server.port), 60.0)
        assert relay.connect_server() == "direct"
    finally:
        store_process.HELLO_SECONDS = seconds
        listener.close()
        relay.ports.close()


def test_a_relay_of_another_user_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, shared: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_process, "peer_user", lambda peer: os.getuid() + 1)
    store, link = join_shared_store(TWO_NODES[3], "127.0.0.1", shared.port, {})
    assert link == StoreLink(server=("127.0.0.1", shared.port))
    store.set("a rank that connects itself", "x")
    assert shared.stores[2].get("a rank that connects itself") == b"x"
    assert "connects to the store at 127.0.0.1" in caplog.text


def test_a_relay_serves_its_own_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection to its port is looked up, over IPv4 and as torch's clients have them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
            with socket.socket(family) as client:
                client.connect((host, listener.getsockname()[1]))
                accepted, _ = listener.accept()
                with accepted:
                    assert store_process.user_of_connection(accepted) == os.getuid()
        assert store_process.knows_peers(listener)
        monkeypatch.setattr(store_process, "user_of_connection", lambda peer: None)
        assert not store_process.knows_peers(listener)


def test_a_rank_0_that_does_not_come_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "GROUP_TIMEOUT", timedelta(seconds=0.5))
    port = free_port()
    line = rf"^MASTER_ADDR: this node can't reach rank 0 at 127\.0\.0\.1:{port} \(.*refused\)"
    with pytest.raises(UserError, match=line):
        join_shared_store(TWO_NODES[2], "127.0.0.1", port, {})


def test_a_relay_that_no_rank_asks_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as asked:
        asked.bind(f"\0credit_dp-unasked-{os.getpid()}")
        asked.listen()
        address = ["127.0.0.1", str(server.getsockname()[1])]
        process = shared_store.start_process(["relay"], [asked], [*address, "0.5"])
        with server.accept()[0] as peer:
            peer.recv(100)
            peer.sendall(store_process.HELLO)
            assert process.wait(30) == 0


def test_a_store_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_process, "__file__", "/absent/store_process.py")
    message = "CREDIT_DP_SHARED_STORE: .* does not start; its exit code is 2"
    with pytest.raises(UserError, match=message):
        join_shared_store(TWO_NODES[0], "127.0.0.1", free_port(), {})


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"^MASTER_PORT: .* port {port} .Address already in"):
            join_shared_store(TWO_NODES[0], "127.0.0.1", port, {})


def test_a_store_beside_torchruns_agent_ends_with_it() -> None:
    """Of the agent's store it needs one connection, and no key."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = Stores(UNDER_TORCHRUN, agent.port)
    keys = agent.num_keys()
    stores.stores[3].set("a", "1")
    assert stores.stores[1].get("a") == b"1"
    server = ("127.0.0.1", shared_store.port_beside_agent(agent.port))
    assert {link.server for link in stores.links} == {server}
    assert agent.num_keys() == keys
    # One of the agent itself, and one of the process that keeps the store.
    assert connections(agent.port) == 2
    assert connections(server[1]) == 3  # of two relays, and rank 0
    del agent
    for process in (link.process for link in stores.links if link.process):
        assert process.wait(30) == 0
    for store in stores.stores:
        with pytest.raises(RuntimeError):
            store.get("a")
    stores.close()


def test_the_port_beside_an_agent_is_that_of_no_other() -> None:
    ports = range(1, 2**16)
    beside = [shared_store.port_beside_agent(port) for port in ports]
    assert all(20_000 <= port < 32_000 for port in beside)
    assert all(one != other for one, other in zip(ports, beside, strict=True))
    assert len(set(beside[29_000:41_000])) == 12_000


@pytest.mark.parametrize("listens", [True, False])
def test_an_agent_that_ends_before_rank_0_has_come_is_one_line(listens: bool) -> None:
    """As when rank 0 has failed while it started: nobody waits for 10 minutes."""
    port = free_port()
    with ExitStack() as stack:
        if listens:  # it ends while the relay waits
            agent = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            closing = threading.Thread(target=lambda: agent.accept()[0].close())
            closing.start()
            stack.callback(closing.join)
        line = (
            r"^MASTER_ADDR: .* reach rank 0 at 127\.0\.0\.1:\d+ \(torchrun's agent there has ended"
        )
        with pytest.raises(UserError, match=line):
            join_shared_store(RankInfo(1, 2, 0, 1, 1), "127.0.0.1", port, UNDER_TORCHRUN)


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("192.0.2.1", r"^MASTER_ADDR: rank 0 runs on .*, which has no address 192\.0\.2\.1: "),
        ("127.0.0.1", r"^MASTER_ADDR: no torchrun answers rank 0 at 127\.0\.0\.1:\d+ \(.*refused"),
    ],
)
def test_rank_0_needs_the_agent_on_its_host(host: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        join_shared_store(TWO_NODES[0], host, free_port(), UNDER_TORCHRUN)


def test_runs_nodes_and_attempts_have_relays_of_their_own() -> None:
    rank = TWO_NODES[2]
    names = [
        shared_store.relay_name(ranks, address, port, environment)
        for ranks, address, port, environment in [
            (rank, "a", 1, {}),
            (TWO_NODES[0], "a", 1, {}),
            (rank, "b", 1, {}),
            (rank, "a", 2, {}),
            (rank, "a", 1, {"SLURM_JOB_ID": "7"}),
            (rank, "a", 1, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        ]
    ]
    assert len(set(names)) == 6
    assert shared_store.relay_name(TWO_NODES[3], "a", 1, {}) == names[0]
