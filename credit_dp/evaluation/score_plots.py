"""Draw maps, curves and spectra.

`draw_map`, `draw_rmse`, `draw_spectra` and `draw_last_lead_errors` write the PNGs of a run;
`score_folder` uses the panels for scorecards.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from credit_dp.errors import UserError, counted
from credit_dp.evaluation.figure_style import (
    REFERENCE,
    SOURCE_LINES,
    decade_label,
    figure_style,
    power_label,
    series_colour,
    title_text,
    with_unit,
)
from credit_dp.evaluation.held_out import LastLeadDiagnostics
from credit_dp.evaluation.metric_table import METRICS, SPECTRA_SOURCES, TRUTH
from credit_dp.evaluation.metrics import LATITUDE_BANDS, REGION_BAND
from credit_dp.evaluation.scorecard import HeldOutScores
from credit_dp.files import atomic_path

Corner = Literal["upper left", "upper right", "lower left", "lower right"]


@figure_style()
def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG atomically.

    Raises:
        UserError: the file can't be written.
    """
    try:
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")
    except OSError as error:
        raise UserError(
            f"{path}: the plot could not be written ({error.strerror}). "
            "Free space there or change run.dir."
        ) from error


PANEL_COLUMNS = 3
PANEL_INCHES = (3.6, 2.7)  # width, height
LEGEND_LINE_INCHES = 0.18
LEGEND_COLUMNS = 4
MAX_LABELS_INSIDE = 4  # of a legend inside a panel
POINTS_BETWEEN = 20  # two points of a curve, where a legend must not be
CHARACTER_INCHES = 0.074  # of a legend
TITLE_INCHES = 0.3
MAX_POWER_TICKS = 7  # on the axis of a spectrum
MIN_POWER_RATIO = 100.0  # largest to smallest power; beyond, ticks are powers of ten
MAX_POWER_DEFICIT = 30.0  # how far below the other source's power the axis of a spectrum reaches
NO_SPECTRUM = "values are missing"
WAVENUMBER_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
NUMBER = "{x:g}"  # ticks as 2e-05: a common factor above the axis would be on the title
MAX_LEAD_TICKS = 8
HOUR_STEPS = (1, 3, 6)  # between ticks
MAX_AXIS_HOURS = 48  # longer lead times are shown in days


