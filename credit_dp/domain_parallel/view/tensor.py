"""The tensor of the global view, and how its parts are cut, moved and gathered.

A `GlobalTensor` has the shape of the globe's tensor. Its `local` tensor is this rank's part, or all
of it if `rows` is None: then every rank holds the same. Gradients follow one convention everywhere:
a rank's gradient is what its own results contribute, and the sum over the ranks of the domain is
the gradient of the unsharded model. Cutting a whole tensor is therefore a plain slice, and
gathering one returns the sum of all ranks' gradients to the owners of the rows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from credit_dp.domain_parallel.bands.reductions import sum_over_bands
from credit_dp.domain_parallel.exchange import RowExchange, RowRange
from credit_dp.domain_parallel.halo_exchange import fetch_rows
from credit_dp.domain_parallel.known_rows import KnownRows
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.transport import message_device
from credit_dp.domain_parallel.view.moves import move_bands
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    NN_FUNCTIONS,
    FakeTensor,
    is_alias,
    is_transform_active,
    new_wrapper,
    saved_tensor_hooks,
    tree_leaves,
    tree_map,
    version_of,
)

TRANSFORM_CURE = (
    "a model can't transform a function of sharded fields. Instead of vmap, write the batch as a "
    "dimension; instead of grad, vjp, jvp, jacrev or hessian, use torch.autograd.grad with "
    "create_graph=True."
)


@final
class Layout(NamedTuple):
    """Where the rows of a tensor are: dimension `dim` is `(outer, entries)`, cut along entries.

    Attributes:
        dim: the dimension, from 0.
        outer: entries before the rows that are folded into the same dimension, as a batch is.
        partition: the bands of the remaining `size / outer` entries of the dimension.
    """

    dim: int
    outer: int
    partition: RowPartition

    @property
    def size(self) -> int:
        """Return the global size of the dimension."""
        return self.outer * self.partition.bounds[-1]

    def at(self, dim: int) -> Layout:
        """Return the same layout in another dimension."""
        return Layout(dim, self.outer, self.partition)


class CallRecorder(Protocol):
    """Records the calls that run whole, in a dry run, and knows some values."""

    def value_of(self, x: Tensor) -> Tensor | None:
        """Return a tensor with its values, on the CPU; None if they are not known."""

    def whole_call(
        self, name: str, tensors: Sequence[GlobalTensor]
    ) -> AbstractContextManager[None]:
        """Return the context in which a function gathers these tensors and runs whole."""

    def add_level(self, height: int) -> None:
        """Note the number of rows of a layer's result."""

    def add_windows(self, height: int, size: int) -> None:
        """Note that a field is cut into windows of rows; of size 1 if it is not."""

    def add_padding(self, height: int, padded: int) -> None:
        """Note that rows after the last one pad a field of `height` rows to `padded`."""


