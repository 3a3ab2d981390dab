"""Forecasts as GRIB, read back by cfgrib and by ecCodes."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.grid import Axis, Grid, Projection, unit_vectors
from credit_dp.data.sources.grib_file import GribFile, load_eccodes
from credit_dp.data.sources.grib_names import CODES, OTHER_NAMES
from credit_dp.data.sources.opening import open_source
from credit_dp.data.units import ACCUMULATED
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import ForecastStore, ForecastVariable
from credit_dp.forecast.check import check_forecast
from credit_dp.forecast.format import ForecastFormat
from credit_dp.forecast.grib_forecast import BITS_PER_VALUE
from credit_dp.forecast.initial_file import GribStates
from credit_dp.forecast.stored_forecast import ZarrForecast
from credit_dp.forecast.writer import ForecastWriter
from credit_dp.variable_names import UPPER_AIR_NAMES, all_names_of
from tests.data import region_grids, stores
from tests.data.proj import project
from tests.forecast.grib_files import projected
from tests.forecast.runs import forecast, forecast_config
from tests.tier_cases import tiers

# Ranks are threads here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COORDINATES = {"time": "time", "prediction_timedelta": "step", "latitude": "latitude"}
LAMBERT = dict(region_grids.LAMBERT)
CONE = {
    "grid_mapping_name": "lambert_conformal_conic",
    "standard_parallel": [30.0, 60.0],
    "longitude_of_central_meridian": -98.0,
    "latitude_of_projection_origin": 40.0,
    "earth_radius": 6370000.0,
}
SOUTHERN = {"standard_parallel": [-33.0, -50.0], "latitude_of_projection_origin": -40.0}
WGS_84 = {"semi_major_axis": 6378137.0, "inverse_flattening": 298.257223563}
POLAR = {
    "grid_mapping_name": "polar_stereographic",
    "standard_parallel": 71.0,
    "straight_vertical_longitude_from_pole": -98.0,
    "latitude_of_projection_origin": 90.0,
    "earth_radius": 6371200.0,
}
ROTATED = {
    "grid_mapping_name": "rotated_latitude_longitude",
    "grid_north_pole_latitude": 39.25,
    "grid_north_pole_longitude": -162.0,
}
# Grid mappings, and metres or degrees of the southwestern corner; of Y rows and X columns.
PROJECTIONS = {
    "one parallel": (LAMBERT, -3e5, -4e5),
    "two parallels": (CONE, -3e5, -4e5),
    "southern cone": (CONE | SOUTHERN, -3e5, -4e5),
    "false easting": (CONE | {"false_easting": 2e6, "false_northing": 1e6}, 7e5, 16e5),
    "true at 71 degrees": (POLAR, -4e6, 1e5),
    "around the pole": (POLAR, -5e5, -6e5),
    "beyond the pole": (POLAR, 2e6, 1e6),
    "south pole": (
        POLAR | {"standard_parallel": -71.0, "latitude_of_projection_origin": -90.0}, 2e6, 1e6
    ),
    "scaled": (
        {x: y for x, y in POLAR.items() if x != "standard_parallel"}
        | {"scale_factor_at_projection_origin": 0.933},
        -4e6, 1e5,
    ),
    "rotated": (ROTATED, -6.0, -9.0),
    "turned": (ROTATED | {"north_pole_grid_longitude": 30.0}, -6.0, 21.0),
    "upside down": (
        ROTATED | {"grid_north_pole_latitude": -39.25, "grid_north_pole_longitude": 18.0},
        -6.0, -9.0,
    ),
}  # fmt: skip
Y, X = 7, 9
GAPS = np.array([[True, False, False, False], [False] * 4, [False] * 4])


def read(path, level_type):
    """Read the variables on one type of level with cfgrib."""
    backend = {"indexpath": "", "filter_by_keys": {"typeOfLevel": level_type}}
    options = {"engine": "cfgrib", "backend_kwargs": backend, "decode_timedelta": True}
    with xr.open_dataset(path, **options) as data:
        return data.load()


def assert_packed(found, wanted):
    """Each field is within half a step of its packing, and of float32."""
    axes = (-2, -1)
    step = (wanted.max(axes) - wanted.min(axes)) / (2**BITS_PER_VALUE - 1)
    bound = step + 1e-6 * np.abs(wanted).max(axes)
    assert (np.abs(found - wanted).max(axes) <= bound).all()


def a_format(**changes):
    """A format of two variables on a small grid; `changes` replaces parts."""
    parts = {
        "channels": (Channel("temperature", 500), Channel("surface_pressure")),
        "units": {},
        "times": np.array(["2026-01-31T18"], "M8[ns]"),
        "hours": (6, 12),
        "grid": Grid(np.array([60.0, 0.0, -60.0]), np.array([0.0, 90.0, 180.0, 270.0])),
    }
    return ForecastFormat(**(parts | changes))


def write(form, path, fields=None):
    """Write fields, `(C, H, W)`, at all times, through a store, and return the messages' keys."""
    writer = ForecastWriter(path, "grib", form, {})
    writer.begin(RowPartition.balanced(form.height, 1))
    shape = (len(form.channels), *form.grid)
    fields = np.zeros(shape, np.float32) if fields is None else fields
    for job in writer.store.jobs:
        for lead in range(len(form.hours)):
            parts = [
                fields[v.channels] if v.on_levels else fields[v.channels.start]
                for v in form.variables
            ]
            writer.write(job, lead, slice(0, form.height), parts)
    for copy in writer.copies(0, 1):
        writer.copy(*copy)
    writer.finish()
    return path


