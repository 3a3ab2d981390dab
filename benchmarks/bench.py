"""Measure everything: `make bench`, or `python benchmarks/bench.py [--only NAME ...] [--rounds N]`.

Writes the figures to `benchmarks/results.json`, and from there into the README and the pages that
show some. With `--only`, the other figures stay as they were. Figures of another device, dtype or
layout go to a separate file and are printed, but not written to the pages.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
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

USUAL = ("cpu", "float32", "contiguous_format")
OTHERS = [way for way, usual in zip((DEVICE, DTYPE, LAYOUT), USUAL, strict=True) if way != usual]
RESULTS = table.RESULTS.with_stem("-".join(["results", *OTHERS]))


def parts(rounds: int) -> Mapping[str, Callable[[], Sequence[Row | dict[str, Any]]]]:
    """Return the functions that measure, by the name of the part: figures, or models of the zoo."""
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
        "zoo": lambda: list(zoo.models(rounds)),
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
            cost = {"seconds": time.monotonic() - since, "stolen": table.stolen_since(before)}
            table.show(keep(name, {**table.machine(), "rounds": arguments.rounds, **cost}, found))
            print(f"{name}: {cost['seconds']:.0f} s, {cost['stolen']:.1%} stolen", flush=True)
    write_pages()


def keep(name: str, how: Mapping[str, Any], found: Sequence[Row | dict[str, Any]]) -> Sequence[Row]:
    """Write what was measured of one part to the results, keep all others; return its figures."""
    rows = [asdict(each) for each in found if isinstance(each, Row)]
    part = {"how": how, **({"rows": rows} if rows else {"models": found})}
    kept = {**table.results(RESULTS), name: part}
    write_text_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")
    return table.figures(part)


def write_pages() -> None:
    """Write the figures into the pages; print them for an unusual device, dtype or layout."""
    kept = table.results(RESULTS)
    if OTHERS:
        print(table.markdown({name: table.figures(part) for name, part in kept.items()}))
        return
    table.write_pages(kept)


if __name__ == "__main__":
    main()
