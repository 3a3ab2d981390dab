"""The base class of all forecast writers: forecasts can be resumed and are published when complete.

While a forecast `OUT` is being written it is called `OUT.partial`; it is renamed when no field is
missing. The order of calls: `check` on every rank; `lock` and `begin` on rank 0; on every rank
`unfinished_jobs` and `bands_to_write`, then `write` for each lead time and `close` for each job; on
rank 0 `assemble_piece` for each piece, and `finish`.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from credit_dp.data.cache import clear_new, lock_output, remove_lock
from credit_dp.data.grid import FieldArray
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.files import fsync_folders, fsync_tree, partial_path, rename_durably
from credit_dp.forecast.format import CONVENTIONS, ForecastFormat, describe_difference
from credit_dp.forecast.request import ForecastJob, all_jobs

SETTINGS_ATTRIBUTE = "credit_dp_forecast"  # global attribute with a forecast's settings, as JSON
BOUNDARY_ATTRIBUTE = "credit_dp_boundary"  # rows and columns at each edge that it was given


def global_attributes(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the global attributes, the same in each store and file of a forecast."""
    return {
        "Conventions": CONVENTIONS,
        "title": "forecast of a model that credit_dp trained",
        "history": f"credit-dp forecast checkpoint={settings.get('checkpoint', '')}",
        SETTINGS_ATTRIBUTE: json.dumps(settings),
        # Also alone: the settings are dropped where forecasts from several times are joined.
        **({BOUNDARY_ATTRIBUTE: str(settings["boundary"])} if settings.get("boundary") else {}),
    }


class MissingField(NamedTuple):
    """A field that has not been written: its job, the index of its lead time, and its rows."""

    job: ForecastJob
    lead: int
    rows: slice


class ForecastPart(NamedTuple):
    """A zarr store or netCDF file of a forecast.

    Attributes:
        slices: the part of a dimension that it contains; dimensions not listed are complete.
        jobs, bands: the forecasts and rows that it contains.
    """

    path: Path
    slices: Mapping[str, slice]
    jobs: Sequence[ForecastJob]
    bands: Sequence[slice]


