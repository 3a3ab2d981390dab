"""Composes a run's config from `conf/`, the user's own folder and overrides."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import cast, final

from filelock import FileLock, Timeout
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp import config as credit_dp_config
from credit_dp.checks import did_you_mean
from credit_dp.cli.overrides import check_key, check_lists, explain_error
from credit_dp.config import (
    Config,
    DataConfig,
    OwnLossConfig,
    OwnModelConfig,
    OwnOptimizerConfig,
    OwnScheduleConfig,
    RunConfig,
)
from credit_dp.config.data import AUTO, ROLES, SPLITS
from credit_dp.config.training import LR_SCHEDULES
from credit_dp.errors import UserError
from credit_dp.plugins import Plugin, find_plugins, one_line_message, registration_hint, schema_node
from credit_dp.training.checkpoint_files import list_checkpoints
from credit_dp.training.run_folder import RunFolder
from credit_dp.variable_names import canonical_name


class UserConfigSource(FileConfigSource):
    """A folder whose groups go before the package's; the primary config stays the package's.

    A `config.yaml` in the working directory is often that of another program.
    """

    @staticmethod
    def scheme() -> str:
        """What its place on the search path begins with."""
        return "user"

    def is_config(self, config_path: str) -> bool:
        """Whether the folder answers for this file."""
        return config_path.strip("/") not in ("config", "config.yaml") and super().is_config(
            config_path
        )


LOCK_FILE = ".run.lock"


def register_resolvers() -> None:
    """Make what the files in conf/ interpolate known."""
    # Cached, so that one config gives one answer, however often it is asked.
    OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("rows_per_rank", rows_per_rank, replace=True)
    OmegaConf.register_new_resolver("of_quickstart", if_quickstart, replace=True)
    OmegaConf.register_new_resolver("hours_of_steps", hours_of_steps, replace=True)


def run_folder(name: str | None, folder: str) -> str:
    """The folder of one run."""
    return os.path.expanduser(folder) or f"outputs/{name or unique_name()}"


def sweep_folder(name: str | None, folder: str) -> str:
    """The folder of a sweep, in which its runs are numbered."""
    return os.path.expanduser(folder) or (
        f"outputs/{name}" if name else f"multirun/{unique_name()}"
    )


def rows_per_rank(grid: str, *, _root_: DictConfig) -> str:
    """The grid that leaves each domain rank this many rows: `24x48` is `96x48` on four ranks.

    Raises:
        UserError: it is no grid.
    """
    checks.grid("data.grid", str(grid))  # digits alone come as a number
    rows, columns = grid.split("x")
    return f"{int(rows) * int(OmegaConf.select(_root_, 'parallel.domain'))}x{columns}"


def if_quickstart(value: object, other: object = None, *, _root_: DictConfig) -> object:
    """The value where the data are the quickstart's, whose store is made as the config says."""
    return value if OmegaConf.select(_root_, "data.name") == "quickstart" else other


def hours_of_steps(*counts: int, _root_: DictConfig) -> list[int]:
    """The hours that so many steps of the data have.

    Raises:
        UserError: the step is none.
    """
    step = DataConfig(step=str(OmegaConf.select(_root_, "data.step"))).step_hours
    return [step * count for count in counts]


def unique_name() -> str:
    """Differs between any two runs: time in microseconds, and the job or the process."""
    job = os.environ.get("SLURM_JOB_ID", os.getpid())
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}_{job}"


def folder_key(run: RunConfig) -> str:
    """The key that chose the folder, which is the one to change."""
    return "run.dir" if run.dir else "run.name"


@contextlib.contextmanager
def explain_folder_errors(run: RunConfig, default: str) -> Iterator[None]:
    """Tell in one line if the folder, which Hydra makes before anything of ours runs, can't be.

    Raises:
        UserError: no folder can be made there, or nothing can be written to it.
    """
    try:
        yield
    except OSError as error:
        folder = run.dir or (f"outputs/{run.name}" if run.name else default)
        raise UserError(
            f"run.dir: cannot write to {error.filename or folder} ({error.strerror}). "
            "Give another folder, or free some space."
        ) from error


