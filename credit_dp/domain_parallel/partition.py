"""Bands: contiguous ranges of latitude rows, one per rank.

A band is a rank's shard along latitude. `RowPartition` holds the bands of one number of rows,
`BandTable` the partitions of all heights that a model's levels have. The partition of a height is
the same for all layers and on all ranks: the height alone says which rows each rank has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, final

from torch import nn

from credit_dp.bands import balanced_bounds
from credit_dp.errors import UserError

# Fewer rows travel between two levels whose bands are aligned. Aligned bands are preferred to
# balanced ones as long as the largest is at most this factor larger than the mean.
LARGEST_IMBALANCE = 1.1
# Rows stay where they are if no rank gets more than this factor of the mean.
LARGEST_BAND = 1.5
# Rows are the last dimension but one of a field, (..., rows, columns).
ROW_DIM = -2
# A tensor with fewer dimensions than (channels, rows, columns) is not a field.
FIELD_DIMS = 3


@final
@dataclass(frozen=True)
class RowPartition:
    """The bands of one globe: rank `r` owns the global rows `bounds[r]` to `bounds[r + 1] - 1`.

    Row 0 is the northernmost. A band may be empty.

    Attributes:
        bounds: where the bands begin, and the number of rows of the globe at the end.

    Raises:
        ValueError: the bounds don't start at 0 or decrease.
    """

    bounds: tuple[int, ...]
    # Not a cached property: torch's compiler can't follow the lock that one holds in Python 3.11.
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bounds[0] != 0 or any(a > b for a, b in pairwise(self.bounds)):
            raise ValueError(f"RowPartition: bounds must rise from 0, got {self.bounds}")
        object.__setattr__(self, "sizes", tuple(b - a for a, b in pairwise(self.bounds)))

    @classmethod
    @lru_cache(4096)  # asked for in most calls of layers
    def balanced(cls, height: int, ranks: int) -> RowPartition:
        """Return bands that differ by at most one row, the larger ones first."""
        return cls(balanced_bounds(height, ranks))

    @classmethod
    def in_multiples_of(cls, height: int, ranks: int, unit: int) -> RowPartition:
        """Return balanced bands in multiples of `unit` rows; the remainder comes last."""
        units = cls.balanced(-(-height // unit), ranks)
        return cls(tuple(min(bound * unit, height) for bound in units.bounds))

    @classmethod
    def from_sizes(cls, sizes: list[int]) -> RowPartition:
        """Return bands with these numbers of rows, from north to south."""
        return cls(tuple(sum(sizes[:r]) for r in range(len(sizes) + 1)))

    def moved_to_multiples_of(self, unit: int) -> RowPartition:
        """Return bands of the same rows in multiples of `unit`, with the nearest bounds.

        Balanced bands instead if these are more even.
        """
        balanced = RowPartition.in_multiples_of(self.height, self.ranks, unit)
        inner = [(2 * bound + unit) // (2 * unit) * unit for bound in self.bounds[1:-1]]
        near = RowPartition((0, *(min(bound, self.height) for bound in inner), self.height))
        is_even = min(near.sizes) > 0 and max(near.sizes) <= max(balanced.sizes)
        return near if is_even else balanced

    @property
    def height(self) -> int:
        """Return the number of rows of the globe."""
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        """Return the number of bands."""
        return len(self.bounds) - 1

    def rows(self, rank: int) -> slice:
        """Return the global rows that `rank` owns."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def owner(self, row: int) -> int:
        """Return the rank that owns a global row."""
        # Bisecting to the right skips empty bands, whose bound is repeated.
        return bisect_right(self.bounds, row) - 1

    def scaled_to(self, height: int) -> RowPartition:
        """Return bands of another height whose bounds are at the same latitudes."""
        numerator, denominator = height, self.height
        # A coarse row covers the same number of fine rows everywhere, except the last row, which
        # covers fewer: scaling by the ratio of the heights would miss the bounds by some rows.
        if height >= self.height:
            numerator, denominator = -(-height // self.height), 1
        scaled = (min(-(-b * numerator // denominator), height) for b in self.bounds[:-1])
        return RowPartition((*scaled, height))

    def bounds_are_multiples_of(self, unit: int) -> bool:
        """Return whether each band starts at a multiple of `unit` rows."""
        return all(bound % unit == 0 for bound in self.bounds[:-1])

    @property
    def is_well_balanced(self) -> bool:
        """Return whether no band is empty and the largest is close to the mean."""
        mean = self.height / self.ranks
        return min(self.sizes) > 0 and max(self.sizes) <= LARGEST_IMBALANCE * mean


@final
class BandTable:
    """The partition of every global height: all layers that see a height use the same bands."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._by_height: dict[int, RowPartition] = {}

    def __getitem__(self, height: int) -> RowPartition:
        """Return the partition of a height; balanced bands if the height is not planned.

        Read-only, so that ranks may query different heights and still agree on later plans.
        """
        return self._by_height.get(height) or RowPartition.balanced(height, self.ranks)

    @property
    def planned_partitions(self) -> tuple[RowPartition, ...]:
        """Return the partitions of all heights that were planned or registered."""
        return tuple(self._by_height.values())

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Forget what is planned in this context if it fails."""
        before = dict(self._by_height)
        try:
            yield
        except BaseException:
            self._by_height = before
            raise

    def register(self, partition: RowPartition) -> RowPartition:
        """Make the bands of existing tensors the partition of their height, and return it.

        Raises:
            UserError: the height has another partition already.
        """
        planned = self._by_height.setdefault(partition.height, partition)
        if planned != partition:
            raise UserError(
                f"bands of {partition.height} rows: the plan has {planned.sizes} rows per rank, "
                f"the tensors have {partition.sizes}. Shard them with shard_tensor."
            )
        return planned

    def aligned_partition(self, height: int, other: RowPartition, unit: int = 1) -> RowPartition:
        """Return the partition of a height; choose one if the height has none.

        The first of these that is well balanced: aligned with `other` and in multiples of `unit`
        rows; in multiples only; aligned only; otherwise balanced bands.
        """
        aligned = other.scaled_to(height)
        in_multiples = RowPartition.in_multiples_of(height, self.ranks, unit)
        choices = [aligned] if aligned.bounds_are_multiples_of(unit) else [in_multiples, aligned]
        chosen = next((bands for bands in choices if bands.is_well_balanced), self[height])
        return self._by_height.setdefault(height, chosen)

    def plan(
        self,
        heights: set[int],
        ties: Mapping[int, int] | None = None,
        units: Mapping[int, int] | None = None,
    ) -> None:
        """Choose the bands of every height, from the coarsest to the finest.

        Coarse levels come first: with few rows there is least choice of balanced bands. The bands
        of finer levels are aligned with them.

        Args:
            ties: height -> coarser height, each of whose rows stands for several of this height's;
                both get the same bands.
            units: height -> number of rows that its bands should be multiples of.
        """
        units = units or {}
        coarser: list[RowPartition] = []
        for height in sorted(heights):
            if ties and height in ties:
                self._by_height.setdefault(height, self[ties[height]].scaled_to(height))
                continue
            # A stride makes ceil(height / stride) rows of this height. If any stride makes exactly
            # p.height rows, the smallest one that makes no more does.
            reachable = [p for p in coarser if -(-height // -(-height // p.height)) == p.height]
            balanced = RowPartition.balanced(height, self.ranks)
            reference = reachable[-1] if reachable else balanced
            coarser.append(self.aligned_partition(height, reference, units.get(height, 1)))


def falls_into_equal_parts(size: int, parts: int) -> bool:
    """Return whether parts of a dimension have nearly the same size."""
    return size > 0 and -(-size // parts) * parts <= LARGEST_IMBALANCE * size


# Attributes in which attention modules hold their window.
WINDOW_ATTRIBUTES = ("window_size", "window")
STRIDED_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_banded(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this whole-globe shape is cut into bands."""
    return len(shape) >= FIELD_DIMS and shape[ROW_DIM] > 1


def too_few_rows_messages(heights: Mapping[int, str], ranks: int) -> list[str]:
    """Return a message for each height, with its first user, that has fewer rows than ranks."""
    lowest = min(heights, default=ranks)
    return [
        f"{user or 'model'}: {rows} rows can't be shared by {ranks} ranks. "
        f"Lower parallel.domain to {lowest}{' or less' if lowest > 1 else ''}."
        for rows, user in heights.items()
        if rows < ranks
    ]


def validate_sharding_constraints(
    model: nn.Module, local_h: int, window_sizes: list[int] | None = None
) -> list[str]:
    """Return warnings about bands of `local_h` rows, one line each; none if they suit the model.

    Results are exact with any bands. But a level whose bands are not a multiple of its stride or
    window has to move rows between ranks, and a level without rows is refused at conversion.

    Args:
        model: before or after conversion; each strided convolution begins a level.
        local_h: rows of one rank at the model's input.
        window_sizes: attention window per level, finest first; more than there are levels count for
            the coarsest. By default those in the attributes `window_size` and `window` of the
            model's modules.
    """
    levels = _levels(model)
    if window_sizes is not None:
        windows = [{window} for window in window_sizes] + [set[int]()] * len(levels)
        # A model may change its rows by other layers than strided convolutions.
        windows[len(levels) - 1] = set(window_sizes[len(levels) - 1 :])
        levels = [_Level(level.stride, w) for level, w in zip(levels, windows, strict=False)]
    rows = local_h
    warnings: list[str] = []
    for number, level in enumerate(levels):
        divisors = [("stride", level.stride), *(("window", w) for w in sorted(level.windows))]
        warnings += [
            f"level {number}: {rows} rows are not a multiple of the {name} {divisor}"
            for name, divisor in divisors
            if rows % divisor
        ]
        rows //= level.stride
    if rows < 1:
        warnings.append(
            f"the coarsest level has less than one row for a band of {local_h}; use fewer ranks"
        )
    return warnings


class _Level(NamedTuple):
    """The windows at one number of rows, and the stride to the next level (1 at the last)."""

    stride: int
    windows: set[int]


def _levels(model: nn.Module) -> list[_Level]:
    levels = [_Level(1, set())]
    for module in model.modules():
        layer = module.__dict__.get("wrapped", module)
        for size in map(_window_rows, (getattr(layer, name, None) for name in WINDOW_ATTRIBUTES)):
            if size is not None and size > 1:
                levels[-1].windows.add(size)
        stride = 1
        if isinstance(layer, STRIDED_CONVS):
            # Rows are the last dimension but one; those of one-dimensional layers are the last.
            stride = layer.stride[max(-2, -len(layer.stride))]
        if stride > 1:
            levels[-1] = levels[-1]._replace(stride=stride)
            levels.append(_Level(1, set()))
    return levels


def _window_rows(window: object) -> int | None:
    if isinstance(window, (list, tuple)) and len(window) > 1:
        window = window[-2]
    return window if isinstance(window, int) and not isinstance(window, bool) else None
