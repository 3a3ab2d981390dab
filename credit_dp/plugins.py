"""Plug-ins: models, losses, optimizers and schedules that are not part of this package.

A plug-in is a config class with a name that derives from one of the bases in `credit_dp.config`,
such as `OwnModelConfig`. It is found in the Python files that the variable CREDIT_DP_PLUGINS names,
or in installed packages, by their entry points. A name in a config only chooses among these; it
never says what to import.

The modules of files have names below that of this module. By these a process that receives a
config, a rank or a job of a sweep, finds its classes again, as long as it has the variable too.
"""

import logging
import os
import re
import sys
import traceback
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar, final

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from credit_dp.checks import did_you_mean, expand_home
from credit_dp.errors import UserError

logger = logging.getLogger(__name__)

PLUGINS_VARIABLE = "CREDIT_DP_PLUGINS"
LEGACY_VARIABLE = "CREDIT_DP_MODELS"  # the same, from when files held models only

__path__: list[str] = []  # lets modules be below this one; _Finder knows their files


class PluginKind(NamedTuple):
    """One kind of plug-in.

    Attributes:
        key: of the config, which chooses a plug-in of this kind by its name.
        group: of the entry points in which packages name theirs.
    """

    key: str
    group: str

    @property
    def label(self) -> str:
        """What one is called: `model`, `schedule`."""
        return self.key.rpartition(".")[2]

    @property
    def with_article(self) -> str:
        """`a model`, `an optimizer`."""
        return f"{'an' if self.label[0] in 'aeiou' else 'a'} {self.label}"


class Plugin:
    """Marks the base of the config classes of one kind of plug-in."""

    plugin_kind: ClassVar[PluginKind]


P = TypeVar("P", bound=Plugin)


class PluginFile(NamedTuple):
    """A file, and the variable that names it."""

    variable: str
    path: Path


def find_plugins(base: type[P], ours: Container[str]) -> dict[str, type[P]]:
    """Return the config class of every plug-in of a kind, by name.

    Args:
        base: of the kind.
        ours: names of this kind in this package.

    Raises:
        UserError: a file can't be used, or has a plug-in with a name that is taken.
    """
    packaged = find_packaged_plugins(base)
    found: dict[str, type[P]] = {}
    for file in plugin_files():
        for config in configs_in(file, import_plugin_file(file)):
            if not issubclass(config, base):
                continue
            name = plugin_name(file, config)
            if name in found:
                raise UserError(
                    f"{file.variable}: {found[name].__name__} and {config.__name__} are both named "
                    f"{name!r}. Give one of them another name."
                )
            if name in ours or name in packaged:
                owner = f"the entry point of {packaged[name].__name__}" if name in packaged else ""
                raise UserError(
                    f"{file.variable}: {config.__name__} is named {name!r}, as "
                    f"{base.plugin_kind.with_article} of {owner or 'this package'} is. Give it "
                    "another name."
                )
            found[name] = config
    return packaged | found


def find_packaged_plugins(base: type[P]) -> dict[str, type[P]]:
    """Return the plug-ins of installed packages; one that fails to load is logged and left out."""
    kind, found = base.plugin_kind, {}
    for entry in entry_points(group=kind.group):
        try:
            config = entry.load()
        except Exception as error:  # noqa: BLE001 - it is another's code
            logger.warning(
                "%s %s: %s can't be imported (%s)", kind.label, entry.name, entry.value, error
            )
            continue
        if isinstance(config, type) and issubclass(config, base):
            found[entry.name] = config
        else:
            logger.warning("%s %s: %s is no %s", kind.label, entry.name, entry.value, base.__name__)
    return found


def registration_hint(kind: PluginKind) -> str:
    """Return the end of an error line: what to do if the unknown name is that of a plug-in."""
    if plugin_files():
        return ""
    one = f"A{kind.with_article[1:]}"
    return f" {one} of your own is known by its file: set {PLUGINS_VARIABLE}=my_{kind.label}.py."


def schema_node(name: str, config: type[Plugin]) -> DictConfig:
    """Return the keys of a plug-in with their types and defaults, as Hydra takes them.

    Raises:
        UserError: a key has a type that no YAML file could hold.
    """
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
    """Return a plug-in with these values of its keys, which stand in `key` of the config.

    Raises:
        UserError: it has no such key, or a value is not allowed.
    """
    node = schema_node(name, config)
    own = [str(known) for known in node if known != "name"]
    for value in values:
        if value not in own:
            allowed = f"Allowed: {', '.join(own)}." if own else "It has no keys."
            raise UserError(
                f"{key}.{value}: {name} has no such key.{did_you_mean(value, own)} {allowed}"
            )
    try:
        made: P = OmegaConf.to_object(OmegaConf.merge(node, dict(values)))  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(f"{key}: {first_line(error)}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{key}: {type(error).__name__}: {one_line_message(error)}") from error
    return made


