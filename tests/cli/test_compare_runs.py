"""`credit-dp compare`: shows how configs of runs differ, and which run scores better."""

import copy
import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.cli.invocation import answer, assert_refused
from tests.evaluation.links import assert_whole
from tests.plots import failing_plots

CONFIG = (
    "run:\n  name: {name}\n  dir: x\noptimizer:\n  lr: {lr}\ndata:\n  name: zarr\n  store: {s}\n"
)
METRICS = {
    "step": 5,
    "initial_times": 4,
    "units": {"z_500": "m2 s-2", "t2m": "K"},
    "rmse": {
        "z_500": {
            "24h": {"model": 100.0, "persistence": 300.0, "climatology": 500.0},
            "48h": {"model": 200.0, "persistence": 400.0, "climatology": 500.0},
        },
        "t2m": {"24h": {"model": 2.0, "persistence": 3.0, "climatology": 4.0}},
    },
}


def run(folder: Path, name: str, factor: float = 1.0, lr: float = 1e-3, store: str = "a") -> Path:
    """Write a run whose errors are `factor` times those above; return its folder."""
    found = copy.deepcopy(METRICS)
    for leads in found["rmse"].values():
        for of in leads.values():
            of["model"] *= factor
    (folder / name).mkdir()
    (folder / name / "metrics.json").write_text(json.dumps(found))
    (folder / name / "config.yaml").write_text(CONFIG.format(name=name, lr=lr, s=store))
    return folder / name


def card(folder: Path, name: str, truth: str = "era5", **scores: tuple[float, float]) -> Path:
    """Write a scorecard with one score of one channel and lead time; return its folder."""
    nested = {
        score: {"24h": {"forecast": a, "truth" if score == "activity" else "persistence": b}}
        for score, (a, b) in scores.items()
    }
    content = {
        "truth": truth,
        "climatology": "c",
        "initial_times": ["2000-01-01T00:00"],
        "grid": [9, 8],
        "units": {"z_500": "m2 s-2"},
        "scores": {"z_500": nested},
    }
    (folder / name).mkdir()
    (folder / name / "scores.json").write_text(json.dumps(content))
    return folder / name


def compare(monkeypatch, *words: object) -> tuple[int, str, str]:
    return answer(monkeypatch, "compare", *map(str, words), program="credit-dp")


def test_runs_beside_each_other(tmp_path, monkeypatch):
    a, b = run(tmp_path, "a"), run(tmp_path, "b", 0.9, lr=2e-3)
    code, said, complaints = compare(monkeypatch, a, b, f"out={tmp_path / 'both'}")
    assert (code, complaints) == (0, "")
    assert re.search(r"^optimizer.lr +0.001 +0.002$", said, re.MULTILINE)
    assert "run.name" not in said
    assert "not comparable" not in said
    assert re.search(r"^z_500 +m² s⁻² +24 +100 +90 +-10.0 % +b$", said, re.MULTILINE)
    assert "Best of 3: a 0, b 3." in said
    rows = list(csv.DictReader((tmp_path / "both/comparison.csv").read_text().splitlines()))
    assert [(row["channel"], row["lead_hours"]) for row in rows] == [
        ("z_500", "24"),
        ("z_500", "48"),
        ("t2m", "24"),
    ]
    assert float(rows[1]["b percent"]) == pytest.approx(-10)
    content = json.loads((tmp_path / "both/comparison.json").read_text())
    assert content["config"] == {"optimizer.lr": {"a": "0.001", "b": "0.002"}}
    assert content["scores"][2]["values"] == {"a": 2.0, "b": 1.8}
    page = (tmp_path / "both/comparison.html").read_text()
    assert '<td class="best">90</td>' in page
    assert page.count('src="data:image/svg') == 1
    assert_whole(page)
    (difference,) = re.findall(r"<caption>(.*)</caption>", page)
    assert difference == "RMSE: b against a"


