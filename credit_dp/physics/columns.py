"""Columns of air: constants, vertical layers, and channels in physical units.

Levels are counted from the top. A level stands for a layer of air; `Layers` says how thick it is,
as a pressure difference: on pressure levels a layer reaches half-way to its neighbours (in
pressure), the uppermost to the top of the atmosphere and the lowest to the ground, and layers are
cut off at the surface pressure; on model levels the interfaces are at `a + b * surface pressure`.
All of this acts on single columns, so that any band of rows computes its own, in float64.

Source of the constants: ECMWF, IFS documentation Cy47r3, part IV, chapter 12.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from credit_dp.config import VariableConfig
from credit_dp.config.model import TOTAL_WATER
from credit_dp.data.channels import Channel
from credit_dp.data.normaliser import ChannelScaler, ChannelStatistics
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.data.transforms import QuantileMap, apply_transform_tensor, invert_transform
from credit_dp.errors import UserError
from credit_dp.variable_names import canonical_name, long_name

DRY_GAS_CONSTANT = 287.0597  # J kg-1 K-1
VAPOUR_GAS_CONSTANT = 461.525  # J kg-1 K-1
DRY_HEAT = 1004.709  # J kg-1 K-1, of dry air at constant pressure
VAPOUR_HEAT = 1846.1  # J kg-1 K-1, of water vapour at constant pressure
EVAPORATION_HEAT = 2.5008e6  # J kg-1

PASCALS = 100.0  # in one hPa
GROUND = "geopotential_at_surface"
SURFACE = 1e5  # Pa, the surface pressure for which pressures of model levels are stated
LOWEST_PRESSURE = 300  # hPa: levels that are all above it lack most of a column's air
GROUND_TOLERANCE = (1.0, 1e-4)  # of a (in Pa) and b at the surface, where they are 0 and 1
VAPOUR = "specific_humidity"  # or `TOTAL_WATER`
CONDENSATES = (
    "specific_cloud_liquid_water_content",
    "specific_cloud_ice_water_content",
    "specific_rain_water_content",
    "specific_snow_water_content",
)


class Layers(nn.Module):
    """The layers of air that levels stand for.

    Attributes:
        levels: in the order of the layers, from the top.
    """

    levels: tuple[int, ...]

    @abstractmethod
    def thickness(self, surface_pressure: Tensor) -> Tensor:
        """Return the thickness of each layer in Pa.

        Shapes:
            `(B, 1, h, W)` -> `(B, N, h, W)`.
        """

    @abstractmethod
    def surface_pressure(self, mass: Tensor, share: Tensor) -> Tensor:
        """Return the surface pressure at which a column of air has a given mass.

        The inverse of `(share * thickness(surface_pressure)).sum(1, keepdim=True)`.

        Shapes:
            mass `(B, 1, h, W)`, in Pa; share `(B, N, h, W)`, of the layer's mass that counts,
            above 0 -> `(B, 1, h, W)`.
        """


@final
class PressureLayers(Layers):
    """Layers around pressure levels, cut off at the surface.

    Args:
        levels: in hPa, rising.
    """

    edges: Tensor
    widths: Tensor

    def __init__(self, levels: Sequence[int]) -> None:
        super().__init__()
        self.levels = tuple(levels)
        pressure = PASCALS * np.array(levels, np.float64)
        edges = np.concatenate([[0.0], (pressure[1:] + pressure[:-1]) / 2])
        # The lowest layer reaches down to the surface, wherever that is.
        widths = np.append(np.diff(edges), np.inf)
        self.register_buffer("edges", _column(edges), persistent=False)
        self.register_buffer("widths", _column(widths), persistent=False)

    def thickness(self, surface_pressure: Tensor) -> Tensor:
        """See `Layers`."""
        return _between(surface_pressure - self.edges, self.widths)

    def surface_pressure(self, mass: Tensor, share: Tensor) -> Tensor:
        """See `Layers`: layer after layer is filled from the top, until the mass is used up."""
        filled = share[:, :-1] * self.widths[:-1]
        above = torch.cat([torch.zeros_like(mass), sums_from_top(filled)], dim=1)
        return _between((mass - above) / share, self.widths).sum(1, keepdim=True)


@final
class HybridLayers(Layers):
    """Layers between interfaces at pressures of `a + b * surface pressure`.

    Args:
        levels: numbers of the model levels, rising.
        a, b: `(N + 1,)`, from the top; a in Pa.
    """

    a: Tensor
    b: Tensor

    def __init__(self, levels: Sequence[int], a: Sequence[float], b: Sequence[float]) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.register_buffer("a", _column(np.array(a, np.float64)), persistent=False)
        self.register_buffer("b", _column(np.array(b, np.float64)), persistent=False)

    def interfaces(self, surface_pressure: Tensor) -> Tensor:
        """Return the pressure at the interfaces: `(B, 1, h, W)` -> `(B, N + 1, h, W)`, in Pa."""
        return self.a + self.b * surface_pressure

    def thickness(self, surface_pressure: Tensor) -> Tensor:
        """See `Layers`."""
        return self.a.diff(dim=0) + self.b.diff(dim=0) * surface_pressure

    def surface_pressure(self, mass: Tensor, share: Tensor) -> Tensor:
        """See `Layers`; thickness is linear in the surface pressure."""
        fixed = (share * self.a.diff(dim=0)).sum(1, keepdim=True)
        return (mass - fixed) / (share * self.b.diff(dim=0)).sum(1, keepdim=True)


def _column(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values)[:, None, None]


def sums_from_top(values: Tensor) -> Tensor:
    """Return the sums over each layer and all above it, `(B, N, h, W)`.

    Layer by layer: on GPUs `cumsum` is not deterministic, and refused where that is needed.
    """
    return torch.stack(list(accumulate(values.unbind(1))), dim=1)


def _between(values: Tensor, high: Tensor) -> Tensor:
    """Clamp values between 0 and `high`."""
    return torch.minimum(values.clamp(min=0), high)


Hybrid = Mapping[str, Sequence[float]]  # `a` and `b` of `HybridLayers`; empty on pressure levels


def build_layers(levels: Sequence[int], hybrid: Hybrid) -> Layers:
    """Return the layers of levels: of model levels with `hybrid`, else of pressure levels."""
    rising = sorted(levels)
    if hybrid:
        return HybridLayers(rising, hybrid["a"], hybrid["b"])
    return PressureLayers(rising)


def on_model_levels(store: Store) -> bool:
    """Whether the levels of a run are model levels."""
    channels = store.channels.output_channels
    return any(store.source.variables[channel.variable].model_levels for channel in channels)


def hybrid_of(store: Store) -> dict[str, list[float]]:
    """Return the coefficients at the interfaces of a run's model levels, from the top.

    `data.hybrid` has them, or the store, for all of its levels. On pressure levels the result is
    empty.

    Raises:
        UserError: neither has them, they are those of other levels, or end above the ground; or
            levels that are no model levels can't be pressures of whole columns.
    """
    rising, given = sorted(store.levels), store.config.hybrid
    if not on_model_levels(store):
        if rising and rising[-1] < LOWEST_PRESSURE:
            raise UserError(
                f"{store.source.where}: has levels of {rising[0]} to {rising[-1]}, which are no "
                "pressures in hPa down to the ground. If they are model levels, set "
                "data.hybrid={a:[...],b:[...]}; otherwise add lower levels to data.levels."
            )
        return {}
    if given:
        found = {name: list(given[name]) for name in ("a", "b")}
        _check_ground(found, "data.hybrid", "Change the last values of data.hybrid.")
        return found
    stored = store.source.hybrid
    if stored is None:
        raise UserError(
            f"{store.source.where}: has model levels, whose pressure needs coefficients a and b, "
            "but neither hyai and hybi (in Pa, hPa or multiples of P0, with pressures that rise "
            "from the top) nor data.hybrid has them. Set data.hybrid={a:[...],b:[...]}."
        )
    first, last = rising[0], rising[-1]
    if len(rising) != last - first + 1 or not 0 < first <= last < len(stored[0]):
        raise UserError(
            f"{store.source.where}: has coefficients of the levels 1 to {len(stored[0]) - 1}, and "
            f"data.levels has {len(rising)} of {first} to {last}. Choose levels without a gap, or "
            "set data.hybrid to a and b at the interfaces of these levels."
        )
    # Interface k is the lower one of level k, and 0 is the top.
    found = {n: x[first - 1 : last + 1].tolist() for n, x in zip("ab", stored, strict=True)}
    lowest = len(stored[0]) - 1
    advice = f"Add the levels down to {lowest} to data.levels, or set data.hybrid."
    if last == lowest:
        advice = "Set data.hybrid={a:[...],b:[...]}."
    _check_ground(found, f"{store.source.where}: data.levels ends at level {last}", advice)
    return found


def pressures_of(store: Store) -> dict[int, float] | None:
    """Return the pressure of each model level over a surface at 1000 hPa, in hPa.

    None on pressure levels, and on model levels whose coefficients neither `data.hybrid` nor the
    store has.
    """
    levels = sorted(store.levels)
    given, stored = store.config.hybrid, store.source.hybrid
    numbers = levels
    if given:
        a, b, numbers = np.array(given["a"]), np.array(given["b"]), list(range(1, len(levels) + 1))
    elif stored is not None and on_model_levels(store):
        a, b = stored
    else:
        return None
    interfaces = (a + b * SURFACE) / PASCALS
    if levels and not 0 < numbers[0] <= numbers[-1] < len(interfaces):
        return None
    # Level k, counted from 1, lies between the interfaces k - 1 and k.
    return {
        level: float(interfaces[number - 1] + interfaces[number]) / 2
        for level, number in zip(levels, numbers, strict=True)
    }


def _check_ground(hybrid: Hybrid, where: str, advice: str) -> None:
    """Refuse levels whose lowest layer ends above the ground: a column of air would lack a part."""
    a, b = hybrid["a"][-1], hybrid["b"][-1]
    tolerance = GROUND_TOLERANCE
    if abs(a) > tolerance[0] or abs(b - 1) > tolerance[1]:
        raise UserError(
            f"{where}: needs the ground, with a=0 and b=1, as the last interface, got a={a:g} and "
            f"b={b:g}. {advice}"
        )


def surface_geopotential(names: Sequence[str], static: Tensor) -> Tensor | None:
    """Return the geopotential of the surface among static fields `(S, h, W)`, if it is there."""
    found = [index for index, name in enumerate(names) if canonical_name(name) == GROUND]
    return static[found[0]] if found else None


class NamedChannels(nn.Module):
    """Finds output channels by the names of ERA5, with the levels of a variable from the top.

    Args:
        channels: the output channels, whose first ones are the state.
        hybrid: coefficients of model levels; see `build_layers`.
        surface_geopotential: `(h, W)`, on this rank's rows, if the data have it.
    """

    surface_geopotential: Tensor | None

    def __init__(
        self, channels: Sequence[Channel], hybrid: Hybrid, surface_geopotential: Tensor | None
    ) -> None:
        super().__init__()
        self.channels = tuple(channels)
        self.hybrid = hybrid
        ground = None if surface_geopotential is None else surface_geopotential.double()
        self.register_buffer("surface_geopotential", ground, persistent=False)

    @staticmethod
    def name(channel: Channel) -> str:
        """Return the name of a channel's variable in ERA5, without the level.

        A field on one pressure level, such as `Z500`, keeps its name: it is none of the levels of a
        variable that is on levels.
        """
        name, level = long_name(channel.variable, channel.level)
        return name if level == channel.level else channel.variable

    def has(self, name: str) -> bool:
        """Whether a field of this name is among the channels."""
        return any(self.name(channel) == name for channel in self.channels)

    def levels(self, name: str) -> list[int]:
        """Return the levels of a variable, in the order of its channels.

        Raises:
            UserError: it is on no levels.
        """
        levels = [c.level for c in self.channels if self.name(c) == name and c.level is not None]
        if not levels:
            raise UserError(f"data.levels: {name} is needed on levels, but it is on none.")
        return levels

    @property
    def humidity(self) -> str:
        """Return the name of vapour, or of total water where vapour is not apart."""
        return VAPOUR if self.has(VAPOUR) or not self.has(TOTAL_WATER) else TOTAL_WATER

    def layers(self, name: str = "") -> Layers:
        """Return the layers of the levels of a variable, by default of humidity."""
        return build_layers(self.levels(name or self.humidity), self.hybrid)

    def water_species(self, count: int | None = None) -> list[str]:
        """Return the names of vapour and of the condensates among the first `count` channels.

        Total water is all of them in one.
        """
        names = {self.name(channel) for channel in self.channels[:count]}
        if TOTAL_WATER in names:
            return [TOTAL_WATER]
        return [VAPOUR, *(name for name in CONDENSATES if name in names)]

    def select(self, name: str) -> slice:
        """Return the channels of a variable, which are adjacent.

        Raises:
            UserError: there are none.
        """
        indices = [i for i, channel in enumerate(self.channels) if self.name(channel) == name]
        if not indices:
            raise UserError(f"data.prognostic: {name} is needed, which is not among the outputs.")
        return slice(indices[0], indices[-1] + 1)

    def from_top(self, values: Tensor, name: str) -> Tensor:
        """Return the levels of a variable from the top, `(B, N, h, W)` in channel order before."""
        return _reorder(values, self._order(name))

    def in_channel_order(self, values: Tensor, name: str) -> Tensor:
        """Undo `from_top`."""
        return _reorder(values, np.argsort(self._order(name)).tolist())

    def _order(self, name: str) -> list[int]:
        """Return the indices of a variable's levels from the top."""
        levels = [channel.level or 0 for channel in self.channels[self.select(name)]]
        order: list[int] = np.argsort(levels, kind="stable").tolist()
        return order


