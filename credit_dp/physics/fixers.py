"""Fixers: modules that correct the fields of a forecast step before anyone sees them.

A fixer takes the fields after a step, and the state before it, and returns fields with a property
that the model's have only roughly: no negative tracers (`nonnegative`), values within bounds
(`bounds`), and closed budgets of the globe: the mass of dry air (`dry_air`), water (`water`) and
energy (`energy`). `model.fixers` lists them in the order in which they act; each sees what the ones
before it have left. They act in training, in which the gradient goes through them, in forecasts and
in exported models, on normalised fields of one band of rows.

Budgets are computed in float64, which takes much more memory than the fields: backward computes
the fixers of a step again from the fields that they got. What bands share are means over the
globe: one all-reduce for each fixer and step, of a few numbers for each sample; its adjoint is
another one.

Sources: Schreck et al. 2024 (arXiv:2411.07814) for water and energy; Watt-Meyer et al. 2023
(arXiv:2310.02074) for dry air; Trenberth 1991 for the budgets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from credit_dp.config import ModelConfig
from credit_dp.config.model import BUDGETS, TOTAL_WATER
from credit_dp.data.channels import Channel
from credit_dp.data.grid import row_weights
from credit_dp.data.setup import TrainingData
from credit_dp.data.statistics import Statistics
from credit_dp.data.store import Store
from credit_dp.data.units import GRAVITY, WATER, is_accumulated, is_nonnegative
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.bands.reductions import sum_over_bands
from credit_dp.domain_parallel.recomputation import (
    RecomputationCounter,
    SavedTensors,
    checkpoint_modules,
    count_recomputation,
)
from credit_dp.domain_parallel.transport import SingleRankTransport, Transport
from credit_dp.errors import UserError
from credit_dp.physics.columns import (
    CONDENSATES,
    DRY_HEAT,
    EVAPORATION_HEAT,
    VAPOUR_HEAT,
    Hybrid,
    PhysicalChannels,
    hybrid_of,
    surface_geopotential,
)
from credit_dp.torch_private import MovedModule, buffers_of
from credit_dp.variable_names import canonical_name, long_name, possible_canonical_names

TINY_RAIN = 1e-12  # m in a step, mean of the globe: less can't be scaled to what is needed
# Positive downwards, as in ERA5.
TOP_FLUXES = [name for name in BUDGETS["energy"].fluxes if name.startswith("top_")]
SURFACE_FLUXES = [name for name in BUDGETS["energy"].fluxes if name.startswith("surface_")]


@final
class GlobalMean(nn.Module):
    """The mean over the globe, weighted by area, of fields of which each rank has some rows.

    Args:
        weights: areas of all rows, with mean 1.
        rows: this rank's band.
        columns: number of columns.
        transport: connects the ranks of the domain.
    """

    weights: Tensor

    def __init__(
        self, weights: NDArray[np.float64], rows: slice, columns: int, transport: Transport
    ) -> None:
        super().__init__()
        shares = weights[rows] / (len(weights) * columns)
        self.register_buffer("weights", torch.from_numpy(shares.copy()), persistent=False)
        self.transport = transport

    def forward(self, *fields: Tensor) -> tuple[Tensor, ...]:
        """Return the means of several fields, the same on all ranks; collective, differentiable.

        Shapes:
            `(B, 1, h, W)` each, float64 -> `(B, 1, 1, 1)` each.
        """
        sums = torch.stack([field.sum(-1) @ self.weights for field in fields])
        means = sum_over_bands(sums, self.transport)
        return tuple(means[..., None, None].unbind(0))


class Fixer(nn.Module):
    """Corrects the fields after a forecast step; see the module.

    `forward(fields, last)` returns corrected fields. Both are normalised. The fixer of a budget
    also returns its correction in physical units, without gradients; others None.

    Shapes:
        fields `(B, C + D, h, W)`, last `(B, C, h, W)`, the state before -> `(B, C + D, h, W)`,
        correction `(B, 1, h, W)`.
    """


@final
class Bounds(Fixer):
    """Clamps channels.

    Args:
        low, high: normalised, of each channel, `(C + D,)`; infinite without a bound.
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("low", low), ("high", high)):
            column = torch.tensor(values, dtype=torch.float64)[:, None, None]
            self.register_buffer(name, column, persistent=False)

    def forward(self, fields: Tensor, last: Tensor) -> tuple[Tensor, None]:
        """See `Fixer`."""
        return fields.clamp(self.low.to(fields), self.high.to(fields)), None


