"""The slurm command: `credit-dp slurm script KEY=VALUE ...` prints a batch script for a mesh."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import common_parser, parse_arguments, run_subcommand
from credit_dp.cli.compose import Composer, check_overrides
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.sweep_jobs import all_combinations, override_choices
from credit_dp.cli.sweep_launchers import check_job_config
from credit_dp.config import Config
from credit_dp.distributed.placement import (
    ClusterNodes,
    Placement,
    PlacementRequest,
    place_ranks,
    slurm_nodes,
)
from credit_dp.distributed.signals import parse_duration
from credit_dp.errors import UserError
from credit_dp.plugins import PLUGINS_VARIABLE, plugin_files

NOTICE_SECONDS = 180  # seconds before the end, more than a run keeps for itself
NOTICE_DIVISOR = 5  # the notice of a short job is the fifth part of its time
REQUEUES = 20  # then a job that gets nowhere is not queued again


@final
@dataclass(frozen=True)
class BatchScript:
    """What a batch script is made of; of several runs each is a job of an array."""

    runs: Sequence[Sequence[str]]
    config: Config
    placement: Placement
    start: str
    time: str
    partition: str
    account: str
    command: str

    @property
    def notice(self) -> int:
        """Seconds before its end at which the job hears of it."""
        return min(
            NOTICE_SECONDS,
            int(parse_duration(self.time) or NOTICE_SECONDS * NOTICE_DIVISOR) // NOTICE_DIVISOR,
        )

    @property
    def is_array(self) -> bool:
        """Whether there are several runs."""
        return len(self.runs) > 1


def script_text(script: BatchScript) -> str:
    """The whole script."""
    parts = [
        header(script), SITE_SETUP, export_plugins(), select_run(script), start_ranks(script),
        wait_and_requeue(script),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def header(script: BatchScript) -> str:
    """What the job asks for."""
    place, parallel = script.placement, script.config.parallel
    number = "%A_%a" if script.is_array else "%j"
    options = {
        "job-name": "credit-dp",
        "array": f"0-{len(script.runs) - 1}" if script.is_array else "",
        "partition": script.partition,
        "account": script.account,
        "nodes": place.nodes,
        "ntasks-per-node": place.tasks_per_node,
        "cpus-per-task": place.cpus_per_task,
        "gpus-per-node": place.gpus_per_node or "",
        "time": script.time,
        "output": f"slurm-{number}.log",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value != ""]
    on_each = f"{place.tasks_per_node} on each of {place.nodes} nodes"
    if place.nodes == 1:
        on_each = "all on one node"
    return f"""\
#!/bin/bash
# {script.command}
# Each run has {place.ranks} ranks, {on_each}:
# pipeline {parallel.pipeline} x data {place.data} x domain {parallel.domain}.
{chr(10).join(lines)}
#SBATCH --open-mode=append   # after a requeue the log goes on
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@{script.notice}  # seconds before the end, to this script
"""


SITE_SETUP = """\
# What your site needs: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # the log is written at once
"""


def export_plugins() -> str:
    """What names the files of plug-ins to the job, wherever it starts; or nothing."""
    files = os.pathsep.join(str(file.path.absolute()) for file in plugin_files())
    return f"export {PLUGINS_VARIABLE}={shlex.quote(files)}\n" if files else ""


def select_run(script: BatchScript) -> str:
    """What is trained, and the number of the job: of the array's, if it is one."""
    if not script.is_array:
        return f"keys=({shlex.join(script.runs[0])})\njob=$SLURM_JOB_ID\n"
    entries = "\n".join(f"    {shlex.quote(shlex.join(run))}" for run in script.runs)
    return f"""\
# One line for each job of the array.
runs=(
{entries}
)
eval "keys=(${{runs[SLURM_ARRAY_TASK_ID]}})"
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # the last one's SLURM_JOB_ID is the whole array's
"""


def start_ranks(script: BatchScript) -> str:
    """How the ranks start, behind traps that tell them of the end."""
    place = script.placement
    keys = f'"${{keys[@]}}"{run_name_key(script)} resume=auto'
    if script.start == "torchrun":
        return start_with_torchrun(place, keys)
    return f"""\
# The ranks save after the step that they are in, and end with exit code 75. SIGTERM, which comes
# with scancel and with preemption, reaches them without this script, which waits for them.
trap 'kill -USR1 "$ranks"' USR1
trap ':' TERM

srun --nodes={place.nodes} --ntasks-per-node={place.tasks_per_node} \\
    --cpus-per-task={place.cpus_per_task} --distribution=block --kill-on-bad-exit=1 \\
    python -m credit_dp train {keys} &
ranks=$!
"""


def run_name_key(script: BatchScript) -> str:
    """A key for the run's folder that stays the same when the job is queued again; or nothing."""
    run = script.config.run
    if script.is_array:
        base = shlex.quote(run.name) if run.name else "slurm-$SLURM_ARRAY_JOB_ID"
        return f' run.name={base}-"$SLURM_ARRAY_TASK_ID"'
    return "" if run.name or run.dir else ' run.name=slurm-"$SLURM_JOB_ID"'