def check_run_folder(folder: Path, config: Config, key: str = "run.name") -> None:
    """Refuse to start a fresh run over the checkpoint of another.

    Raises:
        UserError: there is one, and `resume` does not go on from it.
    """
    checkpoints = RunFolder(folder).checkpoint
    steps = list_checkpoints(checkpoints)
    if not steps or config.resume == "auto":
        return
    own = {path.resolve() for path in (folder, checkpoints, *steps)}
    if config.resume and Path(config.resume).expanduser().resolve() in own:
        return
    raise UserError(
        f"{key}: {folder} holds the checkpoint of an earlier run. "
        f"Go on from it with resume=auto, or give another {key}."
    )


def check_unlocked(folder: Path, key: str = "run.name") -> None:
    """Refuse a folder that another run is writing to, before anything is written there.

    Raises:
        UserError: see `claim`.
    """
    if (folder / LOCK_FILE).exists():
        with lock_folder(folder, key):
            pass


@contextlib.contextmanager
def lock_folder(folder: Path, key: str = "run.name") -> Iterator[None]:
    """Hold the folder while a run writes to it; the system lets go of it when the process ends.

    Raises:
        UserError: another run does, or the folder cannot be written to.
    """
    lock = FileLock(folder / LOCK_FILE, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"{key}: another run is writing to {folder}. Give another one.") from None
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder} ({error.strerror})") from error
    try:
        yield
    finally:
        lock.release()


PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

# The first line of every file of these groups names its schema: `defaults: [schema, _self_]`.
SCHEMAS: Mapping[tuple[str | None, str], type] = {
    (None, "schema"): Config,
    ("model", "schema_unet"): credit_dp_config.UNetConfig,
    ("model", "schema_pangu"): credit_dp_config.PanguConfig,
    ("model", "schema_crossformer"): credit_dp_config.CrossFormerConfig,
    ("data", "schema"): credit_dp_config.DataConfig,
    ("parallel", "schema"): credit_dp_config.ParallelConfig,
    ("trainer", "schema"): credit_dp_config.TrainerConfig,
    ("loss", "schema"): credit_dp_config.StandardLossConfig,
    ("optimizer", "schema"): credit_dp_config.AdamWConfig,
    ("logger", "schema"): credit_dp_config.LoggerConfig,
}

# Whose choices may be plug-ins.
PLUGIN_BASES: Mapping[str, type[Plugin]] = {
    "model": OwnModelConfig,
    "loss": OwnLossConfig,
    "optimizer": OwnOptimizerConfig,
}
CONFIG_GROUPS = {group for group, _ in SCHEMAS if group is not None} | {"experiment"}


def conf_folder() -> Path:
    """`conf/` of the checkout, or the copy that an installed package carries."""
    checkout = PACKAGE_FOLDER.parent / "conf"
    return checkout if (checkout / "config.yaml").exists() else PACKAGE_FOLDER / "conf"


@final
class Composer:
    """Hydra with our schemas and search path: overrides in, a checked `Config` out.

    Only one is in use at a time, as Hydra keeps its state in singletons.
    """

    def __init__(self, job: str, extra: str | None = None, config_name: str = "config") -> None:
        version.setbase("1.3")
        register_schemas()
        register_resolvers()
        SourcesRegistry.instance().register(UserConfigSource)
        GlobalHydra.instance().clear()
        self.config_name = config_name
        self.hydra = Hydra.create_main_hydra2(job, search_path(extra))

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The choices of each config group, schemas left out."""
        loader = self.hydra.config_loader
        names = [name for name in loader.list_groups("") if name != "hydra"]
        names += [f"hydra/{name}" for name in loader.list_groups("hydra")]
        # The loader's own method copies all configs for each group.
        found = cast(ConfigLoaderImpl, loader).repository
        options = {name: found.get_group_options(name, ObjectType.CONFIG) for name in names}
        return {
            name: [choice for choice in choices if not choice.startswith("schema")]
            for name, choices in options.items()
        }

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The composed config with its `hydra` node, types checked, values not yet.

        Raises:
            UserError: the files and overrides do not compose.
        """
        try:
            composed = self.hydra.compose_config(
                config_name=self.config_name,
                overrides=list(overrides),
                run_mode=RunMode.RUN,
                with_log_configuration=False,
            )
        except RecursionError:
            raise UserError(
                "defaults: a config file includes itself. A file of yours with the name of one of "
                "ours replaces it, so that it cannot include it; give yours another name."
            ) from None
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            line = explain_error(error)
            # A user's file may be one of a plug-in.
            unknown = re.search(rf"Could not load '({'|'.join(PLUGIN_BASES)})/", line)
            hint = registration_hint(PLUGIN_BASES[unknown[1]].plugin_kind) if unknown else ""
            raise UserError(f"{line}{hint}") from error
        return composed

    def config(self, overrides: Sequence[str]) -> Config:
        """The checked config of one run.

        Raises:
            UserError: the files and overrides do not compose, or a value is not allowed.
        """
        composed = self.compose(overrides)
        HydraConfig.instance().set_config(composed)
        return to_config(composed)


