"""Tensors that a model makes and fills: each becomes a band when a band is first written to it.

`out = torch.zeros(...)` is the same on all ranks, and plain, as no field takes part. Once a band is
written to it, as in `out[..., :5] = x`, every rank would hold all of it. Instead the tensor is cut
before the write, along the dimension in which the rows of the band come to lie, and so is what
shares its memory. A plain tensor turns into one of the view: the object that the model has stays.

That is done where all tensors of that memory are known. Of plain tensors `view.created` has them,
with the functions that lead to views. A tensor whose memory something else shares, as by `detach`,
as an array of NumPy or as autograd has saved it, stays whole. As that may be so on one rank only,
which prints values, say, such a tensor is still noted, and the ranks decide together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.transport import message_device
from credit_dp.domain_parallel.view.memory import VIEWS, ViewStep, lay_out_memory, view_step
from credit_dp.domain_parallel.view.tensor import (
    GlobalTensor,
    GlobalView,
    Layout,
    bands_of,
    functions_named,
)
from credit_dp.torch_private import (
    FakeTensor,
    disable_torch_function,
    exchange_contents,
    has_gradient_hooks,
    is_alias,
    is_view,
    storage_owners,
    tensor_owners,
)

# Functions that make a tensor of a shape, whatever the values of others are.
CREATORS = frozenset(
    functions_named(
        "zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like",
        "new_zeros", "new_ones", "new_empty", "new_full",
    )
)  # fmt: skip
# Functions that return a new tensor with the values of one that was made so.
COPIES = frozenset(
    functions_named("to", "type", "type_as", "float", "double", "half", "clone", "cuda", "repeat")
)

# Functions that return the memory of a tensor as something else, or change how it is viewed.
USES_MEMORY = frozenset(
    functions_named(
        "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage",
        "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_",
        "resize_", "resize_as_", "set_",
    )
) | {Tensor.data.__set__}  # type: ignore[attr-defined]  # fmt: skip


def layout_with_rows_of(band: GlobalTensor, x: Tensor, dim: int) -> Layout | None:
    """Return the layout of `x` in which rows of a band lie along `dim`; None if there is none."""
    rows = band.rows
    assert rows is not None
    if x.shape[dim] == rows.size:
        return rows.at(dim)
    partition = band.view_.partition(x.shape[dim]) if rows.outer == 1 else None
    return None if partition is None else Layout(dim, 1, partition)


# ---------------------------------------------------------------- plain tensors that models make


def note_created(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, view: GlobalView
) -> None:
    """Note a plain tensor that a running model has made, and views of such."""
    created = view.created
    if func in CREATORS:
        if type(result) is GlobalTensor:
            result.is_created = result.rows is None
        elif _can_be_filled(result):
            created[result] = (None, ())
    elif args and isinstance(args[0], Tensor) and args[0] in created:
        x = args[0]
        results = [result] if isinstance(result, Tensor) else result
        if func in USES_MEMORY:
            source = _source_of(x, view)
            created[source] = (None, None)
        elif func in COPIES and isinstance(result, Tensor) and not is_alias(result, x):
            created[result] = (None, ())
        elif isinstance(results, (list, tuple)):
            is_one = results is not result
            for i, y in enumerate(results):
                if isinstance(y, Tensor) and y is not x and is_alias(y, x):
                    steps = created[x][1]
                    if func not in VIEWS or not is_view(y):
                        steps = None
                    elif steps is not None:
                        steps = (*steps, view_step(func, args, kwargs, None if is_one else i))
                    created[y] = (_source_of(x, view), steps)


def _source_of(x: Tensor, view: GlobalView) -> Tensor:
    """Return the tensor that another one is a view of, which may be itself."""
    source: Tensor | None = view.created[x][0]
    return x if source is None else source


def _can_be_filled(x: Any) -> bool:
    is_plain = type(x) in (Tensor, FakeTensor)
    return is_plain and x.ndim > 0 and (x.is_floating_point() or x.is_complex())


# ---------------------------------------------------------------- before a write


def lay_out(
    args: tuple[Any, ...], kwargs: dict[str, Any], find: Callable[[], Layout | None]
) -> None:
    """Cut a whole tensor that a model has made if a band is about to be written to it.

    All ranks decide alike: by shapes, and together about tensors of which one may know less.

    Args:
        args: of the function that writes to the first of them.
        kwargs: its other arguments.
        find: returns how the tensor is to be cut; None if a rule does not fit.
    """
    x = args[0]
    if not isinstance(x, Tensor) or (type(x) is GlobalTensor and "rows" in vars(x) and x.rows):
        return
    bands = bands_of((args[1:], kwargs))
    if not bands:
        return
    view = bands[0].view_
    if type(x) is not GlobalTensor and x in view.created and find() is not None:
        _show_all(x, view)
    if type(x) is not GlobalTensor or x.rows is not None:
        return
    is_created = x.is_created if x.memory is None else x.memory.is_created
    layout = find() if is_created else None
    if layout is not None:
        lay_out_memory(x, layout)


def _show_all(x: Tensor, view: GlobalView) -> None:
    """Show a plain tensor that the model has made, and its views, through the view; a collective.

    They stay plain, on all ranks, if there may be another tensor with their memory.
    """
    created = view.created
    source = _source_of(x, view)
    views = [y for y, (base, _) in created.items() if base is source]  # type: ignore[no-untyped-call]
    family = [(y, created[y][1]) for y in (source, *views)]
    for y, _ in family:
        del created[y]
    is_known = all(steps is not None for _, steps in family)
    is_closed = isinstance(x, FakeTensor) or _is_closed([y for y, _ in family])
    if not _all_know(is_known and is_closed, view):
        return
    shown: Any = source
    shown.local = _exchange_objects(source, GlobalTensor(source, None, view))
    shown.is_created = True
    for y, steps in family[1:]:
        _show_view(y, source, steps)


def _show_view(y: Tensor, source: Any, steps: Sequence[ViewStep]) -> None:
    """Let a plain view of a tensor that is shown through the view be one of that tensor."""
    shown = source
    with torch.enable_grad():
        for step in steps:
            shown = step.apply(shown)
    memory = shown.memory
    _exchange_objects(y, shown)
    memory.tensors = [weakref.ref(y) if ref() is shown else ref for ref in memory.tensors]


def _all_know(is_known: bool, view: GlobalView) -> bool:
    """Return whether something is true on all ranks; a collective."""
    group = view.manager.domain_group
    device = "cpu" if group is None else message_device(group)
    mine = torch.tensor([is_known], dtype=torch.uint8, device=device)
    everyone = view.manager.transport.all_gather(mine)
    if isinstance(mine, FakeTensor):
        return is_known
    return bool(everyone.all())


def _is_closed(family: Sequence[Tensor]) -> bool:
    """Return whether a plain tensor and views of it are all that share its memory."""
    if any(y.is_inference() or has_gradient_hooks(y) or y.retains_grad or vars(y) for y in family):
        return False
    if any(y.is_leaf and y.requires_grad for y in family):
        return False
    x, *views = family
    # The storage has its object in Python, and each view counts the tensor that it is a view of.
    storage = x.untyped_storage()
    return (
        storage.resizable()  # arrays forbid to resize the memory that they share
        and storage_owners(storage) == 1 + len(family)
        and tensor_owners(x) == len(family)
        and all(tensor_owners(y) == 1 for y in views)
    )


def _exchange_objects(x: Tensor, other: Tensor) -> Tensor:
    """Exchange two tensors between the objects that hold them; return what now holds `x`."""
    with disable_torch_function():
        x.__class__, other.__class__ = other.__class__, x.__class__
        x.__dict__, other.__dict__ = other.__dict__, x.__dict__
        exchange_contents(x, other)
    return other
