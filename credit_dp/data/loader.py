"""Batches of this rank's rows, read ahead in the background while the model computes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_dp.data.normalise import Normaliser
from credit_dp.data.prepare import Prepared
from credit_dp.data.sampling import SampleSequence, frame_steps, sample_times


@dataclass(frozen=True)
class Batch:
    """Samples on one band of rows, normalised.

    Shapes:
        `now`: `(B, frames * C, h, W)`, the states of so many steps, the newest last; `target`, one
        step after that: `(B, C, h, W)`; `forcing`, at the newest one's time: `(B, F, h, W)`;
        `static`: `(B, S, h, W)`; `times`, of the newest: `(B,)` datetime64[ns].
    """

    now: Tensor
    forcing: Tensor
    static: Tensor
    target: Tensor
    times: NDArray[np.datetime64]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("now", "forcing", "static", "target")
        }
        return replace(self, **moved)


@final
class Loader:
    """Endless batches in the order of a sequence, `prefetch` of them read ahead by one thread.

    What resuming needs is the number of batches handed out, never of those read ahead. An error of
    the reading thread is raised as it is where the batch was due.
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
    ) -> None:
        """Read `rows` of the samples of `split`, of `frames` states; `prefetch=0` reads when asked.

        Raises:
            ValueError: the sequence was made for another number of samples.
        """
        self._store = prepared.store
        self._times = sample_times(prepared, split, frames)
        self._steps = frame_steps(frames, prepared.store.config.step_hours, later=1)
        if len(self._times) != sequence.count:
            raise ValueError(f"{split} has {len(self._times)} samples, not {sequence.count}")
        self._rows = rows
        self._sequence = sequence
        self._device = device
        self._prefetch = prefetch
        self._normaliser = Normaliser(prepared.statistics, dtype)
        self._static: Tensor | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: deque[Future[Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        # The batch asked for and those to be ready after it; a failed one is not replaced.
        while len(self._ahead) <= self._prefetch:
            number = self._sequence.position + len(self._ahead)
            self._ahead.append(self._reader.submit(self._read, number))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self._sequence.position += 1
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
        """Stop reading and wait for the thread to end. Closing twice is fine."""
        self._drop()
        self._reader.shutdown(wait=True)

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

    def _read(self, number: int) -> Batch:
        times = self._times[self._sequence.indices(number)]
        # Now and next in one read: a chunk that holds both is read once.
        samples = [self._store.read_times(t + self._steps, self._rows) for t in times]
        now = self._normaliser.state(np.concatenate([s[None, :-1] for s in samples])).flatten(1, 2)
        target = self._normaliser.state(np.stack([sample[-1] for sample in samples]))
        forcing = self._normaliser.forcing(self._store.forcing_times(times, self._rows))
        if self._static is None:
            self._static = self._normaliser.static(self._store.static(self._rows))
        static = self._static.expand(len(times), -1, -1, -1)
        return Batch(now=now, forcing=forcing, static=static, target=target, times=times)
