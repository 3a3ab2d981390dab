#!/bin/bash
# {{ command }}
# Each run has {{ placement.ranks }} ranks, {% if placement.nodes == 1 %}all on one node{% else %}{{ placement.tasks_per_node }} on each of {{ placement.nodes }} nodes{% endif %}:
# {{ mesh }}.
#PBS -N credit-dp
{% if is_array %}
#PBS -J 0-{{ runs | length - 1 }}
{% endif %}
{% if queue %}
#PBS -q {{ queue }}
{% endif %}
{% if account %}
#PBS -A {{ account }}
{% endif %}
#PBS -l select={{ placement.nodes }}:ncpus={{ placement.tasks_per_node * placement.cpus_per_task }}:mpiprocs={{ placement.tasks_per_node }}:ompthreads={{ placement.cpus_per_task }}{% if placement.gpus_per_node %}:ngpus={{ placement.gpus_per_node }}{% endif %}

{% if placement.nodes > 1 %}
#PBS -l place=scatter
{% endif %}
#PBS -l walltime={{ walltime }}
#PBS -j oe
#PBS -r y

cd "$PBS_O_WORKDIR" || exit 1
end=$(($(date +%s) + {{ seconds }}))

# Settings of your site: directives above, such as #PBS -l filesystems=home, modules, the
# environment, the network of the ranks, their cores.
# module load conda
# source .venv/bin/activate
# export NCCL_SOCKET_IFNAME=hsn0 GLOO_SOCKET_IFNAME=hsn0
{% if start == "mpirun" %}
binding=(--bind-to none)
{% else %}
binding=()  # with Cray's mpiexec: binding=(--cpu-bind depth --depth {{ placement.cpus_per_task }})
{% endif %}

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
index=${CREDIT_DP_INDEX:-$PBS_ARRAY_INDEX}
eval "keys=(${runs[index]})"
{% set own_name = ' run.name=' ~ (name or 'pbs-"$job"') ~ '-"$index"' %}
{% else %}
keys=({{ runs[0] }})
{% set own_name = '' if has_folder else ' run.name=pbs-"$job"' %}
{% endif %}
# The number of the run's first job; this one may continue it.
job=${CREDIT_DP_FIRST_JOB:-${PBS_JOBID%%[!0-9]*}}
restarts=${CREDIT_DP_RESTARTS:-0}
{# PBS gives the next job another number, and removes its copy of the script with the job. #}
{% if is_array %}
script=$PBS_O_WORKDIR/pbs-$job-$index.sh  # one job of the array
[ "$restarts" -gt 0 ] || sed '/^#PBS -J/d' "$0" > "$script"
{% else %}
script=$PBS_O_WORKDIR/pbs-$job.sh
[ "$restarts" -gt 0 ] || cp "$0" "$script"
{% endif %}

{# Not every mpiexec hands on the environment of the script, so the ranks get it by `env`. Jobs of
   an array share the number, and often a node, so that their ports differ. #}
variables=(
    MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")" MASTER_PORT=$((20000 + (job * 8{% if is_array %} + index{% endif %}) % 12000))
    WORLD_SIZE={{ placement.ranks }} OMP_NUM_THREADS={{ placement.cpus_per_task }}
    {{ job_end }}="$end" PYTHONUNBUFFERED=1
)
# SIGTERM, from qdel and preemption, reaches the ranks as well, which save and end with exit code
# 75; the trap only keeps this script alive to wait for them.
trap ':' TERM

{% if start == "mpirun" %}{# Open MPI's; Cray's mpiexec has the options of MPICH's #}
mpirun -n {{ placement.ranks }} --map-by ppr:{{ placement.tasks_per_node }}:node "${binding[@]}" env "${variables[@]}" \
{% else %}
mpiexec -n {{ placement.ranks }} -ppn {{ placement.tasks_per_node }} "${binding[@]}" env "${variables[@]}" \
{% endif %}
    python -m credit_dp train "${keys[@]}"{{ own_name }} resume=auto &
ranks=$!

# A signal to this script interrupts `wait` while the ranks still run, so wait again.
wait "$ranks"
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done
wait "$ranks" && code=0 || code=$?

# The exit code may be that of mpiexec: what counts is that the time is over. A job that qdel ended
# before is not submitted again.
if [ "$code" != 0 ] && [ $((end - $(date +%s))) -le {{ time_over }} ] &&
    [ "$restarts" -lt {{ requeues }} ]; then
    qsub -v "CREDIT_DP_FIRST_JOB=$job,CREDIT_DP_RESTARTS=$((restarts + 1)){% if is_array %},CREDIT_DP_INDEX=$index{% endif %}" "$script"
fi
exit "$code"
