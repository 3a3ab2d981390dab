"""Padding, rolls, flips and windows on bands."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import Enter
from credit_dp.domain_parallel.band_tensor.moving import cut
from credit_dp.domain_parallel.band_tensor.tensor import Band, BandTensor, Domain
from tests.domain_parallel.band_tensor import functions
from tests.ranks import RankError, on_threads
from tests.tables import entry

RANKS = [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


MODES = ("constant", "reflect", "replicate", "circular")


def padded_in_all_modes(m, x):
    height = x.shape[2]
    widths = ((1, 2, 1, 1), (0, 0, 2, 0), (0, 1, 0, 3), (2, 2, 0, 0), (0, 0, height - 1, 1))
    return [F.pad(x, pad, mode=mode) for mode in MODES for pad in widths]


def cropped(m, x):
    return (
        *(F.pad(x, (1, 0, -2, 1), mode=mode) for mode in MODES),
        *(F.pad(x, (-1, 2, 1, -3), mode=mode, value=0) for mode in MODES[:1]),
        F.pad(x, (0, 0, -3, -4)),
        F.pad(x, (0, 0, 2, -1, 1, 0), value=2.5),
        F.pad(x, (0, 0, -1, -1)) * F.pad(x[:, :, :-2], (1, -1), value=1.0),
    )


def padded_in_other_dimensions(m, x):
    columns = x[..., 0]
    return (
        F.pad(columns, (2, 1), mode="reflect"),
        F.pad(columns, (0, 3), mode="replicate"),
        F.pad(columns, (1, 1), value=3.0),
        F.pad(x[:, :2].unflatten(1, (1, 2)), (1, 0, 2, 1, 1, 1), mode="replicate"),
        F.pad(x[:, :2].unflatten(1, (1, 2)).transpose(2, 3), (1, 0, 0, 1, 2, 2), mode="reflect"),
        F.pad(x.mT, (3, 1, 1, 1), mode="reflect"),
        F.pad(x.transpose(0, 2), (1, 1, 1, 0), mode="replicate"),
        F.pad(x.transpose(0, 2), (0, 0, 0, 0, 0, 0, 1, 2)),
    )


def folded(m, x):
    """Rows that follow others in one dimension."""
    y = torch.stack([x, x * 2], 2).flatten(2, 3)
    return (
        F.pad(y, (1, 0, 2, 1), mode="reflect"),
        F.pad(y, (0, 0, 1, 2), mode="replicate"),
        F.pad(y, (0, 0, 3, -2), value=1.5),
        y.roll((3, 1), (2, 3)),
        y.flip(2),
        y.unfold(2, 4, 3),
        F.pad(y, (1, 1, 0, 0), mode="reflect"),
        F.interpolate(y, size=(9, 4), mode="bilinear"),
        F.adaptive_avg_pool2d(y, (2, 3)),
    )


def of_few_rows(m, x):
    """Some ranks have no row before, or none after."""
    one, two = x[:, :, -1:], x[:, :, :2]
    return (
        F.pad(one, (0, 0, 3, 4), mode="replicate"),
        F.pad(two, (1, 1, 1, 1), mode="reflect"),
        F.pad(two, (1, 1, 0, 0), mode="reflect"),
        F.pad(one, (0, 1, 2, 1), value=4.0),
        F.pad(x, (0, 0, -2, 3 - x.shape[2])),
        F.pad(two, (0, 0, 5, 5)),
        two.roll((1, 2), (2, 3)),
        two.flip(2, 1),
        two.rot90(1, (2, 3)),
        two.unfold(2, 2, 1),
        one.unfold(3, 2, 2),
        two.diff(dim=2),
    )


def windows(m, x):
    return (
        x.unfold(2, 3, 1),
        x.unfold(2, 3, 3).mean(-1),
        x.unfold(-2, 2, 5),
        x.unfold(3, 2, 2),
        x.mT.unfold(3, 5, 2),
        x.unfold(2, x.shape[2], 1),
        x.unfold(2, 3, 1).unfold(3, 2, 2).flatten(4),
        x[:, :, :12].unfold(2, 4, 4),
    )


def moved(m, x):
    return (
        x.roll((1, -2), (2, 3)),
        x.roll((5, -4), (2, 2)),
        x.roll(x.shape[2], 2),
        x.flip(2),
        x.flip(1, 3),
        *(x.rot90(turns, dims) for turns in range(4) for dims in ((2, 3), (1, 2))),
        x.rot90(1, (0, 1)),
    )


def gradients_of_gradients(m, x):
    y = F.pad(x.square(), (1, 1, 2, 1), mode="reflect").roll(2, 2).flip(2).unfold(2, 3, 2)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return grad * x


FUNCTIONS = {
    "modes": padded_in_all_modes,
    "crops": cropped,
    "other dimensions": padded_in_other_dimensions,
    "folded rows": folded,
    "few rows": of_few_rows,
    "windows": windows,
    "rolls, flips and rotations": moved,
    "gradients of gradients": gradients_of_gradients,
}


@pytest.mark.parametrize("ranks", RANKS)
def test_results_equal_those_of_the_globe(ranks: int) -> None:
    for name, function in FUNCTIONS.items():
        with entry(name):
            functions.check(function, (2, functions.CHANNELS, 13, functions.COLUMNS), ranks)


def test_what_has_to_run_whole() -> None:
    functions.check(lambda m, x: x.roll(5), whole=["roll"])


def test_torch_says_what_it_refuses() -> None:
    for widths, mode in (((0, 0, 13, 0), "reflect"), ((0, 0, -7, -8), "constant")):
        with pytest.raises(RankError, match=r"[Pp]adding|narrow"):
            on_threads(3, moved_rows, lambda x, w=widths, mode=mode: F.pad(x, w, mode=mode), 13)


def moved_rows(
    manager: DomainParallelManager, function: Callable[[Tensor], Tensor], height: int
) -> tuple[tuple[int, ...], list[float]]:
    """Return the bands of a function's result, and how many rows a rank sent forward and back."""
    domain, traffic = Domain(manager), manager.transport.traffic
    x = torch.randn(1, 2, height, 4, generator=torch.Generator().manual_seed(0))
    band = Band(-2, 1, domain.bounds(height))
    x = Enter.apply(cut(x, band, domain.rank).clone().requires_grad_(), band, domain)
    sent = [traffic.bytes]
    y = function(x)
    assert isinstance(y, BandTensor)
    assert isinstance(y.rows, Band)
    sent.append(traffic.bytes)
    torch.autograd.grad(y, x, BandTensor(y.local.detach() * 1, y.rows, domain))
    sent.append(traffic.bytes)
    return y.rows.bounds, [(b - a) / x[:, :, 0].nbytes for a, b in pairwise(sent)]


SENT: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], float]] = {
    "zeros": (lambda x: F.pad(x, (1, 1, 1, 1)), (0, 5, 9, 14), 0),
    "reflected": (lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"), (0, 6, 10, 15), 0),
    "repeated": (lambda x: F.pad(x, (0, 0, 0, 2), mode="replicate"), (0, 4, 8, 14), 0),
    "cropped": (lambda x: F.pad(x, (0, 0, -1, -1)), (0, 3, 7, 10), 0),
    # The first band would have too many rows.
    "many": (lambda x: F.pad(x, (0, 0, 5, 0), mode="reflect"), (0, 6, 12, 17), 6),
    "rolled": (lambda x: x.roll(1, 2), (0, 4, 8, 12), 3),
    "windows in bands": (lambda x: x.unfold(2, 2, 2), (0, 2, 4, 6), 0),
}


def test_rows_stay_where_they_are() -> None:
    for name, (function, bounds, rows) in SENT.items():
        with entry(name):
            found = on_threads(3, moved_rows, function, 12)
            assert {of_rank for of_rank, _ in found} == {bounds}
            assert [sum(sent) for sent in zip(*(sent for _, sent in found), strict=True)] == [
                rows,
                rows,
            ]
