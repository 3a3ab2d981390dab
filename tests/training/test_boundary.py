"""The rim of a region is given: to rollouts, their gradients, the loss and scores, on any mesh."""

import numpy as np
import pytest
import torch

from credit_dp.training.forecast_step import EnsembleForecast, ForecastStep

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


@pytest.mark.parametrize("members", [1, 3])
def test_a_rollout_goes_on_from_the_given_rim(members):
    model = network()
    truth, forcing = normal(0, 4, 2, STATES, ROWS, COLUMNS), normal(1, 4, 2, 1, ROWS, COLUMNS)
    static = normal(2, 2, 1, ROWS, COLUMNS)
    loss, wanted = by_hand(model, truth, forcing, static)
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    rim = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    rim[2:5, 2:4] = False
    ensemble = EnsembleForecast(ForecastStep(model, SCALE, rim=rim), members=range(members))
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
    step = ForecastStep(network(), torch.ones(STATES, 1, 1), rim=torch.ones(1, 1).bool())
    with pytest.raises(ValueError, match="the rim of each state has to be given"):
        next(step.rollout(torch.zeros(1), [torch.zeros(1)], torch.zeros(1)))
