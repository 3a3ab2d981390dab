"""Norms, reductions, softmax, losses and distances on bands, whatever bands ranks have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor import losses, norms, reductions
from credit_dp.domain_parallel.band_tensor.moving import cut, whole
from credit_dp.domain_parallel.band_tensor.rules import short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    RULES,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Rows,
)
from credit_dp.domain_parallel.layers import base
from tests.domain_parallel.band_tensor import functions
from tests.ranks import on_threads, seeded
from tests.tables import entry

aten = torch.ops.aten
Results = Sequence[Tensor]
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
HEIGHT, COLUMNS = 12, 6
SHAPE = (2, 4, HEIGHT, COLUMNS)
# Uneven, with a band of one row, and with bands that are empty.
BOUNDS = [(0, 5, 9, 12), (0, 1, 11, 12), (0, 0, 12, 12), (0, 12, 12, 12)]
MODULES = {module.__name__ for module in (reductions, norms, losses)}
# The operators that have rules here; each one may run whole where its test says so.
OPERATORS = {short_name(func) for func, rule in RULES.items() if rule.__module__ in MODULES}


def results_of(y: Any) -> list[Tensor]:
    """Return the tensors of nested results, as floating-point numbers."""
    if isinstance(y, Tensor):
        return [y if y.is_floating_point() else y.double()]
    return [tensor for each in y for tensor in results_of(each)]


def compute(function: Function, inputs: Sequence[Tensor], twice: bool) -> tuple[Results, Results]:
    """Return outputs and gradients of all inputs, those of second order if `twice`."""
    outputs = results_of(function(*inputs))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    weighted = zip(outputs, weights, strict=True)
    sums = [(y * weight.to(y.dtype)).sum() for y, weight in weighted if y.requires_grad]
    if not sums:
        return outputs, []
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(sums, inputs, create_graph=twice, **options)
    if twice:
        sums = [(g * g.detach().cos()).sum() for g in grads if g.requires_grad]
        grads = torch.autograd.grad(sums, inputs, **options)
    return [y.detach() for y in outputs], grads


def on_rank(
    manager: DomainParallelManager,
    function: Function,
    tensors: Sequence[Tensor],
    band: Band,
    twice: bool,
) -> tuple[Results, Results, set[str]]:
    domain = Domain(manager)
    layouts: list[tuple[Tensor, Rows]] = [(cut(tensors[0], band, domain.rank).contiguous(), band)]
    layouts += [(y, WHOLE) for y in tensors[1:]]
    inputs = [BandTensor(y, rows, domain).requires_grad_() for y, rows in layouts]
    found = [[whole(y).detach() for y in each] for each in compute(function, inputs, twice)]
    return found[0], found[1], OPERATORS & set(domain.whole_calls)


def tensors_of(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return a field and parameters: of channels, of rows and columns, of columns."""
    generator = torch.Generator().manual_seed(0)
    sizes = (shape, (4,), (HEIGHT, COLUMNS), (COLUMNS,))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def check(
    function: Function,
    shape: Sequence[int] = SHAPE,
    dim: int = -2,
    ran_whole: Collection[str] = (),
    twice: bool = False,
) -> None:
    """Compare a function of a field and parameters with that on one process."""
    tensors = tensors_of(shape)
    expected = compute(function, [y.clone().requires_grad_() for y in tensors], twice)
    for bounds in BOUNDS:
        band = Band(dim, 1, bounds)
        with entry(f"{bounds}"):
            for *found, names in on_threads(3, on_rank, function, tensors, band, twice):
                assert_equal(found, expected)
                assert names <= set(ran_whole)


def assert_equal(found: Sequence[Results], expected: Sequence[Results]) -> None:
    for values, wanted in zip(found, expected, strict=True):
        for i, (value, right) in enumerate(zip(values, wanted, strict=True)):
            with entry(f"result {i}"):
                torch.testing.assert_close(value, right, rtol=1e-11, atol=1e-11, equal_nan=True)


# ---------------------------------------------------------------- reductions


