"""Checks of the values that are read: none is missing, and all are in their channel's range.

The range detects damaged chunks without a checksum, fill values that no attribute declares, and
fields in another unit than their label: all of these are read without an error.

The range of a channel is the first of:
1. the range of `data.limits`;
2. the physical limits of a variable known by its name or its CF standard name;
3. all that is smaller than 1e15, which the large fill values are not.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import DataConfig
from credit_dp.data.channels import Channel, suggest_names
from credit_dp.data.grid import FieldArray
from credit_dp.data.sources.source import Source, VariableInfo
from credit_dp.data.units import (
    ACCUMULATED,
    CONVERSIONS,
    KNOWN_VARIABLES,
    ValueRange,
    canonical_unit,
    converted_unit,
    find_conversion,
    parse_conversion,
    usual_unit,
)
from credit_dp.errors import UserError, counted
from credit_dp.variable_names import UPPER_AIR_NAMES, long_name

CACHED = 2**22  # values; smaller fields stay in the processor's cache for a second pass
LARGEST = float(np.finfo(np.float32).max)
HUGE = 1e15  # no field in SI units has values of this size; fill values have
# Common fill values of stores: the defaults of netCDF and GRIB, and other customary ones.
LARGE_FILLS = (9.969209968386869e36, 9.999e20, 1e20, 1e30, 1e36, LARGEST)
SMALL_FILLS = (-999, -999.9, -9999, -99999, 9999, 99999, -32767, -32768, 32767, 65535)
FILL_VALUES = np.array([*LARGE_FILLS, *SMALL_FILLS])
ValidMask = NDArray[np.bool_]  # (rows, W), True where there are values


# The geopotential of a pressure level lies between those in two isothermal atmospheres, one colder
# and one warmer than any real one: Phi = R T ln(p_msl / p).
_GAS_CONSTANT = 287.0  # J kg-1 K-1, of dry air
_COLDEST, _WARMEST = 180.0, 320.0  # K, mean over the layer
_DEEPEST, _HIGHEST = 800.0, 1200.0  # hPa, mean sea level pressure


def _geopotential_range(level: int) -> ValueRange:
    """Return the physical limits of geopotential on a level in hPa, in m2 s-2."""
    smallest_ratio = np.log(_DEEPEST / level)
    largest_ratio = np.log(_HIGHEST / level)
    # Below ground (a negative logarithm), the warm atmosphere has the lower geopotential.
    low = min(_GAS_CONSTANT * temperature * smallest_ratio for temperature in (_COLDEST, _WARMEST))
    return ValueRange(float(low), float(_GAS_CONSTANT * _WARMEST * largest_ratio))


def physical_range(
    name: str, variable: VariableInfo, level: int | None, unit: str
) -> ValueRange | None:
    """Return the physical limits of a known variable, in the unit of its values.

    Args:
        name: in the store; a variable is known by its name, short name or CF standard name.
        unit: of the values, after conversions; if empty, the known unit is assumed.

    Returns:
        None for an unknown variable or unit.
    """
    canonical, level = long_name(name, level)
    names = [UPPER_AIR_NAMES.get(canonical, canonical)]
    if names[0] not in KNOWN_VARIABLES:
        standard = variable.standard_name
        names = [
            known for known, entry in KNOWN_VARIABLES.items() if standard in entry.standard_names
        ]
    ranges = []
    for known in names:
        known_unit, limits, _ = KNOWN_VARIABLES[known]
        conversion = find_conversion(unit, known_unit)
        if conversion is None:
            return None
        if known == "geopotential" and level is not None and not variable.model_levels:
            limits = _geopotential_range(level)
        scale, offset = conversion
        ranges.append(ValueRange(*((limit - offset) / scale for limit in limits)))
    # Several known variables may share a standard name: take the range that covers all of theirs.
    if not ranges:
        return None
    return ValueRange(min(limits.low for limits in ranges), max(limits.high for limits in ranges))


def is_implausible(field: NDArray[np.floating], limits: ValueRange) -> bool:
    """Whether a field is too far out of range even for the forecast of a poor model.

    That is so if most values are out of range, or any by more than the width of the range.
    """
    width = limits.high - limits.low
    values = field[~np.isnan(field)]
    outside = limits.outside(values)
    far_outside = (values < limits.low - width) | (values > limits.high + width)
    return bool(far_outside.any() or np.count_nonzero(outside) > outside.size / 2)


def are_fill_values(values: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return which values are among `FILL_VALUES`."""
    return np.asarray(np.isclose(values[..., None], FILL_VALUES, rtol=1e-5).any(axis=-1))


