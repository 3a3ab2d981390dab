"""Rules of matrix products, distances and linear algebra.

Each dimension of the operands has a letter. One letter is cut into bands, in all operands that have
it: the one for which least is sent. If it is summed over, the result is a sum of the ranks' parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor import views
from credit_dp.domain_parallel.band_tensor.moving import (
    is_same_field,
    other_layouts,
    refresh,
    refresh_all,
    whole,
    with_rows,
)
from credit_dp.domain_parallel.band_tensor.pointwise import has_unknown_sum, is_unsummed
from credit_dp.domain_parallel.band_tensor.rules import decompose, run_whole, short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    OtherLayouts,
    Part,
    Rows,
    domain_of,
    is_band,
    rule_for,
)
from credit_dp.domain_parallel.partition import LARGEST_BAND, falls_into_equal_parts
from credit_dp.domain_parallel.transport import keeps_messages
from credit_dp.errors import UserError
from credit_dp.torch_private import backward_pass, tree_leaves, tree_map

aten = torch.ops.aten
Shape = tuple[int, ...]
# The sum of so many numbers of all ranks takes little longer than that of one.
FEW_NUMBERS = 2**14


# ---------------------------------------------------------------- which dimension is cut


class Cut(NamedTuple):
    """How operands are cut: along a letter, whose dimension is `(outer, height, unit)`.

    Attributes:
        like: the operand that has these bands already; None if bands are moved to the letter.
        height: the number of parts that are cut into bands.
        unit: the entries of each part.
    """

    label: str
    like: int | None
    outer: int = 1
    height: int = 1
    unit: int = 1


@lru_cache(65536)
def best_cut(
    labels: tuple[str, ...],
    out: str,
    shapes: tuple[Shape, ...],
    rows: tuple[Band | None, ...],
    ranks: int,
    parts: tuple[Shape, ...],
    uncut: str,
    is_gradient: bool = False,
) -> Cut | None:
    """Return how to cut a product so that least is sent, given the bands of each operand.

    Bands stay where they are if that is as good. To sum the ranks' parts of a result counts as
    sending it, unless all operands lie in the same bands: then the sum is that of a weight's
    gradient, or could not be had for less.

    Args:
        labels: the letters of each operand's dimensions.
        rows: their bands; None of whole tensors.
        parts: of the first operand that has bands, the sizes that each dimension is made of.
        uncut: letters that have to be in one piece.
        is_gradient: whether backward computes the product: of two fields it is then a weight's
            gradient, which remains in parts.

    Returns:
        None if no letter can be cut.
    """
    sizes: dict[str, int] = {}
    for names, shape in zip(labels, shapes, strict=True):
        # A dimension of size 1 is broadcast to that of another operand.
        sizes |= {name: n for name, n in zip(names, shape, strict=True) if n > 1}
    bands = [i for i, band in enumerate(rows) if band is not None]
    choices: list[tuple[float, bool, int, Cut]] = []

    def sent(label: str, band: Band | None) -> tuple[float, bool]:
        """Return how many entries all ranks send to cut a letter, and whether all have bands."""
        total, is_alike = 0.0, len(bands) == len(rows)
        for i in bands:
            have, names, shape = rows[i], labels[i], shapes[i]
            assert have is not None
            place = names.find(label) - len(names)
            if label in names and shape[place] == sizes.get(label, 1):
                if band is None or not is_same_field(have, band._replace(dim=place)):
                    total += prod(shape) * (ranks - 1) / ranks
                    is_alike = False
                elif have.bounds != band.bounds:
                    total += prod(shape) / ranks / 2
            else:
                total += prod(shape) * (ranks - 1)
                is_alike = False
        return total, is_alike

    for i in bands:
        band = rows[i]
        assert band is not None
        label = labels[i][band.dim]
        if label in uncut or band.size == 1 != sizes.get(label, 1):
            continue
        cost, is_alike = sent(label, band)
        is_kept = label in out
        if not is_kept and not (is_alike or (is_gradient and len(bands) == len(rows))):
            # As much as bands send that move, which have to come back, too.
            cost += (ranks - 1) * prod(sizes.get(name, 1) for name in out)
        choices.append((cost, not is_kept, len(choices), Cut(label, i)))
    for label in out:
        if label in uncut or any(label not in labels[i] for i in bands):
            continue
        if any(shapes[i][labels[i].index(label)] != sizes.get(label, 1) for i in bands):
            continue
        part_sizes = parts[labels[bands[0]].index(label)]
        found = _part_to_cut(part_sizes, ranks)
        if found is not None:
            outer, unit = part_sizes[:found], part_sizes[found + 1 :]
            height = part_sizes[found]
            cut = Cut(label, None, prod(outer), height, prod(unit))
            is_shared = all(label in names for names in labels)
            is_even = falls_into_equal_parts(height, ranks)
            # Of equal ones that in all operands, which is cut alike, then even and large ones.
            order = 1000 - 100 * is_shared - 10 * is_even
            choices.append((sent(label, None)[0], True, order - min(height, 9), cut))
    return min(choices)[3] if choices else None


def _part_to_cut(parts: Shape, ranks: int) -> int | None:
    def is_good(size: int) -> bool:
        return size >= ranks and -(-size // ranks) * ranks <= LARGEST_BAND * size

    good = [i for i, size in enumerate(parts) if is_good(size)]
    return max(
        good, key=lambda i: (falls_into_equal_parts(parts[i], ranks), parts[i]), default=None
    )


@lru_cache(4096)
def _in_units(bounds: tuple[int, ...], unit: int) -> tuple[int, ...]:
    return tuple(bound * unit for bound in bounds)


class Contraction(NamedTuple):
    """A product on this rank."""

    parts: list[Any]
    rows: Rows


def _known_to_match(
    operands: Sequence[Any], labels: tuple[str, ...], rows: tuple[Band | None, ...]
) -> tuple[Band | None, ...]:
    """Return the bands of operands: those of another one where an operand is known in these, too.

    So a product of backward needs no rows that a product of the forward has moved.
    """
    found = list(rows)
    for i, (x, names) in enumerate(zip(operands, labels, strict=True)):
        known = other_layouts(x) if rows[i] is not None else None
        if known is None or not known.parts:
            continue
        for j, band in enumerate(rows):
            if band is None or i == j or labels[j][band.dim] not in names:
                continue
            wanted = band._replace(dim=names.index(labels[j][band.dim]) - len(names))
            if wanted in known.parts:
                found[i] = wanted
    return tuple(found)


def reads_again(operands: Sequence[Any]) -> list[bool]:
    """Return for each factor whether backward reads it, for the gradient of another one."""
    needs = [isinstance(x, Tensor) and x.requires_grad for x in operands]
    return [sum(needs) > need for need in needs]


def contract(
    operands: Sequence[Any],
    labels: tuple[str, ...],
    out: str,
    uncut: str = "",
    is_linear: bool = True,
) -> Contraction | None:
    """Return this rank's parts of the operands of a product, and what its result is.

    Args:
        operands: tensors; an operand that is added has the letters of the result.
        is_linear: whether the result is linear in each operand: else it is no sum of parts.

    Returns:
        None if it has to run whole.
    """
    domain = domain_of(operands)
    refresh_all(*operands)
    rows = tuple([x.rows if is_band(x) else None for x in operands])
    partial = [i for i, x in enumerate(operands) if has_unknown_sum(x)]
    if all(band is None for band in rows):
        if is_linear and len(partial) > 1 and backward_pass() >= 0:  # one of them may stay in parts
            partial.sort(key=lambda i: operands[i].numel())
            for i in partial[:-1]:
                whole(operands[i])
            partial = partial[-1:]
        if is_linear and len(partial) == 1 and labels[partial[0]] != out:
            (i,) = partial
            # Of fields alone: with what a model has computed it is a weight's gradient.
            is_gradient = is_unsummed(operands[i]) and all(type(x) is BandTensor for x in operands)
            sizes = {name: n for x, ns in zip(operands, labels, strict=True)
                     for name, n in zip(ns, x.shape, strict=True)}  # fmt: skip
            # To sum up the smaller one of operand and result, or what nothing may have to sum up:
            # gradients of layers of parameters alone.
            least = FEW_NUMBERS if is_unsummed(operands[i]) and len(out) <= 2 else 0
            size = prod(sizes[name] for name in out)
            if is_gradient or size <= max(operands[i].numel(), least):
                parts = [x.local if j == i else whole(x) for j, x in enumerate(operands)]
                return Contraction(parts, PARTIAL)
        return Contraction([whole(x) for x in operands], WHOLE)
    for x, names in zip(operands, labels, strict=True):
        if x.layout != torch.strided:  # a sparse tensor can't be cut
            uncut += names
    shapes = tuple([tuple(x.shape) for x in operands])
    first = next(i for i, band in enumerate(rows) if band is not None)
    rows = _known_to_match(operands, labels, rows)
    numel = operands[first].numel()
    parts_of = tuple([domain.sizes_before.get((n, numel), (n,)) for n in shapes[first]])
    is_gradient = backward_pass() >= 0 and not keeps_messages()
    cut = best_cut(labels, out, shapes, rows, domain.ranks, parts_of, uncut, is_gradient)
    if cut is None or (cut.label not in out and not is_linear):
        return None
    if cut.like is None:
        band = Band(-1, cut.outer, _in_units(domain.bounds(cut.height), cut.unit))
    else:
        found = rows[cut.like]
        assert found is not None
        band = found
    parts = []
    is_read = reads_again(operands)
    for x, names, again in zip(operands, labels, is_read, strict=True):
        place = names.find(cut.label) - len(names)
        is_cut = cut.label in names and x.shape[place] == band.size
        layout = band._replace(dim=place) if is_cut else WHOLE
        parts.append(with_rows(x, layout, domain, again))
    if cut.label not in out:
        return Contraction(parts, PARTIAL)
    return Contraction(parts, band._replace(dim=out.index(cut.label) - len(out)))


# ---------------------------------------------------------------- transposed operands


@rule_for("permute.default", "transpose.int", "t.default")
def turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give dimensions another order: also in what is known of a tensor in other layouts.

    The backward of a product reads transposed operands.
    """
    part, x = views.move_dims(func, args, kwargs), args[0]
    if type(x) is not BandTensor or x.others is None or not x.others.parts:
        return part
    known = other_layouts(x)
    if known is None or not known.parts:
        return part
    key = tuple([tuple(each) if isinstance(each, list) else each for each in args[1:]])
    others = OtherLayouts(known.version)
    for rows, local in known.parts.items():
        turned = views.moved_band(func, rows, x.ndim, key) if isinstance(rows, Band) else rows
        others.parts[turned] = func(local, *args[1:])
    return part._replace(others=others)


