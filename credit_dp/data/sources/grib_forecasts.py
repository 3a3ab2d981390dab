"""Forecasts in a GRIB file, as a dataset in the layout of WeatherBench 2.

The messages are listed when it is opened; each field is decoded when it is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from xarray.backends import BackendArray
from xarray.core import indexing

from credit_dp.data.sources.coordinates import HORIZONTAL
from credit_dp.data.sources.grib_file import GribFile, Message, with_projection
from credit_dp.data.sources.grib_names import MODEL, OTHER_NAMES, PRESSURE, SINGLE
from credit_dp.data.units import find_conversion, usual_unit
from credit_dp.data.winds import GRIB_FLAG
from credit_dp.errors import UserError
from credit_dp.variable_names import UPPER_AIR_NAMES, long_name

KEY = "forecast"
LEAD, LEAD_BOUNDS, MEMBER = "prediction_timedelta", "prediction_timedelta_bounds", "number"
LONG_NAMES = {name: long for long, names in OTHER_NAMES.items() for name in names}
STEP_TYPES = ("instant", "accum")


def open_grib_forecasts(path: Path) -> xr.Dataset:
    """Open the forecasts in a GRIB file: dims time, prediction_timedelta, number, level and rows.

    Variables have their long names and usual units.
    """
    file = GribFile.open(path, KEY)
    latitude, longitude, _ = file.read_grid(projected=True)
    messages = file.messages(*STEP_TYPES)
    kinds = {message.kind for message in messages} - {SINGLE}
    if not messages or len(kinds) > 1:
        found = "fields on pressure and on model levels" if messages else "no fields of forecasts"
        raise UserError(f"{KEY}: {path} has {found}. Split it with `grib_copy`, or change {KEY}.")
    level_dim = "hybrid" if kinds == {MODEL} else PRESSURE
    places = {dim: np.unique([_place(x)[dim] for x in messages]) for dim in ("time", LEAD, MEMBER)}
    if len(places[MEMBER]) == 1:
        del places[MEMBER]
    levels = {level_dim: np.unique([x.level for x in messages if x.kind])} if kinds else {}
    rows: Sequence[str] = HORIZONTAL if latitude.ndim == 1 else ("y", "x")
    along = [[dim] for dim in rows] if latitude.ndim == 1 else [rows, rows]
    points = {
        name: (dims, values, {"standard_name": name})
        for name, dims, values in zip(HORIZONTAL, along, (latitude, longitude), strict=True)
    }
    dataset = xr.Dataset(coords={**places, **levels, **points})
    by_name: dict[str, list[Message]] = {}
    for message in messages:
        by_name.setdefault(_name(message), []).append(message)
    grid = tuple(dataset.sizes[dim] for dim in rows)
    for name, fields in by_name.items():
        axes = {**places, **(levels if fields[0].kind else {})}
        array = _ForecastArray(file, name, fields, axes, grid)
        along_grid = {file.has_winds_along_grid(field) for field in fields}
        if len(along_grid) > 1:
            raise UserError(
                f"{KEY}: {path}: some fields of {name} have winds along the grid, others not, by "
                f"uvRelativeToGrid. Select some with `grib_copy -w`, or change {KEY}."
            )
        attributes: dict[str, Any] = {"units": array.unit, GRIB_FLAG: int(along_grid.pop())}
        if any(map(file.period, fields)):
            attributes["cell_methods"] = f"{LEAD}: sum"
        dataset[name] = ((*axes, *rows), indexing.LazilyIndexedArray(array), attributes)
    spans = {file.period(message) for message in messages} - {0}
    if len(spans) == 1:
        # Sums over several spans, such as since the start, are not those of a step.
        bounds = np.stack([places[LEAD] - np.timedelta64(spans.pop(), "s"), places[LEAD]], axis=1)
        dataset[LEAD_BOUNDS] = ((LEAD, "bounds"), bounds)
        dataset[LEAD].attrs["bounds"] = LEAD_BOUNDS
    return with_projection(dataset, file)


def _place(message: Message) -> dict[str, Any]:
    """Return initial time, lead time and member of a field."""
    lead = np.timedelta64(round(message.hours * 3600), "s").astype("m8[ns]")
    return {"time": message.initial, LEAD: lead, MEMBER: message.member}


def _name(message: Message) -> str:
    """Return the long name of a field; of an unknown one, what the file calls it."""
    level = message.level if message.kind else None
    name = LONG_NAMES.get(message.name) or long_name(message.name, level)[0]
    # A file may have the same name on levels, and on one that no dim has.
    on_levels = name in UPPER_AIR_NAMES.values()
    return name if on_levels <= bool(message.kind) else f"{name} on one level"


@final
class _ForecastArray(BackendArray):
    """The fields of one variable, which are decoded when they are read.

    Args:
        axes: the coordinates of all dims but rows and columns.
    """

    def __init__(
        self,
        file: GribFile,
        name: str,
        messages: Sequence[Message],
        axes: dict[str, NDArray[Any]],
        grid: tuple[int, ...],
    ) -> None:
        self._file = file
        self._messages: NDArray[np.object_] = np.full([len(x) for x in axes.values()], None, object)
        for message in messages:
            place = _place(message)
            index = tuple(
                int(np.searchsorted(axis, place.get(dim, message.level)))
                for dim, axis in axes.items()
            )
            if self._messages[index] is not None:
                raise UserError(
                    f"{KEY}: {file.path} has {name} from {message.initial.astype('M8[m]')} at "
                    f"{message.hours:g} h more than once. Select one, for example with "
                    f"`grib_copy -w`, or change {KEY}."
                )
            self._messages[index] = [message]  # a list, so that numpy does not take it apart
        unit, usual = messages[0].unit, usual_unit(name)
        conversion = find_conversion(unit, usual) if usual else None
        self.unit = unit if conversion is None else usual
        self._scale, self._offset = conversion or (1.0, 0.0)
        self.shape = (*self._messages.shape, *grid)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._read
        )

    def _read(self, key: tuple[Any, ...]) -> NDArray[np.float32]:
        *places, rows, columns = key
        indices = [np.arange(n)[x] for n, x in zip(self._messages.shape, places, strict=True)]
        messages = self._messages[np.ix_(*map(np.atleast_1d, indices))]
        fields = np.stack([self._decode(message) for message in messages.ravel()])
        fields = fields[:, rows][..., columns]
        kept = [size for size, x in zip(messages.shape, indices, strict=True) if x.ndim]
        return fields.reshape(*kept, *fields.shape[1:])

    def _decode(self, message: Sequence[Message] | None) -> NDArray[np.float32]:
        if message is None:
            raise ValueError("the file has no such field")
        field = self._file.read(message[0]).reshape(self.shape[-2:])
        return np.asarray(field * self._scale + self._offset, np.float32)
