"""The batch script for SLURM that `credit-dp cluster script` prints, and what all scripts share.

The script starts the ranks in the background and waits for them, so that its traps run when SLURM
signals the end of the job. The ranks save a checkpoint and stop; the job is then requeued and
resumes in the same folder.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from credit_dp.config import Config
from credit_dp.distributed.placement import Placement, mesh_text
from credit_dp.distributed.slurm import parse_duration
from credit_dp.plugins import plugins_setting

NOTICE_SECONDS = 180  # before the end of a job; more than a run needs to save
NOTICE_DIVISOR = 5  # of a short job's time, at most a fifth is notice
REQUEUES = 20  # a limit, for jobs that make no progress


@final
@dataclass(frozen=True)
class BatchScript:
    """The content of a batch script; several runs become the jobs of an array.

    Attributes:
        runs: the overrides of each run.
        config: of the first run.
        placement: of the ranks of a run.
        start: the program that starts the ranks.
        time: limit of a job.
        queue: or partition; empty for the default.
        account: that pays; empty for the default.
        command: that made the script.
    """

    runs: Sequence[Sequence[str]]
    config: Config
    placement: Placement
    start: str
    time: str
    queue: str
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


def slurm_script_text(script: BatchScript) -> str:
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
    log_number = "%A_%a" if script.is_array else "%j"
    options = {
        "job-name": "credit-dp",
        "array": f"0-{len(script.runs) - 1}" if script.is_array else "",
        "partition": script.queue,
        "account": script.account,
        "nodes": placement.nodes,
        "ntasks-per-node": placement.tasks_per_node,
        "cpus-per-task": placement.cpus_per_task,
        "gpus-per-node": placement.gpus_per_node or "",
        "time": script.time,
        "output": f"slurm-{log_number}.log",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value != ""]
    return f"""\
{first_lines(script)}
{chr(10).join(lines)}
#SBATCH --open-mode=append   # after a requeue the log continues
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@{script.notice}  # seconds before the end, to this script
"""


def first_lines(script: BatchScript) -> str:
    """Return the command that made the script, and what it starts, as comments."""
    placement, parallel = script.placement, script.config.parallel
    distribution = f"{placement.tasks_per_node} on each of {placement.nodes} nodes"
    if placement.nodes == 1:
        distribution = "all on one node"
    return f"""\
#!/bin/bash
# {script.command}
# Each run has {placement.ranks} ranks, {distribution}:
# {mesh_text(parallel, placement.data)}."""


SITE_SETUP = """\
# Settings of your site: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # lines appear in the log at once
"""


def export_plugins() -> str:
    """Return a line that names the files of plug-ins by absolute path, or an empty text."""
    setting = plugins_setting()
    return f"export {setting}\n" if setting else ""


def select_run(script: BatchScript) -> str:
    """Return lines that set the keys of the run and the number of the job."""
    if not script.is_array:
        return f"keys=({shlex.join(script.runs[0])})\njob=$SLURM_JOB_ID\n"
    return f"""\
{run_list(script)}
eval "keys=(${{runs[SLURM_ARRAY_TASK_ID]}})"
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID  # the last job's SLURM_JOB_ID is the array's
"""


def run_list(script: BatchScript) -> str:
    """Return an array of bash with the overrides of each run."""
    entries = "\n".join(f"    {shlex.quote(shlex.join(run))}" for run in script.runs)
    return f"""\
# One line for each job of the array.
runs=(
{entries}
)"""


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
