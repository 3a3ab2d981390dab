"""Check a forecast on disk: which fields are missing or damaged.

`check_forecast` finds the writer of the format, asks it for missing fields, and then reads all
others: coordinates, dims and shapes, and every field, whose checksum the libraries compare.
"""

import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from credit_dp.errors import UserError, counted
from credit_dp.files import PARTIAL_SUFFIX, partial_path
from credit_dp.forecast.format import (
    Auxiliary,
    ForecastFormat,
    describe_difference,
    format_from_json,
)
from credit_dp.forecast.netcdf_writer import (
    StoredArray,
    open_arrays,
    read_field,
    read_file_settings,
)
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.writer import (
    ForecastPart,
    ForecastWriter,
    MissingField,
    describe_missing,
)
from credit_dp.forecast.writers import WRITERS

MAX_LINES = 5  # missing fields shown, and damaged ones
Masks = dict[tuple[str, int], int]  # checksum of a variable's valid points, by name and first row


@final
class CheckResult(NamedTuple):
    """The state of a forecast on disk.

    Attributes:
        path: the store, file or folder.
        form: its format.
        fields: number of fields when complete; a field is one band of one lead time.
        missing: fields that have not been written, or are gone.
        damaged: the first lines about faults, and the number of all faults.
        has_final_name: whether it has the name of a complete forecast.
    """

    path: Path
    form: ForecastFormat
    fields: int
    missing: list[MissingField]
    damaged: tuple[list[str], int]
    has_final_name: bool

    @property
    def complete(self) -> bool:
        """Whether no field is missing or damaged, and the forecast has its final name."""
        return self.has_final_name and not self.missing and not self.damaged[1]

    def lines(self) -> list[str]:
        """Return text for the screen: a summary, then the first missing and damaged fields."""
        form = self.form
        members = f"{counted(form.members, 'member')}, " if form.members else ""
        times, leads = len(form.times), len(form.hours)
        size = f"{counted(times, 'initial time')}, {members}{counted(leads, 'lead time')}"
        if self.complete:
            return [f"{self.path}: complete ({size})"]
        written = self.fields - len(self.missing)
        state = "damaged" if self.has_final_name and not self.missing else "not complete"
        lines = [f"{self.path}: {state} ({size}): {written} of {self.fields} fields are written"]
        missing = [describe_missing(form, field) for field in self.missing[:MAX_LINES]]
        lines += _indented_lines([f"missing: {line}" for line in missing], len(self.missing))
        damaged, count = self.damaged
        return lines + _indented_lines([f"damaged: {line}" for line in damaged], count)


def check_forecast(path: str) -> CheckResult:
    """Check a forecast, complete or not, reading one field at a time.

    Raises:
        UserError: the path has no forecast that `credit-dp forecast` wrote.
    """
    try:
        out = Path(path).expanduser().absolute()
        out = out.with_name(out.name.removesuffix(PARTIAL_SUFFIX))
    except (RuntimeError, ValueError):  # an unknown home folder (~nobody), or an empty name
        raise UserError(f"{path}: can't be a forecast. Give another path.") from None
    # The user may give either name; a complete forecast comes first.
    for candidate in (out, partial_path(out)):
        for writer_type in WRITERS.values():  # the files tell the format, the path does not
            settings = writer_type.read_settings(candidate)
            if settings is not None:
                form = format_from_json(candidate, settings)
                writer = writer_type(out, form, settings)
                return _build_result(candidate, writer, has_final_name=candidate == out)
    if not out.exists():
        raise UserError(f"{path}: there is no forecast, complete or begun. Give another path.")
    raise UserError(f"{path}: was not written by credit-dp forecast. Give another path.")


def _build_result(path: Path, writer: ForecastWriter, has_final_name: bool) -> CheckResult:
    missing = writer.missing(path)
    return CheckResult(
        path=path,
        form=writer.form,
        fields=len(writer.jobs) * len(writer.form.hours) * len(writer.bands(path)),
        missing=missing,
        damaged=_first_lines(find_damage(writer, path, missing)),
        has_final_name=has_final_name,
    )


def _first_lines(lines: Iterable[str]) -> tuple[list[str], int]:
    """Return the first lines, and the number of all; keeps only the first in memory."""
    rest = iter(lines)
    first = list(islice(rest, MAX_LINES))
    return first, len(first) + sum(1 for _ in rest)


def _indented_lines(lines: list[str], count: int) -> list[str]:
    more = [f"  and {count - len(lines)} more"] if count > len(lines) else []
    return [f"  {line}" for line in lines] + more


def find_damage(
    writer: ForecastWriter, path: Path, missing: Sequence[MissingField]
) -> Iterator[str]:
    """Read all fields but the missing ones, one at a time; yield one line for each fault."""
    # Missing fields are reported as missing; reading them would give fill values.
    skipped = {(field.job, field.lead, field.rows.start) for field in missing}
    masks: Masks = {}
    for part in writer.parts(path):
        try:
            yield from _check_settings(writer, path, part)
            with open_arrays(part.path) as stored:
                yield from _check_coordinates(writer.form, part, stored)
                sound = yield from _check_shapes(writer.form, part, stored)
                yield from _check_fields(writer, part, sound, skipped, masks)
        except UserError as error:
            yield str(error)


