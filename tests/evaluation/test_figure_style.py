"""All figures of the package are drawn and saved in one style."""

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure

import credit_dp
from credit_dp.cli.show_sweep import draw_png
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.evaluation.comparison import compare, comparison_page, read_result
from credit_dp.evaluation.figure_style import (
    DIVERGING,
    MOISTURE,
    RAIN,
    RC_PARAMS,
    SEQUENTIAL,
    SERIES,
    SIZES,
    SOURCE_LINES,
    TEMPERATURE,
    figure_style,
    latitude_label,
    longitude_label,
    power_label,
    series_colour,
    use_figure_style,
    with_unit,
)
from credit_dp.evaluation.forecast_maps import ChartRequest, draw_forecast
from credit_dp.evaluation.forecast_series import SeriesRequest, draw_series
from credit_dp.evaluation.forecast_store import ForecastStore
from credit_dp.evaluation.held_out import LastLeadDiagnostics
from credit_dp.evaluation.map_plots import draw_last_lead_errors, draw_map
from credit_dp.evaluation.maps import FieldMap, MapGrid
from credit_dp.evaluation.metrics import ErrorMap
from credit_dp.evaluation.score_folder import scorecard_page
from credit_dp.evaluation.score_plots import draw_rmse, draw_spectra
from credit_dp.evaluation.scorecard import HeldOutScores, Scorecard
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.plots import draw_metric, draw_scaling
from credit_dp.sweeps.tables import sweep_table
from credit_dp.training.loss_curve import draw_loss
from tests.evaluation import forecasts
from tests.sweeps.folders import write_done, write_sweep

PACKAGE = Path(credit_dp.__file__).parent
GRID = MapGrid(Grid(np.linspace(90, -90, 5), np.arange(8) * 45.0))
FIELD = np.arange(40.0).reshape(5, 8)
MEASURES = {"credit_dp.evaluation.maps"}  # it uses a figure that is never shown, to find contours
LEADS = {"24h": {"model": 1.0, "persistence": 2.0, "climatology": 3.0}}


def in_style() -> bool:
    return all(matplotlib.rcParams[name] == value for name, value in RC_PARAMS.items())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], bool]:
    """Record, by call and calling module, whether the style was active each time.

    Nothing is rendered: files are empty.
    """
    found: dict[tuple[str, str], bool] = {}
    begin = Figure.__init__

    def note(done: str) -> None:
        key = (done, str(sys._getframe(2).f_globals["__name__"]))
        found[key] = found.get(key, True) and in_style()

    def init(self: Figure, *args: Any, **settings: Any) -> None:
        note("begun")
        begin(self, *args, **settings)

    def savefig(self: Figure, target: Path | BytesIO, **settings: Any) -> None:
        note("saved")
        if isinstance(target, Path):
            target.touch()

    monkeypatch.setattr(Figure, "__init__", init)
    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Return all calls in modules that import matplotlib, with the module's name."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        name = ".".join(["credit_dp", *path.relative_to(PACKAGE).with_suffix("").parts])
        if "matplotlib" in text:
            nodes = ast.walk(ast.parse(text))
            yield from ((name, node) for node in nodes if isinstance(node, ast.Call))


def drawing_modules() -> set[tuple[str, str]]:
    """Return which of the calls that `seen` records each module makes."""
    done = {"Figure": "begun", "savefig": "saved"}
    called = ((module, ast.unparse(call.func).split(".")[-1]) for module, call in calls())
    return {(done[name], module) for module, name in called if name in done}


def card() -> Scorecard:
    """A scorecard with figures of every kind."""
    scores = {"rmse": 3, "acc": 2, "bias": 3, "activity": 2, "crps": 3, "spread": 1}
    return Scorecard(
        forecast="f",
        truth="t",
        climatology="c",
        members=2,
        initial_times=("2000-01-01T00:00",),
        hours=(24, 48),
        channels=(Channel("x"),),
        units=("m2 s-2",),
        grid=GRID,
        scores={name: np.ones((sources, 2, 1)) for name, sources in scores.items()},
        spectra=np.ones((2, 2, 1, 1, 5)),
        bands=("globe",),
        maps=(ErrorMap(0, 48, FIELD, FIELD - 20),),
    )


def draw_run(folder: Path) -> None:
    """Draw all plots of a run."""
    log = folder / "metrics.csv"
    log.write_text("step,loss\n1,1.0\n2,0.5\n")
    draw_loss(log, folder / "loss.png")
    scores = HeldOutScores(("x",), ("K",), (6, 24), {"rmse": np.ones((3, 2, 1))}, 2)
    last = LastLeadDiagnostics(24, (0,), 0, np.ones((2, 1, 3, 5)), FIELD, FIELD - 20)
    draw_rmse(scores, [0], folder / "rmse.png")
    draw_spectra(scores, last, folder / "spectra.png")
    field = FieldMap("24 h", "K", FIELD, FIELD - 1, GRID, (0, 5), Channel("x"))
    draw_last_lead_errors(scores, last, field, folder / "errors.png")
    draw_map(field, folder / "map.png")


def draw_stored_forecast(folder: Path) -> None:
    """Draw a map and a series of a stored forecast."""
    stored = forecasts.write(forecasts.forecast(forecasts.truth()), folder / "forecast.zarr")
    store = ForecastStore.open(str(stored))
    draw_forecast(store, "", ChartRequest(), folder / "chart.png")
    draw_series(store, SeriesRequest((46.9, 7.4)), folder / "series.png")


