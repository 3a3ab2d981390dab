"""Plug-ins: models, losses, optimizers, schedules and callbacks that are not part of this package.

A plug-in is a config class with a name that derives from one of the bases in `credit_dp.config`,
such as `OwnModelConfig`. It comes from a Python file listed in the environment variable
CREDIT_DP_PLUGINS, or from an entry point of an installed package. A name in a config only chooses
among these; it never says what to import.

A plug-in file becomes a submodule of this module. Ranks and jobs of a sweep receive configs by
pickle, which names the module of each class: with the same variable set, they import the same file.
"""

import importlib.metadata
import logging
import os
import re
import shlex
import sys
import traceback
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar, final

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from credit_dp.checks import did_you_mean, expand_home
from credit_dp.errors import UserError, first_line

logger = logging.getLogger(__name__)

PLUGINS_VARIABLE = "CREDIT_DP_PLUGINS"
LEGACY_VARIABLE = "CREDIT_DP_MODELS"  # compatibility: its name when files could hold models only

# Of all installed packages, whose files are read for this: once, and not for each kind.
entry_points = cache(importlib.metadata.entry_points)

__path__: list[str] = []  # makes this module a package to Python; `_Finder` finds its submodules


class PluginKind(NamedTuple):
    """One kind of plug-in.

    Attributes:
        key: config key whose value is the name of a plug-in of this kind.
        group: entry-point group in which packages register plug-ins of this kind.
        several: whether the key holds several plug-ins, by name.
    """

    key: str
    group: str
    several: bool = False

    @property
    def label(self) -> str:
        """The word for this kind in messages: `model`, `schedule`."""
        word = self.key.rpartition(".")[2]
        return word.removesuffix("s") if self.several else word

    @property
    def choice(self) -> str:
        """The override that chooses the plug-in NAME."""
        return f"{self.key}.NAME={{}}" if self.several else f"{self.key}=NAME"

    @property
    def with_article(self) -> str:
        """`a model`, `an optimizer`."""
        return f"{'an' if self.label[0] in 'aeiou' else 'a'} {self.label}"


class Plugin:
    """Marks the base class of the configs of one kind of plug-in."""

    plugin_kind: ClassVar[PluginKind]


P = TypeVar("P", bound=Plugin)


class PluginFile(NamedTuple):
    """A plug-in file, and the environment variable that lists it."""

    variable: str
    path: Path


def find_plugins(base: type[P], reserved: Container[str]) -> dict[str, type[P]]:
    """Return the config class of every plug-in of a kind, by name.

    Args:
        reserved: names of this package's own classes of this kind.

    Raises:
        UserError: a file can't be used, or one of its plug-ins has a name in use.
    """
    packaged = find_packaged_plugins(base)
    plugins: dict[str, type[P]] = {}
    for file in plugin_files():
        for config in configs_in(file, import_plugin_file(file)):
            if not issubclass(config, base):
                continue
            name = plugin_name(file, config)
            if name in plugins:
                raise UserError(
                    f"{file.variable}: {plugins[name].__name__} and {config.__name__} are both "
                    f"named {name!r}. Give one of them another name."
                )
            if name in reserved or name in packaged:
                owner = "this package"
                if name in packaged:
                    owner = f"the entry point of {packaged[name].__name__}"
                raise UserError(
                    f"{file.variable}: {config.__name__} is named {name!r}, like "
                    f"{base.plugin_kind.with_article} of {owner}. Give it another name."
                )
            plugins[name] = config
    return packaged | plugins


def find_packaged_plugins(base: type[P]) -> dict[str, type[P]]:
    """Return the plug-ins of installed packages; one that fails to load is logged and left out."""
    kind = base.plugin_kind
    plugins: dict[str, type[P]] = {}
    for entry in entry_points().select(group=kind.group):
        where = f"{kind.label} {entry.name}: {entry.value}"
        try:
            config = entry.load()
        except Exception as error:  # noqa: BLE001 - code of another package may raise anything
            logger.warning("%s can't be imported (%s)", where, error)
            continue
        if isinstance(config, type) and issubclass(config, base):
            plugins[entry.name] = config
        else:
            logger.warning("%s is not a subclass of %s", where, base.__name__)
    return plugins


def registration_hint(kind: PluginKind) -> str:
    """Return the end of an error line about an unknown name: how to register a plug-in.

    Empty if a plug-in file is registered.
    """
    if plugin_files():
        return ""
    return (
        f" To use {kind.with_article} of your own, set {PLUGINS_VARIABLE} to its file, like "
        f"{PLUGINS_VARIABLE}=my_{kind.label}.py."
    )


def schema_node(name: str, config: type[Plugin]) -> DictConfig:
    """Return the keys of a plug-in with their types and defaults, as Hydra's config store needs."""
    try:
        node: DictConfig = OmegaConf.structured(config)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{config.plugin_kind.key}={name}: the fields of {config.__name__} need types that "
            f"YAML has ({first_line(error)})"
        ) from error
    node.name = name
    return node


