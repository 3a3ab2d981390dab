"""What stands for the modules of other stages, so that those that are left keep their names."""

from __future__ import annotations

from typing import Any, final

from torch import nn

from credit_dp.errors import UserError


@final
class Elsewhere(nn.Module):
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