# ---------------------------------------------------------------- matrix products


class Form(NamedTuple):
    """The letters of a product: of each factor, and of the result; to it another may be added."""

    labels: tuple[str, ...]
    out: str
    is_added: bool = False


FORMS = {
    "mm": Form(("yk", "kz"), "yz"),
    "bmm": Form(("byk", "bkz"), "byz"),
    "mv": Form(("yk", "k"), "y"),
    "dot": Form(("k", "k"), ""),
    "vdot": Form(("k", "k"), ""),
    "addmm": Form(("yk", "kz"), "yz", True),
    "baddbmm": Form(("byk", "bkz"), "byz", True),
    "addbmm": Form(("byk", "bkz"), "yz", True),
    "addmv": Form(("yk", "k"), "y", True),
    "addr": Form(("y", "z"), "yz", True),
}


@rule_for(
    *(
        f"{name}.{overload}"
        for name in FORMS
        for overload in getattr(aten, name).overloads()
        if overload in ("default", "dtype")
    )
)
def product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply matrices or vectors, and add the product to a tensor."""
    form = FORMS[short_name(func)]
    count = len(form.labels) + form.is_added
    usual = _usual_product(func, form, args, kwargs)
    if usual is not None:
        return usual
    labels = form.labels
    if form.is_added:  # it broadcasts to the result
        labels = (form.out[len(form.out) - args[0].ndim :], *labels)
    found = contract(args[:count], labels, form.out)
    if found is None:
        return run_whole(func, args, kwargs)
    if form.is_added and found.rows is PARTIAL and domain_of(args).rank:
        kwargs = kwargs | {"beta": 0}  # the first rank adds it
    if form.is_added and 0 in found.parts[1].shape:  # then some of torch's do not broadcast
        sizes = {
            name: n
            for names, x in zip(labels[1:], found.parts[1:], strict=True)
            for name, n in zip(names, x.shape, strict=True)
        }
        found.parts[0] = found.parts[0].expand([sizes[name] for name in form.out])
    return Part(func(*found.parts, *args[count:], **kwargs), found.rows)


def _usual_product(
    func: Any, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Part | None:
    """Return the product of a linear layer, or its gradients, without a search for the best way.

    None if it is another one. The search would find the same: nothing is sent.
    """
    x, other = args[form.is_added : form.is_added + 2]
    refresh_all(x, other)
    if type(x) is not BandTensor or type(x.rows) is not Band or x.layout != torch.strided:
        return None
    names, other_names = form.labels
    label = names[x.rows.dim]
    if type(other) is not BandTensor and label in form.out and label not in other_names:
        added = args[0] if form.is_added else None
        if added is not None and (type(added) is BandTensor or added.ndim > 1):
            return None  # it may have rows, too
        if added is not None and form.out[-1] == label:
            return None
        rows = x.rows._replace(dim=form.out.index(label) - len(form.out))
        operands = (x.local, other) if added is None else (added, x.local, other)
        return Part(func(*operands, *args[len(operands) :], **kwargs), rows)
    is_gradient = backward_pass() >= 0 and not keeps_messages()
    if is_gradient and type(other) is BandTensor and not form.is_added and label not in form.out:
        place = other_names.index(label) - len(other_names)
        if other.rows == x.rows._replace(dim=place):
            return Part(func(x.local, other.local, *args[2:], **kwargs), PARTIAL)
    return None


@rule_for(*(f"{name}_.default" for name, form in FORMS.items() if form.is_added))
def product_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a product to a tensor in place."""
    sum_of = getattr(aten, short_name(func).removesuffix("_")).default
    total = sum_of(*args, **kwargs)
    if total.shape != args[0].shape:
        raise UserError(
            f"{short_name(func)}: gives a field of {tuple(args[0].shape)} the shape "
            f"{tuple(total.shape)} in place. Use the function without the underscore."
        )
    return aten.copy_.default(args[0], total)


