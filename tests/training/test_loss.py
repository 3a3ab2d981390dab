"""The loss: what weighs how much, and that the ranks' shares add up to the globe's."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from credit_dp.config import LossConfig
from credit_dp.data.grid import row_weights
from credit_dp.data.schema import Channel, Channels
from credit_dp.errors import UserError
from credit_dp.training.loss import build_loss, channel_weights

LATITUDE = np.linspace(90, -90, 13)
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


@pytest.mark.parametrize("name", ["mse", "mae"])
@pytest.mark.parametrize("bounds", [(0, 13), (0, 4, 13), (0, 1, 2, 13)])
def test_shares_add_up_to_the_weighted_mean(name, bounds):
    config = LossConfig(name=name, variable_weight={"temperature": 3.0})
    forecast, target = fields()
    parts = []
    for first, last in pairwise(bounds):
        rows = slice(first, last)
        loss = build_loss(config, CHANNELS, LATITUDE, rows, SCALE)
        parts.append(loss(forecast[:, :, rows], target[:, :, rows]))

    error = ((forecast - target) / SCALE).numpy()
    error = error**2 if name == "mse" else np.abs(error)
    over_rows = np.average(error.mean(axis=(0, 3)), axis=1, weights=row_weights(LATITUDE))
    mean = (500 + 850 + 500) / 3
    channel = [500 / mean, 850 / mean, 3 * 500 / mean, 1.0]
    torch.testing.assert_close(
        torch.stack(parts).sum().item(), np.average(over_rows, weights=channel), rtol=1e-13, atol=0
    )


def test_unweighted_loss_is_the_plain_mean():
    config = LossConfig(latitude_weight=False, level_weight=False)
    forecast, target = fields()
    loss = build_loss(config, CHANNELS, LATITUDE, slice(0, 13), SCALE)(forecast, target)
    torch.testing.assert_close(loss, ((forecast - target) / SCALE).square().mean())


def test_levels_weigh_by_pressure_with_mean_one():
    weights = channel_weights(LossConfig(), CHANNELS.prognostic)
    assert weights[:3].mean() == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(850 / 500)
    assert weights[3] == 1


def test_weight_of_an_unknown_variable_is_refused_with_the_nearest_name():
    config = LossConfig(variable_weight={"temprature": 1.0})
    with pytest.raises(UserError, match=r"loss\.variable_weight: .*'temprature'.*temperature"):
        channel_weights(config, CHANNELS.prognostic)


def test_weights_that_are_all_zero_are_refused():
    config = LossConfig(variable_weight={"geopotential": 0.0})
    with pytest.raises(UserError, match="above 0"):
        channel_weights(config, CHANNELS.prognostic[:2])
