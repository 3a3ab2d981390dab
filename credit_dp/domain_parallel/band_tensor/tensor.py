"""BandTensor: a tensor of the globe, of which each rank holds a band of rows.

It is a subclass below autograd: torch computes gradients, views, hooks and checkpoints as for any
tensor of the globe's shape, and calls `__torch_dispatch__` for each operator that remains. `rows`
says what part of the globe's tensor `local` is:

- a `Band`: this rank's rows of it,
- `WHOLE`: all of it, the same on each rank,
- `PARTIAL`: a part of it, the sum of all ranks' parts.

A gradient denotes the globe's gradient in the same way. A tensor of torch's own in a call, as a
parameter, is whole.

The rules in `RULES` compute operators on local tensors; one that has none gathers the rows, see
`whole_calls`. All ranks see the same shapes, strides and layouts, and so make the same calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeGuard
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.strides import (
    Described,
    contiguous,
    described,
    result_strides,
)
from credit_dp.domain_parallel.exchange import RowExchange
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planned_run import GlobeTensor
from credit_dp.domain_parallel.transport import Transport
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    DISABLED_TORCH_FUNCTION,
    backward_pass,
    disable_torch_function,
    never_compile,
    new_wrapper,
    schema_of,
    version_of,
)


class Band(NamedTuple):
    """Rows are cut: dimension `dim` is (outer, rows), and a rank has some of the rows.

    Attributes:
        dim: the dimension, from the end: negative.
        outer: entries that are folded before the rows, as a batch is.
        bounds: rank r has the rows `bounds[r]` to `bounds[r + 1] - 1`; none is possible.
    """

    dim: int
    outer: int
    bounds: tuple[int, ...]

    @property
    def height(self) -> int:
        """Return the number of rows of the globe."""
        return self.bounds[-1]

    @property
    def size(self) -> int:
        """Return the globe's size of the dimension."""
        return self.outer * self.bounds[-1]

    def sizes(self, rank: int) -> int:
        """Return the number of rows of a rank."""
        return self.bounds[rank + 1] - self.bounds[rank]


class Held(Enum):
    """What every rank holds that has no rows of its own."""

    WHOLE = "whole"
    PARTIAL = "partial"


WHOLE: Literal[Held.WHOLE] = Held.WHOLE
PARTIAL: Literal[Held.PARTIAL] = Held.PARTIAL
Rows = Band | Held


class CallRecorder(Protocol):
    """What a run without data notes of a model, and the values that it knows."""

    def value_of(self, x: Tensor) -> Tensor | None:
        """Return a tensor with its values, on the CPU; None if they are not known."""

    def whole_call(self, name: str, tensors: Sequence[BandTensor]) -> AbstractContextManager[None]:
        """Return the context in which an operator gathers these tensors and runs whole."""

    def add_level(self, height: int) -> None:
        """Note the number of rows of an operator's result."""

    def add_windows(self, height: int, size: int) -> None:
        """Note that a field is cut into windows of rows; of size 1 if it is not."""

    def add_padding(self, height: int, padded: int) -> None:
        """Note that rows after the last one pad a field of `height` rows to `padded`."""


