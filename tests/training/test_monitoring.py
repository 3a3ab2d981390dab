"""What is watched while a run trains: the validation on any mesh, and batches of `one_batch`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from credit_dp.config import Config
from credit_dp.data.sampling import evenly_spaced_indices
from credit_dp.data.setup import prepare_training_data
from credit_dp.distributed.launcher import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData, last_forecast
from credit_dp.evaluation.metric_table import METRICS
from credit_dp.training.console import Screen
from credit_dp.training.monitoring import (
    MAX_INITIAL_TIMES,
    TrainingMonitor,
    Validation,
    check_validation_scores,
    mean_cost,
    repeat_first_batch,
)
from credit_dp.training.run import run
from tests.data import stores
from tests.ranks import on_processes
from tests.training.refusals import refusal
from tests.training.runs import (
    alone,
    built,
    make_config,
    make_store,
    step_records,
    tiny_crossformer,
    weights,
)

ROWS = 12


@pytest.fixture
def config(tmp_path):
    model = tiny_crossformer(stochastic_depth=0.3)
    config = make_config(
        make_store(tmp_path, ROWS), tmp_path / "run", model, steps=3, validate_every=1
    )
    dates = replace(config.data.dates, valid=["2000-01-03T12", "2000-01-05T18"])
    ema = replace(config.optimizer, ema=0.9)
    return replace(config, data=replace(config.data, dates=dates), optimizer=ema)


def validated(manager: DomainParallelManager, config: Config) -> float:
    """Return the RMSE of untrained weights."""
    training = built(config, manager)
    training.loader.close()
    return Validation(config, prepare_training_data(config.data), training, manager)()[
        "validation_rmse"
    ]


def trained(config: Config, validates: bool) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Return weights, random state and validation scores after a run."""
    training = built(config, alone())
    prepared = prepare_training_data(config.data)
    validation = Validation(config, prepared, training, alone()) if validates else None
    watch = TrainingMonitor(config, training, Screen(None), validation, None)
    found = []
    with training.loader:
        for record in step_records(training, watch.batches()):
            torch.rand(())  # whoever draws outside of a step draws the same, too
            numbers = watch.on_step_end(record)
            found += [numbers[name] for name in ("validation_rmse",) if name in numbers]
            assert all(part.training for part in training.trainer.state.parts)
    return weights(training), torch.get_rng_state(), found


@pytest.mark.slow
def test_training_does_not_notice_it(config):
    without, with_it = trained(config, False), trained(config, True)
    assert torch.equal(without[0], with_it[0])
    assert torch.equal(without[1], with_it[1])
    assert (len(without[2]), len(set(with_it[2]))) == (0, 3)


@pytest.mark.slow
def test_the_validation_is_the_mean_of_normalised_rmse(config):
    training = built(config, alone())
    training.loader.close()
    prepared = prepare_training_data(config.data)
    validation = Validation(config, prepared, training, alone())
    dates = validation.dates[""]
    assert 1 < len(dates.initial_times) <= MAX_INITIAL_TIMES
    assert dates.hours == (6,)
    training.trainer.state.train(False)
    ahead = np.timedelta64(6, "h")
    with torch.no_grad():
        starts, statics = (
            dates.initial_states(dates.initial_times),
            dates.static(len(dates.initial_times)),
        )
        forcing = dates.forcing(dates.initial_times)
        (made,) = training.forecast_step.rollout(starts, [forcing], statics)
        squares = (made - dates.fields(dates.initial_times + ahead)).square()
    area = np.cos(np.deg2rad(prepared.store.latitude))
    rows = torch.as_tensor(area / area.sum()).to(squares)
    by_field = (squares.mean(-1) * rows).sum(-1).mean(0).sqrt()
    # The weights by area are those of the grid's cells, which are close to the cosine.
    assert validation()["validation_rmse"] == pytest.approx(float(by_field.mean()), rel=1e-2)
    training.trainer.state.train()


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["acc", pytest.param("bias", marks=pytest.mark.exhaustive)])
def test_a_metric_of_runs_is_one_of_their_validation(config, monkeypatch, metric):
    training = built(config, alone())
    training.loader.close()
    prepared = prepare_training_data(config.data)
    validation = Validation(config, prepared, training, alone())
    assert set(validation()) == {"validation_rmse"}
    monkeypatch.setitem(METRICS, metric, replace(METRICS[metric], in_runs=True))
    found = validation()
    assert set(found) == {"validation_rmse", f"validation_{metric}"}
    dates = validation.dates[""]
    training.trainer.state.train(False)
    rows = dates.area_weights.double()[:, None]
    rows = rows / rows.mean()
    scores = []
    with training.trainer.state.eval_mode(), torch.no_grad():
        for time in dates.initial_times[:, None]:
            forecast = last_forecast(validation.rollout, dates, time)[:, 0].double()
            valid_time = time + np.timedelta64(6, "h")
            truth, usual = dates.fields(valid_time), dates.climatology(valid_time)
            if metric == "bias":
                score = ((forecast - truth) * rows).mean(dim=(-2, -1))
            else:
                a, b = forecast - usual, truth - usual
                product, *squares = (
                    (x * rows).mean(dim=(-2, -1)) for x in (a * b, a.square(), b.square())
                )
                score = product / (squares[0] * squares[1]).sqrt()
            scores.append(score.mean())
    wanted = float(torch.stack(scores).mean())
    assert found[f"validation_{metric}"] == pytest.approx(wanted, rel=1e-5, abs=1e-8)


