"""Plain-text tables, amounts of bytes, and lines printed at once."""

import sys
from collections.abc import Sequence

BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_table(names: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lines with columns of equal width: the first `left` flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = []
    for row in (names, *rows):
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_bytes(count: float) -> str:
    """Bytes with a unit of thousands: `1.5 GB`."""
    unit = 0
    while count >= 999.5 and unit < len(BYTE_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{0 if unit == 0 or count >= 99.95 else 1}f} {BYTE_UNITS[unit]}"


def print_line(line: str) -> None:
    """Write a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
