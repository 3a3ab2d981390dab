"""What torch's functions of these names make of the whole globe, in a model's own code.

In a model that was not converted they are torch's. In a converted one, and with `manager`, the
input has this rank's rows, and so has the result. Sizes are those of the whole globe.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.layers.interpolate import (
    DomainParallelInterpolate,
    DomainParallelUpsample,
)
from credit_dp.domain_parallel.layers.pad import DomainParallelPad
from credit_dp.domain_parallel.layers.reduce import DomainParallelMean
from credit_dp.domain_parallel.layers.roll import DomainParallelRoll
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM
from credit_dp.domain_parallel.planner import active_planner
from credit_dp.domain_parallel.running import (
    Running,
    announced,
    any_converted,
    in_backward,
    recomputed,
    running,
)
from credit_dp.errors import UserError

__all__ = ["interpolate", "mean", "pad", "roll"]

Make = Callable[[DomainParallelManager], RowLayer]


def mean(
    x: Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return `torch.mean` of the whole globe, the same on every rank if rows are among `dim`.

    Args:
        x: `(..., H_local, W)`.
        dim: dimensions to reduce; all by default.
        keepdim: whether they stay, with one entry each.
        manager: only needed where no module of a converted model runs.
    """
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelMean(dims, keepdim, manager=manager)

    layer = _layer(f"functional.mean(dim={dim}, keepdim={keepdim})", x, make, manager)
    made: Tensor = torch.mean(x, dims, keepdim) if layer is None else layer(x)
    return made


def interpolate(
    x: Tensor,
    size: int | tuple[int, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `F.interpolate` of the whole globe.

    Args:
        x: `(B, C, H_local, W)`, also `(B, C, D, H_local, W)`.
        size: of the whole globe's result.
        scale_factor: instead of `size`.
        mode: as in torch, without antialias.
        align_corners: as in torch.
        manager: only needed where no module of a converted model runs.
    """

    def make(manager: DomainParallelManager) -> RowLayer:
        if _is_planned():  # then the audit has seen that `size` is not a band's
            upsample = nn.Upsample(size, scale_factor, mode, align_corners)
            return DomainParallelUpsample(upsample, manager=manager)
        return DomainParallelInterpolate(
            size, mode, scale_factor=scale_factor, align_corners=align_corners, manager=manager
        )

    settings = f"size={size}, scale_factor={scale_factor}, mode={mode}, align={align_corners}"
    layer = _layer(f"functional.interpolate({settings})", x, make, manager)
    if layer is None:
        return F.interpolate(x, size, scale_factor, mode, align_corners)
    made: Tensor = layer(x)
    return made


def pad(
    x: Tensor,
    pad: tuple[int, ...],
    mode: str = "constant",
    value: float | None = None,
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `F.pad` of the whole globe; negative widths crop.

    Args:
        x: `(..., H_local, W)`.
        pad: widths in torch's order: west, east, north, south, ...
        mode: as in torch.
        value: as in torch.
        manager: only needed where no module of a converted model runs.
    """
    widths = tuple(pad)

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelPad(widths, mode, value, manager=manager)

    layer = _layer(f"functional.pad(pad={widths}, mode={mode}, value={value})", x, make, manager)
    made: Tensor = F.pad(x, widths, mode, value) if layer is None else layer(x)
    return made


def roll(
    x: Tensor,
    shifts: int | tuple[int, ...],
    dims: int | tuple[int, ...],
    *,
    manager: DomainParallelManager | None = None,
) -> Tensor:
    """Return this rank's rows of `torch.roll` of the whole globe.

    Args:
        x: `(..., H_local, W)`.
        shifts: places to move by, one for each of `dims`.
        dims: dimensions to roll.
        manager: only needed where no module of a converted model runs.
    """

    def make(manager: DomainParallelManager) -> RowLayer:
        return DomainParallelRoll(shifts, dims, manager=manager)

    layer = _layer(f"functional.roll(shifts={shifts}, dims={dims})", x, make, manager)
    made: Tensor = torch.roll(x, shifts, dims) if layer is None else layer(x)
    return made


def _is_planned() -> bool:
    current = running()
    return active_planner() is not None or (current is not None and current.planned)


def _layer(
    call: str, x: Tensor, make: Make, manager: DomainParallelManager | None
) -> RowLayer | None:
    """Return the layer that does a call; None where it is torch's own."""
    current, planner = running(), active_planner()
    if current is None and manager is None and in_backward() and any_converted():
        current = _recomputing(call)
    if current is not None and manager in (None, current.manager):
        key = (call, x.ndim)
        if key not in current.layers:
            if planner is None and current.planned:
                raise UserError(
                    f"{call}: the plan has not seen this call. Convert with inputs that lead to it."
                )
            current.layers[key] = make(current.manager)
        layer = current.layers[key]
    elif manager is not None:
        if manager.domain_parallel_size == 1:
            return None
        layer = make(manager)
    else:
        return None
    if planner is not None:
        planner.names[layer] = call
    elif not layer.is_planned and (x.ndim < FIELD_DIMS or not layer.mixes(ROW_DIM, x.ndim)):
        layer.set_apart()
    return layer


def _recomputing(call: str) -> Running | None:
    """Return the converted model whose code is computed again in backward; None for a plain one."""
    module = recomputed()
    if module is None:
        raise UserError(
            f"{call}: is computed again in a backward pass, where it can't be known whether its "
            "model is sharded. Pass manager=, or checkpoint a module instead of a function."
        )
    return next(iter(announced(module, inside=False)), None)
