#!/bin/bash
# credit-dp slurm script model=crossformer parallel.domain=8 nodes=4 gpus_per_node=8 cpus_per_node=64
# Each run has 32 ranks, 8 on each of 4 nodes:
# pipeline 1 x data 4 x domain 8.
#SBATCH --job-name=credit-dp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append   # after a requeue the log goes on
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@180  # seconds before the end, to this script

# What your site needs: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # the log is written at once

keys=(model=crossformer parallel.domain=8)
job=$SLURM_JOB_ID

# The ranks save after the step that they are in, and end with exit code 75. SIGTERM, which comes
# with scancel and with preemption, reaches them without this script, which waits for them.
trap 'kill -USR1 "$ranks"' USR1
trap ':' TERM

srun --nodes=4 --ntasks-per-node=8 \
    --cpus-per-task=8 --distribution=block --kill-on-bad-exit=1 \
    python -m credit_dp train "${keys[@]}" run.name=slurm-"$SLURM_JOB_ID" resume=auto &
ranks=$!

# A signal to this script ends a wait, and not the ranks.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# 75: stopped; 138: SIGUSR1 came before or after training. Not if cancelled, and not for ever.
if { [ "$code" = 75 ] || [ "$code" = 138 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] &&
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
