"""Stores and requests that can't be scored are refused in one line each."""

import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit_dp.errors import UserError
from credit_dp.evaluation.forecast_store import check_same_rows, column_indices
from tests.evaluation import forecasts
from tests.evaluation.forecasts import refusal, scored, without_members


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
        return made.assign(temperature=made["temperature"].assign_attrs(units="m"))
    if name == "hole":
        values = made["temperature"].values.copy()
        values[2, ..., 3, 2] = np.nan
        return made.assign(temperature=(made["temperature"].dims, values))
    return made.isel(time=slice(0, 8))


@pytest.mark.slow
def test_a_truth_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    observed = forecasts.truth()
    observed["temperature"].attrs["units"] = "K"
    made = without_members(forecasts.forecast(observed, members=1))
    made["temperature"].attrs["units"] = "K"
    path = forecasts.write(made, tmp_path / "f.zarr")
    for name, parts in {
        "grid": ["is on another grid than the truth", "9 rows", "has 5", "Change forecast"],
        "columns": ["is on another grid", "longitude from 0 to 315", "from 3 to 318"],
        "levels": ["levels.zarr: geopotential has no level 850", "500, 1000", "Change levels"],
        "variables": ["the truth has no 2m_temp", "variables=[geopotential,temperature]"],
        "units": ["temperature is in K", "but in m in the truth", "Convert"],
        "hole": ["temperature has NaN at 2000-01-01T12:00", "masked=[temperature]"],
        "times": ["the truth has no 2000-01-03T00:00", "2 of 2 initial times", "dates=[first"],
    }.items():
        truth = forecasts.write(changed(observed, name), tmp_path / f"{name}.zarr")
        said = refusal(tmp_path, path, truth=(str(truth),), climatology="")
        assert all(part in said for part in parts), (name, said)


def test_undeclared_fill_values_of_unknown_variables_are_refused(tmp_path: Path) -> None:
    observed = forecasts.truth()
    observed["gas"] = 1e-8 * observed["2m_temperature"]
    made = forecasts.forecast(observed[list(forecasts.NAMES)])
    made["gas"] = 1e-8 * made["2m_temperature"]
    for name, place in (("truth", "truth.zarr"), ("forecast", "f.zarr")):
        folder = tmp_path / name
        data = {"truth": observed.copy(deep=True), "forecast": made.copy(deep=True)}
        data[name]["gas"].values[(6, 3, 2) if name == "truth" else (0, 1, 3, 2)] = -9999
        forecasts.write(data["truth"], folder / "truth.zarr")
        path = forecasts.write(data["forecast"], folder / "f.zarr")
        said = refusal(folder, path, variables=("gas",), climatology="")
        assert f"{folder / place}: gas is -9999 at 2000-01-0" in said
        assert "looks like a fill value" in said
        scored(folder, path, variables=("gas",), climatology="", limits={"gas": [-1e4, 1]})


def test_a_request_that_can_not_be_met_is_refused(folder: Path) -> None:
    path = folder / "forecast.zarr"
    forecasts.write(without_members(forecasts.forecast(forecasts.truth(), members=1)), path)
    truth = str(folder / "truth.zarr")
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"variables": ("temprature",)}, ["no forecast of temprature", "temperature"]),
        ({"masked": ("sst",)}, ["no forecast of sst", "Change masked"]),
        ({"levels": (700,)}, ["geopotential has no level 700", "500, 850, 1000"]),
        ({"hours": (18,)}, ["no lead time of 18 hours", "0, 6, 24", "Change hours"]),
        ({"dates": ("2001-01-01", "2001-02-01")}, ["no initial time from 2001-01-01"]),
        ({"truth": ("nowhere.zarr",)}, ["nowhere.zarr", "Set truth"]),
        ({"climatology": "nowhere.zarr"}, ["nowhere.zarr", "Set climatology"]),
        ({"climatology": truth}, ["a climatology needs the dims hour, dayofyear"]),
        ({"climatology": "", "climatology_dates": ("1999-01-01", "1999-02-01")}, ["climatology_"]),
    ]
    for changes, parts in cases:
        said = refusal(folder, path, **changes)
        assert all(part in said for part in parts), (changes, said)


