"""Interpolation, adaptive averages, pixel shuffles and samples of grids on bands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import Enter, Leave
from credit_dp.domain_parallel.band_tensor.moving import cut
from credit_dp.domain_parallel.band_tensor.tensor import Band, Domain
from credit_dp.domain_parallel.bands import interpolation
from tests.domain_parallel.band_tensor import functions
from tests.ranks import on_threads
from tests.tables import entry

RANKS = [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
SETTINGS = (
    *({"mode": mode, "size": size} for mode in MODES for size in ((23, 6), (7, 3), (5, 11))),
    *({"mode": mode, "scale_factor": factor} for mode in MODES for factor in (2, (0.6, 1.7))),
    *({"mode": mode, "size": (20, 9), "align_corners": True} for mode in ("bilinear", "bicubic")),
    *(
        {"mode": mode, "size": size, "antialias": True}
        for mode in ("bilinear", "bicubic")
        for size in ((6, 4), (19, 6))
    ),
)


def in_all_modes(m, x):
    return [F.interpolate(x, **settings) for settings in SETTINGS]


def with_other_dimensions(m, x):
    """Rows among levels, as the only spatial dimension, or in a dimension that is not spatial."""
    levels, columns = x[:, :2].unflatten(1, (1, 2)), x[..., 0]
    return (
        F.interpolate(levels, size=(3, 9, 4), mode="trilinear"),
        F.interpolate(levels.transpose(2, 3), scale_factor=(2, 1, 1)),
        F.interpolate(levels, size=(2, 20, 6), mode="nearest-exact"),
        F.interpolate(columns, scale_factor=1.5, mode="linear"),
        F.interpolate(columns, size=6),
        F.interpolate(x.mT, size=(4, 9), mode="bicubic", antialias=True),
        F.interpolate(x.transpose(0, 2), scale_factor=2, mode="bilinear"),
        F.interpolate(x.transpose(1, 2), scale_factor=2, mode="area"),
    )


def of_few_rows(m, x):
    """Some ranks have no row before, some none after."""
    one, two = x[:, :, -1:], x[:, :, :2]
    return (
        F.interpolate(two, size=(13, 6), mode="bilinear"),
        F.interpolate(two, size=(2, 12), mode="bicubic"),
        F.interpolate(one, scale_factor=5),
        F.interpolate(x, size=(2, 3), mode="bilinear", align_corners=True),
        F.interpolate(x, size=(1, 6), mode="nearest"),
        F.interpolate(two, size=(1, 6), mode="area"),
        F.adaptive_avg_pool2d(one, (4, 3)),
        F.interpolate(two.transpose(0, 2), scale_factor=2),
    )


def averages(m, x):
    levels = x.unflatten(1, (4, 2))
    return (
        F.adaptive_avg_pool2d(x, (5, 4)),
        F.adaptive_avg_pool2d(x, (None, 3)),
        F.adaptive_avg_pool2d(x, (2, 12)),
        F.adaptive_avg_pool2d(x[0], (1, 4)),
        F.adaptive_avg_pool2d(x.mT, (4, 2)),
        F.adaptive_avg_pool3d(levels, (1, 6, None)),
        F.adaptive_avg_pool3d(levels.transpose(2, 3), (2, 2, 3)),
        F.adaptive_avg_pool1d(x.transpose(0, 1)[..., 0], 4),
    )


def shuffled(m, x):
    both = torch.cat([x, x * 2], 2)
    return (
        F.pixel_shuffle(x, 2),
        F.pixel_unshuffle(both, 2),
        F.pixel_unshuffle(x.mT[:, :, :, :4], 2),
        F.pixel_shuffle(torch.stack([x, x], 2).flatten(2, 3), 2),
        F.pixel_unshuffle(x[:, :, :2], 2),
        F.channel_shuffle(x, 4),
        F.channel_shuffle(x.transpose(0, 2), 2),
    )


def sampled(m, x):
    points = x[:, :2].movedim(1, -1).tanh()
    return (
        F.grid_sample(x, points, align_corners=True),
        F.grid_sample(x, points * 1.5, "bicubic", "border", align_corners=False),
        F.grid_sample(x[:, :3], points[:, :2], align_corners=False),
    )


def gradients_of_gradients(m, x):
    y = F.interpolate(x.square(), size=(9, 4), mode="bicubic")
    z = F.adaptive_avg_pool2d(x.square(), (4, 3)).square().sum()
    (grad,) = torch.autograd.grad(y.square().sum() + z, x, create_graph=True)
    return grad * x


FUNCTIONS = {
    "modes": in_all_modes,
    "dimensions": with_other_dimensions,
    "few rows": of_few_rows,
    "averages": averages,
    "shuffles": shuffled,
    "samples": sampled,
    "gradients of gradients": gradients_of_gradients,
}


@pytest.mark.parametrize("ranks", RANKS)
def test_results_equal_those_of_the_globe(ranks: int) -> None:
    for name, function in FUNCTIONS.items():
        with entry(name):
            functions.check(function, (2, functions.CHANNELS, 13, functions.COLUMNS), ranks)


def test_what_has_to_run_whole() -> None:
    """torch's own rows of a single column are wrong with antialias; channels become rows."""
    functions.check(
        lambda m, x: (
            F.interpolate(x, size=(7, 1), mode="bilinear", antialias=True),
            F.pixel_shuffle(x.transpose(1, 2)[:, :12], 2),
        ),
        whole=[
            *("_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward"),
            "pixel_shuffle",
        ],
    )


