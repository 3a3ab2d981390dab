"""Check a forecast on disk: which fields are missing or damaged.

`check_forecast` finds the format, asks for missing fields, and then reads all others: coordinates,
dims and shapes, and every field, whose checksum the libraries compare.
"""

import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from credit_dp.errors import UserError, counted
from credit_dp.files import PARTIAL_SUFFIX, partial_path
from credit_dp.forecast.format import describe_difference
from credit_dp.forecast.netcdf_forecast import read_file_settings
from credit_dp.forecast.request import ForecastJob
from credit_dp.forecast.stored_forecast import (
    ForecastFile,
    MissingField,
    StoredArray,
    StoredForecast,
    ZarrForecast,
    read_values,
)
from credit_dp.forecast.writer import COPIED_FORMATS

MAX_LINES = 5  # missing fields shown, and damaged ones
Masks = dict[tuple[str, int], int]  # checksum of a variable's valid points, by name and first row


@final
class CheckResult(NamedTuple):
    """The state of a forecast on disk.

    Attributes:
        missing: fields that have not been written, or are gone; a field is one band of one lead
            time.
        damaged: the first lines about faults, and the number of all faults.
        has_final_name: whether it has the name of a complete forecast.
    """

    forecast: StoredForecast
    missing: list[MissingField]
    damaged: tuple[list[str], int]
    has_final_name: bool

    @property
    def complete(self) -> bool:
        """Whether no field is missing or damaged, and the forecast has its final name."""
        return self.has_final_name and not self.missing and not self.damaged[1]

    def lines(self) -> list[str]:
        """Return text for the screen: a summary, then the first missing and damaged fields."""
        forecast, form = self.forecast, self.forecast.form
        members = f"{counted(form.members, 'member')}, " if form.members else ""
        times, leads = len(form.times), len(form.hours)
        size = f"{counted(times, 'initial time')}, {members}{counted(leads, 'lead time')}"
        if self.complete:
            return [f"{forecast.path}: complete ({size})"]
        fields = len(forecast.jobs) * leads * len(forecast.bands)
        written = fields - len(self.missing)
        state = "damaged" if self.has_final_name and not self.missing else "not complete"
        lines = [f"{forecast.path}: {state} ({size}): {written} of {fields} fields are written"]
        missing = [f"missing: {forecast.describe(field)}" for field in self.missing[:MAX_LINES]]
        lines += _indented_lines(missing, len(self.missing))
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
    # The user may give either name; a complete forecast comes first. The files tell its format.
    candidates: list[tuple[type[StoredForecast], Path]] = [(ZarrForecast, out)]
    candidates += [(kind, out) for kind in COPIED_FORMATS.values()]
    candidates += [(ZarrForecast, partial_path(out))]
    for kind, candidate in candidates:
        forecast = kind.open(candidate)
        if forecast is not None:
            missing = forecast.missing()
            damaged = _first_lines(find_damage(forecast, missing))
            return CheckResult(forecast, missing, damaged, has_final_name=candidate == out)
    if not out.exists():
        raise UserError(f"{path}: there is no forecast, complete or begun. Give another path.")
    raise UserError(f"{path}: was not written by credit-dp forecast. Give another path.")


def _first_lines(lines: Iterable[str]) -> tuple[list[str], int]:
    """Return the first lines, and the number of all; keeps only the first in memory."""
    rest = iter(lines)
    first = list(islice(rest, MAX_LINES))
    return first, len(first) + sum(1 for _ in rest)


def _indented_lines(lines: list[str], count: int) -> list[str]:
    more = [f"  and {count - len(lines)} more"] if count > len(lines) else []
    return [f"  {line}" for line in lines] + more


