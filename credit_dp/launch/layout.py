"""Works out, before any process starts, which device a run uses and how many ranks it has."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from credit_dp.config import Config, ParallelConfig, microbatches
from credit_dp.errors import UserError
from credit_dp.launch.launcher import Launcher
from credit_dp.launch.ranks import Ranks

# Without any of these Linux has no GPU: of NVIDIA's driver, the same under WSL, and of AMD's.
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


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
    each = config.parallel.gpus_of_rank
    if launcher is None:
        data = data_ranks(config.parallel, gpus // each)
        here = data * per_model(config.parallel)
    else:
        data = data_ranks_under(config.parallel, launcher)
        here = launcher.ranks.local_world_size
    if device == "cuda" and here * each > gpus and each > 1:
        raise UserError(
            f"parallel.layout: counts {each} GPUs for each rank, which makes {here * each} on this "
            f"machine, but torch sees {gpus}. Name fewer, or start fewer ranks."
        )
    if device == "cuda" and here > gpus:
        raise UserError(
            f"parallel.domain: {here} ranks on this machine need {here} GPUs, but torch "
            f"sees {gpus}. Lower parallel.domain, parallel.data or parallel.pipeline, or use "
            "device=cpu."
        )
    check_batch(config, data)
    check_shares(config.parallel, data)
    return replace(config, device=device, parallel=replace(config.parallel, data=data))


def check_batch(config: Config, data: int) -> None:
    """Refuse a batch that is no whole number of samples for each data rank and micro-batch."""
    size, parts = config.data.batch_size, microbatches(config)
    if size % data:
        raise UserError(
            f"data.batch_size: needs a multiple of the {data} data ranks, "
            f"got {size}. Change it or parallel.data."
        )
    if size // data % parts:
        raise UserError(
            f"data.batch_size: each of {data} data ranks cuts its {size // data} samples into "
            f"{parts} micro-batches, so it needs a multiple of {data * parts}, got {size}. "
            "Change it, trainer.accumulate or parallel.microbatches."
        )


def check_shares(parallel: ParallelConfig, data: int) -> None:
    """Refuse settings of fsdp2 on a mesh on which there is nobody to share parameters with."""
    keys = ("param_dtype", "reduce_dtype", "cpu_offload")
    key = next((key for key in keys if getattr(parallel, key)), None)
    if key is not None and data * parallel.domain == 1:
        raise UserError(
            f"parallel.{key}: needs at least two data or domain ranks, got one. Raise "
            "parallel.data or parallel.domain, or leave it out."
        )


def own_gpu(parallel: ParallelConfig, ranks: Ranks) -> int:
    """The number of the GPU that a rank computes on, the first one if it drives several."""
    return ranks.local_rank * parallel.gpus_of_rank


def per_model(parallel: ParallelConfig) -> int:
    """Ranks that one copy of the model takes."""
    return parallel.pipeline * parallel.domain


def data_ranks(parallel: ParallelConfig, gpus: int) -> int:
    """How many globes are trained on at once when this process starts the ranks itself."""
    return parallel.data or max(1, gpus // per_model(parallel))


def data_ranks_under(parallel: ParallelConfig, launcher: Launcher) -> int:
    """How many globes the launcher's ranks can hold; all ranks must be used."""
    world, needed = launcher.ranks.world_size, per_model(parallel)
    if world % needed:
        fewer, more = world // needed * needed, (world // needed + 1) * needed
        counts = f"{fewer} or {more}" if fewer else f"{more}"
        raise UserError(
            f"parallel.domain: {launcher.name} started {world} ranks, but parallel.pipeline="
            f"{parallel.pipeline} x parallel.domain={parallel.domain} needs a multiple of "
            f"{needed}. Start {counts} ranks, or let parallel.pipeline x parallel.domain divide "
            f"{world}."
        )
    data = world // needed
    if parallel.data not in (None, data):
        raise UserError(
            f"parallel.data: {launcher.name} started {world} ranks, but parallel.pipeline="
            f"{parallel.pipeline} x parallel.data={parallel.data} x parallel.domain="
            f"{parallel.domain} is {needed * parallel.data}. Leave parallel.data null (that makes "
            f"it {data}), or start {needed * parallel.data} ranks."
        )
    return data


def visible_gpus() -> int:
    """GPUs that torch sees; looking starts no CUDA context."""
    if sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES)):
        return 0
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
