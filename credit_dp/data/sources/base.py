"""What every form of store offers: coordinates, variables, and fields of some rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.grid import FULL_CIRCLE, POLE
from credit_dp.errors import UserError

Fields = NDArray[np.float32]
Times = NDArray[np.datetime64]
Indexer = slice | NDArray[np.intp]


@final
@dataclass(frozen=True)
class VariableInfo:
    """What a source says of one variable before any field is read.

    Attributes:
        timed: whether it changes in time.
        levels: the levels it has, as in the store; empty if it is on none.
        units, standard_name: as the source gives them; empty if it gives none.
        problem: why it can't be read, after its name; empty if it can.
        model_levels: its levels are those of a model, by number, not of pressure.
        stored: what the store calls it, where that is another name.
    """

    timed: bool
    levels: tuple[int, ...] = ()
    units: str = ""
    standard_name: str = ""
    problem: str = ""
    model_levels: bool = False
    stored: str = ""


class ReadCounter(Protocol):
    """Counts what is read of one place."""

    data_bytes: int
    chunk_reads: int


@final
@dataclass(frozen=True)
class AliasedVariables(Mapping[str, VariableInfo]):
    """Variables by name; those of `aliases` are found as well, but not listed."""

    listed: Mapping[str, VariableInfo]
    aliases: Mapping[str, VariableInfo]

    def __getitem__(self, name: str) -> VariableInfo:
        return self.listed[name] if name in self.listed else self.aliases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


def all_names(variables: Mapping[str, VariableInfo]) -> list[str]:
    """All names that are found, listed or not."""
    aliases = variables.aliases if isinstance(variables, AliasedVariables) else ()
    return list(dict.fromkeys([*variables, *aliases]))


def is_listed(name: str, variables: Mapping[str, VariableInfo]) -> bool:
    """Whether it is a name that the store itself has."""
    return name in (variables.listed if isinstance(variables, AliasedVariables) else variables)


class Source(ABC):
    """An open store, checked: fields as float32, row 0 northernmost.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        where: its address, as messages name it.
        times: `(T,)` datetime64[ns], rising, perhaps with gaps.
        latitude: `(H,)` degrees, falling.
        longitude: `(W,)` degrees, in the store's order.
        variables: by their names in the config.
        counters: what counts the reads, one for each place that is read.
        title: what the store says that it is, if it does.
    """

    where: str
    times: Times
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    variables: Mapping[str, VariableInfo]
    counters: Sequence[ReadCounter]
    title: str = ""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.latitude), len(self.longitude)

    @abstractmethod
    def read(self, channels: Sequence[Channel], places: Indexer, rows: slice) -> Fields:
        """Some channels at some places of `times`: `(T, C, rows, W)`, NaN where there is no value.

        All of them change in time, or none: then `places` is `slice(0, 1)`. A chunk that holds
        several of what is asked for is read once.

        Raises:
            UserError: what is on disk cannot be read; names file, variable and date.
        """

    @abstractmethod
    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """The channels in groups, in order, of which each shares its chunks with no other."""

    @abstractmethod
    def times_together(self, channel: Channel) -> int:
        """Times that lie in one shard of the channel or, without shards, in one chunk."""

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """What is decoded at once: times, channels, rows, columns. Here one channel's whole globe.

        Of shards, the inner chunk.
        """
        return self.times_together(channel), 1, *self.grid

    def location(self, channel: Channel, place: int, row: int, column: int) -> str:
        """The file or store, and the chunk, that one value was read from, for a message.

        Args:
            place: in `times`; 0 for what does not change in time.
            row: counted from the north.
        """
        return self.where

    def chunk_numbers(self, channel: Channel, places: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return for each of some places of `times` the number of its chunk, rising with time.

        Places of one number are decoded at once.
        """
        return places // self.chunk_shape(channel)[0]

    @abstractmethod
    def description(self, variables: Sequence[str]) -> list[object]:
        """What a cached result depends on, as JSON: where, how old, coordinates, variables."""

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read since opening, without metadata and shard indices."""
        return sum(counter.data_bytes for counter in self.counters)

    @property
    def chunk_reads(self) -> int:
        """Chunks, or inner chunks of shards, read since opening."""
        return sum(counter.chunk_reads for counter in self.counters)


def as_slice(places: NDArray[np.intp]) -> Indexer:
    """The same places as a slice if they rise evenly, which zarr reads faster, else unchanged."""
    steps = np.diff(places)
    step = int(steps[0]) if len(steps) else 1
    if len(places) == 0 or step < 1 or np.any(steps != step):
        return places
    return slice(int(places[0]), int(places[-1]) + 1, step)


MODEL_LEVELS = ("hybrid", "model_level", "model_level_number")  # dims
MODEL_LEVEL_NAMES = (  # standard names of their coordinate
    "model_level_number",
    "atmosphere_hybrid_sigma_pressure_coordinate",
    "atmosphere_hybrid_height_coordinate",
)
DIM_ALIASES: Mapping[str, tuple[str, ...]] = {
    "time": ("valid_time",),
    "latitude": ("lat",),
    "longitude": ("lon",),
    "level": ("pressure_level", "isobaricInhPa", "plev", *MODEL_LEVELS),
}
PASCALS = 100  # in one hPa
HORIZONTAL = ("latitude", "longitude")
GRID_TYPES = {  # as GRIB calls them
    "reduced_gg": "reduced Gaussian",
    "rotated_ll": "rotated regional",
    "lambert": "Lambert regional",
    "polar_stereographic": "polar stereographic regional",
    "healpix": "HEALPix",
}
CHUNKS = ("chunks", "shards", "chunksizes")  # in the encoding of a variable
CELLS = ("values", "cell", "cells", "ncells", "nCells", "grid_index")  # dims of all cells in a row


def standardise_dims(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """The dataset with its dims called time, level, latitude and longitude, in whatever order.

    Coordinates that are no dims, such as an ensemble member's number, are left out.

    Raises:
        UserError: its grid is not of rows and columns.
    """
    _check_grid(dataset, where)
    valid = dataset.coords.get("valid_time")
    along = None if valid is None or valid.ndim != 1 else str(valid.dims[0])
    if valid is not None and along in ("time", "step"):
        # The times that fields are for; GRIB's own time is that of the analysis or forecast run.
        dataset = dataset.drop_vars([x for x in ("time", along) if x in dataset.coords])
        dataset = dataset.rename({along: "time"} if along != "time" else {})
        dataset = dataset.assign_coords(time=("time", valid.values))
    dataset = dataset.drop_vars([name for name in dataset.coords if name not in dataset.dims])
    for standard, others in DIM_ALIASES.items():
        other = next((name for name in others if name in dataset.dims), None)
        if other is not None and standard not in dataset.dims:
            dataset = dataset.rename({other: standard})
    if "level" in dataset.coords and dataset["level"].attrs.get("units") == "Pa":
        dataset = dataset.assign_coords(level=dataset["level"].values / PASCALS)
    return dataset


def squeeze_other_dims(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset without dims of length 1 such as GRIB's `number`, `step` or `surface`."""
    known = {*DIM_ALIASES, *(name for others in DIM_ALIASES.values() for name in others)}
    single = [dim for dim, size in dataset.sizes.items() if size == 1 and dim not in known]
    found = dataset.isel(dict.fromkeys(single, 0))
    for name, array in dataset.variables.items():
        kept = [axis for axis, dim in enumerate(array.dims) if dim not in single]
        for key in CHUNKS:
            if len(kept) < array.ndim and array.encoding.get(key):
                sizes = array.encoding[key]
                found[name].encoding[key] = tuple(sizes[axis] for axis in kept)
    return found


