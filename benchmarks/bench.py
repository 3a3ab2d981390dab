"""All figures: `make bench`, or `python benchmarks/bench.py [--only NAME ...] [--rounds N]`.

They go to `docs/performance.md`, into the place of its table, and to `benchmarks/results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import exchange_cost
import loader
import memory
import planning
import small_layers
import stack
import start
import table
import traffic
import training_step
from side_by_side import Row

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/performance.md", ROOT / "benchmarks/results.json"
PLACE = re.compile(r"(?<=<!-- figures -->\n).*(?=<!-- end of figures -->)", re.DOTALL)


def parts(rounds: int) -> Mapping[str, Callable[[], list[Row]]]:
    """What is measured, by name."""
    return {
        "exchange_cost": partial(exchange_cost.rows, rounds),
        "stack": partial(stack.rows, rounds),
        "training_step": partial(training_step.rows, rounds),
        "small_layers": partial(small_layers.rows, rounds),
        "traffic": traffic.rows,
        "memory": memory.rows,
        "loader": loader.rows,
        "planning": planning.rows,
        "start": start.rows,
    }


def main() -> None:
    """Measure, print, and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=list(parts(1)))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows: list[Row] = []
    for name, measure in parts(arguments.rounds).items():
        if name in (arguments.only or parts(1)):
            since = time.monotonic()
            try:
                found = measure()
            except SystemExit as error:  # too few cores or GPUs
                print(f"{name}: not measured. {error}", flush=True)
                continue
            table.show(found)
            print(f"{name}: {time.monotonic() - since:.0f} s", flush=True)
            rows += found
    goals = [row.met for row in rows if row.goal is not None]
    minutes = (time.monotonic() - began) / 60
    print(f"{sum(goals)} of {len(goals)} goals met, {minutes:.1f} minutes")
    if not arguments.only:
        write(rows, arguments.rounds)


def write(rows: list[Row], rounds: int) -> None:
    """Keep the figures, as JSON and in the page."""
    machine = table.machine()
    replace(RESULTS, json.dumps(table.as_json(rows), indent=1) + "\n")
    where = ", ".join(f"{name} {value}" for name, value in machine.items())
    text = f"\n{rounds} rounds; {where}.\n\n{table.markdown(rows)}\n\n"
    replace(PAGE, PLACE.sub(lambda found: text, PAGE.read_text()))


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


if __name__ == "__main__":
    main()
