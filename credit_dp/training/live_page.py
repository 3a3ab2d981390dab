"""The page of a run, `run.html`: loss, validation and maps while it trains, its report at the end.

A plain file that a browser opens from disk, and reloads while the run trains. Rank 0 writes it in a
thread of its own (`BackgroundSink`): training never waits for it, and an error costs one warning.
"""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from credit_dp.config import Config, DiffusionConfig, StandardLossConfig
from credit_dp.evaluation.drawing import draw_or_warn
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.metric_table import BASELINES, FORECAST, METRICS
from credit_dp.evaluation.pages import DifferenceTable, data_uri, difference_table, render_page
from credit_dp.evaluation.scorecard import MODEL, HeldOutScores
from credit_dp.files import write_text_atomic
from credit_dp.training.loggers import BackgroundSink, Metrics, Sink, read_csv_log
from credit_dp.training.run_folder import RunFolder, provenance

WRITE_SECONDS = 5.0  # between two versions of the page
RELOAD_SECONDS = 10  # after which a browser reads the page again
DRAWING_SHARE = 0.05  # of the time of training that maps may take
CLOSE_SECONDS = 10.0  # that the end of a run waits for the page
CURVES = {
    "loss": "training loss",
    "validation_rmse": "validation RMSE (standard deviations)",
    "validation_crps": "validation CRPS (standard deviations)",
}
MIN_VALUES_OF_MEAN = 20  # logged values from which a curve has a running mean,
MEAN_SHARE = 0.05  # over this part of them
MAX_POINTS = 500  # of a curve: of more every second, third, ... is drawn
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 260, 58, 36, 8  # of a chart and its margins
MAX_TICKS = 7
GIT = ("commit", "changed")  # of `provenance`
COMMIT_DIGITS = 8


class Chart(NamedTuple):
    """A curve on a logarithmic scale, in the coordinates of a picture in SVG.

    Attributes:
        points: x and y of each step, separated by spaces.
        means: the same of the running mean; empty without one.
        width: logged values in the running mean.
        marks: x and y of the steps to mark; empty of many.
        across, up: places of ticks and their labels.
        reference: the place of the loss of persistence; None: not drawn.
        summary: the first and the last value, for those who can't see the curve.
    """

    title: str
    points: str
    means: str
    width: int
    marks: list[tuple[float, float]]
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]
    reference: float | None
    summary: str


def draw_chart(
    title: str, curve: Sequence[tuple[int, float]], reference: float | None = None
) -> Chart | None:
    """Return the chart of step and value; None without a value that is finite and above 0."""
    known = [(step, value) for step, value in curve if 0 < value < math.inf]
    if not known:
        return None
    means, width = running_mean([value for _, value in known])
    averaged = [(step, float(mean)) for (step, _), mean in zip(known, means, strict=False)]
    shown = thinned(known)
    values = [value for _, value in shown] + ([] if reference is None else [reference])
    low, high = min(values) / 1.1, max(values) * 1.1
    first, last = shown[0][0], max(shown[-1][0], shown[0][0] + 1)

    def across(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 12) * (step - first) / (last - first), 1)

    def up(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share, 1)

    places = [(across(step), up(value)) for step, value in shown]
    return Chart(
        title=title,
        points=" ".join(f"{x},{y}" for x, y in places),
        means=" ".join(f"{across(step)},{up(mean)}" for step, mean in thinned(averaged)),
        width=width,
        marks=places if len(places) <= 50 and not width else [],
        across=[
            (across(step), f"{step:g}") for step in linear_ticks(first, last) if step.is_integer()
        ],
        up=[(up(value), f"{value:g}") for value in ticks_of_decades(low, high)],
        reference=None if reference is None else up(reference),
        summary=f"{known[0][1]:.3g} at step {known[0][0]}, {known[-1][1]:.3g} at step "
        f"{known[-1][0]}",
    )


def running_mean(values: Sequence[float]) -> tuple[NDArray[np.float64], int]:
    """Return the running mean of a curve's values, and of how many; nothing and 0 of few values.

    At both ends the mean is over the values that there are.
    """
    if len(values) < MIN_VALUES_OF_MEAN:
        return np.empty(0), 0
    width = max(5, int(len(values) * MEAN_SHARE))
    ones = np.ones(width)
    counts = np.convolve(np.ones(len(values)), ones, mode="same")
    return np.convolve(values, ones, mode="same") / counts, width


def thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return every second, third, ... point of a curve of many, and the last."""
    shown = curve[:: -(-len(curve) // MAX_POINTS) or 1]
    return shown + [point for point in curve[-1:] if point != shown[-1]]


def linear_ticks(first: float, last: float) -> list[float]:
    """Return a few round numbers of an interval."""
    size = 10 ** math.floor(math.log10(last - first))
    spacing = next(size * f for f in (0.1, 0.2, 0.5, 1, 2, 5) if last - first <= size * f * 6)
    start, end = math.ceil(first / spacing - 1e-9), math.floor(last / spacing + 1e-9)
    return [float(f"{k * spacing:.6g}") for k in range(start, end + 1)]


def ticks_of_decades(low: float, high: float) -> list[float]:
    """Return a few round numbers of an interval of positive numbers, for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 3, 5), (1, 3), (1,)):
        ticks = [float(f"{f}e{k}") for k in decades for f in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks[:: -(-len(ticks) // MAX_TICKS)] if len(ticks) > 2 else linear_ticks(low, high)


def persistence_loss(config: Config) -> float | None:
    """Return the loss of persistence, averaged over the training dates; None if it is unknown.

    The error of persistence is the change over one step, and the statistics of the training dates
    divide it by its standard deviation: the mean square over area is 1 in each channel.
    """
    loss, data, trainer = config.loss, config.data, config.trainer
    others = loss.spectrum or loss.sphere_spectrum or loss.gradient
    only_squares = (
        isinstance(loss, StandardLossConfig)
        and loss.name == "mse"
        and not (loss.variable_error or others)
    )
    of_changes = loss.tendency and loss.latitude_weight and not data.diagnostic
    own_statistics = data.statistics is None and not data.boundary
    one_step = trainer.longest_rollout == 1 and not trainer.one_batch and not trainer.input_noise
    diffusion = isinstance(config.model, DiffusionConfig)
    is_known = only_squares and of_changes and own_statistics and one_step and not diffusion
    return 1.0 if is_known else None


@final
class LivePage:
    """Writes the page of a run; rank 0 alone has one.

    Attributes:
        sink: of the run's tracker.
    """

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        self._writer = PageWriter(folder, config, step)
        self.sink = BackgroundSink("run.html", self._start, timeout=CLOSE_SECONDS)

    def _start(self) -> Sink:
        self._writer.start()
        return self._writer

    def show_map(self, step: int, field: FieldMap) -> None:
        """Draw a map of a validation, unless maps have taken too much time."""
        writer = self._writer
        self.sink.submit(lambda _: writer.show_map(step, field))

    def show_scoring(self) -> None:
        """Say that training has ended and the test dates are being scored."""
        self.sink.submit(lambda _: self._writer.show_scoring())

    def report(self, scores: HeldOutScores) -> None:
        """Write the report of a run that has finished and drawn its plots."""
        draw_or_warn("run.html", self._writer.report, scores)


@final
class PageWriter:
    """Writes the page; all calls come from one thread at a time."""

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        self.folder = folder
        self.config = config
        self.step = step
        self.persistence = persistence_loss(config)
        self.curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
        self.maps: list[tuple[int, Path]] = []
        self.state = "running"
        self.scored = False
        self._written = -math.inf
        self._next_map = -math.inf
        self._skipped: tuple[int, FieldMap] | None = None  # the newest map that is not drawn

    def start(self) -> None:
        """Show what a run that is resumed has done, up to its checkpoint."""
        last = self.step
        for row in read_csv_log(self.folder.log)[1] if last else []:
            if int(row["step"]) <= last:
                numbers = {name: float(row[name]) for name in CURVES if row.get(name)}
                self._add(int(row["step"]), numbers)
        for path in sorted(self.folder.maps.glob("step-*.png")):
            step = int(path.stem.removeprefix("step-"))
            if step <= last:
                self._add_map(step, path)
        self.step = last
        self.write()

    def log(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of one step, and write the page if the last version is old enough."""
        self._add(step, metrics)
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def show_map(self, step: int, field: FieldMap) -> None:
        """Draw a map, or keep it for the end if the last one was drawn a short time ago."""
        start = time.monotonic()
        self._skipped = (step, field) if start < self._next_map < math.inf else None
        if start < self._next_map:
            return
        path = self.folder.maps / f"step-{step:08d}.png"
        draw_or_warn(path.name, self.draw_map, field, path)
        seconds = time.monotonic() - start
        self._next_map = time.monotonic() + seconds / DRAWING_SHARE
        if not path.exists():
            self._next_map = math.inf  # one that can't be drawn costs one warning
            return
        self._add_map(step, path)
        self.write()

    @staticmethod
    def draw_map(field: FieldMap, path: Path) -> None:
        """Draw a map; matplotlib is imported here, so at the first validation."""
        from credit_dp.evaluation.map_plots import draw_map

        path.parent.mkdir(parents=True, exist_ok=True)
        draw_map(field, path)

    def show_scoring(self) -> None:
        """Say that training has ended, and show the map of its last validation."""
        self.state = "scoring"
        if self._skipped is not None:
            self._next_map = -math.inf
            self.show_map(*self._skipped)
        self.write()

    def summarise(self, metrics: Metrics) -> None:
        """Note that the run has scores."""
        self.scored = True

    def close(self, failed: bool) -> None:
        """Show how the run has ended."""
        self.state = "failed" if failed else "finished" if self.scored else "stopped"
        self.write()

    def report(self, scores: HeldOutScores) -> None:
        """Write the page with the final scores and all plots."""
        self.state = "finished"
        plots = {
            "Forecast": self.folder.map_plot,
            "Errors by lead time": self.folder.rmse_plot,
            "Power spectra": self.folder.spectra_plot,
            "Errors on the map": self.folder.errors_plot,
        }
        images = {title: image(path) for title, path in plots.items() if path.exists()}
        self.write(scores, images)

    def write(
        self, scores: HeldOutScores | None = None, images: dict[str, str] | None = None
    ) -> None:
        """Write the page; a reader sees the old or the new version as a whole."""
        charts = [
            draw_chart(title, self.curves[name], self.persistence if name == "loss" else None)
            for name, title in CURVES.items()
        ]
        page = render_page(
            "run.html",
            title=f"{self.config.model.name} on {self.config.data.name}",
            metadata=run_metadata(self.folder, self.config),
            state=self.state,
            reload=RELOAD_SECONDS if self.state in ("running", "scoring") else 0,
            step=self.step,
            steps=self.config.trainer.steps,
            time=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            latest={
                title: f"{self.curves[name][-1][1]:.4g} (step {self.curves[name][-1][0]})"
                for name, title in CURVES.items()
                if self.curves[name]
            },
            charts=[chart for chart in charts if chart is not None],
            size=(WIDTH, HEIGHT, LEFT, BOTTOM, TOP),
            newest=(self.maps[-1][0], image(self.maps[-1][1])) if self.maps else None,
            older=[(step, f"maps/{path.name}") for step, path in self.maps[-2::-1]],
            cards=[] if scores is None else score_tables(scores),
            images=images or {},
        )
        self.folder.page.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(self.folder.page, page)
        self._written = time.monotonic()

    def _add(self, step: int, metrics: Metrics) -> None:
        self.step = step
        for name, curve in self.curves.items():
            if name in metrics:
                curve.append((step, metrics[name]))

    def _add_map(self, step: int, path: Path) -> None:
        self.maps.append((step, path))


def run_metadata(folder: RunFolder, config: Config) -> dict[str, str]:
    """Return what a run is, as texts by heading."""
    dates = config.data.dates
    splits = {"training": dates.train, "validation": dates.valid, "test": dates.test}
    return {
        "Model": config.model.name,
        "Data": " ".join([config.data.name, str(config.data.store or "")]).strip(),
        "Dates": "; ".join(
            f"{name} {' to '.join(split)}" for name, split in splits.items() if len(split) == 2
        ),
        "Folder": str(folder.path),
        "Once more": folder.rerun_command,
        "Code": code_text(provenance()),
    }


def code_text(versions: Mapping[str, str]) -> str:
    """Return the versions of `provenance` in one line."""
    shown = [f"{name} {value}" for name, value in versions.items() if name not in GIT]
    if "commit" in versions:
        shown.append(f"commit {versions['commit'][:COMMIT_DIGITS]}")
    if versions.get("changed") == "yes":
        shown.append("with uncommitted changes")
    return ", ".join(shown)


def image(path: Path) -> str:
    """Return a PNG file as `data:` URI."""
    return data_uri(path.read_bytes(), "png")


def score_tables(scores: HeldOutScores) -> list[DifferenceTable]:
    """Return the RMSE of the model relative to that of each baseline."""
    sources = METRICS["rmse"].sources
    return [
        difference_table(
            (MODEL, baseline),
            scores.channels,
            scores.hours,
            (scores.rmse[sources.index(FORECAST)], scores.rmse[sources.index(baseline)]),
            f"card-{baseline}",
        )
        for baseline in BASELINES
    ]
