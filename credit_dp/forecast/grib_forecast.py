"""Forecasts as one file of GRIB edition 2.

The codes of variables are in `credit_dp.data.sources.grib_names`. A file has no room for the
settings of a forecast: `credit-dp forecast check` compares its messages with each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.channels import Channel
from credit_dp.data.grid import (
    COORDINATE_TOLERANCE,
    ROUNDING,
    Grid,
    turns,
    unit_vectors,
)
from credit_dp.data.projections import EARTH_RADIUS, Cone
from credit_dp.data.sources.grib_file import (
    ALONG_GRID,
    COMPONENT_FLAGS,
    LIBRARY_LOCK,
    GribFile,
    Message,
    is_grib,
    load_eccodes,
    with_checksum,
)
from credit_dp.data.sources.grib_names import MODEL, PRESSURE, SINGLE, GribCode, code_of
from credit_dp.data.units import find_conversion
from credit_dp.data.winds import other_component
from credit_dp.errors import UserError
from credit_dp.forecast.format import Points
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.stored_forecast import (
    CopiedForecast,
    ForecastFile,
    MissingField,
    ZarrForecast,
)
from credit_dp.variable_names import long_name

BITS_PER_VALUE: Final = 16
MISSING_VALUE: Final = 1e20  # stands for NaN between numpy and ecCodes; files have a bitmap
MICRODEGREES = 10**6  # in a degree: the unit of grids in GRIB 2
MILLIMETRES = 1000  # in a metre
STEP_TYPES = ("instant", "accum")  # of the fields that are written
SAMPLE = "regular_ll_pl_grib2"  # ecCodes' message to start from
ROW_LENGTHS = "pl"  # of a reduced grid
LAMBERT, POLAR, ROTATED = "lambert", "polar_stereographic", "rotated_ll"
PROJECTIONS = {  # CF's names of grid mappings, and GRIB's of grids
    "lambert_conformal_conic": LAMBERT,
    "polar_stereographic": POLAR,
    "rotated_latitude_longitude": ROTATED,
}


@final
class GribForecast(CopiedForecast):
    """A forecast as one file of GRIB edition 2.

    A message is one field, packed with `BITS_PER_VALUE` bits between its smallest and its largest
    value; what is not finite becomes a bitmap.
    """

    def check(self) -> None:
        """Check that all variables have a code, and the grid can be written.

        Raises:
            UserError: names the variables, or the problem of the grid.
        """
        eccodes = load_eccodes("format")
        _ = self._codes  # refuses channels without
        cells = self.form.cells
        if cells is not None and not _reduced_grid_keys(cells):
            raise UserError(
                "format: GRIB is written on reduced Gaussian grids from longitude 0 and from the "
                "north, but these cells are on another grid. Use format=zarr."
            )
        grid = self.form.grid
        if grid.is_projected:
            self._check_points(eccodes)
        winds = {x.name for x in self.form.variables if other_component(x.name)}
        if self.form.along_grid and winds != {*self.form.along_grid}:
            raise UserError(
                "format: GRIB has all winds along the grid, or none, but only "
                f"{', '.join(self.form.along_grid)} of {', '.join(sorted(winds))} are. Use "
                "format=zarr or netcdf."
            )
        for axis in () if grid.is_projected or cells is not None else ("latitude", "longitude"):
            steps = turns(getattr(grid, axis))
            if np.abs(steps - steps.mean()).max(initial=0) > 1e-3 * abs(steps.mean()):
                raise UserError(
                    f"format: GRIB needs a grid of equal steps, but those of {axis} are "
                    f"{np.abs(steps).min():g} to {np.abs(steps).max():g} degrees. "
                    "Use format=zarr or netcdf."
                )

    @classmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the format of a file, from the headers of its messages, with their names."""
        try:
            if not is_grib(path):
                return None
            file = GribFile.open(path, "path", cut_off=True)
            latitude, longitude, lengths = file.read_grid(reduced=True, projected=True)
            cells = np.repeat(latitude, lengths or 1), _longitudes(lengths)
        except (OSError, UserError):
            return None
        messages = file.messages(*STEP_TYPES)
        fields = dict.fromkeys((x.name, None if x.kind == SINGLE else x.level) for x in messages)
        members = max(message.member for message in messages) + 1
        return {
            "channels": [list(field) for field in fields],
            "units": {},
            "times": [str(time) for time in np.unique([x.initial for x in messages])],
            "hours": sorted({message.hours for message in messages}),
            **Grid(latitude, longitude).to_json(),
            "members": members if members > 1 else 0,
            **({"cells": [x.tolist() for x in cells]} if lengths else {}),
        }

    def missing(self) -> list[MissingField]:
        """Return the lead times with a message that is gone or damaged."""
        file = GribFile.open(self.path, "path", cut_off=True)
        readable = {
            (x.member, x.initial, x.hours, x.name, None if x.kind == SINGLE else x.level)
            for x in file.messages(*STEP_TYPES)
            if _is_readable(file, x)
        }
        form = self.form
        rows = slice(0, form.height)
        missing = [
            MissingField(job, lead, rows)
            for job in self.jobs
            for lead, hours in enumerate(form.hours)
            if not all(
                (job.member, form.times[job.time], hours, channel.variable, channel.level)
                in readable
                for channel in form.channels
            )
        ]
        # Cut off within the first message of a lead time that no other message is about.
        last = MissingField(self.jobs[-1], len(form.hours) - 1, rows)
        return missing if missing or file.complete else [last]

    def copy(self, file: ForecastFile, job: ForecastJob, lead: int, store: ZarrForecast) -> None:
        """Append the messages of one lead time to the file."""
        eccodes = load_eccodes("format")
        with file.path.open("ab") as messages:
            for variable in self.form.variables:
                channels = self.form.channels[variable.channels]
                values = store.read(variable, job, lead, slice(0, self.form.height))
                for channel, field in zip(channels, values.reshape(len(channels), -1), strict=True):
                    with LIBRARY_LOCK:
                        messages.write(self._encode(eccodes, channel, job, lead, field))

    @cached_property
    def _codes(self) -> dict[Channel, tuple[GribCode, float, float]]:
        """Each channel's code, and scale and offset to the code's unit.

        Raises:
            UserError: a channel has no code, or a unit that can't be converted.
        """
        codes, without = {}, []
        for channel in self.form.channels:
            code = code_of(channel.variable, channel.level)
            if code is None:
                without.append(channel.name)
                continue
            unit = self.form.units.get(channel.variable, "")
            conversion = find_conversion(unit, code.unit)
            if conversion is None:
                raise UserError(
                    f"format: {channel.variable} is in {unit}, which can't be converted to GRIB's "
                    f"{code.unit}. Use format=zarr or netcdf."
                )
            codes[channel] = code, *conversion
        if without:
            raise UserError(
                f"format: GRIB has no code for {', '.join(without)} here. Use format=zarr or "
                "netcdf."
            )
        return codes

    @cached_property
    def _grid(self) -> tuple[dict[str, Any], slice]:
        """The keys of the grid, and the order in which its rows are written."""
        if self.form.grid.is_projected:
            return _projection_keys(self.form.grid)
        cells = self.form.cells
        keys = _grid_keys(self.form.grid) if cells is None else _reduced_grid_keys(cells)
        return keys, slice(None)

    def _check_points(self, eccodes: Any) -> None:
        """Refuse a projection unless ecCodes computes the points of the grid from its keys.

        Raises:
            UserError: says what GRIB can't represent.
        """
        grid = self.form.grid
        name = str(grid.projection.attributes.get("grid_mapping_name") or "")
        problem = f"this one is {name}" if name else "this one has no grid mapping"
        if name in PROJECTIONS:
            try:
                away = self._distance_of_points(eccodes)
            except KeyError as error:
                problem = f"the grid mapping of this {name} lacks {error}"
            except (TypeError, ValueError, OverflowError, eccodes.CodesInternalError) as error:
                problem = f"not on this {name} ({error})"
            else:
                if away <= ROUNDING:  # coordinates may be those of float32
                    return
                problem = (
                    f"points are up to {away:.2g} degrees from where this {name} has them, because "
                    "steps are unequal or the grid mapping is wrong"
                )
        raise UserError(
            "format: GRIB is written on Lambert, polar stereographic and rotated grids, but "
            f"{problem}. Use format=zarr or netcdf."
        )

    def _distance_of_points(self, eccodes: Any) -> float:
        """Return how far, in degrees, ecCodes has points from where the grid has them."""
        grid = self.form.grid
        with np.errstate(all="ignore"):
            keys, rows = self._grid
        with LIBRARY_LOCK, _new_message(eccodes, keys) as handle:
            eccodes.codes_set_values(handle, np.zeros(grid[0] * grid[1]))
            found = [
                eccodes.codes_get_array(handle, axis).reshape(grid.shape)[rows]
                for axis in ("latitudes", "longitudes")
            ]
        apart = unit_vectors(*found) - unit_vectors(grid.latitude, grid.longitude)
        return float(np.rad2deg(np.linalg.norm(apart, axis=0)).max())

    def _encode(
        self,
        eccodes: Any,
        channel: Channel,
        job: ForecastJob,
        lead: int,
        field: NDArray[np.float32],
    ) -> bytes:
        """Return the message of one field, `(H * W,)` or of cells."""
        _, scale, offset = self._codes[channel]
        values = field.astype(np.float64) * scale + offset
        values = values.reshape(self.form.height, -1)[self._grid[1]].ravel()
        with _new_message(eccodes, self._header(channel, job, lead)) as handle:
            if self.form.along_grid:
                # In all messages: readers take those with other flags for ones on another grid.
                flags = eccodes.codes_get(handle, COMPONENT_FLAGS)
                eccodes.codes_set(handle, COMPONENT_FLAGS, flags | ALONG_GRID)
            # Infinite ones, too: GRIB can't hold what single precision can't.
            missing = ~(np.abs(values) <= np.finfo(np.float32).max)
            if missing.any():
                eccodes.codes_set(handle, "bitmapPresent", 1)
                eccodes.codes_set(handle, "missingValue", MISSING_VALUE)
                values = np.where(missing, MISSING_VALUE, values)
            eccodes.codes_set_values(handle, values)
            message: bytes = eccodes.codes_get_message(handle)
        return with_checksum(message)

    def _header(self, channel: Channel, job: ForecastJob, lead: int) -> dict[str, Any]:
        """Return the keys of a message, in the order in which they have to be set."""
        code, *_ = self._codes[channel]
        _, level = long_name(channel.variable, channel.level)
        kind = code.level_type or (MODEL if self.form.model_levels else PRESSURE)
        time = self.form.times[job.time].astype("M8[m]").astype(object)
        hours = self.form.hours[lead]
        is_sum, is_member = channel.variable in self.form.summed, self.form.members > 0
        # Templates 4.0, 4.1, 4.8 and 4.11: a forecast, a member, and a sum over time of either.
        template = (11 if is_member else 8) if is_sum else int(is_member)
        member = {"number": job.member, "numberOfForecastsInEnsemble": self.form.members}
        span = {"typeOfStatisticalProcessing": 1, "stepRange": f"{hours - self.form.span}-{hours}"}
        return {
            "tablesVersion": 32,
            "centre": 255,  # missing: no weather service
            "discipline": code.discipline,
            "productDefinitionTemplateNumber": template,
            "significanceOfReferenceTime": 1,  # start of the forecast
            "productionStatusOfProcessedData": 2,  # research
            "typeOfProcessedData": 4 if is_member else 1,  # perturbed forecast, forecast
            "typeOfGeneratingProcess": 4 if is_member else 2,  # ensemble forecast, forecast
            **({"typeOfEnsembleForecast": 3, **member} if is_member else {}),
            "parameterCategory": code.category,
            "parameterNumber": code.number,
            "dataDate": time.year * 10000 + time.month * 100 + time.day,
            "dataTime": time.hour * 100 + time.minute,
            "stepUnits": "h",
            **(span if is_sum else {"step": hours}),
            "typeOfLevel": kind,
            "level": code.level if code.level_type else level,
            **self._grid[0],
            "bitsPerValue": BITS_PER_VALUE,
        }


