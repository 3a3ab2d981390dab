"""Composes a run's config with Hydra, and checks what can be checked without torch and data.

In this order: `Composer` merges `conf/`, the user's own folder and the overrides; `to_config` turns
the result into dataclasses, which check their values; `check_run_config` checks keys against each
other. A single run does each of these once, in `credit_dp.cli.train`; ranks that it starts receive
the dataclasses.
"""

import copy
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

from hydra import version
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp import config as credit_dp_config
from credit_dp.checks import did_you_mean
from credit_dp.cli.folders import run_folder, sweep_folder
from credit_dp.cli.hydra_private import (
    ConfigLoaderImpl,
    FileConfigSource,
    Hydra,
    create_config_search_path,
)
from credit_dp.cli.overrides import (
    check_key,
    check_lists,
    explain_error,
    parse_overrides,
    unknown_key_message,
)
from credit_dp.config import (
    Config,
    DataConfig,
    OwnCallbackConfig,
    OwnLossConfig,
    OwnModelConfig,
    OwnOptimizerConfig,
    OwnScheduleConfig,
)
from credit_dp.config.data import AUTO, ROLES, SPLITS
from credit_dp.config.launchers import LAUNCHERS
from credit_dp.config.model import MODELS
from credit_dp.config.training import LR_SCHEDULES
from credit_dp.distributed.signals import block_signals
from credit_dp.errors import UserError
from credit_dp.plugins import Plugin, find_plugins, one_line_message, registration_hint, schema_node
from credit_dp.variable_names import canonical_name


class UserConfigSource(FileConfigSource):
    """A folder whose groups take precedence over the package's; its `config.yaml` is ignored.

    A `config.yaml` in the working directory often belongs to another program.
    """

    @staticmethod
    def scheme() -> str:
        """Return the prefix of such a folder on Hydra's search path."""
        return "user"

    def is_config(self, config_path: str) -> bool:
        """Whether a config file is taken from this folder."""
        return config_path.strip("/") not in ("config", "config.yaml") and super().is_config(
            config_path
        )


def register_resolvers() -> None:
    """Register the interpolations that the files in conf/ use."""
    # Cached, because the default names contain the time: Hydra resolves them several times for one
    # config and has to get the same folder each time.
    OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("rows_per_rank", rows_per_rank, replace=True)
    OmegaConf.register_new_resolver("of_quickstart", if_quickstart, replace=True)
    OmegaConf.register_new_resolver("hours_of_steps", hours_of_steps, replace=True)


def rows_per_rank(grid: str, *, _root_: DictConfig) -> str:
    """Return the grid that gives each domain rank as many rows as `grid` has.

    `24x48` is `96x48` on four ranks.
    """
    checks.grid("data.grid", str(grid))  # digits alone come as a number
    rows, columns = grid.split("x")
    return f"{int(rows) * int(OmegaConf.select(_root_, 'parallel.domain'))}x{columns}"


def if_quickstart(value: object, other: object = None, *, _root_: DictConfig) -> object:
    """Return `value` if the data are created by the quickstart, otherwise `other`."""
    return value if OmegaConf.select(_root_, "data.name") == "quickstart" else other


def hours_of_steps(*counts: int, _root_: DictConfig) -> list[int]:
    """Return the hours of this many time steps of the data."""
    step = DataConfig(step=str(OmegaConf.select(_root_, "data.step"))).step_hours
    return [step * count for count in counts]


PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

# The dataclass of each group. A file of the group names it in its defaults: `[schema, _self_]`.
SCHEMAS: Mapping[tuple[str | None, str], type] = {
    (None, "schema"): Config,
    **{("model", f"schema_{name}"): schema for name, schema in MODELS.items()},
    ("data", "schema"): credit_dp_config.DataConfig,
    ("parallel", "schema"): credit_dp_config.ParallelConfig,
    ("trainer", "schema"): credit_dp_config.TrainerConfig,
    ("loss", "schema"): credit_dp_config.StandardLossConfig,
    ("optimizer", "schema"): credit_dp_config.AdamWConfig,
    ("optimizer", "schema_lion"): credit_dp_config.LionConfig,
    ("optimizer", "schema_muon"): credit_dp_config.MuonConfig,
    ("logger", "schema"): credit_dp_config.LoggerConfig,
}

