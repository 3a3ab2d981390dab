"""Scores of stores against an implementation in xarray, whatever form the stores have."""

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid, unit_vectors
from credit_dp.evaluation import score as evaluation_score
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.metric_table import CRPS_SCALES, METRICS
from credit_dp.evaluation.metrics import ErrorMap
from credit_dp.evaluation.score_folder import (
    region_tables,
    score_image,
    score_table,
    scorecard_page,
)
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.sphere import EARTH_RADIUS
from tests.data import region_stores
from tests.evaluation import forecasts
from tests.evaluation.forecasts import refusal, scored, without_members
from tests.tier_cases import tiers

GRID = ["latitude", "longitude"]
OF_SOME = {"wind_vector_rmse", "seeps"}  # metrics of variables that these stores do not have
SHORT = {"geopotential": "z", "temperature": "t", "2m_temperature": "t2m"}


def globe(array: xr.DataArray) -> xr.DataArray:
    """The mean by area, from the edges of cells."""
    latitude = array["latitude"].values
    area = xr.DataArray(globe_area(latitude), dims="latitude", coords=[latitude])
    return array.weighted(area).mean(GRID)


def globe_area(latitude: np.ndarray) -> np.ndarray:
    """The areas of rows from pole to pole, from north to south."""
    edges = np.concatenate([[90.0], (latitude[1:] + latitude[:-1]) / 2, [-90.0]])
    return abs(np.diff(np.sin(np.deg2rad(edges))))


def area_mean(errors: xr.DataArray, km: float) -> xr.DataArray:
    """The means over all points with a value at most so many km away on the sphere."""
    latitude, longitude = np.meshgrid(*(errors[dim] for dim in GRID), indexing="ij")
    points = unit_vectors(latitude, longitude).reshape(3, -1)
    distance = np.arccos((points.T @ points).clip(-1, 1)) * EARTH_RADIUS / 1000
    area = globe_area(errors["latitude"].values)[:, None] + 0 * longitude
    weights = np.where(distance <= max(km, 1), area.flatten(), 0)
    values = errors.transpose(..., *GRID)
    flat = values.values.reshape(*values.shape[:-2], -1)
    valid = np.isfinite(flat)
    means = (np.where(valid, flat, 0) @ weights.T) / np.maximum(valid @ weights.T, 1e-12)
    return values.copy(data=np.where(valid, means, np.nan).reshape(values.shape))


def by_definition(
    made: xr.DataArray, observed: xr.DataArray, normals: xr.DataArray
) -> dict[str, dict[str, xr.DataArray]]:
    """All scores of one variable of a forecast with members, by lead time (and level)."""
    made, observed, normals = (x.astype("f8") for x in (made, observed, normals))
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed.sel(time=valid).assign_coords(time=made["time"])
    normal = normals.sel(hour=valid.dt.hour, dayofyear=valid.dt.dayofyear)
    mean = made.mean("number")
    start = xr.zeros_like(mean) + observed.sel(time=made["time"])
    fields = {"forecast": mean, "persistence": start, "climatology": normal, "truth": truth}
    count = made.sizes["number"]
    pairs = abs(made - made.rename(number="other")).sum(["number", "other"])
    found: dict[str, dict[str, xr.DataArray]] = {name: {} for name in METRICS}
    for of, field in fields.items():
        found["rmse"][of] = np.sqrt(globe((field - truth) ** 2).mean("time"))
        found["bias"][of] = globe(field - truth).mean("time")
        found["activity"][of] = np.sqrt(globe((field - normal) ** 2).mean("time"))
        found["crps"][of] = globe(abs(field - truth)).mean("time")
        if of != "climatology":
            one, two = field - normal, truth - normal
            products = np.sqrt(globe(one**2) * globe(two**2))
            found["acc"][of] = (globe(one * two) / products).mean("time")
    # A single member has no distance to others.
    fair = abs(made - truth).mean("number") - pairs / (2 * count * max(1, count - 1))
    found["crps"]["forecast"] = globe(fair).mean("time")
    for km in CRPS_SCALES:
        for of, field in fields.items():
            error = area_mean((made if of == "forecast" else field) - truth, km)
            score = abs(error)
            if of == "forecast":
                distances = abs(error - error.rename(number="other")).sum(["number", "other"])
                score = score.mean("number") - distances / (2 * count * max(1, count - 1))
            found[f"crps_{km}km"][of] = globe(score).mean("time")
    for of, field in fields.items():
        found["energy_score"][of] = np.sqrt(globe((field - truth) ** 2)).mean("time")
    skill = np.sqrt(globe((made - truth) ** 2)).mean("number")
    neighbours = np.sqrt(globe(made.diff("number") ** 2)).mean("number") if count > 1 else 0
    found["energy_score"]["forecast"] = (skill - neighbours / 2).mean("time")
    variance = made.var("number", ddof=min(1, count - 1), skipna=False)  # 0 for one member
    found["spread"]["forecast"] = np.sqrt(globe(variance).mean("time"))
    return found