def test_which_is_better(tmp_path, monkeypatch):
    cases = (
        ("rmse", (2.0, 9.0), (1.0, 9.0), "b"),
        ("acc", (0.8, 0.1), (0.9, 0.1), "b"),
        ("crps", (1.0, 9.0), (2.0, 9.0), "a"),
        ("bias", (-3.0, 1.0), (1.0, 1.0), "b"),
        ("activity", (4.0, 5.0), (7.0, 5.0), "a"),
        ("spread", (1.0, 1.0), (2.0, 1.0), None),
        ("rmse", (1.0, 9.0), (1.0, 9.0), None),
    )
    for number, (score, one, other, best) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        folders = card(folder, "a", **{score: one}), card(folder, "b", **{score: other})
        assert compare(monkeypatch, *folders, f"out={folder / 'both'}")[0] == 0
        (row,) = json.loads((folder / "both/comparison.json").read_text())["scores"]
        assert row["better"] == best, (score, one, other)


def test_what_is_not_comparable_is_reported(tmp_path, monkeypatch):
    a, b, c = run(tmp_path, "a"), run(tmp_path, "b", store="other"), run(tmp_path, "c")
    content = json.loads((c / "metrics.json").read_text())
    content["rmse"]["t2m"]["24h"]["persistence"] = 3.1
    content["units"]["z_500"] = "m"
    (c / "metrics.json").write_text(json.dumps(content))
    _, said, _ = compare(monkeypatch, a, b, c)
    assert said.splitlines()[:3] == [
        "not comparable: a and b differ in data",
        "not comparable: persistence has different scores in a and c: truth, dates or grid differ",
        "left out: z_500 has different units",
    ]
    cards = card(tmp_path, "d", rmse=(1, 2)), card(tmp_path, "e", "mine", rmse=(1, 2))
    assert compare(monkeypatch, *cards)[1].startswith("not comparable: d and e differ in truth\n")


def test_keys_of_older_scorecards_do_not_matter(tmp_path, monkeypatch):
    old, new = card(tmp_path, "old", rmse=(2.0, 9.0)), card(tmp_path, "new", rmse=(1.0, 9.0))
    content = json.loads((old / "scores.json").read_text())
    (old / "scores.json").write_text(json.dumps({**content, "band_edges": [4], "bands": "1.00"}))
    code, said, complaints = compare(monkeypatch, old, new)
    assert (code, complaints) == (0, "")
    assert "Best of 1: old 0, new 1." in said


def test_runs_of_one_name_are_distinguished(tmp_path, monkeypatch):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    both = run(tmp_path / "x", "a"), run(tmp_path / "y", "a", 2.0)
    assert re.search(r"hours +x/a +y/a", compare(monkeypatch, *both)[1])


def test_scores_that_are_no_numbers_are_left_out(tmp_path, monkeypatch):
    one, two = run(tmp_path, "one"), run(tmp_path, "two")
    text = (two / "metrics.json").read_text()
    (two / "metrics.json").write_text(text.replace('"model": 2.0', '"model": NaN'))
    code, out, _ = compare(monkeypatch, one, two, f"out={tmp_path / 'o'}")
    assert code == 0
    assert "left out: two has no t2m" in out
    assert "t2m" not in (tmp_path / "o" / "comparison.csv").read_text()