class GlobalView:
    """What the tensors of one model share: manager, layers of calls, and counts of whole calls.

    Attributes:
        layers: domain-parallel layers that compute functional calls, by function and settings.
        layer_calls: how they are called, by these and the bands.
        whole_calls: the number of calls of each function that gathered bands and ran whole.
        recorder: of a dry run.
        decision: how the model came to compute through it, see `decide`.
        has_model: whether tensors exist only while a model runs, see `running_views`.
        has_gradients: whether the running model has gradients on, also inside of functions for
            which torch turns them off by itself.
        loss_factor: what training multiplies the loss by, as data parallelism averages over ranks.
        outputs: how the model's latest outputs were shown, by tensor; None before the first.
        inputs: the fields of the forward that runs, each with the tensor that it shows.
        has_backward_code: whether code of the user's runs in backward.
        in_plain_pass: whether `autograd.grad` runs between plain tensors with no bands between:
            gradients are whole, not shares.
        created: plain tensors that the running model has made, see `filling`: each with the one
            that it is a view of, if any, and the functions that lead there.
        lost_orders: how often the order of dimensions in memory was lost as rows moved.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.layers: dict[Any, Any] = {}
        self.layer_calls: dict[Any, Any] = {}
        self.whole_calls: Counter[str] = Counter()
        self.recorder: CallRecorder | None = None
        self.decision: Any = None
        self.has_model = False
        self.has_gradients = False
        self.loss_factor = 1
        self.outputs: Any = None
        self.inputs: list[tuple[GlobalTensor, Tensor]] = []
        self.has_backward_code = False
        self.in_plain_pass = False
        self.lost_orders = 0
        self.created = WeakIdKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Weak references can't be copied.
        return {**self.__dict__, "outputs": None, "inputs": [], "created": WeakIdKeyDictionary()}

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the domain."""
        return self.manager.domain_parallel_size

    @property
    def rank(self) -> int:
        """Return this rank's index in the domain."""
        return self.manager.domain_rank

    def partition(self, entries: int, unit: int = 1) -> RowPartition | None:
        """Return the bands of a number of entries, in multiples of `unit`; None if too few."""
        if entries < self.ranks:
            return None
        if unit == 1:
            return self.manager.partition(entries)
        return RowPartition.in_multiples_of(entries, self.ranks, unit)


NAMESPACES = (torch, Tensor, F, NN_FUNCTIONS, torch.special, torch.linalg, torch.fft)

# The views whose models run in this thread, from the outermost to the innermost.
running_views: ContextVar[tuple[GlobalView, ...]] = ContextVar("views that run", default=())


@final
class SharedMemory:
    """Tensors that share memory on one process, though some may be copies of others here.

    `memory` says how all of them see what is written to one.

    Attributes:
        tensors: weak references, also to tensors that no longer exist; the first is that to the
            tensor that the others are views of.
        base: another tensor with that one's values, without what is pending.
        pending: what was written to a view: its path from the base, its values, and whether
            autograd records the write.
        is_recorded: whether autograd has recorded a write to one of them.
        is_written: whether one of them was written so that the graph of others does not show it.
        has_lost_graph: whether a write without gradients gave others another place in the graph,
            which they keep on one process.
        has_hooks: whether one that is a view, or may be one, has hooks of its gradient.
        is_part: whether it may be a part of another memory.
        is_created: whether the model has made it, and it may be cut before a write.
        links: to memories that may be this one.
        parent: the one that it may be part of; kept, as other tensors may be parts of it.
        strides: of the tensor at the beginning of `history`.
        history: the functions that lead from that tensor to the base.
    """

    # Of most tensors these never change.
    pending: tuple[tuple[Any, ...], GlobalTensor, bool] | None = None
    is_recorded = False
    is_written = False
    has_lost_graph = False
    has_hooks = False
    is_part = False
    parent: SharedMemory | None = None
    history: tuple[Any, ...] = ()
    _limit = 8
    _link_limit = 8

    def __init__(self, x: GlobalTensor) -> None:
        local = x.local
        self.tensors = [weakref.ref(x)]
        self._base: GlobalTensor | tuple[Any, ...] = (local, x.rows, x.view_)
        self.is_created = x.is_created
        self.links: list[Link] = []
        self.strides = BandStrides(x.shape, x.rows, local.shape, local.stride(), x.has_order)

    @property
    def base(self) -> GlobalTensor:
        """Return the tensor; most memories are never written to, and need none."""
        if isinstance(self._base, tuple):
            self._base = untracked(*self._base)
        return self._base

    @base.setter
    def base(self, x: GlobalTensor) -> None:
        self._base = x

    def add(self, tensor: GlobalTensor) -> None:
        """Add a tensor; of a state that lasts, views of all steps would become many."""
        self.tensors.append(weakref.ref(tensor))
        if len(self.tensors) > self._limit:
            first, *others = self.tensors
            self.tensors = [first, *(other for other in others if other() is not None)]
            self._limit = 2 * max(4, len(self.tensors))

    def add_link(self, link: Link) -> None:
        """Add a link, and keep at least one, as all ranks decide by whether there is one."""
        self.links.append(link)
        if len(self.links) > self._link_limit:
            first, *others = self.links
            self.links = [first, *(other for other in others if other.other(self) is not None)]
            self._link_limit = 2 * max(4, len(self.links))

    def alive(self) -> list[GlobalTensor]:
        """Return the tensors that exist."""
        return [x for ref in self.tensors if (x := ref()) is not None]