def headers(path, *keys):
    """Return the values of keys of each message."""
    eccodes, found = load_eccodes("format"), []
    with path.open("rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            found.append(tuple(eccodes.codes_get(handle, key) for key in keys))
            eccodes.codes_release(handle)
    return found


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_cfgrib_reads_what_a_store_would_have(config, whole, tmp_path, ranks):
    out = forecast(forecast_config(config, tmp_path / "f.grib", format="grib"), ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["f.grib"]
    upper, lower = read(out, "isobaricInhPa"), read(out, "heightAboveGround")
    with xr.open_zarr(whole) as wanted:
        upper = upper.sel(isobaricInhPa=wanted["level"].values)
        for name, other in {**COORDINATES, "longitude": "longitude"}.items():
            assert np.array_equal(upper[other].values, wanted[name].values)
        assert_packed(upper["z"].values, wanted["geopotential"].values)
        assert_packed(upper["t"].values, wanted["temperature"].values)
        assert_packed(lower["t2m"].values, wanted["2m_temperature"].values)
    assert upper["z"].attrs["GRIB_paramId"] == 129
    assert lower["t2m"].attrs["units"] == "K"
    assert check_forecast(str(out)).lines() == [f"{out}: complete (2 initial times, 4 lead times)"]


def test_headers(tmp_path):
    rain = {"channels": (Channel("total_precipitation"),), "summed": ("total_precipitation",)}
    path = write(a_format(**rain, span=6, units={"total_precipitation": "m"}), tmp_path / "f")
    keys = ("edition", "shortName", "units", "stepRange", "stepType", "dataDate", "dataTime")
    assert headers(path, *keys) == [
        (2, "tp", "kg m**-2", f"{first}-{first + 6}", "accum", 20260131, 1800) for first in (0, 6)
    ]
    keys = ("typeOfLevel", "level", "step", "dataType", "bitsPerValue", "packingType", "centre")
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    path = write(a_format(hours=(6,)), tmp_path / "g", values)
    assert headers(path, *keys) == [
        ("isobaricInhPa", 500, 6, "fc", BITS_PER_VALUE, "grid_simple", "255"),
        ("surface", 0, 6, "fc", BITS_PER_VALUE, "grid_simple", "255"),
    ]
    path = write(a_format(model_levels=True, hours=(6,)), tmp_path / "h")
    assert headers(path, "typeOfLevel", "level")[0] == ("hybrid", 500)
    later = np.array(["2026-01-31T18:30"], "M8[ns]")
    path = write(a_format(times=later, hours=(6,)), tmp_path / "i")
    assert headers(path, "dataTime", "validityDate", "validityTime")[0] == (1830, 20260201, 30)


def test_cfgrib_reads_sums_of_members_and_soil(tmp_path):
    names = ("total_precipitation", "soil_temperature_level_2", "skin_temperature")
    form = a_format(
        channels=tuple(map(Channel, names)),
        members=2,
        summed=names[:1],
        span=6,
        units={"total_precipitation": "m", names[1]: "K", names[2]: "K"},
    )
    values = np.random.default_rng(3).random((3, 3, 4)).astype("f4")
    path = write(form, tmp_path / "f", values)
    forecasts = ForecastStore.open(str(path))
    assert (forecasts.members, forecasts.span) == (2, np.timedelta64(6, "h"))
    assert forecasts.variables[names[0]] == ForecastVariable((), "m", summed=True)
    assert forecasts.variables[names[2]] == ForecastVariable((), "K")
    for name, field in zip(names, values, strict=True):
        read_back = forecasts.read(name, (), np.array([0]), np.array([0, 1]))
        assert read_back.shape == (1, 2, 2, 1, 3, 4)
        assert_packed(read_back, field)
    keys = ("shortName", "typeOfLevel", "level", "number", "stepRange", "stepType", "dataType")
    found = headers(path, *keys)
    assert len(found) == len(set(found)) == 2 * 2 * 3
    ensemble = set(headers(path, "numberOfForecastsInEnsemble", "typeOfGeneratingProcess"))
    assert ensemble == {(2, 4)}
    for member in (0, 1):
        assert ("tp", "surface", 0, member, "6-12", "accum", "pf") in found
        assert ("skt", "surface", 0, member, "12", "instant", "pf") in found
        assert ("sot", "soilLayer", 2, member, "12", "instant", "pf") in found
    for short, level_type, field in (
        ("tp", "surface", 1000 * values[0]),
        ("sot", "soilLayer", values[1]),
        ("skt", "surface", values[2]),
    ):
        backend = {"indexpath": "", "filter_by_keys": {"shortName": short}}
        options = {"engine": "cfgrib", "backend_kwargs": backend, "decode_timedelta": True}
        with xr.open_dataset(path, **options) as data:
            (variable,) = data.data_vars.values()
            assert variable.attrs["GRIB_typeOfLevel"] == level_type
            assert variable.attrs["GRIB_stepType"] == ("accum" if short == "tp" else "instant")
            assert data["number"].values.tolist() == [0, 1]
            hours = data["step"].values / np.timedelta64(1, "h")
            assert hours.tolist() == [6, 12]
            assert data["time"].values == form.times[0]
            for one in variable.transpose("number", "step", ...).values.reshape(-1, 3, 4):
                assert_packed(one[None], field[None])


@pytest.mark.slow
def test_forecasts_that_lack_a_field_are_read_without_it(tmp_path):
    path = write(a_format(), tmp_path / "f")
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"GRIB")])  # surface_pressure at 12 h
    forecasts = ForecastStore.open(str(path))
    both, last = np.array([0, 1]), np.array([1])
    assert forecasts.read("temperature", (500,), np.array([0]), both).shape == (1, 2, 1, 1, 3, 4)
    line = (
        "surface_pressure from 2026-01-31T18:00 at 12 h can't be read .the file has no such field"
    )
    with pytest.raises(UserError, match=line):
        forecasts.read("surface_pressure", (), np.array([0]), last)
    path.write_bytes(content + content[: content.index(b"GRIB", 4)])
    with pytest.raises(UserError, match="temperature from 2026-01-31T18:00 at 6 h more than once"):
        ForecastStore.open(str(path))


