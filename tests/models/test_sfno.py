"""The Spherical Fourier Neural Operator: its transforms, its symmetries, and what bands send."""

import math

import numpy as np
import pytest
import torch

from credit_dp.config import SFNOConfig
from credit_dp.data.grid import Grid, healpix_rows
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.errors import UserError
from credit_dp.fields import Fields, GridShape
from credit_dp.models import build_model
from tests.domain_parallel.equality import MODEL, assert_same_as_whole_globe
from tests.ranks import on_threads

FIELDS = Fields.flat(2, 1)
GAUSSIAN = np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(20)[0][::-1]))
# Rows with the poles, with neither pole, Gaussian ones, and these from south to north.
LATITUDES = {
    "odd": np.linspace(90, -90, 21),
    "even": np.arange(85.5, -90, -9),
    "without the poles": np.linspace(80, -80, 17),
    "Gaussian": GAUSSIAN,
    "from the south": GAUSSIAN[::-1],
}


def _model(rows, columns, latitude=None, **options):
    torch.manual_seed(0)
    config = SFNOConfig(**{"channels": 4, "blocks": 2, **options})
    return build_model(config, FIELDS, GridShape((rows, columns), latitude=latitude)).double()


def _coefficients(transform, channels=3):
    """Return random ones, 0 where there is no harmonic, or none of a real field."""
    orders, degrees = transform.functions.shape[:2]
    x = torch.randn(2, channels, degrees, orders, 2, dtype=torch.float64)
    x *= (torch.arange(degrees)[:, None] >= torch.arange(orders))[..., None]
    x[:, :, :, 0, 1] = 0
    return x


def test_analysis_inverts_synthesis():
    for (kind, latitude), scale in zip(LATITUDES.items(), (1, 2, 3, 1, 2), strict=True):
        model = _model(len(latitude), 40, latitude, scale=scale)
        for transform in (model.outer, model.inner):
            x = _coefficients(transform)
            assert (transform.analyse(transform.synthesise(x)) - x).abs().max() < 1e-12, kind
    fine = _model(181, 8, scale=1).outer
    x = _coefficients(fine, 1)
    error = (fine.analyse(fine.synthesise(x)) - x).abs().max() / x.abs().max()
    assert error < 1e-12


def test_waves_of_order_0_are_real(monkeypatch):
    """A real field has no others; what a library does with them differs."""
    transform = _model(21, 40).outer
    x = _coefficients(transform)
    fields = transform.synthesise(x)
    seen = []
    irfft = torch.fft.irfft
    monkeypatch.setattr(torch.fft, "irfft", lambda x, *a, **k: seen.append(x) or irfft(x, *a, **k))
    x[:, :, :, 0, 1] = 1
    assert torch.equal(transform.synthesise(x.requires_grad_()), fields)
    assert (seen[0].imag[..., 0] == 0).all()
    assert seen[0].imag.any()
    transform.synthesise(x).square().sum().backward()
    assert not x.grad[:, :, :, 0, 1].any()


# Harmonics as in textbooks, over their root mean squares: 1/2 |c|^2 is the mean square of a wave.
HARMONICS = {
    (0, 0): lambda lat: np.ones_like(lat),
    (1, 0): lambda lat: math.sqrt(3) * np.sin(lat),
    (1, 1): lambda lat: math.sqrt(3 / 2) * np.cos(lat),
    (2, 1): lambda lat: math.sqrt(15 / 2) * np.sin(lat) * np.cos(lat),
    (3, 0): lambda lat: math.sqrt(7) / 2 * (5 * np.sin(lat) ** 3 - 3 * np.sin(lat)),
    (3, 2): lambda lat: math.sqrt(105 / 8) * np.sin(lat) * np.cos(lat) ** 2,
    (4, 4): lambda lat: math.sqrt(315 / 128) * np.cos(lat) ** 4,
}


def test_a_harmonic_is_one_coefficient():
    longitude = 2 * math.pi * np.arange(40) / 40
    phase = torch.tensor([math.cos(1), -math.sin(1)], dtype=torch.float64)
    for kind, latitude in LATITUDES.items():
        transform = _model(len(latitude), 40, latitude).outer
        for (degree, order), rows in HARMONICS.items():
            field = rows(np.deg2rad(latitude))[:, None] * np.cos(order * longitude - 1)
            found = transform.analyse(torch.from_numpy(field)[None, None])[0, 0]
            expected = torch.zeros_like(found)
            expected[degree, order] = phase / 2 if order else phase * torch.tensor([1, 0])
            assert (found - expected).abs().max() < 1e-12, (kind, degree, order)