def likely_unit(values: NDArray[np.floating], limits: ValueRange, unit: str) -> str:
    """Return the unit from which a conversion to `unit` brings values into range; "" without one.

    All of them or, if most are out of range as they are, 99 %.
    """
    mostly_outside = np.mean(limits.outside(values)) > 0.5
    for (old, new), (scale, offset) in CONVERSIONS.items():
        converted = values * scale + offset
        inside = (converted >= limits.low) & (converted <= limits.high)
        if new == unit and (inside.mean() > 0.99 if mostly_outside else inside.all()):
            return old
    return ""


def extremes(fields: FieldArray) -> tuple[FieldArray, FieldArray]:
    """Return the smallest and the largest value of each field of `(T, C, rows, W)`: `(T, C)` each.

    They are NaN for a field with a NaN. Large fields are read from memory only once.
    """
    if fields.strides[2] < 0:
        fields = fields[:, :, ::-1]  # torch supports no negative strides; the order is irrelevant
    shape = fields.shape[:2]
    if not fields.size:
        empty = np.zeros(shape, np.float32)
        return empty, empty
    if fields.size < CACHED or not fields.flags.writeable:
        with np.errstate(invalid="ignore"):
            return fields.min(axis=(2, 3)), fields.max(axis=(2, 3))
    import torch  # here, as commands that read no large fields start faster without it

    pairs = [torch.aminmax(field) for date in torch.from_numpy(fields) for field in date]
    lowest, highest = (torch.stack(ends).numpy() for ends in zip(*pairs, strict=True))
    return lowest.reshape(shape), highest.reshape(shape)


