"""A three-level quasi-geostrophic atmosphere with seasons, mountains and continents.

Potential vorticity at 200, 500 and 800 hPa is carried by the rotational wind of its own level:

    dq/dt = -J(psi, q) + relaxation - friction - hyperdiffusion
    q1 = lap psi1 + f - (psi1 - psi2) / R1^2
    q2 = lap psi2 + f + (psi1 - psi2) / R1^2 - (psi2 - psi3) / R2^2
    q3 = lap psi3 + f + (psi2 - psi3) / R2^2 + f h / H

Source: Marshall & Molteni 1993, eqs. 1 to 8. Where they take the forcing from reanalyses, ours
pulls the two thicknesses towards those of a jet that moves with the season.

Lengths are in Earth radii and times in 1 / Omega inside this file.
"""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from credit_dp.data.quickstart.planet import (
    DAY,
    DRY_AIR,
    RADIUS,
    ROTATION,
    land_fraction,
    terrain,
)
from credit_dp.data.quickstart.spectral import (
    Array,
    GaussianGrid,
    along_longitude,
    degrees_squared,
    to_grid,
)

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
