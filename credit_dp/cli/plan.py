"""The plan command: `credit-dp plan parallel.domain=64` says what a step takes, without ranks."""

import json
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from credit_dp.cli.arguments import OneLineParser
from credit_dp.cli.output import format_bytes, format_table
from credit_dp.cli.train import read_config_arguments
from credit_dp.config import Config, microbatches_per_step
from credit_dp.costs.machine import Machine, machine_names, read_machine
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.costs.budget import (
        MeshBudget,
        MeshComparison,
        PipelinePlan,
        RankBudget,
        StepPlan,
    )
    from credit_dp.costs.prediction import Prediction, Predictions
    from credit_dp.domain_parallel.costs.report import LayerTraffic, PlanReport
    from credit_dp.domain_parallel.count_transport import RankTraffic


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


def levels_table(report: "PlanReport") -> list[str]:
    """The bands of every number of rows, and what is exchanged there."""
    rows = []
    for level in report.levels:
        bands = str(level.rows), str(max(level.bands)), str(min(level.bands))
        excess = "-" if level.excess is None else f"{level.excess:.2f}"
        exchanged = format_bytes(level.sent_bytes), format_bytes(level.least_bytes), excess
        cells = (*bands, f"{level.imbalance:.3f}", *exchanged)
        rows.append(cells if report.layers else cells[: len(BAND_HEADINGS)])
    if not report.layers:
        return format_table(BAND_HEADINGS, rows)
    return [
        *format_table((*BAND_HEADINGS, *EXCHANGE_HEADINGS), rows),
        "all ranks send: rows, forward and backward, for layers with this many rows of input",
        "at least: if each row that a rank needs and doesn't own crosses once in each direction;",
        "where rows are traded for channels, each row of each channel",
    ]


def traffic_table(report: "PlanReport") -> list[str]:
    """What is sent in a step: by the rank that sends most, and by all."""
    layers = [
        layer for layer in report.layers if any(map(sends_anything, layer.forward + layer.backward))
    ]
    rows = [
        (
            path,
            of_path[0].type,
            str(len(of_path)),
            *traffic_cells(of_path[0].forward, of_path[0].backward),
        )
        for path, of_path in group_identical_layers(layers).items()
    ]
    rows.append(("all", "", str(len(layers)), *traffic_cells(report.forward, report.backward)))
    silent = len(report.layers) - len(layers)
    lines = format_table(LAYER_HEADINGS, rows, left=2)
    lines.append("messages, forward, backward, collectives: of the rank that sends most")
    if any("*" in row[0] for row in rows):
        lines.append("*: several layers, whose paths differ here, and each of which sends as much")
    if silent:
        lines.append(f"sharded layers that send nothing: {silent}")
    return lines


def group_identical_layers(layers: Sequence["LayerTraffic"]) -> dict[str, list["LayerTraffic"]]:
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
            [group] if uses[path] == 1 else split_by_name(group, path.split("."))
            for path, group in zip(paths, groups, strict=True)
        )
        groups = [part for of_group in parts for part in of_group]


def common_path(layers: Sequence["LayerTraffic"]) -> str:
    """The layers' paths as one, with a star for each name in which they differ."""
    names = zip(*(layer.path.split(".") for layer in layers), strict=True)
    return ".".join(of_place[0] if len(set(of_place)) == 1 else "*" for of_place in names)


def split_by_name(layers: Sequence["LayerTraffic"], path: list[str]) -> list[list["LayerTraffic"]]:
    """The layers by the first name in which their paths differ."""
    parts: dict[str, list[LayerTraffic]] = defaultdict(list)
    for layer in layers:
        parts[layer.path.split(".")[path.index("*")] if "*" in path else ""].append(layer)
    return list(parts.values())


def sends_anything(sent: "RankTraffic") -> bool:
    """Whether there is anything at all."""
    return sent.messages + sent.collectives > 0


def traffic_cells(
    forward: Sequence["RankTraffic"], backward: Sequence["RankTraffic"]
) -> tuple[str, ...]:
    """Cells of one row of the table."""
    both = [a + b for a, b in zip(forward, backward, strict=True)]
    collectives = f"{both[0].collectives} ({format_bytes(both[0].collective_bytes)})"
    messages = max(sent.messages for sent in both)
    return (
        str(messages or "-"),
        *(
            format_bytes(max(sent.bytes for sent in way)) if messages else "-"
            for way in (forward, backward)
        ),
        format_bytes(sum(sent.bytes for sent in both)) if messages else "-",
        collectives if both[0].collectives else "-",
    )


MESH_HEADINGS = ("domain", "data", "rows", "imbalance")