class Domain:
    """The ranks that share a globe, as the tensors of one model see them.

    Attributes:
        whole_calls: how often each operator gathered bands and ran whole.
        recorder: notes what a run without data does.
        uncounted: storages that something may have written to past torch's count of writes.
        reduced: shape of a field that was reduced over rows -> its bands. The field's gradient has
            that shape, and gets these bands.
        sizes_before: (size of a dimension, entries of the tensor) -> the sizes of the dimensions
            that a view joined into it; none if it joined parts of dimensions. Rules cut the
            dimension where one of these begins, so that the view is undone without moving rows.
        has_model: whether tensors exist only while a model runs, see `check_model_runs`.
        decision: how the model came to compute on tensors of the globe.
        loss_factor: what training multiplies the loss by, as data parallelism averages over ranks.
            Gradients inside of the model are without it.
        outputs: latest output of the model -> its rows; None before the first forward.
        folds: size of a dimension with folded rows -> its number of rows, if an operator has taken
            a part of it. The gradient of the part is folded in the same way.
        read: the call that has read a part of a tensor -> the tensor's bands. Its gradient moves to
            these bands once, before several operators read it.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.rank = manager.domain_rank
        self.ranks = manager.domain_parallel_size
        self.whole_calls: Counter[str] = Counter()
        self.recorder: CallRecorder | None = None
        self.uncounted: WeakSet[torch.UntypedStorage] = WeakSet()
        self.reduced: dict[tuple[int, ...], Band] = {}
        self.sizes_before: dict[tuple[int, int], tuple[int, ...]] = {}
        self.has_model = False
        self.decision: Any = None
        self.loss_factor = 1
        self.outputs: Any = None
        self.folds: dict[int, int] = {}
        self.read: dict[Any, Band] = {}

    @property
    def transport(self) -> Transport:
        """What carries messages; in a run without data it is another one for each module."""
        return self.manager.transport

    def __getstate__(self) -> dict[str, Any]:
        # Weak references can't be pickled.
        return {**self.__dict__, "outputs": None, "uncounted": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, uncounted=WeakSet())

    def bounds(self, height: int) -> tuple[int, ...]:
        """Return the bands of a height."""
        if self.recorder is not None:
            self.recorder.add_level(height)
        return self.manager.partition(height).bounds

    def whole_call(self, name: str, tensors: Sequence[BandTensor]) -> AbstractContextManager[None]:
        """Return the context in which an operator gathers these tensors and runs whole."""
        if any(type(x.rows) is Band for x in tensors):
            self.whole_calls[name] += 1
        return nullcontext() if self.recorder is None else self.recorder.whole_call(name, tensors)

    def note_read(self, key: Any, rows: Rows) -> None:
        """Note how a tensor is held of which an operator reads parts, unless backward runs."""
        if isinstance(rows, Band) and backward_pass() < 0:
            self.read[key] = rows

    def rows_read(self, key: Any) -> Band | None:
        """Return how a gradient shall be held; None if that is not known, or no backward runs."""
        return None if backward_pass() < 0 else self.read.get(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Domain:
        # Of a copied model, whose ranks may be others: what this one has read is not of theirs.
        domain = memo[id(self)] = Domain(deepcopy(self.manager, memo))
        domain.has_model, domain.decision = self.has_model, self.decision
        domain.loss_factor = self.loss_factor
        return domain


# Gradients of rows that this rank has fetched in exchanges, which others own.
Unsent = tuple[tuple[RowExchange, Tensor], ...]


class Part(NamedTuple):
    """A rule's result: what this rank holds of a tensor of the globe.

    Attributes:
        is_copy: whether it is a copy though torch takes it for a view of the first argument.
        kept: tensors of this rank that backward needs, and would have to fetch again.
        is_open: see `BandTensor`; `local` may then repeat one value without memory for each.
    """

    local: Tensor
    rows: Rows
    is_copy: bool = False
    unsent: Unsent = ()
    kept: tuple[Tensor, ...] | None = None
    others: OtherLayouts | None = None
    is_open: bool = False
    is_late: bool = False


class FetchedRows:
    """Rows of other bands that this rank has of one tensor.

    Attributes:
        readers: number of operators that have read rows.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.exchanges: tuple[RowExchange, ...] = ()
        self.rows: tuple[Tensor, ...] = ()
        self.readers = 0


