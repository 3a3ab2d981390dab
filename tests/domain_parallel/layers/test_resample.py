"""Interpolation, pixel shuffles and rolls of bands equal those of the whole globe."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, gather_tensor, shard_tensor
from credit_dp.domain_parallel.bands import interpolation
from credit_dp.domain_parallel.layers import (
    DomainParallelInterpolate,
    DomainParallelPixelUnshuffle,
)
from credit_dp.models.unet import PeriodicUpsample
from tests.domain_parallel.equality import THREADS, assert_same_as_whole_globe, error
from tests.domain_parallel.models import Moved
from tests.ranks import DEVICE, RankError, on_threads
from tests.tables import entry

MODES = ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]


def _moved(kind, options, move="nothing"):
    return Moved(kind(**options), move)


@st.composite
def targets(draw, ranks, height, columns=1):
    """A size, or a scale factor, for rows and columns, that leaves every rank a row."""
    if draw(st.booleans()):
        return {"size": (draw(st.integers(ranks, 3 * height)), draw(st.integers(columns, 9)))}
    rows = draw(st.floats(ranks / height + 1e-3, 4)) if draw(st.booleans()) else None
    rows = rows or draw(st.sampled_from([1.0, 1.5, 2.0, 3.0]))
    recompute = {"recompute_scale_factor": True} if draw(st.booleans()) else {}
    return {"scale_factor": (rows, draw(st.sampled_from([0.5, 1.0, 1.3, 2.0]))), **recompute}


@pytest.mark.parametrize("ranks", THREADS)
@given(mode=st.sampled_from(MODES), more=st.integers(0, 20), data=st.data())
def test_upsample(ranks, mode, more, data):
    height = ranks + more
    options = {"mode": mode, **data.draw(targets(ranks, height, 1))}
    if mode in ("bilinear", "bicubic"):
        options["align_corners"] = data.draw(st.sampled_from([None, True, False]))
    model = (nn.Upsample, options)
    on_threads(ranks, assert_same_as_whole_globe, _moved, model, (2, 2, height, 5))


@pytest.mark.parametrize("ranks", THREADS)
@given(
    move=st.sampled_from(["columns", "turned", "times"]),
    mode=st.sampled_from(["nearest", "linear", "area"]),
    more=st.integers(0, 12),
    factor=st.sampled_from([0.7, 1.6, 2.0]),
)
def test_rows_in_other_dimensions(ranks, move, mode, more, factor):
    height = 2 * ranks + more
    names = {"columns": "linear", "turned": "bilinear", "times": "trilinear"}
    factors = {"columns": factor, "turned": (1.4, factor), "times": (factor, 1.0, 2.0)}
    options = {
        "scale_factor": factors[move],
        "mode": names[move] if mode == "linear" else mode,
    }
    on_threads(
        ranks, assert_same_as_whole_globe, _moved, (nn.Upsample, options, move), (2, 3, height, 4)
    )


def test_rows_apart():
    for move in ("samples", "channels"):
        for mode in MODES:
            one_dimension = move == "samples" and mode[:2] == "bi"
            options = {"scale_factor": 2.0, "mode": "linear" if one_dimension else mode}
            model = (nn.Upsample, options, move)
            with entry(model):
                on_threads(3, assert_same_as_whole_globe, _moved, model, (2, 2, 7, 4))


# Where torch rounds forward and backward differently, and as many rows as a band has.
SIZES = [
    (3, "nearest", 70, 189), (3, "nearest", 3, 165), (3, "nearest-exact", 10, 299),
    (4, "bilinear", 16, 4), (4, "nearest", 6, 18),
]  # fmt: skip


def test_sizes():
    for ranks, mode, height, size in SIZES:
        model = (nn.Upsample, {"size": (size, 3), "mode": mode})
        for planned in (True, False) if height > ranks else (True,):
            args = (_moved, model, (1, 2, height, 3), 1e-12, 0.0, planned)
            with entry((model, planned)):
                on_threads(ranks, assert_same_as_whole_globe, *args)


def _gradient(manager, mode):
    layer = DomainParallelInterpolate(scale_factor=1.5, mode=mode, manager=manager)
    x = shard_tensor(torch.randn(1, 2, 12, 3, dtype=torch.float64), manager=manager)
    x.requires_grad_()
    y = layer(x)
    rows = manager.rows(18)
    y.backward(torch.arange(18.0)[rows, None].expand(y.shape).double())
    return x.grad


def test_gradients_of_nearest_rows_are_those_of_torchs_backward(monkeypatch):
    def backward(grad, size, shape, *factors):
        assert factors == (1.5, 1.0)
        gradient = grad.new_zeros(shape)
        gradient[:, :, 1], gradient[:, :, 9] = grad[:, :, :5].sum(2), grad[:, :, 5:-1].sum(2)
        return gradient

    for mode in ("nearest", "nearest-exact"):
        monkeypatch.setitem(interpolation.NEAREST_BACKWARD, mode, backward)
        gradient = torch.cat(on_threads(3, _gradient, mode), -2)
        # Columns of 3 become 4: one of them is there twice.
        expected = torch.zeros(12, dtype=torch.float64)
        expected[1], expected[9] = sum(range(5)), sum(range(5, 17))
        assert torch.equal(gradient[0, 0].amin(-1), expected), mode
        assert torch.equal(gradient[0, 1].amax(-1), 2 * expected), mode


def _doubled(poles):
    return nn.Sequential(PeriodicUpsample(poles))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", THREADS)
@given(
    more=st.integers(0, 9),
    poles=st.sampled_from(["reflect", "zeros", "mirror", "earth"]),
    columns=st.integers(1, 6),
)
def test_upsample_around_the_globe(ranks, more, poles, columns):
    shape = (2, 2, ranks + more, columns)
    on_threads(ranks, assert_same_as_whole_globe, _doubled, (poles,), shape)


def _interpolated(manager, x, options, dtype):
    layer = DomainParallelInterpolate(manager=manager, **options)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is None):
        made = layer(shard_tensor(x, manager=manager))
    return gather_tensor(made, manager=manager)


def test_interpolate_by_hand_in_single_precision():
    x = torch.randn(2, 3, 10, 6)
    for mode in MODES:
        for size in ((23, 4), (7, 11)):
            options = {"size": size, "mode": mode}
            whole = F.interpolate(x, **options)
            for made in on_threads(4, _interpolated, x, options, torch.float32):
                assert made.dtype == torch.float32, options
                assert error(made, whole) < (1e-6 if mode[:7] != "nearest" else 1e-30), options


def test_half_precision_gives_torchs_dtype():
    x = torch.randn(1, 2, 10, 6, dtype=torch.bfloat16)
    for mode in MODES:
        for autocast in (True, False):
            options = {"size": (23, 12), "mode": mode}
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                whole = F.interpolate(x, **options)
            for made in on_threads(3, _interpolated, x, options, None if autocast else x.dtype):
                assert made.dtype == whole.dtype, (mode, autocast)
                assert error(made.float(), whole.float()) < 2e-2, (mode, autocast)


def test_scale_factor_by_hand_follows_another_dtype_and_height():
    options = {"scale_factor": 1.7, "mode": "bicubic"}

    def case(manager, x):
        layer = DomainParallelInterpolate(manager=manager, **options)
        made = [layer(shard_tensor(y, manager=manager)) for y in (x.float(), x, x[..., :9, :])]
        return [gather_tensor(y, manager=manager) for y in made]

    x = torch.randn(1, 2, 12, 6, dtype=torch.float64)
    whole = [F.interpolate(y, **options) for y in (x.float(), x, x[..., :9, :])]
    for single, double, lower in on_threads(3, case, x):
        assert error(single, whole[0]) < 1e-6
        assert error(double, whole[1]) < 1e-12
        assert error(lower, whole[2]) < 1e-12


def test_interpolate_counts_its_row_dim_from_the_start():
    for options, dims in [
        ({"size": (4, 23, 5), "mode": "nearest", "shard_dim": 3}, (3, 10, 6)),
        ({"scale_factor": 1.5, "mode": "trilinear", "shard_dim": 3}, (3, 10, 6)),
        ({"size": (23, 5), "mode": "bilinear", "shard_dim": 2}, (10, 6)),
        ({"size": 23, "mode": "linear", "shard_dim": 2}, (10,)),
    ]:
        x = torch.randn(2, 3, *dims, dtype=torch.float64)
        settings = {key: value for key, value in options.items() if key != "shard_dim"}
        for y in on_threads(3, _with_row_dim, x, options):
            assert error(y, F.interpolate(x, **settings)) < 1e-12, options


def _with_row_dim(manager, x, options):
    layer = DomainParallelInterpolate(manager=manager, **options)
    row_dim = options["shard_dim"]
    assert layer.shard_dim == row_dim
    return gather_tensor(layer(shard_tensor(x, row_dim, manager)), row_dim, manager)


def test_interpolate_refuses():
    """Of 11 rows on 3 ranks bands have 4 or 3: such a size was meant for a band."""
    for options, message in [
        ({"size": (4, 6)}, "size is the whole globe's output, got 4 rows"),
        ({"size": (3, 6)}, "size is the whole globe's output, got 3 rows"),
        ({"size": (24, 6), "mode": "cubic"}, "mode must be one of nearest"),
    ]:
        with entry(options), pytest.raises(RankError, match=message):
            on_threads(3, _interpolated, torch.randn(1, 1, 11, 6), options, torch.float32)


def _trained_after_inference(manager):
    for layer in (nn.Upsample(scale_factor=1.5), nn.AdaptiveAvgPool2d((5, 3))):
        model = nn.Sequential(layer)
        sharded = convert_to_domain_parallel(model, manager, input_shape=(1, 2, 8, 6))
        x = torch.randn(1, 2, 4, 6)
        with torch.inference_mode():
            sharded(x)
        sharded(x.requires_grad_()).sum().backward()
        assert x.grad is not None, layer


def test_training_after_inference_mode():
    on_threads(2, _trained_after_inference)


def _traffic(manager, x, options):
    layer = DomainParallelInterpolate(manager=manager, **options)
    x = shard_tensor(x, manager=manager)
    layer(x)
    before = manager.transport.traffic.bytes
    layer(x)
    return manager.transport.traffic.bytes - before


def test_each_needed_row_travels_once():
    x = torch.randn(1, 3, 12, 6, dtype=torch.float64)
    for options, rows, columns in [
        ({"scale_factor": 2, "mode": "nearest"}, 0, 6),
        ({"scale_factor": 2, "mode": "bilinear"}, 1, 6),
        ({"scale_factor": 2, "mode": "bicubic"}, 2, 6),
        ({"size": (24, 2), "mode": "bilinear"}, 1, 2),  # columns shrink before rows travel
    ]:
        sent = on_threads(3, _traffic, x, options)
        assert [b // (3 * columns * 8) for b in sent] == [rows, 2 * rows, rows], options


@pytest.mark.parametrize("ranks", THREADS)
@given(factor=st.integers(1, 4), height=st.integers(8, 20), un=st.booleans())
def test_pixel_shuffle(ranks, factor, height, un):
    """Bands of any height: 13 rows x 2 on 4 ranks don't line up with 26 rows on 4."""
    kind, name = (
        (nn.PixelUnshuffle, "downscale_factor") if un else (nn.PixelShuffle, "upscale_factor")
    )
    shape = (2, 2, height * factor, 2 * factor) if un else (2, 2 * factor**2, height, 3)
    on_threads(ranks, assert_same_as_whole_globe, _moved, (kind, {name: factor}), shape)


def test_pixel_shuffle_of_turned_rows():
    model = (nn.PixelShuffle, {"upscale_factor": 2}, "turned")
    on_threads(3, assert_same_as_whole_globe, _moved, model, (2, 4, 7, 3))


@pytest.mark.slow
def test_unshuffle_of_bands_that_do_not_line_up():
    """Of 6 rows bands of 3 make 1.5: rows travel."""

    def case(manager, x):
        made = DomainParallelPixelUnshuffle(nn.PixelUnshuffle(2), manager=manager)(
            shard_tensor(x, manager=manager)
        )
        return gather_tensor(made, manager=manager)

    x = torch.randn(1, 1, 12, 4)
    for made in on_threads(4, case, x):
        assert torch.equal(made, F.pixel_unshuffle(x, 2))
