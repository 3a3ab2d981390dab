"""Measure everything: `make bench`, or `python benchmarks/bench.py [--only NAME ...] [--rounds N]`.

Writes the figures to `benchmarks/results.json`, and their table to `docs/performance.md`. With
`--only`, the other figures stay as they were. Figures of another device, dtype or layout go to a
separate file and are printed, but not written to the page.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import exchange_cost
import loader
import memory
import planning
import scoring
import small_layers
import stack
import start
import table
import traffic
import training_step
import zoo
from pinned import DEVICE, DTYPE, LAYOUT
from side_by_side import Row

from credit_dp.files import write_text_atomic

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"
USUAL = ("cpu", "float32", "contiguous_format")
OTHERS = [way for way, usual in zip((DEVICE, DTYPE, LAYOUT), USUAL, strict=True) if way != usual]
RESULTS = ROOT / "benchmarks" / f"{'-'.join(['results', *OTHERS])}.json"
FIGURES_IN_PAGE = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- end of figures -->)", re.DOTALL)


def parts(rounds: int) -> Mapping[str, Callable[[], list[Row]]]:
    """Return the functions that measure, by the name of the part."""
    return {
        "exchange_cost": partial(exchange_cost.rows, rounds),
        "stack": partial(stack.rows, rounds),
        "training_step": partial(training_step.rows, rounds),
        "compiled": lambda: list(training_step.compiled_rows(rounds)),
        "small_layers": partial(small_layers.rows, rounds),
        "traffic": traffic.rows,
        "memory": memory.rows,
        "loader": loader.rows,
        "planning": planning.rows,
        "scoring": scoring.rows,
        "start": start.rows,
        "zoo": partial(zoo.rows, rounds),
    }


def main() -> None:
    """Measure the chosen parts, and print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=list(parts(1)))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    for name, measure in parts(arguments.rounds).items():
        if name in (arguments.only or parts(1)):
            since, before = time.monotonic(), table.processor_time()
            try:
                found = measure()
            except SystemExit as error:  # too few cores or GPUs
                print(f"{name}: not measured. {error}", flush=True)
                continue
            table.show(found)
            cost = {"seconds": time.monotonic() - since, "stolen": table.stolen_since(before)}
            print(f"{name}: {cost['seconds']:.0f} s, {cost['stolen']:.1%} stolen", flush=True)
            keep(name, {**table.machine(), "rounds": arguments.rounds, **cost}, found)
    write()


def keep(name: str, how: Mapping[str, Any], rows: list[Row]) -> None:
    """Write the figures of one part to the results, and keep all others."""
    kept = figures()
    kept[name] = {"how": how, "rows": [asdict(row) for row in rows]}
    write_text_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")


def figures() -> dict[str, Any]:
    """Return the figures measured so far, by part."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def write() -> None:
    """Write the table of figures to the page; print it for an unusual device, dtype or layout."""
    kept = figures()
    found = {name: [Row(**row) for row in kept[name]["rows"]] for name in parts(1) if name in kept}
    goals = [row.met for rows in found.values() for row in rows if row.goal is not None]
    minutes = sum(kept[name]["how"]["seconds"] for name in found) / 60
    words = f"{sum(goals)} of {len(goals)} goals met, {minutes:.0f} minutes in all"
    print(words)
    if OTHERS:
        print(table.markdown(found))
        return
    text = f"\n{words}.\n\n{table.markdown(found)}\n\n{table.hows(kept)}\n\n"
    write_text_atomic(PAGE, FIGURES_IN_PAGE.sub(lambda _: text, PAGE.read_text()))


if __name__ == "__main__":
    main()
