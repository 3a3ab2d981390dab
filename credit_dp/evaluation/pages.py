"""HTML pages: their templates, and tables that are coloured by differences in percent.

The templates are in `templates/`. A page needs no other file: figures are `data:` URIs.
"""

import base64
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import jinja2
import numpy as np
from numpy.typing import NDArray

from credit_dp.data.sampling import evenly_spaced_indices
from credit_dp.evaluation.scorecard import in_order, variable_and_level

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render_page(template: str, **content: object) -> str:
    """Return a page as HTML text; texts of `content` are escaped."""
    return TEMPLATES.get_template(template).render(content)


def data_uri(content: bytes, image_format: str) -> str:
    """Return an image as `data:` URI."""
    kind = "image/svg+xml" if image_format == "svg" else f"image/{image_format}"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# From better to worse. Source: ColorBrewer 2.0, RdBu.
COLOURS = ("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b")
COLOUR_LIMITS = (4, 10, 20, 50, 100)  # percent, at the ends of the scale; halves are whole, too
SHARE_WITHIN_LIMIT = 0.9  # of the differences; the others have the colour of the end
MAX_DARK_LUMINANCE = 0.18  # up to which white text stands out better than black
MAX_LEADS = 12  # columns


class ColouredCell(NamedTuple):
    """A cell with its colours, as hexadecimal RGB; without a colour if it has no number."""

    text: str
    background: str
    colour: str


class DifferenceTable(NamedTuple):
    """The RMSE of a forecast relative to that of a reference, in percent.

    Attributes:
        limit: percent at the ends of the colour scale.
        variables: name, and for each level its text and a cell for each lead time.
        key: cells of the colour scale, from better to worse.
    """

    identifier: str
    forecast: str
    reference: str
    limit: int
    leads: list[str]
    variables: list[tuple[str, list[tuple[str, list[ColouredCell]]]]]
    key: list[ColouredCell]


class Triangle(NamedTuple):
    """A character that shows a difference, its CSS classes, and the text beside the pointer."""

    text: str
    style: str
    title: str


class SignificanceTable(NamedTuple):
    """Where a forecast is better or worse than a reference by more than chance.

    Attributes:
        variables: name, and for each level its text and a triangle for each lead time.
    """

    caption: str
    leads: list[str]
    variables: list[tuple[str, list[tuple[str, list[Triangle]]]]]


VERY_SIGNIFICANT, SIGNIFICANT = 0.003, 0.05  # three and two standard deviations of a normal one


def triangle(improvement: float, p: float, title: str) -> Triangle:
    """Return the sign of a difference: large, small or, where it may be chance, a dot.

    Args:
        improvement: positive if the forecast is better.
        p: the probability of such a difference by chance.
    """
    if not p < SIGNIFICANT or not improvement:
        return Triangle("\N{MIDDLE DOT}", "chance", title)
    size = "large" if p < VERY_SIGNIFICANT else "small"
    if improvement > 0:
        return Triangle("\N{BLACK UP-POINTING TRIANGLE}", f"better {size}", title)
    return Triangle("\N{BLACK DOWN-POINTING TRIANGLE}", f"worse {size}", title)


Cell = TypeVar("Cell")


def by_variable(
    channels: Sequence[str], cells: Sequence[list[Cell]]
) -> list[tuple[str, list[tuple[str, list[Cell]]]]]:
    """Return the cells of each channel by variable, then by level, in the order of tables."""
    rows = [(*variable_and_level(channels[c]), cells[c]) for c in in_order(channels)]
    return [
        (variable, [(level, row) for _, level, row in levels])
        for variable, levels in groupby(rows, key=lambda row: row[0])
    ]


def difference_table(
    names: tuple[str, str],
    channels: Sequence[str],
    hours: Sequence[int],
    errors: tuple[NDArray[np.float64], NDArray[np.float64]],
    identifier: str,
) -> DifferenceTable:
    """Return the table of a forecast and a reference.

    Args:
        errors: RMSE of both, `(leads, C)`, NaN where there is none.
    """
    forecast, reference = errors
    leads = shown_lead_indices(hours)
    known = np.where(reference > 0, reference, np.nan)
    percent = (100 * (forecast - known) / known)[leads]
    sizes = np.abs(percent[np.isfinite(percent)])
    within = float(np.quantile(sizes, SHARE_WITHIN_LIMIT)) if len(sizes) else 0.0
    limit = next((x for x in COLOUR_LIMITS if within <= x), COLOUR_LIMITS[-1])
    cells = [[coloured_cell(x, limit) for x in column] for column in percent.T.tolist()]
    key = [coloured_cell(x, limit) for x in np.linspace(-limit, limit, 5).tolist()]
    headings = [lead_label(hours[lead], hours[-1]) for lead in leads]
    variables = by_variable(channels, cells)
    return DifferenceTable(identifier, *names, limit, headings, variables, key)


def shown_lead_indices(hours: Sequence[int]) -> list[int]:
    """Return the indices of the lead times of a table: whole days if there are several."""
    later = [lead for lead, hour in enumerate(hours) if hour > 0] or list(range(len(hours)))
    days = [lead for lead in later if hours[lead] % 24 == 0]
    shown = days if len(days) > 1 else later
    return [shown[index] for index in evenly_spaced_indices(len(shown), MAX_LEADS)]


def lead_label(hours: int, longest: int) -> str:
    """Return a lead time as text: in days where the longest one is beyond two."""
    return f"{hours / 24:g} d" if longest > 48 else f"{hours} h"


def coloured_cell(percent: float, limit: int) -> ColouredCell:
    """Return a difference with the colour of its size."""
    if not np.isfinite(percent):
        return ColouredCell("-", "", "")
    where = (float(np.clip(percent / limit, -1, 1)) + 1) / 2 * (len(COLOURS) - 1)
    stops = np.array([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in COLOURS])
    mixed = [np.interp(where, np.arange(len(COLOURS)), stops[:, i]) for i in range(3)]
    rgb = np.round(mixed).astype(int)
    # Source: Web Content Accessibility Guidelines 2.1, relative luminance.
    linear = np.where(rgb <= 10, rgb / 255 / 12.92, ((rgb / 255 + 0.055) / 1.055) ** 2.4)
    dark = float(linear @ [0.2126, 0.7152, 0.0722]) <= MAX_DARK_LUMINANCE
    text = f"{percent:+.0f}".replace("-", "\N{MINUS SIGN}")
    text = "0" if text[1:] == "0" else text
    background = "#" + "".join(f"{part:02x}" for part in rgb.tolist())
    return ColouredCell(text, background, "#ffffff" if dark else "#000000")
