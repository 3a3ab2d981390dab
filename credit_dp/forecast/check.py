"""Says whether a forecast on disk is complete and sound, or what is wrong with it."""

import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from credit_dp.errors import UserError
from credit_dp.forecast.format import ForecastFormat, format_from_json
from credit_dp.forecast.netcdf import (
    NetcdfFileWriter,
    NetcdfWriter,
    StoredArray,
    open_arrays,
    read_field,
)
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.writer import (
    PARTIAL_SUFFIX,
    ForecastPart,
    ForecastWriter,
    MissingField,
    describe_missing,
)
from credit_dp.forecast.zarr import ZarrWriter

Masks = dict[tuple[str, int], int]  # where a variable has values, by name and first row


def find_damage(
    writer: ForecastWriter, place: Path, missing: Sequence[MissingField]
) -> Iterator[str]:
    """Read everything but what is missing, a field at a time; one line for each fault."""
    absent = {(found.job, found.lead, found.rows.start) for found in missing}
    masks: Masks = {}
    for part in writer.parts(place):
        try:
            with open_arrays(part.path) as stored:
                yield from _check_coordinates(writer.form, part, stored)
                sound = yield from _check_shapes(writer.form, part, stored)
                yield from _check_fields(writer, part, sound, absent, masks)
        except UserError as error:
            yield str(error)


def _check_coordinates(
    form: ForecastFormat, part: ForecastPart, stored: Mapping[str, StoredArray]
) -> Iterator[str]:
    wanted = {name: (found.values, found.attributes) for name, found in form.coordinates.items()}
    wanted |= {bounds.name: (bounds.values, {}) for bounds in form.bounds}
    for name, (values, attributes) in wanted.items():
        where = f"{part.path}: {name}"
        if name not in stored:
            yield f"{where}: is missing"
            continue
        try:
            found = read_field(stored[name], (...,), where)
        except UserError as error:
            yield str(error)
            continue
        right = values[part.slices.get(name, slice(None))]
        if found.shape != right.shape:
            yield f"{where}: has the shape {found.shape}, not {right.shape}"
        elif not np.array_equal(found, right):
            odd = tuple(np.argwhere(found != right)[0])
            yield f"{where}: has {found[odd]} where {right[odd]} belongs"
        for key, said in attributes.items():
            if stored[name].attributes.get(key) != said:
                yield f"{where}: its {key} is {stored[name].attributes.get(key)!r}, not {said!r}"


def _check_shapes(
    form: ForecastFormat, part: ForecastPart, stored: Mapping[str, StoredArray]
) -> Generator[str, None, dict[str, StoredArray]]:
    """Faults of the variables; returns those that are as they should be."""
    sound = {}
    for variable in form.variables:
        name, where = variable.name, f"{part.path}: {variable.name}"
        if name not in stored:
            yield f"{where}: is missing"
            continue
        whole = zip(variable.dims, form.shape(variable), strict=True)
        shape = tuple(len(range(n)[part.slices.get(dim, slice(None))]) for dim, n in whole)
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
    absent: set[tuple[ForecastJob, int, int]],
    masks: Masks,
) -> Iterator[str]:
    form = writer.form
    for job in part.jobs:
        for lead in range(len(form.hours)):
            for rows in part.bands:
                if (job, lead, rows.start) in absent:
                    continue
                for name, array in sound.items():
                    yield from _check_field(writer, part, (name, array), (job, lead, rows), masks)


def _check_field(
    writer: ForecastWriter,
    part: ForecastPart,
    named: tuple[str, StoredArray],
    field: tuple[ForecastJob, int, slice],
    masks: Masks,
) -> Iterator[str]:
    (name, array), (job, lead, rows) = named, field
    span = f"rows {rows.start} to {rows.stop - 1}"
    where = f"{part.path}: {name} {writer.form.describe_field(job, lead)}, {span}"
    place = writer.form.place(
        0 if "number" in part.slices else job.member, 0 if "time" in part.slices else job.time, lead
    )
    own = slice(0, rows.stop - rows.start) if "latitude" in part.slices else rows
    try:
        values = read_field(array, (*place, ..., own, slice(None)), where)
    except UserError as error:
        yield str(error)
        return
    finite = np.isfinite(values)
    if name not in writer.masked_variables:
        if not finite.all():
            yield f"{where}: has NaN or infinite values on {np.count_nonzero(~finite)} points"
        return
    mask = zlib.crc32(np.packbits(finite).tobytes())
    if masks.setdefault((name, rows.start), mask) != mask:
        yield f"{where}: has values at other points than the fields before it"


