"""`credit-dp sweep show`: the table, its files and its picture."""

import csv
import json
import subprocess
import sys
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest

from credit_dp.cli import show_sweep
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.tables import sweep_table
from tests.cli.invocation import answer, assert_refused
from tests.plots import failing_plots
from tests.ranks import TIMEOUT
from tests.sweeps.folders import (
    CRASHED,
    write_config,
    write_done,
    write_given,
    write_log,
    write_rank_log,
    write_sweep,
)


def fail(*_: object) -> None:
    raise ValueError("no such axis")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three rates, two seeds; the last run has failed."""
    folder = write_sweep(tmp_path / "rates", ["optimizer.lr=1e-3,1e-2,1e-4", "seed=0,1"])
    for number, (lr, model) in enumerate((("1e-3", 4.0), ("1e-2", 7.0))):
        for seed in (0, 1):
            given = (f"optimizer.lr={lr}", f"seed={seed}")
            write_done(folder / str(2 * number + seed), *given, model=model + seed)
    failed = write_given(folder / "4", "optimizer.lr=1e-4", "seed=0")
    write_config(failed)
    write_log(failed, [1.0] * 5)
    write_rank_log(failed, CRASHED)
    return folder


def shown(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """Return the cells of the table's lines, its heading first."""
    code, out, err = answer(monkeypatch, "sweep", "show", *arguments, program="credit-dp")
    assert (code, err) == (0, "")
    return [line.split() for line in out.split("\n\n")[0].splitlines()]


def test_the_best_run_is_first(monkeypatch: pytest.MonkeyPatch, sweep: Path) -> None:
    heading, *rows = shown(monkeypatch, str(sweep))
    assert heading[:6] == ["job", "optimizer.lr", "seed", "state", "mesh", "relative_rmse"]
    assert rows[0] == ["0", "1e-3", "0", "done", "1x1x1", "0.4", "30/30", "0.5", "8"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert rows[4][3:7] == ["failed", "1x1x1", "-", "5/30"]
    assert rows[5][3:] == ["not", "started", *"-----"]


def test_runs_are_sorted(monkeypatch: pytest.MonkeyPatch, sweep: Path) -> None:
    for sort, jobs in {
        "-metric": "321045",
        "optimizer.lr": "450123",
        "-optimizer.lr": "230145",
        "-seconds": "401235",
        "state": "012345",
    }.items():
        _, *rows = shown(monkeypatch, str(sweep), f"sort={sort}")
        assert "".join(row[0] for row in rows) == jobs, sort


def test_the_metric_can_be_one_for_which_more_is_better(
    monkeypatch: pytest.MonkeyPatch, sweep: Path
) -> None:
    heading, *rows = shown(monkeypatch, str(sweep), "metric=samples_per_second")
    assert heading.count("samples_per_second") == 1
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert rows[4][5] == "4"


def test_why_runs_failed_is_shown(monkeypatch: pytest.MonkeyPatch, sweep: Path) -> None:
    _, out, _ = answer(monkeypatch, "sweep", "show", str(sweep), program="credit-dp")
    assert "6 runs: 4 done, 1 failed, 1 not started\n" in out
    assert out.endswith("4: trainer: the loss has to stay finite\n")


def test_files_hold_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, sweep: Path, tmp_path: Path
) -> None:
    from PIL import Image

    out = tmp_path / "new" / "out"
    for _ in range(2):  # a running sweep is shown again
        shown(monkeypatch, str(sweep), f"out={out}")
    assert sorted(path.name for path in out.iterdir()) == ["metric.png", "sweep.csv", "sweep.json"]
    rows = list(csv.DictReader(StringIO((out / "sweep.csv").read_text())))
    content = json.loads((out / "sweep.json").read_text())
    assert content["swept"] == ["optimizer.lr", "seed"]
    assert rows[0]["relative_rmse"] == str(content["jobs"][0]["relative_rmse"]) == "0.4"
    assert content["jobs"][4]["cause"] == rows[4]["cause"] == "trainer: the loss has to stay finite"
    assert content["jobs"][5]["mesh"] is None
    picture = Image.open(BytesIO((out / "metric.png").read_bytes()))
    assert picture.width > 900


def drawn(folder: Path) -> Any:
    """Return the figure of a sweep."""
    from credit_dp.sweeps.plots import draw_metric

    figure = draw_metric(sweep_table(read_sweep(folder)))
    assert figure is not None
    return figure


