"""Scores and the example field on several meshes against numpy on the whole store."""

import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from rich.console import Console

from credit_dp.config import Config
from credit_dp.data.grid import row_weights
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData, curve_hours, evaluate, example_map
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.scorecard import MAX_HEADLINES, HeldOutScores, three_digits
from credit_dp.training.forecast_step import EnsembleForecast, ForecastStep
from tests.ranks import on_processes, on_threads
from tests.training.runs import alone, make_config, make_store, tiny_unet

ROWS = 13


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    config = make_config(make_store(folder, ROWS, columns=8), folder / "run")
    prepare_training_data(config.data)
    return config


def rise(x: torch.Tensor) -> torch.Tensor:
    """A model whose every step adds half of the first forcing to the prognostic channels."""
    channels = 7
    return x[:, :channels] * 0 + 0.5 * x[:, channels : channels + 1]


def evaluated(manager: DomainParallelManager, config: Config) -> tuple[HeldOutScores, FieldMap]:
    prepared = prepare_training_data(config.data)
    like = torch.zeros((), dtype=torch.float64)
    dates = HeldOutData(config, prepared, manager.rows(ROWS), like)
    statistics = prepared.statistics
    scale = torch.as_tensor(statistics.tendency_std / statistics.std)[:, None, None]
    rollout = EnsembleForecast(ForecastStep(rise, scale)).rollout
    done: list[int] = []
    scores = evaluate(rollout, dates, manager, 4, done.append)
    assert done[-1] == len(dates.initial_times[manager.dp_rank :: manager.dp_world_size])
    return scores, example_map(rollout, dates, manager)


def test_scores_are_those_of_the_definition(config):
    scores, field = evaluated(alone(), config)
    prepared = prepare_training_data(config.data)
    store, statistics = prepared.store, prepared.statistics
    whole = slice(0, ROWS)
    starts = store.times[(store.times >= np.datetime64("2000-01-04"))][:-2]
    weights = row_weights(store.latitude)[:, None]
    for place, lead in enumerate((1, 2)):
        squares = []
        for start in starts:
            valid = start + lead * np.timedelta64(6, "h")
            forcing = [
                store.read_forcing((start + k * np.timedelta64(6, "h"))[None], whole)[0, 0]
                for k in range(lead)
            ]
            now, truth = store.read_states([start], whole)[0], store.read_states([valid], whole)[0]
            moved = 0.5 * np.sum(forcing, axis=0) * statistics.tendency_std[:, None, None]
            guesses = (now + moved, now, prepared.climatology.field(valid, whole))
            error = np.stack([guess - truth for guess in guesses]).astype(np.float64)
            squares.append((weights * error**2).mean(axis=(2, 3)))
        assert scores.rmse[:, place] == pytest.approx(np.sqrt(np.mean(squares, axis=0)), rel=1e-5)
    assert scores.samples == len(starts)
    assert scores.hours == (6, 12)
    assert scores.channels[0] == "geopotential_500"
    valid = starts[0] + np.timedelta64(12, "h")
    assert field.truth == pytest.approx(store.read_states([valid], whole)[0][0], rel=1e-6)
    # Written as JSON, flat numbers and a table.
    rmse = json.loads(scores.to_json(3))["rmse"]
    value = float(scores.rmse[1, 0, 2])
    assert rmse[scores.channels[2]]["6h"]["persistence"] == value
    assert scores.scalars()[f"rmse/{scores.channels[2]}/6h/persistence"] == value
    (table,) = scores.tables(80)
    assert (table.row_count, len(table.columns)) == (MAX_HEADLINES, 2 + 2 * 3)
    # All of them as a table: sources and lead times of each field.
    rows = [*csv.DictReader(io.StringIO(scores.to_csv()))]
    assert len(rows) == scores.rmse.size
    (row,) = (
        row
        for row in rows
        if (row["field"], row["lead_hours"], row["of"]) == (scores.channels[2], "6", "persistence")
    )
    assert (row["score"], float(row["value"])) == ("rmse", value)


def rise_after_two(x: torch.Tensor) -> torch.Tensor:
    """Like `rise`, for two states; only the newest one may be used."""
    return rise(x[:, 7:])


