"""A forecast as one netCDF-4 file.

Several processes can't write into one netCDF file, and a file is lost if a process that writes it
is killed. So `OUT.partial` is a zarr store, into which ranks write as they do for one. When all is
there, rank 0 copies it into a file of another name, a lead time after the other, which then takes
its own. The disk needs room for both meanwhile.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import netCDF4

from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.forecast.form import Form
from credit_dp.forecast.jobs import Job
from credit_dp.forecast.netcdf_file import LIBRARY, as_os_error, create, said_in, settle
from credit_dp.forecast.stored import read_field, stored_in
from credit_dp.forecast.writer import ENDING, Fields, Missing, Part, Writer, disk, sync
from credit_dp.forecast.zarr_writer import ZarrWriter


@final
class NetcdfFileWriter(Writer):
    """See above."""

    def __init__(self, out: Path, form: Form, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._store = ZarrWriter(out, form, settings)
        self._growing = out.with_name(f"{out.name}.file{ENDING}")

    @classmethod
    def said(cls, place: Path) -> Mapping[str, Any] | None:
        """See `Writer`."""
        return ZarrWriter.said(place) if place.is_dir() else said_in(place)

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """See `Writer`."""
        return self._store.bands_to_write(bands)

    def write(self, job: Job, lead: int, rows: slice, fields: Sequence[Fields]) -> None:
        """See `Writer`."""
        self._store.write(job, lead, rows, fields)

    def close(self, job: Job) -> None:
        """Nothing is left to do: see `ZarrWriter`."""

    @property
    def pieces(self) -> int:
        """See `Writer`: the lead times of all forecasts."""
        return len(self.jobs) * len(self.form.hours)

    def put_together(self, piece: int) -> None:
        """See `Writer`: copy one lead time. The first piece begins the file anew."""
        job, lead = self.jobs[piece // len(self.form.hours)], piece % len(self.form.hours)
        with disk(self.out):
            try:
                with LIBRARY, as_os_error():
                    self._copy(job, lead, anew=piece == 0)
            except OSError:  # room for the store, which is needed more
                self._growing.unlink(missing_ok=True)
                raise

    def _copy(self, job: Job, lead: int, anew: bool) -> None:
        if anew:
            create(self._growing, self.form, self._settings, {}, levels_apart=True).close()
        place = self.form.place(job.member, job.time, lead)
        with stored_in(self.partial) as stored, netCDF4.Dataset(self._growing, "a") as file:
            for variable in self.form.variables:
                where = f"{self.partial}: {variable.name} {self.form.told(job, lead)}"
                file[variable.name][place] = read_field(stored[variable.name], place, where)

    def finish(self) -> None:
        """See `Writer`."""
        self.check_complete()
        with disk(self.out):
            settle(self._growing, self.out)
            sync(self.out.parent)
            shutil.rmtree(self.partial)

    def bands(self, place: Path) -> list[slice]:
        """See `Writer`."""
        return self._store.bands(place) if place.is_dir() else [slice(0, self.form.height)]

    def missing(self, place: Path) -> list[Missing]:
        """See `Writer`: a file is whole, for it has its name last."""
        return self._store.missing(place) if place.is_dir() else []

    def make(self, place: Path, bands: RowPartition) -> None:
        """See `Writer`."""
        self._store.make(place, bands)

    def clean_up(self) -> None:
        """See `Writer`."""
        self._growing.unlink(missing_ok=True)
        self._store.clean_up()

    def parts(self, place: Path) -> Iterator[Part]:
        """See `Writer`."""
        if place.is_dir():
            yield from self._store.parts(place)
        else:
            yield Part(place, {}, self.jobs, self.bands(place))