@pytest.mark.slow
def test_a_climatology_that_lacks_something_is_refused(folder: Path, tmp_path: Path) -> None:
    observed = forecasts.truth()
    observed["temperature"].attrs["units"] = "K"
    normals = forecasts.climatology(observed)
    in_celsius = normals.assign(temperature=normals["temperature"].assign_attrs(units="degC"))
    path = forecasts.write(
        without_members(forecasts.forecast(observed, members=1)), tmp_path / "f.zarr"
    )
    for name, made, part in (
        ("hours", normals.isel(hour=[0, 2]), "has no value for 2000-01-02T06:00, day 2 at 6 h"),
        ("days", normals.isel(dayofyear=slice(0, 2)), "has no value for 2000-01-03T00:00"),
        (
            "half_hours",
            normals.assign_coords(hour=normals["hour"] + 0.5),
            "its hours 0.5, 6.5",
        ),
        ("unit", in_celsius, "temperature is in degC, but in K in the forecast"),
        ("levels", normals.sel(level=[500]), "geopotential has no level 850"),
        ("names", normals.drop_vars("temperature"), "no climatology of temperature"),
        ("grid", normals.isel(longitude=slice(0, 8, 2)), "another grid"),
    ):
        store = forecasts.write(made, tmp_path / f"{name}.zarr")
        said = refusal(folder, path, climatology=str(store))
        assert part in said
        assert "climatology" in said


def test_a_climatology_needs_values_where_the_truth_has_them(folder: Path, tmp_path: Path) -> None:
    """The line names the first time that lacks values, not the one that lacks most."""
    observed = forecasts.truth()
    made = without_members(forecasts.forecast(observed, members=1))
    normals = forecasts.climatology(observed)
    normals["temperature"].values[0, 2:4, 1, 3, 2] = np.nan
    normals["temperature"].values[2, 2, 1] = np.nan
    store = forecasts.write(normals, tmp_path / "c.zarr")
    said = refusal(folder, forecasts.write(made, tmp_path / "f.zarr"), climatology=str(store))
    assert f"{store}: temperature for 2000-01-03T00:00 has NaN or infinite values on 1 p" in said


def test_a_climatology_needs_to_say_its_hours(folder: Path, tmp_path: Path) -> None:
    """Otherwise the first level would be used for all."""
    observed = forecasts.truth()
    made = without_members(forecasts.forecast(observed, members=1))
    store = forecasts.write(forecasts.climatology(observed).drop_vars("hour"), tmp_path / "c.zarr")
    said = refusal(folder, forecasts.write(made, tmp_path / "f.zarr"), climatology=str(store))
    assert "has no hour with coordinates" in said


@pytest.mark.filterwarnings("ignore:invalid value encountered in remainder")  # early xarray
def test_lead_times_that_do_not_rise_or_are_no_whole_hours_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    made = without_members(forecasts.forecast(forecasts.truth(), members=1))
    for leads, found in (
        ([0, 2, 1], "6 hours follow 24. Sort the store"),
        ([0, 0], "0 hours follow 0."),
        ([], "empty"),
    ):
        path = tmp_path / f"{len(leads)}.zarr"
        said = refusal(folder, forecasts.write(made.isel(prediction_timedelta=leads), path))
        assert found in said
        assert "as forecast" in said
    for lead_hours, found in (
        ([0, np.nan, 24], r"prediction_timedelta has missing values\. Select the others"),
        # For early xarray it is missing.
        ([0, np.inf, 24], r"prediction_timedelta (can't be read \(Value inf|has missing)"),
        ([0, 6, 1e18], r"prediction_timedelta can't be read \(1000000000000000000 hours\)"),
        ([0, 1.5, 24], r"lead times need whole hours, but one is 1\.5 hours\. Select others"),
    ):
        hours = ("prediction_timedelta", lead_hours, {"units": "hours"})
        path = forecasts.write(made.assign_coords(prediction_timedelta=hours), tmp_path / "f.nc")
        assert re.search(f"f.nc: {found}", refusal(folder, path)), lead_hours
        path.unlink()


