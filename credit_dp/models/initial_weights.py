"""Builds a model of which never all weights are held, and computes its initial weights one by one.

`build_without_weights` runs a model's constructors as they are. Each of their operations is carried
out, and recorded as an `_Operation` with the state of the random numbers before it:

1. As soon as registered parameters hold more than `KEPT_BYTES`, the memory of the least recently
   used ones is released. If an operation needs the values of one again, they are computed again.
2. Afterwards the parameters of the model are on the meta device. `InitialWeights` holds the
   values that were kept, and computes the released ones at each call of `value`.

Same operations on the same random numbers give the same bits: the weights are those of a model that
is built as usual, and so is the state of the random numbers afterwards. Buffers are never released,
nor are parameters that come from elsewhere: from numpy, from a file, or from Python's lists. As
soon as a constructor starts a thread, nothing more is released.

Source: deferred initialisation as in torchdistX (2022), but carried out at once, so that code may
read values of tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from credit_dp.torch_private import (
    DispatchMode,
    disable_current_modes,
    disable_torch_function,
    schema_of,
    storage_key,
    storage_of,
    tree_leaves,
    tree_map_only,
)

KEPT_BYTES = 2**28  # of parameters, besides the one that was used last

_aten = torch.ops.aten
TORCH_NAMESPACES = ("aten", "prims")
# They need no earlier value of their first operand.
OVERWRITING = {
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.zero_.default,
}
# Methods that give access to a tensor's memory: what is done with it can't be recorded.
ACCESSING = {
    getattr(Tensor, name)
    for name in (
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__reduce_ex__",
        "data_ptr",
        "numpy",
        "set_",
        "share_memory_",
        "storage",
        "tolist",
        "untyped_storage",
    )
}


class _View(NamedTuple):
    """Stands for a tensor in a recorded operation: the place of its entries in a storage.

    `key` is of the storage, `nbytes` its size.
    """

    key: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor in this storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@final
@dataclass(frozen=True, eq=False, slots=True)
class _Operation:
    """A recorded operation that has changed a storage or made a new one.

    Attributes:
        number: operations are numbered in the order in which they ran.
        func: of `torch.ops`.
        args: with views in place of tensors.
        kwargs: likewise.
        state: of the random numbers before it, if it draws some.
        dtype: torch's default at that time.
        before: the operations that gave the storages of its operands the values that it needs.
        results: for each tensor that it returns, the key of its storage if that is new.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Tensor | None
    dtype: torch.dtype
    before: tuple[_Operation, ...]
    results: tuple[int | None, ...]


@dataclass(eq=False, slots=True)
class _Record:
    """What is known of a storage.

    Attributes:
        reference: keeps the storage's address, the key, from being used again, but no memory.
        nbytes: size of the storage.
        last: the operation that wrote to it last; None: its values can't be computed again.
        is_released: whether its memory is.
    """

    reference: StorageWeakRef
    nbytes: int
    last: _Operation | None
    is_released: bool = False

    def storage(self) -> UntypedStorage | None:
        """Return the storage, if there still is one."""
        return storage_of(self.reference)


@final
class InitialWeights:
    """The initial values of a model's parameters, by name."""

    def __init__(self, values: dict[str, Tensor | tuple[_Operation, _View]]) -> None:
        self._values = values

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def value(self, name: str) -> Tensor:
        """Return the values of a parameter; computed anew at each call, unless they are at hand."""
        value = self._values[name]
        if isinstance(value, Tensor):
            return value
        operation, view = value
        return view.of(_compute(operation, view.key))


def build_without_weights(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitialWeights]:
    """Return a model with parameters on the meta device, and their initial values.

    Parameters of a class of their own stay as they are, and have no initial value here.

    Args:
        build: returns the model, with parameters on the CPU.
    """
    recorder = _Recorder()
    hook = register_module_parameter_registration_hook(
        lambda module, name, parameter: recorder.add_parameter(parameter)
    )
    try:
        with _keep_all_for_threads(recorder), _MemoryAccess(recorder), recorder:
            model = build()
    finally:
        hook.remove()
    values = _move_to_meta(model, recorder)
    # Code of the model may have kept a parameter elsewhere, as in a list: it has to have values.
    recorder.load_all()
    return model, InitialWeights(values)


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model with parameters on the meta device; they have no values.

    Its buffers are on that device, too, if all of its constructors' code works there.
    """
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # noqa: BLE001 - of code that is carried out again
        # Some constructors read values of tensors, which meta tensors don't have.
        return build_without_weights(build)[0]


def _move_to_meta(
    model: nn.Module, recorder: _Recorder
) -> dict[str, Tensor | tuple[_Operation, _View]]:
    """Replace a model's parameters by others without data; return what gives their values."""
    values: dict[str, Tensor | tuple[_Operation, _View]] = {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # shared parameters stay shared
    for path, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if type(parameter) is not nn.Parameter or not parameter.is_cpu:
            continue
        if parameter not in replaced:
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            replaced[parameter] = nn.Parameter(empty, parameter.requires_grad)
            replaced[parameter].__dict__.update(parameter.__dict__)
        values[path] = recorder.value_of(parameter.detach())
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, replaced[parameter])
    return values