WEIGHTS = {"acc": 1.0, "bias": 0.5, "activity": 0.25}
PARTS = {
    "early": ["2000-01-03T12", "2000-01-04T12"],
    "late": ["2000-01-05", "2000-01-05T18"],
}


def weighed(config: Config) -> Config:
    """Return the config with scores and parts of the validation dates."""
    keys = {"validation_scores": WEIGHTS, "validation_dates": PARTS}
    return replace(config, trainer=replace(config.trainer, **keys))


def scores_by_formula(validation: Validation, dates: HeldOutData) -> dict[str, float]:
    """Return the means over the channels of the scores, in standard deviations."""
    times = dates.initial_times
    forecast = last_forecast(validation.rollout, dates, times)[:, 0].double().numpy()
    valid_times = times + np.timedelta64(6, "h")
    truth, usual = (
        x.double().numpy() for x in (dates.fields(valid_times), dates.climatology(valid_times))
    )
    area = dates.area_weights.double().numpy()[:, None]
    area = area / area.mean()

    def mean(fields: np.ndarray) -> np.ndarray:
        return np.asarray((fields * area).mean(axis=(-2, -1)))

    a, b = forecast - usual, truth - usual
    correlation = mean(a * b) / np.sqrt(mean(a * a) * mean(b * b))
    activity = np.sqrt(mean(a * a).mean(0)) - np.sqrt(mean(b * b).mean(0))
    return {
        "rmse": float(np.sqrt(mean((forecast - truth) ** 2).mean(0)).mean()),
        "acc": float(correlation.mean(0).mean()),
        "bias": float(np.abs(mean(forecast - truth).mean(0)).mean()),
        "activity": float(np.abs(activity).mean()),
    }


@pytest.mark.slow
def test_the_validation_error_is_the_weighted_sum_of_scores_of_all_parts(config):
    config = weighed(config)
    training = built(config, alone())
    training.loader.close()
    validation = Validation(config, prepare_training_data(config.data), training, alone())
    assert {name: len(d.initial_times) for name, d in validation.dates.items()} == {
        "early": 4,
        "late": 3,
    }
    found = validation()
    with training.trainer.state.eval_mode(), torch.no_grad():
        wanted = {
            part: scores_by_formula(validation, dates) for part, dates in validation.dates.items()
        }
    for scores in wanted.values():
        scores["error"] = -scores["acc"] + 0.5 * scores["bias"] + 0.25 * scores["activity"]
    assert len(found) == 15
    for name in ("rmse", *WEIGHTS, "error"):
        for part, scores in wanted.items():
            assert found[f"validation_{name}/{part}"] == pytest.approx(scores[name], rel=1e-6)
        mean = (wanted["early"][name] + wanted["late"][name]) / 2
        assert found[f"validation_{name}"] == pytest.approx(mean, rel=1e-6)

    rollout = validation.rollout

    def one_channel_is_nan(*arguments):
        for fields in rollout(*arguments):
            fields[:, :, 1] = torch.nan
            yield fields

    validation.rollout = one_channel_is_nan
    assert np.isnan(validation()["validation_error"])


