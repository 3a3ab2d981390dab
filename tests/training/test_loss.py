"""The loss: its weights, and the ranks' shares, which add up to the whole globe's."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import LossConfig, OwnLossConfig, StandardLossConfig
from credit_dp.config.training import LOSSES
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.grid import Grid, row_weights
from credit_dp.data.valid_points import ValidPoints
from credit_dp.training.loss import WeightedLoss, build_loss, channel_weights
from tests.training.refusals import assert_refused

LATITUDE = np.linspace(90, -90, 13)
GRID = Grid(LATITUDE, np.arange(8) * 45.0)
CHANNELS = Channels(
    (
        Channel("geopotential", 500),
        Channel("geopotential", 850),
        Channel("temperature", 500),
        Channel("2m_temperature"),
    ),
    (),
    (),
)
SCALE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)[:, None, None]


def fields() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (3, 4, 13, 6)
    forecast = torch.randn(shape, generator=generator, dtype=torch.float64)
    return forecast, torch.randn(shape, generator=generator, dtype=torch.float64)


def pointwise(name: str, error: np.ndarray, delta: float = 1.0) -> np.ndarray:
    if name == "huber":
        size = np.abs(error)
        return np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))
    return error**2 if name == "mse" else np.abs(error)


def test_the_loss_is_the_weighted_mean():
    forecast, target = fields()
    mean = (500 + 850 + 500) / 3
    channel = [500 / mean, 850 / mean, 3 * 500 / mean, 1.0]
    for name in LOSSES:
        options = {"level_weight": True, "variable_weight": {"temperature": 3.0}}
        loss = of_globe(StandardLossConfig(name=name, **options))
        error = pointwise(name, ((forecast - target) / SCALE).numpy())
        over_rows = np.average(error.mean(axis=(0, 3)), axis=1, weights=row_weights(LATITUDE))
        wanted = np.average(over_rows, weights=channel)
        assert loss(forecast, target).item() == pytest.approx(wanted, rel=1e-13), name


def test_levels_weigh_by_pressure_with_mean_one_and_channels_as_given():
    weights = channel_weights(StandardLossConfig(level_weight=True), CHANNELS.prognostic)
    assert weights[:3].mean() == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(850 / 500)
    assert weights[3] == 1
    # A channel may have a weight of its own.
    given = {"temperature": 3.0, CHANNELS.prognostic[1].name: 0.25}
    names = [channel.name for channel in CHANNELS.prognostic]
    found = channel_weights(StandardLossConfig(variable_weight=given), CHANNELS.prognostic)
    wanted = [given.get(c.name, given.get(c.variable, 1.0)) for c in CHANNELS.prognostic]
    assert names[1].endswith("_850")
    assert found.tolist() == wanted
    assert sorted(wanted) == [0.25, 1.0, 1.0, 3.0]


def of_globe(config: LossConfig) -> WeightedLoss:
    return build_loss(config, CHANNELS, GRID, slice(0, 13), SCALE)


def test_huber_is_squared_up_to_delta_and_straight_beyond():
    loss = of_globe(StandardLossConfig(name="huber", huber_delta=0.5))
    zero = torch.zeros(2, 4, 13, 6, dtype=torch.float64)
    for difference, wanted in ((0.3, 0.045), (-0.5, 0.125), (2.0, 0.875), (-2.0, 0.875)):
        found = loss(zero + difference * SCALE, zero).item()
        assert found == pytest.approx(wanted, rel=1e-13), difference


def test_without_tendency_errors_are_in_units_of_the_field():
    forecast, target = fields()
    for name in LOSSES:
        config = {"name": name, "latitude_weight": False, "level_weight": False}
        loss = of_globe(StandardLossConfig(**config, tendency=False))
        wanted = pointwise(name, (forecast - target).numpy()).mean()
        assert loss(forecast, target).item() == pytest.approx(wanted, rel=1e-13), name


def spectra_apart(forecast: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """Return each row's squared distance of root powers, by the sums that define them."""
    wave = np.exp(-2j * np.pi * np.outer(np.arange(6), np.arange(6)) / 6)
    strength = [
        np.sqrt(np.abs((x / SCALE).numpy() @ wave / 6)[..., :4] ** 2 * [1, 2, 2, 1])
        for x in (forecast, target)
    ]
    return ((strength[0] - strength[1]) ** 2).sum(axis=-1)


