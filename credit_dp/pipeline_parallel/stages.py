"""This rank's stages of a model: copies of it without what other stages use."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.dry_run import dataless, tensors_of, without_data
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.tally import Tally
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel, State
from credit_dp.pipeline_parallel.costs import float_type, segmented
from credit_dp.pipeline_parallel.elsewhere import Elsewhere


@final
@dataclass(frozen=True)
class Slot:
    """A tensor of the state that stages hand on: its shape for one sample, which comes first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def empty(self, samples: int, device: torch.device | str) -> Tensor:
        """Return a tensor for so many samples, as a stage takes or makes it."""
        shape = (samples, *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device=device, requires_grad=self.has_gradient)


Slots = tuple[Slot, ...]


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
    takes: Slots
    makes: Slots
    result: Slots

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
    whole = segmented(model)
    _check_owners(whole, cuts)
    ends = _states(whole, manager, cuts, shape)
    mine = range(manager.pipeline_rank, len(cuts), manager.pipeline_parallel_size)
    return [
        Stage(at, len(cuts), _part(whole, cuts, at), ends[at], ends[at + 1], ends[-1])
        for at in mine
    ]


def _part(model: SegmentedModel, cuts: Sequence[slice], stage: int) -> SegmentedModel:
    part = copy.deepcopy(model, {id(x): x for x in tensors_of(model)})
    part.part = cuts[stage]
    paths = _paths(part, cuts)
    for path in {path for of_stage in paths for path in of_stage} - paths[stage]:
        parent_path, _, name = path.rpartition(".")
        parent = part.get_submodule(parent_path)
        if getattr(parent, name) is not None:  # a part that this model does without
            setattr(parent, name, Elsewhere(path, stage))
    return part


def _paths(model: SegmentedModel, cuts: Sequence[slice]) -> list[set[str]]:
    """Return the modules that the segments of each stage use."""
    segments = model.segments()
    return [{path for segment in segments[cut] for path in segment.modules} for cut in cuts]


def _check_owners(model: SegmentedModel, cuts: Sequence[slice]) -> None:
    """Refuse a parameter of no stage, or of several: its gradients would have to be added up."""
    paths = _paths(model, cuts)
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


def _states(
    model: SegmentedModel,
    manager: DomainParallelManager,
    cuts: Sequence[slice],
    shape: Sequence[int],
) -> list[Slots]:
    """Return the state before, between and after the stages, for one sample of this rank's band."""
    band = [1, *shape[1:]]
    band[ROW_DIM] = manager.partition(shape[ROW_DIM]).sizes[manager.domain_rank]
    state: State = (torch.empty(band, dtype=float_type(model), device="meta"),)
    slots = [_slots(state, "the input")]
    empty = segmented(without_data(model))
    with dataless(), _nothing_sent(manager):
        for stage in range(len(cuts)):
            received = [x.detach().requires_grad_(x.requires_grad) for x in state]
            made = _part(empty, cuts, stage)(*received)
            state = made if isinstance(made, tuple) else (made,)
            slots.append(_slots(state, f"stage {stage}"))
    return slots


def _slots(state: State, where: str) -> Slots:
    odd = next((x.shape for x in state if not x.ndim or x.shape[0] != 1), None)
    if odd is not None:
        raise UserError(
            f"parallel.pipeline: {where} makes a tensor of shape {tuple(odd)} of one sample. Every "
            "tensor between segments needs samples in its first dimension."
        )
    return tuple(Slot(tuple(x.shape), x.dtype, x.requires_grad) for x in state)


@contextmanager
def _nothing_sent(manager: DomainParallelManager) -> Iterator[None]:
    """Let this rank run its band of a converted model alone, where only shapes matter."""
    transport, size = manager.transport, manager.domain_parallel_size
    manager.transport = Tally(manager.domain_rank, size, manager.bands.known)
    try:
        yield
    finally:
        manager.transport = transport
