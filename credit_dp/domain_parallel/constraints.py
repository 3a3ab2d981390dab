"""Warnings about a band's number of rows, before anything is converted."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

# Attributes that hold an attention's window.
WINDOWS = ("window_size", "window")
STRIDED = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
        for size in map(_rows_of, (getattr(layer, name, None) for name in WINDOWS)):
            if size is not None and size > 1:
                levels[-1].windows.add(size)
        # Rows are the last dimension but one; those of one-dimensional layers are the last.
        stride = layer.stride[max(-2, -len(layer.stride))] if isinstance(layer, STRIDED) else 1
        if stride > 1:
            levels[-1] = levels[-1]._replace(stride=stride)
            levels.append(_Level(1, set()))
    return levels


def _rows_of(window: object) -> int | None:
    """Return the rows of a window: a number, or the last but one of (levels,) rows, columns."""
    if isinstance(window, (list, tuple)) and len(window) > 1:
        window = window[-2]
    return window if isinstance(window, int) and not isinstance(window, bool) else None
