"""Which fields the channels of a model's input and output hold."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Fields:
    """Channels of states, then of what only goes in, or only comes out.

    The input carries the states of `frames` times, the oldest first, and then `others` channels of
    forcings and statics; the output one state, and then `diagnostic` channels.

    Args:
        upper: the channels of a state that each variable on levels has, level by level; as many for
            every variable.
        surface: the channels of a state that are on no level.
        others: how many forcings and statics there are.
        frames: how many states go in.
        diagnostic: how many channels only come out.
    """

    upper: tuple[tuple[int, ...], ...]
    surface: tuple[int, ...]
    others: int = 0
    frames: int = 1
    diagnostic: int = 0

    @classmethod
    def flat(cls, prognostic: int, others: int = 0, frames: int = 1) -> "Fields":
        """Fields of which none is on a level."""
        return cls((), tuple(range(prognostic)), others, frames)

    @property
    def levels(self) -> int:
        """How many levels there are."""
        return len(self.upper[0]) if self.upper else 0

    @property
    def states(self) -> int:
        """Channels of one state."""
        return sum(map(len, self.upper)) + len(self.surface)

    @property
    def outputs(self) -> int:
        """Channels that come out."""
        return self.states + self.diagnostic

    @property
    def inputs(self) -> int:
        """Channels that go in."""
        return self.frames * self.states + self.others
