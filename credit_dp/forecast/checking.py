"""Says whether a forecast on disk is complete and sound, or what is wrong with it."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple, final

from credit_dp.errors import UserError
from credit_dp.forecast.damage import damage
from credit_dp.forecast.form import Form
from credit_dp.forecast.identity import form_of
from credit_dp.forecast.netcdf_file_writer import NetcdfFileWriter
from credit_dp.forecast.netcdf_writer import NetcdfWriter
from credit_dp.forecast.writer import ENDING, Missing, Writer, told
from credit_dp.forecast.zarr_writer import ZarrWriter

WRITERS: Mapping[str, type[Writer]] = {
    "zarr": ZarrWriter,
    "netcdf": NetcdfWriter,
    "netcdf_file": NetcdfFileWriter,
}
MOST = 5  # lines of one kind


@final
class Finding(NamedTuple):
    """What there is of a forecast.

    Attributes:
        place: where it lies.
        fields, missing: how many there are to be, each one band of one lead time; those that are
            not there.
        damaged: the first of what is wrong with the others, and how much there is.
        named: whether it has the name of a complete one.
    """

    place: Path
    form: Form
    fields: int
    missing: list[Missing]
    damaged: tuple[list[str], int]
    named: bool

    @property
    def complete(self) -> bool:
        """Whether all of it is there, sound and under its name."""
        return self.named and not self.missing and not self.damaged[1]

    def lines(self) -> list[str]:
        """For people: one line that says it, and the first of what is missing or damaged."""
        form = self.form
        members = f"{form.members} members, " if form.members else ""
        what = f"{len(form.times)} initial times, {members}{len(form.hours)} lead times"
        if self.complete:
            return [f"{self.place}: complete ({what})"]
        there = self.fields - len(self.missing)
        state = "damaged" if self.named and not self.missing else "not complete"
        lines = [f"{self.place}: {state} ({what}): {there} of {self.fields} fields are there"]
        missing = [f"missing: {told(form, missing)}" for missing in self.missing[:MOST]]
        lines += _some(missing, len(self.missing))
        damaged, count = self.damaged
        return lines + _some([f"damaged: {line}" for line in damaged], count)


def look_at(path: str) -> Finding:
    """Read a forecast that is complete, or what is there of it; a field at a time.

    Raises:
        UserError: there is none that this program wrote.
    """
    try:
        out = Path(path).expanduser().absolute()
        out = out.with_name(out.name.removesuffix(ENDING))
    except (RuntimeError, ValueError):  # ~nobody, or no name at all
        raise UserError(f"{path}: can't be a forecast. Give another path.") from None
    for place in (out, out.with_name(out.name + ENDING)):
        for kind in WRITERS.values():
            said = kind.said(place)
            if said is not None:
                return _found(place, kind(out, form_of(place, said), said), place == out)
    if not out.exists():
        raise UserError(f"{path}: there is no forecast, and none was begun. Give another path.")
    raise UserError(f"{path}: is no forecast that credit-dp forecast wrote. Give another path.")


def _found(place: Path, writer: Writer, named: bool) -> Finding:
    fields = len(writer.jobs) * len(writer.form.hours) * len(writer.bands(place))
    missing = writer.missing(place)
    return Finding(
        place, writer.form, fields, missing, _first(damage(writer, place, missing)), named
    )


def _first(lines: Iterable[str]) -> tuple[list[str], int]:
    """The first few, and how many there are."""
    rest = iter(lines)
    first = list(islice(rest, MOST))
    return first, len(first) + sum(1 for _ in rest)


def _some(lines: list[str], count: int) -> list[str]:
    more = [f"  and {count - len(lines)} more"] if count > len(lines) else []
    return [f"  {line}" for line in lines] + more