class OtherLayouts:
    """What this rank has of one tensor in other layouts than its own.

    Attributes:
        version: how often the tensor had been written to.
        parts: layout -> what the rank has. If a band has fewer rows than the tensor, these are the
            first ones, and the others are zero.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.parts: dict[Rows, Tensor] = {}


class ViewOrigin(NamedTuple):
    """How a tensor came from another one that it is a view of, but may not share memory with.

    Attributes:
        part: the index of a function's result, if it returns several.
        is_copy: whether it has memory of its own; otherwise another view, or `base`, has.
    """

    base: BandTensor
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: int | None
    is_copy: bool


DATA: Any = Tensor.data
DETACH = torch.ops.aten.detach.default
NEW_ZEROS = torch.ops.aten.new_zeros.default

# Whether a model on tensors of the globe runs its forward in this thread.
is_running: ContextVar[bool] = ContextVar("a model runs", default=False)


class BandTensor(GlobeTensor):
    """A tensor of the globe's shape, of which this rank holds `local`.

    Attributes:
        rows: says which part of the globe's tensor `local` is.
        origin: how a copy that torch takes for a view came about: the copy is computed anew if its
            base was written.
        seen_version: number of writes to its base that a copy shows.
        described: shape, strides and the like, as a key; None if they have to be looked up.
        fetched: rows of other bands that operators have fetched, for the next one that reads it.
        unsent: parts of a gradient that other ranks have to add to their bands. They are sent when
            its bands are read: gradients that are added up before are sent as one.
        others: what rules have moved or summed up, for those that read it again, as in backward.
        returns: whether its gradient is moved to its bands before anything reads it.
        kept: see `Part`; for a result that backward alone reads.
        has_changed_shape: whether its shape was changed in place after views of it were made.
        is_open: whether the model has made it to be filled, and all ranks hold all of it. The first
            band that is written to it, or to a view of it, decides in which bands it is held.
        views: `id` -> a view of this open tensor; None if there were none.
        has_plain: whether this sum, computed in backward, has plain tensors as terms: see
            `parameters`.
        is_late: whether `local` has no values yet, as nothing has read this copy: see `refresh`.
            It may be written to, or torch may only want to know how to differentiate it.
        is_zero: whether this open tensor is all zero, as nothing was written to it.
    """

    # Libraries that choose a backend by a type's module, as opt_einsum, compute it with torch.
    __module__ = "torch"

    local: Tensor
    rows: Rows
    domain: Domain
    origin: ViewOrigin | None = None
    seen_version: int = 0
    described: Described | None = None
    fetched: FetchedRows | None = None
    unsent: Unsent = ()
    others: OtherLayouts | None = None
    returns: bool = False
    kept: tuple[Tensor, ...] | None = None
    has_changed_shape: bool = False
    is_open: bool = False
    is_zero: bool = False
    views: WeakValueDictionary[int, BandTensor] | None = None
    has_plain: bool = False
    is_late: bool = False
    has_views: bool = False
    # The rule of an operator that has none of its own; set by `rules`, which needs this class.
    find_rule: ClassVar[Callable[[Any], Rule]]
    # The values of the globe that all ranks read; set by `values`.
    read_values: ClassVar[Callable[[BandTensor], Tensor]]
    # What is done before an operator writes to an open tensor; set by `filling`.
    prepare_write: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], None]]
    # What is done before something else shares the memory of an open tensor; set by `filling`.
    keep_whole: ClassVar[Callable[[BandTensor], None]]

    __torch_function__ = DISABLED_TORCH_FUNCTION

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        rows: Rows,
        domain: Domain,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> BandTensor:
        """Return a tensor of the globe.

        Args:
            strides: the globe's; None if it is contiguous.
        """
        shape: Sequence[int] = local.shape
        if type(rows) is Band:
            shape = [*shape]
            shape[rows.dim] = rows.size
        if torch.is_inference_mode_enabled():
            # There torch would give views of other tensors no counter of writes.
            with torch.inference_mode(False):
                return BandTensor(local, rows, domain, strides, offset)
        x: BandTensor = new_wrapper(
            cls,
            shape,
            strides,
            None if strides is None else offset,
            dtype=local.dtype,
            device=local.device,
        )
        x.local, x.rows, x.domain = local, rows, domain
        return x

    @classmethod
    @never_compile
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_running.get() and backward_pass() < 0:
            check_model_runs(func, args, kwargs)
        rule = RULES.get(func)
        if rule is None:
            rule = RULES[func] = cls.find_rule(func)
        with disable_torch_function():  # what a rule calls are no functions of the model
            first = args[0] if args else None
            if type(first) is BandTensor and first.is_open and schema_of(func).is_mutable:
                cls.prepare_write(func, args, kwargs)
            return wrap(func, args, kwargs, rule(func, args, kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BandTensor({tuple(self.shape)}, {self.rows}, local={tuple(self.local.shape)})"

    @property
    def data(self) -> Tensor:
        """Return the tensor without its history."""
        data: Tensor = DATA.__get__(self)
        self.domain.uncounted.add(self.local.untyped_storage())
        return data

    @data.setter
    def data(self, x: Tensor) -> None:
        # torch would change what the wrapper says, not what it holds.
        x = x.detach()  # up to date
        if not isinstance(x, BandTensor):
            x = BandTensor(x, WHOLE, self.domain, x.stride())
        if self.is_open:
            BandTensor.keep_whole(self)
        DATA.__set__(self, x)
        self.local, self.rows, self.origin, self.described = x.local, x.rows, None, None
        self.fetched, self.unsent, self.others, self.is_late = None, x.unsent, None, False

    def __deepcopy__(self, memo: dict[int, Any]) -> BandTensor:
        if not self.is_leaf:
            raise UserError(
                "copy.deepcopy: a field that was computed with gradients can't be copied. Use "
                "detach() before."
            )
        if id(self) not in memo:
            strides, offset = self.stride(), int(self.storage_offset())
            now = self.detach()  # up to date
            assert isinstance(now, BandTensor)
            copy = BandTensor(now.local.clone(), now.rows, self.domain, strides, offset)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        copied: BandTensor = memo[id(self)]
        return copied

    @property
    def band(self) -> Band:
        """Return the bands of a tensor whose rows are cut."""
        assert isinstance(self.rows, Band)
        return self.rows

    # What reads memory past the dispatcher.
    def numpy(self, *, force: bool = False) -> Any:
        """Return the values of the globe; a collective.

        As on one process the array shares the memory of the tensor if each rank holds all of it.
        That of a band, or of a view with rows of one, is a copy, which NumPy refuses to write to.
        """
        if self.requires_grad and not force:
            return torch.empty(0, requires_grad=True).numpy()  # torch says what is wrong
        if self.is_open:
            BandTensor.keep_whole(self)
        values = self.read_values()
        array = values.numpy(force=force)
        if values is self.local and not self._is_copied():
            self.domain.uncounted.add(values.untyped_storage())
        else:
            array.setflags(write=False)
        return array

    def _is_copied(self) -> bool:
        origin = self.origin
        while origin is not None and type(origin.base) is BandTensor:
            if origin.is_copy:
                return True
            origin = origin.base.origin
        return False

    def tolist(self) -> Any:
        """Return the values of the globe; a collective."""
        return self.read_values().tolist()

    def item(self) -> Any:
        """Return the only value; a collective."""
        return self.read_values().item()

    # `torch.tensor` reads numbers in lists by these.
    def __float__(self) -> float:
        return float(self.read_values())

    def __int__(self) -> int:
        return int(self.read_values())

    def __bool__(self) -> bool:
        return bool(self.read_values())

    def __complex__(self) -> complex:
        return complex(self.read_values())

    def __index__(self) -> int:
        return self.read_values().__index__()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        array = self.numpy()
        return array.__array__(*args, **kwargs) if args or kwargs else array

    def __format__(self, spec: str) -> str:
        # Without a format no rank waits for another: some may print what others do not.
        return self.item().__format__(spec) if spec and not self.ndim else format(repr(self), spec)

    def data_ptr(self) -> int:
        """Refuse: there is no memory of the globe's tensor."""
        raise no_memory("data_ptr")

    def untyped_storage(self) -> Any:
        """Refuse: there is no memory of the globe's tensor."""
        raise no_memory("untyped_storage")

    def share_memory_(self) -> Any:
        """Refuse: there is no memory of the globe's tensor."""
        raise no_memory("share_memory_")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise no_memory("__dlpack__")

    @property
    def __cuda_array_interface__(self) -> Any:
        raise no_memory("__cuda_array_interface__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "pickle: a sharded field from inside of a model can't be saved. Return it from forward."
        )


