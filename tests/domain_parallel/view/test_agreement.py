"""Ranks decide alike, and what can't be as on one process is refused on all of them."""

from __future__ import annotations

import gc
import warnings
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.domain_parallel.thread_ranks import RankError
from credit_dp.domain_parallel.view import function_rules, running
from credit_dp.domain_parallel.view.attach import attach_view, attached_view
from credit_dp.domain_parallel.view.tensor import GlobalTensor
from credit_dp.errors import UserError
from tests.ranks import cpu_only, on_processes, on_threads, seeded

SHAPE = (2, 8, 7, 6)


class _Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _run(function, ranks=2, shape=SHAPE):
    """Return what a function of the shown field returns on each rank, and the view."""
    x = torch.randn(shape, generator=seeded(0))

    def run(manager):
        results = []

        def forward(x):
            results.append(function(x))
            return x * 1

        model = _Model(forward)
        attach_view(model, manager, [shape])
        model(shard_tensor(x, manager=manager).clone())
        return results[0], attached_view(model)

    return list(zip(*on_threads(ranks, run), strict=True))


def _refuses(function, message, ranks=2):
    """Check that all ranks refuse a function."""

    def refuse(x):
        with pytest.raises(UserError, match=message):
            function(x)
        return True

    assert _run(refuse, ranks)[0] == (True,) * ranks


def _add_one(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)


def test_functions_that_write_to_a_gathered_field_are_refused():
    with warnings.catch_warnings():  # a DeprecationWarning or FutureWarning
        warnings.filterwarnings("ignore", "`torch.jit.script")
        scripted = torch.jit.script(_add_one)
    for function in (scripted, lambda x: _Scale.apply(x)):
        _refuses(function, "in place")


DRAWING = {
    "pool": lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5)),
    "pool of a mean": lambda x: F.fractional_max_pool2d(x.mean(1), 2, output_ratio=(0.5, 0.5)),
    "normal": lambda x: nn.init.normal_(torch.empty(8)),
    "kaiming": lambda x: nn.init.kaiming_uniform_(torch.empty(8, 8)),
    "uniform": lambda x: nn.init.uniform_(x.mean((2, 3)).detach()),
    "svd": lambda x: torch.svd_lowrank(x.mean(2).detach(), 2)[0].abs(),
}


def _draw(x):
    return {name: draw(x).flatten() for name, draw in DRAWING.items()}


def _draw_on_bands(manager, x):
    """Return what ranks draw that begin with other states of their generators."""
    torch.manual_seed(manager.domain_rank)
    model = _Model(_draw)
    attach_view(model, manager, [SHAPE])
    return model(shard_tensor(x, manager=manager).clone())


def test_functions_that_draw_draw_on_all_ranks_what_one_process_does():
    x = torch.randn(SHAPE, generator=seeded(0), dtype=torch.float64)
    torch.manual_seed(0)
    expected = _draw(x)
    for drawn in on_processes(3, _draw_on_bands, x):
        for name, values in expected.items():
            torch.testing.assert_close(drawn[name], values, msg=lambda t, n=name: f"{n}: {t}")


def test_ranks_agree_whether_a_field_is_contiguous():
    # The middle band of a slice is contiguous, the others are not.
    assert _run(lambda x: x[:, :, 1:-1].is_contiguous(), 3)[0] == (False,) * 3
    assert _run(lambda x: (x * 2).is_contiguous(), 3)[0] == (True,) * 3


def test_strides_of_what_was_moved_or_gathered_are_refused():
    for function in (
        lambda x: torch.special.i1(x.permute(0, 2, 3, 1)),
        lambda x: x.permute(0, 2, 3, 1)[:, torch.tensor([6, 5, 4, 3, 2, 1, 0])],
        lambda x: x[:, :, -1],
    ):
        _refuses(lambda x, function=function: function(x).stride(), "stride")


