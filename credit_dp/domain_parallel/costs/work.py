"""The work of a training step on a domain: operations, messages and saved memory.

A step runs on tensors without data, once for each combination of bands that a rank may have. The
prediction of step times is built on these counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from credit_dp.domain_parallel.build import shard_model
from credit_dp.domain_parallel.costs.report import copy_to_meta, row_layers, use_meta_tensors
from credit_dp.domain_parallel.count_transport import CountingTransport, MessageSize, Overlap
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.plan import Shape
from credit_dp.domain_parallel.planning.trace import (
    copy_model,
    dtype_and_device,
    tensor_leaves,
    user_line_of,
)
from credit_dp.domain_parallel.recomputation import (
    RecomputationCounter,
    SavedTensors,
    checkpointed,
    count_recomputation,
)
from credit_dp.errors import UserError

aten = torch.ops.aten
# Operations that allocate memory without touching it; like views, they start no kernel.
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
# Views that their schema does not declare as such.
UNDECLARED_VIEWS = {aten._unsafe_view}


class OperationCost(NamedTuple):
    """One operation: floating-point operations of products, bytes read and written."""

    flops: int
    bytes: int


@final
class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on meta tensors inside the context, by their cost.

    Views and allocations are counted in `views`: they start no kernel. Every operand is read once
    and every result written once, as if there were no caches; an expanded operand has the size of
    its storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[OperationCost] = Counter()
        self.views = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run and count an operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = tensor_leaves((args, kwargs))
        results = tensor_leaves(result)
        on_meta = any(x.is_meta for x in (*operands, *results))
        if on_meta and is_free(func):
            self.views += 1
        elif on_meta:
            # Operations on lists (`_foreach_*_`) return nothing and write to their first argument.
            written = results or tensor_leaves(args[:1])
            bytes_touched = sum(map(_bytes, operands)) + sum(map(_bytes, written))
            packet = func._overloadpacket
            flops = _flops(packet, args, kwargs, result)
            self.counts[OperationCost(flops, bytes_touched)] += 1
        return result


def _bytes(x: Tensor) -> int:
    return min(x.nbytes, x.untyped_storage().nbytes())


def is_free(func: Any) -> bool:
    """Whether an operation is a view or an allocation."""
    if func.namespace != "aten" or func._overloadpacket in ALLOCATIONS | UNDECLARED_VIEWS:
        return True
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if packet is aten.convolution_backward:
        return _convolution_backward_flops(*args)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def _convolution_backward_flops(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Return the FLOPs of a convolution's backward: those of the forward for each gradient.

    torch's own formula for the weight's gradient ignores groups.
    """
    transposed = rest[4]
    mask = rest[-1]
    forward_flops = conv_flop_count([*x.shape], [*weight.shape], [*grad.shape], transposed)
    return forward_flops * sum(map(bool, mask[:2]))


@final
@dataclass(frozen=True)
class StepWork:
    """Forward and backward of one micro-batch on a domain of `ranks` ranks.

    Attributes:
        operations: for each combination of bands that a rank may have, the number of operations by
            their cost.
        views: for each of these combinations, the number of views and allocations.
        exchanges: the number of times that a set of messages is sent at once.
        overlaps: the same, with the operations that a rank starts before it waits for them.
        collectives: the number of collectives by the bytes that each rank sends in a ring.
        saved_bytes: tensors saved for backward, on the rank with most of them; with those of a
            module that is computed again.
    """

    ranks: int
    operations: tuple[Counter[OperationCost], ...]
    views: tuple[int, ...]
    exchanges: Counter[tuple[MessageSize, ...]]
    overlaps: Counter[Overlap]
    collectives: Counter[int]
    saved_bytes: int


def step_work(
    model: nn.Module,
    shape: Shape,
    ranks: int,
    whole_ops: str = "allow",
    recomputed: Sequence[str] = (),
) -> StepWork:
    """Return the work of a step, from runs on meta tensors for each combination of bands.

    Args:
        model: a model that is not converted; it does not change.
        shape: shape of the whole globe's input, `(B, C, H, W)`.
        ranks: number of bands.
        whole_ops: as for `convert_to_domain_parallel`.
        recomputed: paths of the modules that backward computes again; "" stands for the model.

    Raises:
        UserError: the model can't be sharded over `ranks` ranks.
    """
    transport = CountingTransport(0, ranks)
    manager = DomainParallelManager(ranks, ranks, transport=transport)
    if ranks > 1:
        # A limit of memory is for the plan to check: this only counts work.
        model = shard_model(copy_model(model), manager, shape, whole_ops, None)
    by_bands: dict[tuple[int, ...], tuple[Counter[OperationCost], int, int]] = {}
    for rank in range(ranks):
        bands = tuple(partition.sizes[rank] for partition in manager.bands.planned_partitions)
        if bands not in by_bands:
            manager.rank = rank
            manager.transport = transport = CountingTransport(
                rank, ranks, manager.bands.planned_partitions
            )
            with checkpointed(model, recomputed):
                by_bands[bands] = _count_step(model, manager, shape)
    operations, views, saved = zip(*by_bands.values(), strict=True)
    # Every run records the messages of all ranks, so those of the last run serve.
    return StepWork(
        ranks,
        operations,
        views,
        transport.exchanges,
        transport.overlaps,
        transport.ring_collectives,
        max(saved),
    )


def _count_step(
    model: nn.Module, manager: DomainParallelManager, shape: Shape
) -> tuple[Counter[OperationCost], int, int]:
    """Return the operations of one rank's step, its views, and the bytes saved for backward."""
    rows = manager.bands[shape[ROW_DIM]].sizes[manager.domain_rank]
    band = (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])
    with use_meta_tensors():
        model = copy_to_meta(model)
        model.train()
        for layer in row_layers(model).values():
            layer.forget_exchanges()
        held = [*model.parameters(), *model.buffers()]
        saved = SavedTensors(held)
        dtype, _ = dtype_and_device(model)
        x = torch.empty(band, dtype=dtype, device="meta")
        operations = OperationCounter()
        again = RecomputationCounter(saved.add, held, operations.counts)
        if isinstance(manager.transport, CountingTransport):
            manager.transport.operations = operations.counts
        with operations, count_recomputation(again):
            try:
                with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
                    y = model(x)
            except (RuntimeError, NotImplementedError) as error:  # as `item` on the meta device
                raise UserError(
                    f"--machine: {user_line_of(error)} needs the values of a tensor, so that the "
                    "time of a step can't be predicted. Leave --machine out."
                ) from error
            torch.autograd.backward(y, torch.empty_like(y))
    counts = operations.counts + again.repeated
    # What is computed again has as many views for each operation as all of the step.
    views = operations.views * counts.total() // max(1, operations.counts.total())
    return counts, views, saved.bytes + again.received + again.recomputed


def optimiser_step_work(model: nn.Module) -> Counter[OperationCost]:
    """Return the operations of one AdamW step on all trainable parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    # On the meta device: the update of a model of any size takes no memory.
    weights = [nn.Parameter(torch.empty_like(p, device="meta")) for p in trainable]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimiser = torch.optim.AdamW(weights, foreach=True)
    optimiser.step()  # allocates the moments
    operations = OperationCounter()
    with operations:
        optimiser.step()
    return operations.counts
