"""Parameters and buffers with rows: whole in `state_dict()`, a rank's rows in `forward`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from tests.domain_parallel.equality import MODEL, THREADS, assert_same_as_whole_globe
from tests.ranks import on_threads
from tests.tables import entry

SHAPE = (2, 4, 13, 6)
B, C, H, W = SHAPE


class Embeds(nn.Module):
    """A convolution, a row tensor that is joined with its output, a convolution."""

    def __init__(self, shape, join, buffer=False):
        super().__init__()
        self.before, self.after = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        values = torch.randn(shape)
        if buffer:
            self.register_buffer("rows", values)
        else:
            self.rows = nn.Parameter(values)
        self.join = join

    def forward(self, x):
        return self.after(self.join(self, self.before(x)))


def _tokens(m, x):
    tokens = x.flatten(2).mT + m.rows
    return torch.tanh(tokens).mT.reshape(x.shape)


def _resized(m, x):
    return x * F.interpolate(m.rows, x.shape[-2:], mode="bilinear")


def _prefix(m, x):
    return x + m.rows[:, :, : x.shape[-2]]


def _channels_last(m, x):
    return (x.movedim(1, -1) * m.rows + m.rows[..., :1]).movedim(-1, 1)


CASES = {
    "(1, C, H, W)": ((1, C, H, W), lambda m, x: x + m.rows),
    "(H, W)": ((H, W), lambda m, x: x * m.rows),
    "(H, 1)": ((H, 1), lambda m, x: x * m.rows.cos()),
    "(H,)": ((H,), lambda m, x: x * m.rows[:, None]),
    "(H, W, C)": ((H, W, C), _channels_last),
    "(1, H W, C)": ((1, H * W, C), _tokens),
    "(1, H W, C) unfolded": (
        (1, H * W, C),
        lambda m, x: x + m.rows.mT.unflatten(-1, (-1, x.shape[-1])),
    ),
    "(C, H, W) concatenated": (
        (C, H, W),
        lambda m, x: torch.cat([x, m.rows.expand_as(x)], 1)[:, ::2],
    ),
    "resized to the same size": ((1, C, H, W), _resized),
    "the first rows of as many": ((1, C, H, W), _prefix),
    "used twice": ((1, C, H, W), lambda m, x: (x + m.rows) * m.rows),
    "turned": ((W, H), lambda m, x: x + m.rows.mT),
}


@pytest.mark.parametrize("ranks", THREADS)
def test_exact(ranks):
    for name, case in CASES.items():
        with entry(name):
            on_threads(ranks, assert_same_as_whole_globe, Embeds, case, SHAPE, MODEL)


CASES_OF_BUFFERS = {
    **{name: CASES[name] for name in ("(1, C, H, W)", "(1, H W, C)")},
    "(1, 1, H, W) mask": ((1, 1, H, W), lambda m, x: torch.where(m.rows > 0, x, 0.1 * x)),
    "changed copy": ((1, C, H, W), lambda m, x: x + m.rows.clone().add_(1)),
}


def test_exact_buffers():
    for name, case in CASES_OF_BUFFERS.items():
        for planned in (True, False):
            args = (Embeds, (*case, True), SHAPE, MODEL, 0.0, planned)
            with entry((name, planned)):
                on_threads(4, assert_same_as_whole_globe, *args)


class Square(nn.Module):
    """As many rows as columns and channels: only one dimension is right."""

    def __init__(self, size, row_dim):
        super().__init__()
        self.conv = nn.Conv2d(size, size, 3, padding=1)
        self.rows = nn.Parameter(torch.randn(size, size, size))
        self.row_dim = row_dim

    def forward(self, x):
        x = self.conv(x)
        return (
            x + self.rows.movedim(self.row_dim, 1)
            if self.row_dim < 3
            else x + self.rows + self.rows.mT
        )


@pytest.mark.parametrize("ranks", THREADS)
@given(size=st.integers(8, 11), row_dim=st.sampled_from([0, 1, 2, 3]))
def test_dimensions_may_have_as_many_entries_as_there_are_rows(ranks, size, row_dim):
    shape = (1, size, size, size)
    on_threads(ranks, assert_same_as_whole_globe, Square, (size, row_dim), shape, MODEL)


class MoreThanRows(Embeds):
    def forward(self, x):
        x = super().forward(x)
        return x - x.mean(-2, keepdim=True)


class WithAndWithout(Embeds):
    """The same layer on a field and on a tensor without rows."""

    def forward(self, x):
        x = super().forward(x)
        return self.after(x) + self.after(x.mean((2, 3), True))


class InPlace(Embeds):
    def forward(self, x):
        self.rows.mul_(0.9)
        return super().forward(x)


class ViewInPlace(Embeds):
    def forward(self, x):
        self.rows[:, 0].zero_()
        return super().forward(x)


class Replaced(Embeds):
    def forward(self, x):
        self.rows = self.rows * 0.9
        return super().forward(x)


def test_what_else_is_done_to_them():
    for kind in (MoreThanRows, WithAndWithout):
        with entry(kind):
            on_threads(3, assert_same_as_whole_globe, kind, CASES["(H, W)"], SHAPE, MODEL)
    for kind in (InPlace, ViewInPlace, Replaced):
        with entry(kind):
            on_threads(3, assert_same_as_whole_globe, kind, (*CASES["(H, W)"], True), SHAPE, MODEL)


class Many(nn.Module):
    """Row tensors in lists and dictionaries, and in two modules, one of them checkpointed."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.several = nn.ParameterList([torch.randn(H, W), torch.randn(H, 1)])
        self.named = nn.ParameterDict({"a": torch.randn(1, C, H, 1)})
        self.first = Embeds(*CASES["(1, C, H, W)"])
        self.second = Embeds(*CASES["used twice"])
        self.second.rows = self.first.rows
        self.scale = nn.Parameter(torch.randn(H))  # as many as there are rows, by chance

    def forward(self, x):
        x = self.conv(x) * self.several[0] + self.several[1] * self.named["a"]
        x = checkpoint(self.first, x, use_reentrant=False, preserve_rng_state=False)
        x = checkpoint(self._add_rows, x, use_reentrant=False, preserve_rng_state=False)
        return self.second(self.first(x)) * self.scale.sum()

    def _add_rows(self, x):
        return torch.tanh(x + self.several[0])


