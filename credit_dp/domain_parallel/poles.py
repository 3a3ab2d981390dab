"""What lies beyond the first and the last row of the globe."""

from __future__ import annotations

from credit_dp.domain_parallel.exchange import Run
from credit_dp.errors import UserError

# What each mode shows at rows -2, -1 | 0, 1, ... (0 is the pole's row):
#   zeros 0, 0     replicate 0, 0     circular H-2, H-1     reflect 2, 1     mirror 1, 0
#   earth 1, 0 rotated by half the longitudes, as a walk across the pole sees them
MODES = ("zeros", "replicate", "circular", "reflect", "mirror", "earth")


def rows_with_poles(start: int, stop: int, height: int, mode: str) -> tuple[Run, ...]:
    """Return the rows `start` to `stop - 1`, where those below 0 or from `height` on are padding.

    Raises:
        UserError: the padding is wider than what the mode can show.
    """
    widest = height if mode in ("circular", "mirror", "earth") else height - 1
    if mode not in ("zeros", "replicate") and max(-start, stop - height) > widest:
        raise UserError(
            f"padding: {max(-start, stop - height)} rows beyond a pole need as many on the globe, "
            f"which has {height}. Use a finer grid or less padding."
        )
    runs = (
        *_north(start, min(stop, 0), height, mode),
        Run(max(start, 0), min(stop, height)),
        *_south(max(start, height), stop, height, mode),
    )
    return tuple(run for run in runs if run.length > 0)


def _north(start: int, stop: int, height: int, mode: str) -> tuple[Run, ...]:
    match mode:
        case "zeros":
            return (Run(0, stop - start, blank=True),)
        case "replicate":
            return (Run(0, 1),) * (stop - start)
        case "circular":
            return (Run(height + start, height + stop),)
        case "reflect":
            return (Run(1 - stop, 1 - start, flipped=True),)
        case _:
            return (Run(-stop, -start, flipped=True, turned=mode == "earth"),)


def _south(start: int, stop: int, height: int, mode: str) -> tuple[Run, ...]:
    match mode:
        case "zeros":
            return (Run(0, stop - start, blank=True),)
        case "replicate":
            return (Run(height - 1, height),) * (stop - start)
        case "circular":
            return (Run(start - height, stop - height),)
        case "reflect":
            return (Run(2 * height - 1 - stop, 2 * height - 1 - start, flipped=True),)
        case _:
            turned = mode == "earth"
            return (Run(2 * height - stop, 2 * height - start, flipped=True, turned=turned),)
