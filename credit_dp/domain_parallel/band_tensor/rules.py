"""Which rule an operator has that no other module of rules knows, and what runs whole."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from credit_dp.domain_parallel.band_tensor.moving import (
    cut,
    in_memory,
    overlaps,
    put,
    refresh,
    whole,
)
from credit_dp.domain_parallel.band_tensor.pointwise import pointwise, pointwise_in_place
from credit_dp.domain_parallel.band_tensor.strides import describe, is_dense, result_strides
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Part,
    Rule,
    ViewOrigin,
    is_band,
    returns_view,
    rule_for,
    tensors_in,
    write_count,
    writes_results,
)
from credit_dp.domain_parallel.rules import RULES as USER_RULES
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    change_own_shape,
    is_composite,
    is_view,
    schema_of,
    tree_map,
)


def find_rule(func: Any) -> Rule:
    """Return the rule of an operator that has none of its own: that of a user, or a general one."""
    if func in USER_RULES:
        rule: Rule = USER_RULES[func]
        return rule
    if torch.Tag.inplace_view in func.tags:
        return change_shape_in_place
    if writes_results(func) and _without_results(func) is not None:
        return write_results
    is_number = torch.Tag.data_dependent_output in func.tags  # as of `equal`
    if torch.Tag.pointwise in func.tags and not is_number:
        return pointwise_in_place if schema_of(func).is_mutable else pointwise
    if is_composite(func):  # torch has not computed it by others, as gradients are off
        return decompose
    return run_whole if _not_in_place(func) is None else write_in_place


BandTensor.find_rule = find_rule


def short_name(func: Any) -> str:
    """Return the name of an operator without that of its library."""
    name: str = schema_of(func).name
    return name.removeprefix("aten::")


@lru_cache(4096)
def _parameters(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = schema_of(func).arguments
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}
    return tuple(x.name for x in arguments), defaults


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, with the defaults that torch leaves out."""
    names, defaults = _parameters(func)
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator by others, as torch does it."""
    return func.decompose(*args, **kwargs)


def run_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather rows and compute as on one process; results with the rows of an argument are cut."""
    tensors = [x for x in tensors_in((args, kwargs)) if type(x) is BandTensor]
    bands = [x for x in tensors if is_band(x)]
    with tensors[0].domain.whole_call(short_name(func), tensors):
        if schema_of(func).is_mutable:
            return _write_whole(func, args, kwargs)
        # What has strides of its own is the same on each rank only as long as it is whole.
        has_known_strides = result_strides(func, args, kwargs) is not None
        first = args[0] if args else None
        args, kwargs = tree_map(on_one_process, (args, kwargs))
        results = func(*args, **kwargs)
    are_views = returns_view(func)
    # Also of parts of a sum, and of what has other strides here.
    is_copy = are_views and type(first) is BandTensor and args[0] is not first.local
    rows = bands[0].rows if bands and has_known_strides else None

    def part(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            return x  # a sparse tensor is whole, and torch's own
        if not isinstance(rows, Band) or are_views:
            return Part(x, WHOLE, is_copy)
        has_rows = x.ndim == bands[0].ndim and x.shape[rows.dim] == rows.size
        return Part(cut(x, rows, tensors[0].domain.rank), rows) if has_rows else Part(x, WHOLE)

    if isinstance(results, list | tuple):
        return (
            [part(x) for x in results] if isinstance(results, list) else tuple(map(part, results))
        )
    return part(results)


def on_one_process(x: Any) -> Any:
    """Return the globe's tensor with its strides; a collective. Others as they are.

    By strides torch may compute in another way, which the function's backward takes for granted, as
    that of `slogdet`.
    """
    y = whole(x)
    if type(x) is not BandTensor or y.stride() == x.stride():
        return y
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:  # all entries are the same one in memory
            y = y.narrow(dim, 0, 1)
    if overlaps(y.shape, x.stride()):  # there is no such copy
        return y.expand(x.shape)
    return y.new_empty_strided(y.shape, x.stride()).copy_(y).expand(x.shape)


def _write_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to arguments on the globe's tensors, and write to the bands."""
    written: list[tuple[BandTensor, torch.Tensor]] = []
    names = [argument.name for argument in schema_of(func).arguments]
    writes = {
        argument.name
        for argument in schema_of(func).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }

    def gathered(name: str, value: Any) -> Any:
        def gather(x: Any) -> Any:
            y = on_one_process(x)
            if name in writes and type(x) is BandTensor:
                y = y.clone() if y is x.local else y
                written.append((x, y))
            return y

        return tree_map(gather, value)

    new_args = [gathered(name, value) for name, value in zip(names, args, strict=False)]
    new_kwargs = {name: gathered(name, value) for name, value in kwargs.items()}
    results = func(*new_args, **new_kwargs)
    for x, y in written:
        if x.shape != y.shape:
            raise _another_shape(func, x, y)
        put(x, y)
    wrappers = {id(y): x for x, y in written}
    if isinstance(results, list | tuple):
        return tuple(wrappers.get(id(y), y) for y in results)
    return wrappers.get(id(results), results)


@lru_cache(4096)
def _without_results(func: Any) -> Any:
    """Return the operator that returns what one writes to `out`; None if there is none."""

    def given(overload: Any) -> list[tuple[str, str]]:
        return [(x.name, str(x.type)) for x in schema_of(overload).arguments if not x.is_out]

    wanted = given(func)
    packet = func.overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        if not schema_of(found).is_mutable and given(found) == wanted:
            return found
    return None


def write_results(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator that writes to `out`, and write its results there."""
    names = [x.name for x in schema_of(func).arguments if x.is_out]
    outs = [kwargs[name] for name in names]
    others = {name: x for name, x in kwargs.items() if name not in names}
    results = BandTensor.__torch_dispatch__(_without_results(func), (), args, others)
    for out, result in zip(outs, [results] if len(outs) == 1 else results, strict=True):
        if out.shape != result.shape:
            raise _another_shape(func, out, result)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to {out.dtype}")
        BandTensor.__torch_dispatch__(torch.ops.aten.copy_.default, (), (out, result))
    return outs[0] if len(outs) == 1 else tuple(outs)


@lru_cache(4096)
def _not_in_place(func: Any) -> Any:
    """Return the operator that returns what one writes to its first argument; None if none does."""
    schema = schema_of(func)
    packet = getattr(torch.ops.aten, short_name(func).removesuffix("_"), None)
    if func.namespace != "aten" or not short_name(func).endswith("_") or packet is None:
        return None
    if [str(x.type) for x in schema.returns] != ["Tensor"]:  # of lists, as `_foreach_add_`
        return None
    arguments = [(x.name, str(x.type)) for x in schema.arguments]
    for name in packet.overloads():
        found = getattr(packet, name)
        others = [(x.name, str(x.type)) for x in schema_of(found).arguments]
        if others == arguments and not schema_of(found).is_mutable and not returns_view(found):
            return found
    return None


def write_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute what an operator writes to its first argument, and write it there."""
    x = args[0]
    result = BandTensor.__torch_dispatch__(_not_in_place(func), (), args, kwargs)
    if result.shape != x.shape:
        raise _another_shape(func, x, result)
    BandTensor.__torch_dispatch__(torch.ops.aten.copy_.default, (), (x, result))
    return x


def _another_shape(func: Any, x: torch.Tensor, y: torch.Tensor) -> UserError:
    return UserError(
        f"{short_name(func)}: gives a field of {tuple(x.shape)} the shape {tuple(y.shape)} in "
        "place. Use the function without the underscore or `out`."
    )


def change_shape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change a tensor's own shape, as `transpose_` does: what it holds, and what it shows."""
    x = args[0]
    if type(x) is not BandTensor:
        raise UserError(f"{func}: changes the shape of a tensor that is no field, by a field.")
    if x.is_open:  # its views would be computed from another shape
        BandTensor.keep_whole(x)
    if x.has_changed_shape and x.origin is not None:  # once more
        refresh(x)
        x.origin = None
    view, had_views = _view_like(func), x.has_views
    y = None if view is None else BandTensor.__torch_dispatch__(view, (), args, kwargs)
    # A copy would be one of itself, and for gradients torch makes views anew: from the new shape.
    if y is None or y.origin is not None or had_views:
        raise UserError(
            f"{short_name(func)}: changes the shape in place of a field that is a view, or had "
            "views. Use the function without the underscore."
        )
    x.local, x.rows, x.has_changed_shape = y.local, y.rows, True
    x.fetched = None
    change_own_shape(func, args, kwargs)
    x.described = None
    x.has_views = False
    if is_view(x):  # which torch would make anew without the change once its memory was written
        before = BandTensor(y.local, y.rows, x.domain)
        before.has_changed_shape = True
        x.origin = ViewOrigin(before, view, args[1:], kwargs, None, False)
        x.seen_version = write_count(x) + 1  # torch counts this change after it
    return x


def _view_like(func: Any) -> Any:
    name = short_name(func).removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    types = [str(argument.type) for argument in schema_of(func).arguments]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if returns_view(found) and [str(x.type) for x in schema_of(found).arguments] == types:
            return found
    return None


@rule_for("as_strided.default", "as_strided_copy.default", "as_strided_scatter.default")
def by_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View or copy entries by their places in memory, which has to be that of the tensor alone."""
    is_scatter = func is torch.ops.aten.as_strided_scatter.default
    x = args[0]
    size, strides, *given = args[1 + is_scatter :]
    if type(x) is not BandTensor:  # of torch's own: fields are written to it
        return run_whole(func, args, kwargs)
    refresh(x)
    if x.is_open:
        BandTensor.keep_whole(x)
    own = int(x.storage_offset())
    offset = kwargs.get("storage_offset", given[0] if given else None)
    offset = own if offset is None else offset
    last = offset + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    is_part = is_view(x) and not fills_memory(x)
    if is_part or (0 not in size and not own <= offset <= last < own + extent):
        raise UserError(
            f"{short_name(func)}: reaches memory beyond the entries of a field that is a view. Use "
            "slices, or clone() the field before."
        )
    if func is not torch.ops.aten.as_strided.default:
        if own:
            x = BandTensor(x.local, x.rows, x.domain, x.stride())
        others = args[1 : 1 + is_scatter]
        return run_whole(func, (x, *others, size, strides, offset - own), {})
    if fills_memory(x):
        local = describe(x).in_order(x.local if x.rows is PARTIAL else whole(x))
    else:  # the gradient of a tensor with gaps, of which autograd shows what was written
        local = in_memory(x)
    view = func(local, size, strides, offset - own + local.storage_offset())
    is_copy = local is not x.local
    if is_copy:
        with x.domain.whole_call("as_strided", [x]):
            pass
    is_partial = x.rows is PARTIAL and fills_memory(x)
    return Part(view, PARTIAL if is_partial else WHOLE, is_copy)


def fills_memory(x: BandTensor) -> bool:
    """Return whether a tensor's entries follow each other in memory, in any order."""
    order = describe(x).order
    return order is None or is_dense(x, order[0])