# Groups whose choices may be plug-ins.
PLUGIN_BASES: Mapping[str, type[Plugin]] = {
    "model": OwnModelConfig,
    "loss": OwnLossConfig,
    "optimizer": OwnOptimizerConfig,
}
MAX_REMEMBERED = 256  # composed configs: a large sweep must not fill the memory
CONFIG_GROUPS = {group for group, _ in SCHEMAS if group is not None} | {"experiment"}


def conf_folder() -> Path:
    """Return `conf/` of the checkout, or of the installed package."""
    checkout = PACKAGE_FOLDER.parent / "conf"
    return checkout if (checkout / "config.yaml").exists() else PACKAGE_FOLDER / "conf"


@final
class RememberingLoader(ConfigLoaderImpl):
    """Hydra's loader, which composes the same overrides once and then returns copies.

    Hydra composes a config again for each thing that it does with it, such as to print it and to
    run it. Composing takes a quarter of a second, a copy a few milliseconds.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path=config_search_path)
        self._composed: dict[tuple[str | None, RunMode, tuple[str, ...]], DictConfig] = {}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Return the composed config of these overrides; errors are those of Hydra."""
        key = (config_name, run_mode, tuple(overrides))
        if key in self._composed:
            return copy.deepcopy(self._composed[key])
        composed = super().load_configuration(
            config_name, overrides, run_mode, from_shell, validate_sweep_overrides
        )
        if len(self._composed) < MAX_REMEMBERED:
            self._composed[key] = copy.deepcopy(composed)
        return composed


@final
class Composer:
    """Hydra with our schemas and search path: turns overrides into a checked `Config`.

    Use one at a time: Hydra keeps its state in singletons.
    """

    def __init__(
        self, job: str, config_dir: str | None = None, config_name: str = "config"
    ) -> None:
        version.setbase("1.3")  # defaults of Hydra 1.3: it does not change the working directory
        # omegaconf may turn a KeyboardInterrupt inside it into an error of its own.
        with block_signals((signal.SIGINT,)):
            register_schemas()
            register_resolvers()
            Plugins.instance().register(UserConfigSource)
            self.config_name = config_name
            self.hydra = Hydra(job, RememberingLoader(search_path(config_dir)))
            GlobalHydra.instance().clear()  # Hydra refuses to start twice in a process
            GlobalHydra.instance().initialize(self.hydra)

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Return the choices of each config group, without schemas."""
        # The loader's own methods copy the repository with all configs each time.
        repository = cast(ConfigLoaderImpl, self.hydra.config_loader).repository
        names = [n for n in repository.get_group_options("", ObjectType.GROUP) if n != "hydra"]
        names += [f"hydra/{n}" for n in repository.get_group_options("hydra", ObjectType.GROUP)]
        return {
            name: [c for c in repository.get_group_options(name) if not c.startswith("schema")]
            for name in names
        }

    def parse(self, texts: Sequence[str]) -> list[Override]:
        """Return overrides, whose keys and choices exist."""
        overrides = parse_overrides(texts)
        check_overrides(overrides, self.groups)
        return overrides

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed config with its `hydra` node; values are not checked yet."""
        try:
            with block_signals((signal.SIGINT,)):
                composed = self.hydra.compose_config(
                    config_name=self.config_name,
                    overrides=list(overrides),
                    run_mode=RunMode.RUN,
                    with_log_configuration=False,
                )
        except RecursionError:
            raise UserError(
                "defaults: a config file includes itself. A file of yours replaces the package's "
                "file of the same name, so it can't include it. Rename yours."
            ) from None
        except UnicodeDecodeError as error:
            before = error.object[: error.end].decode(errors="replace")
            line = before.rpartition("\n")[2]
            raise UserError(
                f"defaults: needs config files in UTF-8, but one has other bytes in {line!r}. "
                "Convert it, as `iconv -f latin1 -t utf-8` does."
            ) from error
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            line = explain_error(error)
            # The missing file may be meant as a plug-in, which is registered in another way.
            unknown = re.search(rf"Could not load '({'|'.join(PLUGIN_BASES)})/", line)
            hint = registration_hint(PLUGIN_BASES[unknown[1]].plugin_kind) if unknown else ""
            raise UserError(f"{line}{hint}") from error
        return composed

    def compose_config(self, overrides: Sequence[str]) -> Config:
        """Return the checked config of one run."""
        composed = self.compose(overrides)
        HydraConfig.instance().set_config(composed)  # from here `${hydra:KEY}` is resolved
        return to_config(composed, overrides)


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a composed config without its `hydra` node."""
    config = composed.copy()
    with open_dict(config):
        config.pop("hydra", None)
    return config


def to_config(composed: DictConfig, overrides: Sequence[str]) -> Config:
    """Return a composed config as dataclasses, with all interpolations resolved."""
    node = without_hydra(composed)
    check_root(node, OmegaConf.select(composed, "hydra.job.config_name"))
    try:
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            raise UserError(f"{', '.join(missing)}: need a value, and none is given")
        # These need the node: dataclasses no longer know which list had which type, and entries of
        # `data.variables` can't be removed from them.
        check_lists(node)
        reconcile_preset(node, given_keys(overrides))
        return build_dataclasses(node)
    except OmegaConfBaseException as error:
        raise UserError(explain_error(error)) from error


def check_root(node: DictConfig, config_name: str | None) -> None:
    """Refuse a root file that is no config of a run, or that adds keys of its own.

    OmegaConf refuses unknown keys only in files that it merges after the schema.
    """
    file = f"conf/{config_name or 'config'}.yaml"
    names = [item.name for item in fields(Config)]
    if OmegaConf.get_type(node) is not Config:
        raise UserError(
            f"{file}: needs `schema` or `config` as the first entry of its defaults, but has "
            f"neither (its keys: {', '.join(map(str, node))}). Change defaults or --config-name."
        )
    for key in map(str, node):
        if key not in names:
            raise UserError(
                f"{file}: {unknown_key_message(key, '', names)} Change or remove {key}."
            )


def given_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys of overrides."""
    return {text.lstrip("+").partition("=")[0] for text in overrides}


