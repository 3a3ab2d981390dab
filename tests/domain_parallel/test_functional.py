"""`credit_dp.domain_parallel.functional`: global results, where torch's functions are refused."""

from __future__ import annotations

import copy
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    functional,
    gather_tensor,
    replan,
    shard_tensor,
)
from credit_dp.domain_parallel.decide import counting_manager
from credit_dp.domain_parallel.functional import active_context
from credit_dp.errors import UserError
from tests.domain_parallel.equality import MODEL, THREADS, assert_same_as_whole_globe
from tests.ranks import on_processes, on_threads, seeded
from tests.tables import entry

SHAPE = (2, 4, 13, 6)


class Model(nn.Module):
    """A convolution, some code, a convolution."""

    def __init__(self, code):
        super().__init__()
        self.before, self.after = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.code = code

    def forward(self, x):
        return self.after(self.code(self.before(x)))


# Torch's function in a model's code -> the exact one.
PAIRS = {
    "mean": (
        lambda x: x - x.mean((-2, -1), keepdim=True),
        lambda x: x - functional.mean(x, (-2, -1), keepdim=True),
    ),
    "mean over rows": (
        lambda x: x - x.mean(2, keepdim=True),
        lambda x: x - functional.mean(x, 2, True),
    ),
    "mean of all": (lambda x: x - x.mean(), lambda x: x - functional.mean(x)),
    "sum": (
        lambda x: x - x.sum((2, 3), True),
        lambda x: x - 13 * 6 * functional.mean(x, (2, 3), True),
    ),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    ),
    "interpolate with antialias": (
        lambda x: F.interpolate(x, (9, 9), mode="bilinear", antialias=True),
        lambda x: functional.interpolate(x, (9, 9), mode="bilinear", antialias=True),
    ),
    "interpolate to a size": (
        lambda x: F.interpolate(x, (21, 9), mode="bicubic", align_corners=True),
        lambda x: functional.interpolate(x, (21, 9), mode="bicubic", align_corners=True),
    ),
    "down and up": (
        lambda x: x + F.interpolate(F.interpolate(x, (8, 3)), (13, 6)),
        lambda x: x + functional.interpolate(functional.interpolate(x, (8, 3)), (13, 6)),
    ),
    "pad": (
        lambda x: F.pad(x, (1, 1, 2, 1), "reflect"),
        lambda x: functional.pad(x, (1, 1, 2, 1), "reflect"),
    ),
    "crop": (
        lambda x: F.pad(x, (0, 0, -2, -1)),
        lambda x: functional.pad(x, (0, 0, -2, -1)),
    ),
    "roll": (
        lambda x: torch.roll(x, (3, -1), (-2, -1)),
        lambda x: functional.roll(x, (3, -1), (-2, -1)),
    ),
}
SUBSTITUTE = {
    "mean": "mean", "mean over rows": "mean", "mean of all": "mean", "sum": "mean",
    "interpolate": "interpolate", "interpolate with antialias": "interpolate",
    "interpolate to a size": "interpolate",
    "down and up": "interpolate", "pad": "pad", "crop": "pad", "roll": "roll",
}  # fmt: skip


def _refused(code, message):
    with entry(message), pytest.raises(UserError, match=message) as caught:
        convert_to_domain_parallel(
            Model(code), counting_manager(3), input_shape=SHAPE, whole_ops="refuse"
        )
    assert "\n" not in str(caught.value), message


def test_a_refusal_names_the_line_and_what_to_use_instead():
    for name, (torchs, _) in PAIRS.items():
        use = rf"Use credit_dp\.domain_parallel\.functional\.{SUBSTITUTE[name]}\b"
        _refused(torchs, rf"model \(Model\), \S+test_functional\.py:\d+: aten\.\w+: .*{use}")
    for code in (
        lambda x: x.flip(-2),
        lambda x: x.cumsum(-2),
        lambda x: x[..., 1:, :],
        lambda x: x.flatten(1).view(x.shape[0], -1, 4, x.shape[-1])[:, :4],
    ):
        _refused(code, r"test_functional\.py:\d+: aten\.\w+: .* custom_converters=")
    twice = r"test_functional\.py:\d+: control flow or, where the whole globe's is needed, a size"
    _refused(lambda x: functional.interpolate(x, (2 * x.shape[-2], 6)), twice)


