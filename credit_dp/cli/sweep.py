"""`--multirun` and the sweep commands: run the jobs of a sweep, show them and their scaling."""

import contextlib
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from credit_dp.cli.arguments import Command, read_keys, run_subcommand
from credit_dp.cli.compose import Composer, check_run_config, explain_folder_errors
from credit_dp.cli.output import format_bytes, format_table
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.run import run_in_folder
from credit_dp.cli.sweep_launchers import chosen_launcher, sweep_as_jobs
from credit_dp.config import Config
from credit_dp.distributed.launcher import find_launcher
from credit_dp.distributed.report import report_error
from credit_dp.distributed.signals import EXIT_PREEMPTED, Terminated
from credit_dp.errors import UserError
from credit_dp.sweeps import read_sweep
from credit_dp.sweeps.read import choose_metric
from credit_dp.sweeps.scaling import (
    ScalingSeries,
    find_series,
    series_to_csv,
    series_to_json,
    table_rows,
)
from credit_dp.sweeps.tables import SweepTable, sorted_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_folder_and_keys(
    arguments: Sequence[str], program: str, help_text: str, defaults: Mapping[str, Any]
) -> tuple[Path, Mapping[str, Any]] | None:
    """The folder and the keys; None if help was asked for, which has been shown.

    Raises:
        UserError: there is not one folder, or a key does not exist.
    """
    words = [text for text in arguments if not text.startswith("-") and not is_key(text, defaults)]
    keys = read_keys(
        [text for text in arguments if text not in words], program, help_text, defaults
    )
    if keys is None:
        return None
    if len(words) != 1:
        raise UserError(
            f"{program}: needs the folder of one sweep, like multirun/NAME, got "
            f"{' '.join(words) or 'none'}."
        )
    return Path(words[0]), keys


def is_key(text: str, defaults: Mapping[str, Any]) -> bool:
    """Whether this is `KEY=VALUE`, be it a wrong key, and not the path of a folder."""
    key, equals, _ = text.partition("=")
    return bool(equals) and (key in defaults or not Path(text).exists())


def png_bytes(figure: "Figure") -> bytes:
    """The figure as a PNG file's content."""
    from credit_dp.evaluation.figure_style import figure_style  # matplotlib: not for --help

    held = io.BytesIO()
    with figure_style():
        figure.savefig(held, format="png")
    return held.getvalue()


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files into a folder, over earlier ones of these names; where they are.

    Raises:
        UserError: the folder can't be made or written to.
    """
    written = []
    for name, content in files.items():
        path = folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise UserError(
                f"out: cannot write {path} ({error.strerror}). Give another folder, or free some "
                "space."
            ) from error
        written.append(path)
    return written


SHOW_HELP = """\
{program} DIR [KEY=VALUE ...]: the runs of a sweep, the best first.

DIR is the folder that --multirun made, or any folder of runs; they may be under way, or have
failed. For each run: what was swept, how it stands, its mesh as pipeline x data x domain, the
metric, steps, and the medians of seconds per step and samples per second. Then why runs failed.

  metric=NAME   what runs are compared by: relative_rmse (final RMSE over that of persistence at
                the longest lead time, mean over all fields), rmse/geopotential_500/24h and the
                like, or a column of metrics.csv, as validation_rmse (its lowest) or loss (its
                last). Without it: relative_rmse, else validation_rmse, else loss
  sort=NAME     metric (the default), job, state, steps, seconds, samples_per_second, or a swept
                key; -NAME for the largest first
  out=FOLDER    write sweep.csv, sweep.json, and metric.png: the metric against what was swept

  --help, -h    this text

