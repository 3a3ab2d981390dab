"""The plan command: prints what `credit_dp.costs` computes for a step, as tables or JSON.

`credit-dp plan parallel.domain=64` describes one mesh, `--up-to N` compares meshes. The tables of
both come first, the command is at the end.
"""

import json
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from credit_dp.cli.arguments import OneLineParser
from credit_dp.cli.check_run import silence_retries
from credit_dp.cli.compose import check_rows
from credit_dp.cli.output import format_bytes, format_table
from credit_dp.cli.train import read_config_arguments
from credit_dp.config import Config, TrainerConfig, microbatches_per_step
from credit_dp.distributed.placement import mesh_text
from credit_dp.errors import UserError
from credit_dp.process import no_garbage_collection

if TYPE_CHECKING:
    from credit_dp.costs.budget import MeshComparison, PipelinePlan, RankBudget, StepPlan
    from credit_dp.domain_parallel.count_transport import RankTraffic
    from credit_dp.domain_parallel.decide import Decision, LayerTraffic


BAND_HEADINGS = ("rows", "largest band", "smallest", "largest / mean")
EXCHANGE_HEADINGS = ("all ranks send", "at least", "sent / least")
LAYER_HEADINGS = (
    "layers",
    "type",
    "count",
    "messages",
    "forward",
    "backward",
    "all ranks",
    "collectives",
)


def levels_table(report: "Decision") -> list[str]:
    """Return a table of the bands and the traffic at every level, a number of rows."""
    rows = []
    for level in report.levels:
        bands = (str(level.rows), str(max(level.bands)), str(min(level.bands)))
        excess = "-" if level.excess is None else f"{level.excess:.2f}"
        # Nobody knows the least that a model on tensors of the globe could send.
        least = "-" if report.refusal else format_bytes(level.least_bytes)
        exchanged = (format_bytes(level.sent_bytes), least, excess)
        cells = (*bands, f"{level.imbalance:.3f}", *exchanged)
        rows.append(cells if report.layers else cells[: len(BAND_HEADINGS)])
    if not report.layers:
        return format_table(BAND_HEADINGS, rows)
    return [
        *format_table((*BAND_HEADINGS, *EXCHANGE_HEADINGS), rows),
        "all ranks send: rows, forward and backward, for layers with this many rows of input",
        "at least: if each row that a rank needs and doesn't own is sent once in each direction;",
        "in layers that transpose rows and channels, each row of each channel",
    ]


def traffic_table(report: "Decision") -> list[str]:
    """Return a table of what each layer sends in a step."""
    layers = [
        layer
        for layer in report.layers
        if any(sent.messages + sent.collectives for sent in layer.forward + layer.backward)
    ]
    rows = [
        (
            path,
            group[0].type,
            str(len(group)),
            *traffic_cells(group[0].forward, group[0].backward),
        )
        for path, group in group_identical_layers(layers).items()
    ]
    rows.append(("all", "", str(len(layers)), *traffic_cells(report.forward, report.backward)))
    without_traffic = len(report.layers) - len(layers)
    lines = format_table(LAYER_HEADINGS, rows, left=2)
    lines.append("messages, forward, backward, collectives: of the rank that sends most")
    if any("*" in row[0] for row in rows):
        lines.append("*: several layers, whose paths differ here; each of them sends as much")
    if without_traffic:
        lines.append(f"sharded layers that send nothing: {without_traffic}")
    return lines


def group_identical_layers(layers: Sequence["LayerTraffic"]) -> dict[str, list["LayerTraffic"]]:
    """Return layers by path; layers that send the same and differ only in numbers share a path."""
    by_kind: dict[object, list[LayerTraffic]] = defaultdict(list)
    for layer in layers:
        names = ("*" if name.isdigit() else name for name in layer.path.split("."))
        by_kind[tuple(names), layer.type, layer.forward, layer.backward].append(layer)
    groups = list(by_kind.values())
    # Two groups may get the same path with stars. They are split by one name more, until all paths
    # are unique.
    while True:
        paths = [common_path(group) for group in groups]
        path_counts = Counter(paths)
        if len(path_counts) == len(groups):
            return dict(zip(paths, groups, strict=True))
        parts = (
            [group] if path_counts[path] == 1 else split_by_name(group, path.split("."))
            for path, group in zip(paths, groups, strict=True)
        )
        groups = [part for split in parts for part in split]


def common_path(layers: Sequence["LayerTraffic"]) -> str:
    """Return the layers' paths as one, with a star for each name in which they differ."""
    names = zip(*(layer.path.split(".") for layer in layers), strict=True)
    return ".".join(
        alternatives[0] if len(set(alternatives)) == 1 else "*" for alternatives in names
    )