def create_panels(
    count: int, title: str = "", labels: Sequence[str] = ()
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes, and with room above for a legend of many `labels`.

    All figures are as wide as one with all columns: on a page their letters have the same size.
    """
    rows = -(-count // PANEL_COLUMNS)
    width = PANEL_INCHES[0] * PANEL_COLUMNS
    top = (TITLE_INCHES if title else 0.0) + legend_inches(labels, width)
    height = PANEL_INCHES[1] * rows + top
    figure = Figure(figsize=(width, height))
    # Fixed margins: a layout engine takes longer than drawing the curves.
    figure.subplots_adjust(
        left=0.8 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - (top + 0.35) / height,
        wspace=0.34,
        hspace=0.42,
    )
    if title:
        figure.suptitle(title, x=0.01, y=1 - 0.08 / height, ha="left", va="top")
    panels = list(figure.subplots(rows, PANEL_COLUMNS, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def legend_inches(labels: Sequence[str], width: float) -> float:
    """Return the height of a legend above the panels; 0 if it is inside one."""
    if len(labels) <= MAX_LABELS_INSIDE:
        return 0.0
    return LEGEND_LINE_INCHES * -(-len(labels) // legend_columns(labels, width))


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns a legend has in a figure of so many inches."""
    longest = max(map(len, labels), default=0)
    return max(1, min(LEGEND_COLUMNS, int(width / (0.5 + CHARACTER_INCHES * longest))))


def add_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Add a legend of the curves: in a panel that has room, or above all."""
    # All panels have the same curves, but for those without a spectrum.
    legends = [axes.get_legend_handles_labels() for axes in panels]
    longest = max(range(len(panels)), key=lambda index: len(legends[index][1]))
    handles, labels = legends[longest]
    if not labels:
        return
    if len(labels) <= MAX_LABELS_INSIDE:
        place_legend(figure, panels, handles, labels)
        return
    columns = legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="upper left", ncols=min(len(labels), columns))


def place_legend(
    figure: Figure, panels: Sequence[Axes], handles: Sequence[Artist], labels: Sequence[str]
) -> None:
    """Add a legend in a corner without curves; without any, in the row of the title."""
    corners = [(axes, corner) for axes in panels for corner in free_corners(axes, labels)]
    if corners:
        axes, corner = corners[0]
        axes.legend(handles, labels, loc=corner)
        return
    columns = legend_columns(labels, figure.get_figwidth())
    has_title = bool(figure.get_suptitle())
    if not has_title:
        add_row_above(figure, LEGEND_LINE_INCHES * -(-len(labels) // columns))
    place: Corner = "upper right" if has_title else "upper left"  # which phones show first
    figure.legend(handles, labels, loc=place, ncols=columns)


def add_row_above(figure: Figure, inches: float) -> None:
    """Make a figure higher; its panels keep their size."""
    margins, old = figure.subplotpars, figure.get_figheight()
    new = old + inches
    figure.set_figheight(new)
    figure.subplots_adjust(bottom=margins.bottom * old / new, top=margins.top * old / new)


def legend_share(axes: Axes, labels: Sequence[str]) -> tuple[float, float]:
    """Return the width and the height of a legend in parts of a panel's."""
    width, height = axes.bbox.width / axes.figure.dpi, axes.bbox.height / axes.figure.dpi
    wide = 0.6 + CHARACTER_INCHES * max(map(len, labels))
    return wide / width, (0.15 + LEGEND_LINE_INCHES * len(labels)) / height


def free_corners(axes: Axes, labels: Sequence[str]) -> list[Corner]:
    """Return the corners of a panel where a legend covers no curve; none without curves."""
    axes.autoscale_view()  # now the transform knows the limits
    to_panel = axes.transData + axes.transAxes.inverted()
    curves = [np.asarray(line.get_xydata()) for line in axes.lines]
    steps = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    curves += [np.asarray(patch.get_path().vertices) for patch in steps]
    points = []
    for curve in curves:
        x, y = to_panel.transform(curve).T
        number = np.arange(len(x))
        between = np.linspace(0, len(x) - 1, POINTS_BETWEEN * len(x))
        points.append(np.stack([np.interp(between, number, part) for part in (x, y)]))
    if not points:
        return []
    x, y = np.concatenate(points, axis=1)
    wide, high = legend_share(axes, labels)
    covered: dict[Corner, np.ndarray] = {
        "upper left": (x < wide) & (y > 1 - high),
        "upper right": (x > 1 - wide) & (y > 1 - high),
        "lower left": (x < wide) & (y < high),
        "lower right": (x > 1 - wide) & (y < high),
    }
    return [corner for corner, inside in covered.items() if not inside.any()]


def draw_scores(
    axes: Axes, hours: Sequence[int], values: Mapping[str, np.ndarray], title: str, label: str
) -> None:
    """Draw a score by lead time.

    Args:
        values: `(leads,)` of each source.
        label: of the vertical axis, with unit.
    """
    leads = lead_axis(axes, hours)
    for source, scores in values.items():
        axes.plot(
            leads,
            scores,
            label=source,
            marker="o" if len(leads) < 13 else "",
            **SOURCE_LINES[source],
        )
    axes.set_title(title_text(title.replace("_", " ")))
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(NUMBER)


def start_at_zero(axes: Axes) -> None:
    """Let the vertical axis of values that are not negative start at zero."""
    # The margin above the curves is a share of the axis: it has to be known that zero is on it.
    axes.update_datalim([(0, 0)], updatex=False)
    axes.autoscale_view(scalex=False)
    axes.set_ylim(bottom=0)


def lead_axis(axes: Axes, hours: Sequence[float]) -> np.ndarray:
    """Label the axis of lead times, and return their places on it: hours, or days if it is long."""
    if max(hours) > MAX_AXIS_HOURS:
        axes.set_xlabel("lead time (days)")
        axes.xaxis.set_major_locator(MaxNLocator(MAX_LEAD_TICKS, integer=True))
        return np.array(hours) / 24
    axes.set_xlabel("lead time (hours)")
    if len(hours) <= MAX_LEAD_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(hours))
        return np.array(hours)
    spacing = next(step for step in HOUR_STEPS if max(hours) <= step * MAX_LEAD_TICKS)
    axes.xaxis.set_major_locator(MultipleLocator(spacing))
    return np.array(hours)


