"""Augmentation of training samples: turned, mirrored and noisy copies of what the store has.

Each is drawn anew for every step and sample, from (seed, step, sample) alone: a sample is changed
in the same way on every mesh, and a resumed run draws what an uninterrupted one does.

- `trainer.shift_longitude` turns the globe by a random number of columns: all fields of a sample,
  static ones too. Rows stay where they are.
- `trainer.mirror` exchanges the hemispheres of this share of the samples. Rows travel between
  ranks. Winds to the north, vorticity and the like change sign, and so do the coordinates of the
  season: the laws of motion hold in the mirrored world half a year later.
- `trainer.input_noise` adds noise to the input states, which the model has to remove again.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from credit_dp.config import Config, TrainerConfig, VariableConfig
from credit_dp.constants import constant_tensor
from credit_dp.data.loader import Batch
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import TrainingData
from credit_dp.data.store import Store
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import fetch_rows
from credit_dp.errors import UserError
from credit_dp.random_streams import random_seed, random_stream
from credit_dp.variable_names import canonical_name

# Keys of the two streams of a sample, see `credit_dp.random_streams`.
GEOMETRY, NOISE = 1, 2
# Names of ERA5 and of computed fields; the direction of a pole is part of what they mean.
SIGN_CHANGING = (
    "*v_component_*",
    "*northward_*",
    "*meridional_*",
    "*vorticity*",
    "*stream*function*",
    "angle_of_sub_gridscale_orography",
    "latitude",
    "lat",
    "latitude_sin",
    "sin_latitude",
    "day_of_year_sin",
    "day_of_year_cos",
    # Of anemoi's datasets, of climate models and of NCEP, and what latitude or season determine.
    "sin_julian_day",
    "cos_julian_day",
    "*coriolis*",
    "*declination*",
    "va",
    "vas",
    "tauv",
    "tauy",
    "vgrd*",
    "vwnd*",
    # Short names of ECMWF and of its netCDF files that have no long name in the package.
    "v10n",
    "vst",
    "nsss",
    "inss",
    "mntss",
    "mgws",
    "viman",
    "viken",
    "vithn",
    "viwvn",
    "vign",
    "vitoen",
    "viozn",
)
# Angles from the north: `180 - x` in a mirrored world, which no sign can express.
DIRECTIONS = ("*_direction", "mwd", "mdts", "mdww")


def changes_sign(name: str, variable: VariableConfig) -> bool:
    """Whether a variable changes sign in a mirrored world, by the config, otherwise by its name."""
    if variable.sign_changes is not None:
        return variable.sign_changes
    return is_one_of(name, SIGN_CHANGING)


def is_one_of(name: str, patterns: Sequence[str]) -> bool:
    """Whether a variable's long name, or its short one in any case, fits one of the patterns."""
    long = canonical_name(name).lower()
    return any(fnmatchcase(long, pattern) for pattern in patterns)


@final
class Mirror:
    """Exchanges the hemispheres of samples."""

    def __init__(self, manager: DomainParallelManager, height: int) -> None:
        self._transport = manager.transport
        bands = manager.partition(height)
        # The rows of a band are those of the mirrored band, from the equator's other side.
        needed = tuple(
            (RowRange(height - stop, height - start, flipped=True),)
            for start, stop in pairwise(bands.bounds)
        )
        self._exchange = RowExchange(bands, needed, manager.domain_rank)

    def __call__(self, fields: Tensor) -> Tensor:
        """Return mirrored fields, `(B, C, h, W)`, without changes of sign; collective."""
        return fetch_rows(fields.contiguous(), self._exchange, self._transport)


@final
class Augmentation:
    """Changes the samples of a training step; see the module."""

    def __init__(
        self,
        config: TrainerConfig,
        data: TrainingData,
        manager: DomainParallelManager,
        like: Tensor,
        seed: int,
    ) -> None:
        store = data.store
        self.config = config
        self.seed = seed
        self.rows = manager.rows(store.grid[0])
        self.columns = store.grid[1]
        self.states = store.channels.num_states
        self._mirror = Mirror(manager, store.grid[0])
        normaliser = Normaliser.of(data, like.dtype, like.device)
        self._signs = _signs_and_offsets(store, normaliser)
        self._std = normaliser.std[: self.states]
        masks = store.valid_mask(self.rows) if config.input_noise else None
        self._valid = None if masks is None else torch.from_numpy(masks).to(like.device)

    def __call__(self, batch: Batch, step: int, samples: Sequence[int]) -> Batch:
        """Return the augmented batch; collective over the domain.

        Args:
            samples: numbers of the samples in the global batch, the same on all ranks that share
                a globe.
        """
        shifts, mirrored = [], []
        for sample in samples:
            # Both are always drawn, so that one does not depend on whether the other is on.
            random = random_stream(self.seed, step, sample, GEOMETRY, 0, 1)
            shifts.append(int(random.integers(self.columns)) if self.config.shift_longitude else 0)
            mirrored.append(bool(random.random() < self.config.mirror))
        if self.config.input_noise and batch.state.shape[1]:
            batch = replace(batch, state=batch.state + self._noise(batch.state, step, samples))
        if any(mirrored):
            batch = self._mirrored(batch, np.flatnonzero(mirrored).tolist())
        return _turned(batch, shifts) if any(shifts) else batch

    def _noise(self, states: Tensor, step: int, samples: Sequence[int]) -> Tensor:
        """Return noise for the input states, `(B, frames * C, h, W)`.

        Each row has numbers of its own, so that any band draws those of its rows. Within a row the
        newest state comes first: the last stage of a pipeline has no other.
        """
        frames = states.shape[1] // self.states
        shape = (frames, self.states, self.columns)
        noise = torch.empty_like(states)
        generator = torch.Generator(states.device)
        for index, sample in enumerate(samples):
            for row in range(states.shape[2]):
                key = self.rows.start + row
                generator.manual_seed(random_seed(self.seed, step, sample, NOISE, key, 1))
                drawn = [
                    torch.randn(
                        shape[1:], generator=generator, dtype=states.dtype, device=states.device
                    )
                    for _ in range(frames)
                ]
                noise[index, :, row] = torch.cat(drawn[::-1])
        amplitude = self.config.input_noise * self._std
        if self._valid is not None:
            # Points without values keep their fill.
            amplitude = amplitude * self._valid[: self.states]
        return noise * amplitude.repeat(frames, 1, 1)

    def _mirrored(self, batch: Batch, samples: list[int]) -> Batch:
        names = tuple(self._signs)
        parts = [getattr(batch, name) for name in names]
        index = constant_tensor(samples, batch.state.device)
        chosen = torch.cat([part.index_select(0, index) for part in parts], dim=1)
        # One exchange of all fields.
        sizes = [part.shape[1] for part in parts]
        fields = torch.split(self._mirror(chosen), sizes, dim=1)
        changed: dict[str, Any] = {}
        for name, part, mirror in zip(names, parts, fields, strict=True):
            signs, offsets = self._signs[name]
            # The parts of a batch hold several times, or nothing on some stages of a pipeline.
            times = part.shape[1] // max(1, len(signs))
            mirror = mirror * signs.repeat(times, 1, 1) + offsets.repeat(times, 1, 1)
            changed[name] = part.index_copy(0, index, mirror)
        return replace(batch, **changed)


