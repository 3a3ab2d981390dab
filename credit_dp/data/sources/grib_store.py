"""Opens GRIB files as datasets of xarray, through cfgrib.

The messages of a file are listed once, in memory. cfgrib's own index is a pickle, which can run any
code when it is loaded, and could be replaced by others where it is kept.
"""

from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import xarray as xr

from credit_dp.data.sources.address import reason_of
from credit_dp.data.sources.grib import LIBRARY_LOCK, load_eccodes
from credit_dp.data.sources.sums import GRIB_HOURS, GRIB_STEPS
from credit_dp.errors import UserError, install_extra

TIME_KEYS = ("valid_time", "validityDate", "validityTime")
# Sums, means and extremes cover the hours between these steps of a forecast.
STEP_KEYS = ("startStep:int", "endStep:int", "stepUnits:int")
# cfgrib needs a dataset for each of their values.
COMMON_KEYS = (
    *("paramId", "typeOfLevel", "stepType", "dataType", "gridType", "md5GridSection"),
    *("numberOfPoints", "uvRelativeToGrid", "edition", "centre", "subCentre"),
)
# They tell the fields of such a dataset apart.
FIELD_KEYS = ("valid_time", "level:float", "number", "directionNumber", "frequencyNumber")


@final
class GribFields(Mapping[Any, Any]):
    """The messages of one dataset by their offset, in the form that cfgrib indexes.

    `items` gives keys that have been read, so that the file is not read again for each dataset.
    """

    def __init__(self, stream: Any, headers: Mapping[Any, Mapping[str, Any]]) -> None:
        self._stream = stream
        # A sum over no time, as at the start of a forecast, says nothing of the time before.
        periods = [header for header in headers.values() if _period(header)]
        self.headers = {
            offset: header for offset, header in headers.items() if not periods or _period(header)
        }

    def __getitem__(self, offset: Any) -> Any:
        return self._stream[offset]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    def items(self) -> ItemsView[Any, Any]:
        """Return the keys of each message."""
        return self.headers.items()


def open_grib(path: Path) -> list[xr.Dataset]:
    """Open a GRIB file: a dataset for each variable and kind of level.

    Fields are ordered by their valid time, whether they are analyses or forecasts. The times have
    bounds, by the steps of the messages.

    Raises:
        UserError: it can't be read, or has two fields of one variable at the same time.
    """
    load_eccodes("data.store")
    try:
        import cfgrib
    except ImportError as error:
        raise UserError(
            f"{path}: reading GRIB as data.store needs cfgrib ({error}). {install_extra('grib')}."
        ) from error
    stream = cfgrib.FileStream(str(path), errors="raise")
    keys = [*{*cfgrib.compute_index_keys(TIME_KEYS), *COMMON_KEYS, *STEP_KEYS}]
    try:
        with LIBRARY_LOCK:
            index = cfgrib.FieldsetIndex.from_fieldset(stream, keys, cfgrib.COMPUTED_KEYS)
            groups: dict[tuple[str, ...], dict[Any, Mapping[str, Any]]] = {}
            for values, offsets in index.iter_index():
                header = dict(zip(keys, values, strict=True))
                group = tuple(str(header[key]) for key in COMMON_KEYS)
                groups.setdefault(group, {}).update(dict.fromkeys(offsets, header))
            fields = [GribFields(stream, groups[group]) for group in sorted(groups)]
            datasets = [_open_fields(x) for x in fields]
    except EOFError as error:
        raise UserError(f"{path}: has no GRIB message. Change data.store.") from error
    except Exception as error:
        raise UserError(
            f"{path}: not a GRIB file that can be read ({reason_of(error)}). Set data.store to one."
        ) from error
    for one, dataset in zip(fields, datasets, strict=True):
        _refuse_repeated_fields(one, min(map(str, dataset.data_vars)), path)
    return datasets


def _open_fields(fields: GribFields) -> xr.Dataset:
    mapping: Any = fields  # of the types that xarray knows only those of files have a hint
    dataset = xr.open_dataset(
        mapping,
        engine="cfgrib",
        cache=False,
        decode_timedelta=False,
        time_dims=("valid_time",),
        squeeze=False,
        errors="raise",
        lock=LIBRARY_LOCK,
    )
    for variable, array in dataset.data_vars.items():
        # A message, one field of the globe, is decoded at once.
        sizes = [
            size if dim in ("latitude", "longitude") else 1 for dim, size in array.sizes.items()
        ]
        dataset[variable].encoding["chunksizes"] = tuple(sizes)
    periods = {header["valid_time"]: _period(header) for header in fields.headers.values()}
    ends = dataset["valid_time"].values
    seconds = [periods[int(end)] for end in ends.astype("M8[s]").astype(int)]
    bounds = np.stack([ends - np.array(seconds, "m8[s]"), ends], axis=1)
    dataset["valid_time"].attrs["bounds"] = GRIB_STEPS
    return dataset.assign_coords({GRIB_STEPS: (("valid_time", "bounds"), bounds)})


def _period(header: Mapping[str, Any]) -> int:
    """Return how many seconds a field covers; 0 at an instant, or if its steps are unknown."""
    start, end, unit = (header[key] for key in STEP_KEYS)
    known = unit in GRIB_HOURS and "undef" not in (start, end)
    if header["stepType"] == "instant" or not known:
        return 0
    return round(3600 * GRIB_HOURS[unit] * int(end - start))


def _refuse_repeated_fields(fields: GribFields, variable: str, path: Path) -> None:
    """Refuse two messages for one field at one time, of which cfgrib would read one."""
    seen: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for header in fields.headers.values():
        key = tuple(header[key] for key in FIELD_KEYS)
        if key in seen:
            steps = [x["endStep"] for x in (seen[key], header)]
            time = np.datetime64(header["valid_time"], "s").astype("M8[m]")
            raise UserError(
                f"{path}: has {variable} at {time} more than once (steps of {steps[0]:g} and "
                f"{steps[1]:g} hours), as forecasts that overlap do. Select one field for each "
                "time, for example with `grib_copy -w`, or change data.store."
            )
        seen[key] = header
