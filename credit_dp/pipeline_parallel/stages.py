"""Cut a model into the stages of a pipeline.

In this order: the cost of each segment (`segment_costs`), the segments of each stage
(`stage_slices`), this rank's stages as modules (`cut_model`), and the memory and traffic of a stage
for plans (`measure_stage`). All of it runs on tensors without data: only shapes are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from credit_dp.checks import did_you_mean
from credit_dp.domain_parallel.band_tensor.boundary import (
    attach_domain,
    attached_domain,
    detach_domain,
    rows_outside,
)
from credit_dp.domain_parallel.band_tensor.tensor import Band, Domain
from credit_dp.domain_parallel.count_transport import RankTraffic
from credit_dp.domain_parallel.dry_run import DryRun, OutputSpec, dry_run
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.parameter_check import remove_parameter_check
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.model_plan import Shape
from credit_dp.domain_parallel.planning.trace import (
    dtype_and_device,
    preserve_model,
    use_fake_tensors,
)
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel, SegmentState


def as_segmented(model: nn.Module) -> SegmentedModel:
    """Return the model as a `SegmentedModel`."""
    if not isinstance(model, SegmentedModel):
        raise UserError(
            f"parallel.pipeline: a pipeline needs a model in segments, but {type(model).__name__} "
            "declares no segments. Derive it from SegmentedModel, or use parallel.pipeline=1."
        )
    return model


def segment_costs(model: nn.Module, shape: Sequence[int]) -> dict[str, int]:
    """Return the multiply-adds of each segment's forward, by the segment's name.

    Convolutions, matrix products and attention count; pointwise operations do not.

    Args:
        model: before it is sharded, so that all ranks get the same costs.

    Raises:
        UserError: the model has no segments, or several of one name.
    """
    segmented = as_segmented(model)
    dtype, device = dtype_and_device(model)
    costs: dict[str, int] = {}
    # torch counts the products of attention only where it computes them one by one.
    with preserve_model(model), use_fake_tensors(model), sdpa_kernel(SDPBackend.MATH):
        state: SegmentState = (torch.empty(tuple(shape), dtype=dtype, device=device),)
        for segment in segmented.segments():
            if segment.name in costs:
                raise UserError(
                    f"parallel.pipeline: {type(model).__name__} has several segments called "
                    f"{segment.name}. Name each segment after a different module."
                )
            with FlopCounterMode(display=False) as counter:
                state = segment.run(state)
            costs[segment.name] = counter.get_total_flops() // 2
    return costs


def stage_slices(
    costs: Mapping[str, int], stages: int, named: Sequence[str] | None = None, *, virtual: int = 1
) -> list[slice]:
    """Return the segments of each stage, as named, or such that the largest cost is smallest.

    Args:
        named: the first segment of every stage but the first; None to balance the costs.

    Raises:
        UserError: there are fewer segments than stages, or the names do not fit.
    """
    names = list(costs)
    if len(names) < stages:
        with_virtual = f" with {virtual} stages on each rank" if virtual > 1 else ""
        raise UserError(
            f"parallel.pipeline: {stages} stages need as many segments, but the model has "
            f"{len(names)}. Choose at most {len(names) // virtual}{with_virtual}."
        )
    starts = _balanced_starts(list(costs.values()), stages) if named is None else [0]
    if named is not None:
        _check_names(names, stages, named)
        starts += [names.index(name) for name in named]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(names)])]


def _balanced_starts(costs: Sequence[int], stages: int) -> list[int]:
    sums = [0, *accumulate(costs)]
    ends = range(1, len(sums))
    # Dynamic programming over the number of stages. For the segments before each end: the largest
    # cost of a stage, and the first segments of the stages, for the best cut.
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
    all_segments = f"The segments are {', '.join(names)}."
    unknown = next((name for name in named if name not in names), None)
    if unknown is not None:
        raise UserError(
            f"parallel.stages: the model has no segment {unknown!r}.{did_you_mean(unknown, names)} "
            f"{all_segments}"
        )
    if len(named) != stages - 1:
        raise UserError(
            f"parallel.stages: needs the first segment of each of the {stages} stages but the "
            f"first, {stages - 1} in all, got {len(named)}. {all_segments}"
        )
    for before, name in pairwise([names[0], *named]):
        if names.index(name) <= names.index(before):
            raise UserError(
                f"parallel.stages: needs segments in the model's order, without the first one, "
                f"got {', '.join(named)}. {all_segments}"
            )


@final
class OtherStageModule(nn.Module):
    """Takes the position of a module that only other stages of the pipeline use."""

    def __init__(self, path: str, stage: int) -> None:
        super().__init__()
        self.path = path
        self.stage = stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error."""
        raise UserError(
            f"parallel.pipeline: stage {self.stage} calls {self.path}, which only segments of "
            f"other stages list among their modules. Add {self.path} to the modules of the segment "
            "that calls it, or change parallel.stages."
        )

    def extra_repr(self) -> str:
        """Return the path of the missing module."""
        return self.path