@rule_for("_addmm_activation.default")
def product_with_activation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a product of matrices to a tensor, and apply an activation."""
    labels = ("yz"[2 - args[0].ndim :], "yk", "kz")
    found = contract(args, labels, "yz", is_linear=False)
    if found is None:
        return run_whole(func, args, kwargs)
    return Part(func(*found.parts, **kwargs), found.rows)


@rule_for("linear.default")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a linear layer, which torch leaves in one piece in inference mode."""
    x = args[0]
    is_plain = not any(type(w) is BandTensor for w in tree_leaves((args[1:], kwargs)))
    if is_plain and type(x) is BandTensor:
        refresh(x)
        if isinstance(x.rows, Band) and x.rows.dim != -1:
            return Part(func(x.local, *args[1:], **kwargs), x.rows)
    return decompose(func, args, kwargs)


@rule_for("linear_backward.default")
def linear_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradients of a linear layer that torch did not compute by products."""
    x, grad, weight, wanted = args
    rows = grad.reshape(-1, grad.shape[-1])
    results: list[Any] = [None, None, None]
    if wanted[0]:
        results[0] = (rows @ weight).view(x.shape)
    if wanted[1]:
        results[1] = rows.t() @ x.reshape(-1, x.shape[-1])
    if wanted[2]:
        results[2] = rows.sum(0)
    return tuple(results)


@rule_for("_trilinear.default")
def trilinear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply three tensors and sum over some dimensions, as bilinear layers do."""
    ndim = args[0].ndim + len(args[3])
    names = ascii_letters[:ndim]
    labels = tuple(
        "".join(name for d, name in enumerate(names) if d not in expanded) for expanded in args[3:6]
    )
    out = "".join(name for d, name in enumerate(names) if d not in args[6])
    found = contract(args[:3], labels, out)
    if found is None:
        return run_whole(func, args, kwargs)
    return Part(func(*found.parts, *args[3:], **kwargs), found.rows)


