"""The data commands: describe a store (`inspect`), prepare it for training (`stats`, `prepare`)."""

import dataclasses
import functools
import json
import math
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

from credit_dp import checks
from credit_dp.checks import did_you_mean
from credit_dp.cli.arguments import (
    Command,
    common_parser,
    parse_arguments,
    run_subcommand,
    split_keys,
    to_whole_numbers,
)
from credit_dp.cli.compose import Composer
from credit_dp.cli.output import format_bytes, format_table, print_lines
from credit_dp.cli.overrides import quoted_forms, try_parse
from credit_dp.config import Config, DataConfig
from credit_dp.config.data import AUTO, ROLES, DatesConfig
from credit_dp.distributed.forkserver import (
    die_with_parent,
    forget_import_variables,
    import_from_same_folders,
)
from credit_dp.errors import UserError, counted, shell_argument
from credit_dp.process import usable_cores

if TYPE_CHECKING:
    from credit_dp.data.inspection import ChunkReport, StoreReport
    from credit_dp.data.rechunk.copy_fields import PrepareJob, PrepareRequest
    from credit_dp.data.statistics import StatisticsRun
    from credit_dp.data.store import Store
    from credit_dp.data.streaming import PieceWorkers
    from credit_dp.training.console import Screen


class DataArguments(NamedTuple):
    """The config of a run, the values of the command's keys, and whether to print JSON."""

    run: Config
    command_keys: Mapping[str, Any]
    json: bool

    @property
    def config(self) -> DataConfig:
        """The config of the data."""
        return self.run.data


SHORT_KEYS = ("store", "grid", "regrid")  # store= is short for data.store=
GROUPS = ("data", "experiment")  # of the config, which choose stores and variables


def read_data_arguments(
    arguments: Sequence[str], program: str, help_text: str, command_keys: Mapping[str, Any]
) -> DataArguments | None:
    """Parse a command line and compose its data config; None after printing the help, if requested.

    `SHORT_KEYS` are those of `data`. Without `data=` the config is that of `data=zarr`.

    Args:
        arguments: keys and options, in any order.
        program: name of the command in messages.
        help_text: with `{program}` in place of that name.
        command_keys: of this command alone, see `split_keys`.

    Raises:
        UserError: a key or a value does not exist, or is not allowed.
    """
    parser = common_parser()
    parser.add_argument("--json", action="store_true")
    args = parse_arguments(parser, arguments)
    if args.help:
        sys.stdout.write(help_text.format(program=program))
        return None
    values, others = split_keys(args.overrides, command_keys)
    data_overrides = []
    for text in others:
        key, _, value = text.partition("=")
        if key in SHORT_KEYS:
            quoted = _quote_store(value) if key == "store" else value
            data_overrides.append(f"data.{key}={quoted}")
        # Keys of the config have a dot (data.NAME); any other word is a mistake, as is a bare path.
        elif ("." not in key and key not in GROUPS) or "=" not in text:
            known = [*command_keys, *SHORT_KEYS, *GROUPS]
            raise UserError(
                f"{program}: needs keys like {', '.join(known)} or data.NAME, got {text!r}."
                f"{did_you_mean(key, known)}"
            )
        else:
            data_overrides.append(text)
    composer = Composer(program.rpartition(" ")[2])
    if not any(text.partition("=")[0] in GROUPS for text in data_overrides):
        data_overrides.insert(0, "data=zarr")
    overrides = composer.parse(data_overrides)
    texts = [str(override.input_line) for override in overrides]
    return DataArguments(composer.compose_config(texts), values, args.json)


def _quote_store(store: str) -> str:
    """Return a store with the quotes that Hydra needs; entries of a list are quoted one by one.

    Raises:
        UserError: it contains a comma, and may be one path or several.
    """
    parsed = try_parse(f"x={store}")
    if parsed is not None and parsed.is_sweep_override():
        raise UserError(
            f"store: needs brackets for several stores, store=[{store}], or quotes for one with a "
            f"comma, {shell_argument('store', store)}"
        )
    return store if parsed is not None else next(quoted_forms(store), store)


INSPECT_HELP = """\
{program} store=PATH: shows what is in a store, and how fast ranks can read their bands of it.

Shows the grid, dates with gaps, variables with units and levels, chunks, and the read
amplification: the bytes that a rank decodes, over those of its band. A store has any form that
data.store= accepts: a path, an address, a pattern or a list of them.
  domain=4      for parallel.domain=4; without it, for 1, 2, 4 and 8

  --json        everything as JSON, including all gaps
  --help, -h    this text
"""

