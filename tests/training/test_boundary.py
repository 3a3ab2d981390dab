"""The rim of a region is given: to rollouts, their gradients, the loss and scores, on any mesh."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.config import Config, DiffusionConfig
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.setup import prepare_training_data
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import (
    HeldOutData,
    LastLeadAccumulator,
    LastLeadDiagnostics,
    evaluate,
    example_map,
)
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.scorecard import HeldOutScores
from credit_dp.training.data_description import check_data, describe_data
from credit_dp.training.forecast_step import EnsembleForecast, ForecastStep
from tests.data import stores
from tests.ranks import on_processes
from tests.training.runs import alone, built, make_config

STATES, DIAGNOSTIC, ROWS, COLUMNS, WIDTH = 2, 1, 7, 6, 2
SCALE = torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]
INSIDE = (slice(None), slice(None), slice(2, 5), slice(2, 4))


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> torch.nn.Module:
    """A model whose interior depends on the rim: state, forcing and static go in."""
    torch.manual_seed(5)
    channels = STATES + 2, STATES + DIAGNOSTIC
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels[0], 8, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.Conv2d(8, channels[1], 3, padding=1),
    ).double()


def by_hand(
    model: torch.nn.Module, truth: torch.Tensor, forcing: torch.Tensor, static: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Roll out in the plainest way: write the prediction into the interior of the given state."""
    state, loss = truth[0], torch.zeros(())
    for step in range(1, len(truth)):
        output = model(torch.cat([state, forcing[step - 1], static], 1))
        predicted = state + output[:, :STATES] * SCALE
        state = truth[step].clone()
        state[INSIDE] = predicted[INSIDE]
        loss = loss + (state - truth[step]).square()[INSIDE].mean() + output[:, STATES:].mean()
    return loss, state


