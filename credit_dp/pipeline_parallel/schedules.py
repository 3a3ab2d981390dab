"""Torch's schedules of micro-batches, and stages as these want them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from credit_dp.errors import UserError
from credit_dp.pipeline_parallel.bubble import Stopwatch
from credit_dp.pipeline_parallel.stages import Slots, Stage
from credit_dp.spans import BACKWARD, FORWARD, span

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
            input_args=_example(stage.takes, samples),
            output_args=_example(stage.makes, samples),
            group=group,
        )
        self._watch, self._begin = watch, begin

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward."""
        self._begin(fwd_chunk_id)
        with self._watch.busy(), span(FORWARD), _Unwrapped(), warnings.catch_warnings():
            # FSDP2 says so of what a stage hands on untouched; nothing changes it in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch backward."""
        with self._watch.busy(), span(BACKWARD), _Unwrapped():
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
class _Unwrapped:
    """Raises a user's mistake itself, without what torch's schedules say around it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error.__cause__, UserError):
            raise error.__cause__ from None


def _example(slots: Slots, samples: int) -> tuple[Tensor, ...]:
    return tuple(slot.empty(samples, "meta") for slot in slots)
