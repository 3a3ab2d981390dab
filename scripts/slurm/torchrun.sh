#!/bin/bash
# credit-dp slurm script model=crossformer parallel.domain=8 nodes=4 gpus_per_node=8 cpus_per_node=64 start=torchrun
# Each run has 32 ranks, 8 on each of 4 nodes:
# pipeline 1 x data 4 x domain 8.
#SBATCH --job-name=credit-dp
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append   # after a requeue the log continues
#SBATCH --requeue            # a preempted job is queued again
#SBATCH --signal=B:USR1@180  # seconds before the end, to this script

# Settings of your site: modules, the environment, the network of the ranks.
# module load cuda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export PYTHONUNBUFFERED=1    # lines appear in the log at once

keys=(model=crossformer parallel.domain=8)
job=$SLURM_JOB_ID

# torchrun passes SIGTERM on to the ranks, which finish their step and save.
stopping=0
trap 'stopping=1; scancel --signal=TERM "$job"' USR1
trap 'stopping=1' TERM

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID * 8 % 12000))
srun --nodes=4 --ntasks-per-node=1 \
    --cpus-per-task=64 --kill-on-bad-exit=1 \
    torchrun --nnodes=4 --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:$port" \
    -m credit_dp train "${keys[@]}" run.name=slurm-"$SLURM_JOB_ID" resume=auto &
ranks=$!

# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# torchrun has its own exit codes: what counts is a signal before it ended.
# A cancelled job is no longer RUNNING and is not requeued.
if { [ "$code" != 0 ] && [ "$stopping" = 1 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] &&
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
    scontrol requeue "$job"
fi
exit "$code"
