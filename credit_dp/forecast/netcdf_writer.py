"""A forecast as a folder of netCDF-4 files: one for each band, initial time and member.

Each rank writes files of its own rows, so that nothing travels; `open_sharded` joins them. A file
grows under another name, one lead time after the other, and takes its own when it is whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import netCDF4

from credit_dp.data.preparing.files import write_whole
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from credit_dp.forecast.form import Form
from credit_dp.forecast.jobs import Job
from credit_dp.forecast.netcdf_file import LIBRARY, as_os_error, create, settle
from credit_dp.forecast.writer import ATTRIBUTE, ENDING, Fields, Missing, Part, Writer

MANIFEST = "forecast.json"
BOUNDS = "bounds"


@final
class NetcdfWriter(Writer):
    """See above. `forecast.json` in the folder says what there is to be."""

    def __init__(self, out: Path, form: Form, settings: Mapping[str, Any]) -> None:
        super().__init__(out, form, settings)
        self._open: dict[Job, tuple[netCDF4.Dataset, Path]] = {}

    @classmethod
    def said(cls, place: Path) -> Mapping[str, Any] | None:
        """See `Writer`."""
        try:
            said: Mapping[str, Any] = json.loads((place / MANIFEST).read_text())[ATTRIBUTE]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return said

    def bands_to_write(self, bands: RowPartition) -> RowPartition:
        """Those that the ranks have."""
        begun = self._bounds(self.partial)
        if begun != bands.bounds:
            raise UserError(
                f"{self.partial}: was begun with bands that end at rows {list(begun[1:])}, now "
                f"they end at {list(bands.bounds[1:])}. Set parallel.domain to {len(begun) - 1}, "
                "or remove it to begin anew."
            )
        return bands

    def write(self, job: Job, lead: int, rows: slice, fields: Sequence[Fields]) -> None:
        """See `Writer`; a file that is whole is left as it is."""
        final_path = self.partial / self._name(job, rows)
        if final_path.exists():
            return
        with LIBRARY, as_os_error():
            if job not in self._open:
                self._open[job] = self._begun(job, rows), final_path
            file, _ = self._open[job]
            place = self.form.place(0, 0, lead)
            for variable, values in zip(self.form.variables, fields, strict=True):
                file[variable.name][place] = values

    def close(self, job: Job) -> None:
        """See `Writer`."""
        if job not in self._open:
            return
        file, path = self._open.pop(job)
        with LIBRARY, as_os_error():
            file.close()
        growing = path.with_name(path.name + ENDING)
        settle(growing, path)

    def bands(self, place: Path) -> list[slice]:
        """See `Writer`."""
        return [slice(*pair) for pair in pairwise(self._bounds(place))]

    def missing(self, place: Path) -> list[Missing]:
        """See `Writer`; of a file that is not there all lead times are missing."""
        bands = self.bands(place)
        return [
            Missing(job, lead, rows)
            for job in self.jobs
            for rows in bands
            if not (place / self._name(job, rows)).exists()
            for lead in range(len(self.form.hours))
        ]

    def parts(self, place: Path) -> Iterator[Part]:
        """See `Writer`: the files that are there."""
        for job in self.jobs:
            for rows in self.bands(place):
                path = place / self._name(job, rows)
                if path.exists():
                    yield Part(path, _slices(job, rows), [job], [rows])

    def make(self, place: Path, bands: RowPartition) -> None:
        """See `Writer`."""
        content = {ATTRIBUTE: self._settings, BOUNDS: list(bands.bounds)}
        write_whole(place / MANIFEST, json.dumps(content).encode())

    def clean_up(self) -> None:
        """See `Writer`."""
        for leftover in self.partial.glob(f"*{ENDING}"):
            leftover.unlink()

    def _bounds(self, place: Path) -> tuple[int, ...]:
        try:
            return tuple(map(int, json.loads((place / MANIFEST).read_text())[BOUNDS]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{place}: {MANIFEST} can't be read. Remove {place}.") from error

    def _name(self, job: Job, rows: slice) -> str:
        member = f"_member-{job.member:03d}" if self.form.members else ""
        time = str(self.form.times[job.time].astype("M8[h]"))
        return f"{time}{member}_rows-{rows.start:04d}-{rows.stop - 1:04d}.nc"

    def _begun(self, job: Job, rows: slice) -> netCDF4.Dataset:
        """A new file with all but its fields."""
        path = self.partial / (self._name(job, rows) + ENDING)
        return create(path, self.form, self._settings, _slices(job, rows))


def _slices(job: Job, rows: slice) -> dict[str, slice]:
    """What a file has of each dimension of which it has not all."""
    member, time = slice(job.member, job.member + 1), slice(job.time, job.time + 1)
    return {"number": member, "time": time, "latitude": rows}
