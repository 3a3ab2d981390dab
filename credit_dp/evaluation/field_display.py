"""How maps show a field: its unit, its colours, and where lines of equal values are drawn.

As on weather charts geopotential is a height in dam, temperature is in degrees Celsius, and
pressure in hPa; energy is in MJ, whose numbers fit beside each other. `display_of` knows variables
by their names and units; any other is shown as it is stored.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from credit_dp.data.units import DIMENSIONLESS, GRAVITY, WATER, canonical_unit
from credit_dp.errors import UserError
from credit_dp.evaluation.figure_style import (
    DIVERGING,
    MOISTURE,
    NO_VALUE,
    RAIN,
    SEQUENTIAL,
    SIZES,
    TEMPERATURE,
)
from credit_dp.variable_names import canonical_name

Values = NDArray[np.floating[Any]]
PERCENTILE = 99.5  # of the values, the end of the colours: single points don't set the scale
DEPARTURE_PERCENTILE = 98.0  # the same, so that weak waves have colours, too
COLOUR_STEPS = 14  # about
LINES = 24  # at most, about
MAX_LINES = 200  # with a step of the user's
ROUNDING = 1e-9  # of values: smaller differences are not theirs, but of interpolation and means
NICE = (1, 2, 2.5, 4, 5, 8, 10)  # steps between colours, times a power of ten
LINE_STEPS = (1, 2, 4, 8)  # times a power of ten
SMALL_STEPS = (1, 2, 5)  # times 0.1, 0.01 and so on


@final
class Display(NamedTuple):
    """How a variable is shown: values times `scale` plus `offset`.

    Attributes:
        label: for titles; empty for the variable's name.
        colours: of matplotlib; empty for those that fit the values.
        difference_unit: of errors, which have no offset.
        departure: whether colours show the departure from the mean along each row, so that waves
            are not hidden by the difference between the equator and the poles.
        lines: whether lines of equal values are drawn unless the user says otherwise.
        edges: between colours; empty for even steps.
    """

    label: str = ""
    unit: str = ""
    scale: float = 1.0
    offset: float = 0.0
    colours: str = ""
    difference_unit: str = ""
    departure: bool = False
    lines: bool = False
    centre: float | None = None
    edges: tuple[float, ...] = ()

    def values(self, stored: Values) -> NDArray[np.float64]:
        """Return values of the store as they are shown."""
        return np.asarray(stored, np.float64) * self.scale + self.offset

    def differences(self, stored: Values) -> NDArray[np.float64]:
        """Return differences of the store's values as they are shown."""
        return np.asarray(stored, np.float64) * self.scale


HEIGHT = Display(
    "geopotential height", "dam", 0.1 / GRAVITY, colours=DIVERGING, departure=True, lines=True
)
CELSIUS = Display(unit="°C", offset=-273.15, colours=TEMPERATURE, difference_unit="K")
SEA_LEVEL_PRESSURE = Display(
    "mean sea level pressure", "hPa", 0.01, colours=DIVERGING, lines=True, centre=1010.0
)
PRESSURE = Display(unit="hPa", scale=0.01)
ENERGY = Display(unit="MJ m-2", scale=1e-6)
HUMIDITY = Display(unit="g kg-1", scale=1000.0, colours=MOISTURE)
RAIN_EDGES = (0.1, 0.5, 1.0, 2.0, 4.0, 7.0, 10.0, 20.0, 40.0, 70.0, 100.0)
PRECIPITATION = Display(unit="mm", colours=RAIN, edges=RAIN_EDGES)
# By the unit in the store, as data of other programs may have been converted already.
BY_UNIT = {
    ("geopotential", "m2 s-2"): HEIGHT,
    ("geopotential_at_surface", "m2 s-2"): Display("height of the surface", "m", 1 / GRAVITY),
    ("mean_sea_level_pressure", "Pa"): SEA_LEVEL_PRESSURE,
    ("mean_sea_level_pressure", "hPa"): SEA_LEVEL_PRESSURE._replace(scale=1.0),
    ("specific_humidity", "1"): HUMIDITY,
} | {
    (name, unit): HEIGHT._replace(scale=0.1)
    for name in ("geopotential", "geopotential_height")  # CMIP's zg is the former, in m
    for unit in ("m", "gpm")
}
# Names that contain these words have values on both sides of zero.
SIGNED = ("component_of_wind", "vertical_velocity", "vorticity", "divergence")
COLUMN_WATER = ("total_column_water", "total_column_water_vapour", "relative_humidity")
PRECIPITATIONS = ("precipitation", "snowfall")


def display_of(variable: str, unit: str) -> Display:
    """Return how maps show a variable, by its name and its unit in the store."""
    name, known = canonical_name(variable), canonical_unit(unit)
    known = known.removesuffix(" of water equivalent")
    if name == "geopotential_at_surface" and variable != name:
        name = "geopotential" if variable == "z" else name  # a forecast has z on levels
    found = BY_UNIT.get((name, known))
    if found is None and name.endswith("temperature") and "potential" not in name:
        found = {"K": CELSIUS, "degC": CELSIUS._replace(offset=0.0)}.get(known)
    if found is None and known == "Pa" and name.endswith("pressure"):
        found = PRESSURE
    if found is None and known == "J m-2":
        found = ENERGY
    if found is None and name in COLUMN_WATER:
        found = Display(unit=unit, colours=MOISTURE)
    if found is None and any(word in name for word in PRECIPITATIONS):
        scale = {"m": 1000.0, "kg m-2": 1000.0 / WATER, "mm": 1.0}.get(known)
        found = None if scale is None else PRECIPITATION._replace(scale=scale)
    if found is None:
        unit = "" if known == DIMENSIONLESS else unit
        found = Display(unit=unit, centre=0.0 if any(word in name for word in SIGNED) else None)
    return found._replace(
        label=found.label or name.replace("_", " "),
        difference_unit=found.difference_unit or found.unit,
    )


