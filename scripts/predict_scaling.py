"""Writes the docs' table of predicted efficiency: the models for 721x1440 on 1 to 1,024 GPUs.

    python scripts/predict_scaling.py [MODEL ...]

prints the table of these models, or of all, as it stands between two comments in
`docs/which-parallelism.md`, and writes it there if no model is named. Nothing is measured: see "How
long a step takes" in `docs/plan-and-verify.md`. It takes about a quarter of an hour.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from credit_dp.cli.compose import Composer
from credit_dp.costs.machine import read_machine
from credit_dp.costs.prediction import Prediction, Predictor
from credit_dp.errors import UserError

DOCS = Path(__file__).resolve().parents[1] / "docs" / "which-parallelism.md"
BEGIN, END = "<!-- predicted efficiency -->\n", "<!-- end of predicted efficiency -->\n"
MODELS = ("unet_base", "pangu_base", "crossformer_base", "unet_large", "crossformer_large")
MACHINE = "h100"
DOMAINS = (1, 2, 4, 8, 16, 32)
RANKS = (1, 4, 8, 64, 1024)
LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
KEYS = (
    "data.grid=721x1440",
    f"data.levels={LEVELS}",
    "device=cpu",
    "trainer.autocast=bfloat16",
    "trainer.cuda_graph=true",
)
HEADING = ("model", "domain", "GiB", "1 GPU", *(f"{n:,} GPUs" for n in RANKS[1:]), "limited by")


def main() -> int:
    """Print the table, and write it into the docs if it is complete."""
    chosen = sys.argv[1:] or MODELS
    lines = [_line(HEADING), _line(["---"] * len(HEADING))]
    print("\n".join(lines), flush=True)
    for model in chosen:
        for cells in rows(model):
            lines.append(_line(cells))
            print(lines[-1], flush=True)
    if tuple(chosen) == MODELS:
        text = DOCS.read_text()
        before, _, rest = text.partition(BEGIN)
        table = "\n".join(["", *lines, "", ""])
        DOCS.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    return 0


def rows(model: str) -> Iterator[list[str]]:
    """Yield a row for each size of domain."""
    config = Composer("train").compose_config([f"model={model}", *KEYS])
    machine = read_machine(MACHINE)
    predictor = Predictor(config, machine)
    for domain in DOMAINS:
        try:
            held = predictor.held_bytes(domain)
        except UserError:  # the model has too few rows
            return
        found = {n: predictor.predict(n // domain, domain) for n in RANKS if n >= domain}
        largest = found[RANKS[-1]]
        fits = "" if largest.fits(machine) else " (does not fit)"
        yield [
            f"`{model}`",
            str(domain),
            f"{held / 2**30:.0f}{fits}",
            *(f"{found[n].efficiency:.0%}" if n in found else "" for n in RANKS),
            limit_of(largest, predictor.predict(1, 1)),
        ]


def limit_of(mesh: Prediction, single: Prediction) -> str:
    """Return what costs most, beyond a rank's share of the step of a single rank."""
    time, share = mesh.time, single.time.compute / mesh.domain
    unshared = time.update * (1 - 1 / mesh.domain)
    by_host = time.compute == time.starting
    causes = {
        "launches": time.compute - share if by_host else 0.0,
        "the update of all weights": 0.0 if by_host else unshared,
        "uneven bands and their edges": 0.0 if by_host else time.compute - share - unshared,
        "messages of rows and sums": time.exchange,
        "gradients": time.reduction,
    }
    name = max(causes, key=lambda cause: causes[cause])
    return name if mesh.efficiency < 0.95 else "-"


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