def test_the_spectrum_weighs_rows_and_channels_as_the_points_do():
    forecast, target = fields()
    rows = spectra_apart(forecast, target).mean(axis=0)
    by_channel = np.average(rows, axis=1, weights=row_weights(LATITUDE))
    for name in LOSSES:
        options = {"name": name, "level_weight": True, "variable_weight": {"temperature": 3.0}}
        with_it, without = (
            of_globe(StandardLossConfig(**options, spectrum=spectrum)) for spectrum in (0.7, 0.0)
        )
        found = (with_it(forecast, target) - without(forecast, target)).item()
        weights = channel_weights(StandardLossConfig(**options), CHANNELS.output_channels)
        wanted = 0.7 * np.average(by_channel, weights=weights)
        # The floor under the powers moves the amplitudes by less than 1e-7 of themselves here.
        assert found == pytest.approx(wanted, rel=1e-6), name


def test_each_channel_says_what_it_adds():
    forecast, target = fields()
    for name in LOSSES:
        loss = of_globe(StandardLossConfig(name=name, spectrum=0.5))
        parts = loss.by_channel(forecast, target)
        assert loss(forecast, target).item() == pytest.approx(parts.sum().item(), rel=1e-15)
        alone = target.repeat(4, 1, 1, 1, 1)
        for channel in range(4):
            alone[channel, :, channel] = forecast[:, channel]
        found = [loss(each, target).item() for each in alone]
        assert found == pytest.approx(parts.tolist(), rel=1e-14), name


