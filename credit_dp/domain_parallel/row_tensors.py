"""Parameters and buffers that have a row for each of the globe's: every rank uses its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.operations import Rows, narrowed
from credit_dp.domain_parallel.planner import active_planner
from credit_dp.domain_parallel.running import in_backward, running
from credit_dp.errors import UserError

# Where an owner keeps its `Cut`s, by the tensor's name.
CUTS = "_row_cuts"


class Cut(NamedTuple):
    """Where the rows of one tensor are; `path` is its name in the model."""

    path: str
    rows: Rows
    manager: DomainParallelManager


@final
class _Band:
    """Reads as this rank's rows of a parameter or buffer while the model runs, else as all of it.

    A view: gradients flow into the whole tensor, with zeros for the rows of others.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: nn.Module | None, kind: type) -> Any:
        if owner is None:
            return self
        whole = _whole(owner, self.name)
        cut: Cut | None = owner.__dict__.get(CUTS, {}).get(self.name)
        planner = active_planner()
        if whole is None or cut is None:
            return whole
        if planner is not None:
            return planner.band_of(whole, cut.rows, cut.path)
        if running() is None and not in_backward():
            return whole
        return narrowed(whole, cut.rows, cut.manager.rows(cut.rows.height))


def _whole(owner: nn.Module, name: str) -> Tensor | None:
    held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    return held.get(name)


def cut(owner: nn.Module, name: str, what: Cut) -> None:
    """Let the attribute `name` of `owner` read as this rank's rows."""
    owner.__dict__.setdefault(CUTS, {})[name] = what
    kind = type(owner)
    if name not in kind.__dict__.get(CUTS, ()):
        owner.__class__ = _with_bands(_plain(kind), (*kind.__dict__.get(CUTS, ()), name))


def cuts(model: nn.Module) -> list[tuple[nn.Module, dict[str, Cut]]]:
    """Return every cut in a model, by its owner."""
    owners = (module for module in model.modules() if CUTS in module.__dict__)
    return [(owner, dict(owner.__dict__[CUTS])) for owner in owners]


def cut_only(model: nn.Module, wanted: list[tuple[nn.Module, dict[str, Cut]]]) -> None:
    """Undo every cut in a model but these, which are restored."""
    for owner, _ in cuts(model):
        del owner.__dict__[CUTS]
        owner.__class__ = _plain(type(owner))
    for owner, of_owner in wanted:
        for name, what in of_owner.items():
            cut(owner, name, what)


@contextmanager
def unreplaced(model: nn.Module) -> Iterator[None]:
    """Refuse a run that puts another tensor in the place of a cut one."""
    before = [
        (owner, name, what.path, _whole(owner, name))
        for owner, of_owner in cuts(model)
        for name, what in of_owner.items()
    ]
    yield
    for owner, name, path, tensor in before:
        if _whole(owner, name) is not tensor:
            raise UserError(
                f"{path}: is changed by the model, but each rank would change its own rows only. "
                "Change it outside of the model's forward."
            )


def _plain(kind: type) -> type:
    return kind.__mro__[1] if CUTS in kind.__dict__ else kind


def _with_bands(kind: type, names: tuple[str, ...]) -> type:
    """Make a subclass whose instances read these names as bands, as torch's parametrisations do."""
    settings = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, CUTS: names}
    readers = {name: _Band(name) for name in names}
    members = {**settings, **readers, "__reduce_ex__": _reduce}
    return type(kind)(kind.__name__, (kind,), members)


def _reduce(owner: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Copy and pickle by the plain class, which can be found by its name."""
    kind = type(owner)
    return _blank, (_plain(kind), kind.__dict__[CUTS]), owner.__getstate__()  # type: ignore[no-untyped-call]


def _blank(kind: type, names: tuple[str, ...]) -> Any:
    subclass = _with_bands(kind, names)
    return subclass.__new__(subclass)  # type: ignore[call-overload]
