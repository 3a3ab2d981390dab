"""Values that Python reads, and shapes that depend on values: all ranks read the same.

A model may decide by them what it does next. On GPUs the last bits of what each rank computes for
itself may differ, so all ranks read what the first one has.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.moving import whole, with_rows
from credit_dp.domain_parallel.band_tensor.pointwise import common_rows
from credit_dp.domain_parallel.band_tensor.rules import short_name
from credit_dp.domain_parallel.band_tensor.tensor import (
    WHOLE,
    Band,
    BandTensor,
    Domain,
    check_model_runs,
    domain_of,
    is_running,
    rule_for,
    tensors_in,
)
from credit_dp.domain_parallel.transport import message_device
from credit_dp.torch_private import (
    FakeTensor,
    backward_pass,
    disable_torch_function,
    tree_map,
)

# Where ranks compute the same bits.
SAME_BITS = ("cpu", "meta")


def has_no_data(x: Tensor) -> bool:
    """Return whether a tensor has a shape only, as in a dry run."""
    return isinstance(x, FakeTensor) or x.is_meta


def from_first_rank(x: Tensor, domain: Domain) -> Tensor:
    """Return a local tensor as the first rank has it; a collective."""
    # As bytes, since not every type can be sent, and on the device of messages.
    message = x.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    group = domain.manager.domain_group
    if has_no_data(x):
        domain.transport.all_gather(message)
        return x
    if group is not None:
        message = message.to(message_device(group))
    first = domain.transport.all_gather(message)[0].to(x.device)
    return first.view(x.dtype).view(x.shape)


def same_values(x: Any, domain: Domain) -> Any:
    """Return the globe's values of a tensor, with the same bits on all ranks; others as they are.

    A collective for bands and sums of parts, which have the same bits then, and on GPUs.
    """
    if not isinstance(x, Tensor):
        return x
    is_computed = type(x) is not BandTensor or x.rows is WHOLE  # by each rank for itself
    local = whole(x)
    may_differ = is_computed and local.device.type not in SAME_BITS
    return from_first_rank(local, domain) if may_differ else local


def read_values(x: BandTensor) -> Tensor:
    """Return the values of the globe for Python; a collective."""
    if not is_running.get() and backward_pass() < 0:
        check_model_runs("numpy", (x,), {})
    with disable_torch_function():
        values: Tensor = same_values(x, x.domain)
    return values


BandTensor.read_values = read_values


@rule_for(
    "_local_scalar_dense", "nonzero.default", "masked_select.default", "unique_dim.default",
    "unique_consecutive.default", "unique_dim_consecutive.default", "_unique.default",
    "_unique2.default", "bincount.default", "repeat_interleave.Tensor",
)  # fmt: skip
def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read values, or return tensors whose shapes depend on them: they are whole."""
    domain = domain_of((args, kwargs))
    is_number = func is torch.ops.aten._local_scalar_dense.default
    fields = [x for x in tensors_in((args, kwargs)) if type(x) is BandTensor]
    with nullcontext() if is_number else domain.whole_call(short_name(func), fields):
        args, kwargs = tree_map(lambda x: same_values(x, domain), (args, kwargs))
        results = func(*args, **kwargs)
    # Strides can't be found out without values.
    return tree_map(
        lambda x: BandTensor(x, WHOLE, domain, x.stride()) if isinstance(x, Tensor) else x, results
    )


@rule_for("equal.default", "allclose.default")
def compare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all values are equal or close to each other, on all ranks."""
    x, y, *others = args
    domain = domain_of(args)
    rows = common_rows([x, y])
    is_equality = func is torch.ops.aten.equal.default  # that of other shapes is none
    if not isinstance(rows, Band) or (is_equality and x.shape != y.shape):
        result: bool = func(same_values(x, domain), same_values(y, domain), *others, **kwargs)
        return result
    local = with_rows(x, rows, domain), with_rows(y, rows, domain)
    is_here: bool = func(*local, *others, **kwargs)
    everyone = domain.transport.all_gather(
        torch.tensor([is_here], dtype=torch.uint8, device=local[0].device)
    )
    return is_here if has_no_data(local[0]) else bool(everyone.all())


@rule_for("is_same_size.default")
def compare_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether two tensors have the same shape, as forward-mode derivatives have to."""
    x, y = args
    return bool(x.shape == y.shape)
