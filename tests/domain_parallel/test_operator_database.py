"""All operators of torch's own tests on tensors of the globe, compared with torch on whole ones.

For each sample some arguments are cut into bands, in one dimension or another, and others are whole
or sums of the ranks' parts. A call may be refused, with a cure, but never wrong: outputs with their
strides, what views and writes reach, and gradients are those of one process.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import Enter
from credit_dp.domain_parallel.band_tensor.moving import cut, overlaps, whole
from credit_dp.domain_parallel.band_tensor.parameters import share
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Rows,
)
from credit_dp.domain_parallel.thread_ranks import RankError, run_on_threads
from credit_dp.errors import UserError
from credit_dp.torch_private import DispatchMode, FakeTensorMode, is_view
from tests.operator_database import Sample, operators, samples

CHUNKS = 8
SAMPLES = 6  # of each operator
TOLERANCE = 1e-10
TIMEOUT = 20.0

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch warns of samples


class Case(NamedTuple):
    """A sample, and how ranks hold its tensors.

    Attributes:
        kind: whether the function is called, or the one that writes to its first argument; whether
            what it returns is a view that is written to, and whether gradients have gradients.
        held: of each leaf of the arguments what ranks hold of it; None: all, in a plain tensor.
        turn: a number that differs from case to case.
    """

    sample: Sample
    kind: str
    held: list[Rows | None]
    ranks: int
    turn: int

    def __str__(self) -> str:
        leaves = enumerate(self.held)
        held = ", ".join(f"{i}: {shown_rows(rows)}" for i, rows in leaves if rows is not None)
        kind = "" if self.kind == CALL else f", {self.kind}"
        return f"{self.sample}{kind}, {self.ranks} ranks hold of tensor {held}"


# Their values are what is in memory.
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}
# torch computes it in another way for subclasses, with other strides.
OTHER_STRIDES = {"nn.functional.one_hot"}
# torch reads the memory of indices past the dispatcher: they have to be plain.
PLAIN_INDICES = {"tensor_split"}
# Computed in a property that, until Python 3.12, one thread computes at a time: ranks would wait.
ONE_THREAD = {"nn.functional.linear_cross_entropy.chunked_none"}
CALL, IN_PLACE = "call", "in place"
WRITE, TWICE = "write to the view", "gradient of the gradient"


def shown_rows(rows: Rows) -> str:
    """Return what ranks hold as a short text."""
    return f"bands {rows.bounds} of dim {rows.dim}" if isinstance(rows, Band) else rows.value


class Run(NamedTuple):
    """What a call returned: of each output and gradient a tensor, or what it is instead."""

    outputs: list[Any]
    descriptions: list[Any]
    gradients: list[Tensor | None]
    precision: float  # the largest of the outputs that have gradients


class RandomCallError(Exception):
    """An operator draws random numbers: ranks have others than one process."""


class FindRandom(DispatchMode):
    """Refuses operators whose results are random."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomCallError(str(func))
        return func(*args, **kwargs or {})


# ---------------------------------------------------------------- cases