Exit code: 0 if it is shown, 2 if there is no sweep or no such column.
"""

ABSENT = "-"
MAX_CAUSE_LENGTH = 160  # characters
SHOW_HEADINGS = {"seconds": "s/step", "samples_per_second": "samples/s"}
SHOW_KEYS: Mapping[str, str] = {"metric": "", "sort": "metric", "out": ""}


def show_sweep(arguments: Sequence[str], program: str) -> int:
    """Show a sweep's runs; the exit code.

    Raises:
        UserError: there is no sweep, no such metric or column, or nothing can be written.
    """
    words = read_folder_and_keys(arguments, program, SHOW_HELP, SHOW_KEYS)
    if words is None:
        return 0
    folder, keys = words
    sweep = read_sweep(folder)
    metric = choose_metric(sweep.jobs, keys["metric"])
    shown = SweepTable(sweep, metric, sorted_jobs(sweep, metric, keys["sort"]))
    sys.stdout.write("\n".join([*table_lines(shown), ""]))
    if keys["out"]:
        from credit_dp.sweeps.plots import draw_metric  # matplotlib: not for --help

        files = {"sweep.csv": shown.to_csv().encode(), "sweep.json": shown.to_json().encode()}
        figure = draw_metric(shown)
        if figure is not None:
            files["metric.png"] = png_bytes(figure)
        written = write_files(Path(os.path.expanduser(keys["out"])), files)
        sys.stdout.write("\n".join(["", *map(str, written), ""]))
    return 0


def table_lines(shown: SweepTable) -> list[str]:
    """The table, how many runs are in which state, and why runs failed."""
    keys = shown.sweep.keys
    numbers = [name for name in SHOW_HEADINGS if name != shown.metric]
    headings = ("job", *keys, "state", "mesh", shown.metric, "steps")
    rows = []
    for row in map(shown.row, shown.jobs):
        steps = f"{row['steps']}/{row['all_steps'] or '?'}" if row["mesh"] else ABSENT
        texts = [str(row[name] or ABSENT) for name in ("job", *keys, "state", "mesh")]
        rows.append(
            (
                *texts,
                format_number(row[shown.metric]),
                steps,
                *(format_number(row[name]) for name in numbers),
            )
        )
    states = Counter(job.status.state for job in shown.jobs)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    causes = [f"{job.name}: {shorten(job.status.cause)}" for job in shown.jobs if job.status.cause]
    names = (*headings, *(SHOW_HEADINGS[name] for name in numbers))
    return [
        *format_table(names, rows, left=len(keys) + 3),
        "",
        f"{len(rows)} runs: {counts}",
        *causes,
    ]


def shorten(cause: str) -> str:
    """As much of a cause as two lines of a screen hold; the files have all of it."""
    return cause if len(cause) <= MAX_CAUSE_LENGTH else f"{cause[: MAX_CAUSE_LENGTH - 4]} ..."


def format_number(value: float | None) -> str:
    """A number to four significant digits."""
    return ABSENT if value is None else f"{value:.4g}"


SCALING_HELP = """\
{program} DIR [KEY=VALUE]: what more ranks bring, from the runs of a sweep.

DIR is the folder of a sweep over parallel.domain or another axis of the mesh, as --multirun
experiment=scaling makes one. Runs that differ in the ranks of one axis alone make a series: strong
if grid and batch stay the same, weak if each rank's rows (or its samples) do. Times are medians of
steps after a warm-up: ten steps, or a third of all if that is less; starting, validation and
checkpoints are not in them.

  out=FOLDER    write scaling.csv, scaling.json and scaling.png, with ideal lines

  --help, -h    this text

Exit code: 0 if there is a series, 2 if not.
"""

SCALING_KEYS: Mapping[str, str] = {"out": ""}
SCALING_HEADINGS = (
    *("job", "mesh", "grid", "batch", "s/step", "waiting", "samples/s", "speed-up", "efficiency"),
    *("memory", "sent/step"),
)
LEGEND = (
    "mesh: pipeline x data x domain; s/step: median after the warm-up; waiting: for data",
    "memory: peak of the rank with the most; sent/step: rows between bands, by all ranks together",
)
CROWDED_NOTE = "*: more ranks than cores, so that ranks waited for each other's computing"
UNKNOWN_CORES_NOTE = (
    "?: ran on another machine; whether each rank had a core of its own is not known"
)


def scaling(arguments: Sequence[str], program: str) -> int:
    """Show the scaling of a sweep's runs; the exit code.

    Raises:
        UserError: there is no sweep or no series in it, or nothing can be written.
    """
    words = read_folder_and_keys(arguments, program, SCALING_HELP, SCALING_KEYS)
    if words is None:
        return 0
    folder, keys = words
    found = find_series(read_sweep(folder))
    sys.stdout.write("\n".join([*scaling_lines(found), ""]))
    if keys["out"]:
        write_scaling(Path(os.path.expanduser(keys["out"])), found)
    return 0


def report_scaling(folder: Path) -> None:
    """Show the scaling of a sweep that has ended, and write it into the sweep's folder."""
    try:
        found = find_series(read_sweep(folder))
        sys.stdout.write("\n".join(["", *scaling_lines(found), ""]))
        write_scaling(folder, found)
    except UserError as error:
        report_error(str(error))