@final
class _Recorder(DispatchMode):
    """Records operations, and releases the memory of parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records: dict[int, _Record] = {}
        # Of registered parameters that have memory: the keys of their storages and their sizes,
        # the one that was used last at the end.
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._kept_bytes = 0
        self._parameters: set[int] = set()
        self._keeps_all = False
        self._count = 0

    def add_parameter(self, parameter: Tensor | None) -> None:
        """Take note of a parameter that a module registers."""
        if parameter is None or not parameter.is_cpu or not _has_storage(parameter):
            return
        with disable_torch_function():
            record = self._record_of(parameter.untyped_storage())
            key = storage_key(parameter.untyped_storage())
        if record.last is not None:
            self._parameters.add(key)
            self._touch([key])

    def value_of(self, parameter: Tensor) -> Tensor | tuple[_Operation, _View]:
        """Return the values of a parameter, or how they are computed."""
        record = self._record_of(parameter.untyped_storage())
        view = _view(parameter)
        if record.is_released and record.last is not None and view is not None:
            return record.last, view
        return parameter

    def load_all(self) -> None:
        """Compute the values of all tensors that are still there."""
        for record in self._records.values():
            self._load(record)

    def keep_all(self) -> None:
        """Release nothing from now on."""
        self._keeps_all = True
        with disable_current_modes(), disable_torch_function():
            self.load_all()

    def give_access(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is going to be used directly."""
        storage = tensor.untyped_storage()
        record = self._record_of(storage)
        with disable_current_modes():
            self._load(record)
        record.last = None
        self._parameters.discard(storage_key(storage))
        self._kept_bytes -= self._kept.pop(storage_key(storage), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and record it."""
        kwargs = kwargs or {}
        with disable_torch_function():
            operands = _tensors((args, kwargs))
            records = {_key(x): self._record_of(x.untyped_storage()) for x in operands}
            overwrites = func in OVERWRITING and _overwrites(*operands)
            read = operands[1:] if overwrites else operands
            for x in operands:
                self._load(records[_key(x)], compute=any(x is operand for operand in read))
            before = [records[_key(x)].last for x in read]
            # Operators of others may draw random numbers without saying so.
            if func.namespace not in TORCH_NAMESPACES or not all(
                _is_describable(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
            ):
                before.append(None)
            # Before the operation: some change sizes of their operands.
            views = tree_map_only(Tensor, _view, (args, kwargs))
            generator = kwargs.get("generator") or torch.default_generator
            draws = torch.Tag.nondeterministic_seeded in func.tags
            state = generator.get_state() if draws else None
            result = func(*args, **kwargs)
            self._record(_written(func, args, kwargs), result, func, views, state, before)
            if func is _aten.clone.default and _key(args[0]) in self._parameters:
                self._parameters.add(_key(result))  # copies of modules are not registered again
            self._touch({*records, *map(_key, _tensors(result))})
        return result

    def _record(
        self,
        written: list[Tensor],
        result: Any,
        func: Any,
        views: tuple[Any, Any],
        state: Tensor | None,
        before: list[_Operation | None],
    ) -> None:
        """Record an operation for the storages that it has made or written to."""
        results: list[int | None] = []
        new: list[_Record] = []
        for x in _tensors(result):
            is_new = _key(x) not in self._records
            results.append(_key(x) if is_new else None)
            if is_new:
                new.append(self._record_of(x.untyped_storage()))
        changed = [self._record_of(x.untyped_storage()) for x in written]
        operation = None
        if None not in before and all(x.is_cpu for x in _tensors(result)):
            known = tuple({id(step): step for step in before if step is not None}.values())
            dtype = torch.get_default_dtype()
            operation = _Operation(self._count, func, *views, state, dtype, known, tuple(results))
            self._count += 1
        for record in new:
            record.last = operation
        for x, record in zip(written, changed, strict=True):
            record.last = None if record.last is None else operation
            record.nbytes = x.untyped_storage().nbytes()  # `out=` and `resize_` change it

    def _record_of(self, storage: UntypedStorage) -> _Record:
        """Return the record of a storage; values of one from elsewhere can't be computed."""
        record = self._records.get(storage_key(storage))
        if record is None:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            record = _Record(reference, storage.nbytes(), None)
            self._records[storage_key(storage)] = record
        return record

    def _load(self, record: _Record, compute: bool = True) -> None:
        """Give a storage its memory back, with or without its values."""
        storage = record.storage() if record.is_released else None
        if storage is None or record.last is None:
            return
        storage.resize_(record.nbytes)
        record.is_released = False
        if compute:
            storage.copy_(_compute(record.last, storage_key(storage)))

    def _touch(self, keys: Iterable[int]) -> None:
        """Release the parameters that were used longest ago, but none of these."""
        for key in keys:
            record = self._records[key]
            if key in self._parameters and record.last is not None:
                self._kept_bytes += record.nbytes - self._kept.get(key, 0)
                self._kept[key] = record.nbytes
                self._kept.move_to_end(key)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1 and not self._keeps_all:
            key, nbytes = self._kept.popitem(last=False)
            self._kept_bytes -= nbytes
            record = self._records[key]
            storage = record.storage()
            # Without the operation that wrote to it last its values would be lost.
            if storage is not None and record.last is not None:
                storage.resize_(0)
                record.is_released = True


@contextmanager
def _keep_all_for_threads(recorder: _Recorder) -> Iterator[None]:
    """Keep all memory as soon as this thread starts another one: modes of torch don't reach it."""
    start, builder = threading.Thread.start, threading.current_thread()

    def start_thread(thread: threading.Thread) -> None:
        if threading.current_thread() is builder:
            recorder.keep_all()
        start(thread)

    threading.Thread.start = start_thread  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


@final
class _MemoryAccess(TorchFunctionMode):
    """Keeps the memory of tensors that code uses directly, as a numpy array for instance."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function."""
        if func in ACCESSING:
            for x in _tensors((args, kwargs)):
                self._recorder.give_access(x)
        return func(*args, **(kwargs or {}))


def _compute(last: _Operation, key: int) -> UntypedStorage:
    """Carry out an operation, and all that it needs, again; return the storage with this key."""
    needed: dict[int, _Operation] = {}
    waiting = [last]
    while waiting:
        operation = waiting.pop()
        if operation.number not in needed:
            needed[operation.number] = operation
            waiting.extend(operation.before)
    # In the order in which they ran, each finds the values in the storages that it found then.
    operations = [needed[number] for number in sorted(needed)]
    last_use = {k: n for n, operation in enumerate(operations) for k in _keys(operation)}
    storages: dict[int, UntypedStorage] = {}

    def tensor(view: _View) -> Tensor:
        if view.key not in storages:  # it is overwritten
            storages[view.key] = torch.empty(view.nbytes, dtype=torch.uint8).untyped_storage()
        return view.of(storages[view.key])

    with torch.random.fork_rng(devices=[]), torch.no_grad(), _default_dtype_restored():
        for number, operation in enumerate(operations):
            torch.set_default_dtype(operation.dtype)
            args, kwargs = tree_map_only(
                _View, tensor, (operation.args, operation.kwargs), is_leaf=_is_view
            )
            if operation.state is not None:
                if kwargs.get("generator") is not None:
                    kwargs["generator"] = torch.Generator()
                generator = kwargs.get("generator") or torch.default_generator
                generator.set_state(operation.state)
            result = operation.func(*args, **kwargs)
            for x, new in zip(_tensors(result), operation.results, strict=True):
                if new is not None:
                    storages[new] = x.untyped_storage()
            del args, kwargs, result
            for unused in [k for k in storages if last_use[k] <= number and k != key]:
                del storages[unused]
    return storages[key]


@contextmanager
def _default_dtype_restored() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def _keys(operation: _Operation) -> set[int]:
    """Return the keys of the storages that an operation uses or makes."""
    leaves = tree_leaves((operation.args, operation.kwargs), is_leaf=_is_view)
    used = {leaf.key for leaf in leaves if isinstance(leaf, _View)}
    return used | {key for key in operation.results if key is not None}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _has_storage(leaf)]


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided  # others, sparse ones, consist of several tensors


def _is_view(value: Any) -> bool:
    return isinstance(value, _View)


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _is_describable(tensor: Tensor) -> bool:
    """Whether a `_View` is all that an operation needs to know of a tensor."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and _has_storage(tensor)
    return is_plain and not tensor.is_conj() and not tensor.is_neg()


def _view(tensor: Tensor) -> _View | None:
    if not _is_describable(tensor):
        return None  # such an operation can't be carried out again
    storage = tensor.untyped_storage()
    size, stride, offset = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
    return _View(storage_key(storage), storage.nbytes(), tensor.dtype, size, stride, offset)


def _overwrites(tensor: Tensor, *others: Tensor) -> bool:
    """Whether an operation that sets all entries of a tensor replaces all of its storage."""
    fills = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return fills and all(_key(x) != _key(tensor) for x in others)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the operands that an operation writes to."""
    arguments = schema_of(func).arguments
    names = [argument.name for argument in arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [
        given.get(argument.name)
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(written)
