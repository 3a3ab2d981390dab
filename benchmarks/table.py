"""Format figures as Markdown, and describe the machine that measured them.

`python benchmarks/table.py` prints all figures of `results.json`, and writes those of the pages.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pinned import DEVICE, DTYPE, LAYOUT
from side_by_side import Row

from credit_dp.files import write_text_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results.json"
PAGES = tuple(
    ROOT / name
    for name in ("README.md", "docs/performance.md", "docs/model-zoo.md", "benchmarks/README.md")
)
MARKED = re.compile(r"<!-- figures: (.*?) -->.*?<!-- end of figures -->", re.DOTALL)
COST = ("seconds", "stolen")  # keys with the cost of measuring a part
NAMES = ("what", "against", "best", "typical", "baseline / itself", "goal", "met")
# Goals of models of other packages: of their speed on grids with fewer rows and with more.
MANY_ROWS = 224
SPEED_GOALS = (0.85, 1.0)
MEMORY_GOAL = 0.30  # on four ranks
SENT_GOAL = 1.05
PLANNING_GOAL = 5.0


class Group(NamedTuple):
    """Figures of one kind, a row of the page: a name, and what each `Row.what` matches."""

    title: str
    pattern: str


SPEED = Group("speed of 2 ranks, three models in training", r"^training step, .* 96x192: .* ranks$")
SLOWER = Group("the same, slower cores", r"^training step, .* 96x192: .* slower cores$")
PACKAGES = Group("the same, models of other packages, 224 rows", r"^forward and .* 224x448: speed")
SMALL = Group(
    "the same, models of other packages, 96 or 112 rows", r"^forward and .* (96x192|112x224): speed"
)
MEMORY = Group("memory for backward, a rank of 4", r"^activation memory .* domain 4$")
BYTES = Group("bytes of a step, four models", r"^bytes of a step, \w+ at 64x128")
HEADLINES = (
    SPEED,
    SLOWER,
    PACKAGES,
    SMALL,
    MEMORY,
    BYTES,
    Group("whole training step, 1 and 2 ranks", r"^training step of the whole framework"),
    Group("wait for data", r": wait for data$"),
    Group("loader on 2 cores", r"^loader with 2 threads"),
    Group("plan of 1,000 ranks at 721x1440", r"^plan \w+ at 721x1440, \d+ ranks$"),
    Group("start: command to first optimizer step", r"^start of the quickstart"),
)
OTHERS = (
    Group("speed of 2 ranks in training at 32x64", r"at 32x64: speed of 2 ranks$"),
    Group("memory for backward, a rank of 2", r"^activation memory .* domain 2$"),
    Group("the same, models of other packages, 4", r"^activations that a rank saves"),
    Group("bytes of a step, models of other packages", r"^bytes of a step, .* 224x448"),
    Group("messages of a step", r"^messages of a step"),
    Group("conversion, models of other packages", r"^convert .* 224x448"),
    Group("what sharding adds to a convolution", r"^what sharding adds to a Conv2d"),
    Group("halo exchange", r"^HaloExchange"),
    Group("four convolutions with norms", r"^4 x \[Conv2d"),
    Group("their peak memory", r"^peak memory of 4 x"),
    Group("a step of 40 tiny layers", r"^sharded step of 20 x"),
    Group("step without data, one rank", r"^step without data"),
    Group("training step with compile=true", r"^training step with compile=true"),
    Group("loader with limits of values", r"^loader's throughput with limits"),
    Group("loader, 721x1440, uncompressed", r"^loader reads .* none"),
    Group("zarr, the same", r"^zarr reads .* none"),
    Group("tensorstore, the same", r"^tensorstore reads .* none"),
    Group("loader, 721x1440, zstd", r"^loader reads .* zstd"),
    Group("zarr, the same", r"^zarr reads .* zstd"),
    Group("tensorstore, the same", r"^tensorstore reads .* zstd"),
    Group("conversion at 721x1440, 50 or 91 ranks", r"^convert \w+ at 721x1440, \d+ ranks$"),
    Group("its memory", r"^convert \w+ at 721x1440.*: peak memory"),
    Group("memory of a plan of 1,000 ranks", r"^plan \w+ at 721x1440.*: peak memory"),
    Group("conversion of 200 layers", r"^convert deep\w*, 200 layers, at 90x180$"),
    Group("the same, relative", r"^convert deep.*: over an unsharded step$"),
    Group("reads of the truth by scoring", r"^chunks of the truth"),
    Group("imports of training", r"^imports of training"),
)


def results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the figures measured so far, by part."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def figures(part: Mapping[str, Any]) -> list[Row]:
    """Return the figures of a part, which has rows or models."""
    rows = [Row(**row) for row in part.get("rows", ())]
    return rows + [row for model in part.get("models", ()) for row in model_rows(model)]


def model_rows(model: Mapping[str, Any]) -> list[Row]:
    """Return the figures of a model of another package whose speed was measured."""
    if model["best"] is None:
        return []
    what = f"{model['name']} at {model['rows']}x{model['columns']}"
    many = model["rows"] >= MANY_ROWS
    speed = Row(
        f"forward and backward, {what}: speed of 2 ranks",
        "one process x 2 threads",
        model["best"],
        SPEED_GOALS[many],
        model["typical"],
        model["spread"],
        at_least=True,
    )
    if not many:
        return [speed]
    memory, sent = model["memory"][-1], model["excess"][-1]
    return [
        speed,
        Row(f"activations that a rank saves, {what}, domain 4", "one process", memory, MEMORY_GOAL),
        Row(f"bytes of a step, {what}, domain 4", "the least for these bands", sent, SENT_GOAL),
        Row(f"convert {what}, domain 4", "", model["planning"], PLANNING_GOAL, unit="s"),
    ]


def show(rows: Sequence[Row]) -> None:
    """Print a line for each figure."""
    for row in rows:
        line = " | ".join(cells(row)[:-1])
        verdict = "   " if row.goal is None else "ok " if row.met else "NOT"
        print(f"{verdict} {line}   {row.note}", flush=True)


def cells(row: Row) -> list[str]:
    """Return the cells of a figure in the table."""
    goal, met = "", ""
    if row.goal is not None:
        goal = goal_of(row)
        met = "yes" if row.met else "**no**"
    return [
        row.what,
        row.against,
        number(row.best, row.unit),
        number(row.typical, row.unit),
        number(row.spread, "x"),
        goal,
        met,
    ]


def goal_of(row: Row) -> str:
    """Return the goal of a figure as text; empty without one."""
    if row.goal is None:
        return ""
    unit = "" if row.unit == "x" else f" {row.unit}"
    goal = f"{'≥' if row.at_least else '≤'} {row.goal:.4g}{unit}"
    goal += " + spread" if row.with_spread else ""
    return goal + (" typically" if row.by_median else "")


def number(value: float | None, unit: str) -> str:
    """Return a number with its unit; empty without a number."""
    if value is None:
        return ""
    return f"{value:.3f}" if unit == "x" else f"{value:.3g} {unit}"


def markdown(parts: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of all parts."""
    return markdown_table(NAMES, [cells(row) for rows in parts.values() for row in rows])


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grouped(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    """Return a table with a row for each group that has figures: their ranges, and goals met."""
    lines = []
    for group in groups:
        found = members(group, rows)
        if found:
            against = {row.against for row in found}
            goals = [row for row in found if row.goal is not None]
            lines.append(
                [
                    group.title,
                    found[0].against if len(against) == 1 else "",
                    span([row.best for row in found], found[0].unit),
                    span([row.typical for row in found], found[0].unit),
                    f"{goals_met(found)} {goal_of(found[0])}" if goals else "",
                ]
            )
    return markdown_table(("what", "against", "best", "typical", "goals met"), lines)


def members(group: Group, rows: Sequence[Row]) -> list[Row]:
    """Return the figures of a group."""
    return [row for row in rows if re.search(group.pattern, row.what)]


def span(values: Sequence[float | None], unit: str = "x") -> str:
    """Return the smallest and the largest value, once if they look the same; empty without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return ""
    ends = [f"{value:.2f}" if unit == "x" else f"{value:.3g}" for value in (known[0], known[-1])]
    text = " to ".join(dict.fromkeys(ends))
    return text if unit == "x" else f"{text} {unit}"


def goals_met(rows: Sequence[Row]) -> str:
    """Return how many goals are met, as `62 of 71`."""
    goals = [row.met for row in rows if row.goal is not None]
    return f"{sum(goals)} of {len(goals)}"


def model_table(models: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of models of other packages."""

    def pair(values: Sequence[float | None]) -> str:
        return ", ".join(f"{value:.2f}" for value in values if value is not None)

    return markdown_table(
        ("model", "points", "speed of 2 ranks", "memory", "a rank sends, MB", "over the least"),
        [
            [
                model["name"],
                f"{model['rows']}x{model['columns']}",
                pair([model["best"], model["typical"]]),
                pair(model["memory"]),
                pair(model["megabytes"]),
                pair(model["excess"]),
            ]
            for model in models
        ],
    )


def page_texts(kept: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures that pages show, by the name between their markers."""
    rows = [row for part in kept.values() for row in figures(part)]

    def typical(*groups: Group) -> str:
        return span([row.typical for group in groups for row in members(group, rows)])

    return {
        "speed": typical(SPEED, SLOWER),
        "speed of packages": typical(PACKAGES, SMALL),
        "memory": span([row.best for row in members(MEMORY, rows)]),
        "goals": goals_met(rows),
        "headlines": grouped(HEADLINES, rows),
        "others": grouped(OTHERS, rows),
        "machines": hows(kept),
        "models": model_table(kept["zoo"]["models"]),
    }


def write_figures(page: str, texts: Mapping[str, str]) -> str:
    """Return a page with these texts between its markers; several lines stand by themselves."""

    def marked(found: re.Match[str]) -> str:
        text = texts[found[1]]
        text = f"\n{text}\n" if "\n" in text else text
        return f"<!-- figures: {found[1]} -->{text}<!-- end of figures -->"

    return MARKED.sub(marked, page)


def write_pages(kept: Mapping[str, Any]) -> None:
    """Write the figures into the README and the pages that show some."""
    texts = page_texts(kept)
    for page in PAGES:
        write_text_atomic(page, write_figures(page.read_text(), texts))


def hows(kept: Mapping[str, Any]) -> str:
    """Return lines with machine and commit, each with the parts that were measured there."""
    found: dict[str, list[str]] = {}
    for name, part in kept.items():
        how = ", ".join(f"{key} {of}" for key, of in part["how"].items() if key not in COST)
        found.setdefault(how, []).append(name)
    return "\n".join(f"- {', '.join(names)}: {how}." for how, names in found.items())


def machine() -> dict[str, str]:
    """Return what the figures depend on: the machine, versions, and the commit."""
    found = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": found[0].split(":")[1].strip() if found else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "tensors": f"{DTYPE} {LAYOUT}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": git("rev-parse", "--short", "HEAD")
        + ("+" if git("status", "--porcelain", "--", "*.py") else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def processor_time() -> tuple[int, int]:
    """Return the ticks of this machine since its start: all, and those stolen by its host."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks), ticks[7]


def stolen_since(before: tuple[int, int]) -> float:
    """Return the share of processor time that the host has given to others since `before`."""
    total, stolen = (now - then for now, then in zip(processor_time(), before, strict=True))
    return stolen / max(1, total)


def git(*arguments: str) -> str:
    """Return the output of git for this checkout; empty if it is none."""
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    print(markdown({name: figures(part) for name, part in results().items()}))
    write_pages(results())