@final
@dataclass(frozen=True)
class StateSpec:
    """A tensor of the state between stages.

    Attributes:
        shape: for one sample, with the samples' dim of size 1 first.
        has_gradient: whether backward sends a gradient for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def empty(self, samples: int, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor for this number of samples."""
        shape = (samples, *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device=device, requires_grad=self.has_gradient)


StateSpecs = tuple[StateSpec, ...]


@final
@dataclass(frozen=True)
class Stage:
    """One stage of a model, on this rank's band of rows.

    Attributes:
        module: the model without the modules of other stages; names are those of the full model.
        globe_shapes: global shapes of the state before the stage, if it computes on tensors of
            the globe; else None.
    """

    index: int
    count: int
    module: SegmentedModel
    input_specs: StateSpecs
    output_specs: StateSpecs
    model_output_specs: StateSpecs
    globe_shapes: tuple[Shape, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage gets the model's input."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the model's output."""
        return self.index == self.count - 1


def cut_model(
    model: nn.Module, manager: DomainParallelManager, cuts: Sequence[slice], shape: Sequence[int]
) -> list[Stage]:
    """Return this rank's stages; stage `i` belongs to pipeline rank `i` modulo their number.

    Runs the stages on tensors without data and sends nothing. The stages share the model's
    parameters and buffers. If the model computes on tensors of the globe, each stage does. Between
    stages a tensor of fields, or any other with a row for each rank in the last dimension but one,
    is a band.

    Raises:
        UserError: the model has no segments, or stages of these cuts share a parameter.
    """
    segmented = as_segmented(model)
    _check_owners(segmented, cuts)
    domain = attached_domain(segmented)
    dtype, _ = dtype_and_device(segmented)
    states: list[tuple[OutputSpec, ...]] = [(OutputSpec((1, *shape[1:]), dtype, False),)]
    if domain is None:
        band = manager.partition(shape[ROW_DIM]).sizes[manager.domain_rank]
        states = [(OutputSpec((1, *shape[1:ROW_DIM], band, shape[-1]), dtype, False),)]
    for index in range(len(cuts)):
        module = _stage_module(segmented, cuts, index)
        states.append(_run_stage(module, index, states[-1], manager, domain is not None).outputs)
    specs = [
        _state_specs(state, domain, f"stage {index - 1}" if index else "the input")
        for index, state in enumerate(states)
    ]
    local_stages = range(manager.pipeline_rank, len(cuts), manager.pipeline_parallel_size)
    stages = [
        Stage(
            index=index,
            count=len(cuts),
            module=_stage_module(segmented, cuts, index),
            input_specs=specs[index],
            output_specs=specs[index + 1],
            model_output_specs=specs[-1],
            globe_shapes=None if domain is None else tuple(x.shape for x in states[index]),
        )
        for index in local_stages
    ]
    for stage in stages:
        if domain is not None and stage.globe_shapes is not None:
            own = attach_domain(stage.module, manager, stage.globe_shapes, is_stage=True)
            own.decision = domain.decision
    return stages


def _stage_module(model: SegmentedModel, cuts: Sequence[slice], stage: int) -> SegmentedModel:
    # A copy of the modules that shares all tensors: the memo of `deepcopy` maps them to themselves.
    # The copy's hooks refer to the same domain, so that `detach_domain` finds and removes them.
    shared = [*_tensors_of(model), attached_domain(model)]
    module = copy.deepcopy(model, {id(x): x for x in shared})
    detach_domain(module)
    remove_parameter_check(module)  # if a stage raises an error, others wait for its output
    module.active_segments = cuts[stage]
    paths = _module_paths(module, cuts)
    for path in {path for stage_paths in paths for path in stage_paths} - paths[stage]:
        parent_path, _, name = path.rpartition(".")
        parent = module.get_submodule(parent_path)
        if getattr(parent, name) is not None:  # None is an optional module that is switched off
            setattr(parent, name, OtherStageModule(path, stage))
    return module


def _module_paths(model: SegmentedModel, cuts: Sequence[slice]) -> list[set[str]]:
    segments = model.segments()
    return [{path for segment in segments[cut] for path in segment.modules} for cut in cuts]


def _check_owners(model: SegmentedModel, cuts: Sequence[slice]) -> None:
    """Refuse a parameter that belongs to no stage or to several.

    Gradients of several stages would have to be added up, which no rank does.
    """
    paths = _module_paths(model, cuts)
    first_owners: dict[int, tuple[str, int]] = {}  # by id of the parameter: its name and stage
    # Tied parameters occur once under each of their names.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners = [
            stage
            for stage, stage_paths in enumerate(paths)
            if any(name.startswith(f"{path}.") for path in stage_paths)
        ]
        if not owners:
            raise UserError(
                f"parallel.pipeline: no segment of {type(model).__name__} declares a module with "
                f"the parameter {name}. Name its module in the segment that uses it; if that is "
                "the model itself, move the parameter into a submodule and name that."
            )
        other, stage = first_owners.setdefault(id(parameter), (name, owners[0]))
        if {stage, *owners} != {stage}:
            stages = sorted({stage, *owners})
            raise UserError(
                f"parallel.pipeline: the parameter {name}"
                f"{f' (also {other})' if other != name else ''} is used by stages "
                f"{', '.join(map(str, stages))}, but can only be in one. Choose parallel.stages "
                "that keep its segments together."
            )


def _tensors_of(model: nn.Module) -> list[Tensor]:
    modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for module in modules:
        if module is not None:
            tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return tensors


def _run_stage(
    module: SegmentedModel,
    index: int,
    state: Sequence[OutputSpec],
    manager: DomainParallelManager,
    on_globe: bool,
    *,
    backward: bool = False,
) -> DryRun:
    _, device = dtype_and_device(module)

    def inputs(shape_of: Callable[[Shape], Shape]) -> tuple[list[Tensor], dict[str, Any]]:
        return [
            torch.empty(
                shape_of(x.shape) if on_globe else x.shape, dtype=x.dtype, device=device
            ).requires_grad_(x.has_gradient)
            for x in state
        ], {}

    return dry_run(
        module,
        manager,
        [x.shape for x in state],
        inputs,
        rank=manager.domain_rank,
        on_globe=on_globe,
        backward=backward,
        training=True if backward else None,
        stage=index,
    )


def _state_specs(state: Sequence[OutputSpec], domain: Domain | None, where: str) -> StateSpecs:
    wrong = next((x.shape for x in state if not x.shape or x.shape[0] != 1), None)
    if wrong is not None:
        raise UserError(
            f"parallel.pipeline: {where} makes a tensor of shape {tuple(wrong)} of one sample. "
            "Every tensor between segments needs the samples in its first dimension."
        )
    specs = []
    for x in state:
        part = list(x.shape)
        rows = None if domain is None else rows_outside(x.shape, domain)
        if domain is not None and isinstance(rows, Band):
            part[ROW_DIM] = rows.sizes(domain.rank)
        specs.append(StateSpec(tuple(part), x.dtype, x.has_gradient))
    return tuple(specs)


@final
@dataclass(frozen=True)
class StageFootprint:
    """The memory and traffic of one micro-batch on a stage of a pipeline.

    Attributes:
        saved_bytes: kept for backward on one rank: tensors that autograd saves, and the output of
            the stage, but not its input state, which `state_bytes` counts; on the first stage, its
            input too.
        sent: traffic of each rank of the domain, forward and backward.
    """

    saved_bytes: int
    sent: tuple[RankTraffic, ...]


def measure_stage(stage: Stage, manager: DomainParallelManager, samples: int) -> StageFootprint:
    """Return the memory and traffic of a stage, from a dry run of a forward and a backward.

    Args:
        manager: the one that the model was converted with; its `rank` chooses the band.
    """
    shapes = stage.globe_shapes or [spec.shape for spec in stage.input_specs]
    state = [
        OutputSpec((samples, *shape[1:]), spec.dtype, spec.has_gradient)
        for shape, spec in zip(shapes, stage.input_specs, strict=True)
    ]
    on_globe = stage.globe_shapes is not None
    run = _run_stage(stage.module, stage.index, state, manager, on_globe, backward=True)
    traffic = [*run.forward.values(), *run.backward.values()]
    sent = tuple(sum(rank_traffic, RankTraffic()) for rank_traffic in zip(*traffic, strict=True))
    return StageFootprint(run.saved_bytes, sent)


def state_bytes(specs: StateSpecs, samples: int, *, gradients: bool = False) -> int:
    """Return the bytes of a state between stages, or of the gradients that come back for it."""
    tensors = [spec.empty(samples, "meta") for spec in specs if spec.has_gradient or not gradients]
    return sum(tensor.nbytes for tensor in tensors)
