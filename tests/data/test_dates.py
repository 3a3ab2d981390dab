"""`data.dates=auto`: the store decides which dates each split gets."""

import logging
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.config.data import SPLITS
from credit_dp.data.calendar import Calendar
from credit_dp.data.dates import TimesNeeded, resolve_dates, split_slice
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each


def settled(times, step="6h", **dates):
    config = DataConfig(name="zarr", store="s.zarr", step=step, dates=DatesConfig(**dates))
    return resolve_dates(config, np.asarray(times, "M8[ns]"))


@each("name, last", [("noleap", "12-31"), ("360_day", "12-30")])
def test_years_are_those_of_the_calendar(name, last):
    calendar = Calendar(name)
    ends = (calendar.parse("init", text) for text in ("0003-01-01T12", f"0012-{last}T12"))
    first, stop = ends
    times = np.arange(first, stop + calendar.instant, np.timedelta64(24, "h"))
    config = DataConfig(name="zarr", store="s.zarr", step="1d")
    found = resolve_dates(config, times, calendar=calendar)
    assert spans(found) == [
        ["0003-01-01T12", f"0010-{last}T12"],
        ["0011-01-01T12", f"0011-{last}T12"],
        ["0012-01-01T12", f"0012-{last}T12"],
    ]


def test_dates_of_a_split_are_in_the_calendar():
    calendar = Calendar("360_day")
    first = calendar.parse("init", "2001-02-28")
    times = first + np.timedelta64(6, "h") * np.arange(20)  # to 2 March 18:00
    config = DataConfig(
        name="zarr", store="s.zarr", dates=DatesConfig(train=["2001-02-29", "2001-02-30"])
    )
    assert split_slice(config, "train", times, calendar) == slice(4, 12)
    line = r"data.dates.train: needs a date of the noleap calendar, .*, got 2001-02-29"
    with pytest.raises(UserError, match=line):
        split_slice(config, "train", times, Calendar("noleap"))


def days(first, last, hour=0):
    span = np.arange(np.datetime64(first), np.datetime64(last) + np.timedelta64(1, "D"))
    return span.astype("M8[h]") + np.timedelta64(hour, "h")


def six_hourly(first, count):
    return np.datetime64(first, "h") + np.timedelta64(6, "h") * np.arange(count)


def spans(found):
    return [getattr(found.dates, split) for split in SPLITS]