@contextmanager
def _new_message(eccodes: Any, keys: Mapping[str, Any]) -> Iterator[Any]:
    """Yield ecCodes' handle of a message, with keys set in their order."""
    handle = eccodes.codes_grib_new_from_samples(SAMPLE)
    try:
        for name, value in keys.items():
            if value is None:
                eccodes.codes_set_missing(handle, name)
            elif name == ROW_LENGTHS:
                eccodes.codes_set_array(handle, name, value)
            else:
                eccodes.codes_set(handle, name, value)
        yield handle
    finally:
        eccodes.codes_release(handle)


def _grid_keys(grid: Grid) -> dict[str, Any]:
    """Return the keys of a grid of equal steps."""
    latitude, longitude = grid.latitude, grid.longitude
    keys: dict[str, Any] = {"Ni": grid[1], "Nj": grid[0]}
    eastward = turns(longitude)[0] > 0
    # Rows go from the north, but on a rotated grid that may be where its own latitudes rise.
    northward = latitude[0] < latitude[-1]
    keys |= {"iScansNegatively": int(not eastward), "jScansPositively": int(northward)}
    for axis, name, values in (("i", "longitude", longitude % 360), ("j", "latitude", latitude)):
        for end, value in (("First", values[0]), ("Last", values[-1])):
            keys[f"{name}Of{end}GridPoint"] = round(value * MICRODEGREES)
        steps = turns(longitude if axis == "i" else latitude)
        step = 360 / grid[1] if axis == "i" and grid.is_global else np.abs(steps).mean()
        # A step that is no whole number of microdegrees is left out: readers divide the distance
        # between the first and the last point.
        exact = abs(step * MICRODEGREES - round(step * MICRODEGREES)) < 1e-3
        keys[f"{axis}DirectionIncrement"] = round(step * MICRODEGREES) if exact else None
    return keys