def test_refused_in_one_line(tmp_path):
    a = run(tmp_path, "a")
    unfinished, damaged = run(tmp_path, "unfinished"), run(tmp_path, "damaged")
    (unfinished / "metrics.json").unlink()
    (damaged / "metrics.json").write_text("{")
    scores = card(tmp_path, "card", rmse=(1, 2))
    other = run(tmp_path, "other")
    (other / "metrics.json").write_text(json.dumps({**METRICS, "rmse": {}}))
    table = {
        f"{a}": "needs the folders of at least two runs, got 1",
        f"{a} {a}": "is given twice",
        f"{a} {tmp_path}": "has neither metrics.json",
        f"{a} {tmp_path}/nowhere": "nowhere: is not a folder. Give the folder of a training run",
        f"{a} {unfinished}": "unfinished: this run has not finished: it has no metrics.json",
        f"{a} {damaged}": "damaged/metrics.json: can't be read",
        f"{a} {scores}": "card: is a scorecard, but a is a training run",
        f"{a} {other}": "have no score of the same channel, unit and lead time in common",
        f"{a} '~nobody-has-this/b'": "RUN: there is no home folder as in ~nobody-has-this/b",
        f"{a} {unfinished} oot=x": "Did you mean out?",
        f"{a} {run(tmp_path, 'b')} out={a}": f"{a}: exists already",
    }
    assert_refused(table, "compare")


def test_a_figure_that_fails_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such axis")

    runs = [str(run(tmp_path, name)) for name in ("a", "b")]
    monkeypatch.setattr("credit_dp.evaluation.comparison.create_panels", fail)
    with failing_plots():
        code, _, _ = answer(
            monkeypatch, "compare", *runs, f"out={tmp_path / 'out'}", program="credit-dp"
        )
    assert code == 0
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "<img" not in page
    assert "z_500" in page


EVENT = "z_500 >5"


def add_dates(folder: Path, rmse: float, seed: int, hits: float | None = None) -> np.ndarray:
    """Add squared errors by date to a scorecard, with noise that both forecasts have.

    With `hits` there are also counts of an event, `(T, 2, 2)`, which are returned.
    """
    count = 40
    noise = np.random.default_rng(0).normal(size=count) + np.random.default_rng(seed).normal(
        scale=0.1, size=count
    )
    dims = ("region", "source", "time", "prediction_timedelta", "channel")
    coords = {
        "region": ["global"],
        "source": ["forecast", "persistence"],
        "time": np.datetime64("2001-01-01", "ns") + np.arange(count) * np.timedelta64(1, "D"),
        "prediction_timedelta": np.array([24], "m8[h]").astype("m8[ns]"),
        "channel": ["z_500"],
    }
    squares = np.full((1, 2, count, 1, 1), 300.0**2)
    squares[0, 0, :, 0, 0] = (rmse + noise) ** 2
    data = xr.Dataset({"rmse": (dims, squares)}, coords)
    counts = 0.1 + np.random.default_rng(seed).random((1, 2, count, 1, 1, 2, 2))
    if hits is not None:
        counts[:, 0, ..., 1, 1] += hits
        counts[:, 1] = 1.0  # persistence
        data["event_counts"] = (*dims[:-1], "event", "members", "observed"), counts
        data = data.assign_coords(event=[EVENT], event_channel=("event", ["z_500"]))
    data.to_zarr(folder / "scores_by_date.zarr", zarr_format=2)
    return counts[0, 0, :, 0, 0]


def test_differences_by_more_than_chance_have_triangles(tmp_path, monkeypatch):
    a, b, same = (
        card(tmp_path, name, rmse=(x, 300.0)) for name, x in (("a", 10.0), ("b", 9.0), ("c", 10.0))
    )
    for folder, rmse, seed in ((a, 10.0, 1), (b, 9.0, 2), (same, 10.0, 1)):
        add_dates(folder, rmse, seed)
    code, _, complaints = compare(monkeypatch, a, b, same, f"out={tmp_path / 'both'}")
    assert (code, complaints) == (0, "")
    (row,) = csv.DictReader((tmp_path / "both/comparison.csv").read_text().splitlines())
    assert float(row["b p"]) < 1e-6
    assert 20 < float(row["b independent"]) <= 40
    assert float(row["c p"]) == 1  # a forecast differs in nothing from itself
    found = json.loads((tmp_path / "both/comparison.json").read_text())["scores"][0]
    assert found["significance"]["b"]["p"] == float(row["b p"])
    page = (tmp_path / "both/comparison.html").read_text()
    signs = re.findall(r'<td class="(?:better|worse|chance)[^>]*>.</td>', page)
    assert len(signs) == 2
    assert signs[0].startswith('<td class="better large" title="-10.0 %, p = ')
    assert signs[1].startswith('<td class="chance"')