def held_table(budgets: Sequence["RankBudget"]) -> list[str]:
    """What the fullest rank of each place on the pipeline axis holds."""
    columns = [name for name in budgets[0].held if any(b.held[name] for b in budgets)]
    rows = [
        (
            *_budget_cells(budget),
            *(format_bytes(budget.held[name]) for name in columns),
            format_bytes(budget.total_held),
        )
        for budget in budgets
    ]
    lines = format_table(("a rank holds", "pipeline", *columns, "all"), rows, left=1)
    if "gathered" in columns:
        lines.append("gathered: weights of other ranks, while a block of segments computes")
    if "states" in columns:
        lines.append("states: room for what stages hand on, and its gradients")
    return [
        *lines,
        "activations: an estimate. What an operation needs while it runs comes on top",
    ]


def sent_table(budgets: Sequence["RankBudget"]) -> list[str]:
    """What the rank that sends most, of each place on the pipeline axis, sends in a step."""
    columns = [name for name in budgets[0].sent if any(b.sent[name] for b in budgets)]
    if not columns:
        return []
    rows = [
        (
            *_budget_cells(budget),
            *(format_bytes(budget.sent[name]) for name in columns),
            format_bytes(budget.total_sent),
        )
        for budget in budgets
    ]
    return [
        "",
        *format_table(("a rank sends", "pipeline", *columns, "all"), rows, left=1),
        "in a step; rows and states are counted, gradients and weights go round in rings",
    ]


def cuts_table(plan: "PipelinePlan") -> list[str]:
    """The stages of a pipeline."""
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
        "cost: share of the multiply-adds; state: bytes that a rank is handed for a micro-batch",
        f"bubble: a rank waits {plan.bubble:.1%} of a step, if all stages cost the same",
    ]


def meshes_table(meshes: "MeshComparison", config: Config, memory: float) -> str:
    """Lines for people: one for each number of domain ranks."""
    if not meshes.lines:
        return f"It can't be sharded:\n  {meshes.refused}\n"
    rows = []
    for line in meshes.lines:
        of = {budget.mode: budget for budget in line.budgets}
        ddp, shared = of["ddp"], of.get("fsdp2")
        fits = [mode for mode, budget in of.items() if budget.fits(memory)]
        rows.append(
            (
                *(str(line.domain), str(line.data), str(line.rows), f"{line.imbalance:.3f}"),
                format_bytes(ddp.held["activations"]),
                format_bytes(ddp.total_held),
                format_bytes(shared.total_held) if shared else "-",
                format_bytes(ddp.sent["rows"]),
                format_bytes(ddp.sent["gradients"]),
                format_bytes(shared.sent["gradients"] + shared.sent["weights"]) if shared else "-",
                ", ".join(fits) or "-",
            )
        )
    names = ("activations", "with ddp", "with fsdp2", "rows", "for ddp", "for fsdp2")
    lines = [f"model   {config.model.name}, {config.trainer.dtype}", ""]
    lines += [
        *format_table((*MESH_HEADINGS, *names, f"fits {memory:g} GiB"), rows),
        *_legend(meshes),
    ]
    return "\n".join(lines) + "\n"


def _legend(meshes: "MeshComparison") -> list[str]:
    alone = meshes.lines[0].budgets[0].held
    weights, moments = format_bytes(alone["weights"]), format_bytes(alone["moments"])
    lines = [
        "",
        f"Meshes of at most {meshes.up_to} ranks; every data rank works on one sample at a time.",
        "rows: the smallest band at the coarsest level; imbalance: the largest band over the mean",
        "activations, with ddp, with fsdp2: what the fullest rank holds; the last two all of it",
        f"  with ddp: weights {weights}, gradients as much, moments {moments}, activations",
        "  with fsdp2: shares of these, the largest block gathered, activations",
        "rows, for ddp, for fsdp2: what the rank that sends most sends in a step",
    ]
    return [*lines, f"No larger domain: {meshes.refused}"] if meshes.refused else lines


def _budget_cells(budget: "RankBudget") -> tuple[str, str]:
    return budget.mode, str(budget.pipeline_rank)


PREDICTION_HEADINGS = (
    "ranks",
    "domain",
    "data",
    "GiB",
    "fits",
    "compute",
    "exchange",
    "reduction",
    "step",
)


