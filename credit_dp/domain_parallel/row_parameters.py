"""Finding the parameters and buffers that have a row for each of the globe's, by planning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

from torch import Tensor, nn

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.operations import Rows
from credit_dp.domain_parallel.origins import Wanted
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.domain_parallel.row_tensors import Cut, cut, cut_only, cuts
from credit_dp.domain_parallel.running import is_own
from credit_dp.errors import UserError


class _Place(NamedTuple):
    """Where a module of the user's holds a tensor, and its name in the model."""

    owner: nn.Module
    name: str
    path: str


class _Candidate(NamedTuple):
    """A tensor that may have rows: where it is held and which of its dimensions they may be."""

    places: list[_Place]
    shape: tuple[int, ...]
    options: list[Rows]


@final
class RowParameters:
    """Cuts what a refused plan shows to meet the rows of fields, for the plan to be made again.

    The next plan's audit proves a cut right. Where several dimensions have as many entries as the
    globe has rows, they are tried one after the other.
    """

    def __init__(self, model: nn.Module, manager: DomainParallelManager) -> None:
        self.model = model
        self.manager = manager
        self._candidates: dict[int, _Candidate] = {}
        self._option = 0
        self._before = cuts(model)
        self._refusal: UserError | None = None

    def cut_more(self, refusal: UserError, wanted: dict[int, list[Wanted]]) -> bool:
        """Cut what a refused plan wants, else try other dimensions; False if nothing is left."""
        found = {key: c for key, c in self._found(wanted) if key not in self._candidates}
        self._candidates |= found
        if not found:
            self._refusal = self._refusal or refusal
            self._option += 1
            if all(len(c.options) <= self._option for c in self._candidates.values()):
                return False
        for candidate in self._candidates.values():
            rows = candidate.options[min(self._option, len(candidate.options) - 1)]
            for place in candidate.places:
                cut(place.owner, place.name, Cut(place.path, rows, self.manager))
        return True

    def give_up(self, refusal: UserError) -> UserError:
        """Undo all cuts and return the refusal to raise."""
        cut_only(self.model, self._before)
        unclear = [c for c in self._candidates.values() if len(c.options) > 1]
        refusal = self._refusal or refusal
        if not unclear:
            return refusal
        text = str(refusal)
        for candidate in unclear:
            dims = " or ".join(str(rows.dim) for rows in candidate.options)
            text += (
                f" Rows of {candidate.places[0].path} may be in dimension {dims} of "
                f"{candidate.shape}, and none is the right one."
            )
        return UserError(text)

    def _found(self, wanted: dict[int, list[Wanted]]) -> Iterator[tuple[int, _Candidate]]:
        for key, tensor, places in _held(self.model):
            options = _options(tensor, wanted.get(key, []))
            if places and options:
                yield key, _Candidate(places, tuple(tensor.shape), options)


def _held(model: nn.Module) -> Iterator[tuple[int, Tensor, list[_Place]]]:
    """Yield every parameter and buffer with its places in modules of the user's."""
    holders = (nn.ParameterList, nn.ParameterDict)
    tensors: dict[int, Tensor] = {}
    places: dict[int, list[_Place]] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (is_own(module) or isinstance(module, holders)):
                tensors[id(tensor)] = tensor
                path = f"{prefix}.{name}" if prefix else name
                places.setdefault(id(tensor), []).append(_Place(module, name, path))
    for key, tensor in tensors.items():
        yield key, tensor, places[key]


def _options(tensor: Tensor, wanted: list[Wanted]) -> list[Rows]:
    """Return where a tensor may have the rows of a field, the likeliest place first."""
    dims = sorted(range(tensor.ndim), key=lambda dim: dim != tensor.ndim + ROW_DIM)
    options = (
        Rows(dim, 1, inner, height)
        for height, inner in wanted
        for dim in dims
        if tensor.shape[dim] == height * inner
    )
    return list(dict.fromkeys(options))
