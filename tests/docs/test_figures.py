"""The figures of the README and of the pages are those of `benchmarks/results.json`."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> Mapping[str, Any]:
    sys.path.append(str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks/table.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_pages_have_the_current_figures(table: Mapping[str, Any]) -> None:
    texts = table["page_texts"](table["results"]())
    shown = set()
    for page in table["PAGES"]:
        text = page.read_text()
        shown |= set(re.findall(r"<!-- figures: (.*?) -->", text))
        assert table["write_figures"](text, texts) == text, f"{page.name}: run benchmarks/table.py"
    assert shown == set(texts)


def test_each_goal_is_in_one_row_of_the_page(table: Mapping[str, Any]) -> None:
    groups = table["HEADLINES"] + table["OTHERS"]
    rows = [row for part in table["results"]().values() for row in table["figures"](part)]
    for row in rows:
        found = [group.title for group in groups if re.search(group.pattern, row.what)]
        assert len(found) == 1 or (not found and row.goal is None), (row.what, found)
    assert all(table["members"](group, rows) for group in groups)


def test_the_readme_says_the_slowest_and_the_fastest() -> None:
    kept = json.loads((ROOT / "benchmarks/results.json").read_text())
    own = [
        row["typical"]
        for part in ("training_step", "training_step_on_slower_cores")
        for row in kept[part]["rows"]
        if "96x192" in row["what"]
    ]
    others = [model["typical"] for model in kept["zoo"]["models"] if model["typical"]]
    assert (len(own), len(others)) == (6, 10)
    text = re.sub("<!--.*?-->", "", (ROOT / "README.md").read_text())
    for values in (own, others):
        assert f"{min(values):.2f} to {max(values):.2f} times" in text


def test_a_row_has_ranges_and_goals_met(table: Mapping[str, Any]) -> None:
    row, group = table["Row"], table["Group"]
    rows = [
        row("run of a", "b", 0.5, 1.0, 0.7, at_least=True),
        row("run of c", "b", 1.25, 1.0, 1.4, at_least=True),
        row("read of d", "", 3.0, None, unit="GB/s"),
    ]
    groups = [group("runs", "^run"), group("reads", "^read"), group("none", "^x")]
    assert table["grouped"](groups, rows).splitlines()[2:] == [
        "| runs | b | 0.50 to 1.25 | 0.70 to 1.40 | 1 of 2 ≥ 1 |",
        "| reads |  | 3 GB/s |  |  |",
    ]