def predictions_table(predictions: "Predictions", config: Config, machine: Machine) -> str:
    """Lines for people: one for each mesh."""
    if not predictions.lines:
        return f"It can't be sharded:\n  {predictions.refused}\n"
    rows = [_prediction_cells(line, machine) for line in predictions.lines]
    dtype = config.trainer.autocast or config.trainer.dtype
    lines = [
        f"model    {config.model.name}, {dtype}",
        f"machine  {machine.name}",
        f"source   {machine.source}",
        "",
        *format_table((*PREDICTION_HEADINGS, "samples/s", "efficiency"), rows),
        "",
        "Predicted, not measured. Every data rank has one sample; times are seconds of a step.",
        f"GiB: of the fullest rank; fits: in the {machine.memory_gib:g} GiB of a rank",
        "compute: of the slowest rank; exchange: rows and sums over the domain; reduction: of",
        "  gradients, over all ranks. Nothing is taken to overlap",
        "efficiency: samples/s of a rank over those of one rank alone, which may not fit",
    ]
    if predictions.refused:
        lines.append(f"No larger domain: {predictions.refused}")
    return "\n".join(lines) + "\n"


def _prediction_cells(line: "Prediction", machine: Machine) -> tuple[str, ...]:
    time = line.time
    return (
        *(str(line.ranks), str(line.domain), str(line.data)),
        f"{line.held_bytes / 2**30:.2f}",
        "yes" if line.fits(machine) else "NO",
        *(f"{s:.4f}" for s in (time.compute, time.exchange, time.reduction, time.step)),
        f"{line.samples_per_s:.1f}",
        f"{line.efficiency:.1%}",
    )


def predictions_json(predictions: "Predictions", config: Config, machine: Machine) -> str:
    """One entry for each mesh; times in seconds."""
    content = {
        "model": config.model.name,
        "dtype": config.trainer.autocast or config.trainer.dtype,
        "machine": machine.name,
        "source": machine.source,
        "memory_gib": machine.memory_gib,
        "up_to": predictions.up_to,
        "refused": predictions.refused,
        "meshes": [
            {
                "ranks": line.ranks,
                "domain": line.domain,
                "data": line.data,
                "held_bytes": line.held_bytes,
                "fits": line.fits(machine),
                **vars(line.time),
                "step": line.time.step,
                "samples_per_s": line.samples_per_s,
                "efficiency": line.efficiency,
            }
            for line in predictions.lines
        ],
    }
    return json.dumps(content, indent=2) + "\n"


def plan_json(plan: "StepPlan", config: Config) -> str:
    """The whole report, every rank's numbers in lists in the order of the ranks."""
    report = plan.report
    content: dict[str, Any] = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        **asdict(report),
        "forward": [vars(sent) for sent in report.forward],
        "backward": [vars(sent) for sent in report.backward],
        "budget": [asdict(budget) for budget in plan.budgets],
    }
    if plan.pipeline is not None:
        content["cuts"] = [asdict(cut) for cut in plan.pipeline.cuts]
        content["bubble"] = plan.pipeline.bubble
    for level, written in zip(report.levels, content["levels"], strict=True):
        written |= {"imbalance": level.imbalance, "excess": level.excess}
    return json.dumps(content, indent=2) + "\n"


def meshes_json(meshes: "MeshComparison", config: Config, memory: float) -> str:
    """One entry for each number of domain ranks."""
    content = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        "up_to": meshes.up_to,
        "memory_gib": memory,
        "refused": meshes.refused,
        "meshes": [_mesh_json(line, memory) for line in meshes.lines],
    }
    return json.dumps(content, indent=2) + "\n"


def _mesh_json(line: "MeshBudget", memory: float) -> dict[str, Any]:
    fits: Sequence[str] = [b.mode for b in line.budgets if b.fits(memory)]
    return {**asdict(line), "fits": fits}


DEFAULT_MEMORY_GIB = 80.0  # GiB of a rank
MOST_RANKS = 1024  # of predictions

HELP = """\
{program} KEY=VALUE ...: says what a sharded training step will take.

Needs no ranks, no data and no memory for activations, so that any number of ranks and any grid can
be planned on a laptop, in seconds:
  model=unet_base data.grid=721x1440 parallel.domain=64 data.batch_size=1

Prints the messages and bytes of each layer; the rows of the ranks at each level, and what is sent
there beside the least that could be; what a rank holds and sends, with ddp and with fsdp2; the
cuts of a pipeline; and whatever keeps the model from being sharded so.

  --up-to N        instead, a table of meshes of data x domain ranks, at most N of them
  --memory GIB     of a rank, for that table: which meshes fit; 80 without it
  --machine FILE   instead, seconds of a step on a machine, predicted and not measured, on meshes of
                   up to 1,024 ranks (--up-to N: of N). FILE is a YAML file with the machine's
                   figures, or one of {machines}
  --json           the report as JSON, of every rank
  --help, -h       this text

With --machine every data rank has one sample. It compares growing domains with one data rank; the
smallest domain that fits the memory, with 1, 2, 4 ... data ranks; and all domains with as many data
ranks as there are ranks for. With parallel.domain the domain is that one, with parallel.data the
data ranks are as many.

Exit code: 0 if the model can be sharded so, 1 if not, 2 if the keys are wrong.
"""


