"""Scores of stores against an implementation in xarray, whatever form the stores have."""

import base64
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.data.schema import Channel
from credit_dp.errors import UserError
from credit_dp.evaluation.error_maps import ErrorMap
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.grid_match import columns_of, same_rows
from credit_dp.evaluation.score_page import page
from credit_dp.evaluation.score_plots import curves
from credit_dp.evaluation.score_request import ScoreRequest
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.evaluation.scoring import score
from credit_dp.evaluation.variable_scores import SOURCES
from tests.evaluation import forecasts

GRID = ["latitude", "longitude"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a truth and a climatology."""
    path = tmp_path_factory.mktemp("stores")
    observed = forecasts.truth()
    forecasts.write(observed, path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), path / "climatology.zarr")
    return path


def scored(folder: Path, forecast: Path, **changes: object) -> Scorecard:
    settings: dict[str, object] = {
        "forecast": str(forecast),
        "truth": str(folder / "truth.zarr"),
        "cache": str(folder / "cache"),
        "climatology": str(folder / "climatology.zarr"),
    }
    request = ScoreRequest(**(settings | changes))  # type: ignore[arg-type]
    return score(request, ForecastStore.open(request.forecast), lambda title, part: None)


def refusal(folder: Path, forecast: Path, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        scored(folder, forecast, **changes)
    assert "\n" not in str(caught.value)
    assert "data." not in str(caught.value)
    return str(caught.value)


def globe(array: xr.DataArray) -> xr.DataArray:
    """The mean by area, from the edges of cells."""
    latitude = array["latitude"].values
    edges = np.concatenate([[90.0], (latitude[1:] + latitude[:-1]) / 2, [-90.0]])
    area = abs(np.diff(np.sin(np.deg2rad(edges))))
    return array.weighted(xr.DataArray(area, dims="latitude", coords=[latitude])).mean(GRID)


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
    found: dict[str, dict[str, xr.DataArray]] = {name: {} for name in SOURCES}
    for of, field in fields.items():
        found["rmse"][of] = np.sqrt(globe((field - truth) ** 2).mean("time"))
        found["bias"][of] = globe(field - truth).mean("time")
        found["activity"][of] = np.sqrt(globe((field - normal) ** 2).mean("time"))
        found["crps"][of] = globe(abs(field - truth)).mean("time")
        if of != "climatology":
            one, two = field - normal, truth - normal
            products = np.sqrt(globe(one**2) * globe(two**2))
            found["acc"][of] = (globe(one * two) / products).mean("time")
    fair = abs(made - truth).mean("number") - pairs / (2 * count * (count - 1))
    found["crps"]["forecast"] = globe(fair).mean("time")
    found["spread"]["forecast"] = np.sqrt(globe(made.var("number", ddof=1)).mean("time"))
    return found


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
                for source, of in enumerate(SOURCES[score_name]):
                    one = wanted[score_name][of]
                    if channel.level is not None:
                        one = one.sel(level=channel.level)
                    hours = np.array(card.hours) * np.timedelta64(1, "h").astype("m8[ns]")
                    one = one.sel(prediction_timedelta=hours).values
                    assert values[source, :, c] == pytest.approx(one, rel=1e-12, abs=1e-9), (
                        channel,
                        score_name,
                        of,
                    )
                    seen += 1
    assert seen == len(card.channels) * sum(len(SOURCES[name]) for name in card.scores)


def test_an_ensemble_is_scored_by_the_definitions(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=3)
    card = scored(folder, forecasts.write(made, folder / "of_three.zarr"))
    assert set(card.scores) == set(SOURCES)
    assert card.members == 3
    assert card.hours == (0, 6, 24)
    check(card, made)


def without_members(made: xr.Dataset) -> xr.Dataset:
    return made.isel(number=0)


FORMS = {
    "netcdf": lambda made: made,
    "south first": lambda made: made.isel(latitude=slice(None, None, -1)),
    "longitudes from -180": lambda made: made.assign_coords(
        longitude=(made["longitude"] + 180) % 360 - 180
    ).sortby("longitude"),
    "other order of dims": lambda made: made.transpose(
        "longitude", "latitude", "prediction_timedelta", "level", "time"
    ),
    "other names": lambda made: made.rename(
        time="init_time", prediction_timedelta="lead_time", latitude="lat", longitude="lon"
    ),
    "leads as hours": lambda made: made.assign_coords(
        prediction_timedelta=(
            "prediction_timedelta",
            (made["prediction_timedelta"].values / np.timedelta64(1, "h")).astype("i4"),
            {"units": "hours"},
        )
    ),
    "time it is for": lambda made: made.assign_coords(
        valid_time=made["time"] + made["prediction_timedelta"]
    ),
    "a constant beside": lambda made: made.assign(
        land_sea_mask=(GRID, np.zeros((made.sizes["latitude"], made.sizes["longitude"])))
    ),
}


OFTEN = ("netcdf", "south first")  # also in the fast tier


@pytest.mark.parametrize(
    "form", [x if x in OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in FORMS]
)
def test_whatever_form_it_has(folder: Path, form: str) -> None:
    made = forecasts.forecast(forecasts.truth(), members=1)
    ending = "nc" if form in ("netcdf", "leads as hours") else "zarr"
    path = folder / f"{form.replace(' ', '_')}.{ending}"
    card = scored(folder, forecasts.write(FORMS[form](without_members(made)), path))
    assert set(card.scores) == {"rmse", "acc", "bias", "activity"}
    check(card, made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["realization", "ensemble"])
def test_members_under_other_names_anywhere(folder: Path, name: str) -> None:
    made = forecasts.forecast(forecasts.truth(), members=2)
    other = made.rename(number=name).transpose(..., name)
    check(scored(folder, forecasts.write(other, folder / f"{name}.zarr")), made)


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
    """The same mask in all of them, and the scores of what is left."""
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
        for source, of in enumerate(SOURCES[name]):
            one = wanted[name][of].values
            assert card.scores[name][source, :, 0] == pytest.approx(one, rel=1e-12, abs=1e-9)
    assert "masked=[2m_temperature]" in refusal(tmp_path, path)


def test_a_mask_of_what_is_not_scored_is_no_matter(folder: Path) -> None:
    made = forecasts.forecast(forecasts.truth(), members=1)
    path = forecasts.write(without_members(made), folder / "unmasked.zarr")
    card = scored(folder, path, variables=("2m_temperature",), masked=("temperature",), hours=(24,))
    check(card, made)


def test_a_climatology_is_fitted_to_dates_of_the_truth(folder: Path) -> None:
    """Of so few days it is their mean at each hour."""
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
    assert "from 2000-01-01 to 2000-01-03, which the forecasts' own dates are among" in (
        card.climatology
    )


def test_the_first_sums_of_the_truth_may_lack_hours(tmp_path: Path) -> None:
    """The climatology is fitted to those that are whole, without being asked."""
    observed = forecasts.truth()[["2m_temperature"]].rename({"2m_temperature": "snowfall"})
    made = without_members(
        forecasts.forecast(forecasts.truth(), members=1)[["2m_temperature"]]
    ).rename({"2m_temperature": "snowfall"})
    path = forecasts.write(made.isel(prediction_timedelta=[2]), tmp_path / "f.zarr")
    forecasts.write(observed, tmp_path / "truth.zarr")
    card = scored(tmp_path, path, climatology="")
    assert card.climatology.startswith("fitted to the truth from 2000-01-01T12:00 to")


def test_sums_are_over_the_same_span_whichever_leads_are_scored(tmp_path: Path) -> None:
    names = {"2m_temperature": "snowfall"}
    made = forecasts.forecast(forecasts.truth(), members=1)[["2m_temperature"]].rename(names)
    forecasts.write(forecasts.truth()[["2m_temperature"]].rename(names), tmp_path / "truth.zarr")
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


def changed(made: xr.Dataset, name: str) -> xr.Dataset:
    """A forecast, or a truth, that can't be scored."""
    if name == "grid":
        return made.isel(latitude=slice(None, None, 2))
    if name == "columns":
        return made.assign_coords(longitude=made["longitude"] + 3)
    if name == "levels":
        return made.sel(level=[500, 1000])
    if name == "variables":
        return made.drop_vars("2m_temperature")
    if name == "units":
        return made.assign(temperature=made["temperature"].assign_attrs(units="degC"))
    if name == "hole":
        values = made["temperature"].values.copy()
        values[2, ..., 3, 2] = np.nan
        return made.assign(temperature=(made["temperature"].dims, values))
    return made.isel(time=slice(0, 8))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("grid", ["is on another grid than the truth", "9 rows", "has 5", "Change forecast"]),
        ("columns", ["is on another grid", "longitude from 0 to 315", "from 3 to 318"]),
        ("levels", ["truth.zarr: geopotential has no level 850", "500, 1000", "Change levels"]),
        ("variables", ["the truth has no 2m_temperature", "variables=[geopotential,temperature]"]),
        ("units", ["temperature is in K", "but in degC in the truth", "Convert"]),
        ("hole", ["temperature has NaN at 2000-01-01T12:00", "masked=[temperature]"]),
        ("times", ["the truth has no 2000-01-03T00:00", "2 of 2 initial times", "dates=[first"]),
    ],
)
def test_a_truth_that_does_not_fit_is_refused(tmp_path: Path, name: str, parts: list[str]) -> None:
    observed = forecasts.truth()
    observed["temperature"].attrs["units"] = "K"
    made = without_members(forecasts.forecast(observed, members=1))
    made["temperature"].attrs["units"] = "K"
    forecasts.write(changed(observed, name), tmp_path / "truth.zarr")
    path = forecasts.write(made, tmp_path / "f.zarr")
    said = refusal(tmp_path, path, climatology="")
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"variables": ("temprature",)}, ["no forecast of temprature", "temperature"]),
        ({"masked": ("sst",)}, ["no forecast of sst", "Change masked"]),
        ({"levels": (700,)}, ["geopotential has no level 700", "500, 850, 1000"]),
        ({"hours": (18,)}, ["no lead time of 18 hours", "0, 6, 24", "Change hours"]),
        ({"dates": ("2001-01-01", "2001-02-01")}, ["no initial time from 2001-01-01"]),
        ({"truth": "nowhere.zarr"}, ["nowhere.zarr", "Set truth"]),
        ({"climatology": "nowhere.zarr"}, ["nowhere.zarr", "Set climatology"]),
        ({"climatology": "truth.zarr"}, ["a climatology needs the dims hour, dayofyear"]),
        ({"climatology": "", "climatology_dates": ("1999-01-01", "1999-02-01")}, ["climatology_"]),
    ],
)
def test_a_request_that_can_not_be_met_is_refused(
    folder: Path, changes: dict[str, object], parts: list[str]
) -> None:
    path = folder / "asked.zarr"
    if not path.exists():
        forecasts.write(without_members(forecasts.forecast(forecasts.truth(), members=1)), path)
    if changes.get("climatology") == "truth.zarr":
        changes = changes | {"climatology": str(folder / "truth.zarr")}
    said = refusal(folder, path, **changes)
    for part in parts:
        assert part in said


