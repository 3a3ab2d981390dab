"""A model that computes again in backward what it would have kept since its forward."""

from typing import final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from credit_dp.errors import UserError


@final
class Recomputed(nn.Module):
    """Keeps of each forward the input only while the model trains.

    What DDP wraps, rather than what is wrapped around DDP: its own forward must not run again in
    backward.

    Args:
        model: whole, on its device, its parameters shared out already if they are to be.

    Raises:
        UserError: at the first forward, if it changes the model: the second one would again.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._checked = False

    def forward(self, x: Tensor) -> Tensor:
        """The model's output."""
        if not (self.model.training and torch.is_grad_enabled()):
            return self.model(x)  # type: ignore[no-any-return]
        before = {} if self._checked else self._versions()
        # All of it is computed again, so that ranks send each other all that they sent before.
        with set_checkpoint_early_stop(False):
            made: Tensor = checkpoint(self.model, x, use_reentrant=False)
        if not self._checked:
            self._refuse_changed(before)
        return made

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Tells of each buffer whether another took its place, or it was written to."""
        return {name: (id(b), b._version) for name, b in self.model.named_buffers()}

    def _refuse_changed(self, before: dict[str, tuple[int, int]]) -> None:
        for name, version in self._versions().items():
            if before.get(name) != version:
                raise UserError(
                    "trainer.checkpoint_activations: needs a model that a forward leaves as it is, "
                    f"but one changes {name}, and would again in backward. Set "
                    "trainer.checkpoint_activations=false, or use a layer without such a buffer."
                )
        self._checked = True
