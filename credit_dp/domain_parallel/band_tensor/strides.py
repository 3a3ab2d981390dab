"""The strides that an operator's results have on one process, for tensors of the globe.

Whether torch returns a view or a copy depends on strides, and so do the functions that it calls
then: ranks have to agree on it with each other and with one process. Each call is computed once on
tensors without data, which have the globe's shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credit_dp.torch_private import FakeTensorMode, disable_current_modes

Strides = tuple[int, ...]


class Described(NamedTuple):
    """What a tensor is, without its data: the part of a call that decides on strides."""

    shape: tuple[int, ...]
    strides: Strides
    offset: int
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return such a tensor."""
        # The offset, too: a call may make a view of the whole memory.
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        size = 0 if 0 in self.shape else last + 1 + self.offset
        memory = torch.empty(size, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, 0 if size == 0 else self.offset)


def describe(x: Any) -> Any:
    """Return what decides on strides of an argument, as a key: of lists that of each entry."""
    if isinstance(x, Tensor):
        return Described(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, x.device)
    if isinstance(x, list | tuple):
        return tuple([describe(each) for each in x])
    # 1, 1.0 and True are equal, but not to torch.
    return (type(x), x) if isinstance(x, int | float | complex) else x


def result_strides(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return strides and offset of each tensor that an operator returns, empty for what is none.

    Args:
        func: an operator that changes nothing.
        args, kwargs: its arguments; tensors have the globe's shapes and strides.

    Raises:
        RuntimeError: torch's own, if it refuses the call.
    """
    key = describe(args)
    try:
        return _computed(func, key, tuple((name, describe(x)) for name, x in kwargs.items()))
    except TypeError:  # an argument that is no key, as a generator
        return _compute(func, key, tuple((name, describe(x)) for name, x in kwargs.items()))


def _compute(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    with disable_current_modes(), FakeTensorMode():
        results = func(*_made(args), **{name: _made(x) for name, x in kwargs})
    return tuple(
        (x.stride(), x.storage_offset()) if isinstance(x, Tensor) else ()
        for x in (results if isinstance(results, list | tuple) else [results])
    )


_computed = lru_cache(65536)(_compute)


def _made(x: Any) -> Any:
    """Return an argument from its key."""
    if isinstance(x, Described):
        return x.empty()
    if isinstance(x, tuple):
        is_number = len(x) == 2 and isinstance(x[0], type)
        return x[1] if is_number else [_made(each) for each in x]
    return x


def in_order(local: Tensor, strides: Sequence[int], is_contiguous: bool) -> Tensor:
    """Return a tensor whose dimensions are in memory in the order of the globe's strides.

    A view of the globe's tensor then has one of the same function here.
    """
    if is_contiguous:
        return local.contiguous()
    order = sorted(range(local.ndim), key=lambda d: -strides[d])
    ordered = local.permute(order)
    if ordered.is_contiguous():
        return local
    back = sorted(range(local.ndim), key=lambda d: order[d])
    return ordered.contiguous().permute(back)
