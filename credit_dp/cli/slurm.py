"""The slurm command: `credit-dp slurm script KEY=VALUE ...` prints a batch script for a mesh.

The script starts the ranks in the background and waits for them, so that its traps run when SLURM
signals the end of the job. The ranks save a checkpoint and stop; the job is then requeued and
resumes in the same folder.
"""

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
from credit_dp.distributed.slurm import parse_duration
from credit_dp.errors import UserError
from credit_dp.plugins import PLUGINS_VARIABLE, plugin_files

NOTICE_SECONDS = 180  # before the end of a job; more than a run needs to save
NOTICE_DIVISOR = 5  # of a short job's time, at most a fifth is notice
REQUEUES = 20  # a limit, for jobs that make no progress


@final
@dataclass(frozen=True)
class BatchScript:
    """The content of a batch script; several runs become the jobs of an array."""

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
        """Return how many seconds before its end the job is signalled."""
        return min(
            NOTICE_SECONDS,
            int(parse_duration(self.time) or NOTICE_SECONDS * NOTICE_DIVISOR) // NOTICE_DIVISOR,
        )

    @property
    def is_array(self) -> bool:
        """Whether there are several runs."""
        return len(self.runs) > 1


def script_text(script: BatchScript) -> str:
    """Return the script."""
    parts = (
        header(script),
        SITE_SETUP,
        export_plugins(),
        select_run(script),
        start_ranks(script),
        wait_and_requeue(script),
    )
    return "\n".join(part for part in parts if part)


def header(script: BatchScript) -> str:
    """Return the resources that the job requests."""
    placement = script.placement
    parallel = script.config.parallel
    log_number = "%A_%a" if script.is_array else "%j"
    options = {
        "job-name": "credit-dp",
        "array": f"0-{len(script.runs) - 1}" if script.is_array else "",
        "partition": script.partition,
        "account": script.account,
        "nodes": placement.nodes,
        "ntasks-per-node": placement.tasks_per_node,
        "cpus-per-task": placement.cpus_per_task,
        "gpus-per-node": placement.gpus_per_node or "",
        "time": script.time,
        "output": f"slurm-{log_number}.log",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value != ""]
    distribution = f"{placement.tasks_per_node} on each of {placement.nodes} nodes"
    if placement.nodes == 1:
        distribution = "all on one node"
    return f"""\
#!/bin/bash
# {script.command}
# Each run has {placement.ranks} ranks, {distribution}:
# pipeline {parallel.pipeline} x data {placement.data} x domain {parallel.domain}.
{chr(10).join(lines)}
#SBATCH --open-mode=append   # after a requeue the log continues
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@{script.notice}  # seconds before the end, to this script
"""


SITE_SETUP = """\
# Settings of your site: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # lines appear in the log at once
"""


def export_plugins() -> str:
    """Return a line that names the files of plug-ins by absolute path, or an empty text."""
    files = os.pathsep.join(str(file.path.absolute()) for file in plugin_files())
    return f"export {PLUGINS_VARIABLE}={shlex.quote(files)}\n" if files else ""


def select_run(script: BatchScript) -> str:
    """Return lines that set the keys of the run and the number of the job."""
    if not script.is_array:
        return f"keys=({shlex.join(script.runs[0])})\njob=$SLURM_JOB_ID\n"
    entries = "\n".join(f"    {shlex.quote(shlex.join(run))}" for run in script.runs)
    return f"""\
# One line for each job of the array.
runs=(
{entries}
)
eval "keys=(${{runs[SLURM_ARRAY_TASK_ID]}})"
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # the last job's SLURM_JOB_ID is the array's
"""


def start_ranks(script: BatchScript) -> str:
    """Return lines that start the ranks, and traps that pass signals on to them."""
    placement = script.placement
    keys = f'"${{keys[@]}}"{run_name_key(script)} resume=auto'
    if script.start == "torchrun":
        return start_with_torchrun(placement, keys)
    return f"""\
# On SIGUSR1 the ranks finish their step, save, and end with exit code 75. SIGTERM, from scancel and
# preemption, reaches them directly; the trap only keeps this script alive to wait for them.
trap 'kill -USR1 "$ranks"' USR1
trap ':' TERM

srun --nodes={placement.nodes} --ntasks-per-node={placement.tasks_per_node} \\
    --cpus-per-task={placement.cpus_per_task} --distribution=block --kill-on-bad-exit=1 \\
    python -m credit_dp train {keys} &
ranks=$!
"""


