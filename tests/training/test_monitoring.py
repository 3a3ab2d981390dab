"""What is watched while a run trains: the validation on any mesh, and batches of `one_batch`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from credit_dp.config import Config
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import evenly_spaced_indices
from credit_dp.training.console import Screen
from credit_dp.training.monitoring import (
    MAX_INITIAL_TIMES,
    TrainingMonitor,
    Validation,
    repeat_first_batch,
)
from tests.ranks import on_processes
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
    dates = validation.dates
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
def test_bands_find_what_one_rank_finds(config):
    whole = validated(alone(), config)
    assert on_processes(2, validated, config) == pytest.approx([whole] * 2, rel=1e-10)


@pytest.mark.slow
def test_dates_without_room_for_a_forecast_are_refused(config):
    dates = replace(config.data.dates, valid=["2000-01-04T00", "2000-01-04T00"])
    config = replace(config, data=replace(config.data, dates=dates))
    with pytest.raises(UserError, match=r"fits into data\.dates\.valid"):
        validated(alone(), config)


@pytest.mark.parametrize(
    ("count", "places"), [(1, [0]), (3, [0, 1, 2]), (9, [0, 3, 5, 8]), (100, [0, 33, 66, 99])]
)
def test_places_are_evenly_spread(count, places):
    assert evenly_spaced_indices(count, 4).tolist() == places


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
