"""Perturbations are smooth fields of a known size, and the same on every mesh."""

import numpy as np
import pytest

from credit_dp.forecast.make_forecasts import CORRELATION_LENGTH, Perturbations
from credit_dp.forecast.request import ForecastJob

LATITUDE, LONGITUDE = np.linspace(90, -90, 31), np.arange(60) * 6.0
TIME = np.datetime64("2000-01-01", "ns")


def draw(rows=slice(None), seed=0, time=TIME, member=0, channels=3):
    return Perturbations(seed, LATITUDE[rows], LONGITUDE, channels).draw(
        time, ForecastJob(member, 0)
    )


def test_rows_do_not_depend_on_which_others_are_drawn():
    whole = draw()
    assert np.array_equal(np.concatenate([draw(slice(0, 7)), draw(slice(7, None))], axis=1), whole)


def test_each_member_time_seed_and_channel_has_its_own():
    later = TIME + np.timedelta64(6, "h")
    fields = [
        draw(),
        draw(seed=1),
        draw(time=later),
        draw(member=1),
        draw(time=TIME - np.timedelta64(10**15, "ns")),
    ]
    fields += [fields[0][[1, 2, 0]]]
    for place, field in enumerate(fields):
        for other in fields[:place]:
            assert np.abs(field - other).max() > 0.5


def test_moments_and_correlations():
    fields = np.concatenate([draw(member=m, channels=40) for m in range(8)])
    assert np.abs(fields.mean()) < 0.05
    # The same everywhere, including the poles.
    for rows in (slice(0, 1), slice(14, 17), slice(30, 31)):
        assert fields[:, rows].std() == pytest.approx(1, abs=0.1)
    # Neighbours are correlated as the formula says.
    chord = 2 * np.sin(np.deg2rad(6) / 2)
    wanted = np.exp(-(chord**2) / (2 * CORRELATION_LENGTH**2))
    on_the_equator = np.mean(fields[:, 15] * np.roll(fields[:, 15], 1, axis=-1))
    along_a_meridian = np.mean(fields[:, 15] * fields[:, 16])
    assert on_the_equator == pytest.approx(wanted, abs=0.06)
    assert along_a_meridian == pytest.approx(wanted, abs=0.06)
    assert np.ptp(fields[:, 0], axis=-1).max() < 1e-12  # a pole is one point