def _turned(batch: Batch, shifts: Sequence[int]) -> Batch:
    def turn(fields: Tensor) -> Tensor:
        pairs = zip(fields.unbind(0), shifts, strict=True)
        return torch.stack([field.roll(shift, -1) for field, shift in pairs])

    names = ("state", "forcing", "static", "target")
    changed: dict[str, Any] = {name: turn(getattr(batch, name)) for name in names}
    return replace(batch, **changed)


def _signs_and_offsets(store: Store, normaliser: Normaliser) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what normalised channels are multiplied by, and what is added, in a mirrored world.

    A field `x` that changes sign is `-x` there: `(-x - shift) / scale`, which is the normalised
    field times -1, minus `2 * shift / scale`.

    Shapes:
        `(C, 1, 1)` each, for the parts of a batch and one of their times.
    """
    channels = store.channels
    outputs = [channel.variable for channel in channels.output_channels]
    names = {
        "state": outputs[: channels.num_states],
        "forcing": list(channels.forcing),
        "static": list(channels.static),
        "target": outputs,
    }
    found = {}
    for part, of_part in names.items():
        shift, scale = normaliser.shift_and_scale(part)
        shift, scale = shift[: len(of_part)], scale[: len(of_part)]
        changed = [changes_sign(name, store.config.variable_config(name)) for name in of_part]
        flips = constant_tensor(changed, shift.device, torch.bool)[:, None, None]
        signs = torch.where(flips, -1.0, 1.0).to(shift)
        found[part] = (signs, torch.where(flips, -2 * shift / scale, 0.0))
    return found


def build_augmentation(
    config: Config, data: TrainingData, manager: DomainParallelManager, like: Tensor
) -> Augmentation | None:
    """Return the augmentation of a run; None if it has none.

    Raises:
        UserError: on all ranks, if the data can't be turned or mirrored.
    """
    trainer = config.trainer
    if not (trainer.shift_longitude or trainer.mirror or trainer.input_noise):
        return None
    check_augmentation(trainer, data.store)
    return Augmentation(trainer, data, manager, like, config.seed)


def check_augmentation(trainer: TrainerConfig, store: Store) -> None:
    """Refuse data that can't be turned or mirrored.

    Raises:
        UserError: names the key, and what the data lack.
    """
    for key in ("shift_longitude", "mirror"):
        if getattr(trainer, key):
            if not store.grid.is_periodic:  # a band of latitudes turns as the globe does
                store.grid.check_global(f"trainer.{key}", f"Leave trainer.{key} out.")
            _check_fills(store, f"trainer.{key}")
    latitude = store.latitude
    if trainer.mirror and not np.allclose(latitude, -latitude[::-1], rtol=0, atol=1e-3):
        raise UserError(
            f"trainer.mirror: needs latitudes that are the same in both hemispheres, but "
            f"{store.source.where} has {latitude[0]:g} to {latitude[-1]:g}. Set trainer.mirror=0."
        )
    if trainer.mirror:
        _check_signs(store)


def _check_fills(store: Store, key: str) -> None:
    """Refuse outputs with points without values: the loss leaves out the same points always."""
    for channel in store.channels.output_channels:
        if store.config.variable_config(channel.variable).fill is not None:
            raise UserError(
                f"{key}: needs values on all points, but {channel.variable} has a fill. Leave "
                f"{key} out, or {channel.variable}."
            )


def _check_signs(store: Store) -> None:
    """Refuse directions, and variables that change sign but are normalised by a function."""
    channels = store.channels
    outputs = (channel.variable for channel in channels.output_channels)
    for name in (*outputs, *channels.forcing, *channels.static):
        variable = store.config.variable_config(name)
        if variable.sign_changes is None and is_one_of(name, DIRECTIONS):
            raise UserError(
                f"trainer.mirror: {name} is a direction, which becomes 180 degrees minus itself in "
                f"a mirrored world. Leave {name} or trainer.mirror out, or set "
                f"data.variables.{name}.sign_changes to true or false."
            )
        if changes_sign(name, variable) and variable.is_transformed:
            raise UserError(
                f"trainer.mirror: {name} changes sign, and can't be normalised by "
                f"{variable.normalise}. Change data.variables.{name}."
            )