@pytest.mark.slow
def test_units_become_those_of_the_code(tmp_path):
    form = a_format(
        channels=(Channel("snow_depth"), Channel("total_cloud_cover")),
        units={"snow_depth": "m", "total_cloud_cover": "(0 - 1)"},
        hours=(6,),
    )
    values = np.linspace(0, 1, 24, dtype=np.float32).reshape(2, 3, 4)
    file = GribFile.open(write(form, tmp_path / "f", values), "path")
    for message, scale, field in zip(file.messages("instant"), (1000, 100), values, strict=True):
        assert_packed(file.read(message), scale * field)


def test_the_grid_is_that_of_the_fields(tmp_path):
    for number, (rows, longitude) in enumerate(
        (
            (3, np.arange(4) * 90.0),
            (7, np.arange(-2, 2) * 90.0),
            (3, np.arange(7) * 360 / 7),
        )
    ):
        latitude = np.linspace(90, -90, rows)
        form = a_format(grid=Grid(latitude, longitude), hours=(6,))
        random = np.random.default_rng(0).normal(size=(2, rows, len(longitude))).astype("f4")
        path = write(form, tmp_path / str(number), random)
        file = GribFile.open(path, "path")
        found = file.read_grid()
        np.testing.assert_allclose(found[0], latitude, atol=1e-6)
        np.testing.assert_allclose((found[1] - longitude) % 360 % 360, 0, atol=2e-6)
        assert_packed(file.read(file.messages("instant")[0]), random[0])
        data = read(path, "isobaricInhPa")
        np.testing.assert_allclose(data["latitude"].values, latitude, atol=2e-6)
        assert_packed(data["t"].values, random[0])


