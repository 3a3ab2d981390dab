"""Indices, scatters, parts and joins of fields on bands: as on one process, and none runs whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor import filling, indexing, joins, scatters, views
from credit_dp.domain_parallel.band_tensor.boundary import Enter, attach_domain
from credit_dp.domain_parallel.band_tensor.moving import cut, whole
from credit_dp.domain_parallel.band_tensor.rules import short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    RULES,
    Band,
    BandTensor,
    Domain,
    is_band,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import tree_leaves
from tests.domain_parallel.band_tensor import functions
from tests.ranks import on_threads
from tests.tables import entry

# Of one process, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted"),
]

Function = Callable[[Any, Tensor], Any]
MODULES = {module.__name__ for module in (filling, indexing, joins, scatters, views)}
OWN = {short_name(func) for func, rule in RULES.items() if rule.__module__ in MODULES}


@pytest.fixture(autouse=True)
def below_autograd(monkeypatch: pytest.MonkeyPatch) -> list[Domain]:
    domains: list[Domain] = []

    def compute(
        model: nn.Module, manager: DomainParallelManager, shapes: Sequence[tuple[int, ...]]
    ) -> Mapping[str, int]:
        domains.append(attach_domain(model, manager, shapes))
        return domains[-1].whole_calls

    monkeypatch.setattr(functions, "compute_on_bands", compute)
    return domains


def few(x: Tensor) -> Tensor:
    """Return two rows, of which some ranks have none."""
    return x[:, :, 1:3]


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "field": lambda x: x * 1,
    "few rows": few,
    "rows last": lambda x: x.mT,
    "rows first": lambda x: x.transpose(0, 2),
    "rows in channels": lambda x: x.transpose(1, 2),
    "folded rows": lambda x: torch.stack([x, x * 2, x.sin()], 2).flatten(2, 3),
    "folded samples": lambda x: x.transpose(1, 2).flatten(0, 1)[:, None],
}


def order(n: int, step: int = 5) -> Tensor:
    """Return all numbers below `n` in another order, or some of them several times."""
    return torch.arange(n) * step % n


def each_dim(function: Callable[[Tensor, int], Tensor]) -> Function:
    """Return the results of a function along each dimension."""
    return lambda m, x: [function(x, d) for d in range(x.ndim)]


def taken(x: Tensor, dim: int, index: Any) -> Tensor:
    return x[(*[slice(None)] * dim, index)]


def entries(x: Tensor, dim: int, length: int | None = None) -> Tensor:
    """Return an index for each entry, or for some of them along a dimension."""
    sizes = list(x.shape)
    n = sizes[dim]
    sizes[dim] = length or n
    count = torch.Size(sizes).numel()
    return (torch.arange(count) * 7 + torch.arange(count) // 5).view(sizes) % n


def written(x: Tensor, dim: int, index: Any, value: Any) -> Tensor:
    y = x * 1
    y[(*[slice(None)] * dim, index)] = value
    return y


def scattered(x: Tensor, dim: int) -> list[Tensor]:
    """Return what is written and added to each entry, where torch's order does not matter."""
    index = entries(x, dim)
    once = order(x.shape[dim], 1).flip(0).view(-1, *[1] * (x.ndim - 1 - dim)).expand(x.shape)
    few_of_all = entries(x, dim, 1)
    return [
        x.scatter(dim, once, x * 2),
        x.scatter(dim, few_of_all, 0.5),
        x.scatter_add(dim, index, x.sin()),
        torch.zeros_like(x).scatter_add(dim, index, x),
        x.scatter_reduce(dim, index, x.cos(), "amax"),
        x.scatter_reduce(dim, few_of_all, x.narrow(dim, 0, 1), "sum", include_self=False),
        x.detach().scatter(dim, few_of_all, 2.0, reduce="multiply"),
    ]


