"""A model in stages on several ranks, through which micro-batches go one after the other."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentState
from credit_dp.pipeline_parallel.stages import Stage, StateSpecs
from credit_dp.profiling import BACKWARD, FORWARD, profile_region


class StageAction(NamedTuple):
    """A forward or backward of one of this rank's stages on one micro-batch."""

    forward: bool
    local_stage: int


def schedule_actions(
    schedule: str, rank: int, pipeline: int, microbatches: int, virtual: int = 1
) -> list[StageAction]:
    """Return what a rank does in a step, in order.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        rank: of the pipeline.
        pipeline: ranks.
        microbatches: of a step; for interleaved a multiple of the ranks.
        virtual: stages of each rank.

    Source: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    total = virtual * microbatches
    # Forwards go through the rank's stages in turn, with one micro-batch for each rank at a time.
    parts = [number // pipeline % virtual for number in range(total)]
    if schedule != "interleaved":
        parts = [0] * total
    ahead = {
        "gpipe": total,
        "1f1b": pipeline - rank,
        "interleaved": (virtual - 1) * pipeline + 2 * (pipeline - 1 - rank) + 1,
    }[schedule]
    forwards = [StageAction(True, part) for part in parts]
    backwards = [StageAction(False, virtual - 1 - part) for part in parts]
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + number : ahead + number + 1]]
    return order


def peak_saved_bytes(order: Iterable[StageAction], kept: Sequence[int]) -> int:
    """Return the most bytes that are kept for backward at any time of a step.

    Args:
        order: this rank's.
        kept: bytes of each of its stages for one micro-batch.
    """
    now = most = 0
    for work in order:
        now += kept[work.local_stage] if work.forward else -kept[work.local_stage]
        most = max(most, now)
    return most


def count_gathers(order: Iterable[StageAction]) -> Counter[int]:
    """Return how often the blocks of each part are gathered in a step, if FSDP2 shares them out.

    What is gathered for a backward stays so until after the next forward, for gradients are shared
    out only once.
    """
    gathered: set[int] = set()
    times: Counter[int] = Counter()
    for work in order:
        if work.local_stage not in gathered:
            times[work.local_stage] += 1
        (gathered.discard if work.forward else gathered.add)(work.local_stage)
    return times


def theoretical_bubble(pipeline: int, microbatches: int, virtual: int = 1) -> float:
    """Return the share of a step in which a rank waits, if all stages cost the same.

    The same for GPipe and for 1F1B.

    Args:
        pipeline: ranks.
        microbatches: of a step.
        virtual: stages of each rank.

    Source: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    return (pipeline - 1) / (virtual * microbatches + pipeline - 1)


@final
class Stopwatch:
    """Which share of a span of time was not spent in its busy stretches.

    On a GPU times are those of its own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total: tuple[_Mark, _Mark] | None = None
        self._busy: list[tuple[_Mark, _Mark]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a new span; what was measured before is forgotten."""
        self._busy, self._total = [], None
        start = self._mark()
        yield
        self._total = start, self._mark()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count as busy."""
        start = self._mark()
        yield
        self._busy.append((start, self._mark()))

    def idle_share(self) -> float:
        """Return the idle share of the last span; 0 before the first one."""
        if self._total is None:
            return 0.0
        return 1 - sum(_seconds(*pair) for pair in self._busy) / _seconds(*self._total)

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


_Mark = float | torch.cuda.Event


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    return cast(float, end) - cast(float, start)


Schedule = ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B


@final
class ScheduledStage(PipelineStage):
    """A stage as torch's schedules want it: they are told shapes, and so make no trial run.

    Args:
        stage: of this rank.
        samples: of a micro-batch.
        device: where it computes.
        group: the ranks of the pipeline.
        watch: what runs counts there as busy.
        begin: told which micro-batch comes, before its forward.
    """

    def __init__(
        self,
        stage: Stage,
        samples: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        watch: Stopwatch,
        begin: Callable[[int], None],
    ) -> None:
        super().__init__(
            stage.module,
            stage.index,
            stage.count,
            device,
            input_args=_meta_tensors(stage.input_specs, samples),
            output_args=_meta_tensors(stage.output_specs, samples),
            group=group,
        )
        self._stopwatch, self._begin = watch, begin

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward."""
        self._begin(fwd_chunk_id)
        with (
            self._stopwatch.busy(),
            profile_region(FORWARD),
            _UnwrapUserError(),
            warnings.catch_warnings(),
        ):
            # FSDP2 says so of what a stage hands on untouched; nothing changes it in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch backward."""
        with self._stopwatch.busy(), profile_region(BACKWARD), _UnwrapUserError():
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def build_schedule(
    name: str,
    stages: Sequence[ScheduledStage],
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Schedule:
    """Return the schedule of this rank's stages; gradients are those of the sum of the losses."""
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), microbatches, loss, scale_grads=False)
    kind = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    (stage,) = stages
    return kind(stage, microbatches, loss, scale_grads=False)