def run_name_key(script: BatchScript) -> str:
    """Return a key for a folder that stays the same after a requeue, or an empty text."""
    run = script.config.run
    if script.is_array:
        base = shlex.quote(run.name) if run.name else "slurm-$SLURM_ARRAY_JOB_ID"
        return f' run.name={base}-"$SLURM_ARRAY_TASK_ID"'
    return "" if run.name or run.dir else ' run.name=slurm-"$SLURM_JOB_ID"'


def start_with_torchrun(placement: Placement, keys: str) -> str:
    """Return the lines of `start_ranks` for torchrun, whose agents pass on SIGTERM only."""
    return f"""\
# torchrun passes SIGTERM on to the ranks, which finish their step and save.
stopping=0
trap 'stopping=1; scancel --signal=TERM "$job"' USR1
trap 'stopping=1' TERM

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID * 8 % 12000))
srun --nodes={placement.nodes} --ntasks-per-node=1 \\
    --cpus-per-task={placement.tasks_per_node * placement.cpus_per_task} --kill-on-bad-exit=1 \\
    torchrun --nnodes={placement.nodes} --nproc-per-node={placement.tasks_per_node} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:$port" \\
    -m credit_dp train {keys} &
ranks=$!
"""


def wait_and_requeue(script: BatchScript) -> str:
    """Return lines that wait for the ranks, and requeue the job if they were stopped."""
    stopped = '{ [ "$code" = 75 ] || [ "$code" = 138 ]; }'
    reason = (
        "# 75: stopped after saving; 138: SIGUSR1 came in the first seconds, before Python handled "
        "signals."
    )
    if script.start == "torchrun":
        stopped = '{ [ "$code" != 0 ] && [ "$stopping" = 1 ]; }'
        reason = "# torchrun has its own exit codes: what counts is a signal before it ended."
    return f"""\
# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

{reason}
# A cancelled job is no longer RUNNING and is not requeued.
if {stopped} && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {REQUEUES} ] &&
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
"""


HELP = """\
credit-dp slurm COMMAND: trains on a cluster with SLURM.

  credit-dp slurm script KEY=VALUE ...   print a batch script for a mesh

`credit-dp slurm COMMAND --help` says more.
"""

SCRIPT_HELP = """\
{program} KEY=VALUE ...: prints a batch script for sbatch.

Keys of the config set what is trained, as in `credit-dp train`. Several values of a key, as in
seed=0,1,2, make a job array with one job for each combination, all on the same mesh. Other keys:

  nodes=N             nodes of each job; by default the fewest that hold the mesh
  tasks_per_node=N    ranks on each node
  cpus_per_task=N     cores of each rank
  gpus_per_node=N     GPUs of a node, and
  cpus_per_node=N     its cores; by default as SLURM describes the partition, if SLURM is here
  spread=true         let a domain group span several nodes
  start=srun          start the ranks with srun, or with torchrun
  partition=NAME account=NAME time=HH:MM:SS

  --help, -h    this text

Exit code: 0, or 2 if the ranks don't fit on the nodes; then nothing is printed.
"""

NUMBERS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "cpus_per_node")
CHOICES = {"spread": ("false", "true"), "start": ("srun", "torchrun")}
TEXTS = {"partition": "", "account": "", "time": "24:00:00"}


def slurm(arguments: Sequence[str], program: str) -> int:
    """Run the command named by the first argument; return the exit code."""
    return run_subcommand({"script": script}, arguments, program, HELP)


