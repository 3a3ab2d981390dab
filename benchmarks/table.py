"""Format figures as a Markdown table, and describe the machine that measured them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pinned import DEVICE, DTYPE, LAYOUT
from side_by_side import Row

COST = ("seconds", "stolen")  # keys with the cost of measuring a part
NAMES = ("what", "against", "best", "typical", "baseline / itself", "goal", "met")


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
        goal = f"{'≥' if row.at_least else '≤'} {number(row.goal, row.unit)}"
        goal += " + spread" if row.with_spread else ""
        goal += " typically" if row.by_median else ""
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


def number(value: float | None, unit: str) -> str:
    """Return a number with its unit; empty without a number."""
    if value is None:
        return ""
    return f"{value:.3f}" if unit == "x" else f"{value:.3g} {unit}"


def markdown(parts: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of all parts."""
    lines = [NAMES, ["---"] * len(NAMES), *(cells(row) for rows in parts.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
