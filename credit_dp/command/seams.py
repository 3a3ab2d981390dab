"""The seams command: `credit-dp seams forecast=STORE` looks for edges between bands of rows."""

import contextlib
import csv
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_dp import checks
from credit_dp.command.evaluate import opened
from credit_dp.command.plain_keys import numbers, read_plain_keys, texts
from credit_dp.command.tables import table
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.evaluation.forecast_store import ForecastStore
    from credit_dp.evaluation.seam_scan import Scan
    from credit_dp.evaluation.seams import Ratio

HELP = """\
{program} forecast=STORE: looks whether forecasts show where bands of rows meet.

A model that is computed in bands of latitude, and gets the rows beyond a band's edge wrong, leaves
a seam. For each variable, level and lead time, the mean absolute difference of the two rows across
an edge is divided by that of the pairs of rows beside it, and these by the next ones: 1.00 where
nothing is wrong. How far the same ratio is from 1 at all other rows says what is usual; only more
than that is told as a seam.

The store is of the form that `credit-dp evaluate` takes, whoever made it; of an ensemble the first
member is looked at.

  bands=4                    as many bands of equal height, larger ones first
  edges=[180,360,541]        the first rows of bands but the first, from 0 in the north; without
                             either key, what the store says, or the rows of each of its files
  dates=[A,B]                initial times from A to B; without it, up to 8, evenly spread
  hours=[24,72,120]          lead times; without it, up to 4, evenly spread
  variables=[NAME,...]       all of the forecast's without it
  levels=[500,850]           all of the forecast's without it
  out=FILE                   every number, as .csv or .json

  --help, -h    this text

Exit code: 0 if there are no seams, 1 if there are, 2 if a key or a store is not as needed.
"""

KEYS: Mapping[str, Any] = {
    "forecast": "",
    "bands": [],
    "edges": [],
    "dates": [],
    "hours": [],
    "variables": [],
    "levels": [],
    "out": "",
}
COLUMNS = ("variable", "level", "lead_hours", "pairs", "edge", "ratio", "usual_to", "seam")
ALL = "all"
FORMS = (".csv", ".json")


def seams(arguments: Sequence[str], program: str) -> int:
    """Look for seams in a forecast store; the exit code.

    Raises:
        UserError: a key or a store is not as needed.
    """
    keys = read_plain_keys(arguments, program, HELP, KEYS)
    if keys is None:
        return 0
    if not keys["forecast"]:
        raise UserError("forecast: needs the store of forecasts, like forecast=forecast.zarr.")
    out = checked_out(keys["out"])
    dates = texts("dates", keys["dates"])
    if dates:
        checks.span("dates", dates)
    # Here, for numpy and what reads stores take seconds: not for --help.
    from rich.console import Console

    from credit_dp.evaluation.score_request import ScoreRequest
    from credit_dp.evaluation.seam_scan import scan
    from credit_dp.training.screen import Screen

    request = ScoreRequest(
        forecast=keys["forecast"],
        truth="",
        cache="",
        variables=texts("variables", keys["variables"]),
        levels=numbers("levels", keys["levels"]),
        hours=numbers("hours", keys["hours"]),
        dates=dates,
    )
    store = opened(request.forecast)
    edges = edges_of(keys, store)
    with Screen(Console(file=sys.stderr)).report() as report:
        found = scan(request, store, edges, report)
    if out is not None:
        write(out, found)
    sys.stdout.write("\n".join([*told(found), ""]))
    return 1 if found.far else 0


def edges_of(keys: Mapping[str, Any], store: "ForecastStore") -> tuple[int, ...]:
    """The first rows of all bands but the first.

    Raises:
        UserError: they are not given and not known, or given twice.
    """
    from credit_dp.domain_parallel.partition import RowPartition

    bands, edges = numbers("bands", keys["bands"]), numbers("edges", keys["edges"])
    if bands and edges:
        raise UserError("bands: has no use beside edges=. Leave one out.")
    if edges:
        return edges
    height = len(store.latitude)
    if bands:
        if len(bands) > 1 or not 1 <= bands[0] <= height:
            raise UserError(f"bands: needs a number of 2 to {height // 2}, got {list(bands)}")
        return RowPartition.balanced(height, bands[0]).bounds[1:-1]
    if not store.edges:
        raise UserError(
            f"{store.where}: does not say what bands of rows it was computed in, or it was one. "
            "Give bands=4, or edges=[180,360,541]."
        )
    return store.edges