def script(arguments: Sequence[str], program: str) -> int:
    """Print a batch script; return the exit code.

    Raises:
        UserError: a key or a value is not allowed, or the ranks don't fit on the nodes.
    """
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(SCRIPT_HELP.format(program=program))
        return 0
    script_keys = {
        key: value
        for key, _, value in (text.partition("=") for text in args.overrides)
        if is_script_key(key)
    }
    config_overrides = [
        text for text in args.overrides if not is_script_key(text.partition("=")[0])
    ]
    numbers = read_number_keys(script_keys)
    settings = {**TEXTS, **read_choice_keys(script_keys), **script_keys}
    if parse_duration(settings["time"]) is None:
        raise UserError(f"time: needs HH:MM:SS or DAYS-HH:MM:SS, got {settings['time']!r}")
    composer = Composer("train")
    overrides = parse_overrides(config_overrides)
    check_overrides(overrides, composer.groups)
    runs = all_combinations(override_choices(overrides, composer))
    configs = [composer.compose_config(run) for run in runs]
    for config in configs:
        check_job_config(config)
    if len(runs) > 1 and configs[0].run.dir:
        raise UserError(
            "run.dir: the jobs of an array need different folders. Give run.name instead."
        )
    request = PlacementRequest(
        nodes=numbers["nodes"],
        tasks_per_node=numbers["tasks_per_node"],
        cpus_per_task=numbers["cpus_per_task"],
        spread=settings["spread"] == "true",
    )
    placement = place_runs(configs, cluster_nodes(numbers, settings["partition"]), request)
    batch_script = BatchScript(
        runs=runs,
        config=configs[0],
        placement=placement,
        start=settings["start"],
        time=settings["time"],
        partition=settings["partition"],
        account=settings["account"],
        command=f"{program} {shlex.join(arguments)}",
    )
    sys.stdout.write(script_text(batch_script))
    return 0


def is_script_key(key: str) -> bool:
    """Whether a key belongs to this command, not to the config."""
    return key in (*NUMBERS, *CHOICES, *TEXTS)


def read_number_keys(given: dict[str, str]) -> dict[str, int | None]:
    """Return the keys that are numbers; a key that is not given is None.

    Raises:
        UserError: a value is no whole number, or too small.
    """
    for key in NUMBERS:
        minimum = 0 if key == "gpus_per_node" else 1
        if key in given and not (given[key].isdecimal() and int(given[key]) >= minimum):
            raise UserError(
                f"{key}: needs a whole number of at least {minimum}, got {given[key]!r}"
            )
    return {key: int(given[key]) if key in given else None for key in NUMBERS}


def read_choice_keys(given: dict[str, str]) -> dict[str, str]:
    """Return the keys with a choice of values, the first of which is the default.

    Raises:
        UserError: a value is not among the choices.
    """
    for key, allowed in CHOICES.items():
        if given.get(key, allowed[0]) not in allowed:
            raise UserError(
                f"{key}: needs one of {', '.join(allowed)}, got {given[key]!r}."
                f"{did_you_mean(given[key], allowed)}"
            )
    return {key: given.get(key, allowed[0]) for key, allowed in CHOICES.items()}


def cluster_nodes(numbers: dict[str, int | None], partition: str) -> ClusterNodes:
    """Return the resources of a node: as given, otherwise as SLURM describes the partition."""
    cores, gpus = numbers["cpus_per_node"], numbers["gpus_per_node"]
    if cores is not None or gpus is not None:
        return ClusterNodes(None, cores, gpus)
    return slurm_nodes(partition or None)


def place_runs(
    configs: Sequence[Config], available: ClusterNodes, request: PlacementRequest
) -> Placement:
    """Return the placement of all jobs of a script.

    Raises:
        UserError: the jobs have different meshes, or the mesh doesn't fit on the nodes.
    """
    meshes = {
        (config.parallel.pipeline, config.parallel.data, config.parallel.domain)
        for config in configs
    }
    if len(meshes) > 1:
        raise UserError(
            "parallel.domain: the jobs of a script need one mesh. Make a script for each, or use "
            "`credit-dp train --multirun hydra/launcher=slurm`."
        )
    placements = [place_ranks(config, available, request) for config in configs]
    cpus = max(placement.cpus_per_task for placement in placements)
    return replace(placements[0], cpus_per_task=cpus)