def start_with_torchrun(place: Placement, keys: str) -> str:
    """The same with an agent of torchrun on each node, which takes SIGTERM only."""
    return f"""\
# torchrun hands SIGTERM on to the ranks, which save after the step that they are in.
told=0
trap 'told=1; scancel --signal=TERM "$job"' USR1
trap 'told=1' TERM

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID * 8 % 20000))
srun --nodes={place.nodes} --ntasks-per-node=1 \\
    --cpus-per-task={place.tasks_per_node * place.cpus_per_task} --kill-on-bad-exit=1 \\
    torchrun --nnodes={place.nodes} --nproc-per-node={place.tasks_per_node} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:$port" \\
    -m credit_dp train {keys} &
ranks=$!
"""


def wait_and_requeue(script: BatchScript) -> str:
    """Wait for the ranks, and have the job queued again if they were stopped."""
    stopped = '{ [ "$code" = 75 ] || [ "$code" = 138 ]; }'
    if script.start == "torchrun":  # it has exit codes of its own
        stopped = '{ [ "$code" != 0 ] && [ "$told" = 1 ]; }'
    return f"""\
# A signal to this script ends a wait, and not the ranks.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# 75: stopped; 138: SIGUSR1 came before or after training. Not if cancelled, and not for ever.
if {stopped} && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {REQUEUES} ] &&
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
"""


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
    return run_subcommand({"script": script}, arguments, program, HELP)


def script(arguments: Sequence[str], program: str) -> int:
    """Print a batch script; the exit code.

    Raises:
        UserError: a key or a value is not allowed, or the ranks don't fit on the nodes.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(SCRIPT_HELP.format(program=program))
        return 0
    own = {k: v for k, _, v in (text.partition("=") for text in args.overrides) if is_script_key(k)}
    given = [text for text in args.overrides if not is_script_key(text.partition("=")[0])]
    numbers, texts = read_number_keys(own), {**TEXTS, **read_choice_keys(own), **own}
    if parse_duration(texts["time"]) is None:
        raise UserError(f"time: needs HH:MM:SS or DAYS-HH:MM:SS, got {texts['time']!r}")
    composer = Composer("train")
    overrides = parse_overrides(given)
    check_overrides(overrides, composer.groups)
    runs = all_combinations(override_choices(overrides, composer))
    configs = [composer.config(run) for run in runs]
    for config in configs:
        check_job_config(config)
    if len(runs) > 1 and configs[0].run.dir:
        raise UserError("run.dir: the jobs of an array need folders of their own. Give run.name.")
    wish = PlacementRequest(
        numbers["nodes"], numbers["tasks_per_node"], numbers["cpus_per_task"],
        texts["spread"] == "true",
    )  # fmt: skip
    placement = place_runs(configs, cluster_nodes(numbers, texts["partition"]), wish)
    made = BatchScript(
        runs, configs[0], placement, texts["start"], texts["time"], texts["partition"],
        texts["account"], f"{program} {shlex.join(arguments)}",
    )  # fmt: skip
    sys.stdout.write(script_text(made))
    return 0


def is_script_key(key: str) -> bool:
    """Whether a key is of this command, and not of the config."""
    return key in (*NUMBERS, *CHOICES, *TEXTS)


def read_number_keys(own: dict[str, str]) -> dict[str, int | None]:
    """The keys that are numbers; None where none is given.

    Raises:
        UserError: a value is none.
    """
    for key in NUMBERS:
        least = 0 if key == "gpus_per_node" else 1
        if key in own and not (own[key].isdecimal() and int(own[key]) >= least):
            raise UserError(f"{key}: needs a whole number of at least {least}, got {own[key]!r}")
    return {key: int(own[key]) if key in own else None for key in NUMBERS}


def read_choice_keys(own: dict[str, str]) -> dict[str, str]:
    """The keys with few values, the first of which is the default.

    Raises:
        UserError: a value is none of them.
    """
    for key, allowed in CHOICES.items():
        if own.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"{key}: needs one of {', '.join(allowed)}, got {own[key]!r}."
                f"{did_you_mean(own[key], allowed)}"
            )
    return {key: own.get(key, allowed[0]) for key, allowed in CHOICES.items()}


def cluster_nodes(numbers: dict[str, int | None], partition: str) -> ClusterNodes:
    """What nodes have: as given, else as SLURM says."""
    cores, gpus = numbers["cpus_per_node"], numbers["gpus_per_node"]
    if cores is not None or gpus is not None:
        return ClusterNodes(None, cores, gpus)
    return slurm_nodes(partition or None)


def place_runs(configs: Sequence[Config], has: ClusterNodes, wish: PlacementRequest) -> Placement:
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
    placements = [place_ranks(config, has, wish) for config in configs]
    cpus = max(placement.cpus_per_task for placement in placements)
    return replace(placements[0], cpus_per_task=cpus)