def _format_sizes(dims: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{n} {dim}" for dim, n in zip(dims, shape, strict=False)) or "no dims"


WRITERS: Mapping[str, type[ForecastWriter]] = {
    "zarr": ZarrWriter,
    "netcdf": NetcdfWriter,
    "netcdf_file": NetcdfFileWriter,
}
MAX_LINES = 5  # lines of one kind


@final
class CheckResult(NamedTuple):
    """What there is of a forecast.

    Attributes:
        place: where it lies.
        fields, missing: how many there are to be, each one band of one lead time; those that are
            not there.
        damaged: the first of what is wrong with the others, and how much there is.
        named: whether it has the name of a complete one.
    """

    place: Path
    form: ForecastFormat
    fields: int
    missing: list[MissingField]
    damaged: tuple[list[str], int]
    has_final_name: bool

    @property
    def complete(self) -> bool:
        """Whether all of it is there, sound and under its name."""
        return self.has_final_name and not self.missing and not self.damaged[1]

    def lines(self) -> list[str]:
        """For people: one line that says it, and the first of what is missing or damaged."""
        form = self.form
        members = f"{form.members} members, " if form.members else ""
        what = f"{len(form.times)} initial times, {members}{len(form.hours)} lead times"
        if self.complete:
            return [f"{self.place}: complete ({what})"]
        there = self.fields - len(self.missing)
        state = "damaged" if self.has_final_name and not self.missing else "not complete"
        lines = [f"{self.place}: {state} ({what}): {there} of {self.fields} fields are there"]
        missing = [
            f"missing: {describe_missing(form, missing)}" for missing in self.missing[:MAX_LINES]
        ]
        lines += _indented_lines(missing, len(self.missing))
        damaged, count = self.damaged
        return lines + _indented_lines([f"damaged: {line}" for line in damaged], count)


def check_forecast(path: str) -> CheckResult:
    """Read a forecast that is complete, or what is there of it; a field at a time.

    Raises:
        UserError: there is none that this program wrote.
    """
    try:
        out = Path(path).expanduser().absolute()
        out = out.with_name(out.name.removesuffix(PARTIAL_SUFFIX))
    except (RuntimeError, ValueError):  # ~nobody, or no name at all
        raise UserError(f"{path}: can't be a forecast. Give another path.") from None
    for place in (out, out.with_name(out.name + PARTIAL_SUFFIX)):
        for kind in WRITERS.values():
            said = kind.read_settings(place)
            if said is not None:
                return _build_result(
                    place, kind(out, format_from_json(place, said), said), place == out
                )
    if not out.exists():
        raise UserError(f"{path}: there is no forecast, and none was begun. Give another path.")
    raise UserError(f"{path}: is no forecast that credit-dp forecast wrote. Give another path.")


def _build_result(place: Path, writer: ForecastWriter, named: bool) -> CheckResult:
    fields = len(writer.jobs) * len(writer.form.hours) * len(writer.bands(place))
    missing = writer.missing(place)
    return CheckResult(
        place,
        writer.form,
        fields,
        missing,
        _first_lines(find_damage(writer, place, missing)),
        named,
    )


def _first_lines(lines: Iterable[str]) -> tuple[list[str], int]:
    """The first few, and how many there are."""
    rest = iter(lines)
    first = list(islice(rest, MAX_LINES))
    return first, len(first) + sum(1 for _ in rest)


def _indented_lines(lines: list[str], count: int) -> list[str]:
    more = [f"  and {count - len(lines)} more"] if count > len(lines) else []
    return [f"  {line}" for line in lines] + more
