"""Rules of matrix products and `einsum`.

Rows that stay in the result stay where they are; the other operand is cut alike along dimensions
that both have, or gathered. A product that sums over rows is summed over the ranks, unless it sends
less to move the bands to another dimension of the result first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from string import ascii_letters, ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel.bands.reductions import sum_over_bands
from credit_dp.domain_parallel.partition import LARGEST_BAND, falls_into_equal_parts
from credit_dp.domain_parallel.view.function_rules import (
    Args,
    Function,
    Kwargs,
    NoRuleError,
    bind,
    layout_of,
    require_whole,
    rule_for,
)
from credit_dp.domain_parallel.view.shapes import move_rows
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    bands_of,
    is_band,
    local_of,
    whole,
    with_layout,
    wrap,
)


@rule_for("linear")
def linear(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A linear layer over the last dimension."""
    arguments = {"bias": None} | bind(("input", "weight", "bias"), args, kwargs)
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    require_whole(weight, bias)
    layout = layout_of(x)
    if layout.dim == x.ndim - 1:
        try:
            x = move_rows(x, [layout.dim], _windows_or_rows(x))
        except NoRuleError:
            return _linear_over_rows(x, weight, bias)
    return wrap(func(x.local, local_of(weight), local_of(bias)), layout_of(x), x.view_)


def _windows_or_rows(x: Tensor) -> list[int]:
    """Return the dimensions of samples, windows and rows that have parts of one size for all ranks.

    Attention follows among the tokens of a window, and rows of a field are where they were before.
    """
    ranks = bands_of(x)[0].view_.ranks
    return [dim for dim in range(x.ndim - 2) if falls_into_equal_parts(x.shape[dim], ranks)]


def _linear_over_rows(x: GlobalTensor, weight: Tensor, bias: Tensor | None) -> GlobalTensor:
    """Return a linear layer over rows, where no other dimension could hold bands."""
    view, layout = x.view_, layout_of(x)
    part = F.linear(x.local, with_layout(weight, layout.at(1), view))
    total = sum_over_bands(part, view.manager.transport)
    return GlobalTensor(total if bias is None else total + local_of(bias), None, view)


