"""The base classes of all domain-parallel layers.

A layer is a wrapper around the module that it shards: it keeps the names of that module's
parameters and computes this rank's band of the output. `RowLayer.forward` looks up the partitions
of its input and output (`bands`) and calls `compute`, which fetches the rows that `required_rows`
names (`fetch`) and applies the operation to them. Convolutions with equal halos fetch only the rows
that `StencilLayer.halo` names, with `start_fetching`. While a model is being planned, the planner
answers the call instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.bands.rows import fill_beyond_poles, rows_on_globe
from credit_dp.domain_parallel.exchange import RowExchange, RowRange, rows_with_poles
from credit_dp.domain_parallel.halo_exchange import HaloExchange, fetch_rows
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import ROW_DIM, RowPartition
from credit_dp.domain_parallel.planned_run import GlobeTensor, active_planner
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    CALL_ATTRIBUTE,
    MODULE_TABLES,
    FakeTensor,
    buffers_of,
    constant_when_compiled,
    parameters_of,
    run_uncompiled,
    share_kind_of_backward_hooks,
)

# Entries of the largest band up to which layers do what takes least time for small bands. On CPUs,
# a convolution that fetches its rows first and one that convolves while they travel take as long at
# two to four times as many, for 8 to 256 channels and kernels of 3 x 3.
SMALL_BAND_ENTRIES = 2**16
# Users derive their own modules from these, so the type says nothing about what they compute.
CONTAINER_TYPES = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Methods that a subclass may override without computing anything else, and the special methods
# that do change the result.
HARMLESS_OVERRIDES = ("extra_repr", "reset_parameters")
BEHAVIOURAL_METHODS = ("__call__", "__getattr__", "__getattribute__", "__setattr__")


def largest_band_entries(x: Tensor, dim: int, bands: RowPartition) -> int:
    """Return the entries of the largest rank's `x`, the same on all ranks.

    What depends on it differs on no rank. So ranks save the same number of tensors for backward:
    see `_HaloExchangeFunction`.
    """
    return x.numel() // max(1, x.shape[dim]) * max(bands.sizes)


def computes_on_cpu(x: Tensor) -> bool:
    """Return whether a CPU computes; not in a dry run, which counts the kernels of a GPU."""
    return x.is_cpu and not isinstance(x, FakeTensor)


def torch_layer_type(module_type: type) -> type[nn.Module] | None:
    """Return the nearest torch layer that a type is or derives from, None for containers."""
    for base in module_type.__mro__:
        if base.__module__.startswith("torch.nn.modules.") and base.__name__[0] != "_":
            return None if base in CONTAINER_TYPES else base
    return None


def overridden_method(module: nn.Module) -> str | None:
    """Return a method of the nearest torch layer that a module overrides, `forward` first."""
    module_type = type(module)
    layer = torch_layer_type(module_type)
    for name in vars(module):  # of the object itself, as a patch puts it there
        if name != CALL_ATTRIBUTE and callable(getattr(module_type, name, None)):
            return name
    if layer is None or layer is module_type:
        return None
    known = {*dir(layer), *module.__dict__, *parameters_of(module), *buffers_of(module)}
    subclasses = module_type.__mro__[: module_type.__mro__.index(layer)]
    overrides = [
        name
        for base in subclasses
        for name in vars(base)
        if name in known and _changes_behaviour(name)
    ]
    return min(overrides, key="forward".__ne__, default=None)


def _changes_behaviour(name: str) -> bool:
    special = name.startswith("__") and name.endswith("__")
    return name in BEHAVIOURAL_METHODS if special else name not in HARMLESS_OVERRIDES


# A layer shares these dictionaries with the wrapped module: the same objects, not copies. If the
# wrapped module were a child instead, every parameter would be called `wrapped.weight`, and neither
# checkpoints nor weight-decay groups, which go by name, would survive a conversion. As it is, both
# modules always see the same entries. `load_state_dict(assign=True)`, `.double()` and FSDP2's
# `fully_shard` put new tensors into `_parameters` of the module that they walk to, the wrapper, and
# the wrapped module computes with them. `copy.deepcopy` copies each dictionary once, so that the
# copies of both modules share theirs, too. Hooks that were registered before conversion still run.


class Bands(NamedTuple):
    """Input and output partitions of a layer at one global height."""

    input: RowPartition
    output: RowPartition


# Numbers of plans in this process, as texts: torch's compiler takes an integer that differs between
# layers for a variable.
_plan_numbers = map(str, count())


class RowLayer(nn.Module, ABC):
    """A layer whose output rows depend on rows of other bands.

    `output_is_banded`: whether the output is cut into bands, too. If not, it is the same on every
    rank and has no dimension of rows.

    Args:
        wrapped: the layer to shard; it keeps its parameters.
        shard_dim: the row dimension of the input.
        manager: by default `get_domain_parallel_manager()`, looked up at the first forward.
        halo_width: rows that the layer reads beyond each edge of a band. `halo_exchange` shows it;
            the plan and `fetch` don't use it.
        ndim: number of dimensions of the input.
    """

    output_is_banded: ClassVar[bool] = True
    # Whether the model's own code lets backward compute the layer again; set by the plan.
    is_recomputed: bool = False

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
        self._refuse_overridden_behaviour(wrapped)
        for name in MODULE_TABLES:
            self.__dict__[name] = wrapped.__dict__[name]
        share_kind_of_backward_hooks(self, wrapped)
        self.training = wrapped.training
        self.shard_dim = shard_dim
        # The row dimension, counted from the end; the plan may replace it.
        self.dim = shard_dim if shard_dim < 0 else shard_dim - ndim
        self._check_dim()
        # Written past `nn.Module.__setattr__`, which would register both as children and so change
        # the names of the parameters.
        self.__dict__["wrapped"] = wrapped
        self.__dict__["halo_exchange"] = HaloExchange(halo_width, self.dim, manager=manager)
        self._planned_heights: dict[int, int] = {}
        self._is_rowwise = False
        self._exchanges: dict[Bands, RowExchange] = {}
        # What compiled code reads in place of `_exchanges`: by global input height, as torch's
        # compiler can't look up bands. `_plan_number` tells it that the plan has changed.
        self._compiled_bands: dict[int, Bands] = {}
        self._compiled_exchanges: dict[int, RowExchange] = {}
        self._plan_number = next(_plan_numbers)

    def _refuse_overridden_behaviour(self, wrapped: nn.Module) -> None:
        override = overridden_method(wrapped)
        type_name = type(wrapped).__name__
        if override:
            raise UserError(
                f"{type_name} overrides {override}, which {type(self).__name__} would ignore. "
                f"Build {type_name} from a plain torch layer, or convert it by a rule of its own."
            )

    def _check_dim(self) -> None:
        if self.dim != ROW_DIM:
            raise UserError(
                f"{type(self).__name__}: only latitude rows, the last dimension but one, can be "
                f"sharded, got shard_dim={self.shard_dim}. Use shard_dim=-2."
            )

    @property
    def title(self) -> str:
        """The name of this layer in tables."""
        return type(self).__name__

    @property
    def manager(self) -> DomainParallelManager:
        """The manager of this layer, or the module-level one."""
        exchange: HaloExchange = self.__dict__["halo_exchange"]
        return exchange.manager

    def adopt_manager(self, manager: DomainParallelManager) -> None:
        """Use `manager` unless one was passed to the constructor."""
        halo: HaloExchange = self.__dict__["halo_exchange"]
        halo.adopt_manager(manager)

    def train(self, mode: bool = True) -> RowLayer:
        """Set the mode of this layer and of the wrapped one."""
        self.__dict__["wrapped"].train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        """Return the description of the wrapped layer."""
        return str(self.__dict__["wrapped"].extra_repr())

    def set_plan(self, dim: int, heights: dict[int, int]) -> None:
        """Adopt the plan: the row dimension, and the global output height of each input height."""
        self.dim = dim
        self._planned_heights = heights
        self._is_rowwise = False
        halo: HaloExchange = self.__dict__["halo_exchange"]
        halo.dim = dim
        self.forget_exchanges()

    @property
    def is_planned(self) -> bool:
        """Whether a plan has called this layer."""
        return bool(self._planned_heights) or self._is_rowwise

    @property
    def wrapped_is_exact(self) -> bool:
        """Whether the wrapped layer, called with a band, returns the rows that this layer returns.

        It has to do so at the planned heights, or at any height until there is a plan.
        """
        return False

    def forget_exchanges(self) -> None:
        """Drop cached exchanges after the manager was re-assigned to another rank (dry runs)."""
        self._exchanges = {}
        self._plan_number = next(_plan_numbers)

    def set_rowwise(self) -> None:
        """From now on call the wrapped layer: it couples no rows where the model uses it."""
        self._is_rowwise = True

    def couples_rows(self, dim: int, ndim: int) -> bool:
        """Return whether an output row depends on several input rows.

        Raises:
            UserError: the layer couples rows in `dim`, but supports them elsewhere only.
        """
        if dim != self.dim:
            raise UserError(
                f"{type(self).__name__}: rows are in dimension {dim}, it needs them in {self.dim}. "
                "Move them there before this layer."
            )
        return True

    def global_forward(self, x: Tensor, *others: Tensor) -> Any:
        """Apply the wrapped layer to the whole globe, or to a band if it couples no rows.

        Override it if `compute` returns another form than the wrapped layer.
        """
        return self.__dict__["wrapped"].forward(x, *others)

    if torch.__version__ < "2.12":
        # This torch compiles gradients of an autograd.Function to zeros if its forward returns what
        # it has written in place, as normalisations do: layers run uncompiled.
        @run_uncompiled
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Call the layer."""
            return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        """Return this rank's rows of the output that the wrapped layer has on the whole globe."""
        planner = active_planner()
        if planner is not None:
            return planner.call_layer(self, x, *others)
        if self._is_rowwise or isinstance(x, GlobeTensor):  # whose operators know what rows are
            return self.global_forward(x, *others)
        return self.compute(x, self.bands(x, *others))

    def bands(self, x: Tensor, *others: Tensor) -> Bands:
        """Return the partitions of input and output.

        With a plan nothing is sent: this rank's number of rows identifies the global height.
        Without one, all ranks gather their numbers of rows, a collective.
        """
        rows = x.shape[self.dim]
        if torch.compiler.is_dynamo_compiling():
            self.prepare_compilation(self._plan_number)
            compiled = self._compiled_bands.get(rows)
            if compiled is not None:
                return compiled
        table = self.manager.bands
        rank = self.manager.domain_rank
        if self._planned_heights:
            for height, out_height in self._planned_heights.items():
                if table[height].sizes[rank] == rows:
                    return Bands(table[height], table[out_height])
            expected = {h: table[h].sizes[rank] for h in self._planned_heights}
            if rows in expected:
                raise UserError(
                    f"{type(self).__name__}: rank {rank} got {rows} rows, as many as the globe "
                    f"has, and needs its band of {expected[rows]}. Shard the input; if a model "
                    "that is not converted shares this layer, convert a copy.deepcopy of the other."
                )
            raise UserError(
                f"{type(self).__name__}: rank {rank} got {rows} rows, the plan has "
                f"{expected} (global height: band). Convert with the input_shape of this call."
            )
        input_partition = table.register(self.manager.gather_partition(rows))
        if not self.output_is_banded:
            return Bands(input_partition, input_partition)
        output_partition = table.aligned_partition(
            self.out_height(input_partition.height, *others), input_partition
        )
        if min(input_partition.sizes + output_partition.sizes) < 1:
            raise UserError(
                f"{type(self).__name__}: every rank needs a row, but the bands have "
                f"{input_partition.sizes} rows in the input and {output_partition.sizes} in the "
                "output. Lower parallel.domain or shard the input with shard_tensor."
            )
        return Bands(input_partition, output_partition)

    @constant_when_compiled
    def prepare_compilation(self, plan_number: str) -> None:
        """Collect what compiled code needs of the plan, for all planned heights.

        torch's compiler calls this before it looks at any of it. It compiles again if `plan_number`
        has changed.
        """
        table = self.manager.bands
        rank = self.manager.domain_rank
        self._compiled_bands = {}
        for height, out_height in self._planned_heights.items():
            bands = Bands(table[height], table[out_height])
            self._compiled_bands.setdefault(bands.input.sizes[rank], bands)
            self.prepare_height(bands)

    def prepare_height(self, bands: Bands) -> None:
        """Collect what compiled code needs of the plan at one height."""
        self._compiled_exchanges[bands.input.height] = self.exchange(bands)

    def exchange(self, bands: Bands) -> RowExchange:
        """Return the exchange that gives every rank the input rows of its output band."""
        if torch.compiler.is_dynamo_compiling():
            return self._compiled_exchanges[bands.input.height]
        exchange = self._exchanges.get(bands)
        if exchange is None:
            # Every rank computes the requirements of all ranks, and so knows without a message what
            # to send to whom.
            required_rows = tuple(
                self.required_rows(bands.output.rows(r), bands.input.height)
                for r in range(bands.output.ranks)
            )
            exchange = RowExchange(bands.input, required_rows, self.manager.domain_rank)
            self._exchanges[bands] = exchange
        return exchange

    def row_multiple(self, height: int) -> int:
        """Return the number of rows whose multiples make bands that send least."""
        return 1

    def fetch(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the input rows of this rank's output rows, with padding beyond the poles."""
        return fetch_rows(x, self.exchange(bands), self.manager.transport, self.dim)

    @abstractmethod
    def out_height(self, height: int, *others: Tensor) -> int:
        """Return the global height of the output, given that of the input."""

    @abstractmethod
    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the global input rows that the global output rows `out` depend on."""

    @abstractmethod
    def compute(self, x: Tensor, bands: Bands) -> Any:
        """Return this rank's output rows: one tensor or several."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Hooks such as those of the old spectral_norm set a plain tensor (`weight`) on the module
        # that they run on, the wrapper, before each forward. The wrapped layer computes with it, so
        # it is stored there; __getattr__ reads it back.
        wrapped = self.__dict__.get("wrapped")
        if isinstance(value, Tensor) and wrapped is not None and name in wrapped.__dict__:
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Settings (kernel_size, num_groups, eps, ...) are read from the wrapped layer: first, as
        # the error of a module that has no such parameter takes far longer than the look-up.
        settings = getattr(self.__dict__.get("wrapped"), "__dict__", {})
        if name in settings:
            return settings[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # copying and comparing must not use the wrapped layer
                raise
            return getattr(self.__dict__["wrapped"], name)


class SharedRows(Protocol):
    """What layers that read the same tensor ask of their `shared_exchange.SharedExchange`."""

    def fetch(self, layer: StencilLayer, x: Tensor) -> Tensor | None:
        """Return the rows that one of the readers needs; None if it has to fetch them itself."""

    def prepare_height(self, height: int) -> None:
        """Collect what compiled code needs of the plan at one height."""


class StencilLayer(RowLayer):
    """A layer whose output row depends on an interval of input rows: a stencil.

    `pole_mode` is the padding beyond the poles, one of `exchange.POLE_MODES`.
    """

    pole_mode: str = "zeros"
    # One exchange for all layers that read the same tensor; set by the plan.
    shared_exchange: SharedRows | None = None

    @property
    def planned_heights(self) -> Mapping[int, int]:
        """The global output height of each global input height in the plan."""
        return self._planned_heights

    def fetches_halo(self, height: int) -> bool:
        """Return whether inputs of this planned height are computed by fetching a halo."""
        return True

    def planned_bands(self, height: int) -> Bands:
        """Return the partitions at a planned input height."""
        table = self.manager.bands
        return Bands(table[height], table[self._planned_heights[height]])

    def prepare_height(self, bands: Bands) -> None:
        """Collect what compiled code needs of the plan at one height."""
        super().prepare_height(bands)
        if self.shared_exchange is not None:
            self.shared_exchange.prepare_height(bands.input.height)

    def fetch(self, x: Tensor, bands: Bands) -> Tensor:
        """Return the rows of the stencil, with padding beyond the poles."""
        shared = self.shared_exchange
        rows = None if shared is None else shared.fetch(self, x)
        return super().fetch(x, bands) if rows is None else rows

    @abstractmethod
    def input_span(self, out: slice, height: int) -> tuple[int, int]:
        """Return the input rows that the output rows `out` depend on, as `(start, stop)`.

        Rows below 0 and from `height` on lie beyond a pole.
        """

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of the stencil, with padding beyond the poles."""
        return self.rows_between(*self.input_span(out, height), out, height)

    def halo(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of the stencil outside the rows `out` themselves, northern ones first."""
        first, stop = self.input_span(out, height)
        north = self.rows_between(first, out.start, out, height)
        return (*north, *self.rows_between(out.stop, stop, out, height))

    def rows_between(self, start: int, stop: int, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return those of the rows `start` to `stop - 1` that the output rows `out` depend on.

        Zeros stand for the others, and the padding mode's rows for those beyond the poles.
        """
        return rows_with_poles(start, stop, height, self.pole_mode)


class ConstantFillLayer(StencilLayer):
    """A stencil that fetches only rows of the globe and fills those beyond the poles."""

    def required_rows(self, out: slice, height: int) -> tuple[RowRange, ...]:
        """Return the rows of the stencil that lie on the globe, maybe none."""
        return rows_on_globe(*self.input_span(out, height), height)

    def fetch_with_fill(self, x: Tensor, bands: Bands, value: float) -> Tensor:
        """Return the rows of the stencil, with `value` in those beyond the poles."""
        height = bands.input.height
        span = self.input_span(bands.output.rows(self.manager.domain_rank), height)
        return fill_beyond_poles(self.fetch(x, bands), self.dim, *span, height, value)