@st.composite
def bands(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw where bands of at least one row begin and end."""
    inner = draw(st.sets(st.integers(1, 12), max_size=6))
    return (0, *sorted(inner), 13)


WEIGHTS = st.floats(0, 5)
CONFIGS = st.builds(
    StandardLossConfig,
    name=st.sampled_from(LOSSES),
    huber_delta=st.floats(0.01, 10),
    latitude_weight=st.booleans(),
    level_weight=st.booleans(),
    variable_weight=st.fixed_dictionaries(
        {"2m_temperature": st.floats(0.1, 5)}, optional={"temperature": WEIGHTS}
    ),
    tendency=st.booleans(),
    spectrum=st.sampled_from([0.0, 0.3, 2.0]),
)


@given(
    config=CONFIGS, bounds=bands(), covered=st.none() | st.floats(0.1, 0.9), width=st.integers(1, 9)
)
def test_bands_have_the_loss_and_the_gradient_of_the_globe(config, bounds, covered, width):
    generator = torch.Generator().manual_seed(width)
    shape = (2, 4, 13, width)
    forecast, target = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    valid = torch.rand(shape[1:], generator=generator) < (covered or 1)
    valid[:, 0, 0] = True
    target[:, ~valid] = float("nan")
    everywhere = ValidPoints(valid)

    def share(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        def sum_over_globe(_: torch.Tensor) -> torch.Tensor:
            area = row_weights(LATITUDE) if config.latitude_weight else np.ones(13)
            return everywhere.weight(torch.as_tensor(area))

        points = None if covered is None else ValidPoints(valid[:, rows], sum_over_globe)
        loss = build_loss(config, CHANNELS, GRID, rows, SCALE, points)
        own = forecast[:, :, rows].clone().requires_grad_()
        parts = loss.by_channel(own, target[:, :, rows])
        parts.sum().backward()
        return parts.detach(), own.grad

    whole, gradient = share(slice(0, 13))
    found = [share(slice(first, last)) for first, last in pairwise(bounds)]
    assert torch.isfinite(whole).all()
    torch.testing.assert_close(sum(part for part, _ in found), whole, rtol=1e-12, atol=1e-15)
    together = torch.cat([part for _, part in found], dim=2)
    torch.testing.assert_close(together, gradient, rtol=1e-12, atol=1e-15)


NO_LOSS = [
    ({"name": "hubber"}, r"loss\.name: .*mse, mae, huber, crps, got 'hubber'\..*huber"),
    ({"huber_delta": 0.0}, r"loss\.huber_delta: .* above 0, got 0"),
    ({"huber_delta": float("nan")}, r"loss\.huber_delta: .* above 0, got nan"),
    ({"spectrum": -0.1}, r"loss\.spectrum: .* at least 0, got -0\.1"),
    ({"spectrum": float("inf")}, r"loss\.spectrum: .* at least 0, got inf"),
    ({"variable_weight": {"rain": -1.0}}, r"loss\.variable_weight\.rain: .* got -1"),
    ({"variable_weight": {"rain": float("nan")}}, r"loss\.variable_weight\.rain: .* got nan"),
    ({"variable_weight": {"temprature": 1.0}}, r"variable_weight: .*'temprature'.*temperature"),
    ({"variable_weight": {"temperature_777": 1.0}}, r"variable_weight: .*'temperature_777'"),
    ({"variable_weight": {c.variable: 0.0 for c in CHANNELS.prognostic}}, r"above 0"),
]


def test_what_is_no_loss_is_refused_by_its_key():
    def weights_of(options: dict[str, Any]) -> np.ndarray:
        return channel_weights(StandardLossConfig(**options), CHANNELS.prognostic)

    assert_refused((partial(weights_of, options), said) for options, said in NO_LOSS)


@dataclass
class Own(OwnLossConfig):
    """A loss of one function."""

    name: str = "own"
    error: Any = None

    def build(self) -> Any:
        return self.error


def test_a_users_loss_gets_scaled_fields_and_is_weighted_as_ours():
    options = {"level_weight": True, "variable_weight": {"temperature": 3.0}, "spectrum": 0.5}
    forecast, target = fields()
    for difference, name in ((torch.square, "mse"), (torch.abs, "mae")):
        own = Own(error=lambda f, t, of=difference: of(f - t), **options)
        found = of_globe(own).by_channel(forecast, target)
        wanted = of_globe(StandardLossConfig(name=name, **options)).by_channel(forecast, target)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_a_users_loss_does_not_count_points_without_values():
    valid = torch.rand(4, 13, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    forecast, target = fields()
    target[:, ~valid] = float("nan")
    forecast.requires_grad_()
    own = Own(error=lambda f, t: (f - t).square() + 7)  # not 0 where both are 0
    loss = build_loss(own, CHANNELS, GRID, slice(0, 13), SCALE, ValidPoints(valid))
    plain = build_loss(
        StandardLossConfig(), CHANNELS, GRID, slice(0, 13), SCALE, ValidPoints(valid)
    )
    value = loss(forecast, target)
    assert value.item() == pytest.approx(plain(forecast, target).item() + 7, rel=1e-12)
    value.backward()
    assert forecast.grad is not None
    assert (forecast.grad[:, ~valid] == 0).all()
    assert forecast.grad.isfinite().all()


def numpy_error(forecast: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy((forecast.numpy() - truth.numpy()) ** 2)


def weighted_by_row(forecast: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(forecast.shape[2], dtype=forecast.dtype)[:, None]
    return (forecast - truth).square() * (1 + rows)


MEANS = r"Own\.build: its function needs errors that depend only on their own point, but those of"
SHAPES = (
    r"Own\.build: its function has to return an error for each point, \(3, 2, 4, 5\) of .*, got "
)
FINITE = r"Own\.build: its function needs finite errors and a finite gradient"


NOT_POINTWISE = [
    (None, r"loss: Own\.build has to return a function of \(forecast, truth\), got NoneType\."),
    (lambda f: f, r"loss: Own\.build: its function fails at .*\(TypeError: .*1 positional"),
    (lambda f, t: 3.0, r"Own\.build: its function has to return a tensor, got float\."),
    (lambda f, t: (f - t).square().mean(), SHAPES + r"\(\) of torch\.float64\."),
    (lambda f, t: (f - t).square().mean(1, keepdim=True), SHAPES + r"\(3, 1, 4, 5\)"),
    (lambda f, t: (f - t).square().float(), SHAPES + r".* of torch\.float32\."),
    (lambda f, t: (f - t).square() / (f - t).abs().amax(0), f"{MEANS} some samples change"),
    (lambda f, t: (f - t).square() - (f - t).mean(2, keepdim=True), f"{MEANS} some rows change"),
    (lambda f, t: (f - t).square() * f.amax(1, keepdim=True), f"{MEANS} some channels change"),
    (lambda f, t: (f - t.roll(1, 3)).square(), f"{MEANS} some columns change"),
    (weighted_by_row, f"{MEANS} some rows change without the others. Leave out means"),
    (lambda f, t: (f - t).square() * torch.rand_like(f), f"{MEANS} some samples change"),
    (lambda f, t: (f - t).detach().square(), FINITE),
    (lambda f, t: (f - t).abs().sqrt(), f"{FINITE} .* where forecast and truth are equal"),
    (lambda f, t: (f / t).square(), FINITE),
    (numpy_error, r"its function fails at .*\(RuntimeError: Can't call numpy\(\) on Tensor"),
]


def test_a_function_that_is_not_pointwise_is_refused_in_one_line():
    losses = [(Own(error=error), expected) for error, expected in NOT_POINTWISE]
    losses.append((OwnLossConfig("own"), r"OwnLossConfig has no build\. .* method build\(self"))
    assert_refused((partial(of_globe, loss), expected) for loss, expected in losses)
