"""Interpolation, pixel shuffles and rolls of bands equal those of the whole globe."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from credit_dp.domain_parallel import convert_to_domain_parallel, gather_tensor, shard_tensor
from credit_dp.domain_parallel.layers import (
    DomainParallelInterpolate,
    DomainParallelPixelUnshuffle,
    DomainParallelRoll,
    resample,
)
from credit_dp.domain_parallel.layers.resample import ANTIALIASED_MODES, AntialiasedUpsample
from credit_dp.errors import UserError
from credit_dp.models.unet import PeriodicUpsample
from tests.domain_parallel.equality import assert_same_as_whole_globe, error
from tests.domain_parallel.models import Moved
from tests.ranks import DEVICE, PROCESSES, RankError, on_processes, on_threads

RANKS = st.sampled_from([2, 3, 4, 8])
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


@given(ranks=RANKS, mode=st.sampled_from(MODES), more=st.integers(0, 20), data=st.data())
def test_upsample(ranks, mode, more, data):
    height = ranks + more
    antialias = mode in ANTIALIASED_MODES and data.draw(st.booleans())
    options = {"mode": mode, **data.draw(targets(ranks, height, 1 + antialias))}
    if mode in ANTIALIASED_MODES:
        options["align_corners"] = data.draw(st.sampled_from([None, True, False]))
    kind = AntialiasedUpsample if antialias else nn.Upsample
    on_threads(ranks, assert_same_as_whole_globe, _moved, (kind, options), (2, 2, height, 5))


@given(
    ranks=RANKS,
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


@pytest.mark.parametrize("move", ["samples", "channels"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_apart(move, mode):
    options = {"scale_factor": 2.0, "mode": mode}
    model = (nn.Upsample, options, move)
    if move == "samples":
        model = (nn.Upsample, options | {"mode": "linear" if mode[:2] == "bi" else mode}, move)
    on_threads(3, assert_same_as_whole_globe, _moved, model, (2, 2, 7, 4))


@pytest.mark.parametrize(
    ("mode", "height", "size"),
    [("nearest", 70, 189), ("nearest", 3, 165), ("nearest-exact", 10, 299)],
)
def test_sizes_where_torch_rounds_forward_and_backward_differently(mode, height, size):
    options = {"size": (size, 3), "mode": mode}
    on_threads(3, assert_same_as_whole_globe, _moved, (nn.Upsample, options), (1, 2, height, 3))


def _gradient(manager, mode):
    layer = DomainParallelInterpolate(scale_factor=1.5, mode=mode, manager=manager)
    x = shard_tensor(torch.randn(1, 2, 12, 3, dtype=torch.float64), manager=manager)
    x.requires_grad_()
    y = layer(x)
    rows = manager.rows(18)
    y.backward(torch.arange(18.0)[rows, None].expand(y.shape).double())
    return x.grad


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_gradients_of_nearest_rows_are_those_of_torchs_backward(mode, monkeypatch):
    def backward(grad, size, shape, *factors):
        assert factors == (1.5, 1.0)
        gradient = grad.new_zeros(shape)
        gradient[:, :, 1], gradient[:, :, 9] = grad[:, :, :5].sum(2), grad[:, :, 5:-1].sum(2)
        return gradient

    monkeypatch.setitem(resample.NEAREST_BACKWARD, mode, backward)
    gradient = torch.cat(on_threads(3, _gradient, mode), -2)
    # Columns of 3 become 4: one of them is there twice.
    expected = torch.zeros(12, dtype=torch.float64)
    expected[1], expected[9] = sum(range(5)), sum(range(5, 17))
    assert torch.equal(gradient[0, 0].amin(-1), expected)
    assert torch.equal(gradient[0, 1].amax(-1), 2 * expected)


@pytest.mark.parametrize("kind", [nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d])
@pytest.mark.parametrize("ranks", PROCESSES)
def test_upsample_on_processes(kind, ranks):
    """Four ranks leave some a single row; without a plan they gather their bands first."""
    options = {"scale_factor": 3}
    for planned in (True, False):
        on_processes(
            ranks, assert_same_as_whole_globe, _moved, (kind, options), (2, 2, 6, 5), 1e-12, 0.0,
            planned,
        )  # fmt: skip


class _Doubled(nn.Sequential):
    row_rules = {PeriodicUpsample: "periodic_upsample"}  # noqa: RUF012


def _doubled(poles):
    return _Doubled(PeriodicUpsample(poles))


@pytest.mark.slow
@given(
    ranks=RANKS,
    more=st.integers(0, 9),
    poles=st.sampled_from(["reflect", "zeros", "mirror", "earth"]),
    columns=st.integers(1, 6),
)
def test_upsample_around_the_globe(ranks, more, poles, columns):
    shape = (2, 2, ranks + more, columns)
    on_threads(ranks, assert_same_as_whole_globe, _doubled, (poles,), shape)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("ranks", PROCESSES)
def test_upsample_around_the_globe_on_processes(ranks, planned):
    args = (_doubled, ("earth",), (1, 2, 7, 5), 1e-12, 0.0, planned)
    on_processes(ranks, assert_same_as_whole_globe, *args)


def _interpolated(manager, x, options, dtype):
    layer = DomainParallelInterpolate(manager=manager, **options)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is None):
        made = layer(shard_tensor(x, manager=manager))
    return gather_tensor(made, manager=manager)


@pytest.mark.parametrize(
    ("mode", "antialias"),
    [*((mode, False) for mode in MODES), ("bilinear", True), ("bicubic", True)],
)
@pytest.mark.parametrize("size", [(23, 4), (7, 11)])
def test_interpolate_by_hand_in_single_precision(mode, antialias, size):
    x = torch.randn(2, 3, 10, 6)
    options = {"size": size, "mode": mode, "antialias": antialias}
    whole = F.interpolate(x, **options)
    for made in on_threads(4, _interpolated, x, options, torch.float32):
        assert made.dtype == torch.float32
        assert error(made, whole) < (1e-6 if mode[:7] != "nearest" else 1e-30)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_gives_torchs_dtype(mode, autocast):
    x = torch.randn(1, 2, 10, 6, dtype=torch.bfloat16)
    options = {"size": (23, 12), "mode": mode}
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        whole = F.interpolate(x, **options)
    for made in on_threads(3, _interpolated, x, options, None if autocast else x.dtype):
        assert made.dtype == whole.dtype
        assert error(made.float(), whole.float()) < 2e-2


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


@pytest.mark.parametrize(
    ("options", "dims"),
    [
        ({"size": (4, 23, 5), "mode": "nearest", "shard_dim": 3}, (3, 10, 6)),
        ({"scale_factor": 1.5, "mode": "trilinear", "shard_dim": 3}, (3, 10, 6)),
        ({"size": (23, 5), "mode": "bilinear", "shard_dim": 2}, (10, 6)),
        ({"size": 23, "mode": "linear", "shard_dim": 2}, (10,)),
    ],
)
def test_interpolate_counts_its_row_dim_from_the_start(options, dims):
    x = torch.randn(2, 3, *dims, dtype=torch.float64)
    settings = {key: value for key, value in options.items() if key != "shard_dim"}
    row_dim = options["shard_dim"]

    def case(manager):
        layer = DomainParallelInterpolate(manager=manager, **options)
        assert layer.shard_dim == row_dim
        return gather_tensor(layer(shard_tensor(x, row_dim, manager)), row_dim, manager)

    for y in on_threads(3, case):
        assert error(y, F.interpolate(x, **settings)) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (4, 6)}, "size is the whole globe's output, got 4 rows"),
        ({"size": (3, 6)}, "size is the whole globe's output, got 3 rows"),
        ({"size": (24, 6), "mode": "cubic"}, "mode must be one of nearest"),
        ({"size": (24, 6), "mode": "area", "antialias": True}, "bicubic with antialias, got area"),
        ({"size": (24, 1), "mode": "bilinear", "antialias": True}, "has a single column"),
    ],
)
def test_interpolate_refuses(options, message):
    """Of 11 rows on 3 ranks bands have 4 or 3: such a size was meant for a band."""
    with pytest.raises(RankError, match=message):
        on_threads(3, _interpolated, torch.randn(1, 1, 11, 6), options, torch.float32)


@pytest.mark.parametrize("layer", [nn.Upsample(scale_factor=1.5), nn.AdaptiveAvgPool2d((5, 3))])
def test_training_after_inference_mode(layer):
    def trained(manager):
        model = nn.Sequential(copy.deepcopy(layer))  # threads would share it
        sharded = convert_to_domain_parallel(model, manager, input_shape=(1, 2, 8, 6))
        x = torch.randn(1, 2, 4, 6)
        with torch.inference_mode():
            sharded(x)
        sharded(x.requires_grad_()).sum().backward()
        assert x.grad is not None

    on_threads(2, trained)


def test_converted_upsample_may_make_as_many_rows_as_a_band_has():
    options = {"size": (4, 6), "mode": "bilinear"}
    on_threads(4, assert_same_as_whole_globe, _moved, (nn.Upsample, options), (1, 2, 16, 6))


def _traffic(manager, x, options):
    layer = DomainParallelInterpolate(manager=manager, **options)
    x = shard_tensor(x, manager=manager)
    layer(x)
    before = manager.transport.traffic.bytes
    layer(x)
    return manager.transport.traffic.bytes - before


@pytest.mark.parametrize(
    ("options", "rows", "columns"),
    [
        ({"scale_factor": 2, "mode": "nearest"}, 0, 6),
        ({"scale_factor": 2, "mode": "bilinear"}, 1, 6),
        ({"scale_factor": 2, "mode": "bicubic"}, 2, 6),
        ({"size": (24, 2), "mode": "bilinear"}, 1, 2),  # columns shrink before rows travel
    ],
)
def test_each_needed_row_travels_once(options, rows, columns):
    x = torch.randn(1, 3, 12, 6, dtype=torch.float64)
    sent = on_threads(3, _traffic, x, options)
    assert [b // (3 * columns * 8) for b in sent] == [rows, 2 * rows, rows]


@given(ranks=RANKS, factor=st.integers(1, 4), height=st.integers(8, 20), un=st.booleans())
def test_pixel_shuffle(ranks, factor, height, un):
    """Bands of any height: 13 rows x 2 on 4 ranks don't line up with 26 rows on 4."""
    kind, name = (
        (nn.PixelUnshuffle, "downscale_factor") if un else (nn.PixelShuffle, "upscale_factor")
    )
    shape = (2, 2, height * factor, 2 * factor) if un else (2, 2 * factor**2, height, 3)
    on_threads(ranks, assert_same_as_whole_globe, _moved, (kind, {name: factor}), shape)


