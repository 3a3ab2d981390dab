"""`--check`: what a run would find and take, before anything starts.

In the order in which a run meets it: the data, and the samples that they make; the statistics and
the checkpoint that are given; then the model on its mesh. What a run would refuse is refused in its
words.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from credit_dp.cli.compose import check_rows, check_run_folder, folder_key, run_folder
from credit_dp.cli.output import format_bytes
from credit_dp.config import Config, DataConfig
from credit_dp.errors import UnreachableError

if TYPE_CHECKING:
    from credit_dp.costs.budget import StepPlan
    from credit_dp.data.dates import HasTimes
    from credit_dp.data.store import Store
    from credit_dp.training.checkpoint_files import Metadata


EXIT_UNREACHABLE = 3  # the exit code where the data can't be reached
ANSWER_SECONDS = 20.0  # in which a store elsewhere has to answer
READ_BYTES, REMOTE_READ_BYTES = 2**29, 2**25  # of fields that are read for a look
NOISY_LOGGERS = (
    "gcsfs",
    "fsspec",
    "s3fs",
    "aiobotocore",
    "botocore",
    "google",
)  # about their tries


class DataSummary(NamedTuple):
    """What the data of a config are: an open store, or the quickstart's times before it is made."""

    times: "HasTimes"
    store: "Store | None"
    lines: Sequence[str]


def check_and_report(config: Config) -> int:
    """Check a run, say what it would find, hold and send; the exit code.

    Returns:
        0; 1 if the model can't be sharded so; `EXIT_UNREACHABLE` if nothing is known of the data.

    Raises:
        UserError: the run would be refused.
    """
    from credit_dp.training.build import check_plugins  # torch: takes seconds

    check_plugins(config)
    config, path = resolve_resume(config)
    try:
        found = inspect_data(config)
    except UnreachableError as error:
        print_lines(
            "The config is valid.", f"There is no plan, for the data are not known: {error}"
        )
        return EXIT_UNREACHABLE
    config = with_resolved_data(config, found)
    check_rows(config)
    resume = [] if path is None else [check_checkpoint(path, config, found)]
    from credit_dp.costs.budget import plan_step  # torch, which takes seconds

    plan = plan_step(config)
    print_lines("The config is valid.", *found.lines, *resume, *plan_lines(plan, config))
    return 1 if plan.report.problems else 0


def check_sweep(configs: Sequence[Config]) -> int:
    """Check all runs of a sweep, a store that several of them read once; the exit code.

    Raises:
        UserError: a run would be refused.
    """
    valid = f"The configs of all {len(configs)} runs are valid."
    known: dict[str, DataSummary] = {}
    for config in configs:
        data = repr(config.data)
        try:
            found = known[data] if data in known else inspect_data(config)
        except UnreachableError as error:
            print_lines(valid, f"The data are not known: {error}")
            return EXIT_UNREACHABLE
        known[data] = found
        sample_lines(config, found.times)
        check_rows(with_resolved_data(config, found))
    print_lines(valid, *(line for found in known.values() if found.store for line in found.lines))
    return 0


def print_lines(*shown: str) -> None:
    """Write lines."""
    sys.stdout.write("".join(f"{line}\n" for line in shown))


def with_resolved_data(config: Config, found: DataSummary) -> Config:
    """The config with the dates and the grid that are known when the data are."""
    data = found.times.config
    grid = data.grid if found.store is None else "x".join(map(str, found.store.grid))
    return replace(config, data=replace(config.data, dates=data.dates, grid=grid))


def inspect_data(config: Config) -> DataSummary:
    """Open the data, and check all that a run would before its first step, if that is cheap.

    Raises:
        UserError: a run would be refused.
        UnreachableError: the store is elsewhere and does not answer.
    """
    from credit_dp.data.sources.address import is_remote
    from credit_dp.training.console import collect_data_notes

    if config.data.name == "quickstart":
        return quickstart_summary(config)
    elsewhere = [entry for entry in config.data.stores if is_remote(entry)]
    with collect_data_notes() as notes:
        store = open_with_timeout(config.data, elsewhere)
    found = [data_line(store.source.where, store, store.channels.states, store.grid)]
    found += [f"note    {note}" for note in notes]
    found += [f"dates   {store.dates_note}"] if store.dates_note else []
    found += sample_lines(config, store)
    if store.num_skipped:
        lacking = "lack some of the hours that are added up, and are left out"
        found.append(f"sums    {store.num_skipped} times {lacking}")
    if store.config.statistics_files:
        from credit_dp.data.statistics_given import check_given_statistics

        check_given_statistics(store)
    return DataSummary(store, store, [*found, *first_date_lines(store, bool(elsewhere))])


