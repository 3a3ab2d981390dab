"""The audit of code between layers accepts row-local operations and refuses all others."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, functional
from credit_dp.domain_parallel.decide import counting_manager
from credit_dp.errors import UserError
from tests.domain_parallel.equality import assert_same_as_whole_globe
from tests.ranks import RankError, on_threads
from tests.tables import entry
from tests.tier_cases import every

SHAPE = (2, 4, 13, 6)


class Model(nn.Module):
    """A convolution, some code, a convolution."""

    def __init__(self, code):
        super().__init__()
        self.before, self.after = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.code = code

    def forward(self, x):
        unused = self.linear(x.new_zeros(4)) + self.norm(x.new_zeros(4)) + self.scale[:, 0, 0]
        return self.after(self.code(self, self.before(x)) + 0 * unused.sum())


def _tokens(m, x):
    tokens = x.flatten(2).transpose(1, 2)
    return m.norm(m.linear(tokens)).transpose(1, 2).reshape(x.shape)


def _attention_along_longitude(m, x):
    rows = x.permute(0, 2, 3, 1).flatten(0, 1)
    rows = rows + torch.softmax(rows @ rows.transpose(1, 2), -1) @ rows
    return rows.unflatten(0, (x.shape[0], x.shape[2])).permute(0, 3, 1, 2)


def _fused_attention(m, x):
    rows = x.permute(0, 2, 3, 1)
    return F.scaled_dot_product_attention(rows, rows, rows).permute(0, 3, 1, 2)


def _columns(t, x=None):
    """Fold rows into the batch, or unfold as `x` is."""
    if x is None:
        return t.movedim(2, 1).flatten(0, 1)
    return t.unflatten(0, (x.shape[0], x.shape[2])).movedim(1, 2)


def _filtered(spectrum):
    parts = torch.view_as_real(spectrum)
    return torch.view_as_complex(2 * parts) + spectrum.conj() * spectrum.real + 1j * spectrum.imag


ROW_LOCAL = {
    "residual": lambda m, x: x + F.gelu(x) * m.scale,
    "channel mean": lambda m, x: x - x.mean(1, keepdim=True),
    "longitude mean": lambda m, x: x - x.mean(-1).unsqueeze(-1),
    "channel softmax": lambda m, x: x.softmax(1),
    "tokens": _tokens,
    "attention along longitude": _attention_along_longitude,
    "fused attention along longitude": _fused_attention,
    "halves": lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "slices": lambda m, x: torch.cat([x[:, 2:], x[:, :2]], 1)[..., :, :],
    "longitude roll": lambda m, x: x.roll(2, -1).flip(-1),
    "longitude pad": lambda m, x: F.pad(x, (1, 1))[..., 1:-1],
    "longitude reflected": lambda m, x: F.pad(x, (1, 1, 0, 0), mode="reflect")[..., 2:],
    "longitude repeated": lambda m, x: F.pad(x, (1, 1, 0, 0), mode="replicate")[..., 2:],
    "longitude wrapped": lambda m, x: F.pad(x, (1, 1, 0, 0), mode="circular")[..., 2:],
    "channels by number": lambda m, x: x[:, [1, 0, 3, 2]],
    "largest channel": lambda m, x: x / (1 + x.abs().max(1, keepdim=True).values),
    "unit length": lambda m, x: F.normalize(x, dim=1),
    "repeat": lambda m, x: x.repeat(1, 2, 1, 1)[:, ::2],
    "expand": lambda m, x: x.expand(3, *x.shape)[1:].mean(0),
    "spectrum along longitude": lambda m, x: torch.fft.irfft(2 * torch.fft.rfft(x), n=x.shape[-1]),
    "spread embedding": lambda m, x: torch.cat([m.scale.expand_as(x), x], 1)[:, 2:6],
    "zeros like tokens": lambda m, x: _columns(torch.zeros_like(_columns(x)) + _columns(x), x),
    "sorted along longitude": lambda m, x: x.sort().values,
    "halves of longitude": lambda m, x: F.glu(torch.cat([x, x], -1)),
    "einsum": lambda m, x: torch.einsum("bchw,cd->bdhw", x, m.linear.weight),
    "stack": lambda m, x: torch.stack([x, 2 * x], 1)[:, 1],
    "zeros": lambda m, x: x + torch.zeros_like(x) + x.new_zeros(x.shape),
    "shuffle": lambda m, x: F.pixel_shuffle(torch.cat([x] * 4, 1), 2).unflatten(-2, (-1, 2))[
        ..., 0, ::2
    ],
    "var": lambda m, x: x / (1 + x.var(1, keepdim=True)),
    "select": lambda m, x: x[:, 1][:, None] + x,
    "norm of channels": lambda m, x: m.norm(x.movedim(1, -1)).movedim(-1, 1),
    "where": lambda m, x: torch.where(x > 0, x, 0.1 * x),
    "glu": lambda m, x: F.glu(torch.cat([x, x], 1), 1),
    "split": lambda m, x: sum(x.split([1, 3], 1)[0] * 2 for _ in range(2)) + x,
    "in place": lambda m, x: x.clone().add_(1).mul_(m.scale),
    "largest channels": lambda m, x: x.topk(4, 1).values,
    "channels by order": lambda m, x: x.gather(1, x.detach().argsort(1)),
    "product of channels": lambda m, x: x.cumprod(1),
    "largest so far": lambda m, x: x.cummax(-1).values,
    "any channel": lambda m, x: x * (x > 0).any(1, keepdim=True) * (x > -9).all(1, True),
    "median of channels": lambda m, x: x + x.median(1, keepdim=True).values,
    "complex spectrum": lambda m, x: torch.fft.irfft(_filtered(torch.fft.rfft(x)), x.shape[-1]),
    "masked": lambda m, x: x.masked_fill(x > 0, x.new_zeros(())),
    "log sigmoid": lambda m, x: F.logsigmoid(x),
}

MIXING = {
    "mean": lambda m, x: x - x.mean((-2, -1), keepdim=True),
    "mean over rows": lambda m, x: x - x.mean(-2, keepdim=True),
    "sum": lambda m, x: x - x.sum(),
    "max": lambda m, x: x - x.amax((2, 3), keepdim=True),
    "softmax": lambda m, x: x.softmax(-2),
    "roll": lambda m, x: x.roll(1, -2),
    "roll of everything": lambda m, x: x.roll(1),
    "flip": lambda m, x: x.flip(2),
    "cumsum": lambda m, x: x.cumsum(-2),
    "sort": lambda m, x: x.sort(2).values,
    "rows in a number": lambda m, x: x / x.shape[-2],
    "rows in a range": lambda m, x: x + torch.arange(x.shape[-2], dtype=x.dtype)[:, None],
    "rows in a tensor": lambda m, x: x / torch.tensor(float(x.shape[-2])),
    "rows in a filled tensor": lambda m, x: x * torch.full((), float(x.shape[-2])).to(x),
    "rows in a channel": lambda m, x: x + x[:, x.shape[-2] % 4 :][:, :1],
    "rows in an operand": lambda m, x: x + (x if x.shape[-2] > 10 else m.scale),
    "rows in a number of operands": lambda m, x: (
        torch.cat([x] * (1 + x.shape[-2] // 10), 1).unflatten(1, (-1, 4)).sum(1)
    ),
    "slice": lambda m, x: x[..., 1:, :],
    "every second row": lambda m, x: F.interpolate(x[..., ::2, :], size=x.shape[-2:]),
    "pad": lambda m, x: F.pad(x, (0, 0, 1, 0))[..., :-1, :],
    "pad by reflection": lambda m, x: F.pad(x, (1, 1, 1, 1), mode="reflect")[..., 2:, 2:],
    "circular pad": lambda m, x: F.pad(x, (0, 0, 1, 1), mode="circular")[..., 2:, :],
    "upsample": lambda m, x: F.interpolate(x, scale_factor=2.0, mode="bilinear")[..., ::2, ::2],
    "pool": lambda m, x: F.avg_pool2d(x, 3, 1, 1),
    "convolution": lambda m, x: F.conv2d(x, m.before.weight, padding=1),
    "group norm": lambda m, x: F.group_norm(x, 2),
    "batch norm": lambda m, x: F.batch_norm(x, None, None, training=True),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "product over rows": lambda m, x: x + (x.transpose(-2, -1) @ x).mean(),
    "concatenation": lambda m, x: torch.cat([x[..., -1:, :], x], -2)[..., :-1, :],
    "transposed": lambda m, x: x.transpose(-2, -1),
    "index": lambda m, x: x[:, :, torch.arange(x.shape[-2] - 1, -1, -1)],
    "largest rows": lambda m, x: x.topk(x.shape[-2], 2).values,
    "rows by order": lambda m, x: x.gather(2, x.detach().argsort(1).clamp(max=3)),
    "product of rows": lambda m, x: x.cumprod(2),
    "any row": lambda m, x: x * (x > 0.8).any(2, keepdim=True),
    "median": lambda m, x: x - x.median(),
    "median of rows": lambda m, x: x - x.median(-2, keepdim=True).values,
    "control flow": lambda m, x: x if x.shape[-2] > 10 else 2 * x,
    "rows merged with channels": lambda m, x: m.linear(x.reshape(x.shape[0], -1, 4)).view(x.shape),
}


@pytest.mark.parametrize("name", every(8, ROW_LOCAL))
def test_row_local_code_passes_and_is_exact(name):
    on_threads(3, assert_same_as_whole_globe, Model, (ROW_LOCAL[name],), SHAPE, 1e-11)


def _refused(code, batch):
    """Plan for a rank of three, which needs no other one."""
    model = Model(code).double()
    with pytest.raises(UserError, match=r"test_audit\.py:\d+: |^after: ") as caught:
        convert_to_domain_parallel(
            model, counting_manager(3), input_shape=(batch, *SHAPE[1:]), whole_ops="refuse"
        )
    assert "\n" not in str(caught.value)
    assert re.search("custom_converters|Move them|draws", str(caught.value))


def test_mixing_code_is_refused():
    for name, code in MIXING.items():
        with entry(name):
            _refused(code, 2)


@pytest.mark.parametrize("name", every(14, MIXING))
def test_what_is_refused_would_have_been_wrong(name, monkeypatch):
    """Without the audit the cases above raise or give wrong results: no false alarms."""
    monkeypatch.setattr("credit_dp.domain_parallel.planning.model_plan.audit", lambda *_: None)
    with pytest.raises(RankError, match=r"output|gradient|size|rows|length|dimension"):
        on_threads(3, assert_same_as_whole_globe, Model, (MIXING[name],), SHAPE, 1e-11)


def _fold(m, x):
    """Rows and samples change places, which one sample would not show."""
    folded = x.permute(2, 0, 1, 3).reshape(-1, *x.shape[1:2], x.shape[-1])
    return folded.reshape(x.shape[0], x.shape[2], *x.shape[1:2], x.shape[-1]).permute(0, 2, 1, 3)


@torch.library.custom_op("credit_dp_tests::centred", mutates_args=())
def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean((-2, -1), keepdim=True)


_centred.register_fake(torch.empty_like)


@torch.library.custom_op("credit_dp_tests::centre", mutates_args=("x",))
def _centre(x: torch.Tensor) -> None:
    x -= x.mean((-2, -1), keepdim=True)


def _centred_in_place(m, x):
    y = x.clone()
    _centre(y)
    return x + y


class _MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean((-2, -1), keepdim=True)


def _addend_of_other_order(m, x):
    """The rows of the product are (sample, row), those of the addend (row, sample)."""
    rows = x.permute(0, 2, 3, 1).reshape(-1, 4 * x.shape[-1])
    addend = x.permute(2, 0, 3, 1).reshape(-1, 4 * x.shape[-1])
    made = torch.addmm(addend, rows, torch.eye(4 * x.shape[-1], dtype=x.dtype))
    return made.view(x.shape[0], x.shape[2], x.shape[3], 4).permute(0, 3, 1, 2)


# Their results differ only at other batches, in another mode, or by chance.
HIDDEN = {
    "an operation of one's own": lambda m, x: x + _centred(x),
    "an operation of one's own, last": lambda m, x: _centred(x),
    "an operation of one's own, in place": _centred_in_place,
    "a backward of one's own": lambda m, x: _MixesBackward.apply(x),
    "an addend of another order": _addend_of_other_order,
    "a batch of one": lambda m, x: x + x.squeeze().cumsum(1).view(x.shape),
    "a batch of one, decided": lambda m, x: x - x.mean((2, 3), True) if len(x) == 1 else x,
    "another batch": _fold,
    "evaluation only": lambda m, x: x if m.training else x - x.mean((-2, -1), keepdim=True),
    "channels dropped by chance": lambda m, x: F.dropout2d(x, training=m.training),
    "samples dropped by chance": lambda m, x: x * (torch.rand(x.shape[0], 1, 1, 1) > 0.5),
}


def test_what_one_run_would_not_show_is_refused():
    for name, code in HIDDEN.items():
        with entry(name):
            _refused(code, 1)


def test_a_size_taken_from_a_tensor_is_refused_with_what_works():
    for resize in (F.interpolate, functional.interpolate):
        model = Model(lambda m, x, resize=resize: resize(x, size=(2 * x.shape[-2], 6)))
        with pytest.raises(UserError, match=r"scale_factor.* constants, or nn\.Upsample"):
            convert_to_domain_parallel(
                model, counting_manager(2), input_shape=SHAPE, whole_ops="refuse"
            )


class LosesRows(nn.Module):
    def forward(self, x):
        return x.mean(-2)


class Scale(nn.Module):
    def forward(self, x):
        return 2 * x


def test_leaves_of_user_models_are_audited():
    def build():
        return nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), Scale())

    on_threads(3, assert_same_as_whole_globe, build, (), SHAPE)
    with pytest.raises(UserError, match=r"test_audit\.py:\d+: aten\.mean: mixes rows"):
        convert_to_domain_parallel(
            nn.Sequential(LosesRows()), counting_manager(2), input_shape=SHAPE, whole_ops="refuse"
        )


def test_trusted_modules_are_not_audited_and_listed(caplog):
    def trusting(manager):
        model = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), LosesRows())
        converters = {LosesRows: lambda module: module}
        convert_to_domain_parallel(model, manager, custom_converters=converters, input_shape=SHAPE)
        assert len(model[1]._forward_hooks) == 1  # the one that says which model runs

    with caplog.at_level(logging.INFO):
        on_threads(2, trusting)
    assert "trusted: 1 LosesRows" in caplog.text