def test_strides_of_whole_tensors_and_of_views_are_known():
    assert _run(lambda x: x.mean(2).transpose(1, 2).stride())[0] == ((48, 1, 6),) * 2
    assert _run(lambda x: x.permute(0, 2, 3, 1).stride())[0] == ((336, 6, 1, 42),) * 2


def test_an_error_after_messages_is_raised(monkeypatch):
    def fail_after_messages(func, args, kwargs):
        args[0].view_.manager.transport.all_gather(torch.zeros(1))
        raise IndexError("of this rank")

    monkeypatch.setitem(function_rules.RULES, torch.sin, fail_after_messages)
    with pytest.raises(RankError, match="of this rank"):
        _run(torch.sin)


def test_an_error_before_messages_runs_the_function_whole(monkeypatch):
    def fail(func, args, kwargs):
        raise IndexError

    monkeypatch.setitem(function_rules.RULES, torch.sin, fail)
    _, views = _run(torch.sin)
    assert [dict(view.whole_calls) for view in views] == [{"sin": 1}] * 2


DECIDE = [
    lambda score, x: score.max().item(),
    lambda score, x: score.tolist(),
    lambda score, x: [bool(s > 0.5) for s in score],
    lambda score, x: [float(s) for s in score],
    lambda score, x: [int(s * 2**52) for s in score],
    lambda score, x: score.equal(torch.full_like(score, 0.5)),
    lambda score, x: torch.allclose(score, torch.full_like(score, 0.5), rtol=0, atol=0),
    lambda score, x: (score > 0.5).nonzero().tolist(),
    lambda score, x: torch.argwhere(score > 0.5).tolist(),
    lambda score, x: (score.unique().tolist(), torch.unique(score).tolist()),
    lambda score, x: score.unique_consecutive().tolist(),
    lambda score, x: len(score[score > 0.5]),
    lambda score, x: len(torch.masked_select(score, score > 0.5)),
    lambda score, x: x[:, score > 0.5].shape,
    lambda score, x: len(torch.where(score > 0.5)[0]),
    lambda score, x: 0.5 + 3e-15 in score,
    lambda score, x: len(torch.bincount((score > 0.5).long())),
    lambda score, x: F.one_hot((score > 0.5).long()).shape,
    lambda score, x: score.repeat_interleave((score > 0.5).long()).shape,
    lambda score, x: [len(y) for y in score.tensor_split((score > 0.5).long()[:3].cpu())],
    lambda score, x: _assign_by_mask(score).shape,
    lambda score, x: torch.cat([y.sum((1, 2, 3)) for y in (x[:, :, score.argsort()],)]).tolist(),
    lambda score, x: x.index_select(2, score.argsort())[0, 0, :, 0].tolist(),
]


def test_ranks_decide_by_the_values_of_the_first_rank():
    # As on GPUs, where the last bit of what each rank computes may differ.
    def function(x):
        sign = (1, -1, 0)[x.view_.rank]
        score = 0.5 + sign * 1e-15 * torch.arange(7, dtype=torch.float64)
        x = x[:, :7].double()
        return [decide(GlobalTensor(score.clone(), None, x.view_), x) for decide in DECIDE]

    results = _run(function, 3)[0]
    for i, of_ranks in enumerate(zip(*results, strict=True)):
        assert of_ranks == (of_ranks[0],) * 3, f"{i} of DECIDE"


def _assign_by_mask(score):
    score = score * 1
    score[score > 0.5] = score[score > 0.5] * 2
    return score


def test_a_part_of_a_mask_is_a_view():
    def change(x):
        mask = x.mean((0, 2, 3)) > 99
        mask[:4].fill_(True)
        mask[5] |= True
        return mask.tolist()

    expected = [True] * 4 + [False, True, False, False]
    assert _run(change)[0] == (expected, expected)


