"""What the operations of a run cost whatever computes them: multiplications, and bytes touched."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
# They make room and touch nothing; like views, they start no work.
ROOM = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Views whose schema doesn't say so.
VIEWS = {aten._unsafe_view}


class Operation(NamedTuple):
    """One operation: floating-point operations, bytes read and written, whether it convolves."""

    flops: int
    bytes: int
    convolves: bool = False


@final
class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on tensors without data that run meanwhile, by what they cost.

    Views and reserved room count as nothing. Every operand is read once and every result written
    once, however large the caches are; an operand that was expanded is as large as what it was
    expanded from.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: Counter[Operation] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and count it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        results = _tensors(made)
        on_meta = any(x.is_meta for x in (*given, *results))
        if on_meta and not _is_free(func):
            # An operation on lists returns nothing and changes its first one.
            written = results or _tensors(args[:1])
            touched = sum(map(_bytes, given)) + sum(map(_bytes, written))
            packet = func._overloadpacket
            flops = _flops(packet, args, kwargs, made)
            self.counted[Operation(flops, touched, packet in CONVOLUTIONS)] += 1
        return made


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(x: Tensor) -> int:
    return min(x.nbytes, x.untyped_storage().nbytes())


def _is_free(func: Any) -> bool:
    """Whether an operation is a view, or only reserves room."""
    if func.namespace != "aten" or func._overloadpacket in ROOM | VIEWS:
        return True
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    if packet is aten.convolution_backward:
        return _of_convolution_backward(*args)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=made))


def _of_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Each of the two gradients takes as many multiplications as forward.

    torch's formula for the weight's gradient leaves out that groups of channels don't meet.
    """
    transposed, mask = rest[4], rest[-1]
    once = conv_flop_count([*x.shape], [*weight.shape], [*grad.shape], transposed)
    return once * sum(map(bool, mask[:2]))