def draw_comparison(folder: Path) -> None:
    """Draw the comparison of two runs."""
    results = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        found = {"step": 1, "initial_times": 2, "units": {"x": "K"}, "rmse": {"x": LEADS}}
        (folder / name / "metrics.json").write_text(json.dumps(found))
        (folder / name / "config.yaml").write_text("seed: 0\n")
        results.append(read_result(folder / name, name))
    comparison_page(compare(results))


def draw_sweep(folder: Path) -> None:
    """Draw the plots of a sweep and of its scaling."""
    written = write_sweep(folder / "sweep", ["seed=0"])
    write_done(written / "0", "seed=0", model=4.0)
    table = sweep_table(read_sweep(written))
    assert draw_png(lambda: draw_metric(table)) is not None
    row = {"kind": "strong", "axis": "domain", "series": "8x8", "ranks": 2, "seconds": 0.5}
    row |= {"speed_up": 1.0, "efficiency": 1.0, "more_ranks_than_cores": None}
    assert draw_png(lambda: draw_scaling([[row]])) is not None


@pytest.mark.slow
def test_every_module_draws_and_saves_in_the_style(
    tmp_path: Path, seen: dict[tuple[str, str], bool]
) -> None:
    draw_run(tmp_path)
    scorecard_page(card())
    draw_comparison(tmp_path)
    draw_sweep(tmp_path)
    draw_stored_forecast(tmp_path)
    modules = {key for key in drawing_modules() if key[1] not in MEASURES}
    assert set(seen) == modules, "a module that draws is not drawn here, or the other way round"
    assert {key for key, styled in seen.items() if not styled} == set()
    assert not in_style()


def test_no_module_has_a_style_of_its_own() -> None:
    """Sizes, fonts and grids come from the style, not from settings of single calls."""
    own = {"fontsize", "labelsize", "rc", "dpi", "frameon"}
    found = [(module, key.arg) for module, call in calls() for key in call.keywords]
    assert [setting for setting in found if setting[1] in own] == []


def test_settings_are_as_before_afterwards_unless_a_notebook_wants_them() -> None:
    before = dict(matplotlib.rcParams)
    with figure_style():
        assert in_style()
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context():
        use_figure_style()
        assert in_style()
        assert matplotlib.rcParams["figure.constrained_layout.use"]


def test_lines_of_runs_are_not_taken_for_sources() -> None:
    references = {SOURCE_LINES[of]["color"] for of in ("persistence", "climatology")}
    assert len(set(SERIES)) == len(SERIES)
    assert not references & set(SERIES)
    assert series_colour(len(SERIES) + 1) == SERIES[1]


# From light of red, green and blue to what people see who lack one kind of cones.
# Source: Machado, Oliveira & Fernandes 2009, "A physiologically-based model for simulation of color
# vision deficiency", severity 1.
VISIONS = {
    "all cones": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
# Of light of red, green and blue. Source: IEC 61966-2-1 (sRGB), relative to its white.
XYZ = np.array(
    [[0.4338, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]],
)


def seen_colours(colours: Sequence[Any], vision: str) -> np.ndarray:
    """Return L, a and b of CIE 1976 of colours as people with this vision see them: `(N, 3)`."""
    values = to_rgba_array(colours)[:, :3]
    light = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(VISIONS[vision] @ light.T, 0, 1)
    x, y, z = (np.where(v > 0.008856, np.cbrt(v), 7.787 * v + 16 / 116) for v in (x, y, z))
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def least_difference(colours: Sequence[Any], vision: str) -> float:
    """Return the difference (CIE 1976) of the two colours that are most alike."""
    seen = seen_colours(colours, vision)
    return min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2))


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_differ_also_without_red_or_green(vision: str) -> None:
    sources = {str(line["color"]) for line in SOURCE_LINES.values()}
    assert least_difference(sorted(sources), vision) > 20
    assert least_difference(SERIES, vision) > 19
    assert least_difference(SERIES[:5], vision) > 29
    # 2.3 is what an eye just notices.
    for name in (SEQUENTIAL, DIVERGING, SIZES, TEMPERATURE, MOISTURE, RAIN):
        shades = matplotlib.colormaps[name](np.linspace(0, 1, 14))
        assert least_difference(shades, vision) > 2.3, name


def test_simulated_colours_are_those_of_the_source() -> None:
    assert seen_colours(["white"], "deuteranopia")[0] == pytest.approx([100, 0, 0], abs=0.1)
    red, green = seen_colours(["#ff0000", "#00ff00"], "all cones")
    assert red == pytest.approx([53.24, 80.09, 67.20], abs=0.2)
    assert green == pytest.approx([87.73, -86.18, 83.18], abs=0.2)


def test_longitudes_latitudes_and_units() -> None:
    degrees = (0, 60, 180, -180, 240, 360)  # wherever a map begins
    texts = ["0°", "60°E", "180°", "180°", "120°W", "0°"]
    assert list(map(longitude_label, degrees)) == texts
    assert [latitude_label(x) for x in (90, 0, -22.5)] == ["90°N", "0°", "22.5°S"]
    assert with_unit("RMSE", "m2 s-2") == "RMSE (m² s⁻²)"
    assert power_label("K") == "power (K² m)"
    assert with_unit("ACC", "1") == with_unit("ACC", "") == "ACC"
