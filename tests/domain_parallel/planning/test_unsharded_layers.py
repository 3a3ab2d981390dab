"""Layers of torch that stay as they are: they keep rows apart, or compute on the globe."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import DEVICE, on_threads
from tests.tables import entry

SHAPE = (2, 4, 13, 6)
SETTINGS = {nn.Threshold: (0.1, 0.2), nn.GLU: (1,)}
OTHERS = (
    nn.MultiheadAttention, nn.RReLU, nn.LogSoftmax, nn.Softmax, nn.Softmax2d, nn.Softmin,
)  # fmt: skip
# Of one entry each, without chance.
ACTIVATIONS = [
    kind
    for kind in vars(nn.modules.activation).values()
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind.__module__ == "torch.nn.modules.activation"
    and kind not in OTHERS
]
IN_PLACE = [kind for kind in ACTIVATIONS if "inplace" in inspect.signature(kind).parameters]


class _Activated(nn.Module):
    """Every activation of a convolution of its own, one of them also in place."""

    def __init__(self, kinds, **settings):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), kind(*SETTINGS.get(kind, ()), **settings))
            for kind in kinds
        )

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def test_every_activation_stays():
    assert len(ACTIVATIONS) > 20
    assert len(IN_PLACE) > 8
    on_threads(3, assert_same_as_whole_globe, _Activated, (ACTIVATIONS,), SHAPE, 1e-11)
    in_place = (lambda: _Activated(IN_PLACE, inplace=True), (), SHAPE, 1e-11)
    on_threads(3, assert_same_as_whole_globe, *in_place)


class _AlongLongitude(nn.Module):
    """A layer on one row's columns as tokens; `by_row` false: on one column's rows."""

    def __init__(self, make, by_row=True):
        super().__init__()
        self.conv, self.layer, self.by_row = nn.Conv2d(4, 4, 3, padding=1), make(), by_row

    def forward(self, x):
        x = self.conv(x)
        x = x.permute(0, 2, 3, 1) if self.by_row else x.permute(0, 3, 2, 1)
        tokens = x.flatten(0, 1)
        made = self._called(tokens).view(x.shape)
        return made.permute(0, 3, 1, 2) if self.by_row else made.permute(0, 3, 2, 1)

    def _called(self, tokens):
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(tokens, tokens, tokens)[0]
        if isinstance(self.layer, nn.GRU):
            return self.layer(tokens, tokens[:, :1].transpose(0, 1).contiguous())[0]
        if isinstance(self.layer, nn.GRUCell):
            return self.layer(tokens.flatten(0, 1), tokens.flatten(0, 1))
        if isinstance(self.layer, nn.LSTMCell):
            return self.layer(tokens.flatten(0, 1), (tokens.flatten(0, 1),) * 2)[0]
        return self.layer(tokens)


LAYERS = {
    "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, batch_first=True),
    "gru cell": lambda: nn.GRUCell(4, 4),
    "lstm cell": lambda: nn.LSTMCell(4, 4),
}


@pytest.mark.slow
def test_along_longitude_they_are_exact():
    for name, make in LAYERS.items():
        if DEVICE != "cpu" and ("gru" in name or "lstm" in name):
            continue  # recurrent layers have kernels of their own on GPUs, which have no rule
        with entry(name):
            on_threads(3, assert_same_as_whole_globe, _AlongLongitude, (make,), SHAPE, 1e-11)


@pytest.mark.slow
def test_along_rows_they_are_exact():
    for name in ("attention", "transformer", "gru"):
        with entry(name):
            args = LAYERS[name], False
            on_threads(3, assert_same_as_whole_globe, _AlongLongitude, args, SHAPE, 1e-11)


class _Kinds(nn.Module):
    """A number for each kind of surface, looked up, and channels in another order."""

    def __init__(self):
        super().__init__()
        self.conv, self.table = nn.Conv2d(4, 4, 3, padding=1), nn.Embedding(3, 4)
        self.shuffle = nn.ChannelShuffle(2)

    def forward(self, x):
        kinds = (x[:, 0] > 0).long()
        return self.shuffle(self.conv(x)) + self.table(kinds).permute(0, 3, 1, 2)


def test_an_embedding_of_a_field_of_numbers_and_shuffled_channels():
    on_threads(3, assert_same_as_whole_globe, _Kinds, (), SHAPE, 1e-11)
