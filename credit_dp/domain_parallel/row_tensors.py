"""Parameters and buffers that have a row for each of the globe's: every rank uses its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from credit_dp.domain_parallel.functional import active_context, in_backward, is_user_module
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planning.audit import RowLayout, narrow_to_band
from credit_dp.domain_parallel.planning.planner import RowCandidate, active_planner
from credit_dp.errors import UserError

# Where an owner keeps its `RowSharding`s, by the tensor's name.
SHARDINGS_ATTRIBUTE = "_row_cuts"


class RowSharding(NamedTuple):
    """Where the rows of one tensor are; `path` is its name in the model."""

    path: str
    rows: RowLayout
    manager: DomainParallelManager


@final
class _BandDescriptor:
    """Reads as this rank's rows of a parameter or buffer while the model runs, else as all of it.

    A view: gradients flow into the whole tensor, with zeros for the rows of others.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: nn.Module | None, kind: type) -> Any:
        if owner is None:
            return self
        whole = _unsharded_tensor(owner, self.name)
        cut: RowSharding | None = owner.__dict__.get(SHARDINGS_ATTRIBUTE, {}).get(self.name)
        planner = active_planner()
        if whole is None or cut is None:
            return whole
        if planner is not None:
            return planner.band_of_parameter(whole, cut.rows, cut.path)
        if active_context() is None and not in_backward():
            return whole
        return narrow_to_band(whole, cut.rows, cut.manager.rows(cut.rows.height))


def _unsharded_tensor(owner: nn.Module, name: str) -> Tensor | None:
    held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    return held.get(name)


def shard_rows(owner: nn.Module, name: str, what: RowSharding) -> None:
    """Let the attribute `name` of `owner` read as this rank's rows."""
    owner.__dict__.setdefault(SHARDINGS_ATTRIBUTE, {})[name] = what
    kind = type(owner)
    if name not in kind.__dict__.get(SHARDINGS_ATTRIBUTE, ()):
        owner.__class__ = _class_with_bands(
            _original_class(kind), (*kind.__dict__.get(SHARDINGS_ATTRIBUTE, ()), name)
        )


def cuts(model: nn.Module) -> list[tuple[nn.Module, dict[str, RowSharding]]]:
    """Return every cut in a model, by its owner."""
    owners = (module for module in model.modules() if SHARDINGS_ATTRIBUTE in module.__dict__)
    return [(owner, dict(owner.__dict__[SHARDINGS_ATTRIBUTE])) for owner in owners]


def set_row_shardings(
    model: nn.Module, wanted: list[tuple[nn.Module, dict[str, RowSharding]]]
) -> None:
    """Undo every cut in a model but these, which are restored."""
    for owner, _ in cuts(model):
        del owner.__dict__[SHARDINGS_ATTRIBUTE]
        owner.__class__ = _original_class(type(owner))
    for owner, of_owner in wanted:
        for name, what in of_owner.items():
            shard_rows(owner, name, what)


@contextmanager
def forbid_tensor_replacement(model: nn.Module) -> Iterator[None]:
    """Refuse a run that puts another tensor in the place of a cut one."""
    before = [
        (owner, name, what.path, _unsharded_tensor(owner, name))
        for owner, of_owner in cuts(model)
        for name, what in of_owner.items()
    ]
    yield
    for owner, name, path, tensor in before:
        if _unsharded_tensor(owner, name) is not tensor:
            raise UserError(
                f"{path}: is changed by the model, but each rank would change its own rows only. "
                "Change it outside of the model's forward."
            )


def _original_class(kind: type) -> type:
    return kind.__mro__[1] if SHARDINGS_ATTRIBUTE in kind.__dict__ else kind


def _class_with_bands(kind: type, names: tuple[str, ...]) -> type:
    """Make a subclass whose instances read these names as bands, as torch's parametrisations do."""
    settings = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        SHARDINGS_ATTRIBUTE: names,
    }
    readers = {name: _BandDescriptor(name) for name in names}
    members = {**settings, **readers, "__reduce_ex__": _reduce}
    return type(kind)(kind.__name__, (kind,), members)


