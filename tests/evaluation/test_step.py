"""The forecast step and its rollout."""

import torch

from credit_dp.forecast.step import ForecastStep


def test_the_tendency_is_added_in_normalised_units():
    seen = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return torch.ones(1, 2, 3, 4)

    scale = torch.tensor([0.5, 2.0])[:, None, None]
    now, forcing, static = (torch.full((1, n, 3, 4), float(n)) for n in (2, 1, 3))
    later = ForecastStep(model, scale)(now, forcing, static)
    assert seen[0][0, :, 0, 0].tolist() == [2, 2, 1, 3, 3, 3]
    assert later[0, :, 0, 0].tolist() == [2.5, 4.0]


def test_a_rollout_feeds_each_state_and_its_forcing_back():
    def model(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] + 10 * x[:, 1:2]

    step = ForecastStep(model, torch.ones(1, 1, 1))
    forcings = [torch.full((1, 1, 1, 1), value) for value in (1.0, 2.0, 3.0)]
    states = list(step.rollout(torch.ones(1, 1, 1, 1), forcings, torch.zeros(1, 0, 1, 1)))
    assert [state.item() for state in states] == [12, 44, 118]
