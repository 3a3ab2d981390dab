"""How long a run is going to take, told once it has taken some steps."""

import time
from typing import final

STEPS = 20  # after which it is told; before the first of them a lot is set up


@final
class Outlook:
    """Says once how long an epoch takes, and all that is left.

    Args:
        step: after which training starts.
        total: steps of the run.
        per_epoch: steps of an epoch.
    """

    def __init__(self, step: int, total: int, per_epoch: int) -> None:
        self.first = step + 1
        self.total = total
        self.per_epoch = per_epoch
        self._began = 0.0

    def __call__(self, step: int) -> str | None:
        """Hear that a step has been taken; the line, after the 20th."""
        now = time.monotonic()
        if step == self.first:
            self._began = now
        if step + 1 != self.first + STEPS or step >= self.total:
            return None
        pace = (now - self._began) / (STEPS - 1)
        epoch, left = pace * self.per_epoch, pace * (self.total - step)
        return f"about {duration(epoch)} for an epoch, done in about {duration(left)}"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits: `45 s`, `12 min`, `3.5 h`, `2.1 days`."""
    if seconds < 90:
        return f"{seconds:.{0 if seconds >= 9.5 else 1}f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