def without_hydra(composed: DictConfig) -> DictConfig:
    """Our part of a composed config."""
    ours = composed.copy()
    with open_dict(ours):
        ours.pop("hydra", None)
    return ours


def to_config(composed: DictConfig) -> Config:
    """Our part of a composed config as dataclasses, all interpolations resolved.

    Raises:
        UserError: a value is missing or not allowed, or an interpolation leads nowhere.
    """
    ours = without_hydra(composed)
    try:
        missing = sorted(OmegaConf.missing_keys(ours))
        if missing:
            raise UserError(f"{', '.join(missing)}: need a value, and none is given")
        check_lists(ours)
        reconcile_preset(ours, given_keys(composed))
        check_groups(ours)
        config = OmegaConf.to_object(ours)
    except OmegaConfBaseException as error:
        raise UserError(explain_error(error)) from error
    if not isinstance(config, Config):
        raise UserError("config.yaml: needs `schema` as the first entry of its defaults")
    return config


def given_keys(composed: DictConfig) -> set[str]:
    """The keys of the overrides that a config was composed with."""
    texts = OmegaConf.select(composed, "hydra.overrides.task") or []
    return {str(text).lstrip("+").partition("=")[0] for text in texts}


def is_given(key: str, given: set[str]) -> bool:
    """Whether one of the keys that are given is this one, or below it."""
    return any(other == key or other.startswith(f"{key}.") for other in given)


def reconcile_preset(ours: DictConfig, given: set[str]) -> None:
    """Keep of the package's own file of this data what the config uses, and note which dates are.

    An entry of the file's `data.variables` is dropped where no list has the variable, by whatever
    name, and where there is another entry for the same variable. Dates that are null are those of
    the file.
    """
    data = ours.data
    file = conf_folder() / "data" / f"{data.name}.yaml"
    preset = OmegaConf.load(file) if file.exists() else OmegaConf.create()
    used = {canonical_name(name) for role in ROLES for name in data[role]}
    with open_dict(data.variables):
        for name in OmegaConf.select(preset, "variables") or {}:
            others = {canonical_name(other) for other in data.variables if other != name}
            replaced = canonical_name(name) in others and not is_given(
                f"data.variables.{name}", given
            )
            if canonical_name(name) not in used or replaced:
                data.variables.pop(name, None)
    dates = OmegaConf.select(preset, "dates") or {}
    for split in SPLITS:
        if data.dates[split] is None:
            data.dates[split] = dates.get(split, AUTO)
    # The quickstart's store is made for its config: dates outside it are a mistake in it.
    data.dates.preset = [
        split
        for split in SPLITS
        if data.name != "quickstart"
        and split in dates
        and data.dates[split] == dates[split]
        and not given & {"data.dates", f"data.dates.{split}"}
    ]


def check_groups(config: DictConfig) -> None:
    """Let each group check its keys, which a plug-in may do with any error.

    Raises:
        UserError: naming the group.
    """
    for group in sorted(CONFIG_GROUPS - {"experiment"}):
        try:
            OmegaConf.to_object(config[group])
        except OmegaConfBaseException:
            raise
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
            raise UserError(
                f"{group}: {type(error).__name__}: {one_line_message(error)}"
            ) from error


