"""Small files of runs that may be half-written, foreign or gone: what can't be read is empty."""

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

# Written in C where there is a compiler: a thousand configs take seconds and not a minute.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file as plain values; None if it has none."""
    try:
        return yaml.load(read_text(path), LOADER)  # both are safe loaders
    except (yaml.YAMLError, ValueError):
        return None


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it has none."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError):
        return None


def as_table(value: Any) -> dict[str, Any]:
    """A table with texts as keys; an empty one for anything else."""
    return {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else {}


def as_list(value: Any) -> list[str]:
    """The texts of a list; none for anything else."""
    return [str(entry) for entry in value] if isinstance(value, list) else []


def at(table: Any, key: str) -> Any:
    """What a key with dots leads to; None if it leads nowhere."""
    for name in key.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    return table


def count_at(table: Any, key: str) -> int | None:
    """The whole number that a key with dots leads to; None if there is none."""
    value = at(table, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