@rule_for("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "dot", "inner", "vdot")
def matmul(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A matrix product, batched or of vectors."""
    names = {"other", "mat2", "vec", "tensor"}
    others = [x for name, x in kwargs.items() if name in names]
    if len(args) + len(others) != 2 or len(others) != len(kwargs):
        raise NoRuleError
    name = func.__name__
    a, b = (*args, *others)
    if name == "__rmatmul__":
        a, b = b, a
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise NoRuleError
    is_inner = name in ("inner", "vdot") and (a.ndim != 1 or b.ndim != 1 or a.is_complex())
    if is_inner or a.ndim == 0 or b.ndim == 0:
        raise NoRuleError
    if a.ndim == 1 or b.ndim == 1:
        # Vectors are matrices of one row or one column.
        product = (a[None] if a.ndim == 1 else a) @ (b[:, None] if b.ndim == 1 else b)
        if b.ndim == 1:
            product = product.squeeze(-1)
        return product.squeeze(-2 if b.ndim > 1 else -1) if a.ndim == 1 else product
    batch = list(ascii_lowercase[: max(a.ndim, b.ndim) - 2])
    left = [*batch[len(batch) - (a.ndim - 2) :], "y", "k"]
    right = [*batch[len(batch) - (b.ndim - 2) :], "k", "z"]
    return contract([a, b], [left, right], [*batch, "y", "z"], torch.matmul)


@rule_for("baddbmm", "addmm")
def add_product(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A matrix product that is added to a tensor."""
    factors = ("batch1", "batch2") if func.__name__ == "baddbmm" else ("mat1", "mat2")
    arguments = {"alpha": 1, "beta": 1} | bind(("input", *factors), args, kwargs)
    x, alpha, beta = arguments["input"], arguments["alpha"], arguments["beta"]
    product = torch.matmul(arguments[factors[0]], arguments[factors[1]])
    if alpha != 1:
        product = product * alpha
    # With beta 0 the input is not read: it may be empty memory.
    if beta == 0:
        return product
    return product + (x if beta == 1 else x * beta)


MATRIX_PRODUCTS = 25  # rows or columns beyond which torch computes distances by them
DISTANCE_BY_SIZE = "use_mm_for_euclid_dist_if_necessary"


@rule_for("cdist")
def cdist(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The distances of all pairs of vectors, cut as a matrix product."""
    names = ("x1", "x2", "p", "compute_mode")
    defaults: dict[str, Any] = {"p": 2.0, "compute_mode": DISTANCE_BY_SIZE}
    arguments = defaults | bind(names, args, kwargs)
    p, mode = float(arguments["p"]), arguments["compute_mode"] or DISTANCE_BY_SIZE
    vectors = [arguments["x1"], arguments["x2"]]
    a, b = (
        # Differences along the last dimension need all of it.
        move_rows(x, [x.ndim - 1]) if is_band(x) and layout_of(x).dim == x.ndim - 1 else x
        for x in vectors
    )
    if p == 2.0 and mode == DISTANCE_BY_SIZE:
        # By sizes of the globe: both ways round differently where vectors are nearly equal.
        is_large = max(a.shape[-2], b.shape[-2]) > MATRIX_PRODUCTS
        mode = "use_mm_for_euclid_dist" if is_large else "donot_use_mm_for_euclid_dist"
    batch = list(ascii_lowercase[: max(a.ndim, b.ndim) - 2])
    left = [*batch[len(batch) - (a.ndim - 2) :], "y", "k"]
    right = [*batch[len(batch) - (b.ndim - 2) :], "z", "k"]

    def distances(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = torch.cdist(a, b, p, mode)
        return result

    return contract([a, b], [left, right], [*batch, "y", "z"], distances)


def contract(
    tensors: Sequence[Any],
    labels: Sequence[Sequence[str]],
    out: Sequence[str],
    func: Callable[..., Tensor],
) -> GlobalTensor:
    """Multiply tensors whose dimensions have labels, and sum over labels that are not in `out`.

    Args:
        tensors: the operands.
        labels: a letter for each of their dimensions.
        out: those of the result.
        func: computes the product of local parts.
    """
    if any(x.layout != torch.strided for x in tensors if type(x) is not GlobalTensor):
        raise NoRuleError  # a sparse tensor can't be cut
    view = bands_of(tensors)[0].view_
    label, layout = _label_of_rows(tensors, labels, out)
    parts = [
        _operand(x, names, label, layout, view) for x, names in zip(tensors, labels, strict=True)
    ]
    result = func(*parts)
    if label in out:
        return GlobalTensor(result, layout.at(out.index(label)), view)
    return GlobalTensor(sum_over_bands(result, view.manager.transport), None, view)


def _label_of_rows(
    tensors: Sequence[Any], labels: Sequence[Sequence[str]], out: Sequence[str]
) -> tuple[str, Layout]:
    """Return the dimension along which a product is cut, and how.

    Rows of the result come first, as what is summed is then gathered once at most; among them those
    of the first operand, as rows of queries, then those of the largest operand.
    """
    bands = [
        (names[layout_of(x).dim], x, position == 0)
        for position, (x, names) in enumerate(zip(tensors, labels, strict=True))
        if is_band(x)
    ]
    kept = [band for band in bands if band[0] in out]
    if not kept and (cut := _cut_without_sum(tensors, labels, out)) is not None:
        return cut
    kept = kept or bands
    if len({label for label, _, _ in kept}) > 1 and kept[0][0] in out:
        kept = [band for band in kept if band[2]] or kept
    label, x, _ = max(kept, key=lambda band: int(band[1].numel()))
    return label, layout_of(x)


def _cut_without_sum(
    tensors: Sequence[Any], labels: Sequence[Sequence[str]], out: Sequence[str]
) -> tuple[str, Layout] | None:
    """Return a dimension of the result along which to cut a product that sums over rows.

    None if to move the bands there sends more than to sum the results, or no dimension can be cut
    into parts of about one size. A dimension that all operands have comes first, as the orders of a
    Legendre transform: its other operand is then cut alike.
    """
    pairs = list(zip(tensors, labels, strict=True))
    bands = [(x, names) for x, names in pairs if is_band(x)]
    view = bands[0][0].view_
    # A dimension of size 1 is broadcast to that of another operand.
    sizes: dict[str, int] = {}
    for x, names in pairs:
        sizes |= {name: n for name, n in zip(names, x.shape, strict=True) if n > 1}
    common = [
        name
        for name in out
        if sizes.get(name, 1) >= view.ranks
        and -(-sizes[name] // view.ranks) * view.ranks <= LARGEST_BAND * sizes[name]
        and all(name in names and x.shape[names.index(name)] == sizes[name] for x, names in bands)
    ]
    summed = view.ranks * prod(sizes.get(name, 1) for name in out)
    if not common or sum(x.numel() for x, _ in bands) >= summed:
        return None

    def order(name: str) -> tuple[bool, bool, int]:
        is_even = falls_into_equal_parts(sizes[name], view.ranks)
        return all(name in names for names in labels), is_even, sizes[name]

    label = max(common, key=order)
    return label, Layout(0, 1, view.manager.partition(sizes[label]))


def _operand(x: Any, names: Sequence[str], label: str, layout: Layout, view: GlobalView) -> Any:
    """Return the part of an operand that meets the parts that are cut along `label`."""
    if label not in names:
        return whole(x)
    dim = names.index(label)
    if x.shape[dim] == 1 != layout.size:
        return whole(x)  # it is broadcast
    if x.shape[dim] != layout.size:
        raise NoRuleError
    return with_layout(x, layout.at(dim), view)


@rule_for("einsum")
def einsum(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """An Einstein sum of tensors without repeated letters."""
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = list(tensors[0])
    if kwargs or not isinstance(equation, str):
        raise NoRuleError
    if not all(isinstance(x, Tensor) for x in tensors):
        raise NoRuleError
    labels, out = _einsum_labels(equation.replace(" ", ""), [x.ndim for x in tensors])
    if any(len(set(names)) != len(names) for names in labels):
        raise NoRuleError
    full = ",".join(map("".join, labels)) + "->" + "".join(out)
    return contract(tensors, labels, out, lambda *parts: torch.einsum(full, *parts))


def _einsum_labels(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return the letters of the operands' dimensions and of the result's, without `...`.

    Raises:
        NoRuleError: there are other operands than the equation has, or too few letters.
    """
    inputs, arrow, out = equation.partition("->")
    sources = inputs.split(",")
    if len(sources) != len(ndims):
        raise NoRuleError
    free = [letter for letter in ascii_letters if letter not in equation]
    counts = [
        ndim - len(source.replace("...", "")) if "..." in source else 0
        for source, ndim in zip(sources, ndims, strict=True)
    ]
    # Dimensions of `...` are aligned from the last one on, as in broadcasting.
    ellipsis = free[: max(counts)]
    if min(counts) < 0 or len(ellipsis) < max(counts):
        raise NoRuleError
    labels = [
        list(source.replace("...", "".join(ellipsis[len(ellipsis) - count :])))
        for source, count in zip(sources, counts, strict=True)
    ]
    if not arrow:
        letters = sorted(letter for letter in set(inputs) if letter.isalpha())
        out = "..." + "".join(letter for letter in letters if inputs.count(letter) == 1)
    return labels, list(out.replace("...", "".join(ellipsis)))


@rule_for("tensordot")
def tensordot(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A sum of products over some dimensions of both tensors."""
    arguments = {"dims": 2} | bind(
        ("input", "other", "dims"),
        args,
        {("other" if name == "b" else name): x for name, x in kwargs.items()},
    )
    a, b, dims = arguments["input"], arguments["other"], arguments["dims"]
    if isinstance(dims, Tensor):
        raise NoRuleError
    if isinstance(dims, int):
        dims = [list(range(a.ndim - dims, a.ndim)), list(range(dims))]
    names = list(ascii_letters)
    left, right = names[: a.ndim], names[a.ndim : a.ndim + b.ndim]
    for d, e in zip(*dims, strict=True):
        right[e] = left[d]
    out = [name for name in left + right if not (name in left and name in right)]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    return contract([a, b], [left, right], out, lambda *parts: torch.einsum(equation, *parts))


@rule_for("outer", "ger")
def outer(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """All products of the entries of two vectors."""
    arguments = bind(("input", "vec2"), args, kwargs)
    return arguments["input"][:, None] * arguments["vec2"]
