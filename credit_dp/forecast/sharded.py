"""Join netCDF files that contain bands of rows, without filling or dropping anything.

Files are grouped by time and member; the bands of each group are joined along latitude, then the
groups along time and member. Everything that is not joined has to be identical in all files, and so
are the settings of the forecast that wrote them.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.checks import expand_home
from credit_dp.data.calendar import calendar_of, decode_dates
from credit_dp.data.sources.address import reason_of
from credit_dp.errors import UserError
from credit_dp.files import PARTIAL_SUFFIX
from credit_dp.forecast.format import describe_difference, read_settings_attribute
from credit_dp.forecast.netcdf_forecast import ROWS_ATTRIBUTE

LATITUDE_NAMES = ("latitude", "lat")
# Settings that may differ between the initial times and members that are joined.
OTHER_RUNS = ("times", "stores", "init_file", "boundary_from", "members", "perturb_seed")
GAP_TOLERANCE = 1.5  # times the usual distance between rows; a larger distance is a gap


@final
class Band(NamedTuple):
    """An open file with its latitudes and the name of their dim."""

    path: Path
    data: xr.Dataset
    latitude: NDArray[Any]
    dim: str


def open_sharded(path: str | Path) -> xr.Dataset:
    """Join the netCDF files in a folder, or of a pattern, along latitude.

    Files of several initial times or members are joined along these, too. Values are read lazily,
    by dask.

    Raises:
        UserError: there are no files; bands overlap or have gaps; or anything else differs between
            files, even in the last digit: coordinates, bounds, units.
    """
    # Files with the same times and members are bands of one globe.
    globes: dict[tuple[Any, Any], list[Band]] = {}
    for file in _find_files(expand_home("path", str(path))):
        band = _open_band(file)
        globes.setdefault((_values(band.data, "time"), _values(band.data, "number")), []).append(
            band
        )
    joined = {key: _join_bands(globes[key]) for key in sorted(globes)}
    first, *others = joined
    for key in others:
        _check_consistent(globes[key][0].path, joined[key], joined[first])
    return _join_times_and_members(joined)


def _find_files(path: Path) -> list[Path]:
    if path.name.endswith(PARTIAL_SUFFIX):
        raise UserError(f"{path}: is not complete. Start the forecast again to resume it.")
    files = sorted(path.glob("*.nc") if path.is_dir() else path.parent.glob(path.name))
    if not files:
        raise UserError(f"{path}: needs a folder with netCDF files (.nc), or a pattern of them.")
    return files


def _open_band(path: Path) -> Band:
    try:
        data = xr.open_dataset(path, engine="netcdf4", chunks={})  # lazy, in the file's chunks
    except Exception as error:
        raise UserError(f"{path}: can't be read as netCDF ({reason_of(error)}).") from error
    dim = next((name for name in LATITUDE_NAMES if name in data.dims and name in data.coords), None)
    if dim is None and "latitude" in data.coords and data["latitude"].ndim == 2:
        dim = str(data["latitude"].dims[0])  # of a projection, which has its own axis
    if dim is None:
        raise UserError(f"{path}: has no coordinate latitude to join it by.")
    latitude = data[dim].values
    if latitude.dtype.kind not in "fiu" or not latitude.size or not np.isfinite(latitude).all():
        raise UserError(f"{path}: needs rows with numbers as {dim} to join. Leave this file out.")
    return Band(path, data, latitude, dim)


def _values(data: xr.Dataset, name: str) -> tuple[Any, ...]:
    """Return the values of a coordinate, which may be a scalar; () without it."""
    return tuple(np.atleast_1d(data[name].values).tolist()) if name in data.coords else ()


def _join_bands(bands: Sequence[Band]) -> xr.Dataset:
    """Join the bands of one globe, in the order in which the rows of a band are."""
    # A band of one row neither rises nor falls: the others decide.
    falling = all(band.latitude[0] >= band.latitude[-1] for band in bands)
    ordered = sorted(bands, key=lambda band: band.latitude[0], reverse=falling)
    for band in ordered[1:]:
        _check_consistent(band.path, band.data, ordered[0].data, ordered[0].dim)
    _check_edges(ordered, falling)
    _check_all_rows(ordered)
    # After the checks nothing else has to be compared.
    data = _concatenate([band.data for band in ordered], ordered[0].dim)
    data.attrs.pop(ROWS_ATTRIBUTE, None)  # of one band
    return data


def _check_edges(bands: Sequence[Band], falling: bool) -> None:
    """Check that bands neither overlap nor have gaps between them."""
    sign = -1 if falling else 1
    edges = [sign * float(b.latitude[0] - a.latitude[-1]) for a, b in pairwise(bands)]
    inner = np.concatenate([sign * np.diff(band.latitude) for band in bands])
    # Bands of a single row have no distances inside, only between each other.
    usual = float(np.median(inner if len(inner) else edges)) if edges else 0.0
    for (before, after), step in zip(pairwise(bands), edges, strict=True):
        if step <= 0:
            raise UserError(
                f"{after.path}: overlaps {before.path.name}: it begins at latitude "
                f"{after.latitude[0]:g}, but the other ends at {before.latitude[-1]:g}. Remove "
                "one of them."
            )
        if step > GAP_TOLERANCE * usual:
            raise UserError(
                f"{after.path}: there is a gap before it, from latitude {before.latitude[-1]:g} to "
                f"{after.latitude[0]:g}. Add the file with the rows between."
            )


def _check_all_rows(bands: Sequence[Band]) -> None:
    """Check that bands make up the globe, by the attribute with their rows.

    Latitudes alone do not tell that the first or the last band is missing.
    """
    if not all(ROWS_ATTRIBUTE in band.data.attrs for band in bands):
        return  # files of another program
    stated = [tuple(map(int, band.data.attrs[ROWS_ATTRIBUTE])) for band in bands]
    total = stated[0][2]
    row = 0
    for band, (first, stop, height) in zip(bands, stated, strict=True):
        if first != row:
            raise UserError(
                f"{band.path}: begins at row {first}, but the rows before it end at {row - 1}. "
                "Add the file with the rows between, or remove a duplicate."
            )
        if stop - first != len(band.latitude) or height != total:
            raise UserError(
                f"{band.path}: its rows are not those of its attribute. Write it again."
            )
        row = stop
    if row != total:
        raise UserError(
            f"{bands[-1].path}: is the last file, but rows {row} to {total - 1} of the globe are "
            "missing. Add their file."
        )


def _check_consistent(path: Path, data: xr.Dataset, other: xr.Dataset, dim: str = "") -> None:
    """Check that two files have the same settings, variables, units, and values besides a dim.

    Args:
        dim: the dim to join bands along; "": globes are joined along time and member, and may come
            from forecasts with other `init` or `members`.
    """
    along = {dim} if dim else {"time", "number"}
    ours, theirs = (dict(read_settings_attribute(x.attrs)) for x in (data, other))
    if not dim:
        for name in OTHER_RUNS:
            ours.pop(name, None)
            theirs.pop(name, None)
    difference = describe_difference(theirs, ours)
    if difference:
        raise UserError(
            f"{path}: is of another forecast than the other files: they have {difference}. Leave "
            "this file out."
        )
    mismatched = sorted({*map(str, data.data_vars)} ^ {*map(str, other.data_vars)})
    if mismatched:
        raise UserError(f"{path}: has other variables than the other files ({mismatched[0]}).")
    # The join takes these from the first file (compat="override") without comparing them.
    for name in sorted(_unjoined_variables(data, along) | _unjoined_variables(other, along)):
        a, b = (x.variables.get(name) for x in (data, other))
        if a is None or b is None or not a.equals(b):  # type: ignore[no-untyped-call]
            by = ""
            if a is not None and b is not None and a.shape == b.shape and a.dtype.kind == "f":
                by = f", by up to {np.abs(a.values - b.values).max():.3g}"
            raise UserError(
                f"{path}: has another {name} than the other files{by}. Everything that is not "
                "joined has to be identical, to the last digit."
            )
    for name in map(str, data.data_vars):
        units = [str(x[name].attrs.get("units", "none")) for x in (data, other)]
        if units[0] != units[1]:
            raise UserError(f"{path}: has {name} in {units[0]}, the other files in {units[1]}.")


def _unjoined_variables(data: xr.Dataset, along: set[str]) -> set[str]:
    """Return the variables that a joined dataset takes from one file."""
    # A scalar time in a file becomes a dim of all its data variables: only coordinates remain.
    scalar = any(dim in data.coords and dim not in data.dims for dim in along)
    variables = data.coords.variables if scalar else data.variables
    return {str(name) for name, array in variables.items() if not along & {name, *array.dims}}


def _join_times_and_members(joined: dict[tuple[Any, Any], xr.Dataset]) -> xr.Dataset:
    """Join globes, by times and members, along time, then along members.

    Raises:
        UserError: a member lacks a time that another one has.
    """
    times = sorted({key[0] for key in joined})
    members = sorted({key[1] for key in joined})
    rows = []
    for member in members:
        for time in times:
            if (time, member) not in joined:
                dates = next(x for key, x in joined.items() if key[0] == time)["time"].values
                date = calendar_of(dates).short_text(decode_dates(np.atleast_1d(dates))[0])
                raise UserError(
                    f"number={list(member)}: there is no file for the time {date}, which other "
                    "members have. Add it."
                )
        rows.append(_concatenate([joined[time, member] for time in times], "time"))
    return _concatenate(rows, "number")


def _concatenate(parts: list[xr.Dataset], dim: str) -> xr.Dataset:
    """Join along a dimension; what has no such dimension comes from the first part unchecked."""
    if len(parts) == 1:
        return parts[0]
    return xr.concat(
        parts,
        dim=dim,
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="exact",
        combine_attrs="drop_conflicts",
    )
