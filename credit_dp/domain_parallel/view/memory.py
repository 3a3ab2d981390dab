"""Writes in place: every tensor that shares memory on one process sees them.

On one process a view and its base are one memory. Here a view may be a copy, as its rows had to
move to other ranks. So each tensor knows how it is viewed: its `path` of functions, from the base
of its memory. A write goes to the tensor that is written, and is *pending* until another tensor of
the memory is read: then the base gets the values, by the path backwards, and the other tensor is
computed anew from the base. All ranks write and read in the same order, and so send alike. Whether
tensors do share storage on a rank decides about copies only.

`reshape` and a few others return a view or a copy, by the strides of the globe's tensor. Their
results have a memory of their own, with a link to that of their argument. If one of both is written
and the other one read later, the ranks find out which it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from credit_dp.domain_parallel.view.tensor import (
    WITHOUT_GAPS,
    GlobalTensor,
    Layout,
    Link,
    SharedMemory,
    cut,
    functions_named,
    global_tensors,
    is_same_memory,
    shares_storage,
    strides_on_all_ranks,
    untracked,
    whole,
    with_layout,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import is_alias, tree_map

# Functions that return a view or a copy, by the strides of their argument, which differ for a band.
MAYBE_VIEWS = frozenset(functions_named("reshape", "flatten", "contiguous", "reshape_as", "ravel"))
# Functions whose results share memory with their argument on one process, or may do so.
VIEWS = MAYBE_VIEWS | frozenset(
    functions_named(
        "view", "unflatten", "permute", "transpose", "t", "movedim", "narrow", "select",
        "__getitem__", "unbind", "chunk", "split", "squeeze", "unsqueeze", "expand", "diagonal",
        "swapaxes", "swapdims", "view_as", "expand_as", "unfold", "tensor_split", "moveaxis",
        "adjoint", "broadcast_to", "split_with_sizes", "view_as_real", "view_as_complex",
        "hsplit", "vsplit", "dsplit", "detach",
    )
) - frozenset([torch.nn.functional.unfold])  # fmt: skip
RESHAPES = (
    "view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
    "ravel", "contiguous",
)  # fmt: skip
PERMUTATIONS = (
    "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims",
)  # fmt: skip
# Functions whose results have the memory of their argument, of which autograd does not know.
DETACHING = frozenset([*functions_named("detach"), Tensor.data.__get__])  # type: ignore[attr-defined]
EXPANSIONS = frozenset(functions_named("expand", "broadcast_to", "expand_as"))
SPLITS = ("chunk", "split", "tensor_split", "split_with_sizes")


@final
class ViewStep(NamedTuple):
    """A function that returns a view, and its arguments but for the tensor.

    Attributes:
        position: of the view among the function's results; None if it is the only one.
        records: whether autograd recorded it.
        grows: whether the view has more entries, as `expand` may return.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int | None
    records: bool
    grows: bool = False

    @property
    def name(self) -> str:
        """Return the function's name; empty for an attribute."""
        name: str = getattr(self.func, "__name__", "")
        return "" if name == "__get__" else name

    def apply(self, x: Any) -> Any:
        """Return the view of a tensor."""
        with torch.set_grad_enabled(self.records and torch.is_grad_enabled()):
            results = self.func(x, *self.args, **self.kwargs)
        return results if self.position is None else results[self.position]

    @property
    def detaches(self) -> bool:
        """Return whether autograd does not see that the view has the same memory."""
        return self.func in DETACHING

    @property
    def window(self) -> tuple[int, int, int] | None:
        """Return the dimension, the size and the step of `unfold`; None of other functions."""
        if self.name != "unfold":
            return None
        named = dict(zip(("dimension", "size", "step"), self.args, strict=False)) | self.kwargs
        return named["dimension"], named["size"], named["step"]

    def as_index(self, x: Tensor) -> Any:
        """Return the index by which `x` would give the same view; None if there is none."""
        arguments = list(self.args)
        if self.name == "__getitem__":
            return arguments[0]
        if self.name not in ("narrow", "select", "unbind", *SPLITS):
            return None
        names = {"narrow": ("dim", "start", "length"), "select": ("dim", "index")}
        if self.name in names:
            named = dict(zip(names[self.name], arguments, strict=False)) | self.kwargs
            dim = named["dim"] % x.ndim
            if self.name == "select":
                return (*[slice(None)] * dim, named["index"])
            start = int(named["start"]) % max(x.shape[dim], 1) if named["start"] else 0
            return (*[slice(None)] * dim, slice(start, start + named["length"]))
        position = self.position or 0
        others = arguments[1:] if self.name != "unbind" else arguments
        dim = (others[0] if others else self.kwargs.get("dim", self.kwargs.get("axis", 0))) % x.ndim
        if self.name == "unbind":
            return (*[slice(None)] * dim, position)
        parts = self.func(torch.empty(x.shape, device="meta"), *self.args, **self.kwargs)
        start = sum(part.shape[dim] for part in parts[:position])
        return (*[slice(None)] * dim, slice(start, start + parts[position].shape[dim]))


