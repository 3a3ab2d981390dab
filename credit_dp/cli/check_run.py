"""`--check`: finds out whether a run would start, and what it would need, before anything starts.

The order is that of a run: the config, the data, the model and a checkpoint, which are checked here
and there by the functions of `training/start_checks.py`. Then follows what only `--check` does: it
reads some fields, and plans a step.
"""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from credit_dp.checks import expand_home
from credit_dp.cli.folders import (
    check_run_folder,
    folder_key,
    run_checkpoints,
    run_folder,
    sweep_folder,
)
from credit_dp.cli.output import format_bytes, print_lines
from credit_dp.config import Config, TrainerConfig
from credit_dp.config.data import SPLITS
from credit_dp.distributed.launcher import find_launcher
from credit_dp.distributed.placement import mesh_text, spans_nodes
from credit_dp.errors import UnreachableError, UserError, counted
from credit_dp.process import complete
from credit_dp.training.checkpoint_files import locate_checkpoint

# These functions import torch, xarray and zarr where they use them, so that --help does not.
if TYPE_CHECKING:
    from credit_dp.costs.budget import StepPlan
    from credit_dp.data.dates import HasTimes
    from credit_dp.data.store import Store
    from credit_dp.training.start_checks import SampleCounts


EXIT_UNREACHABLE = 3  # exit code if the data are remote and can't be reached
ANSWER_SECONDS = 20.0  # time for a remote store to answer
# Fields of as many dates are read as are at most this large together, locally and remotely.
READ_BYTES = 2**29
REMOTE_READ_BYTES = 2**25
# Libraries that log each of their retries.
NOISY_LOGGERS = ("gcsfs", "fsspec", "s3fs", "aiobotocore", "botocore", "google")


class OpenData(NamedTuple):
    """The data of a config: an open store, or only the times of a quickstart yet to be made."""

    times: "HasTimes"
    store: "Store | None"
    notes: Sequence[str]


def check_and_report(config: Config, overrides: Sequence[str]) -> int:
    """Check a run and print its data, memory and traffic.

    Returns:
        The exit code: 1 if the model can't be sharded on the mesh.
    """
    from credit_dp.costs.budget import plan_step
    from credit_dp.training.start_checks import start_notes

    check_without_opening(config, run_folder(config.run.name, config.run.dir))
    resumed, path = resolve_resume(config)
    try:
        resolved, data, lines = check_data(resumed, {}, path)
    except UnreachableError as error:
        print_lines(
            "The config is valid.", f"There is no plan, because the data can't be read: {error}"
        )
        return EXIT_UNREACHABLE
    launcher = find_launcher(os.environ)
    if launcher is not None and launcher.ranks.on_several_nodes:
        check_prepared(config, overrides)
    fit = fit_lines(config, overrides)
    resume = [] if path is None else [resume_line(path)]
    plan = plan_step(resolved, data.store)
    notes = [f"note    {note}" for note in start_notes(resolved)]
    lines = [*lines, *notes, *fit, *resume, *plan_lines(plan, resolved)]
    print_lines("The config is valid.", *lines)
    return 1 if plan.report.problems else 0


def check_sweep(configs: Sequence[Config]) -> int:
    """Check all runs of a sweep and return the exit code; data of several runs are read once."""
    several = len(configs) > 1
    subject = f"The configs of all {len(configs)} runs are" if several else "The config is"
    valid = f"{subject} valid."
    opened: dict[str, OpenData] = {}
    shown: list[str] = []
    for config in configs:
        check_without_opening(config, sweep_folder(config.run.name, config.run.dir))
        try:
            _, data, lines = check_data(config, opened)
        except UnreachableError as error:
            print_lines(valid, f"The data can't be read: {error}")
            return EXIT_UNREACHABLE
        shown += lines if data.store is not None else []
    print_lines(valid, *shown)
    return 0


def check_without_opening(config: Config, folder: str) -> None:
    """Make the checks of a run's start that need no data, also of the folders that it writes to."""
    from credit_dp.training.monitoring import check_validation_scores
    from credit_dp.training.start_checks import check_without_data

    check_without_data(config)
    check_validation_scores(config.trainer)
    check_writable("data.cache", expand_home("data.cache", config.data.cache))
    check_writable("run.dir", Path(folder))