def test_damaged_scores_by_date_are_one_line(tmp_path):
    a, b = (card(tmp_path, name, rmse=(10.0, 300.0)) for name in "ab")
    add_dates(a, 10.0, 1)
    store = a / "scores_by_date.zarr"
    said = {f"{a} {b}": f"{store}: can't be read"}
    metadata = (store / ".zmetadata").read_text()
    (store / ".zmetadata").write_text("{")
    assert_refused(said, "compare")
    (store / ".zmetadata").write_text(metadata)
    for name in ("time/0", "source", "rmse"):  # as after a copy that was cut off
        shutil.move(store / name, tmp_path / "part")
        assert_refused(said, "compare")
        shutil.move(tmp_path / "part", store / name)


def test_events_are_compared_and_tested(tmp_path, monkeypatch):
    folders = [card(tmp_path, name, rmse=(10.0, 300.0)) for name in "abc"]
    settings = zip(folders, (1, 2, 1), (3.0, 9.0, 3.0), strict=True)
    counts = [add_dates(each, 10.0, seed, hits) for each, seed, hits in settings]
    code, said, complaints = compare(monkeypatch, *folders, f"out={tmp_path / 'all'}")
    assert (code, complaints) == (0, "")
    rows = list(csv.DictReader((tmp_path / "all/comparison.csv").read_text().splitlines()))
    rows = {row["score"]: row for row in rows if row["channel"] == EVENT}
    assert {"csi", "sedi", "frequency_bias"} <= {*rows}
    assert "brier" not in rows  # of ensembles
    csi = [x[:, 1, 1].sum() / (x.sum() - x[:, 0, 0].sum()) for x in counts]
    for name, expected in zip("abc", csi, strict=True):
        assert float(rows["csi"][name]) == pytest.approx(expected, rel=1e-12)
    assert float(rows["csi"]["b p"]) < 1e-6
    assert rows["csi"]["better"] == rows["sedi"]["better"] == "b"
    assert rows["frequency_bias"]["b p"] == ""
    # A forecast differs in nothing from itself.
    assert {rows[name]["c p"] for name in ("csi", "ets", "sedi", "hit_rate")} == {"1.0"}
    assert re.search(rf"^{EVENT} +1 +24 +0\.\d+ +0\.\d+ ", said, re.MULTILINE)
    assert "not comparable" not in said
    page = (tmp_path / "all/comparison.html").read_text()
    assert "<caption>CSI: b against a" in page
    assert "z_500 &gt;5" in page
    assert "could not be drawn" not in page
    store = folders[2] / "scores_by_date.zarr"
    for part in ("event", "event_channel", "event_counts/0.0.0.0.0.0.0"):
        (store / part).rename(tmp_path / "part")
        damaged = {" ".join(map(str, folders)): "/c/scores_by_date.zarr: can't be read"}
        assert_refused(damaged, "compare")
        (tmp_path / "part").rename(store / part)
    # A score of a script, or of another version.
    for folder in folders[:2]:
        scores = json.loads((folder / "scores.json").read_text())
        scores["scores"]["z_500"]["mae"] = scores["scores"]["z_500"]["rmse"]
        (folder / "scores.json").write_text(json.dumps(scores))
    code, said, complaints = compare(monkeypatch, *folders[:2])
    assert (code, complaints) == (0, "")
    assert "mae" not in said
    shutil.rmtree(folders[2] / "scores_by_date.zarr")
    assert "left out: c has no z_500 >5" in compare(monkeypatch, *folders)[1]
