"""What is wrong with a forecast on disk, of which everything is read: coordinates and fields."""

import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from credit_dp.errors import UserError
from credit_dp.forecast.form import Form
from credit_dp.forecast.jobs import Job
from credit_dp.forecast.stored import StoredArray, read_field, stored_in
from credit_dp.forecast.writer import Missing, Part, Writer

Masks = dict[tuple[str, int], int]  # where a variable has values, by name and first row


def damage(writer: Writer, place: Path, missing: Sequence[Missing]) -> Iterator[str]:
    """Read everything but what is missing, a field at a time; one line for each fault."""
    absent = {(found.job, found.lead, found.rows.start) for found in missing}
    masks: Masks = {}
    for part in writer.parts(place):
        try:
            with stored_in(part.path) as stored:
                yield from _of_coordinates(writer.form, part, stored)
                sound = yield from _of_shapes(writer.form, part, stored)
                yield from _of_fields(writer, part, sound, absent, masks)
        except UserError as error:
            yield str(error)


def _of_coordinates(form: Form, part: Part, stored: Mapping[str, StoredArray]) -> Iterator[str]:
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


def _of_shapes(
    form: Form, part: Part, stored: Mapping[str, StoredArray]
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
                f"{where}: has {_sizes(stored[name].dims, stored[name].shape)}, not "
                f"{_sizes(variable.dims, shape)}"
            )
            continue
        sound[name] = stored[name]
    return sound


def _of_fields(
    writer: Writer,
    part: Part,
    sound: Mapping[str, StoredArray],
    absent: set[tuple[Job, int, int]],
    masks: Masks,
) -> Iterator[str]:
    form = writer.form
    for job in part.jobs:
        for lead in range(len(form.hours)):
            for rows in part.bands:
                if (job, lead, rows.start) in absent:
                    continue
                for name, array in sound.items():
                    yield from _of_field(writer, part, (name, array), (job, lead, rows), masks)


def _of_field(
    writer: Writer,
    part: Part,
    named: tuple[str, StoredArray],
    field: tuple[Job, int, slice],
    masks: Masks,
) -> Iterator[str]:
    (name, array), (job, lead, rows) = named, field
    span = f"rows {rows.start} to {rows.stop - 1}"
    where = f"{part.path}: {name} {writer.form.told(job, lead)}, {span}"
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
    if name not in writer.with_gaps:
        if not finite.all():
            yield f"{where}: has NaN or infinite values on {np.count_nonzero(~finite)} points"
        return
    mask = zlib.crc32(np.packbits(finite).tobytes())
    if masks.setdefault((name, rows.start), mask) != mask:
        yield f"{where}: has values at other points than the fields before it"


def _sizes(dims: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{n} {dim}" for dim, n in zip(dims, shape, strict=False)) or "no dims"