def open_with_timeout(data: DataConfig, elsewhere: Sequence[str]) -> "Store":
    """Open a store; those of its addresses that are `elsewhere` may be out of reach.

    Raises:
        UserError: it is not as needed.
        UnreachableError: it does not answer in `ANSWER_SECONDS`; libraries try again for minutes.
    """
    from credit_dp.data.sources.address import check_host, unreachable_error

    def opened() -> "Store":
        for address in elsewhere:
            check_host(address)
        from credit_dp.data.store import Store  # numpy, xarray, zarr: takes a second

        return Store.open(data)

    if not elsewhere:
        return opened()
    stores: list[Store] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            stores.append(opened())
        except Exception as error:  # noqa: BLE001 - raised below, where somebody hears it
            errors.append(error)

    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if errors:
        raise errors[0]
    if not stores:
        where, seconds = ", ".join(elsewhere), f"{ANSWER_SECONDS:g}"
        raise unreachable_error(where, f"no answer within {seconds} seconds")
    return stores[0]


def quickstart_summary(config: Config) -> DataSummary:
    """The times of the quickstart, which is not made for it; its variables are checked by name."""
    from credit_dp.data.channel_preview import expected_channels, expected_grid, quickstart_times

    times, grid = quickstart_times(config.data), expected_grid(config.data)
    line = data_line("quickstart", times, expected_channels(config.data).states, grid)
    return DataSummary(times, None, [line, *sample_lines(config, times)])


def data_line(where: str, times: "HasTimes", fields: int, grid: tuple[int, int]) -> str:
    """What is there."""
    first, last = times.times[[0, -1]].astype("M8[m]")
    return (
        f"data    {where}: {len(times.times):,} times, {first} to {last}, "
        f"{fields} fields on {grid[0]} x {grid[1]} points"
    )


def sample_lines(config: Config, times: "HasTimes") -> list[str]:
    """How many samples there are to train on and to test with, and what gaps cost.

    Raises:
        UserError: there are too few, or lead times don't fit.
    """
    from credit_dp.data.inspection import report_time_axis
    from credit_dp.data.loader import count_samples_across_gaps  # torch: takes seconds
    from credit_dp.data.sampling import SampleSequence, initial_times, sample_times

    trainer, frames = config.trainer, config.model.frames
    ahead, batch = trainer.longest_rollout, config.data.batch_size
    count = len(sample_times(times, "train", frames, ahead))
    sequence = SampleSequence(count, batch, data_size=config.parallel.data or 1)
    if trainer.validate_every:
        initial_times(times, "valid", [min(trainer.evaluate_hours)], config.data.step_hours, frames)
    hours, stride = trainer.evaluate_hours, trainer.evaluate_stride_hours
    tests = len(initial_times(times, "test", hours, stride, frames))
    found = [
        f"samples {count:,} to train on, {sequence.batches_per_epoch:,} steps of {batch} in an "
        f"epoch; {tests:,} forecasts to {max(hours)} h to test with"
    ]
    gaps = report_time_axis(times.times)
    if gaps.missing:
        skipped = count_samples_across_gaps(times, "train", frames, count, ahead)
        found.append(
            f"gaps    {len(gaps.gaps):,} in the times, {gaps.missing:,} are missing; {skipped:,} "
            "samples to train on span one and are skipped"
        )
    return found


def first_date_lines(store: "Store", elsewhere: bool) -> list[str]:
    """Read the first date to train on, if that is cheap; else a line that says so.

    Raises:
        UserError: a value is missing or can't be.
    """
    from credit_dp.data.dates import split_slice

    first = store.times[split_slice(store.config, "train", store.times).start]
    together = max(
        store.source.times_together(channel) for channel in store.channels.output_channels
    )
    fields = store.channels.outputs + len(store.channels.forcing)
    size = 4 * together * fields * store.grid[0] * store.grid[1]
    if size > (REMOTE_READ_BYTES if elsewhere else READ_BYTES):
        return [
            f"values  not looked at: those of {first.astype('M8[m]')} take {format_bytes(size)}"
        ]
    everywhere = slice(None)
    store.valid_mask(everywhere)
    store.static(everywhere)
    store.read_outputs_and_forcing(first[None], everywhere)
    return []


