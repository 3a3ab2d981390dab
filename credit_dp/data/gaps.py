"""Values that are missing where there must be some: found, and told in one line."""

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.schema import Channel
from credit_dp.data.sources.source import Fields
from credit_dp.errors import UserError

Valid = NDArray[np.bool_]


def all_finite(fields: Fields) -> bool:
    """Whether no value is NaN or infinite."""
    # One sum is faster than isfinite, and is finite only if all values are, unless it overflows:
    # then the slow check decides.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(fields.sum()) or np.isfinite(fields).all())


def first_gap(field: Fields, valid: Valid | None) -> int | None:
    """Clear `(T, rows, W)` outside `valid`; the first time with a gap inside it, None if none has.

    Without a mask all points must have values.
    """
    if valid is None:
        if all_finite(field):
            return None
        bad = ~np.isfinite(field)
    else:
        np.copyto(field, np.nan, where=~valid)
        bad = ~np.isfinite(field) & valid
    times = np.flatnonzero(bad.any(axis=(1, 2)))
    return int(times[0]) if len(times) else None


def gap_error(
    where: str, channel: Channel, role: str, field: Fields, times: tuple[object, object] | None
) -> UserError:
    """What is said of a gap in `field`.

    Args:
        where: the store.
        role: the list of the data config that has the variable.
        times: of the field, and of the mask, None if it has none; None for a static.
    """
    name = channel.variable
    there = "" if times is None else f" at {_minute(times[0])}"
    if channel.level is not None:
        there += f" on level {channel.level}"
    other = f"eave it out of data.{role}" + ("" if times is None else ", or choose other dates")
    if np.isinf(field).any():
        return UserError(f"{where}: {name} has infinite values{there}. L{other}.")
    if times is not None and times[1] is not None:
        return UserError(
            f"{where}: {name} has NaN{there}, where it has values at {_minute(times[1])}, the "
            f"first of data.dates.train, which data.variables.{name}.fill goes by. L{other}."
        )
    return UserError(
        f"{where}: {name} has NaN{there}. If it has no values there at any time, set "
        f"data.variables.{name}.fill=mean, or to a number; else l{other}."
    )


def _minute(time: object) -> str:
    return str(np.datetime64(time, "m"))  # type: ignore[call-overload]
