"""The text of a batch script that places a mesh, saves before its time is over, and goes on."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from credit_dp.config import Config
from credit_dp.launch.placement import Placement
from credit_dp.launch.time_limit import read_duration
from credit_dp.plugins import VARIABLE, named_files

NOTICE = 180  # seconds before the end, more than a run keeps for itself
SHARE = 5  # the notice of a short job is the fifth part of its time
REQUEUES = 20  # then a job that gets nowhere is not queued again


@final
@dataclass(frozen=True)
class Script:
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
        return min(NOTICE, int(read_duration(self.time) or NOTICE * SHARE) // SHARE)

    @property
    def is_array(self) -> bool:
        """Whether there are several runs."""
        return len(self.runs) > 1


def text_of(script: Script) -> str:
    """The whole script."""
    parts = [
        header(script), SITE, plugins(), choice_of_run(script), start_of(script), end_of(script),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def header(script: Script) -> str:
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


SITE = """\
# What your site needs: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # the log is written at once
"""


def plugins() -> str:
    """What names the files of plug-ins to the job, wherever it starts; or nothing."""
    files = os.pathsep.join(str(file.path.absolute()) for file in named_files())
    return f"export {VARIABLE}={shlex.quote(files)}\n" if files else ""


def choice_of_run(script: Script) -> str:
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


def start_of(script: Script) -> str:
    """How the ranks start, behind traps that tell them of the end."""
    place = script.placement
    keys = f'"${{keys[@]}}"{name_of(script)} resume=auto'
    if script.start == "torchrun":
        return torchrun(place, keys)
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


def name_of(script: Script) -> str:
    """A key for the run's folder that stays the same when the job is queued again; or nothing."""
    run = script.config.run
    if script.is_array:
        base = shlex.quote(run.name) if run.name else "slurm-$SLURM_ARRAY_JOB_ID"
        return f' run.name={base}-"$SLURM_ARRAY_TASK_ID"'
    return "" if run.name or run.dir else ' run.name=slurm-"$SLURM_JOB_ID"'


def torchrun(place: Placement, keys: str) -> str:
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


def end_of(script: Script) -> str:
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
