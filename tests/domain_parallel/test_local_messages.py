"""Messages between ranks of one machine arrive whole and in order, or raise an error."""

import gc
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from credit_dp.distributed.process_groups import FEW_FILES
from credit_dp.domain_parallel import local_messages
from credit_dp.domain_parallel.local_messages import LocalMessages
from credit_dp.domain_parallel.transport import SMALL_MESSAGE_BYTES, GroupTransport
from tests.ranks import cpu_only, on_processes

pytestmark = cpu_only("nccl sends messages of GPUs")

LARGE = 3_000_000  # bytes, several times what the system takes at once


def pair(timeout=30.0):
    """Return the messages of two ranks of this process."""
    north, south = socket.socketpair()
    return LocalMessages(0, {1: north}, timeout), LocalMessages(1, {0: south}, timeout)


def message(number, size):
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(number)).byte()


def swap(messages, rank, sizes, order):
    """Start all exchanges, then finish them in any order; return what was received."""
    received = [torch.zeros(size, dtype=torch.uint8) for size, _ in sizes]
    finishes = []
    for number, (_, outgoing) in enumerate(sizes):
        sent = message(2 * number + rank, outgoing)
        finishes.append(messages.start([(1 - rank, sent)], [(1 - rank, received[number])]))
    for number in order:
        finishes[number]()
    return received


