"""Shapes of results, computed once for equal operands.

The many runs of a plan on tensors without data have most operations in common. `ShapeMemo` reuses
their results, and runs others by their kernels for the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.band_tensor.tensor import tensors_in
from credit_dp.torch_private import (
    FAKE_IMPLEMENTATIONS,
    LIKE_CONSTRUCTORS,
    FakeTensor,
    FakeTensorMode,
    check_convolution,
    disable_torch_dispatch,
    is_fake_mode_active,
    new_fake,
    schema_of,
)

# Torch's own operations: their results depend on the operands only, so they may be cached.
TORCH_NAMESPACES = ("aten", "prims")
# Except this one: its view may reach beyond the operand.
UNBOUNDED_VIEW = torch.ops.aten.as_strided.default
META = torch.device("meta")


@final
class ShapeMemo:
    """Runs torch operations on tensors without data, only once for equal operands.

    Results are reused only if they are new tensors, views of a fake first operand, or operands,
    changed in place beside a fake first one. Other operations run every time, and so do views and
    changes on the meta device, which are as fast as the cache.

    Attributes:
        mode: that of the fake tensors that run now. A run under another one sets it first; results
            of the runs before are then reused as tensors of this mode.
    """

    def __init__(self) -> None:
        self.mode: FakeTensorMode | None = None
        self._results: dict[Hashable, _CachedResult | None] = {}
        self._changes: set[Hashable] = set()
        self._properties: dict[Any, _Properties] = {}
        self._attributes_of_fakes: dict[Hashable, dict[str, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        first: Any = args[0] if args else None
        signature = func, type(first) is FakeTensor
        properties = self._properties.get(signature)
        if properties is None:
            properties = self._properties[signature] = _properties_of(*signature)
        if not (properties.is_pure or properties.changed):
            return func(*args, **kwargs)
        if self.mode is not None and type(first) is not FakeTensor and not is_fake_mode_active():
            return func(*args, **kwargs)  # values are computed in the middle of a dry run
        try:
            key = (
                func,
                torch.get_default_dtype(),
                _cache_key(args),
                _cache_key((*kwargs.items(),)),
            )
            cached = self._results.get(key)
        except (_UncacheableError, TypeError):  # TypeError: an operand has no hash
            return func(*args, **kwargs)
        if properties.changed:
            # They have no data to change. Autograd counts versions of tensors before it gets here.
            changed = tuple(kwargs[x] if x in kwargs else args[i] for i, x in properties.changed)
            found = changed[0] if len(changed) == 1 else changed
            if key in self._changes:
                return found
            if properties.runs_on_meta and self._run_on_meta(func, args, kwargs) is not None:
                self._changes.add(key)
                return found
            before = _cache_key(changed)
            result = func(*args, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            # An operation gives its `out` another size if need be.
            if all(map(is_, results, changed)) and _cache_key(changed) == before:
                self._changes.add(key)
            return result
        if cached is None:
            result = self._run_on_meta(func, args, kwargs) if properties.runs_on_meta else None
            if result is None:
                result = func(*args, **kwargs)
            if key not in self._results:
                self._results[key] = _cacheable_result(result, args, kwargs)
                modes = filter(None, map(_mode_of, tensors_in([result])))
                self.mode = next(modes, self.mode)
            return result
        storage = first.untyped_storage() if cached.is_view else None
        tensors = [spec and self._create(spec, storage) for spec in cached.outputs]
        return tensors[0] if cached.container is None else cached.container(tensors)

    def _create(self, spec: TensorSpec, storage: torch.UntypedStorage | None) -> Tensor:
        data = spec.create(storage)
        return self._fake(self.mode, data, spec.device) if spec.is_fake else data

    def _fake(self, mode: FakeTensorMode | None, data: Tensor, device: torch.device) -> Tensor:
        """Return the fake tensor of a tensor on the meta device.

        All that the constructor of `FakeTensor` computes is the same for all tensors of a mode and
        a device: it does so once, and the others get what it has found.
        """
        attributes = self._attributes_of_fakes.get((mode, device))
        if attributes is None:
            fake = FakeTensor(mode, data, device)
            self._attributes_of_fakes[mode, device] = dict(fake.__dict__)
            return fake
        return new_fake(data, device, attributes)

    def _run_on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors of one device by its meta kernel; None if that can't be.

        A fake tensor finds the kernel, the device and the strides of a result in Python, and takes
        an operation apart that has no kernel of its own: milliseconds instead of microseconds.
        """
        operands: list[Any] = [*tensors_in(args), *tensors_in(kwargs.values())]
        if not all(type(x) is FakeTensor and _is_describable(x) for x in operands):
            return None
        fits = FITS_META_KERNEL.get(func)
        if fits is not None and not all(map(fits, operands)):
            return None
        mode = operands[0].fake_mode if operands else self.mode
        devices = {x.fake_device for x in operands}
        if kwargs.get("device") is not None:
            devices.add(kwargs["device"])
            kwargs = {**kwargs, "device": META}
        elif not operands:
            devices.add(torch.device("cpu"))
            kwargs = {**kwargs, "device": META}
        if mode is None or len(devices) != 1 or META in devices:
            return None
        with disable_torch_dispatch():
            try:
                args = tuple(map(_on_meta, args))
                if func is torch.ops.aten.convolution.default:
                    check_convolution(*args)
                result = func(*args, **{k: _on_meta(x) for k, x in kwargs.items()})
            except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
                return None  # with fake operands it works, or fails with a better message
            container = type(result) if isinstance(result, tuple | list) else None
            leaves = [result] if container is None else result
            if not all(x is None or (isinstance(x, Tensor) and _is_describable(x)) for x in leaves):
                return None
        device = devices.pop()
        fakes = [x if x is None else self._fake(mode, x, device) for x in leaves]
        return fakes[0] if container is None else container(fakes)


