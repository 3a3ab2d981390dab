"""The inspect command: `credit-dp data inspect store=PATH` says what is in a store."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from credit_dp.command.data_arguments import read_data_arguments
from credit_dp.command.overrides import ready
from credit_dp.command.tables import amount, table
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.data.inspection import Report

HELP = """\
{program} store=PATH: says what is in a store, and how it is laid out for ranks that read bands.

Grid, dates with gaps, variables with units and levels, chunks, and the read amplification: what a
rank has to decode over the share of the fields that is its band's. A store is in any form that
data.store= understands: a path, an address, a pattern or a list of them.
  domain=4      for parallel.domain=4; without it, for 1, 2, 4 and 8

  --json        everything as JSON, all gaps included
  --help, -h    this text
"""

OWN: Mapping[str, Any] = {"domain": None}
DOMAINS = (1, 2, 4, 8)
GAPS = 8  # shown of a long list
# A band that makes its rank decode no more than this many times its share is well served.
WELL_SERVED = 1.05


def inspect(arguments: Sequence[str], program: str) -> int:
    """Look at a store; the exit code.

    Raises:
        UserError: there is none, or it can't be read.
    """
    read = read_data_arguments(arguments, program, HELP, OWN)
    if read is None:
        return 0
    from credit_dp.data.inspection import inspected
    from credit_dp.data.sources.opening import open_source

    domain = read.own["domain"]
    source = open_source(read.config)
    report = inspected(source, DOMAINS if domain is None else _checked(domain, source.grid[0]))
    stores = read.config.stores
    sys.stdout.write(as_json(report, stores) if read.json else as_text(report, stores))
    return 0


def as_json(report: "Report", stores: Sequence[str]) -> str:
    """Everything, with the advice."""
    content = {**dataclasses.asdict(report), "advice": advice(report, stores)}
    return json.dumps(content, indent=2) + "\n"


def as_text(report: "Report", stores: Sequence[str]) -> str:
    """Grid, dates, a table of variables, and what to do."""
    lines = [*_grid(report), *_dates(report), "", *_variables(report), *_names(report), ""]
    lines += _reading(report)
    return "\n".join([*lines, *advice(report, stores), ""])


def advice(report: "Report", stores: Sequence[str]) -> list[str]:
    """What to do about the read amplification, in lines."""
    bad = [ranks for ranks, times in report.amplification.items() if times > WELL_SERVED]
    if not bad:
        return ["Every rank reads little but its own rows: nothing to do."]
    together = max(v.chunks.shape[0] for v in report.variables if v.chunks is not None)
    domains = ",".join(map(str, report.amplification))
    several = f"[{','.join(stores)}]"
    store = ready("store", stores[0]) if len(stores) == 1 else shlex.quote(f"store={several}")
    lines = []
    if any(ranks > 1 for ranks in bad):
        lines.append(
            "Without a second copy the ranks of a domain share the reading: each chunk is decoded "
            "once, and bands are sent."
        )
    if together > 1:
        lines.append(
            f"A chunk holds up to {together} times, and a random sample needs one or two of them."
        )
    lines += [
        "For the fastest reading make a copy, cut to fit the bands (see its --help for variables, "
        "levels and dates):",
        f"  credit-dp data prepare {store} out=prepared.zarr {shlex.quote(f'domains=[{domains}]')}",
    ]
    return lines


def _grid(report: "Report") -> list[str]:
    rows, columns = report.grid
    kind = "with rows on the poles" if report.poles else "without rows on the poles"
    north, south = report.latitude
    west, east = report.longitude
    return [
        f"{report.where}: {report.form}",
        f"grid    {rows} x {columns} {kind}, latitude {north:g} to {south:g}, longitude "
        f"{west:g} to {east:g}, as they are read",
    ]


def _dates(report: "Report") -> list[str]:
    dates = report.dates
    lines = [
        f"dates   {dates.count}, from {dates.first} to {dates.last}, every "
        f"{dates.spacing_hours:g} hours, {_gaps(len(dates.gaps), dates.missing)}"
    ]
    lines += [
        f"        {gap.missing} missing between {gap.after} and {gap.before}"
        for gap in dates.gaps[:GAPS]
    ]
    if len(dates.gaps) > GAPS:
        lines.append(f"        and {len(dates.gaps) - GAPS} other gaps: see --json")
    return lines


def _gaps(count: int, missing: int) -> str:
    return f"{count} gaps, {missing} times missing" if count else "no gaps"


def _variables(report: "Report") -> list[str]:
    rows = []
    for variable in report.variables:
        chunks = variable.chunks
        rows.append(
            (
                variable.name,
                variable.units or "-",
                _levels(variable.levels),
                "yes" if variable.timed else "no",
                "x".join(map(str, chunks.shape)) if chunks is not None else "-",
                str(chunks.times_together) if chunks is not None else "-",
                variable.problem or variable.standard_name or "-",
            )
        )
    chunk = "chunk (time, channel, row, column)"
    names = ("variable", "units", "levels", "in time", chunk, "times in a file", "standard name")
    return table(names, rows, left=len(names))


def _names(report: "Report") -> list[str]:
    if not report.long_names:
        return []
    found = ", ".join(f"{name} ({stored})" for name, stored in report.long_names.items())
    return [f"A config finds them by these names too: {found}"]


def _levels(levels: Sequence[int]) -> str:
    return f"{len(levels)}: {levels[0]} to {levels[-1]}" if levels else "-"


def _reading(report: "Report") -> list[str]:
    rows = [
        (str(ranks), f"{times:.2f}", amount(report.decoded_bytes[ranks]))
        for ranks, times in report.amplification.items()
    ]
    names = ("parallel.domain", "read amplification", "decoded by a rank")
    return [f"A sample of all of it has {amount(report.sample_bytes)}.", *table(names, rows), ""]


def _checked(domain: Any, rows: int) -> tuple[int, ...]:
    if not isinstance(domain, int) or isinstance(domain, bool) or not 1 <= domain <= rows:
        raise UserError(
            f"domain: needs a number of ranks from 1 to {rows}, the rows of the grid, "
            f"got {domain!r}"
        )
    return (domain,)
