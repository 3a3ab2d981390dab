"""The forecast step and its rollout."""

import torch

from credit_dp.training.forecast_step import ForecastStep


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


def test_the_tendency_is_added_to_the_newest_state_unless_the_model_predicts_it():
    now = torch.tensor([1.0, 2.0, 30.0, 40.0]).view(1, 4, 1, 1)
    step = ForecastStep(lambda x: x[:, :2], torch.tensor([1.0, 10.0]).view(2, 1, 1))
    nothing = torch.zeros(1, 0, 1, 1)
    assert step(now, nothing, nothing).flatten().tolist() == [31, 60]
    step = ForecastStep(lambda x: 5 * x, torch.full((1, 1, 1), 0.1), residual=False)
    assert torch.equal(step(now, nothing, nothing), 5 * now)


def test_a_rollout_keeps_the_newest_states():
    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.flatten().tolist())
        return x[:, -1:]  # the forcing

    seen: list[list[float]] = []
    step = ForecastStep(model, torch.ones(1, 1, 1))
    forcings = [torch.full((1, 1, 1, 1), value) for value in (1.0, 2.0, 3.0)]
    now = torch.tensor([7.0, 8.0, 9.0]).view(1, 3, 1, 1)
    states = list(step.rollout(now, forcings, torch.zeros(1, 0, 1, 1)))
    assert [state.item() for state in states] == [10, 12, 15]
    assert seen == [[7, 8, 9, 1], [8, 9, 10, 2], [9, 10, 12, 3]]


def test_a_rollout_feeds_each_state_and_its_forcing_back():
    def model(x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] + 10 * x[:, 1:2]

    step = ForecastStep(model, torch.ones(1, 1, 1))
    forcings = [torch.full((1, 1, 1, 1), value) for value in (1.0, 2.0, 3.0)]
    states = list(step.rollout(torch.ones(1, 1, 1, 1), forcings, torch.zeros(1, 0, 1, 1)))
    assert [state.item() for state in states] == [12, 44, 118]
