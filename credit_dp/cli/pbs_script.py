"""The batch script for PBS Pro and OpenPBS that `credit-dp cluster script scheduler=pbs` prints.

PBS signals a job only seconds before it kills it, and its `qrerun` is for operators. So the script
tells the ranks when the job ends: they stop in time and save, and the script submits itself again.
A preempted job is run again by PBS (`-r y`). In both cases the run resumes in the same folder.
"""

import shlex

from credit_dp.cli.slurm_script import REQUEUES, BatchScript, export_plugins, first_lines, run_list
from credit_dp.distributed.slurm import JOB_END, MARGIN_SECONDS, parse_duration

# A run that stops because of the time has at most its margin left, and some seconds to end.
TIME_OVER_SECONDS = int(MARGIN_SECONDS) + 30
# By how ranks are started: Cray's mpiexec has the options of MPICH's, Open MPI has its own.
START_OPTIONS = {
    "mpiexec": "-n {ranks} -ppn {tasks}",
    "mpirun": "-n {ranks} --map-by ppr:{tasks}:node",
}
BINDINGS = {
    "mpiexec": "binding=()  # with Cray's mpiexec: binding=(--cpu-bind depth --depth {cpus})",
    "mpirun": "binding=(--bind-to none)",
}


def pbs_script_text(script: BatchScript) -> str:
    """Return the script."""
    parts = (
        header(script),
        site_setup(script),
        export_plugins(),
        select_run(script),
        start_ranks(script),
        wait_and_submit_again(script),
    )
    return "\n".join(part for part in parts if part)


def header(script: BatchScript) -> str:
    """Return the resources that the job requests."""
    placement = script.placement
    chunk = {
        "ncpus": placement.tasks_per_node * placement.cpus_per_task,
        "mpiprocs": placement.tasks_per_node,
        "ompthreads": placement.cpus_per_task,
        "ngpus": placement.gpus_per_node,
    }
    resources = ":".join(f"{name}={count}" for name, count in chunk.items() if count)
    options = {
        "-N": "credit-dp",
        "-J": f"0-{len(script.runs) - 1}" if script.is_array else "",
        "-q": script.queue,
        "-A": script.account,
        "-l select": f"={placement.nodes}:{resources}",
        "-l place": "=scatter" if placement.nodes > 1 else "",
        "-l walltime": f"={walltime(script.time)}",
    }
    lines = [
        f"#PBS {key}{'' if value.startswith('=') else ' '}{value}"
        for key, value in options.items()
        if value
    ]
    return f"""\
{first_lines(script)}
{chr(10).join(lines)}
#PBS -j oe
#PBS -r y
"""


def walltime(time: str) -> str:
    """Return a time, which may have days, as hours, minutes and seconds."""
    minutes, seconds = divmod(int(parse_duration(time) or 0), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def site_setup(script: BatchScript) -> str:
    """Return lines for the settings of a site, and the lines that all sites share."""
    cpus = script.placement.cpus_per_task
    return f"""\
cd "$PBS_O_WORKDIR" || exit 1
end=$(($(date +%s) + {int(parse_duration(script.time) or 0)}))

# Settings of your site: directives above, such as #PBS -l filesystems=home, modules, the
# environment, the network of the ranks, their cores.
# module load conda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0
{BINDINGS[script.start].format(cpus=cpus)}
"""


def select_run(script: BatchScript) -> str:
    """Return lines that set the keys of the run, and keep the script for the next job of the run.

    PBS gives the next job another number, and removes its copy of the script with the job.
    """
    number = """\
# The number of the run's first job; this one may continue it.
job=${CREDIT_DP_FIRST_JOB:-${PBS_JOBID%%[!0-9]*}}
restarts=${CREDIT_DP_RESTARTS:-0}
"""
    if not script.is_array:
        script_file = """\
script=$PBS_O_WORKDIR/pbs-$job.sh
[ "$restarts" -gt 0 ] || cp "$0" "$script"
"""
        return f"keys=({shlex.join(script.runs[0])})\n{number}{script_file}"
    return f"""\
{run_list(script)}
index=${{CREDIT_DP_INDEX:-$PBS_ARRAY_INDEX}}
eval "keys=(${{runs[index]}})"
{number}\
script=$PBS_O_WORKDIR/pbs-$job-$index.sh  # one job of the array
[ "$restarts" -gt 0 ] || sed '/^#PBS -J/d' "$0" > "$script"
"""


def start_ranks(script: BatchScript) -> str:
    """Return lines that start the ranks.

    Not every mpiexec hands on the environment of the script, so the ranks get it by `env`.
    """
    placement = script.placement
    run = script.config.run
    base = shlex.quote(run.name) if run.name else 'pbs-"$job"'
    name = "" if run.name or run.dir else f" run.name={base}"
    if script.is_array:
        name = f' run.name={base}-"$index"'
    options = START_OPTIONS[script.start].format(
        ranks=placement.ranks, tasks=placement.tasks_per_node
    )
    # Jobs of an array share the number, and often a node.
    port = "job * 8 + index" if script.is_array else "job * 8"
    return f"""\
variables=(
    MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")" MASTER_PORT=$((20000 + ({port}) % 12000))
    WORLD_SIZE={placement.ranks} OMP_NUM_THREADS={placement.cpus_per_task}
    {JOB_END}="$end" PYTHONUNBUFFERED=1
)
# SIGTERM, from qdel and preemption, reaches the ranks as well, which save and end with exit code
# 75; the trap only keeps this script alive to wait for them.
trap ':' TERM

{script.start} {options} "${{binding[@]}}" env "${{variables[@]}}" \\
    python -m credit_dp train "${{keys[@]}}"{name} resume=auto &
ranks=$!
"""


def wait_and_submit_again(script: BatchScript) -> str:
    """Return lines that wait for the ranks, and submit the next job if the time was too short."""
    index = ",CREDIT_DP_INDEX=$index" if script.is_array else ""
    return f"""\
# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# The exit code may be that of mpiexec: what counts is that the time is over. A job that qdel ended
# before is not submitted again.
if [ "$code" != 0 ] && [ $((end - $(date +%s))) -le {TIME_OVER_SECONDS} ] &&
    [ "$restarts" -lt {REQUEUES} ]; then
    qsub -v "CREDIT_DP_FIRST_JOB=$job,CREDIT_DP_RESTARTS=$((restarts + 1)){index}" "$script"
fi
exit "$code"
"""
