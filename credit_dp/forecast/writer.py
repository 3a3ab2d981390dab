"""Write a forecast: it can be resumed, and has its name only when it is complete.

All fields go to a zarr store first, `OUT.partial`, which ranks write in parallel and resume. A zarr
forecast is this store, renamed. Other formats are copied from it, in `OUT.partial/.copy`, and then
the store is removed.

The order of calls: `check` on every rank; `locked` and `begin` on rank 0; on every rank
`unfinished_jobs`, and `write` for each lead time; then `copy` for each of its `copies`; on rank 0
`finish`.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

from credit_dp.data.cache import clear_new, lock_output, remove_lock
from credit_dp.data.grid import FieldArray
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.files import (
    fsync_folders,
    fsync_path,
    fsync_tree,
    partial_path,
    remove_if_possible,
    rename_durably,
)
from credit_dp.forecast.format import ForecastFormat, describe_difference
from credit_dp.forecast.grib_forecast import GribForecast
from credit_dp.forecast.netcdf_forecast import NetcdfFile, NetcdfFolder
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.stored_forecast import CopiedForecast, ForecastFile, ZarrForecast

# By format; a further one is a class in a file of its own and a line here.
COPIED_FORMATS: Mapping[str, type[CopiedForecast]] = {
    "netcdf": NetcdfFolder,
    "netcdf_file": NetcdfFile,
    "grib": GribForecast,
}
COPY_NAME = ".copy"  # in the store


@final
class ForecastWriter:
    """Writes a forecast band by band; every rank has a writer and writes its own rows.

    Args:
        out: final path of the forecast.
        format_name: one of `FORMATS`.
        settings: everything that the forecast's values depend on, as JSON: one that was begun is
            only resumed with the same settings.
    """

    def __init__(
        self, out: Path, format_name: str, form: ForecastFormat, settings: Mapping[str, Any]
    ) -> None:
        self.out = out
        self.form = form
        self.partial = partial_path(out)
        # As they come back from a file: tuples are lists, and keys are strings.
        self.settings = json.loads(json.dumps(settings))
        self.store = ZarrForecast(self.partial, form, self.settings)
        self._copy: CopiedForecast | None = None
        if format_name in COPIED_FORMATS:
            copied_format = COPIED_FORMATS[format_name]
            self._copy = copied_format(self.partial / COPY_NAME, form, self.settings)

    def check(self) -> None:
        """Check that the forecast can be written or resumed.

        Raises:
            UserError: it exists already, can't be written, or was begun with other settings.
        """
        if self._copy is not None:
            self._copy.check()
        folder = self.out.parent
        if self.out.exists():
            raise UserError(f"{self.out}: exists already. Change out.")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise UserError(f"{nearest}: is not writable. Change out.")
        if not self.partial.exists():
            return
        # Resuming with other settings would mix two forecasts in one store.
        begun = self.store.read_settings(self.partial)
        if begun is None:
            raise UserError(
                f"{self.partial}: is not a forecast that was begun. Move it, or change out."
            )
        difference = describe_difference(begun, self.settings)
        if difference:
            raise UserError(
                f"{self.partial}: was begun with {difference}. Set the same to resume it, remove "
                "it to start over, or change out."
            )

    def begin(self, bands: RowPartition) -> None:
        """Create everything but the fields, or clean up a forecast to resume.

        Args:
            bands: the rows of each domain rank.

        Raises:
            UserError: it can't be written, or another process has written it since `check`.
        """
        # Again, under the lock: another process may have finished in the meantime.
        self.check()
        with disk_errors(self.out):
            if self.partial.exists():
                self.store.remove_temporaries()
            else:
                # Created under a third name: `OUT.partial` exists only with all its metadata.
                new = clear_new(self.out)
                ZarrForecast(new, self.form, self.settings).create(bands)
                fsync_tree(new)
                rename_durably(new, self.partial)
            if self._copy is not None:
                remove_if_possible(self._copy.path)
                self._copy.create(bands)

    def unfinished_jobs(self) -> list[ForecastJob]:
        """Return the forecasts with missing fields."""
        unfinished = {field.job for field in self.store.missing()}
        return [job for job in self.store.jobs if job in unfinished]

    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[FieldArray]) -> None:
        """Write the fields of one lead time; see `ZarrForecast`.

        Raises:
            UserError: the disk is full, or gone.
        """
        with disk_errors(self.out):
            self.store.write(job, lead, rows, fields)

    def copies(self, rank: int, ranks: int) -> list[tuple[ForecastFile, ForecastJob, int]]:
        """Return the files, forecasts and lead times that a rank has to copy; rank 0 has most.

        Copies are short, because the other ranks wait for each in a collective.
        """
        files = [] if self._copy is None else self._copy.files()[rank::ranks]
        leads = range(len(self.form.hours))
        return [(file, job, lead) for file in files for job in file.jobs for lead in leads]

    def copy(self, file: ForecastFile, job: ForecastJob, lead: int) -> None:
        """Copy one lead time to a file, in the order of `copies`.

        Raises:
            UserError: the disk is full, or a field is damaged.
        """
        if self._copy is None:
            raise RuntimeError("a zarr forecast is not copied")
        with disk_errors(self.out):
            try:
                self._copy.copy(file, job, lead, self.store)
                if (job, lead) == (file.jobs[-1], len(self.form.hours) - 1):
                    fsync_path(file.path)
            except OSError:
                # Frees space on a full disk. The store, which took the computing, stays.
                remove_if_possible(file.path)
                raise

    def finish(self) -> None:
        """Give the forecast its final name.

        Raises:
            UserError: a field is missing.
        """
        missing = self.store.missing()
        if missing:
            raise UserError(
                f"{self.partial}: {self.store.describe(missing[0])} is missing. Start again to "
                "write it."
            )
        complete = self.store if self._copy is None else self._copy
        with disk_errors(self.out):
            # Files were synced when written, but their names in the folders were not.
            fsync_folders(complete.path)
            rename_durably(complete.path, self.out)
            if self._copy is None:
                remove_lock(self.out)
            else:
                shutil.rmtree(self.partial, ignore_errors=True)  # its lock file is open


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold a file lock, so that no other run writes the same output.

    Raises:
        UserError: another process holds the lock.
    """
    in_use = f"{out}: another process is writing it. Wait for it, or change out."
    with ExitStack() as lock:
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            lock.enter_context(lock_output(out, in_use))
        yield


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn an OSError inside into a one-line error.

    Raises:
        UserError: the disk is full, or gone.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{out}: can't be written ({error.strerror or error}). Fix this and start "
            "again to resume, or change out."
        ) from error