def no_memory(name: str) -> Exception:
    """Return the error of a function that needs the memory of the globe's tensor."""
    return UserError(
        f"{name}: uses the memory of a tensor, which is not that of the globe where rows are "
        "sharded. Use numpy() to read values."
    )


def check_model_runs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call on a field that has left its model by an attribute or a hook.

    Elsewhere tensors are bands, and ranks need not call alike, so that a collective would hang.
    """
    if domain_of((args, kwargs)).has_model:
        raise UserError(
            f"{func}: a sharded field from inside of a model is used outside of its forward, where "
            "fields are bands. Return it from forward."
        )


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten operators, by name: `name.overload`, or `name` for all of them.

    A name alone leaves out the overloads that write to `out`: `write_results` computes these.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            packet_name, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, packet_name)
            for each in [overload] if overload else packet.overloads():
                func = getattr(packet, each)
                if overload or not writes_results(func):
                    RULES[func] = rule
        return rule

    return register


def is_band(x: Any) -> bool:
    """Return whether a value is a tensor whose rows are cut."""
    return type(x) is BandTensor and type(x.rows) is Band


def is_partial(x: Any) -> TypeGuard[BandTensor]:
    """Return whether a value is a tensor of which ranks hold parts that add up to it."""
    return type(x) is BandTensor and x.rows is PARTIAL


def local_of(x: Any) -> Any:
    """Return what a rank holds of a tensor; other values as they are."""
    return x.local if type(x) is BandTensor else x


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments of an operator, which may be in lists."""
    for x in values.values() if isinstance(values, dict) else values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple | dict):
            yield from tensors_in(x)


