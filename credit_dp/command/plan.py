"""The plan command: what `credit-dp plan parallel.domain=64` takes, before there are ranks."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from credit_dp.command.arguments import OneLineParser
from credit_dp.command.machine_files import machine_names, read_machine
from credit_dp.command.mesh_tables import cuts_table, held_table, meshes_table, sent_table
from credit_dp.command.plan_json import meshes_json, plan_json
from credit_dp.command.plan_tables import levels_table, traffic_table
from credit_dp.command.planned import Plan, model_and_shape, plan_of
from credit_dp.command.predicted_tables import predictions_json, predictions_table
from credit_dp.command.question import read_question
from credit_dp.command.tables import amount
from credit_dp.config import Config, microbatches
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import PlanReport

MEMORY = 80.0  # GiB of a rank
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
    question = read_question(arguments, program, help_text, _add_dashes)
    if question is None:
        return 0
    config, dashes = question.config, question.dashes
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
    found = plan_of(config)
    show = plan_json if question.json else as_text
    sys.stdout.write(show(found, config))
    return 1 if found.report.problems else 0


def _compare(config: Config, dashes: Namespace) -> int:
    from credit_dp.command.meshes import find_meshes  # torch

    memory = MEMORY if dashes.memory is None else dashes.memory
    model, (_, *field) = model_and_shape(config, config.data.batch_size)
    meshes = find_meshes(model, (1, *field), config, dashes.up_to)
    show = meshes_json if dashes.json else meshes_table
    sys.stdout.write(show(meshes, config, memory))
    return 0 if meshes.lines else 1


def _predict(config: Config, dashes: Namespace) -> int:
    up_to = MOST_RANKS if dashes.up_to is None else dashes.up_to
    if up_to < 1:
        raise UserError(f"--up-to: needs at least 1 rank, got {up_to}.")
    machine = read_machine(dashes.machine)
    from credit_dp.command.predicted import predict_meshes  # torch

    predictions = predict_meshes(config, machine, up_to)
    show = predictions_json if dashes.json else predictions_table
    sys.stdout.write(show(predictions, config, machine))
    return 0 if predictions.lines else 1


def _add_dashes(using: OneLineParser) -> None:
    using.add_argument("--up-to", type=int)
    using.add_argument("--memory", type=float)
    using.add_argument("--machine")


def as_text(plan: Plan, config: Config) -> str:
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
    parallel, micros = config.parallel, microbatches(config)
    size = amount(report.parameter_bytes)
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
    most, least = amount(max(report.saved_bytes)), amount(min(report.saved_bytes))
    if report.ranks == 1:
        return f"kept for backward: {most}"
    return f"kept for backward: {most} on the fullest rank, {least} on the emptiest"