Path = tuple[ViewStep, ...]

# ---------------------------------------------------------------- noting views


def as_argument(func: Any, results: Any, args: tuple[Any, ...]) -> Any:
    """Return the first argument if a function has returned it as it is, otherwise the results.

    Hooks, `autograd.grad` and `is` know it, as on one process.
    """
    source = args[0] if args else None
    if type(results) is GlobalTensor and type(source) is GlobalTensor and func not in VIEWS:
        is_same = results.rows == source.rows and results.local is source.local
        return source if is_same else results
    return results


def as_new_tensor(x: GlobalTensor, source: Any) -> GlobalTensor:
    """Return a function's result without shared memory, also if it was computed as a view."""
    is_shared = type(source) is GlobalTensor and shares_storage(x, source)
    if x.memory is None and not is_shared:
        return x
    result = GlobalTensor(x.local.clone() if is_shared else x.local, x.rows, x.view_)
    result.has_order = x.has_order
    return result


def is_certain_copy(x: GlobalTensor) -> bool:
    """Return whether `contiguous` copies on one process; False if that is not certain."""
    if not x.path or x.memory is None:
        return False
    part = torch.empty(x.memory.base.shape, dtype=x.dtype, device="meta")
    for step in x.path:
        part = step.apply(part)
    return not part.is_contiguous()


