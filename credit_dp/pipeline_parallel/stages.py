"""This rank's stages of a model: where it is cut, and copies without what other stages use."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from credit_dp.checks import did_you_mean
from credit_dp.domain_parallel.costs.report import (
    SavedTensors,
    copy_to_meta,
    row_layers,
    tensors_of,
    use_meta_tensors,
)
from credit_dp.domain_parallel.count_transport import CountingTransport, RankTraffic
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel, SegmentState


def as_segmented(model: nn.Module) -> SegmentedModel:
    """Return the model, if it says where it may be cut.

    Raises:
        UserError: it does not.
    """
    if not isinstance(model, SegmentedModel):
        raise UserError(
            f"parallel.pipeline: a pipeline needs a model in segments, {type(model).__name__} "
            "declares no segments. Derive it from SegmentedModel, or use parallel.pipeline=1."
        )
    return model


def parameter_dtype(model: nn.Module) -> torch.dtype | None:
    """Return what a model computes in; None if nothing tells."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def segment_costs(model: nn.Module, shape: Sequence[int]) -> dict[str, int]:
    """Return the multiply-adds of each segment's forward, estimated without data.

    Convolutions, matrix products and attention count; what acts on each number alone does not.

    Args:
        model: for the whole globe, not converted: then all ranks find the same numbers.
        shape: of the whole globe's input, `(B, C, H, W)`.

    Raises:
        UserError: the model has no segments, or several of one name.
    """
    empty = copy_to_meta(as_segmented(model))
    state: SegmentState = (torch.empty(tuple(shape), dtype=parameter_dtype(model), device="meta"),)
    costs: dict[str, int] = {}
    with use_meta_tensors(), torch.no_grad():
        for segment in as_segmented(empty).segments():
            if segment.name in costs:
                raise UserError(
                    f"parallel.pipeline: {type(model).__name__} has several segments called "
                    f"{segment.name}. Name each after a module of its own."
                )
            with FlopCounterMode(display=False) as counter:
                state = segment.run(state)
            costs[segment.name] = counter.get_total_flops() // 2
    return costs


def stage_slices(
    costs: Mapping[str, int], stages: int, named: Sequence[str] | None = None, *, virtual: int = 1
) -> list[slice]:
    """Return the segments of each stage: the dearest stage as cheap as can be, or as named.

    Args:
        costs: of all segments, in order.
        stages: of all ranks of the pipeline together.
        named: the first segment of every stage but the first.
        virtual: stages of each rank, for the message.

    Raises:
        UserError: there are fewer segments than stages, or the names do not fit.
    """
    names = list(costs)
    if len(names) < stages:
        of_each = f" with {virtual} stages of each rank" if virtual > 1 else ""
        raise UserError(
            f"parallel.pipeline: {stages} stages need as many segments, the model has "
            f"{len(names)}. Choose at most {len(names) // virtual}{of_each}."
        )
    starts = _balanced_starts(list(costs.values()), stages) if named is None else [0]
    if named is not None:
        _check_names(names, stages, named)
        starts += [names.index(name) for name in named]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(names)])]


def _balanced_starts(costs: Sequence[int], stages: int) -> list[int]:
    """Return where the stages begin; of equally good cuts, the earliest."""
    sums = [0, *accumulate(costs)]
    ends = range(1, len(sums))
    # Of the segments before each end: what the dearest stage costs, and where stages begin.
    best = {end: (sums[end], [0]) for end in ends}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut])
                for cut in range(stage, end)
            )
            for end in ends[stage:]
        }
    return best[len(costs)][1]


def _check_names(names: Sequence[str], stages: int, named: Sequence[str]) -> None:
    every = f"The segments are {', '.join(names)}."
    unknown = next((name for name in named if name not in names), None)
    if unknown is not None:
        raise UserError(
            f"parallel.stages: the model has no segment {unknown!r}.{did_you_mean(unknown, names)} "
            f"{every}"
        )
    if len(named) != stages - 1:
        raise UserError(
            f"parallel.stages: needs the first segment of each of the {stages} stages but the "
            f"first, {stages - 1} in all, got {len(named)}. {every}"
        )
    for before, name in pairwise([names[0], *named]):
        if names.index(name) <= names.index(before):
            raise UserError(
                f"parallel.stages: needs segments in the model's order, the first one not among "
                f"them, got {', '.join(named)}. {every}"
            )


