"""Batches of this rank's rows, read ahead in the background while the model computes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
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
class Reads:
    """What of a batch is read; the rest has no channels.

    `inputs`: all that goes into the model. `last`: the newest state, which is among them. `target`:
    the state after it.
    """

    inputs: bool = True
    last: bool = True
    target: bool = True

    def states(self, frames: int) -> slice:
        """Which of a sample's states are read, of `frames` and the target."""
        first = 0 if self.inputs else frames - 1 if self.last else frames
        last = frames + 1 if self.target else frames if self.inputs or self.last else first
        return slice(first, last)


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
        reads: Reads = Reads(),
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
        self._reads = reads
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
        states = self._read_states(times)
        newest = -1 if self._reads.target else None
        nothing = self._normaliser.state(states[:, :0]).flatten(1, 2)
        forcing = static = nothing
        if self._reads.inputs:
            forcing = self._normaliser.forcing(self._store.forcing_times(times, self._rows))
            if self._static is None:
                self._static = self._normaliser.static(self._store.static(self._rows))
            static = self._static.expand(len(times), -1, -1, -1)
        return Batch(
            now=self._normaliser.state(states[:, :newest]).flatten(1, 2),
            forcing=forcing,
            static=static,
            target=self._normaliser.state(states[:, -1]) if self._reads.target else nothing,
            times=times,
        )

    def _read_states(self, times: NDArray[np.datetime64]) -> NDArray[np.float32]:
        """What is wanted of now and next, in the store's units, `(B, states, C, h, W)`."""
        steps = self._steps[self._reads.states(len(self._steps) - 1)]
        if not len(steps):
            channels, columns = self._store.channels.outputs, self._store.grid[1]
            rows = self._rows.stop - self._rows.start
            return np.empty((len(times), 0, channels, rows, columns), np.float32)
        # In one read: a chunk that holds several of them is read once.
        return np.stack([self._store.read_times(time + steps, self._rows) for time in times])