def resolve_resume(config: Config) -> tuple[Config, Path | None]:
    """The config with the dates of the checkpoint that the run would start from, and where that is.

    Raises:
        UserError: the folder is that of another run, or there is no checkpoint that can be read.
    """
    folder = Path(run_folder(config.run.name, config.run.dir))
    if config.run.name or config.run.dir:
        check_run_folder(folder, config, folder_key(config.run))
    if config.resume is None:
        if config.init_from is not None:
            from credit_dp.training.transfer import resolve_checkpoint

            resolve_checkpoint(config.init_from)
        return config, None
    from credit_dp.training.checkpoint import find_checkpoint
    from credit_dp.training.run import dates_of_checkpoint
    from credit_dp.training.run_folder import RunFolder

    path = find_checkpoint(config.resume, RunFolder(folder).checkpoint)
    if path is not None and config.data.dates.open:
        dates = dates_of_checkpoint(path, config.data.dates)
        config = replace(config, data=replace(config.data, dates=dates))
    return config, path


def check_checkpoint(path: Path, config: Config, found: DataSummary) -> str:
    """Refuse to go on from a checkpoint of other data, another model or other samples; else a line.

    Raises:
        UserError: naming the first key that differs.
    """
    from credit_dp.data.sampling import SampleSequence, sample_times
    from credit_dp.training.checkpoint import check_model_shapes, model_shapes
    from credit_dp.training.checkpoint_files import read_metadata
    from credit_dp.training.shards import translate_read_errors
    from credit_dp.training.state import model_tensors

    numbers = read_metadata("resume", path)
    with translate_read_errors("resume", path):
        if found.store is not None:
            check_description(numbers, config, found.store)
        saved = model_shapes({name: tuple(shape) for name, shape in numbers["tensors"].items()})
        from credit_dp.costs.budget import model_and_shape

        model, _ = model_and_shape(config, 1)
        own = {name: tuple(tensor.shape) for name, tensor in model_tensors((model,)).items()}
        check_model_shapes(f"resume: {path}", saved, model_shapes(own))
        lengths = (config.model.frames, config.trainer.longest_rollout)
        count = len(sample_times(found.times, "train", *lengths))
        sequence = SampleSequence(count, config.data.batch_size, seed=config.seed)
        sequence.load_state_dict(numbers["sampler"])
    return f"resume  after step {numbers['step']} from {path}"


def check_description(numbers: "Metadata", config: Config, store: "Store") -> None:
    """Refuse a checkpoint of other data, as far as that is known without computing statistics.

    Raises:
        UserError: naming the first key that differs.
    """
    from credit_dp.data.climatology import Climatology
    from credit_dp.data.setup import TrainingData
    from credit_dp.forecast.run import statistics_of
    from credit_dp.training.data_description import check_data, describe_data

    prepared = TrainingData(store, statistics_of(numbers), Climatology([], []))
    check_data(numbers["data"], describe_data(prepared, config.model))


def plan_lines(plan: "StepPlan", config: Config) -> list[str]:
    """The model, and a line for each rank of a pipeline, or one for all ranks."""
    from credit_dp.training.out_of_memory import training_memory  # takes seconds

    report, parallel = plan.report, config.parallel
    if report.problems:
        return ["It can't be sharded so:", *(f"  {problem}" for problem in report.problems)]
    axes = {"pipeline": parallel.pipeline, "data": parallel.data or 1, "domain": parallel.domain}
    mesh = " x ".join(f"{name} {ranks}" for name, ranks in axes.items())
    found = [
        f"model   {config.model.name}, {report.parameters:,} parameters",
        f"mesh    {mesh}{'' if parallel.data else ', for parallel.data is not given'}",
    ]
    modes = {budget.mode for budget in plan.budgets}
    mode = parallel.data_mode if parallel.data_mode in modes else "ddp"
    for budget in plan.budgets:
        if budget.mode == mode:
            whose = f"pipeline {budget.pipeline_rank}" if parallel.pipeline > 1 else "each rank"
            held, sent = (
                training_memory(budget.held, config),
                sent_bytes_by_item(config, budget.sent),
            )
            items = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
            found.append(f"memory  {whose}: about {format_bytes(sum(held.values()))} ({items})")
            found.append(f"sent    {whose}: {format_bytes(sum(sent.values()))} in a step")
    return found


def sent_bytes_by_item(config: Config, sent: Mapping[str, int]) -> dict[str, int]:
    """What is sent by item, for the longest rollout."""
    return {**sent, "rows": config.trainer.longest_rollout * sent["rows"]}