def _projection_keys(grid: Grid) -> tuple[dict[str, Any], slice]:
    """Return the keys of a grid on a projection, and the order in which its rows are written.

    Steps are those between its points: false eastings, scale factors and units of axes don't count.

    Raises:
        KeyError: the grid mapping lacks an attribute.
        TypeError, ValueError, OverflowError: it can't be written.

    Source: CF conventions 1.11, appendix F.
    """
    mapping, (rows, columns) = grid.projection.attributes, grid.projection[2:]
    kind = PROJECTIONS[mapping["grid_mapping_name"]]
    radius = mapping.get("earth_radius", mapping.get("semi_major_axis", EARTH_RADIUS))
    if mapping.get("inverse_flattening") or mapping.get("semi_minor_axis", radius) != radius:
        raise ValueError("on an ellipsoid")
    keys = {
        "shapeOfTheEarth": 1,  # a sphere of this radius, in cm
        "scaleFactorOfRadiusOfSphericalEarth": 2,
        "scaledValueOfRadiusOfSphericalEarth": round(radius * 100),
        "gridType": kind,  # now, or ecCodes computes points on another earth
        "numberOfDataPoints": grid[0] * grid[1],
        "numberOfValues": grid[0] * grid[1],
    }
    if kind == ROTATED:
        if not (len(rows.values) and len(columns.values)):
            raise ValueError("without coordinates of its axes")
        longitude = columns.values - mapping.get("north_pole_grid_longitude", 0)
        pole = -mapping["grid_north_pole_latitude"], mapping["grid_north_pole_longitude"] + 180
        keys |= _microdegrees("latitudeOfSouthernPole", pole[0])
        keys |= _microdegrees("longitudeOfSouthernPole", pole[1] % 360)
        return keys | _grid_keys(Grid(rows.values, longitude)), slice(None)
    cone = Cone.of(mapping)
    x, y = cone.forward(grid.latitude, grid.longitude)
    right, up = np.diff(x, axis=1).mean(), np.diff(y, axis=0).mean()
    first = mapping.get("standard_parallel", np.copysign(90, cone.n))
    if kind == LAMBERT:
        first, second = np.broadcast_to(first, 2).tolist()  # of one or two
        keys |= _microdegrees("Latin1", first) | _microdegrees("Latin2", second)
    if not np.isfinite([right, up]).all():
        raise ValueError("with these points")
    # ecCodes lets y rise from the first point, whatever the scanning mode says.
    order = slice(None, None, -1 if up < 0 else 1)
    keys |= _microdegrees("LaD", first)  # where steps on the map are as long as on the earth
    keys |= _microdegrees("LoV", cone.meridian % 360)
    keys |= _microdegrees("latitudeOfFirstGridPoint", grid.latitude[order][0, 0])
    keys |= _microdegrees("longitudeOfFirstGridPoint", grid.longitude[order][0, 0] % 360)
    steps = {"Dx": round(right * MILLIMETRES), "Dy": round(abs(up) * MILLIMETRES)}
    scanning = {"iScansNegatively": 0, "jScansPositively": 1}
    centre = {"projectionCentreFlag": 0 if cone.n > 0 else 128}
    return keys | {"Nx": grid[1], "Ny": grid[0]} | steps | scanning | centre, order


