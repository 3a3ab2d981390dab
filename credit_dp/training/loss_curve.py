"""Draws the training loss and the validation error of a run over its steps."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from credit_dp.evaluation.figure_style import PALE, SERIES, SOURCE_LINES, figure_style
from credit_dp.evaluation.metric_table import PERSISTENCE
from credit_dp.evaluation.score_plots import save_figure
from credit_dp.training.live_page import running_mean, ticks_of_decades
from credit_dp.training.loggers import Row, read_csv_log

CURVE_LABELS = {
    "loss": "training loss",
    "validation_rmse": "validation RMSE\n(standard deviations)",
    "validation_crps": "validation CRPS\n(standard deviations)",
}
MAX_MARKERS = 50  # more points are a line without marks


@figure_style()
def draw_loss(log: Path, path: Path, persistence: float | None = None) -> None:
    """Draw the curves of a run's log, one panel each; draw nothing if the log has no numbers.

    Args:
        log: the CSV file.
        path: of the figure.
        persistence: the loss of persistence, if it is known.

    Raises:
        UserError: the log can't be read, or the figure can't be written.
    """
    _, rows = read_csv_log(log)
    curves = {label: curve_points(rows, name) for name, label in CURVE_LABELS.items()}
    curves = {label: curve for label, curve in curves.items() if len(curve)}
    if not curves:
        return
    figure = Figure(figsize=(7.5, 1.2 + 2.4 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, curve) in zip(panels, curves.items(), strict=True):
        is_loss = label == CURVE_LABELS["loss"]
        draw_curve(axes, curve[:, 0], curve[:, 1], "o" if is_loss else "s")
        if is_loss and persistence is not None:
            axes.set_ymargin(0.1)
            mark_persistence(axes, persistence)
        label_log_axis(axes)
        axes.set_ylabel(label)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    save_figure(figure, path)


def curve_points(rows: list[Row], name: str) -> np.ndarray:
    """Return step and value, `(N, 2)`, of rows whose value is finite and above 0 (log scale)."""
    pairs = [(float(row["step"]), float(row[name])) for row in rows if row.get(name)]
    points = np.array(pairs).reshape(-1, 2)
    return np.asarray(points[np.isfinite(points).all(axis=1) & (points[:, 1] > 0)])


def draw_curve(axes: Axes, steps: np.ndarray, values: np.ndarray, marker: str = "o") -> None:
    """Draw one curve on a log scale, with its running mean if there are many points."""
    means, width = running_mean(values.tolist())
    style: dict[str, Any] = {"color": SERIES[0]}
    if width:  # single batches are faint behind their mean
        style = {"color": PALE, "linewidth": 0.8, "markersize": 2.5}
    axes.set_yscale("log")
    axes.plot(steps, values, marker=marker if len(steps) < MAX_MARKERS else "", **style)
    if width:
        axes.plot(steps, means, color=SERIES[0], label=f"mean of {width} logged values")
        axes.legend()


def mark_persistence(axes: Axes, loss: float) -> None:
    """Draw a line at the loss of persistence, with its name at the end."""
    axes.axhline(loss, label=PERSISTENCE, **SOURCE_LINES[PERSISTENCE])
    colour = SOURCE_LINES[PERSISTENCE]["color"]
    along = axes.get_yaxis_transform()
    axes.text(1, loss, PERSISTENCE, transform=along, color=colour, ha="right", va="bottom")


def label_log_axis(axes: Axes) -> None:
    """Let the logarithmic axis have round ticks: powers of ten are too few within a decade."""
    axes.yaxis.set_major_locator(FixedLocator(ticks_of_decades(*axes.get_ylim())))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
