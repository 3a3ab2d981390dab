"""Batches of this rank's rows, read by background threads while the model computes.

`Loader` hands out a `Batch` at a time. For each batch of its `SampleSequence` it allocates tensors
and submits one task per sample to a `ReaderThreadPool`. In a task, `BatchReader` reads the fields
from the store and `Normaliser` writes them, normalised, into the batch.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise, starmap
from queue import SimpleQueue
from typing import Any, NamedTuple, Self, TypeVar, final
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.calendar import Times
from credit_dp.data.channels import Channel
from credit_dp.data.dates import HasTimes, split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.grid import FieldArray
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.sampling import (
    ONE_STEP,
    RolloutLengths,
    SampleSequence,
    frame_offsets,
    sample_times,
)
from credit_dp.data.setup import TrainingData
from credit_dp.data.sources.shared import ChunkExchange, SharedSource
from credit_dp.data.store import Store
from credit_dp.errors import counted
from credit_dp.process import complete

__all__ = ["Batch", "Loader", "BatchSelection", "count_samples_across_gaps"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Tasks = SimpleQueue[Callable[[], None] | None]

CLOSE_TIMEOUT = 5.0  # seconds to wait for running reads when a loader is closed


@dataclass(frozen=True)
class Batch:
    """Normalised samples on one band of rows.

    Shapes:
        `state`: `(B, frames * C, h, W)`, the states of each sample, oldest first.
        `forcing`: `(B, steps * F, h, W)`, at the time of the newest state and the steps after it.
        `static`: `(B, S, h, W)`.
        `target`: `(B, steps * outputs, h, W)`, the steps after the newest state; in each step the
        prognostic, then the diagnostic channels.
        `times`: `(B,)` datetime64, of the newest states.
    """

    state: Tensor
    forcing: Tensor
    static: Tensor
    target: Tensor
    times: NDArray[np.datetime64]

    def split(self, parts: int) -> list["Batch"]:
        """Return the samples in order, in equal parts (micro-batches)."""
        if parts == 1:
            return [self]
        size = len(self.times) // parts
        # Slices are views: micro-batches take no memory of their own.
        slices = [slice(start, start + size) for start in range(0, parts * size, size)]
        names = [field.name for field in fields(self)]
        return [Batch(**{name: getattr(self, name)[part] for name in names}) for part in slices]


@final
@dataclass(frozen=True)
class BatchSelection:
    """The parts of a batch that this rank needs; tensors of other parts have no channels.

    Attributes:
        inputs: all states, forcings and statics.
        last: the newest state, which is one of the inputs.
        target: the outputs of every step of the rollout.
    """

    inputs: bool = True
    last: bool = True
    target: bool = True

    def frames(self, frames: int) -> int:
        """Return how many of a sample's states are read, counted from the newest."""
        return frames if self.inputs else int(self.last)


FULL_BATCH = BatchSelection()


