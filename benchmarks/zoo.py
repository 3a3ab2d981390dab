"""Compare other packages' models with one process: speed, memory, traffic, planning.

`python benchmarks/zoo.py [NAME ...] [--rounds N]` prints a table of all or the named models;
`python benchmarks/bench.py --only zoo` writes it into docs/model-zoo.md. It needs the extra `zoo`.
It shows:

- for the models of `HOT`, the speed of two ranks of one thread in a forward and backward, over one
  process of two threads: best and median. It is left out with `--rounds 0`, as on a machine that
  does other work; everything else is counted on fake tensors.
- the part of the activations of one process that a rank saves for backward, on 2 and 4 ranks.
- the bytes and the messages (with sums) that a rank sends in a forward and backward, and all bytes
  relative to the least for these bands.
- the seconds of its processor in which a rank plans, on 4 ranks, and the functions that run whole,
  which the table leaves out.

The least (`LeastTraffic`) is found without the rules, from the definition of each operator that the
model calls, the shapes, and where the rows of its arguments and results are:

- A convolution, pool or interpolation needs the rows under its kernel. Each row that another rank
  owns is sent once, even if several functions read it.
- Views, rolls, slices and concatenation move entries to the rank that holds them in the result.
- Of attention over rows each rank computes some heads or samples, for which their queries, keys and
  values are sent and results returned, or the queries of its rows, for which keys and values are
  sent to all other ranks. With few heads the ranks of a group share one.
- Norms, sums and means send their statistics.

Gradients return the same bytes, if the tensor has one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor
from pathlib import Path
from typing import Any

import torch
from pinned import RANKS as PINNED
from pinned import Contestants, Mesh, team
from side_by_side import Entry, Ratio, ratio, times
from table import model_table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from credit_dp.domain_parallel import DomainParallelManager, convert_to_domain_parallel
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.band_tensor.rules import short_name
from credit_dp.domain_parallel.band_tensor.tensor import BandTensor, is_band
from credit_dp.domain_parallel.count_transport import CountingTransport
from credit_dp.domain_parallel.decide import plan_report
from credit_dp.domain_parallel.dry_run import dry_run
from credit_dp.domain_parallel.partition import ROW_DIM
from credit_dp.torch_private import backward_pass

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import tests.zoo.packages  # noqa: E402, F401  # prepares the import of torchvision

RANKS = (2, 4)


# ---------------------------------------------------------------- the least traffic

MOVES = frozenset(
    [
        "view", "_unsafe_view", "permute", "transpose", "t", "roll", "flip", "constant_pad_nd",
        "slice", "select", "unbind", "split", "split_with_sizes", "cat", "stack",
        "repeat", "index_select", "pixel_shuffle", "pixel_unshuffle", "unfold", "squeeze",
        "unsqueeze", "expand", "clone", "alias", "reflection_pad1d", "reflection_pad2d",
        "replication_pad1d", "replication_pad2d",
    ]
)  # fmt: skip
REDUCTIONS = frozenset(["mean", "sum", "amax", "amin", "max", "min", "std", "var", "prod"])
PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm"])
NORMS = frozenset(["native_batch_norm", "native_group_norm", "native_layer_norm"])
POOLS = frozenset(["max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d"])
STENCILS = ("upsample_", "_upsample_", "_adaptive_avg_pool", "adaptive_max_pool")
Grid = tuple[int, int]
# The rows of the input that a row of the output depends on.
RowsOf = Callable[[int], Sequence[int]]


class LeastTraffic:
    """Adds up the bytes that all ranks have to send at least, while a model runs as one of them.

    Attributes:
        by_operator: the bytes of a forward and backward, by name.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.by_operator: Counter[str] = Counter()
        # The rows of each tensor that were sent to each rank; tensors are kept alive, as the
        # address of a freed one would be reused.
        self._sent: dict[Any, set[tuple[int, int]]] = defaultdict(set)
        self._alive: list[Tensor] = []
        self._is_inside = False

    @property
    def bytes(self) -> int:
        """Return the bytes of all operators."""
        return sum(self.by_operator.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the operators that are called with tensors of the globe."""
        dispatch = BandTensor.__torch_dispatch__

        def watched(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            count = (
                None
                if self._is_inside or (backward_pass() >= 0)
                else self._counter(short_name(func))
            )
            if count is None:
                return dispatch(func, types, args, kwargs)
            self._is_inside = True
            try:
                results = dispatch(func, types, args, kwargs)
                if any(map(is_band, tree_leaves((args, kwargs)))):
                    with unset_fake_temporarily():
                        count(func, args, kwargs, results)
            finally:
                self._is_inside = False
            return results

        BandTensor.__torch_dispatch__ = classmethod(watched)
        try:
            yield
        finally:
            BandTensor.__torch_dispatch__ = dispatch

    def _counter(self, name: str) -> Callable[..., None] | None:
        if name in MOVES:
            return self._moves
        if name in NORMS:
            return self._norm
        if name in REDUCTIONS:
            return self._reduction
        if name in PRODUCTS:
            return self._product
        if name.startswith("_scaled_dot_product"):
            return self._attention
        is_stencil = name in POOLS or "convolution" in name or name.startswith(STENCILS)
        return self._stencil if is_stencil else None

    def _add(self, func: Any, size: float, *tensors: Any) -> None:
        """Add bytes, twice if gradients return the same."""
        directions = 1 + any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        self.by_operator[short_name(func)] += int(size) * directions

    # Moves.

    def _owners(self, x: Any) -> Any:
        """Return for each entry the rank that holds it, from 1; 0 if all do."""
        if not isinstance(x, Tensor):
            return x
        if not is_band(x) or x.dtype is torch.bool:
            return torch.zeros(x.shape) if x.is_floating_point() else x
        rows = x.rows
        of_entries = torch.repeat_interleave(
            torch.arange(1.0, self.ranks + 1), torch.tensor(rows.bounds).diff()
        ).repeat(rows.outer)
        of_entries = of_entries.view(-1, *(1,) * (-rows.dim - 1))
        return of_entries.expand(x.shape).contiguous()

    def _moves(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        moved = tree_map(self._owners, (args, kwargs))
        before = [x for x in tree_leaves(func(*moved[0], **moved[1])) if isinstance(x, Tensor)]
        fields = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        for x, owners in zip(tree_leaves(results), before, strict=True):
            after = self._owners(x)
            if is_band(x):
                entries = int(((owners != after) & (owners > 0)).sum())
            else:
                entries = int((owners > 0).sum()) * (self.ranks - 1)
            self._add(func, entries * x.element_size(), *fields)

    # Stencils.

    def _stencil(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        x, y = args[0], results[0] if isinstance(results, tuple) else results
        name = short_name(func)
        if not is_band(x) or x.ndim + x.rows.dim < 2:
            return
        if not is_band(y) and "adaptive" in name:
            self._add(func, y.numel() * y.element_size() * self.ranks, x)
            return
        rows_of = self._rows_of(func, args, x, y)
        height, size = x.shape[x.rows.dim], y.shape[x.rows.dim]
        needed = []
        for rank in range(self.ranks):
            out = range(*y.rows.bounds[rank : rank + 2]) if is_band(y) else range(size)
            rows = {row for o in out for row in rows_of(o) if 0 <= row < height}
            first, after = x.rows.bounds[rank : rank + 2]
            needed += [(row, rank) for row in rows if not first <= row < after]
        self._send_rows(func, x, set(needed))

    def _send_rows(self, func: Any, x: Any, needed: set[tuple[int, int]]) -> None:
        """Add rows for ranks that don't have them yet."""
        local = x.local
        self._alive.append(local)
        key = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local._version)
        new = needed - self._sent[key]
        self._sent[key] |= new
        self._add(func, len(new) * x.numel() // x.rows.size * x.element_size(), x)

    def _rows_of(self, func: Any, args: Any, x: Any, y: Any) -> RowsOf:
        name, dim = short_name(func), x.rows.dim
        height, size = x.shape[dim], y.shape[dim]
        if "adaptive" in name:
            return lambda o: range(o * height // size, -(-(o + 1) * height // size))
        names = [argument.name for argument in func._schema.arguments]
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip(names, args, strict=False))
        if name.startswith("upsample"):
            return _interpolated_rows(name, bool(given.get("align_corners")), height, size)

        def setting(value: Any) -> int:
            return int(value[dim] if len(value) > 1 else value[0])

        if name in POOLS:
            k, step = (
                setting(given["kernel_size"]),
                setting(given["stride"] or given["kernel_size"]),
            )
        else:
            k, step = given["weight"].shape[dim], setting(given["stride"])
        p, d = setting(given["padding"]), setting(given.get("dilation") or [1])
        if given.get("transposed"):
            return lambda o: [
                (o + p - t * d) // step for t in range(k) if (o + p - t * d) % step == 0
            ]
        return lambda o: range(o * step - p, o * step - p + d * (k - 1) + 1, d)

    # Statistics and products.

    def _norm(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        name, x = short_name(func), args[0]
        if not is_band(x):
            return
        dim = x.ndim + x.rows.dim
        if name == "native_batch_norm":
            moments = x.shape[1] if args[5] else 0
        elif name == "native_layer_norm":
            shape = tuple(args[1])
            entries = torch.Size(shape).numel()
            moments = x.numel() // entries if dim >= x.ndim - len(shape) else 0
        else:
            moments = x.shape[0] * args[6] if dim > 1 else 0
        self._add(func, 2 * moments * 4 * self.ranks, x)

    def _reduction(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        for y in tree_leaves(results)[:1]:
            if not is_band(y):
                self._add(func, y.numel() * y.element_size() * self.ranks, args[0])

    def _product(self, func: Any, args: Any, kwargs: Any, y: Any) -> None:
        factors = args[1:] if short_name(func) in ("addmm", "baddbmm") else args
        if not is_band(y):
            self._add(func, y.numel() * y.element_size() * self.ranks, *factors)
            return
        for x, own in zip(factors, (-2, -1), strict=True):
            if is_band(x) and x.rows.dim >= -2 and y.rows.dim != own:
                self._send_all(func, x)

    def _attention(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        y = results[0]
        if not is_band(y) or y.rows.dim != -2:
            return
        query, *others = args[:3]
        others = [x for x in others if is_band(x)]
        moved = query.numel() + y.numel()
        gathered = sum(x.numel() for x in others) * (self.ranks - 1)
        groups = {1} | {
            n
            for n in range(2, self.ranks + 1)
            if self.ranks % n == 0 and any(size % n == 0 for size in y.shape[:-2])
        }
        entries = min(moved * (1 - 1 / n) + gathered / n for n in groups if n == 1 or others)
        self._add(func, entries * y.element_size(), query, *others)

    def _send_all(self, func: Any, x: Any) -> None:
        self._add(func, x.numel() * x.element_size() * (self.ranks - 1), x)


def _interpolated_rows(name: str, align: bool, height: int, size: int) -> RowsOf:
    if "nearest" in name:
        return lambda o: [o * height // size]

    def rows(o: int) -> Sequence[int]:
        source = o * (height - 1) / max(size - 1, 1) if align else (o + 0.5) * height / size - 0.5
        first = floor(source)
        reach = range(first - 1, first + 3) if "bicubic" in name else range(first, ceil(source) + 1)
        return [min(max(row, 0), height - 1) for row in reach]

    return rows


# ---------------------------------------------------------------- a step


@dataclass(frozen=True)
class Step:
    """The costs of a step of one rank, or of one process.

    Attributes:
        saved: bytes that autograd saves.
        sent: bytes that all ranks send in a forward and backward.
        least: the least that they have to send.
        messages: messages and sums that this rank sends.
        planning: seconds of the processor to convert the model.
        conversion: `layers`, `globe`, or `none` for one process.
        whole_calls: functions that ran whole -> number of calls in a forward.
    """

    saved: int
    sent: int = 0
    least: int = 0
    messages: int = 0
    planning: float = 0.0
    conversion: str = "none"
    whole_calls: dict[str, int] = field(default_factory=dict)

    @property
    def excess(self) -> float:
        """Return what is sent over the least."""
        return self.sent / max(self.least, 1)


def measure(build: Callable[[], nn.Module], shape: tuple[int, ...], ranks: int) -> Step:
    """Return the costs of the second of `ranks` ranks; with one rank, those of one process."""
    model, rank, least = build().train(), min(1, ranks - 1), LeastTraffic(ranks)
    manager = DomainParallelManager(ranks, ranks, transport=CountingTransport(rank, ranks))
    begun = time.process_time()
    model = convert_to_domain_parallel(model, manager, input_shape=shape, whole_ops="allow")
    planning = time.process_time() - begun
    with least.watch():
        run = dry_run(model, manager, [shape], rank=rank, training=True, backward=ranks > 1)
    if ranks == 1:
        return Step(run.saved_bytes)
    of_passes = [*run.forward.values(), *run.backward.values()]
    sent = sum(t.bytes + t.collective_bytes for ranks_sent in of_passes for t in ranks_sent)
    messages = sum(sent[rank].messages + sent[rank].collectives for sent in of_passes)
    if attached_domain(model) is not None:
        whole_calls = {call.function: call.calls for call in run.whole_calls}
        costs = sent, least.bytes, messages, planning
        return Step(run.saved_bytes, *costs, "globe", whole_calls)
    # The plan knows the least of layers. Statistics of norms are what they send.
    levels = plan_report(build(), shape, ranks).levels
    statistics = sum(t.collective_bytes for ranks_sent in of_passes for t in ranks_sent)
    least_bytes = sum(level.least_bytes for level in levels) + statistics
    return Step(run.saved_bytes, sent, least_bytes, messages, planning, "layers")


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **settings)
    return model


class _ChannelsFirst(nn.Module):
    """A model of levels `(B, H, W, C)`, whose rows have to come last but one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        return [level.permute(0, 3, 1, 2) for level in self.model(x)]


def _swin(name: str, size: int) -> nn.Module:
    return _ChannelsFirst(
        _timm(name, img_size=size, depths=(2, 2), num_heads=(3, 6), features_only=True)
    )


def _smp(name: str, encoder: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    model: nn.Module = getattr(smp, name)(encoder, encoder_weights=None, classes=4)
    return model


def _diffusers_unet() -> nn.Module:
    import diffusers

    class AtOneTime(diffusers.UNet2DModel):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x, 1).sample
            return y

    blocks = {"down_block_types": ("DownBlock2D",) * 3, "up_block_types": ("UpBlock2D",) * 3}
    fields = {"in_channels": 3, "out_channels": 3}
    return AtOneTime(**fields, **blocks, block_out_channels=(32, 64, 64), norm_num_groups=8)


IMAGE = (2, 3, 256, 256)
# Name of a model, function that builds it, and the shape of its input.
MODELS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("smp Unet++, ResNet18", partial(_smp, "UnetPlusPlus", "resnet18"), IMAGE),
    ("smp FPN, ResNet18", partial(_smp, "FPN", "resnet18"), IMAGE),
    ("smp DeepLabV3, ResNet18", partial(_smp, "DeepLabV3", "resnet18"), (2, 3, 512, 512)),
    ("smp DeepLabV3+, ResNet18", partial(_smp, "DeepLabV3Plus", "resnet18"), IMAGE),
    ("smp Unet, EfficientNet B0", partial(_smp, "Unet", "timm-efficientnet-b0"), IMAGE),
    ("smp Segformer, MiT B0", partial(_smp, "Segformer", "mit_b0"), IMAGE),
    ("timm EfficientNet B0", partial(_timm, "efficientnet_b0", features_only=True), IMAGE),
    ("timm ResNet18", partial(_timm, "resnet18", features_only=True), IMAGE),
    ("timm Swin", partial(_swin, "swin_tiny_patch4_window7_224", 448), (1, 3, 448, 448)),
    ("timm Swin v2", partial(_swin, "swinv2_tiny_window8_256", 256), IMAGE),
    ("timm MaxViT", partial(_timm, "maxvit_nano_rw_256"), IMAGE),
    ("timm DaViT", partial(_timm, "davit_tiny", features_only=True), (1, 3, 448, 448)),
]

GRIDS = ((96, 192), (224, 448))
# Name of a model that many researchers bring, and a function that builds it for a grid.
HOT: dict[str, Callable[[Grid], nn.Module]] = {
    "smp Unet, ResNet18": lambda grid: _smp("Unet", "resnet18"),
    "timm ConvNeXt atto": lambda grid: _timm("convnext_atto"),
    "timm Swin tiny": lambda grid: _timm("swin_tiny_patch4_window7_224", img_size=grid),
    "diffusers UNet2D, convolutions": lambda grid: _diffusers_unet(),
    "timm ViT tiny": lambda grid: _timm("vit_tiny_patch16_224", img_size=grid),
}


def _grids(name: str) -> Sequence[Grid]:
    # Swin's windows have 7 x 7 patches of 4 x 4.
    return ((112, 224), GRIDS[1]) if "Swin" in name else GRIDS


# ---------------------------------------------------------------- side by side


def contestants(manager: DomainParallelManager, name: str) -> Contestants:
    """Return a forward and backward of a model of `HOT` on each of its grids, by rows."""
    torch.manual_seed(0)  # all ranks have the same model
    return {str(grid[0]): _step(manager, HOT[name](grid), (1, 3, *grid)) for grid in _grids(name)}


def _step(
    manager: DomainParallelManager, model: nn.Module, shape: tuple[int, ...]
) -> Callable[[], None]:
    local = list(shape)
    if manager.domain_parallel_size > 1:
        model = convert_to_domain_parallel(model, manager, input_shape=shape)
        local[ROW_DIM] = manager.partition(shape[ROW_DIM]).sizes[manager.rank]
    x = torch.randn(local)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step


def speeds(name: str, rounds: int) -> dict[Grid, Ratio]:
    """Return by grid the time of two ranks of one thread over one process of two threads."""
    if not rounds:
        return {}
    found = {}
    alone = Mesh(1, 1, threads=PINNED)
    with team(contestants, name, mesh=alone) as whole, team(contestants, name) as ranks:
        for grid in _grids(name):
            rows = str(grid[0])
            teams = {"first": whole, "sharded": ranks, "second": whole}
            entries = [Entry(label, each, rows) for label, each in teams.items()]
            first, sharded, second = times(entries, rounds).values()
            found[grid] = ratio(sharded, first, second)
    return found


def models(rounds: int, names: Sequence[str] = ("",)) -> Iterator[dict[str, Any]]:
    """Yield what was measured of each model, if its name has one of `names` in it."""

    def is_named(name: str) -> bool:
        return any(part.lower() in name.lower() for part in names)

    for name, build in filter(lambda item: is_named(item[0]), HOT.items()):
        found = speeds(name, rounds)
        for grid in _grids(name):
            yield _costs(name, partial(build, grid), (1, 3, *grid), found.get(grid))
    for name, other, shape in MODELS:
        if is_named(name):
            yield _costs(name, other, shape, None)


def _costs(
    name: str, build: Callable[[], nn.Module], shape: tuple[int, ...], speed: Ratio | None
) -> dict[str, Any]:
    """Return the speed and the costs of a model; lists are of 2 and of 4 ranks."""
    one, *several = (measure(build, shape, ranks) for ranks in (1, *RANKS))
    return {
        "name": name,
        "rows": shape[-2],
        "columns": shape[-1],
        "conversion": several[-1].conversion,
        "best": 1 / speed.best if speed else None,
        "typical": 1 / speed.typical if speed else None,
        "spread": speed.spread if speed else None,
        "memory": [step.saved / one.saved for step in several],
        "megabytes": [step.sent / ranks / 1e6 for ranks, step in zip(RANKS, several, strict=True)],
        "messages": [step.messages for step in several],
        "excess": [step.excess for step in several],
        "planning": several[-1].planning,
        "whole_calls": dict(several[-1].whole_calls),
    }


def main() -> None:
    """Print a table of the models."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of models")
    parser.add_argument("--rounds", type=int, default=10, help="of speed; 0 leaves it out")
    arguments = parser.parse_args()
    found = []
    for model in models(arguments.rounds, arguments.names or [""]):
        found.append(model)
        print(*model.values(), flush=True)
    print(model_table(found))


if __name__ == "__main__":
    main()
