"""What a model is built for: the layout of its input and output channels, and its grid."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, final


@final
class GridShape(tuple[int, int]):
    """The numbers of rows and columns of the grid that a model is built for.

    Attributes:
        is_global: whether rows go from pole to pole, and columns once round the globe. If not, the
            grid is a region: nothing lies beyond its first and last row.
        is_periodic: whether columns go once round the globe: the globe's, or those of a region
            between two circles of latitude, such as the tropics.
        latitude: of the rows, in degrees; None: `credit_dp.sphere.usual_latitude`.
    """

    is_global: bool
    is_periodic: bool
    latitude: Sequence[float] | None

    def __new__(
        cls,
        shape: Iterable[int],
        is_global: bool = True,
        is_periodic: bool | None = None,
        latitude: Sequence[float] | None = None,
    ) -> Self:
        """Return the shape (rows, columns); by default columns are periodic on the globe alone."""
        grid = super().__new__(cls, shape)
        grid.is_global = is_global
        grid.latitude = latitude
        grid.is_periodic = is_global if is_periodic is None else is_periodic
        return grid

    @property
    def or_finer(self) -> str:
        """The end of advice on a grid that is too small: only the globe can be regridded."""
        return " or a finer data.grid" if self.is_global else ""


@final
@dataclass(frozen=True)
class Fields:
    """Which channels of a model hold which fields.

    The input holds the states of `frames` times, the oldest first, then `others` channels of
    forcings and static fields, then the `noisy` channels of a noisy output, of a diffusion model.
    The output holds one state, then `diagnostic` channels.

    Args:
        upper: for each variable on levels, its channels in a state, level by level; every variable
            has the same number.
        surface: channels of a state that are on no level.
        others: number of forcing and static channels.
        diagnostic: number of channels that only the output has.
        noisy: number of channels of the noisy output.
    """

    upper: tuple[tuple[int, ...], ...]
    surface: tuple[int, ...]
    others: int = 0
    frames: int = 1
    diagnostic: int = 0
    noisy: int = 0

    @classmethod
    def flat(cls, prognostic: int, others: int = 0, frames: int = 1) -> "Fields":
        """Return the layout of `prognostic` channels without levels."""
        return cls((), tuple(range(prognostic)), others, frames)

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.upper[0]) if self.upper else 0

    @property
    def states(self) -> int:
        """Number of channels of one state."""
        return sum(map(len, self.upper)) + len(self.surface)

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.states + self.diagnostic

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        return self.frames * self.states + self.others + self.noisy