@final
class ValueLimits:
    """The value ranges of a source's channels, and checks against them."""

    def __init__(self, source: Source, config: DataConfig) -> None:
        self._source = source
        self._config = config
        self._ranges: dict[Channel, ValueRange | None] = {}

    def range_of(self, channel: Channel) -> ValueRange | None:
        """Return the range of a channel; None if `data.limits` gives it none."""
        if channel not in self._ranges:
            self._ranges[channel] = self._range(channel)
        return self._ranges[channel]

    def is_undeclared_fill(self, channel: Channel, *extremes: NDArray[np.floating] | float) -> bool:
        """Whether an extreme of a variable without known limits is one of `FILL_VALUES`."""
        if self._is_given(channel) or self._known_range(channel) is not None:
            return False
        convert = self._config.variable_config(channel.variable).convert
        scale, offset = parse_conversion(convert) if convert else (1.0, 0.0)
        return any(are_fill_values((np.array(x) - offset) / scale).any() for x in extremes)

    def in_range(
        self, channels: Sequence[Channel], lowest: FieldArray, highest: FieldArray
    ) -> NDArray[np.bool_]:
        """Return which fields have no NaN, nor `extremes` out of range: `(T, C)`."""
        low, high = self.bounds(channels)
        result: NDArray[np.bool_] = (lowest >= low) & (highest <= high)
        return result

    def bounds(self, channels: Sequence[Channel]) -> NDArray[np.float64]:
        """Return the smallest and the largest plausible value of each channel, `(2, C)`."""
        unlimited = ValueRange(-LARGEST, LARGEST)
        return np.array([self.range_of(channel) or unlimited for channel in channels]).T

    def farthest_outlier(self, channel: Channel, field: FieldArray) -> tuple[int, ...] | None:
        """Return the index of the value farthest out of range; None if all are in range.

        NaN is ignored. The field may have any shape.
        """
        limits = self.range_of(channel)
        if limits is None:
            return None
        # fmin and fmax ignore NaN. Most fields end here, without the copy below.
        with np.errstate(invalid="ignore"):
            lowest, highest = np.fmin.reduce(field, axis=None), np.fmax.reduce(field, axis=None)
        if not (lowest < limits.low or highest > limits.high):
            return None
        values = field.astype(np.float64)
        excess = np.maximum(limits.low - values, values - limits.high)
        excess = np.nan_to_num(excess, nan=0.0, posinf=LARGEST)
        index = np.unravel_index(int(excess.argmax()), excess.shape)
        return tuple(map(int, index)) if excess[index] > 0 else None

    def is_implausible(self, channel: Channel, field: FieldArray) -> bool:
        """See the function of this name; False without a range."""
        limits = self.range_of(channel)
        return limits is not None and is_implausible(field, limits)

    def check(
        self,
        channel: Channel,
        field: FieldArray,
        date_of: Callable[[int], tuple[int, str]],
        first_row: int = 0,
    ) -> None:
        """Refuse values of `(T, rows, W)` that are out of range.

        Args:
            date_of: returns for an index along T the index among the source's times, and the date
                as text for the message.
        """
        outlier = self.farthest_outlier(channel, field)
        if outlier is None:
            return
        time_index, band_row, column = outlier
        row = first_row + band_row
        source_index, date = date_of(time_index)
        position = f"{date}row {row}, column {column}"
        raise UserError(
            f"{self._source.location(channel, source_index, row, column)}: "
            f"{self.out_of_range_message(channel, field[time_index], outlier, position)}"
        )

    def out_of_range_message(
        self,
        channel: Channel,
        field: FieldArray,
        outlier: tuple[int, ...],
        position: str,
        other_cause: str = "",
    ) -> str:
        """Return the message about a value out of range, without its file or store.

        Args:
            field: `(rows, W)`.
            outlier: the index of the value, see `farthest_outlier`; row and column last.
        """
        limits = self.range_of(channel)
        if limits is None:
            raise ValueError(f"{channel.name} has no limits")
        name = channel.variable
        value = float(field[outlier[-2:]])
        unit = self._unit(channel)
        level = "" if channel.level is None else f" on level {channel.level}"
        cause = self._likely_cause(channel, field, limits, value) + other_cause
        count = int(np.count_nonzero(limits.outside(field)))
        return (
            f"{name}{level} is {value:.6g} at {position}, but its limits are {limits.low:.6g} to "
            f"{limits.high:.6g}{f' {unit}' if unit else ''}. {count} of {field.size} "
            f"points are out of range. It looks like {cause}. If the values are right, set "
            f"'data.limits={{{name}:[LOW,HIGH]}}', or {{{name}:null}} for no limits."
        )

    def _likely_cause(
        self, channel: Channel, field: FieldArray, limits: ValueRange, value: float
    ) -> str:
        equal_count = int(np.count_nonzero(field == np.float32(value)))
        if are_fill_values(np.array(value)) or (abs(value) >= HUGE and equal_count > 1):
            points = "" if equal_count == 1 else f", which {equal_count} points have"
            return f"a fill value that no attribute of the store declares{points}"
        values = field[np.isfinite(field)].astype(np.float64)
        mostly_outside = np.mean(limits.outside(values)) > 0.5
        unit = canonical_unit(self._unit(channel) or usual_unit(channel.variable))
        damaged = "a damaged chunk"
        likely = likely_unit(values, limits, unit)
        if likely:
            wrong_unit = self._wrong_unit(channel, likely, unit)
            return wrong_unit if mostly_outside else f"{damaged}, or {wrong_unit}"
        return "another quantity or unit than its name says" if mostly_outside else damaged

    def _wrong_unit(self, channel: Channel, old: str, new: str) -> str:
        variable = self._source.variables[channel.variable]
        if variable.units:
            return f"{old}, while the store says {variable.units}: correct its units attribute"
        key = f"data.variables.{channel.variable}.convert"
        return f"{old}, and the store gives no unit: set {key}='{old}->{new}'"

    def _range(self, channel: Channel) -> ValueRange | None:
        if self._is_given(channel):
            limits = self._config.limits
            given: Any = limits.get(channel.name, limits.get(channel.variable))
            return None if given is None else ValueRange(*map(float, given))
        return self._known_range(channel) or ValueRange(-HUGE, HUGE)

    def _is_given(self, channel: Channel) -> bool:
        return channel.name in self._config.limits or channel.variable in self._config.limits

    def _known_range(self, channel: Channel) -> ValueRange | None:
        is_summed = self._config.variable_config(channel.variable).accumulated
        if is_summed and long_name(channel.variable)[0] not in ACCUMULATED:
            # The user declared it accumulated: its sum over time has other limits.
            return None
        variable = self._source.variables[channel.variable]
        known = physical_range(channel.variable, variable, channel.level, self._unit(channel))
        days = self._config.step_hours / 24
        if known is None or days <= 1 or long_name(channel.variable)[0] not in ACCUMULATED:
            return known
        return ValueRange(known.low * days, known.high * days)

    def _unit(self, channel: Channel) -> str:
        return converted_unit(self._source, channel.variable, self._config)


