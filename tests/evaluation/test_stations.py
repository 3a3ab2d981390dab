"""Scores at stations, computed again one observation at a time."""

import csv
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import ScoreRequest
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.stations import Observations, StationScores, score_stations
from tests.cli.invocation import answer
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


def scored(folder: Path, name: str, where: str = "stations.nc", **options: object) -> StationScores:
    request = ScoreRequest(forecast=name, truth=(), cache="", **options)  # type: ignore[arg-type]
    forecast = ForecastStore.open(str(folder / name))
    return score_stations(request, forecast, str(folder / where), lambda title, done: None)


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


@pytest.mark.parametrize("name", ["one.zarr", "three.zarr"])
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
    assert found.notes == [f"{left_out} stations outside of the forecast's region not scored"]
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
    assert f"stations.nc: {STATIONS} stations" in said
    assert "24 h, tropics" in said
    assert said.endswith("scores/scores.csv\n")
    assert sorted(path.name for path in (folder / "scores").iterdir()) == [
        "scores.csv",
        "stations.csv",
    ]
    expected = scored(folder, "three.zarr", regions=("tropics",))
    assert (folder / "scores" / "scores.csv").read_text() == expected.to_csv()
    assert (folder / "scores" / "stations.csv").read_text() == expected.stations_csv()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["truth=truth.zarr"], "truth: has no effect together with stations="),
        (["boundary=0"], "boundary: has no effect together with stations="),
        (["stations=none.csv"], "none.csv: no such file. Change stations."),
        (["stations=none.nc"], "none.nc: no such file."),
        (["variables=[temperature]"], "no temperature without levels"),
        (["variables=[2m_temperatur]"], "2m_temperature"),
        (["regions=[nowhere]"], "regions: "),
        (["hours=[5]"], "Change hours."),
    ],
)
def test_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], said: str) -> None:
    given = {"forecast": "one.zarr", "stations": "stations.nc", "out": "refused"}
    given |= dict(key.split("=", 1) for key in keys)
    texts = [f"{key}={value}" for key, value in given.items()]
    code, out, complaints = ask(monkeypatch, folder, *texts)
    assert (code, out) == (2, "")
    assert said in complaints
    assert complaints.count("\n") == 1
    assert not (folder / "refused").exists()