@pytest.mark.parametrize("ranks", THREADS)
def test_exact(ranks):
    for name, (_, ours) in PAIRS.items():
        with entry(name):
            on_threads(ranks, assert_same_as_whole_globe, Model, (ours,), SHAPE, MODEL)


def _exact_on_gloo(manager):
    for name, (_, ours) in PAIRS.items():
        with entry(name):
            case = (Model, (ours,), (1, *SHAPE[1:]), MODEL, 0.0, False)
            assert_same_as_whole_globe(manager, *case)


@pytest.mark.slow
def test_exact_on_gloo_ranks_without_a_plan():
    on_processes(3, _exact_on_gloo)


def test_plain_torch_on_a_model_that_was_not_converted():
    x = torch.randn(SHAPE)
    for name, (torchs, ours) in PAIRS.items():
        with entry(name):
            torch.testing.assert_close(ours(x), torchs(x))
    assert active_context() is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", THREADS)
@given(
    rows=st.integers(8, 20),
    sides=st.tuples(st.integers(-2, 5), st.integers(-2, 5)),
    shift=st.integers(-9, 9),
    mode=st.sampled_from(["constant", "replicate", "reflect"]),
)
def test_several_in_one_model(ranks, rows, sides, shift, mode):
    assume(rows + sum(sides) >= ranks)

    def code(x):
        x = functional.roll(x - functional.mean(x, (1, 2), True), shift, 2)
        x = functional.pad(x, (0, 0, *sides), mode)
        return functional.interpolate(x, scale_factor=1.5, mode="bilinear")

    on_threads(ranks, assert_same_as_whole_globe, Model, (code,), (1, 4, rows, 5), MODEL)


def _channels_last(x):
    x = x.movedim(1, -1)
    x = functional.roll(x - functional.mean(x, 1, keepdim=True), 2, 1)
    return (x * functional.mean(x, 3, keepdim=True)).movedim(-1, 1)


def test_rows_elsewhere_than_in_the_last_dimension_but_one():
    on_threads(3, assert_same_as_whole_globe, Model, (_channels_last,), SHAPE, MODEL)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return _gated(self.conv(x))


def _gated(x, manager=None):
    return x * torch.sigmoid(functional.mean(x, (-2, -1), keepdim=True, manager=manager))


class Checkpointed(nn.Module):
    """Recomputes in backward: a module, a method, or a function that belongs to no module."""

    def __init__(self, what):
        super().__init__()
        self.block = Block()
        self.what = what
        self.manager = None

    def forward(self, x):
        if self.what == "function":
            y = self.block.conv(x)
            return checkpoint(
                _gated, y, self.manager, use_reentrant=False, preserve_rng_state=False
            )
        what = {"module": self.block, "method": self.block.forward}[self.what]
        return checkpoint(what, x, use_reentrant=False, preserve_rng_state=False)


def test_recomputed_in_backward():
    for what in ("module", "method"):
        on_threads(3, assert_same_as_whole_globe, Checkpointed, (what,), SHAPE, MODEL)


def _recomputed_function(manager):
    generator = seeded(0)
    plain = Block().double()
    for parameter in plain.parameters():
        parameter.data.normal_(generator=generator)
    x, c = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
    y = plain(x)
    (expected,) = torch.autograd.grad(y, plain.conv.weight, c)

    model = Checkpointed("function").double()
    model.block.load_state_dict(plain.state_dict())
    convert_to_domain_parallel(model, manager, input_shape=SHAPE)
    band = model(shard_tensor(x, manager=manager))
    with pytest.raises(UserError, match=r"functional\.mean.*Pass manager=") as caught:
        band.backward(shard_tensor(c, manager=manager))
    assert "\n" not in str(caught.value)

    model.zero_grad()
    model.manager = manager
    model(shard_tensor(x, manager=manager)).backward(shard_tensor(c, manager=manager))
    total = manager.transport.all_reduce(model.block.conv.weight.grad)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11)