def scalar_level(dataset: xr.Dataset) -> int | None:
    """The pressure level, in hPa, that a dataset without a dim of levels says it is on."""
    for name in ("level", *DIM_ALIASES["level"]):
        if name in dataset.coords and name not in (*dataset.dims, *MODEL_LEVELS):
            level = dataset[name]
            if not level.ndim and np.issubdtype(level.dtype, np.number):
                return round(float(level) / (PASCALS if level.attrs.get("units") == "Pa" else 1))
    return None


def has_model_levels(dataset: xr.Dataset) -> bool:
    """Whether its levels are those of a model, by number, as names and attributes say.

    Give it the dataset as it came, before its dims are renamed.
    """
    if any(name in dataset.dims for name in MODEL_LEVELS):
        return True
    said = dataset["level"].attrs if "level" in dataset.coords else {}
    long_name = str(said.get("long_name", "")).lower()
    return said.get("standard_name") in MODEL_LEVEL_NAMES or "model level" in long_name


def _check_grid(dataset: xr.Dataset, where: str) -> None:
    """Refuse, by its name, a grid whose cells don't lie on rows and columns."""
    kinds = {str(array.attrs.get("GRIB_gridType", "")) for array in dataset.variables.values()}
    known = next((GRID_TYPES[kind] for kind in sorted(kinds) if kind in GRID_TYPES), None)
    dims = [str(dim) for dim in dataset.dims if dim in CELLS]
    for standard in HORIZONTAL:
        for name in (standard, *DIM_ALIASES[standard]):
            if name in dataset.variables and name not in dataset.dims:
                dims += [", ".join(map(str, dataset[name].dims))] if dataset[name].dims else []
    if known is None and not dims:
        return
    if known is None:
        known = "curvilinear or regional" if "," in dims[-1] else "reduced Gaussian or unstructured"
    raise _store_error(
        where,
        f"has a {known} grid{f' (cells along {dims[-1]})' if dims else ''}, but a grid with a row "
        "for each latitude and a column for each longitude is needed: regrid it first",
    )


