"""Any model converts by default; plans count what it sends, and limit what runs whole."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from credit_dp.domain_parallel import (
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    plan_report,
    replan,
    shard_tensor,
    verify_domain_parallel,
)
from credit_dp.domain_parallel import dry_run as dry_run_module
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.decide import decision_lines, whole_call_lines
from credit_dp.domain_parallel.dry_run import WholeCall, dry_run
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor.functions import Cube
from tests.domain_parallel.band_tensor.models import check
from tests.domain_parallel.equality import RANDOM_LOCK
from tests.ranks import DEVICE, on_threads
from tests.tier_cases import every

SHAPE = (2, 4, 13, 6)


class _Spectral(nn.Module):
    """A Fourier transform over rows, for which no layer has a rule."""

    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[-2:])


class _Rows(nn.Module):
    """A recurrent layer over rows."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(x.permute(0, 3, 2, 1).flatten(0, 1))
        return x + y.reshape(x.shape[0], x.shape[3], x.shape[2], 4).permute(0, 3, 2, 1)


class _Code(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _around(*layers):
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *layers, nn.Conv2d(4, 4, 1)).double()


def _global_norm(x):
    return x / (x.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()


def _take_rows_in_another_order(x):
    for _ in range(20):  # memory that is written to and freed before that of the index
        torch.zeros(4).add_(1)
    height = x.shape[-2]
    index = torch.tensor([5 * row % height for row in range(height)], device=x.device)
    return x + x.index_select(-2, index)


REFUSED = {
    "index": lambda: _Code(_take_rows_in_another_order),
    "fft": _Spectral,
    "lstm": _Rows,
    "fold": lambda: nn.Sequential(nn.Unfold(1), nn.Fold(SHAPE[-2:], 1)),
    "norm of the globe": lambda: _Code(_global_norm),
    "flip": lambda: _Code(lambda x: x + x.flip(-2)),
    "roll": lambda: _Code(lambda x: x * x.roll(1, -2)),
    "crop": lambda: _Code(lambda x: x[:, :, 1:-1]),
    "control flow": lambda: _Code(lambda x: x * 2 if x.shape[-2] > 8 else x),
    "function of a row": lambda: _Code(lambda x: x + Cube.apply(x[:, :, :1])),
    "few rows": lambda: nn.Sequential(nn.Conv2d(4, 4, 6, 6), nn.Upsample(SHAPE[-2:])),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", every(4, REFUSED, pytest.mark.exhaustive))
def test_what_the_layers_refuse_is_exact_by_default(name):
    result = verify_domain_parallel(lambda: _around(REFUSED[name]()), SHAPE, 3, device=DEVICE)
    assert result.passed, result.worst


def _first_forward(manager, model, x):
    model = convert_to_domain_parallel(copy.deepcopy(model), manager)
    band = shard_tensor(x, manager=manager).requires_grad_()
    y = model(band)
    assert attached_domain(model) is not None
    assert len(attached_domain(model).decision.input_shapes) == 1
    with torch.no_grad():
        assert torch.equal(model(band), y)
    y.square().sum().backward()
    weight = manager.transport.all_reduce(model[0].weight.grad)
    joined = [gather_tensor(t.detach(), manager=manager) for t in (y, band.grad)]
    restored = convert_from_domain_parallel(model)
    assert not restored._forward_pre_hooks
    return *joined, weight


@pytest.mark.parametrize("name", every(3, ["lstm", "fft", "fold"], pytest.mark.exhaustive))
def test_the_first_forward_plans_without_an_input_shape(name):
    model, x = _around(REFUSED[name]()), torch.randn(SHAPE, dtype=torch.float64)
    x.requires_grad_()
    y = model(x)
    y.square().sum().backward()
    expected = y.detach(), x.grad, model[0].weight.grad
    for tensors in on_threads(3, _first_forward, model, x.detach()):
        for pair in zip(tensors, expected, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-11)


class _TwoFields(nn.Module):
    def forward(self, fields, scale=None):
        return {"y": torch.fft.fft(fields["x"], dim=-2).real * scale, "z": fields["x"]}


def test_the_first_forward_takes_nested_and_keyword_inputs():
    x = torch.randn(SHAPE, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64)
    expected = _TwoFields()({"x": x}, scale=scale)["y"]

    def run(manager):
        model = convert_to_domain_parallel(_TwoFields(), manager)
        y = model({"x": shard_tensor(x, manager=manager)}, scale=scale)["y"]
        torch.testing.assert_close(gather_tensor(y, manager=manager), expected)

    on_threads(2, run)


def test_a_model_whose_layers_convert_has_no_domain():
    def run(manager):
        model = convert_to_domain_parallel(_around().float(), manager)
        model(torch.zeros(2, 4, manager.partition(13).sizes[manager.rank], 6))
        assert attached_domain(model) is None
        assert type(model[0]) is not nn.Conv2d

    on_threads(2, run)


def _manager(ranks=2):
    return DomainParallelManager(ranks, ranks, transport=CountingTransport(0, ranks))


def _converted(model, ranks=2, **options):
    options = {"input_shape": SHAPE, **options}
    return convert_to_domain_parallel(model, _manager(ranks), **options)


class _Inverts(nn.Module):
    """A function of matrices whose rows are those of the globe."""

    def forward(self, x):
        return x + torch.linalg.pinv(x).mT


def test_whole_calls_are_reported_with_module_line_bytes_and_memory(caplog):
    with caplog.at_level(logging.INFO):
        model = _converted(_around(_Inverts(), _Inverts()).float())
    run = attached_domain(model).decision.run
    assert [(call.path, call.function) for call in run.whole_calls] == [
        ("1", "linalg_pinv"),
        ("2", "linalg_pinv"),
    ]
    call = run.whole_calls[0]
    size = 4 * torch.Size(SHAPE).numel()
    assert (call.calls, call.gathered_bytes) == (1, size)
    assert call.saved_bytes == size  # the result; the argument is kept in bands
    assert call.work is None
    assert call.location.startswith(f"{__file__}:")
    assert run.largest_gathered == size
    assert "functions that run whole on every rank: 2;" in caplog.records[-1].message
    assert "test_plan.py:" in caplog.text


def test_the_work_of_whole_calls_is_counted():
    as_weights = _Code(lambda x: x * F.conv2d(torch.ones(1, *SHAPE[1:]), x).sum())
    (call,) = attached_domain(_converted(_around(as_weights).float())).decision.run.whole_calls
    assert call.function == "convolution"
    assert 0 < call.work < 1


def test_memory_of_whole_calls_is_counted_apart():
    model = _converted(_around(_Inverts()).float())
    run = attached_domain(model).decision.run
    assert 0 < run.whole_bytes < run.saved_bytes
    assert run.whole_bytes == sum(call.saved_bytes for call in run.whole_calls)
    banded = run.saved_bytes - run.whole_bytes
    assert run.least_bytes == banded + run.whole_bytes // 2


def test_at_most_eight_lines():
    calls = [WholeCall(f"layer.{i}", "m.py:1", "sort", 1, 10, 10, 0.5) for i in range(11)]
    lines = whole_call_lines(calls)
    assert len(lines) == 9
    assert lines[-1] == "and 3 more"
    assert lines[0] == (
        "layer.0, m.py:1: sort runs whole on every rank, once, gathers 10 bytes, holds 10 bytes, "
        "50% of a rank's work"
    )


def _inverts(x):
    return torch.linalg.pinv(torch.linalg.pinv(torch.linalg.pinv(x))).mT


def test_a_rank_that_would_hold_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(dry_run_module, "SMALL_EXCESS", 0)
    shape = (2, 4, 32, 6)
    smooth = [layer for _ in range(8) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.GELU())]
    model = _around(*smooth, _Code(_inverts))
    with pytest.raises(UserError, match=r"parallel\.whole_ops_limit: a rank of 8 would") as caught:
        _converted(model, 8, input_shape=shape)
    message = str(caught.value)
    assert "linalg_pinv runs whole" in message
    assert "test_plan.py" in message
    assert "\n" not in message
    assert attached_domain(model) is None
    most = int(message.split("Lower parallel.domain to ")[1].split(",")[0])
    assert 2 <= most < 8
    assert attached_domain(_converted(copy.deepcopy(model), most, input_shape=shape)) is not None
    with pytest.raises(UserError, match="whole_ops_limit"):
        _converted(copy.deepcopy(model), most + 1, input_shape=shape)
    for limit in (None, 100.0):
        converted = _converted(copy.deepcopy(model), 8, input_shape=shape, whole_ops_limit=limit)
        assert attached_domain(converted) is not None


def test_a_small_excess_is_not_refused():
    assert attached_domain(_converted(_around(_Code(_inverts)), 8)) is not None


def test_refusals_name_module_and_line_of_the_model_first():
    def read_memory(x):
        return x[:, 1:].as_strided(x.shape, (1, 1, 1, 1))

    with pytest.raises(
        UserError, match=r"^1 \(_Code\), \S+test_plan\.py:\d+: as_strided"
    ) as caught:
        _converted(_around(_Code(read_memory)))
    assert "Nor can its layers be converted: " in str(caught.value)


def test_an_unknown_word_is_refused():
    with pytest.raises(UserError, match="whole_ops: needs allow or refuse"):
        _converted(_around(), whole_ops="alow")


@torch.library.custom_op("credit_dp_tests::reverse_rows", mutates_args=())
def _reverse_rows(x: torch.Tensor) -> torch.Tensor:
    """A custom operator without a fake kernel."""
    return x.flip(-2)


class _Reverses(nn.Module):
    def forward(self, x):
        return _reverse_rows(x)


def test_operators_without_a_fake_kernel_run_and_are_said_to_be_that(caplog):
    x = torch.randn(SHAPE)
    plain = _Reverses()

    def run(manager, input_shape):
        with RANDOM_LOCK:
            model = copy.deepcopy(plain)
            model = convert_to_domain_parallel(model, manager, input_shape=input_shape)
        y = model(shard_tensor(x, manager=manager))
        torch.testing.assert_close(gather_tensor(y, manager=manager), x.flip(-2))

    on_threads(2, run, SHAPE)
    on_threads(2, run, None)
    assert "no fake kernel" in caplog.text
    assert "reverse_rows" in caplog.text


class _MayFlip(nn.Module):
    flips = False

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return y.flip(-2) if self.flips else y


def test_a_first_forward_on_the_globe_has_no_layers_of_an_earlier_conversion():
    x, plain = torch.randn(SHAPE), _MayFlip()

    def run(manager):
        with RANDOM_LOCK:
            model = copy.deepcopy(plain)
            convert_to_domain_parallel(model, manager, input_shape=SHAPE)
            convert_to_domain_parallel(model, manager)
        model.flips = True
        y = model(shard_tensor(x, manager=manager))
        assert type(model.conv) is nn.Conv2d
        torch.testing.assert_close(gather_tensor(y, manager=manager), plain(x).flip(-2))

    on_threads(2, run)


def test_replan_for_another_grid():
    model = _converted(_around(_Spectral()).float(), 3)
    replan(model, (1, 4, 20, 6))
    assert attached_domain(model).decision.input_shapes == ((1, 4, 20, 6),)
    with pytest.raises(UserError, match="2 rows can't be shared"):
        replan(model, (1, 4, 2, 6))
    assert attached_domain(model).decision.input_shapes == ((1, 4, 20, 6),)


def _traffic(manager):
    return Counter(vars(manager.transport.traffic))


def _real_step(manager, model, shape):
    with RANDOM_LOCK:
        model = convert_to_domain_parallel(copy.deepcopy(model), manager, input_shape=shape)
        rows = manager.partition(shape[-2]).sizes[manager.rank]
        x = torch.randn(*shape[:-2], rows, shape[-1], dtype=torch.float64)
    y = model.train()(x)
    forward = _traffic(manager)
    y.sum().backward()
    return forward, _traffic(manager) - forward


def _norms():
    """Return norms over rows beside a layer without a rule; a plan computes no moments."""
    norms = nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)
    return nn.Sequential(_Spectral(), *norms, nn.LayerNorm(SHAPE[1:]), nn.RMSNorm(SHAPE[1:]))


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "few rows",
        "norms",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fft", "norm of the globe", "roll", "crop", "function of a row")
        ),
    ],
)
def test_the_plan_counts_what_a_real_step_sends(name):
    layer = _norms() if name == "norms" else REFUSED[name]()
    model, ranks = _around(layer, nn.GroupNorm(2, 4)), 3
    plan = plan_report(model, SHAPE, ranks)
    assert plan.problems == ()
    assert plan.refusal
    for rank, (forward, backward) in enumerate(on_threads(ranks, _real_step, model, SHAPE)):
        assert Counter(vars(plan.forward[rank])) == forward
        assert Counter(vars(plan.backward[rank])) == backward
    assert len(plan.saved_bytes) == ranks
    sent = sum(traffic.bytes for traffic in (*plan.forward, *plan.backward))
    by_level = sum(level.sent_bytes for level in plan.levels)
    assert 0 < by_level <= sent
    assert plan.whole_calls == ()


