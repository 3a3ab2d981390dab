"""The Earth's radius, usual latitudes, Legendre functions, and weights that integrate on it."""

import numpy as np
from numpy.typing import NDArray

from credit_dp.errors import UserError

Vector = NDArray[np.float64]
EARTH_RADIUS = 6_367_500.0  # m, mean of polar and equatorial radius, as in WeatherBench 2


def usual_latitude(rows: int) -> Vector:
    """Return evenly spaced latitudes from north to south, in degrees, `(rows,)`.

    An odd number of rows includes the poles and the equator, an even number includes neither.
    """
    if rows % 2:
        return np.linspace(90.0, -90.0, rows, dtype=np.float64)
    return np.asarray(90.0 - 180.0 * (np.arange(rows) + 0.5) / rows)


def associated_legendre(sine: Vector, degrees: int) -> Vector:
    """Return normalised associated Legendre functions `P(m, l)` for orders and degrees < `degrees`.

    The mean over the sphere of `|P(m, l) exp(i m lon)|^2` is 1; `P(m, l)` is 0 for l < m.

    Args:
        sine: of the latitudes, `(H,)`.

    Shapes:
        -> `(degrees, degrees, H)`: order, degree, row.

    Source: Holmes & Featherstone 2002, eqs. 11 to 13, the standard forward column method.
    """
    cosine = np.sqrt(np.maximum(1 - sine**2, 0))
    table = np.zeros((degrees, degrees, len(sine)))
    diagonal = np.ones_like(sine)
    for m in range(degrees):
        if m:
            diagonal = np.sqrt((2 * m + 1) / (2 * m)) * cosine * diagonal
        table[m, m] = diagonal
        if m + 1 < degrees:
            table[m, m + 1] = np.sqrt(2 * m + 3) * sine * diagonal
        for n in range(m + 2, degrees):
            rise = np.sqrt((4 * n**2 - 1) / (n**2 - m**2))
            fall = np.sqrt(((n - 1) ** 2 - m**2) / (4 * (n - 1) ** 2 - 1))
            table[m, n] = rise * (sine * table[m, n - 1] - fall * table[m, n - 2])
    return table


def quadrature_weights(sine: Vector, where: str, remedy: str) -> Vector:
    """Return the weights, which sum to 1, that integrate polynomials of degree < H exactly.

    For evenly spaced latitudes these are the weights of Clenshaw & Curtis or of Fejer, for Gaussian
    latitudes those of Gauss.

    Args:
        remedy: ends it.

    Raises:
        UserError: some weights are not positive, so that the rows are neither of these.
    """
    count = len(sine)
    # Row l holds the Legendre polynomial of degree l, whose mean is 1 for l = 0 and 0 otherwise.
    # With a mean square of 1 the weights of 721 rows keep one more digit beside the poles.
    degrees = np.arange(count)[:, None]
    polynomials = np.sqrt(2 * degrees + 1) * np.polynomial.legendre.legvander(sine, count - 1).T
    means = np.zeros(count)
    means[0] = 1
    weights = np.linalg.solve(polynomials, means)
    if not (weights > 0).all():
        raise UserError(
            f"{where}: needs rows that are evenly spaced or Gaussian over the whole globe, which "
            f"the store's latitudes are not. {remedy}"
        )
    return np.asarray(weights)