@pytest.mark.slow
def test_a_climatology_that_lacks_something_is_refused(folder: Path, tmp_path: Path) -> None:
    observed = forecasts.truth()
    normals = forecasts.climatology(observed)
    path = forecasts.write(
        without_members(forecasts.forecast(observed, members=1)), tmp_path / "f.zarr"
    )
    for name, made, part in (
        ("hours", normals.isel(hour=[0, 2]), "has no value for 2000-01-02T06:00, day 2 at 6 h"),
        ("days", normals.isel(dayofyear=slice(0, 2)), "has no value for 2000-01-03T00:00"),
        ("levels", normals.sel(level=[500]), "geopotential has no level 850"),
        ("names", normals.drop_vars("temperature"), "no climatology of temperature"),
        ("grid", normals.isel(longitude=slice(0, 8, 2)), "another grid"),
    ):
        store = forecasts.write(made, tmp_path / f"{name}.zarr")
        said = refusal(folder, path, climatology=str(store))
        assert part in said
        assert "climatology" in said


def test_a_climatology_needs_to_say_its_hours(folder: Path, tmp_path: Path) -> None:
    """Else the first would stand for all of them."""
    observed = forecasts.truth()
    made = without_members(forecasts.forecast(observed, members=1))
    store = forecasts.write(forecasts.climatology(observed).drop_vars("hour"), tmp_path / "c.zarr")
    said = refusal(folder, forecasts.write(made, tmp_path / "f.zarr"), climatology=str(store))
    assert "has no hour with one" in said


