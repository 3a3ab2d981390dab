"""What operations make of tensors without data, worked out once for equal operands.

A model's equal layers repeat the same operations on the same shapes; torch works out each result
anew, in Python for many of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Torch's own operations: their results depend on nothing but the operands.
NAMESPACES = ("aten", "prims")
# But for one, whose view may reach beyond its operand.
BEYOND = torch.ops.aten.as_strided.default


class _UnclearError(Exception):
    """More than its key says may matter of an operand."""


class _Made(NamedTuple):
    """One tensor that an operation makes: on the meta device, or a fake one of another device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    mode: FakeTensorMode | None

    def again(self, memory: torch.UntypedStorage | None = None) -> Tensor:
        """Make it anew, or as a view of this memory."""
        if self.mode is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        with torch._C._DisableTorchDispatch():
            if memory is None:
                made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                made = torch.empty(0, dtype=self.dtype, device="meta")
                made.set_(memory, self.offset, self.shape, self.stride)
        return FakeTensor(self.mode, made, self.device)


class _Result(NamedTuple):
    """All that an operation makes; `several` is what holds them, if something does.

    `is_view`: they lie in the memory of the first operand.
    """

    made: tuple[_Made | None, ...]
    several: type | None
    is_view: bool


@final
class ShapeMemo:
    """Runs torch's operations on tensors without data, those on equal operands only once.

    What changes an operand, returns one, or makes anything but whole tensors and views of a fake
    one is run every time. Views on the meta device are too: torch makes these as fast. One memo
    serves one `FakeTensorMode`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Result | None] = {}
        self._is_pure: dict[Any, bool] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` makes of its operands."""
        first: Any = args[0] if args else None
        kind = func, type(first) is FakeTensor
        if kind not in self._is_pure:
            self._is_pure[kind] = _is_pure(*kind)
        if not self._is_pure[kind]:
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key((*kwargs.items(),)))
            known = self._known.get(key)
        except (_UnclearError, TypeError):  # the latter of what has no hash
            return func(*args, **kwargs)
        if known is None:
            made = func(*args, **kwargs)
            if key not in self._known:
                self._known[key] = _result(made, args, kwargs)
            return made
        memory = first.untyped_storage() if known.is_view else None
        tensors = [one and one.again(memory) for one in known.made]
        return tensors[0] if known.several is None else known.several(tensors)


def tensors_in(operands: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among operands of an operation, and in lists of these."""
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from tensors_in(operand)


def _is_pure(func: Any, of_fake: bool) -> bool:
    """Return whether an operation leaves operands alone: makes new tensors, or views of fakes."""
    schema = func._schema
    is_view = any(returned.alias_info is not None for returned in schema.returns)
    can_be_made = (of_fake and func is not BEYOND) or not is_view
    return func.namespace in NAMESPACES and not schema.is_mutable and can_be_made


def _key(value: Any) -> Hashable:
    """Return all of an operand that a result can depend on.

    Raises:
        _UnclearError: it is a tensor with data, or of a kind with rules of its own.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple(map(_key, value))
    if not isinstance(value, Tensor):
        return kind, value  # 1, 1.0 and True are equal
    if not _is_dataless(value):
        raise _UnclearError
    # A fake one asked for its device would ask all that is under way.
    device = value.fake_device if isinstance(value, FakeTensor) else value.device
    return value.shape, value.stride(), value.storage_offset(), value.dtype, device


def _is_dataless(x: Any) -> bool:
    """Return whether this is a dense tensor, fake or on the meta device."""
    kind = type(x)
    if kind is FakeTensor:
        return x.constant is None and x.layout is torch.strided
    return kind in (Tensor, nn.Parameter) and x.is_meta and x.layout is torch.strided


def _result(made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result | None:
    """Return what to make again for equal operands; None if it has to be run."""
    several = type(made) if isinstance(made, tuple | list) else None
    leaves = [made] if several is None else list(made)
    new = [leaf for leaf in leaves if leaf is not None]
    given = [*tensors_in(args), *tensors_in(kwargs.values())]
    if not new or not all(map(_is_plain, new)) or any(x is y for x in new for y in given):
        return None
    memories, own = ({x.untyped_storage()._cdata for x in of} for of in (new, given))
    is_view = memories == {given[0].untyped_storage()._cdata} if given else False
    if is_view and not (given[0] is args[0] and type(given[0]) is FakeTensor):
        return None
    if not is_view and (len(memories - own) < len(new) or not all(map(_is_whole, new))):
        return None  # some share their memory
    described = tuple(leaf if leaf is None else _made(leaf) for leaf in leaves)
    return _Result(described, several, is_view)


def _made(x: Tensor) -> _Made:
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return _Made(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, x.device, mode)


def _is_plain(x: Any) -> bool:
    """Return whether this is a tensor without data, as its numbers are."""
    return _is_dataless(x) and not x.is_conj() and not x.is_neg()


def _is_whole(x: Tensor) -> bool:
    """Return whether this tensor fills its memory."""
    size: int = x.untyped_storage().nbytes()
    return x.storage_offset() == 0 and size == _made(x).again().untyped_storage().nbytes()
