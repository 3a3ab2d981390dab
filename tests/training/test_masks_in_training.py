"""Points without values count neither in the loss nor in gradients or scores, on any mesh."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.config import Config, StandardLossConfig, VariableConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.grid import Grid, row_weights
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.valid_points import ValidPoints
from credit_dp.distributed.launcher import RankInfo
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOutData, evaluate, example_map
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.training.forecast_step import ForecastStep
from credit_dp.training.loss import build_loss
from credit_dp.training.run import run
from tests.plots import DRAW_PLOTS, failing_plots
from tests.ranks import on_processes, on_threads
from tests.tier_cases import tiers
from tests.training.masked_stores import COLUMNS, RAIN, ROWS, SEA, SOIL, sea, sea_config
from tests.training.runs import alone, built, train_on, weights

LATITUDE = np.linspace(90, -90, ROWS)
GRID = Grid(LATITUDE, np.arange(8) * 45.0)
CHANNELS = Channels((Channel("temperature", 500), Channel(SEA)), (), (), (Channel(SOIL),))
SCALE = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)[:, None, None]


def valid() -> torch.Tensor:
    """One channel has values everywhere, one at sea, one on land: `(3, ROWS, COLUMNS)`."""
    return torch.from_numpy(np.stack([np.ones_like(sea()), sea(), ~sea()]))


def fields() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 3, ROWS, COLUMNS)
    forecast = torch.randn(shape, generator=generator, dtype=torch.float64)
    return forecast, torch.randn(shape, generator=generator, dtype=torch.float64)


def shares(manager: DomainParallelManager, name: str, even: bool) -> tuple[float, torch.Tensor]:
    """Return this rank's share of the loss, and its gradient by the rank's rows of the forecast."""
    rows = manager.rows(ROWS)
    points = ValidPoints(valid()[:, rows], manager.transport.all_reduce)
    config = StandardLossConfig(
        name=name, latitude_weight=not even, level_weight=True, variable_weight={SEA: 3.0}
    )
    loss = build_loss(config, CHANNELS, GRID, rows, SCALE, points)
    forecast, target = fields()
    own = forecast[:, :, rows].clone().requires_grad_()
    target[:, ~valid()] = float("nan")  # whatever is there has to be left alone
    share = loss(own, target[:, :, rows])
    share.backward()
    assert own.grad is not None
    return share.item(), own.grad


def by_definition(name: str, even: bool) -> tuple[float, torch.Tensor]:
    forecast, target = fields()
    forecast.requires_grad_()
    error = (forecast - target) / SCALE
    error = error.square() if name == "mse" else error.abs()
    area = torch.as_tensor(np.ones(ROWS) if even else row_weights(LATITUDE))[:, None] * valid()
    per_channel = (error * area).sum(dim=(0, 2, 3)) / area.sum(dim=(1, 2)) / 2
    channel = torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64)
    loss = (per_channel * channel).sum() / channel.sum()
    loss.backward()
    assert forecast.grad is not None
    return loss.item(), forecast.grad


def test_a_channel_weighs_the_same_whatever_it_covers():
    for name, even, ranks in (("mse", False, 1), ("mse", False, 3), ("mae", True, 3)):
        wanted, gradient = by_definition(name, even)
        found = on_threads(ranks, shares, name, even)
        assert sum(share for share, _ in found) == pytest.approx(wanted, rel=1e-13), name
        whole = torch.cat([part for _, part in found], dim=2)
        torch.testing.assert_close(whole, gradient, rtol=1e-13, atol=1e-16)
        assert not whole[:, 1, : ROWS // 2].any()  # the band that is all land


def no_soil(manager: DomainParallelManager) -> str:
    rows = manager.rows(ROWS)
    points = valid()
    points[2] = False
    with pytest.raises(UserError) as error:
        build_loss(
            StandardLossConfig(),
            CHANNELS,
            GRID,
            rows,
            SCALE,
            ValidPoints(points[:, rows], manager.transport.all_reduce),
        )
    return str(error.value)


def test_a_channel_without_any_values_is_refused_on_all_ranks():
    for said in on_threads(3, no_soil):
        assert said.startswith(f"data.variables.{SOIL}.fill: ")
        assert "data.diagnostic" in said
        assert "\n" not in said


def scored(manager: DomainParallelManager) -> torch.Tensor:
    rows = manager.rows(ROWS)
    area = torch.as_tensor(row_weights(LATITUDE)[rows].copy())
    sums = RootMeanSquare((1, 3), area, ValidPoints(valid()[:, rows]))
    forecast, target = fields()
    target[:, ~valid()] = float("nan")
    for sample in range(manager.dp_rank, 2, manager.dp_world_size):
        error = (forecast - target)[sample : sample + 1, :, rows]
        sums.add((0,), error)
    return sums.result(manager)


@pytest.mark.parametrize(("ranks", "domain"), tiers([(3, 3)], [], [(2, 2), (2, 1)]))
def test_errors_are_averaged_over_the_points_with_values(ranks, domain):
    forecast, target = fields()
    area = torch.as_tensor(row_weights(LATITUDE))[:, None] * valid()
    squares = ((forecast - target).square() * area).sum(dim=(0, 2, 3))
    wanted = (squares / area.sum(dim=(1, 2)) / 2).sqrt()
    for found in on_processes(ranks, scored, domain=domain):
        torch.testing.assert_close(found[0], wanted, rtol=1e-13, atol=0)


def test_a_rollout_starts_again_from_the_fill():
    seen = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return torch.full((1, 3, 1, 2), 7.0)  # of a state of two channels, and one more

    points = ValidPoints(torch.tensor([[[True, True]], [[True, False]], [[False, True]]]))
    fills = torch.tensor([0.0, -1.0, -2.0])[:, None, None]
    scale = torch.ones(2, 1, 1)
    step = ForecastStep(model, scale, fill=lambda fields: points.fill_invalid(fields, fills))
    nothing = torch.zeros(1, 0, 1, 2)
    start = torch.tensor([0.0, 0.0, 0.0, -1.0]).view(1, 2, 1, 2)
    first, second = step.rollout(start, [nothing, nothing], nothing)
    assert seen[1].flatten().tolist() == [7, 7, 7, -1]
    assert first.flatten().tolist() == [7, 7, 7, -1, -2, 7]
    assert second.flatten().tolist() == [14, 14, 14, -1, -2, 7]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = sea_config(tmp_path_factory.mktemp("sea"))
    prepare_training_data(config.data)
    return config


def train_all(
    manager: DomainParallelManager, config: Config
) -> tuple[list[tuple[float, float]], torch.Tensor, np.ndarray, np.ndarray]:
    """Return loss and gradient norm of all steps, weights, and scores."""
    training = built(config, manager)
    numbers = train_on(training)
    prepared = prepare_training_data(config.data)
    dates = HeldOutData(config, prepared, training.rows, training.like)
    training.trainer.state.train(False)
    scores = evaluate(training.ensemble.rollout, dates, manager, 4, lambda _: None)
    field = example_map(training.ensemble.rollout, dates, manager)
    return numbers, weights(training), scores.rmse, field.forecast


@pytest.fixture(scope="module")
def wanted(config):
    return train_all(alone(), config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_the_same_on_bands_without_any_values(config, wanted, ranks):
    numbers, vector, rmse, field = wanted
    assert np.isfinite(rmse).all()
    for found in on_processes(ranks, train_all, config):
        assert np.array(found[0]) == pytest.approx(np.array(numbers), rel=1e-10, abs=0)
        assert (found[1] - vector).norm() <= 1e-10 * vector.norm()
        assert found[2] == pytest.approx(rmse, rel=1e-10)
    assert field.shape == (ROWS, COLUMNS)


def poisoned(config: Config, monkeypatch: pytest.MonkeyPatch, value: float) -> torch.Tensor:
    """Return the weights after a few steps with `value` on masked points of the target."""
    mask = torch.from_numpy(prepare_training_data(config.data).store.valid_mask(slice(None)))
    training = built(config, alone())
    given = training.trainer.train_step

    def train_step(batch, *arguments):
        return given(replace(batch, target=batch.target.masked_fill(~mask, value)), *arguments)

    monkeypatch.setattr(training.trainer, "train_step", train_step)
    train_on(training)
    return weights(training)


@pytest.mark.slow
def test_masked_points_of_the_target_do_not_matter(config, wanted, monkeypatch):
    assert torch.equal(poisoned(config, monkeypatch, 1e6), wanted[1])
    assert torch.equal(poisoned(config, monkeypatch, float("nan")), wanted[1])


@pytest.mark.slow
def test_forecasts_have_no_masked_values_and_none_below_zero(config):
    training = built(config, alone())
    training.loader.close()
    dates = HeldOutData(config, prepare_training_data(config.data), training.rows, training.like)
    times = dates.initial_times[:1]
    with torch.no_grad():
        state = training.forecast_step(
            dates.initial_states(times), dates.forcing(times), dates.static(1)
        )
        made = dates.denormalise(state - 3)[0]
    names = [
        channel.name
        for channel in prepare_training_data(config.data).store.channels.output_channels
    ]
    assert np.array_equal(np.isnan(made[names.index(SEA)].numpy()), ~sea())
    assert np.array_equal(np.isnan(made[names.index(SOIL)].numpy()), sea())
    assert made[names.index(RAIN)].min() == 0
    assert np.isfinite(made[names.index("temperature_500")].numpy()).all()


@pytest.mark.slow
def test_scores_are_those_of_the_definition(config, wanted):
    prepared = prepare_training_data(config.data)
    store = prepared.store
    starts = HeldOutData(config, prepared, slice(0, ROWS), torch.zeros(())).initial_times
    valid_times = starts + np.timedelta64(6, "h")
    now, truth = (store.read_outputs(times, slice(None)) for times in (starts, valid_times))
    climatology = np.stack([prepared.climatology.field(t, slice(None)) for t in valid_times])
    names = [channel.name for channel in store.channels.output_channels]
    for wet in (names.index(RAIN), names.index(SOIL)):
        climatology[:, wet] = climatology[:, wet].clip(min=0)
    area = row_weights(store.latitude)[:, None] * store.valid_mask(slice(None))
    for source, guess in ((1, now), (2, climatology)):
        squares = np.nan_to_num(guess.astype(np.float64) - truth) ** 2
        mean = (squares * area).sum(axis=(2, 3)).mean(axis=0) / area.sum(axis=(1, 2))
        assert wanted[2][source, 0] == pytest.approx(np.sqrt(mean), rel=1e-5)


@pytest.mark.parametrize(
    ("prognostic", "missing"),
    [
        pytest.param(["geopotential", SEA], set(), marks=pytest.mark.slow),
        pytest.param([SEA], {"spectra.png"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_draws_fields_with_points_without_values(tmp_path, monkeypatch, prognostic, missing):
    monkeypatch.setenv(DRAW_PLOTS, "1")
    changes = {"diagnostic": [], "variables": {SEA: VariableConfig(fill="mean")}}
    config = sea_config(tmp_path, prognostic=prognostic, steps=2, **changes)
    allowed = failing_plots() if missing else nullcontext()
    with allowed:
        assert run(config, RankInfo()) == 0
    names = {"errors.png", "forecast.png", "loss.png", "rmse.png", "spectra.png"}
    assert {path.name for path in Path(config.run.dir).glob("*.png")} == names - missing