def write_scaling(folder: Path, found: Sequence[ScalingSeries]) -> None:
    """Write the numbers and the picture, and say where.

    Raises:
        UserError: nothing can be written there.
    """
    from credit_dp.sweeps.plots import draw_scaling  # matplotlib: not for --help

    files = {
        "scaling.csv": series_to_csv(found).encode(),
        "scaling.json": series_to_json(found).encode(),
        "scaling.png": png_bytes(draw_scaling(found)),
    }
    sys.stdout.write("\n".join(["", *map(str, write_files(folder, files)), ""]))


def scaling_lines(found: Sequence[ScalingSeries]) -> list[str]:
    """A table for each series, and what its columns are."""
    told: list[str] = []
    rows = table_rows(found)
    for (kind, axis, title), members in groupby(
        rows, lambda row: (row["kind"], row["axis"], row["series"])
    ):
        told += [f"{kind} scaling over {axis} ranks: {title}"]
        told += [*format_table(SCALING_HEADINGS, [scaling_cells(row) for row in members]), ""]
    marks = {row["more_ranks_than_cores"] for row in rows}
    notes = [
        *([CROWDED_NOTE] if True in marks else []),
        *([UNKNOWN_CORES_NOTE] if None in marks else []),
    ]
    return [*told, *LEGEND, *notes]


def scaling_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as texts, its mesh marked where ranks may have shared cores."""
    mark = {True: " *", None: " ?", False: ""}[row["more_ranks_than_cores"]]
    memory, sent = row["peak_memory_bytes"], row["sent_bytes"]
    return (
        *(row["job"], row["mesh"] + mark, row["grid"] or "-", str(row["batch"])),
        *(f"{row['seconds']:.4g}", f"{row['waited'] / row['seconds']:.0%}"),
        *(f"{row['samples_per_second']:.4g}", f"{row['speed_up']:.2f}", f"{row['efficiency']:.0%}"),
        *("-" if value is None else format_bytes(value) for value in (memory, sent)),
    )


class RunError(Exception):
    """One run of a sweep ended with this exit code; what there was to say has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def sweep(composer: Composer, overrides: Sequence[Override], dashes: Sequence[str]) -> int:
    """Check every value of every key, then hand over to Hydra's sweeper and launcher, or ours.

    `dashes` are those that each run has to be given, too.

    Raises:
        UserError: a value is not allowed, or this is one of several ranks already.
    """
    check_may_sweep(overrides)
    overrides = with_experiment_params(composer, overrides)
    launcher = chosen_launcher(overrides)
    if launcher is not None:
        return sweep_as_jobs(composer, overrides, dashes, launcher)
    for texts in covering_combinations(composer, overrides):
        config = composer.config(texts)
        check_run_config(config)
    texts = [str(override.input_line) for override in overrides]
    try:
        with explain_folder_errors(config.run, "multirun"):
            batches = composer.hydra.multirun(composer.config_name, run_sweep_job, texts)
    except RunError as failure:
        return failure.code
    jobs = [job for batch in batches or () for job in batch]
    if config.run.scaling and jobs:
        report_scaling(job_folder(jobs[0]).parent)
    return report_failed_runs(jobs)


def report_failed_runs(jobs: Sequence[JobReturn]) -> int:
    """Name the runs that failed, in one line; the exit code of the first of them, or 0."""
    failed = [job for job in jobs if job.return_value]
    if failed:
        folders = [job_folder(job) for job in failed]
        names = ", ".join(folder.name for folder in folders)
        report_error(
            f"--multirun: {len(failed)} of {len(jobs)} runs failed: {names}. "
            f"See `credit-dp sweep show {folders[0].parent}`."
        )
    return int(failed[0].return_value) if failed else 0


