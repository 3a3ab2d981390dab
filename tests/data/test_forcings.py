"""Computed forcings against published values, and against sums over small steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.data.calendar import STANDARD, Calendar
from credit_dp.data.forcings import (
    COMPUTED_FORCINGS,
    COMPUTED_STATICS,
    SOLAR_CONSTANT,
    Sun,
    insolation,
    year_fraction,
)
from tests.data.region_grids import rotated
from tests.tables import each

HOUR = np.timedelta64(1, "h")
EVERYWHERE = np.linspace(90, -90, 19)
AROUND = np.arange(0, 360, 7.5)


def at(text):
    return np.array([np.datetime64(text, "ns")])


def daily_mean(day, latitude):
    """W m-2, over the 24 hours of a day."""
    times = np.datetime64(day, "ns") + HOUR * np.arange(1, 25)
    return insolation(times, np.array([latitude]), np.array([0.0])).mean()


def test_sun_stands_where_meeus_has_it():
    """Astronomical Algorithms (1998), examples 25.a and 28.b: 1992 October 13, 0h."""
    sun = Sun.at(at("1992-10-13"))
    assert np.rad2deg(sun.declination[0]) == pytest.approx(-7.78507, abs=2e-4)
    assert sun.distance[0] == pytest.approx(0.99766, abs=1e-5)
    assert sun.equation_of_time[0] == pytest.approx(0.059825557, abs=1e-6)


@each("solstice, declination", [("2020-06-20T21:44", 23.4366), ("2020-12-21T10:02", -23.4366)])
def test_declination_is_greatest_at_the_solstices(solstice, declination):
    """The obliquity of 2020 by the Astronomical Almanac, and the hours of its solstices."""
    assert np.rad2deg(Sun.at(at(solstice)).declination[0]) == pytest.approx(declination, abs=2e-3)
    week = Sun.at(np.datetime64(solstice, "ns") + HOUR * np.arange(-84, 85))
    assert abs(np.argmax(np.abs(week.declination)) - 84) <= 12


def test_equation_of_time_has_its_known_extremes():
    """In 2000, -14 min 15 s on February 11 and +16 min 25 s on November 3 (Meeus, chapter 28)."""
    days = np.datetime64("2000-01-01T12", "ns") + 24 * HOUR * np.arange(366)
    minutes = np.rad2deg(Sun.at(days).equation_of_time) * 4
    assert minutes.min() == pytest.approx(-14.25, abs=0.1)
    assert minutes.max() == pytest.approx(16 + 25 / 60, abs=0.1)
    assert str(days[minutes.argmin()])[:10] in ("2000-02-10", "2000-02-11", "2000-02-12")
    assert str(days[minutes.argmax()])[:10] in ("2000-11-02", "2000-11-03", "2000-11-04")


def test_earth_is_nearest_in_january_and_farthest_in_july():
    """2020: 0.98324 au on January 5, 1.01669 au on July 4 (Astronomical Almanac)."""
    days = np.datetime64("2020-01-01T12", "ns") + 24 * HOUR * np.arange(366)
    distance = Sun.at(days).distance
    assert distance.min() == pytest.approx(0.98324, abs=1e-4)
    assert distance.max() == pytest.approx(1.01669, abs=1e-4)
    assert str(days[distance.argmin()])[:7] == "2020-01"
    assert str(days[distance.argmax()])[:7] == "2020-07"


def test_daily_means_are_those_of_the_closed_form():
    """Berger 1978, J. Atmos. Sci. 35, eq. 9 and 10: S / pi at the equator at an equinox, S sin(d)
    at the pole in summer; S is the solar constant over the distance squared."""
    assert daily_mean("2020-03-20", 0.0) == pytest.approx(
        SOLAR_CONSTANT / 0.99594**2 / np.pi, rel=1e-3
    )
    assert daily_mean("2020-06-20", 90.0) == pytest.approx(
        SOLAR_CONSTANT / 1.01622**2 * np.sin(np.deg2rad(23.437)), rel=1e-3
    )
    assert daily_mean("2020-06-20", 90.0) == pytest.approx(524, abs=1)
    assert daily_mean("2020-03-20", 0.0) == pytest.approx(436.8, abs=1)
    assert daily_mean("2020-06-20", -80.0) == 0


@given(hour=st.integers(0, 366 * 24), latitude=st.floats(-90, 90), longitude=st.floats(-180, 360))
def test_an_hour_is_the_sum_of_its_seconds(hour, latitude, longitude):
    time = np.datetime64("2020-01-01", "ns") + HOUR * hour
    found = insolation(np.array([time]), np.array([latitude]), np.array([longitude]))[0, 0, 0]
    # The position of the sun is that of the middle of the hour.
    sun = Sun.at(np.array([time - np.timedelta64(1800, "s")]))
    seconds = np.arange(-3600, 0) + 0.5
    universal = (time - np.datetime64("2020-01-01", "ns")) / np.timedelta64(1, "s") + seconds
    angle = 2 * np.pi * (universal / 86400 + longitude / 360 - 0.5) + sun.equation_of_time
    phi, delta = np.deg2rad(latitude), sun.declination
    height = np.sin(phi) * np.sin(delta) + np.cos(phi) * np.cos(delta) * np.cos(angle)
    direct = SOLAR_CONSTANT / sun.distance**2 * np.maximum(height, 0).mean()
    assert found == pytest.approx(direct[0], abs=1e-3)


def test_any_rows_and_times_are_those_of_the_whole():
    times = np.datetime64("2021-05-05", "ns") + 5 * HOUR * np.arange(6)
    whole = insolation(times, EVERYWHERE, AROUND)
    assert whole.shape == (6, 19, 48)
    assert whole.min() == 0
    part = insolation(times[2:4], EVERYWHERE[3:9], AROUND)
    assert np.array_equal(part, whole[2:4, 3:9])


@pytest.mark.slow
def test_the_globe_gets_a_quarter_of_the_constant():
    latitude, longitude = np.linspace(89.75, -89.75, 360), np.arange(0, 360, 5.0)
    field = insolation(at("2020-04-03T09"), latitude, longitude)[0].mean(axis=1)
    weights = np.cos(np.deg2rad(latitude))
    flux = SOLAR_CONSTANT / Sun.at(at("2020-04-03T08:30")).distance[0] ** 2
    assert (field * weights).sum() / weights.sum() == pytest.approx(flux / 4, rel=1e-3)


def test_local_time_is_noon_where_the_mean_sun_is():
    names = ("hour_of_day_sin", "hour_of_day_cos")
    times = np.array(["2020-02-02T00", "2020-02-02T06"], dtype="datetime64[ns]")
    longitude = np.array([0.0, 90.0, 180.0, -90.0])
    sin, cos = (COMPUTED_FORCINGS[name](times, EVERYWHERE, longitude)[:, 4] for name in names)
    assert np.allclose(cos, [[1, 0, -1, 0], [0, -1, 0, 1]], atol=1e-12)
    assert np.allclose(sin, [[0, 1, 0, -1], [1, 0, -1, 0]], atol=1e-12)


@each("name", COMPUTED_FORCINGS)
def test_computed_forcings_are_of_order_one_on_the_whole_grid(name):
    times = np.datetime64("2020-01-01", "ns") + 31 * HOUR * np.arange(300)
    values = COMPUTED_FORCINGS[name](times, EVERYWHERE, AROUND)
    assert values.shape == (300, 19, 48)
    assert 0.9 < np.abs(values).max() < 1.04


def test_the_season_begins_at_new_year():
    names = ("day_of_year_sin", "day_of_year_cos")
    times = np.datetime64("2001-01-01", "ns") + 365 * 6 * HOUR * np.arange(3)  # quarters of a year
    sin, cos = (COMPUTED_FORCINGS[name](times, EVERYWHERE, AROUND)[:, 3, 5] for name in names)
    assert np.allclose((sin, cos), [[0, 1, 0], [1, 0, -1]], atol=1e-6)


def test_latitude_and_longitude_are_points_on_circles():
    latitude, longitude = np.array([90.0, 30.0, -90.0]), np.array([0.0, 90.0, 180.0, 270.0])
    found = {name: static(latitude, longitude) for name, static in COMPUTED_STATICS.items()}
    assert {values.shape for values in found.values()} == {(3, 4)}
    assert np.allclose(found["latitude_sin"][:, 1], [1, 0.5, -1])
    assert np.allclose(found["latitude_cos"][:, 1], [0, np.sqrt(0.75), 0])
    assert np.allclose(found["longitude_sin"][1], [0, 1, 0, -1])
    assert np.allclose(found["longitude_cos"][1], [1, 0, -1, 0])


def days_of(calendar, year, count=None):
    """Midnights of a year, or of `count` days from its start, and their fractions of the year."""
    lengths = {"noleap": 365, "all_leap": 366, "360_day": 360, "julian": 365 + (year % 4 == 0)}
    first = calendar.parse("init", f"{year:04}-01-01")
    days = np.arange(count or lengths[calendar.name])
    return first + 24 * HOUR * days, days / lengths[calendar.name]


@each("name, year", itertools.product(["noleap", "all_leap", "360_day", "julian"], [1, 1999, 2000]))
def test_the_year_of_a_calendar_has_its_own_length(name, year):
    calendar = Calendar(name)
    times, fractions = days_of(calendar, year)
    np.testing.assert_allclose(year_fraction(times, calendar), fractions, atol=1e-12)
    half = year_fraction(times + 12 * HOUR, calendar) - fractions
    np.testing.assert_allclose(half, 0.5 / len(times), atol=1e-12)
    for wave, wanted in (("sin", np.sin), ("cos", np.cos)):
        season = COMPUTED_FORCINGS[f"day_of_year_{wave}"](times, EVERYWHERE, AROUND, calendar)
        np.testing.assert_allclose(season[:, 3, 5], wanted(2 * np.pi * fractions), atol=1e-12)


def kepler_insolation(days_since_equinox, year, latitude):
    """Daily mean insolation (W m-2) on an orbit of the year 2000, Kepler's equation by bisection.

    Source: Berger 1978, eqs. 8 and 10, for the daily mean; elements for 2000 by Meeus, chapter 25.
    """
    eccentricity, tilt, perihelion = 0.016708634, np.deg2rad(23.4393), np.deg2rad(282.9372)

    def mean_anomaly(true):
        root = np.sqrt((1 - eccentricity) / (1 + eccentricity))
        eccentric = 2 * np.arctan(root * np.tan(true / 2))
        return eccentric - eccentricity * np.sin(eccentric)

    at_equinox = mean_anomaly(2 * np.pi - perihelion)  # of the true anomaly at longitude zero
    wanted = (at_equinox + 2 * np.pi * days_since_equinox / year + np.pi) % (2 * np.pi) - np.pi
    low, high = -np.pi, np.pi
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_anomaly(middle) < wanted else (low, middle)
    declination = np.arcsin(np.sin(tilt) * np.sin(middle + perihelion))
    distance = (1 - eccentricity**2) / (1 + eccentricity * np.cos(middle))
    phi = np.deg2rad(latitude)
    half_day = np.arccos(np.clip(-np.tan(phi) * np.tan(declination), -1, 1))
    height = half_day * np.sin(phi) * np.sin(declination)
    height += np.cos(phi) * np.cos(declination) * np.sin(half_day)
    return SOLAR_CONSTANT / np.pi / distance**2 * height


@each(
    "name, year, equinox",
    [("noleap", 365, 79.5), ("all_leap", 366, 80.5), ("360_day", 360, 80.5)],
)
def test_the_sun_of_a_calendar_has_its_equinox_on_21_march(name, year, equinox):
    calendar = Calendar(name)
    for day in range(5, 360, 37):
        times = calendar.parse("init", "0003-01-01") + HOUR * (24 * day + np.arange(1, 25))
        for latitude in (-50.0, 0.0, 35.0, 80.0):
            found = insolation(times, np.array([latitude]), np.array([0.0]), calendar).mean()
            expected = kepler_insolation(day + 0.5 - equinox, year, latitude)
            assert found == pytest.approx(expected, rel=2e-3, abs=0.5)


@pytest.mark.slow
@each("name", ["noleap", "all_leap", "360_day"])
def test_every_year_of_a_calendar_has_the_same_sun(name):
    calendar = Calendar(name)
    years = [
        insolation(days_of(calendar, year)[0][::40], EVERYWHERE, AROUND, calendar)
        for year in (1, 1850, 2000)
    ]
    np.testing.assert_allclose(years[0], years[2], atol=1e-5)
    np.testing.assert_allclose(years[1], years[2], atol=1e-5)


@pytest.mark.slow
def test_the_sun_moves_on_at_the_end_of_a_calendar_s_year():
    for name in ("noleap", "all_leap", "360_day", "julian"):
        calendar = Calendar(name)
        times, _ = days_of(calendar, 1996, 4 * 366)
        declination = np.rad2deg(Sun.at(times, calendar).declination)
        assert np.abs(np.diff(declination)).max() < 0.42  # degrees in a day, at the equinoxes


def test_points_of_a_projection_have_what_rows_and_columns_have():
    times = np.datetime64("2001-03-05", "s") + np.arange(9) * np.timedelta64(3, "h")
    latitude, longitude = rotated(np.arange(-20.0, 40, 7), np.arange(-30.0, 31, 5), (39.25, -162.0))
    for name, forcing in COMPUTED_FORCINGS.items():
        found = forcing(times, latitude, longitude, STANDARD)
        assert found.shape == (9, *latitude.shape), name
        for row, column in np.ndindex(latitude.shape):
            point = np.array([latitude[row, column]]), np.array([longitude[row, column]])
            wanted = forcing(times, *point, STANDARD)[:, 0, 0]
            np.testing.assert_allclose(found[:, row, column], wanted, rtol=1e-12, atol=1e-15)
    for name, static in COMPUTED_STATICS.items():
        found = static(latitude, longitude)
        point = latitude[3:4, 5], longitude[3:4, 5]
        assert found[3, 5] == pytest.approx(static(*point)[0, 0], rel=1e-13), name
