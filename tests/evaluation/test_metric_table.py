"""An entry of the table of metrics appears in all files and pages, of stores and of runs."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.cli.evaluate import comparison_lines, summary_lines
from credit_dp.config import Config
from credit_dp.data.grid import row_weights
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.comparison import compare, comparison_page, read_result
from credit_dp.evaluation.held_out import HeldOutData, evaluate
from credit_dp.evaluation.metric_table import METRICS, SOURCES, Better, Metric, over_area
from credit_dp.evaluation.metrics import AreaMean
from credit_dp.evaluation.score_folder import scorecard_page
from credit_dp.evaluation.scorecard import HeldOutScores, Scorecard
from credit_dp.training.forecast_step import EnsembleForecast, ForecastStep
from tests.evaluation import forecasts
from tests.ranks import on_threads
from tests.training.runs import alone, make_config, make_store

ROWS = 13
DOCS = Path(__file__).parents[2] / "docs/evaluating.md"
ABSOLUTE_ERROR = Metric(
    name="mae",
    label="MAE",
    title="Mean absolute error",
    explanation="Weighted by area.",
    better=Better.SMALLER,
    accumulator=over_area(AreaMean),
    inputs=lambda fields, source: (fields.error(source).abs(),),
    in_terminal=True,
    in_runs=True,
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a metric to the table; return its name."""
    monkeypatch.setitem(METRICS, ABSOLUTE_ERROR.name, ABSOLUTE_ERROR)
    return ABSOLUTE_ERROR.name


@pytest.fixture
def card(folder: Path, tmp_path: Path, added: str) -> Scorecard:
    """The scores of forecasts, with the metric that was added."""
    single = forecasts.without_members(forecasts.forecast(forecasts.truth(), members=1))
    path = forecasts.write(single, tmp_path / "f.zarr")
    return forecasts.scored(folder, path, variables=("2m_temperature",))


@pytest.mark.slow
def test_an_added_metric_is_in_the_files_and_on_the_page(card: Scorecard, added: str) -> None:
    assert card.scores[added].shape == card.scores["rmse"].shape
    assert np.all(card.scores[added][:, 1:] <= card.scores["rmse"][:, 1:])
    content = json.loads(card.to_json())["scores"]["2m_temperature"][added]["24h"]
    assert content == {s: card.scores[added][i, 2, 0] for i, s in enumerate(SOURCES)}
    rows = [row for row in csv.DictReader(card.to_csv().splitlines()) if row["score"] == added]
    assert [(row["of"], float(row["value"])) for row in rows[-3:]] == list(content.items())
    page = scorecard_page(card)
    assert f'<table id="{added}">' in page
    assert f'<h2 id="section-{added}">Mean absolute error</h2>' in page
    assert "Weighted by area. Smaller is better; the best of each lead time is bold." in page
    assert any("MAE persist." in line for line in summary_lines(card))


