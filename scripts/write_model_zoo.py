"""Write docs/model-zoo.md: the models of the tests' zoo, how they are converted, their memory.

Usage: python scripts/write_model_zoo.py [--measure [NAME ...]]

With `--measure` the models, all or the named ones, are run first, which needs the extra `zoo`: for
the memory, which is kept in `tests/zoo/memory.json`, and for the functions that run whole on three
ranks, kept in `tests/zoo/whole_calls.json`.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.zoo.families import Family, all_families  # noqa: E402

PAGE = ROOT / "docs/model-zoo.md"
CALLS = ROOT / "tests/zoo/whole_calls.json"
MEMORY = ROOT / "tests/zoo/memory.json"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->\n"
RANKS = 4


def share_of_memory(family: Family) -> float:
    """Return the part of one process's activations that a rank keeps, on four ranks."""
    from zoo import measure

    from tests.zoo.comparison import build_model

    def saved(ranks: int) -> int:
        return measure(lambda: build_model(family), family.shape, ranks).saved

    return saved(RANKS) / saved(1)


def measure_all(names: list[str]) -> None:
    """Measure some families, and write the page of all."""
    from tests.zoo.comparison import compare

    calls, shares = json.loads(CALLS.read_text()), json.loads(MEMORY.read_text())
    for name, family in all_families().items():
        if name not in (names or [name]):
            continue
        result = compare(family, 3, trains=True)
        whole = dict(sorted(result.whole_calls.items()))
        calls[name] = {"conversion": result.conversion, "whole_calls": whole}
        shares[name] = round(share_of_memory(family), 2)
        print(name, shares[name], whole, flush=True)
        for path, table in ((CALLS, calls), (MEMORY, shares)):
            path.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


def table() -> str:
    """Return a row for each family."""
    calls, shares = json.loads(CALLS.read_text()), json.loads(MEMORY.read_text())
    lines = [
        "| model | package | converted by | runs whole on 3 ranks | memory on 4 ranks |",
        "|---|---|---|---|---|",
    ]
    for name, family in all_families().items():
        whole = [f"`{f}` {n} x" for f, n in calls[name]["whole_calls"].items()]
        cells = (
            name,
            family.package,
            calls[name]["conversion"],
            ", ".join(whole),
            f"{shares[name]:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    """Measure with `--measure`, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", nargs="*", metavar="NAME")
    names = parser.parse_args().measure
    if names is not None:
        measure_all(names)
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
