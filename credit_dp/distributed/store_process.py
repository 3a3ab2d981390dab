"""The processes that keep the rendezvous store of a run on several nodes.

`shared_store` starts them by the path of this file, which therefore imports nothing but Python's
own library: it is running within 30 ms, and takes 14 MB. There are two kinds.

- The *server*, beside rank 0, keeps keys and values. Its clients are `torch.distributed.TCPStore`
  of the ranks, so that it answers in the protocol of torch's own server (torch 2.11 to 2.13).
- A *relay* on each node carries the connections of the node's ranks over one connection to the
  server. It does not read what they send: a frame is the number of a local connection, the number
  of bytes, and these bytes; no bytes mean that the connection has ended.

Neither is a rank. A rank that is killed takes no other rank's connection along, so that the others
can still agree on who reports it.

What a process accepts from others has limits. A relay serves the processes of its own user alone.
Ranks request its port at a socket of the `AF_UNIX` family, for which Linux knows the peer's user;
of that port, on the loopback interface, Linux lists the user of each connection. The server listens
on all interfaces, as torch's does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import final

# Of torch's protocol: the first byte of a request. All numbers are little-endian.
(
    VALIDATE,
    SET,
    COMPARE_SET,
    GET,
    ADD,
    CHECK,
    WAIT,
    NUM_KEYS,
    DELETE_KEY,
    APPEND,
    MULTI_GET,
    MULTI_SET,
    CANCEL_WAIT,
    PING,
    QUEUE_PUSH,
    QUEUE_POP,
    QUEUE_LEN,
    LIST_KEYS,
    BARRIER,
) = range(19)
MAGIC_NUMBER = 0x3C85F7CE  # follows VALIDATE
STORE_NONCE = b"ping"  # a server returns it
READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
# The same limits as torch's server has, in bytes and keys, and one for a whole request.
MAX_KEY_BYTES = 8 * 1024
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
MAX_REQUEST_BYTES = 256 * 1024 * 1024

# By which a relay and the server know each other; no client of torch begins so.
HELLO = b"\xffcredit_dp store 1\n"
STARTED = b"+"  # what the server tells rank 0
FRAME = struct.Struct("<II")  # number of the connection, bytes
MAX_FRAME_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024

# Seconds.
# A server that is busy answers later than one that is not ours.
HELLO_SECONDS = 60.0
RETRY_SECONDS = 0.2
ERROR_SECONDS = 1.0


class ProtocolError(Exception):
    """A peer sent what the protocol does not have."""


# Connections


@final
class Loop:
    """Calls functions when sockets are ready; all of this process runs in one thread."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def listen(self, server: socket.socket, on_accept: Callable[[socket.socket], None]) -> None:
        """Call `on_accept` with each connection that arrives."""
        server.setblocking(False)

        def accept(_: int) -> None:
            try:
                peer, _address = server.accept()
            except OSError as error:  # the peer has gone, or no descriptor is left for now
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(RETRY_SECONDS)
                return
            on_accept(peer)

        self.selector.register(server, selectors.EVENT_READ, accept)

    def step(self, timeout: float | None) -> None:
        """Wait for events, at most `timeout` seconds, and handle them."""
        for key, events in self.selector.select(timeout):
            # One of the events before may have closed this socket.
            current = self.selector.get_map().get(key.fd)
            if current is not None and current.fileobj is key.fileobj:
                current.data(events)


