"""Which dates the climate covers: independent runs laid end to end with gaps between them.

Independent runs keep all cores busy. A gap keeps a forecast from starting in one and ending in the
next, and makes the last runs a truly held-out climate.
"""

from dataclasses import asdict, dataclass
from hashlib import sha256
from json import dumps
from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import QuickstartConfig
from credit_dp.data.quickstart.model import Physics
from credit_dp.errors import UserError

VERSION = 2  # raise it when code changes what a store holds
GAP_DAYS = 10
STEPS_PER_DAY = 4
BYTES_AT_ONCE = 64 * 2**20  # of fields in memory per process
LONGEST_SHARD = 40  # time steps: keeps the index that a read fetches small
FIELDS = 14  # two-dimensional fields in one time step

Times = NDArray[np.datetime64]


def resolve_grid(config: QuickstartConfig, grid: tuple[int, int] | None) -> tuple[int, int]:
    """The grid asked for, or the one that resolves products of fields at this truncation."""
    if not 5 <= config.truncation <= 255:
        raise UserError(
            f"data.quickstart.truncation: needs a number from 5 to 255, but it is "
            f"{config.truncation}. Take 21 (the default) or 42."
        )
    if grid is None:
        rows = 8 * -(-(3 * config.truncation + 1) // 16)
        return rows, 2 * rows
    if min(grid) < 4:
        raise UserError(
            f"data.grid: the quickstart climate needs at least 4 rows and 4 columns, but the grid "
            f"is {grid[0]}x{grid[1]}. Set data.grid to something like 32x64."
        )
    return grid


def store_name(config: QuickstartConfig, grid: tuple[int, int] | None) -> str:
    """A folder name that differs whenever the store's content would."""
    rows, columns = resolve_grid(config, grid)
    content = [asdict(config), asdict(Physics()), rows, columns, VERSION]
    fingerprint = sha256(dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return f"quickstart-T{config.truncation}-{rows}x{columns}-{fingerprint}.zarr"


@final
@dataclass(frozen=True)
class Run:
    """One independent integration. Its time steps `first:first + steps` are its own."""

    index: int
    start: np.datetime64
    first: int
    steps: int

    @property
    def times(self) -> Times:
        """Six-hourly, `(steps,)`."""
        hours = 24 // STEPS_PER_DAY
        return np.asarray(self.start + np.arange(self.steps) * np.timedelta64(hours, "h"))


def runs(config: QuickstartConfig) -> list[Run]:
    """The runs of a store in order of time."""
    try:
        start = np.datetime64(config.start, "h")
    except ValueError:
        raise UserError(
            f"data.quickstart.start: needs a date like 2001-01-01, but it is {config.start!r}."
        ) from None
    period = np.timedelta64(config.run_days + GAP_DAYS, "D")
    steps = config.run_days * STEPS_PER_DAY
    return [Run(i, start + i * period, i * steps, steps) for i in range(config.runs)]


def shard_steps(steps: int, grid: tuple[int, int]) -> int:
    """Time steps per file: the most that memory allows and that divide a run."""
    per_step = FIELDS * 4 * grid[0] * grid[1]
    most = max(1, min(LONGEST_SHARD, BYTES_AT_ONCE // per_step))
    return max(n for n in range(1, most + 1) if steps % n == 0)


def day_of_year(time: np.datetime64) -> float:
    """Days since the year's first midnight."""
    return float((time - time.astype("datetime64[Y]")) / np.timedelta64(1, "D"))
