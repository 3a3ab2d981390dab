"""What every domain-parallel layer is: a wrapper that keeps names and knows its bands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from credit_dp.domain_parallel.exchange import RowExchange, RowRange, rows_with_poles
from credit_dp.domain_parallel.halo_exchange import HaloExchange
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.planning.planner import active_planner
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.shared_exchange import SharedExchange


# Modules of one's own are made from these; what they do is their own.
CONTAINER_TYPES = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What a subclass may say anew without acting otherwise, and the special methods that do act.
HARMLESS_OVERRIDES = ("extra_repr", "reset_parameters")
BEHAVIOURAL_METHODS = ("__call__", "__getattr__", "__getattribute__", "__setattr__")


def torch_layer_type(kind: type) -> type[nn.Module] | None:
    """Return the nearest layer of torch that a type is or is made from."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.modules.") and base.__name__[0] != "_":
            return None if base in CONTAINER_TYPES else base
    return None


def overridden_method(module: nn.Module) -> str | None:
    """Return what of the nearest layer of torch a module replaces, as `forward`, if anything."""
    kind = type(module)
    layer = torch_layer_type(kind)
    if "forward" in module.__dict__:
        return "forward"
    if layer is None or layer is kind:
        return None
    known = {*dir(layer), *module.__dict__, *module._parameters, *module._buffers}
    before = kind.__mro__[: kind.__mro__.index(layer)]
    own = [
        name for base in before for name in vars(base) if name in known and _changes_behaviour(name)
    ]
    return min(own, key="forward".__ne__, default=None)


def _changes_behaviour(name: str) -> bool:
    special = name.startswith("__") and name.endswith("__")
    return name in BEHAVIOURAL_METHODS if special else name not in HARMLESS_OVERRIDES


# Shared with the wrapped module by identity: conversion then keeps the names in state_dict() and
# named_parameters(), and assignment, casting, copying and hooks reach both.
SHARED_ATTRIBUTES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Bands(NamedTuple):
    """A layer's input and output partitions for one global height."""

    input: RowPartition
    output: RowPartition


class _WrappedTypeMixin:
    """In the plan's run of the whole globe `isinstance` sees a wrapped layer, else its wrapper.

    Code that decides by the type of a layer then differs between the runs, and is refused.
    """

    @property
    def __class__(self) -> Any:
        planner = active_planner()
        if planner is None or not planner.is_global_run:
            return type(self)
        return type(self.__dict__.get("wrapped", self))

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)


