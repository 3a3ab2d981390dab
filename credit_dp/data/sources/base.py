"""The interface of all data sources, and the checks of their coordinates.

`Source` is what the rest of the package reads from; its subclasses in this folder read one format
each (zarr and netCDF, anemoi, prepared stores) or combine other sources (`combined`). Each of them
brings its coordinates to one form first: dims are renamed (`standardise_dims`), dims of length 1
are dropped (`squeeze_other_dims`), then the coordinates are checked (`check_coordinates`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.grid import FULL_CIRCLE, POLE
from credit_dp.errors import UserError

Fields = NDArray[np.float32]
Times = NDArray[np.datetime64]
Indexer = slice | NDArray[np.intp]
# Gets positions of channels and rows in the result, and their values `(c, n, r, W)`, which are n
# adjacent groups of r rows.
BlockConsumer = Callable[[slice, slice, Fields], None]


@final
@dataclass(frozen=True)
class VariableInfo:
    """The metadata of one variable, known before any field is read.

    Attributes:
        has_time: whether the variable changes in time.
        levels: its levels in the store's order; empty if it has no level dim.
        units, standard_name: as the source gives them; empty if it gives none.
        problem: why the variable can't be read, to be shown after its name; empty if it can.
        model_levels: whether `levels` are numbers of model levels, not pressures.
        stored_name: its name in the store, if that is another one.
    """

    has_time: bool
    levels: tuple[int, ...] = ()
    units: str = ""
    standard_name: str = ""
    problem: str = ""
    model_levels: bool = False
    stored_name: str = ""


class ReadCounter(Protocol):
    """Counts what is read from one store."""

    data_bytes: int
    chunk_reads: int


@final
@dataclass(frozen=True)
class AliasedVariables(Mapping[str, VariableInfo]):
    """Variables by name; the names in `aliases` can be looked up, but are not listed."""

    listed: Mapping[str, VariableInfo]
    aliases: Mapping[str, VariableInfo]

    def __getitem__(self, name: str) -> VariableInfo:
        return self.listed[name] if name in self.listed else self.aliases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)


def all_names(variables: Mapping[str, VariableInfo]) -> list[str]:
    """Return all names that can be looked up, listed or not."""
    aliases = variables.aliases if isinstance(variables, AliasedVariables) else ()
    return list(dict.fromkeys([*variables, *aliases]))


def is_listed(name: str, variables: Mapping[str, VariableInfo]) -> bool:
    """Whether `name` is the store's own name, not an alias."""
    return name in (variables.listed if isinstance(variables, AliasedVariables) else variables)


class BlockReader(Protocol):
    """Reads the same channels and rows of one time after another, in small blocks."""

    def read(self, time: int, consume: BlockConsumer) -> bool:
        """Pass on all values of a time, each once, block by block.

        Args:
            time: index into the source's times.
            consume: called with every block. It may overwrite the values, but not keep them: their
                memory is used again for the next block.

        Returns:
            False if a file is missing or damaged: values that were passed on may be wrong then.

        Raises:
            UserError: the store has changed since it was opened.
        """


class Source(ABC):
    """An open store with checked coordinates: float32 fields with row 0 in the north.

    Open it in the process that reads it: zarr's reading thread does not survive a fork.

    Attributes:
        where: its address as messages show it.
        times: `(T,)` datetime64[ns], increasing, perhaps with gaps.
        latitude: `(H,)` degrees, decreasing.
        longitude: `(W,)` degrees, in the store's order.
        variables: metadata of the variables by their names in the config.
        counters: one counter of reads for each store that is read.
        title: the store's own title; empty if it has none.
        hybrid: coefficients a, in Pa, and b at the interfaces of all model levels, from the top,
            `(L + 1,)` each; None if the store has none.
    """

    where: str
    times: Times
    latitude: NDArray[np.float64]
    longitude: NDArray[np.float64]
    variables: Mapping[str, VariableInfo]
    counters: Sequence[ReadCounter]
    title: str = ""
    hybrid: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of rows and columns."""
        return len(self.latitude), len(self.longitude)

    @abstractmethod
    def read(self, channels: Sequence[Channel], times: Indexer, rows: slice) -> Fields:
        """Read channels at some times: `(T, C, rows, W)`, with NaN for missing values.

        Either all channels change in time or none does. A chunk that holds several of them is
        read once.

        Args:
            channels: in the order of the result.
            times: indices into `self.times`; `slice(0, 1)` for channels without a time.
            rows: counted from the north.

        Raises:
            UserError: the store can't be read; the message names file, variable and date.
        """

    def block_reader(self, channels: Sequence[Channel], rows: slice) -> BlockReader | None:
        """Return a reader of blocks for channels that change in time.

        Args:
            channels: in the order of the result.
            rows: counted from the north, with both ends.

        Returns:
            None if fields can only be read at once, with `read`.
        """
        return None

    @abstractmethod
    def group_by_chunk(self, channels: Sequence[Channel]) -> list[list[Channel]]:
        """Split the channels, in order, into groups that share no chunk with each other."""

    @abstractmethod
    def times_per_file(self, channel: Channel) -> int:
        """Return how many times share one shard of the channel, or one chunk without shards."""

    def chunk_shape(self, channel: Channel) -> tuple[int, int, int, int]:
        """Return the shape that is decoded at once: times, channels, rows, columns.

        This is the chunk, or the inner chunk of a shard. By default it is one channel on the
        globe.
        """
        return self.times_per_file(channel), 1, *self.grid

    def location(self, channel: Channel, time: int, row: int, column: int) -> str:
        """Return the file (or store) and the chunk that hold one value, for a message.

        Args:
            channel: the channel of the value.
            time: index into `self.times`; 0 for a channel without a time.
            row: counted from the north.
            column: in the store's order.
        """
        return self.where

    def chunk_numbers(self, channel: Channel, times: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the number of the chunk that holds each of `times`, increasing with time.

        Times with the same number are decoded together.
        """
        return times // self.chunk_shape(channel)[0]

    @abstractmethod
    def description(self, variables: Sequence[str]) -> list[object]:
        """Return what a cached result depends on, as JSON: address, age, grid and variables."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of chunks read since opening, without metadata and shard indices."""
        return sum(counter.data_bytes for counter in self.counters)

    @property
    def chunk_reads(self) -> int:
        """Return how many chunks (or inner chunks of shards) were read since opening."""
        return sum(counter.chunk_reads for counter in self.counters)