@pytest.mark.parametrize("move", ["turned", "times"])
def test_pixel_shuffle_of_rows_in_other_dimensions(move):
    model = (nn.PixelShuffle, {"upscale_factor": 2}, move)
    if move == "turned":
        on_threads(3, assert_same_as_whole_globe, _moved, model, (2, 4, 7, 3))
    else:  # (B, C, H, 1, W): rows are the channels of the shuffle
        with pytest.raises(RankError, match="rows are in the channels' dimension"):
            on_threads(2, assert_same_as_whole_globe, _moved, model, (2, 4, 8, 3))


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


def _roll(manager, x, shifts, dims, cotangent):
    band = shard_tensor(x, manager=manager).requires_grad_()
    made = DomainParallelRoll(shifts, dims, manager=manager)(band)
    made.backward(shard_tensor(cotangent, manager=manager))
    return gather_tensor(made.detach(), manager=manager), gather_tensor(band.grad, manager=manager)


@given(
    ranks=RANKS,
    more=st.integers(0, 9),
    shifts=st.lists(st.integers(-25, 25), min_size=1, max_size=3),
    data=st.data(),
)
def test_roll(ranks, more, shifts, data):
    dims = tuple(data.draw(st.sampled_from([-1, -2, 1, 2])) for _ in shifts)
    x, cotangent = torch.randn(2, 2, 3, ranks + more, 4)
    assume(len({d % 4 for d in dims}) == len(dims))
    whole = x.roll(tuple(shifts), dims)
    back = cotangent.roll(tuple(-s for s in shifts), dims)
    for made, grad in on_threads(ranks, _roll, x, tuple(shifts), dims, cotangent):
        assert torch.equal(made, whole)
        assert torch.equal(grad, back)


def test_roll_refuses_shifts_without_dimensions():
    with pytest.raises(UserError, match="one shift for each dimension"):
        DomainParallelRoll((1, 2), (-2,))