def rounding(score: str) -> float:
    """Return the error allowed beside a relative one: a bias is a small difference of fields."""
    return 1e-9 if score == "bias" else 1e-14


def check(card: Scorecard, made: xr.Dataset) -> None:
    """Every number of a scorecard against its definition."""
    observed = forecasts.truth()
    normals = forecasts.climatology(observed)
    seen = 0
    for name in forecasts.NAMES:
        wanted = by_definition(made[name], observed[name], normals[name])
        for c, channel in enumerate(card.channels):
            if channel.variable != name:
                continue
            for score_name, values in card.scores.items():
                for source, of in enumerate(METRICS[score_name].sources):
                    one = wanted[score_name][of]
                    if channel.level is not None:
                        one = one.sel(level=channel.level)
                    hours = np.array(card.hours) * np.timedelta64(1, "h").astype("m8[ns]")
                    one = one.sel(prediction_timedelta=hours).values
                    found, where = values[source, :, c], (channel, score_name, of)
                    assert found == pytest.approx(one, rel=1e-12, abs=rounding(score_name)), where
                    seen += 1
    assert seen == len(card.channels) * sum(len(METRICS[name].sources) for name in card.scores)


def test_an_ensemble_is_scored_by_the_definitions(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=3)
    card = scored(folder, forecasts.write(made, folder / "of_three.zarr"))
    assert set(card.scores) == set(METRICS) - OF_SOME
    assert card.members == 3
    assert card.hours == (0, 6, 24)
    check(card, made)


FORMS: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "netcdf": lambda made: made,
    "south first": lambda made: made.isel(latitude=slice(None, None, -1)),
    "longitudes from -180": lambda made: made.assign_coords(
        longitude=(made["longitude"] + 180) % 360 - 180
    ).sortby("longitude"),
    "time it is for": lambda made: made.assign_coords(
        valid_time=made["time"] + made["prediction_timedelta"]
    ),
    "a constant beside": lambda made: made.assign(
        land_sea_mask=(GRID, np.zeros((made.sizes["latitude"], made.sizes["longitude"])))
    ),
    "leads as hours": lambda made: made.assign_coords(
        prediction_timedelta=(
            "prediction_timedelta",
            (made["prediction_timedelta"].values / np.timedelta64(1, "h")).astype("i4"),
            {"units": "hours"},
        )
    ),
    "other order of dims": lambda made: made.transpose(
        "longitude", "latitude", "prediction_timedelta", "level", "time"
    ),
    "other names": lambda made: made.rename(
        time="init_time", prediction_timedelta="lead_time", latitude="lat", longitude="lon"
    ),
}


@pytest.mark.parametrize(
    "form", ["all", *(pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS)]
)
def test_whatever_form_it_has(folder: Path, form: str) -> None:
    made = forecasts.forecast(forecasts.truth(), members=1)
    changed = without_members(made)
    for change in FORMS.values() if form == "all" else [FORMS[form]]:
        changed = change(changed)
    ending = "nc" if form in ("all", "netcdf", "leads as hours") else "zarr"
    path = folder / f"{form.replace(' ', '_')}.{ending}"
    card = scored(folder, forecasts.write(changed, path))
    assert set(card.scores) == {"rmse", "acc", "bias", "activity", "crps"}
    check(card, made)


@pytest.mark.parametrize(
    "name", tiers(fast=[], slow=[("realization",)], exhaustive=[("ensemble",)])
)
def test_members_under_other_names_anywhere(folder: Path, name: str) -> None:
    made = forecasts.forecast(forecasts.truth(), members=2)
    other = made.rename(number=name).transpose(..., name)
    check(scored(folder, forecasts.write(other, folder / f"{name}.zarr")), made)