def test_a_filter_multiplies_by_complex_matrices():
    layer = _model(16, 32).blocks[0].filter
    x = torch.randn(2, 4, *layer.weight.shape[:1], 5, dtype=torch.complex128)
    weight = torch.view_as_complex(layer.weight.movedim(1, -1).contiguous())
    expected = torch.einsum("bilm,lij->bjlm", x, weight)
    found = torch.view_as_complex(layer(torch.view_as_real(x)).contiguous())
    torch.testing.assert_close(found, expected)


def test_a_turned_state_has_the_turned_forecast():
    for rows in (16, 17):
        model = _model(rows, 32)
        x = torch.randn(2, 3, rows, 32, dtype=torch.float64)
        error = (model(x.roll(4, -1)) - model(x).roll(4, -1)).abs().max()
        assert error < 1e-12, rows
        # About an axis through the equator by half a turn, where only real matrices commute.
        for block in model.blocks:
            block.filter.weight.data[:, 1] = 0
        error = (model(x.flip(-2, -1).roll(1, -1)) - model(x).flip(-2, -1).roll(1, -1)).abs().max()
        assert error < 1e-12, rows


@pytest.mark.slow
def test_degrees_are_those_that_rows_integrate_and_the_coarser_grid_has():
    """Half of 33 rows, rounded up; a third of 60 columns has waves up to 9."""
    assert _model(33, 60, scale=1).outer.functions.shape == (17, 17, 33)
    assert _model(33, 60, scale=3).outer.functions.shape == (10, 11, 33)
    assert _model(33, 60, scale=3).inner.functions.shape == (10, 11, 11)


def test_coefficients_are_in_float32_under_autocast():
    model = _model(16, 32).float()
    x = torch.randn(1, 4, 16, 32).bfloat16()
    wanted = model.outer.analyse(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = model.blocks[0].filter(model.outer.analyse(x))
        assert torch.equal(model.outer.analyse(x), wanted)
        assert model.outer.synthesise(found).dtype == found.dtype == torch.float32
    assert torch.equal(found, model.blocks[0].filter(wanted))


def test_a_grid_without_harmonics_is_refused():
    for grid, start in (
        (GridShape((16, 32), False), "model: sfno needs the globe, "),
        (GridShape((16, 32), False, True), "model: sfno needs the globe, "),
        (GridShape((2, 32)), "model.scale: 2 leaves 1x16 points of the grid of 2x32, "),
        (GridShape((16, 4)), "model.scale: 2 leaves 8x2 points of the grid of 16x4, "),
        (Grid(healpix_rows(16)[0], np.arange(32) * 11.25), "model: needs rows that are evenly "),
    ):
        with pytest.raises(UserError) as error:
            build_model(SFNOConfig(), FIELDS, grid)
        assert str(error.value).startswith(start), grid


def test_sharded_equals_whole():
    """On tensors of the globe, and nothing runs whole."""
    options = (0.0, True, 0, None, "allow")
    case = (_model, (17, 32), (2, 3, 17, 32), MODEL, *options)
    on_threads(3, assert_same_as_whole_globe, *case)


def _sent(manager, rows, columns):
    """Return the bytes and messages of a step, and what ran whole."""
    model = _model(rows, columns)
    shard_model(model, manager, (1, 3, rows, columns))
    x = torch.randn(1, 3, len(range(rows)[manager.rows(rows)]), columns, dtype=torch.float64)
    before = manager.transport.traffic.bytes, manager.transport.traffic.messages
    model(x).square().sum().backward()
    traffic = manager.transport.traffic
    whole = attached_domain(model).whole_calls
    return traffic.bytes - before[0], traffic.messages - before[1], sum(whole.values())


@pytest.mark.slow
def test_bands_send_each_coefficient_once():
    """Rows are exchanged for orders, and back: of each all but a rank's own part is sent."""
    ranks, rows, columns, orders, channels, blocks = 4, 33, 64, 16, 4, 2
    sent = on_threads(ranks, _sent, rows, columns)
    numbers = 0
    for height in [rows] + [17] * (2 * blocks + 2) + [rows]:
        bands = [len(part) for part in np.array_split(range(height), ranks)]
        # The orders of a rank are a fourth of all, whatever its rows.
        numbers += channels * 2 * sum(band * (orders - orders // ranks) for band in bands)
    forward_and_backward, float64 = 2, 8
    assert sum(of_rank[0] for of_rank in sent) == forward_and_backward * float64 * numbers
    messages = (2 * blocks + 4) * (ranks - 1) * forward_and_backward
    assert [of_rank[1:] for of_rank in sent] == [(messages, 0)] * ranks
