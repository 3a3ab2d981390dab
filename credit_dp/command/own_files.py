"""Models in single Python files, anywhere: the variable CREDIT_DP_MODELS names the files.

Their modules have names below that of this one. By these a process that is sent a config, a rank or
a job of a sweep, finds its class again, as long as it has the variable too.
"""

import os
import re
import sys
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import final

from credit_dp.checks import home_replaced
from credit_dp.config import ModelConfig, OwnModelConfig
from credit_dp.errors import UserError

VARIABLE = "CREDIT_DP_MODELS"

__path__: list[str] = []  # lets modules be below this one; where they are is told by _Finder


def configs_of_files() -> dict[str, type[OwnModelConfig]]:
    """The config class of every model in the files that the variable names, by name.

    Raises:
        UserError: a file can't be run, has no model, or one whose name can't be used.
    """
    found: dict[str, type[OwnModelConfig]] = {}
    for file in named_files():
        for config in configs_in(load(file)):
            name = name_of(config)
            if name in found:
                raise UserError(
                    f"{VARIABLE}: {found[name].__name__} and {config.__name__} are both named "
                    f"{name!r}. Give one of them another name."
                )
            found[name] = config
    return found


def named_files() -> list[Path]:
    """The files of the variable, each once."""
    texts = os.environ.get(VARIABLE, "").split(os.pathsep)
    files = [home_replaced(VARIABLE, text) for text in texts if text]
    return list({module_name(file): file for file in files}.values())


def module_name(file: Path) -> str:
    """What the module of a file is called in `sys.modules`, in every process alike."""
    place = str(file.resolve()).encode()
    return f"{__name__}.{re.sub(r'[^A-Za-z0-9_]', '_', file.stem)}_{zlib.crc32(place):08x}"


def load(file: Path) -> ModuleType:
    """The module of a file, which is run if it has not been.

    Raises:
        UserError: it is not there, or can't be run.
    """
    if not file.is_file():
        raise UserError(f"{VARIABLE}: there is no file {file}. Give the path of a Python file.")
    try:
        return import_module(module_name(file))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code
        told = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        kind = type(error).__name__
        raise UserError(f"{VARIABLE}: {file}{line_of(error, file)}: {kind}: {told}") from error


def line_of(error: BaseException, file: Path) -> str:
    """Where in the file an error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    lines = [line for name, line in places if name == str(file.resolve())]
    return f", line {lines[-1]}" if lines else ""


def configs_in(module: ModuleType) -> Sequence[type[OwnModelConfig]]:
    """The config classes that a module defines; one without a name may be what others derive from.

    Raises:
        UserError: there is none, or one is no dataclass.
    """
    kinds = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    defined = [
        kind
        for kind in kinds
        if issubclass(kind, OwnModelConfig) and kind.__module__ == module.__name__
    ]
    for config in defined:
        if "__dataclass_fields__" not in vars(config):
            raise UserError(
                f"{VARIABLE}: {config.__name__} in {module.__file__} is no dataclass. "
                "Write @dataclass above it."
            )
    bases = {base for config in defined for base in config.__mro__[1:] if not has_name(base)}
    configs = [config for config in defined if config not in bases]
    if not configs:
        raise UserError(
            f"{VARIABLE}: {module.__file__} has no model. It needs a dataclass that derives from "
            "credit_dp.config.OwnModelConfig."
        )
    return configs


def has_name(config: type) -> bool:
    """Whether a config class gives its model a name."""
    return issubclass(config, ModelConfig) and default_name(config) != default_name(ModelConfig)


def default_name(config: type[ModelConfig]) -> object:
    """The default of the field `name`."""
    return next(field.default for field in fields(config) if field.name == "name")


def name_of(config: type[OwnModelConfig]) -> str:
    """The name by which a config chooses the model.

    Raises:
        UserError: it has none, or one that `model=NAME` can't say.
    """
    name = default_name(config) if has_name(config) else None
    if not isinstance(name, str) or not re.fullmatch(r"(?!schema)[A-Za-z][\w-]*", name):
        raise UserError(
            f"{VARIABLE}: {config.__name__} needs a field `name: str = ...`, which model=NAME "
            f"chooses it by, of letters, digits, _ and -, got {name!r}."
        )
    return name


@final
class _Finder(MetaPathFinder):
    """Tells Python in which file a module below this one is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How to load a module; None if it is not in a file of the variable."""
        if not fullname.startswith(f"{__name__}."):
            return None
        file = next((file for file in named_files() if module_name(file) == fullname), None)
        if file is None:
            return None
        place = str(file.resolve())
        loader = SourceFileLoader(fullname, place)  # whatever the file's name ends in
        return spec_from_file_location(fullname, place, loader=loader)


sys.meta_path.append(_Finder())  # where Python asks for modules, unpickling included