@final
class _UnwrapUserError:
    """Raises a user's mistake itself, without what torch's schedules say around it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error.__cause__, UserError):
            raise error.__cause__ from None


def _meta_tensors(slots: StateSpecs, samples: int) -> tuple[Tensor, ...]:
    return tuple(slot.empty(samples, "meta") for slot in slots)


LossFunction = Callable[[Tensor, Tensor], Tensor]
BeginCallback = Callable[[int, int], None]


@final
class Pipeline:
    """This rank's stages, and the schedule by which they work together with those of other ranks.

    Every method is a collective of the ranks of the pipeline.

    Args:
        stages: see `cut_model`; their modules may have been given to `fully_shard`.
        manager: of this rank.
        schedule: gpipe, 1f1b, or interleaved for several stages of each rank.
        microbatches: into which `backward` cuts its samples.

    Raises:
        UserError: the schedule needs more micro-batches.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        manager: DomainParallelManager,
        schedule: str,
        microbatches: int,
    ) -> None:
        ranks = manager.pipeline_parallel_size
        if schedule == "1f1b" and microbatches < ranks:
            raise UserError(
                f"parallel.microbatches: schedule 1f1b needs at least one for each of the {ranks} "
                f"ranks of the pipeline, got {microbatches}. Raise it or use "
                "parallel.schedule=gpipe."
            )
        self._stages = tuple(stages)
        self._manager = manager
        self._kind = schedule
        self._microbatches = microbatches
        self._device = _device(manager)
        self._stopwatch = Stopwatch(self._device)
        self._schedule: Schedule | None = None
        self._samples = 0  # of each call of `backward`, known from the first one on
        self._loss: LossFunction | None = None
        self._begin: BeginCallback | None = None

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """This rank's stretches of the model."""
        return tuple(stage.module for stage in self._stages)

    @property
    def model_output_specs(self) -> StateSpecs:
        """What the last stage makes."""
        return self._stages[0].model_output_specs

    def backward(
        self,
        inputs: Tensor | None,
        target: Tensor | None,
        loss: LossFunction,
        begin: BeginCallback | None = None,
    ) -> Tensor:
        """Add the gradients of all micro-batches' losses to those of this rank's parameters.

        Args:
            inputs: this band's, used on the rank of the first stage.
            target: this band's, used on the rank of the last stage.
            loss: of a micro-batch's output and target; it is differentiated as it is.
            begin: told the number of the part and of the micro-batch before each forward.

        Returns:
            the sum of the micro-batches' losses, zero on ranks without the last stage.

        Raises:
            ValueError: the samples are not as many as in the first call, or do not divide.
        """
        schedule = self._schedule_for(inputs)
        self._loss, self._begin = loss, begin
        losses: list[Tensor] = []
        first, last = self._stages[0].is_first, self._stages[-1].is_last
        with self._stopwatch.measure():
            schedule.step(
                *((inputs,) if first else ()),
                target=target if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
        self._loss = self._begin = None
        zero = torch.zeros((), dtype=self.model_output_specs[0].dtype, device=self._device)
        return sum((x.detach() for x in losses), zero)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return what the whole model makes of this band, on all ranks of the pipeline.

        Args:
            x: used on the rank of the first stage; any number of samples, the same on all ranks.
        """
        state: SegmentState = (x,)
        for stage in self._stages:
            if not stage.is_first:
                state = self._receive(stage, len(x))
            made = stage.module(*state)
            if isinstance(stage.module, FSDPModule):
                stage.module.reshard()  # without a backward to come it would stay gathered
            state = made if isinstance(made, tuple) else (made,)
            if not stage.is_last:
                self._send(stage, state)
        (slot,) = self.model_output_specs
        last = self._stages[-1]
        made = state[0] if last.is_last else slot.empty(len(x), self._device).detach()
        dist.broadcast(
            made, group=self._manager.pipeline_group, group_src=self._rank(last.count - 1)
        )
        return made

    def bubble(self) -> float:
        """Return the share of the last `backward` in which a rank waited, their mean."""
        idle = torch.tensor(self._stopwatch.idle_share(), device=self._device)
        dist.all_reduce(idle, group=self._manager.pipeline_group)
        return idle.item() / self._manager.pipeline_parallel_size

    def ideal_bubble(self) -> float:
        """Return what `bubble` would be if all stages took equally long."""
        ranks = self._manager.pipeline_parallel_size
        return theoretical_bubble(ranks, self._microbatches, len(self._stages))

    def _rank(self, stage: int) -> int:
        return stage % self._manager.pipeline_parallel_size

    def _receive(self, stage: Stage, samples: int) -> SegmentState:
        state = tuple(slot.empty(samples, self._device).detach() for slot in stage.input_specs)
        for x in state:
            dist.recv(x, group=self._manager.pipeline_group, group_src=self._rank(stage.index - 1))
        return state

    def _send(self, stage: Stage, state: SegmentState) -> None:
        for x in state:
            dist.send(x, group=self._manager.pipeline_group, group_dst=self._rank(stage.index + 1))

    def _schedule_for(self, inputs: Tensor | None) -> Schedule:
        """Return the schedule, made at the first call: only then the number of samples is known."""
        if self._schedule is None:
            samples = torch.tensor(0 if inputs is None else len(inputs), device=self._device)
            dist.broadcast(samples, group=self._manager.pipeline_group, group_src=0)
            self._samples = int(samples.item())
            if not self._samples or self._samples % self._microbatches:
                raise ValueError(
                    f"Pipeline: {self._samples} samples can't be cut into {self._microbatches} "
                    "micro-batches"
                )
            self._schedule = self._build()
        if self._stages[0].is_first and (inputs is None or len(inputs) != self._samples):
            found = None if inputs is None else len(inputs)
            raise ValueError(f"Pipeline: needs {self._samples} samples in each call, got {found}")
        return self._schedule

    def _build(self) -> Schedule:
        size = self._samples // self._microbatches
        stages = [
            ScheduledStage(
                stage,
                size,
                self._device,
                self._manager.pipeline_group,
                watch=self._stopwatch,
                begin=partial(self._call_begin, part),
            )
            for part, stage in enumerate(self._stages)
        ]
        return build_schedule(self._kind, stages, self._microbatches, self._timed_loss)

    def _call_begin(self, part: int, microbatch: int) -> None:
        if self._begin is not None:
            self._begin(part, microbatch)

    def _timed_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._loss is None:
            raise RuntimeError("Pipeline: a loss is only computed in `backward`")
        with self._stopwatch.busy():
            return self._loss(output, target)


def _device(manager: DomainParallelManager) -> torch.device:
    """Return where this rank computes; its parameters may wait elsewhere."""
    if manager.mesh is not None and manager.mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