def test_coordinates_with_nan_are_another_grid() -> None:
    wanted = np.array([0.0, 90.0, 180.0, 270.0])
    found = np.array([0.0, 90.0, np.nan, 270.0])
    with pytest.raises(UserError, match="another grid"):
        columns_of(wanted, found, "f.zarr", "forecast")
    with pytest.raises(UserError, match="another grid"):
        same_rows(wanted, found, "f.zarr", "forecast")


def test_names_and_units_are_shown_as_they_are() -> None:
    """Neither as HTML nor as formulas."""
    card = Scorecard(
        forecast="<i>f",
        truth="<i>t",
        climatology="<i>c",
        members=1,
        initial_times=np.array(["2000-01-01"], "M8[ns]"),
        hours=(24,),
        channels=(Channel(r"<b>$\frac$"),),
        units=(r"<b>$\frac$",),
        latitude=np.array([45.0, -45.0]),
        longitude=np.array([0.0, 180.0]),
        scores={"rmse": np.ones((3, 1, 1))},
        spectra=np.full((2, 1, 1, 1, 2), np.nan),
        bands=("globe",),
        maps=(ErrorMap(0, 24, np.ones((2, 2)), np.ones((2, 2))),),
    )
    text = page(card)
    assert r"<td>&lt;b&gt;$\frac$</td>" in text
    assert "<b>" not in text
    assert "<i>" not in text
    picture = base64.b64decode(curves(card, "rmse").split(",")[1]).decode()
    assert r"&lt;b&gt;$\frac$" in picture


def test_forecasts_that_are_not_whole_are_refused(folder: Path, tmp_path: Path) -> None:
    made = without_members(forecasts.forecast(forecasts.truth(), members=1))
    values = made["temperature"].values.copy()
    values[1, 2, 0, 3, 2] = np.inf
    broken = made.assign(temperature=(made["temperature"].dims, values))
    said = refusal(folder, forecasts.write(broken, tmp_path / "nan.zarr"))
    assert (
        "temperature from 2000-01-02T12:00 at 24 h has NaN or infinite values on 1 points" in said
    )
    path = forecasts.write(made, tmp_path / "gone.zarr")
    min(file for file in (path / "geopotential" / "c").rglob("*") if file.is_file()).unlink()
    assert "geopotential from 2000-01-02T00:00 at 0 h can't be read" in refusal(folder, path)
    said = refusal(folder, folder / "truth.zarr")
    assert "forecasts need the dims time (initial time), prediction_timedelta" in said
    said = refusal(
        folder,
        forecasts.write(made.assign_coords(prediction_timedelta=[0, 1, 2]), tmp_path / "bare.zarr"),
    )
    assert "prediction_timedelta needs to be time spans" in said
