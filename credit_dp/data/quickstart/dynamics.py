"""A three-level quasi-geostrophic atmosphere with seasons, mountains and continents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


def ladder(orders: Array, degree: int) -> Array:
    """`eps` of `mu P[n] = eps[n + 1] P[n + 1] + eps[n] P[n - 1]`, zero where `n <= m`."""
    return np.sqrt(np.maximum(degree**2 - orders**2, 0) / (4.0 * degree**2 - 1))


def legendre(truncation: int, degrees: int, mu: Array) -> Array:
    """Normalised associated Legendre functions.

    Shapes:
        mu `(L,)` -> `(truncation + 1, L, degrees)`, indexed by order, latitude, degree.

    Source: Holmes & Featherstone 2002, eq. 11 (standard forward columns).
    """
    orders = np.arange(truncation + 1, dtype=np.float64)
    table = np.zeros((truncation + 1, len(mu), degrees))
    sectoral = np.ones(len(mu))
    for m in range(min(truncation + 1, degrees)):
        if m > 0:
            sectoral = sectoral * np.sqrt((2 * m + 1) / (2 * m) * (1 - mu**2))
        table[m, :, m] = sectoral
    for n in range(1, degrees):
        lower = orders < n
        below = table[lower, :, n - 2] * ladder(orders[lower], n - 1)[:, None] if n > 1 else 0.0
        table[lower, :, n] = (mu * table[lower, :, n - 1] - below) / ladder(orders[lower], n)[
            :, None
        ]
    return table


def legendre_slope(truncation: int, degrees: int, mu: Array) -> Array:
    """`(1 - mu^2) dP/dmu` of the functions that `legendre` returns, in the same shape."""
    table = legendre(truncation, degrees + 1, mu)
    orders = np.arange(truncation + 1, dtype=np.float64)
    slope = np.zeros((truncation + 1, len(mu), degrees))
    for n in range(degrees):
        slope[:, :, n] = -n * ladder(orders, n + 1)[:, None] * table[:, :, n + 1]
        if n > 0:
            slope[:, :, n] += (n + 1) * ladder(orders, n)[:, None] * table[:, :, n - 1]
    return slope


def fourier(truncation: int, longitudes: Array) -> Array:
    """Rows of cosines and minus sines: coefficients to values at `longitudes` (radians).

    Shapes:
        `(W,)` -> `(W, 2 (truncation + 1))`.
    """
    angle = longitudes[:, None] * np.arange(truncation + 1)
    return np.stack([np.cos(angle), -np.sin(angle)], axis=-1).reshape(len(longitudes), -1)


def degrees_squared(degrees: int) -> Array:
    """`n (n + 1)`: minus the Laplacian's eigenvalues on the unit sphere."""
    n = np.arange(degrees, dtype=np.float64)
    return n * (n + 1)


def along_longitude(coefficients: Array) -> Array:
    """The coefficients of the derivative in longitude: multiplication by `i m`."""
    m = np.arange(coefficients.shape[1], dtype=coefficients.dtype)[:, None]
    result = np.empty_like(coefficients)
    np.multiply(-m, coefficients[:, :, 1], out=result[:, :, 0])
    np.multiply(m, coefficients[:, :, 0], out=result[:, :, 1])
    return result


def to_grid(associated: Array, waves: Array, coefficients: Array) -> Array:
    """Sums a spectral series at the points of a grid.

    Shapes:
        associated `(M, L, N)`, waves `(W, 2 M)`, coefficients `(F, M, 2, N)` -> `(W, F, L)`.
    """
    orders, latitudes, degrees = associated.shape
    fields = len(coefficients)
    folded = coefficients.transpose(1, 3, 2, 0).reshape(orders, degrees, 2 * fields)
    zonal = np.matmul(associated, folded).reshape(orders, latitudes, 2, fields)
    zonal = zonal.transpose(0, 2, 3, 1).reshape(2 * orders, fields * latitudes)
    return np.asarray((waves @ zonal).reshape(len(waves), fields, latitudes))


