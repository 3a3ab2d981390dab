"""Warnings about a band's number of rows, before anything is converted."""

from __future__ import annotations

from torch import nn


def validate_sharding_constraints(
    model: nn.Module, local_h: int, window_sizes: list[int] | None = None
) -> list[str]:
    """Return readable warnings about a band of `local_h` rows, none if it suits the model.

    Every band gives exact results; a level whose band is no multiple of its stride or window has
    to move rows between ranks, and a level without rows is refused at conversion.

    Args:
        model: before or after conversion; its strided convolutions make the levels.
        local_h: rows of one rank at the model's input.
        window_sizes: attention window per level, finest first.
    """
    layers = [m.__dict__.get("wrapped", m) for m in model.modules()]
    strides = [m.stride[0] for m in layers if isinstance(m, nn.Conv2d) and m.stride[0] > 1]
    rows, warnings = local_h, []
    for level in range(len(strides) + 1):
        window = window_sizes[level] if window_sizes and level < len(window_sizes) else 1
        if rows % window:
            warnings.append(f"level {level}: {rows} rows are no multiple of the window {window}")
        if level < len(strides):
            if rows % strides[level]:
                warnings.append(
                    f"level {level}: {rows} rows are no multiple of the stride {strides[level]}"
                )
            rows //= strides[level]
    if rows < 1:
        warnings.append(f"the coarsest level has less than one row of {local_h}; use fewer ranks")
    return warnings