def check_data(
    config: Config, opened: dict[str, OpenData], resume: Path | None = None
) -> tuple[Config, OpenData, list[str]]:
    """Open the data, make the checks of a run's start, and read some fields.

    Data of earlier runs, which are in `opened`, are neither opened nor read again.

    Returns:
        The config with the dates and the grid of the data, the data, and lines about them.
    """
    from credit_dp.data.dates import times_needed
    from credit_dp.training.start_checks import check_start

    # What automatic dates are depends on the times that the run needs.
    needed = times_needed(config)
    key = repr((config.data, needed if config.data.dates.undetermined else None))
    is_read = key in opened
    if not is_read:
        opened[key] = open_data(config)
    data = opened[key]
    resolved = data.times.config
    grid = resolved.grid if data.store is None else "x".join(map(str, data.store.grid))
    config = replace(config, data=replace(config.data.on_grid(grid), dates=resolved.dates))
    counts = check_start(config, data.times, config.parallel.data or 1, resume)
    return config, data, [] if is_read else data_lines(config, data, counts)


# Statistics and climatology of runs on several nodes


def check_prepared(config: Config, overrides: Sequence[str]) -> None:
    """Refuse a run on several nodes that would compute statistics or climatology first."""
    missing = None if config.data.fit_in_job else missing_preparation(config, overrides)
    if missing is not None:
        raise UserError(not_prepared_line(missing))


def not_prepared_line(missing: str) -> str:
    """Return the line about what is missing and the command that computes it."""
    return (
        f"data.fit_in_job: on several nodes all ranks would wait for one that computes what is "
        f"missing: {missing}. Or set data.fit_in_job=true."
    )


def missing_preparation(config: Config, overrides: Sequence[str]) -> str | None:
    """Return what the cache lacks and the command that computes it; None if nothing is missing."""
    from credit_dp.data.cache import NotComputedError
    from credit_dp.data.setup import prepare_training_data
    from credit_dp.training.console import collect_data_notes

    resolved, _ = resolve_resume(config)
    try:
        with collect_data_notes():  # the run shows them
            prepare_training_data(resolved.data, compute=False)
    except NotComputedError as error:
        return with_command(error, config, overrides)
    return None


def explain_refusal(config: Config, overrides: Sequence[str], error: UserError) -> str:
    """Return the line of a rank's error, with the command that computes what is missing."""
    from credit_dp.data.cache import NotComputedError

    if not isinstance(error, NotComputedError):
        return str(error)
    return not_prepared_line(with_command(error, config, overrides))


def with_command(error: UserError, config: Config, overrides: Sequence[str]) -> str:
    """Return what is missing, and the command that computes it."""
    return f"{error}. Run first: {preparation_command(config, overrides)}"