def test_repeats_are_dots_about_their_mean(sweep: Path) -> None:
    (axes,) = drawn(sweep).axes
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1e-3, 1e-2]
    assert list(line.get_ydata()) == pytest.approx([0.45, 0.75])
    assert [len(dots.get_offsets()) for dots in axes.collections] == [2, 2]
    assert axes.get_xlabel() == "optimizer.lr"


def test_a_sweep_of_seeds_is_dots_at_whole_numbers(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "seeds", ["seed=0,1,2,3"])
    for seed in range(4):
        write_done(folder / str(seed), f"seed={seed}", model=4.0 + seed % 2)
    figure = drawn(folder)
    (axes,) = figure.axes
    (dots,) = axes.lines
    assert (dots.get_linestyle(), dots.get_marker()) == ("None", "o")
    assert list(dots.get_ydata()) == pytest.approx([0.4, 0.5, 0.4, 0.5])
    figure.draw_without_rendering()
    shown = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert shown == ["0", "1", "2", "3"]


def test_axes_are_logarithmic_where_values_span_decades(tmp_path: Path) -> None:
    for name, key, scales in (
        ("rates", "optimizer.lr=1e-4,1e-3", ("log", "log")),
        ("steps", "trainer.steps=10,20", ("linear", "log")),
    ):
        folder = write_sweep(tmp_path / name, [key])
        values = key.partition("=")[2].split(",")
        for number, value in enumerate(values):
            given = f"{key.partition('=')[0]}={value}"
            write_done(folder / str(number), given, model=10.0 ** (2 * number))
        (axes,) = drawn(folder).axes
        assert (axes.get_xscale(), axes.get_yscale()) == scales, name
        assert [label.get_text() for label in axes.get_xticklabels()] == values


def test_a_second_key_makes_lines_and_names_make_bars(tmp_path: Path) -> None:
    lines = write_sweep(tmp_path / "lines", ["model=unet,pangu", "trainer.steps=10,20,40"])
    bars = write_sweep(tmp_path / "bars", ["model=unet,pangu"])
    for number, model in enumerate(("unet", "pangu")):
        write_done(bars / str(number), f"model={model}", model=4 + number)
        for place, steps in enumerate((10, 20, 40)):
            given = (f"model={model}", f"trainer.steps={steps}")
            write_done(lines / str(3 * number + place), *given, model=9 - place)
    (axes,) = drawn(lines).axes
    assert [line.get_label() for line in axes.lines] == ["model=pangu", "model=unet"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[10, 20, 40]] * 2
    (axes,) = drawn(bars).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([0.4, 0.5])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["unet", "pangu"]


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch, sweep: Path) -> None:
    table = {
        "nowhere": "nowhere: is not a folder. Give the folder of a sweep",
        "": "credit-dp sweep show: needs the folder of one sweep",
        f"{sweep} {sweep}": "credit-dp sweep show: needs the folder of one sweep",
        f"{sweep} metrik=loss": "Did you mean metric?",
        f"{sweep} metric=rmse": "metric: no run of this sweep has 'rmse' yet",
        f"{sweep} sort=optimiser.lr": "Did you mean optimizer.lr?",
        f"{sweep}/0": "is not a sweep",
    }
    assert_refused(table, "sweep show")
    words = ("sweep", "show", str(sweep), f"out={sweep}/0/config.yaml")
    code, _, err = answer(monkeypatch, *words, program="credit-dp")  # after the table
    assert (code, err.count("\n"), "out: cannot write" in err) == (2, 1, True)
    assert_refused({"shwo": "Did you mean show[?]$"}, "sweep")


def test_reading_does_not_import_torch(sweep: Path) -> None:
    name = show_sweep.__name__
    code = f"from {name} import sweeps; sweeps(['show', '{sweep}'], 'x'); import sys; "
    subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit('torch' in sys.modules)"],
        check=True,
        timeout=TIMEOUT,
    )


def test_a_figure_that_fails_costs_no_table(
    monkeypatch: pytest.MonkeyPatch, sweep: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("credit_dp.sweeps.plots.draw_metric", fail)
    with failing_plots():
        code, out, _ = answer(
            monkeypatch, "sweep", "show", str(sweep), f"out={tmp_path / 'out'}", program="credit-dp"
        )
    assert code == 0
    assert out.endswith("sweep.json\n")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"sweep.csv", "sweep.json"}
