"""The config of another package, and the experiment that a command writes from it.

`ForeignConfig` knows which keys were read, so that none is dropped silently. `Experiment` holds
the choices and keys of this package.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import yaml  # type: ignore[import-untyped]

from credit_dp.errors import UserError
from credit_dp.plugins import one_line_message

Reasons = Mapping[str, str]
NO_REASON = "nothing here corresponds to it"
_ABSENT = object()


class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values only, and dates as text: they are parsed where they are used."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@final
class ForeignConfig:
    """The config of another package, which remembers the keys that were read.

    Keys are paths with dots, such as `trainer.scheduler.min_lr`; a list is one value.
    """

    def __init__(self, path: Path, tree: Mapping[str, Any]) -> None:
        self.path = path
        self.tree = tree
        self._read: set[str] = set()
        self.remarks: dict[str, str] = {}

    @classmethod
    def load(cls, path: Path) -> "ForeignConfig":
        """Read a YAML file, which may hold plain values only.

        Raises:
            UserError: there is no such file, or it isn't a table in YAML.
        """
        try:
            tree = yaml.load(path.read_text(encoding="utf-8"), PlainLoader)
        except OSError as error:
            raise UserError(
                f"{path}: can't be read ({error.strerror}). Give the path of a config in YAML."
            ) from error
        except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise UserError(f"{path}: is no config in YAML ({one_line_message(error)}).") from error
        if not isinstance(tree, dict):
            raise UserError(f"{path}: needs a table of keys, got {type(tree).__name__}.")
        return cls(path, tree)

    def has(self, key: str) -> bool:
        """Whether there is such a key, with any value; does not count as reading it."""
        return self._find(key) is not _ABSENT

    def read(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default; the key, with all below it, counts as read."""
        value = self._find(key)
        if value is _ABSENT:
            return default
        self._read.add(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; YAML reads some, such as 1e-3, as text.

        Raises:
            UserError: the value is something else.
        """
        value = self.read(key, default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.error(key, "a number", value) from None

    def whole(self, key: str, default: int | None = None) -> Any:
        """Return a whole number.

        Raises:
            UserError: the value is something else.
        """
        value = self.number(key, default)
        if value is not None and not float(value).is_integer():  # also infinity and NaN
            raise self.error(key, "a whole number", value)
        return None if value is None else int(value)

    def names(self, key: str) -> list[str]:
        """Return a list of texts; empty if the key is absent.

        Raises:
            UserError: the value is something else.
        """
        value = self.read(key, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
            raise self.error(key, "a list of names", value)
        return list(dict.fromkeys(values))

    def paths(self, *keys: str) -> list[str]:
        """Return the paths at these keys, each once, with `$NAME` and `~` expanded."""
        found = [path for key in keys for path in self.names(key)]
        return list(dict.fromkeys(os.path.expanduser(os.path.expandvars(p)) for p in found))

    def error(self, key: str, needed: str, got: object) -> UserError:
        """Return the error that a value is not what is needed."""
        return UserError(f"{self.path}: {key}: needs {needed}, got {got!r}.")

    def remark(self, key: str, text: str) -> None:
        """Remember a line about a key: what has no counterpart in it, or another meaning."""
        self._read.add(key)
        self.remarks[key] = text

    def lines(self, reasons: Reasons) -> list[str]:
        """Return the remarks, and a line for each key that was not read.

        `reasons` says why a key has no counterpart, by the beginning of its path.
        """
        texts = dict(self.remarks)
        for key in self._leaves():
            parents = [*(key[: dot.start()] for dot in re.finditer(r"\.", key)), key]
            if not self._read & set(parents):
                known = [reasons[parent] for parent in parents if parent in reasons]
                texts[key] = f"no counterpart: {known[-1] if known else NO_REASON}"
        order = {key: position for position, key in enumerate(self._leaves())}
        first = {
            key: min((order[leaf] for leaf in order if f"{leaf}.".startswith(f"{key}.")), default=0)
            for key in texts
        }
        return [
            f"{key}{self._value_text(key)}: {texts[key]}"
            for key in sorted(texts, key=first.__getitem__)
        ]

    def _value_text(self, key: str) -> str:
        value = self._find(key)
        if value is _ABSENT or isinstance(value, dict | list):
            return ""
        return f"={' '.join(str(value).split())}"

    def _find(self, key: str) -> Any:
        value: Any = self.tree
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return _ABSENT
            value = value[name]
        return value

    def _leaves(self) -> list[str]:
        def walk(prefix: str, value: object) -> Iterator[str]:
            if isinstance(value, dict) and value:
                for name, entry in value.items():
                    yield from walk(f"{prefix}.{name}" if prefix else str(name), entry)
            else:
                yield prefix

        return list(walk("", self.tree)) if self.tree else []


@dataclass
class Experiment:
    """An experiment: choices of groups, keys, and the files of a model that comes with it.

    Attributes:
        choices: the choice of each config group, such as `{"data": "zarr"}`.
        keys: values by path with dots; a table as value is written as it is.
        plugin: the text of a plug-in file that `choices["model"]` needs; None: none is needed.
        write_weights: writes the weights of the plug-in's model to a path; None: it has none.
    """

    choices: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    plugin: str | None = None
    write_weights: Callable[[Path], None] | None = None

    def set(self, key: str, value: Any) -> None:
        """Set a key, unless the value is None."""
        if value is not None:
            self.keys[key] = value

    def text(self, head: Sequence[str]) -> str:
        """Return the YAML of the experiment, with lines of comments at its head."""
        tree: dict[str, Any] = {}
        for path, value in self.keys.items():
            node = tree
            *parents, last = path.split(".")
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = value
        defaults = [{f"override /{group}": name} for group, name in self.choices.items()]
        body = {"defaults": [*defaults, "_self_"], **tree}
        comments = "".join(f"# {line}\n" for line in head)
        # Flow style of the innermost lists: [500, 850] in one line.
        text = yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=100)
        return f"# @package _global_\n{comments}{text}"