INSPECT_KEYS: Mapping[str, Any] = {"domain": None}
DEFAULT_DOMAINS = (1, 2, 4, 8)
GAPS_SHOWN = 8  # in the text; --json has all
LOW_AMPLIFICATION = 1.05  # up to here no copy of the store is recommended


def inspect(arguments: Sequence[str], program: str) -> int:
    """Describe a store; return the exit code."""
    parsed = read_data_arguments(arguments, program, INSPECT_HELP, INSPECT_KEYS)
    if parsed is None:
        return 0
    from credit_dp.data.inspection import inspect_source
    from credit_dp.data.sources.opening import open_source

    domain = parsed.command_keys["domain"]
    source = open_source(parsed.config)
    report = inspect_source(
        source, DEFAULT_DOMAINS if domain is None else _parse_domain(domain, source.grid[0])
    )
    stores = parsed.config.stores
    if parsed.json:
        sys.stdout.write(as_json(report, stores))
    else:
        print_lines(as_text(report, stores))
    return 0 if report.sample_bytes else 2


def as_json(report: "StoreReport", stores: Sequence[str]) -> str:
    """Return the whole report as JSON, with the advice."""
    content = {**dataclasses.asdict(report), "advice": advice(report, stores)}
    return json.dumps(content, indent=2) + "\n"


def as_text(report: "StoreReport", stores: Sequence[str]) -> str:
    """Return grid, dates, a table of variables, the read amplification, and the advice."""
    lines = [*_grid(report), *_dates(report), "", *_variables(report), *_names(report), ""]
    lines += _reading(report) if report.sample_bytes else []
    return "\n".join([*lines, *advice(report, stores)])


def advice(report: "StoreReport", stores: Sequence[str]) -> list[str]:
    """Return lines that say how to lower the read amplification."""
    slow_domains = [
        ranks for ranks, factor in report.amplification.items() if factor > LOW_AMPLIFICATION
    ]
    if not report.sample_bytes:
        problem = next((f": {x.name} {x.problem}" for x in report.variables if x.problem), "")
        return [f"Nothing to train on: no variable that changes in time can be read{problem}"]
    if not slow_domains:
        return ["Every rank reads little more than its own rows: nothing to do."]
    times_per_chunk = max(
        variable.chunks.shape[0] for variable in report.variables if variable.chunks is not None
    )
    domains = ",".join(map(str, report.amplification))
    store_list = f"[{','.join(stores)}]"
    store = (
        shell_argument("store", stores[0])
        if len(stores) == 1
        else shlex.quote(f"store={store_list}")
    )
    member = f" data.member={report.members[0]}" if len(report.members) > 1 else ""
    lines = []
    if any(ranks > 1 for ranks in slow_domains):
        lines.append(
            "Without a copy the ranks of a domain share the reading: one rank decodes a chunk and "
            "sends bands to the others."
        )
    if times_per_chunk > 1:
        lines.append(
            f"A chunk holds up to {times_per_chunk} times, but a random sample needs one or two."
        )
    lines += [
        "For the fastest reading, make a copy with one time in a chunk and rows that fit the bands "
        "(its --help explains how to select variables, levels and dates):",
        f"  credit-dp data prepare {store}{member} out=prepared.zarr "
        f"{shlex.quote(f'domains=[{domains}]')}",
    ]
    return lines


def _grid(report: "StoreReport") -> list[str]:
    rows, columns = report.grid
    kind = "with rows on the poles" if report.poles else "without rows on the poles"
    if not report.is_global:
        kind = " ".join(["region", *(["on", report.projection] if report.projection else [])])
        kind += f", {report.spacing}"
    north, south = report.latitude
    west, east = report.longitude
    return [
        f"{report.where}: {report.form}",
        f"grid    {rows} x {columns} {kind}, latitude {north:g} to {south:g}, longitude "
        f"{west:g} to {east:g}, as ranks read them",
        *(f"winds   {kind}: {', '.join(names)}" for kind, names in report.winds.items()),
    ]


