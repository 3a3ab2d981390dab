"""Transforms of single variables before shift and scale: `sqrt`, `log1p(EPS)` and `quantile`.

`apply_transform` (arrays), `apply_transform_tensor` and `invert_transform` (tensors) act on one
channel. Root and logarithm depend on the config alone. `quantile` needs quantiles of the channel,
which `sample_quantiles` takes from some training dates before the statistics are computed;
`QuantileMap` is the map that they define.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from credit_dp.config import VariableConfig
from credit_dp.data.sampling import evenly_spaced_indices
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, channel_groups

Vector = NDArray[np.float64]

# Standard normal variates to which the quantiles of a channel are mapped: 129 from -4 to 4.
# Evenly spaced, so a variable that is normally distributed has evenly spaced quantiles, too.
QUANTILE_SCORES: Vector = np.linspace(-4, 4, 129)
QUANTILE_DATES = 64  # evenly spaced training dates from which quantiles are computed
QUANTILE_VALUES = 2**22  # values of a channel at most: sorting them takes a second
# Quantiles that are closer than this part of their range count as equal. No slope of the map is
# steeper than 1/16 over it, which float32 can undo.
TIE = 1e-6


@final
class QuantileMap(nn.Module):
    """Maps the values of one channel to a standard normal distribution, and back.

    The map is continuous, increasing and linear between the quantiles of the training data.

    - Equal quantiles, as of a value that many points have, are one knot: that of the lowest value
      is at the upper end of their scores, and that of the highest at the lower end, so that the
      map has no jump beside them; others are in the middle of their scores.
    - Beyond the outermost quantiles the map is extrapolated linearly, with the slope of the last
      interval or the mean slope of the map, whichever is less: next to a frequent value an interval
      may be very short, as between no rain and the least rain.

    Differentiable. Each point is mapped by itself. Computes in the dtype of its buffers, float64
    unless the module is moved. Values that are mapped and mapped back have an error of at most two
    millionths of the range of the quantiles in float32, and 1e-10 of it in float64.

    Args:
        quantiles: of the `QUANTILE_SCORES`, not falling, `(129,)`.

    Raises:
        ValueError: the quantiles are not so.

    Source: the idea is that of scikit-learn's `QuantileTransformer` with a normal distribution.
    """

    values: Tensor
    scores: Tensor
    slopes: Tensor

    def __init__(self, quantiles: Vector) -> None:
        super().__init__()
        if quantiles.shape != QUANTILE_SCORES.shape or not np.isfinite(quantiles).all():
            raise ValueError(f"quantiles need {len(QUANTILE_SCORES)} finite numbers")
        if (np.diff(quantiles) < 0).any():
            raise ValueError("quantiles need to be in rising order")
        values, scores = _knots(quantiles)
        inner = np.diff(scores) / np.diff(values)
        if not len(inner):  # a constant field: only shifted
            slopes = np.ones(2)
        else:
            mean = (scores[-1] - scores[0]) / (values[-1] - values[0])
            slopes = np.concatenate([[min(inner[0], mean)], inner, [min(inner[-1], mean)]])
        # Piece j of the map starts at knot j - 1, and the piece below all knots at the first one.
        for name, numbers in (
            ("values", values[[0, *range(len(values))]]),
            ("scores", scores[[0, *range(len(scores))]]),
            ("slopes", slopes),
        ):
            self.register_buffer(name, torch.from_numpy(numbers), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Return the scores of values, of any shape; NaN stays."""
        x = values.to(self.values.dtype)
        piece = torch.searchsorted(self.values[1:], x.detach().contiguous(), right=True)
        mapped = self.scores[piece] + (x - self.values[piece]) * self.slopes[piece]
        return mapped.to(values.dtype)

    def invert(self, scores: Tensor) -> Tensor:
        """Return the values of scores, of any shape."""
        z = scores.to(self.scores.dtype)
        piece = torch.searchsorted(self.scores[1:], z.detach().contiguous(), right=True)
        mapped = self.values[piece] + (z - self.scores[piece]) / self.slopes[piece]
        return mapped.to(scores.dtype)


def _knots(quantiles: Vector) -> tuple[Vector, Vector]:
    """Return values and scores of the knots of a map, both rising, of quantiles with ties."""
    least = TIE * (quantiles[-1] - quantiles[0])
    starts = [0]  # the first quantile of each knot
    for index, value in enumerate(quantiles):
        if value - quantiles[starts[-1]] > least:
            starts.append(index)
    last = len(starts) - 1
    scores = []
    for knot, (start, stop) in enumerate(pairwise([*starts, len(quantiles)])):
        low, high = QUANTILE_SCORES[start], QUANTILE_SCORES[stop - 1]
        at_edge = {0: high, last: low} if last else {}
        scores.append(at_edge.get(knot, (low + high) / 2))
    return quantiles[starts], np.array(scores)