def test_times_that_no_truth_has_are_refused_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    made = without_members(forecasts.forecast(forecasts.truth(), members=1))
    day = np.timedelta64(24 * 60, "m")
    for name, later, remedy in (
        ("partly", 1.5 * day, "Choose initial times with dates=[first,last] or lead times with"),
        ("never", 400 * day, "Change truth or forecast: it has none of the initial times."),
    ):
        moved = made.assign_coords(time=made["time"] + later)
        assert remedy in refusal(folder, forecasts.write(moved, tmp_path / f"{name}.zarr"))
    half = np.array([0, 30], "m8[m]")
    path = forecasts.write(made.assign_coords(time=made["time"] + half), tmp_path / "half.zarr")
    assert "initial times need steps of whole hours, but one is 12.5 hours" in refusal(folder, path)
    odd = made.isel(prediction_timedelta=[2]).assign_coords(
        prediction_timedelta=[np.timedelta64(8, "h")]
    )
    path = forecasts.write(odd.isel(time=[0]), tmp_path / "odd.zarr")
    said = refusal(folder, path)
    assert (
        "its times are 6 hours apart, so no two of them in a row are 8h apart. Change truth, or"
        in said
    )


def test_coordinates_with_nan_are_another_grid() -> None:
    wanted = np.array([0.0, 90.0, 180.0, 270.0])
    found = np.array([0.0, 90.0, np.nan, 270.0])
    with pytest.raises(UserError, match="another grid"):
        column_indices(wanted, found, "f.zarr", "forecast")
    with pytest.raises(UserError, match="another grid"):
        check_same_rows(wanted, found, "f.zarr", "forecast")


def test_forecasts_that_are_not_whole_are_refused(folder: Path, tmp_path: Path) -> None:
    made = without_members(forecasts.forecast(forecasts.truth(), members=1))
    values = made["temperature"].values.copy()
    values[1, 2, 0, 3, 2] = np.inf
    broken = made.assign(temperature=(made["temperature"].dims, values))
    said = refusal(folder, forecasts.write(broken, tmp_path / "nan.zarr"))
    assert "temperature from 2000-01-02T12:00 at 24 h has NaN or infinite values on 1 point" in said
    path = forecasts.write(made, tmp_path / "gone.zarr")
    min(file for file in (path / "geopotential" / "c").rglob("*") if file.is_file()).unlink()
    assert "geopotential from 2000-01-02T00:00 at 0 h can't be read" in refusal(folder, path)
    said = refusal(folder, folder / "truth.zarr")
    assert "forecasts need the dims time (initial time), prediction_timedelta" in said
    said = refusal(
        folder,
        forecasts.write(made.assign_coords(prediction_timedelta=[0, 1, 2]), tmp_path / "bare.zarr"),
    )
    assert "prediction_timedelta must be timedeltas" in said


