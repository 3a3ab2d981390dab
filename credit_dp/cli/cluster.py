"""The command `credit-dp cluster script KEY=VALUE ...`; `credit-dp slurm script` is the same.

It reads the keys, places the ranks on nodes, and fills in the template of the scheduler. A script
starts the ranks in the background and waits for them, so that its traps run when a signal comes.
The ranks save a checkpoint and stop; the job is then queued again and resumes in the same folder.
SLURM signals the end of a job early and can queue it again. PBS signals only seconds before it
kills, and its `qrerun` is for operators: so its script tells the ranks when the job ends, and
submits itself again; a job that PBS preempts runs again by itself (`-r y`).
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import common_parser, parse_arguments, run_subcommand
from credit_dp.cli.compose import Composer
from credit_dp.cli.sweep_jobs import check_resume, compose_combinations, override_choices
from credit_dp.config import Config
from credit_dp.distributed.placement import (
    ClusterNodes,
    Placement,
    PlacementRequest,
    mesh_text,
    place_ranks,
    slurm_nodes,
)
from credit_dp.distributed.slurm import JOB_END, MARGIN_SECONDS, parse_duration
from credit_dp.errors import UserError
from credit_dp.plugins import plugin_files, plugins_setting

HELP = """\
credit-dp cluster COMMAND: trains on a cluster with SLURM or PBS.

  credit-dp cluster script KEY=VALUE ...   print a batch script for a mesh

`credit-dp cluster COMMAND --help` says more.
"""

SCRIPT_HELP = """\
{program} KEY=VALUE ...: prints a batch script for sbatch or qsub.

Keys of the config set what is trained, as in `credit-dp train`. Several values of a key, as in
seed=0,1,2, make a job array with one job for each combination, all on the same mesh. Other keys:

  scheduler=slurm     or pbs, for PBS Pro and OpenPBS
  nodes=N             nodes of each job; by default the fewest that hold the mesh
  tasks_per_node=N    ranks on each node
  cpus_per_task=N     cores of each rank
  gpus_per_node=N     GPUs of a node, and
  cpus_per_node=N     its cores; by default as SLURM describes the partition, if SLURM is here
  spread=true         let a domain group span several nodes
  start=srun          start the ranks with srun or torchrun; with PBS by mpiexec (of Cray, MPICH or
                      Intel MPI) or mpirun (of Open MPI)
  partition=NAME queue=NAME account=NAME time=HH:MM:SS

  --help, -h    this text

