"""The style of all figures: fonts, lines, colours, degrees on maps, and units.

Draw and save figures within `figure_style()`, a `with` block or decorator. Notebooks call
`use_figure_style()` once.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import matplotlib
from cycler import cycler

from credit_dp.plain_text import SUPERSCRIPTS
from credit_dp.plain_text import superscript as superscript

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

# Each source has the same colour and dashes in all figures; they also differ in print without
# colours.
SOURCE_LINES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "forecast": {"color": "#1f4e9c", "linewidth": 2.0},
        "persistence": {"color": "#c2571a", "linestyle": "--"},
        "climatology": {"color": "#5f6b6d", "linestyle": ":", "linewidth": 2.0},
        "truth": {"color": "#111111", "linestyle": "-."},
        "mean": {"color": "#2e8b57", "linestyle": "--"},
        "error of the mean": {"color": "#111111", "linestyle": "-."},
    }
)
# Colours of other lines, such as the runs of a sweep; distinct from persistence and climatology,
# and from each other also to readers who do not tell red from green.
SERIES = (
    "#1f4e9c", "#785611", "#7eb3ce", "#111111", "#7bc059",
    "#3fa684", "#81314c", "#8f63e9", "#111178", "#318181",
)  # fmt: skip
PALE = "#9db4d8"  # single values behind their mean, which has the first colour of `SERIES`
NO_VALUE = "#d4d4d4"  # cells of a map without a value
REFERENCE = "#888888"  # reference lines: zero, the ideal, a tolerance
SEQUENTIAL = "viridis"  # colour map of fields
DIVERGING = "RdBu_r"  # colour map of differences, white at zero
SIZES = "YlOrRd"  # colour map of sizes of errors, pale at zero
TEMPERATURE = "RdYlBu_r"  # without green, which some do not tell from red
MOISTURE = "YlGnBu"
RAIN = "YlGnBu"
COAST = "#7a5230"  # distinct from lines of equal values, which are black
OUTLINE = "#333333"  # of a map
BAND_EDGE = "#7a1fa2"  # between the bands of two ranks
LINE_LABEL_SIZE = 6.5  # of the numbers on lines of equal values

RC_PARAMS: "dict[RcKeyType, Any]" = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib: the same figures on every machine
    # On a phone, which shows the figures of a page in their own size, 8.5 points are 11 pixels.
    "font.size": 8.5,
    "figure.titlesize": 11,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # None would lay out all ticks a second time to avoid overlap
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=SERIES),
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "image.cmap": SEQUENTIAL,
    "savefig.dpi": 130,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text, not outlines of glyphs
    "svg.hashsalt": "credit_dp",  # matplotlib's ids are random by default: files would differ
}

PANEL_CHARACTERS = 44  # of a title that fits above a panel of curves


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the package's style within a `with` block or a decorated function."""
    with matplotlib.rc_context(RC_PARAMS):
        yield


def use_figure_style() -> None:
    """Apply the package's style to all later figures of a notebook, with constrained layout."""
    matplotlib.rcParams.update({**RC_PARAMS, "figure.constrained_layout.use": True})


def series_colour(index: int) -> str:
    """Return the colour of a line by its index, cycling through `SERIES`."""
    return SERIES[index % len(SERIES)]


def latitude_label(degrees: float) -> str:
    """Return a latitude as map label: 60°N, 0°, 30°S."""
    return f"{abs(degrees):g}°{'N' if degrees > 0 else 'S' if degrees < 0 else ''}"


def longitude_label(degrees: float) -> str:
    """Return a longitude, in any range, as map label: 0°, 120°E, 180°, 60°W."""
    east = (degrees + 180.0) % 360.0 - 180.0
    return f"{abs(east):g}°{'' if east in (0.0, -180.0) else 'E' if east > 0 else 'W'}"


def place_label(latitude: float, longitude: float) -> str:
    """Return a place as text: 46.9°N, 7.4°E."""
    return f"{latitude_label(latitude)}, {longitude_label(longitude)}"


def escape_mathtext(text: str) -> str:
    """Escape dollar signs, between which matplotlib would read a formula."""
    return text.replace("$", r"\$")


def title_text(text: str, width: int = PANEL_CHARACTERS) -> str:
    """Return a title with line breaks, after commas if there are any, to fit so many characters.

    A panel of curves has room for two lines.
    """
    lines = []
    while len(text) > width:
        cut = text.rfind(",", 0, width) + 1 or text.rfind(" ", 0, width) + 1
        if not cut:
            break
        lines.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return escape_mathtext("\n".join([*lines, text]))


def with_unit(name: str, unit: str) -> str:
    """Return the label of an axis or colour bar, with the unit in brackets if there is one."""
    return (
        escape_mathtext(name)
        if unit in ("", "1")
        else f"{escape_mathtext(name)} ({unit_label(unit)})"
    )


def power_label(unit: str, length: str = " m") -> str:
    """Return the label of a spectrum's axis, in the field's unit squared times a length, or not."""
    label = unit_label(unit)
    squared = f"{label}²" if label.isalpha() else f"({label})²"
    return f"power ({squared}{length})" if label else "power"


def unit_label(unit: str) -> str:
    """Return a unit for a plot, with superscript exponents."""
    return escape_mathtext(superscript(unit))


def decade_label(value: float, _: float) -> str:
    """Return the label of a tick at a power of ten, such as 10⁻³."""
    return "10" + str(round(math.log10(value))).translate(SUPERSCRIPTS)
