"""One rank's training step without data, other ranks or memory: what is sent, what is kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from credit_dp.domain_parallel.fake_run import Before
from credit_dp.domain_parallel.layers.row_layer import Bands, RowLayer
from credit_dp.domain_parallel.least import Least
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.plan import Shape, is_banded
from credit_dp.domain_parallel.running import announced
from credit_dp.domain_parallel.shape_memo import ShapeMemo, tensors_in
from credit_dp.domain_parallel.tally import Sent, Tally

# Messages outside the layers: of a module from `custom_converters`, say.
ELSEWHERE = "(elsewhere)"


@final
@dataclass(frozen=True)
class DryRun:
    """What all ranks send in a step, by layer, and the bytes that one rank saves for backward.

    `sent_bytes` of rows, and the `least_bytes` that could be, are of all ranks in the whole step,
    by the global rows of the input of the layers that send them.
    """

    forward: dict[str, tuple[Sent, ...]]
    backward: dict[str, tuple[Sent, ...]]
    saved_bytes: int
    sent_bytes: Mapping[int, int]
    least_bytes: Mapping[int, int]


def dry_run(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    rank: int,
) -> DryRun:
    """Run a planned model's training step as one of the ranks, on tensors without data.

    Args:
        model: converted and planned; left as it is.
        manager: the one that it was converted with.
        shapes: of the whole globe's inputs, which need no gradient.
        rank: whose band is taken.
    """
    return dry_runs(model, manager, shapes, [rank])[0]


def dry_runs(
    model: nn.Module,
    manager: DomainParallelManager,
    shapes: Sequence[Shape],
    ranks: Sequence[int],
) -> list[DryRun]:
    """Run the step of `dry_run` as each of these ranks.

    Only the first one's has a backward, which sends for all ranks. What is saved for it is known
    before.
    """
    place = manager.rank, manager.transport
    found: list[DryRun] = []
    try:
        with dataless():
            empty = without_data(model)
            before = Before(empty)
            for rank in ranks:
                manager.rank = rank
                found.append(_step(empty, manager, shapes, backward=not found))
                before.restore()
    finally:
        manager.rank, manager.transport = place
    return found


@contextmanager
def dataless() -> Iterator[None]:
    """Let code run on tensors without data; torch's random numbers stay where they were."""
    mode = _Dataless()
    with mode, torch.random.fork_rng(devices=[]):
        yield


@final
class _Dataless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets tensors that code makes on the CPU meet those that have no data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memo = ShapeMemo()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while planning: spare every operation torch's check of that."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation without data if one of its operands has none."""
        given = (args, kwargs or {})
        devices = {
            x.is_meta for operands in (args, given[1].values()) for x in tensors_in(operands)
        }
        if len(devices) > 1:
            given = tree_map_only(Tensor, lambda x: x if x.is_meta else _shape_only(x), given)
        return self._memo.run(func, *given)


def _step(
    model: nn.Module, manager: DomainParallelManager, shapes: Sequence[Shape], backward: bool
) -> DryRun:
    model.train()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    bands = [_band(shape, manager) for shape in shapes]
    inputs = [torch.empty(band, dtype=dtype, device="meta") for band in bands]
    saved = Saved([*model.parameters(), *model.buffers()])
    with _tallied(model, manager) as tallies:
        with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
            made = [x for x in tree_leaves(model(*inputs)) if isinstance(x, Tensor)]
        forward = tallies.by_layer()
        made = [x for x in made if x.requires_grad]
        if made and backward:
            torch.autograd.backward(made, [torch.empty_like(x) for x in made])
    back = {
        name: tuple(a - b for a, b in zip(sent, forward[name], strict=True))
        for name, sent in tallies.by_layer().items()
    }
    return DryRun(forward, back, saved.bytes, tallies.by_height(), tallies.least.bytes)


def _band(shape: Shape, manager: DomainParallelManager) -> Shape:
    if not is_banded(shape):
        return shape
    rows = manager.bands[shape[ROW_DIM]].sizes[manager.domain_rank]
    return (*shape[:ROW_DIM], rows, *shape[ROW_DIM + 1 :])