@final
class OtherStageModule(nn.Module):
    """Stands for a module that only other stages of the pipeline use.

    Args:
        path: of the module.
        stage: this one.

    Raises:
        UserError: it is called.
    """

    def __init__(self, path: str, stage: int) -> None:
        super().__init__()
        self.path, self.stage = path, stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run."""
        raise UserError(
            f"parallel.pipeline: stage {self.stage} calls {self.path}, which only segments of "
            f"other stages say they use. Add {self.path} to the modules of the segment that calls "
            "it, or cut elsewhere with parallel.stages."
        )

    def extra_repr(self) -> str:
        """Describe what is missing."""
        return self.path


@final
@dataclass(frozen=True)
class StateSpec:
    """A tensor of the state that stages hand on: its shape for one sample, which comes first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def empty(self, samples: int, device: torch.device | str) -> Tensor:
        """Return a tensor for so many samples, as a stage takes or makes it."""
        shape = (samples, *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device=device, requires_grad=self.has_gradient)


StateSpecs = tuple[StateSpec, ...]


@final
@dataclass(frozen=True)
class Stage:
    """A stretch of a model, on this rank's band of rows.

    Attributes:
        index: which one, 0 takes the input.
        count: of all stages of the model.
        module: the model without the modules of other stages; names are those of the whole model.
        takes: the state that it is given.
        makes: the state that it hands on.
        result: what the last stage makes.
    """

    index: int
    count: int
    module: SegmentedModel
    input_specs: StateSpecs
    output_specs: StateSpecs
    model_output_specs: StateSpecs

    @property
    def is_first(self) -> bool:
        """Whether it takes the model's input."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes the model's output."""
        return self.index == self.count - 1


def cut_model(
    model: nn.Module, manager: DomainParallelManager, cuts: Sequence[slice], shape: Sequence[int]
) -> list[Stage]:
    """Return this rank's stages: every so many-th one, as many as the pipeline has ranks.

    Nothing is sent, and nothing is computed but shapes. Parameters and buffers are the model's own.

    Args:
        model: the plain one or, with domains, the converted one.
        manager: the one that it was converted with.
        cuts: the segments of every stage.
        shape: of the whole globe's input, `(B, C, H, W)`.

    Raises:
        UserError: the model has no segments, or they can't be told apart at these cuts.
    """
    whole = as_segmented(model)
    _check_owners(whole, cuts)
    ends = _boundary_specs(whole, manager, cuts, shape)
    mine = range(manager.pipeline_rank, len(cuts), manager.pipeline_parallel_size)
    return [
        Stage(at, len(cuts), _stage_module(whole, cuts, at), ends[at], ends[at + 1], ends[-1])
        for at in mine
    ]


def _stage_module(model: SegmentedModel, cuts: Sequence[slice], stage: int) -> SegmentedModel:
    part = copy.deepcopy(model, {id(x): x for x in tensors_of(model)})
    part.active_segments = cuts[stage]
    paths = _module_paths(part, cuts)
    for path in {path for of_stage in paths for path in of_stage} - paths[stage]:
        parent_path, _, name = path.rpartition(".")
        parent = part.get_submodule(parent_path)
        if getattr(parent, name) is not None:  # a part that this model does without
            setattr(parent, name, OtherStageModule(path, stage))
    return part


def _module_paths(model: SegmentedModel, cuts: Sequence[slice]) -> list[set[str]]:
    """Return the modules that the segments of each stage use."""
    segments = model.segments()
    return [{path for segment in segments[cut] for path in segment.modules} for cut in cuts]


def _check_owners(model: SegmentedModel, cuts: Sequence[slice]) -> None:
    """Refuse a parameter of no stage, or of several: its gradients would have to be added up."""
    paths = _module_paths(model, cuts)
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners = [
            stage
            for stage, of_stage in enumerate(paths)
            if any(name.startswith(f"{path}.") for path in of_stage)
        ]
        if not owners:
            raise UserError(
                f"parallel.pipeline: no segment of {type(model).__name__} says that it uses the "
                f"parameter {name}. Name its module, which can't be the model itself, among the "
                "modules of the segment that does."
            )
        other, stage = seen.setdefault(id(parameter), (name, owners[0]))
        if {stage, *owners} != {stage}:
            among = sorted({stage, *owners})
            raise UserError(
                f"parallel.pipeline: the parameter {name}"
                f"{f' (also {other})' if other != name else ''} is used by stages "
                f"{', '.join(map(str, among))}, it can only be in one. Choose cuts that keep its "
                "segments together with parallel.stages."
            )