def test_the_dry_run_of_a_converted_model_counts_the_same():
    model = _around(REFUSED["fft"]())
    plan = plan_report(model, SHAPE, 3)
    manager = _manager(3)
    converted = convert_to_domain_parallel(model, manager, input_shape=SHAPE)
    hooks = [len(module._forward_hooks) for module in converted.modules()]
    step = dry_run(converted, manager, [SHAPE], backward=True, training=True)
    for rank in range(3):
        sent = sum((traffic[rank] for traffic in step.forward.values()), RankTraffic())
        returned = sum((traffic[rank] for traffic in step.backward.values()), RankTraffic())
        assert (sent, returned) == (plan.forward[rank], plan.backward[rank])
    assert step.saved_bytes == plan.saved_bytes[0]
    assert attached_domain(converted) is not None
    assert [len(module._forward_hooks) for module in converted.modules()] == hooks


def test_the_plan_and_the_summary_have_lines_about_whole_calls():
    from credit_dp.training.summary import whole_lines

    model = _around(_Inverts(), _Inverts())
    lines = "\n".join(decision_lines(plan_report(model, SHAPE, 2)))
    assert "Computes on tensors of the globe, which is exact" in lines
    assert "Its layers are not converted one by one, because of this:\n  1 (" in lines
    assert "test_plan.py:" in lines
    assert "linalg_pinv runs whole on every rank, once, gathers 5.0 kB, holds" in lines
    assert "the largest gathered tensor: " in lines
    training = _training_of(_converted(model), nn.Identity())
    assert [line in lines for line in whole_lines(training)] == [True] * 2
    without = decision_lines(plan_report(_around(_Code(lambda x: x + x.roll(1, -2))), SHAPE, 2))
    assert without[-1] == "Every function has a rule for bands: none runs whole."


