"""The plan command: what `credit-dp plan parallel.domain=64` takes, before there are ranks."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from credit_dp.command.plan_tables import levels_table, traffic_table
from credit_dp.command.question import read_question
from credit_dp.command.tables import amount
from credit_dp.config import Config
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import PlanReport

HELP = """\
{program} KEY=VALUE ...: says what a sharded training step will take.

Needs no ranks, no data and no memory for activations, so that any number of ranks and any grid can
be planned on a laptop, in seconds:
  model=unet_base data.grid=721x1440 parallel.domain=64 data.batch_size=1

Prints the messages and bytes of each layer; the rows of the ranks at each level, and what is sent
there beside the least that could be; parameters; an estimate of the activations that a rank keeps
for backward; and whatever keeps the model from being sharded so.

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
    grid = expected_grid(config.data)
    fields = expected_channels(config.data).fields(config.model.frames)
    try:
        with torch.device("meta"):
            model = build_model(config.model, fields, grid)
    except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
        model = build_model(config.model, fields, grid)
    model = model.to(getattr(torch, config.trainer.dtype))
    shape = (config.data.batch_size // data, fields.inputs, *grid)
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
    ]
    if report.layers:
        lines += ["", *traffic_table(report)]
    lines += ["", *levels_table(report)]  # after what is long, where a terminal shows it
    if report.saved_bytes:
        lines += ["", memory_line(report)]
    if report.problems:
        lines += ["", "It can't be sharded so:", *(f"  {problem}" for problem in report.problems)]
    return "\n".join([*lines, ""])


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
        written |= {"imbalance": level.imbalance, "excess": level.excess}
    return json.dumps(content, indent=2) + "\n"
