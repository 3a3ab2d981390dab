"""Batches of this rank's rows, read ahead in the background while the model computes."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.config import VariableConfig
from credit_dp.data.channels import Channels
from credit_dp.data.dates import HasTimes, Times, split_slice
from credit_dp.data.forcings import COMPUTED_FORCINGS, COMPUTED_STATICS
from credit_dp.data.sampling import (
    ONE_STEP,
    RolloutLengths,
    SampleSequence,
    frame_offsets,
    sample_times,
)
from credit_dp.data.scaling import ChannelScaler, ChannelStatistics
from credit_dp.data.setup import TrainingData
from credit_dp.data.sources.base import Fields
from credit_dp.data.sources.shared import ChunkExchange, SharedSource
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store

__all__ = ["Batch", "Loader", "BatchSelection", "count_samples_across_gaps"]


T = TypeVar("T")
Tasks = SimpleQueue[Callable[[], None] | None]

CLOSE_TIMEOUT = 5.0  # seconds for what is being read when reading is closed


@final
class ReaderThreadPool:
    """Some threads that begin tasks in the order in which they came.

    They end with the process, unlike those of `concurrent.futures`, which a process waits for: a
    store that is slow or gone must not keep a run from ending.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Have a task done; its result or error is that of the future.

        Raises:
            RuntimeError: the threads were closed.
        """
        if self._closed:
            raise RuntimeError("reading was closed")
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
        """Begin no more, and wait a while for what is under way. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        patience = CLOSE_TIMEOUT
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(patience)
            patience = 0.0 if thread.is_alive() else patience