def note_views(func: Any, results: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note which results of a function share memory with its first argument on one process."""
    source = args[0] if args else None
    if type(source) is not GlobalTensor or results is source:
        return
    is_one = isinstance(results, Tensor)
    for i, x in enumerate([results] if is_one else global_tensors(results)):
        if type(x) is not GlobalTensor or x is source:
            continue
        if not source.is_tracked:
            x.is_tracked = False
            continue
        if x.memory is not None and x.memory is source.memory:  # an inner call has noted it
            continue
        if not (func in VIEWS or x.is_view or is_alias(x.local, source.local)):
            continue
        grows = func in EXPANSIONS and x.numel() > source.numel()
        step = view_step(func, args, kwargs, None if is_one else i, grows)
        if step.detaches:
            _link(x, source, step)
        elif func in MAYBE_VIEWS and not (
            step.name not in WITHOUT_GAPS and _only_splits(source.shape, x.shape)
        ):
            # Also of what all ranks hold: not all of them may know the order of its dimensions.
            _link(x, source, step)
        elif func not in VIEWS:
            _add_view(x, source, None if x.local is source.local else step)
        elif _is_view(func, args):
            _add_view(x, source, step)


def _only_splits(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether each dimension of a shape becomes others by itself, as in any view."""
    sizes = iter([size for size in other if size != 1])
    for size in shape:
        product = 1
        while product < size:
            product *= next(sizes, size + 1)
        if product != size:
            return False
    return True


def _is_view(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function of views returns none for these arguments, as an index may."""
    if getattr(func, "__name__", "") != "__getitem__":
        return True
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    return BASIC_INDICES.issuperset(map(type, items)) or all(map(_is_basic, items))


def _is_repeated(x: Any) -> bool:
    """Return whether a tensor shows entries of its memory several times."""
    if type(x) is not GlobalTensor or x.memory is None:
        return False
    repeated = False
    for step in (*x.memory.history, *x.path):
        if step.name in WITHOUT_GAPS:
            repeated = False
        elif step.name in ("expand", "broadcast_to"):
            repeated |= step.grows
    return repeated


# Types of most of what selects by position; `bool` is none, though it is an `int`.
BASIC_INDICES = frozenset([int, slice, type(None), type(...)])


def _is_basic(item: Any) -> bool:
    """Return whether an item of an index selects by position."""
    if isinstance(item, bool):
        return False
    if isinstance(item, Tensor):
        return item.ndim == 0 and item.dtype != torch.bool and not item.is_floating_point()
    return item is None or item is Ellipsis or isinstance(item, (int, slice, np.integer))


def view_step(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    position: int | None,
    grows: bool = False,
) -> ViewStep:
    """Return a function and its arguments as they are now."""

    def keep(value: Any) -> Any:
        if type(value) is GlobalTensor:
            return GlobalTensor(value.local.detach().clone(), value.rows, value.view_)
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, (list, tuple)):
            return type(value)(map(keep, value)) if any(map(_is_array, value)) else value
        return value

    others = args[1:]
    name = getattr(func, "__name__", "")
    if name in ("view_as", "reshape_as", "expand_as"):  # of which the shape counts
        others = (tuple((*others, *kwargs.values())[0].shape),)
        func, kwargs = getattr(Tensor, name.removesuffix("_as")), {}
    elif not BASIC_INDICES.issuperset(map(type, others)) and any(map(_is_array, others)):
        others = tuple(map(keep, others))
    return ViewStep(func, others, kwargs, position, torch.is_grad_enabled(), grows)


def _is_array(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_array, value))
    return isinstance(value, Tensor)


def _memory_of(x: GlobalTensor) -> SharedMemory:
    if x.memory is None:
        x.memory = SharedMemory(x)
    return x.memory


def _add_view(x: GlobalTensor, source: GlobalTensor, step: ViewStep | None) -> None:
    """Note that `x` has the memory of `source`."""
    x.memory = _memory_of(source)
    x.path = source.path if step is None else (*source.path, step)
    x.memory.add(x)
    x.has_order &= source.has_order and shares_storage(x, source)


def _link(x: GlobalTensor, source: GlobalTensor, step: ViewStep) -> None:
    """Note that `x` is a view of `source` or a copy, or a view that autograd does not know of."""
    memory, path = _memory_of(source), (*source.path, step)
    own = SharedMemory(x)
    x.memory, x.path = own, ()
    own.history = (*memory.history, *path)
    own.strides, own.parent = memory.strides, memory
    own.is_part, own.has_hooks = True, memory.has_hooks
    link = Link(weakref.ref(memory), path, weakref.ref(own))
    memory.add_link(link)
    own.add_link(link)
    x.has_order &= source.has_order and shares_storage(x, source)


# ---------------------------------------------------------------- writes


def writing(x: Any) -> AbstractContextManager[None]:
    """Return the context in which a function writes to a tensor in place."""
    if type(x) is not GlobalTensor or not x.is_tracked or x.memory is None:
        return nullcontext()
    return _writing_shared(x)


@contextmanager
def _writing_shared(x: GlobalTensor) -> Iterator[None]:
    x.local  # noqa: B018  (computed anew if others have been written)
    keeps_graph = not torch.is_grad_enabled() and not x.is_leaf
    memory = _certain_memory(x, _memory_of(x))
    _refuse_overlapping_rows(x, memory)
    _bypass_hooks(x, memory)
    if memory.pending is not None and memory.pending[0] is not x.path:
        _write_back(memory)
    if memory.links and not _is_alone(x, memory):
        # What turns out to be a copy keeps its values.
        with torch.enable_grad():
            x.local = x.local.clone()
        x.known_rows = None
    yield
    if x.path:
        records = torch.is_grad_enabled() or (memory.pending is not None and memory.pending[2])
        memory.pending = (x.path, untracked(x.local, x.rows, x.view_), records)
    else:
        memory.base, memory.pending = untracked(x.local, x.rows, x.view_), None
    memory.is_recorded |= torch.is_grad_enabled()
    memory.is_written = memory.is_written or _hides_write(x, memory)
    memory.has_lost_graph |= keeps_graph and _has_others(x, memory)
    for other in memory.alive():
        if other is not x:
            _outdate(other)
    _outdate_linked(memory, None)


def _certain_memory(x: GlobalTensor, memory: SharedMemory) -> SharedMemory:
    """Return the memory of a tensor that is to be written; collectives.

    If its entries may be repeated ones of another memory, it is found out whether they are: a write
    to one of them is then seen in the others.

    Raises:
        UserError: they are, past autograd, or it is not known.
    """
    while memory.is_part and _is_repeated(x):
        link = next(each for each in memory.links if each.target() is memory)
        if link.path[-1].detaches:
            raise UserError(
                "expand: its result is detached and then changed in place, which can't be done "
                "where rows are sharded. Clone it before."
            )
        link.writer = link.source()
        _decide(link, memory, x)
        memory = _memory_of(x)
    return memory


def _refuse_overlapping_rows(x: GlobalTensor, memory: SharedMemory) -> None:
    """Refuse to write to windows that share rows: each rank has copies of the rows of its windows.

    Raises:
        UserError: a write to one of them would have to be seen in others.
    """
    steps = [step.window for step in x.path]
    if not any(steps):
        return
    part = memory.base
    for step, window in zip(x.path, steps, strict=True):
        if window is not None and part.rows is not None:
            dim, size, stride = window
            is_shared = size > stride and size + stride <= part.shape[dim]
            if dim % part.ndim == part.rows.dim and is_shared:
                raise UserError(
                    f"unfold: its windows of {size} rows, {stride} apart, share rows, and one is "
                    "changed in place, which can't be done where rows are sharded. Clone the "
                    "windows before."
                )
        part = step.apply(part)


def note_hook(x: GlobalTensor) -> None:
    """Note that a tensor has a hook of its gradient.

    Raises:
        UserError: a tensor that shares memory with it was written before. What was computed
            since need not depend on the tensor that gets the hook, as it would on one process.
    """
    x.local  # noqa: B018  (computed anew if others have been written)
    if x.memory is None:
        return
    family = _family(x.memory)
    if any(memory.is_written or memory.has_lost_graph for memory in family):
        raise _hook_error()
    if x.path or x.memory.is_part:
        for memory in family:
            memory.has_hooks = True


def check_graph(x: Any) -> None:
    """Check that all that was computed from a tensor depends on it as it is now.

    Raises:
        UserError: it was written without gradients in between.
    """
    if type(x) is not GlobalTensor or x.memory is None:
        return
    x.local  # noqa: B018  (computed anew if others have been written)
    if any(memory.has_lost_graph for memory in _family(x.memory)):
        raise UserError(
            "autograd.grad: a field shares memory with one that was changed in place without "
            "gradients, and its own gradient on one process is not known. Clone it before."
        )


def _bypass_hooks(x: GlobalTensor, memory: SharedMemory) -> None:
    """Compute a view that is to be written from its base, past views that have hooks.

    On one process a write to a view is one to its base: hooks that views had before see no gradient
    of it, those of the base do.

    Raises:
        UserError: whether the tensor, or one with a hook, is a view is not known.
    """
    if not memory.has_hooks:
        return
    # `ravel` returns a view of its copy: a write to it passes by hooks that the result had before.
    if memory.is_part or [step.name for step in memory.history[-1:]] == ["ravel"]:
        raise _hook_error()
    if x.path:
        _write_back(memory)
        _outdate(x)
        _compute(x, memory)


def arguments_of_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of a function that writes to the first of them, which may be others too.

    These keep the hooks that the write passes by, as `view.add_(view)` reads the view before.
    """
    if func is Tensor.__setitem__ and _is_repeated(args[0]) and _is_view(Tensor.__getitem__, args):
        # Seen wherever the part is repeated, as it is in memory once. The part has each entry once.
        args = (args[0][args[1]], ..., args[2])
    x, *others = args
    if type(x) is not GlobalTensor or x.memory is None or not x.memory.has_hooks:
        return args, kwargs
    before = untracked(x.local, x.rows, x.view_)
    others, kwargs = tree_map(lambda y: before if y is x else y, (others, kwargs))
    return (x, *others), kwargs


def _hides_write(x: GlobalTensor, memory: SharedMemory) -> bool:
    """Return whether tensors that share memory with one that is written do not depend on it."""
    # Otherwise they are computed from it.
    return bool(x.path or memory.links) and _has_others(x, memory)


def _has_others(x: GlobalTensor, memory: SharedMemory) -> bool:
    """Return whether other tensors share memory with one, or may do so."""
    return any(other is not x for each in _family(memory) for other in each.alive())


def _family(memory: SharedMemory) -> list[SharedMemory]:
    """Return a memory and all that may be one with it."""
    family = [memory]
    for each in family:
        others = [link.other(each) for link in each.links if not link.is_copy]
        family += [other for other in others if other is not None and other not in family]
    return family


def _hook_error() -> UserError:
    return UserError(
        "register_hook: a field with a hook shares memory with one that is changed in place, and "
        "the gradient that the hook would see on one process is not known. Use a function that "
        "returns a new tensor instead of the change."
    )


def _is_alone(x: GlobalTensor, memory: SharedMemory) -> bool:
    """Return whether no other tensor can have the storage of one that is written."""
    others = any(other is not x for other in memory.alive())
    return not x.path and not others and not any(link.other(memory) for link in memory.links)


def _outdate(x: GlobalTensor, is_certain: bool = True) -> None:
    """Let a tensor be computed anew when it is read; it may turn out that it need not be."""
    x.set_aside = x.__dict__.pop("local", x.set_aside)
    if is_certain:
        x.set_aside = None
    x.known_rows = None


def _outdate_linked(memory: SharedMemory, origin: Link | None) -> None:
    """Let tensors be read again that may be views of those of a memory that was written."""
    for link in memory.links:
        other = None if link is origin or link.is_copy else link.other(memory)
        if other is None:
            continue
        link.writer = memory
        for x in other.alive():
            if link.path[-1].detaches:
                _note_changed_past_autograd(x)
            _outdate(x, is_certain=False)
        _outdate_linked(other, link)


def _note_changed_past_autograd(x: GlobalTensor) -> None:
    """Let torch refuse to compute gradients by what autograd has saved, which one process changes.

    Here the values that were saved remain.
    """
    local = x.__dict__.get("local", x.set_aside)
    if local is not None and not local.is_inference():
        torch.autograd.graph.increment_version(local)


def is_assigned_to_itself(x: Any, index: Any, value: Any) -> bool:
    """Return whether `x[index] = value` assigns a view to where it is, as `x[index] += y` ends.

    Raises:
        UserError: nothing was written to the view, and one of the memory's views has a hook.
    """
    if type(value) is not GlobalTensor or type(x) is not GlobalTensor:
        return False
    if x.memory is None or x.memory is not value.memory or len(value.path) != len(x.path) + 1:
        return False
    step = value.path[-1]
    if value.path[:-1] != x.path or step.name != "__getitem__" or _is_array([*step.args, index]):
        return False
    is_same = bool(step.args == (index,))
    is_written = x.memory.pending is not None and x.memory.pending[0] is value.path
    if is_same and x.memory.has_hooks and not is_written:
        raise _hook_error()  # on one process the gradient of the value passes the hook
    return is_same


# ---------------------------------------------------------------- reads


def read(x: GlobalTensor) -> Tensor:
    """Return the band of a tensor that is outdated; collectives if rows move.

    Raises:
        UserError: it is not known whether the tensor is a view of what was written.
    """
    assert x.memory is not None
    while (link := _open_link(x.memory)) is not None:
        _decide(link, x.memory, x)
    if "local" not in x.__dict__:
        _compute(x, x.memory)
    return x.local


def _open_link(memory: SharedMemory) -> Link | None:
    """Return a link at whose other end something was written, which may be seen in a memory."""
    return next((link for link in memory.links if link.is_open(memory)), None)


GlobalTensor.read_outdated = staticmethod(read)


def _compute(x: GlobalTensor, memory: SharedMemory) -> None:
    """Compute a view anew from the base."""
    if x.set_aside is not None:
        x.local, x.set_aside = x.set_aside, None
        return
    _write_back(memory)
    view = memory.base
    with torch.enable_grad():
        for step in x.path:
            view = step.apply(view)
        if "rows" not in x.__dict__:  # the memory was cut
            x.rows = view.rows
        x.local = whole(view) if x.rows is None else with_layout(view, x.rows, x.view_)


def lay_out_memory(x: GlobalTensor, layout: Layout) -> None:
    """Cut a whole tensor, and what shares its memory; nothing changes where that is not known.

    Args:
        x: a tensor that every rank holds.
        layout: that which it should have; views have what follows from that of their base.
    """
    x.local  # noqa: B018  (computed anew if others have been written)
    memory = x.memory
    if memory is None:
        with torch.enable_grad():
            x.local = cut(x.local, layout, x.view_).clone()
        x.rows = layout
        return
    if memory.has_hooks or memory.is_part:
        return
    _write_back(memory)
    base = memory.base
    if x.path:
        candidates = [d for d in range(base.ndim) if base.shape[d] == layout.size]
        from_end = layout.dim - x.ndim
        if not candidates:
            return
        layout = layout.at(min(candidates, key=lambda d: abs(d - base.ndim - from_end)))
    if base.rows is not None:
        return
    with torch.enable_grad():
        base.local = cut(base.local, layout, base.view_).clone()
    base.rows = layout
    for other in memory.alive():
        _outdate(other)
        other.__dict__.pop("rows", None)


def _write_back(memory: SharedMemory) -> None:
    """Write pending values to the base; collectives if rows move."""
    if memory.pending is None:
        return
    path, value, records = memory.pending
    memory.pending = None
    if memory.links:
        with torch.enable_grad():
            memory.base.local = memory.base.local.clone()
    with torch.set_grad_enabled(records):
        _write(memory.base, path, value)


def _write(x: GlobalTensor, path: Sequence[ViewStep], value: GlobalTensor) -> None:
    """Write values in place to a view of a tensor that is not tracked."""
    if not path:
        _copy(x, value)
        return
    step, *rest = path
    index = step.as_index(x)
    inverse = None if index is not None else _inverse(step, x)
    if index is None and inverse is None:
        _write_whole(x, path, value)
        return
    if rest:
        part = step.apply(x)
        if not shares_storage(part, x):
            part.local = part.local.clone()
        _write(part, rest, value)
        value = part
    if inverse is None:
        # Nothing is written that is there already: autograd may have saved these entries.
        if x.rows is not None or not is_same_memory(step.apply(x).local, value.local):
            x[index] = value
    else:
        _copy(x, inverse(value))


def _inverse(step: ViewStep, x: GlobalTensor) -> Callable[[GlobalTensor], Any] | None:
    """Return what undoes a function that views all entries; None if it is not known."""
    if step.detaches:
        return lambda value: value
    if step.name in RESHAPES and not any(isinstance(each, torch.dtype) for each in step.args):
        return lambda value: value.reshape(x.shape)
    if step.name in PERMUTATIONS:
        marks = torch.empty(tuple(range(x.ndim)), device="meta")
        order = list(step.apply(marks).shape)
        return lambda value: value.permute([order.index(d) for d in range(x.ndim)])
    return None


def _write_whole(x: GlobalTensor, path: Sequence[ViewStep], value: GlobalTensor) -> None:
    """Write values to a view on gathered rows; a collective."""
    changed = whole(x) if x.rows is None else whole(x).clone()
    values = whole(value)
    part, target = x, changed
    for step in path:
        part, target = step.apply(part), step.apply(target)
    if is_same_memory(part.local, value.local):
        return
    target.copy_(values)
    if x.rows is not None:
        x.local.copy_(cut(changed, x.rows, x.view_))


def _copy(x: GlobalTensor, value: GlobalTensor) -> None:
    """Copy values, which may be there already."""
    local = whole(value) if x.rows is None else with_layout(value, x.rows, x.view_)
    if not is_same_memory(local, x.local):
        x.local.copy_(local)


# ---------------------------------------------------------------- views or copies


def _decide(link: Link, reader: SharedMemory, x: GlobalTensor) -> None:
    """Bring a memory up to date with what was written at the other end of a link; collectives.

    Args:
        link: an open one of the memory.
        reader: the memory.
        x: any tensor of the view.

    Raises:
        UserError: the strides of the globe's tensor are not known.
    """
    source, target, writer = link.source(), link.target(), link.writer
    link.writer = None
    if source is None or target is None or writer is None:
        return
    if link.path[-1].detaches:
        while (other := _open_link(writer)) is not None:
            _decide(other, writer, x)
            writer = link.other(reader) or writer  # which may have become part of another one
        _pass_values(link, writer, reader)
    elif _is_view_of_globe(link, target, x):
        _join(link, source, target, writer)
    else:
        link.is_copy, target.parent, target.is_part = True, None, False


def _pass_values(link: Link, writer: SharedMemory, reader: SharedMemory) -> None:
    """Copy values past autograd between tensors that share memory, of which one is detached."""
    _write_back(writer)
    _write_back(reader)
    reader.is_written = True
    with torch.enable_grad():
        reader.base.local = reader.base.local.clone()
    with torch.no_grad():
        if reader is link.source():
            _write(reader.base, link.path, writer.base)
        else:
            view = writer.base
            for step in link.path:
                view = step.apply(view)
            _copy(reader.base, view)
    for tensor in reader.alive():
        _outdate(tensor)


def _join(link: Link, source: SharedMemory, target: SharedMemory, writer: SharedMemory) -> None:
    """Make two memories one, that of a function's argument and that of its result, a view."""
    for tensor in (target if writer is source else source).alive():
        _outdate(tensor)
    source.links.remove(link)
    target.links.remove(link)
    if writer is target:
        _write_back(source)
        _write_back(target)
        source.pending = (link.path, target.base, target.is_recorded)
        source.is_recorded |= target.is_recorded
    source.is_written |= target.is_written
    source.has_lost_graph |= target.has_lost_graph
    source.has_hooks |= target.has_hooks
    for tensor in target.alive():
        tensor.memory, tensor.path = source, (*link.path, *tensor.path)
        source.add(tensor)
    for each in target.links:
        each.move(target, source, link.path)
        source.add_link(each)
        other = each.other(source)
        if other is not None and other.parent is target:
            other.parent = source


def _is_view_of_globe(link: Link, target: SharedMemory, x: GlobalTensor) -> bool:
    """Return whether a function has returned a view on one process; a collective.

    Raises:
        UserError: the strides of the globe's tensor are not known.
    """
    strides = strides_on_all_ranks(target.strides, x)
    if strides is not None:
        shape, known = strides
        root = torch.empty_strided(shape, known, device="meta")
        before = root
        with torch.no_grad():
            for step in target.history[:-1]:
                before = step.apply(before)
            result = target.history[-1].apply(before)
        return is_alias(before, result)
    name = link.path[-1].name
    raise UserError(
        f"{name}: its result or argument was changed in place, and whether both share memory on "
        "one process does not follow from the bands. Clone one of them, or use the function that "
        "returns a new tensor."
    )
