"""Write the models of the tests' zoo into docs/model-zoo.md, and their number into the README.

Usage: python scripts/write_model_zoo.py [--measure [NAME ...]]

With `--measure` the models, all or the named ones, are run first, which needs the extra `zoo`: how
they are converted for three ranks, and the memory of four are kept in `tests/zoo/measured.json`.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.zoo.families import Family, all_families  # noqa: E402
from tests.zoo.weather import FAMILIES as WEATHER  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "docs/model-zoo.md")
MEASURED = ROOT / "tests/zoo/measured.json"
MARKED = re.compile(r"<!-- zoo: (\w+) -->.*?<!-- end of zoo -->", re.DOTALL)
RANKS = 4
NOTABLE = 0.5  # from this part of the memory on it stands beside the name


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

    measured = json.loads(MEASURED.read_text())
    for name, family in all_families().items():
        if name not in (names or [name]):
            continue
        conversion = compare(family, 3, trains=True).conversion
        share = round(share_of_memory(family), 2)
        measured[name] = {"conversion": conversion, "memory": share}
        print(name, conversion, share, flush=True)
        MEASURED.write_text(json.dumps(dict(sorted(measured.items())), indent=1) + "\n")


def count() -> str:
    """Return how many models of which packages there are, and how many were written here."""
    packages = Counter(family.package for family in all_families().values())
    del packages["own"]
    *most, last = [name for name, _ in packages.most_common()]
    return (
        f"{packages.total()} models of {', '.join(most)} and {last}, and {len(WEATHER)} after "
        "published designs"
    )


def table() -> str:
    """Return a row for each package, and one for models written here after publications."""
    measured = json.loads(MEASURED.read_text())
    packages: dict[str, list[Family]] = {}
    for family in all_families().values():
        if family.package != "own":
            packages.setdefault(family.package, []).append(family)
    packages["after published designs"] = WEATHER
    lines = [
        "| package | models | of them by layers | memory on 4 ranks | names |",
        "|---|---|---|---|---|",
    ]
    for package, families in packages.items():
        prefix = {"segmentation-models-pytorch": "smp_"}.get(package, f"{package}_")
        names = []
        for family in families:
            share = measured[family.name]["memory"]
            notable = f" ({share:.2f})" if share >= NOTABLE else ""
            names.append(family.name.removeprefix(prefix) + notable)
        by_layers = sum(measured[family.name]["conversion"] == "layers" for family in families)
        kept = sorted(measured[family.name]["memory"] for family in families)
        cells = (
            package,
            str(len(families)),
            str(by_layers),
            f"{kept[0]:.2f} to {kept[-1]:.2f}, median {kept[len(kept) // 2]:.2f}",
            ", ".join(names),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return a page with the current table and count between its markers."""
    texts = {"count": count, "families": table}
    return MARKED.sub(
        lambda found: f"<!-- zoo: {found[1]} -->{texts[found[1]]()}<!-- end of zoo -->", page
    )


def main() -> None:
    """Measure with `--measure`, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", nargs="*", metavar="NAME")
    names = parser.parse_args().measure
    if names is not None:
        measure_all(names)
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