def _dates(report: "StoreReport") -> list[str]:
    from credit_dp.data.sources.source import describe_members

    dates = report.dates
    members = [f"        {describe_members(report.members)}"] if report.members else []
    if dates.count == 1:
        return [f"dates   1, {dates.first}", *members]
    months = dates.spacing_months
    every = counted(months, "month") if months else counted(dates.spacing_hours or 0, "hour")
    calendar = "" if dates.calendar == "standard" else f", {dates.calendar} calendar"
    gaps = "no gaps"
    if dates.gaps:
        gaps = f"{counted(len(dates.gaps), 'gap')}, {counted(dates.missing, 'time')} missing"
    lines = [
        f"dates   {dates.count}, from {dates.first} to {dates.last}, every "
        f"{every}, {gaps}{calendar}"
    ]
    if months:
        lines.append(
            "        a model needs steps of equal length, in whole hours or days: data.step"
        )
    lines += [
        f"        {gap.missing} missing between {gap.after} and {gap.before}"
        for gap in dates.gaps[:GAPS_SHOWN]
    ]
    if len(dates.gaps) > GAPS_SHOWN:
        more = counted(len(dates.gaps) - GAPS_SHOWN, "more gap")
        lines.append(f"        and {more}: see --json")
    return [*lines, *members]


def _variables(report: "StoreReport") -> list[str]:
    rows = []
    for variable in report.variables:
        chunks, levels = variable.chunks, variable.levels
        rows.append(
            (
                variable.name,
                variable.units or "-",
                _levels(levels),
                "yes" if variable.timed else "no",
                _chunk_shape(chunks),
                str(chunks.times_together) if chunks is not None else "-",
                variable.problem or variable.standard_name or "-",
            )
        )
    chunk_heading = "chunk (time, channel, row, column)"
    headings = (
        "variable",
        "units",
        "levels",
        "in time",
        chunk_heading,
        "times in a file",
        "standard name",
    )
    return format_table(headings, rows, left=len(headings))


def _levels(levels: Sequence[int]) -> str:
    """Return the number of levels, with the first and the last; the only one alone."""
    if len(levels) < 2:
        return str(levels[0]) if levels else "-"
    return f"{len(levels)}: {levels[0]} to {levels[-1]}"


def _chunk_shape(chunks: "ChunkReport | None") -> str:
    """Return the shape of chunks; "none" of contiguous netCDF, whose values can be read alone."""
    if chunks is None:
        return "-"
    return "x".join(map(str, chunks.shape)) if math.prod(chunks.shape) > 1 else "none"


def _names(report: "StoreReport") -> list[str]:
    if not report.long_names:
        return []
    names = ", ".join(f"{name} ({stored})" for name, stored in report.long_names.items())
    return [f"A config may also use these names: {names}"]


