"""The plan of a converted model: bands of every height it sees, found on fake tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from credit_dp.domain_parallel.audit import audit
from credit_dp.domain_parallel.layers.row_layer import RowLayer
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.domain_parallel.planner import Planner
from credit_dp.domain_parallel.sharding import FIELD_DIMS
from credit_dp.domain_parallel.trace import FOREIGN, Trace
from credit_dp.errors import UserError

Shape = tuple[int, ...]
ROW_DIM = -2


def plan_model(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shape: Shape | Sequence[Shape],
    trusted: Iterable[nn.Module] = (),
) -> None:
    """Give every height that the model sees its bands, and every layer its heights.

    Runs the model on fake tensors: once whole, once per distinct band. Nothing is sent, no
    activation is held, parameters and random state stay as they are.

    Raises:
        UserError: a level has fewer rows than there are ranks, code between the layers mixes or
            changes rows, or the model's control flow depends on data.
    """
    whole = isinstance(input_shape[0], int)
    shapes: list[Shape] = [tuple(input_shape)] if whole else [tuple(s) for s in input_shape]  # type: ignore[arg-type]
    dtype, device = _dtype_and_device(model)

    def inputs(shape_of: Callable[[Shape], Shape]) -> tuple[list[Tensor], dict[str, Any]]:
        return [torch.empty(shape_of(s), dtype=dtype, device=device) for s in shapes], {}

    plan_calls(model, manager, [s for s in shapes if is_banded(s)], inputs, trusted)


def is_banded(shape: Shape) -> bool:
    """Return whether a tensor of this whole-globe shape is cut into bands."""
    return len(shape) >= FIELD_DIMS and shape[ROW_DIM] > 1


def plan_calls(
    model: nn.Module,
    manager: DomainParallelManager,
    banded: list[Shape],
    inputs: Callable[[Callable[[Shape], Shape]], tuple[list[Any], dict[str, Any]]],
    trusted: Iterable[nn.Module] = (),
) -> None:
    """Plan the call that `inputs` makes; it gets a function from whole-globe to wanted shapes.

    What `trusted` modules do inside is not audited.
    """
    names = {
        m: name or type(m).__name__ for name, m in model.named_modules() if isinstance(m, RowLayer)
    }
    ranks, bands = manager.domain_parallel_size, manager.bands
    planner = Planner(names, bands)
    with _traceable(model), planner.trusting(trusted):
        whole = _follow(planner, None, model, lambda: inputs(lambda shape: shape))
        heights = planner.heights() | {shape[ROW_DIM] for shape in banded}
        _check_rows(planner, heights, ranks)
        bands.plan(heights)
        for rank in _distinct_ranks([bands[h] for h in heights], ranks):

            def cut(shape: Shape, rank: int = rank) -> Shape:
                if not is_banded(shape):
                    return shape
                return (*shape[:ROW_DIM], bands[shape[ROW_DIM]].sizes[rank], *shape[ROW_DIM + 1 :])

            part = _follow(planner, rank, model, lambda cut=cut: inputs(cut))  # type: ignore[misc]
            audit(whole.trace, part.trace, {h: bands[h].sizes[rank] for h in heights})
            _check_outputs(whole.outputs, part.outputs, manager, rank)
    for layer in planner.visits:
        layer.set_heights(planner.planned(layer))


class _Followed(NamedTuple):
    trace: Trace
    outputs: list[Any]


def _follow(
    planner: Planner,
    rank: int | None,
    model: nn.Module,
    inputs: Callable[[], tuple[list[Any], dict[str, Any]]],
) -> _Followed:
    """Run the model on fake tensors of the whole globe or of one rank's band."""
    args, kwargs = inputs()
    with planner.following(rank) as trace:
        trace.mark((), _tensors((args, kwargs)))
        outputs = tree_leaves(model(*args, **kwargs))
        trace.mark(_tensors(outputs), ())
    return _Followed(trace, outputs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _traceable(model: nn.Module) -> Iterator[None]:
    """Run on fake tensors, without gradients, and restore the random state afterwards."""
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    except DataDependentOutputException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(FOREIGN)]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else type(model).__name__
        raise UserError(
            f"{where}: control flow that depends on data can't be planned. "
            "Decide from shapes or configuration instead."
        ) from None


def _dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype, parameter.device
    return torch.get_default_dtype(), torch.device("cpu")


def _check_rows(planner: Planner, heights: set[int], ranks: int) -> None:
    lowest = min(heights, default=ranks)
    if lowest >= ranks:
        return
    places = [
        planner.names[layer]
        for layer, visits in planner.visits.items()
        if any(lowest in (v.taken, v.made[layer.dim]) for v in visits)
    ]
    raise UserError(
        f"{places[0] if places else 'input'}: {lowest} rows can't be shared by {ranks} ranks. "
        f"Lower parallel.domain to {lowest} or less."
    )


def _distinct_ranks(partitions: list[RowPartition], ranks: int) -> list[int]:
    """Return one rank for every different combination of bands."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(ranks):
        first.setdefault(tuple(p.sizes[rank] for p in partitions), rank)
    return list(first.values())


def _check_outputs(
    whole: list[Any], parts: list[Any], manager: DomainParallelManager, rank: int
) -> None:
    for total, part in zip(whole, parts, strict=True):
        if not isinstance(total, Tensor) or total.shape == part.shape:
            continue
        height = total.shape[ROW_DIM]
        expected = list(total.shape)
        expected[ROW_DIM] = manager.bands[height].sizes[rank]
        if list(part.shape) != expected:
            raise UserError(
                f"output: rank {rank} makes {tuple(part.shape)} where its band of "
                f"{tuple(total.shape)} is {tuple(expected)}. The code after the last layer changes "
                "rows; put that into a module and name it in custom_converters."
            )