def check_overrides(overrides: Sequence[Override], groups: Mapping[str, list[str]]) -> None:
    """Refuse keys and choices that do not exist; Hydra itself lets some of them pass.

    Raises:
        UserError: with the nearest match and what is allowed.
    """
    for override in overrides:
        key = override.key_or_group
        if key in groups:
            check_choice(key, override, groups[key])
        elif "/" in key:
            raise UserError(f"{key}: no such group.{did_you_mean(key, groups)}")
        elif override.is_hydra_override():
            continue  # Hydra's own schema answers for its keys
        else:
            check_key(key)
            if override.is_delete():
                raise UserError(f"{key}: keys cannot be removed; give it a value, like {key}=null")


def check_choice(group: str, override: Override, choices: list[str]) -> None:
    """Refuse a choice of a group that has no file."""
    if override.is_delete() or override.is_interval_sweep():
        return
    if override.is_add() and group in CONFIG_GROUPS:
        text = str(override.input_line).lstrip("+")
        raise UserError(f"{group}: is in the config already; write {text}, without the +")
    if override.is_sweep_override():
        chosen = [str(value) for value in override.sweep_iterator()]
    else:
        value = override.value()
        chosen = [str(value)] if value is None or isinstance(value, str) else []
    hint = registration_hint(PLUGIN_BASES[group].plugin_kind) if group in PLUGIN_BASES else ""
    for choice in chosen:
        if choice not in choices:
            raise UserError(
                f"{group}: needs one of {', '.join(choices)}, got {choice!r}."
                f"{did_you_mean(choice, choices)}{hint}"
            )


def register_schemas() -> None:
    """Tell Hydra the dataclass of each group, so that types are checked as files are merged.

    Raises:
        UserError: a plug-in can't be used.
    """
    store = ConfigStore.instance()
    for (group, name), schema in SCHEMAS.items():
        store.store(group=group, name=name, node=schema, provider="credit_dp")
    for group, base in PLUGIN_BASES.items():
        ours = {path.stem for path in (conf_folder() / group).glob("*.yaml")}
        for name, plugin in find_plugins(base, ours).items():
            store.store(
                group=group, name=name, node=schema_node(name, plugin), provider="credit_dp"
            )
    for name, plugin in find_plugins(OwnScheduleConfig, LR_SCHEDULES).items():
        schema_node(name, plugin)  # a schedule is not a group, but refused as early as the others


def search_path(extra: str | None) -> ConfigSearchPath:
    """Where groups are looked for: `--config-dir`, the user's `conf/`, then the package's."""
    path = create_config_search_path(f"file://{conf_folder()}")
    own = Path.cwd() / "conf"
    if own.is_dir() and own.resolve() != conf_folder().resolve():
        path.prepend("user", f"{UserConfigSource.scheme()}://{own}", anchor="main")
    if extra is not None:
        if not Path(extra).is_dir():
            raise UserError(f"--config-dir: no folder {extra}")
        path.prepend("command-line", f"file://{Path(extra).resolve()}")
    return path


def check_run_config(config: Config) -> None:
    """Refuse a training run that is bound to fail, without torch and without opening any data.

    Raises:
        UserError: more ranks than rows, a checkpoint that is not there, leads between steps, or a
            climate that starts at no date.
    """
    if config.data.name == "quickstart":
        checks.date("data.quickstart.start", config.data.quickstart.start)
    check_rows(config)
    checks.lead_times(config.trainer.evaluate_hours, config.data.step_hours)
    if config.resume not in (None, "auto"):
        checks.checkpoint_path("resume", str(config.resume))


def check_rows(config: Config) -> None:
    """Refuse more bands than the model's coarsest level has rows, if the grid is known yet."""
    domain = config.parallel.domain
    rows = grid_rows(config.data) if domain > 1 else None
    if rows is None:
        return
    coarsest = config.model.coarsest_rows(rows)
    if domain > coarsest:
        raise UserError(
            f"parallel.domain: the model's coarsest level has {coarsest} "
            f"of the grid's {rows} rows, too few for {domain} ranks. "
            f"Lower parallel.domain to {coarsest}{' or less' if coarsest > 1 else ''}."
        )


def grid_rows(data: DataConfig) -> int | None:
    """Rows of the grid; None if only the store can tell."""
    if data.grid is not None:
        return int(data.grid.partition("x")[0])
    if data.name != "quickstart":
        return None
    from credit_dp.data.quickstart.dataset import resolve_grid  # numpy: not for --help

    return resolve_grid(data.quickstart, None)[0]