def as_slice(indices: NDArray[np.intp]) -> Indexer:
    """Return evenly increasing indices as a slice, which zarr reads faster; others unchanged."""
    steps = np.diff(indices)
    step = int(steps[0]) if len(steps) else 1
    if len(indices) == 0 or step < 1 or np.any(steps != step):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, step)


MODEL_LEVELS = ("hybrid", "model_level", "model_level_number")  # names of dims
MODEL_LEVEL_NAMES = (  # CF standard names of the coordinate
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
NAMES_OF_TIME = ("time", "times", "date", "dates", "datetime")  # that are not read
PASCALS = 100  # in one hPa
LARGEST_HPA = 2000  # levels beyond it are in Pa if the store gives no unit
HORIZONTAL = ("latitude", "longitude")
GRID_TYPES = {  # GRIB's names of grids that can't be read
    "reduced_gg": "reduced Gaussian",
    "rotated_ll": "rotated regional",
    "lambert": "Lambert regional",
    "polar_stereographic": "polar stereographic regional",
    "healpix": "HEALPix",
}
CHUNKS = ("chunks", "shards", "chunksizes")  # keys in the encoding of a variable
# Names of the one dim that unstructured grids have in place of latitude and longitude.
CELLS = ("values", "cell", "cells", "ncells", "nCells", "grid_index")


def standardise_dims(dataset: xr.Dataset, where: str) -> xr.Dataset:
    """Rename the dims to time, level, latitude and longitude; their order stays.

    Coordinates that are not dims, such as the number of an ensemble member, are dropped.

    Raises:
        UserError: the grid does not consist of rows and columns.
    """
    _check_grid(dataset, where)
    valid = dataset.coords.get("valid_time")
    time_dim = None if valid is None or valid.ndim != 1 else str(valid.dims[0])
    if valid is not None and time_dim in ("time", "step"):
        # valid_time is the time of the fields; GRIB's `time` is when the analysis or forecast
        # started, and would repeat if the dim were `step`.
        dataset = dataset.drop_vars([x for x in ("time", time_dim) if x in dataset.coords])
        dataset = dataset.rename({time_dim: "time"} if time_dim != "time" else {})
        dataset = dataset.assign_coords(time=("time", valid.values))
    dataset = dataset.drop_vars([name for name in dataset.coords if name not in dataset.dims])
    for standard, aliases in DIM_ALIASES.items():
        alias = next((name for name in aliases if name in dataset.dims), None)
        if alias is not None and standard not in dataset.dims:
            dataset = dataset.rename({alias: standard})
    if "level" in dataset.coords and _in_pascals(dataset["level"]):
        dataset = dataset.assign_coords(level=dataset["level"].values / PASCALS)
    return dataset


def _in_pascals(level: xr.DataArray) -> bool:
    """Whether levels are in Pa, by their unit or, without one, by their size."""
    unit = level.attrs.get("units", "")
    is_number = level.size > 0 and np.issubdtype(level.dtype, np.number)
    return bool(unit == "Pa" or (not unit and is_number and level.values.max() > LARGEST_HPA))


def squeeze_other_dims(dataset: xr.Dataset) -> xr.Dataset:
    """Drop dims of length 1 such as GRIB's `number`, `step` or `surface`."""
    known = {*DIM_ALIASES, *(name for aliases in DIM_ALIASES.values() for name in aliases)}
    single = [dim for dim, size in dataset.sizes.items() if size == 1 and dim not in known]
    squeezed = dataset.isel(dict.fromkeys(single, 0))
    for name, array in dataset.variables.items():
        # isel() keeps the encoding as it was: chunk shapes have to lose the same dims.
        kept = [axis for axis, dim in enumerate(array.dims) if dim not in single]
        for key in CHUNKS:
            if len(kept) < array.ndim and array.encoding.get(key):
                sizes = array.encoding[key]
                squeezed[name].encoding[key] = tuple(sizes[axis] for axis in kept)
    return squeezed


def scalar_level(dataset: xr.Dataset) -> int | None:
    """Return the pressure level in hPa of a dataset without a level dim; None if unknown."""
    for name in ("level", *DIM_ALIASES["level"]):
        if name in dataset.coords and name not in (*dataset.dims, *MODEL_LEVELS):
            level = dataset[name]
            if not level.ndim and np.issubdtype(level.dtype, np.number):
                return round(float(level) / (PASCALS if _in_pascals(level) else 1))
    return None


def has_model_levels(dataset: xr.Dataset) -> bool:
    """Whether the levels are numbers of model levels, by their names and attributes.

    Call this before `standardise_dims` renames the dims.
    """
    if any(name in dataset.dims for name in MODEL_LEVELS):
        return True
    attributes = dataset["level"].attrs if "level" in dataset.coords else {}
    long_name = str(attributes.get("long_name", "")).lower()
    return attributes.get("standard_name") in MODEL_LEVEL_NAMES or "model level" in long_name


def whole_number_levels(dataset: xr.Dataset, where: str, key: str) -> tuple[int, ...]:
    """Return the levels in the store's order; empty if it has no level dim.

    Args:
        dataset: with standard dims.
        where: name of the store in error messages.
        key: the key of the store in error messages.

    Raises:
        UserError: the level coordinate has no values, or they are not unique whole numbers.
    """
    if "level" not in dataset.dims:
        return ()
    if "level" not in dataset.coords:
        raise UserError(f"{where}: has a dim level, but no values for it. Change {key}.")
    values = dataset["level"].values
    is_numeric = np.issubdtype(values.dtype, np.number) and np.isfinite(values).all()
    if not is_numeric or (values != values.astype(int)).any():
        raise UserError(
            f"{where}: levels must be whole numbers, but are {values.tolist()}. Change {key}."
        )
    if len(set(values.tolist())) < len(values):
        raise UserError(f"{where}: a level comes twice: {values.tolist()}. Change {key}.")
    return tuple(int(level) for level in values)


def chunk_length(array: xr.DataArray, dim: str) -> int:
    """Return the length of an array's chunks along a dim; 1 for an array without chunks."""
    # xarray has the chunks of zarr and of netCDF under different names.
    chunks = array.encoding.get("chunks") or array.encoding.get("chunksizes")
    return int(chunks[array.dims.index(dim)]) if chunks else 1


def in_dim_order(values: NDArray[Any], dims: Sequence[str], order: Sequence[str]) -> NDArray[Any]:
    """Return values with their dims in this order; dims that they lack have the length 1."""
    missing = [dim for dim in order if dim not in dims]
    all_dims = [*missing, *dims]
    values = values.reshape((1,) * len(missing) + values.shape)
    return values.transpose([all_dims.index(dim) for dim in order])


def _check_grid(dataset: xr.Dataset, where: str) -> None:
    """Refuse a grid that does not consist of rows and columns, and name its type."""
    grid_types = {str(array.attrs.get("GRIB_gridType", "")) for array in dataset.variables.values()}
    grid_name = next(
        (GRID_TYPES[grid_type] for grid_type in sorted(grid_types) if grid_type in GRID_TYPES), None
    )
    dims = [str(dim) for dim in dataset.dims if dim in CELLS]
    for standard in HORIZONTAL:
        for name in (standard, *DIM_ALIASES[standard]):
            if name in dataset.variables and name not in dataset.dims:
                dims += [", ".join(map(str, dataset[name].dims))] if dataset[name].dims else []
    if grid_name is None and not dims:
        return
    if grid_name is None:
        grid_name = (
            "curvilinear or regional" if "," in dims[-1] else "reduced Gaussian or unstructured"
        )
    raise _store_error(
        where,
        f"has a {grid_name} grid{f' (cells along {dims[-1]})' if dims else ''}, but a grid with a "
        "row for each latitude and a column for each longitude is needed: regrid it first",
    )


def check_coordinates(dataset: xr.Dataset, where: str, timed: bool = True) -> None:
    """Refuse coordinates with which row, column or time indices would mean something else.

    Args:
        dataset: with standard names of dims.
        where: its address as messages show it.
        timed: whether it needs times.

    Raises:
        UserError: a coordinate is missing, latitude or time is not monotonic, or longitude does
            not go round the globe once in equal steps.
    """
    for dim in ("time", *HORIZONTAL) if timed else HORIZONTAL:
        if dim not in dataset.dims or dim not in dataset.coords:
            raise _store_error(
                where,
                "needs one-dimensional coordinates time, latitude (or lat) and longitude (or lon), "
                f"but has {', '.join(map(str, dataset.dims))}; {dim} "
                + ("has no values" if dim in dataset.dims else "is missing"),
            )
    if timed:
        _check_time(dataset, where)
    else:
        _refuse_other_names_of_time(dataset, where)
    latitude = dataset["latitude"].values
    _check_latitude(latitude, where)
    _check_longitude(dataset["longitude"].values, where)


def _refuse_other_names_of_time(dataset: xr.Dataset, where: str) -> None:
    """Refuse times under a name that is not read, whose variables would count as static fields."""
    for dim in map(str, dataset.dims):
        has_dates = dim in dataset.coords and np.issubdtype(dataset[dim].dtype, np.datetime64)
        if has_dates or dim.lower() in NAMES_OF_TIME:
            raise UserError(
                f"{where}: needs times named time (or valid_time), but they are named {dim}. "
                "Rename that dimension and its coordinate, or change data.store."
            )


def _check_time(dataset: xr.Dataset, where: str) -> None:
    times = dataset["time"].values
    if np.issubdtype(times.dtype, np.number) or times.dtype.kind in "SU":
        kind = "texts" if times.dtype.kind in "SU" else "numbers without a unit"
        raise _store_error(
            where,
            f"time has {kind}, not dates: its attribute units has to be like "
            "'hours since 1900-01-01'",
        )
    if not np.issubdtype(times.dtype, np.datetime64):
        calendar = getattr(times.flat[0], "calendar", None) if times.size else None
        calendar_note = f", but in {calendar}" if calendar else ""
        raise _store_error(where, f"time is not in the standard calendar{calendar_note}")
    if len(times) == 0:
        raise _store_error(where, "has no times")
    if np.isnat(times).any():
        raise _store_error(where, "time has missing values")
    wrong = np.flatnonzero(np.diff(times) <= np.timedelta64(0, "D"))
    if len(wrong):
        earlier, later = times[wrong[0] : wrong[0] + 2].astype("datetime64[m]")
        raise _store_error(where, f"time must increase throughout, but {later} follows {earlier}")


def _check_latitude(latitude: np.ndarray, where: str) -> None:
    """Refuse latitudes that area weights and pole padding could not use.

    Both assume that the outermost rows are next to the poles, and that rows are equally wide.
    """
    steps = np.diff(latitude)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise _store_error(where, "latitude must increase or decrease throughout")
    if np.abs(latitude).max() > POLE:
        raise _store_error(where, "latitude must lie within -90 to 90 degrees")
    if len(latitude) < 2:
        raise _store_error(where, "needs at least two rows of latitude, has one")
    widest = np.abs(steps).max()
    # Between the outermost row and its pole.
    gap = POLE - min(abs(latitude[0]), abs(latitude[-1]))
    if latitude[0] * latitude[-1] >= 0 or gap > 1.5 * widest or widest > 2 * np.abs(steps).min():
        raise _store_error(
            where,
            f"latitude must cover the globe from pole to pole in roughly equal steps, but "
            f"goes from {latitude[0]:g} to {latitude[-1]:g} in steps of "
            f"{np.abs(steps).min():g} to {widest:g} degrees; a regional grid can't be used",
        )


def _check_longitude(longitude: np.ndarray, where: str) -> None:
    """Refuse longitudes that don't close the circle: models pad the last column by the first."""
    steps = np.diff(np.append(longitude, longitude[0])) % FULL_CIRCLE
    # Columns may go east or west, but all of them the same way.
    signed = np.where(steps > FULL_CIRCLE / 2, steps - FULL_CIRCLE, steps)
    is_even_step = np.abs(np.abs(signed) - FULL_CIRCLE / len(longitude)) < 1e-2 * FULL_CIRCLE / len(
        longitude
    )
    if len(longitude) > 2 and not (is_even_step.all() and len(set(np.sign(signed))) == 1):
        raise _store_error(
            where,
            f"longitude must go once round the globe in {len(longitude)} equal steps, without "
            f"repeating its first column, but goes from {longitude[0]:g} to {longitude[-1]:g}; "
            "a regional grid can't be used",
        )


def _store_error(where: str, problem: str) -> UserError:
    return UserError(f"{where}: {problem}. Change data.store.")
