#!/bin/bash
# credit-dp slurm script model=unet parallel.domain=4 seed=0,1,2,3 run.name=seeds gpus_per_node=4 cpus_per_node=32
# Each run has 4 ranks, all on one node:
# pipeline 1 x data 1 x domain 4.
#SBATCH --job-name=credit-dp
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%A_%a.log
#SBATCH --open-mode=append   # after a requeue the log continues
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@180  # seconds before the end, to this script

# Settings of your site: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # lines appear in the log at once

# One line for each job of the array.
runs=(
    'model=unet parallel.domain=4 seed=0 run.name=seeds'
    'model=unet parallel.domain=4 seed=1 run.name=seeds'
    'model=unet parallel.domain=4 seed=2 run.name=seeds'
    'model=unet parallel.domain=4 seed=3 run.name=seeds'
)
eval "keys=(${runs[SLURM_ARRAY_TASK_ID]})"
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the last job's SLURM_JOB_ID is the array's

# On SIGUSR1 the ranks finish their step, save, and end with exit code 75. SIGTERM, from scancel and
# preemption, reaches them directly; the trap only keeps this script alive to wait for them.
trap 'kill -USR1 "$ranks"' USR1
trap ':' TERM

srun --nodes=1 --ntasks-per-node=4 \
    --cpus-per-task=8 --distribution=block --kill-on-bad-exit=1 \
    python -m credit_dp train "${keys[@]}" run.name=seeds-"$SLURM_ARRAY_TASK_ID" resume=auto &
ranks=$!

# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# 75: stopped after saving; 138: SIGUSR1 came in the first seconds, before Python handled signals.
# A cancelled job is no longer RUNNING and is not requeued.
if { [ "$code" = 75 ] || [ "$code" = 138 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] &&
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