@pytest.mark.slow
def test_some_of_it(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=2)
    path = forecasts.write(made, folder / "some.zarr")
    card = scored(
        folder,
        path,
        variables=("temperature",),
        levels=(850,),
        hours=(24, 6),
        dates=("2000-01-02T12", "2000-01-03"),
    )
    assert [channel.name for channel in card.channels] == ["temperature_850"]
    assert card.hours == (6, 24)
    assert len(card.initial_times) == 1
    check(card, made.isel(time=slice(1, None)))


@pytest.mark.slow
def test_other_forms_of_truth_and_climatology(tmp_path: Path) -> None:
    observed = forecasts.truth()
    made = forecasts.forecast(observed, members=1)
    forecasts.write(without_members(made), tmp_path / "f.zarr")
    turned = observed.isel(latitude=slice(None, None, -1)).transpose("longitude", ...)
    forecasts.write(turned, tmp_path / "truth.zarr")
    normals = forecasts.climatology(observed).isel(latitude=slice(None, None, -1))
    normals = normals.rename({name: f"{name}_mean" for name in normals.data_vars})
    forecasts.write(normals.transpose(..., "hour"), tmp_path / "climatology.zarr")
    check(scored(tmp_path, tmp_path / "f.zarr"), made)


def test_points_without_values_are_left_out(tmp_path: Path) -> None:
    """All stores have the same mask; scores are of the other points."""
    observed = forecasts.truth()[["2m_temperature"]]
    made = forecasts.forecast(observed, members=1)
    inside = xr.DataArray(np.random.default_rng(3).random((9, 8)) > 0.3, dims=GRID)
    path = forecasts.write(without_members(made).where(inside), tmp_path / "f.zarr")
    forecasts.write(observed.where(inside), tmp_path / "truth.zarr")
    normals = forecasts.climatology(forecasts.truth())[["2m_temperature"]]
    forecasts.write(normals, tmp_path / "climatology.zarr")
    card = scored(tmp_path, path, masked=("2m_temperature",))
    wanted = by_definition(
        made["2m_temperature"].where(inside),
        observed["2m_temperature"].where(inside),
        normals["2m_temperature"],
    )
    for name in ("rmse", "acc", "bias", "activity"):
        for source, of in enumerate(METRICS[name].sources):
            one = wanted[name][of].values
            assert card.scores[name][source, :, 0] == pytest.approx(one, rel=1e-12, abs=1e-9)
    assert "masked=[2m_temperature]" in refusal(tmp_path, path)


def test_spectra_of_an_ensemble_are_those_of_its_mean_spread_and_error(tmp_path: Path) -> None:
    observed = forecasts.truth()
    made = forecasts.forecast(observed, members=3)
    for name, data in (("truth", observed), ("climatology", forecasts.climatology(observed))):
        forecasts.write(data, tmp_path / f"{name}.zarr")
    card = scored(tmp_path, forecasts.write(made, tmp_path / "f.zarr"))
    name, tropics = "2m_temperature", card.bands.index("20S to 20N")
    members = made[name].transpose("number", ...).values.astype("f8")[..., 4, :]  # the equator
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed[name].sel(time=valid).values.astype("f8")[..., 4, :]
    mean = members.mean(axis=0)
    parts = {
        "forecast": members,
        "truth": truth[None],
        "mean": mean[None],
        "spread": np.sqrt(3 / 2) * (members - mean),
        "error": (mean - truth)[None],
    }
    assert card.spectra_sources == tuple(parts)
    columns = np.arange(8)
    waves = np.exp(-2j * np.pi * columns[:5, None] * columns / 8) / 8
    length = 2 * np.pi * EARTH_RADIUS * np.array([1, 2, 2, 2, 2])
    c = [channel.name for channel in card.channels].index(name)
    for source, (of, fields) in enumerate(parts.items()):
        power = (abs(fields @ waves.T) ** 2).mean(axis=(0, 1)) * length
        close = pytest.approx(power, rel=1e-11, abs=1e-7)
        assert card.spectra[source, :, c, tropics] == close, of
    table = card.spectra_csv().splitlines()
    assert table[0].endswith(",wavenumber,forecast,truth,mean,spread,error")
    row = next(line for line in table if line.startswith(f"{name},,24,20S to 20N,2,"))
    found = [float(cell) for cell in row.split(",")[-5:]]
    assert found == card.spectra[:, -1, c, tropics, 2].tolist()
    page = scorecard_page(card)
    assert page.count('alt="spread over error by scale, ') == 3
    assert "This figure could not be drawn" not in page