def _microdegrees(key: str, degrees: float) -> dict[str, Any]:
    return {key: round(degrees * MICRODEGREES)}


def _reduced_grid_keys(cells: Points) -> dict[str, Any]:
    """Return the keys of a reduced Gaussian grid; empty if cells are on another grid."""
    starts = np.flatnonzero(np.diff(cells.latitude, prepend=np.inf))
    latitude, lengths = cells.latitude[starts], np.diff([*starts, len(cells.latitude)])
    # Other grids may have as many latitudes as cells.
    if len(latitude) % 2 or len(latitude) > len(cells.latitude) / 4:
        return {}
    gaussian = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(len(latitude))[0]))[::-1]
    away = np.abs(cells.longitude - _longitudes(lengths.tolist()))
    if max(np.abs(latitude - gaussian).max(), away.max()) > COORDINATE_TOLERANCE:
        return {}
    ends = {"First": (latitude[0], 0), "Last": (latitude[-1], 360 - 360 / lengths.max())}
    return {
        "gridType": "reduced_gg",
        "N": len(latitude) // 2,
        "Ni": None,
        "iDirectionIncrement": None,
        "Nj": len(latitude),
        "numberOfDataPoints": len(cells.latitude),
        "numberOfValues": len(cells.latitude),
        "interpretationOfNumberOfPoints": 1,  # of whole circles
        ROW_LENGTHS: lengths,
        **{f"latitudeOf{end}GridPoint": round(x[0] * MICRODEGREES) for end, x in ends.items()},
        **{f"longitudeOf{end}GridPoint": round(x[1] * MICRODEGREES) for end, x in ends.items()},
    }


def _longitudes(lengths: Sequence[int]) -> NDArray[np.float64]:
    """Return the longitudes of the cells of rows of these lengths, from 0."""
    return np.concatenate([np.empty(0), *(np.arange(n) * (360 / n) for n in lengths)])


def _is_readable(file: GribFile, message: Message) -> bool:
    try:
        file.read(message)
    except UserError:
        return False
    return True
