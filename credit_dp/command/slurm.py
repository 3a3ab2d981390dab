"""The slurm command: `credit-dp slurm script KEY=VALUE ...` prints a batch script for a mesh."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from credit_dp.checks import nearest
from credit_dp.command.arguments import parse, parser, run_named
from credit_dp.command.compose import Composer, check_overrides
from credit_dp.command.overrides import parse_overrides
from credit_dp.command.slurm_script import Script, text_of
from credit_dp.command.sweep_jobs import choices_of, combinations
from credit_dp.command.sweep_launchers import check_config
from credit_dp.config import Config
from credit_dp.errors import UserError
from credit_dp.launch.placement import Nodes, Placement, Wish, place
from credit_dp.launch.slurm_nodes import slurm_nodes
from credit_dp.launch.time_limit import read_duration

HELP = """\
credit-dp slurm COMMAND: trains on a cluster with SLURM.

  credit-dp slurm script KEY=VALUE ...   print a batch script that is right for a mesh

`credit-dp slurm COMMAND --help` says more.
"""

SCRIPT_HELP = """\
{program} KEY=VALUE ...: prints a batch script for sbatch.

Keys of the config say what is trained, as in `credit-dp train`. Several values of a key, as in
seed=0,1,2, make a job array with one job for each combination, all on the same mesh. Besides:

  nodes=N             nodes of each job; by default the fewest that hold the mesh
  tasks_per_node=N    ranks on each node
  cpus_per_task=N     cores of each rank
  gpus_per_node=N     GPUs that a node has; by default what SLURM says of the partition, if it is
  cpus_per_node=N     here, else not known; cores that a node has, likewise
  spread=true         let a domain group reach over several nodes
  start=srun          srun starts the ranks, or torchrun does
  partition=NAME account=NAME time=HH:MM:SS

  --help, -h    this text

Exit code: 0, or 2 if the ranks don't fit on the nodes; then nothing is printed.
"""

NUMBERS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "cpus_per_node")
CHOICES = {"spread": ("false", "true"), "start": ("srun", "torchrun")}
TEXTS = {"partition": "", "account": "", "time": "24:00:00"}


def slurm(arguments: Sequence[str], program: str) -> int:
    """Run the command that the first argument names."""
    return run_named({"script": script}, arguments, program, HELP)


def script(arguments: Sequence[str], program: str) -> int:
    """Print a batch script; the exit code.

    Raises:
        UserError: a key or a value is not allowed, or the ranks don't fit on the nodes.
    """
    args = parse(parser(), arguments)
    if args.help:
        sys.stdout.write(SCRIPT_HELP.format(program=program))
        return 0
    own = {k: v for k, _, v in (text.partition("=") for text in args.overrides) if is_own(k)}
    given = [text for text in args.overrides if not is_own(text.partition("=")[0])]
    numbers, texts = read_numbers(own), {**TEXTS, **read_choices(own), **own}
    if read_duration(texts["time"]) is None:
        raise UserError(f"time: needs HH:MM:SS or DAYS-HH:MM:SS, got {texts['time']!r}")
    composer = Composer("train")
    overrides = parse_overrides(given)
    check_overrides(overrides, composer.groups)
    runs = combinations(choices_of(overrides, composer))
    configs = [composer.config(run) for run in runs]
    for config in configs:
        check_config(config)
    if len(runs) > 1 and configs[0].run.dir:
        raise UserError("run.dir: the jobs of an array need folders of their own. Give run.name.")
    wish = Wish(
        numbers["nodes"], numbers["tasks_per_node"], numbers["cpus_per_task"],
        texts["spread"] == "true",
    )  # fmt: skip
    placement = place_all(configs, nodes_of(numbers, texts["partition"]), wish)
    made = Script(
        runs, configs[0], placement, texts["start"], texts["time"], texts["partition"],
        texts["account"], f"{program} {shlex.join(arguments)}",
    )  # fmt: skip
    sys.stdout.write(text_of(made))
    return 0


def is_own(key: str) -> bool:
    """Whether a key is of this command, and not of the config."""
    return key in (*NUMBERS, *CHOICES, *TEXTS)


def read_numbers(own: dict[str, str]) -> dict[str, int | None]:
    """The keys that are numbers; None where none is given.

    Raises:
        UserError: a value is none.
    """
    for key in NUMBERS:
        least = 0 if key == "gpus_per_node" else 1
        if key in own and not (own[key].isdecimal() and int(own[key]) >= least):
            raise UserError(f"{key}: needs a whole number of at least {least}, got {own[key]!r}")
    return {key: int(own[key]) if key in own else None for key in NUMBERS}


def read_choices(own: dict[str, str]) -> dict[str, str]:
    """The keys with few values, the first of which is the default.

    Raises:
        UserError: a value is none of them.
    """
    for key, allowed in CHOICES.items():
        if own.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"{key}: needs one of {', '.join(allowed)}, got {own[key]!r}."
                f"{nearest(own[key], allowed)}"
            )
    return {key: own.get(key, allowed[0]) for key, allowed in CHOICES.items()}


def nodes_of(numbers: dict[str, int | None], partition: str) -> Nodes:
    """What nodes have: as given, else as SLURM says."""
    cores, gpus = numbers["cpus_per_node"], numbers["gpus_per_node"]
    if cores is not None or gpus is not None:
        return Nodes(None, cores, gpus)
    return slurm_nodes(partition or None)


def place_all(configs: Sequence[Config], has: Nodes, wish: Wish) -> Placement:
    """The placement that all jobs of a script share.

    Raises:
        UserError: they don't share one, or it doesn't fit on the nodes.
    """
    meshes = {(c.parallel.pipeline, c.parallel.data, c.parallel.domain) for c in configs}
    if len(meshes) > 1:
        raise UserError(
            "parallel.domain: the jobs of a script need one mesh. Make a script for each, or use "
            "`credit-dp train --multirun hydra/launcher=slurm`."
        )
    placements = [place(config, has, wish) for config in configs]
    cpus = max(placement.cpus_per_task for placement in placements)
    return replace(placements[0], cpus_per_task=cpus)
