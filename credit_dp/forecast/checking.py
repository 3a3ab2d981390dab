"""Says whether a forecast on disk is complete, or what of it is missing."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, final

from credit_dp.errors import UserError
from credit_dp.forecast.form import Form
from credit_dp.forecast.identity import form_of
from credit_dp.forecast.netcdf_writer import NetcdfWriter
from credit_dp.forecast.writer import ENDING, Missing, Writer, told
from credit_dp.forecast.zarr_writer import ZarrWriter

WRITERS: Mapping[str, type[Writer]] = {"zarr": ZarrWriter, "netcdf": NetcdfWriter}


@final
class Finding(NamedTuple):
    """What there is of a forecast.

    Attributes:
        place: where it lies.
        fields, missing: how many there are to be, each one band of one lead time; those that are
            not there.
        named: whether it has the name of a complete one.
    """

    place: Path
    form: Form
    fields: int
    missing: list[Missing]
    named: bool

    @property
    def complete(self) -> bool:
        """Whether all of it is there, under its name."""
        return self.named and not self.missing

    def lines(self, most: int = 5) -> list[str]:
        """For people: one line that says it, and the first of what is missing."""
        form = self.form
        members = f"{form.members} members, " if form.members else ""
        what = f"{len(form.times)} initial times, {members}{len(form.hours)} lead times"
        if self.complete:
            return [f"{self.place}: complete ({what})"]
        there = self.fields - len(self.missing)
        lines = [f"{self.place}: not complete ({what}): {there} of {self.fields} fields are there"]
        lines += [f"  missing: {told(form, missing)}" for missing in self.missing[:most]]
        if len(self.missing) > most:
            lines.append(f"  and {len(self.missing) - most} more")
        return lines


def look_at(path: str) -> Finding:
    """Look at a forecast that is complete, or at what is there of it.

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
    return Finding(place, writer.form, fields, writer.missing(place), named)