def parts_of_all_kinds(x: Tensor, dim: int) -> list[Tensor]:
    n = x.shape[dim]
    return [
        x.narrow(dim, n // 2, n - n // 2),
        torch.narrow_copy(x.detach(), dim, n // 2, n - n // 2),
        taken(x, dim, slice(n // 3, None, 2)),
        x.select(dim, n - 1),
        *x.split([1, n - 1], dim)[1:],
        *x.tensor_split(2, dim),
        *x.unbind(dim)[-1:],
        taken(x, dim, slice(0, 0)).sum() + x,
    ]


def scattered_parts(x: Tensor, dim: int) -> list[Tensor]:
    n = x.shape[dim]
    return [
        torch.slice_scatter(x, x.narrow(dim, 0, n - n // 2) * 2, dim, n // 2),
        torch.slice_scatter(torch.ones_like(x.detach()), x.narrow(dim, 0, 1), dim, n - 1),
        torch.select_scatter(x, x.select(dim, 0) * 3, dim, n // 2),
    ]


def added(x: Tensor, dim: int) -> list[Tensor]:
    n = x.shape[dim]
    some, index = order(n)[: n - n // 3], order(n, 3)
    sizes = list(x.shape)
    sizes[dim] = 3
    return [
        x.index_add(dim, index, x * 2, alpha=-0.5),
        x.index_add(dim, some, x.narrow(dim, n // 3, n - n // 3)),
        x.new_zeros(sizes).index_add(dim, index % 3, x),
        x.index_copy(dim, order(n, 1).flip(0), x * 2),
        x.index_fill(dim, some[:1], 0.25),
        x.index_reduce(dim, index, x.detach(), "mean") * x,
        x.new_ones(sizes).index_add_(dim, index % 3, x.detach()) * x.sum(),
    ]


def with_points(m: Any, x: Tensor) -> list[Tensor]:
    a, b, c, d = (order(24, 5) % n for n in x.shape)
    table = c.view(4, 6)
    y, z, w = x * 1, x * 2, x.new_zeros(x.shape)
    y[:, :, c[:3], d[:3]] = 0.5
    z.index_put_((a, b, c, d), x.flatten()[:24], accumulate=True)
    w = w.index_put(
        (a[:, None], b), torch.ones(24, 24, *x.shape[2:], dtype=x.dtype) * x[:1, :1], True
    )
    return [
        x[:, :, table],
        x[:, :, table, d.view(4, 6)],
        x[a, :, c],
        x[a, b, c, d],
        x[:, b[:, None], c[:5]],
        x[..., d[:4]],
        x[:, None, :, c[0]],
        x[order(x.shape[0], 1)],
        x.take(order(40, 3)),
        *(x.put(order(40, 1), x.flatten()[2:42]), x.put(order(40, 3) - 1, x.flatten()[:40], True)),
        y,
        z,
        w,
    ]


def with_masks(m: Any, x: Tensor) -> list[Tensor]:
    y, z, w = x * 1, x * 1, x * 2
    high = x.detach() > 0.5
    y[high] = 0.25
    z[high] *= 0.5
    w[:, x.detach().sum((0, 2, 3)) > 0] = m.scale[0]
    return [
        *(x[high], x[:, x.detach()[0].sum((1, 2)) > 0], y, z, w, x.masked_fill(high, m.scale[1])),
        *((x * 1).masked_fill_(high, 2.0), x.where(high, m.scale[2])),
    ]


def with_values(m: Any, x: Tensor) -> list[Tensor]:
    """Read tables by an index with rows."""
    index = (x.detach() * 9).long() % 8
    table = m.matrix
    rows = table[index] + 0.5 * F.embedding(index, table, padding_idx=1)
    limits = torch.linspace(-1, 1, 5, dtype=x.dtype)
    many = x.detach().sort(-1)[0]
    return [
        rows * x[..., None],
        table[index, index.flip(-1)] * x,
        table.flatten().take(index * 3) * x,
        table.index_select(1, index.flatten()[:9]).sum() * x,
        x * torch.bucketize(x.detach(), limits) + torch.searchsorted(limits, x.detach()),
        x * torch.searchsorted(many, x.detach(), right=True),
        F.one_hot(index, 8) * x[..., None],
        x * x.detach().histc(4, -2, 2).sum(),
        F.embedding(index, table, scale_grad_by_freq=True) * x[..., None],
    ]


def triangles(m: Any, x: Tensor) -> list[Tensor]:
    return [
        *(x.tril(1), x.triu(), x.clone().tril_(-1), x.diagonal(1, 2, 3), x.diagonal(-1, 3, 2)),
        *(x.diagonal(0, 1, 2), x.diagonal(2, -1, 0), x.transpose(1, 3).diag_embed(1, 0, 2)),
        torch.diagonal_scatter(x, x.diagonal(1, 2, 3) * 2, 1, 2, 3),
        x[0, 0].diag(),
    ]


def joined(m: Any, x: Tensor) -> list[Tensor]:
    return [
        *(torch.cat([x, x.sin(), x[..., :1]], -1), torch.cat([x[:, :, :1], x, x[:, :, -1:]], 2)),
        *(torch.cat([x.new_ones(x.shape), x], 1), torch.cat([x, x, x[:, :, 1:]], 2)),
        *(torch.stack([x, x.cos()], d) for d in range(5)),
        *(x.repeat(2, 1, 3, 1), x.repeat(2, 1, 1, 1, 2), x.tile(2), x.repeat_interleave(2, 2)),
        x.repeat_interleave(torch.arange(x.shape[2]) % 3, 2),
    ]


def viewed(m: Any, x: Tensor) -> list[Tensor]:
    pairs = x.contiguous()[..., : x.shape[3] // 2 * 2].unflatten(-1, (-1, 2)).contiguous()
    return [
        *(x.flatten(1, 2), x.movedim(1, -1), x.swapaxes(0, 2), x.unflatten(1, (-1, 1))),
        *(x.detach().view(torch.int64) % 5 * x, x.detach().mT.view(torch.int64).mT % 3 * x),
        *(torch.view_as_complex(pairs).real, torch.view_as_real(torch.complex(x, x * 2))),
        *(torch.complex(x, x).conj().resolve_conj().imag, x.expand(2, *x.shape), x.chunk(2, 3)[1]),
        *(x[:, :1].expand_as(x), torch.atleast_3d(x[0]), x.mT.contiguous()),
        *(x.clone(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)),
        torch.empty_like(x, memory_format=torch.channels_last).copy_(x),
        torch.zeros_like(x.mT).add_(x.mT),
        *torch.meshgrid(x[0, 0, :, 0], x[0, 0, 0], indexing="ij"),
    ]


OPERATIONS: dict[str, Function] = {
    "vectors": each_dim(lambda x, d: x.index_select(d, order(x.shape[d]))),
    "falling indices": each_dim(lambda x, d: taken(x, d, order(x.shape[d], 1).flip(0))),
    "rising indices": each_dim(lambda x, d: taken(x, d, torch.arange(2 * x.shape[d]) // 3)),
    "every second": each_dim(lambda x, d: taken(x, d, torch.arange(0, x.shape[d], 2))),
    "one": each_dim(lambda x, d: taken(x, d, torch.tensor(-1))),
    "none": each_dim(lambda x, d: taken(x, d, torch.arange(0)).sum() + x),
    "points": with_points,
    "masks": with_masks,
    "values": with_values,
    "gathers": each_dim(lambda x, d: x.gather(d, entries(x, d))),
    "few gathers": each_dim(
        lambda x, d: x.gather(d, entries(x, d, 2)[tuple(slice(0, -(-n // 2)) for n in x.shape)])
    ),
    "scatters": lambda m, x: [scattered(x, d) for d in range(x.ndim)],
    "assignments": each_dim(
        lambda x, d: written(x, d, order(x.shape[d])[: x.shape[d] // 2 + 1], taken(x, d, slice(1)))
    ),
    "assignments of fields": each_dim(
        lambda x, d: written(x, d, order(x.shape[d], 1).flip(0), x.sin())
    ),
    "sums": lambda m, x: [added(x, d) for d in range(x.ndim)],
    "parts": lambda m, x: [parts_of_all_kinds(x, d) for d in range(x.ndim)],
    "scattered parts": lambda m, x: [scattered_parts(x, d) for d in range(x.ndim)],
    "triangles": triangles,
    "joins": joined,
    "views": viewed,
}


def check_on_bands(
    function: Function, domains: list[Domain], ranks: int = 3, height: int = 13
) -> None:
    """Compare a function with one process; of the operators of this family none runs whole."""
    domains.clear()
    functions.check(function, (2, functions.CHANNELS, height, functions.COLUMNS), ranks, None)
    ran_whole = OWN & {name for domain in domains for name in domain.whole_calls}
    assert not ran_whole, ran_whole


# Diagonals and triangles of rows that are folded, and of which a dimension becomes two.
MAY_RUN_WHOLE = {
    ("triangles", "rows in channels"),
    ("triangles", "folded rows"),
    ("triangles", "folded samples"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_fields(name: str, below_autograd: list[Domain]) -> None:
    check_on_bands(partial(_of_variant, OPERATIONS[name], "field"), below_autograd)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_operations_of_other_bands(variant: str, below_autograd: list[Domain]) -> None:
    for name, operation in OPERATIONS.items():
        with entry(name):
            function = partial(_of_variant, operation, variant)
            if (name, variant) in MAY_RUN_WHOLE:
                functions.check(function, whole=None)
            else:
                check_on_bands(function, below_autograd)


def _of_variant(operation: Function, variant: str, m: Any, x: Tensor) -> Any:
    results = tree_leaves(operation(m, VARIANTS[variant](x)))
    return [y if y.numel() else y.sum() for y in results]


def gradients(operation: Function, m: Any, x: Tensor) -> list[Tensor]:
    """Return gradients of results, which are differentiated again."""
    results = [y for y in tree_leaves(operation(m, x)) if y.requires_grad and y.numel()]
    return list(torch.autograd.grad([(y**3).mean() for y in results], x, create_graph=True))


TWICE = ("vectors", "points", "masks", "gathers", "scatters", "sums", "parts", "joins", "triangles")


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name: str, below_autograd: list[Domain]) -> None:
    check_on_bands(partial(gradients, OPERATIONS[name]), below_autograd)


# ---------------------------------------------------------------- tensors that are filled


def in_bands(x: Tensor) -> Tensor:
    """Return a tensor, which has to be in bands where there are ranks."""
    assert type(x) is not BandTensor or is_band(x)
    return x


def with_border(m: Any, x: Tensor) -> list[Tensor]:
    batch, channels, rows, columns = x.shape
    y = x.new_full((batch, channels, rows + 2, columns + 2), 0.5)
    y[:, :, 0] = m.scale[None, :, None]
    before = y[:, :, 1:3], y.permute(0, 2, 3, 1)[:, 1:, 2:], y.flatten(2), y[:, :, 2], y * 2
    y[:, :, 1:-1, 1:-1] = x
    before[0].mul_(3)
    return [in_bands(y), *(view * 2 for view in before)]


def members(m: Any, x: Tensor) -> list[Tensor]:
    y = x.new_empty((3, *x.shape))
    for i in range(3):
        y[i] = x * m.scale[i]
    z = x.new_zeros(4, 2, 8, 5, 6)
    z[1:3, :, :, ::2] += x.narrow(2, 0, 3)
    one = x.new_zeros(1, 1, x.shape[2], 1)
    one[:, 0] += x[:1, 0, :, 2:3]
    return [in_bands(y), y.sum(0), in_bands(z), in_bands(one)]


def sums_at_indices(m: Any, x: Tensor) -> list[Tensor]:
    tokens, channels = x.flatten(2), order(20, 3) % x.shape[1]
    y, z = x.new_zeros(2, 8, 5), x.new_zeros(2, 8, x.shape[2] + 3, 6)
    y.index_add_(2, torch.arange(tokens.shape[2]) % 5, tokens)
    z[:, :, torch.arange(x.shape[2]) + 2] = x
    v = x.new_zeros(8, 3, 6).index_put((channels, channels % 3), x[0, 0, :1].expand(20, -1), True)
    return [in_bands(y), in_bands(z), v]


@pytest.mark.parametrize("function", [with_border, members, sums_at_indices])
def test_new_tensors_get_the_bands_that_are_written(
    function: Function, below_autograd: list[Domain]
) -> None:
    check_on_bands(function, below_autograd)


def shared_as_an_array(m: Any, x: Tensor) -> list[Tensor]:
    y = x.new_zeros(3, x.shape[2], 6)
    view = y[1]
    array = y.numpy()
    y[:, :2], view[2:4] = 2.0, x.detach()[0, 0, 2:4]
    return [x * y.sum(), view * x, torch.from_numpy(array) * x[:, :1]]


def other_memory(m: Any, x: Tensor) -> list[Tensor]:
    y = (x * 1).detach()
    strided = torch.as_strided(y, (4, 6), (12, 2), 5)
    strided.mul_(2)
    part = y[:, :, ::2].clone()
    return [y * x, strided.sum() * x, part.as_strided((3, 2), (5, 1)).sum() * x]


@pytest.mark.parametrize("function", [shared_as_an_array, other_memory])
def test_memory_that_is_shared_in_other_ways(function: Function) -> None:
    functions.check(function, whole=None)


def test_refuses_to_change_memory() -> None:
    def run(manager: DomainParallelManager) -> list[str]:
        x = Enter.apply(torch.ones(2, 3, 4), Band(-2, 1, (0, 3, 6)), Domain(manager))
        messages = []
        for change in (
            lambda: x.resize_(3, 2),
            lambda: x.set_(),
            lambda: x[:, 1:].as_strided((4, 40), (40, 1)),
        ):
            with pytest.raises(UserError) as error:
                change()
            messages.append(str(error.value))
        return messages

    for messages in on_threads(2, run):
        assert all("memory" in message for message in messages)


# ---------------------------------------------------------------- what is sent

ROWS = 48


def filled(x: Tensor) -> Tensor:
    y = x.new_zeros(*x.shape[:2], ROWS + 2, x.shape[3])
    y[:, :, 1:-1] = x
    return y


# Rows that all of three ranks send, forward and backward.
SENT: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "every second row": (lambda x: x[:, :, ::2], 0, 0),
    "every second row by an index": (lambda x: x[:, :, torch.arange(0, ROWS, 2)], 0, 0),
    "all but the poles": (lambda x: x[:, :, 1:-1], 0, 0),
    "few rows": (lambda x: x[:, :, :5], 0, 0),
    "one of each in another order": (lambda x: x[:, :, [3, 0, 0, -1]], 1, 1),
    "shifted": (lambda x: x.index_select(2, (torch.arange(ROWS) + 2) % ROWS), 6, 6),
    "flipped": (lambda x: x[:, :, torch.arange(ROWS).flip(0)], 32, 32),
    "repeated by an index": (lambda x: x[:, :, torch.arange(2 * ROWS) // 2], 0, 0),
    "a row": (lambda x: x[:, :, 3] * 1, 2, 0),
    "joined with poles": (lambda x: torch.cat([x[:, :, :1], x, x[:, :, -1:]], 2), 0, 0),
    # Bands of 16 rows become 18, 12 and 18.
    "windows": (lambda x: x.unflatten(2, (-1, 6)), 4, 4),
    "a copy of folded rows": (lambda x: folded(x)[:, :, ROWS + 3 :], 0, 0),
    "samples of folded rows": (lambda x: x.transpose(1, 2).flatten(0, 1)[ROWS:], 0, 0),
    "written": (filled, 0, 0),
    "an index of channels": (lambda x: x[:, [3, 1, 0]], 0, 0),
    "added to channels": (lambda x: x.index_add(1, order(8, 3) % 5, x), 0, 0),
    "added to other rows": (lambda x: x.index_add(2, (torch.arange(ROWS) + 1) % ROWS, x), 3, 3),
}


def folded(x: Tensor) -> Tensor:
    return torch.stack([x, x * 2], 2).flatten(2, 3)


def count_rows(
    manager: DomainParallelManager, function: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    """Return how many rows a rank sends forward, and backward."""
    traffic = manager.transport.traffic
    x = torch.randn(2, 8, ROWS // 3, 6, requires_grad=True)
    y = function(Enter.apply(x, Band(-2, 1, (0, 16, 32, 48)), Domain(manager)))
    forward = traffic.bytes
    y.backward(y.detach())
    row = x[:, :, 0].numel() * x.element_size()
    return forward / row, (traffic.bytes - forward) / row


def test_no_more_rows_are_sent_than_needed() -> None:
    for name, (function, forward, backward) in SENT.items():
        with entry(name):
            counts = on_threads(3, count_rows, function)
            assert tuple(map(sum, zip(*counts, strict=True))) == (forward, backward)


def several(x: Tensor) -> Tensor:
    """Return an index of rows for each entry."""
    return (torch.arange(x.numel()).view(x.shape) * 5) % x.shape[2]


# The same in a model, whose outputs have usual bands: a gradient moves once, whoever reads it.
SENT_IN_MODEL: dict[str, tuple[Function, int, int]] = {
    "all but the poles": (lambda m, x: x[:, :, 1:-1] * 2, 1, 1),
    # To channels and back.
    "gathered": (lambda m, x: x.gather(2, several(x)), 64, 64),
    "points": (lambda m, x: x[:, :, order(20), order(20) % 6], 32, 32),
    "scattered": (lambda m, x: x.scatter(2, several(x), x * 2), 96, 96),
    "joined with poles": (lambda m, x: torch.cat([x[:, :, :1] * 2, x, x[:, :, -1:]], 2), 1, 1),
    "joined with itself": (lambda m, x: torch.cat([x, x], 2), 64, 64),
    "repeated": (lambda m, x: x.repeat(1, 1, 2, 1), 64, 64),
    "in windows": (lambda m, x: (x.unflatten(2, (-1, 6)) * 2).flatten(2, 3) + x, 8, 8),
}


def test_gradients_move_once() -> None:
    for name, (function, forward, backward) in SENT_IN_MODEL.items():
        with entry(name):
            sent = functions.check(function, (2, functions.CHANNELS, ROWS, functions.COLUMNS))
            found = [sum(rows for rows, _ in of_pass) for of_pass in zip(*sent, strict=True)]
            assert found == pytest.approx([forward, backward])


# ---------------------------------------------------------------- other types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision(dtype: torch.dtype) -> None:
    def function(x: Tensor, table: Tensor) -> list[Tensor]:
        index = torch.arange(12) % 5
        rows = (x[0, :, :, 0].float() * 8).long() % 3
        return [
            *(x.index_add(2, index, x), x.new_zeros(2, 4, 5, 6).index_add(2, index, x)),
            *(F.embedding(rows, table), table[rows], x.gather(2, entries(x, 2))),
        ]

    def run(manager: DomainParallelManager, x: Tensor, table: Tensor) -> list[Tensor]:
        domain, band = Domain(manager), Band(-2, 1, (0, 5, 9, 12))
        local, table = cut(x, band, domain.rank).clone(), table.clone().requires_grad_()
        y = Enter.apply(local.requires_grad_(), band, domain)
        results = function(y, table)
        gradients = torch.autograd.grad(
            results, [y, table], [z.detach() for z in results], allow_unused=True
        )
        return [whole(z).detach() for z in (*results, *gradients)]

    generator = torch.manual_seed(0)
    x = torch.rand(2, 4, 12, 6, generator=generator).to(dtype).requires_grad_()
    table = torch.randn(3, 2, generator=generator).to(dtype).requires_grad_()
    results = function(x, table)
    gradients = torch.autograd.grad(results, [x, table], [z.detach() for z in results])
    for found in on_threads(3, run, x.detach(), table.detach()):
        for value, expected in zip(found, (*results, *gradients), strict=True):
            assert value.dtype == expected.dtype
            torch.testing.assert_close(value, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("ranges", "numbers"), [(0, 8192), (1024, 4)])
def test_many_rows_that_are_taken_one_by_one(
    ranges: int, numbers: int, below_autograd: list[Domain], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "MOST_RANGES", ranges)
    monkeypatch.setattr(indexing, "MOST_ENTRIES", numbers)
    indexing.taking_few.cache_clear()
    for name in ("vectors", "rising indices", "points", "sums", "assignments of fields"):
        for variant in ("field", "folded rows"):
            with entry((name, variant)):
                check_on_bands(partial(_of_variant, OPERATIONS[name], variant), below_autograd)
    indexing.taking_few.cache_clear()
