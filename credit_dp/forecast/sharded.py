"""Joins files that hold bands of rows, exactly: nothing is filled in, nothing is left out."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.checks import expand_home
from credit_dp.errors import UserError
from credit_dp.forecast.netcdf import ROWS_ATTRIBUTE
from credit_dp.forecast.writer import PARTIAL_SUFFIX

LATITUDE_NAMES = ("latitude", "lat")
GAP_TOLERANCE = 1.5  # of the distance between rows: where it is larger, some are missing


@final
class Band(NamedTuple):
    """An open file, its latitudes, and the name of their dimension."""

    path: Path
    data: xr.Dataset
    latitude: NDArray[Any]
    dim: str


def open_sharded(path: str | Path) -> xr.Dataset:
    """Join the netCDF files in a folder, or those that a pattern stands for, along latitude.

    Files of several initial times or members are joined along these, too. Values are read when
    they are needed, by dask.

    Raises:
        UserError: there are none; bands overlap or lack rows; or anything that is not joined
            differs, if only in the last digit: other coordinates, bounds, units.
    """
    files = _find_files(expand_home("path", str(path)))
    groups: dict[tuple[Any, ...], list[Band]] = {}
    for file in files:
        band = _open_band(file)
        groups.setdefault(_globe_key(band.data), []).append(band)
    joined = {key: _join_bands(bands) for key, bands in sorted(groups.items())}
    first = next(iter(joined.values()))
    for key, data in list(joined.items())[1:]:
        _check_consistent(groups[key][0].path, data, first)
    return _join_times_and_members(joined)


def _find_files(path: Path) -> list[Path]:
    if path.name.endswith(PARTIAL_SUFFIX):
        raise UserError(f"{path}: is not complete. Start the forecast again: it goes on.")
    found = sorted(path.glob("*.nc") if path.is_dir() else path.parent.glob(path.name))
    if not found:
        raise UserError(f"{path}: needs a folder with netCDF files (.nc), or a pattern of them.")
    return found


def _open_band(path: Path) -> Band:
    try:
        data = xr.open_dataset(path, engine="netcdf4", chunks={})
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: is no netCDF file that can be read ({reason}).") from error
    dim = next((name for name in LATITUDE_NAMES if name in data.dims and name in data.coords), None)
    if dim is None:
        raise UserError(f"{path}: has no coordinate latitude to join it by.")
    latitude = data[dim].values
    if latitude.dtype.kind not in "fiu" or not latitude.size or not np.isfinite(latitude).all():
        raise UserError(f"{path}: needs rows with numbers as {dim}, to join them by. Leave it out.")
    return Band(path, data, latitude, dim)


def _globe_key(data: xr.Dataset) -> tuple[Any, ...]:
    """Which files are bands of one globe: those of the same times and members."""
    return tuple(
        tuple(np.atleast_1d(data[name].values).tolist()) if name in data.coords else ()
        for name in ("time", "number")
    )


def _join_bands(bands: Sequence[Band]) -> xr.Dataset:
    """The bands of one globe, northernmost or southernmost first, as the rows of a band are."""
    falling = all(band.latitude[0] >= band.latitude[-1] for band in bands)
    ordered = sorted(bands, key=lambda band: band.latitude[0], reverse=falling)
    for band in ordered[1:]:
        _check_consistent(band.path, band.data, ordered[0].data, ordered[0].dim)
    _check_edges(ordered, -1 if falling else 1)
    _check_all_rows(ordered)
    data = xr.concat(
        [band.data for band in ordered],
        dim=ordered[0].dim,
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="exact",
        combine_attrs="drop_conflicts",
    )
    data.attrs.pop(ROWS_ATTRIBUTE, None)
    return data


def _check_edges(bands: Sequence[Band], sign: int) -> None:
    """Refuse bands that overlap, and edges across which a row is missing."""
    edges = [sign * float(b.latitude[0] - a.latitude[-1]) for a, b in pairwise(bands)]
    inner = np.concatenate([sign * np.diff(band.latitude) for band in bands])
    # Bands of one row each have distances only between them.
    usual = float(np.median(inner if len(inner) else edges)) if edges else 0.0
    for (north, south), step in zip(pairwise(bands), edges, strict=True):
        if step <= 0:
            raise UserError(
                f"{south.path}: overlaps {north.path.name}: it begins at latitude "
                f"{south.latitude[0]:g}, which the other, up to {north.latitude[-1]:g}, has "
                "passed. Remove one of them."
            )
        if step > GAP_TOLERANCE * usual:
            raise UserError(
                f"{south.path}: there is a gap before it, from latitude {north.latitude[-1]:g} to "
                f"{south.latitude[0]:g}. Add the file of the rows between them."
            )


def _check_all_rows(bands: Sequence[Band]) -> None:
    """Refuse bands that, by what they say of their rows, do not make up the globe."""
    if not all(ROWS_ATTRIBUTE in band.data.attrs for band in bands):
        return  # somebody else's
    said = [tuple(map(int, band.data.attrs[ROWS_ATTRIBUTE])) for band in bands]
    at = 0
    for band, (first, stop, height) in zip(bands, said, strict=True):
        if first != at:
            raise UserError(
                f"{band.path}: begins at row {first}, but the rows before it end at {at - 1}. "
                "Add the file of the rows between them, or remove the one that is double."
            )
        if stop - first != len(band.latitude) or height != said[0][2]:
            raise UserError(f"{band.path}: does not have the rows that it says. Write it again.")
        at = stop
    if at != said[0][2]:
        raise UserError(
            f"{bands[-1].path}: is the last file, but rows {at} to {said[0][2] - 1} of the globe "
            "are missing. Add their file."
        )


def _check_consistent(path: Path, data: xr.Dataset, other: xr.Dataset, dim: str = "") -> None:
    """Refuse other variables or units, and other values of anything that is not joined."""
    odd = sorted({*map(str, data.data_vars)} ^ {*map(str, other.data_vars)})
    if odd:
        raise UserError(f"{path}: has other variables than the other files ({odd[0]}).")
    along = {dim} if dim else {"time", "number"}
    for name in sorted(_unjoined_variables(data, along) | _unjoined_variables(other, along)):
        a, b = (x.variables.get(name) for x in (data, other))
        if a is None or b is None or not a.equals(b):  # type: ignore[no-untyped-call]
            far = "" if a is None or b is None else _describe_difference(a.values, b.values)
            raise UserError(
                f"{path}: has another {name} than the other files{far}. Files are only joined "
                "where all that is not joined is the same, to the last digit."
            )
    for name in map(str, data.data_vars):
        units = [str(x[name].attrs.get("units", "none")) for x in (data, other)]
        if units[0] != units[1]:
            raise UserError(f"{path}: has {name} in {units[0]}, the other files in {units[1]}.")


def _unjoined_variables(data: xr.Dataset, along: set[str]) -> set[str]:
    """Variables that a joined dataset has from one file alone."""
    # Where a file has a time as a mere number, that becomes a dim of all its variables.
    scalar = any(dim in data.coords and dim not in data.dims for dim in along)
    variables = data.coords.variables if scalar else data.variables
    return {str(name) for name, of in variables.items() if not along & {name, *of.dims}}


def _describe_difference(a: NDArray[Any], b: NDArray[Any]) -> str:
    if a.shape != b.shape or a.dtype.kind != "f":
        return ""
    return f", by up to {np.abs(a - b).max():.3g}"


def _join_times_and_members(joined: dict[tuple[Any, ...], xr.Dataset]) -> xr.Dataset:
    """Globes of several times and members as one dataset.

    Raises:
        UserError: a member has not the times that another one has.
    """
    times = sorted({key[0] for key in joined})
    members = sorted({key[1] for key in joined})
    rows = []
    for member in members:
        lacks = next((time for time in times if (time, member) not in joined), None)
        if lacks is not None:
            raise UserError(
                f"number={list(member)}: there is no file of time "
                f"{np.array(lacks, 'M8[ns]').astype('M8[h]')[0]}, which other members have. Add it."
            )
        rows.append(_concatenate([joined[time, member] for time in times], "time"))
    return _concatenate(rows, "number")


def _concatenate(parts: list[xr.Dataset], dim: str) -> xr.Dataset:
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