@each(
    "times, step, expected",
    [
        (  # no whole year: 80, 10 and 10 % of the times
            six_hourly("2001-01-01", 204),
            "6h",
            [
                ["2001-01-01T00", "2001-02-10T18"],
                ["2001-02-11T00", "2001-02-15T18"],
                ["2001-02-16T00", "2001-02-20T18"],
            ],
        ),
        (  # ten years
            days("2000-01-01", "2009-12-31", hour=12),
            "1d",
            [
                ["2000-01-01T12", "2007-12-31T12"],
                ["2008-01-01T12", "2008-12-31T12"],
                ["2009-01-01T12", "2009-12-31T12"],
            ],
        ),
        (  # a whole year each
            days("2000-01-01", "2002-12-31"),
            "1d",
            [
                ["2000-01-01T00", "2000-12-31T00"],
                ["2001-01-01T00", "2001-12-31T00"],
                ["2002-01-01T00", "2002-12-31T00"],
            ],
        ),
        (  # too few whole years for all
            days("2000-01-02", "2002-12-31"),
            "1d",
            [
                ["2000-01-02T00", "2002-05-25T00"],
                ["2002-05-26T00", "2002-09-12T00"],
                ["2002-09-13T00", "2002-12-31T00"],
            ],
        ),
        (  # parts of years at both ends
            days("1999-06-01", "2020-03-01"),
            "1d",
            [
                ["1999-06-01T00", "2015-12-31T00"],
                ["2016-01-01T00", "2017-12-31T00"],
                ["2018-01-01T00", "2020-03-01T00"],
            ],
        ),
        (  # years that are missing don't count
            np.concatenate([days("2000-01-01", "2003-12-31"), days("2010-01-01", "2010-12-31")]),
            "1d",
            [
                ["2000-01-01T00", "2002-12-31T00"],
                ["2003-01-01T00", "2003-12-31T00"],
                ["2010-01-01T00", "2010-12-31T00"],
            ],
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


@each("count, words", [(1, "1 in a row of 1 time"), (2, "2 in a row of 2 times")])
def test_too_few_times_are_refused(count, words):
    with pytest.raises(
        UserError, match=rf"s\.zarr: data\.dates\.train is chosen.*at most {words}\."
    ):
        settled(six_hourly("2001-01-01", count))


# Of one batch of 4, without validations, and of forecasts of 4 steps from one state.
NEEDED = {"train": TimesNeeded(5, 2), "valid": TimesNeeded(0, 0), "test": TimesNeeded(5, 2)}


def few(count, needed, **dates):
    config = DataConfig(name="zarr", store="s.zarr", dates=DatesConfig(**dates))
    return resolve_dates(config, six_hourly("2001-01-01", count).astype("M8[ns]"), needed)


def hours_of(found):
    start = np.datetime64("2001-01-01T00")
    return [
        [int((np.datetime64(date) - start) / np.timedelta64(6, "h")) for date in span]
        for span in spans(found)
    ]


@each(
    "count, expected",
    [
        (10, [[0, 4], [5, 9], [5, 9]]),  # validation, which is not made, has the dates of the test
        (20, [[0, 12], [13, 14], [15, 19]]),  # the test gets from training what it lacks
        (60, [[0, 47], [48, 53], [54, 59]]),  # 10 % are enough
    ],
)
def test_few_times_are_enough_for_each_split(count, expected):
    assert hours_of(few(count, NEEDED)) == expected


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 45))
def test_a_longer_store_gives_no_split_fewer_times(train, valid, test):
    numbers = zip(SPLITS, (train, valid, test), strict=True)
    needed = {split: TimesNeeded(number, number) for split, number in numbers}
    least = train + valid + test
    before = [0, 0, 0]
    for count in range(max(least, 3), max(least, 3) + 450, 9):
        sizes = [stop - start + 1 for start, stop in hours_of(few(count, needed))]
        assert all(size >= earlier - 1 for size, earlier in zip(sizes, before, strict=True))
        before = sizes


@given(st.integers(3, 100), st.integers(1, 30), st.integers(0, 5), st.integers(1, 9), st.booleans())
def test_each_split_gets_what_a_run_needs_of_it_or_one_line(count, train, valid, test, given_test):
    needed = {
        split: TimesNeeded(number, min(number, 2))
        for split, number in zip(SPLITS, (train, valid, test), strict=True)
    }
    dates = {"test": ["2001-01-01", "2001-01-01T06"]} if given_test else {}
    free, wanted = (count - 2, train + valid) if given_test else (count, train + valid + test)
    if free < wanted:
        with pytest.raises(UserError, match=rf"at most {free} in a row of {count} times\. "):
            few(count, needed, **dates)
        return
    found = few(count, needed, **dates).dates
    config = DataConfig(name="zarr", store="s.zarr", dates=found)
    times = six_hourly("2001-01-01", count).astype("M8[ns]")
    sizes = [len(times[split_slice(config, split, times)]) for split in SPLITS]
    assert sizes[0] >= train
    assert sizes[1] >= valid
    assert given_test or sizes[2] >= test


def test_too_few_times_are_one_line_with_all_that_is_needed():
    with pytest.raises(UserError) as refusal:
        few(4, NEEDED)
    assert str(refusal.value) == (
        "s.zarr: data.dates.train is chosen among the times that no other split has, which are at "
        "most 4 in a row of 4 times. This run needs 10: 5 for train, 5 for test. Give it more "
        "times, or lower data.batch_size, trainer.rollout or trainer.evaluate_hours: with 1, "
        "{0: 1} and [6] it needs 4."
    )
    least = {split: TimesNeeded(need.least, need.least) for split, need in NEEDED.items()}
    assert hours_of(few(4, least)) == [[0, 1], [2, 3], [2, 3]]
    with pytest.raises(
        UserError, match=r"needs 4: 2 for train, 2 for test\. Give it more times\.$"
    ):
        few(3, least)


def test_a_store_knows_its_dates_when_it_is_open(tmp_path):
    path = stores.write(stores.dataset(steps=20), tmp_path / "s.zarr")
    store = Store.open(stores.config(path, train="auto", valid="auto", test="auto"))
    assert store.config.dates == DatesConfig(
        ["2000-01-01T00", "2000-01-04T18"],
        ["2000-01-05T00", "2000-01-05T06"],
        ["2000-01-05T12", "2000-01-05T18"],
    )
    assert "train 2000-01-01T00 to 2000-01-04T18 (16 times)" in store.dates_note


@each("first, shared", [("03T18", 1), ("03", 4), ("04", 0)])
def test_times_of_training_in_another_split_are_noted(tmp_path, caplog, first, shared):
    path = stores.write(stores.dataset(steps=20), tmp_path / "s.zarr")
    dates = {"train": ["2000-01-01", "2000-01-03"], "valid": ["2000-01-04", "2000-01-04"]}
    caplog.set_level(logging.INFO, "credit_dp.data")
    Store.open(stores.config(path, **dates, test=[f"2000-01-{first}", "2000-01-05"]))
    noted = [line for line in caplog.messages if line.startswith("data.dates: train has")]
    times = "1 time" if shared == 1 else f"{shared} times"
    wanted = f"data.dates: train has {times} of test, too: scores of test are too good"
    assert noted == [wanted] * bool(shared)
