"""A user's model runs on tensors without data before it trains."""

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel.planning.model_plan import check_model
from credit_dp.errors import UserError
from tests.tables import entry


class Model(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), act

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


def test_a_good_model_passes_and_is_left_as_it_was():
    model = Model(nn.Identity()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_model(model, 3, 2, (4, 6))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


WRONG = [
    (nn.ZeroPad2d((0, 0, 1, 0)), r"needs to return \(2, 2, 4, 6\) .* got \(2, 2, 5, 6\)"),
    (nn.Conv2d(2, 5, 1), r"got \(2, 5, 4, 6\)"),
    (lambda x: (x, x), "got tuple"),
    (
        lambda x: x.no_such_thing,
        r"Model\.forward fails at .*test_check_model\.py:\d+ \(AttributeError",
    ),
    (lambda x: x @ x, r"Model\.forward fails at .*test_check_model\.py:\d+ \(RuntimeError"),
    (lambda x: x.detach(), "the output of Model depends on none of its parameters"),
    (lambda x: x.view(7), r"\(batch, channels, rows, columns\), of shape \(2, 3, 4, 6\)\.$"),
]


def test_a_wrong_one_is_one_line():
    for act, expected in WRONG:
        with entry(expected), pytest.raises(UserError, match=expected) as error:
            check_model(Model(act), 3, 2, (4, 6))
        assert "\n" not in str(error.value), expected
    with pytest.raises(UserError, match="model: Identity has no parameters to train"):
        check_model(nn.Identity(), 2, 2, (4, 6))


class WeightsInList(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 1, 1))
        self.weights = [self.weight]

    def forward(self, x):
        return torch.conv2d(x, self.weights[0])


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = nn.Parameter(torch.ones(2, 2, 4, 6))

    def forward(self, x):
        return self.field


def test_what_tensors_without_data_do_not_show_is_left_to_the_plan():
    for act in (
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * float(x.detach().numpy().mean()),
        lambda x: x * x.detach().flatten().tolist()[0],
    ):
        check_model(Model(act), 3, 2, (4, 6))
    check_model(WeightsInList(), 3, 2, (4, 6))
    check_model(Constant(), 3, 2, (4, 6))