def _reorder(values: Tensor, order: list[int]) -> Tensor:
    """Return levels, `(B, N, h, W)`, in another order; rising and falling ones need no index."""
    rising = list(range(len(order)))
    if order == rising:
        return values
    return values.flip(1) if order == rising[::-1] else values[:, order]


Transform = Callable[[Tensor, VariableConfig, QuantileMap | None], Tensor]


@final
class PhysicalChannels(NamedChannels):
    """Reads and writes variables of normalised fields in physical units and in float64.

    Differentiable, and not clamped: forecasts that are written are clamped only then.

    Args:
        channels, hybrid, surface_geopotential: see `NamedChannels`.
        statistics: with which channels are normalised.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        channels: Sequence[Channel],
        variables: Mapping[str, VariableConfig],
        statistics: Statistics,
        hybrid: Hybrid,
        surface_geopotential: Tensor | None,
    ) -> None:
        super().__init__(channels, hybrid, surface_geopotential)
        self.variables = variables
        names = [channel.variable for channel in channels]
        scaler = ChannelScaler(
            names, variables, ChannelStatistics.of(statistics), torch.float64, None
        )
        self.register_buffer("shift", scaler.shift, persistent=False)
        self.register_buffer("scale", scaler.scale, persistent=False)
        self.quantiles = nn.ModuleDict(
            {str(channel): map_of for channel, map_of in scaler.quantiles.items()}
        )

    def read(self, fields: Tensor, name: str) -> Tensor:
        """Return a variable of normalised fields in its unit, its levels from the top.

        Shapes:
            `(B, C, h, W)` -> `(B, N, h, W)`, of all channels or those of a state.
        """
        channels = self.select(name)
        values = fields[:, channels].double() * self.scale[channels] + self.shift[channels]
        values = self._transform_levels(invert_transform, values, channels)
        return self.from_top(values, name)

    def write(self, fields: Tensor, name: str, values: Tensor) -> Tensor:
        """Return normalised fields with other values, in the unit, of one variable."""
        channels = self.select(name)
        values = self.in_channel_order(values, name)
        values = self._transform_levels(apply_transform_tensor, values, channels)
        values = (values - self.shift[channels]) / self.scale[channels]
        parts = [fields[:, : channels.start], values.to(fields), fields[:, channels.stop :]]
        return torch.cat(parts, dim=1)

    def normalised_bound(self, channel: int, value: float) -> float:
        """Return a number in the unit of a channel in its normalised units."""
        transformed = torch.full((), value, dtype=torch.float64, device=self.shift.device)
        transformed = apply_transform_tensor(
            transformed, self.config_of(channel), self._quantiles_of(channel)
        )
        return float((transformed - self.shift[channel]) / self.scale[channel])

    def config_of(self, channel: int) -> VariableConfig:
        """Return the config of a channel's variable."""
        return self.variables.get(self.channels[channel].variable) or VariableConfig()

    def _quantiles_of(self, channel: int) -> QuantileMap | None:
        if str(channel) not in self.quantiles:
            return None
        return cast("QuantileMap", self.quantiles[str(channel)])

    def _transform_levels(self, transform: Transform, values: Tensor, channels: slice) -> Tensor:
        """Transform the levels of a variable, `(B, N, h, W)`; quantiles differ between them."""
        config = self.config_of(channels.start)
        if self._quantiles_of(channels.start) is None:
            return transform(values, config, None)
        levels = zip(values.unbind(1), range(channels.start, channels.stop), strict=True)
        return torch.stack(
            [transform(level, config, self._quantiles_of(channel)) for level, channel in levels],
            dim=1,
        )
