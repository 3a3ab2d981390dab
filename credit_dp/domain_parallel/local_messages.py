"""Messages between ranks of one machine that compute on CPUs, over Unix sockets.

Gloo's threads carry a message only when both sides have called: the receiver's thread answers the
sender's, and then the sender's sends. Ranks use all cores to compute, so that each of these threads
waits for a core, for up to milliseconds. Here the system keeps what was sent until the receiver
reads it: a rank sends in `start`, in one system call, and no other thread has to run.

Ranks meet as follows: each listens at a path of its own, and learns those of the others in a
collective of their group. A rank connects to those before it and tells in a second collective to
which of them it could; these accept as many, and tell in a third whom they have accepted. Ranks of
other machines, and far ones, stay without a connection: messages to them go through the process
group.
"""

from __future__ import annotations

import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from ctypes import Array, c_char
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from credit_dp.distributed.process_groups import may_open_few_files
from credit_dp.files import temporary_folder

# Ranks farther apart than this exchange few rows, and each connection is a file.
MOST_DISTANT = 7
SECONDS_TO_MEET = 60.0
# Before a rank sleeps until something comes: waking up takes as long as some ten tries.
TRIES = 20
# That the system is to keep for each receiver; many allow no more than 208 KB.
SEND_BYTES = 2**22
_PATH_BYTES = 100  # a Unix socket's path may have 103 bytes on macOS, 107 on Linux
_MACHINE_BYTES = 16
_RANK_BYTES = 4
_SIZE_BYTES = 8  # of a message's size, which is sent before its values
# A program may have set SIGPIPE to end it; macOS lacks the flag.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


@final
class _Message:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # keeps the memory alive
        values = _bytes_of(tensor)
        self.length = len(values)
        # The receiver overwrites it with what the sender has written here.
        self.size = bytearray(self.length.to_bytes(_SIZE_BYTES, "little"))
        self.rest = [memoryview(self.size), values]

    def skip(self, count: int) -> None:
        rest = self.rest
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]

    @property
    def sent_length(self) -> int:
        """The number of bytes that the sender sends; the expected one until its size has come."""
        return self.length if len(self.rest) > 1 else int.from_bytes(self.size, "little")


