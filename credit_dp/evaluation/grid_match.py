"""Whether two stores are on one grid, whichever longitude their columns begin with."""

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.grid import FULL_CIRCLE
from credit_dp.errors import UserError

SAME = 1e-3  # degrees: stores have them as float32, and rounded

Degrees = NDArray[np.float64]


def same_rows(wanted: Degrees, found: Degrees, where: str, key: str) -> None:
    """Refuse rows that are not those wanted; both `(H,)`, falling.

    Raises:
        UserError: naming the store and the key that gave it.
    """
    if len(wanted) != len(found) or not np.abs(wanted - found).max() <= SAME:  # or NaN
        raise _other("rows", "latitude", wanted, found, where, key)


def columns_of(wanted: Degrees, found: Degrees, where: str, key: str) -> NDArray[np.intp]:
    """Which column of a store lies at each longitude that is wanted: `(W,)`.

    Raises:
        UserError: the columns are others.
    """
    if len(wanted) != len(found):
        raise _other("columns", "longitude", wanted, found, where, key)
    apart = (found[None, :] - wanted[:, None] + FULL_CIRCLE / 2) % FULL_CIRCLE - FULL_CIRCLE / 2
    places: NDArray[np.intp] = np.abs(apart).argmin(axis=1)
    if not np.abs(apart[np.arange(len(wanted)), places]).max() <= SAME:  # or NaN
        raise _other("columns", "longitude", wanted, found, where, key)
    return places


def in_columns(fields: NDArray[np.float32], columns: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return `(..., W)` with its columns in this order; not copied where they are in it."""
    return fields if np.array_equal(columns, np.arange(len(columns))) else fields[..., columns]


def _other(
    what: str, name: str, wanted: Degrees, found: Degrees, where: str, key: str
) -> UserError:
    return UserError(
        f"{where}: is on another grid than the truth: {len(found)} {what} with {name} from "
        f"{found[0]:g} to {found[-1]:g}, where the truth has {len(wanted)} from {wanted[0]:g} to "
        f"{wanted[-1]:g}. Change {key}, or regrid the truth with `credit-dp data prepare`."
    )