def is_given(key: str, given: set[str]) -> bool:
    """Whether one of the given keys is this key, or below it."""
    return any(other == key or other.startswith(f"{key}.") for other in given)


def reconcile_preset(config: DictConfig, given: set[str]) -> None:
    """Drop entries of the data preset that the config does not use, and take its dates as defaults.

    The preset is the package's file of the data, such as `conf/data/weatherbench2.yaml`. An entry
    of its `variables` is dropped if no list of the config has the variable, under any of its names,
    or if another entry stands for the same variable. Dates that are null become those of the
    preset; `data.dates.preset` lists the splits whose dates come from there, and
    `data.optional_static` the static fields, if all of them do.
    """
    data = config.data
    file = conf_folder() / "data" / f"{data.name}.yaml"
    preset = OmegaConf.load(file) if file.exists() else OmegaConf.create()
    used_names = {canonical_name(name) for role in ROLES for name in data[role]}
    with open_dict(data.variables):
        for name in OmegaConf.select(preset, "variables") or {}:
            others = {canonical_name(other) for other in data.variables if other != name}
            replaced = canonical_name(name) in others and not is_given(
                f"data.variables.{name}", given
            )
            if canonical_name(name) not in used_names or replaced:
                data.variables.pop(name, None)
    # Not so for the quickstart, whose store has what the config names.
    static = OmegaConf.select(preset, "static") or []
    is_own = is_given("data.static", given) or data.name == "quickstart"
    data.optional_static = [] if is_own or data.static != static else static
    dates = OmegaConf.select(preset, "dates") or {}
    for split in SPLITS:
        if data.dates[split] is None:
            data.dates[split] = dates.get(split, AUTO)
    # Dates of a preset become `auto` if the store lacks some of them. Not so for the quickstart,
    # whose store is made to fit the config: dates outside it are an error.
    data.dates.preset = [
        split
        for split in SPLITS
        if data.name != "quickstart"
        and split in dates
        and data.dates[split] == dates[split]
        and not given & {"data.dates", f"data.dates.{split}"}
    ]


def build_dataclasses(node: DictConfig) -> Config:
    """Return a config as dataclasses, each of which is built, and so checked, once."""
    values: dict[str, Any] = {}
    for group in sorted(CONFIG_GROUPS - {"experiment"}):
        try:
            values[group] = OmegaConf.to_object(node[group])
        except OmegaConfBaseException:
            raise
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
            raise UserError(
                f"{group}: {type(error).__name__}: {one_line_message(error)}"
            ) from error
    for key in map(str, node.keys() - values.keys()):
        value = node[key]
        values[key] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    return Config(**values)