@final
class ColourScale(NamedTuple):
    """Colours of a map, with edges between them; `extend` says which ends have an arrow."""

    colours: Colormap
    norm: BoundaryNorm
    extend: str

    @property
    def edges(self) -> NDArray[np.float64]:
        """The values at which the colour changes."""
        return np.asarray(self.norm.boundaries, np.float64)


def field_scale(display: Display, *fields: Values) -> ColourScale:
    """Return one scale for fields as they are shown (departures, if the display says so).

    Points count alike: on the raster of an equal-area map, all areas do.
    """
    if display.edges:
        return _scale(display.colours, display.edges, "max", below="white")
    finite = np.concatenate([field[np.isfinite(field)] for field in fields])
    low = _percentile(finite, 100 - PERCENTILE)
    high = _percentile(finite, PERCENTILE)
    if display.departure:
        return _around(0.0, _percentile(np.abs(finite), DEPARTURE_PERCENTILE))
    if display.centre is not None:
        return _around(display.centre, max(high - display.centre, display.centre - low))
    colours = display.colours
    if not colours:
        # About as much above zero as below.
        if low < 0 < high and min(high, -low) > 0.2 * max(high, -low):
            return _around(0.0, max(high, -low))
        colours = SEQUENTIAL
    return _scale(colours, _steps(low, high), "both")


def error_scale(*errors: Values) -> ColourScale:
    """Return a scale around zero, as long on both sides."""
    return _around(0.0, _limit(*(np.abs(error) for error in errors)))


def size_scale(values: Values) -> ColourScale:
    """Return a scale from zero, of values that are not negative."""
    return _scale(SIZES, _steps(0.0, _limit(values)), "max")


def _around(centre: float, limit: float) -> ColourScale:
    limit = limit or 1.0
    locator = MaxNLocator(COLOUR_STEPS, steps=NICE, symmetric=True)
    edges = np.asarray(locator.tick_values(-limit, limit))
    # The two colours beside the centre are one, so that small values are white.
    return _scale(DIVERGING, centre + edges[np.abs(edges) > 1e-9 * limit], "both")


def _steps(low: float, high: float) -> NDArray[np.float64]:
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        # The same everywhere: in the middle of a colour, so that rounding changes none.
        return low + (0.1 * abs(low) or 1.0) * np.linspace(-0.9, 0.9, 10)
    return np.asarray(MaxNLocator(COLOUR_STEPS, steps=NICE).tick_values(low, high))


def _scale(
    name: str, edges: Sequence[float] | NDArray[np.float64], extend: str, below: str = ""
) -> ColourScale:
    first = int(extend == "both")
    inner = len(edges) - 1
    shades = [
        (float(red), float(green), float(blue))
        for red, green, blue, _ in matplotlib.colormaps[name](np.linspace(0, 1, first + inner + 1))
    ]
    colours = ListedColormap(shades[first : first + inner], name).with_extremes(
        bad=NO_VALUE, under=below or shades[0], over=shades[-1]
    )
    return ColourScale(colours, BoundaryNorm(np.asarray(edges), inner), extend)


def _limit(*fields: Values) -> float:
    finite = np.concatenate([field[np.isfinite(field)] for field in fields])
    return _percentile(finite, PERCENTILE) or _percentile(finite, 100) or 1.0


def _percentile(values: Values, percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else 0.0


def line_values(values: Values, step: float | None = None) -> NDArray[np.float64]:
    """Return the values of lines: multiples of a step, or of a round one that fits the range.

    Charts have 4 or 8 dam, and 4 hPa. A field that is the same everywhere has no lines.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.empty(0)
    low, high = float(finite.min()), float(finite.max())
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        return np.empty(0)
    if step is None:
        least = (high - low) / LINES
        power = 10.0 ** np.floor(np.log10(least))
        steps = (*(LINE_STEPS if power >= 1 else SMALL_STEPS), 10)
        step = next(float(x * power) for x in steps if x * power >= least * (1 - 1e-9))
    if (high - low) / step > MAX_LINES:
        raise UserError(
            f"contours: {step:g} gives more than {MAX_LINES} lines. Give a larger step."
        )
    return np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step


def departure_from_rows(values: Values) -> NDArray[np.float64]:
    """Return a field `(H, W)` minus the mean of each row, of the points with a value."""
    valid = np.isfinite(values)
    count = np.maximum(valid.sum(axis=1, keepdims=True), 1)
    mean = np.where(valid, values, 0.0).sum(axis=1, keepdims=True) / count
    departure = np.asarray(values - mean, np.float64)
    return np.where(np.abs(departure) <= ROUNDING * np.abs(mean), 0.0, departure)
