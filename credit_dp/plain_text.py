"""Texts that hold names from data files, for terminals and spreadsheets.

A name may contain what a terminal takes for a command, or begin as a formula of a spreadsheet does.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

# All but tabs and line breaks; also marks that turn the direction of text, and bytes of paths that
# are not UTF-8.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The exponent in a unit: m2 s-2, m**2 s**-2, m^2 s^-2.
EXPONENT = re.compile(r"(?<=[A-Za-z])(?:\*\*|\^)?(-?\d+)")
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FORMULA = ("=", "+", "-", "@")  # with which formulas of spreadsheets begin


def printable(text: str) -> str:
    r"""Return a text in which control characters are written as Python does, such as `\x1b`."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str) -> str:
    """Return a printable text without tabs and line breaks."""
    return printable(re.sub(r"[\t\r\n]+", " ", text))


def superscript(unit: str) -> str:
    """Return a unit as plain text with superscript exponents: m2, m^2 and m**2 become m²."""
    return EXPONENT.sub(lambda match: match[1].translate(SUPERSCRIPTS), unit)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV; texts that spreadsheets would take for formulas begin with '."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([*map(_cell, row)] for row in (columns, *rows))
    return text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = in_one_line(value)
    return f"'{text}" if text.lstrip().startswith(FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