@contextmanager
def report_plugin_errors(what: str) -> Iterator[None]:
    """Report what goes wrong in a plug-in's code in one line; `what` is like `loss: Mine.build`.

    Raises:
        UserError: with the place in the code.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{what} fails at {place.filename}:{place.lineno} "
            f"({type(error).__name__}: {one_line_message(error)})."
        ) from error


def one_line_message(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split())


def first_line(error: BaseException) -> str:
    """Return the first line of a message; OmegaConf adds several about its insides."""
    return " ".join(str(error).split("\n")[0].split())


# Files


def plugin_files() -> list[PluginFile]:
    """Return the files that the variables name, each once."""
    found: dict[str, PluginFile] = {}
    for variable in (PLUGINS_VARIABLE, LEGACY_VARIABLE):
        for text in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            path = expand_home(variable, text)
            found.setdefault(module_name(path), PluginFile(variable, path))
    return list(found.values())


def module_name(path: Path) -> str:
    """Return what the module of a file is called in `sys.modules`, in every process alike."""
    place = str(path.resolve()).encode()
    return f"{__name__}.{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{zlib.crc32(place):08x}"


def import_plugin_file(file: PluginFile) -> ModuleType:
    """Return the module of a file, which is run if it has not been.

    Raises:
        UserError: it is not there, or can't be run.
    """
    variable, path = file
    if not path.is_file():
        raise UserError(f"{variable}: there is no file {path}. Give the path of a Python file.")
    name = module_name(path)
    if name not in sys.modules:
        logger.info("%s: plug-ins in %s", variable, path)
    try:
        return import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code
        reason = error.msg if isinstance(error, SyntaxError) else one_line_message(error)
        kind = type(error).__name__
        raise UserError(f"{variable}: {path}{error_line(error, path)}: {kind}: {reason}") from error


def error_line(error: BaseException, path: Path) -> str:
    """Return where in the file an error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    lines = [line for name, line in places if name == str(path.resolve())]
    return f", line {lines[-1]}" if lines else ""


def configs_in(file: PluginFile, module: ModuleType) -> Sequence[type[Plugin]]:
    """Return the config classes that a file defines; one without a name may be a base of others.

    Raises:
        UserError: there is none, or one is no dataclass.
    """
    kinds = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    defined = [
        kind for kind in kinds if issubclass(kind, Plugin) and kind.__module__ == module.__name__
    ]
    for config in defined:
        if "__dataclass_fields__" not in vars(config):
            raise UserError(
                f"{file.variable}: {config.__name__} in {module.__file__} is no dataclass. "
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
    """Return whether a config class gives its plug-in a name."""
    return is_dataclass(config) and default_name(config) not in (None, MISSING)


def default_name(config: type) -> object:
    """Return the default of the field `name`; None if there is no such field."""
    known = fields(config) if is_dataclass(config) else ()
    return next((field.default for field in known if field.name == "name"), None)


def plugin_name(file: PluginFile, config: type[Plugin]) -> str:
    """Return the name by which a config chooses a plug-in.

    Raises:
        UserError: it has none, or one that no key can take.
    """
    name = default_name(config) if has_name(config) else None
    if not isinstance(name, str) or not re.fullmatch(r"(?!schema)[A-Za-z][\w-]*", name):
        raise UserError(
            f"{file.variable}: {config.__name__} needs a field `name: str = ...`, which "
            f"{config.plugin_kind.key}=NAME chooses it by, of letters, digits, _ and -, got "
            f"{name!r}."
        )
    return name


@final
class _Finder(MetaPathFinder):
    """Tells Python in which file a module below this one is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module; None if no variable names its file."""
        if not fullname.startswith(f"{__name__}."):
            return None
        paths = (file.path for file in plugin_files())
        found = next((file for file in paths if module_name(file) == fullname), None)
        if found is None:
            return None
        place = str(found.resolve())
        loader = SourceFileLoader(fullname, place)  # whatever the file's name ends in
        return spec_from_file_location(fullname, place, loader=loader)


sys.meta_path.append(_Finder())  # where Python asks for modules, unpickling included