def all_finite(fields: FieldArray) -> bool:
    """Whether no value is NaN or infinite."""
    # A sum is faster than isfinite, and not finite if any value is not. If it is not finite for
    # another reason, which is overflow, the slow check decides.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(fields.sum()) or np.isfinite(fields).all())


def find_missing(field: FieldArray, valid: ValidMask | None, has_fill: bool = False) -> int | None:
    """Set a field to NaN outside `valid`, then look for missing values inside.

    Without a mask all points must have values; of a variable with a fill, whose mask is not known,
    they may be NaN.

    Shapes:
        `field`: `(T, rows, W)`, changed in place.

    Returns:
        The index along T of the first time with a missing or infinite value; None if there is none.
    """
    if valid is not None:
        np.copyto(field, np.nan, where=~valid)
        missing = ~np.isfinite(field) & valid
    elif has_fill:
        missing = np.isinf(field)
    elif all_finite(field):
        return None
    else:
        missing = ~np.isfinite(field)
    times = np.flatnonzero(missing.any(axis=(1, 2)))
    return int(times[0]) if len(times) else None


def missing_value_error(
    where: str,
    channel: Channel,
    role: str,
    field: FieldArray,
    time: str | None,
    valid: ValidMask | None = None,
) -> UserError:
    """Return the error about a missing or infinite value.

    Args:
        field: the values, `(rows, W)`.
        valid: its mask, if it has one.
    """
    name = channel.variable
    position = "" if time is None else f" at {time}"
    if channel.level is not None:
        position += f" on level {channel.level}"
    remedy = f"leave it out of data.{role}" + ("" if time is None else ", or choose other dates")
    if np.isinf(field).any():
        return UserError(f"{where}: {name} has infinite values{position}; {remedy}.")
    if valid is not None:
        count = int((np.isnan(field) & valid).sum())
        return UserError(
            f"{where}: {name} has NaN{position} on {counted(count, 'point')} where it has values "
            f"at all training dates, so that data.variables.{name}.fill does not fill them; "
            f"{remedy}."
        )
    return UserError(
        f"{where}: {name} has NaN{position}. If it has no values there at any time, set "
        f"data.variables.{name}.fill=mean, or to a number; otherwise {remedy}."
    )


def no_value_error(where: str, channel: Channel, role: str, time: str) -> UserError:
    """Return the error about a date at which a variable has no value on the globe."""
    return UserError(
        f"{where}: {channel.name} has no value at all at {time}. Choose other dates, leave "
        f"{channel.variable} out of data.{role}, or write the store without this time, as with "
        f"xarray's ds.drop_sel(time='{time}'): gaps in time are skipped."
    )


def check_limit_keys(config: DataConfig, channels: Iterable[Channel]) -> None:
    """Refuse entries of `data.limits` for variables that are not read."""
    names = {name for channel in channels for name in (channel.variable, channel.name)}
    for key in config.limits:
        if key not in names:
            raise UserError(
                f"data.limits.{key}: no list of the data config has a variable {key}. "
                f"{suggest_names(key, names)}. Change data.limits, or add it to a list."
            )
