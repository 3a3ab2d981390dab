"""A model in stages on several ranks, through which micro-batches go one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.models.segments import State
from credit_dp.pipeline_parallel.bubble import Stopwatch, theoretical_bubble
from credit_dp.pipeline_parallel.schedules import Schedule, ScheduledStage, build_schedule
from credit_dp.pipeline_parallel.stages import Slots, Stage

Loss = Callable[[Tensor, Tensor], Tensor]
Begin = Callable[[int, int], None]


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
        self._watch = Stopwatch(self._device)
        self._schedule: Schedule | None = None
        self._samples = 0  # of each call of `backward`, known from the first one on
        self._loss: Loss | None = None
        self._begin: Begin | None = None

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """This rank's stretches of the model."""
        return tuple(stage.module for stage in self._stages)

    @property
    def result(self) -> Slots:
        """What the last stage makes."""
        return self._stages[0].result

    def backward(
        self, inputs: Tensor | None, target: Tensor | None, loss: Loss, begin: Begin | None = None
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
        schedule = self._scheduled(inputs)
        self._loss, self._begin = loss, begin
        losses: list[Tensor] = []
        first, last = self._stages[0].is_first, self._stages[-1].is_last
        with self._watch.span():
            schedule.step(
                *((inputs,) if first else ()),
                target=target if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
        self._loss = self._begin = None
        zero = torch.zeros((), dtype=self.result[0].dtype, device=self._device)
        return sum((x.detach() for x in losses), zero)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return what the whole model makes of this band, on all ranks of the pipeline.

        Args:
            x: used on the rank of the first stage; any number of samples, the same on all ranks.
        """
        state: State = (x,)
        for stage in self._stages:
            if not stage.is_first:
                state = self._receive(stage, len(x))
            made = stage.module(*state)
            if isinstance(stage.module, FSDPModule):
                stage.module.reshard()  # without a backward to come it would stay gathered
            state = made if isinstance(made, tuple) else (made,)
            if not stage.is_last:
                self._send(stage, state)
        (slot,) = self.result
        last = self._stages[-1]
        made = state[0] if last.is_last else slot.empty(len(x), self._device).detach()
        dist.broadcast(
            made, group=self._manager.pipeline_group, group_src=self._rank(last.count - 1)
        )
        return made

    def bubble(self) -> float:
        """Return the share of the last `backward` in which a rank waited, their mean."""
        idle = torch.tensor(self._watch.idle(), device=self._device)
        dist.all_reduce(idle, group=self._manager.pipeline_group)
        return idle.item() / self._manager.pipeline_parallel_size

    def bubble_of_equal_stages(self) -> float:
        """Return what `bubble` would be if all stages took equally long."""
        ranks = self._manager.pipeline_parallel_size
        return theoretical_bubble(ranks, self._microbatches, len(self._stages))

    def _rank(self, stage: int) -> int:
        return stage % self._manager.pipeline_parallel_size

    def _receive(self, stage: Stage, samples: int) -> State:
        state = tuple(slot.empty(samples, self._device).detach() for slot in stage.takes)
        for x in state:
            dist.recv(x, group=self._manager.pipeline_group, group_src=self._rank(stage.index - 1))
        return state

    def _send(self, stage: Stage, state: State) -> None:
        for x in state:
            dist.send(x, group=self._manager.pipeline_group, group_dst=self._rank(stage.index + 1))

    def _scheduled(self, inputs: Tensor | None) -> Schedule:
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
                watch=self._watch,
                begin=partial(self._tell, part),
            )
            for part, stage in enumerate(self._stages)
        ]
        return build_schedule(self._kind, stages, self._microbatches, self._timed_loss)

    def _tell(self, part: int, microbatch: int) -> None:
        if self._begin is not None:
            self._begin(part, microbatch)

    def _timed_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._loss is None:
            raise RuntimeError("Pipeline: a loss is only computed in `backward`")
        with self._watch.busy():
            return self._loss(output, target)


def _device(manager: DomainParallelManager) -> torch.device:
    """Return where this rank computes; its parameters may wait elsewhere."""
    if manager.mesh is not None and manager.mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