def test_the_summary_says_how_ranks_share_the_model():
    from credit_dp.config import ParallelConfig
    from credit_dp.config.training import TrainerConfig
    from credit_dp.training.summary import model_line

    for ranks, part, way in (
        (2, _Code(lambda x: x + x.roll(1, -2)), ", on tensors of the globe"),
        (2, nn.Conv2d(4, 4, 3, padding=1), ", in converted layers"),
        (1, nn.Conv2d(4, 4, 3, padding=1), ""),
    ):
        config = SimpleNamespace(
            model=SimpleNamespace(name="mine"),
            parallel=ParallelConfig(domain=ranks),
            trainer=TrainerConfig(),
            device="cpu",
        )
        model = _around(part)
        line = model_line(config, _training_of(_converted(model) if ranks > 1 else model))
        count = sum(p.numel() for p in model.parameters())
        assert line == f"mine, {count:,} parameters, float32{way}"


def _training_of(*parts):
    parameters = dict(parts[0].named_parameters())
    state = SimpleNamespace(parts=parts, parameters=parameters, trainable_parameters=parameters)
    return SimpleNamespace(trainer=SimpleNamespace(state=state))


class _NotCopied(nn.Sequential):
    def __deepcopy__(self, memo):
        raise TypeError("a handle of a file")


def test_a_model_that_can_not_be_copied_is_planned():
    for layer in (_Spectral, nn.Identity):
        plan = plan_report(_NotCopied(_around(layer())), SHAPE, 2)
        copied = plan_report(nn.Sequential(_around(layer())), SHAPE, 2)
        assert (plan.levels, plan.forward, plan.saved_bytes) == (
            copied.levels,
            copied.forward,
            copied.saved_bytes,
        )
        assert plan.problems == ()
        assert bool(plan.refusal) is (layer is _Spectral)


class Repeated(nn.Module):
    """Takes more rows than there are, by an index of which a plan knows no values."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        order = y.detach().mean((0, 1, 3)).argsort().repeat(2)
        taken = y.new_zeros(y.shape).index_add(2, order, y.index_select(2, order))
        return y[:, :, order] + torch.cat([taken, taken], 2)


def test_an_index_of_unknown_values_may_be_longer_than_the_dimension():
    report = plan_report(Repeated(), (1, 3, 13, 8), 3)
    assert report.problems == ()
    assert report.backward
    check(Repeated)