def wrong_unit(data: xr.Dataset) -> xr.Dataset:
    data["t2m"].attrs["units"] = "Pa"
    return data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_unit, "t2m is in Pa, which can't be converted to the forecast's K"),
        (lambda x: x.drop_vars("lat"), "latitude is missing"),
        (lambda x: x.rename(t2m="gust"), "none of its variables gust is among the forecast's"),
        (lambda x: x.assign_coords(time=x["time"] + np.timedelta64(1, "m")), "no observation of"),
        (lambda x: x.isel(time=[0, 1, 1]), "has 2000-01-01T06:00 twice"),
        (
            lambda x: x.assign_coords(time=x["time"].where(x["time"] > x["time"][0])),
            "missing dates",
        ),
        (lambda x: x.assign(t2m=x["t2m"].where(x["t2m"] > 280, np.inf)), "t2m has infinite values"),
        (lambda x: x.assign_coords(lat=x["lat"] + 100), "station WMO0 has no place on the globe"),
        (lambda x: x.isel(station=0), "latitude"),
        (lambda x: x.convert_calendar("noleap"), "noleap calendar"),
        (lambda x: x.assign({"2m_temperature": x["t2m"]}), "t2m and 2m_temperature are two names"),
    ],
)
def test_observations_that_do_not_fit(folder: Path, tmp_path: Path, change, said: str) -> None:
    change(xr.load_dataset(folder / "stations.nc")).to_netcdf(tmp_path / "changed.nc")
    with pytest.raises(UserError, match=said):
        scored(folder, "one.zarr", str(tmp_path / "changed.nc"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("station,time,latitude,t2m\nA,2000-01-01,1,2\n", "the column longitude is missing"),
        ("station,time,latitude,longitude,t2m\nA,2000-01-01,1,2,3,4\n", "can't be read as CSV"),
        ("station,time,latitude,longitude,t2m\nA,soon,1,2,3\n", "time has 'soon', no date"),
        ("station,time,latitude,longitude,t2m\nA,01/02/2000,1,2,3\n", "time has '01/02/2000'"),
        ("station,time,latitude,longitude,t2m\nA,,1,2,3\n", "time has '', no date"),
        ("station,time,latitude,longitude,t2m\nA,2300-01-01,1,2,3\n", "time has '2300-01-01', no"),
        ("station,time,latitude,longitude,t2m\nA,1500-01-01,1,2,3\n", "time has '1500-01-01', no"),
        ("station,time,latitude,longitude,t2m\n,2000-01-01,1,2,3\n", "a row has no station"),
        ("station,time,latitude,longitude,t2m\nA,2000-01-01,1N,2,3\n", "latitude has '1N', which"),
        ("station,time,latitude,longitude,t2m\nA,2000-01-01,,2,3\n", "A has no place on the globe"),
        (
            "station,time,latitude,longitude,t2m,msl\nA,2000-01-01,1,2,calm,4\n",
            "t2m has 'calm', which is no number",
        ),
        ("station,time,latitude,longitude,t2m\nA,2000-01-01,1,2,inf\n", "t2m has 'inf', which"),
        (
            "station,time,latitude,longitude,t2m,t2m\nA,2000-01-01,1,2,3,4\n",
            "the column t2m is there twice",
        ),
        ("station,time,latitude,longitude,t2m\n", "it has no rows"),
        (
            "station,time,latitude,longitude,t2m\nA,2000-01-01,1,2,3\nA,2000-01-02,1,3,3\n",
            "station A has several places",
        ),
        (
            "station,time,latitude,longitude,t2m\nA,2000-01-01,1,2,3\nA,2000-01-01,1,2,3\n",
            "station A has 2000-01-01T00:00:00 twice",
        ),
    ],
)
def test_csv_that_is_refused(folder: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        scored(folder, "one.zarr", str(tmp_path / "wrong.csv"))


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
    assert [str(time)[:13] for time in seen.times] == ["2000-01-01T12", "2000-01-02T00"]
    nan = np.nan
    np.testing.assert_array_equal(seen.values["t2m"], [[nan, 281, nan], [nan, nan, 280]])


@pytest.mark.parametrize("dims", [(), ("time",)])
def test_names_that_are_not_of_stations_are_not_used(folder: Path, tmp_path: Path, dims) -> None:
    data = xr.open_dataset(folder / "stations.nc").load().drop_vars("name")
    values = np.arange(data.sizes["time"]) if dims else 0
    data = data.assign_coords(profile=(dims, values, {"cf_role": "profile_id"}))
    data.to_netcdf(tmp_path / "profiles.nc")
    seen = Observations.open(str(tmp_path / "profiles.nc"))
    assert seen.names == list(map(str, range(STATIONS)))


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


def test_nan_in_a_forecast_is_refused_unless_it_is_masked(folder: Path, tmp_path: Path) -> None:
    made = xr.open_zarr(folder / "one.zarr", decode_timedelta=True, consolidated=False).load()
    made["2m_temperature"][:, 1] = np.nan
    made.to_netcdf(tmp_path / "gaps.nc")
    with pytest.raises(UserError, match="2m_temperature has NaN or infinite values near stations"):
        scored(tmp_path, "gaps.nc", str(folder / "stations.nc"))
    found = scored(tmp_path, "gaps.nc", str(folder / "stations.nc"), masked=("2m_temperature",))
    counts = found.of_region("2m_temperature", "global")["observations"][0]
    whole = scored(folder, "one.zarr").of_region("2m_temperature", "global")["observations"][0]
    np.testing.assert_array_equal(counts, whole * [1, 0, 1])