@final
class Connection:
    """A socket that never blocks: what can't be sent yet is kept."""

    def __init__(
        self,
        loop: Loop,
        peer: socket.socket,
        on_bytes: Callable[[bytes], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.selector = loop.selector
        self.peer = peer
        self.on_bytes = on_bytes
        self.on_close = on_close
        self.unsent = bytearray()
        self.closed = False
        peer.setblocking(False)
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.selector.register(peer, selectors.EVENT_READ, self._handle)

    def send(self, data: bytes) -> None:
        """Send bytes now or later."""
        if self.closed:
            return
        self.unsent += data
        self._send_unsent()

    def close(self) -> None:
        """Close the socket, and call `on_close`, once."""
        if not self.closed:
            self.closed = True
            self.selector.unregister(self.peer)
            self.peer.close()
            self.on_close()

    def _handle(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send_unsent()
        if events & selectors.EVENT_READ and not self.closed:
            try:
                data = self.peer.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                if data:
                    self.on_bytes(data)
                    return
            except ProtocolError:
                pass
            self.close()

    def _send_unsent(self) -> None:
        before = bool(self.unsent)
        try:
            while self.unsent:
                del self.unsent[: self.peer.send(self.unsent[:MAX_FRAME_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if before:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
            if self.selector.get_key(self.peer).events != wanted:
                self.selector.modify(self.peer, wanted, self._handle)


def frames(channel: int, data: bytes) -> bytes:
    """Return the frames of some bytes of a connection; of none: that it has ended."""
    parts = []
    for start in range(0, max(1, len(data)), MAX_FRAME_BYTES):
        part = data[start : start + MAX_FRAME_BYTES]
        parts += [FRAME.pack(channel, len(part)), part]
    return b"".join(parts)


def split_frames(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Take the complete frames out of a buffer: connections, and bytes of each.

    Raises:
        ProtocolError: a frame is too long.
    """
    found = []
    start = 0
    while len(buffer) - start >= FRAME.size:
        channel, length = FRAME.unpack_from(buffer, start)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes")
        end = start + FRAME.size + length
        if len(buffer) < end:
            break
        found.append((channel, bytes(buffer[start + FRAME.size : end])))
        start = end
    del buffer[:start]
    return found


# The store


class IncompleteError(Exception):
    """The rest of a request has not arrived yet."""


@final
class Request:
    """Reads the parts of a request from the bytes that have arrived."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.offset = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.offset + count
        if end > MAX_REQUEST_BYTES:
            raise ProtocolError("too long a request")
        if len(self.data) < end:
            raise IncompleteError
        part = bytes(self.data[self.offset : end])
        self.offset = end
        return part

    def number(self) -> int:
        """Return the next number, of 64 bits."""
        return int.from_bytes(self.take(8), "little", signed=True)

    def text(self, limit: int) -> bytes:
        """Return the next bytes, whose number the request has before them."""
        length = self.number()
        if not 0 <= length <= limit:
            raise ProtocolError(f"{length} bytes")
        return self.take(length)

    def key(self) -> bytes:
        """Return the next key."""
        return self.text(MAX_KEY_BYTES)

    def value(self) -> bytes:
        """Return the next value."""
        return self.text(MAX_VALUE_BYTES)

    def count(self) -> int:
        """Return the number of keys that follow."""
        count = self.number()
        if not 0 <= count <= MAX_KEYS:
            raise ProtocolError(f"{count} keys")
        return count

    def key_list(self) -> list[bytes]:
        """Return a list of keys."""
        return [self.key() for _ in range(self.count())]


def number_bytes(number: int) -> bytes:
    """Return a number as torch's protocol sends it."""
    try:
        return number.to_bytes(8, "little", signed=True)
    except OverflowError as error:
        raise ProtocolError(str(error)) from error


def ping() -> bytes:
    """Return the first bytes of a client that a server answers at once."""
    return bytes([VALIDATE]) + MAGIC_NUMBER.to_bytes(4, "little") + bytes([PING]) + STORE_NONCE


def text_bytes(value: bytes) -> bytes:
    """Return bytes with their length in front."""
    return number_bytes(len(value)) + value


def counter_value(value: bytes) -> int:
    """Return the number in a value that counts."""
    try:
        return int(value)
    except ValueError as error:
        raise ProtocolError("a counter that is not a number") from error


@final
class Store:
    """Keys and values, queues, and who waits for which key."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waiting: dict[bytes, list[Client]] = {}

    def has(self, key: bytes) -> bool:
        """Whether a key has a value, or a queue that is not empty."""
        return key in self.values or bool(self.queues.get(key))

    def write(self, key: bytes, value: bytes) -> None:
        """Write a value, and wake the clients that wait for it."""
        self.values[key] = value
        self.wake(key)

    def wake(self, key: bytes, at_most: int | None = None) -> None:
        """Answer the clients that wait for a key: all of them, or the first `at_most`."""
        clients = self.waiting.pop(key, [])
        count = len(clients) if at_most is None else at_most
        if clients[count:]:
            self.waiting[key] = clients[count:]
        for client in clients[:count]:
            client.missing.discard(key)
            if not client.missing:
                client.send(STOP_WAITING)

    def wait(self, client: Client, keys: set[bytes]) -> None:
        """Let a client wait for keys of which none is there."""
        client.missing = keys
        for key in keys:
            self.waiting.setdefault(key, []).append(client)

    def forget(self, client: Client) -> None:
        """Let a client wait no longer."""
        for key in client.missing:
            clients = [other for other in self.waiting.pop(key, []) if other is not client]
            if clients:
                self.waiting[key] = clients
        client.missing = set()


@final
class Client:
    """One connection of a rank's `TCPStore`: reads requests, and answers them."""

    def __init__(self, store: Store, send: Callable[[bytes], None]) -> None:
        self.store = store
        self.send = send
        self.unread = bytearray()
        self.missing: set[bytes] = set()  # keys that it waits for
        self.validated = False

    def receive(self, data: bytes) -> None:
        """Answer the requests that are complete.

        Raises:
            ProtocolError: the peer is no `TCPStore` of a torch that is known here.
        """
        self.unread += data
        while self.unread:
            request = Request(self.unread)
            try:
                answer = self.answer(request)
            except IncompleteError:
                return
            del self.unread[: request.offset]
            if answer:
                self.send(answer)

    def close(self) -> None:
        """Forget what it waits for: its connection has ended."""
        self.store.forget(self)

    def answer(self, request: Request) -> bytes:
        """Return the answer to a request; changes nothing if it is not complete.

        Raises:
            IncompleteError: the rest has not arrived.
            ProtocolError: there is no such request.
        """
        store = self.store
        kind = request.take(1)[0]
        if not self.validated:
            if kind != VALIDATE or request.take(4) != MAGIC_NUMBER.to_bytes(4, "little"):
                raise ProtocolError("no client of torch's store")
            self.validated = True
            return b""
        if kind == PING:
            return request.take(4)
        if kind == SET:
            key, value = request.key(), request.value()
            store.write(key, value)
            return b""
        if kind == GET:
            return text_bytes(store.values.get(request.key(), b""))
        if kind == WAIT:
            return self._wait(request.key_list())
        if kind == CHECK:
            return READY if all(map(store.has, request.key_list())) else NOT_READY
        if kind == ADD:
            key, amount = request.key(), request.number()
            total = counter_value(store.values.get(key, b"0")) + amount
            answer = number_bytes(total)
            store.write(key, str(total).encode())
            return answer
        if kind == COMPARE_SET:
            return self._compare_set(request.key(), request.value(), request.value())
        if kind == CANCEL_WAIT:
            store.forget(self)
            return WAIT_CANCELED
        if kind == MULTI_GET:
            return b"".join(text_bytes(store.values.get(key, b"")) for key in request.key_list())
        if kind == MULTI_SET:
            pairs = [(request.key(), request.value()) for _ in range(request.count())]
            for key, value in pairs:
                store.write(key, value)
            return b""
        if kind == APPEND:
            key, value = request.key(), request.value()
            store.write(key, store.values.get(key, b"") + value)
            return b""
        if kind == DELETE_KEY:
            return number_bytes(int(store.values.pop(request.key(), None) is not None))
        return self._answer_rarely(kind, request)

    def _answer_rarely(self, kind: int, request: Request) -> bytes:
        """Return the answer to a request that few programs make."""
        store = self.store
        if kind == NUM_KEYS:
            return number_bytes(len(store.values))
        if kind == LIST_KEYS:
            return number_bytes(len(store.values)) + b"".join(map(text_bytes, store.values))
        if kind == BARRIER:
            key, size = request.key(), request.number()
            count = counter_value(store.values.get(key, b"0")) + 1
            store.values[key] = str(count).encode()
            if count < size:
                store.wait(self, {key})
                return b""
            store.wake(key)
            return STOP_WAITING
        if kind == QUEUE_PUSH:
            key, value = request.key(), request.value()
            store.queues.setdefault(key, deque()).append(value)
            store.wake(key, at_most=1)
            return b""
        if kind == QUEUE_POP:
            queue = store.queues.get(request.key()) or deque()
            return number_bytes(len(queue)) + (text_bytes(queue.popleft()) if queue else b"")
        if kind == QUEUE_LEN:
            return number_bytes(len(store.queues.get(request.key(), ())))
        raise ProtocolError(f"request {kind}")

    def _wait(self, keys: list[bytes]) -> bytes:
        missing = {key for key in keys if not self.store.has(key)}
        if not missing:
            return STOP_WAITING
        self.store.wait(self, missing)
        return b""

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        values = self.store.values
        # An absent key equals an empty value; if it should have another, torch returns that.
        current = values.get(key, b"" if not expected else None)
        if current == expected:
            self.store.write(key, desired)
            return text_bytes(desired)
        return text_bytes(expected if current is None else current)


# The server


@final
class Server:
    """Answers ranks that connect themselves, and those behind relays."""

    def __init__(
        self,
        listener: socket.socket,
        lifeline: socket.socket,
        grace: float,
        agent: socket.socket | None = None,
    ) -> None:
        """Listen for ranks.

        Args:
            listener: at which they connect.
            lifeline: closes when rank 0 ends.
            grace: seconds in which the others can report the death of rank 0.
            agent: closes when the agent of torchrun beside rank 0 ends; None: there is none.
        """
        self.grace = grace
        self.loop = Loop()
        self.store = Store()
        self.sessions: set[Session] = set()
        self.orphaned_at: float | None = None
        self.loop.listen(listener, self.accept)
        # Rank 0 holds the other end, waits for the first byte, and never writes.
        Connection(self.loop, lifeline, lambda _: None, self.become_orphan).send(STARTED)
        if agent is not None:
            Connection(self.loop, agent, lambda _: None, self.lose_agent)

    def accept(self, peer: socket.socket) -> None:
        """Serve a new connection."""
        self.sessions.add(Session(self, peer))

    def become_orphan(self) -> None:
        """Rank 0 has ended."""
        self.orphaned_at = time.monotonic()

    def lose_agent(self) -> None:
        """torchrun's agent has ended: all ranks notice this by the end of the store."""
        self.grace = 0.0
        self.become_orphan()

    def run(self) -> None:
        """Serve until rank 0 has ended, then for the time of grace until no client is left."""
        while self.orphaned_at is None:
            self.loop.step(None)
        while self.sessions and time.monotonic() < self.orphaned_at + self.grace:
            self.loop.step(RETRY_SECONDS)


@final
class Session:
    """A connection to the server: that of a rank, or of a relay with many of them."""

    def __init__(self, server: Server, peer: socket.socket) -> None:
        self.server = server
        self.connection = Connection(server.loop, peer, self.receive, self.close)
        self.clients: dict[int, Client] = {}
        self.unread = bytearray()
        self.of_relay: bool | None = None  # unknown before its first bytes

    def receive(self, data: bytes) -> None:
        """Pass bytes to the client that sent them."""
        if self.of_relay is None:
            self.unread += data
            if HELLO.startswith(self.unread[: len(HELLO)]):
                if len(self.unread) < len(HELLO):
                    return
                self.of_relay = True
                data = bytes(self.unread[len(HELLO) :])
                self.connection.send(HELLO)
            else:
                self.of_relay = False
                self.clients[0] = Client(self.server.store, self.connection.send)
                data = bytes(self.unread)
            self.unread.clear()
        if not self.of_relay:
            self.clients[0].receive(data)
            return
        self.unread += data
        for channel, part in split_frames(self.unread):
            if not self.connection.closed:  # as an answer to the last one may have found
                self.receive_from_channel(channel, part)

    def receive_from_channel(self, channel: int, data: bytes) -> None:
        """Pass bytes to the client of a relay that sent them; no bytes: it has ended."""
        if not data:
            client = self.clients.pop(channel, None)
            if client is not None:
                client.close()
            return
        if channel not in self.clients:

            def send(answer: bytes) -> None:
                self.connection.send(frames(channel, answer))

            self.clients[channel] = Client(self.server.store, send)
        try:
            self.clients[channel].receive(data)
        except ProtocolError:  # of this client alone
            self.clients.pop(channel).close()
            self.connection.send(frames(channel, b""))

    def close(self) -> None:
        """Forget its clients."""
        for client in self.clients.values():
            client.close()
        self.server.sessions.discard(self)


# A relay


@final
class Relay:
    """Carries the connections of this node's ranks over one to the server."""

    def __init__(
        self,
        listener: socket.socket,
        address: tuple[str, int],
        patience: float,
        agent: tuple[str, int] | None = None,
    ) -> None:
        """Listen for ranks; `run` connects to the server.

        Args:
            listener: at which ranks request the port; it belongs to the `AF_UNIX` family.
            address: of the server.
            patience: seconds after which a server that can't be reached is given up, and ranks that
                never request the port: the one that started this process may have been killed.
            agent: host and port of the agent of torchrun beside rank 0, without which the server is
                given up at once; None: there is none.
        """
        self.loop = Loop()
        self.address = address
        self.agent = agent
        self.end = time.monotonic() + patience
        self.ranks: set[Connection] = set()  # from the request for the port until a rank ends
        self.seen_ranks = False
        self.answer = b""  # to ranks; empty until there is a connection to the server
        self.ports = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self.ports.getsockname()[1]
        self.channels: dict[int, Connection] = {}
        self.channel_count = 0
        self.unread = bytearray()
        self.server: Connection | None = None
        self.loop.listen(listener, self.accept_rank)

    def run(self) -> None:
        """Connect to the server, then relay until it has ended, or all ranks of this node have."""
        answer = "direct" if not knows_peers(self.ports) else self.connect_server()
        self.loop.listen(self.ports, self.accept_channel)
        self.answer = f"{answer}\n".encode()
        for rank in list(self.ranks):
            rank.send(self.answer)
        if answer.startswith("error "):
            # Other ranks of the node may come a little later; still later ones start a relay again.
            end = time.monotonic() + ERROR_SECONDS
            while time.monotonic() < end or (not self.seen_ranks and self.has_ranks()):
                self.loop.step(RETRY_SECONDS)
            return
        while self.has_ranks() and (self.server is None or not self.server.closed):
            self.loop.step(None if self.seen_ranks else RETRY_SECONDS)

    def has_ranks(self) -> bool:
        """Whether a rank may still use this relay."""
        awaited = not self.seen_ranks and time.monotonic() < self.end
        return awaited or bool(self.ranks) or bool(self.channels)

    def connect_server(self) -> str:
        """Return the answer to ranks: `port N`, `direct` or `error TEXT`."""
        agent = None
        while True:
            try:
                if self.agent is not None and agent is None:
                    peer = socket.create_connection(self.agent, timeout=5.0)
                    agent = Connection(self.loop, peer, lambda _: None)
                server = socket.create_connection(self.address, timeout=5.0)
                break
            except OSError as error:
                # An agent listens before it starts ranks.
                refused = isinstance(error, ConnectionRefusedError)
                if self.agent is not None and (agent.closed if agent is not None else refused):
                    return "error torchrun's agent there has ended"
                if time.monotonic() > self.end:
                    return f"error {error.strerror or error}"
            self.loop.step(RETRY_SECONDS)
            if not self.has_ranks():
                sys.exit(1)
        if agent is not None:
            agent.close()  # from now on the server ends with it
        try:
            server.settimeout(HELLO_SECONDS)
            server.sendall(HELLO)
            answer = b""
            while len(answer) < len(HELLO):
                part = server.recv(len(HELLO) - len(answer))
                if not part:
                    break
                answer += part
        except OSError:
            answer = b""
        if answer != HELLO:  # torch's own store
            server.close()
            return "direct"
        self.server = Connection(self.loop, server, self.receive)
        return f"port {self.port}"

    def accept_rank(self, peer: socket.socket) -> None:
        """Answer a rank of this user, and keep the connection, which ends with the rank."""
        if peer_user(peer) != os.getuid():
            peer.close()
            return
        rank = Connection(self.loop, peer, lambda _: None, lambda: self.ranks.discard(rank))
        self.ranks.add(rank)
        self.seen_ranks = True
        if self.answer:
            rank.send(self.answer)

    def accept_channel(self, peer: socket.socket) -> None:
        """Relay a connection of this user."""
        if self.server is None or user_of_connection(peer) != os.getuid():
            peer.close()
            return
        server = self.server
        self.channel_count += 1
        channel = self.channel_count

        def receive(data: bytes) -> None:
            server.send(frames(channel, data))

        def close() -> None:
            if self.channels.pop(channel, None) is not None:
                server.send(frames(channel, b""))

        self.channels[channel] = Connection(self.loop, peer, receive, close)

    def receive(self, data: bytes) -> None:
        """Pass answers of the server on."""
        self.unread += data
        for channel, part in split_frames(self.unread):
            connection = self.channels.get(channel)
            if connection is not None and part:
                connection.send(part)
            elif connection is not None:
                connection.close()


def peer_user(peer: socket.socket) -> int:
    """Return the user at the other end of a connection of the `AF_UNIX` family, on Linux."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def user_of_connection(peer: socket.socket) -> int | None:
    """Return the user at the other end of a connection over the loopback interface.

    None if Linux does not list it.
    """
    try:
        there, here = peer.getpeername(), peer.getsockname()
    except OSError:
        return None
    # torch's client has a socket for IPv6, on which such addresses begin with MAPPED.
    for table, prefix in (("tcp6", MAPPED), ("tcp", "")):
        ends = [prefix + listed_address(there), prefix + listed_address(here)]
        with contextlib.suppress(OSError), Path("/proc/net", table).open() as lines:
            for line in lines:
                fields = line.split()
                if fields[1:3] == ends:
                    return int(fields[7])
    return None


def listed_word(data: bytes) -> str:
    """Return four bytes of an address as Linux lists them."""
    return f"{int.from_bytes(data, sys.byteorder):08X}"


MAPPED = listed_word(bytes(4)) * 2 + listed_word(b"\0\0\xff\xff")


def listed_address(address: tuple[str, int]) -> str:
    """Return an address and port as Linux lists them."""
    return f"{listed_word(socket.inet_aton(address[0]))}:{address[1]:04X}"


def knows_peers(listener: socket.socket) -> bool:
    """Whether Linux lists the user of a connection to this listener; some sandboxes hide it."""
    try:
        with socket.create_connection(listener.getsockname(), timeout=5.0):
            accepted, _ = listener.accept()
            with accepted:
                return user_of_connection(accepted) == os.getuid()
    except OSError:
        return False


def main(arguments: list[str]) -> None:
    """Run `server LISTENER LIFELINE [AGENT] GRACE` or a relay.

    That is `relay LISTENER HOST PORT PATIENCE [AGENT_HOST AGENT_PORT]`. LISTENER, LIFELINE and
    AGENT are numbers of descriptors.
    """
    # Launchers send signals to all processes of a job. The ranks decide when the run ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kind, listener, *others = arguments
    if kind == "server":
        *numbers, grace = others
        lifeline, *agents = (socket.socket(fileno=int(number)) for number in numbers)
        Server(socket.socket(fileno=int(listener)), lifeline, float(grace), *agents).run()
    else:
        host, port, patience, *rest = others
        agent = (rest[0], int(rest[1])) if rest else None
        address = (host, int(port))
        Relay(socket.socket(fileno=int(listener)), address, float(patience), agent).run()


if __name__ == "__main__":
    main(sys.argv[1:])
