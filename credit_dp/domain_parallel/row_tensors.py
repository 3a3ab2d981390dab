"""Parameters and buffers with one row per latitude: the model's code sees this rank's rows of them.

Every rank keeps the complete tensor, so that `state_dict()`, optimizers and checkpoints are as for
the original model. Only the attribute of the module that holds the tensor reads differently:
`shard_rows` gives the module a subclass with a descriptor of that name, which returns a view of
this rank's rows while the model runs. Gradients flow through that into the complete tensor, and
are zero for the rows of other ranks.

Users don't declare these tensors, the plan finds them: it is refused where a complete tensor meets
a band, `RowTensorSharder` shards the tensors that were involved, and the plan starts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.functional import active_context, in_backward, is_user_module
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.planning.audit import RowLayout, narrow_to_band
from credit_dp.domain_parallel.planning.planner import RowCandidate
from credit_dp.errors import UserError
from credit_dp.torch_private import buffers_of, parameters_of

# A module holds its `RowSharding`s in this attribute, by the tensor's name; its subclass holds the
# names under the same one.
SHARDINGS_ATTRIBUTE = "_row_cuts"


class RowSharding(NamedTuple):
    """The position of the rows in one tensor.

    Attributes:
        path: the tensor's name in the model.
        rows: the dimension that holds the rows.
        manager: the manager whose bands are used.
    """

    path: str
    rows: RowLayout
    manager: DomainParallelManager


def shard_rows(owner: nn.Module, name: str, sharding: RowSharding) -> None:
    """Make the attribute `name` of `owner` read as this rank's rows while the model runs."""
    owner.__dict__.setdefault(SHARDINGS_ATTRIBUTE, {})[name] = sharding
    kind = type(owner)
    names = kind.__dict__.get(SHARDINGS_ATTRIBUTE, ())
    if name not in names:
        owner.__class__ = _class_with_bands(_original_class(kind), (*names, name))


def row_shardings(model: nn.Module) -> list[tuple[nn.Module, dict[str, RowSharding]]]:
    """Return all row shardings in a model, by the module that holds the tensor."""
    owners = (module for module in model.modules() if SHARDINGS_ATTRIBUTE in module.__dict__)
    return [(owner, dict(owner.__dict__[SHARDINGS_ATTRIBUTE])) for owner in owners]


def set_row_shardings(
    model: nn.Module, shardings: list[tuple[nn.Module, dict[str, RowSharding]]]
) -> None:
    """Give a model these row shardings and no others."""
    for owner, _ in row_shardings(model):
        del owner.__dict__[SHARDINGS_ATTRIBUTE]
        owner.__class__ = _original_class(type(owner))
    for owner, by_name in shardings:
        for name, sharding in by_name.items():
            shard_rows(owner, name, sharding)


@contextmanager
def forbid_tensor_replacement(model: nn.Module) -> Iterator[None]:
    """Raise an error if the model replaces a row-sharded tensor by another one.

    The new tensor would be a band under the name of a complete tensor, different on every rank.
    """
    before = [
        (owner, name, sharding.path, _unsharded_tensor(owner, name))
        for owner, by_name in row_shardings(model)
        for name, sharding in by_name.items()
    ]
    yield
    for owner, name, path, tensor in before:
        if _unsharded_tensor(owner, name) is not tensor:
            raise UserError(
                f"{path}: is changed by the model's forward, where each rank would change only its "
                "own rows. Change it outside of forward."
            )


@final
class _BandDescriptor:
    """Reads as this rank's rows of a tensor in a forward, and outside as the complete tensor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: nn.Module | None, kind: type) -> Any:
        if owner is None:
            return self
        tensor = _unsharded_tensor(owner, self.name)
        sharding: RowSharding | None = owner.__dict__.get(SHARDINGS_ATTRIBUTE, {}).get(self.name)
        planner = active_planner()
        if tensor is None or sharding is None:
            return tensor
        if planner is not None:
            return planner.band_of_parameter(tensor, sharding.rows, sharding.path)
        # A checkpointed function is recomputed in backward without the hooks that set the context.
        # Compiled code is a forward, too.
        is_compiling = torch.compiler.is_dynamo_compiling()
        if not is_compiling and active_context() is None and not in_backward():
            return tensor
        band = sharding.manager.rows(sharding.rows.height)
        return narrow_to_band(tensor, sharding.rows, band)


def _unsharded_tensor(owner: nn.Module, name: str) -> Tensor | None:
    tensors: dict[str, Any] = (
        parameters_of(owner) if name in parameters_of(owner) else buffers_of(owner)
    )
    return tensors.get(name)


def _original_class(kind: type) -> type:
    return kind.__mro__[1] if SHARDINGS_ATTRIBUTE in kind.__dict__ else kind


def _class_with_bands(kind: type, names: tuple[str, ...]) -> type:
    """Return a subclass whose instances read these names as bands.

    torch's parametrizations swap classes in the same way. `nn.Module` finds its tensors in
    `__getattr__`, which Python asks only after the class: the descriptor comes first.
    """
    settings = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        SHARDINGS_ATTRIBUTE: names,
    }
    descriptors = {name: _BandDescriptor(name) for name in names}
    members = {**settings, **descriptors, "__reduce_ex__": _reduce}
    return type(kind)(kind.__name__, (kind,), members)


def _reduce(owner: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Copy and pickle an instance by its original class, the only one that can be imported."""
    kind = type(owner)
    state = owner.__getstate__()  # type: ignore[no-untyped-call]
    return _new_instance, (_original_class(kind), kind.__dict__[SHARDINGS_ATTRIBUTE]), state


