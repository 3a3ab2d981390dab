"""Steps the quasi-geostrophic model through time, by leapfrog with a filter on its odd steps."""

from collections.abc import Iterator

import numpy as np

from credit_dp.data.quickstart.model import QuasiGeostrophic
from credit_dp.data.quickstart.planet import DAY, ROTATION, winter
from credit_dp.data.quickstart.spectral import Array

SAMPLE_SECONDS = 21600.0
LONGEST_STEP = 64000.0  # s, divided by the truncation: a wind of 100 m/s stays stable
FILTER = 0.04  # Robert's coefficient
SHARE = 0.53  # Williams' split of the filter between two steps


def first_state(model: QuasiGeostrophic, rng: np.random.Generator) -> Array:
    """Weak, large-scale noise: what the baroclinic instability grows from."""
    size = model.truncation + 1
    degree = np.arange(size)
    noise = rng.standard_normal((3, size, 2, size)) * 1e-2 * np.exp(-(((degree - 8) / 5) ** 2))
    noise[:, 0, 1] = 0
    return np.asarray((noise * model.mask).astype(model.dtype))


def six_hourly(model: QuasiGeostrophic, state: Array, day_of_year: float) -> Iterator[Array]:
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