def apply_transform(
    values: NDArray[np.floating], variable: VariableConfig, quantiles: QuantileMap | None = None
) -> NDArray[np.floating]:
    """Return one channel transformed; unchanged if its variable has no transform.

    The root with `sqrt`, `log(1 + x / EPS)` with `log1p(EPS)`. For these, negative values count as
    zero: packing may leave slightly negative rain. With `quantile` see `QuantileMap`.
    """
    if not variable.is_transformed:
        return values
    if variable.normalise == "quantile":
        return np.asarray(_known(quantiles)(torch.tensor(values)).numpy())
    positive = np.maximum(values, 0)
    if variable.normalise == "sqrt":
        return np.asarray(np.sqrt(positive))
    return np.asarray(np.log1p(positive / variable.log1p_scale))


def apply_transform_tensor(
    values: Tensor, variable: VariableConfig, quantiles: QuantileMap | None = None
) -> Tensor:
    """Apply the same transform to a tensor; returns it unchanged if there is no transform."""
    if not variable.is_transformed:
        return values
    if variable.normalise == "quantile":
        mapped: Tensor = _known(quantiles)(values)
        return mapped
    if variable.normalise == "sqrt":
        # The root of clamped values has an infinite gradient at 0, which the clamp turns into NaN.
        is_zero = values <= 0  # not NaN, which stays
        return torch.where(is_zero, 0, torch.where(is_zero, 1, values).sqrt())
    return values.clamp(min=0).div_(variable.log1p_scale).log1p_()


def invert_transform(
    values: Tensor, variable: VariableConfig, quantiles: QuantileMap | None = None
) -> Tensor:
    """Return transformed values of one channel in the store's units."""
    if not variable.is_transformed:
        return values
    if variable.normalise == "quantile":
        return _known(quantiles).invert(values)
    if variable.normalise == "sqrt":
        # A model may predict a root below zero, which stands for zero.
        return values.clamp(min=0).square()
    return torch.expm1(values) * variable.log1p_scale


def _known(quantiles: QuantileMap | None) -> QuantileMap:
    if quantiles is None:
        raise ValueError("a channel that is normalised by quantile needs its quantiles")
    return quantiles


def weighted_quantiles(values: NDArray[np.floating], weights: Vector) -> Vector:
    """Return the quantiles of the `QUANTILE_SCORES`, rounded to float32.

    Sorted values stand for the middle of their weights; between them quantiles are interpolated.
    NaN is ignored. Without any value the quantiles are the scores: the map changes nothing.

    Shapes:
        values `(rows, N)`, weights `(rows,)` or `(rows, N)` -> `(129,)`.

    Source: with equal weights, definition 5 of Hyndman & Fan 1996.
    """
    valid = ~np.isnan(values)
    if not valid.any():
        return QUANTILE_SCORES.copy()
    present = values[valid]
    # A stable sort: the sum of weights has the same bits everywhere.
    order = np.argsort(present, kind="stable")
    sorted_weights = np.broadcast_to(weights.reshape(len(weights), -1), values.shape)[valid][order]
    sums = np.cumsum(sorted_weights)
    levels = torch.special.ndtr(torch.from_numpy(QUANTILE_SCORES)).numpy()
    quantiles = np.interp(levels * sums[-1], sums - sorted_weights / 2, present[order])
    # Rounded, so that equal values are equal in every dtype of the map.
    return np.array(quantiles, dtype=np.float32).astype(np.float64)


def sample_quantiles(store: Store, dates: TrainingDates) -> dict[str, Vector]:
    """Return the quantiles, by channel name, of the channels that are normalised by `quantile`.

    They are weighted by area, of the values at up to `QUANTILE_DATES` evenly spaced dates (those of
    all members are one row): at all points or, if these were more than `QUANTILE_VALUES` values, in
    every n-th column, which are others at each date. The result depends neither on chunks nor on
    processes.
    """
    positions = evenly_spaced_indices(store.num_members * len(dates.indices), QUANTILE_DATES)
    samples = [divmod(position, len(dates.indices)) for position in positions]
    rows, columns = store.grid
    stride = -(-len(positions) * rows * columns // QUANTILE_VALUES)
    weights = store.grid.weights
    if weights.ndim == 2:
        parts = [weights[:, number % stride :: stride] for number in range(len(positions))]
        weights = np.concatenate(parts, axis=1)
    found = {}
    for group in channel_groups(store):
        channels = [
            channel
            for channel in group
            if store.config.variable_config(channel.variable).normalise == "quantile"
        ]
        values_of_dates: Sequence[NDArray[np.float32]] = [
            # Not a view of the whole field.
            store.without_rim(block[0], slice(0, rows))[..., number % stride :: stride].copy()
            for number, (member, date) in enumerate(samples if channels else [])
            for index in [int(dates.indices[date])]
            for _, block in store.member(member).blocks(
                channels, slice(index, index + 1), slice(0, rows)
            )
        ]
        for position, channel in enumerate(channels):
            values = np.concatenate([date[position] for date in values_of_dates], axis=-1)
            found[channel.name] = weighted_quantiles(values, weights)
    return found
