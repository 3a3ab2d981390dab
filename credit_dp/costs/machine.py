"""A machine to predict steps for: its figures, read from a YAML file.

Imports no torch, so that `credit-dp plan --help` can name the machines at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import yaml  # type: ignore[import-untyped]

from credit_dp.checks import did_you_mean, existing_path
from credit_dp.errors import UserError

MACHINES_FOLDER = Path(__file__).resolve().parents[1] / "machines"
# Limits of every figure: with them no product of two is 0 or infinite.
MIN_FIGURE = 1e-9
MAX_FIGURE = 1e15
# tf32 stands for float32 convolutions on GPUs that have it: torch uses it there by default, but not
# for matrix products.
DTYPES = ("float64", "float32", "tf32", "bfloat16")


@final
@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Attributes:
        latency_us: of a message, in microseconds.
        gb_per_s: GB/s (1e9 bytes) that a rank sends while it receives as much.
    """

    latency_us: float
    gb_per_s: float

    @property
    def latency(self) -> float:
        """Return the latency in seconds."""
        return self.latency_us * 1e-6

    def seconds(self, size: float) -> float:
        """Return the seconds to send `size` bytes, latency not included."""
        return size / (self.gb_per_s * 1e9)


@final
@dataclass(frozen=True)
class Machine:
    """A cluster of identical nodes: peak figures of a data sheet, and the shares that are reached.

    Attributes:
        name: shown in tables.
        source: where the figures come from.
        ranks_per_node: GPUs of a node, or processes on a node without GPUs.
        memory_gib: of a rank.
        tflops: peak of a rank, by dtype (see `DTYPES`).
        tflops_reached: share of the peak that is reached, from 0 to 1.
        memory_gb_per_s: peak memory bandwidth of a rank, reads and writes together.
        memory_reached: share of that bandwidth that is reached.
        overhead_us: to start an operation, in microseconds.
        runs_ahead: whether operations are started while earlier ones compute, as on a GPU.
        within_node, between_nodes: peak links; between nodes, one rank's share of the node's
            bandwidth.
        links_reached: share of the links' bandwidth that is reached; latencies are used as given.
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

    def flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s that a rank reaches in a dtype of `tflops`."""
        return self.tflops[dtype] * 1e12 * self.tflops_reached

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes per second that a rank reads and writes."""
        return self.memory_gb_per_s * 1e9 * self.memory_reached

    def link(self, *, between: bool) -> Link:
        """Return a link with the bandwidth that is reached in practice."""
        peak = self.between_nodes if between else self.within_node
        return Link(peak.latency_us, peak.gb_per_s * self.links_reached)


def parse_machine(content: Any, where: str) -> Machine:
    """Return the machine that a YAML file describes.

    Args:
        content: of the file, as plain values.
        where: the file, for messages.

    Raises:
        UserError: a key is unknown or missing, or its value has the wrong type.
    """
    names = tuple(field.name for field in fields(Machine))
    given = _table(where, content, names, needed=names)

    def entry(key: str) -> tuple[str, Any]:
        return f"{where}: {key}", given[key]

    return Machine(
        name=_text(*entry("name")),
        source=_text(*entry("source")),
        ranks_per_node=_count(*entry("ranks_per_node")),
        memory_gib=_number(*entry("memory_gib")),
        tflops=_tflops(*entry("tflops")),
        tflops_reached=_share(*entry("tflops_reached")),
        memory_gb_per_s=_number(*entry("memory_gb_per_s")),
        memory_reached=_share(*entry("memory_reached")),
        overhead_us=_number(*entry("overhead_us")),
        runs_ahead=_boolean(*entry("runs_ahead")),
        within_node=_link(*entry("within_node")),
        between_nodes=_link(*entry("between_nodes")),
        links_reached=_share(*entry("links_reached")),
    )


def _table(
    where: str, value: Any, allowed: tuple[str, ...], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a table of the file after checking its keys."""
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: needs the keys {', '.join(allowed)}, got {_describe_value(value)}."
        )
    for key in value:
        if key not in allowed:
            raise UserError(
                f"{where}: unknown key {key!r}. Allowed: {', '.join(allowed)}."
                f"{did_you_mean(str(key), allowed)}"
            )
    missing = [key for key in needed if key not in value]
    if missing:
        raise UserError(f"{where}: needs {', '.join(missing)} too. Add it.")
    return value


def _tflops(where: str, value: Any) -> dict[str, float]:
    table = _table(where, value, DTYPES)
    if not table:
        raise UserError(f"{where}: needs at least one of {', '.join(DTYPES)}, got none.")
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
        raise UserError(f"{where}: needs a share above 0 and at most 1, got {share:g}.")
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
        return "a huge number"  # str() of an int with over 4,300 digits raises a ValueError
    kinds = {dict: "a table", list: "a list", type(None): "nothing"}
    return kinds.get(type(value)) or " ".join(repr(value).split())[:60]


def machine_names() -> list[str]:
    """Return the names of the machines that come with the package."""
    return sorted(path.stem for path in MACHINES_FOLDER.glob("*.yaml"))


def read_machine(name: str) -> Machine:
    """Read a machine: one of the package's by name, or a YAML file.

    Raises:
        UserError: there is no such file, or its content is wrong.
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
        raise UserError(f"{where}: is not valid YAML{line} ({problem}).") from None
    return parse_machine(content, where)