class ForecastWriter(ABC):
    """Writes a forecast band by band; every rank has a writer and writes its own rows.

    Args:
        out: final path of the forecast.
        form: its dims, coordinates and variables.
        settings: everything that its values depend on, as JSON. A forecast that was begun is only
            resumed with the same settings.
    """

    def __init__(self, out: Path, form: ForecastFormat, settings: Mapping[str, Any]) -> None:
        self.out = out
        self.form = form
        self.partial = partial_path(out)
        # As they come back from a file: tuples are lists, and keys are strings.
        self.settings = json.loads(json.dumps(settings))

    def check(self) -> None:
        """Check that the forecast can be written or resumed.

        Raises:
            UserError: it exists already, can't be written, or was begun with other settings.
        """
        folder = self.out.parent
        if self.out.exists():
            raise UserError(f"{self.out}: exists already. Change out.")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise UserError(f"{nearest}: is not writable. Change out.")
        if not self.partial.exists():
            return
        # Resuming with other settings would mix two forecasts in one store.
        begun = self.read_settings(self.partial)
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

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a file lock, so that no other run writes the same forecast.

        Raises:
            UserError: another process holds the lock.
        """
        in_use = f"{self.out}: another process is writing it. Wait for it, or change out."
        with ExitStack() as lock:
            with disk_errors(self.out):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                lock.enter_context(lock_output(self.out, in_use))
            yield

    def begin(self, bands: RowPartition) -> None:
        """Create everything but the fields, or clean up a forecast to resume.

        Raises:
            UserError: it can't be written, or another process has written it since `check`.
        """
        # Again, under the lock: another process may have finished in the meantime.
        self.check()
        with disk_errors(self.out):
            if self.partial.exists():
                self.clean_up()
                return
            # Created under a third name: `OUT.partial` exists only with all its metadata.
            new = clear_new(self.out)
            self.create(new, bands)
            fsync_tree(new)
            rename_durably(new, self.partial)

    @property
    def piece_count(self) -> int:
        """Return the number of pieces to assemble after all fields are written."""
        return 0

    def assemble_piece(self, piece: int) -> None:
        """Assemble one piece; call for all in order.

        Pieces are short, because the other ranks wait for each in a collective.

        Raises:
            UserError: the disk is full, or a field is damaged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no pieces")

    def finish(self) -> None:
        """Rename the forecast to its final name.

        Raises:
            UserError: a field is missing.
        """
        self.check_complete()
        with disk_errors(self.out):
            # Files were synced when written, but their names in the folders were not.
            fsync_folders(self.partial)
            rename_durably(self.partial, self.out)
            remove_lock(self.out)

    def check_complete(self) -> None:
        """Check that no field is missing."""
        missing = self.missing(self.partial)
        if missing:
            raise UserError(
                f"{self.partial}: {describe_missing(self.form, missing[0])} is missing. Start "
                "again to write it."
            )

    def unfinished_jobs(self) -> list[ForecastJob]:
        """Return the forecasts with missing fields."""
        unfinished = {field.job for field in self.missing(self.partial)}
        return [job for job in self.jobs if job in unfinished]

    @property
    def masked_variables(self) -> frozenset[str]:
        """Return the variables with points that never have values."""
        configs = self.settings.get("variables", {})
        # As in training, a variable with a fill is one with missing points.
        return frozenset(name for name, of in configs.items() if of.get("fill") is not None)

    @property
    def jobs(self) -> list[ForecastJob]:
        """Return all forecasts."""
        return all_jobs(len(self.form.times), max(1, self.form.members))

    # Called on every rank.

    @abstractmethod
    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """Return the rows that each domain rank writes, given the rows that it computes.

        Raises:
            UserError: the begun forecast has other bands and can't be resumed.
        """

    @abstractmethod
    def write(self, job: ForecastJob, lead: int, rows: slice, fields: Sequence[FieldArray]) -> None:
        """Write the fields of one lead time.

        Args:
            job: the forecast.
            lead: index of the lead time.
            rows: this rank's rows of `bands_to_write`.
            fields: for each of the format's `variables`, `(rows, W)` or `(levels, rows, W)`;
                of cells without W.

        Raises:
            OSError: the fields can't be written.
        """

    @abstractmethod
    def close(self, job: ForecastJob) -> None:
        """Complete this rank's part of a forecast after all its lead times.

        Raises:
            OSError: it can't be written.
        """

    # What the formats implement differently. `path` is `out` or `partial`.

    @classmethod
    @abstractmethod
    def read_settings(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the settings of a forecast on disk; None if it is not of this format."""

    @abstractmethod
    def bands(self, path: Path) -> list[slice]:
        """Return the rows of each field on disk."""

    @abstractmethod
    def missing(self, path: Path) -> list[MissingField]:
        """Return the fields that have not been written, or are gone."""

    @abstractmethod
    def parts(self, path: Path) -> Iterator[ForecastPart]:
        """Yield the stores or files of a forecast."""

    @abstractmethod
    def create(self, path: Path, bands: RowPartition) -> None:
        """Create everything but the fields in a new folder."""

    @abstractmethod
    def clean_up(self) -> None:
        """Remove temporary files of a run that was killed."""


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
            f"{out}: can't be written ({error.strerror or error}). Fix this and start again to "
            "resume, or change out."
        ) from error


def describe_missing(form: ForecastFormat, field: MissingField) -> str:
    """Return a missing field as text for messages."""
    rows = field.rows
    return f"{form.describe_field(field.job, field.lead)}, rows {rows.start} to {rows.stop - 1}"


def read_settings_attribute(attributes: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return what `settings_of` returned for a forecast; empty if it does not say so."""
    try:
        return dict(json.loads(attributes[SETTINGS_ATTRIBUTE]))
    except (KeyError, TypeError, ValueError):
        return {}


def given_width(attributes: Mapping[Any, Any]) -> int:
    """Return the rows and columns at each edge of a region that a forecast was given; 0 if none."""
    try:
        return int(attributes[BOUNDARY_ATTRIBUTE])
    except (KeyError, TypeError, ValueError):
        return 0