def job_folder(job: JobReturn) -> Path:
    """Where a run that Hydra started has written."""
    found = job.hydra_cfg or OmegaConf.create()
    return Path(str(OmegaConf.select(found, "hydra.runtime.output_dir")))


def check_combinations(composer: Composer, overrides: Sequence[Override]) -> list[Config]:
    """Check every combination and start none; their configs.

    Raises:
        UserError: a value is not allowed, or this is one of several ranks already.
    """
    check_may_sweep(overrides)
    overrides = with_experiment_params(composer, overrides)
    choices = [choice for override in overrides if (choice := override_values(composer, override))]
    configs = [composer.config(texts) for texts in product(*choices)]
    for config in configs:
        check_run_config(config)
    return configs


def check_may_sweep(overrides: Sequence[Override]) -> None:
    """Refuse a sweep inside a rank, and runs that would each want to name the sweep's folder."""
    launcher = find_launcher(os.environ)
    if launcher is not None:
        raise UserError(f"--multirun: sweep from outside {launcher.name}, which started ranks here")
    for override in overrides:
        if override.is_sweep_override() and override.key_or_group in ("run.name", "run.dir"):
            raise UserError(
                f"{override.key_or_group}: names the whole sweep, whose runs are numbered in it; "
                "give one value"
            )


def with_experiment_params(composer: Composer, overrides: Sequence[Override]) -> list[Override]:
    """With what an experiment has the sweeper vary, where no value of it is given.

    Given like this, interpolations in them are resolved in each run, and not by the sweeper.
    """
    given = {override.key_or_group for override in overrides}
    composed = composer.compose(covering_combinations(composer, overrides)[0])
    params = composed.hydra.sweeper.get("params") or {}
    texts = [f"{key}={value}" for key, value in params.items() if key not in given]
    return [*parse_overrides(texts), *overrides]


def covering_combinations(composer: Composer, overrides: Sequence[Override]) -> list[list[str]]:
    """Enough combinations to see each value once: their number is a sum and not a product."""
    choices = [override_values(composer, override) for override in overrides]
    first = [choice[0] for choice in choices if choice]
    result = [first]
    for position, choice in enumerate(choices):
        for text in choice[1:]:
            result.append([*first[:position], text, *first[position + 1 :]])
    return result


def override_values(composer: Composer, override: Override) -> list[str]:
    """The override, or one for each value of its sweep; none if they cannot be counted."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        return []
    override.config_loader = composer.hydra.config_loader
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


def run_sweep_job(composed: DictConfig) -> int:
    """What Hydra calls for each run of a sweep, here or inside a job.

    Here, the runs after one that failed are still to be made. One that was told to stop ends the
    sweep, for so was this program.

    Raises:
        RunError: inside a job, so that a job queue sees that the run did not succeed.
        Terminated: here, the run was told to stop.
    """
    code = run_in_folder(composed, of_sweep=True)
    choices = HydraConfig.get().runtime.choices
    here = all(choices[f"hydra/{name}"] == "basic" for name in ("launcher", "sweeper"))
    if here and code == EXIT_PREEMPTED:
        raise Terminated(signal.SIGUSR1)
    if code and not here:
        raise RunError(code)
    return code


SWEEP_HELP = """\
credit-dp sweep reads the folder of a sweep (`python train.py --multirun ...`), also while it runs.

  credit-dp sweep show DIR       the runs with what was swept, how they stand, and which does best
  credit-dp sweep scaling DIR    speed-up and efficiency over numbers of ranks

`credit-dp sweep COMMAND --help` says more.
"""

COMMANDS: Mapping[str, Command] = MappingProxyType({"show": show_sweep, "scaling": scaling})


def sweeps(arguments: Sequence[str], program: str) -> int:
    """Run the sweep command that the first argument names; the exit code.

    Raises:
        UserError: there is none of this name, or what it raises.
    """
    return run_subcommand(COMMANDS, arguments, program, SWEEP_HELP)