def _check_settings(writer: ForecastWriter, path: Path, part: ForecastPart) -> Iterator[str]:
    """Yield whether a file of a folder is of another forecast than the folder."""
    if part.path == path:
        return
    settings = read_file_settings(part.path)
    if settings is None:
        return  # it can't be opened, which is a fault of its own
    difference = describe_difference(settings, writer.settings)
    if difference:
        yield f"{part.path}: is of another forecast, with {difference}"


def _check_coordinates(
    form: ForecastFormat, part: ForecastPart, stored: Mapping[str, StoredArray]
) -> Iterator[str]:
    """Yield the faults of coordinates and bounds: values and attributes."""
    coordinates = [Auxiliary(name, (name,), *axis) for name, axis in form.coordinates.items()]
    for name, dims, values, attributes in (*coordinates, *form.auxiliary):
        where = f"{part.path}: {name}"
        if name not in stored:
            yield f"{where}: is missing"
            continue
        try:
            actual = read_field(stored[name], (...,), where)
        except UserError as error:
            yield str(error)
            continue
        expected = values[tuple(part.slices.get(dim, slice(None)) for dim in dims)]
        if actual.shape != expected.shape:
            yield f"{where}: has the shape {actual.shape}, not {expected.shape}"
        elif not np.array_equal(actual, expected):
            first = tuple(np.argwhere(actual != expected)[0])
            yield f"{where}: has {actual[first]} instead of {expected[first]}"
        for key, value in attributes.items():
            found = stored[name].attributes.get(key)
            # netCDF returns lists of numbers as arrays.
            if np.asarray(found).tolist() != value:
                yield f"{where}: its {key} is {found!r}, not {value!r}"


def _check_shapes(
    form: ForecastFormat, part: ForecastPart, stored: Mapping[str, StoredArray]
) -> Generator[str, None, dict[str, StoredArray]]:
    """Yield the faults of dims and shapes; return the variables without."""
    sound = {}
    for variable in form.variables:
        name = variable.name
        where = f"{part.path}: {name}"
        if name not in stored:
            yield f"{where}: is missing"
            continue
        sizes = zip(variable.dims, form.shape(variable), strict=True)
        shape = tuple(len(range(n)[part.slices.get(dim, slice(None))]) for dim, n in sizes)
        if (stored[name].dims, stored[name].shape) != (variable.dims, shape):
            yield (
                f"{where}: has {_format_sizes(stored[name].dims, stored[name].shape)}, not "
                f"{_format_sizes(variable.dims, shape)}"
            )
            continue
        sound[name] = stored[name]
    return sound


def _check_fields(
    writer: ForecastWriter,
    part: ForecastPart,
    sound: Mapping[str, StoredArray],
    skipped: set[tuple[ForecastJob, int, int]],
    masks: Masks,
) -> Iterator[str]:
    form = writer.form
    for job in part.jobs:
        for lead in range(len(form.hours)):
            for rows in part.bands:
                if (job, lead, rows.start) in skipped:
                    continue
                for name, array in sound.items():
                    yield from _check_field(writer, part, name, array, (job, lead, rows), masks)


def _check_field(
    writer: ForecastWriter,
    part: ForecastPart,
    name: str,
    array: StoredArray,
    field: tuple[ForecastJob, int, slice],
    masks: Masks,
) -> Iterator[str]:
    """Yield the faults of one variable at one lead time on one band.

    Args:
        masks: valid points of the fields read so far; a new variable's are added.
    """
    job, lead, rows = field
    span = f"rows {rows.start} to {rows.stop - 1}"
    where = f"{part.path}: {name} {writer.form.describe_field(job, lead)}, {span}"
    # A file with one member, time or band has it at index 0.
    index = writer.form.field_index(
        0 if "number" in part.slices else job.member, 0 if "time" in part.slices else job.time, lead
    )
    is_band = writer.form.horizontal_dims[0] in part.slices
    stored_rows = slice(0, rows.stop - rows.start) if is_band else rows
    try:
        values = read_field(array, (*index, ..., *writer.form.selection(stored_rows)), where)
    except UserError as error:
        yield str(error)
        return
    finite = np.isfinite(values)
    if name not in writer.masked_variables:
        if not finite.all():
            points = counted(int(np.count_nonzero(~finite)), "point")
            yield f"{where}: has NaN or infinite values on {points}"
        return
    # The valid points of a masked variable never change; a checksum is enough to compare them.
    mask = zlib.crc32(np.packbits(finite).tobytes())
    if masks.setdefault((name, rows.start), mask) != mask:
        yield f"{where}: has values at other points than the fields before it"


def _format_sizes(dims: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{n} {dim}" for dim, n in zip(dims, shape, strict=False)) or "no dims"
