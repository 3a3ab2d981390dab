"""The strides that an operator's results have on one process, for tensors of the globe.

Whether torch returns a view or a copy depends on strides, and so do the functions that it calls
then: ranks have to agree on it with each other and with one process. Each call is computed once on
tensors without data, which have the globe's shapes and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from credit_dp.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    disable_current_modes,
    new_fake_mode,
)

# Values decide on the result's shape, or a user's operator says nothing of it.
UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
INTEGERS = {int}
PLAIN = object()  # instead of what a tensor of the globe keeps


@final
class Described:
    """What a tensor is, without its data: the part of a call that decides on strides.

    There is one object of each kind of tensors, so that it may be a key by its identity.

    Attributes:
        order: its dimensions from that with the largest stride on, and the order that undoes this;
            None if it is contiguous.
    """

    __slots__ = ("device", "dtype", "offset", "order", "shape", "strides")

    def __init__(self, x: Tensor, device: torch.device) -> None:
        self.shape, self.strides, self.offset = tuple(x.shape), x.stride(), int(x.storage_offset())
        self.dtype, self.device = x.dtype, device
        self.order = None
        if not x.is_contiguous():
            order = sorted(range(x.ndim), key=lambda d: -self.strides[d])
            self.order = order, sorted(range(x.ndim), key=lambda d: order[d])

    def empty(self) -> Tensor:
        """Return such a tensor."""
        # The offset, too: a call may make a view of the whole memory.
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        size = 0 if 0 in self.shape else last + 1 + self.offset
        memory = torch.empty(size, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.strides, 0 if size == 0 else self.offset)

    def in_order(self, local: Tensor) -> Tensor:
        """Return a tensor whose dimensions are in memory in the order of the globe's strides.

        A view of the globe's tensor then has one of the same function here.
        """
        if self.order is None:
            return local if local.is_contiguous() else local.contiguous()
        order, back = self.order
        return local if is_dense(local, order) else local.permute(order).contiguous().permute(back)


def is_dense(x: Tensor, order: Sequence[int]) -> bool:
    """Return whether a tensor fills its memory with dimensions in an order, the slowest first."""
    sizes, strides, expected = x.shape, x.stride(), 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if sizes[dim] == 0:
                return True
            if strides[dim] != expected:
                return False
            expected *= sizes[dim]
    return True


_known: dict[Any, Described] = {}


def described(x: Tensor, device: torch.device | None = None) -> Described:
    """Return the description of a tensor, which others like it share."""
    device = device or x.device
    key = (x.shape, x.stride(), x.storage_offset(), x.dtype, device)
    found = _known.get(key)
    if found is None:
        # Threads that are ranks share it, too.
        found = _known.setdefault(key, Described(x, device))
    return found


@lru_cache(65536)
def contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Described:
    """Return the description of a contiguous tensor."""
    return described(torch.empty(shape, dtype=dtype, device="meta"), device)


def describe(x: Any) -> Any:
    """Return what decides on strides of an argument, as a key: of lists that of each entry."""
    kind = type(x)
    if kind is int or kind is float or kind is bool or kind is complex:
        return kind, x  # 1, 1.0 and True are equal, but not to torch
    if kind is list or kind is tuple:
        # An operator takes lists of one type: integers need no types beside them.
        return tuple(x) if {*map(type, x)} == INTEGERS else tuple([describe(each) for each in x])
    if isinstance(x, Tensor):
        known: Any = getattr(x, "described", PLAIN)
        if known is PLAIN:
            return described(x)
        if known is None:
            known = x.described = described(x)  # type: ignore[attr-defined]
        return known
    if isinstance(x, (list, tuple)):
        return tuple([describe(each) for each in x])
    return x


def result_strides(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return the description of each tensor that an operator returns, None for what is none.

    None instead of all: they are only known once it has run.

    Args:
        args, kwargs: its arguments; tensors have the globe's shapes and strides.

    Raises:
        RuntimeError: torch's own, if it refuses the call.
    """
    try:
        key = tuple([describe(x) for x in args])
        named = tuple([(name, describe(x)) for name, x in kwargs.items()]) if kwargs else ()
    except RuntimeError:  # a sparse tensor has no strides
        return None
    try:
        return _computed(func, key, named)
    except TypeError:  # an argument that is no key, as a generator
        return _compute(func, key, named)


def _compute(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    mode = new_fake_mode()
    mode.cache_enabled = False  # torch forgets the offset of a result that it has computed before
    try:
        with disable_current_modes(), mode:
            results = func(*_made(args), **{name: _made(x) for name, x in kwargs})
    except UNKNOWN:
        return None
    except RuntimeError:
        if func.namespace != "aten":  # a user's, which has run, but has no function for it
            return None
        raise
    if func is FLASH_ATTENTION and results[0].dtype is torch.float64:
        # torch 2.11 says that its logarithms of sums are float32.
        results = results[0], results[1].double()
    return tuple(
        described(x) if isinstance(x, Tensor) else None
        for x in (results if isinstance(results, list | tuple) else [results])
    )


_computed = lru_cache(65536)(_compute)


def _made(x: Any) -> Any:
    if isinstance(x, Described):
        return x.empty()
    if isinstance(x, tuple):
        is_number = len(x) == 2 and isinstance(x[0], type)
        return x[1] if is_number else [_made(each) for each in x]
    return x