def _run_tasks(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # a batch lives no longer than somebody wants it


def _run_task(future: Future[T], task: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the task has to see it
        future.set_exception(error)
    else:
        future.set_result(result)


@dataclass(frozen=True)
class Batch:
    """Samples on one band of rows, normalised.

    Shapes:
        `state`: `(B, frames * C, h, W)`, the states of so many steps, the newest last; `target`, of
        the steps after that: `(B, steps * outputs, h, W)`, in each prognostic channels then
        diagnostic ones; `forcing`, at the newest one's time and the steps after it:
        `(B, steps * F, h, W)`; `static`: `(B, S, h, W)`; `times`, of the newest: `(B,)`
        datetime64[ns].
    """

    state: Tensor
    forcing: Tensor
    static: Tensor
    target: Tensor
    times: NDArray[np.datetime64]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("state", "forcing", "target")
        }
        static = self.static[:1].to(device, non_blocking=True)  # the same for all samples
        return replace(self, **moved, static=static.expand(len(self.times), -1, -1, -1))

    def split(self, parts: int) -> list["Batch"]:
        """The samples in order, in equal parts."""
        if parts == 1:
            return [self]
        size = len(self.times) // parts
        places = [slice(start, start + size) for start in range(0, parts * size, size)]
        names = [field.name for field in fields(self)]
        return [Batch(**{name: getattr(self, name)[place] for name in names}) for place in places]


@final
@dataclass(frozen=True)
class BatchSelection:
    """What of a batch is read; the rest has no channels.

    `inputs`: all that goes into the model. `last`: the newest state, which is among them. `target`:
    what comes after it, as many steps as the rollout has.
    """

    inputs: bool = True
    last: bool = True
    target: bool = True

    def frames(self, frames: int) -> int:
        """How many of a sample's states are read, the newest ones."""
        return frames if self.inputs else int(self.last)


FULL_BATCH = BatchSelection()


NOT_NORMALISED = VariableConfig(normalise="none")


@final
class Normaliser:
    """Makes every channel about as large as a network likes, in `dtype` on `device`.

    How, `data.variables.NAME.normalise` says; computed forcings and statics stay as they are.

    Attributes:
        dtype: of what it makes.
        tendency_scale: `(outputs, 1, 1)`, std of one-step changes in normalised units. A model's
            output times this is what one step adds to the normalised state.
        scale, fills: of what comes out, see `ChannelScaler`.
    """

    def __init__(
        self,
        statistics: Statistics,
        dtype: torch.dtype,
        device: torch.device | None = None,
        variables: Mapping[str, VariableConfig] | None = None,
        channels: Channels | None = None,
    ) -> None:
        """Without `variables` and `channels`, every channel is standardised."""
        self.dtype = dtype
        computed = dict.fromkeys([*COMPUTED_FORCINGS, *COMPUTED_STATICS], NOT_NORMALISED)
        known = {**(variables or {}), **computed} if channels is not None else {}

        def scales(prefix: str, names: Sequence[str] | None) -> ChannelScaler:
            extent = ChannelStatistics.of(statistics, prefix)
            named = [""] * len(extent.mean) if names is None else names
            return ChannelScaler(named, known, extent, dtype, device)

        outputs = (
            None if channels is None else [channel.variable for channel in channels.output_channels]
        )
        self._outputs = scales("", outputs)
        self.scale, self.fills = self._outputs.scale, self._outputs.fills
        self._forcing = scales("forcing_", None if channels is None else channels.forcing)
        self._static = scales("static_", None if channels is None else channels.static)
        self.tendency_scale = self._outputs.divide_by_scale(statistics.tendency_std)

    @classmethod
    def of(
        cls, prepared: TrainingData, dtype: torch.dtype, device: torch.device | None = None
    ) -> "Normaliser":
        """The one of a store and its statistics, as the config wants each variable."""
        store = prepared.store
        return cls(prepared.statistics, dtype, device, store.config.variables, store.channels)

    def state(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Prognostic fields, or all that come out, normalised: `(..., C, h, W)`.

        Made on the spot if there is an `out` of that shape, which is returned.
        """
        return self._outputs.normalise(fields, out)

    def outputs(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """All that come out, normalised: `(..., outputs, h, W)`."""
        return self._outputs.normalise(fields, out)

    def forcing(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Forcing fields -> normalised: `(..., F, h, W)`."""
        return self._forcing.normalise(fields, out)

    def static(self, fields: NDArray[np.float32], out: Tensor | None = None) -> Tensor:
        """Static fields -> normalised: `(..., S, h, W)`."""
        return self._static.normalise(fields, out)

    def denormalise(self, state: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised prognostic fields, or all that come out, in the store's units.

        Variables that can't be negative are clamped at zero; outside the mask all is NaN.

        Shapes:
            `(..., C, h, W)`; `mask`: `(outputs, h, W)`, True where there are values.
        """
        return self._outputs.denormalise(state, mask)


def empty_with_large_pages(
    shape: Sequence[int], dtype: torch.dtype, pinned: bool = False
) -> Tensor:
    """An empty tensor on the CPU that is quick to fill for the first time.

    Numpy asks the system for large pages, torch does not: of the time in which a globe was
    normalised into a fresh tensor, two thirds went into getting small ones.
    """
    size = math.prod(shape) * dtype.itemsize
    if pinned or not size:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(*shape)


@final
class BatchReader:
    """Knows what is read of a sample; several threads may call it at once.

    Args:
        rows: of which band.
        frames: states of a sample.
        reads: what of it is wanted.
        pinned: whether batches are made in memory that a GPU can copy from meanwhile.
    """

    def __init__(
        self,
        store: Store,
        normaliser: Normaliser,
        dtype: torch.dtype,
        rows: slice,
        frames: int = 1,
        reads: BatchSelection = FULL_BATCH,
        pinned: bool = False,
    ) -> None:
        self._store, self._normaliser, self._rows = store, normaliser, rows
        self._dtype = dtype
        self._reads = reads
        self._pinned = pinned
        self._states = reads.frames(frames)
        north, south, _ = rows.indices(store.grid[0])
        self._band_shape = (south - north, store.grid[1])
        # Where a sample's times may lie in one chunk, and where nothing else is read at one of them
        # that could lie in a chunk with the states.
        first = store.channels.prognostic[0]
        alone = not store.channels.diagnostic and not store.has_stored_forcing
        self._times_together = store.source.chunk_shape(first)[0] > 1 or alone

    def empty(self, times: Times, length: int = 1) -> Batch:
        """Room for the samples at these times and `length` steps, without static fields."""
        channels, count = self._store.channels, len(times)

        def room(channels: int) -> Tensor:
            return empty_with_large_pages(
                (count, channels, *self._band_shape), self._dtype, self._pinned
            )

        return Batch(
            state=room(self._states * channels.states),
            forcing=room(length * len(channels.forcing) if self._reads.inputs else 0),
            static=room(0),
            target=room(length * channels.outputs if self._reads.target else 0),
            times=times,
        )

    def read_sample(self, batch: Batch, place: int, length: int = 1) -> None:
        """Read one sample of a batch, which has room for `length` steps.

        Raises:
            UserError: something cannot be read, or a value is missing.
        """
        time = batch.times[place]
        states, forcings, outputs = self._read(time, length)
        if states is not None:
            self._normaliser.state(states, batch.state[place].view(states.shape))
        if forcings is not None:
            self._normaliser.forcing(forcings, batch.forcing[place].view(forcings.shape))
        if outputs is not None:
            self._normaliser.outputs(outputs, batch.target[place].view(outputs.shape))

    def static(self) -> Tensor:
        """The static fields: `(1, S, h, W)`; without channels if no inputs are wanted.

        To be called first: it also reads the masks, so that all ranks read them at the same point.
        """
        self._store.valid_mask(self._rows)
        if not self._reads.inputs:
            return torch.empty(1, 0, *self._band_shape, dtype=self._dtype)
        return self._normaliser.static(self._store.static(self._rows))[None]

    def _read(
        self, time: np.datetime64, length: int
    ) -> tuple[Fields | None, Fields | None, Fields | None]:
        """States `(frames, C, h, W)`, forcings `(length, F, h, W)` and outputs
        `(length, outputs, h, W)`; None if not wanted.

        In few reads, for a chunk is decoded once in each: channels that share chunks are read
        together, and times too where a chunk holds several.
        """
        frames = max(1, self._states)
        times = time + frame_offsets(frames, self._store.config.step_hours, later=length)
        now, later, forced = times[:frames], times[frames:], times[frames - 1 : -1]
        if not self._states:
            return None, None, self._outputs(later)
        if self._times_together and self._reads.target:
            fields = self._store.read_outputs(times, self._rows)
            forcings = self._store.read_forcing(forced, self._rows) if self._forced else None
            return fields[:frames, : self._store.channels.states], forcings, fields[frames:]
        if not self._forced:
            return self._store.read_states(now, self._rows), None, self._outputs(later)
        states, forcings = self._store.read_inputs(now[-1:], self._rows)
        if frames > 1:
            states = np.concatenate([self._store.read_states(now[:-1], self._rows), states])
        if length == 1:
            return states, forcings, self._outputs(later)
        return states, *self._rollout(forcings, later)

    def _rollout(self, first: Fields, later: Times) -> tuple[Fields, Fields | None]:
        """The forcings of all steps, of which the first have been read, and their outputs."""
        if not self._reads.target:
            return np.concatenate([first, self._store.read_forcing(later[:-1], self._rows)]), None
        outputs, forcings = self._store.read_outputs_and_forcing(later[:-1], self._rows)
        last = self._store.read_outputs(later[-1:], self._rows)
        return np.concatenate([first, forcings]), np.concatenate([outputs, last])

    @property
    def _forced(self) -> bool:
        return self._reads.inputs and bool(self._store.channels.forcing)

    def _outputs(self, times: Times) -> Fields | None:
        if not self._reads.target:
            return None
        return self._store.read_outputs(times, self._rows)


logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class _PendingBatch:
    """A batch and what fills it."""

    batch: Batch
    static: Future[Tensor]
    samples: list[Future[None]]

    def result(self) -> Batch:
        """The batch, once it is there; or the first error."""
        static = self.static.result()
        for sample in self.samples:
            sample.result()
        return replace(self.batch, static=static.expand(len(self.samples), -1, -1, -1))


@final
class Loader:
    """Endless batches in the order of a sequence, read ahead by threads.

    Besides the batch in use, `prefetch` of them are in memory or on their way into it. What
    resuming needs is the number of batches handed out, never of those read ahead. An error of a
    reading thread is raised as it is where the batch was due.
    """

    def __init__(
        self,
        prepared: TrainingData,
        split: str,
        rows: slice,
        sequence: SampleSequence,
        dtype: torch.dtype = torch.float32,
        prefetch: int = 2,
        device: torch.device | None = None,
        frames: int = 1,
        reads: BatchSelection = FULL_BATCH,
        trade: ChunkExchange | None = None,
        lengths: RolloutLengths = ONE_STEP,
    ) -> None:
        """Read `rows` of the samples of `split`, of `frames` states; `prefetch=0` reads when asked.

        Of each sample of a batch the steps are read that its rollout has, which `lengths` tells by
        the batch's number in the sequence.

        `data.workers` threads read. With a `trade` reading is shared, by one thread: all its ranks
        must be asked for the same batches, and meet in their order.

        Raises:
            ValueError: the sequence was made for another number of samples.
        """
        store = prepared.store
        self._times = sample_times(store, split, frames, lengths.longest)
        if len(self._times) != sequence.count:
            raise ValueError(f"{split} has {len(self._times)} samples, not {sequence.count}")
        _log_gaps(store, split, frames, len(self._times), lengths.longest)
        self._sequence = sequence
        self._lengths = lengths
        self._prefetch = prefetch
        self._device = device
        self._shared = SharedSource(store.source, trade) if trade is not None else None
        if self._shared is not None:
            store = Store(self._shared, store.config, store.limits.sampled_ranges)
        cuda = device is not None and device.type == "cuda"
        normaliser = Normaliser.of(prepared, dtype)
        self._reader = BatchReader(store, normaliser, dtype, rows, frames, reads, pinned=cuda)
        self._threads = ReaderThreadPool(1 if trade is not None else store.config.workers)
        self._static: Future[Tensor] | None = None
        self._prefetched: deque[_PendingBatch] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._read_ahead(max(1, self._prefetch))
        batch = self._prefetched[0].result()  # one that failed stays first, and fails again
        self._prefetched.popleft()
        self._sequence.position += 1
        self._read_ahead(self._prefetch)
        return batch if self._device is None else batch.to(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the batches handed out end."""
        return self._sequence.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; what was read ahead is dropped."""
        self._drop_prefetched()
        self._sequence.load_state_dict(state)

    def close(self) -> None:
        """Stop reading; what is being read is given a few seconds. Closing twice is fine."""
        if self._shared is not None:
            self._shared.stop()
        self._drop_prefetched()
        self._threads.close()

    def _drop_prefetched(self) -> None:
        """Forget what was read ahead. Ranks that share reading finish it, to stay in step."""
        while self._prefetched:
            for sample in self._prefetched.popleft().samples:
                if self._shared is None or self._shared.stopped:
                    sample.cancel()
                else:
                    sample.exception()

    def _read_ahead(self, batches: int) -> None:
        """Have so many batches read, or on their way; the static fields before any."""
        if self._static is None:
            self._static = self._threads.submit(partial(self._run_and_agree, self._reader.static))
        while len(self._prefetched) < batches:
            number = self._sequence.position + len(self._prefetched)
            times, length = self._times[self._sequence.indices(number)], self._lengths.at(number)
            batch, fill = self._reader.empty(times, length), self._reader.read_sample
            tasks = [partial(fill, batch, place, length) for place in range(len(times))]
            samples = [self._threads.submit(partial(self._run_and_agree, task)) for task in tasks]
            self._prefetched.append(_PendingBatch(batch, self._static, samples))

    def _run_and_agree(self, read: Callable[[], T]) -> T:
        try:
            found = read()
            if self._shared is not None:
                self._shared.check_all_ranks()
            return found
        except Exception as error:
            if self._shared is not None:
                self._shared.fail(error)
            raise


def count_samples_across_gaps(
    store: HasTimes, split: str, frames: int, samples: int, ahead: int = 1
) -> int:
    """How many samples are missing from a split's `samples`, for a time of theirs is missing.

    Those that would reach out of the split are not counted.
    """
    times = store.times[split_slice(store.config, split, store.times)]
    steps = frame_offsets(frames, store.config.step_hours, later=ahead)
    inside = (times + steps[0] >= times[0]) & (times + steps[-1] <= times[-1])
    return int(np.count_nonzero(inside)) - samples


def _log_gaps(store: Store, split: str, frames: int, samples: int, ahead: int) -> None:
    skipped = count_samples_across_gaps(store, split, frames, samples, ahead)
    if skipped:
        logger.info(
            "data.dates.%s: %d samples; %d more span a gap in time and are skipped",
            *(split, samples, skipped),
        )
    if store.num_skipped:
        logger.info(
            "%d times lack some of the hours that are added up, and are left out", store.num_skipped
        )
