"""Valid and invalid keys of a forecast."""

import numpy as np
import pytest

from credit_dp.errors import UserError
from credit_dp.forecast.request import (
    ForecastJob,
    ForecastRequest,
    all_jobs,
    parse_initial_times,
    rank_jobs,
)

BEGINNING = {"checkpoint": "run", "out": "f.zarr", "init": "2000-01-01", "lead": "24h"}


def test_initial_times():
    for text, wanted in (
        ("2000-01-01", ["2000-01-01T00"]),
        ("2000-01-01T06", ["2000-01-01T06"]),
        ("2000-01-01T00:30/2000-01-01T12/6h", ["2000-01-01T00:30", "2000-01-01T06:30"]),
        ("[2000-01-02,'2000-01-01 06:00']", ["2000-01-01T06", "2000-01-02T00"]),
        ("2000-01-01/2000-01-02/12h", ["2000-01-01T00", "2000-01-01T12", "2000-01-02T00"]),
        ("2000-01-01/2000-01-03T23/2d", ["2000-01-01T00", "2000-01-03T00"]),
    ):
        assert np.array_equal(parse_initial_times(text), np.array(wanted, "M8[ns]")), text


def test_what_is_no_initial_time():
    for text, line in (
        ("", "init: needs a date"),
        ("soon", "init: needs a date like 2001-01-01, got 'soon'"),
        ("[2000-01-01,2000-01-01T00]", "init: needs each time once"),
        ("2000-01-01T00:30:10", "init: needs whole minutes"),
        ("2000-01-01/2000-01-02", "init: needs FIRST/LAST/STRIDE"),
        ("2000-01-02/2000-01-01/6h", "init: the first time is after the last"),
        ("2000-01-01/2000-01-02/0h", "init: needs whole hours or days, like 240h or 10d, got '0h'"),
        ("0001-01-01/9999-01-01/1h", "init: "),
        ("2000-01-01T00+01:00", "init: needs a date"),
    ):
        with pytest.raises(UserError) as refused:
            parse_initial_times(text)
        assert str(refused.value).startswith(line)
        assert "\n" not in str(refused.value), text


def test_what_fits():
    """A model with noise needs no perturbation."""
    ForecastRequest(**BEGINNING, members=2).check(6, noise=True)
    assert ForecastRequest(**BEGINNING).lead_hours(6) == (6, 12, 18, 24)
    assert ForecastRequest(**{**BEGINNING, "lead": "2d", "every": "1d"}).lead_hours(6) == (24, 48)


def test_what_does_not_fit():
    for keys, line in (
        ({"lead": "20h"}, "lead: needs a multiple of the model's step of 6h, got 20h"),
        ({"lead": "240"}, "lead: needs whole hours or days, like 240h or 10d, got '240'"),
        ({"every": "5h"}, "every: needs a multiple of the model's step"),
        ({"every": "18h"}, "every: needs to divide lead=24h, got 18h"),
        ({"format": "grb"}, "format: needs one of zarr, netcdf, netcdf_file, grib, got 'grb'"),
        ({"members": -1}, "members: needs an integer of at least 0"),
        ({"members": 2}, "members: 2 forecasts from the same state would be the same"),
        ({"perturb": 0.1}, "perturb: needs members"),
        ({"perturb": float("nan"), "members": 2}, "perturb: needs a number of at least 0"),
        ({"perturb_seed": -1}, "perturb_seed: needs an integer"),
        (
            {"init_file": "a.grib", "regrid": "nearest"},
            "regrid: needs one of conservative, bilinear",
        ),
        ({"regrid": "bilinear"}, "regrid: bilinear is for states of init_file"),
        ({"grid": "181x360"}, "grid: needs one of source, got '181x360'"),
        (
            {"grid": "source", "format": "netcdf"},
            "format: cells, grid=source, are written as zarr or grib",
        ),
    ):
        with pytest.raises(UserError) as refused:
            ForecastRequest(**{**BEGINNING, **keys}).check(6)
        assert str(refused.value).startswith(line), keys


def test_every_forecast_is_computed_once_and_ranks_keep_in_step():
    jobs = all_jobs(times=3, members=3)
    shares = [list(rank_jobs(jobs, rank, 4)) for rank in range(4)]
    assert {len(share) for share in shares} == {3}
    made = [job for share in shares for job, counts in share if counts]
    assert sorted(made) == sorted(jobs)
    assert list(rank_jobs(jobs[:1], 1, 2)) == [(ForecastJob(0, 0), False)]