def plan(arguments: Sequence[str], program: str) -> int:
    """Report on the configured model, grid and number of ranks; the exit code.

    Raises:
        UserError: the config is not as needed.
    """
    help_text = HELP.replace("{machines}", ", ".join(machine_names()))
    question = read_config_arguments(arguments, program, help_text, _add_options)
    if question is None:
        return 0
    config, dashes = question.config, question.options
    if dashes.memory is not None and dashes.machine is not None:
        raise UserError("--memory: --machine has the GiB of a rank: change memory_gib of the file.")
    if dashes.memory is not None and (dashes.up_to is None or not dashes.memory > 0):
        raise UserError(
            f"--memory: needs --up-to, and GiB of a rank above 0, got {dashes.memory:g}."
        )
    if dashes.machine is not None:
        return _predict(config, dashes)
    if dashes.up_to is not None:
        return _compare(config, dashes)
    from credit_dp.costs.budget import plan_step  # torch

    found = plan_step(config)
    show = plan_json if question.json else as_text
    sys.stdout.write(show(found, config))
    return 1 if found.report.problems else 0


def _compare(config: Config, dashes: Namespace) -> int:
    from credit_dp.costs.budget import compare_meshes, model_and_shape  # torch

    memory = DEFAULT_MEMORY_GIB if dashes.memory is None else dashes.memory
    model, (_, *field) = model_and_shape(config, config.data.batch_size)
    meshes = compare_meshes(model, (1, *field), config, dashes.up_to)
    show = meshes_json if dashes.json else meshes_table
    sys.stdout.write(show(meshes, config, memory))
    return 0 if meshes.lines else 1


def _predict(config: Config, dashes: Namespace) -> int:
    up_to = MOST_RANKS if dashes.up_to is None else dashes.up_to
    if up_to < 1:
        raise UserError(f"--up-to: needs at least 1 rank, got {up_to}.")
    machine = read_machine(dashes.machine)
    from credit_dp.costs.prediction import predict_meshes  # torch

    predictions = predict_meshes(config, machine, up_to)
    show = predictions_json if dashes.json else predictions_table
    sys.stdout.write(show(predictions, config, machine))
    return 0 if predictions.lines else 1


def _add_options(using: OneLineParser) -> None:
    using.add_argument("--up-to", type=int)
    using.add_argument("--memory", type=float)
    using.add_argument("--machine")


def as_text(plan: "StepPlan", config: Config) -> str:
    """Tables for people."""
    report = plan.report
    lines = _head(report, config)
    if report.layers:
        lines += ["", *traffic_table(report)]
    lines += ["", *levels_table(report)]  # after what is long, where a terminal shows it
    if plan.pipeline is not None:
        lines += ["", *cuts_table(plan.pipeline)]
    if plan.budgets:
        lines += ["", *held_table(plan.budgets), *sent_table(plan.budgets)]
    if config.parallel.data_mode == "fsdp2" and {b.mode for b in plan.budgets} == {"ddp"}:
        lines += ["", "fsdp2: one rank shares nothing, nor do parameters with a row for each row"]
    if report.saved_bytes:
        lines += ["", memory_line(report)]
    if report.problems:
        lines += ["", "It can't be sharded so:", *(f"  {problem}" for problem in report.problems)]
    return "\n".join([*lines, ""])


def _head(report: "PlanReport", config: Config) -> list[str]:
    parallel, micros = config.parallel, microbatches_per_step(config)
    size = format_bytes(report.parameter_bytes)
    shape = " x ".join(map(str, report.input_shapes[0]))
    lines = [
        f"model   {config.model.name}, {report.parameters:,} parameters ({size})",
        f"input   {shape}, {config.trainer.dtype}",
        f"ranks   {report.ranks}",
    ]
    axes = {"pipeline": parallel.pipeline, "data": parallel.data or 1, "domain": parallel.domain}
    if axes["pipeline"] * axes["data"] > 1:
        lines.append("mesh    " + " x ".join(f"{name} {ranks}" for name, ranks in axes.items()))
    if micros > 1:
        lines.append(f"step    {micros} micro-batches, the input is one of them")
    return lines


def memory_line(report: "PlanReport") -> str:
    """What the ranks keep for backward."""
    most, least = format_bytes(max(report.saved_bytes)), format_bytes(min(report.saved_bytes))
    if report.ranks == 1:
        return f"kept for backward: {most}"
    return f"kept for backward: {most} on the fullest rank, {least} on the emptiest"
