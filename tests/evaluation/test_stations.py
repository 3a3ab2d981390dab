"""Scores at stations, computed again one observation at a time."""

import csv
import os
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import ScoreRequest
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.maps import EARTH, SIMULATED
from credit_dp.evaluation.observations import Observations
from credit_dp.evaluation.station_page import station_page
from credit_dp.evaluation.station_scores import StationScores, StationSums
from credit_dp.evaluation.stations import StationOptions, density_weights, score_stations
from credit_dp.forecast.format import SETTINGS_ATTRIBUTE
from tests.cli.invocation import answer
from tests.data import region_grids, wind_stores
from tests.data.proj import project
from tests.evaluation import forecasts

STATIONS = 7


def observations(observed: xr.Dataset) -> xr.Dataset:
    """Random temperatures in degrees Celsius, with gaps, at stations all over the globe."""
    random = np.random.default_rng(8)
    shape = (observed.sizes["time"], STATIONS)
    values = random.normal(10, 5, shape)
    values[random.random(shape) < 0.3] = np.nan
    latitude = random.uniform(-90, 90, STATIONS)
    latitude[0] = 89.9  # poleward of the northernmost row, unless this is the pole
    return xr.Dataset(
        {"t2m": (("station", "time"), values.T, {"units": "degC"})},
        {
            "time": observed["time"].values,
            "lat": ("station", latitude, {"units": "degrees_north"}),
            "lon": ("station", random.uniform(-180, 180, STATIONS), {"units": "degrees_east"}),
            "name": ("station", [f"WMO{i}" for i in range(STATIONS)], {"cf_role": "timeseries_id"}),
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stations")
    observed = forecasts.truth()
    for name, members in (("one.zarr", 0), ("three.zarr", 3)):
        made = forecasts.forecast(observed, members)
        made["2m_temperature"].attrs["units"] = "K"
        forecasts.write(made, path / name)
    observations(observed).to_netcdf(path / "stations.nc")
    return path


def scored(
    folder: Path,
    name: str,
    where: str = "stations.nc",
    missing: tuple[str, ...] = (),
    **keys: object,
) -> StationScores:
    """Score with some keys of the request, and of the options of stations."""
    names = {field.name for field in fields(StationOptions)}
    options = StationOptions(missing, **{k: x for k, x in keys.items() if k in names})  # type: ignore[arg-type]
    rest = {key: value for key, value in keys.items() if key not in names}
    request = ScoreRequest(forecast=name, truth=(), cache="", **rest)  # type: ignore[arg-type]
    forecast = ForecastStore.open(str(folder / name))
    return score_stations(request, forecast, str(folder / where), lambda title, done: None, options)


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def bilinear(field: xr.DataArray, latitude: float, longitude: float) -> np.ndarray:
    """Return the values of `(number, latitude, longitude)` at a point, first along each row."""
    field = field.sortby("latitude").astype("f8")
    columns, rows = field["longitude"].values, field["latitude"].values
    return np.array(
        [
            np.interp(latitude, rows, [np.interp(longitude, columns, x, period=360) for x in part])
            for part in field.transpose("number", ...).values
        ]
    )


@pytest.mark.parametrize("name", [pytest.param("one.zarr", marks=pytest.mark.slow), "three.zarr"])
def test_scores_by_definition(folder: Path, name: str) -> None:
    seen = observations(forecasts.truth())
    made = xr.open_zarr(folder / name, decode_timedelta=True, consolidated=False)["2m_temperature"]
    if "number" not in made.dims:
        made = made.expand_dims("number")
    errors, absolute, variances = (defaultdict(list) for _ in range(3))
    for init in made["time"].values:
        for lead in made["prediction_timedelta"].values:
            for i in range(STATIONS):
                station = seen["t2m"].isel(station=i) + 273.15
                value = float(station.sel(time=init + lead))
                if np.isnan(value):
                    continue
                members = bilinear(
                    made.sel(time=init, prediction_timedelta=lead),
                    *map(float, (seen["lat"][i], seen["lon"][i])),
                )
                hours = int(lead / np.timedelta64(1, "h"))
                persistent = float(station.sel(time=init))
                for key in ((hours, "global"), (hours, i)):
                    errors["forecast", *key].append(members.mean() - value)
                    pairs = [abs(a - b) for a in members for b in members]
                    number = len(members)
                    spread = sum(pairs) / (2 * number * (number - 1)) if number > 1 else 0
                    absolute["forecast", *key].append(np.abs(members - value).mean() - spread)
                    variances["forecast", *key].append(members.var(ddof=1) if number > 1 else 0)
                    if not np.isnan(persistent):
                        errors["persistence", *key].append(persistent - value)
                        absolute["persistence", *key].append(abs(persistent - value))
    result = scored(folder, name)
    rows = table(result.to_csv())
    assert {row["score"] for row in rows} == {
        *("observations", "rmse", "bias", "crps"),
        *(["spread"] if name == "three.zarr" else []),
    }
    for row in rows:
        key = (row["of"], int(row["lead_hours"]), row["region"])
        expected = {
            "observations": len(errors[key]),
            "rmse": np.sqrt(np.mean(np.square(errors[key]))),
            "bias": np.mean(errors[key]),
            "crps": np.mean(absolute[key]),
            "spread": np.sqrt(np.mean(variances[key])) if key in variances else None,
        }[row["score"]]
        assert float(row["value"]) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert (row["variable"], row["level"]) == ("2m_temperature", "")
        assert row["unit"] == ("" if row["score"] == "observations" else "K")
    of_stations = table(result.stations_csv())
    assert len(of_stations) == len([key for key in errors if key[2] != "global"])
    for row in of_stations:
        key = (row["of"], int(row["lead_hours"]), int(row["station"].removeprefix("WMO")))
        assert int(row["observations"]) == len(errors[key])
        rmse = np.sqrt(np.mean(np.square(errors[key])))
        assert float(row["rmse"]) == pytest.approx(rmse, rel=1e-9, abs=1e-9)
        assert float(row["latitude"]) == float(seen["lat"][key[2]])


def test_csv_gives_the_same(folder: Path) -> None:
    seen = xr.open_dataset(folder / "stations.nc").rename(t2m="2m_temperature")
    lines = ["station,time,latitude,longitude,2m_temperature"]
    for i in np.random.default_rng(1).permutation(STATIONS):
        for time in seen["time"].values:
            value = float(seen["2m_temperature"].isel(station=i).sel(time=time)) + 273.15
            place = (float(seen[name][i]) for name in ("lat", "lon"))
            text = "" if np.isnan(value) else repr(value)
            lines.append(",".join(map(str, (f"WMO{i}", f"{time}Z", *place, text))))
    (folder / "stations.csv").write_text("\n".join(lines))
    found, expected = (scored(folder, "one.zarr", name) for name in ("stations.csv", "stations.nc"))
    assert len(table(found.to_csv())) == len(table(expected.to_csv()))
    for row, other in zip(table(found.to_csv()), table(expected.to_csv()), strict=True):
        assert float(row.pop("value")) == pytest.approx(float(other.pop("value")), rel=1e-9)
        assert row == other


def test_regions_hours_and_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scored(folder, "three.zarr", regions=("northern-hemisphere",))
    assert {row["region"] for row in table(whole.to_csv())} == {"global", "northern-hemisphere"}
    north = Observations.open(str(folder / "stations.nc")).latitude >= 20
    counts = whole.sums["2m_temperature"].of_stations()["observations"][0, :, north].sum(axis=0)
    of_north = whole.of_region("2m_temperature", "northern-hemisphere")
    np.testing.assert_array_equal(of_north["observations"][0], counts)
    monkeypatch.setattr("credit_dp.evaluation.stations.MAX_BYTES", 1)
    assert scored(folder, "three.zarr", regions=("northern-hemisphere",)).to_csv() == whole.to_csv()
    late = table(scored(folder, "three.zarr", hours=(24,)).to_csv())
    assert late == [
        row
        for row in table(whole.to_csv())
        if row["lead_hours"] == "24" and row["region"] == "global"
    ]


def test_stations_outside_of_a_region_are_left_out(folder: Path) -> None:
    made = xr.open_zarr(folder / "one.zarr", decode_timedelta=True, consolidated=False)
    box = made.isel(latitude=slice(1, 5), longitude=slice(0, 4)).load()
    box.to_netcdf(folder / "box.nc")
    seen = Observations.open(str(folder / "stations.nc"))
    rows, columns = box["latitude"].values, box["longitude"].values
    inside = (seen.latitude >= rows.min()) & (seen.latitude <= rows.max())
    inside &= (seen.longitude % 360 >= columns.min()) & (seen.longitude % 360 <= columns.max())
    assert 0 < inside.sum() < STATIONS
    found = scored(folder, "box.nc")
    assert found.observations.names == [f"WMO{i}" for i in np.flatnonzero(inside)]
    left_out = STATIONS - inside.sum()
    assert found.notes[0] == f"{left_out} of 7 stations left out: outside of the forecast's region"
    whole = scored(folder, "one.zarr").sums["2m_temperature"].of_stations()
    for name, values in found.sums["2m_temperature"].of_stations().items():
        np.testing.assert_allclose(values, whole[name][..., inside], rtol=1e-6)


def ask(monkeypatch: pytest.MonkeyPatch, folder: Path, *keys: str) -> tuple[int, str, str]:
    monkeypatch.chdir(folder)
    return answer(monkeypatch, "evaluate", *keys, program="credit-dp")


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("forecast=three.zarr", "stations=stations.nc", "out=scores", "regions=[tropics]")
    code, said, complaints = ask(monkeypatch, folder, *given)
    assert (code, complaints) == (0, "")
    assert f"stations.nc: {STATIONS} of {STATIONS} stations and " in said
    assert "24 h, tropics" in said
    assert said.endswith("scores/stations.html\n")
    expected = scored(folder, "three.zarr", regions=("tropics",))
    seen = replace(expected.observations, where="stations.nc")
    assert {path.name: path.read_text() for path in (folder / "scores").iterdir()} == {
        "scores.csv": expected.to_csv(),
        "stations.csv": expected.stations_csv(),
        "hours.csv": expected.hours_csv(),
        "rank_histograms.csv": expected.ranks_csv(),
        "stations.html": station_page(replace(expected, forecast="three.zarr", observations=seen)),
    }


def test_maps_have_the_coasts_of_the_planet_that_the_forecast_started_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = xr.open_zarr(folder / "one.zarr", consolidated=False, decode_timedelta=True)
    text = '{"stores": ["/home/user/quickstart-T21-32x64-b08d.zarr"]}'
    made = made.assign_attrs({SETTINGS_ATTRIBUTE: text})
    made.to_netcdf(tmp_path / "own.nc")
    made.assign_attrs({SETTINGS_ATTRIBUTE: '{"stores": 5}'}).to_netcdf(tmp_path / "odd.nc")
    seen: list[str] = []

    def record(scores: StationScores) -> str:
        seen.append(scores.grid.planet)
        return ""

    names = {"own": tmp_path / "own.nc", "odd": tmp_path / "odd.nc", "other": "one.zarr"}
    for out, name in names.items():
        monkeypatch.setattr("credit_dp.evaluation.station_page.station_page", record)
        keys = f"forecast={name}", "stations=stations.nc", f"out={tmp_path / out}"
        assert ask(monkeypatch, folder, *keys)[0] == 0
    assert seen == [SIMULATED, EARTH, EARTH]


def test_keys_that_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for keys, said in (
        (["truth=truth.zarr"], "truth: has no effect together with stations="),
        (["boundary=0"], "boundary: has no effect together with stations="),
        (["stations=none.csv"], "none.csv: no such file. Change stations."),
        (["stations=none.nc"], "none.nc: no such file."),
        (["variables=[temperature]"], "stations.nc: no temperature at the surface or on pressure"),
        (["variables=[wind]"], "one.zarr: no wind at the surface or on pressure levels."),
        (["levels=[500]"], "stations.nc: no scored variable on level 500, among t2m. "),
        (["levels=[123]"], "one.zarr: no scored variable on level 123, among "),
        (["variables=[2m_temperatur]"], "2m_temperature"),
        (["regions=[nowhere]"], "regions: "),
        (["hours=[5]"], "Change hours."),
        (["limits={t2m:[1,2]}"], "limits.t2m: there is no scored variable t2m."),
        (["stations=", "truth=truth.zarr", "missing=[9]"], "missing: has an effect on stations="),
        (["stations=", "truth=truth.zarr", "tolerance=1h"], "tolerance: has an effect on stat"),
        (["tolerance=99999h"], "tolerance: needs minutes or hours, like 15min or 1h, got 99999h."),
        (["tolerance=4h"], "tolerance: needs less than 180min, half the time between dates of"),
        (["tolerance=15"], "tolerance: needs minutes or hours, like 15min or 1h, got 15."),
        (["interpolate=cubic"], "interpolate: needs bilinear or nearest, got cubic."),
        (["weights=area"], "weights: needs density, got area."),
        (["lapse_rate=6.5"], "lapse_rate: has an effect with orography= only. Leave it out."),
        (["orography=a.nc", "lapse_rate=steep"], "lapse_rate: needs a number in K/km, like 6.5"),
        (["orography=a.nc", "lapse_rate=.nan"], "lapse_rate: needs a number in K/km, like 6.5"),
        (["orography=none.nc"], "none.nc: no such file. Set orography to one that exists."),
        (["stations=", "truth=truth.zarr", "orography=a.nc"], "orography: has an effect on st"),
    ):
        given = {"forecast": "one.zarr", "stations": "stations.nc", "out": "refused"}
        given |= dict(key.split("=", 1) for key in keys)
        texts = [f"{key}={value}" for key, value in given.items()]
        code, out, complaints = ask(monkeypatch, folder, *texts)
        assert (code, out, complaints.count("\n")) == (2, "", 1), keys
        assert said in complaints, keys
        assert not (folder / "refused").exists(), keys


def wrong_unit(data: xr.Dataset) -> xr.Dataset:
    data["t2m"].attrs["units"] = "Pa"
    return data


UNFIT: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "t2m is in Pa, which can't be converted to the forecast's K": wrong_unit,
    "latitude is missing": lambda x: x.drop_vars("lat"),
    "none of its variables gust is among the forecast's": lambda x: x.rename(t2m="gust"),
    "no observation of": lambda x: x.assign_coords(time=x["time"] + np.timedelta64(1, "m")),
    "has 2000-01-01T06:00 twice": lambda x: x.isel(time=[0, 1, 1]),
    "missing dates": lambda x: x.assign_coords(time=x["time"].where(x["time"] > x["time"][0])),
    "t2m has infinite values": lambda x: x.assign(t2m=x["t2m"].where(x["t2m"] > 280, np.inf)),
    "station WMO0 has no place on the globe": lambda x: x.assign_coords(lat=x["lat"] + 100),
    "latitude": lambda x: x.isel(station=0),
    "no variable has a value": lambda x: x.assign(t2m=x["t2m"] * np.nan),
    "noleap calendar": lambda x: x.convert_calendar("noleap"),
    "t2m and 2m_temperature are two names": lambda x: x.assign({"2m_temperature": x["t2m"]}),
}


def test_observations_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    for number, (said, change) in enumerate(UNFIT.items()):
        path = tmp_path / f"{number}.nc"
        change(xr.load_dataset(folder / "stations.nc")).to_netcdf(path)
        with pytest.raises(UserError, match=said):
            scored(folder, "one.zarr", str(path))


COLUMNS = "station,time,latitude,longitude,t2m"


def test_csv_that_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    for columns, row, said in (
        ("station,time,latitude,t2m", "A,2000-01-01,1,2", "the column longitude is missing"),
        (COLUMNS, "A,2000-01-01,1,2,3,4", "can't be read as CSV"),
        (COLUMNS, "A,soon,1,2,3", "time has 'soon', no date"),
        (COLUMNS, "A,01/02/2000,1,2,3", "time has '01/02/2000'"),
        (COLUMNS, "A,,1,2,3", "time has '', no date"),
        (COLUMNS, "A,2300-01-01,1,2,3", "time has '2300-01-01', no"),
        (COLUMNS, "A,1500-01-01,1,2,3", "time has '1500-01-01', no"),
        (COLUMNS, ",2000-01-01,1,2,3", "a row has no station"),
        (COLUMNS, "A,2000-01-01,1N,2,3", "latitude has '1N', which"),
        (COLUMNS, "A,2000-01-01,,2,3", "A has no place on the globe"),
        (f"{COLUMNS},msl", "A,2000-01-01,1,2,calm,4", "t2m has 'calm', which is no number"),
        (COLUMNS, "A,2000-01-01,1,2,inf", "t2m has 'inf', which"),
        (f"{COLUMNS},t2m", "A,2000-01-01,1,2,3,4", "the column t2m is there twice"),
        (COLUMNS, "", "it has no rows"),
        (COLUMNS, "A,2000-01-01,1,2,3\n" * 2, "station A has 2000-01-01T00:00 twice"),
    ):
        path.write_text(f"{columns}\n{row}\n")
        with pytest.raises(UserError, match=said):
            scored(folder, "one.zarr", str(path))


def test_csv_keeps_names_and_reads_all_forms_of_times(tmp_path: Path) -> None:
    (tmp_path / "wild.csv").write_text(
        "\ufeffstation, time, latitude, longitude, t2m\n"
        "NA,2000-01-02T01:00+01:00,1,-2,280\n"
        "012,20000102,3,358,NaN\n12,2000-01-02,5,6,\n12,2000-01-01T12:00Z,5,6,281\n",
        encoding="utf-8",
    )
    seen = Observations.open(str(tmp_path / "wild.csv"))
    assert seen.names == ["012", "12", "NA"]
    assert list(seen.longitude) == [358, 6, -2]
    assert [str(time)[:13] for time in seen.times] == ["2000-01-01T12", *["2000-01-02T00"] * 3]
    values = dict(zip(map(seen.describe, range(4)), seen.values["t2m"], strict=True))
    nan = np.nan
    assert values == pytest.approx(
        {
            "station 12 at 2000-01-01T12:00": 281,
            "station NA at 2000-01-02T00:00": 280,
            "station 012 at 2000-01-02T00:00": nan,
            "station 12 at 2000-01-02T00:00": nan,
        },
        nan_ok=True,
    )


@pytest.mark.slow
def test_names_that_are_not_of_stations_are_not_used(folder: Path, tmp_path: Path) -> None:
    data = xr.load_dataset(folder / "stations.nc").drop_vars("name")
    for dims, values in (((), 0), (("time",), np.arange(data.sizes["time"]))):
        named = data.assign_coords(profile=(dims, values, {"cf_role": "profile_id"}))
        named.to_netcdf(tmp_path / f"{len(dims)}.nc")
        seen = Observations.open(str(tmp_path / f"{len(dims)}.nc"))
        assert seen.names == list(map(str, range(STATIONS))), dims


@pytest.mark.slow
def test_a_file_is_closed_when_it_is_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "closed.nc"
    path.write_bytes((folder / "stations.nc").read_bytes())
    with xr.open_dataset(path):
        assert str(path) in opened_files()
    seen = Observations.open(str(path))
    assert str(path) not in opened_files()
    assert np.isfinite(seen.values["t2m"]).any()


def opened_files() -> set[str]:
    return {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}


def test_a_forecast_with_nan_or_fill_values_is_refused_unless_it_is_masked(
    folder: Path, tmp_path: Path
) -> None:
    made = xr.open_zarr(folder / "one.zarr", decode_timedelta=True, consolidated=False).load()
    made["2m_temperature"][:, 1] = np.nan
    made.to_netcdf(tmp_path / "gaps.nc")
    with pytest.raises(UserError, match="2m_temperature has NaN or infinite values near stations"):
        scored(tmp_path, "gaps.nc", str(folder / "stations.nc"))
    found = scored(tmp_path, "gaps.nc", str(folder / "stations.nc"), masked=("2m_temperature",))
    counts = found.of_region("2m_temperature", "global")["observations"][0]
    whole = scored(folder, "one.zarr").of_region("2m_temperature", "global")["observations"][0]
    np.testing.assert_array_equal(counts, whole * [1, 0, 1])
    made["2m_temperature"][:, 1:] = 1e20
    made.to_netcdf(tmp_path / "filled.nc")
    with pytest.raises(UserError, match=r"at 6 h is 1e\+20 .* its limits are 150 to 350. .* give"):
        scored(tmp_path, "filled.nc", str(folder / "stations.nc"))


HEADER = "station,time,latitude,longitude,2m_temperature\n"
NOON = "2000-01-02T12:00"


def csv_of(path: Path, values: list[str], header: str = HEADER, time: str = NOON) -> str:
    """Write one report of each of some stations on the equator, and return the path."""
    lines = [f"S{i},{time},0,{i},{value}\n" for i, value in enumerate(values)]
    path.write_text(header + "".join(lines))
    return str(path)


def store_of(path: Path, values: list[str], units: str = "") -> str:
    """Write the same as netCDF in float32."""
    data = xr.Dataset(
        {"t2m": (("time", "station"), [np.array(values, "f4")], {"units": units} if units else {})},
        {
            "time": [np.datetime64(NOON, "ns")],
            "latitude": ("station", np.zeros(len(values))),
            "longitude": ("station", np.arange(len(values), dtype="f8")),
            "name": (
                "station",
                [f"S{i}" for i in range(len(values))],
                {"cf_role": "timeseries_id"},
            ),
        },
    )
    data.to_netcdf(path)
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", pytest.param("nc", marks=pytest.mark.slow)])
def test_values_outside_the_limits_do_not_count(folder: Path, tmp_path: Path, suffix: str) -> None:
    write = csv_of if suffix == "csv" else store_of
    clean = write(tmp_path / f"clean.{suffix}", ["280", "281", "282", "283"])
    expected = scored(folder, "one.zarr", clean).to_csv()
    cases: list[tuple[str, tuple[str, ...]]] = [
        ("-9999", ("-9999",)),
        ("-999.9", ("-999.9", "M")),
        ("-9999", ()),
        ("1e+30", ()),
        ("12.5", ()),
    ]
    for number, (odd, missing) in enumerate(cases):
        where = write(tmp_path / f"{number}.{suffix}", ["280", "281", "282", "283", odd])
        found = scored(folder, "one.zarr", where, missing=missing)
        assert found.to_csv() == expected, (odd, missing)
        given = 4 if missing else 5
        assert found.coverage == f"4 of 5 stations and 4 of {given} observations count"
        notes = [text.replace("t2m", "2m_temperature") for text in found.notes]
        assert "1 of 5 stations left out: no observation at a date of the forecast" in notes
        assert "2m_temperature is taken for K, as no unit is given" in notes
        note = (
            "1 of 5 observations of 2m_temperature are outside the limits 150 to 350 K, such as "
            f"{odd} of station S4 at 2000-01-02T12:00, left out"
        )
        assert [x for x in notes if "limits" in x] == ([] if missing else [note]), (odd, missing)


def test_implausible_columns_are_refused(folder: Path, tmp_path: Path) -> None:
    degrees = HEADER.strip() + " [degC]\n"
    for header, values, cure in (
        (HEADER, ["12", "13", "14", "-9999"], "like degC: name the column '2m_temperature [degC]'"),
        (HEADER, ["-9999", "-9999", "290"], "a fill value: give missing=[-9999]"),
        (HEADER, ["5e6", "6e6"], "give 'limits={2m_temperature:[LOW,HIGH]}'"),
        (degrees, ["280", "281"], "They look like K: name the column"),
    ):
        where = csv_of(tmp_path / "odd.csv", values, header)
        said = "are outside the limits 150 to 350 K, such as"
        with pytest.raises(UserError, match=said) as caught:
            scored(folder, "one.zarr", where)
        assert cure in str(caught.value)
        wide = scored(folder, "one.zarr", where, limits={"2m_temperature": None})
        assert wide.coverage.endswith(f"{len(values)} of {len(values)} observations count"), values
    where = store_of(tmp_path / "celsius.nc", ["12", "13", "14"])
    with pytest.raises(UserError, match=r"3 of 3 observations of t2m .* look like degC: .* units"):
        scored(folder, "one.zarr", where)
    stated = store_of(tmp_path / "stated.nc", ["12", "13", "14"], "degC")
    assert scored(folder, "one.zarr", stated).notes == [
        "2m_temperature is not corrected for height, as orography= is not given"
    ]


def test_names_of_stations_are_not_formulas(folder: Path, tmp_path: Path) -> None:
    where = csv_of(tmp_path / "names.csv", ["280"])
    path = Path(where)
    path.write_text(path.read_text().replace("S0", '"=HYPERLINK(""http://x"")\x1b[2J"'))
    (row,) = {row["station"] for row in table(scored(folder, "one.zarr", where).stations_csv())}
    assert row == '\'=HYPERLINK("http://x")\\x1b[2J'


def test_names_that_are_not_utf_8_are_refused(folder: Path, tmp_path: Path) -> None:
    text, undeclared, declared = (tmp_path / name for name in ("a.csv", "b.nc", "c.nc"))
    text.write_bytes(f"{HEADER}T\xf6nning,{NOON},0,0,280\n".encode("latin-1"))
    with xr.open_dataset(store_of(tmp_path / "ascii.nc", ["280"])) as data:
        names = np.array([list(b"T\xf6nning")], "u1").view("S1")
        named = data.drop_vars("name").assign_coords(
            name=(("station", "letter"), names, {"cf_role": "timeseries_id"})
        )
        named.to_netcdf(undeclared)
        named["name"].attrs["_Encoding"] = "utf-8"
        named.to_netcdf(declared)
    for path in (text, undeclared, declared):
        with pytest.raises(UserError, match=r"(?i)UTF-8") as caught:
            scored(folder, "one.zarr", str(path))
        assert "\n" not in str(caught.value), path


def test_stations_that_report_at_other_times_are_counted(folder: Path, tmp_path: Path) -> None:
    lines = [f"S{i},2000-01-02T{'12:00' if i == 2 else '11:56'},0,{i},280\n" for i in range(5)]
    (tmp_path / "synop.csv").write_text(HEADER + "".join(lines))
    found = scored(folder, "one.zarr", str(tmp_path / "synop.csv"))
    assert found.coverage == "1 of 5 stations and 1 of 5 observations count"
    assert found.notes[:2] == [
        "4 of 5 stations left out: no observation at a date of the forecast",
        "4 of 5 observations left out: not at a date of the forecast",
    ]


def test_the_nearest_report_within_a_tolerance_counts(folder: Path, tmp_path: Path) -> None:
    reports = (
        # station, time, value: three near noon, of which the nearest lacks the value
        ("A", "11:50", "280"), ("A", "11:56", "281"), ("A", "12:02", "NA"),
        ("B", "11:55", "282"), ("B", "12:05", "283"),  # as near: the earlier one
        ("C", "12:16", "284"), ("C", "17:50", "285"),
        ("D", "15:00", "286"),
    )  # fmt: skip
    lines = [f"{name},2000-01-02T{at},0,{ord(name)},{x}\n" for name, at, x in reports]
    (tmp_path / "metar.csv").write_text(HEADER + "".join(lines))
    tolerance = np.timedelta64(15, "m")
    found = scored(folder, "one.zarr", str(tmp_path / "metar.csv"), tolerance=tolerance)
    seen = found.observations
    counted = {
        (seen.names[station], str(time)[11:16]): value
        for station, time, value in zip(
            seen.station, seen.times, seen.values["2m_temperature"], strict=True
        )
        if np.isfinite(value)
    }
    assert counted == {("A", "12:00"): 281, ("B", "12:00"): 282, ("C", "18:00"): 285}
    assert found.coverage == "3 of 4 stations and 3 of 7 observations count"
    assert found.notes[:2] == [
        "1 of 4 stations left out: no observation at a date of the forecast",
        "4 of 7 observations left out: not at a date of the forecast, nor the nearest of a station "
        "within 15 minutes",
    ]
    # The scores are those of the reports at their dates.
    rows = [f"{a},2000-01-02T{b},0,{ord(a)},{x}\n" for (a, b), x in counted.items()]
    (tmp_path / "dated.csv").write_text(HEADER + "".join(rows))
    assert scored(folder, "one.zarr", str(tmp_path / "dated.csv")).to_csv() == found.to_csv()


NAMED = (
    "station,time,latitude,longitude,2m_temperature\nA,2000-01-02T12:00,1.5,2,280.5\n",
    "lon,lat,valid_time,id,t2m\n2,1.5,2000-01-02T12:00,A,280.5\n",
    "Station_ID,Date,LAT,Lon,2t [degC]\nA,2000-01-02 12:00,1.5,2,7.35\n",
    "STATION;TIME (UTC);LAT [deg];LON;t2m (degC)\nA;2000-01-02T12:00;1,5;2;7,35\n",
    "name\tstid\ttime\tlat\tlng\tVAR_2T\nNowhere\tA\t20000102T12\t1.5\t2\t280.5\n",
)


def test_columns_under_usual_names(folder: Path, tmp_path: Path) -> None:
    for text in NAMED:
        (tmp_path / "named.csv").write_text(text)
        seen = scored(folder, "one.zarr", str(tmp_path / "named.csv")).observations
        places = (seen.names, list(seen.latitude), list(seen.longitude))
        assert places == (["A"], [1.5], [2.0]), text
        assert seen.values["2m_temperature"] == pytest.approx([280.5], abs=1e-9), text


@pytest.mark.parametrize("form", ["csv", pytest.param("nc", marks=pytest.mark.slow)])
def test_memory_grows_with_the_reports(folder: Path, tmp_path: Path, form: str) -> None:
    """Of ships at times of their own, a table of times and stations would take 128 MB."""
    number = 4000
    random = np.random.default_rng(2)
    times = np.datetime64("2000-01-02T00:00", "s") + 30 * np.arange(number)
    places = np.round([random.uniform(-80, 80, number), random.uniform(-180, 180, number)], 3)
    values = np.round(random.uniform(270, 290, number), 2)
    names = [f"SHIP{i % 7}" for i in range(number)]
    path = tmp_path / f"ships.{form}"
    if form == "csv":
        rows = zip(names, times, *places, values, strict=True)
        path.write_text(HEADER + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    else:
        xr.Dataset(
            {"t2m": ("obs", values), "ship": ("obs", names, {"cf_role": "trajectory_id"})},
            {
                "time": ("obs", times.astype("M8[ns]")),
                "lat": ("obs", places[0], {"units": "degrees_north"}),
                "lon": ("obs", places[1], {"units": "degrees_east"}),
            },
        ).to_netcdf(path)
    tracemalloc.start()
    try:
        found = scored(folder, "one.zarr", str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1500 * number
    # At 0, 6, 12, 18 and 24 hours of the second day.
    assert found.coverage == "5 of 4,000 stations and 5 of 4,000 observations count"
    assert found.notes[1].startswith("7 names of stations at several places")
    assert sorted({*found.observations.names}) == sorted({*names})


def on_projection(folder: Path, wind: bool = False) -> np.ndarray:
    """Write forecasts on a Lambert grid, from the south, and return the fields `(L, H, W)`."""
    y, x = 1.2e5 * (np.arange(13) - 6), 1.2e5 * (np.arange(16) - 8)
    latitude, longitude = region_grids.Lambert().coordinates(y, x)
    fields = np.random.default_rng(4).normal(280, 3, (1, 2, 13, 16)).astype("f4")
    dims = ("time", "prediction_timedelta", "y", "x")
    name = "10m_u_component_of_wind" if wind else "2m_temperature"
    xr.Dataset(
        {name: (dims, fields, {"units": "m s-1" if wind else "K"})},
        {
            "time": [np.datetime64("2000-01-02", "ns")],
            "prediction_timedelta": np.array([6, 12]) * np.timedelta64(3600 * 10**9, "ns"),
            "latitude": (("y", "x"), latitude, {"units": "degrees_north"}),
            "longitude": (("y", "x"), longitude, {"units": "degrees_east"}),
        },
    ).to_netcdf(folder / "lambert.nc")
    return fields[0]


def test_stations_on_a_projection(tmp_path: Path) -> None:
    fields = on_projection(tmp_path)
    # In rows and columns of the grid; the last two are outside.
    rows, columns = np.array([[0, 3.25, 11.5, 6, 13, -2], [0, 7.5, 14.75, 15, 5, 3]])
    crs = "+proj=lcc +lat_1=38.5 +lat_2=38.5 +lat_0=38.5 +lon_0=-97.5 +R=6371229"
    longitude, latitude = project(crs, 1.2e5 * (columns - 8), 1.2e5 * (rows - 6), "inverse")
    lines = [f"S{i},{NOON},{latitude[i]},{longitude[i]},280\n" for i in range(6)]
    (tmp_path / "there.csv").write_text(HEADER + "".join(lines))
    found = scored(tmp_path, "lambert.nc", "there.csv")
    assert found.notes[0] == "2 of 6 stations left out: outside of the forecast's region"
    biases = found.sums["2m_temperature"].of_stations()["bias"][0]
    assert np.isnan(biases[0]).all()
    i, j = np.minimum(rows[:4].astype(int), 11), np.minimum(columns[:4].astype(int), 14)
    down, right = rows[:4] - i, columns[:4] - j
    last = fields[1].astype("f8")
    south = last[i, j] * (1 - right) + last[i, j + 1] * right
    north = last[i + 1, j] * (1 - right) + last[i + 1, j + 1] * right
    # Cells of 120 km on the sphere differ by less than a thousandth from those on the map.
    assert biases[1] == pytest.approx(south * (1 - down) + north * down - 280, abs=0.02)


def test_winds_that_may_lie_along_a_projection_are_refused(tmp_path: Path) -> None:
    on_projection(tmp_path, wind=True)
    where = csv_of(tmp_path / "wind.csv", ["3"], HEADER.replace("2m_temperature", "u10"))
    with pytest.raises(UserError, match="10m_u_component_of_wind is on a projection, and nothing"):
        scored(tmp_path, "lambert.nc", where)


def test_winds_along_a_projection_are_turned(tmp_path: Path) -> None:
    valid = xr.DataArray(np.array([[NOON]], "M8[ns]"), dims=("time", "prediction_timedelta"))
    lead = np.array([12], "m8[h]").astype("m8[ns]")
    made = wind_stores.lambert(along=True).sel(time=valid).drop_vars("time")
    made = made.assign_coords(time=valid.values[0] - lead, prediction_timedelta=lead)
    made.to_netcdf(tmp_path / "winds.nc")
    latitude, longitude = np.arange(38.0, 41), np.arange(-100.0, -92, 3)
    observed = [each[6, 0] for each in wind_stores.eastward(latitude, longitude)]
    rows = zip(latitude, longitude, *observed, strict=True)
    lines = [f"S{i},{NOON},{','.join(map(str, row))}\n" for i, row in enumerate(rows)]
    header = HEADER.replace("2m_temperature", "u10,v10")
    (tmp_path / "wind.csv").write_text(header + "".join(lines))
    found = scored(tmp_path, "winds.nc", "wind.csv")
    for name in wind_stores.NAMES:
        # Rows and columns of the map are no straight lines in degrees.
        errors = found.sums[name].of_stations()["bias"][0, 0]
        assert errors == pytest.approx(np.zeros(3), abs=0.01)


HOURS = np.timedelta64(1, "h")


def cases(folder: Path, name: str) -> list[tuple[int, int, int, np.ndarray, float]]:
    """Lead and valid hour, station, members and observation of each comparison."""
    seen = observations(forecasts.truth())
    made = xr.open_zarr(folder / name, decode_timedelta=True, consolidated=False)["2m_temperature"]
    found = []
    for init in made["time"].values:
        for lead in made["prediction_timedelta"].values:
            field = made.sel(time=init, prediction_timedelta=lead)
            hour = int((init + lead - (init + lead).astype("M8[D]")) / HOURS)
            for i in range(STATIONS):
                value = float(seen["t2m"].isel(station=i).sel(time=init + lead)) + 273.15
                if not np.isnan(value):
                    place = map(float, (seen["lat"][i], seen["lon"][i]))
                    found.append((int(lead / HOURS), hour, i, bilinear(field, *place), value))
    return found


def test_scores_by_hour_of_the_day(folder: Path) -> None:
    rows = table(scored(folder, "three.zarr", regions=("northern-hemisphere",)).hours_csv())
    latitude = observations(forecasts.truth())["lat"].values
    expected = defaultdict(list)
    for lead, hour, i, members, value in cases(folder, "three.zarr"):
        for region in ("global", *(["northern-hemisphere"] if latitude[i] >= 20 else [])):
            expected[lead, hour, region].append(members.mean() - value)
    found = {
        (int(row["lead_hours"]), int(row["hour"]), row["region"]): row
        for row in rows
        if row["of"] == "forecast"
    }
    assert {*found} == {*expected}
    assert {hour for _, hour, _ in found} == {0, 6, 12, 18}
    for key, errors in expected.items():
        assert int(found[key]["observations"]) == len(errors)
        rmse = np.sqrt(np.mean(np.square(errors)))
        assert float(found[key]["rmse"]) == pytest.approx(rmse, rel=1e-9)
        assert float(found[key]["bias"]) == pytest.approx(np.mean(errors), rel=1e-9, abs=1e-9)


def test_rank_histograms(folder: Path) -> None:
    rows = table(scored(folder, "three.zarr").ranks_csv())
    counts = np.zeros((3, 4))
    for lead, _, _, members, value in cases(folder, "three.zarr"):
        if lead:  # at 0 hours all members are equal
            counts[[0, 6, 24].index(lead), int((members < value).sum())] += 1
    found = np.array([float(row["frequency"]) for row in rows]).reshape(3, 4)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(found[1:], counts[1:] / counts[1:].sum(axis=1, keepdims=True))
    assert [(row["lead_hours"], row["rank"]) for row in rows[:5]] == [
        *(("0", str(rank)) for rank in range(4)),
        ("6", "0"),
    ]


def test_observations_that_equal_members_share_ranks() -> None:
    sums = StationSums(1, 3, np.ones((1, 3), bool), np.array([1.0, 1.0, 2.0]))
    members = np.array([[1.0, 2, 3], [1, 2, 5], [4, 2, 6]])
    sums.add(0, 0, 12, np.arange(3), members, np.array([1.0, 2, 4]))
    # Equal to two of three members, to all of them, and above one with twice the weight.
    expected = [1 / 3 + 1 / 4, 1 / 3 + 1 / 4 + 2, 1 / 3 + 1 / 4, 1 / 4]
    np.testing.assert_allclose(sums.ranks, [expected], rtol=1e-14)


def uniform_forecast(path: Path, field: np.ndarray) -> None:
    """Write a forecast of 2 m temperature for noon on a grid of 30 degrees."""
    lead = np.array([12], "m8[h]").astype("m8[ns]")
    dims = ("time", "prediction_timedelta", "latitude", "longitude")
    xr.Dataset(
        {"2m_temperature": (dims, field.astype("f4")[None, None], {"units": "K"})},
        {
            "time": [np.datetime64("2000-01-02", "ns")],
            "prediction_timedelta": lead,
            "latitude": np.arange(75.0, -90, -30),
            "longitude": np.arange(0.0, 360, 30),
        },
    ).to_netcdf(path)


def test_the_nearest_row_and_column(tmp_path: Path) -> None:
    field = 270.0 + np.arange(72).reshape(6, 12) / 8
    uniform_forecast(tmp_path / "made.nc", field)
    # Latitude and longitude, and the row and column there.
    places = [(50, 14, 1, 0), (-30.5, 346, 4, 0), (89, 200, 0, 7), (31, 44, 1, 1)]
    lines = [f"S{i},{NOON},{at[0]},{at[1]},280\n" for i, at in enumerate(places)]
    (tmp_path / "there.csv").write_text(HEADER + "".join(lines))
    found = scored(tmp_path, "made.nc", "there.csv", nearest=True).sums["2m_temperature"]
    expected = [field[row, column] - 280 for *_, row, column in places]
    np.testing.assert_allclose(found.of_stations()["bias"][0, 0], expected, atol=1e-9)
    # Without a value there, no neighbour takes its place.
    field[1, 1] = np.nan
    uniform_forecast(tmp_path / "gaps.nc", field)
    keys = {"nearest": True, "masked": ("2m_temperature",)}
    gaps = scored(tmp_path, "gaps.nc", "there.csv", **keys).sums["2m_temperature"].of_stations()
    assert gaps["observations"][0, 0].tolist() == [1, 1, 1, 0]


def test_the_nearest_point_of_a_projection(tmp_path: Path) -> None:
    fields = on_projection(tmp_path)
    rows, columns = np.array([[0, 3.4, 11.6], [0, 7.6, 14.3]])
    crs = "+proj=lcc +lat_1=38.5 +lat_2=38.5 +lat_0=38.5 +lon_0=-97.5 +R=6371229"
    longitude, latitude = project(crs, 1.2e5 * (columns - 8), 1.2e5 * (rows - 6), "inverse")
    lines = [f"S{i},{NOON},{latitude[i]},{longitude[i]},280\n" for i in range(3)]
    (tmp_path / "there.csv").write_text(HEADER + "".join(lines))
    found = scored(tmp_path, "lambert.nc", "there.csv", nearest=True)
    biases = found.sums["2m_temperature"].of_stations()["bias"][0, 1]
    expected = fields[1][[0, 3, 12], [0, 8, 14]].astype("f8") - 280
    np.testing.assert_allclose(biases, expected, atol=1e-9)


def orography(path: Path, metres: np.ndarray, **attributes: str) -> None:
    units = {"units": "m2 s-2"} | attributes
    values = 9.80665 * metres if units["units"] == "m2 s-2" else metres
    xr.Dataset(
        {"geopotential_at_surface": (("latitude", "longitude"), values, units)},
        {"latitude": np.arange(75.0, -90, -30), "longitude": np.arange(0.0, 360, 30)},
    ).to_netcdf(path)


ELEVATED = "station,time,latitude,longitude,elevation,2m_temperature\n"


def test_temperature_is_corrected_for_height(tmp_path: Path) -> None:
    uniform_forecast(tmp_path / "made.nc", np.full((6, 12), 280.0))
    metres = np.zeros((6, 12))
    metres[2:4, 1:3] = [[400, 800], [400, 800]]
    lines = [
        f"high,{NOON},0,45,1600,280\n",  # 1000 m above the model's ground
        f"low,{NOON},0,30,100,280\n",  # 300 m below it
        f"unknown,{NOON},0,40,,280\n",
        f"filled,{NOON},0,50,-9999,280\n",
    ]
    (tmp_path / "there.csv").write_text(ELEVATED + "".join(lines))
    for unit in ("m2 s-2", "m"):
        orography(tmp_path / f"{unit}.nc", metres, units=unit)
        keys = {"orography": str(tmp_path / f"{unit}.nc")}
        for rate, options in ((6.5, {}), (9.8, {"lapse_rate": 9.8})):
            found = scored(tmp_path, "made.nc", "there.csv", **keys, **options)
            bias = dict(
                zip(
                    found.observations.names,
                    found.sums["2m_temperature"].of_stations()["bias"][0, 0],
                    strict=True,
                )
            )
            expected = {"high": -rate, "low": 0.3 * rate, "unknown": 0, "filled": 0}
            assert bias == pytest.approx(expected, abs=1e-6)  # fields are read in float32
            assert found.notes[-1] == (
                f"2m_temperature is corrected for height by {rate:g} K/km at 2 of 4 stations"
            )
    # In the forecast's unit, of which a kelvin has 1.8.
    made = xr.load_dataset(tmp_path / "made.nc", decode_timedelta=True)
    made["2m_temperature"][:] = 44.33  # 280 K
    made["2m_temperature"].attrs["units"] = "degF"
    made.to_netcdf(tmp_path / "fahrenheit.nc")
    (tmp_path / "there.csv").write_text(ELEVATED.replace("re\n", "re [K]\n") + "".join(lines))
    found = scored(tmp_path, "fahrenheit.nc", "there.csv", **keys)
    biases = found.sums["2m_temperature"].of_stations()["bias"][0, 0]
    assert sorted(biases) == pytest.approx([-6.5 * 1.8, 0, 0, 1.95 * 1.8], abs=1e-5)


def test_heights_that_are_not_corrected(tmp_path: Path) -> None:
    uniform_forecast(tmp_path / "made.nc", np.full((6, 12), 280.0))
    where = csv_of(tmp_path / "flat.csv", ["280", "281"])
    orography(tmp_path / "ground.nc", np.full((6, 12), 1000.0))
    ground = str(tmp_path / "ground.nc")
    for keys, reason in (
        ({"orography": ground}, "no station has an elevation"),
        ({}, "orography= is not given"),
    ):
        found = scored(tmp_path, "made.nc", where, **keys)
        assert found.notes[-1] == f"2m_temperature is not corrected for height, as {reason}"
        assert found.of_region("2m_temperature", "global")["bias"][0, 0] == pytest.approx(-0.5)
    (tmp_path / "flat.csv").write_text(f"{ELEVATED}A,{NOON},0,0,10,280\n")
    for number, unit in enumerate(("feet", "")):
        orography(tmp_path / f"{number}.nc", np.zeros((6, 12)), units=unit)
        with pytest.raises(UserError, match=f"needs units of m2 s-2 or m, got '{unit}'"):
            scored(tmp_path, "made.nc", where, orography=str(tmp_path / f"{number}.nc"))
    orography(tmp_path / "factor.nc", np.full((6, 12), 20000.0), units="m")
    coarse = xr.load_dataset(ground)
    coarse.isel(longitude=slice(0, 12, 2)).to_netcdf(tmp_path / "coarse.nc")
    coarse.rename(geopotential_at_surface="lsm").to_netcdf(tmp_path / "land.nc")
    for name, said in (
        (
            "coarse.nc",
            "needs the forecast's grid, but has a grid of 6x6, where the forecast has",
        ),
        ("land.nc", "no geopotential_at_surface"),
        ("factor.nc", "geopotential_at_surface is 20000 to 20000 m, but its limits are -1019"),
        ("none.nc", "Set orography to one that exists"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            scored(tmp_path, "made.nc", where, orography=str(tmp_path / name))
        assert "\n" not in str(caught.value), name
        assert "data.store" not in str(caught.value), name
    (tmp_path / "wind.csv").write_text(f"station,time,lat,lon,msl\nA,{NOON},0,0,1e5\n")
    made = xr.load_dataset(tmp_path / "made.nc", decode_timedelta=True) * 0 + 1e5
    made.rename({"2m_temperature": "mean_sea_level_pressure"}).to_netcdf(tmp_path / "msl.nc")
    with pytest.raises(UserError, match="orography: has an effect on 2m_temperature only, which"):
        scored(tmp_path, "msl.nc", "wind.csv", orography=ground)


def test_a_folder_of_isd_lite_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniform_forecast(tmp_path / "made.nc", np.full((6, 12), 280.0))
    made = xr.load_dataset(tmp_path / "made.nc", decode_timedelta=True)
    for name, value in (("u", 3.0), ("v", -2.0)):
        made[f"10m_{name}_component_of_wind"] = made["2m_temperature"] * 0 + value
        made[f"10m_{name}_component_of_wind"].attrs["units"] = "m s-1"
    made["mean_sea_level_pressure"] = made["2m_temperature"] * 0 + 101000
    made["mean_sea_level_pressure"].attrs["units"] = "Pa"
    made.to_netcdf(tmp_path / "all.nc")
    folder = tmp_path / "isd"
    folder.mkdir()
    (folder / "isd-history.csv").write_text(
        "USAF,WBAN,STATION NAME,LAT,LON,ELEV(M)\n010010,99999,JAN MAYEN,70.9,-8.7,100\n"
    )
    # 5.8 degrees, 1012.5 hPa and 4 m/s from the west at noon; an impossible temperature later.
    (folder / "010010-99999-2000").write_text(
        "2000 01 02 12    58 -9999 10125   270    40 -9999 -9999 -9999\n"
        "2000 01 02 18  9990 -9999 -9999 -9999 -9999 -9999 -9999 -9999\n"
    )
    orography(tmp_path / "ground.nc", np.zeros((6, 12)))
    code, said, complaints = ask(
        monkeypatch, tmp_path, "forecast=all.nc", "stations=isd", "orography=ground.nc", "out=out"
    )
    assert (code, complaints) == (0, "")
    assert "note: 1 of 2 observations of 2m_temperature are outside the limits" in said
    assert "note: 2m_temperature is corrected for height by 6.5 K/km at 1 of 1 station" in said
    bias = {
        row["variable"]: float(row["bias"])
        for row in table((tmp_path / "out" / "stations.csv").read_text())
    }
    assert bias == pytest.approx(
        {
            "2m_temperature": 280 - 0.65 - 278.95,
            "10m_u_component_of_wind": 3 - 4,
            "10m_v_component_of_wind": -2,
            "mean_sea_level_pressure": -250,
        },
        abs=1e-6,
    )


def forecast_on_levels(path: Path) -> None:
    """Write one for noon that is the same everywhere, on 500 and 850 hPa and at the surface."""
    uniform_forecast(path, np.full((6, 12), 280.0))
    made = xr.load_dataset(path, decode_timedelta=True)
    level = xr.DataArray([500, 850], dims="level", coords={"level": [500, 850]})
    for name, unit, values in (
        ("geopotential", "m2 s-2", [54000, 14000]),
        ("temperature", "K", [250, 280]),
        ("u_component_of_wind", "m s-1", [20, 8]),
        ("v_component_of_wind", "m s-1", [-3, 2]),
    ):
        field = made["2m_temperature"] * 0 + xr.DataArray(values, dims="level")
        made[name] = field.assign_coords(level=level).transpose(..., "latitude", "longitude")
        made[name].attrs["units"] = unit
    made.to_netcdf(path.with_suffix(".levels.nc"))


SOUNDING = """\
#USM00072520 2000 01 02 12 1105    4 ncdc-nws ncdc-gts  405317  -802172
10  1820  50000B 5520B -233B-9999   150   270   205
10  0612  85000  1480B   12B  650    55   180    40
10  0612  70000  3000B  -50B  650    55   180    40
"""


def test_soundings_against_forecasts_on_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast_on_levels(tmp_path / "made.nc")
    (tmp_path / "igra").mkdir()
    (tmp_path / "igra" / "USM00072520-data.txt").write_text(SOUNDING)
    given = "forecast=made.levels.nc", "stations=igra"
    code, _, complaints = ask(monkeypatch, tmp_path, *given, "out=out")
    assert (code, complaints) == (0, "")
    # Heights of 5520 m and 1480 m, -23.3 and 1.2 degrees, and winds from the west and the south.
    expected = {
        ("geopotential", "500"): 54000 - 5520 * 9.80665,
        ("geopotential", "850"): 14000 - 1480 * 9.80665,
        ("temperature", "500"): 250 - 249.85,
        ("temperature", "850"): 280 - 274.35,
        ("u_component_of_wind", "500"): 20 - 20.5,
        ("u_component_of_wind", "850"): 8,
        ("v_component_of_wind", "500"): -3,
        ("v_component_of_wind", "850"): 2 - 4,
    }
    rows = table((tmp_path / "out" / "stations.csv").read_text())
    bias = {(row["variable"], row["level"]): float(row["bias"]) for row in rows}
    assert bias == pytest.approx(expected, abs=1e-4)  # fields are read in float32
    for name in ("scores.csv", "hours.csv"):
        rows = table((tmp_path / "out" / name).read_text())
        assert {(row["variable"], row["level"]) for row in rows} == {*expected}
    keys = "levels=[850]", "variables=[temperature]", "limits={temperature:[200,300]}"
    code, _, complaints = ask(monkeypatch, tmp_path, *given, *keys, "out=one")
    assert (code, complaints) == (0, "")
    (row,) = table((tmp_path / "one" / "stations.csv").read_text())
    assert (row["variable"], row["level"], row["unit"]) == ("temperature", "850", "K")


def test_levels_that_are_refused(tmp_path: Path) -> None:
    forecast_on_levels(tmp_path / "made.nc")
    made = xr.load_dataset(tmp_path / "made.levels.nc", decode_timedelta=True)
    made.assign_coords(level=[600, 900]).to_netcdf(tmp_path / "others.nc")
    made["level"].attrs["standard_name"] = "atmosphere_hybrid_sigma_pressure_coordinate"
    made.to_netcdf(tmp_path / "model-levels.nc")
    sounding = tmp_path / "USM00072520-data.txt"
    for name, text, keys, said in (
        ("others", SOUNDING, {}, "none of its variables geopotential_500, geopotential_700, "),
        ("others", SOUNDING, {}, ", ... is among the forecast's at the surface or on pressure "),
        ("others", SOUNDING, {}, "levels: 2m_temperature, geopotential_600, geopotential_900, "),
        ("model-levels", SOUNDING, {}, "on pressure levels: 2m_temperature. Rename the variables"),
        ("made.levels", SOUNDING, {"levels": (700,)}, "made.levels.nc: no scored variable on lev"),
        ("made.levels", SOUNDING.replace("850", "925"), {"levels": (850,)}, "data.txt: no scored"),
        ("made.levels", SOUNDING.replace(" 12 11", " 13 11"), {}, "has no observation of "),
        ("made.levels", SOUNDING.replace("5520B", "552 B"), {}, "geopotential_500 are outside the"),
    ):
        sounding.write_text(text)
        with pytest.raises(UserError) as caught:
            scored(tmp_path, f"{name}.nc", sounding.name, **keys)
        assert said in str(caught.value), name
        assert "\n" not in str(caught.value), name


def test_columns_of_levels(tmp_path: Path) -> None:
    forecast_on_levels(tmp_path / "made.nc")
    made = xr.load_dataset(tmp_path / "made.levels.nc", decode_timedelta=True)
    header = "station,time,latitude,longitude,elevation,t2m,t_500 [degC],temperature_850,z850 [m]\n"
    (tmp_path / "there.csv").write_text(
        f"{header}A,{NOON},0,45,1000,281,-20,NA,1500\nB,{NOON},0,45.5,NA,281,-10,NA,1400\n"
    )
    orography(tmp_path / "ground.nc", np.zeros((6, 12)))
    found = scored(tmp_path, "made.levels.nc", "there.csv", orography=str(tmp_path / "ground.nc"))
    # Of 1000 m, from which only the temperature at 2 m is corrected; nothing is observed on 850 hPa
    # but the height.
    expected = {
        "2m_temperature": [280 - 6.5 - 281, 280 - 281],
        "geopotential_850": [14000 - 9.80665 * 1500, 14000 - 9.80665 * 1400],
        "temperature_500": [250 - 253.15, 250 - 263.15],
        "temperature_850": [np.nan, np.nan],
    }
    assert {*found.sums} == {*expected}
    for name, bias in expected.items():
        np.testing.assert_allclose(
            found.sums[name].of_stations()["bias"][0, 0], bias, atol=1e-4, err_msg=name
        )
    for column in ("geopotential_height_500", "zg500"):
        text = f"station,time,latitude,longitude,{column} [m]\nA,{NOON},0,45,5500\n"
        (tmp_path / "height.csv").write_text(text)
        assert {*scored(tmp_path, "made.levels.nc", "height.csv").sums} == {"geopotential_500"}
    # One field twice.
    both = made.assign(temperature_500=made["temperature"].sel(level=500, drop=True))
    both.to_netcdf(tmp_path / "both.nc")
    with pytest.raises(UserError, match="has two fields called temperature_500"):
        scored(tmp_path, "both.nc", "there.csv")
    # Heights of a forecast without a dim of levels, or in geopotential metres.
    flat = xr.Dataset(
        {
            "temperature_850": made["temperature"].sel(level=850, drop=True),
            "temperature_500": made["temperature"].sel(level=500, drop=True),
            "gh": (made["geopotential"] / 9.80665).assign_attrs(
                units="gpm", standard_name="geopotential_height"
            ),
        }
    )
    flat.to_netcdf(tmp_path / "flat.nc")
    found = scored(tmp_path, "flat.nc", "there.csv")
    expected["gh_850"] = [14000 / 9.80665 - 1500, 14000 / 9.80665 - 1400]
    assert {*found.sums} == {"gh_850", "temperature_500", "temperature_850"}
    for name, sums in found.sums.items():
        np.testing.assert_allclose(
            sums.of_stations()["bias"][0, 0], expected[name], atol=1e-4, err_msg=name
        )


def test_persistence_on_levels(tmp_path: Path) -> None:
    forecast_on_levels(tmp_path / "made.nc")
    (tmp_path / "there.csv").write_text(
        "station,time,latitude,longitude,temperature_500,temperature_850\n"
        f"A,2000-01-02,0,45,250,270\nA,{NOON},0,45,254,271\n"
    )
    found = scored(tmp_path, "made.levels.nc", "there.csv")
    for name, errors in {"temperature_500": [-4, -4], "temperature_850": [9, -1]}.items():
        bias = found.of_region(name, "global")["bias"][:, 0]
        assert bias.tolist() == pytest.approx(errors, abs=1e-4), name


def test_weights_by_density(tmp_path: Path) -> None:
    # 0.5 degrees are 56 km, 1 degree 111 km: A has the neighbour B, and B also C; D has none.
    uniform_forecast(tmp_path / "made.nc", np.full((6, 12), 280.0))
    places = {"A": 0.0, "B": 0.5, "C": 1.0, "D": 10.0, "E": 0.1}
    values = {"A": 281, "B": 282, "C": 283, "D": 290, "E": "NA"}  # E has no observation
    lines = [f"{name},{NOON},0,{at},{values[name]}\n" for name, at in places.items()]
    (tmp_path / "dense.csv").write_text(HEADER + "".join(lines))
    found = scored(tmp_path, "made.nc", "dense.csv", by_density=True, regions=("tropics",))
    weights = np.array([1 / 2, 1 / 3, 1 / 2, 1])
    errors = -np.array([1.0, 2, 3, 10])
    for region in ("global", "tropics"):
        scores = {k: x[0, 0] for k, x in found.of_region("2m_temperature", region).items()}
        assert scores["observations"] == 4
        assert scores["bias"] == pytest.approx((weights * errors).sum() / weights.sum(), rel=1e-12)
        rmse = np.sqrt((weights * errors**2).sum() / weights.sum())
        assert scores["rmse"] == pytest.approx(rmse, rel=1e-12)
    at_stations = found.sums["2m_temperature"].of_stations()["bias"][0, 0]
    assert at_stations[:4] == pytest.approx(errors, rel=1e-12)


def test_density_of_many_stations(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    latitude = np.degrees(np.arcsin(random.uniform(0.95, 1, 300)))  # around the pole
    longitude = random.uniform(-180, 180, 300)
    phi, lam = np.deg2rad(latitude), np.deg2rad(longitude)
    half = np.sin((phi[:, None] - phi) / 2) ** 2
    half = half + np.cos(phi)[:, None] * np.cos(phi) * np.sin((lam[:, None] - lam) / 2) ** 2
    near = 2 * 6367.5 * np.arcsin(np.sqrt(half)) <= 75  # haversine formula
    assert near.sum(axis=1).max() > 1
    monkeypatch.setattr("credit_dp.evaluation.stations.STATIONS_AT_ONCE", 7)
    np.testing.assert_allclose(density_weights(latitude, longitude), 1 / near.sum(axis=1))
