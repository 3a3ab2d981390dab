"""The range that values must lie in, wherever they enter: damaged chunks, fill values, wrong units.

A damaged chunk without a checksum, a fill value that no attribute declares and a field in another
unit than its label are all read without an error. Their values give them away. The range of a
channel is, in this order: that of `data.limits`; the physical limits of a variable that is known by
its name or its CF standard name; else the median of the training dates plus and minus 1,000 times
the spread between their 1st and 99th percentile.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.channels import Channel, suggest_names
from credit_dp.data.sources.base import Fields, Source, VariableInfo
from credit_dp.data.units import (
    ACCUMULATED,
    CONVERSIONS,
    KNOWN_VARIABLES,
    UNSPECIFIED_UNITS,
    KnownVariable,
    canonical_unit,
    converted_unit,
)
from credit_dp.errors import UserError
from credit_dp.variable_names import UPPER_AIR_NAMES, canonical_name, long_name

SPREAD_FACTOR = 1e3  # times the spread of the training dates, for variables that are not known
SAMPLED_POINTS = 20_000  # of each field, from which percentiles are taken
CACHED = 2**22  # values; fewer are in the processor's cache when they are looked at once more
LARGEST = float(np.finfo(np.float32).max)
HUGE = 1e15  # no field in SI units has values of this size; fill values have
# What stores write for "no value": the defaults of netCDF and GRIB, and habits.
LARGE_FILLS = (9.969209968386869e36, 9.999e20, 1e20, 1e30, 1e36, LARGEST)
SMALL_FILLS = (-999, -999.9, -9999, -99999, 9999, 99999, -32767, -32768, 32767, 65535)
FILL_VALUES = np.array([*LARGE_FILLS, *SMALL_FILLS])


class ValueRange(NamedTuple):
    """The smallest and the largest value that is believed."""

    low: float
    high: float


# Physical limits in the units of `known_units`, with a wide margin around what has been measured or
# analysed anywhere, so that overshoots of interpolation and packing pass.
# Sources: WMO World Weather and Climate Extremes Archive (2 m temperature -89.2 to 56.7 degC, mean
# sea level pressure 870 to 1084.8 hPa, rain of a day 1.825 m); ERA5 on its 137 model levels, up to
# 0.01 hPa; solar constant 1361 W m-2 (Kopp & Lean 2011), which bounds energies of a day.
_FRACTION = ValueRange(-0.5, 1.5)
_WIND = ValueRange(-300.0, 300.0)
_SURFACE_WIND = ValueRange(-150.0, 150.0)
_WATER_CONTENT = ValueRange(-0.01, 0.1)
_TEMPERATURE_NEAR_SURFACE = ValueRange(150.0, 350.0)
PHYSICAL_RANGES: Mapping[str, ValueRange] = {
    "geopotential": ValueRange(-2e4, 2e6),  # on pressure levels see `_geopotential_range`
    "temperature": ValueRange(100.0, 400.0),
    "u_component_of_wind": _WIND,
    "v_component_of_wind": _WIND,
    "wind_speed": ValueRange(-1.0, 300.0),
    "vertical_velocity": ValueRange(-100.0, 100.0),
    "specific_humidity": _WATER_CONTENT,
    "relative_humidity": ValueRange(-50.0, 250.0),
    "vorticity": ValueRange(-0.1, 0.1),
    "divergence": ValueRange(-0.1, 0.1),
    "potential_vorticity": ValueRange(-100.0, 100.0),
    "ozone_mass_mixing_ratio": ValueRange(-1e-4, 1e-3),
    "fraction_of_cloud_cover": _FRACTION,
    "specific_cloud_liquid_water_content": _WATER_CONTENT,
    "specific_cloud_ice_water_content": _WATER_CONTENT,
    "specific_rain_water_content": _WATER_CONTENT,
    "specific_snow_water_content": _WATER_CONTENT,
    "2m_temperature": _TEMPERATURE_NEAR_SURFACE,
    "2m_dewpoint_temperature": ValueRange(100.0, 350.0),
    "10m_u_component_of_wind": _SURFACE_WIND,
    "10m_v_component_of_wind": _SURFACE_WIND,
    "100m_u_component_of_wind": _SURFACE_WIND,
    "100m_v_component_of_wind": _SURFACE_WIND,
    "10m_wind_speed": ValueRange(-1.0, 150.0),
    "instantaneous_10m_wind_gust": ValueRange(-1.0, 200.0),
    "mean_sea_level_pressure": ValueRange(8e4, 1.2e5),
    "surface_pressure": ValueRange(2.5e4, 1.2e5),
    "skin_temperature": ValueRange(150.0, 400.0),
    "sea_surface_temperature": ValueRange(250.0, 350.0),
    "sea_ice_cover": _FRACTION,
    "ice_temperature_layer_1": _TEMPERATURE_NEAR_SURFACE,
    "temperature_of_snow_layer": _TEMPERATURE_NEAR_SURFACE,
    "snow_depth": ValueRange(-1.0, 100.0),
    "snow_density": ValueRange(-1.0, 1500.0),
    "total_cloud_cover": _FRACTION,
    "low_cloud_cover": _FRACTION,
    "medium_cloud_cover": _FRACTION,
    "high_cloud_cover": _FRACTION,
    "total_column_water": ValueRange(-10.0, 200.0),
    "total_column_water_vapour": ValueRange(-10.0, 200.0),
    "boundary_layer_height": ValueRange(-100.0, 2e4),
    "convective_available_potential_energy": ValueRange(-100.0, 5e4),
    "geopotential_at_surface": ValueRange(-1e4, 1e5),
    "land_sea_mask": _FRACTION,
    "lake_cover": _FRACTION,
    "lake_depth": ValueRange(-100.0, 1.2e4),
    "high_vegetation_cover": _FRACTION,
    "low_vegetation_cover": _FRACTION,
    "standard_deviation_of_orography": ValueRange(-10.0, 5e3),
    "standard_deviation_of_filtered_subgrid_orography": ValueRange(-10.0, 5e3),
    "slope_of_sub_gridscale_orography": _FRACTION,
    "anisotropy_of_sub_gridscale_orography": _FRACTION,
    "angle_of_sub_gridscale_orography": ValueRange(-7.0, 7.0),
    **{f"soil_temperature_level_{layer}": ValueRange(150.0, 400.0) for layer in "1234"},
    **{f"volumetric_soil_water_layer_{layer}": _FRACTION for layer in "1234"},
}
# Of sums, over whatever span up to a day: depths of water in m, energies in J m-2.
_OF_SUMS = {"m": ValueRange(-1.0, 2.0), "J m-2": ValueRange(-3e8, 3e8)}

# The height of a pressure level lies between those in two isothermal atmospheres, one colder, one
# warmer than any: Phi = R T ln(p_msl / p).
_GAS_CONSTANT = 287.0  # J kg-1 K-1, of dry air
_COLDEST, _WARMEST = 180.0, 320.0  # K, mean over the layer
_DEEPEST, _HIGHEST = 800.0, 1200.0  # hPa, mean sea level pressure


def _geopotential_range(level: int) -> ValueRange:
    """The physical limits of geopotential on a level in hPa, in m2 s-2."""
    least, most = np.log(_DEEPEST / level), np.log(_HIGHEST / level)
    low = min(_GAS_CONSTANT * temperature * least for temperature in (_COLDEST, _WARMEST))
    return ValueRange(float(low), float(_GAS_CONSTANT * _WARMEST * most))


def physical_range(
    name: str, variable: VariableInfo, level: int | None, unit: str
) -> ValueRange | None:
    """The physical limits of a known variable, in the unit that its values have.

    Args:
        name, variable: as the store has it; known by name, short name or CF standard name.
        level: None off the levels.
        unit: of the values, after conversions; without one they are taken to be in the known unit.

    Returns:
        None for a variable or a unit of which nothing is known.
    """
    long, level = long_name(name, level)
    names = [UPPER_AIR_NAMES.get(long, long)]
    if names[0] not in KNOWN_VARIABLES:
        standard = variable.standard_name
        names = [
            known for known, entry in KNOWN_VARIABLES.items() if standard in entry.standard_names
        ]
    found = [
        _convert_range(_range_in_known_unit(known, variable, level), KNOWN_VARIABLES[known], unit)
        for known in names
    ]
    ranges = [one for one in found if one is not None]
    if not ranges or len(ranges) < len(found):
        return None
    return ValueRange(min(one.low for one in ranges), max(one.high for one in ranges))


def _range_in_known_unit(name: str, variable: VariableInfo, level: int | None) -> ValueRange | None:
    """The physical limits of a known variable in its known unit."""
    if name == "geopotential" and level is not None and not variable.model_levels:
        return _geopotential_range(level)
    return PHYSICAL_RANGES.get(name) or _OF_SUMS.get(KNOWN_VARIABLES[name].unit)


def _convert_range(limits: ValueRange | None, known: KnownVariable, unit: str) -> ValueRange | None:
    """Limits in the known unit as limits in another one; None where no conversion is known."""
    own, needed = canonical_unit(unit), canonical_unit(known.unit)
    if limits is None or own in (*UNSPECIFIED_UNITS, needed):
        return limits
    if (own, needed) not in CONVERSIONS:
        return None
    scale, offset = CONVERSIONS[own, needed]
    return ValueRange((limits.low - offset) / scale, (limits.high - offset) / scale)


def sampled_ranges(fields: Iterable[Fields], channels: Sequence[Channel]) -> dict[str, ValueRange]:
    """The ranges of channels of which nothing is known, from fields `(C, H, W)` of some dates.

    Damaged fields among them do no harm: percentiles are those of each date by itself, of which the
    median over the dates is taken, and fill values are left out. A channel that is constant on all
    dates, or has no values, has no range.
    """
    dates = [[_percentiles(field) for field in date] for date in fields]
    found = {}
    for place, channel in enumerate(channels):
        of_dates = np.array([date[place] for date in dates])
        of_dates = of_dates[np.isfinite(of_dates).all(axis=1)]
        if not len(of_dates):
            continue
        low, middle, high = np.median(of_dates, axis=0)
        reach = SPREAD_FACTOR * (high - low)
        if reach > 0:
            found[channel.name] = ValueRange(float(middle - reach), float(middle + reach))
    return found


def _percentiles(field: NDArray[np.float32]) -> NDArray[np.float64]:
    """The 1st, the 50th and the 99th percentile of a field; NaN if it has no values.

    Where more than 98 % of the points have one value, as rain in dry places, the percentiles are
    those of the other points.
    """
    values = field.ravel()[:: max(1, field.size // SAMPLED_POINTS)].astype(np.float64)
    values = values[np.isfinite(values) & (np.abs(values) < HUGE)]
    values = values[~np.isin(values.astype(np.float32), FILL_VALUES.astype(np.float32))]
    if not len(values):
        return np.full(3, np.nan)
    low, middle, high = np.percentile(values, [1, 50, 99])
    others = values[values != middle]
    if low == high and len(others):
        low, high = np.percentile(np.append(others, middle), [1, 99])
    return np.array([low, middle, high])


def extremes(fields: Fields) -> tuple[Fields, Fields]:
    """The smallest and the largest value of each field of `(T, C, rows, W)`, each `(T, C)`.

    NaN for a field that has a NaN. Each value comes from memory once.
    """
    if fields.strides[2] < 0:
        fields = fields[:, :, ::-1]  # torch knows no falling rows, and the order does not matter
    shape = fields.shape[:2]
    if not fields.size:
        nothing = np.zeros(shape, np.float32)
        return nothing, nothing
    if fields.size < CACHED or not fields.flags.writeable:
        with np.errstate(invalid="ignore"):
            return fields.min(axis=(2, 3)), fields.max(axis=(2, 3))
    import torch  # here: commands that read no large fields start without it

    found = [torch.aminmax(field) for date in torch.from_numpy(fields) for field in date]
    lowest, highest = (torch.stack(ends).numpy() for ends in zip(*found, strict=True))
    return lowest.reshape(shape), highest.reshape(shape)


@final
class ValueLimits:
    """The ranges of the channels of a source.

    Args:
        source: whose variables they are.
        config: for `data.limits` and conversions of units.
        sampled: ranges of channels that are not known otherwise, by channel name.
    """

    def __init__(
        self, source: Source, config: DataConfig, sampled: Mapping[str, ValueRange] | None = None
    ) -> None:
        self._source, self._config = source, config
        self.sampled_ranges = dict(sampled or {})
        self._ranges: dict[Channel, ValueRange | None] = {}

    def of(self, channel: Channel) -> ValueRange | None:
        """The range of a channel; None if it has none."""
        if channel not in self._ranges:
            self._ranges[channel] = self._range(channel)
        return self._ranges[channel]

    def channels_without_range(self, channels: Iterable[Channel]) -> list[Channel]:
        """The channels whose range has to be sampled."""
        return [c for c in channels if not self._is_given(c) and self._known_range(c) is None]

    def in_range(
        self, channels: Sequence[Channel], lowest: Fields, highest: Fields
    ) -> NDArray[np.bool_]:
        """Which fields have values everywhere, all within the range: `(T, C)`, as `extremes`."""
        unlimited = ValueRange(-LARGEST, LARGEST)
        low, high = np.array([self.of(channel) or unlimited for channel in channels]).T
        found: NDArray[np.bool_] = (lowest >= low) & (highest <= high)
        return found

    def farthest_outlier(self, channel: Channel, field: Fields) -> tuple[int, ...] | None:
        """Where in `field`, of any shape, the value farthest out of range is; None if none is.

        NaN is not looked at.
        """
        limits = self.of(channel)
        if limits is None:
            return None
        # NaN is passed over, and most fields with some are in range.
        with np.errstate(invalid="ignore"):
            lowest, highest = np.fmin.reduce(field, axis=None), np.fmax.reduce(field, axis=None)
        if not (lowest < limits.low or highest > limits.high):
            return None
        values = field.astype(np.float64)
        beyond = np.maximum(limits.low - values, values - limits.high)
        beyond = np.nan_to_num(beyond, nan=0.0, posinf=LARGEST)
        at = np.unravel_index(int(beyond.argmax()), beyond.shape)
        return tuple(map(int, at)) if beyond[at] > 0 else None

    def is_implausible(self, channel: Channel, field: Fields) -> bool:
        """Whether a field is too far out of range to be the forecast of a poor model.

        It is if most values are out of range, or one by more than the width of the range.
        """
        limits = self.of(channel)
        if limits is None:
            return False
        width = limits.high - limits.low
        values = field[~np.isnan(field)]
        out = (values < limits.low) | (values > limits.high)
        far = (values < limits.low - width) | (values > limits.high + width)
        return bool(far.any() or np.count_nonzero(out) > out.size / 2)

    def check(
        self,
        channel: Channel,
        field: Fields,
        when: Callable[[int], tuple[int, str]],
        first_row: int = 0,
    ) -> None:
        """Refuse values of `(T, rows, W)` that are out of range.

        Args:
            when: of an index along T, the place among the source's times, and the date.
            first_row: of the field, counted from the north.

        Raises:
            UserError: names the value that is farthest away, where it is, and what it looks like.
        """
        found = self.farthest_outlier(channel, field)
        if found is None:
            return
        time, row, column = found[0], found[1] + first_row, found[2]
        place, date = when(time)
        at = f"{date}row {row}, column {column}"
        raise UserError(
            f"{self._source.location(channel, place, row, column)}: "
            f"{self.out_of_range_message(channel, field[time], found, at)}"
        )

    def out_of_range_message(
        self, channel: Channel, field: Fields, at: tuple[int, ...], when: str, other: str = ""
    ) -> str:
        """What is said of a value out of range; where it was read from comes before it.

        Args:
            field: `(rows, W)`, the field that it is in.
            at: where, as from `farthest`; row and column last.
            when: date, row and column.
            other: what such values may be besides.
        """
        limits = self.of(channel)
        if limits is None:
            raise ValueError(f"{channel.name} has no limits")
        name, value, unit = channel.variable, float(field[at[-2:]]), self._unit(channel)
        level = "" if channel.level is None else f" on level {channel.level}"
        why = " (1000 times the spread of the training dates)" if self._is_sampled(channel) else ""
        cause = self._likely_cause(channel, field, limits, value) + other
        many = int(np.count_nonzero((field < limits.low) | (field > limits.high)))
        return (
            f"{name}{level} is {value:.6g} at {when}, but its limits are {limits.low:.6g} to "
            f"{limits.high:.6g}{f' {unit}' if unit else ''}{why}. {many} of {field.size} points "
            f"are out of range. It looks like {cause}. If the values are right, set "
            f"'data.limits={{{name}:[LOW,HIGH]}}', or {{{name}:null}} for no limits."
        )

    def _likely_cause(
        self, channel: Channel, field: Fields, limits: ValueRange, value: float
    ) -> str:
        """What values outside of the limits look like."""
        fills = np.isclose(FILL_VALUES, value, rtol=1e-5).any()
        same = int(np.count_nonzero(field == np.float32(value)))
        if fills or (abs(value) >= HUGE and same > 1):
            points = "" if same == 1 else f", which {same} points have"
            return f"a fill value that no attribute of the store declares{points}"
        values = field[np.isfinite(field)].astype(np.float64)
        most = np.mean((values < limits.low) | (values > limits.high)) > 0.5
        unit = canonical_unit(self._unit(channel)) or self._known_unit(channel)
        damaged = "a damaged chunk"
        for (old, new), (scale, offset) in CONVERSIONS.items():
            converted = values * scale + offset
            inside = (converted >= limits.low) & (converted <= limits.high)
            if new == unit and (inside.mean() > 0.99 if most else inside.all()):
                found = self._wrong_unit(channel, old, new)
                return found if most else f"{damaged}, or {found}"
        return "another quantity or unit than its name says" if most else damaged

    def _wrong_unit(self, channel: Channel, old: str, new: str) -> str:
        variable = self._source.variables[channel.variable]
        if variable.units:
            return f"{old}, while the store says {variable.units}: correct its units attribute"
        key = f"data.variables.{channel.variable}.convert"
        return f"{old}, and the store gives no unit: set {key}='{old}->{new}'"

    def _range(self, channel: Channel) -> ValueRange | None:
        if self._is_given(channel):
            given = self._given(channel)
            return None if given is None else ValueRange(float(given[0]), float(given[1]))
        return self._known_range(channel) or self.sampled_ranges.get(channel.name)

    def _is_given(self, channel: Channel) -> bool:
        return channel.name in self._config.limits or channel.variable in self._config.limits

    def _given(self, channel: Channel) -> Sequence[float] | None:
        limits = self._config.limits
        found: Sequence[float] | None = limits.get(channel.name, limits.get(channel.variable))
        return found

    def _is_sampled(self, channel: Channel) -> bool:
        return not self._is_given(channel) and self._known_range(channel) is None

    def _known_range(self, channel: Channel) -> ValueRange | None:
        summed = self._config.of(channel.variable).accumulated
        if summed and long_name(channel.variable)[0] not in ACCUMULATED:
            return None  # a sum over time of what is no sum elsewhere is another quantity
        variable = self._source.variables[channel.variable]
        found = physical_range(channel.variable, variable, channel.level, self._unit(channel))
        days = self._config.step_hours / 24
        if found is None or days <= 1 or long_name(channel.variable)[0] not in ACCUMULATED:
            return found
        return ValueRange(found.low * days, found.high * days)

    def _unit(self, channel: Channel) -> str:
        return converted_unit(self._source, channel.variable, self._config)

    def _known_unit(self, channel: Channel) -> str:
        """The known unit of a variable; empty if it is not known."""
        known = KNOWN_VARIABLES.get(channel.variable) or KNOWN_VARIABLES.get(
            canonical_name(channel.variable)
        )
        return canonical_unit(known.unit) if known else ""


def check_limit_keys(config: DataConfig, channels: Iterable[Channel]) -> None:
    """Refuse entries of `data.limits` for variables that are not read.

    Raises:
        UserError: naming the key and the nearest variables.
    """
    names = {name for channel in channels for name in (channel.variable, channel.name)}
    for key in config.limits:
        if key not in names:
            raise UserError(
                f"data.limits.{key}: no list of the data config has a variable {key}. "
                f"{suggest_names(key, names)}. Change data.limits, or add it to a list."
            )