# ---------------------------------------------------------------- distances


BY_PRODUCTS, BY_DIFFERENCES = 1, 2  # torch's numbers of ways to compute distances
MATRIX_PRODUCTS = 25  # rows or columns beyond which torch computes distances by products


def _labels_of_vectors(*tensors: Any) -> tuple[list[str], str]:
    most = max(x.ndim for x in tensors) - 2
    batch = ascii_letters[:most]
    return [batch[most - (x.ndim - 2) :] for x in tensors], batch


@rule_for("_cdist_forward.default", "_euclidean_dist.default")
def distances(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the distances of all pairs of vectors."""
    a, b = args[:2]
    before, batch = _labels_of_vectors(a, b)
    # Differences along the last dimension need all of it.
    found = contract((a, b), (before[0] + "YK", before[1] + "ZK"), batch + "YZ", "K", False)
    if found is None:
        return run_whole(func, args, kwargs)
    rest = args[2:]
    if rest and rest[0] == 2 and not rest[1]:
        # By sizes of the globe: both ways round differently where vectors are nearly equal.
        is_large = max(a.shape[-2], b.shape[-2]) > MATRIX_PRODUCTS
        rest = (rest[0], BY_PRODUCTS if is_large else BY_DIFFERENCES)
    return Part(func(*found.parts, *rest), found.rows)


@rule_for("_cdist_backward.default")
def distances_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient of the first vectors."""
    grad, a, b, p, result = args
    (names_a, names_b, _), batch = _labels_of_vectors(a, b, result)
    labels = (batch + "YZ", names_a + "YK", names_b + "ZK", batch + "YZ")
    found = contract((grad, a, b, result), labels, batch + "YK", "K")
    if found is None:
        return run_whole(func, args, kwargs)
    grad, a, b, result = found.parts
    if 0 not in args[4].shape:  # else torch returns a gradient that it has not expanded
        a = a.expand(*grad.shape[:-2], -1, -1)
    return Part(func(grad.contiguous(), a, b, p, result.contiguous()), found.rows)


# ---------------------------------------------------------------- linear algebra


@rule_for(
    "linalg_inv_ex.default",
    "linalg_cholesky_ex.default",
    "linalg_solve_triangular.default",
    "_linalg_solve_ex.default",
    "linalg_lu_factor_ex.default",
    "linalg_lu.default",
    "linalg_lu_solve.default",
    "_linalg_det.default",
    "_linalg_slogdet.default",
    "_linalg_eigh.default",
    "_linalg_svd.default",
    "linalg_eig.default",
    "_linalg_eigvals.default",
    "linalg_qr.default",
    "linalg_matrix_exp.default",
    "triangular_solve.default",
    "cholesky_solve.default",
    "cholesky_inverse.default",
    "lu_unpack.default",
    "linalg_householder_product.default",
)
def batched_matrices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a function of each matrix of a batch, of which ranks have some."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    refresh_all(*tensors)
    first: Any = next((x for x in tensors if is_band(x)), None)
    if first is None:
        return _parts(func(*tree_map(whole, args), **tree_map(whole, kwargs)), WHOLE, 0)
    band, domain, place = first.rows, first.domain, first.ndim + first.rows.dim
    batch = max(x.ndim for x in tensors) - 2
    # With other batches, or vectors, nothing says which matrix belongs to which rank.
    if place >= batch or len({tuple(x.shape[:batch]) for x in tensors}) > 1:
        return run_whole(func, args, kwargs)

    def local(x: Any) -> Any:
        is_tensor = isinstance(x, Tensor)
        return with_rows(x, band._replace(dim=place - x.ndim), domain) if is_tensor else x

    return _parts(func(*tree_map(local, args), **tree_map(local, kwargs)), band, place)


def _parts(results: Any, rows: Rows, place: int) -> Any:
    def part(x: Tensor) -> Part:
        # What was not asked for is an empty tensor without a batch.
        if isinstance(rows, Band) and x.ndim > place:
            return Part(x, rows._replace(dim=place - x.ndim))
        return Part(x, WHOLE)

    return part(results) if isinstance(results, Tensor) else tuple(map(part, results))


@rule_for("_linalg_check_errors.default")
def check_errors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise the same error on all ranks if a matrix has no solution on one of them."""
    return func(*tree_map(whole, args), **kwargs)