def reduce_rows(x: Tensor, *_: Tensor) -> Any:
    return [
        *(x.sum(2), x.mean((0, 2)), x.nansum((1, 2), keepdim=True), x.prod(2), x.prod()),
        *(x.amax(2), x.amin((1, 2)), x.max(2)[0], x.min(2, keepdim=True)[0], x.max()),
        *(x.detach().aminmax(dim=2), x.detach().aminmax(), x.logsumexp((2, 3))),
        *(x.var(2), x.std(), torch.var_mean(x, (2, 3)), torch.std_mean(x, 2, keepdim=True)),
        *((x * 0 + 3.1).std(2), x.var((0, 2), correction=0)),
        *(x.norm(dim=2), x.norm(), x.norm(3, (1, 2), True)),
        *(torch.linalg.vector_norm(x, order, 2) for order in (0, 1, 2.5, -1.5, float("inf"))),
        *(x.softmax(2), x.log_softmax(2), x.cumsum(2), x.logcumsumexp(2), x.cumprod(2)),
    ]  # fmt: skip


def keep_rows(x: Tensor, *_: Tensor) -> Any:
    return [
        *(x.sum(1), x.amax((0, 3)), x.std(1), x.var(3), x.norm(dim=1)),
        *(x.softmax(1), x.log_softmax(3), x.cumsum(1), x.sort(3)[0], x.topk(2, 1)[0]),
        *(x.median(1)[0], x.cummax(3)[0], F.glu(x, 1), F.glu(x, 3), x.logsumexp(1), x.prod(3)),
    ]  # fmt: skip


def find_places(x: Tensor, *_: Tensor) -> Any:
    y = x.detach()
    some_nan = y.where(y < 1, torch.nan)
    return [
        *(y.argmax(2), y.argmin(2, True), y.argmax(), y.argmin(keepdim=True)),
        *(y.round().argmax(2), y.round().argmax(), some_nan.argmax(2), some_nan.max(2)),
        *((y > 0).max(2), (y > 0).all(2), (y > 9).any(), (y > -9).all((0, 2)), (y > 0).sum(2)),
        *(y.relu().count_nonzero(2), y.relu().count_nonzero(), (y > 0).to(torch.uint8).any(2)),
        *((y * 9).int().amax(2), (y * 9).int().prod(2), (y * 9).int().cumsum(2)),
        *((y > 0).cumsum(2), (y * 9).int().sum(2, dtype=torch.int16), y.kthvalue(2, 1), y.mode(3)),
        y * torch.equal(y, y) + 2 * torch.equal(y, y + 1),
    ]  # fmt: skip


def sort_rows(x: Tensor, *_: Tensor) -> Any:
    return [x.sort(2)[0], x.topk(2, 2)[0], x.median(2)[0], x.kthvalue(2, 2)[0], x.cummax(2)[0]]


