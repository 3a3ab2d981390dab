#!/bin/bash
# {{ command }}
# Each run has {{ placement.ranks }} ranks, {% if placement.nodes == 1 %}all on one node{% else %}{{ placement.tasks_per_node }} on each of {{ placement.nodes }} nodes{% endif %}:
# {{ mesh }}.
#SBATCH --job-name=credit-dp
{% if is_array %}
#SBATCH --array=0-{{ runs | length - 1 }}
{% endif %}
{% if queue %}
#SBATCH --partition={{ queue }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
#SBATCH --nodes={{ placement.nodes }}
#SBATCH --ntasks-per-node={{ placement.tasks_per_node }}
#SBATCH --cpus-per-task={{ placement.cpus_per_task }}
{% if placement.gpus_per_node %}
#SBATCH --gpus-per-node={{ placement.gpus_per_node }}
{% endif %}
#SBATCH --time={{ time }}
#SBATCH --output=slurm-{{ "%A_%a" if is_array else "%j" }}.log
#SBATCH --open-mode=append   # after a requeue the log continues
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@{{ notice }}  # seconds before the end, to this script

# Settings of your site: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # lines appear in the log at once

{% if plugins %}
export {{ plugins }}

{% endif %}
{% if is_array %}
# One line for each job of the array.
runs=(
{% for run in runs %}
    {{ run | quote }}
{% endfor %}
)
eval "keys=(${runs[SLURM_ARRAY_TASK_ID]})"
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the last job's SLURM_JOB_ID is the array's
{% set own_name = ' run.name=' ~ (name or 'slurm-$SLURM_ARRAY_JOB_ID') ~ '-"$SLURM_ARRAY_TASK_ID"' %}
{% else %}
keys=({{ runs[0] }})
job=$SLURM_JOB_ID
{% set own_name = '' if has_folder else ' run.name=slurm-"$SLURM_JOB_ID"' %}
{% endif %}

{% if start == "torchrun" %}
# torchrun passes SIGTERM on to the ranks, which finish their step and save.
stopping=0
trap 'stopping=1; scancel --signal=TERM "$job"' USR1
trap 'stopping=1' TERM

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID * 8 % 12000))
srun --nodes={{ placement.nodes }} --ntasks-per-node=1 \
    --cpus-per-task={{ placement.tasks_per_node * placement.cpus_per_task }} --kill-on-bad-exit=1 \
    torchrun --nnodes={{ placement.nodes }} --nproc-per-node={{ placement.tasks_per_node }} \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:$port" \
    -m credit_dp train "${keys[@]}"{{ own_name }} resume=auto &
{% else %}
# On SIGUSR1 the ranks finish their step, save, and end with exit code 75. SIGTERM, from scancel and
# preemption, reaches them directly; the trap only keeps this script alive to wait for them.
trap 'kill -USR1 "$ranks"' USR1
trap ':' TERM

srun --nodes={{ placement.nodes }} --ntasks-per-node={{ placement.tasks_per_node }} \
    --cpus-per-task={{ placement.cpus_per_task }} --distribution=block --kill-on-bad-exit=1 \
    python -m credit_dp train "${keys[@]}"{{ own_name }} resume=auto &
{% endif %}
ranks=$!

# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

{% if start == "torchrun" %}
# torchrun has its own exit codes: what counts is a signal before it ended.
{% set stopped = '{ [ "$code" != 0 ] && [ "$stopping" = 1 ]; }' %}
{% else %}
# 75: stopped after saving; 138: SIGUSR1 came in the first seconds, before Python handled signals.
{% set stopped = '{ [ "$code" = 75 ] || [ "$code" = 138 ]; }' %}
{% endif %}
# A cancelled job is no longer RUNNING and is not requeued.
if {{ stopped }} && [ "${SLURM_RESTART_COUNT:-0}" -lt {{ requeues }} ] &&
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
