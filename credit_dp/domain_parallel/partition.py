"""Which rank owns which latitude rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, final

from torch import nn

from credit_dp.errors import UserError

# Bands of two levels that line up save bytes; they are preferred while the largest band stays
# within this factor of the mean one.
LARGEST_IMBALANCE = 1.1
# Rows are the last dimension but one of every field.
ROW_DIM = -2
# Fewer dimensions than (channel, row, column) mean that a tensor is no field.
FIELD_DIMS = 3


@final
@dataclass(frozen=True)
class RowPartition:
    """Bands of one globe: rank `r` owns the global rows `bounds[r]` to `bounds[r + 1] - 1`.

    Row 0 is the northernmost.

    Raises:
        ValueError: the bounds don't start at 0 or decrease.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bounds[0] != 0 or any(a > b for a, b in pairwise(self.bounds)):
            raise ValueError(f"RowPartition: bounds must rise from 0, got {self.bounds}")

    @classmethod
    def balanced(cls, height: int, ranks: int) -> RowPartition:
        """Bands that differ by one row at most, the larger ones first."""
        share, surplus = divmod(height, ranks)
        return cls(tuple(r * share + min(r, surplus) for r in range(ranks + 1)))

    @classmethod
    def in_multiples_of(cls, height: int, ranks: int, unit: int) -> RowPartition:
        """Balanced bands of whole units of rows; what is less than a unit comes last."""
        units = cls.balanced(-(-height // unit), ranks)
        return cls(tuple(min(bound * unit, height) for bound in units.bounds))

    @classmethod
    def from_sizes(cls, sizes: list[int]) -> RowPartition:
        """Bands of these numbers of rows, north to south."""
        return cls(tuple(sum(sizes[:r]) for r in range(len(sizes) + 1)))

    @property
    def height(self) -> int:
        """Rows of the whole globe."""
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        """How many bands there are."""
        return len(self.bounds) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(b - a for a, b in pairwise(self.bounds))

    def rows(self, rank: int) -> slice:
        """Return the global rows that `rank` owns."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def owner(self, row: int) -> int:
        """Return the rank that owns a global row."""
        return bisect_right(self.bounds, row) - 1

    def scaled_to(self, height: int) -> RowPartition:
        """Bands of another height whose edges lie where these lie on the globe."""
        ratio_up, ratio_down = height, self.height
        if height >= self.height:  # one coarse row covers `factor` fine rows, the last one fewer
            ratio_up, ratio_down = -(-height // self.height), 1
        scaled = (min(-(-b * ratio_up // ratio_down), height) for b in self.bounds[:-1])
        return RowPartition((*scaled, height))

    def bounds_are_multiples_of(self, unit: int) -> bool:
        """Whether bands end where units of rows do."""
        return all(bound % unit == 0 for bound in self.bounds[:-1])

    @property
    def is_well_balanced(self) -> bool:
        """Whether no band is empty and the largest is near the mean."""
        mean = self.height / self.ranks
        return min(self.sizes) > 0 and max(self.sizes) <= LARGEST_IMBALANCE * mean


@final
class BandTable:
    """The one partition of every global height, so that all layers of all models line up."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._by_height: dict[int, RowPartition] = {}

    def __getitem__(self, height: int) -> RowPartition:
        """Return the partition of a height, balanced bands for one that no plan has.

        Looking changes nothing: a rank may ask what others don't ask, and plans stay the same.
        """
        return self._by_height.get(height) or RowPartition.balanced(height, self.ranks)

    @property
    def planned_partitions(self) -> tuple[RowPartition, ...]:
        """The partitions of all heights that a plan or tensors have."""
        return tuple(self._by_height.values())

    def register(self, partition: RowPartition) -> RowPartition:
        """Make the bands that tensors already have those of their height.

        Raises:
            UserError: the height has other bands already.
        """
        known = self._by_height.setdefault(partition.height, partition)
        if known != partition:
            raise UserError(
                f"bands of {partition.height} rows: the plan has {known.sizes} rows per rank, "
                f"the tensors have {partition.sizes}. Cut them with shard_tensor."
            )
        return known

    def aligned_partition(self, height: int, other: RowPartition, unit: int = 1) -> RowPartition:
        """Return the bands of a height; if new, the first of these that is well balanced.

        Lined up with `other` and of whole units; of whole units; lined up; whatever is balanced.
        """
        aligned = other.scaled_to(height)
        of_units = RowPartition.in_multiples_of(height, self.ranks, unit)
        choices = [aligned] if aligned.bounds_are_multiples_of(unit) else [of_units, aligned]
        new = next((bands for bands in choices if bands.is_well_balanced), self[height])
        return self._by_height.setdefault(height, new)

    def plan(
        self,
        heights: set[int],
        ties: Mapping[int, int] | None = None,
        units: Mapping[int, int] | None = None,
    ) -> None:
        """Give every height its bands, from the coarsest up, each lined up with a coarser one.

        `ties` are heights whose rows are several per row of a coarser height, in the same bands;
        `units` of how many rows a band of a height should be a multiple.
        """
        units = units or {}
        coarser: list[RowPartition] = []
        for height in sorted(heights):
            if ties and height in ties:
                self._by_height.setdefault(height, self[ties[height]].scaled_to(height))
                continue
            fits = [p for p in coarser if -(-height // -(-height // p.height)) == p.height]
            alone = RowPartition.balanced(height, self.ranks)
            lined_up = fits[-1] if fits else alone
            coarser.append(self.aligned_partition(height, lined_up, units.get(height, 1)))


# Attributes that hold an attention's window.
WINDOW_ATTRIBUTES = ("window_size", "window")
STRIDED_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def validate_sharding_constraints(
    model: nn.Module, local_h: int, window_sizes: list[int] | None = None
) -> list[str]:
    """Return readable warnings about a band of `local_h` rows, none if it suits the model.

    Every band gives exact results; a level whose band is no multiple of its stride or window has
    to move rows between ranks, and a level without rows is refused at conversion.

    Args:
        model: before or after conversion; its strided convolutions make the levels.
        local_h: rows of one rank at the model's input.
        window_sizes: attention window per level, finest first. By default those of the model:
            the attributes `window_size` and `window` of its modules, where these stand.
    """
    levels = _levels(model)
    if window_sizes is not None:
        given = [{window} for window in window_sizes] + [set[int]()] * len(levels)
        levels = [_Level(at.stride, windows) for at, windows in zip(levels, given, strict=False)]
    rows, warnings = local_h, []
    for number, level in enumerate(levels):
        for size, what in (
            (level.stride, "stride"),
            *((w, "window") for w in sorted(level.windows)),
        ):
            if rows % size:
                warnings.append(f"level {number}: {rows} rows are no multiple of the {what} {size}")
        rows //= level.stride
    if rows < 1:
        warnings.append(f"the coarsest level has less than one row of {local_h}; use fewer ranks")
    return warnings


class _Level(NamedTuple):
    """The windows at one number of rows, and the stride to the next level, 1 after the last."""

    stride: int
    windows: set[int]


def _levels(model: nn.Module) -> list[_Level]:
    levels = [_Level(1, set())]
    for module in model.modules():
        layer = module.__dict__.get("wrapped", module)
        for size in map(_window_rows, (getattr(layer, name, None) for name in WINDOW_ATTRIBUTES)):
            if size is not None and size > 1:
                levels[-1].windows.add(size)
        # Rows are the last dimension but one; those of one-dimensional layers are the last.
        stride = (
            layer.stride[max(-2, -len(layer.stride))] if isinstance(layer, STRIDED_CONVS) else 1
        )
        if stride > 1:
            levels[-1] = levels[-1]._replace(stride=stride)
            levels.append(_Level(1, set()))
    return levels


def _window_rows(window: object) -> int | None:
    """Return the rows of a window: a number, or the last but one of (levels,) rows, columns."""
    if isinstance(window, (list, tuple)) and len(window) > 1:
        window = window[-2]
    return window if isinstance(window, int) and not isinstance(window, bool) else None
