"""What the rows of a run's `metrics.csv` come to."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from credit_dp.errors import UserError
from credit_dp.training.csv_log import read_rows

LONGEST_WARM_UP = 10  # steps
TIMES = ("seconds", "samples_per_second", "wait_seconds", "sent_bytes", "sent_messages")

Row = Mapping[str, float]


def rows_of(path: Path) -> list[Row]:
    """The log's rows as numbers, cells that have none left out; none if there is no log."""
    try:
        _, rows = read_rows(path)
    except UserError:
        return []
    return [
        {name: found for name, text in row.items() if (found := number(text)) is not None}
        for row in rows
    ]


def number(text: str) -> float | None:
    """The finite number that a text is; None if it is none."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def settled(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows whose steps all come after the warm-up: ten steps, or a third of all if that is less."""
    if not rows:
        return []
    warm_up = min(LONGEST_WARM_UP, math.ceil(rows[-1]["step"] / 3))
    before = [0.0, *(row["step"] for row in rows)]
    return [row for row, begin in zip(rows, before, strict=False) if begin >= warm_up]


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """One number for each column.

    Medians of what a step takes and sends, without the warm-up; the lowest `validation_rmse`; the
    last value of everything else.
    """
    last = {name: value for row in rows for name, value in row.items()}
    for name in TIMES:
        found = column(settled(rows), name) or column(rows, name)
        if found:
            last[name] = median(found)
    scores = column(rows, "validation_rmse")
    return last | ({"validation_rmse": min(scores)} if scores else {})


def column(rows: Iterable[Row], name: str) -> list[float]:
    """The values of one column, where there are any."""
    return [row[name] for row in rows if name in row]
