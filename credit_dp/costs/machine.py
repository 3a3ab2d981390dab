"""Machines: what one computes and sends in a second, read from a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import yaml  # type: ignore[import-untyped]

from credit_dp.checks import did_you_mean, existing_path
from credit_dp.errors import UserError

MIN_FIGURE, MAX_FIGURE = 1e-9, 1e15  # so that no product is 0 or infinite
DTYPES = ("float64", "float32", "tf32", "bfloat16")


@final
@dataclass(frozen=True)
class Link:
    """A way from one rank to another one.

    Attributes:
        latency_us: of a message, in microseconds.
        gb_per_s: that a rank sends while it receives as much, in thousands of millions of bytes.
    """

    latency_us: float
    gb_per_s: float

    @property
    def latency(self) -> float:
        """Return seconds."""
        return self.latency_us * 1e-6

    def seconds(self, size: float) -> float:
        """Return what bytes take, without latency."""
        return size / (self.gb_per_s * 1e9)


@final
@dataclass(frozen=True)
class Machine:
    """Nodes that are all alike. Figures are a data sheet's, times the share that is reached.

    Attributes:
        name: for people.
        source: of the figures.
        ranks_per_node: GPUs of a node, or processes where there are none.
        memory_gib: of a rank.
        tflops: of a rank at most, by what is computed in.
        tflops_reached: the share of it that is reached, from 0 to 1.
        memory_gb_per_s: of a rank's memory at most, reads and writes together.
        memory_reached: the share of it that is reached.
        overhead_us: to start an operation, in microseconds.
        runs_ahead: whether operations are started while earlier ones compute, as on a GPU.
        within_node, between_nodes: links at most; between nodes, a rank's share of what its node
            has.
        links_reached: the share of them that is reached; latencies are taken as they are.
    """

    name: str
    source: str
    ranks_per_node: int
    memory_gib: float
    tflops: Mapping[str, float]
    tflops_reached: float
    memory_gb_per_s: float
    memory_reached: float
    overhead_us: float
    runs_ahead: bool
    within_node: Link
    between_nodes: Link
    links_reached: float

    def flops_per_s(self, dtype: str, convolves: bool = False) -> float:
        """Return what a rank reaches in a dtype, which is one of `tflops`."""
        kind = "tf32" if convolves and dtype == "float32" and "tf32" in self.tflops else dtype
        return self.tflops[kind] * 1e12 * self.tflops_reached

    @property
    def bytes_per_s(self) -> float:
        """Return what a rank reads and writes."""
        return self.memory_gb_per_s * 1e9 * self.memory_reached

    def link(self, *, between: bool) -> Link:
        """Return a link as fast as it is in practice."""
        found = self.between_nodes if between else self.within_node
        return Link(found.latency_us, found.gb_per_s * self.links_reached)


def parse_machine(content: Any, where: str) -> Machine:
    """Return the machine that a YAML file describes.

    Args:
        content: of the file, as plain values.
        where: the file, for messages.

    Raises:
        UserError: a key is unknown, missing or of another kind.
    """
    names = tuple(field.name for field in fields(Machine))
    given = _table(where, content, names, needed=names)

    def at(key: str) -> tuple[str, Any]:
        return f"{where}: {key}", given[key]

    return Machine(
        _text(*at("name")),
        _text(*at("source")),
        _count(*at("ranks_per_node")),
        _number(*at("memory_gib")),
        _tflops(*at("tflops")),
        _share(*at("tflops_reached")),
        _number(*at("memory_gb_per_s")),
        _share(*at("memory_reached")),
        _number(*at("overhead_us")),
        _boolean(*at("runs_ahead")),
        _link(*at("within_node")),
        _link(*at("between_nodes")),
        _share(*at("links_reached")),
    )


def _table(
    where: str, value: Any, allowed: tuple[str, ...], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: needs the keys {', '.join(allowed)}, got {_describe_value(value)}."
        )
    for key in value:
        if key not in allowed:
            raise UserError(
                f"{where}: unknown key {key!r}. It may have {', '.join(allowed)}."
                f"{did_you_mean(str(key), allowed)}"
            )
    missing = [key for key in needed if key not in value]
    if missing:
        raise UserError(f"{where}: needs {', '.join(missing)} too. Add it.")
    return value


def _tflops(where: str, value: Any) -> dict[str, float]:
    table = _table(where, value, DTYPES)
    if not table:
        raise UserError(f"{where}: needs one of {', '.join(DTYPES)} at least, got none.")
    return {dtype: _number(f"{where}.{dtype}", entry) for dtype, entry in table.items()}


def _link(where: str, value: Any) -> Link:
    names = tuple(field.name for field in fields(Link))
    table = _table(where, value, names, needed=names)
    return Link(*(_number(f"{where}.{name}", table[name]) for name in names))


def _number(where: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not MIN_FIGURE <= value <= MAX_FIGURE:
        raise UserError(
            f"{where}: needs a number from {MIN_FIGURE:g} to {MAX_FIGURE:g}, got "
            f"{_describe_value(value)}."
        )
    return float(value)


def _share(where: str, value: Any) -> float:
    share = _number(where, value)
    if share > 1:
        raise UserError(f"{where}: needs a share above 0, and 1 at most, got {share:g}.")
    return share


def _count(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: needs an integer of at least 1, got {_describe_value(value)}.")
    return value


def _boolean(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where}: needs true or false, got {_describe_value(value)}.")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: needs a text, got {_describe_value(value)}.")
    return value


def _describe_value(value: Any) -> str:
    if isinstance(value, int) and not -MAX_FIGURE <= value <= MAX_FIGURE:
        return "a huge number"  # Python refuses to write some of them
    kinds = {dict: "a table", list: "a list", type(None): "nothing"}
    return kinds.get(type(value)) or " ".join(repr(value).split())[:60]


MACHINES_FOLDER = Path(__file__).resolve().parents[1] / "machines"


def machine_names() -> list[str]:
    """The machines that this package knows."""
    return sorted(path.stem for path in MACHINES_FOLDER.glob("*.yaml"))


def read_machine(name: str) -> Machine:
    """The machine of a name, or of a file.

    Raises:
        UserError: there is none, or it is not as needed.
    """
    names = machine_names()
    path = MACHINES_FOLDER / f"{name}.yaml" if name in names else existing_path(name)
    if path is None or not path.is_file():
        raise UserError(
            f"--machine: needs a YAML file, or one of {', '.join(names)}, but {name!r} is neither."
            f"{did_you_mean(name, names)}"
        )
    where = f"--machine {name}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: can't be read ({error}).") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise UserError(f"{where}: is no YAML{line} ({problem}).") from None
    return parse_machine(content, where)