def resampled(
    manager: DomainParallelManager, x: Tensor, settings: dict[str, Any]
) -> tuple[Tensor, Tensor | None, list[float]]:
    """Return a rank's rows of a field, their gradient, and how many it sent forward and back."""
    domain, traffic = Domain(manager), manager.transport.traffic
    band = Band(-2, 1, domain.bounds(x.shape[-2]))
    local = cut(x, band, domain.rank).clone().requires_grad_()
    sent = [traffic.bytes]
    y: Tensor = F.interpolate(Enter.apply(local, band, domain), **settings)
    out = Band(-2, 1, domain.bounds(y.shape[-2]))
    y = Leave.apply(y, out, domain)  # type: ignore[no-untyped-call]
    sent.append(traffic.bytes)
    y.square().sum().backward()
    sent.append(traffic.bytes)
    return y.detach(), local.grad, [(b - a) / x[:, :, 0].nbytes for a, b in pairwise(sent)]


def test_half_precision_is_widened() -> None:
    x = torch.randn(2, 3, 13, 6, dtype=torch.bfloat16, generator=torch.manual_seed(0))
    for settings in SETTINGS:
        if settings.get("antialias"):  # which torch has not on CPUs
            continue
        with entry(settings):
            exact = x.double().requires_grad_()
            wanted = F.interpolate(exact, **settings)
            wanted.square().sum().backward()
            outputs, gradients, _ = zip(*on_threads(3, resampled, x, settings), strict=True)
            for parts, whole in ((outputs, wanted.detach()), (gradients, exact.grad)):
                joined = torch.cat(parts, -2)
                assert joined.dtype == x.dtype
                assert float((joined - whole).abs().max() / whole.abs().max()) < 2**-6


def test_gradients_of_nearest_rows_are_those_of_torchs_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backward(grad: Tensor, size: object, shape: Sequence[int], *factors: object) -> Tensor:
        gradient = grad.new_zeros(shape)
        gradient[:, :, 1], gradient[:, :, 9] = grad[:, :, :5].sum(2), grad[:, :, 5:].sum(2)
        return gradient

    # A height of no other test, as tables are kept.
    x = torch.randn(1, 2, 14, 3, dtype=torch.float64, generator=torch.manual_seed(0))
    monkeypatch.setitem(interpolation.NEAREST_BACKWARD, "nearest", backward)
    parts = on_threads(3, resampled, x, {"size": (22, 3), "mode": "nearest"})
    outputs, gradients, _ = zip(*parts, strict=True)
    expected = backward(2 * torch.cat(outputs, -2), None, x.shape)
    torch.testing.assert_close(torch.cat(gradients, -2), expected)


def test_shorter_rows_are_sent() -> None:
    """Columns come first if there are fewer of them then; each rank needs a row at each edge."""
    x = torch.randn(2, 3, 12, 6, generator=torch.manual_seed(0))
    for size, length in (((24, 6), 1), ((24, 3), 1 / 2), ((24, 12), 1)):
        found = on_threads(3, resampled, x, {"size": size, "mode": "bilinear"})
        for rows, (_, _, sent) in zip((1, 2, 1), found, strict=True):
            assert sent == [rows * length] * 2
