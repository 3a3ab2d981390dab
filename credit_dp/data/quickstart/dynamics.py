"""A spectral three-level quasi-geostrophic atmosphere with seasons, mountains and continents.

The file has, in this order: spherical harmonics and transforms (`GaussianGrid`), the shape of the
planet (`land_fraction`, `terrain`), the model (`QuasiGeostrophic`) and its time stepping
(`integrate_six_hourly`). Spectral coefficients have the shape `(fields, order, 2, degree)`, with
the real and the imaginary part in the third dim.

Source: Marshall & Molteni 1993.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


def ladder(orders: Array, degree: int) -> Array:
    """Return `eps[n]` of `mu P[n] = eps[n + 1] P[n + 1] + eps[n] P[n - 1]`, zero for `n <= m`."""
    return np.sqrt(np.maximum(degree**2 - orders**2, 0) / (4.0 * degree**2 - 1))


def legendre(truncation: int, degrees: int, mu: Array) -> Array:
    """Return normalised associated Legendre functions.

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
        previous = table[lower, :, n - 2] * ladder(orders[lower], n - 1)[:, None] if n > 1 else 0.0
        table[lower, :, n] = (mu * table[lower, :, n - 1] - previous) / ladder(orders[lower], n)[
            :, None
        ]
    return table


def legendre_slope(truncation: int, degrees: int, mu: Array) -> Array:
    """Return `(1 - mu^2) dP/dmu` of the functions of `legendre`, in the same shape."""
    table = legendre(truncation, degrees + 1, mu)
    orders = np.arange(truncation + 1, dtype=np.float64)
    slope = np.zeros((truncation + 1, len(mu), degrees))
    for n in range(degrees):
        slope[:, :, n] = -n * ladder(orders, n + 1)[:, None] * table[:, :, n + 1]
        if n > 0:
            slope[:, :, n] += (n + 1) * ladder(orders, n)[:, None] * table[:, :, n - 1]
    return slope


def fourier(truncation: int, longitudes: Array) -> Array:
    """Return the matrix of cosines and minus sines that sums a Fourier series.

    Shapes:
        longitudes in radians `(W,)` -> `(W, 2 (truncation + 1))`.
    """
    angle = longitudes[:, None] * np.arange(truncation + 1)
    return np.stack([np.cos(angle), -np.sin(angle)], axis=-1).reshape(len(longitudes), -1)


def degrees_squared(degrees: int) -> Array:
    """Return `n (n + 1)`, minus the eigenvalues of the Laplacian on the unit sphere."""
    degree = np.arange(degrees, dtype=np.float64)
    return degree * (degree + 1)


def along_longitude(coefficients: Array) -> Array:
    """Return the coefficients of the derivative in longitude: multiply by `i m`."""
    m = np.arange(coefficients.shape[1], dtype=coefficients.dtype)[:, None]
    result = np.empty_like(coefficients)
    np.multiply(-m, coefficients[:, :, 1], out=result[:, :, 0])
    np.multiply(m, coefficients[:, :, 0], out=result[:, :, 1])
    return result