class _Properties(NamedTuple):
    """What is known of an operation, on a fake or another first operand.

    Attributes:
        is_pure: it only creates new tensors, or views of fake tensors.
        changed: position and name of the operands whose values it changes, and which it returns;
            the first operand is a fake tensor.
        runs_on_meta: its kernel for the meta device alone gives the shapes of fake results.
    """

    is_pure: bool
    changed: tuple[tuple[int, str], ...]
    runs_on_meta: bool


def _properties_of(func: Any, on_fake: bool) -> _Properties:
    schema = schema_of(func)
    results = [x.alias_info for x in schema.returns]
    is_view = any(alias is not None for alias in results)
    is_torch = func.namespace in TORCH_NAMESPACES
    is_reproducible = (on_fake and func is not UNBOUNDED_VIEW) or not is_view
    is_pure = is_torch and not schema.is_mutable and is_reproducible
    written = [
        (i, x) for i, x in enumerate(schema.arguments) if x.alias_info and x.alias_info.is_write
    ]
    returned = [alias and alias.before_set for alias in results]
    only_changes = (
        is_torch
        and on_fake
        and returned == [x.alias_info.before_set for _, x in written]
        and torch.Tag.inplace_view not in func.tags  # its strides change
    )
    changed = tuple((i, x.name) for i, x in written if only_changes)
    depends_on_data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    is_special = func in FAKE_IMPLEMENTATIONS and not is_view
    runs_on_meta = (
        (is_pure or [i for i, _ in changed] == [0])
        and not depends_on_data.intersection(func.tags)
        and (not is_special or func in LIKE_CONSTRUCTORS or func in FITS_META_KERNEL)
    )
    return _Properties(is_pure, changed, runs_on_meta)


def _on_meta(value: Any) -> Any:
    if type(value) is FakeTensor:
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        return meta.set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )
    if isinstance(value, list | tuple):
        return type(value)(map(_on_meta, value))
    return value


def _is_channels_first(x: Tensor) -> bool:
    # In that format the last dimension has at least the entries of the channels in between.
    return x.ndim < 3 or x.stride(-1) < x.stride(1) * x.shape[1]