def test_lists_dictionaries_sharing_and_recomputation():
    on_threads(3, assert_same_as_whole_globe, Many, (), SHAPE, MODEL)


def _twice(m, x):
    return x + m.rows * m.rows


def _complete_outside(manager, plain):
    model = copy.deepcopy(plain)
    state = copy.deepcopy(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    convert_to_domain_parallel(model, manager, input_shape=SHAPE)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert [name for name, _ in model.named_parameters()] == names
    assert model.first.rows is model.second.rows is dict(model.named_parameters())["first.rows"]
    assert model.several[0].shape == (H, W)
    assert type(model.first).__name__ == "Embeds"
    assert isinstance(model.first, Embeds)

    band = shard_tensor(torch.ones(SHAPE), manager=manager)
    expected = model(band)
    # A pickled copy knows its position in the mesh, but is not connected to other ranks.
    loaded = pickle.loads(pickle.dumps(model.first))  # noqa: S301
    assert torch.equal(loaded.rows, model.first.rows)
    assert isinstance(loaded, Embeds)
    torch.testing.assert_close(copy.deepcopy(model)(band), expected)
    other = Many()
    other.first.join = other.second.join = _twice
    convert_to_domain_parallel(other, manager, input_shape=SHAPE)
    other.load_state_dict(state, assign=True)
    torch.testing.assert_close(other(band), expected)

    assert convert_from_domain_parallel(model) is model
    assert type(model.first) is Embeds
    unsharded = model(torch.ones(SHAPE))
    torch.testing.assert_close(gather_tensor(expected, manager=manager), unsharded)


@pytest.mark.slow
def test_tensors_are_complete_outside_of_the_models_code():
    model = Many()
    model.first.join = model.second.join = _twice
    on_threads(2, _complete_outside, model)