def test_area_means_leave_out_points_without_values_and_know_their_regions(tmp_path: Path) -> None:
    """On rows 625 km apart, with neighbours beyond the edges of a region."""
    observed = forecasts.truth(rows=33, columns=16)
    normals = forecasts.climatology(observed)[["2m_temperature"]]
    observed = observed[["2m_temperature"]]
    made = forecasts.forecast(observed, members=3)
    inside = xr.DataArray(np.random.default_rng(3).random((33, 16)) > 0.3, dims=GRID)
    forecasts.write(normals, tmp_path / "climatology.zarr")
    for name, data in (("truth", observed), ("f", made)):
        forecasts.write(data.where(inside), tmp_path / f"{name}.zarr")
    regions, path = ("tropics", "europe"), tmp_path / "f.zarr"
    card = scored(tmp_path, path, masked=("2m_temperature",), regions=regions)
    observed, made, normals = (
        x["2m_temperature"].astype("f8").where(inside) for x in (observed, made, normals)
    )
    wanted = by_definition(made, observed, normals)
    valid = made["time"] + made["prediction_timedelta"]
    error = made - observed.sel(time=valid).assign_coords(time=made["time"])
    for km in CRPS_SCALES:
        name = f"crps_{km}km"
        for source, of in enumerate(METRICS[name].sources):
            found = card.scores[name][source, :, 0]
            assert found == pytest.approx(wanted[name][of].values, rel=1e-12), (km, of)
        mean = area_mean(error, km).sortby("latitude")
        pairs = abs(mean - mean.rename(number="other")).sum(["number", "other"], skipna=False)
        score = abs(mean).mean("number", skipna=False) - pairs / 12
        area = xr.DataArray(globe_area(observed["latitude"].values)[::-1], dims="latitude")
        area = area.assign_coords(latitude=score["latitude"]) * xr.ones_like(score["longitude"])
        for region in regions:
            one = boxes(region, score).weighted(boxes(region, area)).mean(GRID).mean("time").values
            assert card.regions[region][name][0, :, 0] == pytest.approx(one, rel=1e-12), region
    assert np.all(card.scores["crps_1000km"][0, 1:] < 0.7 * card.scores["crps"][0, 1:])
    assert any(",crps_500km,forecast," in line for line in card.to_csv().splitlines())
    assert '<table id="crps_1000km">' in scorecard_page(card)


def test_points_that_lack_one_scored_value_are_left_out(tmp_path: Path) -> None:
    """What dates lack that are not scored, such as the first, does not matter."""
    observed = forecasts.truth()[["2m_temperature"]]
    made = forecasts.forecast(observed, members=1)
    path = forecasts.write(without_members(made), tmp_path / "f.zarr")
    values = observed["2m_temperature"].values
    values[0, 1:3] = np.nan
    values[8, 5, 2] = np.nan  # 24 hours after the first initial time
    forecasts.write(observed, tmp_path / "truth.zarr")
    normals = forecasts.climatology(forecasts.truth())[["2m_temperature"]]
    forecasts.write(normals, tmp_path / "climatology.zarr")
    card = scored(tmp_path, path, masked=("2m_temperature",))
    inside = xr.DataArray(np.ones((9, 8), bool), dims=GRID)
    inside[5, 2] = False
    wanted = by_definition(
        made["2m_temperature"].where(inside),
        observed["2m_temperature"].where(inside),
        normals["2m_temperature"],
    )
    for source, of in enumerate(METRICS["rmse"].sources):
        one = wanted["rmse"][of].values
        assert card.scores["rmse"][source, :, 0] == pytest.approx(one, rel=1e-12, abs=1e-9)


@pytest.mark.slow
def test_a_truth_in_another_unit_is_converted(tmp_path: Path) -> None:
    """The data of climate models have the sea surface in degrees Celsius."""
    observed = forecasts.truth()
    names = ["2m_temperature"]
    made = forecasts.forecast(observed, members=1)[names]
    normals = forecasts.climatology(observed)[names]
    observed = observed[names]
    wanted = by_definition(*(x["2m_temperature"] for x in (made, observed, normals)))
    celsius = observed - 273.15
    for data, unit in ((made, "K"), (celsius, "degC"), (normals, "kelvin")):
        data["2m_temperature"].attrs["units"] = unit
    path = forecasts.write(without_members(made), tmp_path / "f.zarr")
    forecasts.write(celsius, tmp_path / "truth.zarr")
    forecasts.write(normals, tmp_path / "climatology.zarr")
    card = scored(tmp_path, path)
    for source, of in enumerate(METRICS["rmse"].sources):
        found = card.scores["rmse"][source, :, 0]
        assert found == pytest.approx(wanted["rmse"][of].values, abs=1e-4)