def split_by_name(layers: Sequence["LayerTraffic"], path: list[str]) -> list[list["LayerTraffic"]]:
    """Split layers by the first name in which their paths differ."""
    parts: dict[str, list[LayerTraffic]] = defaultdict(list)
    for layer in layers:
        parts[layer.path.split(".")[path.index("*")] if "*" in path else ""].append(layer)
    return list(parts.values())


def traffic_cells(
    forward: Sequence["RankTraffic"], backward: Sequence["RankTraffic"]
) -> tuple[str, ...]:
    """Return the cells of one row: messages, forward, backward, all ranks, collectives."""
    # All ranks take part in the same collectives, so the first rank's count is that of any.
    both = [a + b for a, b in zip(forward, backward, strict=True)]
    collectives = f"{both[0].collectives} ({format_bytes(both[0].collective_bytes)})"
    messages = max(traffic.messages for traffic in both)
    return (
        str(messages or "-"),
        *(
            format_bytes(max(traffic.bytes for traffic in direction)) if messages else "-"
            for direction in (forward, backward)
        ),
        format_bytes(sum(traffic.bytes for traffic in both)) if messages else "-",
        collectives if both[0].collectives else "-",
    )


MESH_HEADINGS = ("domain", "data", "rows", "imbalance")


def held_table(budgets: Sequence["RankBudget"]) -> list[str]:
    """Return a table of what the fullest rank at each position of the pipeline axis holds."""
    columns, lines = _items_table("a rank holds", budgets, [budget.held for budget in budgets])
    if "gathered" in columns:
        lines.append("gathered: weights of other ranks, while a block of segments computes")
    if "states" in columns:
        lines.append("states: receive buffers for states between stages and their gradients")
    if "fixers" in columns:
        lines.append("fixers: the fields that they got; fixers again: what backward recomputes")
    return [
        *lines,
        "activations: an estimate, without temporary memory of operations",
    ]


def sent_table(budgets: Sequence["RankBudget"]) -> list[str]:
    """Return a table of what the busiest rank at each position of the pipeline axis sends."""
    columns, lines = _items_table("a rank sends", budgets, [budget.sent for budget in budgets])
    if not columns:
        return []
    if "members" in columns:
        lines.append("members: for the loss, between ranks that share the members of a sample")
    return [
        "",
        *lines,
        "in a step; gradients and weights are estimated as rings, all others are counted",
    ]


def cuts_table(plan: "PipelinePlan") -> list[str]:
    """Return a table of the stages of a pipeline."""
    rows = [
        (
            cut.first,
            str(cut.stage),
            str(cut.pipeline_rank),
            f"{cut.cost:.1%}",
            format_bytes(cut.state_bytes) if cut.stage else "-",
        )
        for cut in plan.cuts
    ]
    return [
        *format_table(("first segment", "stage", "pipeline", "cost", "state"), rows, left=1),
        "cost: share of the multiply-adds; state: bytes that a rank receives for a micro-batch",
        f"bubble: a rank waits {plan.bubble:.1%} of a step, if all stages cost the same",
    ]


def meshes_table(comparison: "MeshComparison", config: Config, memory: float) -> str:
    """Return a table with one line for each number of domain ranks."""
    if not comparison.meshes:
        return f"The model can't be sharded:\n  {comparison.limit}\n"
    rows = []
    for mesh in comparison.meshes:
        budgets = {budget.mode: budget for budget in mesh.budgets}
        ddp, fsdp2 = budgets["ddp"], budgets.get("fsdp2")
        fits = [mode for mode, budget in budgets.items() if budget.fits(memory)]
        rows.append(
            (
                *(str(mesh.domain), str(mesh.data), str(mesh.rows), f"{mesh.imbalance:.3f}"),
                format_bytes(ddp.held["activations"]),
                format_bytes(ddp.total_held),
                format_bytes(fsdp2.total_held) if fsdp2 else "-",
                format_bytes(ddp.sent["rows"]),
                format_bytes(ddp.sent["gradients"]),
                format_bytes(fsdp2.sent["gradients"] + fsdp2.sent["weights"]) if fsdp2 else "-",
                ", ".join(fits) or "-",
            )
        )
    headings = ("activations", "with ddp", "with fsdp2", "rows", "for ddp", "for fsdp2")
    lines = [f"model   {config.model.name}, {config.trainer.dtype}"]
    lines += [*rollout_lines(config.trainer), ""]
    lines += [
        *format_table((*MESH_HEADINGS, *headings, f"fits {memory:g} GiB"), rows),
        *_legend(comparison),
    ]
    return "\n".join(lines) + "\n"


