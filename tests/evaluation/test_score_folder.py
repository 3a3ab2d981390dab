"""A scorecard's page: bold numbers, units, and the order of figures."""

import base64
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.errors import UserError
from credit_dp.evaluation.maps import MapGrid
from credit_dp.evaluation.metric_table import METRICS
from credit_dp.evaluation.score_folder import ScoreFolder, score_image, scorecard_page
from credit_dp.evaluation.scorecard import MAX_HEADLINES, Scorecard
from tests.evaluation.links import assert_whole


def card(scores: dict[str, list[float]], channels: int = 1) -> Scorecard:
    """With one lead time, and the same scores of every channel."""
    return Scorecard(
        forecast="f",
        truth="t",
        climatology="c",
        members=1,
        initial_times=("2000-01-01T00:00",),
        hours=(24,),
        channels=tuple(Channel(f"x{number}") for number in range(channels)),
        units=("K",) * channels,
        grid=MapGrid(Grid(np.array([45.0, -45.0]), np.array([0.0, 180.0])), ""),
        scores={
            name: np.array(values)[:, None, None].repeat(channels, 2)
            for name, values in scores.items()
        },
        spectra=np.full((2, 1, channels, 1, 2), np.nan),
        bands=("globe",),
        maps=(),
    )


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "scores [1]"
    ScoreFolder(out)  # never locked
    used = ScoreFolder(out)
    with used.cleanup_on_failure():
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))
        young = ScoreFolder(out)
        assert set(tmp_path.iterdir()) == {used.temporary, young.temporary}


def test_scores_of_another_process_are_not_overwritten(tmp_path: Path) -> None:
    line = "another process has just created it, .* Change out, or remove it"
    for out, other in ((tmp_path / "folder", "scores.csv"), (tmp_path / "file", "")):
        folder = ScoreFolder(out)
        (out / other).parent.mkdir(exist_ok=True)
        (out / other).write_text("theirs")
        with folder.cleanup_on_failure(), pytest.raises(UserError, match=f"{out.name}: {line}"):
            folder.write_files({"scores.csv": "ours"})
        assert (out / other).read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_the_best_is_bold_where_better_has_a_meaning() -> None:
    for name, values, best in (
        ("rmse", [2.0, 3.0, 1.0], ["climatology"]),
        ("rmse", [np.nan, 3.0, 4.0], ["persistence"]),
        ("rmse", [np.nan, np.nan, np.nan], []),
        ("acc", [0.9, -0.95], ["forecast"]),
        ("bias", [0.1, -2.0, 0.0], []),
    ):
        text = scorecard_page(card({name: values}))
        assert re.findall(r'<td class="(\w+) best">', text) == best, (name, values)
        cells = re.findall(r"<td class=\"(?:\w+)(?: best)?\">", text)
        assert len(cells) == len(METRICS[name].sources) + 1


def test_the_page_begins_with_contents_and_differences_from_both_baselines() -> None:
    page = scorecard_page(card({"rmse": [2.0, 4.0, 1.0], "acc": [0.5, 0.5]}))
    assert_whole(page)
    assert re.findall(r"<caption>(.*)</caption>", page) == [
        "RMSE: forecast against persistence",
        "RMSE: forecast against climatology",
    ]
    assert re.findall(r"<td style=.*>(.*)</td>", page) == ["\N{MINUS SIGN}50", "+100"]
    assert 'href="#section-acc"' in page
    assert "At a glance" not in scorecard_page(card({"acc": [0.5, 0.5]}))


def test_the_page_says_that_not_all_fields_are_plotted() -> None:
    for channels, noted in ((MAX_HEADLINES, False), (MAX_HEADLINES + 1, True)):
        text = scorecard_page(card({"acc": [0.5, 0.5]}, channels))
        assert (f"Plots show {MAX_HEADLINES} of the {channels} fields" in text) == noted


def test_spread_is_drawn_beside_the_error_that_it_should_match() -> None:
    shown = score_image(card({"rmse": [1.0, 2.0, 3.0], "spread": [0.9]}), "spread")
    assert "error of the mean" in base64.b64decode(shown.split(",")[1]).decode()


def test_panels_of_wind_vectors_are_called_after_the_wind() -> None:
    scored = card({"wind_vector_rmse": [1.0, 2.0, 3.0], "rmse": [1.0, 2.0, 3.0]})
    named = replace(scored, channels=(Channel("10m_u_component_of_wind"),))
    for metric, title in (("wind_vector_rmse", "10m wind"), ("rmse", "10m u component of wind")):
        shown = base64.b64decode(score_image(named, metric).split(",")[1]).decode()
        assert f">{title}<" in shown, metric


def test_the_csv_of_spectra_has_every_variable() -> None:
    count = MAX_HEADLINES + 3
    powers = np.arange(2.0 * count).reshape(2, 1, count, 1, 1).repeat(2, 4)
    many = replace(card({"rmse": [1.0, 2.0, 3.0]}, count), spectra=powers)
    lines = many.spectra_csv().splitlines()
    assert lines[0] == "variable,level,lead_hours,band,wavenumber,forecast,truth"
    assert lines[1:] == [
        f"x{c},,24,globe,{wave},{c}.0,{c + count}.0" for c in range(count) for wave in (0, 1)
    ]
