"""Tensors of the globe have the strides of one process, whatever bands ranks have of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import Enter, Leave
from credit_dp.domain_parallel.band_tensor.moving import cut, whole
from credit_dp.domain_parallel.band_tensor.tensor import PARTIAL, Band, BandTensor, Domain
from tests.ranks import on_threads
from tests.tables import entry

Results = list[Tensor]
# Even, with a band of one row, and with bands that are empty.
BOUNDS = [(0, 5, 9, 12), (0, 1, 11, 12), (0, 0, 12, 12), (0, 12, 12, 12)]


def permuted(x: Tensor) -> Results:
    last = x.permute(0, 2, 3, 1)
    tokens = last.relu().flatten(1, 2)
    return [last, last + 1, tokens, tokens.transpose(1, 2).reshape(x.shape), last.clone()]


def of_one_row(x: Tensor) -> Results:
    row = x[:, :, 3:4]
    return [row, row.permute(2, 0, 1, 3).reshape(-1), row.squeeze(2), (row * 2).mT.flatten()]


def parts(x: Tensor) -> Results:
    north, south = x.split([7, 5], 2)
    cells = x.unflatten(2, (4, 3)).unflatten(4, (2, 3))
    return [north, south.flatten(), cells, cells.permute(0, 2, 4, 3, 5, 1).flatten(0, 2)]


def channels_last(x: Tensor) -> Results:
    y = x.to(memory_format=torch.channels_last)
    return [y, y * 2, F.avg_pool2d(y, 2), F.group_norm(y, 2), y.flatten(2), y.reshape(2, -1)]


def convolved(x: Tensor) -> Results:
    weight = torch.ones(4, 4, 3, 3, dtype=x.dtype)
    y = F.conv2d(x.to(memory_format=torch.channels_last), weight, padding=1)
    return [y, F.silu(y), F.conv2d(x, weight), y.flatten(1, 2)]


def repeated(x: Tensor) -> Results:
    y = x[:, :1].expand(-1, 3, -1, -1)
    return [y, y + 0, y.reshape(2, -1), x.mean(2, keepdim=True).expand_as(x)]


def products(x: Tensor) -> Results:
    return [x @ x.mT, x.mT.matmul(x), F.linear(x.mT, torch.ones(5, 12, dtype=x.dtype)), x.sum(2)]


def others(x: Tensor) -> Results:
    values, places = x.sort(2)
    sums = x.cumsum(2)
    turned = x.mT.cumsum(1)
    return [
        *(values, places, sums.flatten(1, 2), turned, turned.mT.flatten(2)),
        *(torch.fft.rfft2(x), torch.stack([x, x], 3), x.roll(1, 2)),
    ]


PROGRAMS = (permuted, of_one_row, parts, channels_last, convolved, repeated, products, others)


def described(results: Results) -> list[tuple[tuple[int, ...], int, bool]]:
    """Return strides, offset, and whether a write would be seen by others."""
    return [(y.stride(), int(y.storage_offset()), y._is_view()) for y in results]


def on_rank(
    manager: DomainParallelManager,
    program: Callable[[Tensor], Results],
    x: Tensor,
    bounds: tuple[int, ...],
) -> tuple[list[tuple[tuple[int, ...], int, bool]], Results]:
    band, domain = Band(-2, 1, bounds), Domain(manager)
    local = cut(x, band, domain.rank).clone()
    results = program(Enter.apply(local, band, domain))  # type: ignore[no-untyped-call]
    return described(results), [whole(y).detach() for y in results]


@pytest.mark.parametrize("program", PROGRAMS)
def test_strides_are_those_of_one_process(program: Callable[[Tensor], Results]) -> None:
    x = torch.randn(2, 4, 12, 6, dtype=torch.float64, generator=torch.manual_seed(0))
    expected = program(x)
    for bounds in BOUNDS:
        with entry(str(bounds)):
            for strides, values in on_threads(3, on_rank, program, x, bounds):
                assert strides == described(expected)
                for value, wanted in zip(values, expected, strict=True):
                    assert value.shape == wanted.shape
                    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def entered(
    manager: DomainParallelManager, x: Tensor, bounds: tuple[int, ...]
) -> tuple[tuple[int, ...], Tensor]:
    band, domain = Band(-2, 1, bounds), Domain(manager)
    y = Enter.apply(cut(x, band, domain.rank), band, domain)  # type: ignore[no-untyped-call]
    return y.stride(), whole(y.permute(2, 3, 0, 1).flatten(2).detach())


def test_a_field_has_the_memory_format_of_its_bands() -> None:
    x = torch.randn(2, 4, 12, 6, dtype=torch.float64, generator=torch.manual_seed(0))
    last = x.to(memory_format=torch.channels_last)
    # Others have no format that a rank sees from one row: their dimensions are in order.
    columns_first = x.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    for bounds in BOUNDS:
        for y, strides in ((x, x.stride()), (last, last.stride()), (columns_first, x.stride())):
            with entry((bounds, strides)):
                for found, values in on_threads(3, entered, y, bounds):
                    assert found == strides
                    assert torch.equal(values, x.permute(2, 3, 0, 1).flatten(2))


def written(x: Tensor) -> Results:
    """Write to what torch takes for a view, and to what it takes for a copy."""
    x = x * 1
    by_rows = x.permute(0, 2, 1, 3)
    for y in (by_rows.reshape(2, 12, -1), by_rows.reshape(2, 3, 4, 4, 6), x.mT.reshape(2, 4, 72)):
        y.add_(1.0)
        y.flatten()[3:40:2] *= 2.0
    x[:, :, ::5].mul_(3.0)
    return [x]


def test_writes_reach_the_tensors_that_they_reach_on_one_process() -> None:
    test_strides_are_those_of_one_process(written)


def written_gradient(grad: Tensor) -> Results:
    """What a hook may do with a gradient: read and write it, and views of it."""
    half = grad / 2 + grad.neg()
    row = half[1]
    row.exp_()
    half.flatten()[3:9:2] *= grad.flatten()[0]
    half.T.clamp_(max=1.5)
    half.diagonal().mul_(2.0)
    return [half, row, grad.long(), grad * grad, grad / grad, 2 / grad]


def of_parts(manager: DomainParallelManager, parts: Tensor) -> Results:
    domain = Domain(manager)
    grad = BandTensor(parts[domain.rank].clone(), PARTIAL, domain)
    with torch.no_grad():
        return [whole(y) for y in written_gradient(grad)]


def test_sums_of_parts_are_written_and_read_as_on_one_process() -> None:
    parts = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.manual_seed(0)) * 3
    for found in on_threads(3, of_parts, parts):
        for value, wanted in zip(found, written_gradient(parts.sum(0)), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-12)


def outputs_changed(
    manager: DomainParallelManager, x: Tensor, bounds: tuple[int, ...]
) -> Tensor | None:
    band, domain = Band(-2, 1, bounds), Domain(manager)
    local = cut(x, band, domain.rank).clone().requires_grad_()
    y = Enter.apply(local, band, domain).sigmoid()  # type: ignore[no-untyped-call]
    Leave.apply(y, band, domain).mul_(3.0).sum().backward()  # type: ignore[no-untyped-call]
    return local.grad


def test_outputs_may_be_changed_though_the_model_has_saved_them() -> None:
    x = torch.randn(2, 4, 12, 6, dtype=torch.float64, generator=torch.manual_seed(0))
    x.requires_grad_()
    (x.sigmoid() * 3.0).sum().backward()
    found = on_threads(3, outputs_changed, x.detach(), BOUNDS[0])
    torch.testing.assert_close(torch.cat(found, -2), x.grad, rtol=1e-12, atol=1e-12)


def gradient_of_reshaped(
    manager: DomainParallelManager, parts: list[Tensor], bounds: tuple[int, ...]
) -> Tensor | None:
    """Return the gradient where input and output gradient are parts of larger tensors."""
    band, domain = Band(-2, 1, bounds), Domain(manager)
    x, grad = (cut(part, band, domain.rank) for part in parts)
    x = x.detach().requires_grad_()
    y = Enter.apply(x, band, domain).flatten(1, 2).sin().view(2, 4, 12, 6)  # type: ignore[no-untyped-call]
    Leave.apply(y, band, domain).backward(grad)  # type: ignore[no-untyped-call]
    return x.grad


def test_parts_of_larger_tensors_may_be_inputs_and_gradients() -> None:
    generator = torch.manual_seed(0)
    parts = [torch.randn(2, 4, 12, 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    for bounds in BOUNDS:
        found = on_threads(3, gradient_of_reshaped, parts, bounds)
        expected = parts[0].cos() * parts[1]
        torch.testing.assert_close(torch.cat(found, -2), expected, rtol=1e-12, atol=1e-12)
