"""`credit-dp sweep scaling`: series of runs, and their speed-up with more ranks."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.scaling import find_series
from credit_dp.sweeps.tables import Row
from tests.cli.invocation import answer
from tests.sweeps.folders import (
    ENDED,
    write_config,
    write_given,
    write_log,
    write_rank_log,
    write_sweep,
)

# Domain ranks, rows and seconds per step.
RUNS = ((1, 48, 1.0), (1, 24, 0.5), (2, 48, 0.625), (4, 48, 0.5), (4, 96, 1.0))


def run(folder: Path, name: str, seconds: float, rows: int = 48, **axes: int) -> None:
    """A run whose first steps, and some in the middle, took longer: more than half of all."""
    domain = axes.get("domain", 1)
    path = write_given(folder / name, f"parallel.domain={domain}", f"data.grid={rows}x48")
    batch = axes.pop("batch", 4)
    write_config(path, data={"grid": f"{rows}x48", "batch_size": batch}, parallel=axes)
    write_log(path, [20.0] * 10 + [seconds] * 7 + [7.0] * 6 + [seconds] * 7, wait_seconds=0.1)
    write_rank_log(path, ENDED)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = write_sweep(tmp_path / "scaling", ["parallel.domain=1,2,4"])
    for number, (domain, rows, seconds) in enumerate(RUNS):
        run(folder, str(number), seconds, rows, domain=domain)
    return folder


def series_by_kind(folder: Path) -> dict[tuple[str, str], list[Row]]:
    return {(rows[0]["kind"], rows[0]["axis"]): rows for rows in find_series(read_sweep(folder))}


def test_speed_up_and_efficiency_are_those_of_the_medians(sweep: Path) -> None:
    series = series_by_kind(sweep)
    assert set(series) == {("strong", "domain"), ("weak", "domain")}
    strong, weak = series["strong", "domain"], series["weak", "domain"]
    assert [row["job"] for row in strong] == ["0", "2", "3"]
    assert [row["seconds"] for row in strong] == [1.0, 0.625, 0.5]
    assert [row["speed_up"] for row in strong] == [1.0, 1.6, 2.0]
    assert [row["efficiency"] for row in strong] == [1.0, 0.8, 0.5]
    assert [row["job"] for row in weak] == ["1", "2", "4"]
    assert [row["speed_up"] for row in weak] == [1.0, 1.6, 2.0]
    assert [row["efficiency"] for row in weak] == [1.0, 0.8, 0.5]
    assert strong[1]["samples_per_second"] == 4 / 0.625
    assert (strong[0]["series"], weak[0]["series"]) == (
        "48x48, batch 4",
        "24x48 of each rank, batch 4",
    )


def test_runs_that_differ_in_more_than_ranks_are_not_compared(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "other", ["parallel.domain=1,2"])
    run(folder, "0", 1.0)
    run(folder, "1", 0.5, domain=2)
    config = folder / "1" / "config.yaml"
    config.write_text(config.read_text().replace("name: unet", "name: pangu"))
    code, out, err = scaling_of(folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "2 of 2 runs could be timed" in err


def test_data_ranks_scale_with_the_batch(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "data", ["parallel.data=1,2"])
    run(folder, "0", 1.0, batch=4)
    run(folder, "1", 1.25, batch=8, data=2)
    run(folder, "2", 1.0, batch=4)  # once more
    weak = series_by_kind(folder)["weak", "data"]
    assert [row["efficiency"] for row in weak] == [1.0, 0.8]
    assert weak[0]["series"] == "48x48, batch 4 of each rank"


def test_ranks_that_share_members_have_an_axis_of_their_own(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "members", ["parallel.ensemble=1,2", "parallel.domain=1,2"])
    for name, (ensemble, domain, seconds) in enumerate([(1, 1, 1.0), (2, 1, 0.625), (2, 2, 0.5)]):
        run(folder, str(name), seconds, ensemble=ensemble, domain=domain)
    series = series_by_kind(folder)
    assert set(series) == {("strong", "ensemble"), ("strong", "domain")}
    shared = series["strong", "ensemble"]
    assert [row["efficiency"] for row in shared] == [1.0, 0.8]
    rows = [*shared, *series["strong", "domain"]]
    assert [row["mesh"] for row in rows] == ["1x1x1", "1x1x2x1", "1x1x2x1", "1x1x2x2"]


def test_a_run_with_few_steps_is_not_timed(sweep: Path) -> None:
    lines = (sweep / "2" / "metrics.csv").read_text().splitlines()
    (sweep / "2" / "metrics.csv").write_text("\n".join([*lines[:3], ""]))
    assert [row["ranks"] for row in series_by_kind(sweep)["strong", "domain"]] == [1, 4]


def scaling_of(*arguments: object) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        words = map(str, arguments)
        return answer(patch, "sweep", "scaling", *words, program="credit-dp")


@contextmanager
def cores(count: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
        yield


def test_more_ranks_than_cores_are_marked(sweep: Path) -> None:
    with cores(2):
        strong = series_by_kind(sweep)["strong", "domain"]
        assert [row["more_ranks_than_cores"] for row in strong] == [False, False, True]


def test_the_table_the_files_and_the_picture(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("credit_dp.sweeps.scaling.usable_cores", lambda: 2)
        code, text, err = scaling_of(sweep, f"out={out}")
    assert (code, err) == (0, "")
    assert "strong scaling over domain ranks: 48x48, batch 4\n" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == ["3", "1x1x4"])
    assert row[2:] == [
        "*",
        "48x48",
        "4",
        "0.5",
        "20%",
        "8",
        "2.00",
        "50%",
        "500",
        "MB",
        "1.0",
        "MB",
    ]
    assert "*: more ranks than this machine has cores" in text
    rows = json.loads((out / "scaling.json").read_text())["runs"]
    assert [row["efficiency"] for row in rows] == [1.0, 0.8, 0.5] * 2
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "scaling.csv").read_text().splitlines()) == 7


def test_the_picture_has_ideal_lines(sweep: Path) -> None:
    from credit_dp.sweeps.plots import draw_scaling

    seconds, speed_up, efficiency = draw_scaling(list(series_by_kind(sweep).values())).axes
    ideal = {
        tuple(line.get_ydata())
        for axes in (seconds, speed_up, efficiency)
        for line in axes.lines
        if line.get_linestyle() == ":"
    }
    assert ideal == {(1.0, 0.5, 0.25), (0.5, 0.5, 0.5), (1.0, 2.0, 4.0), (1.0, 1.0, 1.0)}


def test_times_that_differ_little_have_ticks(tmp_path: Path) -> None:
    from credit_dp.sweeps.plots import draw_scaling

    folder = write_sweep(tmp_path / "scaling", ["parallel.domain=1,2"])
    for name, (rows, seconds) in enumerate([(48, 0.28), (96, 0.35)]):
        run(folder, str(name), seconds, rows, domain=1 + name)
    figure = draw_scaling(list(series_by_kind(folder).values()))
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) > 1