def _legend(comparison: "MeshComparison") -> list[str]:
    held = comparison.meshes[0].budgets[0].held
    weights, moments = format_bytes(held["weights"]), format_bytes(held["moments"])
    lines = [
        "",
        f"Meshes of at most {comparison.up_to} ranks; each data rank has one sample at a time.",
        "rows: the smallest band at the coarsest level; imbalance: the largest band over the mean",
        "activations, with ddp, with fsdp2: held by the fullest rank; the last two are totals",
        f"  with ddp: weights {weights}, gradients as much, moments {moments}, activations",
        "  with fsdp2: shards of these, the largest block gathered, activations",
        "rows, for ddp, for fsdp2: what the rank that sends most sends in a step",
    ]
    return [*lines, f"No larger domain: {comparison.limit}"] if comparison.limit else lines


def _items_table(
    heading: str, budgets: Sequence["RankBudget"], items: Sequence[Mapping[str, int]]
) -> tuple[list[str], list[str]]:
    """Return the items of which any budget has bytes, and a table of these and of the sums."""
    columns = [name for name in items[0] if any(of[name] for of in items)]
    rows = [
        (
            budget.mode,
            str(budget.pipeline_rank),
            *map(format_bytes, (*(of[name] for name in columns), sum(of.values()))),
        )
        for budget, of in zip(budgets, items, strict=True)
    ]
    return columns, format_table((heading, "pipeline", *columns, "all"), rows, left=1)


# What the JSON has of a `Decision`, in the order of the text.
DECISION_KEYS = (
    *("parameters", "parameter_bytes", "input_shapes", "ranks", "layers", "forward", "backward"),
    *("levels", "saved_bytes", "recomputed_bytes", "launches", "refusal", "unplanned"),
    *("decisions", "whole_calls", "whole_bytes", "largest_gathered", "problems"),
)


def _plain(value: Any) -> Any:
    """Return a value with dictionaries in place of dataclasses."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def plan_json(plan: "StepPlan", config: Config) -> str:
    """Return the whole report as JSON; lists are in the order of the ranks."""
    report = plan.report
    content: dict[str, Any] = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        "rollout": config.trainer.longest_rollout,  # forecast steps; all else is of one of them
        **{name: _plain(getattr(report, name)) for name in DECISION_KEYS},
        "budget": [asdict(budget) for budget in plan.budgets],
    }
    if plan.pipeline is not None:
        content["cuts"] = [asdict(cut) for cut in plan.pipeline.cuts]
        content["bubble"] = plan.pipeline.bubble
    for level, entry in zip(report.levels, content["levels"], strict=True):
        entry |= {"imbalance": level.imbalance, "excess": level.excess}
    return json.dumps(content, indent=2) + "\n"


def meshes_json(comparison: "MeshComparison", config: Config, memory: float) -> str:
    """Return JSON with one entry for each number of domain ranks."""
    content = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        "up_to": comparison.up_to,
        "memory_gib": memory,
        "refused": comparison.limit,
        "meshes": [
            {**asdict(mesh), "fits": [b.mode for b in mesh.budgets if b.fits(memory)]}
            for mesh in comparison.meshes
        ],
    }
    return json.dumps(content, indent=2) + "\n"


DEFAULT_MEMORY_GIB = 80.0  # of a rank, for --up-to

HELP = """\
{program} KEY=VALUE ...: estimates memory and traffic of a sharded training step.

Needs no ranks, no data and no memory for activations, so that any number of ranks and any grid can
be planned on a laptop, in seconds:
  model=unet_base data.grid=721x1440 parallel.domain=64 data.batch_size=1

Prints the messages and bytes of each layer; the rows of the ranks at each level, and the bytes sent
there compared with the least possible; what a rank holds and sends, with ddp and with fsdp2; the
cuts of a pipeline; the kernels that a rank launches; and what prevents the model from being sharded
on this mesh.

  --up-to N        instead, compare meshes of data x domain ranks, with at most N ranks
  --memory GIB     memory of a rank, for that table: which meshes fit; by default 80
  --json           the report as JSON, with every rank
  --help, -h       this text

