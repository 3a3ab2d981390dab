"""Works out, before any process starts, which device a run uses and how many ranks it has."""

import os
from collections.abc import Mapping
from dataclasses import replace

from credit_dp.config import Config, ParallelConfig
from credit_dp.errors import UserError
from credit_dp.launch.launcher import Launcher
from credit_dp.launch.ranks import Ranks


def lay_out(config: Config, launcher: Launcher | None) -> Config:
    """The config with `device` and `parallel.data` made definite.

    Raises:
        UserError: the ranks or GPUs that there are do not make up this mesh, or the batch cannot
            be dealt to its data ranks.
    """
    gpus = visible_gpus() if config.device != "cpu" else 0
    if config.device == "cuda" and gpus == 0:
        raise UserError("device: needs a GPU for cuda, but torch sees none here. Use device=cpu.")
    device = "cuda" if gpus else "cpu"
    if launcher is None:
        data = data_ranks(config.parallel, gpus)
        here = data * config.parallel.domain
    else:
        data = data_ranks_under(config.parallel, launcher)
        here = launcher.ranks.local_world_size
    if device == "cuda" and here > gpus:
        raise UserError(
            f"parallel.domain: {here} ranks on this machine need {here} GPUs, but torch sees "
            f"{gpus}. Lower parallel.domain or parallel.data, or use device=cpu."
        )
    if config.data.batch_size % data:
        raise UserError(
            f"data.batch_size: needs a multiple of the {data} data ranks, "
            f"got {config.data.batch_size}. Change it or parallel.data."
        )
    return replace(config, device=device, parallel=replace(config.parallel, data=data))


def data_ranks(parallel: ParallelConfig, gpus: int) -> int:
    """How many globes are trained on at once when this process starts the ranks itself."""
    return parallel.data or max(1, gpus // parallel.domain)


def data_ranks_under(parallel: ParallelConfig, launcher: Launcher) -> int:
    """How many globes the launcher's ranks can hold; all ranks must be used."""
    world = launcher.ranks.world_size
    if world % parallel.domain:
        raise UserError(
            f"parallel.domain: needs a divisor of the {world} ranks that {launcher.name} started, "
            f"got {parallel.domain}"
        )
    data = world // parallel.domain
    if parallel.data not in (None, data):
        raise UserError(
            f"parallel.data: {launcher.name} started {world} ranks, which parallel.domain="
            f"{parallel.domain} makes {data} data ranks, got {parallel.data}. Leave it null."
        )
    return data


def visible_gpus() -> int:
    """GPUs that torch sees; looking starts no CUDA context."""
    import torch  # takes seconds

    return torch.cuda.device_count()


def threads_per_rank(parallel: ParallelConfig, ranks: Ranks, environment: Mapping[str, str]) -> int:
    """CPU threads of one rank: the config's, else the user's, else this machine's shared out."""
    if parallel.threads is not None:
        return parallel.threads
    # torchrun sets OMP_NUM_THREADS=1 on its own when the user did not.
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0 and "TORCHELASTIC_RUN_ID" not in environment:
        return int(given)
    # srun pins each task to its own cores, so there is nothing left to share.
    if environment.get("SLURM_CPUS_PER_TASK", "").isdigit() and "SLURM_STEP_ID" in environment:
        return int(environment["SLURM_CPUS_PER_TASK"])
    return max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size)
