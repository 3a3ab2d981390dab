"""Scores of forecasts that are not written are those of the same forecasts when they are."""

import io
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credit_dp.config import Config
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.thread_ranks import RankError
from credit_dp.errors import UserError
from credit_dp.evaluation.alignment import ScoreRequest
from credit_dp.evaluation.events import EventResult
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.score import score
from credit_dp.evaluation.scorecard import Scorecard
from credit_dp.files import partial_path
from credit_dp.forecast import score_forecasts
from credit_dp.forecast.make_forecasts import open_store
from credit_dp.forecast.score_forecasts import ForecastScorer, ScoredForecastConfig, complete_times
from credit_dp.training.console import Screen
from tests.data import stores
from tests.forecast.runs import ROWS, forecast, forecast_config, train_ensemble
from tests.ranks import on_threads

ENSEMBLE = {"members": 3, "perturb": 0.1, "init": "2000-01-04/2000-01-05/12h", "lead": "18h"}

EVENTS = {"2m_temperature": [">280", "<275", ">50%"], "temperature": ["<265", "<40%"]}
TRUTH = "truth.zarr"


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of an ensemble with noise, and a truth that is long enough for quantiles."""
    config = train_ensemble(tmp_path_factory.mktemp("noisy"))
    truth = stores.dataset(ROWS, 16, steps=96)
    truth = truth.assign_coords(time=truth["time"] - np.timedelta64(12, "D"))
    stores.write(truth, Path(config.data.stores[0]).with_name(TRUTH))
    return config


def scored_config(config: Config, out: Path, **changes: Any) -> ScoredForecastConfig:
    """Forecasts of the run that are scored at two lead times."""
    asked = forecast_config(config, out, **changes)
    values = {field.name: getattr(asked, field.name) for field in fields(asked)}
    truth = Path(config.data.stores[0]).with_name(TRUTH)
    keys: dict[str, Any] = {"regions": ("tropics",), "events": EVENTS, "fss": (1500.0, 4000.0)}
    cache = str(truth.with_name("cache"))
    request = ScoreRequest("run", (str(truth),), cache, hours=(6, 18), **keys)
    return ScoredForecastConfig(**values, score=request)


def on_rank(manager: DomainParallelManager, config: ScoredForecastConfig) -> Scorecard | None:
    return score_forecasts.score_forecasts(config, manager, torch.device("cpu"), Screen(None))


def assert_same(found: Scorecard, expected: Scorecard) -> None:
    """Compare all numbers of two scorecards."""
    assert found.initial_times == expected.initial_times
    assert found.hours == expected.hours
    assert found.units == expected.units
    for one, other in zip(found.by_date(), expected.by_date(), strict=True):
        assert one.times == other.times
        for region, means in other.means.items():
            for name, values in means.items():
                np.testing.assert_allclose(one.means[region][name], values, rtol=1e-6, atol=1e-9)
        assert_same_events(one.events, other.events)
    for name, values in expected.scores.items():
        np.testing.assert_allclose(found.scores[name], values, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.spectra, expected.spectra, rtol=1e-6)
    np.testing.assert_allclose(found.rank_histograms, expected.rank_histograms, atol=1e-4)
    assert_same_events(found.events, expected.events)
    for event in expected.events:
        assert (event.counts["global"][0].sum(axis=(0, 2)) > 0).all()  # each number of members
    for one, other in zip(found.maps, expected.maps, strict=True):
        np.testing.assert_allclose(one.rmse, other.rmse, rtol=1e-5, atol=1e-9)


def assert_same_events(found: Sequence[EventResult], expected: Sequence[EventResult]) -> None:
    for event, same in zip(found, expected, strict=True):
        for region, counts in same.counts.items():
            np.testing.assert_array_equal(event.counts[region], counts)
            np.testing.assert_allclose(
                event.fractions[region], same.fractions[region], rtol=1e-12, atol=1e-12
            )


@pytest.fixture(scope="module")
def expected(noisy: Config, tmp_path_factory: pytest.TempPathFactory) -> Scorecard:
    """The scores of the same forecasts, which one process writes before they are scored."""
    folder = tmp_path_factory.mktemp("stored")
    store = forecast(forecast_config(noisy, folder / "forecast.zarr", **ENSEMBLE))
    request = replace(scored_config(noisy, folder / "out").score, forecast=str(store))
    return score(request, ForecastStore.open(str(store)), lambda title, part: None)


@pytest.mark.parametrize("ranks", [1, 3])
def test_scores_are_those_of_stored_forecasts(
    noisy: Config, expected: Scorecard, ranks: int, tmp_path: Path
) -> None:
    card, *_ = on_threads(ranks, on_rank, scored_config(noisy, tmp_path / "scores", **ENSEMBLE))
    assert card is not None
    assert_same(card, expected)
    names = {path.name for path in (tmp_path / "scores").iterdir()}
    assert {"scores.csv", "scorecard.html", "scores_by_date.zarr"} <= names
    assert not partial_path(tmp_path / "scores").exists()


def test_a_killed_run_continues_on_another_mesh(
    noisy: Config, expected: Scorecard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scored_config(noisy, tmp_path / "scores", **ENSEMBLE)
    scored: list[tuple[int, int]] = []
    original = ForecastScorer._score

    def fail_at_the_third(self: ForecastScorer, start: int, lead: int, values: Any) -> None:
        if len(scored) == 3:
            raise OSError("killed")
        original(self, start, lead, values)
        scored.append((start, lead))

    monkeypatch.setattr(score_forecasts, "SAVE_SECONDS", 0)
    monkeypatch.setattr(ForecastScorer, "_score", fail_at_the_third)
    with pytest.raises(RankError, match="killed"):
        on_threads(1, on_rank, config)
    before, scored[:] = [*scored], []
    [dates] = (partial := partial_path(tmp_path / "scores")).glob("*.dates")
    [sums] = partial.glob("*.npz")
    kept = sums.read_bytes()
    (partial / "unsaved.dates").touch()  # of a rank that was killed before it saved
    with monkeypatch.context() as patch:
        patch.setattr(ForecastScorer, "run", None)  # what can't be resumed is refused before
        dates.rename(tmp_path / "moved")
        with pytest.raises(RankError, match=r"can't be read .*\.dates.*Remove .* to start over"):
            on_threads(1, on_rank, config)
        assert not (partial / "unsaved.dates").exists()
        (tmp_path / "moved").rename(dates)
        sums.write_bytes(b"")
        with pytest.raises(RankError, match=r"npz: can't be read .* to start over"):
            on_threads(1, on_rank, config)
        state = dict(np.load(io.BytesIO(kept)))
        np.savez(sums, **state | {"shape": state["shape"] + 1})
        with pytest.raises(RankError, match=r"partial: was begun by another version. Remove it"):
            on_threads(1, on_rank, config)
        sums.write_bytes(kept)

    def note(self: ForecastScorer, start: int, lead: int, values: Any) -> None:
        original(self, start, lead, values)
        scored.append((start, lead))

    monkeypatch.setattr(ForecastScorer, "_score", note)
    card, *_ = on_threads(3, on_rank, config)
    assert len(before) == 3
    assert sorted([*before, *scored]) == [(time, lead) for time in range(3) for lead in range(2)]
    assert_same(card, expected)


def test_other_settings_are_not_mixed(
    noisy: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ForecastScorer, start: int, lead: int, values: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(ForecastScorer, "_score", fail)
    with pytest.raises(RankError, match="killed"):
        on_threads(1, on_rank, scored_config(noisy, tmp_path / "scores", **ENSEMBLE))
    other = scored_config(noisy, tmp_path / "scores", **ENSEMBLE | {"perturb": 0.2})
    with pytest.raises(RankError, match=r"was begun with perturb=0.1, not 0.2"):
        on_threads(1, on_rank, other)


def test_dates_without_states_are_left_out(noisy: Config, tmp_path: Path) -> None:
    keys = ENSEMBLE | {"init": "2000-01-01/2000-01-02/12h"}
    config = scored_config(noisy, tmp_path / "scores", **keys)
    store = open_store(config, lambda title, part: None)
    first = store.times[0]
    assert complete_times(config, store).min() == first
    # The last forecasts need a truth that the store has.
    last = store.times[-1] - np.timedelta64(18, "h")
    late = replace(config.request, init=f"{first}/{store.times[-1]}/6h")
    config = replace(config, request=late, score=replace(config.score, truth=()))
    assert complete_times(config, store).max() == last
    too_late = replace(late, init=str(store.times[-1] - np.timedelta64(12, "h")))
    with pytest.raises(UserError, match=r"^dates: needs initial times whose forecasts can be"):
        complete_times(replace(config, request=too_late), store)
    unknown = replace(late, init="1950-01-01")
    with pytest.raises(UserError, match=r"^dates: needs a state at 1950.* Change dates or data"):
        complete_times(replace(config, request=unknown), store)