def test_a_rollout_goes_on_from_the_given_rim():
    model, members = network(), 3
    truth, forcing = normal(0, 4, 2, STATES, ROWS, COLUMNS), normal(1, 4, 2, 1, ROWS, COLUMNS)
    static = normal(2, 2, 1, ROWS, COLUMNS)
    loss, wanted = by_hand(model, truth, forcing, static)
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    rim = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    rim[2:5, 2:4] = False
    ensemble = EnsembleForecast(
        ForecastStep(model, SCALE, given_share=rim.double()), members=range(members)
    )
    times = np.array(["2000-01-01", "2000-01-02"], "M8[ns]")
    found = torch.zeros(())
    steps = ensemble.rollout(times, truth[0], forcing[:3], static, truth[1:])
    for step, fields in enumerate(steps, start=1):
        assert fields.shape == (2, members, STATES + DIAGNOSTIC, ROWS, COLUMNS)
        for member in fields.unbind(1):
            state = member[:, :STATES]
            assert torch.equal(state[..., rim], truth[step][..., rim])
            error = (state - truth[step]).square()[INSIDE].mean() + member[:, STATES:].mean()
            found = found + error / members
    assert torch.allclose(fields[:, 0, :STATES], wanted, rtol=1e-13, atol=0)
    for a, b in zip(torch.autograd.grad(found, list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_rollout_without_the_rim_is_a_mistake():
    step = ForecastStep(network(), torch.ones(STATES, 1, 1), given_share=torch.ones(1, 1))
    with pytest.raises(ValueError, match="the rim of each state has to be given"):
        next(step.rollout(torch.zeros(1), [torch.zeros(1)], torch.zeros(1)))


BOX_ROWS, BOX_COLUMNS, RIM = 13, 16, 5  # of three bands, the first and the last are all rim
INTERIOR = (..., slice(RIM, -RIM), slice(RIM, -RIM))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run on a box with a rim, that has no weights yet."""
    return run_on(tmp_path_factory.mktemp("box"), 2.0)


def run_on(folder: Path, degrees: float) -> Config:
    """Return a run on a region whose columns are so far apart."""
    latitude, longitude = np.linspace(66, 30, BOX_ROWS), np.arange(BOX_COLUMNS) * degrees
    data = stores.dataset(BOX_ROWS, BOX_COLUMNS, 20)
    data = data.assign_coords(latitude=latitude, longitude=longitude)
    config = make_config(stores.write(data, folder / "box.zarr"), folder / "run")
    config = replace(config, data=replace(config.data, boundary=RIM))
    prepare_training_data(config.data)
    return config


def scored(
    manager: DomainParallelManager, config: Config
) -> tuple[HeldOutScores, FieldMap, LastLeadDiagnostics]:
    """Score forecasts of the initial weights."""
    training = built(config, manager)
    prepared = prepare_training_data(config.data)
    dates = HeldOutData(config, prepared, training.rows, training.like)
    training.trainer.state.train(False)
    last = LastLeadAccumulator(dates, manager)
    scores = evaluate(training.ensemble.rollout, dates, manager, 4, lambda _: None, last)
    return scores, example_map(training.ensemble.rollout, dates, manager), last.result()


@pytest.mark.slow
@torch.no_grad()
def test_scores_leave_out_the_rim(config):
    """The first lead times, from the store's fields in numpy, and the model itself."""
    scores, field, last = scored(alone(), config)
    training, prepared = built(config, alone()), prepare_training_data(config.data)
    store, normaliser = prepared.store, Normaliser.of(prepared, torch.float64)
    model = training.trainer.state.parts[0].eval()
    step = np.timedelta64(6, "h")
    starts = store.times[store.times >= np.datetime64("2000-01-04")][:-2]
    rows = slice(0, BOX_ROWS)
    static = normaliser.normalise_static(store.read_static(rows))[None]
    weights = np.cos(np.deg2rad(store.latitude))[RIM:-RIM, None] * np.ones(BOX_COLUMNS - 2 * RIM)
    squares: list[list[np.ndarray]] = [[], []]
    for start in starts:
        state = normaliser.normalise_outputs(store.read_states([start], rows))
        for lead in (0, 1):
            forcing = store.read_forcing(np.array([start + lead * step]), rows)
            output = model(torch.cat([state, normaliser.normalise_forcing(forcing), static], 1))
            truth = store.read_states([start + (lead + 1) * step], rows)
            guess = state + output * normaliser.tendency_scale
            state = normaliser.normalise_outputs(truth)
            state[INTERIOR] = guess[INTERIOR]
            error = (normaliser.denormalise(state).numpy() - truth)[0][INTERIOR]
            squares[lead].append(np.average(error.reshape(7, -1) ** 2, 1, weights.ravel()))
    wanted = np.sqrt(np.mean(squares, axis=1))
    assert scores.rmse[0] == pytest.approx(wanted, rel=1e-6)
    for found in (field.forecast, last.rmse, last.bias):
        assert np.isfinite(found[INTERIOR]).all()
        assert np.isnan(found).sum() == found.size - found[INTERIOR].size


def assert_same_scores(config: Config) -> None:
    """Compare the scores, maps and errors of three bands with those of one process."""
    wanted, field, last = scored(alone(), config)
    for scores, other, diagnostics in on_processes(3, scored, config):
        for name, values in wanted.scores.items():
            assert scores.scores[name] == pytest.approx(values, rel=1e-10)
        assert other.forecast == pytest.approx(field.forecast, rel=1e-10, nan_ok=True)
        assert diagnostics.rmse == pytest.approx(last.rmse, rel=1e-10, nan_ok=True)


@pytest.mark.slow
def test_bands_that_are_all_rim_change_nothing(config):
    assert_same_scores(config)


@pytest.mark.slow
def test_the_rim_of_a_band_of_latitudes_is_rows(tmp_path):
    config = run_on(tmp_path, 360 / BOX_COLUMNS)
    _, field, last = scored(alone(), config)
    for found in (field.forecast, last.rmse, last.bias):
        assert np.isfinite(found[RIM:-RIM]).all()
        assert np.isnan(found[:RIM]).all()
        assert np.isnan(found[-RIM:]).all()
    assert_same_scores(config)


def test_a_run_resumes_with_its_own_rim(config):
    saved, current = (
        describe_data(prepare_training_data(replace(config.data, boundary=width)), config.model)
        for width in (RIM, RIM - 1)
    )
    check_data(saved, saved)
    said = r"^resume: the checkpoint was trained with data.boundary=5, the config has 4\. Set data"
    with pytest.raises(UserError, match=said):
        check_data(saved, current)


def test_noise_stays_off_the_rim(config):
    """A diffusion model sees zeros there, in training as in sampling."""
    model = DiffusionConfig(channels=[8, 16], blocks=1, groups=4, noise=4, sampling_steps=2)
    training = built(replace(config, model=model), alone())
    with training.loader:
        batch = next(training.loader)
    assert training.trainer.denoising is not None
    noisy = training.trainer.denoising(batch, 0, range(4)).static[:, batch.static.shape[1] :]
    step = training.ensemble.step.model
    step.keys = [(0, sample) for sample in range(4)]
    with torch.no_grad():
        drawn = step(torch.cat([batch.state, batch.forcing, batch.static], 1))
    for fields in (noisy, drawn):
        inside = fields[INTERIOR]
        assert (inside != 0).all()
        assert torch.count_nonzero(fields) == inside.numel()
