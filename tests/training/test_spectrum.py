"""The error of zonal spectra: definition, invariances and gradient."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.config import StandardLossConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.grid import Grid
from credit_dp.data.valid_points import ValidPoints
from credit_dp.errors import UserError
from credit_dp.training.loss import FLOOR, amplitudes, build_loss, spectrum_error

WIDTHS = st.integers(1, 24)
SEEDS = st.integers(0, 2**31)
TINY = 2 * FLOOR**0.5  # more than what the floor adds to an amplitude


def rows(seed: int, width: int, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


@given(seed=SEEDS, width=WIDTHS)
def test_powers_add_up_to_the_mean_square(seed, width):
    x = rows(seed, width)
    powers = amplitudes(x).square() - FLOOR
    assert powers.shape == (3, width // 2 + 1)
    torch.testing.assert_close(powers.sum(-1), x.square().mean(-1), rtol=1e-12, atol=1e-15)


def test_a_wave_has_its_strength_wherever_it_lies():
    for width, number, phase in product((12, 13), (1, 4, 5), (0.0, 0.3, 2.0)):
        place = torch.arange(width, dtype=torch.float64) / width
        found = amplitudes(3 * torch.cos(2 * np.pi * number * place + phase))
        wanted = torch.zeros(width // 2 + 1, dtype=torch.float64)
        wanted[number] = 3 / 2**0.5
        torch.testing.assert_close(found, wanted, rtol=0, atol=TINY)


@given(seed=SEEDS, width=WIDTHS)
def test_the_error_is_never_more_than_the_mean_squared_difference(seed, width):
    x, y = rows(seed, width), rows(seed + 1, width)
    error = spectrum_error(x, y)
    assert error.shape == (3,)
    assert (error <= (x - y).square().mean(-1) * (1 + 1e-12)).all()


@given(seed=SEEDS, width=WIDTHS, factor=st.floats(0, 2))
def test_the_error_is_the_mean_squared_difference_where_only_amplitudes_differ(seed, width, factor):
    x = rows(seed, width)
    wanted = ((1 - factor) * x).square().mean(-1)
    torch.testing.assert_close(spectrum_error(factor * x, x), wanted, rtol=1e-3, atol=1e-3)


@given(seed=SEEDS, width=WIDTHS, shift=st.integers(0, 24))
def test_the_error_does_not_depend_on_longitude(seed, width, shift):
    x = rows(seed, width)
    assert spectrum_error(x.roll(shift, -1), x).max().item() < 1e-20


def test_gradient():
    for width, flat in product((1, 2, 7, 8), (False, True)):
        x = rows(1, width)
        if flat:  # no power at any wavenumber but 0, and none at all
            x = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).repeat(1, width)
        target = rows(2, width).requires_grad_()
        assert torch.autograd.gradcheck(spectrum_error, (x.requires_grad_(), target)), (width, flat)


def test_a_field_of_zeros_has_a_gradient_of_zeros():
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(2, 9, dtype=dtype, requires_grad=True)
        spectrum_error(x, rows(1, 9, 2).to(dtype)).sum().backward()
        assert x.grad is not None
        assert not x.grad.any(), dtype


def test_single_precision_is_enough_for_fields_far_from_zero():
    x, y = rows(1, 240) + 100, rows(2, 240) + 100
    wanted = spectrum_error(x, y)
    torch.testing.assert_close(
        spectrum_error(x.float(), y.float()).double(), wanted, rtol=1e-3, atol=0
    )


def test_gradient_of_the_whole_loss_with_points_left_out():
    channels = Channels((Channel("temperature", 500), Channel("sea")), (), (), (Channel("soil"),))
    generator = torch.Generator().manual_seed(3)
    valid = torch.rand(3, 4, 5, generator=generator) < 0.6
    valid[1, 0] = False  # a row without any
    config = StandardLossConfig(name="huber", spectrum=0.8, huber_delta=0.5)
    scale = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)[:, None, None]
    grid = Grid(np.linspace(90, -90, 4), np.arange(5) * 72.0)
    loss = build_loss(config, channels, grid, slice(0, 4), scale, ValidPoints(valid))
    forecast, target = (
        torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    target[:, ~valid] = float("nan")
    forecast.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss.by_channel(x, target), (forecast,))
    loss(forecast, target).backward()
    assert forecast.grad is not None
    assert not forecast.grad[:, ~valid].any()
    assert forecast.grad[:, valid].all()


def test_the_rows_of_a_band_of_latitudes_are_circles():
    """Those of a box are not."""
    channels = Channels((Channel("sea"),), (), ())
    scale = torch.ones(1, 1, 1, dtype=torch.float64)
    latitude, longitude = np.array([25.0, 15, 5, -5]), np.arange(6) * 60.0
    fields = torch.randn(2, 3, 1, 4, 6, generator=torch.Generator().manual_seed(3)).double()
    with_spectra, without = (
        build_loss(
            StandardLossConfig(spectrum=weight),
            channels,
            Grid(latitude, longitude),
            slice(0, 4),
            scale,
        )
        for weight in (0.8, 0.0)
    )
    area = np.diff(np.sin(np.radians([-10, 0, 10, 20, 30])))[::-1]
    power = np.abs(np.fft.rfft(fields.numpy()) / 6) ** 2 * [1, 2, 2, 1]
    error = (np.diff(np.sqrt(power), axis=0) ** 2).sum((0, -1))  # (B, 1, H)
    wanted = 0.8 * np.average(error.mean((0, 1)), weights=area)
    found = with_spectra(*fields) - without(*fields)
    assert found.item() == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(UserError, match=r"loss.spectrum: a global grid is needed here"):
        build_loss(
            StandardLossConfig(spectrum=1.0),
            channels,
            Grid(latitude, longitude / 2),
            slice(0, 4),
            scale,
        )