def fold_rows(x: Tensor, *_: Tensor) -> Any:
    """Rows follow each sample's: (batch, rows) in one dimension."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return [
        *(rows.sum(0), rows.mean((0, 2)), rows.amax(0), rows.max(0), rows.detach().argmax(0)),
        *(rows.detach().argmin(), rows.var(0), rows.softmax(0), rows.norm(dim=0)),
        rows.logsumexp(0),
    ]  # fmt: skip


def test_reductions() -> None:
    check(reduce_rows)
    check(find_places)


@pytest.mark.slow
def test_reductions_along_other_dimensions_and_of_folded_rows() -> None:
    check(keep_rows)
    check(fold_rows)
    check(sort_rows)
    # Gradients of products need scans over all entries in one dimension.
    check(reduce_rows, twice=True, ran_whole=("cumsum", "cumprod"))
    check(lambda x, *_: reduce_rows(x.mT), (2, 4, COLUMNS, HEIGHT), -1)


# ---------------------------------------------------------------- norms


def normalise(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor) -> Any:
    positive = weight.exp()
    return [
        *(F.group_norm(x, 2), F.group_norm(x, 4, weight, positive)),
        *(F.batch_norm(x, None, None, weight, positive, True), F.instance_norm(x, weight=weight)),
        F.batch_norm(x, weight.detach(), positive.detach(), weight, positive),
        F.layer_norm(x, (COLUMNS,), of_columns, of_columns.exp()),
        *(F.layer_norm(x, x.shape[2:]), F.layer_norm(x, x.shape[1:])),
        F.layer_norm(x, x.shape[2:], of_rows, of_rows.exp()),
        *(F.rms_norm(x, x.shape[2:], of_rows), F.rms_norm(x, (COLUMNS,), of_columns)),
        F.layer_norm(x.mT, (HEIGHT,)),
    ]


def normalise_channels_last(x: Tensor, *parameters: Tensor) -> Any:
    return normalise(x.to(memory_format=torch.channels_last), *parameters)


def normalise_samples(x: Tensor, weight: Tensor, *_: Tensor) -> Any:
    """Rows are samples."""
    positive = weight.exp()
    return [
        *(F.group_norm(x, 2), F.group_norm(x, 4, weight, positive)),
        F.batch_norm(x, None, None, weight, positive, True),
        F.batch_norm(x, weight.detach(), positive.detach(), weight, positive),
        F.layer_norm(x, x.shape[2:]),
    ]


def normalise_rows(x: Tensor, _: Tensor, of_rows: Tensor, *__: Tensor) -> Any:
    """Rows are channels."""
    weight = of_rows[:, 0]
    return [
        *(F.group_norm(x, HEIGHT, weight, weight.exp()), F.group_norm(x, 3)),
        F.batch_norm(x, None, None, weight, weight.exp(), True),
        F.batch_norm(x, weight.detach(), weight.detach().exp(), weight, weight.exp()),
        *(F.layer_norm(x, x.shape[1:]), F.instance_norm(x)),
    ]


@pytest.mark.parametrize("entries", [0, 2**16])
def test_norms(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SMALL_BAND_ENTRIES", entries)
    check(normalise)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [0, 2**16])
def test_other_norms(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SMALL_BAND_ENTRIES", entries)
    check(normalise, twice=True)
    check(normalise_channels_last)
    check(normalise_samples, (HEIGHT, 4, 5, COLUMNS), -4)
    check(normalise_rows, (2, HEIGHT, 5, COLUMNS), -3)


def update(manager: DomainParallelManager, x: Tensor, is_field: bool) -> Results:
    """Return running statistics after a batch norm and an instance norm."""
    domain = Domain(manager)
    local = cut(x, Band(-2, 1, BOUNDS[2]), domain.rank)
    field = BandTensor(local, Band(-2, 1, BOUNDS[2]), domain)
    running = [torch.full((4,), value, dtype=x.dtype) for value in (0.5, 2.0, 0.1, 0.3)]
    if is_field:
        running = [BandTensor(y, WHOLE, domain) for y in running]
    train(field, running)
    return [whole(y) for y in running]


def train(x: Tensor, running: Results) -> None:
    F.batch_norm(x, *running[:2], training=True, momentum=0.3)
    F.instance_norm(x, *running[2:], use_input_stats=True, momentum=0.2)


def test_running_statistics_are_those_of_the_globe_on_all_ranks() -> None:
    x = tensors_of(SHAPE)[0]
    expected = [torch.full((4,), value, dtype=x.dtype) for value in (0.5, 2.0, 0.1, 0.3)]
    train(x, expected)
    for is_field in (False, True):
        for found in on_threads(3, update, x, is_field):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def by_rules_of_gpus(manager: DomainParallelManager, x: Tensor, weight: Tensor) -> Results:
    """Return results of operators that only GPUs have, by their rules."""
    domain, band = Domain(manager), Band(-2, 1, BOUNDS[0])
    y = BandTensor(cut(x, band, domain.rank), band, domain)
    found: list[Any] = []
    for name in ("cudnn_batch_norm", "miopen_batch_norm"):
        forward = getattr(aten, name).default
        results = RULES[forward](forward, (y, weight, weight, None, None, True, 0.1, 1e-5), {})
        backward = getattr(aten, f"{name}_backward").default
        saved = (results[1].local, results[2].local, 1e-5)
        reserve = [part.local for part in results[3:]]
        grads = RULES[backward](backward, (y, y, weight, None, None, *saved, *reserve), {})
        found += [results[0], *grads]
    rms = aten._fused_rms_norm.default
    results = RULES[rms](rms, (y, x.shape[2:], None, 1e-5), {})
    backward = aten._fused_rms_norm_backward.default
    arguments = (y, y, x.shape[2:], results[1].local, None, [True, False])
    found += [results[0], RULES[backward](backward, arguments, {})[0]]
    return [whole(BandTensor(part.local, part.rows, domain)) for part in found]


def test_norms_of_gpus() -> None:
    x, weight = tensors_of(SHAPE)[:2]
    leaves = [y.clone().requires_grad_() for y in (x, weight, weight)]
    y = F.batch_norm(leaves[0], None, None, *leaves[1:], True)
    of_batch = [y.detach(), *torch.autograd.grad(y, leaves, x)]
    y = F.rms_norm(leaves[0], x.shape[2:], eps=1e-5)
    expected = [*of_batch, *of_batch, y.detach(), *torch.autograd.grad(y, leaves[0], x)]
    for found in on_threads(3, by_rules_of_gpus, x, weight):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def gradients_of_whole(
    manager: DomainParallelManager, x: Tensor, grad: Tensor, weight: Tensor, training: bool
) -> Results:
    """Return gradients of a norm of samples that all ranks have; that of the output has bands."""
    domain = Domain(manager)
    band = Band(-1, 1, domain.bounds(x.shape[1]))
    field = BandTensor(x, WHOLE, domain)
    bands = BandTensor(cut(grad, band, domain.rank), band, domain, grad.stride())
    running = (None, None) if training else (weight, weight.exp())
    saved = aten.native_batch_norm.default(x, weight, None, *running, training, 0.1, 1e-5)[1:]
    backward = aten.native_batch_norm_backward.default
    last = (training, 1e-5, [True] * 3)
    parts = RULES[backward](backward, (bands, field, weight, *running, *saved, *last), {})
    assert not domain.whole_calls
    return [whole(BandTensor(part.local, part.rows, domain)) for part in parts]


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_whole_samples_takes_gradients_of_bands(training: bool) -> None:
    shapes = (8, 7), (8, 7), (7,)
    generator = seeded(0)
    x, grad, weight = (torch.randn(n, dtype=torch.float64, generator=generator) for n in shapes)
    leaves = [y.clone().requires_grad_() for y in (x, weight, weight)]
    running = (None, None) if training else (weight, weight.exp())
    y = F.batch_norm(leaves[0], *running, *leaves[1:], training)
    expected = [*torch.autograd.grad(y, leaves, grad)]
    for found in on_threads(3, gradients_of_whole, x, grad, weight, training):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# ---------------------------------------------------------------- losses and distances


def lose(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor) -> Any:
    target = (x.detach()[:, 0] * 9).long().abs() % 4
    other, scores, weights = x.detach().sigmoid(), x.log_softmax(1), weight.detach().exp()
    return [
        *(F.mse_loss(x, x * 2), F.mse_loss(x, of_rows.expand_as(x), reduction="sum")),
        *(F.mse_loss(of_rows, x[0, 0], reduction="none"), F.l1_loss(x, other)),
        *(F.smooth_l1_loss(x, other * 3, beta=0.3), F.huber_loss(x, other * 3, "sum", 0.4)),
        *(F.huber_loss(x, other, "none"), F.soft_margin_loss(x, other.round() * 2 - 1)),
        F.binary_cross_entropy(x.sigmoid(), other, weight=other, reduction="sum"),
        F.binary_cross_entropy(x.sigmoid(), other),
        F.binary_cross_entropy_with_logits(x, other, pos_weight=of_columns.detach().exp()),
        F.kl_div(scores, x.softmax(1), reduction="batchmean"),
        *(F.cross_entropy(x, target), F.nll_loss(scores, target, reduction="none")),
        F.cross_entropy(x, target, weights, ignore_index=2, label_smoothing=0.1),
        F.nll_loss(scores, target, weights, reduction="sum"),
        F.nll_loss(scores[0].flatten(1).T, target[0].flatten(), weights),
        *(torch.dist(x, x * 2, 3), torch.dist(of_rows, x)),
    ]


def measure(x: Tensor, _: Tensor, of_rows: Tensor, *__: Tensor) -> Any:
    table, tables = x[0, 0], x[0].transpose(0, 1)
    return [
        *(torch.cdist(table, of_rows), torch.cdist(of_rows, table), torch.cdist(x, x * 2)),
        *(torch.cdist(table, of_rows, 1), torch.cdist(of_rows, table, 3)),
        *(torch.cdist(tables, tables * 2), torch.cdist(tables, of_rows[:3], 1)),
        *(torch.cdist(of_rows[:3], tables, 1), torch.cdist(x.flatten(0, 2), of_rows)),
        torch.cdist(x, x[:1, :1] * 3, 1),
    ]


def test_losses_and_distances() -> None:
    check(lose)
    check(measure)


@pytest.mark.slow
def test_gradients_of_gradients_of_losses() -> None:
    check(lose, twice=True)


# ---------------------------------------------------------------- half precision, messages


def normalise_and_sum(x: Tensor, weight: Tensor, of_rows: Tensor, of_columns: Tensor) -> Any:
    classes = x.detach().argmax(1)
    return [
        *(F.group_norm(x, 2, weight, weight), F.batch_norm(x, None, None, weight, weight, True)),
        *(F.layer_norm(x, x.shape[2:], of_rows), F.layer_norm(x, (COLUMNS,), of_columns)),
        *(x.sum(2), x.mean(), x.var(2), x.std(), x.softmax(2), x.log_softmax(2), x.logsumexp(2)),
        *(x.norm(dim=2), x.prod(2), x.cumsum(2), F.mse_loss(x, x * 2), F.cross_entropy(x, classes)),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_exact_as_on_one_process(dtype: torch.dtype) -> None:
    halves = tensors_of(SHAPE, dtype)
    halves[0] += 3  # beside a mean that is larger than what differs
    exact, alone = (
        compute(normalise_and_sum, [y.to(kind).clone().requires_grad_() for y in halves], False)
        for kind in (torch.float64, dtype)
    )
    found = on_threads(3, on_rank, normalise_and_sum, halves, Band(-2, 1, BOUNDS[0]), False)[0]
    for i in range(2):
        for on_bands, one, right in zip(found[i], alone[i], exact[i], strict=True):
            assert on_bands.dtype == one.dtype == dtype
            errors = [float((y.double() - right).abs().max()) for y in (on_bands, one)]
            largest = float(right.abs().max())
            assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps * largest


def collectives_of(manager: DomainParallelManager, function: Function) -> tuple[int, int]:
    """Return the collectives of a forward and a backward, and the bytes of all."""
    domain, band = Domain(manager), Band(-2, 1, BOUNDS[0])
    tensors = tensors_of(SHAPE)
    x = BandTensor(cut(tensors[0], band, domain.rank), band, domain).requires_grad_()
    weight = BandTensor(tensors[1], WHOLE, domain).requires_grad_()
    y = function(x, weight, tensors[2], tensors[3])
    grad = BandTensor(torch.ones(y.shape, dtype=y.dtype), PARTIAL, domain)
    if y.rows is not WHOLE:
        grad = BandTensor(torch.ones_like(y.local), y.rows, domain)
    torch.autograd.grad(y, [x, weight], grad, allow_unused=True)
    traffic = manager.transport.traffic
    assert traffic.messages == 0
    return traffic.collectives, traffic.collective_bytes


@pytest.mark.parametrize(
    ("function", "collectives", "numbers"),
    [
        # The sum, and its gradient, of which each rank has a part.
        (lambda x, *_: x.sum(), 2, 2),
        (lambda x, *_: x * x.mean((2, 3), True).sigmoid(), 2, 2 * 8),
        (lambda x, *_: F.mse_loss(x, x * 2), 2, 2),  # both gradients are of the same number
        (lambda x, w, *_: (x * w[:, None, None]).softmax(1), 0, 0),
        (lambda x, *_: x.softmax(2), 2, 3 * 2 * 4 * COLUMNS),
        (lambda x, w, *_: F.group_norm(x, 2, w), 2, 2 * 2 * 2 * 2),
        (lambda x, w, *_: F.batch_norm(x, None, None, w, w, True), 2, 2 * 2 * 4),
        (lambda x, *_: F.layer_norm(x, (COLUMNS,)), 0, 0),
        (lambda x, *_: F.layer_norm(x, (HEIGHT, COLUMNS)), 2, 2 * 2 * 2 * 4),
    ],
)
def test_what_is_sent(function: Function, collectives: int, numbers: int) -> None:
    assert set(on_threads(3, collectives_of, function)) == {(collectives, 8 * numbers)}


# ---------------------------------------------------------------- channels in bands


def norms_of_channels_in_bands(m: Any, x: Tensor) -> list[Tensor]:
    y = x.transpose(1, 2)
    running = x.new_zeros(y.shape[1]), x.new_ones(y.shape[1])
    z = F.batch_norm(y, *running, m.rows[:13, 0], training=True)
    few = y[:, :2] * 1
    return [z, F.group_norm(y, 1), F.group_norm(few, 1, m.scale[:2]), *running]


def test_channels_in_bands_move_to_rows() -> None:
    functions.check(norms_of_channels_in_bands, whole=())