Exit code: 0 if the model can be sharded on the mesh, 1 if not, 2 if the keys are wrong.
"""


@no_garbage_collection()  # it would walk over all that torch has imported, again and again
def plan(arguments: Sequence[str], program: str) -> int:
    """Report on the configured model, grid and mesh; return the exit code."""
    parsed = read_config_arguments(arguments, program, HELP, _add_options)
    if parsed is None:
        return 0
    config = parsed.config
    options = parsed.options
    if options.memory is not None and options.up_to is None:
        raise UserError("--memory: has no effect without --up-to. Add --up-to.")
    if options.memory is not None and not options.memory > 0:
        raise UserError(f"--memory: needs more than 0 GiB, got {options.memory:g}.")
    silence_retries()
    if config.parallel.domain > 1:
        from credit_dp.data.setup import expected_data  # a store's, too; xarray: not for --help

        # As all commands that run a model: on more ranks none of them would.
        grid = "x".join(map(str, expected_data(config.data).grid))
        check_rows(replace(config, data=config.data.on_grid(grid)))
    if options.up_to is not None:
        return _compare(config, options)
    from credit_dp.costs.budget import plan_step  # torch: not for --help

    step_plan = plan_step(config)
    render = plan_json if parsed.json else as_text
    sys.stdout.write(render(step_plan, config))
    return 1 if step_plan.report.problems else 0


def _compare(config: Config, options: Namespace) -> int:
    from credit_dp.costs.budget import compare_meshes, model_and_shape  # torch

    memory = DEFAULT_MEMORY_GIB if options.memory is None else options.memory
    model, (_, *image_shape) = model_and_shape(config, config.data.batch_size)
    shape = (config.trainer.members, *image_shape)  # those of one sample
    comparison = compare_meshes(model, shape, config, options.up_to)
    render = meshes_json if options.json else meshes_table
    sys.stdout.write(render(comparison, config, memory))
    return 0 if comparison.meshes else 1


def _add_options(parser: OneLineParser) -> None:
    parser.add_argument("--up-to", type=int)
    parser.add_argument("--memory", type=float)


def as_text(plan: "StepPlan", config: Config) -> str:
    """Return the report as tables."""
    report = plan.report
    lines = _head(report, config)
    if report.layers:
        lines += ["", *traffic_table(report)]
    lines += ["", *levels_table(report)]  # after the long table, so that a terminal shows it
    if plan.pipeline is not None:
        lines += ["", *cuts_table(plan.pipeline)]
    if plan.budgets:
        lines += ["", *held_table(plan.budgets), *sent_table(plan.budgets)]
    if config.parallel.data_mode == "fsdp2" and {budget.mode for budget in plan.budgets} == {"ddp"}:
        lines += [
            "",
            "fsdp2: impossible with one rank, or if parameters have rows of the grid",
        ]
    if report.saved_bytes:
        lines += ["", memory_line(report), launches_line(report)]
    if report.on_globe or report.unplanned:
        from credit_dp.domain_parallel.decide import decision_lines  # torch: not for --help

        lines += ["", *decision_lines(report)]
    if report.problems:
        lines += [
            "",
            "The model can't be sharded on this mesh:",
            *(f"  {problem}" for problem in report.problems),
        ]
    return "\n".join([*lines, ""])


def _head(report: "Decision", config: Config) -> list[str]:
    parallel = config.parallel
    microbatches = microbatches_per_step(config)
    size = format_bytes(report.parameter_bytes)
    shape = " x ".join(map(str, report.input_shapes[0]))
    lines = [
        f"model   {config.model.name}, {report.parameters:,} parameters ({size})",
        f"input   {shape}, {config.trainer.dtype}",
        f"ranks   {report.ranks}{report.way}",
    ]
    if parallel.pipeline * (parallel.data or 1) * parallel.ensemble > 1:
        lines.append(f"mesh    {mesh_text(parallel)}")
    if config.data.name == "quickstart":
        lines.append("data    quickstart; data=NAME data.store=PATH plans the channels of a store")
    if microbatches > 1:
        lines.append(f"step    {microbatches} micro-batches, each with this input")
    return [*lines, *rollout_lines(config.trainer)]


def rollout_lines(trainer: TrainerConfig) -> list[str]:
    """Return lines about what a rollout adds to the tables; none without a rollout."""
    steps = trainer.longest_rollout
    if steps == 1:
        return []
    return [
        f"rollout up to {steps} forecast steps in a training step; the tables are of one of them:",
        f"        activations, and messages of rows and members, are up to {steps} times as much",
    ]


def memory_line(report: "Decision") -> str:
    """Return a line about the activations that ranks save for backward."""
    largest = format_bytes(max(report.saved_bytes))
    smallest = format_bytes(min(report.saved_bytes))
    if report.ranks == 1:
        return f"saved for backward: {largest}"
    return f"saved for backward: {largest} on the fullest rank, {smallest} on the emptiest"


def launches_line(report: "Decision") -> str:
    """Return a line about the kernels that the host of a rank has to start."""
    rank = report.run.rank if report.run else 0
    return f"launched: {report.launches:,} kernels in forward and backward, by rank {rank}"
