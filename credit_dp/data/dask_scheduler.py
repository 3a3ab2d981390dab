"""Connects to a `dask.distributed` scheduler, for data commands that run on its workers."""

from typing import Any

from credit_dp.errors import UserError

CONNECT_SECONDS = 30  # for the scheduler to answer


def connect_to_scheduler(address: str) -> Any:
    """Return a `distributed.Client` of the scheduler at an address like `tcp://HOST:PORT`.

    It is not made the default of this process: dask computes elsewhere as it did before.

    Raises:
        UserError: no scheduler answers, or `distributed` is not installed.
    """
    try:
        from distributed import Client
    except ImportError:
        raise UserError(
            "scheduler: needs the package distributed. Install it, or leave scheduler out."
        ) from None
    try:
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:  # a TimeoutError is an OSError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"scheduler: no dask scheduler answers at {address} ({reason}). Change scheduler."
        ) from None
