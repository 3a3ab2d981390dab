"""All that a training step makes the ranks of a domain do: operations, messages, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.costs.report import (
    SavedTensors,
    copy_to_meta,
    row_layers,
    use_meta_tensors,
)
from credit_dp.domain_parallel.count_transport import MessageSize, RecordingTransport
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.plan import Shape
from credit_dp.domain_parallel.planning.trace import copy_model

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
# They make room and touch nothing; like views, they start no work.
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
# Views whose schema doesn't say so.
UNDECLARED_VIEWS = {aten._unsafe_view}


class OperationCost(NamedTuple):
    """One operation: floating-point operations, bytes read and written, whether it convolves."""

    flops: int
    bytes: int
    is_convolution: bool = False


@final
class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on tensors without data that run meanwhile, by what they cost.

    Views and reserved room count as nothing. Every operand is read once and every result written
    once, however large the caches are; an operand that was expanded is as large as what it was
    expanded from.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[OperationCost] = Counter()

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
            self.counts[OperationCost(flops, touched, packet in CONVOLUTIONS)] += 1
        return made


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(x: Tensor) -> int:
    return min(x.nbytes, x.untyped_storage().nbytes())


def _is_free(func: Any) -> bool:
    """Whether an operation is a view, or only reserves room."""
    if func.namespace != "aten" or func._overloadpacket in ALLOCATIONS | UNDECLARED_VIEWS:
        return True
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    if packet is aten.convolution_backward:
        return _convolution_backward_flops(*args)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=made))


def _convolution_backward_flops(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Each of the two gradients takes as many multiplications as forward.

    torch's formula for the weight's gradient leaves out that groups of channels don't meet.
    """
    transposed, mask = rest[4], rest[-1]
    once = conv_flop_count([*x.shape], [*weight.shape], [*grad.shape], transposed)
    return once * sum(map(bool, mask[:2]))


@final
@dataclass(frozen=True)
class StepWork:
    """Forward and backward of one micro-batch on a domain of `ranks`.

    Attributes:
        operations: of each combination of bands that a rank may have, how many cost what.
        exchanges: the messages that are under way at once, and how often.
        collectives: bytes that each rank sends in a ring, and how often.
        saved_bytes: for backward, on the fullest rank.
    """

    ranks: int
    operations: tuple[Counter[OperationCost], ...]
    exchanges: Counter[tuple[MessageSize, ...]]
    collectives: Counter[int]
    saved_bytes: int


def step_work(model: nn.Module, shape: Shape, ranks: int) -> StepWork:
    """Follow a step on tensors without data, once for each combination of bands.

    Args:
        model: not converted; left as it is.
        shape: of the whole globe's input, `(B, C, H, W)`.
        ranks: how many bands.

    Raises:
        UserError: the model can't be sharded so.
    """
    rounds = RecordingTransport(0, ranks)
    manager = DomainParallelManager(ranks, ranks, transport=rounds)
    if ranks > 1:
        model = shard_model(copy_model(model), manager, shape)
    found: dict[tuple[int, ...], tuple[Counter[OperationCost], int]] = {}
    for rank in range(ranks):
        bands = tuple(partition.sizes[rank] for partition in manager.bands.planned_partitions)
        if bands not in found:
            manager.rank = rank
            manager.transport = rounds = RecordingTransport(
                rank, ranks, manager.bands.planned_partitions
            )
            found[bands] = _count_step(model, manager, shape)
    operations, kept = zip(*found.values(), strict=True)
    # Every run notes the messages of all ranks: the last one's are as good as the first one's.
    return StepWork(ranks, operations, rounds.exchanges, rounds.collectives, max(kept))


def _count_step(
    model: nn.Module, manager: DomainParallelManager, shape: Shape
) -> tuple[Counter[OperationCost], int]:
    """Return the operations of one rank's step, and the bytes that it keeps for backward."""
    rows = manager.bands[shape[ROW_DIM]].sizes[manager.domain_rank]
    band = (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])
    with use_meta_tensors():
        model = copy_to_meta(model)
        model.train()
        for layer in row_layers(model).values():
            layer.forget_exchanges()
        saved = SavedTensors([*model.parameters(), *model.buffers()])
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        x = torch.empty(band, dtype=dtype, device="meta")
        operations = OperationCounter()
        with operations:
            with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda kept: kept):
                made = model(x)
            torch.autograd.backward(made, torch.empty_like(made))
    return operations.counts, saved.bytes


def optimiser_step_work(model: nn.Module) -> Counter[OperationCost]:
    """Return the operations of an update of all parameters by AdamW."""
    learning = [p for p in model.parameters() if p.requires_grad]
    weights = [nn.Parameter(torch.empty_like(p, device="meta")) for p in learning]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimiser = torch.optim.AdamW(weights, foreach=True)
    optimiser.step()  # makes the moments
    operations = OperationCounter()
    with operations:
        optimiser.step()
    return operations.counts
