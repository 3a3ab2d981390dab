"""Errors of whole fields: their definitions, and the ranks' shares, which add up to the globe's."""

from dataclasses import replace
from itertools import product
from math import factorial

import numpy as np
import pytest
import torch
from numpy.polynomial import legendre

from credit_dp.config import StandardLossConfig
from credit_dp.data.channels import Channel, Channels
from credit_dp.data.grid import Grid, unit_vectors
from credit_dp.data.valid_points import ValidPoints
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.sphere import EARTH_RADIUS
from credit_dp.training.field_errors import FLOOR
from credit_dp.training.loss import build_loss, channel_weights
from tests.ranks import PROCESSES, on_processes, on_threads
from tests.training.runs import alone

ROWS, COLUMNS = 13, 14
LATITUDE = np.linspace(90, -90, ROWS)
GRID = Grid(LATITUDE, np.arange(8) * 45.0)
CHANNELS = Channels((Channel("geopotential", 500), Channel("2m_temperature")), (), ())
SCALE = torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]
DEGREES = 7  # 0 to half of the rows
EVERY = StandardLossConfig(
    spectrum=0.3,
    sphere_spectrum=0.7,
    sphere_error="amse",
    gradient=0.4,
    variable_error={"geopotential": "mae"},
    variable_weight={"geopotential": 2.0},
)