def _new_instance(kind: type, names: tuple[str, ...]) -> Any:
    subclass = _class_with_bands(kind, names)
    return subclass.__new__(subclass)  # type: ignore[call-overload]


class _TensorLocation(NamedTuple):
    """The attribute of a user's module that holds a tensor, and its name in the model."""

    owner: nn.Module
    name: str
    path: str


class _Candidate(NamedTuple):
    """A tensor that may have rows: the attributes that hold it and its possible row dimensions."""

    locations: list[_TensorLocation]
    shape: tuple[int, ...]
    options: list[RowLayout]
    is_index: bool


@final
class RowTensorSharder:
    """Shards the tensors that a refused plan shows to meet the rows of fields.

    Where several dimensions have as many entries as the globe has rows, they are tried one after
    the other: the audit of the next plan proves a sharding right or refuses it.

    Args:
        model: the converted model.
        manager: the manager whose bands are used.
    """

    def __init__(self, model: nn.Module, manager: DomainParallelManager) -> None:
        self.model = model
        self.manager = manager
        self._candidates: dict[int, _Candidate] = {}
        self._option_index = 0
        self._initial = row_shardings(model)
        self._first_error: UserError | None = None

    def shard_more(self, error: UserError, row_candidates: dict[int, list[RowCandidate]]) -> bool:
        """Shard more tensors, or the same ones in other dimensions; return False if there are none.

        Args:
            error: why the plan was refused.
            row_candidates: by the identity of a tensor, the rows that it may have.
        """
        new = {
            key: candidate
            for key, candidate in self._find_candidates(row_candidates)
            if key not in self._candidates
        }
        self._candidates |= new
        if not new:
            # The error of the likeliest dimensions is the one to report if no others work.
            self._first_error = self._first_error or error
            self._option_index += 1
            if all(len(c.options) <= self._option_index for c in self._candidates.values()):
                return False
        for candidate in self._candidates.values():
            rows = candidate.options[min(self._option_index, len(candidate.options) - 1)]
            for location in candidate.locations:
                sharding = RowSharding(location.path, rows, self.manager)
                shard_rows(location.owner, location.name, sharding)
        return True

    def revert(self, error: UserError) -> UserError:
        """Restore the initial shardings and return the error to raise."""
        set_row_shardings(self.model, self._initial)
        # Indices, as of relative positions in a window, are as large as the rows by chance.
        ambiguous = [c for c in self._candidates.values() if len(c.options) > 1 and not c.is_index]
        error = self._first_error or error
        if not ambiguous:
            return error
        text = str(error)
        for candidate in ambiguous:
            dims = " or ".join(str(rows.dim) for rows in candidate.options)
            text += (
                f" Rows of {candidate.locations[0].path} may be in dimension {dims} of "
                f"{candidate.shape}, but the plan fails with each of them."
            )
        return UserError(text)

    def _find_candidates(
        self, row_candidates: dict[int, list[RowCandidate]]
    ) -> Iterator[tuple[int, _Candidate]]:
        for key, tensor, locations in _user_tensors(self.model):
            options = _possible_rows(tensor, row_candidates.get(key, []))
            if locations and options:
                is_index = tensor.dtype == torch.long
                yield key, _Candidate(locations, tuple(tensor.shape), options, is_index)


def _user_tensors(model: nn.Module) -> Iterator[tuple[int, Tensor, list[_TensorLocation]]]:
    """Yield every parameter and buffer in modules of the user's, with the attributes that hold it.

    A tensor that several modules share is one tensor with several locations.
    """
    containers = (nn.ParameterList, nn.ParameterDict)
    tensors: dict[int, Tensor] = {}
    locations: dict[int, list[_TensorLocation]] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            if tensor is not None and (is_user_module(module) or isinstance(module, containers)):
                tensors[id(tensor)] = tensor
                path = f"{prefix}.{name}" if prefix else name
                locations.setdefault(id(tensor), []).append(_TensorLocation(module, name, path))
    for key, tensor in tensors.items():
        yield key, tensor, locations[key]


def _possible_rows(tensor: Tensor, row_candidates: list[RowCandidate]) -> list[RowLayout]:
    """Return the dimensions in which a tensor may have a field's rows, the likeliest first."""
    dims = sorted(range(tensor.ndim), key=lambda dim: dim != tensor.ndim + ROW_DIM)
    options = (
        RowLayout(dim, 1, inner, height)
        for height, inner in row_candidates
        for dim in dims
        if tensor.shape[dim] == height * inner
    )
    return list(dict.fromkeys(options))