def _reading(report: "StoreReport") -> list[str]:
    rows = [
        (
            str(ranks),
            f"{factor:.2f}",
            f"{factor / report.row_amplification[ranks]:.2f}",
            f"{report.row_amplification[ranks]:.2f}",
            format_bytes(report.decoded_bytes[ranks]),
        )
        for ranks, factor in report.amplification.items()
    ]
    headings = (
        "parallel.domain",
        "read amplification",
        "by times and levels",
        "by rows",
        "decoded by a rank",
    )
    return [
        f"A sample with all fields has {format_bytes(report.sample_bytes)}.",
        *format_table(headings, rows),
        "read amplification: what a rank decodes over its share of the sample; 1 is the least. It "
        "is the product of two factors, as chunks hold more times, levels or rows than are needed.",
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
{program} store=STORE out=PATH KEY=VALUE ...: copies the fields that a run needs into the form that
ranks read fastest: all variables in one array, chunked by latitude, with a checksum for each chunk.

  data=weatherbench2 data.prognostic=[...] data.levels=[...] data.step=6h   which fields
  dates=[1979-01-01,2020-12-31]   first and last; all without it
  domains=[1,2,4,8]   values of parallel.domain whose bands the chunks should fit
  grid=121x240        regrid to this many rows and columns
  regrid=conservative how: conservative or bilinear
  codec=zstd          zstd, lz4 or none: lossless compression
  workers=4           processes on this machine
  scheduler=tcp://HOST:PORT   use the workers of a distributed dask scheduler instead
  overwrite=false     true: replace an existing prepared store

If it is killed, the same command continues where it stopped. At the end random samples are compared
with the store, bit for bit.

  --help, -h    this text

Exit code: 0 if it is done, 2 if the keys or the store are wrong.
"""

PREPARE_KEYS: Mapping[str, Any] = {
    "out": "",
    "dates": None,
    "domains": [1, 2, 4, 8],
    "codec": "zstd",
    "workers": 0,
    "scheduler": "",
    "overwrite": False,
}


def prepare(arguments: Sequence[str], program: str) -> int:
    """Copy a store into the prepared form; return the exit code.

    Raises:
        UserError: the request can't be met.
    """
    parsed = read_data_arguments(arguments, program, PREPARE_HELP, PREPARE_KEYS)
    if parsed is None:
        return 0
    if parsed.json:
        raise UserError(f"{program}: has no --json. Leave it out.")
    from rich.console import Console

    from credit_dp.data.rechunk.copy_fields import PrepareJob
    from credit_dp.distributed.local import start_resource_tracker
    from credit_dp.training.console import Screen

    screen = Screen(Console(file=sys.stdout))
    job = PrepareJob(_request(parsed))
    num_times = job.selected.shape[0]
    with job.locked():
        screen.show(describe_preparation(job))
        with screen.bar("preparing", num_times, num_times - len(job.missing())) as bar:
            start_resource_tracker()
            with import_from_same_folders():  # of the processes that write
                job.write(bar, functools.partial(start_worker, os.getpid()))
        samples = job.verify()
        job.finish()
    screen.show(
        f"{job.out}: {counted(num_times, 'time')}, {samples} random samples equal to the store's. "
        f"Train with {' '.join(training_keys(job, parsed.config))}"
    )
    return 0


def training_keys(job: "PrepareJob", config: DataConfig) -> list[str]:
    """Return the keys, for a shell, with which training reads what a job copied with a config."""
    from credit_dp.data.forcings import COMPUTED_STATICS

    preset = Composer("train").compose_config(["data=prepared", "data.store=none"]).data
    # Presets also name static fields that a store may lack.
    static = {*COMPUTED_STATICS, *job.selected.metadata.static}
    keys = ["data=prepared", shell_argument("data.store", str(job.out))]
    for role in ROLES:
        names, preset_names = (
            [name for name in getattr(each, role) if role != "static" or name in static]
            for each in (config, preset)
        )
        if names != preset_names:
            keys.append(shlex.quote(f"data.{role}=[{','.join(names)}]"))
    if config.step != preset.step:
        keys.append(f"data.step={config.step}")
    for name, variable in config.variables.items():
        for item in dataclasses.fields(variable):
            value = getattr(variable, item.name)
            # Units are converted and sums are formed already.
            if item.name in ("convert", "accumulated") or value == item.default:
                continue
            key = f"data.variables.{name}.{item.name}"
            text = isinstance(value, str)
            keys.append(shell_argument(key, value) if text else f"{key}={json.dumps(value)}")
    return keys


def describe_preparation(job: "PrepareJob") -> str:
    """Return what will be copied, and the space that it takes."""
    selected = job.selected
    times, channels, height, columns = selected.shape
    lines = [
        f"{selected.metadata.origin}: {counted(times, 'time')} "
        f"({' to '.join(selected.calendar.short_text(x) for x in selected.times[[0, -1]])}), "
        f"{counted(channels, 'field')}, {height} x {columns}",
        f"codec {job.request.codec}, {counted(job.chunk_rows, 'row')} in a chunk: "
        f"{format_bytes(4 * math.prod(selected.shape))} become about "
        f"{format_bytes(job.stored_bytes())}",
    ]
    if job.begun:
        lines.append(f"resuming: {times - len(job.missing())} of {times} times are done")
    return "\n".join(lines)


def format_duration(hours: float) -> str:
    """Return a duration in its largest unit of hours, minutes and seconds."""
    if hours >= 1:
        return f"{hours:.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.1f} seconds"


def start_worker(parent: int) -> None:
    """Leave Ctrl-C and a lost terminal to the parent of this process, and end with it."""
    forget_import_variables()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)


def _request(parsed: DataArguments) -> "PrepareRequest":
    from credit_dp.data.rechunk.copy_fields import PrepareRequest

    keys = parsed.command_keys
    if not keys["out"]:
        raise UserError("out: needs the path of the store to write. Give it, like out=era5.zarr.")
    return PrepareRequest(
        config=parsed.config,
        out=keys["out"],
        dates=_parse_dates(keys["dates"]),
        domains=to_whole_numbers("domains", keys["domains"]),
        codec=keys["codec"],
        overwrite=keys["overwrite"],
        workers=keys["workers"] or usable_cores(),
        scheduler=keys["scheduler"],
    )


def _parse_dates(dates: Any) -> tuple[str, ...]:
    if dates is None:
        return ()
    if not isinstance(dates, list):
        raise UserError(f"dates: needs [first, last], like [2000-01-01,2000-12-31], got {dates!r}")
    return tuple(map(str, dates))


STATS_HELP = """\
{program} store=STORE KEY=VALUE ...: computes mean, standard deviation, standard deviation of the
change over a step, minimum and maximum of each channel, weighted by area, over the training dates.

  data.dates.train=[1979-01-01,2017-12-31]   the training dates; without it those of a run with
                the same keys
  data=weatherbench2 data.prognostic=[...] data.levels=[...] data.step=6h   which fields
  out=FILE      the file to write, for data.statistics=FILE; without it, a file in the cache, where
                training with the same data finds it
  climatology=false   true: fit the climatology, too, so that the cache has all that training with
                the same keys computes; missing statistics are computed in the same pass, by one
                thread and not resumed
  every=1       use every N-th date, and the one a step later; choose N so that all hours of the day
                occur
  workers=2     threads
  scheduler=tcp://HOST:PORT   use the workers of a distributed dask scheduler instead

If it is killed, the same command continues where it stopped.

  --help, -h    this text

Exit code: 0 if it is done, 2 if the keys or the store are wrong.
"""

STATS_KEYS: Mapping[str, Any] = {
    "out": "",
    "climatology": False,
    "every": 1,
    "workers": 2,
    "scheduler": "",
}


def stats(arguments: Sequence[str], program: str) -> int:
    """Compute the statistics of a store; return the exit code.

    Raises:
        UserError: the keys, the store or the file are wrong.
    """
    parsed = read_data_arguments(arguments, program, STATS_HELP, STATS_KEYS)
    if parsed is None:
        return 0
    if parsed.json:
        raise UserError(f"{program}: has no --json. Leave it out.")
    for key in ("every", "workers"):
        if parsed.command_keys[key] < 1:
            raise UserError(
                f"{key}: needs a whole number of at least 1, got {parsed.command_keys[key]}"
            )
    if parsed.command_keys["climatology"]:
        return _prepare_cache(parsed)
    if parsed.config.name == "quickstart":
        raise UserError(
            f"{program}: needs a store: only training and climatology=true create that of the "
            "quickstart. Set store."
        )
    from rich.console import Console

    from credit_dp.data.cache import cache_folder
    from credit_dp.data.masks import with_masks
    from credit_dp.training.console import Screen, collect_data_notes

    screen = Screen(Console(file=sys.stdout))
    with collect_data_notes() as notes:
        store = _open_store(parsed.run)
    for note in notes:
        screen.show(f"note: {note}")
    folder = cache_folder(store.config.cache)
    with screen.report() as report:
        store = with_masks(store, folder, report)
    path = _statistics_path(store, parsed.command_keys)
    if not _is_computed(store, path, parsed.command_keys["every"]):
        _compute(store, path, parsed.command_keys, screen)
    hint = "training with the same data and data.cache finds it there"
    if parsed.command_keys["out"]:
        hint = f"train with {shell_argument('data.statistics', str(path))}"
    screen.show(f"{path}: {hint}")
    return 0


def _prepare_cache(parsed: DataArguments) -> int:
    """Compute all that training takes from the cache, as a run would; return the exit code.

    Raises:
        UserError: a key asks for statistics that training would not find, or the store is wrong.
    """
    for key in ("out", "every", "workers", "scheduler"):
        if parsed.command_keys[key] != STATS_KEYS[key]:
            raise UserError(
                f"{key}: can't be used with climatology=true, which computes what training with "
                "the same keys takes from the cache. Leave one of them out."
            )
    from rich.console import Console

    from credit_dp.data.dates import times_needed
    from credit_dp.data.setup import prepare_training_data, with_quickstart_store
    from credit_dp.data.store import Store
    from credit_dp.training.console import Screen

    screen = Screen(Console(file=sys.stdout))
    with screen.report() as report:
        config = parsed.config
        if config.dates.undetermined:
            store = Store.open(with_quickstart_store(config, report), times_needed(parsed.run))
            config = replace(config, dates=store.config.dates)
            screen.show(f"data.dates: {store.dates_note}")
        prepare_training_data(config, report)
    screen.show(f"{parsed.config.cache}: training with the same data and data.cache finds all here")
    return 0


def _open_store(run: Config) -> "Store":
    """Open the store of a run; of the splits, only the training dates have to be in it."""
    from credit_dp.data.dates import times_needed
    from credit_dp.data.sources.opening import open_source
    from credit_dp.data.store import Store
    from credit_dp.data.units import check_units

    config = run.data
    train = config.dates.train
    if train != AUTO and "train" not in config.dates.preset:
        # With the training dates for all splits, no other dates have to be in the store.
        config = replace(config, dates=DatesConfig(train, train, train, config.dates.limit))
    store = Store(open_source(config), config)
    check_units(store.source, store.config)
    store.resolve_dates(times_needed(run))
    return store


def _statistics_path(store: "Store", keys: Mapping[str, Any]) -> Path:
    from credit_dp.data.cache import cache_folder
    from credit_dp.data.statistics import statistics_path

    if keys["out"]:
        return checks.expand_home("out", keys["out"])
    return statistics_path(store, cache_folder(store.config.cache), keys["every"])


def _is_computed(store: "Store", path: Path, every: int) -> bool:
    """Whether the file exists, with these statistics.

    Raises:
        UserError: it exists with other content.
    """
    from credit_dp.data.statistics import Statistics, StatisticsFile

    if not path.exists():
        return False
    file = StatisticsFile.load(path)
    if file is None:
        raise UserError(
            f"{path}: exists, but is no file of statistics. Change out, or remove the file."
        )
    if file.every != every:
        raise UserError(
            f"{path}: exists with every={file.every}, not {every}. Change out, or remove the file."
        )
    file.check(store, str(path), change="out, or remove the file")
    Statistics.of(file.channels, store, str(path))
    return True


def _compute(store: "Store", path: Path, keys: Mapping[str, Any], screen: "Screen") -> None:
    from credit_dp.data.statistics import StatisticsRun
    from credit_dp.data.streaming import PieceWorkers

    with closing(StatisticsRun(store, path, keys["every"])) as run:
        screen.show(_describe_run(run))
        workers = PieceWorkers(store, run.dates, keys["workers"], keys["scheduler"])
        with closing(workers):
            if run.remaining:
                screen.show(_estimate_duration(run, workers))
            with screen.bar("statistics (fields)", run.num_fields, run.num_done) as bar:
                run.run(workers, bar)


def _describe_run(run: "StatisticsRun") -> str:
    """Return lines about the fields that will be read."""
    from credit_dp.data.statistics_files import covers_all_hours

    store = run.store
    dates = store.times[run.dates.indices]
    first, last = (store.calendar.text(date) for date in dates[[0, -1]])
    nth = f", every={run.every} of the training dates" if run.every > 1 else ""
    variables = dict.fromkeys(c.variable for piece in run.pieces for c in piece.channels)
    lines = [
        f"{store.source.where}: {counted(len(dates), 'date')}, {first} to {last}{nth}; "
        f"{_format_fields(run, run.num_fields)} of fields of {store.grid[0]} x {store.grid[1]}",
        f"variables: {', '.join(variables)}",
    ]
    if store.dates_note:
        lines.append(f"data.dates: {store.dates_note}")
    if run.num_done:
        lines.append(f"resuming: {_format_fields(run, run.num_done)} of the fields are done")
    step = store.config.step_hours
    if not covers_all_hours(run.every, step):
        # Ends soon: every number without a factor of 2 or 3 covers all hours.
        better = next(n for n in count(run.every) if covers_all_hours(n, step))
        lines.append(
            f"every={run.every} misses some hours of the day, which biases the statistics. "
            f"every={better} is better."
        )
    return "\n".join(lines)


def _estimate_duration(run: "StatisticsRun", workers: "PieceWorkers") -> str:
    """Time the first fields of as many pieces as there are workers, and extrapolate."""
    from credit_dp.data.statistics import process_first_window

    pieces = run.remaining[: workers.count]
    process = functools.partial(process_first_window, quantiles=run.quantiles)
    start = time.perf_counter()
    fields = sum(workers.run(process, pieces))
    speed = fields / max(time.perf_counter() - start, 1e-9)
    remaining = run.num_fields - run.num_done
    return (
        f"expected: {format_duration(remaining / speed / 3600)}, at "
        f"{_format_fields(run, int(speed))} per second, measured on "
        f"the first {_format_fields(run, fields)}"
    )


def _format_fields(run: "StatisticsRun", fields: int) -> str:
    """Return the size of this many float32 fields."""
    rows, columns = run.store.grid
    return format_bytes(4 * fields * rows * columns)


DATA_HELP = """\
credit-dp data prepares stores for training.

  credit-dp data inspect store=PATH       show what is in a store and how fast ranks can read it
  credit-dp data stats store=PATH         compute the statistics that normalise fields
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
    """Run the data command named by the first argument; return the exit code."""
    return run_subcommand(COMMANDS, arguments, program, DATA_HELP)
