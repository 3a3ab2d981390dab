"""The prepare command: `credit-dp data prepare store=... out=...` makes a store fast to read."""

import functools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from credit_dp.command.data_arguments import DataArguments, read_data_arguments
from credit_dp.command.overrides import ready
from credit_dp.command.tables import amount, table
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.data.preparing.preparation import Estimate, Preparation, Request

HELP = """\
{program} store=STORE out=PATH KEY=VALUE ...: copies what a run needs of a store into the form that
ranks read fastest: all variables stacked, cut by latitude, with a checksum for each chunk.

  data=weatherbench2 data.prognostic=[...] data.levels=[...] data.step=6h   which fields
  dates=[1979-01-01,2020-12-31]   first and last; all without it
  domains=[1,2,4,8]   values of parallel.domain whose bands the chunks are to fit
  grid=121x240        regrid (conservatively) to that many rows and columns
  codec=auto          none, lz4, zstd, zstd3 or zstd-plain; auto: what is read fastest here
  workers=4           processes of this machine
  scheduler=tcp://HOST:PORT   have the workers of a distributed dask scheduler do it
  overwrite=false     true: replace a prepared store that is there

Killed at any point, it goes on where it stopped when it is started again. At the end random samples
are compared with the store, bit for bit.

  --help, -h    this text

Exit code: 0 if it is done, 2 if the keys or the store are wrong.
"""

OWN: Mapping[str, Any] = {
    "out": "",
    "dates": None,
    "domains": [1, 2, 4, 8],
    "grid": None,
    "codec": "auto",
    "workers": 0,
    "scheduler": "",
    "overwrite": False,
}


def prepare(arguments: Sequence[str], program: str) -> int:
    """Prepare a store; the exit code.

    Raises:
        UserError: the request can't be met.
    """
    read = read_data_arguments(arguments, program, HELP, OWN)
    if read is None:
        return 0
    if read.json:
        raise UserError(f"{program}: has no --json. Leave it out.")
    from credit_dp.data.preparing.preparation import Preparation

    preparation = Preparation(_request(read))
    with preparation.alone():
        _run(preparation)
    return 0


def _run(preparation: "Preparation") -> None:
    from rich.console import Console

    from credit_dp.training.screen import Screen

    screen = Screen(Console(file=sys.stdout))
    estimate = preparation.estimate()
    screen.say(told(preparation, estimate))
    preparation.begin(estimate.codec)
    times = preparation.asked.shape[0]
    count = 0
    with screen.bar("preparing", times) as bar:

        def done(more: int) -> None:
            nonlocal count
            count += more
            bar(count)

        preparation.work(done)
    samples = preparation.verify()
    preparation.finish()
    screen.say(
        f"{preparation.target.out}: {times} times, {samples} random samples equal to the store's. "
        f"Train with data=prepared {ready('data.store', str(preparation.target.out))}"
    )


def told(preparation: "Preparation", estimate: "Estimate") -> str:
    """What will be done, what it takes, and how the codecs did."""
    times, channels, height, columns = preparation.asked.shape
    asked = preparation.asked
    rows = [
        (
            one.name,
            f"{one.ratio:.2f}",
            f"{1e-6 / one.encode:.0f}",
            f"{1e-6 / one.decode:.0f}",
            f"{1e-6 / one.read:.0f}",
        )
        for one in estimate.codecs.values()
    ]
    names = ("codec", "ratio", "encode MB/s", "decode MB/s", "disk and decode MB/s")
    lines = [
        f"{asked.form.origin}: {times} times ({asked.times[0].astype('M8[h]')} to "
        f"{asked.times[-1].astype('M8[h]')}), {channels} channels, {height} x {columns}",
        f"the disk gives {amount(estimate.disk_speed)} in a second",
        *table(names, rows, left=1),
        f"codec {estimate.codec}, {preparation.rows} rows in a chunk: {amount(estimate.raw)} "
        f"become about {amount(estimate.stored)}, in about {span(estimate.hours)}",
    ]
    if preparation.resumed:
        lines.append(f"going on: {preparation.done} of {times} times are done")
    return "\n".join(lines)


def span(hours: float) -> str:
    """A duration with one unit."""
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.1f} seconds"


def start_worker(parent: int) -> None:
    """In a worker process: Ctrl-C is the parent's to handle, and its end is the worker's too."""
    from credit_dp.launch.nursery import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def _request(read: DataArguments) -> "Request":
    from credit_dp.data.preparing.asked import Question
    from credit_dp.data.preparing.preparation import Request
    from credit_dp.data.preparing.work import Workers

    own = read.own
    if not own["out"]:
        raise UserError("out: needs the path of the store to write. Give it, like out=era5.zarr.")
    return Request(
        Question(
            read.config, _dates(own["dates"]), None if own["grid"] is None else str(own["grid"])
        ),
        own["out"],
        tuple(own["domains"]),
        own["codec"],
        own["overwrite"],
        Workers(
            own["workers"] or _processors(),
            own["scheduler"],
            functools.partial(start_worker, os.getpid()),
        ),
    )


def _dates(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise UserError(f"dates: needs [first, last], like [2000-01-01,2000-12-31], got {given!r}")
    return tuple(map(str, given))


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
