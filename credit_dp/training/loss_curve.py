"""The curve of a training: its loss, and the validation if there was one, over steps."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from credit_dp.evaluation.figure_style import PALE, SERIES, figure_style
from credit_dp.evaluation.plots import save_figure
from credit_dp.training.loggers import Row, read_csv_log

CURVE_LABELS = {
    "loss": "training loss",
    "validation_rmse": "validation RMSE\n(standard deviations)",
}
MIN_ROWS_TO_SMOOTH = 100  # rows from which on a running mean is drawn as well
SMOOTHING_DIVISOR = 20  # one mean is of this part of all rows
DECADE = 10.0


@figure_style()
def draw_loss(log: Path, path: Path) -> None:
    """Draw what a run's log has; nothing where it has no numbers.

    Raises:
        UserError: the log can't be read, or the file could not be written.
    """
    _, rows = read_csv_log(log)
    found = {label: curve_points(rows, name) for name, label in CURVE_LABELS.items()}
    found = {label: curve for label, curve in found.items() if len(curve)}
    if not found:
        return
    figure = Figure(figsize=(7.5, 1.2 + 2.4 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, curve) in zip(panels, found.items(), strict=True):
        draw_curve(axes, *curve.T)
        axes.set_ylabel(label)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    save_figure(figure, path)


def curve_points(rows: list[Row], name: str) -> np.ndarray:
    """Step and number of the rows that have one above zero: `(N, 2)`."""
    pairs = [(float(row["step"]), float(row[name])) for row in rows if row.get(name)]
    found = np.array(pairs).reshape(-1, 2)
    return np.asarray(found[np.isfinite(found).all(axis=1) & (found[:, 1] > 0)])


def draw_curve(axes: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """One curve on a log scale, and its running mean where there are many points."""
    many = len(steps) >= MIN_ROWS_TO_SMOOTH
    marker = "o" if len(steps) < MIN_ROWS_TO_SMOOTH // 2 else ""
    style: dict[str, Any] = {"color": PALE, "linewidth": 0.8} if many else {"color": SERIES[0]}
    axes.plot(steps, values, marker=marker, **style)
    if many:
        width = len(steps) // SMOOTHING_DIVISOR
        means = np.convolve(values, np.full(width, 1 / width), mode="valid")
        first = width // 2
        label = f"mean of {width} logged steps"
        axes.plot(steps[first : first + len(means)], means, color=SERIES[0], label=label)
        axes.legend()
    axes.set_yscale("log")
    if values.max() < DECADE * values.min():
        # Within a decade hardly a power of ten is there to read from.
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:.4g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="both")
