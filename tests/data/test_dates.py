"""`data.dates=auto`: the store decides which dates each split gets."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import SPLITS
from credit_dp.data.dates import resolve_dates, split_slice
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores


def settled(times, step="6h", **dates):
    config = DataConfig(name="zarr", store="s.zarr", step=step, dates=DatesConfig(**dates))
    return resolve_dates(config, np.asarray(times, "M8[ns]"))


def days(first, last, hour=0):
    span = np.arange(np.datetime64(first), np.datetime64(last) + np.timedelta64(1, "D"))
    return span.astype("M8[h]") + np.timedelta64(hour, "h")


def six_hourly(first, count):
    return np.datetime64(first, "h") + np.timedelta64(6, "h") * np.arange(count)


def spans(found):
    return [getattr(found.dates, split) for split in SPLITS]


@pytest.mark.parametrize(
    ("times", "step", "expected"),
    [
        pytest.param(
            six_hourly("2001-01-01", 204),
            "6h",
            [
                ["2001-01-01T00", "2001-02-10T18"],
                ["2001-02-11T00", "2001-02-15T18"],
                ["2001-02-16T00", "2001-02-20T18"],
            ],
            id="no whole year: 80, 10 and 10 % of the times",
        ),
        pytest.param(
            days("2000-01-01", "2009-12-31", hour=12),
            "1d",
            [
                ["2000-01-01T12", "2007-12-31T12"],
                ["2008-01-01T12", "2008-12-31T12"],
                ["2009-01-01T12", "2009-12-31T12"],
            ],
            id="ten years",
        ),
        pytest.param(
            days("2000-01-01", "2002-12-31"),
            "1d",
            [
                ["2000-01-01T00", "2000-12-31T00"],
                ["2001-01-01T00", "2001-12-31T00"],
                ["2002-01-01T00", "2002-12-31T00"],
            ],
            id="a whole year each",
        ),
        pytest.param(
            days("2000-01-02", "2002-12-31"),
            "1d",
            [
                ["2000-01-02T00", "2002-05-25T00"],
                ["2002-05-26T00", "2002-09-12T00"],
                ["2002-09-13T00", "2002-12-31T00"],
            ],
            id="too few whole years for all",
        ),
        pytest.param(
            days("1999-06-01", "2020-03-01"),
            "1d",
            [
                ["1999-06-01T00", "2015-12-31T00"],
                ["2016-01-01T00", "2017-12-31T00"],
                ["2018-01-01T00", "2020-03-01T00"],
            ],
            id="parts of years at both ends",
        ),
        pytest.param(
            np.concatenate([days("2000-01-01", "2003-12-31"), days("2010-01-01", "2010-12-31")]),
            "1d",
            [
                ["2000-01-01T00", "2002-12-31T00"],
                ["2003-01-01T00", "2003-12-31T00"],
                ["2010-01-01T00", "2010-12-31T00"],
            ],
            id="years that are missing don't count",
        ),
    ],
)
def test_auto_takes_whole_years_where_it_can(times, step, expected):
    assert spans(settled(times, step)) == expected


@given(
    st.sets(st.integers(0, 5000), min_size=3, max_size=200),
    st.integers(1, 48),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_splits_never_overlap_and_are_never_empty(places, hours, limit):
    later = hours * np.array(sorted(places)) * np.timedelta64(1, "h")
    times = np.datetime64("1999-11-03T00", "ns") + later
    config = DataConfig(
        name="zarr", store="s.zarr", step=f"{hours}h", dates=DatesConfig(limit=limit)
    )
    found = resolve_dates(config, times).dates
    config.dates = found
    taken = [split_slice(config, split, times) for split in SPLITS]
    assert not found.undetermined
    assert all(span.stop > span.start for span in taken)
    assert all(one.stop <= two.start for one, two in pairwise(taken))
    if limit is None:
        assert [span.stop for span in taken] == [taken[1].start, taken[2].start, len(times)]
    else:
        assert all(span.stop - span.start <= limit for span in taken)


def test_auto_takes_what_the_dates_that_are_given_leave():
    times = six_hourly("2001-01-01", 100)  # to 2001-01-25T18
    train = ["2001-01-01", "2001-01-20"]
    found = settled(times, train=train)
    assert spans(found) == [
        train,
        ["2001-01-21T00", "2001-01-23T06"],
        ["2001-01-23T12", "2001-01-25T18"],
    ]
    assert found.note == (
        "auto: valid 2001-01-21T00 to 2001-01-23T06 (10 times), "
        "test 2001-01-23T12 to 2001-01-25T18 (10 times)"
    )
    early = ["2001-01-01", "2001-01-02"]
    assert settled(times, test=early).dates.train[0] == "2001-01-03T00"
    with pytest.raises(UserError, match=r"data\.dates\.valid is chosen among.*at most 0 in a row"):
        settled(times, train=["2001-01-01", "2001-01-25"])


def test_a_presets_dates_stay_where_the_store_has_them():
    times = six_hourly("2001-01-01", 100)
    mine = {"train": ["2001-01-01", "2001-01-20"], "valid": ["2001-01-21", "2001-01-22"]}
    inside = settled(times, **mine, test=["2001-01-23", "2001-01-24"], preset=[*SPLITS])
    assert (spans(inside)[:2], inside.note) == ([*mine.values()], "")
    outside = settled(times, **mine, test=["2001-01-23", "2002-01-24"], preset=[*SPLITS])
    assert spans(outside) == spans(settled(times))
    assert outside.note.startswith("auto, as the store lacks dates of data=zarr: train 2001-01-01")
    with pytest.raises(UserError, match=r"data\.dates\.test asks for 2001-01-23 to 2002"):
        settled(times, **mine, test=["2001-01-23", "2002-01-24"], preset=["train", "valid"])


def test_a_limit_keeps_the_first_times_of_each_split():
    times = six_hourly("2001-01-01", 100)
    found = settled(times, train=["2001-01-01", "2001-01-20"], test=["2001-01-25", "2001-01-25"],
                    limit=4)  # fmt: skip
    assert spans(found) == [
        ["2001-01-01T00", "2001-01-01T18"],
        ["2001-01-21T00", "2001-01-21T18"],
        ["2001-01-25", "2001-01-25"],
    ]


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 in a row of 1 time"), (2, "2 in a row of 2 times")]
)
def test_too_few_times_are_refused(count, words):
    with pytest.raises(
        UserError, match=rf"s\.zarr: data\.dates\.train is chosen.*at most {words}\."
    ):
        settled(six_hourly("2001-01-01", count))


def test_a_store_knows_its_dates_when_it_is_open(tmp_path):
    path = stores.write(stores.dataset(steps=20), tmp_path / "s.zarr")
    store = Store.open(stores.config(path, train="auto", valid="auto", test="auto"))
    assert store.config.dates == DatesConfig(
        ["2000-01-01T00", "2000-01-04T18"],
        ["2000-01-05T00", "2000-01-05T06"],
        ["2000-01-05T12", "2000-01-05T18"],
    )
    assert "train 2000-01-01T00 to 2000-01-04T18 (16 times)" in store.dates_note
