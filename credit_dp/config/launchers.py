"""The keys of `hydra.launcher`: how the jobs of a sweep are run, side by side here or by SLURM."""

from dataclasses import dataclass, field
from typing import Any

from credit_dp import checks
from credit_dp.errors import UserError


@dataclass
class LocalLauncherConfig:
    """`hydra/launcher=local`: as many jobs at once as this machine has cores and GPUs for."""

    cores: int = 0  # 0: the cores that this process may use

    def __post_init__(self) -> None:
        checks.at_least("hydra.launcher.cores", self.cores, 0)


@dataclass
class SlurmLauncherConfig:
    """`hydra/launcher=slurm`: a sweep as one job array. The names are those of submitit."""

    nodes: int = 0  # 0: what the mesh needs
    tasks_per_node: int = 0  # 0: what the mesh needs
    cpus_per_task: int | None = None  # null: the GPU's share of a node's cores
    gpus_per_node: int | None = None  # null: one for each rank
    timeout_min: int = 60  # of each job, and again after each requeue
    signal_delay_s: int = 120  # seconds before its end in which a job saves and is queued again
    max_num_timeout: int = 20  # how often a job is queued again before it counts as stuck
    array_parallelism: int = 256  # jobs that run at once
    setup: list[str] | None = None  # lines of bash before the program: [module load cuda, ...]
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # others of sbatch
    name: str = "${hydra.job.name}"
    stderr_to_stdout: bool = False
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    mem_gb: float | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None

    def __post_init__(self) -> None:
        for key in ("nodes", "tasks_per_node", "signal_delay_s", "max_num_timeout"):
            checks.at_least(f"hydra.launcher.{key}", getattr(self, key), 0)
        for key in ("cpus_per_task", "timeout_min", "array_parallelism"):
            checks.at_least(f"hydra.launcher.{key}", getattr(self, key), 1)
        # SLURM would stop such a job soon after each of its starts.
        if self.signal_delay_s > self.timeout_min * 30:
            raise UserError(
                f"hydra.launcher.signal_delay_s: {self.signal_delay_s} s before the end of a job "
                f"is too early, as hydra.launcher.timeout_min gives it {self.timeout_min * 60} s. "
                "Lower it, or give jobs more time."
            )


LAUNCHERS = {"local": LocalLauncherConfig, "slurm": SlurmLauncherConfig}