def fields(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (3, 2, ROWS, COLUMNS)
    forecast, target = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return forecast, target


def added(config: StandardLossConfig, forecast: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """What the errors of fields add to each channel of the loss, in units of its weight."""
    none = {"spectrum": 0.0, "sphere_spectrum": 0.0, "gradient": 0.0}
    parts = [
        build_loss(one, CHANNELS, GRID, slice(0, ROWS), SCALE).by_channel(forecast, target)
        for one in (config, replace(config, **none))
    ]
    share = channel_weights(config, CHANNELS.output_channels)
    return (parts[0] - parts[1]).numpy() / share * share.sum()


def harmonic(order: int, degree: int) -> np.ndarray:
    """A normalised harmonic of order >= 0, `(H, W)` complex, by derivatives of polynomials."""
    sine = np.sin(np.deg2rad(LATITUDE))[:, None]
    polynomial = legendre.legder(np.eye(degree + 1)[degree], order)
    values = np.maximum(1 - sine**2, 0) ** (order / 2) * legendre.legval(sine, polynomial)
    norm = np.sqrt((2 * degree + 1) * factorial(degree - order) / factorial(degree + order))
    return norm * values * np.exp(2j * np.pi * order * np.arange(COLUMNS) / COLUMNS)


def synthesised(seed: int) -> tuple[torch.Tensor, dict[tuple[int, int], np.ndarray]]:
    """Fields with known coefficients `(B, C)` by order and degree."""
    random = np.random.default_rng(seed)
    total = np.zeros((3, 2, ROWS, COLUMNS))
    coefficients = {}
    for degree in range(DEGREES):
        for order in range(degree + 1):
            a = random.normal(size=(3, 2)) + (1j * random.normal(size=(3, 2)) if order else 0)
            coefficients[order, degree] = a
            wave = a[..., None, None] * harmonic(order, degree)
            total += wave.real * (2 if order else 1)
    return torch.from_numpy(total), coefficients


def test_spectra_on_the_sphere_are_those_of_the_coefficients() -> None:
    (forecast, a), (target, b) = synthesised(1), synthesised(2)
    scale = SCALE[:, 0, 0].numpy()
    wanted, coherence = np.zeros((3, 2)), np.zeros((3, 2))
    for degree in range(DEGREES):
        orders = [(order, 2 if order else 1) for order in range(degree + 1)]

        def shared(x: dict, y: dict, degree: int = degree, orders: list = orders) -> np.ndarray:
            parts = [n * (x[m, degree] * np.conj(y[m, degree])).real for m, n in orders]
            return sum(parts) / scale**2

        f, t, both = shared(a, a) + FLOOR, shared(b, b) + FLOOR, shared(a, b) + FLOOR
        wanted += (np.sqrt(f) - np.sqrt(t)) ** 2
        coherence += 2 * np.maximum(f, t) * (1 - both / np.sqrt(f * t))
    for error, values in (("amplitude", wanted), ("amse", wanted + coherence)):
        config = StandardLossConfig(sphere_spectrum=0.7, sphere_error=error)
        found = added(config, forecast, target)
        assert found == pytest.approx(0.7 * values.mean(axis=0), rel=1e-10), error
    # Against zero, the squared amplitudes of all degrees: the mean square over the globe.
    found = added(StandardLossConfig(sphere_spectrum=1.0), forecast, 0 * forecast)
    squares = sum(abs(x) ** 2 * (2 if m else 1) for (m, _), x in a.items())
    assert found == pytest.approx(squares.mean(axis=0) / scale**2, rel=1e-3)  # but for the floor


def test_the_spectrum_of_an_ensemble_is_that_of_each_member() -> None:
    config = StandardLossConfig(name="crps", sphere_spectrum=0.7)
    first, target = fields(1)
    second, _ = fields(2)
    members = torch.stack([first, second], dim=1).flatten(0, 1)
    alone = [added(StandardLossConfig(sphere_spectrum=0.7), x, target) for x in (first, second)]
    assert added(config, members, target) == pytest.approx(sum(alone) / 2, rel=1e-10)


def masked(seed: int = 4) -> torch.Tensor:
    valid = torch.rand(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[0] = True
    valid[1, 0, 0] = True
    return valid


def test_gradients_are_differences_to_the_next_point() -> None:
    """On the globe, and in a band of latitudes, whose columns go round as well."""
    for north, with_points in product((90, 30), (False, True)):
        latitude = LATITUDE * north / 90
        half = (latitude[0] - latitude[1]) / 2
        edges = np.radians(np.clip([latitude[0] + half, *(latitude - half)], -90, 90))
        area = -np.diff(np.sin(edges))
        area /= area.mean()
        forecast, target = fields()
        valid = masked() if with_points else torch.ones(2, ROWS, COLUMNS, dtype=torch.bool)
        error = ((forecast - target) / SCALE).numpy()
        wanted = np.zeros(2)
        for c, i, j in np.ndindex(2, ROWS, COLUMNS):
            south_area = (area[i] + area[i + 1]) / 2 if i + 1 < ROWS else 0
            for other, weight in (((i, (j + 1) % COLUMNS), area[i]), ((i + 1, j), south_area)):
                if other[0] < ROWS and valid[c, i, j] and valid[(c, *other)]:
                    step = error[:, c, other[0], other[1]] - error[:, c, i, j]
                    wanted[c] += weight * (step**2).mean()
        wanted /= [(area[:, None] * valid[c].numpy()).sum() for c in range(2)]
        if with_points:
            target[:, ~valid] = float("nan")
        grid = Grid(latitude, np.arange(COLUMNS) * 360 / COLUMNS)
        points = ValidPoints(valid) if with_points else None
        with_gradient, without = (
            build_loss(
                StandardLossConfig(gradient=weight), CHANNELS, grid, slice(0, ROWS), SCALE, points
            ).by_channel(forecast, target)
            for weight in (0.4, 0.0)
        )
        found = 2 * (with_gradient - without).numpy()  # both channels have half of the weight
        assert found == pytest.approx(0.4 * wanted, rel=1e-12), (north, with_points)


def test_each_variable_may_have_its_own_error() -> None:
    forecast, target = fields()
    own, mse, mae, huber = (
        build_loss(config, CHANNELS, GRID, slice(0, ROWS), SCALE).by_channel(forecast, target)
        for config in (
            StandardLossConfig(variable_error={"2m_temperature": "huber", "geopotential": "mae"}),
            StandardLossConfig(),
            StandardLossConfig(name="mae"),
            StandardLossConfig(name="huber"),
        )
    )
    assert torch.equal(own, torch.stack([mae[0], huber[1]]))
    part = StandardLossConfig(variable_error={"geopotential": "mae"})
    found = build_loss(part, CHANNELS, GRID, slice(0, ROWS), SCALE).by_channel(forecast, target)
    assert torch.equal(found, torch.stack([mae[0], mse[1]]))


def share(
    manager: DomainParallelManager, config: StandardLossConfig, with_points: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the loss by channel, and its gradient."""
    rows = manager.rows(ROWS)
    forecast, target = fields()
    points = None
    if with_points:
        valid = masked()
        target[:, ~valid] = float("nan")
        points = ValidPoints(valid[:, rows], manager.transport.all_reduce)
    loss = build_loss(config, CHANNELS, GRID, rows, SCALE, points, manager)
    own = forecast[:, :, rows].clone().requires_grad_()
    parts = loss.by_channel(own, target[:, :, rows])
    parts.sum().backward()
    assert own.grad is not None
    return parts.detach(), own.grad


@pytest.mark.parametrize("ranks", PROCESSES)
def test_bands_have_the_loss_and_the_gradient_of_the_globe(ranks: int) -> None:
    for error, with_points in product(("amplitude", "amse"), (False, True)):
        config = replace(EVERY, sphere_error=error)
        whole, gradient = share(alone(), config, with_points)
        found = on_threads(ranks, share, config, with_points)
        torch.testing.assert_close(sum(part for part, _ in found), whole, rtol=1e-12, atol=1e-15)
        together = torch.cat([part for _, part in found], dim=2)
        torch.testing.assert_close(together, gradient, rtol=1e-11, atol=1e-14)


WORLD = Grid(LATITUDE, np.arange(COLUMNS) * 360 / COLUMNS)
SCALES = [0.0, 2500.0, 9000.0]  # km; the last reaches beyond the neighbours of a band
ENSEMBLE = StandardLossConfig(
    name="crps", alpha=0.9, scales=SCALES, variable_weight={"geopotential": 2.0}
)


def ensemble_fields() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four members of each of two samples, the truth, and where it has values."""
    draw = torch.Generator().manual_seed(8)
    members = torch.randn(2, 4, 2, ROWS, COLUMNS, generator=draw, dtype=torch.float64)
    target = torch.randn(2, 2, ROWS, COLUMNS, generator=draw, dtype=torch.float64)
    return members, target, masked()


def by_definition(with_points: bool) -> np.ndarray:
    """The loss by channel: double loops over members, of means over points by their distances."""
    members, target, valid = (x.numpy() for x in ensemble_fields())
    valid = valid if with_points else np.ones_like(valid)
    points = unit_vectors(*WORLD.points).reshape(3, -1)
    distance = np.arccos((points.T @ points).clip(-1, 1)) * EARTH_RADIUS / 1000
    np.fill_diagonal(distance, 0)
    scores = np.zeros(2)
    for c, radius in product(range(2), SCALES):
        area = (WORLD.weights[:, None] * valid[c]).flatten()
        near = (distance <= radius) if radius else np.eye(len(area))

        def mean(fields: np.ndarray, near: np.ndarray = near, area: np.ndarray = area):
            total = (near @ area).clip(min=1e-9)
            return (fields.reshape(*fields.shape[:-2], -1) * area) @ near.T / total

        truth, each = mean(target[:, c]), mean(members[:, :, c])
        error = np.abs(each - truth[:, None]).mean(1)
        pairs = np.abs(each[:, :, None] - each[:, None]).sum((1, 2)) / 2
        score = error - pairs * (0.9 / (4 * 3) + 0.1 / 16)
        scale = SCALE[c].item() * len(SCALES)
        scores[c] += (score @ area).mean() / area.sum() / scale
    return scores * np.array([2, 1]) / 3


def ensemble_share(
    manager: DomainParallelManager, with_points: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the loss by channel, and the gradient of its members' bands."""
    rows = manager.rows(ROWS)
    members, target, valid = ensemble_fields()
    points = None
    if with_points:
        target[:, ~valid] = float("nan")
        points = ValidPoints(valid[:, rows], manager.transport.all_reduce)
    loss = build_loss(ENSEMBLE, CHANNELS, WORLD, rows, SCALE, points, manager)
    count = 4 // manager.ensemble_parallel_size
    own = members[:, manager.ensemble_rank * count :][:, :count, :, rows].clone().requires_grad_()
    parts = loss.by_channel(own.flatten(0, 1), target[:, :, rows])
    parts.sum().backward()
    assert own.grad is not None
    return parts.detach(), own.grad


@pytest.mark.parametrize("with_points", [False, True])
def test_area_means_of_members_have_the_loss_of_the_definition(with_points: bool) -> None:
    found, _ = ensemble_share(alone(), with_points)
    assert found.numpy() == pytest.approx(by_definition(with_points), rel=1e-12)


@pytest.mark.parametrize("ranks", PROCESSES)
def test_area_means_are_the_same_on_uneven_bands(ranks: int) -> None:
    for with_points in (False, True):
        whole, gradient = ensemble_share(alone(), with_points)
        found = on_threads(ranks, ensemble_share, with_points)
        torch.testing.assert_close(sum(part for part, _ in found), whole, rtol=1e-12, atol=0)
        together = torch.cat([part for _, part in found], dim=3)
        torch.testing.assert_close(together, gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("domain", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_area_means_are_the_same_if_ranks_share_members(domain: int) -> None:
    """With four ranks for two channels, some have no channel to score."""
    whole, gradient = ensemble_share(alone(), True)
    sizes = {"domain": domain, "ensemble": 4 // domain}
    found = on_processes(4, ensemble_share, True, **sizes)
    torch.testing.assert_close(sum(part for part, _ in found), whole, rtol=1e-12, atol=0)
    bands = [torch.cat([x for _, x in found[i::domain]], dim=1) for i in range(domain)]
    torch.testing.assert_close(torch.cat(bands, dim=3), gradient, rtol=1e-11, atol=1e-15)


@pytest.mark.slow
def test_the_gradient_of_all_errors_is_right() -> None:
    forecast, target = fields()
    loss = build_loss(EVERY, CHANNELS, GRID, slice(0, ROWS), SCALE)
    one = forecast[:1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, target[:1]), (one,))


def test_equal_fields_have_no_error_and_no_gradient() -> None:
    forecast, _ = fields()
    own = forecast.clone().requires_grad_()
    loss = build_loss(EVERY, CHANNELS, GRID, slice(0, ROWS), SCALE)(own, forecast)
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert own.grad is not None
    assert own.grad.abs().max() < 1e-12


def test_wrong_keys_are_refused() -> None:
    for options, said in (
        ({"gradient": -1.0}, r"loss\.gradient: .* at least 0, got -1"),
        ({"sphere_spectrum": float("nan")}, r"loss\.sphere_spectrum: .* at least 0, got nan"),
        ({"sphere_error": "phase"}, r"loss\.sphere_error: .*amplitude, amse, got 'phase'"),
        ({"variable_error": {"rain": "ame"}}, r"loss\.variable_error\.rain: .*mse, mae, huber"),
        ({"scales": [0, 500]}, r"^loss\.scales: needs loss=crps, got \[0, 500\] with loss=mse"),
        ({"name": "crps", "scales": [500, 0]}, r"^loss\.scales: needs radii that rise, .*\[500, 0"),
        ({"name": "crps", "scales": [0, 0]}, r"^loss\.scales: needs radii that rise, got \[0, 0\]"),
        ({"name": "crps", "scales": [-1]}, r"^loss\.scales: .* from 0 to 20004, got -1"),
        ({"name": "crps", "scales": [0, 20005]}, r"^loss\.scales: .* from 0 to 20004, got 20005"),
        ({"name": "crps", "scales": []}, r"^loss\.scales: needs at least one entry"),
    ):
        with pytest.raises(UserError, match=said):
            StandardLossConfig(**options)


def test_unknown_variables_and_other_rows_are_refused() -> None:
    unknown = StandardLossConfig(variable_error={"2m_temprature": "mae"})
    with pytest.raises(UserError, match=r"loss\.variable_error: .*'2m_temprature'.*2m_temperature"):
        build_loss(unknown, CHANNELS, GRID, slice(0, ROWS), SCALE)
    sphere = StandardLossConfig(sphere_spectrum=1.0)
    half = Grid(90 * np.linspace(1, -1, ROWS) ** 3, GRID.longitude)
    with pytest.raises(UserError, match=r"loss\.sphere_spectrum: needs rows that are evenly"):
        build_loss(sphere, CHANNELS, half, slice(0, ROWS), SCALE)
    region = Grid(np.linspace(60, 20, ROWS), GRID.longitude / 2)
    for key in ("spectrum", "sphere_spectrum"):
        with pytest.raises(UserError, match=rf"^loss\.{key}: a global grid .*Set loss\.{key}=0\.$"):
            build_loss(StandardLossConfig(**{key: 1.0}), CHANNELS, region, slice(0, ROWS), SCALE)
    with pytest.raises(
        UserError, match=r"^loss\.scales: a global grid .*Set loss\.scales=\[0\]\.$"
    ):
        build_loss(ENSEMBLE, CHANNELS, region, slice(0, ROWS), SCALE)