def fit_lines(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return a line about what is computed first, if the mesh is larger than a node."""
    if config.data.fit_in_job or not spans_nodes(config):
        return []
    missing = missing_preparation(config, overrides)
    return [] if missing is None else [f"fit     refused on several nodes: {missing}"]


def preparation_command(config: Config, overrides: Sequence[str]) -> str:
    """Return the command that computes statistics and climatology of a run with these overrides.

    It has the dates of a checkpoint that the run resumes from.
    """
    groups = ("data=", "experiment=")
    given = [text for text in overrides if text.lstrip("+").startswith(("data.", *groups))]
    if not any(text.startswith(groups) for text in given):
        given.insert(0, f"data={config.data.name}")
    dates = resolve_resume(config)[0].data.dates
    if dates != config.data.dates:
        given += [f"data.dates.{split}=[{','.join(getattr(dates, split))}]" for split in SPLITS]
    return shlex.join(["credit-dp", "data", "stats", "climatology=true", *given])


# The data


def open_data(config: Config) -> OpenData:
    """Open the data of a run; a quickstart's store is not made, only its times are worked out."""
    from credit_dp.data.dates import times_needed
    from credit_dp.data.setup import quickstart_times
    from credit_dp.data.sources.address import is_remote
    from credit_dp.training.console import collect_data_notes

    if config.data.name == "quickstart":
        return OpenData(quickstart_times(config.data, times_needed(config)), None, ())
    with collect_data_notes() as notes:
        store = open_with_timeout(config, [e for e in config.data.stores if is_remote(e)])
    return OpenData(store, store, notes)


def data_lines(config: Config, data: OpenData, counts: "SampleCounts") -> list[str]:
    """Return lines about the data and the samples, after reading the fields of some dates."""
    from credit_dp.data.setup import expected_data
    from credit_dp.data.sources.address import is_remote
    from credit_dp.data.statistics_files import check_statistics_files
    from credit_dp.training.start_checks import with_validation
    from credit_dp.training.summary import unused_line

    store = data.store
    if store is None:
        channels, grid = expected_data(config.data)
        line = data_line("quickstart", data.times, channels.num_states, grid)
        return [line, *sample_lines(config, data.times, counts)]
    lines = [data_line(store.source.where, store, store.channels.num_states, store.grid)]
    lines += [f"note    {note}" for note in data.notes]
    lines += [f"dates   {store.dates_note}"] if store.dates_note else []
    lines += sample_lines(config, store, counts)
    unused = unused_line(store)
    lines += [f"unused  {unused}"] if unused else []
    if store.num_skipped:
        lines.append(
            "sums    left out, as some hours of their sums are missing: "
            + counted(store.num_skipped, "time")
        )
    if store.config.statistics_files:
        check_statistics_files(store)
    validates = with_validation(config, store).trainer.validate_every
    splits = [split for split in SPLITS if split != "valid" or validates]
    return [*lines, *sampled_date_lines(store, splits, any(map(is_remote, config.data.stores)))]


def check_writable(key: str, folder: Path) -> None:
    """Refuse a folder that can't be created or written to, without creating it."""
    folder = folder.absolute()
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UserError(
            f"{key}: cannot read {folder} ({error.strerror}). Give another {key}."
        ) from error
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        kind = "is not writable" if existing.is_dir() else "is not a folder"
        raise UserError(f"{key}: {existing} {kind}. Set {key} to another folder.")


def open_with_timeout(config: Config, remote: Sequence[str]) -> "Store":
    """Open the store of a run; wait for remote ones at most `ANSWER_SECONDS`."""
    from credit_dp.data.dates import times_needed
    from credit_dp.data.sources.address import check_host, unreachable_error
    from credit_dp.data.store import Store

    def open_store() -> Store:
        for address in remote:
            check_host(address)
        return Store.open(config.data, times_needed(config))

    if not remote:
        return open_store()
    silence_retries()
    # The libraries retry for minutes and can't be interrupted. A daemon thread is abandoned when
    # the program ends.
    opened: Future[Store] = Future()
    Thread(target=complete, args=(opened, open_store), daemon=True).start()
    if wait([opened], ANSWER_SECONDS).not_done:
        raise unreachable_error(", ".join(remote), f"no answer within {ANSWER_SECONDS:g} seconds")
    return opened.result()


def silence_retries() -> None:
    """Hide what libraries log of each try to reach a store: the error at the end says why."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def data_line(where: str, times: "HasTimes", fields: int, grid: tuple[int, int]) -> str:
    """Return a line with the times, fields and grid of the data."""
    first, last = (times.calendar.text(time) for time in times.times[[0, -1]])
    return (
        f"data    {where}: {counted(len(times.times), 'time')}, {first} to {last}, "
        f"{counted(fields, 'field')} on {grid[0]} x {grid[1]} points"
    )


def sample_lines(config: Config, times: "HasTimes", counts: "SampleCounts") -> list[str]:
    """Return lines with the numbers of samples to train and to test, and of those lost to gaps."""
    from credit_dp.data.inspection import report_time_axis
    from credit_dp.data.loader import count_samples_across_gaps

    lines = [
        f"samples {counts.samples:,} for training, {counted(counts.steps, 'step')} of "
        f"{config.data.batch_size} in an epoch; {counted(counts.forecasts, 'forecast')} to "
        f"{max(config.trainer.evaluate_hours)} h for testing"
    ]
    gaps = report_time_axis(times.times, times.calendar)
    if gaps.missing:
        lengths = config.model.frames, counts.samples, config.trainer.longest_rollout
        skipped = count_samples_across_gaps(times, "train", *lengths)
        lines.append(
            f"gaps    {len(gaps.gaps):,} in the times, missing: {counted(gaps.missing, 'time')}; "
            f"skipped across them: {counted(skipped, 'training sample')}"
        )
    return lines


def sampled_date_lines(store: "Store", splits: Sequence[str], remote: bool) -> list[str]:
    """Read the first, last and middle dates of splits that are cheap to read; return a line."""
    from credit_dp.data.dates import split_slice

    times_per_chunk = max(
        store.source.times_per_file(channel) for channel in store.channels.output_channels
    )
    fields = store.channels.num_outputs + len(store.channels.forcing)
    # A chunk is decoded as a unit, with all times that it holds, in float32.
    size = 4 * times_per_chunk * fields * store.grid[0] * store.grid[1]
    calendar = store.calendar
    spans = [split_slice(store.config, split, store.times, calendar) for split in splits]
    firsts, lasts = [span.start for span in spans], [span.stop - 1 for span in spans]
    middles = [(first + last) // 2 for first, last in zip(firsts, lasts, strict=True)]
    affordable = (REMOTE_READ_BYTES if remote else READ_BYTES) // size
    indices = list(dict.fromkeys([*firsts, *lasts, *middles]))[:affordable]
    if not indices:
        date = calendar.text(store.times[firsts[0]])
        return [f"values  not read: the fields of {date} take {format_bytes(size)}"]
    all_rows = slice(None)
    store.read_static(all_rows)
    store.check_static()
    for index in indices:
        times = store.times[index : index + 1]
        # Of the last time only a target is needed.
        forcing = [] if index in lasts else store.stored_forcing
        store.read_channels([*store.channels.output_channels, *forcing], times, all_rows)
    dates = ", ".join(calendar.text(store.times[index]) for index in sorted(indices))
    in_splits = {index for span in spans for index in range(span.start, span.stop)}
    others = counted(len(in_splits) - len(indices), "other date")
    return [f"values  read at {dates}; not read at {others}"]


def resolve_resume(config: Config) -> tuple[Config, Path | None]:
    """Return the checkpoint that the run would resume from, and the config with its dates."""
    folder = Path(run_folder(config.run.name, config.run.dir))
    if config.run.name or config.run.dir:
        check_run_folder(folder, config, folder_key(config.run))
    if config.resume is None:
        if config.init_from is not None:
            locate_checkpoint("init_from", config.init_from)
        return config, None
    if config.resume == "auto":
        steps = run_checkpoints(folder, folder_key(config.run))
        path = steps[-1] if steps else None
    else:
        path = locate_checkpoint("resume", config.resume)
    if path is not None and config.data.dates.undetermined:
        from credit_dp.training.run import dates_of_checkpoint

        dates = dates_of_checkpoint(path, config.data.dates)
        config = replace(config, data=replace(config.data, dates=dates))
    return config, path


def resume_line(path: Path) -> str:
    """Return a line about the checkpoint that the run resumes from."""
    from credit_dp.training.checkpoint_files import read_metadata

    return f"resume  after step {read_metadata('resume', path)['step']} from {path}"


def plan_lines(plan: "StepPlan", config: Config) -> list[str]:
    """Return lines about the model, its mesh, and memory and traffic of each pipeline rank."""
    from credit_dp.costs.budget import training_memory
    from credit_dp.domain_parallel.decide import assumption_line, whole_call_lines

    report = plan.report
    parallel = config.parallel
    if report.problems:
        return [
            "The model can't be sharded on this mesh:",
            *(f"  {problem}" for problem in report.problems),
        ]
    given = "" if parallel.data else " (parallel.data is not given)"
    lines = [
        f"model   {config.model.name}, {report.parameters:,} parameters",
        f"mesh    {mesh_text(parallel)}{given}",
    ]
    if report.unplanned:
        return [*lines, f"costs   are not known before training: {report.unplanned}"]
    # There is no budget for fsdp2 with one rank, nor if parameters have rows of the grid.
    modes = {budget.mode for budget in plan.budgets}
    mode = parallel.data_mode if parallel.data_mode in modes else "ddp"
    for budget in plan.budgets:
        if budget.mode == mode:
            label = f"pipeline {budget.pipeline_rank}" if parallel.pipeline > 1 else "each rank"
            held = training_memory(budget.held, config)
            sent = sent_bytes_by_item(config.trainer, budget.sent)
            items = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
            lines.append(f"memory  {label}: about {format_bytes(sum(held.values()))} ({items})")
            lines.append(f"sent    {label}: {format_bytes(sum(sent.values()))} in a step")
    lines += [f"whole   {line}" for line in whole_call_lines(report.whole_calls)]
    return [*lines, *(f"branch  {line}" for line in map(assumption_line, report.decisions))]


def sent_bytes_by_item(trainer: TrainerConfig, sent: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes sent by item; some are exchanged in each step of the longest rollout."""
    steps = trainer.longest_rollout
    return {
        item: steps * size if item in ("rows", "members") else size for item, size in sent.items()
    }
