"""Reads a sample block by block: each from its file into the batch while it is in the cache.

A block is a part of a chunk that fits the processor's cache (`RawBlockReader`). It is read, its
checksum is computed, its values are checked (`CheckedBlockReader`) and written, normalised, into
the batch (`SampleBlocks`), before the next one is read. Reading whole fields first would move them
through main memory once for each of these steps.
"""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple, final

from torch import Tensor

from credit_dp.data.channels import Channel
from credit_dp.data.dates import Times
from credit_dp.data.forcings import COMPUTED_FORCINGS
from credit_dp.data.scaling import ChannelScaler
from credit_dp.data.sources.base import Fields
from credit_dp.data.store import CheckedBlockReader, Store


class _Output(NamedTuple):
    """Where some of the channels that are read belong.

    Attributes:
        first: position of the first one among the channels that are read.
        scaler: normalises them.
        scaler_first: the number of the first one in `scaler`.
        tensor: `(C, h, W)`.
    """

    first: int
    scaler: ChannelScaler
    scaler_first: int
    tensor: Tensor

    def write(self, channels: slice, rows: slice, values: Fields) -> None:
        """Write those of the values that belong here."""
        low = max(channels.start, self.first)
        high = min(channels.stop, self.first + len(self.tensor))
        if low < high:
            self.scaler.normalise_block(
                values[low - channels.start : high - channels.start],
                self.scaler_first + low - self.first,
                self.tensor[low - self.first : high - self.first, rows],
            )


@final
class SampleBlocks:
    """Reads and normalises one sample at a time; several threads may call it at once."""

    def __init__(
        self, store: Store, rows: slice, outputs: ChannelScaler, forcings: ChannelScaler
    ) -> None:
        """Prepare without reading.

        Args:
            store: gives the fields.
            rows: the band.
            outputs, forcings: normalise the output and the forcing channels.
        """
        self._store = store
        self._rows = rows
        self._outputs = outputs
        self._forcings = forcings
        names = store.channels.forcing
        self._stored = [i for i, name in enumerate(names) if name not in COMPUTED_FORCINGS]
        self._computed = [i for i, name in enumerate(names) if name in COMPUTED_FORCINGS]
        self._lock = Lock()
        self._readers: dict[tuple[int, bool], CheckedBlockReader | None] = {}

    @property
    def available(self) -> bool:
        """Whether the store can be read this way."""
        return self._reader(self._store.channels.num_outputs, bool(self._stored)) is not None

    def read(
        self, times: Times, frames: int, state: Tensor, forcing: Tensor, target: Tensor
    ) -> bool:
        """Read a sample; tensors without channels are left out.

        Args:
            times: `(frames + steps,)`, of the states, then of the targets.
            frames: the number of states.
            state: `(frames * C, h, W)`.
            forcing: `(steps * F, h, W)`, at the time of the newest state and the steps after it.
            target: `(steps * outputs, h, W)`.

        Returns:
            False if a field can't be read, or a value is missing or out of range. The tensors may
            have wrong values then.
        """
        channels = self._store.channels
        forced_steps = len(forcing) // max(1, len(channels.forcing))
        forcings = forcing.view(forced_steps, len(channels.forcing), *forcing.shape[1:])
        # The store may lack later times, if nothing is read at them.
        later_forcings = max(0, forced_steps - 1) if self._stored else 0
        needed = times if len(target) else times[: frames + later_forcings]
        for number, index in enumerate(self._store.time_indices(needed).tolist()):
            step = number - frames
            if step < 0:
                fields = state[number * channels.num_states : (number + 1) * channels.num_states]
            else:
                fields = target[step * channels.num_outputs : (step + 1) * channels.num_outputs]
            # The forcing of a step is that of the time before it.
            forced = 0 <= step + 1 < forced_steps
            outputs = [_Output(0, self._outputs, 0, fields)]
            if forced:
                outputs += [
                    _Output(
                        len(fields) + position, self._forcings, i, forcings[step + 1, i : i + 1]
                    )
                    for position, i in enumerate(self._stored)
                ]
            if not self._read_time(index, len(fields), forced, outputs):
                return False
        steps = times[frames - 1 : frames - 1 + forced_steps]
        for i in self._computed if forced_steps else ():
            values = self._store.computed_forcing(channels.forcing[i], steps, self._rows)
            self._forcings.normalise(values[:, None], forcings[:, i : i + 1], i)
        return True

    def _read_time(
        self, index: int, num_fields: int, forced: bool, outputs: Sequence[_Output]
    ) -> bool:
        """Read the first output channels, and the stored forcings, at one time."""
        forced = forced and bool(self._stored)
        if not num_fields and not forced:
            return True
        reader = self._reader(num_fields, forced)
        if reader is None:
            return False

        def write(channels: slice, rows: slice, values: Fields) -> None:
            for output in outputs:
                output.write(channels, rows, values)

        return reader.read(index, write)

    def _reader(self, num_fields: int, forced: bool) -> CheckedBlockReader | None:
        """Return the reader of some outputs and the stored forcings; None if there is none."""
        with self._lock:
            if (num_fields, forced) not in self._readers:
                channels = list(self._store.channels.output_channels[:num_fields])
                if forced:
                    names = self._store.channels.forcing
                    channels += [Channel(names[i]) for i in self._stored]
                reader = self._store.block_reader(channels, self._rows)
                self._readers[num_fields, forced] = reader
            return self._readers[num_fields, forced]