def draw_spectrum(
    axes: Axes,
    powers: Mapping[str, np.ndarray],
    name: str,
    unit: str,
    wavelength: float | None = None,
) -> None:
    """Draw the power `(N,)` of each source by wavenumber, starting at 1.

    The axis has zonal wavenumbers, or on a region, given the wavelength of 1, wavelengths.

    Without any power, as of a field that has missing values in each row, a text says so.
    """
    axes.set_title(title_text(name.replace("_", " ")))
    if not any(map(has_power, powers.values())):
        axes.set_axis_off()
        axes.text(0.5, 0.5, NO_SPECTRUM, transform=axes.transAxes, ha="center")
        return
    lowest = lowest_power(np.stack(list(powers.values())))
    # Both end where the truth does, as that of a simulation at its truncation.
    waves = np.arange(1, 1 + last_wavenumber(powers[TRUTH], lowest or 0.0))
    places = waves if wavelength is None else wavelength / 1000 / waves
    for source, spectrum in powers.items():
        power = spectrum[waves]
        positive = np.where(power > 0, power, np.nan)  # a logarithmic axis has no zero
        axes.plot(places, positive, label=source, **SOURCE_LINES[source])
    axes.set_yscale("log")
    axes.set_ylim(bottom=lowest)
    label_waves(axes, len(waves), wavelength)
    low, high = axes.get_ylim()
    if high > MIN_POWER_RATIO * low:  # otherwise powers of ten would be too few ticks
        axes.yaxis.set_major_locator(LogLocator(numticks=MAX_POWER_TICKS))
        axes.yaxis.set_major_formatter(decade_label)
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(NUMBER)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(power_label(unit, " m" if wavelength is None else ""))


def label_waves(axes: Axes, waves: int, wavelength: float | None) -> None:
    """Label the axis of wavenumbers from 1 on, or on a region of wavelengths."""
    axes.set_xscale("log")
    # A tick takes as long to draw as a curve, and a logarithmic axis has hundreds by default.
    if wavelength is None:
        axes.xaxis.set_major_locator(FixedLocator([k for k in WAVENUMBER_TICKS if k <= waves]))
        axes.set_xlabel("zonal wavenumber")
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.set_xlabel("wavelength (km)")
        axes.invert_xaxis()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def draw_spread_error(
    axes: Axes, ratios: Mapping[str, np.ndarray], name: str, wavelength: float | None = None
) -> None:
    """Draw the ratio of spread and error `(N,)` at several lead times by wavenumber, from 1 on."""
    axes.axhline(1, color=REFERENCE, linewidth=0.8)
    for number, (label, ratio) in enumerate(ratios.items()):
        waves = np.arange(1, len(ratio))
        places = waves if wavelength is None else wavelength / 1000 / waves
        axes.plot(places, ratio[1:], label=label, color=series_colour(number))
    label_waves(axes, max(map(len, ratios.values())) - 1, wavelength)
    start_at_zero(axes)
    axes.set_title(title_text(name.replace("_", " ")))
    axes.set_ylabel("spread / error")


def has_power(spectrum: np.ndarray) -> bool:
    """Whether there is power, `(..., N)`, at a wavenumber above 0."""
    return bool((spectrum[..., 1:] > 0).any())  # NaN, of missing values, is not


def last_wavenumber(truth: np.ndarray, lowest: float) -> int:
    """Return the last wavenumber above 1 at which the truth's power `(N,)` is on the axis.

    Without any, it is the last of all.
    """
    above = np.flatnonzero(truth >= lowest)
    return int(above[-1]) if len(above) and above[-1] > 1 else len(truth) - 1


