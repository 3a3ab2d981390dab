"""Scores of events against brute force and the numbers of the library `scores` 2.7.0."""

import csv
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from credit_dp.config import DataConfig, DatesConfig
from credit_dp.data.calendar import STANDARD
from credit_dp.data.channels import Channel
from credit_dp.data.grid import GLOBAL, Grid
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.evaluation import events
from credit_dp.evaluation.events import (
    EVENT_SCORES,
    Event,
    Neighbourhoods,
    Quantiles,
    brier_parts,
    brier_score,
    open_quantiles,
    parse_events,
    roc_area,
)
from credit_dp.evaluation.score_folder import scorecard_page
from credit_dp.evaluation.scores_by_date import write_scores_by_date
from credit_dp.sphere import EARTH_RADIUS
from tests.evaluation import forecasts
from tests.evaluation.forecasts import refusal, scored

UNITS = {"t2m": "K", "tp": "m", "r": "%", "x": ""}


@pytest.mark.parametrize(
    ("name", "text", "event"),
    [
        ("t2m", "> 303.150", Event(">303.15", True, 303.15, False)),
        ("t2m", "<0degC", Event("<0 degC", False, 273.15, False)),
        ("t2m", ">95%", Event(">95%", True, 0.95, True)),
        ("tp", ">25 mm", Event(">25 mm", True, 0.025, False)),
        ("r", ">95%", Event(">95 %", True, 95, False)),  # its own unit
        ("x", ">-1e-3", Event(">-0.001", True, -1e-3, False)),
    ],
)
def test_an_event_has_a_threshold(name: str, text: str, event: Event) -> None:
    assert parse_events({name: [text]}, UNITS) == {name: [event]}


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ({"t2m": [">303 parsec"]}, "the truth is in K, to which 'parsec' can't be converted"),
        ({"t2m": ["303"]}, "needs > or <, a number and a unit or %"),
        ({"t2m": [">100%"]}, "needs a quantile between 0 and 100 %"),
        ({"t2m": ">1"}, "needs a list"),
        ({"t2m": [">1", "> 1.0"]}, "has an event twice"),
        ({"t2m": [">274.15", ">1 degC"]}, "has an event twice"),
        ({"moon": [">1"]}, "needs a variable that is scored, one of t2m, tp, r, x"),
    ],
)
def test_no_event(events: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=f"^events.{next(iter(events))}: .*{words}"):
        parse_events(events, UNITS)


@pytest.mark.parametrize(
    ("text", "unit", "stored"),
    [
        (">25 mm", "m", 0.025),
        (">1 mm", "m", 0.001),
        ("<303.15", "K", 303.15),
        (">300.1", "K", 300.1),
        ("<0 degC", "K", 273.15),
    ],
)
def test_a_value_on_the_threshold_is_no_event(text: str, unit: str, stored: float) -> None:
    """Fields are float32, in which the threshold itself may be above or below its value."""
    event = parse_events({"x": [text]}, {"x": unit})["x"][0]
    field = np.float32(stored)
    away = np.nextafter(field, np.float32(np.inf if event.above else -np.inf))
    fields = torch.from_numpy(np.array([field, away])).double()
    assert event.occurs(fields, event.value).tolist() == [False, True]


def test_contingency_scores_are_those_of_the_library() -> None:
    # Of correct negatives, false alarms, misses and hits; its numbers to all digits.
    counts = np.array([[138.0, 27.0], [33.0, 26.0]])
    expected = {
        "frequency_bias": 1.1132075471698113,
        "hit_rate": 0.49056603773584906,
        "false_alarm_ratio": 0.559322033898305,
        "false_alarm_rate": 0.19298245614035087,
        "csi": 0.3023255813953488,
        "ets": 0.16713143707008737,
        "sedi": 0.429116753628136,
    }
    for name, value in expected.items():
        assert EVENT_SCORES[name].compute(counts) == pytest.approx(value, rel=1e-13)


def test_probabilities_are_scored_as_by_the_library() -> None:
    random = np.random.default_rng(6)
    members = random.integers(0, 6, 400)
    observed = random.random(400) < 0.2 + 0.6 * members / 5
    counts = np.zeros((6, 2))
    np.add.at(counts, (members, observed.astype(int)), 1)
    assert brier_score(counts) == pytest.approx(0.21550000000000005, rel=1e-13)
    assert brier_score(counts) == pytest.approx(((members / 5 - observed) ** 2).mean(), rel=1e-13)
    assert roc_area(counts) == pytest.approx(0.7520908453525641, rel=1e-13)
    parts = brier_parts(counts)
    assert parts.uncertainty == pytest.approx(observed.mean() * (1 - observed.mean()))
    assert min(parts) > 0


