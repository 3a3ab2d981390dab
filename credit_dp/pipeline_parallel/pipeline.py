"""Run the stages of a model on the ranks of a pipeline, micro-batch by micro-batch.

In this order: what a schedule does on each rank (`schedule_actions`, for plans), a stopwatch for
the time in which ranks wait, torch's schedules on our stages, and `Pipeline`, which training calls.
"""

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
from credit_dp.domain_parallel.transport import message_device
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentState
from credit_dp.pipeline_parallel.stages import Stage, StateSpecs
from credit_dp.process import BACKWARD, FORWARD, profile_region


class StageAction(NamedTuple):
    """One forward or backward of a stage on one micro-batch.

    Attributes:
        local_stage: index of the stage among those of its rank.
    """

    forward: bool
    local_stage: int


def schedule_actions(
    schedule: str, rank: int, pipeline: int, microbatches: int, virtual: int = 1
) -> list[StageAction]:
    """Return the forwards and backwards of a rank in a step, in order.

    Args:
        microbatches: of a step; for interleaved a multiple of the ranks.

    Source: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    total = virtual * microbatches
    # An interleaved rank runs its first stage on as many micro-batches as there are ranks, then its
    # next stage on the same ones.
    stages = [number // pipeline % virtual for number in range(total)]
    if schedule != "interleaved":
        stages = [0] * total
    # Forwards before the first backward: enough to fill the later stages of the pipeline.
    warmup = {
        "gpipe": total,
        "1f1b": pipeline - rank,
        "interleaved": (virtual - 1) * pipeline + 2 * (pipeline - 1 - rank) + 1,
    }[schedule]
    forwards = [StageAction(True, stage) for stage in stages]
    backwards = [StageAction(False, virtual - 1 - stage) for stage in stages]
    order = forwards[:warmup]
    # Then backwards and the remaining forwards alternate.
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[warmup + number : warmup + number + 1]]
    return order


def peak_saved_bytes(order: Iterable[StageAction], saved: Sequence[int]) -> int:
    """Return the largest number of bytes saved for backward at any time of a step.

    Args:
        saved: bytes that one micro-batch saves on each of the rank's stages.
    """
    current = peak = 0
    for action in order:
        change = saved[action.local_stage]
        current += change if action.forward else -change
        peak = max(peak, current)
    return peak


def count_gathers(order: Iterable[StageAction]) -> Counter[int]:
    """Return how often FSDP2 gathers the blocks of each stage of a rank in a step."""
    gathered: set[int] = set()
    counts: Counter[int] = Counter()
    for action in order:
        if action.local_stage not in gathered:
            counts[action.local_stage] += 1
        # A forward reshards its blocks. A backward leaves them gathered, because gradients are only
        # reduced after the last one of a step.
        (gathered.discard if action.forward else gathered.add)(action.local_stage)
    return counts


def theoretical_bubble(pipeline: int, microbatches: int, virtual: int = 1) -> float:
    """Return the share of a step in which a rank waits, if all stages take equally long.

    It is the same for GPipe and 1F1B.

    Source: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
    """
    return (pipeline - 1) / (virtual * microbatches + pipeline - 1)


@final
class Stopwatch:
    """Measures the share of a period in which a device was idle.

    On a GPU it records events in the current stream, so that the host does not wait for the GPU
    during the period.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total: tuple[_Mark, _Mark] | None = None
        self._busy: list[tuple[_Mark, _Mark]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure a new period, instead of the last one."""
        self._busy = []
        self._total = None
        start = self._mark()
        yield
        self._total = start, self._mark()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count this part of the period as busy."""
        start = self._mark()
        yield
        self._busy.append((start, self._mark()))

    def idle_share(self) -> float:
        """Return the idle share of the last period; 0 before the first one."""
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
    """A stage as torch's schedules need it, with the shapes of its input and output.

    With the shapes given, torch makes no trial run to infer them.

    Args:
        stopwatch: measures forwards and backwards as busy.
        begin: called with the number of the micro-batch before its forward.
    """

    def __init__(
        self,
        stage: Stage,
        samples: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        stopwatch: Stopwatch,
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
        self._stopwatch = stopwatch
        self._begin = begin

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward."""
        self._begin(fwd_chunk_id)
        with (
            self._stopwatch.busy(),
            profile_region(FORWARD),
            _UnwrapUserError(),
            warnings.catch_warnings(),
        ):
            # FSDP2 warns if a stage passes a tensor of its state on unchanged. That matters for
            # changes in place only, and there are none.
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
    """Return torch's schedule for this rank's stages."""
    # `scale_grads=False`: gradients are those of the sum of the micro-batches' losses, not of their
    # mean.
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), microbatches, loss, scale_grads=False)
    schedule = ScheduleGPipe if name == "gpipe" else Schedule1F1B
    (stage,) = stages
    return schedule(stage, microbatches, loss, scale_grads=False)


@final
class _UnwrapUserError:
    """Raises a `UserError` itself instead of the error in which torch's schedules wrap it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error.__cause__, UserError):
            raise error.__cause__ from None


def _meta_tensors(specs: StateSpecs, samples: int) -> tuple[Tensor, ...]:
    return tuple(spec.empty(samples, "meta") for spec in specs)


LossFunction = Callable[[Tensor, Tensor], Tensor]
BeginCallback = Callable[[int, int], None]


@final
class Pipeline:
    """This rank's stages of a model, and the schedule that runs them with those of other ranks.

    `forward_backward`, `forward` and `bubble` are collectives of the pipeline's ranks.

    Args:
        stages: see `cut_model`; FSDP2's `fully_shard` may have been applied to their modules.
        schedule: gpipe, 1f1b, or interleaved for several stages on each rank.

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
        # Of this rank's computations; parameters may be offloaded to the host.
        self._device = torch.device("cpu") if manager.mesh is None else message_device()
        self._stopwatch = Stopwatch(self._device)
        self._schedule: Schedule | None = None
        self._samples = 0  # of each call of `forward_backward`, known from the first one on
        self._loss: LossFunction | None = None
        self._begin: BeginCallback | None = None

    @property
    def stage_modules(self) -> tuple[nn.Module, ...]:
        """The modules of this rank's stages."""
        return tuple(stage.module for stage in self._stages)

    @property
    def model_output_specs(self) -> StateSpecs:
        """Shapes and dtypes of the last stage's output."""
        return self._stages[0].model_output_specs

    def forward_backward(
        self,
        inputs: Tensor | None,
        target: Tensor | None,
        loss: LossFunction,
        begin: BeginCallback | None = None,
    ) -> Tensor:
        """Run all micro-batches and add the gradients of their losses to this rank's parameters.

        Args:
            inputs: of this band; used on the rank of the first stage.
            target: of this band; used on the rank of the last stage.
            loss: of a micro-batch's output and target; gradients are those of the sum.
            begin: called before each forward with the index of the stage among those of this rank,
                and the number of the micro-batch.

        Returns:
            The sum of the micro-batches' losses; zero on ranks without the last stage.

        Raises:
            ValueError: the number of samples differs from the first call's, or the micro-batches
                do not divide it.
        """
        schedule = self._schedule_for(inputs)
        self._loss = loss
        self._begin = begin
        losses: list[Tensor] = []
        has_first = self._stages[0].is_first
        has_last = self._stages[-1].is_last
        with self._stopwatch.measure():
            schedule.step(
                *((inputs,) if has_first else ()),
                target=target if has_last else None,
                losses=losses if has_last else None,
                return_outputs=False,
            )
        self._loss = self._begin = None
        zero = torch.zeros((), dtype=self.model_output_specs[0].dtype, device=self._device)
        return sum((x.detach() for x in losses), zero)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output for this band, on all ranks of the pipeline.

        Args:
            x: used on the rank of the first stage; any number of samples, the same on all ranks.
        """
        state: SegmentState = (x,)
        # Each stage waits for the state of the one before, so sends and receives pair up in the
        # order of the stages.
        for stage in self._stages:
            if not stage.is_first:
                state = self._receive(stage, len(x))
            output = stage.module(*state)
            if isinstance(stage.module, FSDPModule):
                stage.module.reshard()  # no backward follows, after which FSDP2 would do it
            state = output if isinstance(output, tuple) else (output,)
            if not stage.is_last:
                self._send(stage, state)
        (spec,) = self.model_output_specs
        last = self._stages[-1]
        y = state[0] if last.is_last else spec.empty(len(x), self._device).detach()
        dist.broadcast(y, group=self._manager.pipeline_group, group_src=self._rank(last.count - 1))
        return y

    def bubble(self) -> float:
        """Return the share of the last `forward_backward` in which ranks waited, on average."""
        idle = torch.tensor(self._stopwatch.idle_share(), device=self._device)
        dist.all_reduce(idle, group=self._manager.pipeline_group)
        return idle.item() / self._manager.pipeline_parallel_size

    def ideal_bubble(self) -> float:
        """Return the value of `bubble` if all stages took equally long."""
        ranks = self._manager.pipeline_parallel_size
        return theoretical_bubble(ranks, self._microbatches, len(self._stages))

    def _rank(self, stage: int) -> int:
        return stage % self._manager.pipeline_parallel_size

    def _receive(self, stage: Stage, samples: int) -> SegmentState:
        state = tuple(spec.empty(samples, self._device).detach() for spec in stage.input_specs)
        for x in state:
            dist.recv(x, group=self._manager.pipeline_group, group_src=self._rank(stage.index - 1))
        return state

    def _send(self, stage: Stage, state: SegmentState) -> None:
        for x in state:
            dist.send(x, group=self._manager.pipeline_group, group_dst=self._rank(stage.index + 1))

    def _schedule_for(self, inputs: Tensor | None) -> Schedule:
        if self._schedule is None:
            # Only the first stage's rank has the inputs: it broadcasts their number.
            samples = torch.tensor(0 if inputs is None else len(inputs), device=self._device)
            dist.broadcast(samples, group=self._manager.pipeline_group, group_src=0)
            self._samples = int(samples.item())
            if not self._samples or self._samples % self._microbatches:
                raise ValueError(
                    f"Pipeline: {self._samples} samples can't be split into {self._microbatches} "
                    "micro-batches"
                )
            self._schedule = self._build()
        if self._stages[0].is_first and (inputs is None or len(inputs) != self._samples):
            count = None if inputs is None else len(inputs)
            raise ValueError(f"Pipeline: needs {self._samples} samples in each call, got {count}")
        return self._schedule

    def _build(self) -> Schedule:
        size = self._samples // self._microbatches
        stages = [
            ScheduledStage(
                stage,
                size,
                self._device,
                self._manager.pipeline_group,
                stopwatch=self._stopwatch,
                begin=partial(self._call_begin, local_stage),
            )
            for local_stage, stage in enumerate(self._stages)
        ]
        return build_schedule(self._kind, stages, self._microbatches, self._timed_loss)

    def _call_begin(self, local_stage: int, microbatch: int) -> None:
        if self._begin is not None:
            self._begin(local_stage, microbatch)

    def _timed_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._loss is None:
            raise RuntimeError("Pipeline: a loss is only computed in `forward_backward`")
        with self._stopwatch.busy():
            return self._loss(output, target)