def build_plugin_config(name: str, config: type[P], key: str, values: Mapping[str, Any]) -> P:
    """Return the config of a plug-in with the given values of its keys.

    Args:
        key: config key that holds the values, for messages.

    Raises:
        UserError: the plug-in has no such key, or a value is not allowed.
    """
    node = schema_node(name, config)
    known = [str(field) for field in node if field != "name"]
    for field in values:
        if field not in known:
            allowed = f"Allowed: {', '.join(known)}." if known else "It has no keys."
            raise UserError(
                f"{key}.{field}: {name} has no such key.{did_you_mean(field, known)} {allowed}"
            )
    try:
        plugin: P = OmegaConf.to_object(OmegaConf.merge(node, dict(values)))  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(f"{key}: {first_line(error)}") from error
    # What the plug-in's own `__post_init__` may raise for a value that it refuses.
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{key}: {type(error).__name__}: {one_line_message(error)}") from error
    return plugin


@contextmanager
def report_plugin_errors(where: str) -> Iterator[None]:
    """Turn an error in a plug-in's code into one line.

    Args:
        where: the call that may fail, with its key, like `loss: Mine.build`.

    Raises:
        UserError: with the file and line of the error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{where} fails at {frame.filename}:{frame.lineno} "
            f"({type(error).__name__}: {one_line_message(error)})."
        ) from error


def one_line_message(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


# Plug-in files


def plugin_files() -> list[PluginFile]:
    """Return the files that the environment variables list, each once."""
    files: dict[str, PluginFile] = {}
    for variable in (PLUGINS_VARIABLE, LEGACY_VARIABLE):
        for text in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            path = expand_home(variable, text)
            files.setdefault(module_name(path), PluginFile(variable, path))
    return list(files.values())


def plugins_setting() -> str:
    """Return `CREDIT_DP_PLUGINS=FILES` for a shell, with absolute paths; empty without files."""
    files = os.pathsep.join(str(file.path.absolute()) for file in plugin_files())
    return f"{PLUGINS_VARIABLE}={shlex.quote(files)}" if files else ""


def module_name(path: Path) -> str:
    """Return the name of a file's module in `sys.modules`, the same in every process."""
    # The checksum keeps files of one name in different folders apart.
    checksum = zlib.crc32(str(path.resolve()).encode())
    return f"{__name__}.{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{checksum:08x}"


def import_plugin_file(file: PluginFile) -> ModuleType:
    """Import a plug-in file, once in each process, and return its module."""
    variable, path = file
    if not path.is_file():
        raise UserError(f"{variable}: there is no file {path}. Give the path of a Python file.")
    name = module_name(path)
    if name not in sys.modules:
        logger.info("%s: loading plug-ins of %s", variable, path)
    try:
        return import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        reason = error.msg if isinstance(error, SyntaxError) else one_line_message(error)
        kind = type(error).__name__
        raise UserError(f"{variable}: {path}{error_line(error, path)}: {kind}: {reason}") from error


def error_line(error: BaseException, path: Path) -> str:
    """Return `, line N`, the line of the file at which an error was raised; empty if at none."""
    frames = traceback.extract_tb(error.__traceback__)
    positions = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):  # no frame of the file exists yet
        positions.append((error.filename or "", error.lineno))
    lines = [line for name, line in positions if name == str(path.resolve())]
    return f", line {lines[-1]}" if lines else ""


def configs_in(file: PluginFile, module: ModuleType) -> Sequence[type[Plugin]]:
    """Return the config classes that a plug-in file defines, except base classes without a name."""
    classes = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    defined = [
        each for each in classes if issubclass(each, Plugin) and each.__module__ == module.__name__
    ]
    for config in defined:
        # A subclass inherits the fields of its base, so `is_dataclass` would be true of it.
        if "__dataclass_fields__" not in vars(config):
            raise UserError(
                f"{file.variable}: {config.__name__} in {module.__file__} is not a dataclass. "
                "Write @dataclass above it."
            )
    bases = {base for config in defined for base in config.__mro__[1:] if not has_name(base)}
    configs = [config for config in defined if config not in bases]
    if not configs:
        known = ", ".join(base.__name__ for base in Plugin.__subclasses__())
        raise UserError(
            f"{file.variable}: {module.__file__} has no plug-in. It needs a dataclass that derives "
            f"from a class of credit_dp.config: {known}."
        )
    return configs


def has_name(config: type) -> bool:
    """Whether a config class gives its plug-in a name."""
    return is_dataclass(config) and default_name(config) not in (None, MISSING)


def default_name(config: type) -> object:
    """Return the default of the field `name`; None if the class has no such field."""
    all_fields = fields(config) if is_dataclass(config) else ()
    return next((field.default for field in all_fields if field.name == "name"), None)


def plugin_name(file: PluginFile, config: type[Plugin]) -> str:
    """Return the name by which a config chooses a plug-in."""
    name = default_name(config) if has_name(config) else None
    # Hydra would take `schema...` for one of this package's schema nodes.
    if not isinstance(name, str) or not re.fullmatch(r"(?!schema)[A-Za-z][\w-]*", name):
        raise UserError(
            f"{file.variable}: {config.__name__} needs a field `name: str = ...` of letters, "
            f"digits, _ and -, by which {config.plugin_kind.choice} chooses it, got {name!r}."
        )
    return name


@final
class _Finder(MetaPathFinder):
    """Tells Python which file a submodule of this module is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        paths = (file.path for file in plugin_files())
        module_path = next((each for each in paths if module_name(each) == fullname), None)
        if module_path is None:
            return None
        location = str(module_path.resolve())
        # Python chooses a loader by the file's suffix; here any suffix will do.
        loader = SourceFileLoader(fullname, location)
        return spec_from_file_location(fullname, location, loader=loader)


sys.meta_path.append(_Finder())  # every import asks it, also that of a class being unpickled