@pytest.mark.parametrize("step", [1, evaluation_score.STEP_BYTES])
def test_each_level_has_a_mask_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Also if levels are too large to be scored together."""
    monkeypatch.setattr(evaluation_score, "STEP_BYTES", step)
    whole = forecasts.truth()
    made = forecasts.forecast(whole, members=1)
    name = "temperature"
    shape = whole.sizes["level"], 9, 8
    inside = xr.DataArray(np.random.default_rng(4).random(shape) > 0.3, dims=["level", *GRID])
    path = forecasts.write(without_members(made), tmp_path / "f.zarr")
    forecasts.write(whole.assign({name: whole[name].where(inside)}), tmp_path / "truth.zarr")
    normals = forecasts.climatology(whole)
    forecasts.write(normals, tmp_path / "climatology.zarr")
    card = scored(tmp_path, path, masked=(name,))
    wanted = by_definition(made[name].where(inside), whole[name].where(inside), normals[name])
    for c, channel in enumerate(card.channels):
        if channel.variable == name:
            found = card.scores["rmse"][0, :, c]
            one = wanted["rmse"]["forecast"].sel(level=channel.level).values
            assert found == pytest.approx(one, rel=1e-12)


@pytest.mark.slow
def test_a_mask_of_what_is_not_scored_is_no_matter(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=1)
    path = forecasts.write(without_members(made), folder / "unmasked.zarr")
    card = scored(folder, path, variables=("2m_temperature",), masked=("temperature",), hours=(24,))
    check(card, made)


@pytest.mark.slow
def test_a_climatology_is_fitted_to_dates_of_the_truth(folder: Path) -> None:
    """With so few days the climatology is the mean of each hour."""
    observed = forecasts.truth()
    made = forecasts.forecast(observed, members=1)
    path = forecasts.write(without_members(made), folder / "fitted.zarr")
    dates = ("2000-01-01", "2000-01-03")
    card = scored(folder, path, climatology="", climatology_dates=dates)
    known = observed.sel(time=slice(*dates))["2m_temperature"]
    valid = made["time"] + made["prediction_timedelta"]
    normal = known.groupby("time.hour").mean().sel(hour=valid.dt.hour)
    truth = observed["2m_temperature"].sel(time=valid).assign_coords(time=made["time"])
    wanted = np.sqrt(globe((normal - truth) ** 2).mean("time")).values
    place = [channel.name for channel in card.channels].index("2m_temperature")
    assert card.scores["rmse"][2, :, place] == pytest.approx(wanted, rel=1e-5)
    assert "from 2000-01-01 to 2000-01-03, which includes dates of the forecasts" in (
        card.climatology
    )


def snowfall(data: xr.Dataset) -> xr.Dataset:
    """A temperature that is declared as a sum over time, of plausible size."""
    return data[["2m_temperature"]].rename({"2m_temperature": "snowfall"}) / 4096


def test_the_first_sums_of_the_truth_may_lack_hours(tmp_path: Path) -> None:
    """The climatology is fitted to complete sums."""
    observed = snowfall(forecasts.truth())
    made = without_members(snowfall(forecasts.forecast(forecasts.truth(), members=1)))
    path = forecasts.write(made.isel(prediction_timedelta=[2]), tmp_path / "f.zarr")
    forecasts.write(observed, tmp_path / "truth.zarr")
    card = scored(tmp_path, path, climatology="")
    assert card.climatology.startswith("fitted to the truth from 2000-01-01T12:00 to")


@pytest.mark.slow
def test_sums_are_over_the_same_span_whichever_leads_are_scored(tmp_path: Path) -> None:
    made = snowfall(forecasts.forecast(forecasts.truth(), members=1))
    forecasts.write(snowfall(forecasts.truth()), tmp_path / "truth.zarr")
    path = forecasts.write(without_members(made), tmp_path / "f.zarr")
    every = scored(tmp_path, path, climatology="", hours=(6, 24)).scores["rmse"]
    last = scored(tmp_path, path, climatology="", hours=(24,)).scores["rmse"]
    assert np.array_equal(every[:2, 1:], last[:2])  # of forecast and persistence


def test_maps_are_errors_of_each_point(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=2)
    card = scored(folder, forecasts.write(made, folder / "mapped.zarr"))
    found = next(one for one in card.maps if card.channels[one.channel].level is not None)
    channel = card.channels[found.channel]
    one = made[channel.variable].sel(level=channel.level).isel(prediction_timedelta=2)
    one = one.astype("f8").mean("number")
    truth = forecasts.truth()[channel.variable].sel(level=channel.level)
    error = one.values - truth.sel(time=made["time"] + np.timedelta64(24, "h")).values
    assert found.hours == 24
    assert found.bias == pytest.approx(error.mean(axis=0), rel=1e-12, abs=1e-9)
    assert found.rmse == pytest.approx(np.sqrt((error**2).mean(axis=0)), rel=1e-12)


def test_names_and_units_are_shown_as_they_are() -> None:
    """Neither as HTML nor as formulas."""
    card = Scorecard(
        forecast="<i>f",
        truth="<i>t",
        climatology="<i>c",
        members=1,
        initial_times=("2000-01-01T00:00",),
        hours=(24,),
        channels=(Channel(r"<u>$\frac$"),),
        units=(r"<u>$\frac$",),
        grid=MapGrid(Grid(np.array([45.0, -45.0]), np.array([0.0, 180.0])), ""),
        scores={"rmse": np.ones((3, 1, 1))},
        spectra=np.full((2, 1, 1, 1, 2), np.nan),
        bands=("globe",),
        maps=(ErrorMap(0, 24, np.ones((2, 2)), np.ones((2, 2))),),
    )
    text = scorecard_page(card)
    assert r"<td>&lt;u&gt;$\frac$</td>" in text
    assert "<u>" not in text
    assert "<i>" not in text
    picture = base64.b64decode(score_image(card, "rmse").split(",")[1]).decode()
    assert r"&lt;u&gt;$\frac$" in picture


@pytest.mark.parametrize(
    "levels", tiers(fast=[("by name",)], slow=[("isobaricInhPa",)], exhaustive=[("level",)])
)
def test_truth_and_climatology_may_have_other_names(
    folder: Path, tmp_path: Path, levels: str
) -> None:
    made = forecasts.forecast(forecasts.truth())
    forecasts.write(made, tmp_path / "long.zarr")
    short = made.rename(SHORT)
    if levels == "by name":
        flat = {f"z{level}": short["z"].sel(level=level, drop=True) for level in (500, 850)}
        short = short[["t2m"]].assign(flat)
    else:
        short = short.rename({"level": levels} if levels != "level" else {})
    forecasts.write(short, tmp_path / "short.nc")
    one, two = (scored(folder, tmp_path / name) for name in ("long.zarr", "short.nc"))
    names = {channel.name: place for place, channel in enumerate(one.channels)}
    for place, channel in enumerate(two.channels):
        long = {"t2m": "2m_temperature", "z500": "geopotential_500", "z850": "geopotential_850"}
        name = long.get(channel.name, channel.name.replace("z_", "geopotential_"))
        there = names[name.replace("t_", "temperature_")]
        for score in one.scores:
            mine, theirs = two.scores[score][..., place], one.scores[score][..., there]
            assert np.allclose(mine, theirs, rtol=1e-6, equal_nan=True)


WINDS = {"u_component_of_wind": "geopotential", "v_component_of_wind": "temperature"}


def winds(data: xr.Dataset) -> xr.Dataset:
    """Both components of a wind, of plausible size."""
    made = {name: data[of] / data[of].max() * 30 for name, of in WINDS.items()}
    return xr.Dataset(made, attrs=data.attrs)


def boxes(name: str, array: xr.DataArray) -> xr.DataArray:
    """A region as WeatherBench 2 selects it; `array` has rows from south to north."""
    lat = {
        "tropics": [slice(-20, 20)],
        "extra-tropics": [slice(None, -20), slice(20, None)],
        "europe": [slice(35, 75)],
        "north-pacific": [slice(25, 60)],
        "arctic": [slice(60, 90)],
    }[name]
    lon = {"europe": [slice(347.5, None), slice(0, 42.5)], "north-pacific": [slice(145, 230)]}
    parts = [array.sel(latitude=one) for one in lat]
    array = xr.concat(parts, "latitude")
    parts = [array.sel(longitude=one) for one in lon.get(name, [slice(None)])]
    return xr.concat(parts, "longitude")


@pytest.mark.parametrize("west", [pytest.param(0, marks=pytest.mark.exhaustive), -180])
def test_regions_are_those_of_weatherbench(tmp_path: Path, west: int) -> None:
    observed = winds(forecasts.truth())
    made = winds(forecasts.forecast(forecasts.truth(), members=2))
    normals = winds(forecasts.climatology(forecasts.truth()))
    for name, data in (("truth", observed), ("climatology", normals), ("f", made)):
        turned = data.assign_coords(longitude=(data["longitude"] - west) % 360 + west)
        forecasts.write(turned.sortby("longitude"), tmp_path / f"{name}.zarr")
    regions = ("tropics", "extra-tropics", "europe", "north-pacific", "arctic")
    card = scored(tmp_path, tmp_path / "f.zarr", regions=regions)
    assert tuple(card.regions) == regions
    valid = made["time"] + made["prediction_timedelta"]
    truth = observed.sel(time=valid).assign_coords(time=made["time"]).astype("f8")
    mean = made.astype("f8").mean("number")
    made = made.astype("f8").sortby("latitude")
    bounds = np.deg2rad(made["latitude"].values)
    bounds = np.concatenate([[-np.pi / 2], (bounds[1:] + bounds[:-1]) / 2, [np.pi / 2]])
    area = xr.DataArray(np.diff(np.sin(bounds)), dims="latitude", coords=[made["latitude"]])
    for region, scores in card.regions.items():
        weights = boxes(region, area * xr.ones_like(made["longitude"]))
        errors, variances = {}, {}
        for name in WINDS:
            square = ((mean[name] - truth[name]) ** 2).sortby("latitude")
            errors[name] = boxes(region, square).weighted(weights).mean(GRID).mean("time")
            variance = boxes(region, made[name].var("number", ddof=1))
            variances[name] = variance.weighted(weights).mean(GRID).mean("time")
        for c, channel in enumerate(card.channels):
            mse = errors[channel.variable].sel(level=channel.level).values
            assert scores["rmse"][0, :, c] == pytest.approx(np.sqrt(mse), rel=1e-12)
            variance = variances[channel.variable].sel(level=channel.level).values
            assert scores["spread"][0, :, c] == pytest.approx(np.sqrt(variance), rel=1e-12)
            both = sum(error.sel(level=channel.level) for error in errors.values())
            wind = scores["wind_vector_rmse"][0, :, c]
            if channel.variable == "u_component_of_wind":
                assert wind == pytest.approx(np.sqrt(both.values), rel=1e-12)
            else:
                assert np.isnan(wind).all()
    rows = card.to_csv().splitlines()
    levels = observed.sizes["level"]
    assert sum("wind_vector_rmse" in row for row in rows) == 6 * levels * 3 * 3
    assert sum(row.endswith(",arctic") for row in rows) == levels * 3 * (len(WINDS) * 23 + 3)
    tables = region_tables(card, "europe")
    assert [table.identifier for table in tables] == ["rmse-europe", "acc-europe"]
    wind = score_table(card, "wind_vector_rmse", card.scores["wind_vector_rmse"], "")
    assert [row[0] for row in wind.rows] == [
        f"u_component_of_wind_{level}" for level in observed["level"].values
    ]


def test_regions_on_a_projection_are_masks_of_its_points(tmp_path: Path) -> None:
    """Europe ends at 42.5 E, a meridian that crosses rows and columns."""
    observed = region_stores.dataset("rotated")[["2m_temperature", "crs"]].drop_encoding()
    longitude = observed["lon"] + 20
    observed = observed.assign_coords(lon=longitude.assign_attrs(observed["lon"].attrs))
    made = observed.isel(time=[4, 6]).expand_dims(prediction_timedelta=forecasts.LEADS[:2])
    noise = np.random.default_rng(3).normal(size=made["2m_temperature"].shape)
    made["2m_temperature"] = (made["2m_temperature"] + noise).astype("f4")
    forecasts.write(observed, tmp_path / "truth.zarr")
    path = forecasts.write(made, tmp_path / "forecast.zarr")
    card = scored(tmp_path, path, climatology="", regions=("europe",))
    inside = (longitude <= 42.5).values
    assert not inside[:, inside.any(0)].all()  # it is no box of rows and columns
    area = region_stores.areas("rotated") * inside
    truth = observed["2m_temperature"].values[[[4, 6], [5, 7]]].astype("f8")
    error = made["2m_temperature"].values - truth
    for name, power, root in (("rmse", 2, 2), ("bias", 1, 1)):
        wanted = ((error**power * area).sum((-2, -1)) / area.sum()).mean(1) ** (1 / root)
        # Areas from the formulas of the projection differ by 2e-3 at most.
        found = card.regions["europe"][name][0, :, 0]
        assert found == pytest.approx(wanted, abs=2e-4), name
        assert found != pytest.approx(card.scores[name][0, :, 0], abs=1e-2), name


def test_a_region_without_points_is_refused(tmp_path: Path) -> None:
    observed = forecasts.truth(columns=4)
    forecasts.write(observed, tmp_path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), tmp_path / "climatology.zarr")
    path = forecasts.write(forecasts.forecast(observed), tmp_path / "f.zarr")
    for regions, message in (
        (("tropic",), "regions: needs one of global, tropics,"),
        (("arctic", "arctic"), "regions: names arctic twice"),
        (("arctic", "ausnz"), "truth.zarr: its grid of 9 x 4 points has none in ausnz"),
    ):
        assert message in refusal(tmp_path, path, regions=regions), regions


@pytest.mark.slow
def test_a_forecast_is_compared_with_years_beyond_those_of_nanoseconds(tmp_path: Path) -> None:
    """The truth goes on to 13 April 2262, so that xarray has its dates as cftime's."""
    observed = forecasts.truth()
    made = forecasts.forecast(observed)
    first = np.datetime64("2262-04-10", "ns") - observed["time"].values[0]
    far = xr.date_range("2262-04-10", periods=16, freq="6h", use_cftime=True)
    cases = {
        "near": (observed, made),
        "far": (
            observed.assign_coords(time=far),
            made.assign_coords(time=made["time"].values + first),
        ),
    }
    cards = {}
    for case, (truth, forecast) in cases.items():
        folder = tmp_path / case
        folder.mkdir()
        forecasts.write(truth, folder / "truth.zarr")
        path = forecasts.write(forecast, folder / "forecast.zarr")
        cards[case] = forecasts.scored(folder, path, climatology="")
    assert cards["far"].initial_times == ("2262-04-11T00:00", "2262-04-11T12:00")
    for score in ("rmse", "bias", "crps"):
        near, beyond = (cards[case].scores[score][0] for case in ("near", "far"))
        np.testing.assert_array_equal(near, beyond)


