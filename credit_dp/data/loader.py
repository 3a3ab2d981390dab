"""Batches of this rank's rows, read ahead in the background while the model computes."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from credit_dp.data.batch import EVERYTHING, Batch, Reads
from credit_dp.data.dates import Dated, split_span
from credit_dp.data.normalise import Normaliser
from credit_dp.data.prepare import Prepared
from credit_dp.data.reading import BatchReader
from credit_dp.data.reading_threads import ReadingThreads
from credit_dp.data.sampling import (
    ONE_STEP,
    Lengths,
    SampleSequence,
    frame_steps,
    sample_times,
)
from credit_dp.data.sources.shared import SharedSource, Trade
from credit_dp.data.store import Store

__all__ = ["Batch", "Loader", "Reads", "spanning_gaps"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class _Coming:
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
        prepared: Prepared,
        split: str,
        rows: slice,
        sequence: SampleSequence,
        dtype: torch.dtype = torch.float32,
        prefetch: int = 2,
        device: torch.device | None = None,
        frames: int = 1,
        reads: Reads = EVERYTHING,
        trade: Trade | None = None,
        lengths: Lengths = ONE_STEP,
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
        _tell_of_gaps(store, split, frames, len(self._times), lengths.longest)
        self._sequence = sequence
        self._lengths = lengths
        self._prefetch = prefetch
        self._device = device
        self._shared = SharedSource(store.source, trade) if trade is not None else None
        if self._shared is not None:
            store = Store(self._shared, store.config, store.limits.sampled)
        cuda = device is not None and device.type == "cuda"
        normaliser = Normaliser.of(prepared, dtype)
        self._reader = BatchReader(store, normaliser, dtype, rows, frames, reads, pinned=cuda)
        self._threads = ReadingThreads(1 if trade is not None else store.config.workers)
        self._static: Future[Tensor] | None = None
        self._ahead: deque[_Coming] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._read_ahead(max(1, self._prefetch))
        batch = self._ahead[0].result()  # one that failed stays first, and fails again
        self._ahead.popleft()
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
        self._drop()
        self._sequence.load_state_dict(state)

    def close(self) -> None:
        """Stop reading; what is being read is given a few seconds. Closing twice is fine."""
        if self._shared is not None:
            self._shared.stop()
        self._drop()
        self._threads.close()

    def _drop(self) -> None:
        """Forget what was read ahead. Ranks that share reading finish it, to stay in step."""
        while self._ahead:
            for sample in self._ahead.popleft().samples:
                if self._shared is None or self._shared.stopped:
                    sample.cancel()
                else:
                    sample.exception()

    def _read_ahead(self, batches: int) -> None:
        """Have so many batches read, or on their way; the static fields before any."""
        if self._static is None:
            self._static = self._threads.submit(partial(self._try, self._reader.static))
        while len(self._ahead) < batches:
            number = self._sequence.position + len(self._ahead)
            times, length = self._times[self._sequence.indices(number)], self._lengths.at(number)
            batch, fill = self._reader.empty(times, length), self._reader.fill
            tasks = [partial(fill, batch, place, length) for place in range(len(times))]
            samples = [self._threads.submit(partial(self._try, task)) for task in tasks]
            self._ahead.append(_Coming(batch, self._static, samples))

    def _try(self, read: Callable[[], T]) -> T:
        try:
            found = read()
            if self._shared is not None:
                self._shared.agree()
            return found
        except Exception as error:
            if self._shared is not None:
                self._shared.fail(error)
            raise


def spanning_gaps(store: Dated, split: str, frames: int, samples: int, ahead: int = 1) -> int:
    """How many samples are missing from a split's `samples`, for a time of theirs is missing.

    Those that would reach out of the split are not counted.
    """
    times = store.times[split_span(store.config, split, store.times)]
    steps = frame_steps(frames, store.config.step_hours, later=ahead)
    inside = (times + steps[0] >= times[0]) & (times + steps[-1] <= times[-1])
    return int(np.count_nonzero(inside)) - samples


def _tell_of_gaps(store: Store, split: str, frames: int, samples: int, ahead: int) -> None:
    skipped = spanning_gaps(store, split, frames, samples, ahead)
    if skipped:
        logger.info(
            "data.dates.%s: %d samples; %d more span a gap in time and are skipped",
            *(split, samples, skipped),
        )
    if store.skipped:
        logger.info(
            "%d times lack some of the hours that are added up, and are left out", store.skipped
        )