class Budget(Fixer):
    """Base of the fixers that close a budget of the globe's air."""

    def __init__(self, channels: PhysicalChannels, mean: GlobalMean) -> None:
        super().__init__()
        self.channels = channels
        self.layers = channels.layers()
        self.mean = mean

    def thickness(self, fields: Tensor) -> Tensor:
        """Return the thickness of the layers in Pa, `(B, N, h, W)`."""
        return self.layers.thickness(self.channels.read(fields, "surface_pressure"))

    def water_share(self, fields: Tensor, states: int) -> Tensor:
        """Return the share of water, vapour and condensates, in the mass of air: `(B, N, h, W)`.

        Condensates count if they are among the channels of the state, `states` in number: of the
        others the mass before the step is not known.
        """
        names = self.channels.water_species(states)
        return torch.stack([self.channels.read(fields, name) for name in names]).sum(0)


@final
class DryAirFixer(Budget):
    """Keeps the global mass of dry air.

    The surface pressure of dry air changes by the same amount everywhere, so that its gradients
    stay; humidity stays, and the total surface pressure follows from both. The correction is the
    mass of dry air that columns gain, in kg m-2.

    Source: Watt-Meyer et al. 2023, the correction of dry air.
    """

    def forward(self, fields: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """See `Fixer`."""
        states = last.shape[1]
        dry = 1 - self.water_share(fields, states)
        after = (dry * self.thickness(fields)).sum(1, keepdim=True)
        before = (1 - self.water_share(last, states)) * self.thickness(last)
        (lost,) = self.mean(before.sum(1, keepdim=True) - after)
        pressure = self.layers.surface_pressure(after + lost, dry)
        correction = lost.detach().expand_as(after) / GRAVITY
        return self.channels.write(fields, "surface_pressure", pressure), correction


@final
class WaterFixer(Budget):
    """Closes the global budget of water: what the air loses has rained, less what evaporated.

    Precipitation is multiplied by one number. If the globe would have to rain less than nothing, or
    there is no precipitation that could be scaled, evaporation takes the rest, the same amount
    everywhere. The correction is the water that the surface gains by both, in kg m-2.

    Args:
        precipitation, evaporation: names of variables in m over a step; evaporation is negative
            where water leaves the surface, as in ERA5.

    Source: Schreck et al. 2024, the correction of precipitation.
    """

    def __init__(
        self, channels: PhysicalChannels, mean: GlobalMean, precipitation: str, evaporation: str
    ) -> None:
        super().__init__(channels, mean)
        self.precipitation = precipitation
        self.evaporation = evaporation

    def forward(self, fields: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """See `Fixer`."""
        given = self.channels.read(fields, self.precipitation)
        rain = given.clamp(min=0)
        evaporation = self.channels.read(fields, self.evaporation)
        states = last.shape[1]
        lost = self.depth(last, states) - self.depth(fields, states)
        needed, found = self.mean(lost - evaporation, rain)
        factor = needed.clamp(min=0) / found.clamp(min=TINY_RAIN)
        fixed = rain * factor
        fields = self.channels.write(fields, self.precipitation, fixed)
        rest = needed - factor * found
        correction = WATER * (fixed - given + rest).detach()
        return self.channels.write(fields, self.evaporation, evaporation + rest), correction

    def depth(self, fields: Tensor, states: int) -> Tensor:
        """Return the water of columns as a depth in m, `(B, 1, h, W)`; see `water_share`."""
        water = (self.water_share(fields, states) * self.thickness(fields)).sum(1, keepdim=True)
        return water / (GRAVITY * WATER)


@final
class EnergyFixer(Budget):
    """Closes the global budget of energy: its change is what enters at the top and leaves below.

    The energy of all layers (internal and potential energy as enthalpy, latent heat, kinetic
    energy, and the geopotential of the surface) is multiplied by one number, and temperature
    changes accordingly. Total water, where vapour is not apart, counts as vapour. The correction is
    the energy that columns gain, in J m-2.

    Args:
        fluxes: names of the fluxes through top and surface, in J m-2 over a step.

    Source: Schreck et al. 2024, the correction of total energy.
    """

    def __init__(
        self, channels: PhysicalChannels, mean: GlobalMean, fluxes: Mapping[str, str]
    ) -> None:
        super().__init__(channels, mean)
        self.fluxes = fluxes

    def forward(self, fields: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """See `Fixer`."""
        heat, energy = self.heat_and_energy(fields)
        after = (energy * self.thickness(fields)).sum(1, keepdim=True) / GRAVITY
        before = self.heat_and_energy(last)[1] * self.thickness(last)
        target = before.sum(1, keepdim=True) / GRAVITY + self.gain(fields)
        needed, found = self.mean(target, after)
        share = needed / found - 1
        temperature = self.channels.read(fields, "temperature") + share * energy / heat
        correction = share.detach() * after.detach()
        return self.channels.write(fields, "temperature", temperature), correction

    def heat_and_energy(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        """Return heat capacity, in J kg-1 K-1, and energy, in J kg-1, of each layer."""
        read = self.channels.read
        ground = self.channels.surface_geopotential
        if ground is None:
            raise ValueError("an energy fixer needs the geopotential of the surface")
        vapour = read(fields, self.channels.humidity)
        heat = (1 - vapour) * DRY_HEAT + vapour * VAPOUR_HEAT
        east, north = (read(fields, f"{name}_component_of_wind") for name in "uv")
        kinetic = (east.square() + north.square()) / 2
        enthalpy = heat * read(fields, "temperature")
        return heat, enthalpy + EVAPORATION_HEAT * vapour + ground + kinetic

    def gain(self, fields: Tensor) -> Tensor:
        """Return the energy that columns gain in a step by fluxes, in J m-2: `(B, 1, h, W)`."""
        top = [self.channels.read(fields, self.fluxes[name]) for name in TOP_FLUXES]
        surface = [self.channels.read(fields, self.fluxes[name]) for name in SURFACE_FLUXES]
        return torch.stack(top).sum(0) - torch.stack(surface).sum(0)


@final
class Fixers(MovedModule):
    """The fixers of a run, in the order in which they act; see `Fixer`."""

    def __init__(self, fixers: Sequence[Fixer]) -> None:
        super().__init__()
        self.fixers = nn.ModuleList(fixers)
        checkpoint_modules(self, [""])

    def move(self, apply: Callable[[], object]) -> None:
        """Move the fixers; their numbers stay in float64 if a model that has them is cast.

        Raises:
            UserError: the device has no float64.
        """
        kept = [(module, dict(buffers_of(module))) for module in self.modules()]
        try:
            apply()
        except TypeError as error:  # of Apple's GPUs
            raise UserError(
                "model.fixers: need float64, which this device doesn't have. Choose another device "
                "or set model.fixers=[]."
            ) from error
        for module, buffers in kept:
            for name, buffer in buffers.items():
                moved = buffers_of(module)[name]
                if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                    buffers_of(module)[name] = buffer.to(moved.device)

    def forward(self, fields: Tensor, last: Tensor) -> Tensor:
        """Return corrected fields; collective over the domain if a budget is among the fixers."""
        return self.fields_and_corrections(fields, last)[0]

    @property
    def num_corrections(self) -> int:
        """Return the number of fixers of budgets, which have corrections."""
        return sum(isinstance(fixer, Budget) for fixer in self.fixers)

    def fields_and_corrections(self, fields: Tensor, last: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return corrected fields, as `forward`, and the corrections of budgets in their order.

        It is not computed again in backward.
        """
        corrections = []
        for fixer in self.fixers:
            fields, correction = fixer(fields, last)
            if correction is not None:
                corrections.append(correction)
        return fields, corrections


class FixerMemory(NamedTuple):
    """Bytes that the fixers of one forecast step need for backward.

    Attributes:
        kept: the fields that they got, and the means that they received.
        recomputed: what they save when backward computes them again, one step at a time.
    """

    kept: int = 0
    recomputed: int = 0


def count_fixer_memory(
    config: ModelConfig,
    channels: PhysicalChannels,
    step_hours: int,
    shape: tuple[int, int, int],
    states: int,
    dtype: torch.dtype,
) -> FixerMemory:
    """Return what the fixers of a config need for backward, from tensors without data.

    Args:
        channels: finds variables; its statistics don't matter.
        shape: samples, rows and columns of the band.
        states: number of channels of a state.
    """
    samples, rows, columns = shape
    # As a rank that has no others: a mean that it receives is of the same size.
    latitude = np.linspace(90.0, -90.0, rows + 1)
    mean = GlobalMean(row_weights(latitude), slice(0, rows), columns, SingleRankTransport())
    fixers = build_fixers(config, channels, mean, step_hours)
    if fixers is None:
        return FixerMemory()
    fields, last = (
        torch.empty((samples, count, rows, columns), dtype=dtype, device="meta")
        for count in (len(channels.channels), states)
    )
    kept = SavedTensors([last])  # the state, which is held anyway
    counter = RecomputationCounter(kept.add, [last, *(b for b in fixers.to("meta").buffers())])
    with count_recomputation(counter):
        fixers(fields.requires_grad_(), last)
    return FixerMemory(kept.bytes + counter.received, counter.recomputed)


def fixers_of_run(
    config: ModelConfig, data: TrainingData, manager: DomainParallelManager, device: torch.device
) -> Fixers | None:
    """Return the fixers of a run on this rank's rows; None if it has none.

    Raises:
        UserError: on all ranks, if the data lack what a fixer needs.
    """
    if not config.fixers:
        return None
    store = data.store
    if config.budgets:
        remedy = "Leave the fixers of budgets out of model.fixers."
        store.grid.check_global("model.fixers", remedy)
    rows = manager.rows(store.grid[0])
    hybrid: Hybrid = {}
    if config.budgets:
        check_budgets(config, store)
        check_signs(config, store, data.statistics)
        hybrid = hybrid_of(store)
    ground = surface_geopotential(store.channels.static, torch.from_numpy(store.read_static(rows)))
    channels = PhysicalChannels(
        store.channels.output_channels, store.config.variables, data.statistics, hybrid, ground
    )
    mean = GlobalMean(store.grid.weights, rows, store.grid[1], manager.transport)
    fixers = build_fixers(config, channels, mean, store.config.step_hours)
    return None if fixers is None else fixers.to(device)


def check_budgets(config: ModelConfig, store: Store) -> None:
    """Check that the variables of budgets have values everywhere, and fluxes are sums over a step.

    Which variables there are is checked with the config already.

    Raises:
        UserError: names the first variable that doesn't fit.
    """
    step = f"_{store.config.step_hours}hr"
    names = dict.fromkeys(channel.variable for channel in store.channels.output_channels)
    states = {channel.variable for channel in store.channels.prognostic}
    for fixer in config.fixers:
        needs = BUDGETS.get(fixer)
        if needs is None:
            continue
        for name in needs.static:
            if name not in map(canonical_name, store.channels.static):
                raise UserError(
                    f"model.fixers: {fixer} needs {name}, which {store.source.where} lacks. Add a "
                    f"store that has it to data.store, or take {fixer} out of model.fixers."
                )
        for name in names:
            canonical = canonical_name(name)
            if canonical.removesuffix(step) in needs.fluxes and not (
                canonical.endswith(step) or is_accumulated(name, store.config)
            ):
                raise UserError(
                    f"model.fixers: {fixer} needs sums over a step of {name}. Leave "
                    f"data.variables.{name}.accumulated out, or take {fixer} out of model.fixers."
                )
            is_needed = canonical.removesuffix(step) in (*needs.state, *needs.fluxes) or (
                canonical in (*CONDENSATES, TOTAL_WATER) and name in states
            )
            if is_needed and store.config.variable_config(name).fill is not None:
                raise UserError(
                    f"model.fixers: {fixer} needs {name} everywhere, but it has a fill. Leave "
                    f"data.variables.{name}.fill out, or take {fixer} out of model.fixers."
                )


# Signs of the global means of ERA5's fluxes, which are positive downwards.
MEAN_SIGNS = {
    "evaporation": -1,
    "top_net_solar_radiation": 1,
    "top_net_thermal_radiation": -1,
    "surface_net_solar_radiation": 1,
    "surface_net_thermal_radiation": -1,
    "surface_sensible_heat_flux": -1,
    "surface_latent_heat_flux": -1,
}


def check_signs(config: ModelConfig, store: Store, statistics: Statistics) -> None:
    """Check that the fluxes of budgets have the signs of ERA5, by their global means.

    Other data, as of climate models, often have fluxes upwards. A budget would be closed with the
    wrong sign. Fluxes that a function transforms are not checked: the statistics have the mean of
    its values.

    Raises:
        UserError: names the first variable with the other sign.
    """
    step = f"_{store.config.step_hours}hr"
    for channel, mean in zip(store.channels.output_channels, statistics.mean, strict=True):
        name = canonical_name(channel.variable).removesuffix(step)
        fixer = next((x for x in config.fixers if x in BUDGETS and name in BUDGETS[x].fluxes), None)
        is_plain = not store.config.variable_config(channel.variable).is_transformed
        if fixer and is_plain and mean * MEAN_SIGNS.get(name, 0) < 0:
            upward = "upward" if MEAN_SIGNS[name] < 0 else "negative"
            raise UserError(
                f"model.fixers: {fixer} needs {channel.variable} positive downwards, as in ERA5, "
                f"but its global mean is {mean:.3g}: it seems to be {upward}. Change its sign in "
                f"the store, or take {fixer} out of model.fixers."
            )


def build_fixers(
    config: ModelConfig, channels: PhysicalChannels, mean: GlobalMean, step_hours: int
) -> Fixers | None:
    """Return the fixers of a config; None if it has none.

    Raises:
        UserError: a variable is on no levels, or not known to `model.bounds`.
    """

    def of_step(name: str) -> str:
        """Return a variable's name, or that of its sum over a step (`_6hr`)."""
        return name if channels.has(name) else f"{name}_{step_hours}hr"

    builders: dict[str, Callable[[], Fixer]] = {
        "nonnegative": lambda: build_nonnegative(channels),
        "bounds": lambda: build_bounds(channels, config.bounds),
        "dry_air": lambda: DryAirFixer(channels, mean),
        "water": lambda: WaterFixer(
            channels, mean, of_step("total_precipitation"), of_step("evaporation")
        ),
        "energy": lambda: EnergyFixer(
            channels, mean, {name: of_step(name) for name in (*TOP_FLUXES, *SURFACE_FLUXES)}
        ),
    }
    return Fixers([builders[name]() for name in config.fixers]) if config.fixers else None


def build_nonnegative(channels: PhysicalChannels) -> Bounds:
    """Return the fixer that clamps at zero what can't be negative, as forecasts on disk are."""
    low = [-np.inf] * len(channels.channels)
    for index, channel in enumerate(channels.channels):
        if is_nonnegative(channel.variable, channels.config_of(index)):
            low[index] = channels.normalised_bound(index, 0.0)
    return Bounds(low, [np.inf] * len(low))


def bounded_channels(
    bounds: Mapping[str, Sequence[float]], channels: Sequence[Channel]
) -> dict[str, list[int]]:
    """Return the indices of the output channels of each name in `model.bounds`.

    Raises:
        UserError: a name is that of no output.
    """
    found = {}
    for bounded in bounds:
        names, level = possible_canonical_names(bounded), long_name(bounded)[1]
        found[bounded] = [
            index
            for index, channel in enumerate(channels)
            if bounded in (channel.name, channel.variable)
            or (level in (None, channel.level) and PhysicalChannels.name(channel) in names)
        ]
        if not found[bounded]:
            raise UserError(f"model.bounds.{bounded}: is no variable of the model's output.")
    return found


def build_bounds(channels: PhysicalChannels, bounds: Mapping[str, Sequence[float]]) -> Bounds:
    """Return the fixer of `model.bounds`, by variables, or by channels as `temperature_500`.

    Raises:
        UserError: a name is that of no output.
    """
    low = [-np.inf] * len(channels.channels)
    high = [np.inf] * len(channels.channels)
    for name, indices in bounded_channels(bounds, channels.channels).items():
        limits = bounds[name]
        for index in indices:
            low[index], high[index] = (channels.normalised_bound(index, x) for x in limits)
    return Bounds(low, high)