def check_overrides(overrides: Sequence[Override], groups: Mapping[str, list[str]]) -> None:
    """Refuse keys and choices that do not exist; Hydra accepts some of them."""
    for override in overrides:
        key = override.key_or_group
        if key in groups:
            check_choice(key, override, groups[key])
        elif "/" in key:
            raise UserError(f"{key}: no such group.{did_you_mean(key, groups)}")
        elif override.is_hydra_override():
            continue  # Hydra's own schema answers for its keys
        else:
            check_key(key, composed=override.type == OverrideType.CHANGE)  # + adds any key
            if override.is_delete():
                raise UserError(f"{key}: keys can't be removed. Give it a value, like {key}=null.")


def check_choice(group: str, override: Override, choices: list[str]) -> None:
    """Refuse a choice that its group does not have."""
    if override.is_delete() or override.is_interval_sweep():
        return
    if override.is_add() and group in CONFIG_GROUPS:
        text = str(override.input_line).lstrip("+")
        raise UserError(f"{group}: is in the config already. Write {text}, without the +.")
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
    """Register the dataclass of each group with Hydra, which then checks types of merged files."""
    store = ConfigStore.instance()
    for (group, name), schema in SCHEMAS.items():
        store.store(group=group, name=name, node=schema, provider="credit_dp")
    for name, schema in LAUNCHERS.items():
        store.store(group="hydra/launcher", name=name, node=schema, provider="credit_dp")
    for group, base in PLUGIN_BASES.items():
        package_names = {path.stem for path in (conf_folder() / group).glob("*.yaml")}
        for name, plugin in find_plugins(base, package_names).items():
            store.store(
                group=group, name=name, node=schema_node(name, plugin), provider="credit_dp"
            )
    for name, plugin in find_plugins(OwnScheduleConfig, LR_SCHEDULES).items():
        schema_node(name, plugin)  # not a group, so not stored: this only checks it as early
    for name, callback in find_plugins(OwnCallbackConfig, ()).items():
        schema_node(name, callback)


def search_path(config_dir: str | None) -> ConfigSearchPath:
    """Return where Hydra searches for groups: `--config-dir`, the user's `conf/`, the package's."""
    path = create_config_search_path(f"file://{conf_folder()}")
    user_folder = Path.cwd() / "conf"
    if user_folder.is_dir() and user_folder.resolve() != conf_folder().resolve():
        path.prepend("user", f"{UserConfigSource.scheme()}://{user_folder}", anchor="main")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir: needs a folder, but {config_dir} is not a folder")
        # Prepended last, so it is searched first.
        path.prepend("command-line", f"file://{Path(config_dir).resolve()}")
    return path


def check_run_config(config: Config) -> None:
    """Refuse a training run that is bound to fail, without torch and without opening data."""
    if config.data.name == "quickstart":
        checks.date("data.quickstart.start", config.data.quickstart.start)
        if config.data.stores:
            raise UserError(
                "data.store: data=quickstart simulates its own store, got "
                f"{config.data.where}. Add data=zarr, or another preset of a store, or "
                "leave data.store out."
            )
    check_rows(config)
    checks.lead_times(config.trainer.evaluate_hours, config.data.step_hours)
    # Not in the config's own checks: a forecast without fixers keeps the bounds of its run.
    if config.model.bounds and "bounds" not in config.model.fixers:
        raise UserError(
            "model.bounds: needs the fixer bounds, got none. Add bounds to model.fixers, or leave "
            "model.bounds out."
        )
    if config.resume not in (None, "auto"):
        checks.checkpoint_path("resume", str(config.resume))


def check_rows(config: Config) -> None:
    """Refuse more bands than the coarsest level of the model has rows, if the grid is known yet."""
    rows = grid_rows(config.data) if config.parallel.domain > 1 else None
    if rows is not None:
        config.check_rows(rows)


def grid_rows(data: DataConfig) -> int | None:
    """Return the rows of the grid; None if they are only known from the store."""
    if data.grid is not None:
        return int(data.grid.partition("x")[0])
    return data.quickstart.grid_or_default(None)[0] if data.name == "quickstart" else None
