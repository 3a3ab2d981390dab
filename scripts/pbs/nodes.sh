#!/bin/bash
# credit-dp cluster script scheduler=pbs model=crossformer parallel.domain=4 nodes=4 gpus_per_node=4 cpus_per_node=64 queue=main account=NAME
# Each run has 16 ranks, 4 on each of 4 nodes:
# pipeline 1 x data 4 x domain 4.
#PBS -N credit-dp
#PBS -q main
#PBS -A NAME
#PBS -l select=4:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -r y

cd "$PBS_O_WORKDIR" || exit 1
end=$(($(date +%s) + 86400))

# Settings of your site: directives above, such as #PBS -l filesystems=home, modules, the
# environment, the network of the ranks, their cores.
# module load conda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0
binding=()  # with Cray's mpiexec: binding=(--cpu-bind depth --depth 16)

keys=(model=crossformer parallel.domain=4)
# The number of the run's first job; this one may continue it.
job=${CREDIT_DP_FIRST_JOB:-${PBS_JOBID%%[!0-9]*}}
restarts=${CREDIT_DP_RESTARTS:-0}
script=$PBS_O_WORKDIR/pbs-$job.sh
[ "$restarts" -gt 0 ] || cp "$0" "$script"

variables=(
    MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")" MASTER_PORT=$((20000 + (job * 8) % 12000))
    WORLD_SIZE=16 OMP_NUM_THREADS=16
    CREDIT_DP_JOB_END="$end" PYTHONUNBUFFERED=1
)
# SIGTERM, from qdel and preemption, reaches the ranks as well, which save and end with exit code
# 75; the trap only keeps this script alive to wait for them.
trap ':' TERM

mpiexec -n 16 -ppn 4 "${binding[@]}" env "${variables[@]}" \
    python -m credit_dp train "${keys[@]}" run.name=pbs-"$job" resume=auto &
ranks=$!

# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# The exit code may be that of mpiexec: what counts is that the time is over. A job that qdel ended
# before is not submitted again.
if [ "$code" != 0 ] && [ $((end - $(date +%s))) -le 150 ] &&
    [ "$restarts" -lt 20 ]; then
    qsub -v "CREDIT_DP_FIRST_JOB=$job,CREDIT_DP_RESTARTS=$((restarts + 1))" "$script"
fi
exit "$code"