def check_coordinates(dataset: xr.Dataset, where: str, timed: bool = True) -> None:
    """Refuse coordinates on which row, column or time numbers would mean something else.

    Args:
        dataset: with its standard names.
        where: as messages name it.
        timed: whether it needs times.

    Raises:
        UserError: a coordinate is missing, latitude or time is not monotone, or longitude is not
            one whole circle in equal steps.
    """
    for dim in ("time", *HORIZONTAL) if timed else HORIZONTAL:
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _store_error(
                where,
                f"needs one-dimensional coordinates time, latitude and longitude, but has "
                f"{', '.join(map(str, dataset.dims))}; {dim} is missing",
            )
    if timed:
        _check_time(dataset, where)
    latitude = dataset["latitude"].values
    _check_latitude(latitude, where)
    _check_longitude(dataset["longitude"].values, where)


def _check_time(dataset: xr.Dataset, where: str) -> None:
    times = dataset["time"].values
    if not np.issubdtype(times.dtype, np.datetime64):
        calendar = getattr(times.flat[0], "calendar", None) if times.size else None
        found = f", but in {calendar}" if calendar else ""
        raise _store_error(where, f"time is not in the standard calendar{found}")
    if len(times) == 0:
        raise _store_error(where, "has no times")
    if np.isnat(times).any():
        raise _store_error(where, "time has missing values")
    wrong = np.flatnonzero(np.diff(times) <= np.timedelta64(0))
    if len(wrong):
        one, other = times[wrong[0] : wrong[0] + 2].astype("datetime64[m]")
        raise _store_error(where, f"time does not rise throughout: after {one} comes {other}")


def _check_latitude(latitude: np.ndarray, where: str) -> None:
    """Weights and padding take the outermost rows to be next to the poles, and rows to be alike."""
    steps = np.diff(latitude)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise _store_error(where, "latitude neither rises nor falls throughout")
    if np.abs(latitude).max() > POLE:
        raise _store_error(where, "latitude must lie within -90 to 90 degrees")
    if len(latitude) < 2:
        raise _store_error(where, "needs at least two rows of latitude, has one")
    widest = np.abs(steps).max()
    gap = POLE - min(abs(latitude[0]), abs(latitude[-1]))
    if latitude[0] * latitude[-1] >= 0 or gap > 1.5 * widest or widest > 2 * np.abs(steps).min():
        raise _store_error(
            where,
            f"latitude must cover the globe from pole to pole in rows of about one distance, but "
            f"goes from {latitude[0]:g} to {latitude[-1]:g} in steps of "
            f"{np.abs(steps).min():g} to {widest:g} degrees; a regional grid can't be used",
        )


def _check_longitude(longitude: np.ndarray, where: str) -> None:
    """Models take the last column to be next to the first, so the circle must close evenly."""
    steps = np.diff(np.append(longitude, longitude[0])) % FULL_CIRCLE
    signed = np.where(steps > FULL_CIRCLE / 2, steps - FULL_CIRCLE, steps)
    even = np.abs(np.abs(signed) - FULL_CIRCLE / len(longitude)) < 1e-2 * FULL_CIRCLE / len(
        longitude
    )
    if len(longitude) > 2 and not (even.all() and len(set(np.sign(signed))) == 1):
        raise _store_error(
            where,
            f"longitude must go once round the globe in {len(longitude)} equal steps, without "
            f"repeating its first column, but goes from {longitude[0]:g} to {longitude[-1]:g}; "
            "a regional grid can't be used",
        )


def _store_error(where: str, what: str) -> UserError:
    return UserError(f"{where}: {what}. Change data.store.")
