"""Transports: how the ranks of one domain exchange messages.

`GroupTransport` uses a `torch.distributed` process group and, between CPU ranks of one machine,
sockets; `ThreadTransport` connects ranks that are threads of one process (for tests and
verification), `SingleRankTransport` sends nothing. Every transport has point-to-point messages,
which overlap with computation (`start`), and two collectives, which all ranks have to call in the
same order.

torch's compiler can follow none of this: in compiled code a collective is one of the operators
`credit_dp::all_gather` and `credit_dp::all_reduce`, which find their transport by its name.

`use_batch_scheduling_for_gloo`, at the end, changes how Linux schedules the threads in which gloo
waits for messages.
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import EffectType  # type: ignore[attr-defined]

from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.local_messages import LocalMessages, connect_local_ranks
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.process import EXCHANGE, profile_region, profiled_call
from credit_dp.torch_private import cpu_backend, timeout_of

# Up to this size a collective of more than two ranks is one message from each to each.
SMALL_MESSAGE_BYTES = 2**16
# (rank within the domain, contiguous tensor to send or to receive into)
PeerTensor = tuple[int, Tensor]


@dataclass
class Traffic:
    """The messages and bytes that this rank has sent, counted as they are sent.

    A collective counts its payload once, whatever the algorithm sends.
    """

    messages: int = 0
    bytes: int = 0
    collectives: int = 0
    collective_bytes: int = 0


_numbers = count()
# By name. A transport stays until nobody else holds it.
_transports: WeakValueDictionary[str, Transport] = WeakValueDictionary()


class Transport(ABC):
    """Point-to-point messages and small collectives between the ranks of one domain.

    Args:
        rank: this rank's index within the domain.

    Attributes:
        calls: exchanges and collectives so far, also those in which this rank sends nothing.
        name: by which compiled code finds it.
    """

    def __init__(self, rank: int, size: int) -> None:
        # With what the shapes of its results depend on: torch keeps compiled code on disk.
        self.name = f"transport {next(_numbers)}, rank {rank} of {size}"
        _transports[self.name] = self
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.calls = 0

    def announce_exchange(  # noqa: B027
        self, exchange: RowExchange, x: Tensor, dim: int, backward: bool
    ) -> None:
        """Hook for transports that only count messages: called before all ranks start an exchange.

        Args:
            x: a tensor whose rows have the size of those that are sent.
            backward: whether gradients are returned: then messages go in the opposite direction.
        """

    def announce_sizes(  # noqa: B027
        self, sizes: Sequence[Sequence[int]], partition: RowPartition | None = None
    ) -> None:
        """Hook for transports that only count messages: called before all ranks start to send.

        Args:
            sizes: for each sender the bytes to each receiver; zero bytes are not sent.
            partition: the bands of what is sent, if these are rows.
        """

    def start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        """Start all messages of an exchange at once; return a function that waits for them.

        Until it has returned, `receive` is not filled and `send` must not be changed.
        """
        kept = _kept_messages.get()
        if kept is not None:
            into = [tensor for _, tensor in receive]
            return kept.exchange(into, lambda: self._start_now(send, receive))
        return self._start_now(send, receive)

    def _start_now(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        send = [(peer, plain(tensor)) for peer, tensor in send]
        self.calls += 1
        self.traffic.messages += len(send)
        self.traffic.bytes += sum([tensor.nbytes for _, tensor in send])
        with profile_region(EXCHANGE):
            return profiled_call(EXCHANGE, self._start(send, receive))

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the `x` of every rank, stacked along a new first dimension in rank order."""
        if torch.compiler.is_dynamo_compiling():
            gathered: Tensor = _all_gather_operator(x, self.name)
            return gathered
        return self._collective(self._all_gather, plain(x).contiguous())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, with the same bits on each; `x` is not changed."""
        if torch.compiler.is_dynamo_compiling():
            total: Tensor = _all_reduce_operator(x, self.name)
            return total
        return self._collective(self._all_reduce, plain(x))

    def _collective(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def compute_now() -> Tensor:
            self.calls += 1
            self.traffic.collectives += 1
            self.traffic.collective_bytes += x.nbytes
            with profile_region(EXCHANGE):
                return compute(x)

        kept = _kept_messages.get()
        return compute_now() if kept is None else kept.collective(compute_now)

    @abstractmethod
    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> Tensor: ...

    def _all_reduce(self, x: Tensor) -> Tensor:
        # Every rank adds in rank order, so that rounding is the same on all.
        return self._all_gather(x.contiguous()).sum(0)


def plain(x: Tensor) -> Tensor:
    """Return a tensor whose memory has its values, as messages need it."""
    # torch conjugates and negates when a tensor is read.
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


@final
class ReceivedMessages:
    """What a part of a model received in its forward, for computing it again without messages.

    The second forward makes the same calls in the same order, on every rank: it computes the same
    from the same inputs.
    """

    def __init__(self, path: str = "the model") -> None:
        self.path = path
        self._calls: list[list[Tensor]] = []
        self._next: int | None = None  # the call that is replayed next; None while recording

    @property
    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        return sum(tensor.nbytes for call in self._calls for tensor in call)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep all that is received inside the context."""
        self._next = None
        with self._current():
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Receive all of it again inside the context, from the first call on; nothing is sent."""
        self._next = 0
        with self._current():
            yield

    @contextmanager
    def _current(self) -> Iterator[None]:
        token = _kept_messages.set(self)
        try:
            yield
        finally:
            _kept_messages.reset(token)

    def exchange(
        self, receive: Sequence[Tensor], start: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Start an exchange and keep what it receives, or fill `receive` with what was kept."""
        if self._next is not None:
            kept = self._replayed([tensor.shape for tensor in receive])

            def fill() -> None:
                for tensor, message in zip(receive, kept, strict=True):
                    tensor.copy_(message)

            return fill
        wait = start()
        call: list[Tensor] = []
        self._calls.append(call)  # in the order of starts: others may start before this one ends

        def finish() -> None:
            wait()
            call.extend(map(_own_copy, receive))

        return finish

    def collective(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of a collective, which is kept, or what was kept of it."""
        if self._next is not None:
            (kept,) = self._replayed(None)
            return kept.clone()  # another backward pass may read it again
        result = compute()
        self._calls.append([result.clone()])
        return result

    def _replayed(self, shapes: list[torch.Size] | None) -> list[Tensor]:
        at = self._next or 0
        call = self._calls[at] if at < len(self._calls) else None
        if call is None or (shapes is not None and shapes != [t.shape for t in call]):
            raise UserError(
                f"trainer.checkpoint_activations: {self.path} must exchange the same rows when "
                "backward computes it again, but exchanges others. Set it (or "
                "model.activation_checkpointing) to false."
            )
        self._next = at + 1
        return call


# A context variable and not a global: the ranks may be threads of one process, and backward passes
# of GPUs run in threads of their own.
_kept_messages: ContextVar[ReceivedMessages | None] = ContextVar("kept messages", default=None)


def keeps_messages() -> bool:
    """Return whether what is received now is kept for backward anyway; the same on all ranks."""
    return _kept_messages.get() is not None


def _own_copy(x: Tensor) -> Tensor:
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def transport_named(name: str) -> Transport:
    """Return the transport of this name."""
    return _transports[name]


@torch.library.custom_op("credit_dp::all_gather", mutates_args=())
def _all_gather_operator(x: Tensor, transport: str) -> Tensor:
    # A copy, where one rank would return a view: an operator's output is a tensor of its own.
    return transport_named(transport).all_gather(x).clone(memory_format=torch.contiguous_format)


@_all_gather_operator.register_fake
def _(x: Tensor, transport: str) -> Tensor:
    return x.new_empty((transport_named(transport).size, *x.shape))


@torch.library.custom_op("credit_dp::all_reduce", mutates_args=())
def _all_reduce_operator(x: Tensor, transport: str) -> Tensor:
    return transport_named(transport).all_reduce(x.contiguous())


@_all_reduce_operator.register_fake
def _(x: Tensor, transport: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_transport(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.transport = inputs[1]


def _all_reduce_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _all_reduce_operator(grad, ctx.transport), None


_all_reduce_operator.register_autograd(_all_reduce_gradient, setup_context=_keep_transport)


def keep_order(*operators: Any) -> None:
    """Let the compiler neither drop nor reorder calls of these operators.

    All ranks have to start the same exchanges in the same order, although a compiler may find
    another order best for each rank's sizes.
    """
    for operator in operators:
        operator.register_effect(EffectType.ORDERED)


keep_order(_all_gather_operator, _all_reduce_operator)


@final
class SingleRankTransport(Transport):
    """The transport of a single rank, which owns the complete globe: nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        return lambda: None

    def _all_gather(self, x: Tensor) -> Tensor:
        return x[None]


@final
class DetachedTransport(Transport):
    """The transport of a manager that was unpickled: it has no other ranks and raises errors."""

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        raise self._error()

    def _all_gather(self, x: Tensor) -> Tensor:
        raise self._error()

    def _error(self) -> UserError:
        return UserError(
            f"DomainParallelManager: rank {self.rank} of {self.size} was unpickled and is not "
            "connected to other ranks. Convert the model again with a manager of this process, "
            "after convert_from_domain_parallel."
        )


@final
class GroupTransport(Transport):
    """Messages over a `torch.distributed` process group; collective of its ranks.

    Tensors of CPUs go to ranks of the same machine through `LocalMessages`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group
        # torch addresses the peers of point-to-point messages by their global ranks in any group.
        self._global_ranks = dist.get_process_group_ranks(group)
        self._local: LocalMessages | None = None
        if message_device(group).type == "cpu" and cpu_backend(group).name() == "gloo":
            self._local = connect_local_ranks(
                self.rank, self.size, self._gather_over_group, timeout_of(group)
            )

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        if all([tensor.is_cpu for _, tensor in (*send, *receive)]):
            return self._start_one_by_one(send, receive)
        transfers = [
            dist.P2POp(action, tensor, self._global_ranks[peer], self.group)
            for action, tensors in ((dist.isend, send), (dist.irecv, receive))
            for peer, tensor in tensors
        ]
        # One batch: with nccl, two ranks that both send first and receive later block each other.
        works = dist.batch_isend_irecv(transfers) if transfers else []

        def finish() -> None:
            for work in works:
                work.wait()
            # The list keeps the sent tensors alive until here: some are temporary copies.
            transfers.clear()

        return finish

    def _start_one_by_one(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        local = self._local
        if local is None:
            return self._start_over_group(send, receive)
        if local.connects_all:
            return local.start(send, receive)
        near, far = (
            [
                [(peer, tensor) for peer, tensor in messages if local.reach(peer) == is_near]
                for messages in (send, receive)
            ]
            for is_near in (True, False)
        )
        if not any(far):
            return local.start(send, receive)
        wait_for_far = self._start_over_group(*far)
        wait_for_near = local.start(*near)

        def finish() -> None:
            # This order: gloo's threads also send while nobody waits, sockets take what fits.
            wait_for_near()
            wait_for_far()

        return finish

    def _start_over_group(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        """Start messages as torch does with a batch that the back end can't send as one.

        Without torch's checks, which take as long as to start the messages.
        """
        # Receivers first: gloo sends a message whose receiver waits without asking for it.
        works = [self.group.recv([_real(tensor)], peer, 0) for peer, tensor in receive]
        works += [self.group.send([_real(tensor)], peer, 0) for peer, tensor in send]
        sent = list(send)

        def finish() -> None:
            for work in works:
                work.wait()
            sent.clear()  # kept alive until here: some are temporary copies

        return finish

    def _is_sent_to_each(self, x: Tensor) -> bool:
        """Return whether a collective of `x` is one message to each other rank.

        Gloo's collectives run in a thread of their own, and send more messages, though of many
        ranks not as many bytes.
        """
        if not x.is_cpu or not x.numel():
            return False
        if self.size == 2:
            return True
        is_small = x.numel() * x.element_size() <= SMALL_MESSAGE_BYTES
        return is_small and self._local is not None and self._local.connects_all

    def _from_each_rank(self, x: Tensor) -> list[Tensor]:
        x = x.detach().contiguous()
        gathered = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        received = [(rank, other) for rank, other in enumerate(gathered) if rank != self.rank]
        self._start_one_by_one([(rank, x) for rank, _ in received], received)()
        return gathered

    def _all_gather(self, x: Tensor) -> Tensor:
        if self._is_sent_to_each(x):
            return torch.stack(self._from_each_rank(x))
        return self._gather_over_group(x)

    def _gather_over_group(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        all_gather_single(gathered, x, group=self.group)
        return gathered

    def _all_reduce(self, x: Tensor) -> Tensor:
        if self._is_sent_to_each(x):
            first, second, *others = self._from_each_rank(x)
            return sum(others, first + second)  # in the same order on all ranks
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def all_gather_single(
    gathered: Tensor, x: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gather the `x` of all ranks into one tensor; collective.

    A list of tensors would cost more: nccl gathers into one tensor and then copies each part.

    Shapes:
        `x`: `(...)`, contiguous, the same on all ranks; `gathered`: `(ranks, ...)`.
    """
    # torch 2.13 has renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    # As vectors: gloo takes the first dimension for that of the ranks.
    work: dist.Work | None = gather(gathered.view(-1), x.view(-1), group=group, async_op=async_op)
    return work


def message_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of small messages of a process group; by default, of all ranks' group."""
    # NCCL moves tensors of GPUs only. Over both back ends a message may be on either device.
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@final
class ThreadWorld:
    """The mailboxes that ranks share which are threads of one process.

    Args:
        timeout: seconds that a rank waits for a message before it raises `TimeoutError`.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._mailboxes: dict[tuple[int, int], queue.SimpleQueue[Tensor | None]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }
        self.failed = threading.Event()

    def send(self, sender: int, receiver: int, message: Tensor) -> None:
        """Put a copy of a message into the receiver's mailbox."""
        self._mailboxes[sender, receiver].put(message.detach().clone())

    def receive(self, sender: int, receiver: int) -> Tensor:
        """Wait for the next message of one sender.

        Raises:
            TimeoutError: no message came in time.
            ConnectionError: another rank failed.
        """
        if self.failed.is_set():
            raise ConnectionError(f"rank {receiver}: another rank failed")
        try:
            message = self._mailboxes[sender, receiver].get(timeout=self.timeout)
        except queue.Empty:
            raise TimeoutError(
                f"rank {receiver}: no message from rank {sender} in {self.timeout:g} s"
            ) from None
        if message is None:
            raise ConnectionError(f"rank {receiver}: another rank failed")
        return message

    def fail(self) -> None:
        """Make every rank that waits for a message raise an error."""
        self.failed.set()
        for mailbox in self._mailboxes.values():
            mailbox.put(None)


@final
class ThreadTransport(Transport):
    """Messages between ranks that are threads of one process."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world

    def _start(
        self, send: Sequence[PeerTensor], receive: Sequence[PeerTensor]
    ) -> Callable[[], None]:
        for peer, tensor in send:
            self.world.send(self.rank, peer, tensor)

        def finish() -> None:
            for peer, tensor in receive:
                message = self.world.receive(peer, self.rank)
                if message.shape != tensor.shape:
                    raise ConnectionError(
                        f"rank {self.rank}: expects a message of shape {tuple(tensor.shape)} from "
                        f"rank {peer}, got {tuple(message.shape)}"
                    )
                tensor.copy_(message)

        return finish

    def _all_gather(self, x: Tensor) -> Tensor:
        others = [r for r in range(self.size) if r != self.rank]
        for peer in others:
            self.world.send(self.rank, peer, x)
        parts = {peer: self.world.receive(peer, self.rank) for peer in others}
        parts[self.rank] = x.detach()
        return torch.stack([parts[r] for r in range(self.size)])


# One folder for each thread of this process, with the thread's name in `comm`.
TASK_FOLDER = Path("/proc/self/task")
GLOO_THREAD_NAME = "gloo_tcp_loop"


def use_batch_scheduling_for_gloo() -> None:
    """Keep gloo's threads of this process from preempting threads that compute or send; on Linux.

    A gloo thread spins for a lock that is held while a message is sent. If a message arrives
    meanwhile and the thread preempts the sender, it spins in vain for all of its time slice,
    many times longer than the message takes. A thread with the scheduling policy SCHED_BATCH does
    not preempt others when it wakes up.

    Source: gloo's `Pair::handleEvents` (gloo/transport/tcp/pair.cc).
    """
    if not TASK_FOLDER.exists():
        return
    for task in TASK_FOLDER.iterdir():
        with suppress(OSError):  # the thread may have ended meanwhile
            if (task / "comm").read_text().strip() == GLOO_THREAD_NAME:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