def _reduce(owner: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Copy and pickle by the plain class, which can be found by its name."""
    kind = type(owner)
    state = owner.__getstate__()  # type: ignore[no-untyped-call]
    return _new_instance, (_original_class(kind), kind.__dict__[SHARDINGS_ATTRIBUTE]), state


def _new_instance(kind: type, names: tuple[str, ...]) -> Any:
    subclass = _class_with_bands(kind, names)
    return subclass.__new__(subclass)  # type: ignore[call-overload]


class _TensorLocation(NamedTuple):
    """Where a module of the user's holds a tensor, and its name in the model."""

    owner: nn.Module
    name: str
    path: str


class _Candidate(NamedTuple):
    """A tensor that may have rows: where it is held and which of its dimensions they may be."""

    locations: list[_TensorLocation]
    shape: tuple[int, ...]
    options: list[RowLayout]


@final
class RowTensorSharder:
    """Cuts what a refused plan shows to meet the rows of fields, for the plan to be made again.

    The next plan's audit proves a cut right. Where several dimensions have as many entries as the
    globe has rows, they are tried one after the other.
    """

    def __init__(self, model: nn.Module, manager: DomainParallelManager) -> None:
        self.model = model
        self.manager = manager
        self._candidates: dict[int, _Candidate] = {}
        self._option_index = 0
        self._initial = cuts(model)
        self._first_error: UserError | None = None

    def shard_more(self, refusal: UserError, wanted: dict[int, list[RowCandidate]]) -> bool:
        """Cut what a refused plan wants, else try other dimensions; False if nothing is left."""
        found = {key: c for key, c in self._find_candidates(wanted) if key not in self._candidates}
        self._candidates |= found
        if not found:
            self._first_error = self._first_error or refusal
            self._option_index += 1
            if all(len(c.options) <= self._option_index for c in self._candidates.values()):
                return False
        for candidate in self._candidates.values():
            rows = candidate.options[min(self._option_index, len(candidate.options) - 1)]
            for place in candidate.locations:
                shard_rows(place.owner, place.name, RowSharding(place.path, rows, self.manager))
        return True

    def revert(self, refusal: UserError) -> UserError:
        """Undo all cuts and return the refusal to raise."""
        set_row_shardings(self.model, self._initial)
        unclear = [c for c in self._candidates.values() if len(c.options) > 1]
        refusal = self._first_error or refusal
        if not unclear:
            return refusal
        text = str(refusal)
        for candidate in unclear:
            dims = " or ".join(str(rows.dim) for rows in candidate.options)
            text += (
                f" Rows of {candidate.locations[0].path} may be in dimension {dims} of "
                f"{candidate.shape}, and none is the right one."
            )
        return UserError(text)

    def _find_candidates(
        self, wanted: dict[int, list[RowCandidate]]
    ) -> Iterator[tuple[int, _Candidate]]:
        for key, tensor, places in _user_tensors(self.model):
            options = _possible_rows(tensor, wanted.get(key, []))
            if places and options:
                yield key, _Candidate(places, tuple(tensor.shape), options)


def _user_tensors(model: nn.Module) -> Iterator[tuple[int, Tensor, list[_TensorLocation]]]:
    """Yield every parameter and buffer with its places in modules of the user's."""
    holders = (nn.ParameterList, nn.ParameterDict)
    tensors: dict[int, Tensor] = {}
    places: dict[int, list[_TensorLocation]] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (is_user_module(module) or isinstance(module, holders)):
                tensors[id(tensor)] = tensor
                path = f"{prefix}.{name}" if prefix else name
                places.setdefault(id(tensor), []).append(_TensorLocation(module, name, path))
    for key, tensor in tensors.items():
        yield key, tensor, places[key]


def _possible_rows(tensor: Tensor, wanted: list[RowCandidate]) -> list[RowLayout]:
    """Return where a tensor may have the rows of a field, the likeliest place first."""
    dims = sorted(range(tensor.ndim), key=lambda dim: dim != tensor.ndim + ROW_DIM)
    options = (
        RowLayout(dim, 1, inner, height)
        for height, inner in wanted
        for dim in dims
        if tensor.shape[dim] == height * inner
    )
    return list(dict.fromkeys(options))