def _boundary_specs(
    model: SegmentedModel,
    manager: DomainParallelManager,
    cuts: Sequence[slice],
    shape: Sequence[int],
) -> list[StateSpecs]:
    """Return the state before, between and after the stages, for one sample of this rank's band."""
    band = [1, *shape[1:]]
    band[ROW_DIM] = manager.partition(shape[ROW_DIM]).sizes[manager.domain_rank]
    state: SegmentState = (torch.empty(band, dtype=parameter_dtype(model), device="meta"),)
    slots = [_state_specs(state, "the input")]
    empty = as_segmented(copy_to_meta(model))
    with use_meta_tensors(), _without_communication(manager):
        for stage in range(len(cuts)):
            received = [x.detach().requires_grad_(x.requires_grad) for x in state]
            made = _stage_module(empty, cuts, stage)(*received)
            state = made if isinstance(made, tuple) else (made,)
            slots.append(_state_specs(state, f"stage {stage}"))
    return slots


def _state_specs(state: SegmentState, where: str) -> StateSpecs:
    odd = next((x.shape for x in state if not x.ndim or x.shape[0] != 1), None)
    if odd is not None:
        raise UserError(
            f"parallel.pipeline: {where} makes a tensor of shape {tuple(odd)} of one sample. Every "
            "tensor between segments needs samples in its first dimension."
        )
    return tuple(StateSpec(tuple(x.shape), x.dtype, x.requires_grad) for x in state)


@contextmanager
def _without_communication(manager: DomainParallelManager) -> Iterator[None]:
    """Let this rank run its band of a converted model alone, where only shapes matter."""
    transport, size = manager.transport, manager.domain_parallel_size
    manager.transport = CountingTransport(
        manager.domain_rank, size, manager.bands.planned_partitions
    )
    try:
        yield
    finally:
        manager.transport = transport


@final
@dataclass(frozen=True)
class StageFootprint:
    """What one micro-batch takes on a stage of a pipeline.

    Attributes:
        kept_bytes: for backward, on one rank: what autograd saves, and what the stage makes. The
            state that it is given is not in it: `state_bytes` counts that.
        sent: by each rank of the domain, forward and backward.
    """

    saved_bytes: int
    sent: tuple[RankTraffic, ...]


def measure_stage(stage: Stage, manager: DomainParallelManager, samples: int) -> StageFootprint:
    """Run a stage forward and backward on tensors without data, as one rank of the domain.

    Args:
        stage: its module is left as it is.
        manager: the one that the model was converted with; its `rank` says whose band it is.
        samples: of a micro-batch.
    """
    transport, size = manager.transport, manager.domain_parallel_size
    tally = CountingTransport(manager.domain_rank, size, manager.bands.planned_partitions)
    manager.transport = tally
    try:
        with use_meta_tensors():
            return StageFootprint(_saved_for_backward(stage, samples), tally.sent)
    finally:
        manager.transport = transport


def _saved_for_backward(stage: Stage, samples: int) -> int:
    model = copy_to_meta(stage.module)
    model.train()
    for layer in row_layers(model).values():
        layer.forget_exchanges()
    given = [slot.empty(samples, "meta") for slot in stage.input_specs]
    own = [*model.parameters(), *model.buffers()]
    saved = SavedTensors(own if stage.is_first else [*own, *given])
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x):
        made = model(*given)
    made = made if isinstance(made, tuple) else (made,)
    for x in made:
        saved.add(x)
    ends = [x for x in made if x.requires_grad]
    torch.autograd.backward(ends, [torch.empty_like(x) for x in ends])
    return saved.bytes


def state_bytes(slots: StateSpecs, samples: int, *, gradients: bool = False) -> int:
    """Return the bytes of a state that is handed on, or of the gradients that come back for it."""
    tensors = [slot.empty(samples, "meta") for slot in slots if slot.has_gradient or not gradients]
    return sum(tensor.nbytes for tensor in tensors)