def test_an_added_metric_is_compared(card: Scorecard, added: str, tmp_path: Path) -> None:
    scores = {**card.scores, added: card.scores[added] * np.array([0.5, 1, 1])[:, None, None]}
    results = []
    tropics = {"regions": {"tropics": scores}}
    for name, one in (
        ("old", replace(card, **tropics)),
        ("<i>new", replace(card, scores=scores, **tropics)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(one.to_json())
        results.append(read_result(tmp_path / name, name))
    comparison = compare(results)
    assert comparison.scores == ("rmse", "acc", "crps", added, "bias", "activity")
    assert comparison.wins(added) == (0, 2)  # at lead time 0 both have no error
    rows = list(csv.DictReader(comparison.to_csv().splitlines()))
    of_region = [row for row in rows if row["region"] == "tropics" and row["score"] == added]
    assert [row["old"] for row in of_region] == [row["<i>new"] for row in of_region]
    assert len(of_region) == 3
    page = comparison_page(comparison)
    assert f'<table id="{added}">' in page
    assert 'alt="Mean absolute error by lead time"' in page
    assert "&lt;i&gt;new" in page
    assert "<i>" not in page
    assert any(line.startswith("MAE") for line in comparison_lines(comparison))


def test_the_docs_say_what_each_metric_is() -> None:
    text = DOCS.read_text()
    assert [name for name in METRICS if f"\n| `{name}` | " not in text] == []


def test_a_better_forecast_has_a_smaller_cost() -> None:
    for better, scores, cost in (
        (Better.SMALLER, {"forecast": -2.0}, -2.0),
        (Better.LARGER, {"forecast": 0.5}, -0.5),
        (Better.CLOSER_TO_ZERO, {"forecast": -2.0}, 2.0),
        (Better.CLOSER_TO_ONE, {"forecast": 0.75}, 0.25),
        (Better.CLOSER_TO_TRUTH, {"forecast": 3.0, "truth": 5.0}, 2.0),
        (Better.CLOSER_TO_TRUTH, {"forecast": 3.0}, None),
        (Better.UNDECIDED, {"forecast": 3.0}, None),
    ):
        assert better.cost(scores) == cost, (better, scores)


def rise(x: torch.Tensor) -> torch.Tensor:
    """A model whose every step adds a tenth to all channels."""
    return x[:, :7] * 0 + 0.1


def evaluated(manager: DomainParallelManager, config: Config) -> HeldOutScores:
    like = torch.zeros((), dtype=torch.float64)
    dates = HeldOutData(config, prepare_training_data(config.data), manager.rows(ROWS), like)
    step = ForecastStep(rise, torch.ones(7, 1, 1, dtype=torch.float64))
    rollout = EnsembleForecast(step).rollout
    return evaluate(rollout, dates, manager, 4, lambda _: None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("metrics")
    return make_config(make_store(folder, ROWS, columns=8), folder / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_an_added_metric_is_a_final_score_of_runs(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric with its own accumulator, on any number of bands."""
    assert set(evaluated(alone(), config).scores) == {"rmse", "mae"}
    for name, metric in METRICS.items():
        monkeypatch.setitem(METRICS, name, replace(metric, in_runs=True))
    scores = evaluated(alone(), config)
    scores.check()
    channel, last = scores.channels[0], f"{scores.hours[-1]}h"
    assert scores.scalars()[f"mae/{channel}/{last}/model"] == scores.scores["mae"][0, -1, 0]
    (tmp_path / "metrics.json").write_text(scores.to_json(1))
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    keys = read_result(tmp_path, "run").scores
    computed = {name for name, metric in METRICS.items() if metric.accumulator is not None}
    assert {key.score for key in keys} == computed
    # One member: the mean absolute error, and no spread.
    assert scores.scores["crps"] == pytest.approx(scores.scores["mae"], rel=1e-9)
    assert np.all(scores.scores["spread"] == 0)
    check_definitions(scores, config)
    for shared in on_threads(2, evaluated, config):
        for name, values in scores.scores.items():
            assert shared.scores[name] == pytest.approx(values, rel=1e-9, abs=1e-9), name


def check_definitions(scores: HeldOutScores, config: Config) -> None:
    """Compare scores at the first lead time with those of the whole store's fields."""
    prepared = prepare_training_data(config.data)
    store, whole = prepared.store, slice(0, ROWS)
    weights = row_weights(store.latitude)[:, None]
    weights = weights / weights.mean()
    starts = store.times[store.times >= np.datetime64("2000-01-04")][:-2]
    assert len(starts) == scores.samples
    valid = starts + np.timedelta64(scores.hours[0], "h")
    start, truth = (store.read_states(times, whole).astype("f8") for times in (starts, valid))
    normal = np.stack([prepared.climatology.field(time, whole) for time in valid])
    one, two = start - normal, truth - normal
    bias = (weights * (start - truth)).mean(axis=(0, 2, 3))
    activity = np.sqrt((weights * two**2).mean(axis=(0, 2, 3)))
    product = (weights * one * two).mean(axis=(2, 3))
    squares = (weights * one**2).mean(axis=(2, 3)) * (weights * two**2).mean(axis=(2, 3))
    acc = (product / np.sqrt(squares)).mean(axis=0)
    # Index 1 is persistence, for the activity the truth. A bias is a small difference of fields.
    assert scores.scores["bias"][1, 0] / activity == pytest.approx(bias / activity, abs=1e-5)
    assert scores.scores["activity"][1, 0] == pytest.approx(activity, rel=1e-5)
    assert scores.scores["acc"][1, 0] == pytest.approx(acc, abs=1e-5)
