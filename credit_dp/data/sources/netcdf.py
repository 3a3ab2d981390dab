"""A netCDF file as lazily read variables, and what is asked of it, counted."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import final

import xarray as xr

from credit_dp.data.sources.address import is_remote, local_path, reason_of, without_secrets
from credit_dp.errors import UserError

ENDINGS = (".nc", ".nc4", ".netcdf", ".cdf")


@final
class AskedBytes:
    """Adds up the bytes of the values that are asked for, as they are stored.

    What the netCDF library reads for them, whole chunks, it does not say.
    """

    absent = 0

    def __init__(self) -> None:
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.data_bytes = 0
        self.chunk_reads = 0

    def asked(self, size: int) -> None:
        """Count one read of `size` bytes."""
        with self._lock:
            self.data_bytes += size
            self.chunk_reads += 1


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No file that nobody uses any more is closed meanwhile, by whatever thread.

    xarray reads what a file says of its variables without holding its lock. The collector may run
    in another thread, such as zarr's, and the netCDF library crashes where one thread closes a
    file while another reads.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def is_netcdf(where: str) -> bool:
    """Whether this is the name of a netCDF file, not of a zarr store."""
    return where.lower().endswith(ENDINGS) and not local_path(where).is_dir()


def open_netcdf(where: str) -> tuple[xr.Dataset, AskedBytes]:
    """The file at a path of this machine, and its counter.

    xarray holds one lock of the whole process while the netCDF library works, which is not safe
    among threads.

    Raises:
        UserError: there is none, or none that can be read.
    """
    if is_remote(where):
        raise UserError(
            f"{without_secrets(where)}: a netCDF file is read from a path of this machine only. "
            "Copy it, or set data.store to a zarr store."
        )
    path = local_path(where)
    if not path.exists():
        raise UserError(f"{where}: no such file. Set data.store to one that exists.")
    try:
        with no_garbage_collection():
            dataset = xr.open_dataset(path, engine="netcdf4", cache=False, decode_timedelta=False)
    except Exception as error:
        raise UserError(
            f"{where}: not a netCDF file that can be read ({reason_of(error)}). "
            "Set data.store to one."
        ) from error
    return dataset, AskedBytes()