def all_scores(manager: DomainParallelManager, config: Config) -> dict[str, float]:
    training = built(config, manager)
    training.loader.close()
    return dict(Validation(config, prepare_training_data(config.data), training, manager)())


@pytest.mark.slow
def test_uneven_bands_find_the_scores_of_one_rank(tmp_path):
    config = make_config(make_store(tmp_path, 32), tmp_path / "run", validate_every=1)
    dates = replace(config.data.dates, valid=["2000-01-03T12", "2000-01-05T18"])
    config = weighed(replace(config, data=replace(config.data, dates=dates)))
    whole = all_scores(alone(), config)
    for found in on_processes(3, all_scores, config):
        assert found == pytest.approx(whole, rel=1e-9, abs=1e-12)


def test_fields_without_the_score_are_left_out_of_the_mean():
    nan, acc = torch.nan, METRICS["acc"]
    rmse = replace(METRICS["rmse"], sources=("forecast",))
    correlations = torch.tensor([[[0.5, nan, 0.75]], [[nan, nan, nan]]])
    assert mean_cost(acc, correlations) == -0.625
    assert np.isnan(mean_cost(acc, correlations.flip(0)))
    assert np.isnan(mean_cost(rmse, correlations[:1]))


def test_scores_that_a_validation_cannot_have_are_refused(config):
    for name, line in (
        ("ac", r"needs one of rmse, acc, bias, .*, got 'ac'\. Did you mean acc\?$"),
        ("seeps", "needs one of .* got 'seeps'"),
        ("spread", "needs one of .* got 'spread'"),
        ("energy_score", "energy_score needs several members, .*trainer.evaluate_members"),
    ):
        trainer = replace(config.trainer, validation_scores={name: 1.0})
        with pytest.raises(UserError, match=rf"^trainer\.validation_scores: {line}") as error:
            check_validation_scores(trainer)
        assert "\n" not in str(error.value)
    check_validation_scores(replace(trainer, evaluate_members=2))


@pytest.mark.slow
def test_bands_find_what_one_rank_finds(config):
    whole = validated(alone(), config)
    assert on_processes(2, validated, config) == pytest.approx([whole] * 2, rel=1e-10)


def test_places_are_evenly_spread():
    wanted = {1: [0], 3: [0, 1, 2], 9: [0, 3, 5, 8], 100: [0, 33, 66, 99]}
    assert {count: evenly_spaced_indices(count, 4) for count in wanted} == wanted


@pytest.mark.slow
def test_the_repeated_batch_is_the_first_in_a_resumed_run_too(tmp_path):
    config = make_config(make_store(tmp_path, 12), tmp_path / "run")
    training = built(config, alone())
    with training.loader as loader:
        wanted = next(loader)
        next(loader)
        batches = repeat_first_batch(loader)
        for batch in (next(batches), next(batches)):
            assert torch.equal(batch.target, wanted.target)
        assert loader.state_dict()["position"] == 0


@pytest.mark.slow
def test_dates_that_only_a_validation_reads_name_the_key_that_leaves_it_out(tmp_path):
    """A validation may be one that nobody has asked for."""
    data = stores.dataset(ROWS, 16, 20)
    data["temperature"][13, 0, 3, 3] = np.nan
    store = stores.write(data, tmp_path / "s.zarr")
    dates = {"valid": ["2000-01-04T00", "2000-01-04T06"], "test": ["2000-01-04T12", "2000-01-05"]}
    config = make_config(store, tmp_path / "run", steps=1, validate_every=1)
    changed = replace(config.data.dates, **dates)
    config = replace(config, data=replace(config.data, dates=changed))
    line = refusal(run, config, RankInfo())
    assert "temperature has NaN at 2000-01-04T06:00" in line
    assert line.endswith(" Or validate never: trainer.validate_every=0.")
    assert not (tmp_path / "run").exists()
    config = replace(config, trainer=replace(config.trainer, validate_every=0))
    assert run(config, RankInfo()) == 0