# Operations whose kernel for the meta device gives the results of fake tensors only for some
# operands. The memory format of a convolution's result is that of the device's kernel, which is
# `channels_last` only if that of an operand is. Statistics of a layer norm in half precision have
# another dtype on CPUs. Some that move entries forget `channels_last`, or return a view.
FITS_META_KERNEL: dict[Any, Callable[[Tensor], bool]] = {
    torch.ops.aten.convolution.default: _is_channels_first,
    torch.ops.aten.convolution_backward.default: _is_channels_first,
    torch.ops.aten.native_layer_norm.default: lambda x: x.dtype in (torch.float32, torch.float64),
    torch.ops.aten._unsafe_view.default: lambda x: True,
    torch.ops.aten.reflection_pad2d.default: _is_channels_first,
    torch.ops.aten.replication_pad2d.default: _is_channels_first,
    torch.ops.aten.pixel_shuffle.default: _is_channels_first,
    torch.ops.aten.channel_shuffle.default: lambda x: False,
}


class _UncacheableError(Exception):
    """The result may depend on more of an operand than a cache key contains."""


class TensorSpec(NamedTuple):
    """An output tensor of an operation: on the meta device, or fake with another device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_fake: bool

    def create(self, storage: torch.UntypedStorage | None = None) -> Tensor:
        """Return a new tensor on the meta device, or a view of `storage`."""
        with disable_torch_dispatch():
            if storage is None:
                return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
            data = torch.empty(0, dtype=self.dtype, device=META)
            return data.set_(storage, self.offset, self.shape, self.stride)


class _CachedResult(NamedTuple):
    """The outputs of an operation, in a list or tuple (`container`) unless it returns one tensor.

    `is_view`: the outputs share the storage of the first operand.
    """

    outputs: tuple[TensorSpec | None, ...]
    container: type | None
    is_view: bool


def _cache_key(value: Any) -> Hashable:
    """Return everything that the shape of a result can depend on."""
    value_type = type(value)
    if value_type is tuple or value_type is list:
        return tuple(map(_cache_key, value))
    if not isinstance(value, Tensor):
        return value_type, value  # with the type, as 1, 1.0 and True are equal
    if not _is_dataless(value):
        raise _UncacheableError
    # `.device` of a fake tensor would dispatch to all active modes; `.fake_device` does not.
    device = value.fake_device if isinstance(value, FakeTensor) else value.device
    return value.shape, value.stride(), value.storage_offset(), value.dtype, device


def _is_dataless(x: Any) -> bool:
    tensor_type = type(x)
    if tensor_type is FakeTensor:
        return x.constant is None and x.layout is torch.strided
    return tensor_type in (Tensor, nn.Parameter) and x.is_meta and x.layout is torch.strided


def _cacheable_result(
    result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _CachedResult | None:
    """Return the cache entry of a result; None if the operation has to run every time."""
    container = type(result) if isinstance(result, tuple | list) else None
    leaves = [result] if container is None else list(result)
    new = [leaf for leaf in leaves if leaf is not None]
    operands = [*tensors_in(args), *tensors_in(kwargs.values())]
    if not new or not all(map(_is_describable, new)) or any(x is y for x in new for y in operands):
        return None
    storages, operand_storages = (
        {id(x.untyped_storage()) for x in tensors} for tensors in (new, operands)
    )
    is_view = storages == {id(operands[0].untyped_storage())} if operands else False
    if is_view and not (operands[0] is args[0] and type(operands[0]) is FakeTensor):
        return None
    if not is_view and (
        len(storages - operand_storages) < len(new) or not all(map(_fills_storage, new))
    ):
        return None  # outputs share storages with each other or an operand
    specs = tuple(leaf if leaf is None else _spec_of(leaf) for leaf in leaves)
    return _CachedResult(specs, container, is_view)


def _mode_of(x: Tensor) -> FakeTensorMode | None:
    mode: FakeTensorMode | None = x.fake_mode if isinstance(x, FakeTensor) else None
    return mode


def _spec_of(x: Tensor) -> TensorSpec:
    offset, is_fake = int(x.storage_offset()), isinstance(x, FakeTensor)
    return TensorSpec(tuple(x.shape), x.stride(), offset, x.dtype, x.device, is_fake)


def _is_describable(x: Any) -> bool:
    return _is_dataless(x) and not x.is_conj() and not x.is_neg()


def _fills_storage(x: Tensor) -> bool:
    size: int = x.untyped_storage().nbytes()
    return x.storage_offset() == 0 and size == _spec_of(x).create().untyped_storage().nbytes()
