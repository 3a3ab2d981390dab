"""Which rule an operator has that no other module of rules knows, and what runs whole."""

from __future__ import annotations

from typing import Any

import torch

from credit_dp.domain_parallel.band_tensor.moving import (
    cut,
    put,
    whole,
)
from credit_dp.domain_parallel.band_tensor.pointwise import pointwise, pointwise_in_place
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Part,
    Rule,
    is_band,
    returns_view,
    tensors_in,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import change_own_shape, is_composite, schema_of, tree_map


def find_rule(func: Any) -> Rule:
    """Return the rule of an operator that has none of its own."""
    if torch.Tag.inplace_view in func.tags:
        return change_shape_in_place
    if torch.Tag.pointwise in func.tags:
        return pointwise_in_place if schema_of(func).is_mutable else pointwise
    if is_composite(func):  # torch has not computed it by others, as gradients are off
        return decompose
    return run_whole


BandTensor.find_rule = find_rule


def short_name(func: Any) -> str:
    """Return the name of an operator without that of its library."""
    name: str = schema_of(func).name
    return name.removeprefix("aten::")


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
        args, kwargs = tree_map(whole, (args, kwargs))
        results = func(*args, **kwargs)
    is_view = returns_view(func)
    rows = bands[0].rows if bands else None

    def part(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not isinstance(rows, Band) or is_view:
            return Part(x, WHOLE, is_copy=bool(bands))
        has_rows = x.ndim == bands[0].ndim and x.shape[rows.dim] == rows.size
        return Part(cut(x, rows, tensors[0].domain.rank), rows) if has_rows else Part(x, WHOLE)

    if isinstance(results, list | tuple):
        return (
            [part(x) for x in results] if isinstance(results, list) else tuple(map(part, results))
        )
    return part(results)


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
            y = whole(x)
            if name in writes and type(x) is BandTensor:
                y = y.clone() if y is x.local else y
                written.append((x, y))
            return y

        return tree_map(gather, value)

    new_args = [gathered(name, value) for name, value in zip(names, args, strict=False)]
    new_kwargs = {name: gathered(name, value) for name, value in kwargs.items()}
    results = func(*new_args, **new_kwargs)
    for x, y in written:
        put(x, y)
    wrappers = {id(y): x for x, y in written}
    if isinstance(results, list | tuple):
        return tuple(wrappers.get(id(y), y) for y in results)
    return wrappers.get(id(results), results)


def change_shape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change a tensor's own shape, as `transpose_` does: as the view does, and the wrapper's."""
    x = args[0]
    if type(x) is not BandTensor:
        raise UserError(f"{func}: changes the shape of a tensor that is no field, by a field.")
    view = _view_like(func)
    if view is None:
        raise UserError(
            f"{short_name(func)}: changes the shape of a field in place. Use the function without "
            "the underscore."
        )
    y = BandTensor.__torch_dispatch__(view, (), args, kwargs)
    x.local, x.rows, x.origin, x.seen_version = y.local, y.rows, y.origin, y.seen_version
    x.fetched = None
    change_own_shape(func, args, kwargs)
    x.described = None
    return x


def _view_like(func: Any) -> Any:
    """Return the operator that returns what an operator in place makes of its argument."""
    name = short_name(func).removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    types = [str(argument.type) for argument in schema_of(func).arguments]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if [str(argument.type) for argument in schema_of(found).arguments] == types:
            return found
    return None