def _read_types(manager):
    def forward(x):
        values = x.mean((0, 2, 3))
        types = (torch.int16, torch.bool, torch.complex64, torch.bfloat16, torch.uint8)
        results.append([(values.abs() * 9).to(dtype).tolist() for dtype in types])
        return x * 1

    results = []
    x = torch.randn(SHAPE, generator=seeded(0))
    model = _Model(forward)
    attach_view(model, manager, [SHAPE])
    model(shard_tensor(x, manager=manager).clone())
    return results[0]


def test_values_of_all_types_are_read_on_processes():
    results = on_processes(3, _read_types)
    assert results == results[:1] * 3


@pytest.mark.slow
def test_functions_defined_in_a_forward_are_freed():
    functions = []

    def forward(x):
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        functions.append(weakref.ref(Double))
        return Double.apply(x).shape

    _run(forward)
    gc.collect()
    assert [function() for function in functions] == [None] * 2


def test_fields_in_reference_cycles_do_not_refuse_a_change_in_place():
    def change(x):
        y = x * 2
        cycle = [y.flip(2).view(y.shape), y[:, :, :2]]
        cycle.append(cycle)
        del cycle
        y.add_(1)
        return True

    gc.disable()
    try:
        assert _run(change)[0] == (True, True)
    finally:
        gc.enable()


def _one_bit_more(x):
    """Return a value that differs between ranks, as on GPUs the last bits may."""
    value = x.abs().mean()
    value.local.add_(x.view_.rank)
    return value


@cpu_only("NumPy has no arrays on GPUs")
def test_text_and_arrays_are_those_of_the_first_rank():
    def read(x):
        value = _one_bit_more(x)
        array = value.numpy()
        is_own = array.flags.writeable
        return f"{value:.4f}", float(array), float(np.asarray(value)), is_own, f"{x.sum():>9.3f}"

    texts, view = _run(read, 3)
    assert len({text[:3] for text in texts}) == 1
    assert all(text[3] for text in texts)
    assert view[0].whole_calls == {}


@cpu_only("NumPy has no arrays on GPUs")
def test_what_is_written_to_arrays_is_not_lost():
    def write(x):
        whole = x.mean((2, 3))
        whole.numpy()[0, 0] = 7.0
        field = np.asarray(x)
        for array in (field, x[:, :, :1].numpy()):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0
        return whole[0, 0].item(), field.shape

    assert _run(write)[0] == ((7.0, SHAPE),) * 2


def test_memory_that_is_a_copy_is_not_shared():
    for read in (torch.from_dlpack, np.from_dlpack):
        for field in (torch.clone, lambda x: x[:, :, :1]):
            _refuses(lambda x, read=read, f=field: read(f(x)), "memory of a tensor.*numpy")


def test_a_value_in_a_text_can_be_planned():
    class Says(nn.Module):
        def forward(self, x):
            self.text = f"{x.mean():.3f}"
            return torch.fft.rfft2(x).abs()

    def text(manager):
        model = Says()
        x = torch.ones(1, 2, 6, 4)
        convert_to_domain_parallel(model, manager, input_shape=x.shape)
        model(shard_tensor(x, manager=manager))
        return model.text

    assert on_threads(2, text) == ["1.000"] * 2


def _gathers_of_a_forward(manager):
    """Return how often a forward gathers, by itself and while a CUDA graph is captured."""
    model = _Model(lambda x: 2 * x)
    attach_view(model, manager, [SHAPE])
    band = shard_tensor(torch.ones(SHAPE), manager=manager)
    counts = []
    for captured in (False, True):
        gather = mock.Mock(wraps=manager.transport.all_gather)
        with (
            mock.patch.object(running, "is_captured", lambda device, captured=captured: captured),
            mock.patch.object(manager.transport, "all_gather", gather),
        ):
            model(band)
        counts.append(gather.call_count)
    return counts


def test_a_captured_forward_exchanges_no_numbers_of_python():
    """The host would wait for them, which a CUDA graph can't hold."""
    for outside, captured in on_processes(2, _gathers_of_a_forward):
        assert outside > 0
        assert captured == 0