@final
class _Tallies:
    """A transport for each layer and each height of its input, and one for what is elsewhere."""

    def __init__(self, names: Iterable[str], manager: DomainParallelManager) -> None:
        self.manager = manager
        self.least = Least()
        self.elsewhere = self._tally()
        self._of: dict[str, dict[int | None, Tally]] = {name: {} for name in names}

    def enter(self, name: str, height: int | None) -> None:
        """Count for a layer from now on; backward counts where its forward did."""
        known = self._of[name]
        if height not in known:
            known[height] = self._tally()
        self.manager.transport = known[height]

    def leave(self) -> None:
        """Count for no layer."""
        self.manager.transport = self.elsewhere

    def by_layer(self) -> dict[str, tuple[Sent, ...]]:
        """Return what each rank has sent so far for each layer, and elsewhere."""
        nothing = (Sent(),) * self.manager.domain_parallel_size
        sums = {name: [t.sent for t in known.values()] for name, known in self._of.items()}
        return {ELSEWHERE: self.elsewhere.sent} | {
            name: tuple(sum(of_rank, Sent()) for of_rank in zip(nothing, *sent, strict=True))
            for name, sent in sums.items()
        }

    def by_height(self) -> dict[int, int]:
        """Return the bytes of rows that all ranks have sent, by the rows of the layer's input."""
        sums: Counter[int] = Counter()
        for known in self._of.values():
            for height, tally in known.items():
                if height is not None:
                    sums[height] += sum(sent.bytes for sent in tally.sent)
        return sums

    def _tally(self) -> Tally:
        manager = self.manager
        return Tally(manager.rank, manager.domain_parallel_size, manager.bands.known)


@contextmanager
def _tallied(model: nn.Module, manager: DomainParallelManager) -> Iterator[_Tallies]:
    """Count what each layer sends while the model runs."""
    layers = row_layers(model)
    tallies = _Tallies(layers, manager)
    tallies.leave()
    with ExitStack() as stack:
        for name, layer in layers.items():
            layer.forget_exchanges()

            def enter(layer: RowLayer, args: tuple[Any, ...], name: str = name) -> None:
                bands = _bands(layer, args)
                tallies.enter(name, None if bands is None else bands.taken.height)

            def leave(layer: RowLayer, args: tuple[Any, ...], made: Any) -> None:
                tallies.leave()
                bands = _bands(layer, args)
                if bands is not None:
                    tallies.least.add(layer, bands, args[0], made)

            stack.callback(layer.register_forward_pre_hook(enter).remove)
            # Always: what is computed again stops at the last tensor needed, inside a layer.
            hook = layer.register_forward_hook(leave, always_call=True)
            stack.callback(hook.remove)
        yield tallies


def _bands(layer: RowLayer, args: tuple[Any, ...]) -> Bands | None:
    """Return the bands of a call; None if no rows meet in it."""
    return layer.bands(*args) if args and layer._planned else None


def row_layers(model: nn.Module) -> dict[str, RowLayer]:
    """Return the sharded layers of a planned model by path, and those of `functional` by call."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RowLayer)}
    calls = (items for current in announced(model) for items in current.layers.items())
    return layers | {call: layer for (call, _), layer in calls}


@final
class Saved:
    """The bytes of all tensors saved for backward, each storage once, those of `own` left out."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        # Holds on to the storages: the address of a freed one would be given out again.
        self._known = {x.untyped_storage()._cdata: x.untyped_storage() for x in own}
        self.bytes = 0

    def add(self, x: Tensor) -> Tensor:
        """Count one."""
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage
            self.bytes += storage.nbytes()
        return x


def without_data(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters, buffers and other tensors have shapes only."""
    return copy.deepcopy(model, {id(x): _shape_only(x) for x in tensors_of(model)})


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters, buffers and other tensors that modules of a model hold."""
    modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in modules:
        if module is not None:
            tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return tensors


def _shape_only(x: Tensor) -> Tensor:
    empty = torch.empty_like(x, device="meta", requires_grad=False)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