def test_a_global_forecast_is_interpolated_to_a_region(tmp_path):
    """Its RMSE on a box, against bilinear means and areas in numpy; off the box it is refused."""
    observed = forecasts.truth()
    made = forecasts.forecast(observed)[["2m_temperature"]]
    path = forecasts.write(made, tmp_path / "forecast.zarr")
    box = {"latitude": [50.0, 40.0, 30.0], "longitude": [340.0, 350.0, 0.0, 10.0]}

    def interpolated(values):
        # Rows every 22.5 degrees from the north, columns every 45 from 0.
        row, column = ((90 - np.array(box["latitude"])) / 22.5, np.array(box["longitude"]) / 45)
        (i, y), (j, x) = ((s.astype(int), s % 1) for s in (row, column))
        rows = values[..., i, :] * (1 - y)[:, None] + values[..., i + 1, :] * y[:, None]
        return rows[..., j] * (1 - x) + rows[..., (j + 1) % 8] * x

    dims = ("time", "latitude", "longitude")
    fields = interpolated(observed["2m_temperature"].values).astype("f4")
    attributes = observed["2m_temperature"].attrs
    truth = xr.Dataset(
        {"2m_temperature": (dims, fields, attributes)}, {"time": observed["time"], **box}
    )
    forecasts.write(truth, tmp_path / "truth.zarr")
    card = scored(tmp_path, path, climatology="", variables=("2m_temperature",))
    valid = made["time"].values[:, None] + made["prediction_timedelta"].values
    seen = truth["2m_temperature"].sel(time=valid.ravel()).values.reshape(*valid.shape, 3, 4)
    error = interpolated(made["2m_temperature"].values) - seen
    edges = np.sin(np.deg2rad([55, 45, 35, 25]))
    areas = -np.diff(edges) / -np.diff(edges).mean()
    expected = np.sqrt((error**2 * areas[:, None]).mean((-2, -1)).mean(0))
    np.testing.assert_allclose(card.scores["rmse"][0, :, 0], expected, rtol=1e-5, atol=1e-4)
    assert card.forecast.endswith("forecast.zarr, interpolated bilinearly")
    half = made.isel(longitude=slice(0, 3))
    path = forecasts.write(half, tmp_path / "half.zarr")
    said = refusal(tmp_path, path, climatology="", variables=("2m_temperature",))
    assert "covers longitude 0 to 90, but the region has points at 340. Change forecast" in said
