"""Models that decide by values: all ranks alike, and a plan says what it assumes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.domain_parallel.band_tensor import values
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.decide import assumption_line
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor.models import WIDTH, Model, check, convert
from tests.ranks import DEVICE, cpu_only, on_threads


def _check_for_nan(model, x):
    if torch.isnan(x).any():
        raise ValueError("NaN")
    assert torch.isfinite(x).all()
    return x * 2


def _branch(model, x):
    return (
        x.cumsum(-2)
        if x.mean() > 0
        else x.flip(-2) + model.linear(x.mT.flip(-1)[..., :WIDTH]).sum()
    )


def _rescale(model, x):
    while not x.abs().amax() < 0.3:
        x = x.roll(1, -2) * 0.5
    return x / x.abs().max().item()


def _read_list(model, x):
    return x * x.detach()[0, 0, 0].tolist()[0]


def _compare(model, x):
    return x.sort(-2)[0] if torch.allclose(x, x.clone()) and not torch.equal(x, x + 1) else x


DECIDING = {  # and what a plan assumes, by the order of lines
    _check_for_nan: [False, True],
    _branch: [False],
    _rescale: [True, 1.0],
    _compare: [False],
    _read_list: [1.0],
}


# A plan runs a loop hundreds of times before it gives up an assumption.
DECISIONS = [
    pytest.param(function, marks=pytest.mark.slow) if function is _rescale else function
    for function in DECIDING
]


@pytest.mark.parametrize("function", DECISIONS)
def test_a_model_may_decide_by_values_of_fields(function):
    check(lambda: Model(function))


@pytest.mark.parametrize("function", DECISIONS)
def test_a_plan_says_where_a_model_decides_and_what_it_assumes(function):
    run = attached_domain(convert(Model(function))).decision.run
    assert [assumed.value for assumed in run.assumed] == DECIDING[function]
    lines = [
        line for line in map(assumption_line, run.assumed) if "test_assumed_values.py:" in line
    ]
    assert len(lines) == len(DECIDING[function])


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + len(torch.where(x > 0)[0]),
        lambda m, x: x + x[x > x.mean()].sum(),
        lambda m, x: x * int((x > 0).sum()),
        pytest.param(
            lambda m, x: x * float(x.detach().numpy().mean()),
            marks=cpu_only("NumPy has no arrays on GPUs"),
        ),
    ],
)
def test_shapes_may_depend_on_fields_but_costs_are_then_unknown(function, caplog):
    assert attached_domain(convert(Model(function))).decision.run is None
    assert "costs are not known before training: model (Model), " in caplog.text
    assert "test_assumed_values.py:" in caplog.text
    check(lambda: Model(function))


def test_a_model_that_fails_in_every_branch_shows_its_first_error():
    def fail(model, x):
        if x.mean() > 0:
            raise ValueError("second")
        raise ValueError("first")

    with pytest.raises(UserError, match=r"test_assumed_values.py:\d+: fails .*ValueError: first"):
        convert(Model(fail))


def test_places_that_torch_reads_from_memory_are_refused():
    def split(model, x):
        places = (x.mean((0, 2, 3)) * 0).long()[:2]
        return torch.cat(x.tensor_split(places, 1), 1)

    with pytest.raises(UserError, match=r"test_assumed_values.py:\d+: an operator reads .*tolist"):
        convert(Model(split))


def test_a_value_in_a_text_can_be_planned():
    class Says(nn.Module):
        def forward(self, x):
            self.text = f"{x.mean():.3f}"
            return torch.fft.rfft2(x).abs()

    def text(manager):
        model, x = Says(), torch.ones(1, 2, 6, 4)
        convert_to_domain_parallel(model, manager, input_shape=x.shape)
        model(shard_tensor(x, manager=manager))
        return model.text

    assert on_threads(2, text) == ["1.000"] * 2


class _Decides(nn.Module):
    """Decides by coordinates that it makes from the height, and by those in a buffer."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.register_buffer("longitude", torch.linspace(0, 350, 8))

    def forward(self, x):
        if self.change == "before":
            self.longitude.mul_(1)
        latitude = torch.linspace(90, -90, x.shape[-2], dtype=x.dtype)
        if not (torch.all(latitude[1:] - latitude[:-1] < 0) and self.longitude.max() < 360):
            raise ValueError("the grid is not a globe")
        cells = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"))
        northern = (latitude > 0).nonzero()[:, 0]
        _, south = latitude.split([3, x.shape[-2] - 3])
        factor = int(cells.amax().item()) + len(northern) + float(south.max())
        if self.change == "after":
            self.longitude.add_(1)
        return self.conv(x) * factor + latitude[:, None]


@pytest.mark.parametrize(
    "change",
    [None, *(pytest.param(x, marks=pytest.mark.slow) for x in ("before", "after"))],
)
def test_values_that_do_not_depend_on_the_input_may_decide(change):
    """Also where they change."""
    check(lambda: _Decides(change))


def test_a_plan_counts_what_ranks_send_to_decide_alike(monkeypatch):
    """Values that each rank computes for itself, which may differ in their last bits on GPUs."""

    def decide(model, x):
        means = x.mean((0, 2, 3)) * 2  # summed up over ranks, and then each rank's own
        return x.roll(1, 2) if (means > 1).any() or means.sum() > 1 else x

    def sent():
        run = attached_domain(convert(Model(decide))).decision.run
        return run.forward[""][0].collective_bytes

    monkeypatch.setattr(values, "SAME_BITS", (DEVICE,))
    without = sent()
    monkeypatch.setattr(values, "SAME_BITS", ())
    assert sent() - without == 2  # two truth values


def test_a_plan_knows_values_on_a_gpu():
    def weigh(model, x):
        longitude = torch.arange(9, device="cuda")
        eastern = longitude.masked_select(longitude > 2)
        return x * (eastern + torch.arange(len(eastern), device="cuda")).sum().item()

    run = attached_domain(convert(Model(weigh))).decision.run
    assert run.assumed == ()
