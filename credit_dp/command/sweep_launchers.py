"""Our own launchers, which run a sweep's jobs as programs: `hydra/launcher=local` and `slurm`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, read_write

from credit_dp.command.compose import Composer
from credit_dp.command.folders import check_free, folder_key, folder_made_by_hydra
from credit_dp.command.local_sweep import run_locally
from credit_dp.command.preflight import check_plan
from credit_dp.command.slurm_sweep import leave_out_queued, submit
from credit_dp.command.sweep_jobs import choices_of, plan_jobs
from credit_dp.command.tell import tell
from credit_dp.config import Config
from credit_dp.errors import UserError

LAUNCHERS = ("local", "slurm")
GROUP = "hydra/launcher"
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def launcher_of(overrides: Sequence[Override]) -> str | None:
    """Which of our launchers a command line asks for, if any."""
    chosen = [override.value() for override in overrides if override.key_or_group == GROUP]
    return str(chosen[-1]) if chosen and chosen[-1] in LAUNCHERS else None


def check_launcher(overrides: Sequence[Override], multirun: bool) -> None:
    """Refuse one of our launchers where it can't work.

    Raises:
        UserError: there is no sweep, another sweeper chooses the runs, or an extra is missing.
    """
    launcher = launcher_of(overrides)
    if launcher is None:
        return
    if not multirun:
        raise UserError(f"{GROUP}={launcher}: starts the runs of a sweep; add --multirun")
    for override in overrides:
        if override.key_or_group == "hydra/sweeper" and override.value() != "basic":
            raise UserError(
                f"hydra/sweeper: {GROUP}={launcher} needs basic, got {override.value()}"
            )
    if launcher == "slurm" and not installed(PLUGIN):
        raise UserError(
            f"{GROUP}=slurm: needs hydra-submitit-launcher, which is not installed. "
            "Install it with pip install 'credit_dp[slurm]'."
        )


def installed(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package can't
        return False


def sweep_as_jobs(
    composer: Composer, overrides: Sequence[Override], dashes: Sequence[str], launcher: str
) -> int:
    """Run or submit the jobs of a sweep that have not finished before; the exit code.

    Raises:
        UserError: a job can't run as it is; none has been started.
    """
    choices = choices_of(overrides, composer)
    composed = composer.compose([choice[0] for choice in choices])
    sweep = Path(str(composed.hydra.sweep.dir))
    settings = settings_of(composed.hydra.launcher)
    jobs = plan_jobs(composer, choices, sweep)
    left = [job for job in jobs if job.state != "finished"]
    if len(left) < len(jobs):
        tell(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done already")
    for job in left:
        check_config(job.config)
    if launcher == "slurm":
        left = leave_out_queued(left)
    for job in left:
        check_free(job.folder, folder_key(job.config.run))
    if not left:
        return 0
    with folder_made_by_hydra(jobs[0].config.run, "multirun"):
        sweep.mkdir(parents=True, exist_ok=True)
        save_typed(composed, overrides, sweep / "multirun.yaml")
        if launcher == "slurm":
            return submit(left, dashes, settings, sweep)
        return run_locally(left, dashes, settings["cores"])


def save_typed(composed: DictConfig, overrides: Sequence[Override], path: Path) -> None:
    """Write what Hydra writes for a sweep: the config, with what was typed."""
    texts = [str(each.input_line) for each in overrides if not each.is_hydra_override()]
    with read_write(composed):
        composed.hydra.overrides.task = texts
    OmegaConf.save(composed, path)


def check_config(config: Config) -> None:
    """Refuse a job that is bound to fail.

    Raises:
        UserError: for what reason.
    """
    if config.resume not in (None, "auto"):
        raise UserError(
            "resume: each job goes on from its own checkpoint. Leave it out; init_from starts with "
            "the weights of another run."
        )
    check_plan(config)


def settings_of(launcher: DictConfig) -> dict[str, Any]:
    """The keys of `hydra.launcher`, plain."""
    settings = OmegaConf.to_container(launcher, resolve=True)
    return {str(key): value for key, value in dict(settings).items()}  # type: ignore[arg-type]