def brute_force(grid: Grid, fields: np.ndarray, kilometres: float) -> np.ndarray:
    """Return the mean over all points within a great circle's distance."""
    latitude, longitude = (np.deg2rad(x) for x in grid.points)
    points = np.stack(
        [
            np.cos(latitude) * np.cos(longitude),
            np.cos(latitude) * np.sin(longitude),
            np.sin(latitude),
        ]
    ).reshape(3, -1)
    chords = np.linalg.norm(points[:, :, None] - points[:, None], axis=0)
    near = 2 * np.arcsin((chords / 2).clip(max=1)) * EARTH_RADIUS / 1000 <= kilometres + 1e-6
    weights = near * np.repeat(grid.weights, grid[1])
    return (weights @ fields.ravel() / weights.sum(axis=1)).reshape(fields.shape)


def globe(rows: int, columns: int, poles: bool) -> Grid:
    edge = 90.0 if poles else 90 - 90 / rows
    return Grid(np.linspace(edge, -edge, rows), np.arange(columns) * 360 / columns)


GRIDS = {
    "poles": globe(13, 24, poles=True),
    "no poles": globe(12, 17, poles=False),
    "a box": Grid(np.linspace(60, 40, 9), np.linspace(5, 30, 11)),
    "a box across 0": Grid(np.linspace(60, 40, 11), (350 + np.arange(10) * 2.0) % 360),
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("kilometres", [1, 700, 2500, 9000, 20000])
def test_neighbourhoods_are_discs_on_the_sphere(grid: Grid, kilometres: float) -> None:
    fields = np.random.default_rng(1).random((2, *grid)) > 0.5
    near = Neighbourhoods(grid, kilometres, torch.ones(2, *grid).bool())
    found = near.mean(torch.from_numpy(fields), slice(0, 2))
    for one, other in zip(found.numpy(), fields, strict=True):
        np.testing.assert_allclose(one, brute_force(grid, other, kilometres), atol=1e-12)


def test_far_from_any_event_the_share_is_zero() -> None:
    grid = GRIDS["poles"]
    fields = torch.zeros(1, *grid, dtype=torch.bool)
    fields[0, :, 0] = True
    near = Neighbourhoods(grid, 700, torch.ones(1, *grid).bool())
    found = near.mean(fields, slice(0, 1))[0].numpy()
    expected = brute_force(grid, fields[0].numpy(), 700)
    assert (expected == 0).sum() > grid[0]
    assert (found[expected == 0] == 0).all()


def test_neighbourhoods_leave_out_points_without_values() -> None:
    grid = GRIDS["poles"]
    random = np.random.default_rng(1)
    fields, valid = random.random((2, 2, *grid)) > 0.5
    near = Neighbourhoods(grid, 2500, torch.from_numpy(valid))
    found = near.mean(torch.from_numpy(fields)[None, 1:], slice(1, 2))[0, 0].numpy()
    share = brute_force(grid, valid[1], 2500)
    with np.errstate(invalid="ignore"):  # where no point near has a value
        expected = brute_force(grid, fields[1] & valid[1], 2500) / share
    expected = np.where(valid[1], expected, 0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_fractions_skill_score_of_a_flat_box_is_the_librarys() -> None:
    # Discs of 1.5 grid lengths have 3 x 3 points, as the library's windows; nothing at the edges.
    random = np.random.default_rng(5)
    fields = np.zeros((2, 14, 16))
    fields[:, 2:-2, 2:-2] = random.random((2, 10, 12))
    step = 0.01  # degrees, at the equator: area weights are equal to 1e-6
    grid = Grid(step * np.arange(7, -7, -1.0), 10 + step * np.arange(16))
    distance = 1.5 * np.deg2rad(step) * EARTH_RADIUS / 1000
    near = Neighbourhoods(grid, distance, torch.ones(2, *grid).bool())
    for threshold, expected in {0.5: 0.8823529411764706, 0.8: 0.6916256157635468}.items():
        # The library divides by 9 at the edges, too, where no fraction is above zero.
        one, other = near.mean(torch.from_numpy(fields > threshold), slice(0, 2))
        fss = 1 - ((one - other) ** 2).mean() / (one**2 + other**2).mean()
        assert float(fss) == pytest.approx(expected, rel=1e-6)


def test_quantiles_are_interpolated_between_dates() -> None:
    values = np.arange(24, dtype=np.float32).reshape(1, 24, 1, 1)
    quantiles = Quantiles(np.array([0.0]), values, STANDARD)
    middle = np.array(["2001-01-08T15", "2001-07-02T12"], "M8[h]")
    # Half of the first of 24 parts; halfway through the year between the 12th and the 13th.
    np.testing.assert_allclose(quantiles.at(middle).ravel(), [0, 11.5], atol=0.01)
    # The last and the first date are neighbours.
    np.testing.assert_allclose(quantiles.at(np.array(["2001-01-01"], "M8[h]")).ravel(), [11.5])


def years(count: int, rows: int = 6, columns: int = 8, hours: int = 24) -> xr.Dataset:
    """Temperature at steps of some hours for some years."""
    dates = np.array(["2001-01-01", f"{2001 + count}-01-01"], "M8[h]")
    times = np.arange(*dates, np.timedelta64(hours, "h")).astype("M8[ns]")
    random = np.random.default_rng(3)
    values = 280 + 10 * random.normal(size=(len(times), rows, columns))
    coords = {
        "time": times,
        "latitude": np.linspace(75, -75, rows),
        "longitude": np.arange(columns) * 360 / columns,
    }
    array = xr.DataArray(values.astype("f4"), coords, attrs={"units": "K"})
    return xr.Dataset({"2m_temperature": array})


def daily_forecast(observed: xr.Dataset, members: int) -> xr.Dataset:
    """Forecasts of one and two days from the last dates, near the truth."""
    inits = observed["time"].values[-8:-3]
    leads = np.array([24, 48]) * np.timedelta64(1, "h").astype("m8[ns]")
    valid = xr.DataArray(inits, dims="time") + xr.DataArray(leads, dims="prediction_timedelta")
    made = observed.sel(time=valid).drop_vars("time")
    made = made.assign_coords(time=inits, prediction_timedelta=leads, number=np.arange(members))
    sizes = (members, *made["2m_temperature"].shape)
    noise = 6 * np.random.default_rng(4).normal(size=sizes).astype("f4")
    dims = ("number", *made["2m_temperature"].dims)
    made["2m_temperature"] = made["2m_temperature"] + xr.DataArray(noise, dims=dims)
    made["2m_temperature"].attrs["units"] = "K"
    return made.transpose("number", ...)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two years of a truth, and ensembles of three members from the last of its dates."""
    folder = tmp_path_factory.mktemp("events")
    observed = years(2)
    forecasts.write(observed, folder / "truth.zarr")
    forecasts.write(daily_forecast(observed, 3), folder / "forecast.zarr")
    return folder


@pytest.mark.parametrize("members", [3, 1])
def test_scores_are_those_of_numpy(stores: Path, members: int) -> None:
    observed = years(2)
    made = daily_forecast(observed, 3).isel(number=slice(0, members))
    path = stores / f"{members}.zarr"
    forecasts.write(made if members > 1 else made.isel(number=0), path)
    events = {"2m_temperature": [">285", "<0 degC", ">90%"]}
    card = scored(stores, path, climatology="", events=events, fss=(3000.0,), regions=("tropics",))
    array = observed["2m_temperature"]
    valid = made["time"].values + np.array([24, 48])[:, None] * np.timedelta64(1, "h")
    truth = array.sel(time=xr.DataArray(valid, dims=("lead", "time"))).values  # (L, T, H, W)
    start = array.sel(time=made["time"].values).values
    forecast = made["2m_temperature"].values  # (M, T, L, H, W)
    weights = Grid(array["latitude"].values, array["longitude"].values).weights[:, None]
    limits = quantile_of(array, valid, before=made["time"].values[0])
    [dates] = card.by_date()
    for result, dated, threshold, above in zip(
        card.events, dates.events, (285, 273.15, limits), (True, False, True), strict=True
    ):
        occurs = (lambda x, t: x > t) if above else (lambda x, t: x < t)
        seen = occurs(truth, threshold)
        yes = occurs(np.moveaxis(forecast, 1, 2), threshold).sum(axis=0)
        expected = np.zeros((2, 5, 2, members + 1, 2))
        for lead in range(2):
            limit = threshold[lead] if isinstance(threshold, np.ndarray) else threshold
            again = members * occurs(start, limit)
            for source, count in enumerate((yes[lead], again)):
                for k in range(members + 1):
                    for o in (0, 1):
                        cases = (count == k) & (seen[lead] == o)
                        expected[source, :, lead, k, o] = (weights * cases).sum(axis=(1, 2))
        np.testing.assert_allclose(dated.counts[GLOBAL], expected, rtol=1e-12, atol=1e-12)
        total = expected.sum(axis=1)
        np.testing.assert_allclose(result.counts[GLOBAL], total, rtol=1e-12, atol=1e-12)
        assert result.counts["tropics"].sum() < result.counts[GLOBAL].sum()
        grid = Grid(array["latitude"].values, array["longitude"].values)
        terms = np.zeros((5, 2))
        for time, (one, other) in enumerate(zip(yes[0] / members, seen[0], strict=True)):
            one, other = (brute_force(grid, x, 3000) for x in (one, other))
            terms[time] = [(weights * x).sum() for x in ((one - other) ** 2, one**2 + other**2)]
        np.testing.assert_allclose(dated.fractions[GLOBAL][0, :, 0, 0], terms, rtol=1e-10)
        errors, squares = terms.sum(axis=0)
        fss = result.scores(GLOBAL)["fss_3000km"][0, 0]
        assert fss == pytest.approx(1 - errors / squares, rel=1e-10)
    rows = list(csv.DictReader(card.events_csv().splitlines()))
    assert {row["region"] for row in rows} == {"global", "tropics"}
    hits = [row for row in rows if row["score"] == "hit_rate" and row["event"] == ">285"]
    assert float(hits[0]["value"]) == pytest.approx(
        card.events[0].scores(GLOBAL)["hit_rate"][0, 0], rel=1e-15
    )
    assert {row["score"] for row in rows} >= {"sedi", "fss_3000km"}
    assert ("roc_area" in {row["score"] for row in rows}) == (members > 1)
    page = scorecard_page(card)
    assert "2m temperature &gt;90%" in page
    assert "could not be drawn" not in page
    if members > 1:
        lines = list(csv.DictReader(card.reliability_csv().splitlines()))
        assert len(lines) == 3 * 2 * 4
        shares = [float(line["share"]) for line in lines[:4]]
        assert sum(shares) == pytest.approx(1)


def test_sums_over_some_dates_are_those_of_an_evaluation_of_these(
    stores: Path, tmp_path: Path
) -> None:
    keys = {
        "climatology": "",
        "events": {"2m_temperature": [">285", ">90%"]},
        "fss": (1000.0, 3000.0),
        "regions": ("tropics",),
    }
    card = scored(stores, stores / "forecast.zarr", **keys)
    write_scores_by_date(card, tmp_path)
    # The first dates: quantiles are of all dates before the first forecast.
    dates = card.initial_times[0], card.initial_times[2]
    part = scored(stores, stores / "forecast.zarr", dates=dates, **keys)
    with xr.open_zarr(tmp_path / "scores_by_date.zarr", decode_timedelta=True) as file:
        sources = file.sel(source=["forecast", "persistence"], time=slice(*dates)).load()
    counts, fractions = sources["event_counts"], sources["event_fractions"]
    assert counts.sizes["time"] == 3
    for result in part.events:
        for region in (GLOBAL, "tropics"):
            at = {"event": f"2m_temperature {result.event}", "region": region}
            found = counts.sel(at).sum("time").transpose("source", ..., "members", "observed")
            expected = result.counts[region]
            np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)
            scores = result.scores(region)
            yes = found.sel(members=slice(2, 3)).sum("members")  # of three members two or more
            misses = found.sel(members=slice(0, 1), observed=1).sum("members")
            csi = yes.sel(observed=1) / (yes.sum("observed") + misses)
            np.testing.assert_allclose(csi, scores["csi"], rtol=1e-13)
            probability = found["members"] / 3
            errors = (probability - found["observed"]) ** 2 * found
            kinds = ["members", "observed"]
            brier = errors.sum(kinds) / found.sum(kinds)
            np.testing.assert_allclose(brier, scores["brier"], rtol=1e-12)
            terms = fractions.sel(at).sum("time")
            fss = 1 - terms.sel(term="errors") / terms.sel(term="squares")
            for distance in (1000, 3000):
                one = fss.sel(distance=distance).transpose("source", ...)
                np.testing.assert_allclose(one, scores[f"fss_{distance}km"], rtol=1e-12)


def quantile_of(array: xr.DataArray, valid: np.ndarray, before: np.datetime64) -> np.ndarray:
    """The 90 % quantile of dates before the forecasts, at valid times: `(L, T, H, W)`."""
    by_season = season_quantiles(array[array["time"].values < before])
    limits = np.zeros((*valid.shape, *array.shape[1:]))
    for at, time in np.ndenumerate(valid):
        place = fraction(time) * 24 - 0.5
        low = int(np.floor(place))
        first, second = by_season[low % 24], by_season[(low + 1) % 24]
        limits[at] = first + (place - low) * (second - first)
    return limits


def season_quantiles(array: xr.DataArray) -> list[np.ndarray]:
    """The 90 % quantiles of all dates within 15 days of each of 24 dates."""
    fractions = np.array([fraction(time) for time in array["time"].values])
    centres = (np.arange(24) + 0.5) / 24
    distances = abs((fractions - centres[:, None] + 0.5) % 1 - 0.5) * 365.25
    return [np.quantile(array[distance <= 15.5].values, 0.9, axis=0) for distance in distances]


def fraction(time: np.datetime64) -> float:
    """The part of its year that is over."""
    year = time.astype("M8[Y]")
    start, end = (x.astype("M8[s]") for x in (year, year + 1))
    return float((time.astype("M8[s]") - start) / (end - start))


@pytest.mark.parametrize(
    ("length", "rows", "room", "bands"),
    # Chunks of one hour of the day, of both, longer than a window, of all dates.
    [(1, 6, 64, 1), (8, 6, 144, 1), (8, 6, 48, 3), (100, 2, 140, 3), (2000, 6, 1460, 1)],
)
def test_each_chunk_is_read_once_for_each_band_of_rows(
    tmp_path: Path,
    reads: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    rows: int,
    room: int,
    bands: int,
) -> None:
    """Two years at 0 and 12 UTC, with memory for `room` fields."""
    observed = years(2, hours=12)
    array = observed["2m_temperature"]
    sizes = {"2m_temperature": {"chunks": (length, rows, 8)}}
    path = tmp_path / "truth.zarr"
    observed.to_zarr(path, consolidated=False, encoding=sizes)
    span = ["2001-01-01", "2002-12-31"]
    truth = Store.open(
        DataConfig(
            name="zarr",
            store=str(path),
            prognostic=["2m_temperature"],
            step="12h",
            dates=DatesConfig(train=span, valid=span, test=span),
        )
    )
    field_bytes = 4 * 6 * 8
    monkeypatch.setattr(events, "WINDOW_BYTES", room * field_bytes)
    alive = AliveBytes(monkeypatch)
    valid = array["time"].values[:1].astype("M8[s]")
    parts: list[float] = []
    open_quantiles(
        truth,
        Channel("2m_temperature"),
        0.9,
        valid,
        str(tmp_path / "cache"),
        lambda title, part: parts.append(part),
    )
    times = array["time"].values
    chunks = -(-len(times) // length)
    assert len(reads) == chunks * (6 // rows)
    once = max(1, bands * rows // 6)  # a chunk has rows of so many bands
    for key, count in reads.items():
        held = times[int(key.split("/")[-3]) * length :][:length].astype("M8[M]").astype(int) % 12
        # The windows of the last dates of a year have dates of the first ones, too.
        assert count == once or (count == 2 * once and {*held} & {0, 11})
    assert alive.most <= (room + length) * field_bytes
    assert parts == sorted(parts)
    assert 0 <= parts[0] <= parts[-1] < 1
    (file,) = (tmp_path / "cache").glob("quantiles-*.npy")
    for hour, values in enumerate(np.load(file)):
        np.testing.assert_array_equal(values, np.array(season_quantiles(array[hour::2])))


class AliveBytes:
    """Counts the bytes of fields that stores have read and that are in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._now = 0
        read = Store.read_channels

        def counted(store: Store, *args: Any) -> np.ndarray:
            fields = read(store, *args)
            self._now += fields.nbytes
            self.most = max(self.most, self._now)
            owner = fields if fields.base is None else fields.base
            weakref.finalize(owner, self._free, fields.nbytes)
            return fields

        monkeypatch.setattr(Store, "read_channels", counted)

    def _free(self, size: int) -> None:
        self._now -= size


def test_only_dates_of_the_forecasts_need_a_climate(stores: Path) -> None:
    # Without spring: the forecasts are of December.
    observed = years(2)
    rest = observed.isel(time=(observed["time.month"] != 4).values)
    forecasts.write(rest, stores / "no-april.zarr")
    card = scored(
        stores,
        stores / "forecast.zarr",
        truth=(str(stores / "no-april.zarr"),),
        climatology="",
        events={"2m_temperature": [">90%"]},
    )
    counts = card.events[0].counts[GLOBAL][0, 0]
    assert 0.05 < counts[..., 1].sum() / counts.sum() < 0.2


def test_bad_input_is_one_line(stores: Path) -> None:
    path = stores / "forecast.zarr"
    for event, words in {
        ">99%": "of the climate of 2m_temperature needs 500 dates within 15 days",
        ">1 parsec": "the truth is in K",
    }.items():
        given = {"2m_temperature": [event]}
        assert words in refusal(stores, path, climatology="", events=given)
    assert not list((stores / "cache").glob("*.partial"))