Exit code: 0, or 2 if the ranks don't fit on the nodes; then nothing is printed.
"""

NUMBERS = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "cpus_per_node")
TEXTS = {"account": "", "time": "24:00:00"}
# By the scheduler: how ranks are started, and the name of a queue.
STARTS = {"slurm": ("srun", "torchrun"), "pbs": ("mpiexec", "mpirun")}
QUEUES = {"slurm": "partition", "pbs": "queue"}
NOTICE_SECONDS = 180  # before the end of a job; more than a run needs to save
NOTICE_DIVISOR = 5  # of a short job's time, at most a fifth is notice
REQUEUES = 20  # a limit, for jobs that make no progress


def cluster(arguments: Sequence[str], program: str) -> int:
    """Run the cluster command named by the first argument; return the exit code."""
    return run_subcommand({"script": print_script}, arguments, program, HELP)


def print_script(arguments: Sequence[str], program: str) -> int:
    """Print a batch script; return the exit code."""
    args = parse_arguments(common_parser(), arguments)
    if args.help:
        sys.stdout.write(SCRIPT_HELP.format(program=program))
        return 0
    given = dict(text.partition("=")[::2] for text in args.overrides)
    for text in args.overrides:
        key, _, value = text.partition("=")
        checks.one_line(key, value)
    for file in plugin_files():
        checks.one_line(file.variable, str(file.path))
    scheduler = read_choice(given, "scheduler", tuple(STARTS))
    queue = QUEUES[scheduler]
    for name, other in QUEUES.items():
        if other != queue and other in given:
            raise UserError(f"{other}: is for scheduler={name}. Use {queue} instead.")
    own_keys = (*NUMBERS, *TEXTS, "spread", "start", queue, "scheduler")
    settings = {**TEXTS, queue: "", **given}
    numbers = read_number_keys(given)
    start = read_choice(given, "start", STARTS[scheduler])
    spread = read_choice(given, "spread", ("false", "true"))
    if parse_duration(settings["time"]) is None:
        raise UserError(f"time: needs HH:MM:SS or DAYS-HH:MM:SS, got {settings['time']!r}")
    composer = Composer("train")
    overrides = composer.parse(
        [text for text in args.overrides if text.partition("=")[0] not in own_keys]
    )
    combinations = compose_combinations(composer, override_choices(overrides, composer))
    runs, configs = zip(*combinations, strict=True)
    for config in configs:
        check_resume(config)
    if len(runs) > 1 and configs[0].run.dir:
        raise UserError(
            "run.dir: the jobs of an array need different folders. Give run.name instead."
        )
    request = PlacementRequest(
        nodes=numbers["nodes"],
        tasks_per_node=numbers["tasks_per_node"],
        cpus_per_task=numbers["cpus_per_task"],
        spread=spread == "true",
    )
    available = ClusterNodes(None, numbers["cpus_per_node"], numbers["gpus_per_node"])
    if available == ClusterNodes() and scheduler == "slurm":
        available = slurm_nodes(settings[queue] or None)
    placement = place_runs(configs, available, request)
    run = configs[0].run
    facts = {
        "command": f"{program} {shlex.join(arguments)}",
        "plugins": plugins_setting(),
        "is_array": len(runs) > 1,
        "runs": [shlex.join(run) for run in runs],
        "name": shlex.quote(run.name) if run.name else "",
        "has_folder": bool(run.name or run.dir),
        "mesh": mesh_text(configs[0].parallel, placement.data),
        "placement": placement,
        "start": start,
        "queue": settings[queue],
        "account": settings["account"],
        "requeues": REQUEUES,
        "job_end": JOB_END,
        # A run that stops because of the time has at most its margin left, and some seconds to end.
        "time_over": int(MARGIN_SECONDS) + 30,
        **time_facts(settings["time"]),
    }
    sys.stdout.write(render_script(scheduler, facts))
    return 0


def time_facts(time: str) -> dict[str, object]:
    """Return the time of a job in the forms of the templates, and the seconds of notice."""
    seconds = int(parse_duration(time) or 0)
    minutes = seconds // 60
    return {
        "time": time,
        "seconds": seconds,
        "walltime": f"{minutes // 60:02}:{minutes % 60:02}:{seconds % 60:02}",  # PBS has no days
        "notice": min(NOTICE_SECONDS, seconds // NOTICE_DIVISOR) if seconds else NOTICE_SECONDS,
    }


def render_script(scheduler: str, facts: Mapping[str, object]) -> str:
    """Return the template of the scheduler, `templates/SCHEDULER.sh`, with these facts."""
    import jinja2  # not for --help

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(f"{scheduler}.sh").render(facts)


def read_number_keys(given: Mapping[str, str]) -> dict[str, int | None]:
    """Return the keys that are numbers; a key that is not given is None."""
    for key in NUMBERS:
        minimum = 0 if key == "gpus_per_node" else 1
        if key in given and not (given[key].isdecimal() and int(given[key]) >= minimum):
            raise UserError(
                f"{key}: needs a whole number of at least {minimum}, got {given[key]!r}"
            )
    return {key: int(given[key]) if key in given else None for key in NUMBERS}


def read_choice(given: Mapping[str, str], key: str, allowed: Sequence[str]) -> str:
    """Return the value of a key; if it is not given, the first allowed one."""
    value = given.get(key, allowed[0])
    if value not in allowed:
        raise UserError(
            f"{key}: needs one of {', '.join(allowed)}, got {value!r}."
            f"{did_you_mean(value, allowed)}"
        )
    return value


def place_runs(
    configs: Sequence[Config], available: ClusterNodes, request: PlacementRequest
) -> Placement:
    """Return the placement of all jobs of a script."""
    meshes = {
        (p.pipeline, p.data, p.ensemble, p.domain) for p in (config.parallel for config in configs)
    }
    if len(meshes) > 1:
        raise UserError(
            "parallel.domain: the jobs of a script need one mesh. Make a script for each, or use "
            "`credit-dp train --multirun hydra/launcher=slurm`."
        )
    placements = [place_ranks(config, available, request) for config in configs]
    cpus = max(placement.cpus_per_task for placement in placements)
    return replace(placements[0], cpus_per_task=cpus)