@final
@dataclass(frozen=True)
class GaussianGrid:
    """The transform grid on which products of two truncated fields have no aliasing error.

    Shapes:
        `inverse` and `inverse_slope` `(T + 1, L, T + 1)`, `direct` and `direct_slope`
        `(T + 1, T + 1, L)` with the quadrature weights divided by `1 - mu^2`, `waves`
        `(W, 2 T + 2)`, `analysis` `(2 T + 2, W)`.

    Source: Orszag 1970 (W >= 3 T + 1, L >= (3 T + 1) / 2).
    """

    mu: Array
    longitudes: Array
    inverse: Array
    inverse_slope: Array
    direct: Array
    direct_slope: Array
    waves: Array
    analysis: Array

    @classmethod
    def of(cls, truncation: int, dtype: type[np.floating[Any]] = np.float32) -> "GaussianGrid":
        """The smallest such grid for `truncation`, with its tables in `dtype`."""
        latitudes = -(-(3 * truncation + 1) // 4) * 2
        mu, weights = np.polynomial.legendre.leggauss(latitudes)
        longitudes = 2 * np.pi * np.arange(2 * latitudes) / (2 * latitudes)
        table = legendre(truncation, truncation + 1, mu)
        slope = legendre_slope(truncation, truncation + 1, mu)
        weight = (weights / (2 * (1 - mu**2)))[:, None]
        waves = fourier(truncation, longitudes)
        # Folding +m and -m into one real part doubles every wave but the zonal mean.
        analysis = (
            waves.T * (np.where(np.arange(2 * truncation + 2) < 2, 1, 2) / len(waves))[:, None]
        )
        tables = (
            table,
            slope,
            (table * weight).transpose(0, 2, 1),
            (slope * weight).transpose(0, 2, 1),
            waves,
            analysis,
        )
        return cls(mu, longitudes, *(np.ascontiguousarray(t, dtype=dtype) for t in tables))

    def transform(self, values: Array, slope: bool = False) -> Array:
        """Projects `values` on the harmonics (or on their slopes), weighted by `1 / (1 - mu^2)`.

        Shapes:
            `(W, F, L)` -> `(F, T + 1, 2, T + 1)`.
        """
        longitudes, fields, latitudes = values.shape
        orders = len(self.direct)
        zonal = self.analysis @ values.reshape(longitudes, -1)
        folded = zonal.reshape(orders, 2 * fields, latitudes).transpose(0, 2, 1)
        table = self.direct_slope if slope else self.direct
        spectrum = np.matmul(table, folded).reshape(orders, orders, 2, fields)
        return np.asarray(spectrum.transpose(3, 0, 2, 1))

    def project(self, values: Array) -> Array:
        """The coefficients of `values`: the inverse of `to_grid` for truncated fields."""
        return self.transform(values * (1 - self.mu**2).astype(values.dtype))


GRAVITY = 9.80665  # m s-2
DRY_AIR = 287.05  # J kg-1 K-1
RADIUS = 6.371e6  # m
ROTATION = 7.292e-5  # s-1
DAY = 86400.0  # s
YEAR_DAYS = 365.2425
LAPSE_RATE = 6.5e-3  # K m-1
COLDEST_DAY = 15.0  # of the year, in the north
TITLE = "Quasi-geostrophic quickstart climate"  # how the titles of its stores begin


@final
@dataclass(frozen=True)
class Bump:
    """A smooth hill or continent: centre and half widths in degrees."""

    longitude: float
    latitude: float
    width: float
    height: float

    def distance(self, longitude: Array, latitude: Array) -> Array:
        """Squared distance from the centre in half widths, on the outer product of both axes."""
        east = np.sin(np.radians(longitude - self.longitude) / 2)[:, None]
        east = 2 * np.degrees(np.arcsin(np.abs(east))) * np.cos(np.radians(latitude))[None, :]
        north = (latitude - self.latitude)[None, :]
        return np.asarray((east / self.width) ** 2 + (north / self.height) ** 2)


CONTINENTS = (
    Bump(80.0, 48.0, 42.0, 24.0),
    Bump(262.0, 50.0, 26.0, 22.0),
    Bump(20.0, 0.0, 20.0, 32.0),
    Bump(300.0, -15.0, 16.0, 30.0),
    Bump(134.0, -25.0, 16.0, 12.0),
    Bump(0.0, -90.0, 400.0, 20.0),
)
MOUNTAINS = (
    (3500.0, Bump(88.0, 36.0, 14.0, 9.0)),
    (2200.0, Bump(250.0, 44.0, 8.0, 13.0)),
    (1800.0, Bump(318.0, 73.0, 8.0, 8.0)),
    (1800.0, Bump(290.0, -24.0, 6.0, 18.0)),
    (900.0, Bump(30.0, -5.0, 10.0, 20.0)),
    (2500.0, Bump(0.0, -90.0, 400.0, 14.0)),
)


def land_fraction(longitude: Array, latitude: Array) -> Array:
    """Share of land, 0 to 1. Shapes: `(W,)` and `(L,)`, both in degrees, -> `(W, L)`."""
    sea = np.ones((len(longitude), len(latitude)))
    for continent in CONTINENTS:
        edge = np.sqrt(continent.distance(longitude, latitude)) - 1
        sea = sea * (0.5 + 0.5 * np.tanh(6 * edge))
    return np.asarray(1 - sea)


def terrain(longitude: Array, latitude: Array) -> Array:
    """Height of the ground in metres. Shapes as `land_fraction`."""
    height = np.zeros((len(longitude), len(latitude)))
    for peak, bump in MOUNTAINS:
        height += peak * np.exp(-bump.distance(longitude, latitude))
    return height


def winter(day_of_year: float) -> float:
    """1 in the depth of the northern winter, -1 half a year later."""
    return float(np.cos(2 * np.pi * (day_of_year - COLDEST_DAY) / YEAR_DAYS))


LEVELS = (200, 500, 800)  # hPa
STREAM = RADIUS**2 * ROTATION  # m2 s-1 of one unit of streamfunction


@final
@dataclass(frozen=True)
class Physics:
    """The model's constants."""

    deformation: tuple[float, float] = (700e3, 450e3)  # m, Marshall & Molteni
    relaxation_days: float = 15.0
    friction_days: float = 5.0
    depth: float = 9000.0  # m, scale height over which mountains squeeze the lowest layer
    shear: tuple[float, float] = (32.0, 16.0)  # m s-1 at the jet's core, 200-500 and 500-800 hPa
    season: float = 0.35  # the jet's strength swings by this share
    core: float = 45.0  # degrees of latitude, annual mean
    core_swing: float = 5.0  # degrees towards the equator in winter
    core_width: float = 16.0  # degrees
    land_swing: float = 20.0  # K, a continent's winter cold below the zonal mean
    smallest_days: float = 0.6  # hyperdiffusion's time on the smallest wave
    order: int = 4  # power of the Laplacian


def jet(latitude: Array, physics: Physics, cold: float) -> Array:
    """Zonal shear in units of its core's, positive eastward; `cold` is 1 in the north's winter."""
    speed = np.zeros_like(latitude)
    for side in (1.0, -1.0):
        here = side * cold
        centre = physics.core - physics.core_swing * here
        strength = 1 + physics.season * here
        speed += strength * np.exp(-(((side * latitude - centre) / physics.core_width) ** 2))
    return np.asarray(speed * np.cos(np.radians(latitude)) / np.cos(np.radians(physics.core)))


@final
class QuasiGeostrophic:
    """Steps the model; the state is potential vorticity less that of the resting planet.

    Shapes:
        states and tendencies `(3, T + 1, 2, T + 1)`, coefficients as in `spectral`.
    """

    def __init__(
        self,
        truncation: int,
        physics: Physics | None = None,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        self.truncation = truncation
        self.physics = physics or Physics()
        self.dtype = dtype
        self.grid = GaussianGrid.of(truncation, dtype)
        self.mask = np.tri(truncation + 1, dtype=dtype).T[:, None, :]
        self.invert = self._inversion()
        self.resting = self._resting()
        self.linear = product(self._damping(), self.invert)
        self.forcing = self._forcing()

    def streamfunction(self, state: Array) -> Array:
        """`psi` in Earth radii squared times Omega; its mean is zero."""
        return product(self.invert, state)

    def advection(self, state: Array) -> Array:
        """`-J(psi, q)` in flux form: conserves energy and enstrophy but for the time stepping."""
        psi, levels = self.streamfunction(state), len(state)
        carried = np.concatenate([along_longitude(psi), state + self.resting])
        values = to_grid(self.grid.inverse, self.grid.waves, carried)
        north, q = values[:, :levels], values[:, levels:]
        west = to_grid(self.grid.inverse_slope, self.grid.waves, psi)
        divergence = along_longitude(self.grid.transform(west * q))
        divergence += self.grid.transform(north * q, slope=True)
        return divergence * self.mask

    def sources(self, state: Array, cold: float) -> Array:
        """Relaxation and friction; `cold` is 1 in the depth of the north's winter."""
        mean, swing = self.forcing
        return product(self.linear, state) + (mean + self.dtype(cold) * swing)

    def hyperdiffusion(self) -> Array:
        """Its rate for each degree. Shapes: `(T + 1,)`."""
        scale = degrees_squared(self.truncation + 1) / (self.truncation * (self.truncation + 1))
        rate = scale**self.physics.order / (self.physics.smallest_days * DAY * ROTATION)
        return rate.astype(self.dtype)

    def _stretching(self) -> Array:
        upper, lower = ((RADIUS / r) ** 2 for r in self.physics.deformation)
        return np.array([[-upper, upper, 0], [upper, -upper - lower, lower], [0, lower, -lower]])

    def _inversion(self) -> Array:
        laplacian = -degrees_squared(self.truncation + 1)[:, None, None] * np.eye(3)
        operator = laplacian + self._stretching()
        operator[0] = np.eye(3)
        inverse = np.linalg.inv(operator)
        inverse[0] = 0  # no mean: only differences of a streamfunction mean anything
        return inverse.transpose(1, 2, 0).astype(self.dtype)

    def _damping(self) -> Array:
        rate = -1 / (self.physics.relaxation_days * DAY * ROTATION)
        damping = np.repeat(rate * self._stretching()[..., None], self.truncation + 1, axis=-1)
        friction = 1 / (self.physics.friction_days * DAY * ROTATION)
        damping[2, 2] += friction * degrees_squared(self.truncation + 1)
        return damping.astype(self.dtype)

    def _resting(self) -> Array:
        longitude, latitude = np.degrees(self.grid.longitudes), np.degrees(np.arcsin(self.grid.mu))
        vorticity = np.tile(2 * self.grid.mu, (len(longitude), 3, 1))
        vorticity[:, 2] *= 1 + terrain(longitude, latitude) / self.physics.depth
        return self.grid.project(vorticity.astype(self.dtype)) * self.mask

    def _forcing(self) -> tuple[Array, Array]:
        """Potential vorticity per time towards the mean climate, and its swing with the season."""
        stretching = self._stretching() / (self.physics.relaxation_days * DAY * ROTATION)
        north, south = (
            product(stretching[..., None], self._equilibrium(cold)).astype(self.dtype)
            for cold in (1.0, -1.0)
        )
        return (north + south) / 2, (north - south) / 2

    def _equilibrium(self, cold: float) -> Array:
        """A streamfunction that has the thicknesses of the climate relaxed to."""
        latitude = np.degrees(np.arcsin(self.grid.mu))
        shear = jet(latitude, self.physics, cold) / (RADIUS * ROTATION)
        zonal = np.tile(shear * np.sqrt(1 - self.grid.mu**2), (len(self.grid.longitudes), 1, 1))
        # u cos(lat) = -(1 - mu^2) dpsi/dmu, projected on slopes and divided by n (n + 1).
        slopes = self.grid.transform(-zonal.astype(self.dtype), slope=True)
        profile = slopes / np.maximum(degrees_squared(self.truncation + 1), 1) * self.mask
        upper, lower = self.physics.shear
        asymmetry = self._land_contrast() * cold
        return np.concatenate(
            [upper * profile + asymmetry, 0 * profile, -lower * profile - asymmetry / 2]
        )

    def _land_contrast(self) -> Array:
        """Streamfunction thickness of the winter cold over land (the summer's has its sign)."""
        mu = self.grid.mu
        land = land_fraction(np.degrees(self.grid.longitudes), np.degrees(np.arcsin(mu)))
        contrast = land - land.mean(axis=0)
        # The sign of latitude enters twice, through the season and through f in psi =
        # geopotential / f; the division is softened at the equator.
        kelvin = -self.physics.land_swing * np.abs(mu) / (mu**2 + 0.15)
        psi = DRY_AIR * np.log(LEVELS[1] / LEVELS[0]) * kelvin / (2 * ROTATION) / STREAM
        return self.grid.project((contrast * psi)[:, None].astype(self.dtype)) * self.mask


def product(left: Array, right: Array) -> Array:
    """Matrix product over levels, elementwise in the rest. Shapes: `(3, 3, N)`, `(3, ..., N)`."""
    spread = left.reshape(3, 3, *(1,) * (right.ndim - 2), left.shape[-1])
    return np.asarray((spread * right[None]).sum(axis=1))


SAMPLE_SECONDS = 21600.0
LONGEST_STEP = 64000.0  # s, divided by the truncation: a wind of 100 m/s stays stable
FILTER = 0.04  # Robert's coefficient
SHARE = 0.53  # Williams' split of the filter between two steps


def initial_state(model: QuasiGeostrophic, rng: np.random.Generator) -> Array:
    """Weak, large-scale noise: what the baroclinic instability grows from."""
    size = model.truncation + 1
    degree = np.arange(size)
    noise = rng.standard_normal((3, size, 2, size)) * 1e-2 * np.exp(-(((degree - 8) / 5) ** 2))
    noise[:, 0, 1] = 0
    return np.asarray((noise * model.mask).astype(model.dtype))


def integrate_six_hourly(
    model: QuasiGeostrophic, state: Array, day_of_year: float
) -> Iterator[Array]:
    """Yields `state` and then the state of every six hours that follow, without end.

    Source: Robert 1966 and Williams 2009 for the filter; linear terms from the earlier step and
    implicit hyperdiffusion keep the damping stable.
    """
    substeps = int(np.ceil(SAMPLE_SECONDS / (LONGEST_STEP / model.truncation)))
    seconds = SAMPLE_SECONDS / substeps
    step = model.dtype(seconds * ROTATION)
    smooth = 1 / (1 + 2 * step * model.hyperdiffusion())
    before = state
    now = state + step * (model.advection(state) + model.sources(state, winter(day_of_year)))
    yield before
    count = 1
    while True:
        if count % substeps == 0:
            yield now
        cold = winter(day_of_year + count * seconds / DAY)
        after = (before + 2 * step * (model.advection(now) + model.sources(before, cold))) * smooth
        wiggle = model.dtype(FILTER / 2) * (before - 2 * now + after)
        before = now + model.dtype(SHARE) * wiggle
        now = after - model.dtype(1 - SHARE) * wiggle
        count += 1