class RowLayer(_WrappedTypeMixin, nn.Module, ABC):
    """A layer whose output rows depend on rows of other bands.

    `output_is_banded`: whether the output is cut into bands too; else it is the same on every
    rank, and has the input's rows nowhere.

    Args:
        wrapped: the layer to shard; it keeps its parameters.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
        halo_width: rows that a band's edge reaches over, for the record.
        ndim: dimensions of the input.
    """

    output_is_banded: ClassVar[bool] = True

    def __init__(
        self,
        wrapped: nn.Module,
        shard_dim: int,
        manager: DomainParallelManager | None,
        *,
        halo_width: int = 0,
        ndim: int = 4,
    ) -> None:
        super().__init__()
        self._check_is_torch(wrapped)
        for name in SHARED_ATTRIBUTES:
            self.__dict__[name] = wrapped.__dict__[name]
        self._is_full_backward_hook = wrapped._is_full_backward_hook
        self.training = wrapped.training
        self.shard_dim = shard_dim
        # Where rows are, counted from the end, until the plan finds them elsewhere.
        self.dim = shard_dim if shard_dim < 0 else shard_dim - ndim
        self._check_dim()
        # Neither may become a child: the names of parameters would change.
        self.__dict__["wrapped"] = wrapped
        self.__dict__["halo_exchange"] = HaloExchange(halo_width, self.dim, manager=manager)
        self._planned_heights: dict[int, int] = {}
        self._is_rowwise = False
        self._exchanges: dict[Bands, RowExchange] = {}

    def _check_is_torch(self, wrapped: nn.Module) -> None:
        """Refuse a layer that does otherwise than the one of torch that it is made from."""
        own, kind = overridden_method(wrapped), type(wrapped).__name__
        if own:
            raise UserError(
                f"{kind} has a {own} of its own, which {type(self).__name__} would leave out. "
                f"Name {kind} in custom_converters, or build it from a plain layer of torch."
            )

    def _check_dim(self) -> None:
        """Refuse rows where no field has them."""
        if self.dim != ROW_DIM:
            raise UserError(
                f"{type(self).__name__}: only latitude rows, the last dimension but one, can be "
                f"sharded, got shard_dim={self.shard_dim}. Use shard_dim=-2."
            )

    @property
    def title(self) -> str:
        """What a table of layers says of this one."""
        return type(self).__name__

    @property
    def manager(self) -> DomainParallelManager:
        """The manager given, or the module-level one."""
        exchange: HaloExchange = self.__dict__["halo_exchange"]
        return exchange.manager

    def adopt_manager(self, manager: DomainParallelManager) -> None:
        """Use this manager unless one was given."""
        halo: HaloExchange = self.__dict__["halo_exchange"]
        halo.adopt_manager(manager)

    def train(self, mode: bool = True) -> RowLayer:
        """Set the mode of this layer and of the one it wraps."""
        self.__dict__["wrapped"].train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        """Describe the layer as the wrapped one does."""
        return str(self.__dict__["wrapped"].extra_repr())

    def set_plan(self, dim: int, planned: dict[int, int]) -> None:
        """Adopt where the plan found rows, and the global heights: taken -> made."""
        self.dim, self._planned_heights, self._is_rowwise = dim, planned, False
        halo: HaloExchange = self.__dict__["halo_exchange"]
        halo.dim = dim
        self._exchanges = {}

    @property
    def is_planned(self) -> bool:
        """Whether a plan has called this layer."""
        return bool(self._planned_heights) or self._is_rowwise

    def forget_exchanges(self) -> None:
        """Make exchanges anew, because the manager has become another rank."""
        self._exchanges = {}

    def set_rowwise(self) -> None:
        """Do from now on what the wrapped layer does: no rows meet where it is used."""
        self._is_rowwise = True

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether rows in the negative dimension `dim` of `ndim` meet in this layer.

        Raises:
            UserError: they do, and this layer can't be exact there.
        """
        if dim != self.dim:
            raise UserError(
                f"{type(self).__name__}: rows are in dimension {dim}, it needs them in {self.dim}. "
                "Move them there before this layer."
            )
        return True

    def global_forward(self, x: Tensor, *others: Tensor) -> Any:
        """Return what the layer makes of the whole globe, or of a tensor where no rows meet."""
        return self.__dict__["wrapped"].forward(x, *others)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        """Return this rank's rows of what the wrapped layer makes of the whole globe."""
        planner = active_planner()
        if planner is not None:
            return planner.call_layer(self, x, *others)
        if self._is_rowwise:
            return self.global_forward(x, *others)
        return self.compute(x, self.bands(x, *others))

    def bands(self, x: Tensor, *others: Tensor) -> Bands:
        """Return the partitions of this input: from the plan, else gathered from all ranks."""
        rows = x.shape[self.dim]
        table, rank = self.manager.bands, self.manager.domain_rank
        if self._planned_heights:
            for height, out_height in self._planned_heights.items():
                if table[height].sizes[rank] == rows:
                    return Bands(table[height], table[out_height])
            expected = {h: table[h].sizes[rank] for h in self._planned_heights}
            raise UserError(
                f"{type(self).__name__}: rank {rank} got {rows} rows, the plan has "
                f"{expected} (globe: band). Convert with the input_shape that is used."
            )
        taken = table.register(self.manager.gather_partition(rows))
        if not self.output_is_banded:
            return Bands(taken, taken)
        made = table.aligned_partition(self.out_height(taken.height, *others), taken)
        if min(taken.sizes + made.sizes) < 1:
            raise UserError(
                f"{type(self).__name__}: every rank needs a row, the bands are {taken.sizes} going "
                f"in and {made.sizes} coming out. Lower parallel.domain or cut with shard_tensor."
            )
        return Bands(taken, made)

    def exchange(self, bands: Bands) -> RowExchange:
        """Return what every rank needs of the input, for the output that the bands say."""
        exchange = self._exchanges.get(bands)
        if exchange is None:
            needs = tuple(
                self.required_rows(bands.output.rows(r), bands.input.height)
                for r in range(bands.output.ranks)
            )
            exchange = RowExchange(bands.input, needs, self.manager.domain_rank)
            self._exchanges[bands] = exchange
        return exchange

    def row_multiple(self, height: int) -> int:
        """Return of how many rows a band should be a multiple for less to be sent."""
        return 1

    def fetch(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the input rows that this rank's output rows need, poles included."""
        halo: HaloExchange = self.__dict__["halo_exchange"]
        return halo.fetch(x, self.exchange(bands))

    @abstractmethod
    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global rows that come out of `height` global rows."""

    @abstractmethod
    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the input rows that the output rows `out` are made of."""

    @abstractmethod
    def compute(self, x: Tensor, bands: Bands) -> Any:
        """Return this rank's output rows: a tensor, or several."""

    def __setattr__(self, name: str, value: Any) -> None:
        # What hooks like the old spectral_norm set before a forward, the wrapped layer computes
        # with; it is read back from there.
        wrapped = self.__dict__.get("wrapped")
        if isinstance(value, Tensor) and wrapped is not None and name in wrapped.__dict__:
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # What the wrapped layer has (kernel_size, num_groups, eps, ...) is read from it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how Python copies and compares is the wrapper's own
                raise
            return getattr(self.__dict__["wrapped"], name)


class StencilLayer(RowLayer):
    """A layer that needs an interval of rows; beyond the poles it sees what `pole_mode` says."""

    pole_mode: str = "zeros"
    # With layers that read the same tensor; the plan finds them.
    shared_exchange: SharedExchange | None = None

    @property
    def planned_heights(self) -> Mapping[int, int]:
        """Global rows that the plan has seen going in, and what comes out of them."""
        return self._planned_heights

    def fetches_halo(self, height: int) -> bool:
        """Return whether rows of this planned height are fetched as windows."""
        return True

    def planned_bands(self, height: int) -> Bands:
        """Return the partitions of a planned height."""
        table = self.manager.bands
        return Bands(table[height], table[self._planned_heights[height]])

    def fetch(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the rows of the windows, poles included."""
        shared = self.shared_exchange
        rows = None if shared is None else shared.fetch(self, x)
        return super().fetch(x, bands) if rows is None else rows

    @abstractmethod
    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the first row that the output rows `out` need and the row after the last.

        Rows below 0 and from `height` on lie beyond a pole.
        """

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of the windows, poles included."""
        return rows_with_poles(*self.input_span(out, height), height, self.pole_mode)

    def halo(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of the windows beyond those of the same numbers, north ones first."""
        first, stop = self.input_span(out, height)
        north = rows_with_poles(first, out.start, height, self.pole_mode)
        return (*north, *rows_with_poles(out.stop, stop, height, self.pole_mode))


class ConstantFillLayer(StencilLayer):
    """A window layer that fetches the globe's rows only and fills in those beyond the poles."""

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of the windows that the globe has, maybe none."""
        first, stop = self.input_span(out, height)
        run = RowRange(max(first, 0), min(stop, height))
        return (run,) if run.length > 0 else ()

    def fetch_with_fill(self, x: Tensor, bands: Bands, value: float) -> Tensor:
        """Return the rows of the windows, with `value` in those beyond the poles."""
        height = bands.input.height
        first, stop = self.input_span(bands.output.rows(self.manager.domain_rank), height)
        north, south = max(0, min(stop, 0) - first), max(0, stop - max(first, height))
        rows = self.fetch(x, bands)
        if not north and not south:
            return rows
        return F.pad(rows, (*[0, 0] * (-self.dim - 1), north, south), value=value)
