"""The tables of the plan command: levels, and what is sent for each layer."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from credit_dp.command.tables import amount, table

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import LayerTraffic, PlanReport
    from credit_dp.domain_parallel.tally import Sent

BANDS = ("rows", "largest band", "smallest", "largest / mean")
EXCHANGED = ("all ranks send", "at least", "sent / least")
LAYERS = ("layers", "type", "count", "messages", "forward", "backward", "all ranks", "collectives")


def levels_table(report: "PlanReport") -> list[str]:
    """The bands of every number of rows, and what is exchanged there."""
    rows = []
    for level in report.levels:
        bands = str(level.rows), str(max(level.bands)), str(min(level.bands))
        excess = "-" if level.excess is None else f"{level.excess:.2f}"
        exchanged = amount(level.sent_bytes), amount(level.least_bytes), excess
        cells = (*bands, f"{level.imbalance:.3f}", *exchanged)
        rows.append(cells if report.layers else cells[: len(BANDS)])
    if not report.layers:
        return table(BANDS, rows)
    return [
        *table((*BANDS, *EXCHANGED), rows),
        "all ranks send: rows, forward and backward, for layers with this many rows of input",
        "at least: if each row that a rank needs and doesn't own crosses once in each direction;",
        "where rows are traded for channels, each row of each channel",
    ]


def traffic_table(report: "PlanReport") -> list[str]:
    """What is sent in a step: by the rank that sends most, and by all."""
    layers = [layer for layer in report.layers if any(map(sends, layer.forward + layer.backward))]
    rows = [
        (
            path,
            of_path[0].type,
            str(len(of_path)),
            *volumes(of_path[0].forward, of_path[0].backward),
        )
        for path, of_path in alike(layers).items()
    ]
    rows.append(("all", "", str(len(layers)), *volumes(report.forward, report.backward)))
    silent = len(report.layers) - len(layers)
    lines = table(LAYERS, rows, left=2)
    lines.append("messages, forward, backward, collectives: of the rank that sends most")
    if any("*" in row[0] for row in rows):
        lines.append("*: several layers, whose paths differ here, and each of which sends as much")
    if silent:
        lines.append(f"sharded layers that send nothing: {silent}")
    return lines


def alike(layers: Sequence["LayerTraffic"]) -> dict[str, list["LayerTraffic"]]:
    """Layers by path; those that send the same, and whose paths differ in numbers, together."""
    by_kind: dict[object, list[LayerTraffic]] = defaultdict(list)
    for layer in layers:
        names = ("*" if name.isdigit() else name for name in layer.path.split("."))
        by_kind[tuple(names), layer.type, layer.forward, layer.backward].append(layer)
    groups = list(by_kind.values())
    while True:
        paths = [common_path(group) for group in groups]
        uses = Counter(paths)
        if len(uses) == len(groups):
            return dict(zip(paths, groups, strict=True))
        parts = (
            [group] if uses[path] == 1 else split(group, path.split("."))
            for path, group in zip(paths, groups, strict=True)
        )
        groups = [part for of_group in parts for part in of_group]


def common_path(layers: Sequence["LayerTraffic"]) -> str:
    """The layers' paths as one, with a star for each name in which they differ."""
    names = zip(*(layer.path.split(".") for layer in layers), strict=True)
    return ".".join(of_place[0] if len(set(of_place)) == 1 else "*" for of_place in names)


def split(layers: Sequence["LayerTraffic"], path: list[str]) -> list[list["LayerTraffic"]]:
    """The layers by the first name in which their paths differ."""
    parts: dict[str, list[LayerTraffic]] = defaultdict(list)
    for layer in layers:
        parts[layer.path.split(".")[path.index("*")] if "*" in path else ""].append(layer)
    return list(parts.values())


def sends(sent: "Sent") -> bool:
    """Whether there is anything at all."""
    return sent.messages + sent.collectives > 0


def volumes(forward: Sequence["Sent"], backward: Sequence["Sent"]) -> tuple[str, ...]:
    """Cells of one row of the table."""
    both = [a + b for a, b in zip(forward, backward, strict=True)]
    collectives = f"{both[0].collectives} ({amount(both[0].collective_bytes)})"
    messages = max(sent.messages for sent in both)
    return (
        str(messages or "-"),
        *(
            amount(max(sent.bytes for sent in way)) if messages else "-"
            for way in (forward, backward)
        ),
        amount(sum(sent.bytes for sent in both)) if messages else "-",
        collectives if both[0].collectives else "-",
    )