@final
class BatchMover:
    """Copies batches to a device; to a GPU on a stream of its own, while the GPU computes.

    Static fields are copied once: they are the same in all batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_copy_stream(device)
        self._static: Tensor | None = None

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside the computation, so that it helps to start them early."""
        return self._stream is not None

    def start(self, batch: Batch) -> Batch:
        """Start to copy a batch; use what it returns only after `finish`."""
        if self._stream is None:
            return self._copy(batch)
        with torch.cuda.stream(self._stream):
            return self._copy(batch)

    def finish(self, moved: Batch) -> Batch:
        """Let later kernels wait until a batch is copied, and return it. The host does not wait."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in (moved.state, moved.forcing, moved.target, moved.static):
                # Allocated on the stream of copies, which else would write the next batch into
                # this memory once the host drops the tensor, though kernels may still read it.
                tensor.record_stream(current)
        return moved

    def _copy(self, batch: Batch) -> Batch:
        if self._static is None:
            self._static = batch.static[:1].to(self._device)
        # From pinned memory the host goes on at once.
        moved = {
            name: getattr(batch, name).to(self._device, non_blocking=True)
            for name in ("state", "forcing", "target")
        }
        return replace(batch, **moved, static=self._static.expand(len(batch.times), -1, -1, -1))


def new_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies to a GPU, and None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@final
class Loader:
    """Endless batches in the order of a sequence, read ahead by threads.

    Up to `prefetch` batches besides the current one are in memory or being read. The next one is
    copied to a GPU ahead, if it has been read. `state_dict` counts the batches that were handed
    out, not those read ahead. An error in a reading thread is raised from `__next__` of the batch
    that it belongs to.
    """

    def __init__(
        self,
        data: TrainingData,
        split: str,
        rows: slice,
        sequence: SampleSequence,
        dtype: torch.dtype = torch.float32,
        prefetch: int = 2,
        device: torch.device | None = None,
        frames: int = 1,
        selection: BatchSelection = FULL_BATCH,
        exchange: ChunkExchange | None = None,
        rollout_lengths: RolloutLengths = ONE_STEP,
    ) -> None:
        """Prepare to read; nothing is read before the first batch is requested.

        Args:
            data: the store and its statistics.
            split: train, valid or test.
            rows: the band of this rank.
            sequence: the order of the samples; its `position` is advanced with every batch.
            dtype: of the tensors.
            prefetch: batches read ahead; 0 reads each batch when it is requested.
            device: where batches are moved to; None leaves them on the CPU.
            frames: states of a sample.
            selection: the parts of a batch to read.
            exchange: connects the ranks that share the reading of chunks. One thread reads then,
                instead of `data.workers`, and all these ranks must request the same batches.
            rollout_lengths: the number of steps of each batch.

        Raises:
            ValueError: the sequence has another number of samples than the split.
        """
        store = data.store
        self._times = sample_times(store, split, frames, rollout_lengths.longest)
        count = store.num_members * len(self._times)
        if count != sequence.count:
            raise ValueError(f"{split} has {count} samples, not {sequence.count}")
        _log_gaps(store, split, frames, count, rollout_lengths.longest)
        self._sequence = sequence
        self._rollout_lengths = rollout_lengths
        self._prefetch = prefetch
        self._mover = None if device is None else BatchMover(device)
        self._moved: Batch | None = None  # the first of `_prefetched`, if it is being copied
        self._shared = SharedSource(store.source, exchange) if exchange is not None else None
        if self._shared is not None:
            store = Store(self._shared, store.config, store.masks)
        normaliser = Normaliser.of(data, dtype)
        # Samples are numbered member by member, and all times of one are of the same member.
        self._readers = [
            BatchReader(
                store.member(member),
                normaliser,
                dtype,
                rows,
                frames=frames,
                selection=selection,
                pinned=device is not None and device.type == "cuda",
            )
            for member in range(store.num_members)
        ]
        # Shared reads are collectives: with one thread, every rank meets them in the same order.
        self._threads = ReaderThreadPool(1 if exchange is not None else store.config.workers)
        self._static: Future[Tensor] | None = None
        self._prefetched: deque[_PendingBatch] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        # Without read-ahead, too, the batch that is needed now is read by the threads.
        self._read_ahead(max(1, self._prefetch))
        batch = self._move_first()  # a failed batch stays first, and fails again
        self._prefetched.popleft()
        self._moved = None
        # Only now: a checkpoint after an error reads the failed batch again.
        self._sequence.position += 1
        # Before the batch is handed out: the threads read the next ones while the model computes.
        self._read_ahead(self._prefetch)
        self._start_to_move_next()
        return batch

    def _move_first(self) -> Batch:
        if self._mover is None:
            return self._prefetched[0].result()
        moved = self._moved or self._mover.start(self._prefetched[0].result())
        return self._mover.finish(moved)

    def _start_to_move_next(self) -> None:
        """Start to copy the next batch, if it has been read, while the present one computes."""
        if self._mover is not None and self._mover.overlaps and self._prefetched:
            pending = self._prefetched[0]
            if pending.succeeded:
                self._moved = self._mover.start(pending.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the sequence after the last batch that was handed out."""
        return self._sequence.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position and drop the batches that were read ahead."""
        self._drop_prefetched()
        self._sequence.load_state_dict(state)

    def close(self) -> None:
        """Stop reading, waiting a few seconds for running reads; may be called twice."""
        if self._shared is not None:
            # First, because a thread that waits for other ranks would not end by itself.
            self._shared.stop()
        self._drop_prefetched()
        self._threads.close()

    def _drop_prefetched(self) -> None:
        """Drop the batches that were read ahead.

        Ranks that share reading finish theirs: a rank that skipped a read would miss its
        collectives, and the next batch would not match those of the others.
        """
        self._moved = None
        while self._prefetched:
            for sample in self._prefetched.popleft().samples:
                if self._shared is None or self._shared.stopped:
                    sample.cancel()
                else:
                    sample.exception()

    def _read_ahead(self, batches: int) -> None:
        """Submit tasks until `batches` are read or being read; static fields come first."""
        if self._static is None:
            read_static = partial(self._run_and_agree, self._readers[0].read_static)
            self._static = self._threads.submit(read_static)
        while len(self._prefetched) < batches:
            number = self._sequence.position + len(self._prefetched)
            members, starts = np.divmod(self._sequence.indices(number), len(self._times))
            length = self._rollout_lengths.at(number)
            batch = self._readers[0].allocate(self._times[starts], length)
            tasks = [
                partial(self._readers[member].read_sample, batch, index, length)
                for index, member in enumerate(members.tolist())
            ]
            samples = [self._threads.submit(partial(self._run_and_agree, task)) for task in tasks]
            self._prefetched.append(_PendingBatch(batch, self._static, samples))

    def _run_and_agree(self, read: Callable[[], T]) -> T:
        """Run a read; with shared reading, succeed only if it succeeds on all ranks."""
        try:
            result = read()
            if self._shared is not None:
                self._shared.check_all_ranks()
            return result
        except Exception as error:
            # An error outside the exchange (a NaN, say) is known to this rank alone: without
            # this message the other ranks would wait for its next collective.
            if self._shared is not None:
                self._shared.fail(error)
            raise


@final
@dataclass(frozen=True)
class _PendingBatch:
    batch: Batch
    static: Future[Tensor]
    samples: list[Future[None]]

    @property
    def succeeded(self) -> bool:
        """Whether all tasks are done, without errors."""
        tasks: tuple[Future[Any], ...] = (self.static, *self.samples)
        return all(task.done() and task.exception() is None for task in tasks)

    def result(self) -> Batch:
        """Return the batch when all its tasks are done, or raise the first error."""
        static = self.static.result()
        for sample in self.samples:
            sample.result()
        return replace(self.batch, static=static.expand(len(self.samples), -1, -1, -1))


def count_samples_across_gaps(
    store: HasTimes, split: str, frames: int, samples: int, steps: int = 1
) -> int:
    """Return how many samples a split loses because one of their times is missing.

    Samples that would extend beyond the split are not counted.

    Args:
        samples: the number of complete samples, of all members.
    """
    times = store.times[split_slice(store.config, split, store.times, store.calendar)]
    offsets = frame_offsets(frames, store.config.step_hours, later=steps)
    inside = (times + offsets[0] >= times[0]) & (times + offsets[-1] <= times[-1])
    return store.num_members * int(np.count_nonzero(inside)) - samples


def _log_gaps(store: Store, split: str, frames: int, samples: int, steps: int) -> None:
    skipped = count_samples_across_gaps(store, split, frames, samples, steps)
    if skipped:
        logger.info(
            "data.dates.%s: %s; skipped across gaps in time: %d more",
            split,
            counted(samples, "sample"),
            skipped,
        )
    if store.num_skipped:
        logger.info(
            "left out, as some of the hours that are added up are missing: %s",
            counted(store.num_skipped, "time"),
        )


@final
class BatchReader:
    """Reads samples into batches; several threads may call it at once."""

    def __init__(
        self,
        store: Store,
        normaliser: Normaliser,
        dtype: torch.dtype,
        rows: slice,
        frames: int = 1,
        selection: BatchSelection = FULL_BATCH,
        pinned: bool = False,
    ) -> None:
        """Prepare to read a band of rows.

        Args:
            store: gives the fields.
            normaliser: on the CPU.
            dtype: of the tensors.
            rows: the band.
            frames: states of a sample.
            selection: the parts of a sample to read.
            pinned: whether to allocate batches in page-locked memory, from which copies to a GPU
                are asynchronous.
        """
        self._store = store
        self._normaliser = normaliser
        self._rows = rows
        self._dtype = dtype
        self._selection = selection
        self._pinned = pinned
        self._memory = BatchMemory()
        self._frames = selection.frames(frames)
        north, south, _ = rows.indices(store.grid[0])
        self._band_shape = (south - north, store.grid[1])
        names = store.channels.forcing
        self._stored = [i for i, name in enumerate(names) if name not in COMPUTED_FORCINGS]
        # Whether a chunk may hold several times of a sample.
        self._times_share_chunks = store.source.chunk_shape(store.channels.prognostic[0])[0] > 1

    def allocate(self, times: Times, length: int = 1) -> Batch:
        """Return an uninitialised batch for samples of `length` steps, without static fields."""
        channels = self._store.channels

        def allocate_channels(count: int) -> Tensor:
            shape = (len(times), count, *self._band_shape)
            return self._memory.empty(shape, self._dtype, self._pinned)

        return Batch(
            state=allocate_channels(self._frames * channels.num_states),
            forcing=allocate_channels(
                length * len(channels.forcing) if self._selection.inputs else 0
            ),
            static=allocate_channels(0),
            target=allocate_channels(
                length * channels.num_outputs if self._selection.target else 0
            ),
            times=times,
        )

    def read_sample(self, batch: Batch, index: int, length: int = 1) -> None:
        """Read and normalise one sample of a batch that was allocated for `length` steps."""
        frames, names = self._frames, self._store.channels.forcing
        offsets = frame_offsets(max(1, frames), self._store.config.step_hours, later=length)
        times = batch.times[index] + offsets[-length - frames :]
        states = batch.state[index].tensor_split(frames) if frames else ()
        fields = [*states, *batch.target[index].tensor_split(length)]
        forcing = batch.forcing[index]
        forcings: dict[int, Tensor] = {}
        if self._store.stored_forcing and self._selection.inputs:
            # The forcing of a step is that of the time before it.
            forcings = dict(enumerate(forcing.tensor_split(length), start=frames - 1))
        for read in self._reads(fields, forcings):
            values = self._store.read_channels(read.channels, times[read.times], self._rows)
            for of_time, write in zip(values, read.writers, strict=True):
                write(of_time)
        for i, name in enumerate(names if self._selection.inputs else ()):
            if name in COMPUTED_FORCINGS:
                steps = times[frames - 1 : -1]
                computed = self._store.computed_forcing(name, steps, self._rows)
                out = forcing[i :: len(names), None]
                self._normaliser.forcing.normalise(computed[:, None], out, i)

    def _reads(self, fields: Sequence[Tensor], forcings: Mapping[int, Tensor]) -> list["_Read"]:
        """Return what to read for a sample.

        Every read decodes its chunks again. Channels that share chunks are therefore read together,
        and so are times if a chunk holds several of them.
        """
        outputs = self._store.channels.output_channels

        def read(times: range, num_outputs: int, forced: bool) -> _Read:
            channels = (*outputs[:num_outputs], *(self._store.stored_forcing if forced else ()))
            writers = [
                partial(self._write, fields[t], forcings.get(t, fields[t][:0]), num_outputs)
                for t in times
            ]
            return _Read(slice(times.start, times.stop), channels, writers)

        if self._times_share_chunks and self._frames and self._selection.target:
            reads = [read(range(len(fields)), len(outputs), False)]
            if forcings:
                reads.append(read(range(self._frames - 1, len(fields) - 1), 0, True))
            return reads
        # Adjacent times of which the same channels are needed are one read.
        needed = [(len(tensor), time in forcings) for time, tensor in enumerate(fields)]
        edges = [time for time in range(1, len(needed)) if needed[time] != needed[time - 1]]
        spans = starmap(range, pairwise([0, *edges, len(needed)]))
        return [read(span, *needed[span.start]) for span in spans if any(needed[span.start])]

    def _write(
        self,
        fields: Tensor,
        forcing: Tensor,
        num_outputs: int,
        values: FieldArray,
    ) -> None:
        """Normalise the fields of a time, `(c, h, W)`, into the tensors of a sample.

        Args:
            num_outputs: how many channels that are read are outputs; stored forcings follow them.
        """
        count = min(num_outputs, len(fields))
        if count:
            self._normaliser.outputs.normalise(values[:count], fields[:count])
        for position in range(num_outputs, len(values)):
            i = self._stored[position - num_outputs]
            self._normaliser.forcing.normalise(values[position][None], forcing[i : i + 1], i)

    def read_static(self) -> Tensor:
        """Read the static fields, `(1, S, h, W)`; without channels if no inputs are selected."""
        if not self._selection.inputs:
            return torch.empty(1, 0, *self._band_shape, dtype=self._dtype)
        return self._normaliser.normalise_static(self._store.read_static(self._rows))[None]


class _Read(NamedTuple):
    """Fields of a sample that are read at once.

    Attributes:
        times: of the sample.
        channels: to read at each of them.
        writers: for each time, the function that gets the values.
    """

    times: slice
    channels: tuple[Channel, ...]
    writers: Sequence[Callable[[FieldArray], None]]


@final
class BatchMemory:
    """Allocates tensors, in the memory of earlier ones that are no longer used, if there is some.

    New memory is slow to write: the system clears every page first. New memory comes from numpy,
    which requests large pages from the system; torch does not.

    Memory returns when nothing refers to it any more, be it a batch, a view of one of its tensors,
    or what autograd keeps for backward. So nothing that still reads a batch sees the next one.
    """

    def __init__(self) -> None:
        # As many as a batch has tensors. Appending to a full one drops the oldest.
        self._unused: deque[NDArray[np.uint8]] = deque(maxlen=3)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """Return an uninitialised CPU tensor.

        Args:
            pinned: whether its memory is page-locked. torch itself uses such memory again, once
                copies to a GPU have read it.
        """
        size = math.prod(shape) * dtype.itemsize
        if pinned or not size:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
        memory = self._take(size)
        # The tensor's storage refers to this array, and only the storage does.
        array = memory[:]
        finalize(array, self._unused.append, memory).atexit = False
        return torch.from_numpy(array).view(dtype).view(*shape)

    def _take(self, size: int) -> NDArray[np.uint8]:
        for _ in range(len(self._unused)):
            try:
                memory = self._unused.popleft()
            except IndexError:  # another thread has dropped it
                break
            if len(memory) == size:
                return memory
            self._unused.append(memory)
        return np.empty(size, np.uint8)


@final
class ReaderThreadPool:
    """Threads that start tasks in the order of submission.

    They are daemon threads, unlike those of `concurrent.futures`, which are joined at exit: a store
    that is slow or gone must not keep a run from ending.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; the future gets its result or error.

        Raises:
            RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("reading was closed")
        # Threads start with the first task: a loader that is never used has none.
        for number in range(len(self._threads), self._count):
            name = f"loader-{number}"
            thread = threading.Thread(
                target=_run_tasks, args=(self._tasks,), name=name, daemon=True
            )
            thread.start()
            self._threads.append(thread)
        future: Future[T] = Future()
        self._tasks.put(partial(_run_task, future, task))
        return future

    def close(self) -> None:
        """Start no more tasks and wait for running ones, but not for long; may be called twice."""
        if self._closed:
            return
        self._closed = True
        timeout = CLOSE_TIMEOUT
        for _ in self._threads:
            # One None ends one thread. What is queued before it was cancelled, and takes no time.
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout)
            # Once one thread has used up the timeout, the others are not waited for.
            timeout = 0.0 if thread.is_alive() else timeout


def _run_tasks(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        # This variable would keep the batch alive until the next task comes.
        del task


def _run_task(future: Future[T], task: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():  # not if it was cancelled while it was queued
        complete(future, task)
