"""The plan command: what `credit-dp plan parallel.domain=64` takes, before there are ranks."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from credit_dp.command.question import read_question
from credit_dp.command.tables import amount, table
from credit_dp.config import Config
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import PlanReport
    from credit_dp.domain_parallel.tally import Sent

HELP = """\
{program} KEY=VALUE ...: says what a sharded training step will take.

Needs no ranks, no data and no memory for activations, so that any number of ranks and any grid can
be planned on a laptop, in seconds:
  model=unet_base data.grid=721x1440 parallel.domain=64 data.batch_size=1

Prints the rows of each rank, the messages and bytes of each layer, parameters, an estimate of the
activations that a rank keeps for backward, and whatever keeps the model from being sharded so.

  --json        the report as JSON, of every rank
  --help, -h    this text

Exit code: 0 if the model can be sharded so, 1 if not, 2 if the keys are wrong.
"""


def plan(arguments: Sequence[str], program: str) -> int:
    """Report on the configured model, grid and number of ranks; the exit code.

    Raises:
        UserError: the config is not as needed.
    """
    question = read_question(arguments, program, HELP)
    if question is None:
        return 0
    report = report_of(question.config)
    show = as_json if question.json else as_text
    sys.stdout.write(show(report, question.config))
    return 1 if report.problems else 0


def report_of(config: Config) -> "PlanReport":
    """Build the model without data for its parameters, and plan it.

    Raises:
        UserError: the grid, the batch or the variables are not as needed.
    """
    import torch  # takes seconds: not for --help

    from credit_dp.data.expected import expected_channels, expected_grid
    from credit_dp.domain_parallel.build import declared_converters
    from credit_dp.domain_parallel.report import plan_report
    from credit_dp.models import build_model

    data = config.parallel.data or 1
    if config.data.batch_size % data:
        raise UserError(
            f"data.batch_size: needs a multiple of the {data} data ranks, "
            f"got {config.data.batch_size}. Change it or parallel.data."
        )
    grid, channels = expected_grid(config.data), expected_channels(config.data)
    try:
        with torch.device("meta"):
            model = build_model(config.model, channels.inputs, channels.outputs, grid)
    except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
        model = build_model(config.model, channels.inputs, channels.outputs, grid)
    model = model.to(getattr(torch, config.trainer.dtype))
    shape = (config.data.batch_size // data, channels.inputs, *grid)
    return plan_report(
        model, shape, config.parallel.domain, custom_converters=declared_converters(model)
    )


def as_text(report: "PlanReport", config: Config) -> str:
    """Tables for people."""
    size = amount(report.parameter_bytes)
    shape = " x ".join(map(str, report.input_shapes[0]))
    lines = [
        f"model   {config.model.name}, {report.parameters:,} parameters ({size})",
        f"input   {shape}, {config.trainer.dtype}",
        f"ranks   {report.ranks}",
        "",
        *levels_table(report),
    ]
    if report.layers:
        lines += ["", *traffic_table(report)]
    if report.saved_bytes:
        lines += ["", memory_line(report)]
    if report.problems:
        lines += ["", "It can't be sharded so:", *(f"  {problem}" for problem in report.problems)]
    return "\n".join([*lines, ""])


def levels_table(report: "PlanReport") -> list[str]:
    """The bands of every number of rows."""
    rows = [
        (str(level.rows), str(max(level.bands)), str(min(level.bands)), f"{level.imbalance:.3f}")
        for level in report.levels
    ]
    return table(("rows", "largest band", "smallest", "largest / mean"), rows)


def traffic_table(report: "PlanReport") -> list[str]:
    """What is sent in a step: by the rank that sends most, and by all."""
    layers = [layer for layer in report.layers if any(map(sends, layer.forward + layer.backward))]
    rows = [(layer.path, layer.type, *volumes(layer.forward, layer.backward)) for layer in layers]
    rows.append(("all", "", *volumes(report.forward, report.backward)))
    silent = len(report.layers) - len(layers)
    names = ("layer", "type", "messages", "forward", "backward", "all ranks", "collectives")
    lines = table(names, rows, left=2)
    lines.append("messages, forward, backward, collectives: of the rank that sends most")
    if silent:
        lines.append(f"sharded layers that send nothing: {silent}")
    return lines


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


def memory_line(report: "PlanReport") -> str:
    """What the ranks keep for backward."""
    most, least = amount(max(report.saved_bytes)), amount(min(report.saved_bytes))
    if report.ranks == 1:
        return f"kept for backward: {most}"
    return f"kept for backward: {most} on the fullest rank, {least} on the emptiest"


def as_json(report: "PlanReport", config: Config) -> str:
    """The whole report, every rank's numbers in lists in the order of the ranks."""
    content: dict[str, Any] = {
        "model": config.model.name,
        "dtype": config.trainer.dtype,
        **asdict(report),
        "forward": [vars(sent) for sent in report.forward],
        "backward": [vars(sent) for sent in report.backward],
    }
    for level, written in zip(report.levels, content["levels"], strict=True):
        written["imbalance"] = level.imbalance
    return json.dumps(content, indent=2) + "\n"