def lowest_power(spectra: np.ndarray) -> float | None:
    """Return where the axis of spectra `(sources, N)` ends; None to show all of them.

    Below it there is only what a float32 field has from rounding, or the power of one source where
    the other has far more, as in a truth that ends at some wavenumber.
    """
    power = np.where(spectra > 0, spectra, np.nan)[:, 1:]
    power = power[:, np.isfinite(power).any(axis=0)]
    higher = float(np.nanmax(power, axis=0).min())
    # Errors of values near the mean, spread evenly over all wavenumbers.
    columns = 2 * (spectra.shape[1] - 1)
    rounding = float(np.finfo(np.float32).eps) ** 2 * float(np.nanmax(spectra[:, 0])) / columns
    end = max(higher / MAX_POWER_DEFICIT, rounding if rounding < np.nanmax(power) else 0.0)
    return end if np.nanmin(power) < end else None


def draw_rank_histogram(
    axes: Axes, histograms: Mapping[str, np.ndarray], name: str, of: str = "truth"
) -> None:
    """Draw rank histograms `(M + 1,)` of several lead times, relative to equal frequencies."""
    axes.axhline(1, color=REFERENCE, linewidth=0.8)
    for number, (label, frequencies) in enumerate(histograms.items()):
        edges = np.arange(len(frequencies) + 1) - 0.5
        axes.stairs(frequencies * len(frequencies), edges, label=label, color=series_colour(number))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title_text(name.replace("_", " ")))
    axes.set_xlabel(f"rank of the {of}")
    axes.set_ylabel("relative frequency")


@figure_style()
def draw_rmse(scores: HeldOutScores, channels: Sequence[int], path: Path) -> None:
    """Write a PNG with root-mean-square errors by lead time, one panel per channel.

    Raises:
        UserError: the file can't be written.
    """
    metric = METRICS["rmse"]
    title = f"{metric.label} over {counted(scores.samples, 'initial time')}"
    figure, panels = create_panels(len(channels), title)
    for axes, c in zip(panels, channels, strict=True):
        values = {source: scores.rmse[s, :, c] for s, source in enumerate(metric.sources)}
        label = with_unit(metric.label, metric.unit(scores.units[c]))
        draw_scores(axes, scores.hours, values, scores.channels[c], label)
        start_at_zero(axes)
    add_legend(figure, panels)
    save_figure(figure, path)


@figure_style()
def draw_spectra(scores: HeldOutScores, last: LastLeadDiagnostics, path: Path) -> None:
    """Write a PNG with power spectra: a row per channel, a column per latitude band.

    Raises:
        UserError: no channel has a spectrum, or the file can't be written.
    """
    forecasts = f"{last.hours} h forecasts from {counted(scores.samples, 'initial time')}"
    zonal = last.wavelength is None
    title = f"{'Zonal power' if zonal else 'Power'} spectra, {forecasts}"
    bands = list(LATITUDE_BANDS) if zonal else [REGION_BAND]
    drawn = channels_to_draw(scores, last)
    figure, panels = create_panels(len(drawn) * len(bands), title)
    for index, axes in enumerate(panels):
        row, band = divmod(index, len(bands))
        c = drawn[row]
        spectra = last.spectra[:, last.spectra_channels.index(c), band]
        powers = dict(zip(SPECTRA_SOURCES, spectra, strict=True))
        name = f"{scores.channels[c]}, {bands[band]}"
        draw_spectrum(axes, powers, name, scores.units[c], last.wavelength)
    add_legend(figure, panels)
    save_figure(figure, path)


def channels_to_draw(scores: HeldOutScores, last: LastLeadDiagnostics) -> list[int]:
    """Return the map's channel, if it has spectra, and one channel with another unit.

    Channels without power in one of the latitude bands are left out if there are others.
    """
    spectra = dict(zip(last.spectra_channels, last.spectra.swapaxes(0, 1), strict=True))
    some = [c for c, both in spectra.items() if has_power(both)]
    if not some:
        raise UserError(
            "a spectrum needs a row, or in a region a field, with values at all points that are "
            "not all equal, which no variable has"
        )
    complete = [c for c in some if all(has_power(band) for band in spectra[c].swapaxes(0, 1))]
    available = complete or some
    first = last.map_channel if last.map_channel in available else available[0]
    others = [c for c in available if scores.units[c] != scores.units[first]]
    return [first, *(others or [c for c in available if c != first])[:1]]