@given(data=st.data())
def test_messages_of_any_size_arrive_whatever_the_order_of_waiting(data):
    size = st.sampled_from([0, 1, 7, 4096, 200_000, LARGE])
    sizes = data.draw(st.lists(st.tuples(size, size), min_size=1, max_size=4))
    orders = [data.draw(st.permutations(range(len(sizes)))) for _ in range(2)]
    of_ranks = pair()
    found = {}

    def run(rank):
        own = sizes if rank == 0 else [(b, a) for a, b in sizes]
        found[rank] = swap(of_ranks[rank], rank, own, orders[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        for number, x in enumerate(found[rank]):
            torch.testing.assert_close(x, message(2 * number + 1 - rank, len(x)), rtol=0, atol=0)


def test_what_others_wait_for_is_sent_while_this_rank_waits():
    """Rank 0 has more to send to rank 2 than fits, which rank 2 needs before it sends to rank 1."""
    sockets = {(a, b): None for a in range(3) for b in range(3) if a != b}
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        sockets[a, b], sockets[b, a] = socket.socketpair()
    ranks = [
        LocalMessages(r, {b: s for (a, b), s in sockets.items() if a == r}, 30.0) for r in range(3)
    ]
    x, y = torch.ones(LARGE), torch.zeros(LARGE)
    token, got, last = torch.ones(1), torch.zeros(1), torch.zeros(1)

    def rank_1():
        ranks[1].start([], [(2, got)])()
        ranks[1].start([(0, got)], [])()

    def rank_2():
        ranks[2].start([], [(0, y)])()
        ranks[2].start([(1, token)], [])()

    others = [threading.Thread(target=rank) for rank in (rank_1, rank_2)]
    for thread in others:
        thread.start()
    sent = ranks[0].start([(2, x)], [])
    ranks[0].start([], [(1, last)])()
    sent()
    for thread in others:
        thread.join(30)
    assert last == 1
    assert y.equal(x)


def test_a_rank_that_has_ended_is_an_error():
    north, south = pair()
    finish = north.start([], [(1, torch.zeros(3))])
    del south
    gc.collect()
    with pytest.raises(RuntimeError, match="rank 0 of the group: rank 1 closed its connection"):
        finish()
    with pytest.raises(RuntimeError, match="rank 1 closed its connection"):
        north.start([(1, torch.zeros(3))], [])


def test_a_rank_that_does_not_come_in_time_is_an_error():
    north, _south = pair(timeout=0.1)
    with pytest.raises(RuntimeError, match="from or to rank 1 of the group in"):
        north.start([], [(1, torch.zeros(3))])()
    with pytest.raises(ValueError, match="contiguous"):
        north.start([(1, torch.zeros(3, 3).T)], [])


def test_a_rank_that_ends_while_it_connects_is_no_other_rank():
    with ExitStack() as stack:
        listener, path = local_messages._listen(stack)
        for written in (b"", b"\0"):
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(path)
                other.sendall(written)
            with pytest.raises(ConnectionError, match="has connected and ended"):
                local_messages._accept(listener)


def test_a_message_of_another_size_is_an_error():
    """As from ranks whose batches or dtypes differ: the next message would follow at once."""
    for sent, expected in [(1, 2), (2, 1), (0, 1), (1, 0), (LARGE, 3)]:
        north, south = pair()
        north.start([(1, torch.zeros(sent)), (1, torch.zeros(sent))], [])
        line = f"rank 1 of the group: expects a message of {4 * expected} bytes from rank 0, got "
        with pytest.raises(RuntimeError, match=f"{line}{4 * sent}"):
            south.start([], [(0, torch.zeros(expected))])()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_tensor_without_memory_is_an_error():
    north, _south = pair()
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(ValueError, match="messages have memory, got a FakeTensor without"):
        north.start([(1, fake)], [])


def send_to_closed_connection(manager):
    """Return the error of a program that a write to a closed pipe would end."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        north, south = pair()
        del south
        gc.collect()
        with pytest.raises(RuntimeError) as caught:
            north.start([(1, torch.zeros(3))], [])
        return str(caught.value)
    finally:
        signal.signal(signal.SIGPIPE, before)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "MSG_NOSIGNAL"), reason="the system has no such flag")
def test_a_closed_connection_ends_no_program():
    line = "rank 0 of the group: rank 1 closed its connection"
    assert on_processes(3, send_to_closed_connection) == [line] * 3


def results(transport, seed=7):
    """Return what this rank gets of exchanges and collectives of many types and sizes."""
    peers = [peer for peer in range(transport.size) if peer != transport.rank]
    found = []
    for number, dtype in enumerate(
        [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int64]
    ):
        sent = [torch.full((3, 5), transport.rank + number).to(dtype) for _ in peers]
        received = [torch.zeros(3, 5, dtype=dtype) for _ in peers]
        transport.start(
            list(zip(peers, sent, strict=True)), list(zip(peers, received, strict=True))
        )()
        found += received
    generator = torch.Generator().manual_seed(seed + transport.rank)
    for entries in (1, 5, SMALL_MESSAGE_BYTES // 8, SMALL_MESSAGE_BYTES // 8 + 1):
        x = torch.randn(entries, generator=generator, dtype=torch.float64)
        found += [transport.all_gather(x), transport.all_reduce(x)]
    found.append(transport.all_gather(torch.tensor(transport.rank)))
    return found


def reached(transport):
    """Return the ranks to which there is a connection."""
    return [peer for peer in range(transport.size) if transport._local.reach(peer)]


def over_group(manager):
    transport = GroupTransport(manager.domain_group)
    transport._local = None
    return results(transport)


def over_sockets(manager):
    transport = GroupTransport(manager.domain_group)
    return reached(transport), results(transport)


def on_two_machines(manager):
    """Ranks 0 and 1 are on one machine, rank 2 on another."""
    machine = b"%016d" % (manager.domain_rank // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_messages, "_machine", lambda: machine)
        return over_sockets(manager)


def near_only(manager):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_messages, "MOST_DISTANT", 1)
        return over_sockets(manager)


def without_folder(manager):
    """Rank 1 can't listen, as the path of its folder is too long, but connects to rank 0."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        long_path = Path(folder, "long" * 30)
        long_path.mkdir()
        if manager.domain_rank == 1:
            patch.setattr("tempfile.tempdir", str(long_path))
            patch.setattr("credit_dp.files.LONGEST_ROOT", 1000)  # as if nothing else were writable
        return over_sockets(manager)


def with_few_files(manager):
    """Rank 1 may open fewer files than the others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if manager.domain_rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, limits[1]))
    try:
        return over_sockets(manager)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


WAYS = [
    (over_sockets, [[1, 2], [0, 2], [0, 1]]),
    (on_two_machines, [[1], [0], []]),
    (near_only, [[1], [0, 2], [1]]),
    (without_folder, [[1, 2], [0], [0]]),
    (with_few_files, [[2], [], [0]]),
]


def on_every_way(manager):
    return over_group(manager), [way(manager) for way, _ in WAYS]


def test_messages_are_the_same_on_any_way():
    for rank, (expected, found) in enumerate(on_processes(3, on_every_way)):
        for (way, reaches), (peers, values) in zip(WAYS, found, strict=True):
            assert peers == reaches[rank], way
            for a, b in zip(values, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-15, atol=1e-15)


def open_files(manager):
    """Return the numbers of open files before, with and after a transport."""

    def number():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # closes what other tests have left
    numbers = [number()]
    transport = GroupTransport(manager.domain_group)
    numbers.append(number())
    del transport
    gc.collect()
    return [*numbers, number()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_connections_close_with_their_transport():
    for before, open_meanwhile, after in on_processes(3, open_files):
        assert open_meanwhile == before + 2
        assert after == before
