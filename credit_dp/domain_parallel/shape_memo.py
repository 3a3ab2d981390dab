"""What operations make of tensors without data, worked out once for equal operands.

A model's equal layers repeat the same operations on the same shapes; torch works out each result
anew, in Python for many of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

# Torch's own operations: their results depend on nothing but the operands.
NAMESPACES = ("aten", "prims")


class _UnclearError(Exception):
    """More than its key says may matter of an operand."""


class _Made(NamedTuple):
    """One tensor that an operation makes: on the meta device, or a fake one of another device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    mode: FakeTensorMode | None

    def again(self) -> Tensor:
        if self.mode is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(self.mode, empty, self.device)


class _Result(NamedTuple):
    """All that an operation makes; `several` is what holds them, if something does."""

    made: tuple[_Made | None, ...]
    several: type | None


@final
class ShapeMemo:
    """Runs torch's operations on tensors without data, those on equal operands only once.

    What changes an operand, returns one or part of one, or makes anything but whole tensors is run
    every time. One memo serves one `FakeTensorMode`.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Result | None] = {}
        self._is_pure: dict[Any, bool] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` makes of its operands."""
        if func not in self._is_pure:
            self._is_pure[func] = _is_pure(func)
        if not self._is_pure[func]:
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key((*kwargs.items(),)))
            known = self._known.get(key)
        except (_UnclearError, TypeError):  # the latter of what has no hash
            return func(*args, **kwargs)
        if known is None:
            made = func(*args, **kwargs)
            if key not in self._known:
                self._known[key] = _result(made, (args, kwargs))
            return made
        tensors = [one and one.again() for one in known.made]
        return tensors[0] if known.several is None else known.several(tensors)


def _is_pure(func: Any) -> bool:
    """Return whether an operation says that it leaves operands alone and makes new tensors."""
    schema = func._schema
    aliases = any(returned.alias_info is not None for returned in schema.returns)
    return func.namespace in NAMESPACES and not schema.is_mutable and not aliases


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
    return value.shape, value.stride(), value.dtype, value.device


def _is_dataless(x: Any) -> bool:
    """Return whether this is a dense tensor, fake or on the meta device."""
    kind = type(x)
    if kind is FakeTensor:
        return x.constant is None and x.layout is torch.strided
    return kind in (Tensor, nn.Parameter) and x.is_meta and x.layout is torch.strided


def _result(made: Any, given: Any) -> _Result | None:
    """Return what to make again for equal operands; None if it has to be run."""
    several = type(made) if isinstance(made, tuple | list) else None
    leaves = [made] if several is None else list(made)
    new = [leaf for leaf in leaves if leaf is not None]
    if not new or not all(map(_is_whole, new)):
        return None
    own = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
    if len({x.untyped_storage()._cdata for x in new} - own) < len(new):  # some share their memory
        return None
    return _Result(tuple(leaf if leaf is None else _made(leaf) for leaf in leaves), several)


def _made(x: Tensor) -> _Made:
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return _Made(tuple(x.shape), x.stride(), x.dtype, x.device, mode)


def _is_whole(x: Any) -> bool:
    """Return whether this is a tensor without data that fills its memory."""
    if not _is_dataless(x) or x.is_conj() or x.storage_offset() != 0:
        return False
    return bool(x.untyped_storage().nbytes() == _made(x).again().untyped_storage().nbytes())