def checked_out(out: str) -> Path | None:
    """Where to write; None for nowhere.

    Raises:
        UserError: it is there, in no folder, or of another form.
    """
    if not out:
        return None
    path = Path(os.path.expanduser(out))
    if path.suffix not in FORMS:
        raise UserError(f"out: needs a name that ends in .csv or .json, got {out!r}")
    if os.path.lexists(path):
        raise UserError(f"{path}: exists already. Change out, or remove it.")
    if not path.parent.is_dir():
        raise UserError(f"{path}: can't be written (no folder {path.parent}). Change out.")
    return path


def told(found: "Scan") -> list[str]:
    """A line for each channel, and what it comes to."""
    rows = []
    for channel, of_channel in zip(found.channels, found.found, strict=True):
        known = [one for one in of_channel if one is not None]
        across = [
            "-" if one is None else f"{one.across.mean:.2f}{'!' if one.across.is_far else ' '}"
            for one in of_channel
        ]
        usual = f"{max(one.across.limit for one in known):.2f}" if known else "-"
        beside = [one.beside for one in known if one.beside is not None]
        worst = max(beside, key=lambda one: (one.is_far, one.mean), default=None)
        last = ("-", "-")
        if worst is not None:
            last = (f"{worst.mean:.2f}{'!' if worst.is_far else ' '}", f"{worst.limit:.2f}")
        rows.append((channel.name, *across, usual, *last))
    hours = (f"{hours:g} h " for hours in found.hours)
    names = ("across edges", *hours, "usual to", "beside ", "usual to")
    head = (
        f"{found.where}: {len(found.edges) + 1} bands, edges at rows "
        f"{', '.join(map(str, found.edges))}; {found.initials} initial times"
    )
    return [head, "", *table(names, rows, left=1), "", verdict(found)]


def verdict(found: "Scan") -> str:
    """What it comes to, in a line."""
    every = [one for of_channel in found.found for one in of_channel]
    if not found.far:
        return "no seams" if any(every) else "nothing to compare: rows have no values, or are alike"
    far = [line for line in lines(found) if line["seam"]]
    worst = max(far, key=lambda line: line["ratio"] / line["usual_to"])
    channel = "" if worst["level"] is None else f"_{worst['level']}"
    at = "all edges" if worst["edge"] == ALL else f"row {worst['edge']}"
    return (
        f"SEAMS in {len(found.far)} of {len(every)} fields (!): above all in "
        f"{worst['variable']}{channel} at {worst['lead_hours']:g} h, where rows {worst['pairs']} "
        f"edges differ {worst['ratio']:.2f} times as much as their neighbours ({at}; usual is up "
        f"to {worst['usual_to']:.2f})"
    )


def lines(found: "Scan") -> list[dict[str, Any]]:
    """Every number: of the pairs across edges and beside them, of all edges and of each."""
    listed = []
    for channel, of_channel in zip(found.channels, found.found, strict=True):
        for hours, one in zip(found.hours, of_channel, strict=True):
            both = {} if one is None else {"across": one.across, "beside": one.beside}
            for pairs, ratio in both.items():
                for edge, value, limit in of_edges(found.edges, ratio):
                    key = (channel.variable, channel.level, hours, pairs, edge)
                    cells = (*key, value, limit, value > limit)
                    listed.append(dict(zip(COLUMNS, cells, strict=True)))
    return listed


def of_edges(edges: Sequence[int], ratio: "Ratio | None") -> list[tuple[str | int, float, float]]:
    """Edge, ratio and what is usual."""
    if ratio is None:
        return []
    each = zip(edges, ratio.of_edges, strict=True)
    return [(ALL, ratio.mean, ratio.limit), *((e, value, ratio.edge_limit) for e, value in each)]


def write(path: Path, found: "Scan") -> None:
    """Write every number, whole or not at all.

    Raises:
        UserError: the file could not be written.
    """
    listed = lines(found)
    for line in listed:
        for name in ("ratio", "usual_to"):
            line[name] = line[name] if math.isfinite(line[name]) else None
    if path.suffix == ".json":
        content = {"forecast": found.where, "edges": list(found.edges), "fields": listed}
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    else:
        held = io.StringIO()
        writer = csv.DictWriter(held, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(listed)
        text = held.getvalue()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(
            f"{path}: can't be written ({error.strerror}). Free space there or change out."
        ) from error