def find_damage(forecast: StoredForecast, missing: Sequence[MissingField]) -> Iterator[str]:
    """Read all fields but the missing ones, one at a time; yield one line for each fault."""
    # Missing fields are reported as missing; reading them would give fill values.
    skipped = {(field.job, field.lead, field.rows.start) for field in missing}
    masks: Masks = {}
    for file in forecast.files():
        if not file.path.exists():
            continue
        try:
            yield from _check_settings(forecast, file)
            with forecast.open_arrays(file.path) as stored:
                if stored is None:
                    continue
                yield from _check_fixed_arrays(forecast, file, stored)
                sound = yield from _check_shapes(forecast, file, stored)
                yield from _check_fields(forecast, file, sound, skipped, masks)
        except UserError as error:
            yield str(error)


def _check_settings(forecast: StoredForecast, file: ForecastFile) -> Iterator[str]:
    """Yield whether a file of a folder is of another forecast than the folder."""
    if file.path == forecast.path:
        return
    settings = read_file_settings(file.path)
    if settings is None:
        return  # it can't be opened, which is a fault of its own
    difference = describe_difference(settings, forecast.settings)
    if difference:
        yield f"{file.path}: is of another forecast, with {difference}"


def _check_fixed_arrays(
    forecast: StoredForecast, file: ForecastFile, stored: Mapping[str, StoredArray]
) -> Iterator[str]:
    """Yield the faults of coordinates and bounds: values and attributes."""
    for name, dims, values, attributes in forecast.form.fixed_arrays:
        where = f"{file.path}: {name}"
        if name not in stored:
            yield f"{where}: is missing"
            continue
        try:
            actual = read_values(stored[name].values, ..., where)
        except UserError as error:
            yield str(error)
            continue
        expected = values[tuple(file.slices.get(dim, slice(None)) for dim in dims)]
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
    forecast: StoredForecast, file: ForecastFile, stored: Mapping[str, StoredArray]
) -> Generator[str, None, dict[str, StoredArray]]:
    """Yield the faults of dims and shapes; return the variables without."""
    sound = {}
    for variable in forecast.form.variables:
        name = variable.name
        where = f"{file.path}: {name}"
        if name not in stored:
            yield f"{where}: is missing"
            continue
        sizes = zip(variable.dims, forecast.form.shape(variable), strict=True)
        shape = tuple(len(range(n)[file.slices.get(dim, slice(None))]) for dim, n in sizes)
        if (stored[name].dims, stored[name].shape) != (variable.dims, shape):
            yield (
                f"{where}: has {_format_sizes(stored[name].dims, stored[name].shape)}, not "
                f"{_format_sizes(variable.dims, shape)}"
            )
            continue
        sound[name] = stored[name]
    return sound


def _check_fields(
    forecast: StoredForecast,
    file: ForecastFile,
    sound: Mapping[str, StoredArray],
    skipped: set[tuple[ForecastJob, int, int]],
    masks: Masks,
) -> Iterator[str]:
    """Yield the faults of values.

    Args:
        masks: valid points of the fields read so far; a new variable's are added.
    """
    form = forecast.form
    variables = forecast.settings.get("variables", {})
    # As in training, a variable with a fill is one with points that never have values.
    masked = {name for name, config in variables.items() if config.get("fill") is not None}
    for job, lead, rows in product(file.jobs, range(len(form.hours)), file.bands):
        if (job, lead, rows.start) in skipped:
            continue
        field = f"{form.describe_field(job, lead)}, rows {rows.start} to {rows.stop - 1}"
        for name, array in sound.items():
            where = f"{file.path}: {name} {field}"
            try:
                values = read_values(array.values, file.field_index(form, job, lead, rows), where)
            except UserError as error:
                yield str(error)
                continue
            finite = np.isfinite(values)
            if name in masked:
                # Valid points never change; a checksum is enough to compare them.
                mask = zlib.crc32(np.packbits(finite).tobytes())
                if masks.setdefault((name, rows.start), mask) != mask:
                    yield f"{where}: has values at other points than the fields before it"
            elif not finite.all():
                points = counted(int(np.count_nonzero(~finite)), "point")
                yield f"{where}: has NaN or infinite values on {points}"


def _format_sizes(dims: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{n} {dim}" for dim, n in zip(dims, shape, strict=False)) or "no dims"