@final
class Link:
    """Between a memory and that of a result, which may be a view of it or a copy.

    Attributes:
        source: the memory of the function's argument.
        path: of the result, if it is a view.
        target: the memory of the result.
        writer: the one to whose tensors was written since; None if to none.
        is_copy: whether it turned out that the result is no view. On this rank it may be one.
    """

    def __init__(
        self,
        source: weakref.ref[SharedMemory],
        path: tuple[Any, ...],
        target: weakref.ref[SharedMemory],
    ) -> None:
        self.source = source
        self.path = path
        self.target = target
        self.writer: SharedMemory | None = None
        self.is_copy = False

    def other(self, memory: SharedMemory) -> SharedMemory | None:
        """Return the memory at the other end, if it still exists."""
        return self.target() if self.source() is memory else self.source()

    def is_open(self, memory: SharedMemory) -> bool:
        """Return whether something was written at the other end, which may be seen here."""
        return self.writer is not None and self.writer is not memory

    def move(self, old: SharedMemory, new: SharedMemory, path: tuple[Any, ...]) -> None:
        """Replace the memory at the beginning, which is at `path` of another one."""
        assert self.source() is old
        self.source, self.path = weakref.ref(new), (*path, *self.path)
        if self.writer is old:
            self.writer = new


@final
class BandStrides(NamedTuple):
    """What a band shows of the strides of the globe's tensor."""

    shape: torch.Size
    rows: Layout | None
    sizes: torch.Size
    strides: tuple[int, ...]
    has_order: bool


def saved_tensors_hooks() -> object:
    """Return what is the same object under the same innermost hooks of saved tensors; maybe None.

    Each forward of a checkpointed block has its own hooks, and so has each time that backward
    computes it again. The object is a weak reference: a field must not keep a block's inputs.
    """
    hooks = saved_tensor_hooks()
    return None if hooks is None else weakref.ref(hooks[0])


