"""Reads samples of a band into batches: each chunk once, in the store's units, then normalised."""

import math
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.data.batch import EVERYTHING, Batch, Reads
from credit_dp.data.dates import Times
from credit_dp.data.normalise import Normaliser
from credit_dp.data.sampling import frame_steps
from credit_dp.data.sources.source import Fields
from credit_dp.data.store import Store


def roomy(shape: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
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
        reads: Reads = EVERYTHING,
        pinned: bool = False,
    ) -> None:
        self._store, self._normaliser, self._rows = store, normaliser, rows
        self._dtype = dtype
        self._reads = reads
        self._pinned = pinned
        self._states = reads.frames(frames)
        north, south, _ = rows.indices(store.grid[0])
        self._band = (south - north, store.grid[1])
        # Where a sample's times may lie in one chunk, and where nothing else is read at one of them
        # that could lie in a chunk with the states.
        first = store.channels.prognostic[0]
        alone = not store.channels.diagnostic and not store.has_stored_forcing
        self._times_together = store.source.chunk_shape(first)[0] > 1 or alone

    def empty(self, times: Times, length: int = 1) -> Batch:
        """Room for the samples at these times and `length` steps, without static fields."""
        channels, count = self._store.channels, len(times)

        def room(channels: int) -> Tensor:
            return roomy((count, channels, *self._band), self._dtype, self._pinned)

        return Batch(
            now=room(self._states * channels.states),
            forcing=room(length * len(channels.forcing) if self._reads.inputs else 0),
            static=room(0),
            target=room(length * channels.outputs if self._reads.target else 0),
            times=times,
        )

    def fill(self, batch: Batch, place: int, length: int = 1) -> None:
        """Read one sample of a batch, which has room for `length` steps.

        Raises:
            UserError: something cannot be read, or a value is missing.
        """
        time = batch.times[place]
        states, forcings, outputs = self._read(time, length)
        if states is not None:
            self._normaliser.state(states, batch.now[place].view(states.shape))
        if forcings is not None:
            self._normaliser.forcing(forcings, batch.forcing[place].view(forcings.shape))
        if outputs is not None:
            self._normaliser.outputs(outputs, batch.target[place].view(outputs.shape))

    def static(self) -> Tensor:
        """The static fields: `(1, S, h, W)`; without channels if no inputs are wanted.

        To be called first: it also reads the masks, so that all ranks read them at the same point.
        """
        self._store.masks(self._rows)
        if not self._reads.inputs:
            return torch.empty(1, 0, *self._band, dtype=self._dtype)
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
        times = time + frame_steps(frames, self._store.config.step_hours, later=length)
        now, later, forced = times[:frames], times[frames:], times[frames - 1 : -1]
        if not self._states:
            return None, None, self._outputs(later)
        if self._times_together and self._reads.target:
            fields = self._store.read_outputs(times, self._rows)
            forcings = self._store.forcing_times(forced, self._rows) if self._forced else None
            return fields[:frames, : self._store.channels.states], forcings, fields[frames:]
        if not self._forced:
            return self._store.read_times(now, self._rows), None, self._outputs(later)
        states, forcings = self._store.read_inputs(now[-1:], self._rows)
        if frames > 1:
            states = np.concatenate([self._store.read_times(now[:-1], self._rows), states])
        if length == 1:
            return states, forcings, self._outputs(later)
        return states, *self._rollout(forcings, later)

    def _rollout(self, first: Fields, later: Times) -> tuple[Fields, Fields | None]:
        """The forcings of all steps, of which the first have been read, and their outputs."""
        if not self._reads.target:
            return np.concatenate([first, self._store.forcing_times(later[:-1], self._rows)]), None
        outputs, forcings = self._store.read_steps(later[:-1], self._rows)
        last = self._store.read_outputs(later[-1:], self._rows)
        return np.concatenate([first, forcings]), np.concatenate([outputs, last])

    @property
    def _forced(self) -> bool:
        return self._reads.inputs and bool(self._store.channels.forcing)

    def _outputs(self, times: Times) -> Fields | None:
        if not self._reads.target:
            return None
        return self._store.read_outputs(times, self._rows)