@final
class _Connection:
    """The messages to and from one rank, each in the order of their starts."""

    def __init__(self, rank: int, peer: int, connected: socket.socket) -> None:
        self.rank = rank
        self.peer = peer
        self.socket = connected
        self.to_send: deque[_Message] = deque()
        self.to_receive: deque[_Message] = deque()
        # Messages whose transfer has ended.
        self.sent = 0
        self.received = 0

    def send(self, tensor: Tensor) -> int:
        self.to_send.append(_Message(tensor))
        goal = self.sent + len(self.to_send)
        if len(self.to_send) == 1:
            self.write()
        return goal

    def receive(self, tensor: Tensor) -> int:
        self.to_receive.append(_Message(tensor))
        return self.received + len(self.to_receive)

    def write(self) -> None:
        while self.to_send:
            message = self.to_send[0]
            while message.rest:
                try:
                    message.skip(self.socket.sendmsg(message.rest, (), _NO_SIGNAL))
                except BlockingIOError:
                    return
                except OSError as error:
                    raise self._lost() from error
            self.to_send.popleft()
            self.sent += 1

    def read(self) -> None:
        while self.to_receive:
            message = self.to_receive[0]
            while message.rest:
                try:
                    received = self.socket.recvmsg_into(message.rest)[0]
                except BlockingIOError:
                    return
                except OSError as error:
                    raise self._lost() from error
                if not received:
                    raise self._lost()
                message.skip(received)
                if message.sent_length != message.length:
                    raise RuntimeError(
                        f"rank {self.rank} of the group: expects a message of {message.length} "
                        f"bytes from rank {self.peer}, got {message.sent_length}. All ranks of a "
                        "group need inputs of the same dtype and, but for their rows, shape."
                    )
            self.to_receive.popleft()
            self.received += 1

    def _lost(self) -> RuntimeError:
        # As gloo's errors, which also follow from the failure of another rank.
        return RuntimeError(
            f"rank {self.rank} of the group: rank {self.peer} closed its connection"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.is_contiguous():
        raise ValueError(f"messages are contiguous, got strides {tensor.stride()}")
    size, address = tensor.nbytes, tensor.data_ptr()
    if size and not address:
        raise ValueError(f"messages have memory, got a {type(tensor).__name__} without")
    # Not through numpy, which lacks bfloat16.
    return memoryview(_memory_type(size).from_address(address)).cast("B")


@lru_cache(4096)  # ctypes would make the type again each time, which takes longer than to send
def _memory_type(size: int) -> type[Array[c_char]]:
    return c_char * size


@final
class LocalMessages:
    """Messages between this rank and others of its machine.

    Args:
        connects_all: whether all ranks of the group are connected to each other, the same on all.
    """

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        timeout: float,
        connects_all: bool = False,
    ) -> None:
        self.connects_all = connects_all
        self._connections = {
            peer: _Connection(rank, peer, connected) for peer, connected in sockets.items()
        }
        self._timeout = timeout
        for connected in sockets.values():
            connected.setblocking(False)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        weakref.finalize(self, _close, list(sockets.values()))

    def reach(self, peer: int) -> bool:
        """Return whether there is a connection; the other rank has the same answer."""
        return peer in self._connections

    def start(
        self, send: Sequence[tuple[int, Tensor]], receive: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        """Start messages, in the same order on both ranks; return a function that waits for them.

        Until it has returned, `receive` is not filled and `send` must not be changed.

        Raises (the returned function too):
            RuntimeError: the other rank has ended, did not come in time, or sends another size.
        """
        connections = self._connections
        incoming = [
            (connections[peer], connections[peer].receive(tensor)) for peer, tensor in receive
        ]
        outgoing = [(connections[peer], connections[peer].send(tensor)) for peer, tensor in send]

        def is_done() -> bool:
            return all([of.received >= goal for of, goal in incoming]) and all(
                [of.sent >= goal for of, goal in outgoing]
            )

        def finish() -> None:
            for connection, _ in incoming:
                connection.read()
            if not is_done():
                self._wait(is_done)

        return finish

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Send and receive what all ranks have started, until this rank has what it waits for.

        Everything, as others may need it before they can send what this rank waits for.
        """
        for _ in range(TRIES):
            for connection in self._connections.values():
                connection.write()
                connection.read()
            if is_done():
                return
        end = time.monotonic() + self._timeout
        while not is_done():
            poll = select.poll()
            active = {}
            for connection in self._connections.values():
                events = select.POLLIN * bool(connection.to_receive)
                events |= select.POLLOUT * bool(connection.to_send)
                if events:
                    poll.register(connection.socket, events)
                    active[connection.socket.fileno()] = connection
            ready = poll.poll(1e3 * max(0.0, end - time.monotonic()))
            if not ready:
                waiting = ", ".join(str(connection.peer) for connection in active.values())
                raise RuntimeError(
                    f"no message from or to rank {waiting} of the group in {self._timeout:g} s"
                )
            for descriptor, _ in ready:
                active[descriptor].write()
                active[descriptor].read()


def _close(sockets: Sequence[socket.socket]) -> None:
    for connected in sockets:
        connected.close()


def connect_local_ranks(
    rank: int, size: int, gather: Callable[[Tensor], Tensor], timeout: float
) -> LocalMessages:
    """Connect the ranks of a group that are on one machine; collective."""
    near = [peer for peer in range(size) if 0 < abs(peer - rank) <= MOST_DISTANT]
    if may_open_few_files():  # the process groups need them
        near = []
    sockets: dict[int, socket.socket] = {}

    def gather_connected() -> Tensor:
        return gather(_as_tensor(bytes(peer in sockets for peer in range(size))))

    with ExitStack() as stack:
        listener, path = _listen(stack) if near else (None, b"")  # before others learn the path
        own = _machine() + path.ljust(_PATH_BYTES, b"\0")
        for peer, row in enumerate(gather(_as_tensor(own)).tolist()):
            machine, peer_path = bytes(row[:_MACHINE_BYTES]), bytes(row[_MACHINE_BYTES:])
            if peer in near and peer < rank and machine == _machine() and any(peer_path):
                with suppress(OSError):  # a container with another folder for temporary files
                    sockets[peer] = _connect(peer_path.rstrip(b"\0"), rank)
        connected = gather_connected()
        if listener is not None:
            for _ in range(int(connected[rank + 1 :, rank].sum())):
                with suppress(OSError):  # no file is left for it
                    peer, accepted = _accept(listener)
                    sockets[peer] = accepted
    connected = gather_connected()
    for peer in [peer for peer in sockets if not connected[peer, rank]]:
        sockets.pop(peer).close()
    # Both ranks of each pair know of the connection, and all ranks know of all.
    connects_all = bool((connected & connected.T).sum() == size * (size - 1))
    return LocalMessages(rank, sockets, timeout, connects_all)


def _listen(stack: ExitStack) -> tuple[socket.socket | None, bytes]:
    try:
        path = bytes(stack.enter_context(temporary_folder()) / "rank")
        if len(path) > _PATH_BYTES:
            return None, b""
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(MOST_DISTANT)
    except (AttributeError, OSError):  # Windows has none; or nothing can be written
        return None, b""
    listener.settimeout(SECONDS_TO_MEET)
    return listener, path


def _connect(path: bytes, rank: int) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(path)
        connected.sendall(rank.to_bytes(_RANK_BYTES, "little"))
    except OSError:
        connected.close()
        raise
    return connected


def _accept(listener: socket.socket) -> tuple[int, socket.socket]:
    accepted, _ = listener.accept()
    accepted.settimeout(SECONDS_TO_MEET)
    try:
        number = accepted.recv(_RANK_BYTES, socket.MSG_WAITALL)
        if len(number) < _RANK_BYTES:
            raise ConnectionError("a rank has connected and ended")
    except OSError:
        accepted.close()
        raise
    return int.from_bytes(number, "little"), accepted


def _machine() -> bytes:
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        name = socket.gethostname()
    return sha256(name.encode()).digest()[:_MACHINE_BYTES]


def _as_tensor(values: bytes) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)