class TestLimits:
    """Impossible values in each store that is scored; no line names a `data.` key."""

    def made(self) -> xr.Dataset:
        return without_members(forecasts.forecast(forecasts.truth(), members=1))

    @pytest.mark.slow
    def test_of_a_forecast(self, folder: Path, tmp_path: Path) -> None:
        made = self.made()
        values = made["temperature"].values.copy()
        values[1, 2, 0, 3, 2] = 9.96921e36
        broken = made.assign(temperature=(made["temperature"].dims, values))
        path = forecasts.write(broken, tmp_path / "f.zarr")
        said = refusal(folder, path)
        for part in (
            "f.zarr: temperature on level 500 is 9.96921e+36 at 2000-01-03T12:00 (from "
            "2000-01-02T12:00 at 24 h), row 3, column 2, but its limits are 100 to 400",
            "a fill value that no attribute of the store declares, or a model that has become",
            "set 'limits={temperature:[LOW,HIGH]}', or {temperature:null} for no limits",
        ):
            assert part in said
        card = scored(folder, path, hours=(0, 6), levels=(850,), limits={"t": None})
        assert np.isfinite(card.scores["rmse"]).all()
        low = {"2m_temperature": [300, 400]}
        assert "its limits are 300 to 400" in refusal(folder, path, hours=(0,), limits=low)

    def test_a_poor_forecast_is_scored(self, folder: Path, tmp_path: Path) -> None:
        """A forecast may be a little out of range, but not in most of a field."""
        made = self.made()
        values = made["2m_temperature"].values
        values[1, 2, 3, 2] = 105
        path = forecasts.write(made, tmp_path / "poor.zarr")
        assert np.isfinite(scored(folder, path).scores["rmse"]).all()
        values[1, 2] -= 200
        message = refusal(folder, forecasts.write(made, tmp_path / "wrong.zarr"))
        assert "72 of 72 points are out of range" in message

    @pytest.mark.slow
    def test_of_points_that_are_not_scored(self, tmp_path: Path) -> None:
        """Points where the truth has no values are not checked."""
        observed = forecasts.truth()
        made = self.made()
        observed["2m_temperature"][:, 2:4, :3] = np.nan
        made["2m_temperature"][..., 2:4, :3] = -9999
        forecasts.write(observed, tmp_path / "truth.zarr")
        path = forecasts.write(made, tmp_path / "f.zarr")
        card = scored(tmp_path, path, climatology="", masked=("2m_temperature",))
        assert np.isfinite(card.scores["rmse"]).all()

    def test_of_what_it_is_compared_with(self, tmp_path: Path) -> None:
        observed = forecasts.truth()
        stored = {"truth": observed, "climatology": forecasts.climatology(observed)}
        path = forecasts.write(self.made(), tmp_path / "f.zarr")
        for name, data in stored.items():
            forecasts.write(data, tmp_path / f"{name}.zarr")
            wrong = data.assign(temperature=data["temperature"] - 273.15)
            forecasts.write(wrong, tmp_path / f"wrong_{name}.zarr")
        wrong_truth = (str(tmp_path / "wrong_truth.zarr"),)
        wrong_climatology = str(tmp_path / "wrong_climatology.zarr")
        for changes, part in (
            ({"truth": wrong_truth}, "wrong_truth.zarr, chunk temperature/c/"),
            (
                {"climatology": wrong_climatology},
                "wrong_climatology.zarr: temperature on level ",
            ),
        ):
            said = refusal(tmp_path, path, **changes)
            assert part in said
            assert (
                "It looks like degC, and the store gives no unit: convert it, or leave it out of "
                "variables. If the values are right, set 'limits={temperature:[LOW,HIGH]}'"
            ) in said


def test_scores_that_are_not_finite_or_too_good(folder: Path, tmp_path: Path) -> None:
    made = without_members(forecasts.forecast(forecasts.truth(), members=1))
    card = scored(folder, forecasts.write(made, tmp_path / "f.zarr"))
    assert card.warnings() == []  # persistence has no error at 0 h, which says nothing
    card.scores["rmse"][1:, -1, 2] = 0
    assert [line.split(".")[0] for line in card.warnings()] == [
        f"{card.channels[2].name}: the RMSE of {of} is exactly 0"
        for of in ("persistence", "climatology")
    ]
    card.scores["acc"][:] = np.nan
    card.check()
    card.scores["bias"][0, 1, 1] = np.nan
    with pytest.raises(UserError, match=f"bias of the forecast is nan for {card.channels[1].name}"):
        card.check()