def test_points_without_values_stay_so(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    values[:, GAPS] = np.nan
    path = write(a_format(hours=(6,)), tmp_path / "f", values)
    file = GribFile.open(path, "path")
    assert np.array_equal(np.isnan(file.read(file.messages("instant")[1])), GAPS)
    assert np.array_equal(np.isnan(read(path, "isobaricInhPa")["t"].values), GAPS)
    values[0, 2, 1] = -np.inf  # as of an unstable forecast
    file = GribFile.open(write(a_format(hours=(6,)), tmp_path / "g", values), "path")
    assert np.argwhere(np.isnan(file.read(file.messages("instant")[0])) & ~GAPS).tolist() == [
        [2, 1]
    ]


@pytest.mark.slow
def test_each_code_has_the_name_that_is_looked_for(tmp_path):
    levels = {name: 500 if name in UPPER_AIR_NAMES.values() else None for name in CODES}
    levels["wind_speed"] = 500
    channels = tuple(Channel(name, level) for name, level in levels.items())
    summed = tuple(name for name in CODES if name in ACCUMULATED)
    form = a_format(channels=channels, hours=(6,), summed=summed, span=6)
    messages = GribFile.open(write(form, tmp_path / "f"), "path").messages("instant", "accum")
    assert len(messages) == len(CODES)
    for channel, message in zip(channels, messages, strict=True):
        names = (*all_names_of(channel.variable), *OTHER_NAMES.get(channel.variable, ()))
        assert message.name in names
        assert (message.kind == "isobaricInhPa") == (channel.level is not None)


def test_a_cut_end_or_a_damaged_byte_is_found_wherever_it_is(tmp_path):
    path = write(a_format(), tmp_path / "f")
    file = GribFile.open(path, "path")
    first, start, end = (message.offset for message in file.messages("instant")[:3])
    content = path.read_bytes()

    path.write_bytes(content[:-9])
    assert check_forecast(str(path)).lines()[1:] == ["  missing: 2026-01-31T18 +12h, rows 0 to 2"]
    path.write_bytes(content[: len(content) // 2 + 30])
    assert not check_forecast(str(path)).complete

    def damage(position):
        damaged = bytearray(content)
        damaged[position] ^= 4
        path.write_bytes(damaged)

    for position in (start + 20, start + 97, end - 10):  # time, grid, values
        damage(position)
        with pytest.raises(UserError, match=r"can't be decoded \(its checksum is wrong\)"):
            file.read(file.messages("instant")[1])
        shapes = {file.read(file.messages("instant")[n]).shape for n in (0, 2)}
        assert len(shapes) == 1
    assert check_forecast(str(path)).lines()[1:] == ["  missing: 2026-01-31T18 +6h, rows 0 to 2"]
    # A damaged grid is no other grid: its type and its latitude, of either message.
    for number, offset in ((0, first), (1, start)):
        for position in (offset + 83, offset + 97):
            damage(position)
            said = rf"read after {number} message.*checksum is wrong"
            with pytest.raises(UserError, match=said):
                GribFile.open(path, "path")
    damage(start + 16 + 21 + 3)  # the length of section 2: messages can't be found
    with pytest.raises(UserError, match=r"after 1 message: more messages follow, which can't"):
        GribFile.open(path, "path")
    assert not check_forecast(str(path)).complete


def on_projection(mapping, south, west, step=None):
    """A grid of Y rows from the north and X columns, with points from PROJ or formulas."""
    degrees = mapping["grid_mapping_name"] == ROTATED["grid_mapping_name"]
    step = step or (1.0 if degrees else 117_123.0)
    y, x = south + step * np.arange(Y)[::-1], west + step * np.arange(X)
    if degrees:
        pole = mapping["grid_north_pole_latitude"], mapping["grid_north_pole_longitude"]
        columns = x - mapping.get("north_pole_grid_longitude", 0)
        latitude, longitude = region_grids.rotated(y, columns, pole)
    else:
        longitude, latitude = project(mapping, *np.meshgrid(x, y), "inverse")
    axes = (Axis(name, values, {}) for name, values in (("y", y), ("x", x)))
    grid = Grid(latitude, longitude, Projection("crs", mapping, *axes))
    return grid.flipped() if grid.rises else grid  # as the reader does


def distance(grid, latitude, longitude):
    """Degrees between the points of a grid and others."""
    apart = unit_vectors(*grid.points) - unit_vectors(latitude, longitude)
    return np.rad2deg(np.linalg.norm(apart, axis=0)).max()


@pytest.mark.parametrize(
    "kind",
    tiers(
        fast=[("false easting",), ("south pole",)],
        slow=[("southern cone",), ("around the pole",), ("scaled",), ("turned",)],
        exhaustive=[
            *(("one parallel",), ("two parallels",), ("true at 71 degrees",)),
            *(("beyond the pole",), ("rotated",), ("upside down",)),
        ],
    ),
)
def test_other_programs_find_the_points_of_projections(tmp_path, kind):
    """By the latitudes and longitudes that ecCodes computes from the keys."""
    grid = on_projection(*PROJECTIONS[kind])
    values = np.random.default_rng(0).normal(size=(2, Y, X)).astype("f4")
    values[1] += grid.latitude
    path = write(a_format(grid=grid, hours=(6,)), tmp_path / "f", values)
    data = read(path, "isobaricInhPa")
    same = np.allclose(data["latitude"].values[0], grid.latitude[0], atol=1e-4)
    order = slice(None, None, 1 if same else -1)
    degrees = (data[name].values[order] for name in ("latitude", "longitude"))
    assert distance(grid, *degrees) < 3e-6
    assert_packed(data["t"].values[order], values[0])
    states = GribStates(path)
    assert distance(grid, *states.grid.points) < 3e-6
    assert grid.difference(states.grid, 1e-4) is None
    field = states.find(["sp"], None, False, np.datetime64("2026-02-01")).read()
    assert_packed(field.reshape(Y, X), values[1])
    forecasts = ForecastStore.open(str(path))
    assert grid.difference(forecasts.grid, 1e-4) is None
    first = np.array([0])
    assert_packed(forecasts.read("surface_pressure", (), first, first).squeeze(), values[1])
    assert_packed(forecasts.read("temperature", (500,), first, first).squeeze(), values[0])
    assert check_forecast(str(path)).complete


@pytest.mark.parametrize(
    "kind",
    tiers(fast=[("polar_stereographic",)], slow=[("lambert",)], exhaustive=[("rotated_ll",)]),
)
def test_keys_of_projections(tmp_path, kind):
    keys, latitude, longitude = projected(kind)
    mapping = {"lambert": LAMBERT, "rotated_ll": ROTATED}.get(kind, {
        **POLAR, "standard_parallel": 90.0, "straight_vertical_longitude_from_pole": 0.0,
        "earth_radius": region_grids.RADIUS,
    })  # fmt: skip
    axes = Axis("y", 6 - 1.0 * np.arange(13), {}), Axis("x", 1.0 * np.arange(16) - 9, {})
    grid = Grid(latitude, longitude, Projection("crs", mapping, *axes))
    grid = grid.flipped() if grid.rises else grid
    path = write(a_format(grid=grid, hours=(6,)), tmp_path / "f.grib")
    keys |= {"shapeOfTheEarth": 1, "radius": region_grids.RADIUS}
    keys |= {"resolutionAndComponentFlags": 48}  # winds are eastward and northward
    found = dict(zip(keys, headers(path, *keys)[0], strict=True))
    assert found == {
        x: y if isinstance(y, str) else pytest.approx(y, abs=1e-6) for x, y in keys.items()
    }
    names = {"prognostic": ["surface_pressure"], "forcing": [], "static": [], "levels": None}
    source = open_source(stores.config(path, **names))
    again = write(a_format(grid=source.grid, hours=(6,)), tmp_path / "g")
    assert headers(again, *keys) == headers(path, *keys)


WINDS = ("10m_u_component_of_wind", "10m_v_component_of_wind")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", tiers(fast=[("rotated",)], slow=[("one parallel",)], exhaustive=[("scaled",)])
)
def test_grib_is_flagged(tmp_path, kind):
    """Messages of all variables, or readers would take them for those of two grids."""
    grid = on_projection(*PROJECTIONS[kind])
    channels = (*map(Channel, WINDS), Channel("surface_pressure"))
    form = a_format(channels=channels, grid=grid, hours=(6,))
    stated = dict(zip(WINDS, ("x_wind", "y_wind"), strict=True))
    for along_grid in ({}, stated):
        path = write(replace(form, along_grid=along_grid), tmp_path / f"{len(along_grid)}.grib")
        [(flags,)] = set(headers(path, "resolutionAndComponentFlags"))
        assert flags & 8 == (8 if along_grid else 0)
        found = GribStates(path).find(["10u"], None, False, np.datetime64("2026-02-01"))
        assert found.along_grid == bool(along_grid)
        source = open_source(stores.config(path))
        names = {source.variables[name].standard_name for name in WINDS}
        assert names == ({*along_grid.values()} or {"eastward_wind", "northward_wind"})
    mixed = replace(form, along_grid={WINDS[0]: "x_wind"})
    with pytest.raises(UserError, match=r"^format: GRIB has all winds along the grid, or none, "):
        write(mixed, tmp_path / "mixed.grib")


OTHER_MAPPINGS = [
    ({}, "but this one has no grid mapping"),
    ({"grid_mapping_name": "mercator"}, "but this one is mercator"),
    (CONE | {"standard_parallel": [30.0, -30.0]}, "not on this lambert_conformal_conic"),
    (CONE | {"standard_parallel": "30"}, "not on this lambert_conformal_conic"),
    (CONE | {"earth_radius": np.inf}, "not on this lambert_conformal_conic"),
    (CONE | {"longitude_of_central_meridian": -98.1}, "up to 0.0[0-9]* degrees from where"),
    (CONE | WGS_84, r"not on this lambert_conformal_conic \(on an ellipsoid\)"),
    ({x: y for x, y in CONE.items() if x != "standard_parallel"}, "lacks 'standard_parallel'"),
    (POLAR, "degrees from where this polar_stereographic has them"),
    (ROTATED, "this rotated_latitude_longitude"),
]


def test_what_grib_has_no_form_for_is_refused(tmp_path):
    uneven = Grid(np.array([80.0, 1.0, -60.0]), np.arange(4) * 90.0)
    cases = [
        ({"channels": (Channel("a"), Channel("temperature"))}, "no code for a, temperature here"),
        ({"units": {"surface_pressure": "K"}}, "surface_pressure is in K, which can't be"),
        ({"grid": uneven}, "latitude are 61 to 79 degrees"),
    ]
    plane = on_projection(CONE, -3e5, -4e5)
    for mapping, line in OTHER_MAPPINGS:
        grid = Grid(*plane.points, plane.projection._replace(attributes=mapping))
        cases.append(({"grid": grid}, line))
    unequal = on_projection(CONE, -3e5, -4e5)
    unequal.longitude[:, 4:] += 1e-3
    cases.append(({"grid": unequal}, r"to 0\.0[0-9]* degrees .* steps are unequal"))
    for changes, line in cases:
        with pytest.raises(UserError, match=rf"format: .*{line}.*\. Use format=zarr or netcdf"):
            ForecastWriter(tmp_path / "f", "grib", a_format(**changes), {}).check()


@pytest.mark.slow
def test_an_interrupted_file_is_written_again(config, tmp_path, monkeypatch):
    settings = forecast_config(config, tmp_path / "f.grib", format="grib", lead="6h")
    with monkeypatch.context() as patch:
        patch.setattr(ZarrForecast, "read", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forecast(settings)
    assert not (tmp_path / "f.grib").exists()
    assert check_forecast(str(forecast(settings))).complete
    assert len(GribFile.open(tmp_path / "f.grib", "path").messages("instant")) == 2 * 7


def test_pyproj_is_not_imported_after_eccodes(monkeypatch):
    """Python would crash at its end; xarray may have loaded ecCodes, with cfgrib."""
    imported, eccodes = [], load_eccodes("format")

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "pyproj":
                imported.append(name)
                raise ImportError

    assert "eccodes" in sys.modules
    monkeypatch.delitem(sys.modules, "pyproj", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert load_eccodes.__wrapped__("format") is eccodes
    assert imported == []