def test_several_states_start_later_and_score_by_the_newest(config):
    prepared, like = prepare_training_data(config.data), torch.zeros((), dtype=torch.float64)
    several = replace(config, model=tiny_unet(frames=2))
    one, two = (HeldOutData(c, prepared, slice(0, ROWS), like) for c in (config, several))
    assert two.initial_times.tolist() == one.initial_times[1:].tolist()
    before = prepared.store.chunk_reads
    starts = two.initial_states(two.initial_times[:3])
    # Four times in two chunks of rows each, of three variables.
    assert prepared.store.chunk_reads - before == 4 * 2 * 3
    assert torch.equal(starts[:, 7:], one.initial_states(two.initial_times[:3]))
    assert torch.equal(starts[:, :7], one.initial_states(one.initial_times[:3]))
    scale = torch.ones(7, 1, 1, dtype=torch.float64)
    one.initial_times = two.initial_times
    steps = [EnsembleForecast(ForecastStep(model, scale)) for model in (rise, rise_after_two)]
    runs = ((steps[0], one), (steps[1], two))
    a, b = (evaluate(step.rollout, dates, alone(), 4, lambda _: None) for step, dates in runs)
    assert np.array_equal(a.rmse, b.rmse)
    maps = [example_map(step.rollout, dates, alone()) for step, dates in runs]
    assert np.array_equal(maps[0].forecast, maps[1].forecast)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "domain"),
    [(3, 3), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_any_mesh_scores_the_same(config, ranks, domain):
    wanted, field = evaluated(alone(), config)
    if ranks == domain:
        ranks_found = on_threads(ranks, evaluated, config)
    else:
        ranks_found = on_processes(ranks, evaluated, config, domain=domain)
    for scores, found in ranks_found:
        assert scores.rmse == pytest.approx(wanted.rmse, rel=1e-12)
        assert found.bounds[0] == 0
        assert len(found.bounds) == domain + 1
    _, found = ranks_found[0]
    assert found.forecast == pytest.approx(field.forecast, rel=1e-12)
    assert found.truth == pytest.approx(field.truth, rel=1e-12)


def test_curves_have_a_point_at_each_step_or_at_most_twelve_between_those_requested() -> None:
    for hours, step, expected in (
        ((6, 24), 6, (6, 12, 18, 24)),
        ((6,), 6, (6,)),
        ((72,), 6, tuple(range(6, 73, 6))),
        ((6, 78), 6, (6, 12, 24, 36, 48, 60, 72, 78)),
        ((24, 72, 120, 240), 6, tuple(range(24, 241, 24))),
        ((1, 2), 1, (1, 2)),
    ):
        assert curve_hours(hours, step) == expected


def test_tables_and_loggers_have_the_lead_times_that_were_requested() -> None:
    rmse = np.arange(12.0).reshape(3, 4, 1) + 1
    scores = HeldOutScores(("x",), ("K",), (6, 12, 18, 24), {"rmse": rmse}, 2, shown_hours=(6, 24))
    assert set(scores.scalars()) == {
        f"rmse/x/{hours}h/{source}"
        for hours in (6, 24)
        for source in ("model", "persistence", "climatology")
    }
    (table,) = scores.tables(80)
    assert [str(column.header).split()[0] for column in table.columns[2:]] == ["6"] * 3 + ["24"] * 3
    assert list(json.loads(scores.to_json(1))["rmse"]["x"]) == ["6h", "12h", "18h", "24h"]


def test_numbers_stay_short_and_none_is_cut_off_where_many_lead_times_do_not_fit():
    numbers = (0.000123456, 0.00123456, 0.5, 12.345, 999.4, 999.6, 1036.4, 123456.0, 12345678.0)
    shown = ["1.23e-4", "0.00123", "0.5", "12.3", "999", "1000", "1036", "123456", "1.23e+07"]
    assert [three_digits(number) for number in numbers] == shown
    channels = ("10m_u_component_of_wind", "specific_humidity_700")
    rmse = np.arange(1.0, 19).reshape(3, 3, 2) / 8 + 100
    rmse[:, :, 1] *= 1e-6
    scores = HeldOutScores(channels, ("m s**-1", "kg kg**-1"), (6, 24, 72), {"rmse": rmse}, 5)
    for width, shown_leads in ((80, [0, 2]), (60, [2])):
        text = io.StringIO()
        console = Console(file=text, width=width)
        (table,) = scores.tables(console.width)
        console.print(table)
        printed = text.getvalue()
        assert "…" not in printed, width
        assert "kg kg⁻¹" in printed, width
        found = sorted(re.findall(r"\b1\d\d\b(?! ini)|1\.\d\de-4", printed))
        assert found == sorted(map(three_digits, rmse[:, shown_leads].ravel())), width
        named = [hours for hours in (6, 24, 72) if f" {hours} h" in printed]
        assert named == [scores.hours[lead] for lead in shown_leads], width


def test_the_table_at_the_end_of_a_run_is_short():
    """Of 34 fields at ten lead times, headline fields at the first and the last."""
    levels = (50, 100, 250, 500, 700, 850, 925, 1000)
    names = [f"{name}_{level}" for name in ("geopotential", "temperature") for level in levels]
    names += [f"specific_humidity_{level}" for level in levels]
    names += [f"field{number}" for number in range(10)]
    hours = tuple(range(24, 264, 24))
    rmse = np.ones((3, len(hours), len(names)))
    scores = HeldOutScores(tuple(names), ("m",) * len(names), hours, {"rmse": rmse}, 5)
    text = io.StringIO()
    console = Console(file=text, width=80)
    for table in scores.tables(80):
        console.print(table)
    lines = text.getvalue().splitlines()
    assert len(lines) <= 15
    assert "6 of 34 fields" in lines[0]
    assert [line.split()[0] for line in lines[-6:]] == [
        *("geopotential_50", "geopotential_100", "geopotential_250"),
        *("geopotential_500", "temperature_850", "specific_humidity_700"),
    ]


@pytest.mark.slow
def test_units_are_those_of_the_store_where_it_gives_them(tmp_path):
    path = make_store(tmp_path, ROWS, columns=8)
    data = xr.open_zarr(path, chunks=None, consolidated=False).load()
    data["geopotential"].attrs["units"] = "m**2 s**-2"
    data.to_zarr(tmp_path / "units.zarr", zarr_format=3, consolidated=False)
    scores, field = evaluated(alone(), make_config(tmp_path / "units.zarr", tmp_path / "run"))
    units = json.loads(scores.to_json(3))["units"]
    assert field.unit == units["geopotential_500"] == "m**2 s**-2"
    assert units["temperature_500"] == "K"


def test_reading_is_limited_to_own_rows(config):
    prepared = prepare_training_data(config.data)
    dates = HeldOutData(config, prepared, slice(8, 13), torch.zeros(()))
    before = prepared.store.bytes_read
    fields = dates.states(dates.initial_times[:1])
    assert fields.shape == (1, 7, 5, 8)
    # Chunks of 8 rows: the second one holds rows 8 to 12 and is stored at full size.
    assert prepared.store.bytes_read - before == 7 * 8 * 8 * 4


def scores_of(rmse: np.ndarray) -> HeldOutScores:
    return HeldOutScores(("t_500", "2m_temperature"), ("K", "K"), (6, 24), {"rmse": rmse}, 3)


def test_a_score_that_is_not_finite_is_an_error():
    scores_of(np.ones((3, 2, 2))).check()
    for index, (source, value, advice) in enumerate(
        (
            ("model", np.inf, "trainer.rollout"),
            ("persistence", np.nan, "dates.test"),
            ("climatology", np.nan, "dates.train"),
        )
    ):
        rmse = np.ones((3, 2, 2))
        rmse[index, 1, 1] = value
        with pytest.raises(UserError, match=advice) as caught:
            scores_of(rmse).check()
        start = f"2m_temperature: the RMSE of the {source} at 24 h is {value}."
        assert str(caught.value).startswith(start)


def test_a_baseline_without_any_error_is_warned_of():
    rmse = np.ones((3, 2, 2))
    rmse[0] = 0  # a model without error is no reason to warn
    assert scores_of(rmse).warnings() == []
    rmse[1, :, 1] = rmse[2, 1, 0] = 0
    assert [line.partition(". ")[0] for line in scores_of(rmse).warnings()] == [
        "t_500: the RMSE of climatology is exactly 0 at 24 h",
        "2m_temperature: the RMSE of persistence is exactly 0 at 6 h",
    ]