def to_grid(associated: Array, waves: Array, coefficients: Array) -> Array:
    """Sum a spectral series at the points of a grid.

    Shapes:
        associated `(M, L, N)`, waves `(W, 2 M)`, coefficients `(F, M, 2, N)` -> `(W, F, L)`.
    """
    orders, latitudes, degrees = associated.shape
    fields = len(coefficients)
    folded = coefficients.transpose(1, 3, 2, 0).reshape(orders, degrees, 2 * fields)
    # First over degrees for each order and latitude, then over orders: two matrix products.
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
        """Return the smallest grid without aliasing, with tables in `dtype`."""
        num_latitudes = -(-(3 * truncation + 1) // 4) * 2
        mu, weights = np.polynomial.legendre.leggauss(num_latitudes)
        longitudes = 2 * np.pi * np.arange(2 * num_latitudes) / (2 * num_latitudes)
        table = legendre(truncation, truncation + 1, mu)
        slope = legendre_slope(truncation, truncation + 1, mu)
        weight = (weights / (2 * (1 - mu**2)))[:, None]
        waves = fourier(truncation, longitudes)
        # A real field has equal waves at +m and -m: all but the zonal mean count twice.
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
        """Project `values` on the harmonics (or on their slopes), weighted by `1 / (1 - mu^2)`.

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
        """Return the coefficients of `values`: the inverse of `to_grid` for truncated fields."""
        return self.transform(values * (1 - self.mu**2).astype(values.dtype))


DRY_AIR = 287.05  # J kg-1 K-1
RADIUS = 6.371e6  # m
ROTATION = 7.292e-5  # s-1
DAY = 86400.0  # s
YEAR_DAYS = 365.2425
LAPSE_RATE = 6.5e-3  # K m-1
COLDEST_DAY = 15.0  # of the year, in the north
TITLE = "Quasi-geostrophic quickstart climate"  # the beginning of the title of its stores


@final
@dataclass(frozen=True)
class Bump:
    """A smooth hill or continent: centre and half widths in degrees."""

    longitude: float
    latitude: float
    width: float
    height: float

    def distance(self, longitude: Array, latitude: Array) -> Array:
        """Return the squared distance from the centre in half widths, `(W, L)`."""
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
    """Return the fraction of land.

    Shapes:
        longitudes `(W,)`, latitudes `(L,)`, in degrees -> `(W, L)`.
    """
    sea = np.ones((len(longitude), len(latitude)))
    for continent in CONTINENTS:
        edge = np.sqrt(continent.distance(longitude, latitude)) - 1
        sea = sea * (0.5 + 0.5 * np.tanh(6 * edge))
    return np.asarray(1 - sea)


def terrain(longitude: Array, latitude: Array) -> Array:
    """Return the surface height in metres; shapes as for `land_fraction`."""
    height = np.zeros((len(longitude), len(latitude)))
    for peak, bump in MOUNTAINS:
        height += peak * np.exp(-bump.distance(longitude, latitude))
    return height


def winter(day_of_year: float) -> float:
    """Return the season as a number: 1 in the northern mid-winter, -1 half a year later."""
    return float(np.cos(2 * np.pi * (day_of_year - COLDEST_DAY) / YEAR_DAYS))


LEVELS = (200, 500, 800)  # hPa
STREAM = RADIUS**2 * ROTATION  # m2 s-1, the unit of the streamfunction


@final
@dataclass(frozen=True)
class Physics:
    """The constants of the model."""

    deformation: tuple[float, float] = (700e3, 450e3)  # m, Marshall & Molteni
    relaxation_days: float = 15.0
    friction_days: float = 5.0
    depth: float = 9000.0  # m, scale height by which mountains act on the lowest layer
    shear: tuple[float, float] = (32.0, 16.0)  # m s-1 in the core of the jet: 200-500, 500-800 hPa
    season: float = 0.35  # seasonal amplitude of the jet, relative to its mean
    core: float = 45.0  # degrees of latitude, annual mean
    core_swing: float = 5.0  # degrees towards the equator in winter
    core_width: float = 16.0  # degrees
    land_swing: float = 20.0  # K by which a continent is colder than the zonal mean in winter
    smallest_days: float = 0.6  # time scale of hyperdiffusion at the smallest wave
    order: int = 4  # power of the Laplacian


def jet(latitude: Array, physics: Physics, cold: float) -> Array:
    """Return the zonal shear relative to that in the core of the jet, positive eastward.

    Shapes:
        latitude in degrees `(L,)` -> `(L,)`; `cold` is a value of `winter`.
    """
    speed = np.zeros_like(latitude)
    for hemisphere in (1.0, -1.0):
        local_winter = hemisphere * cold
        centre = physics.core - physics.core_swing * local_winter
        strength = 1 + physics.season * local_winter
        speed += strength * np.exp(-(((hemisphere * latitude - centre) / physics.core_width) ** 2))
    return np.asarray(speed * np.cos(np.radians(latitude)) / np.cos(np.radians(physics.core)))


@final
class QuasiGeostrophic:
    """The tendencies of the model; its state is potential vorticity minus that of a planet at rest.

    Shapes:
        states and tendencies `(3, T + 1, 2, T + 1)`, spectral coefficients on three levels.
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
        """Return the streamfunction in Earth radii squared times Omega; its mean is zero."""
        return product(self.invert, state)

    def advection(self, state: Array) -> Array:
        """Return `-J(psi, q)` in flux form: only the time stepping breaks energy and enstrophy."""
        psi = self.streamfunction(state)
        levels = len(state)
        # -J = d/dlon(q dpsi/dmu) - d/dmu(q dpsi/dlon). Products are formed on the grid. Projecting
        # on slopes gives minus the derivative in mu, integrated by parts.
        coefficients = np.concatenate([along_longitude(psi), state + self.resting])
        values = to_grid(self.grid.inverse, self.grid.waves, coefficients)
        north, q = values[:, :levels], values[:, levels:]
        west = to_grid(self.grid.inverse_slope, self.grid.waves, psi)
        divergence = along_longitude(self.grid.transform(west * q))
        divergence += self.grid.transform(north * q, slope=True)
        return divergence * self.mask

    def sources(self, state: Array, cold: float) -> Array:
        """Return the tendency by relaxation and friction; `cold` is a value of `winter`."""
        mean, swing = self.forcing
        return product(self.linear, state) + (mean + self.dtype(cold) * swing)

    def hyperdiffusion(self) -> Array:
        """Return the rate of hyperdiffusion for each degree, `(T + 1,)`."""
        scale = degrees_squared(self.truncation + 1) / (self.truncation * (self.truncation + 1))
        rate = scale**self.physics.order / (self.physics.smallest_days * DAY * ROTATION)
        return rate.astype(self.dtype)

    def _stretching(self) -> Array:
        upper, lower = ((RADIUS / r) ** 2 for r in self.physics.deformation)
        return np.array([[-upper, upper, 0], [upper, -upper - lower, lower], [0, lower, -lower]])

    def _inversion(self) -> Array:
        laplacian = -degrees_squared(self.truncation + 1)[:, None, None] * np.eye(3)
        operator = laplacian + self._stretching()
        operator[0] = np.eye(3)  # degree 0 is singular: any matrix that can be inverted
        inverse = np.linalg.inv(operator)
        inverse[0] = 0  # degree 0: only differences of a streamfunction have a meaning
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
        """Return the forcing of the annual mean, and its change with the season."""
        stretching = self._stretching() / (self.physics.relaxation_days * DAY * ROTATION)
        north, south = (
            product(stretching[..., None], self._equilibrium(cold)).astype(self.dtype)
            for cold in (1.0, -1.0)
        )
        return (north + south) / 2, (north - south) / 2

    def _equilibrium(self, cold: float) -> Array:
        """Return a streamfunction with the thicknesses of the climate that the model relaxes to."""
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
        """Return the change of thickness by winter cold over land, as a streamfunction."""
        mu = self.grid.mu
        land = land_fraction(np.degrees(self.grid.longitudes), np.degrees(np.arcsin(mu)))
        contrast = land - land.mean(axis=0)
        # The sign of latitude enters twice, through the season and through f in psi =
        # geopotential / f; the division is softened at the equator.
        cooling = -self.physics.land_swing * np.abs(mu) / (mu**2 + 0.15)
        psi = DRY_AIR * np.log(LEVELS[1] / LEVELS[0]) * cooling / (2 * ROTATION) / STREAM
        return self.grid.project((contrast * psi)[:, None].astype(self.dtype)) * self.mask


def product(left: Array, right: Array) -> Array:
    """Return the matrix product over levels, elementwise in all other dims.

    Shapes:
        `(3, 3, N)`, `(3, ..., N)` -> `(3, ..., N)`.
    """
    matrix = left.reshape(3, 3, *(1,) * (right.ndim - 2), left.shape[-1])
    return np.asarray((matrix * right[None]).sum(axis=1))


SAMPLE_SECONDS = 21600.0
LONGEST_STEP = 64000.0  # s, divided by the truncation: a wind of 100 m/s stays stable
FILTER_COEFFICIENT = 0.04  # of the Robert filter
FILTER_SPLIT = 0.53  # of the Williams filter: the part that acts on the current step


def initial_state(model: QuasiGeostrophic, rng: np.random.Generator) -> Array:
    """Return weak, large-scale noise, from which baroclinic instability grows."""
    size = model.truncation + 1
    degree = np.arange(size)
    noise = rng.standard_normal((3, size, 2, size)) * 1e-2 * np.exp(-(((degree - 8) / 5) ** 2))
    noise[:, 0, 1] = 0  # order 0 has no imaginary part
    return np.asarray((noise * model.mask).astype(model.dtype))


def integrate_six_hourly(
    model: QuasiGeostrophic, state: Array, day_of_year: float
) -> Iterator[Array]:
    """Yield `state` and then the state every six hours, without end.

    The scheme is leapfrog: advection is centred in time, linear terms are taken from the earlier
    step and hyperdiffusion is implicit, which keeps the damping stable. The filter suppresses the
    computational mode of the leapfrog.

    Source: Robert 1966 and Williams 2009 for the filter.
    """
    substeps = int(np.ceil(SAMPLE_SECONDS / (LONGEST_STEP / model.truncation)))
    seconds = SAMPLE_SECONDS / substeps
    step = model.dtype(seconds * ROTATION)
    diffusion_factor = 1 / (1 + 2 * step * model.hyperdiffusion())
    previous = state
    current = state + step * (model.advection(state) + model.sources(state, winter(day_of_year)))
    yield previous
    count = 1
    while True:
        if count % substeps == 0:
            yield current
        cold = winter(day_of_year + count * seconds / DAY)
        tendency = model.advection(current) + model.sources(previous, cold)
        following = (previous + 2 * step * tendency) * diffusion_factor
        correction = model.dtype(FILTER_COEFFICIENT / 2) * (previous - 2 * current + following)
        previous = current + model.dtype(FILTER_SPLIT) * correction
        current = following - model.dtype(1 - FILTER_SPLIT) * correction
        count += 1
