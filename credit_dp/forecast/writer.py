"""What every form of a forecast on disk has in common: it grows under another name, and resumes.

While it grows a forecast `OUT` is called `OUT.partial`. It takes its name when all of it is there.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from credit_dp.data.cache import lock_path
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.forecast.format import CONVENTIONS, ForecastFormat, describe_difference
from credit_dp.forecast.request import ForecastJob, all_jobs

PARTIAL_SUFFIX = ".partial"
SETTINGS_ATTRIBUTE = "credit_dp_forecast"  # what a forecast says of itself, as JSON

Fields = NDArray[np.float32]


def global_attributes(settings: Mapping[str, Any]) -> dict[str, str]:
    """What a whole forecast says of itself: the same of each of its stores and files."""
    return {
        "Conventions": CONVENTIONS,
        "title": "forecast of a model that credit_dp trained",
        "history": f"credit-dp forecast checkpoint={settings.get('checkpoint', '')}",
        SETTINGS_ATTRIBUTE: json.dumps(settings),
    }


class MissingField(NamedTuple):
    """A field that is not there: by the places of its job and lead time, and its rows."""

    job: ForecastJob
    lead: int
    rows: slice


class ForecastPart(NamedTuple):
    """A zarr store or netCDF file of a forecast.

    Attributes:
        slices: what of a dimension it has; all where none is given.
        jobs, bands: the forecasts that are in it, and which rows.
    """

    path: Path
    slices: Mapping[str, slice]
    jobs: Sequence[ForecastJob]
    bands: Sequence[slice]


class ForecastWriter(ABC):
    """Writes the bands of a forecast, each rank its own; all ranks of a run have one each.

    Args:
        out: what the forecast is called when it is whole.
        form: what it consists of.
        settings: what its values depend on, as JSON: it is gone on with only for the same.
    """

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        self.out = out
        self.form = form
        self.partial = out.with_name(out.name + PARTIAL_SUFFIX)
        self._new_folder = out.with_name(f"{out.name}.new{PARTIAL_SUFFIX}")
        self._settings = json.loads(json.dumps(settings))

    # What rank 0 does while the others wait.

    def check(self) -> None:
        """Refuse to write where something else is.

        Raises:
            UserError: it is there, or can't be made, or was begun with other settings.
        """
        folder = self.out.parent
        if self.out.exists():
            raise UserError(f"{self.out}: is there already. Change out.")
        near = next(path for path in (folder, *folder.parents) if path.exists())
        if not near.is_dir() or not os.access(near, os.W_OK):
            raise UserError(f"{near}: can't be written in. Change out.")
        if not self.partial.exists():
            return
        begun = self.read_settings(self.partial)
        if begun is None:
            raise UserError(
                f"{self.partial}: is no forecast that was begun. Move it, or change out."
            )
        odd = describe_difference(begun, self._settings)
        if odd:
            raise UserError(
                f"{self.partial}: was begun with {odd}. Give the same to go on, remove it to begin "
                "anew, or change out."
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs from writing the same forecast meanwhile.

        Raises:
            UserError: another one does.
        """
        lock = FileLock(lock_path(self.out), timeout=0)
        with disk_errors(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                raise UserError(
                    f"{self.out}: another process is writing it. Wait for it, or change out."
                ) from None
        try:
            yield
        finally:
            with suppress(OSError):
                lock_path(self.out).unlink(missing_ok=True)
            lock.release()

    def begin(self, bands: RowPartition) -> None:
        """Make all but the fields, or clean up what was begun.

        Raises:
            UserError: it can't be written, or another process has made it since `check`.
        """
        self.check()
        with disk_errors(self.out):
            if self.partial.exists():
                self.clean_up()
                return
            shutil.rmtree(self._new_folder, ignore_errors=True)
            try:
                self._new_folder.mkdir()
                self.create(self._new_folder, bands)
                fsync_tree(self._new_folder)
                os.replace(self._new_folder, self.partial)
                fsync_path(self.out.parent)
            except OSError:
                shutil.rmtree(self._new_folder, ignore_errors=True)
                raise

    @property
    def piece_count(self) -> int:
        """How many turns it takes to put the forecast together, once every field is written."""
        return 0

    def assemble_piece(self, piece: int) -> None:
        """Do one of the `pieces`, in order; the other ranks wait no longer than for one.

        Raises:
            UserError: the disk is full, or a field is damaged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no pieces")

    def finish(self) -> None:
        """Give the forecast its name.

        Raises:
            UserError: not all of it is there.
        """
        self.check_complete()
        with disk_errors(self.out):
            fsync_folders(self.partial)  # the files are on the disk, but perhaps not their names
            os.replace(self.partial, self.out)
            fsync_path(self.out.parent)

    def check_complete(self) -> None:
        """Refuse to go on with a forecast of which something has not been written, or is gone.

        Raises:
            UserError: something is missing.
        """
        missing = self.missing(self.partial)
        if missing:
            raise UserError(
                f"{self.partial}: {describe_missing(self.form, missing[0])} is missing. Start "
                "again: it will "
                "be written."
            )

    def unfinished_jobs(self) -> list[ForecastJob]:
        """The forecasts of which something is missing."""
        left = {missing.job for missing in self.missing(self.partial)}
        return [job for job in self.jobs if job in left]

    @property
    def masked_variables(self) -> frozenset[str]:
        """Variables that have no values on some points at any time."""
        said = self._settings.get("variables", {})
        return frozenset(name for name, of in said.items() if of.get("fill") is not None)

    @property
    def jobs(self) -> list[ForecastJob]:
        """All forecasts."""
        return all_jobs(len(self.form.times), max(1, self.form.members))

    # What every rank does.

    @abstractmethod
    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """The rows that each rank of a domain writes, given those that it has.

        Raises:
            UserError: what was begun has other bands, and can't be gone on with.
        """

    @abstractmethod
    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[Fields]) -> None:
        """Write the fields of one lead time, as the `variables` of the form have them.

        Args:
            job: which forecast.
            lead: place of the lead time.
            rows: those that `bands_to_write` gave.
            fields: of each variable, `(rows, W)` or `(levels, rows, W)`.

        Raises:
            OSError: it could not be written.
        """

    @abstractmethod
    def close(self, job: ForecastJob) -> None:
        """Complete a forecast, of which all lead times have been written.

        Raises:
            OSError: it could not be written.
        """

    # What the forms differ in.

    @classmethod
    @abstractmethod
    def read_settings(cls, place: Path) -> Mapping[str, Any] | None:
        """What a forecast there depends on; None if there is none of this form."""

    @abstractmethod
    def bands(self, place: Path) -> list[slice]:
        """The rows that are written together."""

    @abstractmethod
    def missing(self, place: Path) -> list[MissingField]:
        """All that is not there yet, or any more."""

    @abstractmethod
    def parts(self, place: Path) -> Iterator[ForecastPart]:
        """The stores or files that it consists of, one after the other."""

    @abstractmethod
    def create(self, place: Path, bands: RowPartition) -> None:
        """Make everything in a new folder but the fields."""

    @abstractmethod
    def clean_up(self) -> None:
        """Clean up behind what was killed."""


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Say in one line that a disk is full, or gone.

    Raises:
        UserError: it is.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{out}: can't be written ({error.strerror or error}). Mend that, then start again: "
            "it goes on where it stopped. Or change out."
        ) from error


def describe_missing(form: ForecastFormat, missing: MissingField) -> str:
    """A missing field, for people."""
    rows = missing.rows
    return f"{form.describe_field(missing.job, missing.lead)}, rows {rows.start} to {rows.stop - 1}"


def source_stores(attributes: Mapping[Any, Any]) -> tuple[str, ...]:
    """The stores that a forecast with these attributes started from; empty if they name none."""
    try:
        return tuple(map(str, json.loads(attributes[SETTINGS_ATTRIBUTE])["stores"]))
    except (KeyError, TypeError, ValueError):
        return ()


def fsync_tree(folder: Path) -> None:
    """Make sure that a folder with all that is in it is on the disk.

    Raises:
        OSError: it could not be written.
    """
    for root, _, names in os.walk(folder):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


def fsync_folders(folder: Path) -> None:
    """Make sure that the names of all files in a folder, and in folders in it, are on the disk.

    Raises:
        OSError: it could not be written.
    """
    for root, _, _ in os.walk(folder):
        fsync_path(Path(root))


def fsync_path(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk.

    Raises:
        OSError: it could not be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
