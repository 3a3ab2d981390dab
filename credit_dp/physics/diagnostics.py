"""Fields that follow from a forecast's: geopotential, sea level pressure, column water, levels.

All of them need one column of air only, so that any band of rows computes its own. They are written
beside the model's fields (`credit-dp forecast diagnostics=[...]`), or, for fields on pressure
levels, in place of those on model levels (`pressure_levels=[...]`).

Below the ground and between the surface and the lowest level, temperature and geopotential follow
the method of ECMWF: a temperature `T*` of the surface from the lowest level, the lapse rate of the
standard atmosphere, and corrections where that would be too warm or too cold. Sources: ECMWF, IFS
documentation, part VI (post-processing); Trenberth, Berry & Buja 1993 (NCAR/TN-396+STR), which
gives the same equations; Simmons & Burridge 1981 for the hydrostatic equation on model levels;
ICAO 1993 (Doc 7488) for the standard atmosphere.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.config.model import AIR, CORRECTIONS, SUBSTITUTES
from credit_dp.constants import cached_constant
from credit_dp.data.channels import Channel
from credit_dp.data.store import Store
from credit_dp.data.units import GRAVITY
from credit_dp.errors import UserError
from credit_dp.physics.columns import (
    DRY_GAS_CONSTANT,
    GROUND,
    PASCALS,
    VAPOUR,
    VAPOUR_GAS_CONSTANT,
    HybridLayers,
    Layers,
    NamedChannels,
    PressureLayers,
    hybrid_of,
    sums_from_top,
    surface_geopotential,
)
from credit_dp.variable_names import canonical_name, possible_canonical_names

LAPSE_RATE = 0.0065  # K m-1, of the standard atmosphere
ALPHA = LAPSE_RATE * DRY_GAS_CONSTANT / GRAVITY  # dlnT / dlnp in it
WARM, COLD = 290.5, 255.0  # K, between which the standard lapse rate holds down to the sea
PLATEAU = 298.0  # K, at most, at the sea level below a plateau
PLATEAU_HEIGHTS = (2000.0, 2500.0)  # m, between which ground becomes a plateau
SEA_LEVEL = 0.001  # m2 s-2: lower ground is at sea level
# Of the standard atmosphere: temperature and pressure of the sea, and pressure of the tropopause.
STANDARD_TEMPERATURE, STANDARD_PRESSURE, STANDARD_TROPOPAUSE = 288.15, 101325.0, 22632.0

GEOPOTENTIAL = "geopotential"
TEMPERATURE = "temperature"
SEA_PRESSURE = "mean_sea_level_pressure"
COLUMN_WATER = "total_column_water"
COLUMN_VAPOUR = "total_column_water_vapour"
# What each needs: outputs of the model, and whether it needs the ground.
NEEDS: dict[str, tuple[tuple[str, ...], bool]] = {
    GEOPOTENTIAL: ((*AIR, TEMPERATURE), True),
    SEA_PRESSURE: (("surface_pressure", TEMPERATURE), True),
    COLUMN_WATER: (AIR, False),
    COLUMN_VAPOUR: (AIR, False),
}


class Surface(NamedTuple):
    """The lower end of columns, `(B, 1, h, W)` each: see `surface_of`.

    Attributes:
        pressure: in Pa.
        geopotential: in m2 s-2.
        temperature: in K, extrapolated from the lowest level.
    """

    pressure: Tensor
    geopotential: Tensor
    temperature: Tensor

    @property
    def sea_temperature(self) -> Tensor:
        """Return the temperature at sea level by the standard lapse rate."""
        return self.temperature + LAPSE_RATE * self.geopotential / GRAVITY


def surface_of(
    pressure: Tensor, geopotential: Tensor, temperature: Tensor, levels: Tensor
) -> Surface:
    """Return the lower end of columns; the lowest level is the lowest one above the ground.

    Shapes:
        pressure `(B, 1, h, W)`, geopotential `(h, W)`, temperature and levels (pressures)
        `(B, N, h, W)`, from the top.
    """
    lowest = ((levels <= pressure).sum(1, keepdim=True) - 1).clamp(min=0)
    level, above = levels.gather(1, lowest), temperature.gather(1, lowest)
    ground = geopotential.expand_as(pressure)
    return Surface(pressure, ground, above * (1 + ALPHA * (pressure / level - 1)))


def corrected(surface: Surface) -> tuple[Tensor, Tensor]:
    """Return `T*` and the lapse rate `dlnT / dlnp` with which air reaches down to the sea."""
    star, sea = surface.temperature, surface.sea_temperature
    # Nothing is divided by zero: ground at sea level has no air below.
    ground = torch.where(surface.geopotential.abs() < SEA_LEVEL, 1.0, surface.geopotential)
    towards_warm = DRY_GAS_CONSTANT * (WARM - star) / ground
    alpha = torch.full_like(star, ALPHA)
    alpha = torch.where((sea > WARM) & (star <= WARM), towards_warm, alpha)
    alpha = torch.where((sea > WARM) & (star > WARM), 0.0, alpha)
    star = torch.where((sea > WARM) & (star > WARM), (WARM + star) / 2, star)
    return torch.where((sea <= WARM) & (star < COLD), (COLD + star) / 2, star), alpha


def sea_level_pressure(surface: Surface) -> Tensor:
    """Return the pressure reduced to mean sea level in Pa."""
    star, alpha = corrected(surface)
    beta = surface.geopotential / (DRY_GAS_CONSTANT * star)
    exponent = beta * (1 - alpha * beta / 2 + (alpha * beta) ** 2 / 3)
    at_sea = surface.geopotential.abs() < SEA_LEVEL
    return torch.where(at_sea, surface.pressure, surface.pressure * exponent.exp())


def geopotential_below(surface: Surface, pressure: Tensor) -> Tensor:
    """Return the geopotential at pressures below the ground."""
    star, alpha = corrected(surface)
    down = (pressure / surface.pressure).log()
    y = alpha * down
    return surface.geopotential - DRY_GAS_CONSTANT * star * down * (1 + y / 2 + y**2 / 6)


def temperature_below(surface: Surface, pressure: Tensor) -> Tensor:
    """Return the temperature at pressures below the ground."""
    star, sea = surface.temperature, surface.sea_temperature
    low, high = PLATEAU_HEIGHTS
    height = surface.geopotential / GRAVITY
    share = ((height - low) / (high - low)).clamp(0, 1)
    # Below a plateau the sea level is no warmer than 298 K; half-way up to one, partly so.
    limited = sea + share * (sea.clamp(max=PLATEAU) - sea)
    ground = torch.where(height < low, 1.0, surface.geopotential)
    rate = (DRY_GAS_CONSTANT * (limited - star) / ground).clamp(min=0)
    alpha = torch.where(height < low, ALPHA, rate)
    y = alpha * (pressure / surface.pressure).log()
    return star * (1 + y + y**2 / 2 + y**3 / 6)


def level_pressures(layers: Layers, surface_pressure: Tensor) -> Tensor:
    """Return the pressure of levels in Pa: `(B, 1, h, W)` -> `(B, N, h, W)`.

    That of a model level is the mean of its interfaces'.
    """
    if isinstance(layers, HybridLayers):
        interfaces = layers.interfaces(surface_pressure)
        return (interfaces[:, 1:] + interfaces[:, :-1]) / 2
    levels = tuple(layers.levels)
    numbers = PASCALS * cached_constant(
        list, levels, surface_pressure.device, surface_pressure.dtype
    )
    shape = (len(surface_pressure), len(numbers), *surface_pressure.shape[2:])
    return numbers[:, None, None].expand(shape)


def hydrostatic_geopotential(
    layers: Layers, surface_pressure: Tensor, virtual_temperature: Tensor, ground: Tensor
) -> Tensor:
    """Return the geopotential of levels by the hydrostatic equation, `(B, N, h, W)`.

    A layer has the virtual temperature of its level. On pressure levels it reaches half-way to its
    neighbours in the logarithm of pressure, and levels below the ground have that temperature down
    to themselves.

    Args:
        surface_pressure: `(B, 1, h, W)`.
        virtual_temperature: `(B, N, h, W)`, from the top.
        ground: `(h, W)`, geopotential of the surface.
    """
    warmth = DRY_GAS_CONSTANT * virtual_temperature
    if isinstance(layers, HybridLayers):
        interfaces = layers.interfaces(surface_pressure)
        upper, lower = interfaces[:, :-1], interfaces[:, 1:]
        is_top = upper <= 0
        ratio = (lower / torch.where(is_top, lower, upper)).log()
        # Simmons & Burridge 1981, equations 2.24 and 2.25; ln 2 where the layer has no upper end.
        inner = 1 - upper / (lower - upper) * ratio
        inner = torch.where(is_top, torch.full_like(inner, 2.0).log(), inner)
        above = warmth * ratio
        below = sums_from_top(above.flip(1)).flip(1) - above  # of all layers below
        return ground + below + inner * warmth
    if not isinstance(layers, PressureLayers):
        raise TypeError(f"no hydrostatic equation for {type(layers).__name__}")
    # The integral of T dlnp from the uppermost level down to a pressure.
    depth = level_pressures(layers, surface_pressure)
    logs = depth.log()
    # Not the layers of masses: from level to level this is the trapezoidal rule in lnp.
    ends = torch.cat([logs[:, :1], (logs[:, 1:] + logs[:, :-1]) / 2], dim=1)
    widths = ends.diff(dim=1)

    def integral(log_pressure: Tensor) -> Tensor:
        total = torch.zeros_like(log_pressure)
        for layer in range(ends.shape[1]):
            part = log_pressure - ends[:, layer : layer + 1]
            part = part.clamp(min=0) if layer else part
            if layer < widths.shape[1]:
                part = torch.minimum(part, widths[:, layer : layer + 1])
            total = total + part * warmth[:, layer : layer + 1]
        return total

    return ground + integral(surface_pressure.log()) - integral(logs)


def interpolate_to_pressure(values: Tensor, levels: Tensor, pressure: float) -> Tensor:
    """Return fields at a pressure, linear in its logarithm; those of the end levels beyond them.

    Shapes:
        values and levels (pressures in Pa) `(B, N, h, W)`, from the top -> `(B, 1, h, W)`.
    """
    lower = (levels < pressure).sum(1, keepdim=True).clamp(1, levels.shape[1] - 1)
    ends = [(values.gather(1, i), levels.gather(1, i).log()) for i in (lower - 1, lower)]
    (top, start), (bottom, end) = ends
    at = torch.full_like(start, pressure).log()
    share = ((at - start) / (end - start)).clamp(0, 1)
    return top + share * (bottom - top)


def standard_geopotential(pressure: Tensor) -> Tensor:
    """Return the geopotential of the standard atmosphere at pressures, in m2 s-2.

    Its temperature falls by `LAPSE_RATE` up to the tropopause and is constant above. For pressures
    of a model's levels, where only its curvature matters.
    """
    share = (pressure.clamp(min=STANDARD_TROPOPAUSE) / STANDARD_PRESSURE).pow(ALPHA)
    tropopause: float = STANDARD_TEMPERATURE * (STANDARD_TROPOPAUSE / STANDARD_PRESSURE) ** ALPHA
    above: Tensor = (STANDARD_TROPOPAUSE / pressure).log().clamp(min=0)
    below: Tensor = GRAVITY / LAPSE_RATE * STANDARD_TEMPERATURE * (1 - share)
    return below + DRY_GAS_CONSTANT * tropopause * above


def virtual_temperature(temperature: Tensor, vapour: Tensor) -> Tensor:
    """Return the temperature at which dry air would be as light as this moist air."""
    return temperature * (1 + (VAPOUR_GAS_CONSTANT / DRY_GAS_CONSTANT - 1) * vapour)


def written_channels(
    named: NamedChannels, diagnostics: Sequence[str], pressure_levels: Sequence[int]
) -> tuple[Channel, ...]:
    """Return the channels that a forecast writes; see `WrittenFields`."""
    written: list[Channel] = []
    levels = list(dict.fromkeys(c.level for c in named.channels if c.level is not None))
    chosen = list(pressure_levels) or levels
    for variable in dict.fromkeys(channel.variable for channel in named.channels):
        own = [channel for channel in named.channels if channel.variable == variable]
        on_levels = bool(pressure_levels) and own[0].level is not None
        written += [Channel(variable, level) for level in chosen] if on_levels else own
    for name in diagnostics:
        on_levels = name == GEOPOTENTIAL
        written += [Channel(name, level) for level in chosen] if on_levels else [Channel(name)]
    return tuple(written)


class _Columns:
    """The columns of one set of fields, in float64; what several diagnostics need is kept."""

    def __init__(self, named: NamedChannels, layers: Layers, fields: Tensor) -> None:
        self.named = named
        self.layers = layers
        self.fields = fields
        self.pressure = self.read("surface_pressure")
        self.levels = level_pressures(layers, self.pressure)

    def read(self, name: str) -> Tensor:
        """Return a variable, its levels from the top."""
        return self.named.from_top(self.fields[:, self.named.select(name)].double(), name)

    @property
    def ground(self) -> Tensor:
        """Return the geopotential of the surface, `(h, W)`."""
        if self.named.surface_geopotential is None:
            raise ValueError("the geopotential of the surface is needed")
        return self.named.surface_geopotential

    @cached_property
    def surface(self) -> Surface:
        """Return the lower end of the columns."""
        return surface_of(self.pressure, self.ground, self.read(TEMPERATURE), self.levels)

    def geopotential(self) -> Tensor:
        """Return the geopotential of the levels, from the top."""
        humidity = self.read(self.named.humidity)
        warmth = virtual_temperature(self.read(TEMPERATURE), humidity)
        return hydrostatic_geopotential(self.layers, self.pressure, warmth, self.ground)


@final
class WrittenFields(nn.Module):
    """Computes the fields that a forecast writes from the fields of a model.

    These are the model's, on other levels if `pressure_levels` are given, then the diagnostics. All
    is computed in float64.

    Shapes:
        `(B, C + K, h, W)`, K corrections at the end -> `(B, C', h, W)`, the channels of
        `written_channels`; both in physical units.

    Args:
        named: finds channels; `check_written` has checked that all channels are there.
        diagnostics: names of fields to add, keys of `NEEDS`.
        pressure_levels: in hPa, to which variables on model levels are interpolated; empty: none.
        corrections: names of the corrections at the end of the fields.
    """

    def __init__(
        self,
        named: NamedChannels,
        diagnostics: Sequence[str],
        pressure_levels: Sequence[int],
        corrections: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.named = named
        self.diagnostics = tuple(diagnostics)
        self.pressure_levels = tuple(pressure_levels)
        self.corrections = tuple(corrections)
        # All variables have the same levels; not all diagnostics need both of these.
        name = TEMPERATURE if named.has(TEMPERATURE) else named.humidity
        self.layers = named.layers(name) if diagnostics or pressure_levels else None
        self.channels = written_channels(named, diagnostics, pressure_levels)

    def forward(self, fields: Tensor) -> Tensor:
        """Return the fields to write."""
        if self.layers is None:
            return fields
        columns = _Columns(self.named, self.layers, fields)
        parts = []
        for variable in dict.fromkeys(channel.variable for channel in self.named.channels):
            own = [i for i, c in enumerate(self.named.channels) if c.variable == variable]
            part = fields[:, own[0] : own[-1] + 1]
            if self.pressure_levels and self.named.channels[own[0]].level is not None:
                name = self.named.name(self.named.channels[own[0]])
                part = self._on_pressure(columns, name, columns.read(name)).to(fields)
            parts.append(part)
        parts += [self._diagnose(columns, name).to(fields) for name in self.diagnostics]
        return torch.cat(parts, dim=1)

    def _diagnose(self, columns: _Columns, name: str) -> Tensor:
        if name in self.corrections:
            index = len(self.named.channels) + self.corrections.index(name)
            return columns.fields[:, index : index + 1]
        if name == SEA_PRESSURE:
            return sea_level_pressure(columns.surface)
        if name == GEOPOTENTIAL:
            values = columns.geopotential()
            if self.pressure_levels:
                return self._on_pressure(columns, name, values)
            return self.named.in_channel_order(values, TEMPERATURE)
        species = [VAPOUR] if name == COLUMN_VAPOUR else self.named.water_species()
        share = torch.stack([columns.read(kind) for kind in species]).sum(0)
        thickness = columns.layers.thickness(columns.pressure)
        return (share * thickness).sum(1, keepdim=True) / GRAVITY

    def _on_pressure(self, columns: _Columns, name: str, values: Tensor) -> Tensor:
        """Interpolate a variable from model levels, `(B, N, h, W)` from the top."""
        pressures = [PASCALS * level for level in self.pressure_levels]
        if name not in (TEMPERATURE, GEOPOTENTIAL):
            parts = [interpolate_to_pressure(values, columns.levels, p) for p in pressures]
            return torch.cat(parts, dim=1)
        surface = columns.surface
        is_height = name == GEOPOTENTIAL
        lowest = surface.geopotential if is_height else surface.temperature
        levels = torch.cat([columns.levels, surface.pressure], dim=1)
        values = torch.cat([values, lowest], dim=1)
        below = geopotential_below if is_height else temperature_below
        # Geopotential is curved in the logarithm of pressure, as temperature falls with height:
        # between levels at 500 and 600 hPa a straight line is up to 6 m too low. What is
        # interpolated is the difference from the standard atmosphere, which is curved alike.
        standard = standard_geopotential(levels) if is_height else torch.zeros_like(levels)
        parts = []
        for pressure in pressures:
            part = interpolate_to_pressure(values - standard, levels, pressure)
            at = torch.full_like(part, pressure)
            part = part + standard_geopotential(at) if is_height else part
            part = torch.where(at > surface.pressure, below(surface, at), part)
            if is_height:  # air above the uppermost level has its temperature
                warmth = DRY_GAS_CONSTANT * columns.read(TEMPERATURE)[:, :1]
                above = values[:, :1] + warmth * (levels[:, :1] / at).log()
                part = torch.where(at < levels[:, :1], above, part)
            parts.append(part)
        return torch.cat(parts, dim=1)


def check_written(
    names: Sequence[str],
    static: Sequence[str],
    diagnostics: Sequence[str],
    pressure_levels: Sequence[int],
    corrections: Sequence[str] = (),
) -> None:
    """Check that a model has what diagnostics and pressure levels need.

    Args:
        names: of the model's outputs.
        corrections: that its fixers have.

    Raises:
        UserError: names what is missing.
    """
    outputs = {name for output in names for name in possible_canonical_names(output)}
    substitutes = {needed for needed, name in SUBSTITUTES.items() if name in outputs}
    has_ground = any(canonical_name(name) == GROUND for name in static)
    for name in diagnostics:
        if name in outputs - {GROUND}:
            raise UserError(
                f"diagnostics: {name} is an output of the model already. Take it out of "
                "diagnostics."
            )
    for fixer, name in CORRECTIONS.items():
        if name in diagnostics and name not in corrections:
            raise UserError(
                f"diagnostics: {name} needs {fixer} in model.fixers. Add it there, or leave it out "
                "of diagnostics."
            )
    needs = [(f"diagnostics: {name}", *NEEDS[name]) for name in diagnostics if name in NEEDS]
    if pressure_levels:
        needs.append(("pressure_levels: interpolation", ("surface_pressure", TEMPERATURE), True))
    for what, needed, needs_ground in needs:
        # The column of water vapour needs vapour itself, which total water is not.
        available = outputs if what.endswith(COLUMN_VAPOUR) else outputs | substitutes
        missing = [f"{name} among the model's outputs" for name in needed if name not in available]
        if needs_ground and not has_ground:
            missing.append(f"{GROUND} in data.static")
        if missing:
            raise UserError(
                f"{what} needs {' and '.join(missing)}. Leave it out, or train with what is "
                "missing."
            )


def written_fields(
    store: Store,
    rows: slice | None,
    diagnostics: Sequence[str],
    pressure_levels: Sequence[int],
    corrections: Sequence[str] = (),
) -> WrittenFields:
    """Return the module that computes the fields to write from those of a store's model.

    Args:
        rows: this rank's band; None reads nothing.
        corrections: see `WrittenFields`.

    Raises:
        UserError: the store has no model levels to interpolate from, or not their coefficients.
    """
    wanted = bool(diagnostics or pressure_levels)
    hybrid = hybrid_of(store) if wanted else {}
    if pressure_levels and not hybrid:
        raise UserError(
            f"pressure_levels: needs a model on model levels, but {store.source.where} has "
            "pressure levels. Leave pressure_levels out."
        )
    ground = None
    if wanted and rows is not None:
        static = torch.from_numpy(store.read_static(rows))
        ground = surface_geopotential(store.channels.static, static)
    named = NamedChannels(store.channels.output_channels, hybrid, ground)
    return WrittenFields(named, diagnostics, pressure_levels, corrections)
