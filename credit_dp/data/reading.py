"""Reads samples of a band into batches: each chunk once, in the store's units, then normalised."""

from typing import final

import numpy as np
import torch
from torch import Tensor

from credit_dp.data.batch import EVERYTHING, Batch, Reads
from credit_dp.data.normalise import Normaliser
from credit_dp.data.sampling import Times, frame_steps
from credit_dp.data.sources.source import Fields
from credit_dp.data.store import Store


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
        self._steps = frame_steps(max(1, self._states), store.config.step_hours, later=1)
        north, south, _ = rows.indices(store.grid[0])
        self._band = (south - north, store.grid[1])
        # Then a sample's times may lie in one chunk.
        first = store.channels.prognostic[0]
        self._times_share_chunks = store.source.chunk_shape(first)[0] > 1

    def empty(self, times: Times) -> Batch:
        """Room for the samples at these times, without static fields."""
        channels, count = self._store.channels, len(times)

        def room(channels: int) -> Tensor:
            shape = (count, channels, *self._band)
            return torch.empty(shape, dtype=self._dtype, pin_memory=self._pinned)

        return Batch(
            now=room(self._states * channels.states),
            forcing=room(len(channels.forcing) if self._reads.inputs else 0),
            static=room(0),
            target=room(channels.outputs if self._reads.target else 0),
            times=times,
        )

    def fill(self, batch: Batch, place: int) -> None:
        """Read one sample of a batch.

        Raises:
            UserError: something cannot be read, or a value is missing.
        """
        time = batch.times[place]
        states, forcing, outputs = self._read(time)
        if states is not None:
            self._normaliser.state(states, batch.now[place].view(states.shape))
        if forcing is not None:
            self._normaliser.forcing(forcing, batch.forcing[place])
        if outputs is not None:
            self._normaliser.outputs(outputs, batch.target[place])

    def static(self) -> Tensor:
        """The static fields: `(1, S, h, W)`; without channels if no inputs are wanted.

        To be called first: it also reads the masks, so that all ranks read them at the same point.
        """
        self._store.masks(self._rows)
        if not self._reads.inputs:
            return torch.empty(1, 0, *self._band, dtype=self._dtype)
        return self._normaliser.static(self._store.static(self._rows))[None]

    def _read(self, time: np.datetime64) -> tuple[Fields | None, Fields | None, Fields | None]:
        """States `(frames, C, h, W)`, forcings `(F, h, W)` and outputs; None if not wanted.

        In few reads, for a chunk is decoded once in each: channels that share chunks are read
        together, and times too where a chunk holds several.
        """
        now, later = time + self._steps[:-1], time + self._steps[-1:]
        if not self._states:
            return None, None, self._outputs(later)
        if self._times_share_chunks and self._reads.target:
            fields = self._store.read_outputs(time + self._steps, self._rows)
            forcing = self._store.forcing_times(now[-1:], self._rows)[0] if self._forced else None
            return fields[:-1, : self._store.channels.states], forcing, fields[-1]
        if not self._forced:
            return self._store.read_times(now, self._rows), None, self._outputs(later)
        states, forcings = self._store.read_inputs(now[-1:], self._rows)
        if len(now) > 1:
            states = np.concatenate([self._store.read_times(now[:-1], self._rows), states])
        return states, forcings[0], self._outputs(later)

    @property
    def _forced(self) -> bool:
        return self._reads.inputs and bool(self._store.channels.forcing)

    def _outputs(self, times: Times) -> Fields | None:
        if not self._reads.target:
            return None
        fields: Fields = self._store.read_outputs(times, self._rows)[0]
        return fields
