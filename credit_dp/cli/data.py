"""The data commands: `credit-dp data inspect|stats|prepare` describe a store and make it ready."""

import dataclasses
import functools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import Command, common_parser, parse_arguments, run_subcommand
from credit_dp.cli.compose import Composer, check_overrides
from credit_dp.cli.output import format_bytes, format_table
from credit_dp.cli.overrides import parse_overrides, quoted_forms, shell_argument, try_parse
from credit_dp.config import DataConfig
from credit_dp.config.data import AUTO, DatesConfig
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.data.inspection import StoreReport
    from credit_dp.data.rechunk.run import RechunkEstimate, RechunkJob, RechunkRequest
    from credit_dp.data.statistics import StatisticsRun
    from credit_dp.data.store import Store
    from credit_dp.data.streaming import PieceWorkers
    from credit_dp.training.console import Screen


class DataArguments(NamedTuple):
    """A checked data config, the command's own keys, and whether JSON is wanted."""

    config: DataConfig
    command_keys: Mapping[str, Any]
    json: bool


def read_data_arguments(
    arguments: Sequence[str], program: str, help_text: str, own: Mapping[str, Any]
) -> DataArguments | None:
    """Understand a command line; None if it asked for help, which has been shown.

    `store=` is short for `data.store=`. Without `data=` the store is `data=zarr`.

    Args:
        arguments: keys and dashes, in any order.
        program: as messages name it.
        help_text: with `{program}` for the program.
        own: keys that only this command has, with their defaults; an own key is of the default's
            type, or anything where that is None.

    Raises:
        UserError: a key or a value does not exist, or is not allowed.
    """
    using = common_parser()
    using.add_argument("--json", action="store_true")
    args = parse_arguments(using, arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    given, rest = dict(own), []
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if equals and key in own:
            given[key] = _parse_value(key, value, own[key])
        elif key == "store":
            rest.append(f"data.store={_quote_store(value)}")
        elif "." not in key and key != "data":
            known = [*own, "store", "data"]
            raise UserError(
                f"{program}: needs keys like {', '.join(known)} or data.NAME, got {text!r}."
                f"{did_you_mean(key, known)}"
            )
        else:
            rest.append(text)
    composer = Composer(program.rpartition(" ")[2])
    parsed = parse_overrides([*_default_overrides(rest), *rest])
    check_overrides(parsed, composer.groups)
    overrides = [str(override.input_line) for override in parsed]
    return DataArguments(composer.config(overrides).data, given, args.json)


def _parse_value(key: str, text: str, default: Any) -> Any:
    if isinstance(default, str) and text[:1] not in ("'", '"'):
        return text  # a path may look like a number, a list or a comment
    try:
        value = OmegaConf.to_object(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index,call-overload]
    except (OmegaConfBaseException, YAMLError):
        raise UserError(f"{key}: can't be read, got {text!r}") from None
    if default is not None and type(value) is not type(default):
        raise UserError(f"{key}: needs {_type_name(default)}, got {text!r}")
    return value


def _quote_store(store: str) -> str:
    """A path that Hydra can't read as it is, in quotes; a list that it can't, entry by entry.

    Raises:
        UserError: it has a comma, and may be one path or several.
    """
    parsed = try_parse(f"x={store}")
    if parsed is not None and parsed.is_sweep_override():
        raise UserError(
            f"store: needs brackets for several stores, store=[{store}], or quotes for one with a "
            f"comma, {shell_argument('store', store)}"
        )
    return store if parsed is not None else next(quoted_forms(store), store)


def _type_name(default: Any) -> str:
    kinds = {bool: "true or false", int: "a whole number", list: "a list", str: "a text"}
    return kinds[type(default)]


def _default_overrides(given: Sequence[str]) -> list[str]:
    return [] if any(text.startswith("data=") for text in given) else ["data=zarr"]


INSPECT_HELP = """\
{program} store=PATH: says what is in a store, and how it is laid out for ranks that read bands.

Grid, dates with gaps, variables with units and levels, chunks, and the read amplification: what a
rank has to decode over the share of the fields that is its band's. A store is in any form that
data.store= understands: a path, an address, a pattern or a list of them.
  domain=4      for parallel.domain=4; without it, for 1, 2, 4 and 8

  --json        everything as JSON, all gaps included
  --help, -h    this text
"""

INSPECT_KEYS: Mapping[str, Any] = {"domain": None}
DEFAULT_DOMAINS = (1, 2, 4, 8)
GAPS_SHOWN = 8  # shown of a long list
# A band that makes its rank decode no more than this many times its share is well served.
WELL_SERVED = 1.05


def inspect(arguments: Sequence[str], program: str) -> int:
    """Look at a store; the exit code.

    Raises:
        UserError: there is none, or it can't be read.
    """
    read = read_data_arguments(arguments, program, INSPECT_HELP, INSPECT_KEYS)
    if read is None:
        return 0
    from credit_dp.data.inspection import inspect_source
    from credit_dp.data.sources.opening import open_source

    domain = read.command_keys["domain"]
    source = open_source(read.config)
    report = inspect_source(
        source, DEFAULT_DOMAINS if domain is None else _parse_domain(domain, source.grid[0])
    )
    stores = read.config.stores
    sys.stdout.write(as_json(report, stores) if read.json else as_text(report, stores))
    return 0


def as_json(report: "StoreReport", stores: Sequence[str]) -> str:
    """Everything, with the advice."""
    content = {**dataclasses.asdict(report), "advice": advice(report, stores)}
    return json.dumps(content, indent=2) + "\n"


def as_text(report: "StoreReport", stores: Sequence[str]) -> str:
    """Grid, dates, a table of variables, and what to do."""
    lines = [*_grid(report), *_dates(report), "", *_variables(report), *_names(report), ""]
    lines += _reading(report)
    return "\n".join([*lines, *advice(report, stores), ""])


def advice(report: "StoreReport", stores: Sequence[str]) -> list[str]:
    """What to do about the read amplification, in lines."""
    bad = [ranks for ranks, times in report.amplification.items() if times > WELL_SERVED]
    if not bad:
        return ["Every rank reads little but its own rows: nothing to do."]
    together = max(v.chunks.shape[0] for v in report.variables if v.chunks is not None)
    domains = ",".join(map(str, report.amplification))
    several = f"[{','.join(stores)}]"
    store = (
        shell_argument("store", stores[0]) if len(stores) == 1 else shlex.quote(f"store={several}")
    )
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


def _grid(report: "StoreReport") -> list[str]:
    rows, columns = report.grid
    kind = "with rows on the poles" if report.poles else "without rows on the poles"
    north, south = report.latitude
    west, east = report.longitude
    return [
        f"{report.where}: {report.form}",
        f"grid    {rows} x {columns} {kind}, latitude {north:g} to {south:g}, longitude "
        f"{west:g} to {east:g}, as they are read",
    ]


def _dates(report: "StoreReport") -> list[str]:
    dates = report.dates
    lines = [
        f"dates   {dates.count}, from {dates.first} to {dates.last}, every "
        f"{dates.spacing_hours:g} hours, {_gaps(len(dates.gaps), dates.missing)}"
    ]
    lines += [
        f"        {gap.missing} missing between {gap.after} and {gap.before}"
        for gap in dates.gaps[:GAPS_SHOWN]
    ]
    if len(dates.gaps) > GAPS_SHOWN:
        lines.append(f"        and {len(dates.gaps) - GAPS_SHOWN} other gaps: see --json")
    return lines


def _gaps(count: int, missing: int) -> str:
    return f"{count} gaps, {missing} times missing" if count else "no gaps"


def _variables(report: "StoreReport") -> list[str]:
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
    return format_table(names, rows, left=len(names))


def _names(report: "StoreReport") -> list[str]:
    if not report.long_names:
        return []
    found = ", ".join(f"{name} ({stored})" for name, stored in report.long_names.items())
    return [f"A config finds them by these names too: {found}"]


def _levels(levels: Sequence[int]) -> str:
    return f"{len(levels)}: {levels[0]} to {levels[-1]}" if levels else "-"


def _reading(report: "StoreReport") -> list[str]:
    rows = [
        (str(ranks), f"{times:.2f}", format_bytes(report.decoded_bytes[ranks]))
        for ranks, times in report.amplification.items()
    ]
    names = ("parallel.domain", "read amplification", "decoded by a rank")
    return [
        f"A sample of all of it has {format_bytes(report.sample_bytes)}.",
        *format_table(names, rows),
        "",
    ]


def _parse_domain(domain: Any, rows: int) -> tuple[int, ...]:
    if not isinstance(domain, int) or isinstance(domain, bool) or not 1 <= domain <= rows:
        raise UserError(
            f"domain: needs a number of ranks from 1 to {rows}, the rows of the grid, "
            f"got {domain!r}"
        )
    return (domain,)


PREPARE_HELP = """\
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

PREPARE_KEYS: Mapping[str, Any] = {
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
    read = read_data_arguments(arguments, program, PREPARE_HELP, PREPARE_KEYS)
    if read is None:
        return 0
    if read.json:
        raise UserError(f"{program}: has no --json. Leave it out.")
    from credit_dp.data.rechunk.run import RechunkJob

    preparation = RechunkJob(_request(read))
    with preparation.locked():
        _run_preparation(preparation)
    return 0


def _run_preparation(preparation: "RechunkJob") -> None:
    from rich.console import Console

    from credit_dp.training.console import Screen

    screen = Screen(Console(file=sys.stdout))
    estimate = preparation.estimate()
    screen.show(describe_preparation(preparation, estimate))
    preparation.begin(estimate.codec)
    times = preparation.selected.shape[0]
    count = 0
    with screen.bar("preparing", times) as bar:

        def done(more: int) -> None:
            nonlocal count
            count += more
            bar(count)

        preparation.write_missing(done)
    samples = preparation.verify()
    preparation.finish()
    screen.show(
        f"{preparation.target.out}: {times} times, {samples} random samples equal to the store's. "
        f"Train with data=prepared {shell_argument('data.store', str(preparation.target.out))}"
    )


def describe_preparation(preparation: "RechunkJob", estimate: "RechunkEstimate") -> str:
    """What will be done, what it takes, and how the codecs did."""
    times, channels, height, columns = preparation.selected.shape
    asked = preparation.selected
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
        f"the disk gives {format_bytes(estimate.disk_bandwidth)} in a second",
        *format_table(names, rows, left=1),
        f"codec {estimate.codec}, {preparation.rows} rows in a chunk: {format_bytes(estimate.raw)} "
        f"become about {format_bytes(estimate.stored)}, in about {format_duration(estimate.hours)}",
    ]
    if preparation.resumed:
        lines.append(f"going on: {preparation.done} of {times} times are done")
    return "\n".join(lines)


def format_duration(hours: float) -> str:
    """A duration with one unit."""
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.1f} seconds"


def initialise_worker(parent: int) -> None:
    """In a worker process: Ctrl-C is the parent's to handle, and its end is the worker's too."""
    from credit_dp.distributed.forkserver import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def _request(read: DataArguments) -> "RechunkRequest":
    from credit_dp.data.rechunk.request import FieldSelection
    from credit_dp.data.rechunk.run import RechunkRequest, WorkerConfig

    own = read.command_keys
    if not own["out"]:
        raise UserError("out: needs the path of the store to write. Give it, like out=era5.zarr.")
    return RechunkRequest(
        FieldSelection(
            read.config,
            _parse_dates(own["dates"]),
            None if own["grid"] is None else str(own["grid"]),
        ),
        own["out"],
        tuple(own["domains"]),
        own["codec"],
        own["overwrite"],
        WorkerConfig(
            own["workers"] or _count_cpus(),
            own["scheduler"],
            functools.partial(initialise_worker, os.getpid()),
        ),
    )


def _parse_dates(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise UserError(f"dates: needs [first, last], like [2000-01-01,2000-12-31], got {given!r}")
    return tuple(map(str, given))


def _count_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


STATS_HELP = """\
{program} store=STORE KEY=VALUE ...: computes mean, standard deviation, that of the change over a
step, minimum and maximum of each channel, weighted by area, over exactly the training dates.

  data.dates.train=[1979-01-01,2017-12-31]   the training dates; without it those of a run with
                the same keys
  data=weatherbench2 data.prognostic=[...] data.levels=[...] data.step=6h   which fields
  out=FILE      the file to write, for data.statistics=FILE; without it, the cache's own, where
                training with the same data finds it
  every=1       take every N-th date, and the one a step later; N that meet all hours are best
  workers=2     threads
  scheduler=tcp://HOST:PORT   have the workers of a distributed dask scheduler do it

Killed at any point, it goes on where it stopped when it is started again.

  --help, -h    this text

Exit code: 0 if it is done, 2 if the keys or the store are wrong.
"""

STATS_KEYS: Mapping[str, Any] = {"out": "", "every": 1, "workers": 2, "scheduler": ""}


def stats(arguments: Sequence[str], program: str) -> int:
    """Compute the statistics of a store; the exit code.

    Raises:
        UserError: the keys, the store or the file are not as needed.
    """
    read = read_data_arguments(arguments, program, STATS_HELP, STATS_KEYS)
    if read is None:
        return 0
    if read.json:
        raise UserError(f"{program}: has no --json. Leave it out.")
    for key in ("every", "workers"):
        if read.command_keys[key] < 1:
            raise UserError(
                f"{key}: needs a whole number of at least 1, got {read.command_keys[key]}"
            )
    if read.config.name == "quickstart":
        raise UserError(
            f"{program}: needs a store: the quickstart's is made by training. Set store."
        )
    from rich.console import Console

    from credit_dp.data.cache import cache_folder
    from credit_dp.data.setup import load_or_sample_ranges
    from credit_dp.training.console import Screen, collect_data_notes

    screen = Screen(Console(file=sys.stdout))
    with collect_data_notes() as notes:
        store = _open_store(read.config)
    for note in notes:
        screen.show(f"note: {note}")
    store = store.with_ranges(load_or_sample_ranges(store, cache_folder(store.config.cache)))
    path = _statistics_path(store, read.command_keys)
    if not _is_computed(store, path, read.command_keys["every"]):
        _compute(store, path, read.command_keys, screen)
    screen.show(_usage_hint(path, read.command_keys["out"]))
    return 0


def _open_store(config: DataConfig) -> "Store":
    """The store; of the dates that are given, it only has to have those to train on."""
    from credit_dp.data.sources.opening import open_source
    from credit_dp.data.store import Store
    from credit_dp.data.units import check_units

    train = config.dates.train
    if train != AUTO and "train" not in config.dates.preset:
        config = replace(config, dates=DatesConfig(train, train, train, config.dates.limit))
    source = open_source(config)
    check_units(source, config)
    store = Store(source, config)
    store.resolve_dates()
    return store


def _statistics_path(store: "Store", own: Mapping[str, Any]) -> Path:
    from credit_dp.data.cache import cache_folder
    from credit_dp.data.statistics import statistics_path

    if own["out"]:
        return checks.expand_home("out", own["out"])
    return statistics_path(store, cache_folder(store.config.cache), own["every"])


def _is_computed(store: "Store", path: Path, every: int) -> bool:
    """Whether the file is there and of the same.

    Raises:
        UserError: there is something else.
    """
    from credit_dp.data.statistics import Statistics, StatisticsFile

    if not path.exists():
        return False
    found = StatisticsFile.load(path)
    if found is None:
        raise UserError(f"{path}: is there, and no file of statistics. Change out, or remove it.")
    if found.every != every:
        raise UserError(
            f"{path}: is there, of every={found.every}, not {every}. Change out, or remove it."
        )
    found.check(store, str(path), change="out, or remove the file")
    Statistics.of(found.channels, store, str(path))
    return True


def _compute(store: "Store", path: Path, own: Mapping[str, Any], screen: "Screen") -> None:
    from credit_dp.data.statistics import StatisticsRun
    from credit_dp.data.streaming import DaskWorkers, ThreadWorkers

    with closing(StatisticsRun(store, path, own["every"])) as run:
        screen.show(_describe_run(run))
        workers: PieceWorkers
        if own["scheduler"]:
            workers = DaskWorkers(store, run.dates, own["scheduler"])
        else:
            workers = ThreadWorkers(store, run.dates, own["workers"])
        with closing(workers):
            if run.left:
                screen.show(_estimate_duration(run, workers))
            with screen.bar("statistics (fields)", run.fields, run.done) as bar:
                run.run(workers, bar)


def _describe_run(run: "StatisticsRun") -> str:
    """What will be read."""
    from credit_dp.data.statistics_given import covers_all_hours

    store, dates = run.store, run.store.times[run.dates.indices].astype("M8[m]")
    nth = f", every={run.every} of the training dates" if run.every > 1 else ""
    variables = dict.fromkeys(c.variable for piece in run.pieces for c in piece.channels)
    lines = [
        f"{store.source.where}: {len(dates)} dates, {dates[0]} to {dates[-1]}{nth}; "
        f"{_format_fields(run, run.fields)} of fields of {store.grid[0]} x {store.grid[1]}",
        f"variables: {', '.join(variables)}",
    ]
    if store.dates_note:
        lines.append(f"data.dates: {store.dates_note}")
    if run.done:
        lines.append(f"going on: {_format_fields(run, run.done)} of it are done")
    step = store.config.step_hours
    if not covers_all_hours(run.every, step):
        better = next(n for n in count(run.every) if covers_all_hours(n, step))
        lines.append(
            f"every={run.every} does not meet all hours of the day: means will be those of a few. "
            f"every={better} is better."
        )
    return "\n".join(lines)


def _estimate_duration(run: "StatisticsRun", workers: "PieceWorkers") -> str:
    """How long it will take, from a try with the first fields of as many pieces as there are
    workers."""
    from credit_dp.data.statistics import process_first_window

    some = run.left[: workers.count]
    started = time.perf_counter()
    fields = sum(workers.run(process_first_window, some))
    speed = fields / max(time.perf_counter() - started, 1e-9)
    left = run.fields - run.done
    return (
        f"expected: {format_duration(left / speed / 3600)}, at "
        f"{_format_fields(run, int(speed))} in a second, as "
        f"the first {_format_fields(run, fields)} were read"
    )


def _format_fields(run: "StatisticsRun", fields: int) -> str:
    rows, columns = run.store.grid
    return format_bytes(4 * fields * rows * columns)


def _usage_hint(path: Path, out: str) -> str:
    if out:
        return f"{path}: train with {shell_argument('data.statistics', str(path))}"
    return f"{path}: training with the same data and data.cache finds it there"


DATA_HELP = """\
credit-dp data makes stores ready for training.

  credit-dp data inspect store=PATH       say what is in a store and how it is laid out
  credit-dp data stats store=PATH         compute the statistics that fields are normalised with
  credit-dp data prepare store=PATH out=PATH   copy it into the form that ranks read fastest

`credit-dp data COMMAND --help` says more.
"""

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "inspect": inspect,
        "prepare": prepare,
        "stats": stats,
    }
)


def data(arguments: Sequence[str], program: str) -> int:
    """Run the data command that the first argument names; the exit code.

    Raises:
        UserError: there is none of this name, or what it raises.
    """
    return run_subcommand(COMMANDS, arguments, program, DATA_HELP)