def test_a_recomputed_function_needs_the_manager():
    on_threads(3, _recomputed_function)


def test_a_recomputed_function_of_a_plain_model_is_torchs(monkeypatch):
    # Converted models of other tests may still exist.
    monkeypatch.setattr(functional, "_live_contexts", WeakSet())
    x = torch.randn(SHAPE, requires_grad=True)
    Checkpointed("function")(x).sum().backward()
    assert x.grad is not None


def test_a_plain_model_stays_plain_beside_a_converted_one():
    def both(manager):
        x = torch.randn(SHAPE, generator=seeded(0))
        plain = Model(PAIRS["mean"][1])
        expected = plain(x)
        sharded = convert_to_domain_parallel(copy.deepcopy(plain), manager, input_shape=SHAPE)
        sharded(shard_tensor(x, manager=manager))
        sent = manager.transport.traffic.collectives
        torch.testing.assert_close(plain(x), expected)
        assert manager.transport.traffic.collectives == sent > 0

    on_threads(2, both)


@pytest.mark.slow
def test_planned_calls_gather_no_row_counts():
    def counted(manager):
        model = Model(PAIRS["roll"][1])
        convert_to_domain_parallel(model, manager, input_shape=SHAPE)
        model(torch.zeros(2, 4, manager.partition(13).sizes[manager.domain_rank], 6))
        assert manager.transport.traffic.collectives == 0

    on_threads(3, counted)


class Chooses(nn.Module):
    """Makes a call that the plan has not seen if `switch` is set."""

    def __init__(self):
        super().__init__()
        self.switch = False

    def forward(self, x):
        return functional.roll(x, 2, -2) if self.switch else x


def test_a_call_that_was_not_planned_is_refused():
    def chooses(manager):
        model = convert_to_domain_parallel(Chooses(), manager, input_shape=SHAPE)
        x = torch.arange(13.0).expand(1, 1, 13).mT.expand(2, 4, 13, 6)
        band = shard_tensor(x, manager=manager)
        assert torch.equal(model(band), band)
        model.switch = True
        with pytest.raises(UserError, match=r"functional\.roll.*plan has not seen this call"):
            model(band)
        replan(model, SHAPE)
        assert torch.equal(gather_tensor(model(band), manager=manager), x.roll(2, -2))
        assert convert_from_domain_parallel(model) is model
        assert torch.equal(model(x), x.roll(2, -2))

    on_threads(3, chooses)


def test_outside_of_any_model_with_a_manager():
    def alone(manager):
        x = torch.arange(13.0).expand(1, 1, 13).mT.expand(2, 4, 13, 6).contiguous()
        band = shard_tensor(x, manager=manager)
        torch.testing.assert_close(
            functional.mean(band, (-2, -1), manager=manager), x.mean((-2, -1))
        )
        torch.testing.assert_close(functional.mean(band, 1, manager=manager), band.mean(1))
        rolled = functional.roll(band, 1, -2, manager=manager)
        assert torch.equal(gather_tensor(rolled, manager=manager), x.roll(1, -2))
        up = functional.interpolate(band, (26, 6), manager=manager)
        assert torch.equal(gather_tensor(up, manager=manager), F.interpolate(x, (26, 6)))

    on_threads(3, alone)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.switch = False

    def forward(self, x):
        if self.switch:
            raise ValueError("on purpose")
        return x


@pytest.mark.slow
def test_an_error_leaves_no_model_running():
    def fails(manager):
        model = convert_to_domain_parallel(Fails(), manager)
        model(torch.zeros(1, 1, 4, 4))
        model.switch = True
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.zeros(1, 1, 4, 4))
        assert active_context() is None

    on_threads(2, fails)


def test_an_error_of_the_model_is_raised_with_its_cause():
    def fails(manager):
        model = Fails()
        model.switch = True
        with pytest.raises(
            UserError, match=r"functional\.py:\d+: fails on the whole.*on purpose"
        ) as caught:
            convert_to_domain_parallel(model, manager, input_shape=SHAPE, whole_ops="refuse")
        assert isinstance(caught.value.__cause__, ValueError)
        assert not model._forward_hooks

    on_threads(2, fails)
