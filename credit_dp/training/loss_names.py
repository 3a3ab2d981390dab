"""What the parts of a loss are called in the log: by variable, and by lead time."""

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True)
class LossNames:
    """Of the channels that come out, and the hours of a forecast step.

    Attributes:
        variables: of each channel.
        step_hours: of one forecast step.
    """

    variables: tuple[str, ...]
    step_hours: int

    def named(self, losses: Tensor) -> dict[str, float]:
        """`loss/VARIABLE`, its mean over the steps, and `loss/+HOURSh` if there are several steps.

        Either kind adds up to, or has the mean of, the loss.

        Shapes:
            `(steps, channels)`, what each channel adds to the loss of each step.
        """
        found = dict.fromkeys((f"loss/{variable}" for variable in self.variables), 0.0)
        for variable, part in zip(self.variables, losses.mean(0).tolist(), strict=True):
            found[f"loss/{variable}"] += part
        steps = losses.sum(1).tolist()
        if len(steps) > 1:
            hours = (self.step_hours * step for step in range(1, len(steps) + 1))
            found |= {f"loss/+{h}h": part for h, part in zip(hours, steps, strict=True)}
        return found
