"""What is done about losses and gradients that are no numbers, or explode."""

import logging
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.agreement import gather
from credit_dp.training.state import TrainingState
from credit_dp.training_config import TrainerConfig

ENOUGH = 20  # accepted gradient norms; with fewer none is compared with them
IN_A_ROW = 10  # so many steps that would have to be skipped end the run after all

logger = logging.getLogger(__name__)


@final
class Guard:
    """Decides after each backward pass whether the optimiser may take its step.

    What it knows of earlier steps, `history`, belongs into checkpoints.

    Args:
        config: of the trainer.
        state: what would change.
        manager: this rank's place in the mesh.

    Attributes:
        checkpoint: finds the newest checkpoint, or None; asked on one rank when training stops.
    """

    def __init__(
        self, config: TrainerConfig, state: TrainingState, manager: DomainParallelManager
    ) -> None:
        self.config = config
        self.state = state
        self.manager = manager
        self.checkpoint: Callable[[], Path | None] = lambda: None
        self.history = state.history
        self.buffers: list[Tensor] = []

    def begin(self) -> None:
        """Remember what a forward pass may change, if its step may be skipped."""
        if self.config.on_nonfinite == "skip":
            self.buffers = [buffer.clone() for buffer in self._buffers()]

    def accepts(self, share: Tensor, norm: Tensor, diagnose: Callable[[], str]) -> bool:
        """Whether to take the step; the same on every rank. Collective.

        Args:
            share: this rank's share of the loss.
            norm: of the global gradient, before clipping.
            diagnose: looks for where it began; collective, and gives every rank the same sentence.

        Raises:
            UserError: if training is to stop; the same line on all ranks.
        """
        loss, size = self._of_all_ranks(share, norm)
        finite = math.isfinite(loss) and math.isfinite(size)
        fault = self._explosion(size) if finite else self._no_numbers(loss, size)
        if not fault:
            self.history.norms.append(size)
            self.history.in_a_row = 0
            return True
        self.history.in_a_row += 1
        if self.config.on_nonfinite == "stop" or self.history.in_a_row >= IN_A_ROW:
            raise UserError(self._verdict(fault, "" if finite else diagnose()))
        self._skip(fault)
        return False

    def numbers(self) -> dict[str, float]:
        """For the log: how many steps the run has skipped."""
        return {"skipped": self.history.skipped} if self.config.on_nonfinite == "skip" else {}

    def _of_all_ranks(self, share: Tensor, norm: Tensor) -> tuple[float, float]:
        """The loss and the norm, from one sum, so that no rank sees other numbers than another."""
        total = torch.stack([share.detach().double(), norm.detach().to(share.device).double()])
        if self.manager.mesh is not None:
            dist.all_reduce(total)
        else:
            total = self.manager.transport.sum(total)
        loss, size = total.tolist()
        return loss / self.manager.dp_world_size, size / self.manager.world_size

    def _no_numbers(self, loss: float, norm: float) -> str:
        return (
            f"the loss has to stay finite, but is {loss} with gradient norm {norm} at step "
            f"{self.state.step + 1}"
        )

    def _explosion(self, norm: float) -> str:
        """What is wrong with a finite norm, if anything."""
        most = self.config.exploding
        norms = self.history.norms
        if most is None or len(norms) < ENOUGH:
            return ""
        usual = statistics.median(norms)
        if not norm > most * usual > 0:
            return ""
        return (
            f"the gradient norm is {norm:.3g} at step {self.state.step + 1}, {norm / usual:.3g} "
            f"times the median of the last {len(norms)}; trainer.exploding={most:g} allows "
            "no more than that many times"
        )

    def _verdict(self, fault: str, finding: str) -> str:
        """The line that ends the run; collective."""
        path = gather(self.checkpoint() if self.manager.rank == 0 else None)[0]
        saved = "There is no checkpoint yet" if path is None else f"The last checkpoint is {path}"
        often = f", {self.history.in_a_row} times in a row" if self.history.in_a_row > 1 else ""
        advice = (
            f"Lower optimizer.lr (now {self.state.schedule.base_lrs[0]}) or trainer.gradient_clip "
            f"(now {self.config.gradient_clip})"
        )
        if self.config.on_nonfinite == "stop":
            advice += ", or leave such steps out with trainer.on_nonfinite=skip"
        return f"trainer: {fault}{often}. {finding}The step was not taken. {saved}. {advice}."

    def _skip(self, fault: str) -> None:
        """Leave all as it was before the step."""
        self.history.skipped += 1
        if self.manager.rank == 0:
            logger.warning(
                "%s: skipped (%d in a row; the run stops at %d)",
                fault,
                self.history.in_a_row,
                IN_A_ROW,
            )
        with torch.no_grad():
            for buffer, before in zip(self._buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        # Changes nothing without gradients; but the schedule warns of steps that it does not see.
        self.state.optimiser.zero_grad(set_to_none=True)
        self.state.optimiser.step()

    def _buffers(self) -> Iterator[Tensor]:
        """Those that checkpoints hold: running statistics, for one."""
        for part in self.state.parts:
            kept = part.state_dict(keep_vars=True)
            yield from (buffer for name, buffer in part.named_buffers() if name in kept)