class GlobalTensor(torch.Tensor):
    """A tensor of the globe, of which this rank holds a part.

    Attributes:
        local: this rank's part, with its autograd history.
        rows: where the rows are; None if every rank holds all.
        view_: the view that it belongs to.
        memory: the tensors that share memory with this one on one process, itself among them; None
            if there are no others.
        path: the functions that return this tensor, from the base of its memory: see `memory`.
        is_tracked: whether what shares memory with it is noted.
        is_created: whether the model has made it, to fill it: see `filling`.
        set_aside: its part, while it is not known whether it was changed with another tensor.
        read_outdated: computes the part of a tensor that was changed with another one.
        is_view: whether a function that ran whole returned it as a view of its argument.
        has_order: whether dimensions are in memory in the order that they have on one process, as
            far as is known: rows that were moved or gathered, and what runs whole, may differ.
        has_lost_order: whether results of functions of it may have their dimensions in another
            order, as rows are sent in the usual one. Not the same on all ranks.
        hooks: what tells under which hooks of saved tensors it was made: see `saved_tensors_hooks`.
        known_rows: rows of other bands that convolutions have fetched.
        call_function: computes torch's functions; set by `function_rules`, which needs this class.
    """

    # Libraries that choose a backend by a type's module, as opt_einsum, compute it with torch.
    __module__ = "torch"

    local: Tensor
    rows: Layout | None
    view_: GlobalView
    memory: SharedMemory | None = None
    path: tuple[Any, ...] = ()
    is_tracked: bool = True
    is_created: bool = False
    set_aside: Tensor | None = None
    read_outdated: ClassVar[Callable[[GlobalTensor], Tensor]]
    is_view: bool = False
    has_order: bool = True
    has_lost_order: bool = False
    hooks: object
    known_rows: KnownRows | None = None
    call_function: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    _shape: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout | None, view: GlobalView) -> GlobalTensor:
        """Return a tensor that shows the global shape of `local`."""
        shape = local.shape
        if layout is not None:
            sizes = list(shape)
            sizes[layout.dim] = layout.outer * layout.partition.bounds[-1]
            shape = torch.Size(sizes)
        result: GlobalTensor = new_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        result.local = local
        result.rows = layout
        result.view_ = view
        result.hooks = saved_tensors_hooks()
        result._shape = shape
        return result

    def __getattr__(self, name: str) -> Any:
        # The part is missing if it is outdated, and its layout if the memory was cut since.
        if name in ("local", "rows") and self.memory is not None:
            GlobalTensor.read_outdated(self)
            return self.__dict__[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # Read often: not answered through `__torch_function__`, which takes microseconds.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Return the shape of the globe's tensor."""
        return self._shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Return the number of dimensions."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the globe's tensor, or the size of a dimension."""
        return self._shape if dim is None else self._shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    def numel(self) -> int:
        """Return the number of entries of the globe's tensor."""
        return prod(self._shape)

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of the globe's tensor, or that of a dimension; a collective.

        Raises:
            UserError: they don't follow from those of the bands.
        """
        strides = global_strides(self)
        return strides if dim is None else strides[dim]

    nelement = numel
    ndimension = dim

    def __len__(self) -> int:
        return self._shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GlobalTensor({tuple(self.shape)}, rows={self.rows}, local={self.local})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        return GlobalTensor(self.local.clone(), self.rows, self.view_)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Exists because a wrapper needs it. Nothing may get here: `local` would be passed over.
        raise UserError(
            f"{func}: reached a sharded field past torch's functions, so that it can't be sharded. "
            "Call functions of torch on it outside of transforms and compiled code."
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not running_views.get():
            check_model_runs(func, args, kwargs)
        check_no_transform()
        return cls.call_function(func, tuple(args), kwargs)


# What is true of this rank's part is true of the tensor.
for _name in ("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "is_cuda"):
    setattr(GlobalTensor, _name, property(attrgetter(f"local.{_name}")))


def untracked(local: Tensor, layout: Layout | None, view: GlobalView) -> GlobalTensor:
    """Return a tensor of which it is not noted what shares memory with it."""
    result = GlobalTensor(local, layout, view)
    result.is_tracked = False
    return result


def check_no_transform() -> None:
    """Refuse a field inside of a transform, such as one that its function uses without an argument.

    Raises:
        UserError: a transform is active.
    """
    if is_transform_active():
        raise UserError(f"torch.func: {TRANSFORM_CURE}")


def check_model_runs(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse a call on a field that has left its model by an attribute or a hook.

    Elsewhere tensors are bands, and ranks need not call alike, so that a collective would hang.

    Raises:
        UserError: a field is that of a model.
    """
    if any(x.view_.has_model for x in global_tensors((args, kwargs))):
        raise UserError(
            f"{getattr(func, '__name__', func)}: a sharded field from inside of a model is used "
            "outside of its forward, where fields are bands. Return it from forward."
        )


def global_strides(x: GlobalTensor) -> tuple[int, ...]:
    """Return the strides of the globe's tensor; a collective.

    Those of a band are those of a tensor without gaps whose dimensions are in memory in the order
    of the band's.

    Raises:
        UserError: the band is part of another tensor, was moved, or its order is not certain.
    """
    band = BandStrides(x.shape, x.rows, x.local.shape, x.local.stride(), x.has_order)
    result, is_dense, is_usual = _strides_of_globe(band)
    # A view on one process that is no view here has been moved.
    source = x if x.memory is None else x.memory.tensors[0]()
    is_view = source is not None and shares_storage(source, x)
    is_certain = x.rows is None or (is_dense and is_view and (x.memory is not None or is_usual))
    strides = _agreed_strides(result, is_certain and x.has_order, x)
    if strides is None:
        raise UserError(
            "stride: the memory of the globe's field does not follow from that of its bands. Use "
            "shapes instead."
        )
    return strides


def strides_on_all_ranks(
    band: BandStrides, x: GlobalTensor
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape and strides of a globe's tensor by those of a band; a collective.

    None if they are not certain. The tensor itself may no longer exist: `x` is any other one.
    """
    shape, rows, sizes, strides, has_order = band
    if rows is None:
        known = _agreed_strides(strides, has_order, x)
    else:
        # Without gaps, in the usual order. The strides of one row do not show where rows are.
        usual = [prod(shape[d + 1 :]) for d in range(len(shape))]
        own = [prod(sizes[d + 1 :]) for d in range(len(sizes))]
        dims = zip(sizes, strides, own, strict=True)
        is_usual = 0 in sizes or all(size == 1 or a == b for size, a, b in dims)
        is_certain = is_usual and max(rows.partition.sizes) * rows.outer > 1
        known = _agreed_strides(usual, is_certain and has_order, x)
    return None if known is None else (tuple(shape), known)


def _agreed_strides(
    strides: Sequence[int], is_certain: bool, x: GlobalTensor
) -> tuple[int, ...] | None:
    """Return strides that are certain and the same on all ranks, else None; a collective."""
    summary = torch.tensor([is_certain, *strides], device=x.device)
    everyone = x.view_.manager.transport.all_gather(summary)
    if not (isinstance(summary, FakeTensor) or summary.is_meta):
        is_certain = all(bool(other[0]) and torch.equal(other, summary) for other in everyone)
    return tuple(strides) if is_certain else None


def _strides_of_globe(band: BandStrides) -> tuple[Sequence[int], bool, bool]:
    """Return strides of the globe's tensor, whether a band has no gaps, and the usual order.

    Another order is certain for views only: elsewhere it depends on how a function was computed.
    """
    _, rows, sizes, strides, _ = band
    if rows is None:
        return strides, True, True
    ndim = len(sizes)
    order = sorted(range(ndim), key=lambda d: -strides[d])
    is_dense = all(n != 1 or size == 1 for n, size in zip(sizes, band.shape, strict=True))
    local, entries = 1, 1
    result = [0] * ndim
    for d in reversed(order):
        is_dense = is_dense and (strides[d] == local or sizes[d] == 1)
        result[d] = entries
        local, entries = local * sizes[d], entries * band.shape[d]
    return result, is_dense, order == list(range(ndim))


def functions_named(*names: str) -> list[Any]:
    """Return torch's functions and methods of these names."""
    functions: dict[Any, None] = {}
    for name in names:
        for namespace in NAMESPACES:
            function = getattr(namespace, name, None)
            if function is not None:
                functions[function] = None
    return list(functions)


# Types of arguments without others in them. A look-up is ten times as fast as torch's trees, which
# matters as every function of torch comes along here.
LEAVES = frozenset(
    [
        Tensor, nn.Parameter, int, float, bool, str, type(None), type(...), slice, torch.dtype,
        torch.device,
    ]
)  # fmt: skip


def global_tensors(*values: Any) -> list[GlobalTensor]:
    """Return the view's tensors in nested arguments."""
    found: list[GlobalTensor] = []
    _collect(values, found)
    return found


def _collect(values: Iterable[Any], found: list[GlobalTensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is GlobalTensor:
            found.append(value)
        elif kind is tuple or kind is list:
            _collect(value, found)
        elif kind is dict:
            if value:
                _collect(value.values(), found)
        elif kind not in LEAVES:
            found += [x for x in tree_leaves(value) if type(x) is GlobalTensor]


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested arguments with a function's results in place of the leaves."""
    kind = type(value)
    if kind is GlobalTensor or kind in LEAVES:
        return function(value)
    if kind is tuple:
        return tuple([map_values(function, entry) for entry in value])
    if kind is list:
        return [map_values(function, entry) for entry in value]
    if kind is dict:
        return {key: map_values(function, entry) for key, entry in value.items()}
    return tree_map(function, value)


def bands_of(values: Any) -> list[GlobalTensor]:
    """Return the tensors in nested arguments of which this rank holds a part only."""
    return [x for x in global_tensors(values) if x.rows is not None]


def is_band(x: object) -> bool:
    """Return whether this rank holds only a part of a tensor."""
    return type(x) is GlobalTensor and x.rows is not None


def has_few_rows(x: GlobalTensor) -> bool:
    """Return whether a tensor is a slice of fewer rows than ranks, of which some have none."""
    rows = x.rows
    return rows is not None and rows.partition.bounds[-1] < len(rows.partition.sizes)


def has_usual_bands(x: GlobalTensor) -> bool:
    """Return whether a tensor has the bands that layers return."""
    return x.rows is not None and x.rows.partition == x.view_.partition(x.rows.partition.height)


def wrap(values: Any, layout: Layout | None, view: GlobalView) -> Any:
    """Show results of a function through the view; those of several tensors have one layout."""
    if isinstance(values, Tensor):
        return GlobalTensor(values, layout, view)
    return map_values(
        lambda x: GlobalTensor(x, layout, view) if isinstance(x, Tensor) else x, values
    )


def local_of(x: Any) -> Any:
    """Return the local part of a view's tensor, anything else unchanged."""
    return x.local if type(x) is GlobalTensor else x


def _unfold_outer(x: Tensor, layout: Layout, entries: int) -> Tensor:
    """Return `x` with its row dimension split into `(outer, entries)`."""
    if layout.outer == 1:
        return x
    dim = layout.dim
    return x.reshape(*x.shape[:dim], layout.outer, entries, *x.shape[dim + 1 :])


def note_order(x: GlobalTensor) -> None:
    """Note that a tensor's rows are sent, which arrive with dimensions in the usual order."""
    of_dims = zip(x.local.shape, x.local.stride(), strict=True)
    strides = [stride for size, stride in of_dims if size > 1 and stride > 0]
    x.view_.lost_orders += x.has_lost_order or strides != sorted(strides, reverse=True)


def exchange_entries(
    x: GlobalTensor, required: Sequence[tuple[RowRange, ...]], result: Layout | None
) -> GlobalTensor:
    """Return a tensor whose rank `r` holds the entries `required[r]` of `x`; a collective.

    Args:
        x: a band.
        required: for each rank the ranges of entries, in the order of the result.
        result: the layout of the result; None if all ranks require the same.
    """
    layout = x.rows
    assert layout is not None
    view = x.view_
    exchange = RowExchange(layout.partition, tuple(required), view.rank)
    local = _unfold_outer(x.local, layout, layout.partition.sizes[view.rank])
    dim = layout.dim + (layout.outer > 1)
    moved = fetch_rows(local, exchange, view.manager.transport, dim - local.ndim)
    if moved is not local:
        note_order(x)
    if layout.outer > 1:
        moved = moved.flatten(layout.dim, dim)
    taken = GlobalTensor(moved, result, view)
    taken.has_order = x.has_order and moved is x.local
    return taken


def whole(x: Any) -> Any:
    """Return the global tensor on every rank; a collective. Anything else is returned unchanged."""
    if type(x) is not GlobalTensor:
        return x
    if x.rows is None:
        return x.local
    return gather(x).local


def gather(x: GlobalTensor) -> GlobalTensor:
    """Return a band on every rank; a collective."""
    assert x.rows is not None
    everything = (RowRange(0, x.rows.partition.height),)
    return exchange_entries(x, (everything,) * x.view_.ranks, None)


def cut(x: Tensor, layout: Layout, view: GlobalView) -> Tensor:
    """Return this rank's part of a tensor that every rank holds.

    A plain slice: what the other ranks' parts contribute to its gradient, the other ranks add.
    """
    rows = layout.partition.rows(view.rank)
    unfolded = _unfold_outer(x, layout, layout.partition.height)
    dim = layout.dim + (layout.outer > 1)
    part = unfolded.narrow(dim, rows.start, rows.stop - rows.start)
    return part.flatten(layout.dim, dim) if layout.outer > 1 else part


def with_layout(x: Any, layout: Layout, view: GlobalView) -> Tensor:
    """Return the local part of `x` in a layout; a collective if `x` is a band with another one."""
    if type(x) is not GlobalTensor:
        return cut(x, layout, view)
    if x.rows == layout:
        return x.local
    if x.rows is None:
        return cut(x.local, layout, view)
    if (x.rows.dim, x.rows.outer) == (layout.dim, layout.outer):
        required = tuple(
            (RowRange(rows.start, rows.stop),)
            for rows in map(layout.partition.rows, range(view.ranks))
        )
        return exchange_entries(x, required, layout).local
    note_order(x)
    if x.rows.dim != layout.dim:
        return move_bands(x.local, x.rows, layout, view.manager.transport)
    exchange = _folded_otherwise(x.rows, layout, view.rank)
    return fetch_rows(x.local, exchange, view.manager.transport, layout.dim - x.ndim)


@lru_cache(1024)
def _folded_otherwise(source: Layout, target: Layout, rank: int) -> RowExchange:
    """Return the exchange from bands of a dimension to bands with other entries before the rows.

    It numbers the entries of the dimension in the order in which the ranks hold them.
    """
    order = [i for band in _entries_of_ranks(source) for i in band]
    position = {entry: i for i, entry in enumerate(order)}
    required = [
        tuple(RowRange(first, stop) for first, stop in _runs([position[entry] for entry in band]))
        for band in _entries_of_ranks(target)
    ]
    sizes = [size * source.outer for size in source.partition.sizes]
    return RowExchange(RowPartition.from_sizes(sizes), tuple(required), rank)


def _entries_of_ranks(layout: Layout) -> list[list[int]]:
    """Return the entries of a dimension that each rank holds, in its order."""
    height, bands = layout.partition.height, layout.partition
    return [
        [before * height + row for before in range(layout.outer) for row in range(*rows)]
        for rows in pairwise(bands.bounds)
    ]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges that rise by 1: first and end of each."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    return [(numbers[i], numbers[i] + j - i) for i, j in pairwise([*starts, len(numbers)])]


def note_whole_call(
    view: GlobalView, name: str, tensors: Sequence[GlobalTensor]
) -> AbstractContextManager[None]:
    """Count a call that gathers bands; return the context in which it does so and runs whole.

    Slices of few rows do not count: a rank may hold them.
    """
    if any(x.rows is not None and not has_few_rows(x) for x in tensors):
        view.whole_calls[name] += 1
    return nullcontext() if view.recorder is None else view.recorder.whole_call(name, tensors)


# Reshapes whose results have no gaps, and so never an entry of memory twice. Whether they return
# their argument depends on the order of its entries, which may be another one on one process.
WITHOUT_GAPS = ("contiguous", "ravel")


def call_whole(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function as on one process: on gathered tensors, with the result on every rank."""
    tensors = global_tensors((args, kwargs))
    view = tensors[0].view_
    name = getattr(func, "__name__", str(func))
    with note_whole_call(view, name, tensors):
        # A tensor that is passed twice is gathered once.
        gathered = {id(x): whole(x) for x in tensors}
        args, kwargs = tree_map(
            lambda x: gathered[id(x)] if type(x) is GlobalTensor else x, (args, kwargs)
        )
        # What a function writes to a gathered copy would be lost. Its name or schema need not say
        # that it writes, but torch counts the writes to each tensor and to its views.
        copies = [y for x in tensors if (y := gathered[id(x)]) is not x.local]
        versions = [_version(y) for y in copies]
        results = func(*args, **kwargs)
        if versions != [_version(y) for y in copies]:
            raise UserError(
                f"{name}: changes its arguments in place, which can't be done where rows are "
                "sharded. Use a function that returns new tensors."
            )
        has_order = all(x.rows is None and x.has_order for x in tensors)
        is_certain = name not in WITHOUT_GAPS
        arguments = {id(gathered[id(x)]): x for x in tensors} if is_certain else {}

        def show_result(y: Any) -> Any:
            if id(y) in arguments or not isinstance(y, Tensor):
                return arguments.get(id(y), y)  # a function may return its argument as it is
            x = GlobalTensor(y, None, view)
            x.has_order = has_order
            x.is_view = any(is_alias(y, copy) for copy in copies)
            return x

        return map_values(show_result, results)


def _version(x: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 in inference mode, which does not count."""
    return 0 if x.is_inference() else version_of(x)


def shares_storage(a: GlobalTensor, b: GlobalTensor) -> bool:
    """Return whether an operation in place on one tensor's part changes the other's."""
    return is_alias(a.local, b.local)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same entries of a storage, in the same order."""
    if not is_alias(a, b) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    is_same_order = all(size == 1 or first == second for size, first, second in strides)
    return is_same_order and a.storage_offset() == b.storage_offset()


@contextmanager
def same_random_numbers(
    view: GlobalView, device: torch.device, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Draw on all ranks of the domain what its first rank draws on a device; a collective.

    Args:
        view: of the ranks.
        device: where numbers are drawn.
        generator: one of the model's; None for that of the device.
    """
    on_gpu = device.type == "cuda"

    def read() -> Tensor:
        if generator is not None:
            return generator.get_state()
        return torch.cuda.get_rng_state(device) if on_gpu else torch.get_rng_state()

    def restore(state: Tensor) -> None:
        if generator is not None:
            generator.set_state(state.cpu())
        elif on_gpu:
            torch.cuda.set_rng_state(state.cpu(), device)
        else:
            torch.set_rng_state(state.cpu())

    state = read()
    group = view.manager.domain_group
    messages = torch.device("cpu") if group is None else message_device(group)
    first = view.manager.transport.all_gather(state.to(messages))[0]
    if isinstance(first, FakeTensor):  # a dry run: no numbers are drawn
        yield
        return
    restore(first)
    try:
        yield
    finally:
        # The first rank continues from where it is, the others from where they were, one step on.
        # A generator of the model's is the same on all ranks from now on.
        if view.rank and generator is None:
            restore(state)
            if not is_transform_active():
                torch.rand(1, device=device)


# ---------------------------------------------------------------- whole gradients


def share_gradient(x: Any, view: GlobalView) -> Any:
    """Return a tensor whose gradient is a whole one, of which each rank returns a share."""
    is_differentiable = isinstance(x, Tensor) and x.requires_grad
    factor = view.loss_factor / view.ranks
    return _ScaleGradient.apply(x, factor) if is_differentiable else x  # type: ignore[no-untyped-call]


def sum_gradient(x: Any, view: GlobalView) -> Any:
    """Return a tensor whose gradient is shown whole on every rank; backward is collective."""
    is_differentiable = isinstance(x, Tensor) and x.requires_grad
    return _SumGradient.apply(x, view) if is_differentiable else x  # type: ignore[no-untyped-call]


@final
class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


@final
class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GlobalView) -> Tensor:
        ctx.view = view
        return x.clone()  # autograd lets nobody write to a view that a function returns

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = sum_over_bands(grad, ctx.view.manager.transport)
        return total / ctx.view.loss_factor, None


def with_whole_gradients(function: Callable[..., Any], view: GlobalView) -> Callable[..., Any]:
    """Return a function of whole tensors whose backward sees whole gradients on every rank.

    What its backward returns then counts once, not once a rank.
    """

    view.has_backward_code = True

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: share_gradient(x, view), (args, kwargs))
        return tree_map(lambda x: sum_gradient(x, view), function(*args, **kwargs))

    call.__name__ = getattr(function, "__name__", str(function))
    return call