def domain_of(values: Any) -> Domain:
    """Return the domain of the first tensor of the globe among arguments."""
    return next(x.domain for x in tensors_in(values) if type(x) is BandTensor)


def wrap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return what a rule returned as tensors of the globe, with the strides of one process."""
    if type(result) is Part:
        likes = result_strides(func, args, kwargs)
        like = _described_alone(result) if likes is None else likes[0]
        return _wrapped(func, args, kwargs, result, like, None)
    if not isinstance(result, list | tuple) or not any([type(x) is Part for x in result]):
        return result
    likes = result_strides(func, args, kwargs)
    if likes is None:
        likes = tuple([_described_alone(x) if type(x) is Part else None for x in result])
    every = zip(result, likes, strict=True)
    wrapped = [
        _wrapped(func, args, kwargs, part, like, index) if type(part) is Part else part
        for index, (part, like) in enumerate(every)
    ]
    return wrapped if isinstance(result, list) else tuple(wrapped)


def _described_alone(part: Part) -> Described:
    """Return the description of a result whose strides on one process are not known."""
    local, rows = part.local, part.rows
    if type(rows) is not Band:
        return described(local)
    shape = [*local.shape]
    shape[rows.dim] = rows.size
    return contiguous(tuple(shape), local.dtype, local.device)


def _wrapped(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: Part,
    like: Described,
    index: int | None,
) -> BandTensor:
    local, rows, is_copy, unsent, kept, others, is_open, is_late = part
    first = args[0] if args else None
    domain = first.domain if type(first) is BandTensor else domain_of((args, kwargs))
    is_view = returns_view(func)
    if is_copy if is_view else not is_open:
        local = local if is_view and 0 in like.strides else like.in_order(local)
    if local.dtype is not like.dtype:
        local = local.to(like.dtype)
    x = new_tensor(local, rows, domain, like)
    if unsent:
        x.unsent = unsent
    if kept is not None:
        x.kept = kept
    if others is not None:
        x.others = others
    if func is DETACH:  # a checkpoint keeps such a tensor, before the operator has read it
        share_reads(args[0], x)
    if is_open:
        x.is_open, x.is_zero = True, func is NEW_ZEROS
    if is_late:
        x.is_late = True
    if is_view and type(first) is BandTensor and func is not DETACH:
        first.has_views = True
    if is_view and (
        is_copy or (type(first) is BandTensor and (first.is_open or first.origin is not None))
    ):
        note_view(x, ViewOrigin(args[0], func, args[1:], kwargs, index, is_copy))
        x.seen_version = write_count(args[0])
        x.is_open = type(first) is BandTensor and first.is_open
    return x


def new_tensor(local: Tensor, rows: Rows, domain: Domain, like: Described) -> BandTensor:
    """Return a tensor of the globe with a description that is known."""
    if torch.is_inference_mode_enabled():
        x = BandTensor(local, rows, domain, like.strides, like.offset)
    else:
        x = new_wrapper(
            BandTensor, like.shape, like.strides, like.offset, dtype=like.dtype, device=like.device
        )
        x.local, x.rows, x.domain = local, rows, domain
    x.described = like
    return x


def share_reads(x: BandTensor, y: BandTensor) -> None:
    """Let a detached tensor know what is fetched or moved of the other one, now or later."""
    if x.is_inference():
        return
    version = write_count(x)
    if x.fetched is None or x.fetched.version != version:
        x.fetched = FetchedRows(version)
    if x.others is None or x.others.version != version:
        x.others = OtherLayouts(version)
    y.fetched, y.others = x.fetched, x.others


def note_view(x: BandTensor, origin: ViewOrigin) -> None:
    """Note how a tensor came from another one."""
    x.origin, base = origin, origin.base
    if type(base) is BandTensor and base.is_open:
        if base.views is None:
            base.views = WeakValueDictionary()
        base.views[id(x)] = x


def writes_results(func: Any) -> bool:
    """Return whether an operator writes its results to arguments, as `out`."""
    return any(x.is_out for x in schema_of(func).arguments)


_returns_view: dict[Any, bool] = {}


def returns_view(func: Any) -> bool:
    """Return whether an operator's results are views of an argument."""
    found = _returns_view.get(func)
    if found is None:
        found = any(r.alias_info and not r.alias_info.is_write for r in schema_of(func).returns)
        _returns_view[func] = found
    return found


def write_count(x: Tensor) -> int:
    """Return how often a tensor or a view of it was written to; torch counts none for inference."""
    return -1 if x.is_inference() else version_of(x)