def bounds_of(size: int, turn: int) -> tuple[int, ...]:
    """Return uneven bands, by turns of two and three ranks, and some that are empty."""
    first = max(1, size // 3)
    return (
        (0, first, size),
        (0, first, size - (size > 2), size),
        (0, first, first, size),
        (0, size - 1, size),
        (0, 0, size - 1, size),
        (0, first, size, size),
        (0, 1, size - 1, size) if size > 2 else (0, 1, 1, size),
    )[turn % 7]


def cases(sample: Sample, number: int) -> list[Case]:
    """Return cases of a sample: the number decides which arguments are cut, and where."""
    leaves = tree_leaves((sample.args, sample.kwargs))
    turn = zlib.crc32(f"{sample.operator} {number}".encode())
    eligible = [i for i, x in enumerate(leaves) if may_be_cut(x)]
    eligible = eligible[:1] if sample.operator in PLAIN_INDICES else eligible
    chosen = (eligible[:1], eligible, [eligible[turn // 7 % len(eligible)]])[turn % 3]
    ranks = len(bounds_of(2, turn)) - 1
    held: list[Rows | None] = [None] * len(leaves)
    for i, x in enumerate(leaves):
        if i in chosen:
            dims = [d for d in (-1, -2, -x.ndim) if d >= -x.ndim and x.shape[d] > 1]
            dims = dims or [d for d in range(-x.ndim, 0) if x.shape[d] > 1]
            dim = dims[turn // 21 % len(dims)]
            held[i] = Band(dim, 1, bounds_of(x.shape[dim], turn))
        elif is_strided(x) and sample.operator not in PLAIN_INDICES:
            is_real = x.is_floating_point() and x.itemsize > 1  # eight bits can't be added
            held[i] = (None, WHOLE, None, PARTIAL if is_real else WHOLE)[turn // 5 % 4]
    kinds = [CALL, *([IN_PLACE] if sample.in_place else [])]
    return [Case(sample, kind, held, ranks, turn) for kind in kinds]


def may_be_cut(x: Any) -> bool:
    """Return whether an argument is a tensor with a dimension to cut."""
    return is_strided(x) and x.numel() > 1


# ---------------------------------------------------------------- calls


def call(case: Case, leaves: list[Any], grad_of: Callable[[int, Tensor], Tensor]) -> Run:
    """Return outputs and gradients of the tensors among leaves.

    Args:
        case: what is called.
        leaves: of its arguments.
        grad_of: returns the gradient of an output, by its number.
    """
    sample = case.sample
    _, tree = tree_flatten((sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    arguments = leaves
    if case.turn // 3 % 4 == 0:
        arguments = [between_others(x) if is_strided(x) else x for x in leaves]
    elif case.turn // 3 % 4 == 1:
        arguments = [reordered(x, case.turn) if is_strided(x) else x for x in leaves]
    elif case.kind in (IN_PLACE, WRITE):  # a leaf is not written to
        arguments = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
    args, kwargs = tree_unflatten(arguments, tree)
    if case.kind == IN_PLACE:
        result = sample.in_place(*args, **kwargs)
        result = [result, *(x for x in tree_leaves(args) if isinstance(x, Tensor))]
    else:
        result = sample.function(*args, **kwargs)
    if case.kind == WRITE:
        written = [x for x in tree_leaves(result) if may_be_written(x)]
        for x in written:
            x.mul_(3)
        result = [*written, *(x for x in arguments if isinstance(x, Tensor))]
    outputs = tree_leaves(result)
    described = [describe(x) for x in outputs]
    if case.kind in (CALL, TWICE):
        result = sample.process(result)
    ends = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    starts = [x for x in tensors if is_strided(x) and x.requires_grad]
    gradients: list[Tensor | None] = [None] * len(starts)
    if ends and starts:
        weights = [grad_of(i, x) for i, x in enumerate(ends)]
        settings: Any = {"allow_unused": True, "create_graph": case.kind == TWICE}
        gradients = list(torch.autograd.grad(ends, starts, weights, **settings))
    if case.kind == TWICE:
        numbered = [(i, x) for i, x in enumerate(gradients) if x is not None and x.requires_grad]
        weights = [grad_of(len(ends) + i, x) for i, x in numbered]
        gradients = [None] * len(starts)
        if numbered:
            firsts = [x for _, x in numbered]
            gradients = list(torch.autograd.grad(firsts, starts, weights, allow_unused=True))
    precision = max([precision_of(x) for x in ends], default=0.0)
    return Run([detached(x) for x in outputs], described, gradients, precision)


def is_strided(x: Any) -> bool:
    """Return whether an argument is a tensor that is not sparse."""
    return isinstance(x, Tensor) and x.layout is torch.strided


def contiguous(x: Tensor) -> Tensor:
    """Return a copy without history."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def between_others(x: Tensor) -> Tensor:
    """Return a tensor as a view that has others' entries between its own in memory."""
    return torch.stack([x, x], -1)[..., 1]


def reordered(x: Tensor, turn: int) -> Tensor:
    """Return a copy with its dimensions in another order in memory."""
    if x.ndim == 4 and turn % 2:
        return x.clone(memory_format=torch.channels_last)
    return x.mT.clone(memory_format=torch.contiguous_format).mT if x.ndim > 1 else x.clone()


def precision_of(x: Tensor) -> float:
    """Return the largest relative error that is one of rounding."""
    if x.dtype in (torch.float64, torch.complex128):
        return TOLERANCE
    return 100 * torch.finfo(x.dtype).eps


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def may_be_written(x: Any) -> bool:
    """Return whether a result is a view, each of whose entries has a place of its own in memory."""
    return isinstance(x, Tensor) and is_view(x) and not overlaps(x.shape, x.stride())


def describe(x: Any) -> Any:
    """Return what is known of an output beside its values."""
    if not isinstance(x, Tensor):
        return type(x)
    if not is_strided(x):
        return x.dtype, tuple(x.shape), x.layout
    # The stride of a dimension of one entry says nothing, and torch is not of one mind about it.
    strides = tuple([s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)])
    return x.dtype, tuple(x.shape), strides, int(x.storage_offset()), is_view(x), x.requires_grad


def weights(x: Tensor, number: int) -> Tensor:
    """Return the gradient of an output, not of random numbers, which `FindRandom` would find."""
    places = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    waves = torch.cos(1.7 * places + number + 1)
    return (torch.complex(waves, waves.roll(1)) if x.is_complex() else waves).to(x.dtype)


def layout_of_gradient(x: Tensor, turn: int) -> Rows | None:
    """Return how ranks hold the gradient of an output, by turns."""
    dims = [d for d in range(-x.ndim, 0) if x.shape[d] > 1]
    if turn % 2 == 0 and dims:
        dim = dims[turn // 2 % len(dims)]
        return Band(dim, 1, bounds_of(x.shape[dim], turn % 7 + 7))
    return (PARTIAL, WHOLE, None)[turn // 2 % 3]


def local_part(x: Tensor, rows: Rows | None, domain: Domain) -> Tensor:
    """Return what a rank holds of a whole tensor."""
    if isinstance(rows, Band):
        return contiguous(cut(x, rows, domain.rank))
    if rows is not PARTIAL:
        return x.clone()
    # Parts whose sum has no rounding: whole numbers, and the rest.
    real = torch.view_as_real(x) if x.is_complex() else x
    rounded = torch.where(real.isfinite(), real.double().round().to(real.dtype), real)
    rest = torch.where(real.isfinite(), real - rounded, 0)
    parts = [rounded, rest] if domain.ranks == 2 else [rounded + 1, rest * 0 - 1, rest]
    part = parts[domain.rank].to(x.real.dtype)
    return torch.view_as_complex(part.contiguous()) if x.is_complex() else part


def run_rank(manager: DomainParallelManager, case: Case, leaves: list[Any]) -> Run:
    """Return a rank's outputs, of which each is whole, and its gradients."""
    domain = Domain(manager)
    locals_, arguments = [], []
    for x, rows in zip(leaves, case.held, strict=True):
        if is_strided(x):
            local = local_part(x.detach(), rows, domain).requires_grad_(x.requires_grad)
            locals_.append(local)
            arguments.append(local if rows is None else Enter.apply(local, rows, domain))
        else:
            arguments.append(x)

    def grad_of(number: int, y: Tensor) -> Tensor:
        grad = weights(y, number)
        rows = layout_of_gradient(y, case.turn + number)
        if type(y) is not BandTensor or rows is None or y.dtype is torch.complex32:
            return grad
        if isinstance(rows, Band) and len(rows.bounds) != domain.ranks + 1:
            rows = rows._replace(bounds=domain.bounds(rows.height))
        return BandTensor(local_part(grad, rows, domain), rows, domain)

    entered = [x for x in arguments if is_strided(x)]
    outputs, descriptions, gradients, precision = call(case, arguments, grad_of)
    starts = [x for x in entered if x.requires_grad]
    sources = [x for x in locals_ if x.requires_grad]
    held = [rows for x, rows in zip(leaves, case.held, strict=True) if is_strided(x)]
    held = [rows for x, rows in zip(locals_, held, strict=True) if x.requires_grad]
    found: list[Tensor | None] = []
    for start, source, grad, rows in zip(starts, sources, gradients, held, strict=True):
        if grad is None or start is source:  # a plain tensor, of which each rank has its share
            found.append(grad if grad is None else share(grad, domain))
        else:
            (local,) = torch.autograd.grad(start, source, grad)
            # Of a part of a sum each rank has the gradient, which here counts once.
            found.append(share(local, domain) if rows is PARTIAL else local)
    for y in outputs:
        if type(y) is BandTensor:
            check_local(y)
    return Run([whole(y) for y in outputs], descriptions, found, precision)


def check_local(y: BandTensor) -> None:
    """Check that what a rank holds is what it says."""
    sizes = list(y.shape)
    if isinstance(y.rows, Band):
        sizes[y.rows.dim] = y.rows.outer * y.rows.sizes(y.domain.rank)
    assert tuple(y.local.shape) == tuple(sizes), f"{y.rows}: a local shape of {y.local.shape}"
    assert y.local.dtype == y.dtype, f"a local dtype of {y.local.dtype}"


# ---------------------------------------------------------------- verdicts


def check(case: Case, leaves: list[Any], expected: Run) -> str | None:
    """Return what is wrong, or None."""
    results = run_on_threads(case.ranks, lambda m: run_rank(m, case, leaves), TIMEOUT)
    for rank, result in enumerate(results):
        if len(result.outputs) != len(expected.outputs):
            return f"rank {rank}: {len(result.outputs)} results, not {len(expected.outputs)}"
        for i, (y, wanted) in enumerate(zip(result.outputs, expected.outputs, strict=True)):
            found, described = result.descriptions[i], expected.descriptions[i]
            if found != described and not has_strides_without_data(found, described, case, i):
                return f"rank {rank}: result {i} is {found}, not {described}"
            wrong = None if case.sample.operator in UNDEFINED else difference(y, wanted)
            if wrong:
                return f"rank {rank}: result {i}: {wrong}"
    starts = [i for i, x in enumerate(leaves) if is_strided(x) and x.requires_grad]
    for i, wanted, *parts in zip(
        starts, expected.gradients, *(result.gradients for result in results), strict=True
    ):
        wrong = difference(joined(parts, case.held[i]), wanted, expected.precision)
        if wrong:
            return f"gradient of tensor {i}: {wrong}"
    return None


def has_strides_without_data(found: Any, wanted: Any, case: Case, number: int) -> bool:
    """Return whether a result has the strides that torch gives it if arguments have no data.

    Those are what tensors of the globe have, and for some operators torch's own mistake.
    """
    if case.sample.operator in OTHER_STRIDES:
        return bool(found[:2] == wanted[:2])

    def without_data(x: Any) -> Any:
        if not is_strided(x):
            return x
        return torch.empty(x.shape, dtype=x.dtype, requires_grad=x.requires_grad)

    leaves = tree_leaves((case.sample.args, case.sample.kwargs))
    try:
        with FakeTensorMode():
            run = call(case, [without_data(x) for x in leaves], lambda _, y: torch.zeros_like(y))
    except Exception:  # noqa: BLE001 - torch can't say it of every function
        return False
    return bool(found == run.descriptions[number])


def joined(parts: list[Tensor | None], rows: Rows | None) -> Tensor | None:
    """Return the gradient of all ranks."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    return torch.cat(tensors, rows.dim) if isinstance(rows, Band) else sum(tensors)


def difference(found: Any, wanted: Any, precision: float = 0.0) -> str | None:
    """Return by how much values differ, or None; a gradient that is none is zero."""
    if not isinstance(wanted, Tensor) and not isinstance(found, Tensor):
        return None if found == wanted or found != found else f"{found}, not {wanted}"
    found = torch.zeros_like(wanted) if found is None else found
    wanted = torch.zeros_like(found) if wanted is None else wanted
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    if found.layout is not torch.strided:
        found, wanted = found.to_dense(), wanted.to_dense()
    if not found.dtype.is_floating_point and not found.dtype.is_complex:
        count = int((found != wanted).sum())
        return f"{count} of {found.numel()} entries differ" if count else None
    tolerance = max(precision, precision_of(found))
    if found.itemsize == 1:  # torch computes little in eight bits
        found, wanted = found.float(), wanted.float()
    scale = float(wanted[wanted.isfinite()].abs().amax()) if wanted.isfinite().any() else 0.0
    scale = max(1e-3, scale)
    if torch.allclose(found, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True):
        return None
    largest = float((found - wanted).abs().nan_to_num().max())
    return f"largest difference {largest:.2g}, of {scale:.2g}"


class Verdicts:
    """How often calls were right, refused, or skipped, and what was wrong."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.refused = Counter[str]()
        self.wrong: list[str] = []

    def judge(self, operator: Any, count: int = SAMPLES) -> None:
        """Check samples of an operator, of few ones each several times, in several ways."""
        found = samples(operator, count)
        for number in range(count if found else 0):
            self.judge_sample(found[number % len(found)], number)

    def judge_sample(self, sample: Sample, number: int) -> None:
        """Check a sample in all cases."""
        for case in cases(sample, number):
            run = self.judge_case(case)
            is_call = run is not None and case.kind == CALL
            if is_call and any(map(is_shown_as_view, run.descriptions)):
                self.judge_case(case._replace(kind=WRITE))
            elif is_call and case.turn % 4 == 0 and any(x is not None for x in run.gradients):
                self.judge_case(case._replace(kind=TWICE))

    def judge_case(self, case: Case) -> Run | None:
        """Check a case; return what it gives on one process, None if that refuses it."""
        leaves = [
            contiguous(x).requires_grad_(x.requires_grad) if is_strided(x) else x
            for x in tree_leaves((case.sample.args, case.sample.kwargs))
        ]
        try:
            with FindRandom():
                expected = call(case, leaves, lambda number, y: weights(y, number))
        except RandomCallError:
            self.counts["random"] += 1
            return None
        except Exception:  # noqa: BLE001 - whatever torch raises of its own functions
            self.counts["refused by torch"] += 1
            return None
        try:
            wrong = check(case, leaves, expected)
        except RankError as error:
            if isinstance(error.__cause__, UserError):
                self.counts["refused"] += 1
                self.refused[case.sample.operator] += 1
                return expected
            wrong = f"raises: {str(error)[:300]}"
        self.counts["wrong" if wrong else "right"] += 1
        if wrong:
            self.wrong.append(f"{case}: {wrong}")
        return expected


def is_shown_as_view(description: Any) -> bool:
    return isinstance(description, tuple) and description[-2] is True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_operators_equal_those_of_one_process(chunk: int) -> None:
    verdicts, began = Verdicts(), time.monotonic()
    for operator in operators()[chunk::CHUNKS]:
        if operator.full_name not in ONE_THREAD or sys.version_info >= (3, 12):
            verdicts.judge(operator)
    took = time.monotonic() - began
    total = verdicts.counts.total()
    print(f"{total} calls in {took:.0f} s, {total / took:.0f} a second: {dict(verdicts.counts)}")
    print(f"refused: {dict(verdicts.refused)}")
    assert not verdicts.wrong, "\n".join([f"{len(verdicts.wrong)} wrong", *verdicts.wrong])
