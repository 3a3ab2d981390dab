"""Formats tables and sizes in bytes, and prints lines at once."""

import sys
from collections.abc import Sequence

from credit_dp.plain_text import in_one_line, printable

BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0
) -> list[str]:
    """Return the lines of a table: the first `left` columns are left-aligned, all others right."""
    headings, *rows = [[*map(in_one_line, row)] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for row in (headings, *rows):
        cells = [
            cell.ljust(width) if column_number < left else cell.rjust(width)
            for column_number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_bytes(size: float) -> str:
    """Return a size with a decimal unit: `1.5 GB`."""
    unit = 0
    while size >= 999.5 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.{0 if unit == 0 or size >= 99.95 else 1}f} {BYTE_UNITS[unit]}"


def print_lines(*lines: str) -> None:
    """Print lines without commands to a terminal, and flush: they show in logs at once."""
    sys.stdout.write(printable("".join(f"{line}\n" for line in lines)))
    sys.stdout.flush()
