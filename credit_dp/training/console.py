"""Shows the progress of a run on the terminal, and estimates how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import INFO, WARNING, LogRecord, getLogger
from typing import Protocol, final

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from credit_dp.distributed.worker import EarlyRecords
from credit_dp.plain_text import printable
from credit_dp.process import output_file

# Loggers whose messages are about the data and their dates.
DATA_LOGGERS = (
    "credit_dp.data",
    "credit_dp.training.run.dates",
    "credit_dp.training.shared_reading",
)
LINE_INTERVAL_SECONDS = 10.0  # between two lines of progress where there is no terminal


class ProgressBar(Protocol):
    """Shows the progress of one task."""

    def __call__(self, done: int, note: str = "") -> None:
        """Show that `done` of the total are done, with a note."""


@final
class Screen:
    """The output of rank 0; other ranks have one without a console, which shows nothing."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    @property
    def width(self) -> int:
        """Return the number of characters in a line."""
        return self.console.width if self.console is not None else 80

    def show(self, renderable: RenderableType) -> None:
        """Show a line, a table or anything else that rich can render."""
        if isinstance(renderable, str):
            renderable = printable(renderable)
        if self.console is not None:
            # Soft wrapping leaves long paths on one line, so that they can be copied. Without
            # markup, brackets in them are not taken for styles.
            self.console.print(renderable, soft_wrap=isinstance(renderable, str), markup=False)

    @contextmanager
    def bar(
        self, label: str, total: int, done: int = 0, work: Callable[[int], float] = float
    ) -> Iterator[ProgressBar]:
        """Show a progress bar from `done` to `total`; lines where there is no terminal.

        `work(n)` is the work of the first n of them, in any unit: the remaining time is estimated
        from it. By default all take as long.
        """
        if self.console is None:
            yield lambda done, note="": None
        elif self.console.is_terminal:
            with live_progress(self.console) as progress:
                task = progress.add_task(label, total=total, completed=done, note="", left="")
                yield LiveBar(progress, task, RemainingTime(total, done, work))
        else:
            yield ProgressLines(self.show, label, RemainingTime(total, done, work))

    @contextmanager
    def report(self) -> Iterator[Callable[[str, float], None]]:
        """Show the progress of several tasks, each by its label and the fraction done.

        Works on every rank: only the rank that does the work calls it, while the others wait.
        """
        console = self.console or Console(file=output_file())
        if not console.is_terminal:
            yield TaskLines(Screen(console).show)
            return
        progress = live_progress(console, counts=False)
        try:
            yield TaskBars(progress)
        finally:
            progress.stop()


@final
class RemainingTime:
    """Estimates the remaining time from the work done since the start; see `Screen.bar`."""

    def __init__(self, total: int, done: int, work: Callable[[int], float]) -> None:
        self.total = total
        self.first = done
        self.work = work
        self.started = time.monotonic()

    def seconds(self, done: int) -> float:
        """Return the seconds that the rest will take, 0 if nothing has been done yet."""
        work_done = self.work(done) - self.work(self.first)
        if not work_done:
            return 0.0
        elapsed = time.monotonic() - self.started
        return elapsed * (self.work(self.total) - self.work(done)) / work_done


@final
class LiveBar:
    """A progress bar on a terminal."""

    def __init__(self, progress: Progress, task: TaskID, remaining: RemainingTime) -> None:
        self.progress = progress
        self.task = task
        self.remaining = remaining

    def __call__(self, done: int, note: str = "") -> None:
        """Move the bar."""
        left = f"{format_duration(self.remaining.seconds(done))} left"
        self.progress.update(self.task, completed=done, note=note, left=left)


@final
class ProgressLines:
    """Shows progress as a line every few seconds and one at the end, for logs and pipes."""

    def __init__(self, show: Callable[[str], None], label: str, remaining: RemainingTime) -> None:
        self.show = show
        self.label = label
        self.remaining = remaining
        self.last_shown = remaining.started

    def __call__(self, done: int, note: str = "") -> None:
        """Show a line if `LINE_INTERVAL_SECONDS` have passed, or if all is done."""
        now = time.monotonic()
        remaining = self.remaining
        if done < remaining.total and now - self.last_shown < LINE_INTERVAL_SECONDS:
            return
        self.last_shown = now
        speed = (done - remaining.first) / max(now - remaining.started, 1e-9)
        left = format_duration(remaining.seconds(done))
        parts = [f"{self.label} {done}/{remaining.total}", note, f"{speed:.2f}/s", f"{left} left"]
        self.show("  ".join(part for part in parts if part))


@final
class TaskLines:
    """Shows several tasks as lines: when a task begins, every few seconds, and when it is done."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.label = ""
        self.fraction = 0.0
        self.last_shown = 0.0

    def __call__(self, label: str, fraction: float) -> None:
        """Show a line if a task begins or ends, or if `LINE_INTERVAL_SECONDS` have passed."""
        now = time.monotonic()
        changed = label != self.label or fraction >= 1 > self.fraction
        if not changed and now - self.last_shown < LINE_INTERVAL_SECONDS:
            return
        self.label = label
        self.fraction = fraction
        self.last_shown = now
        self.show(f"{label} {100 * fraction:.0f} %")


@final
class TaskBars:
    """Shows several tasks as one progress bar each."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, fraction: float) -> None:
        """Move the bar of a task, which is created at its first call."""
        if label not in self.tasks:
            self.progress.start()
            self.tasks[label] = self.progress.add_task(label, total=1.0, note="")
        self.progress.update(self.tasks[label], completed=fraction)


@final
class SpeedColumn(ProgressColumn):
    """A column with the steps per second."""

    def render(self, task: Task) -> Text:
        """Return the speed, or an empty text before the first step."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


def live_progress(console: Console, counts: bool = True) -> Progress:
    """Return a progress display with bar, counts, note, speed and remaining time."""
    columns: list[str | ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if counts:
        columns += [MofNCompleteColumn(), TextColumn("{task.fields[note]}"), SpeedColumn()]
    columns += [TextColumn("{task.fields[left]}") if counts else TimeRemainingColumn()]
    return Progress(*columns, console=console)


def screen_for(rank: int) -> Screen:
    """Return the screen of one rank: only rank 0 shows anything except `Screen.report`."""
    return Screen(Console(file=output_file()) if rank == 0 else None)


@contextmanager
def collect_data_notes() -> Iterator[list[str]]:
    """Collect notes about the data that are logged inside the context; see `notes_of`.

    The list is filled when the context ends.
    """
    notes: list[str] = []
    logger = getLogger("credit_dp")
    handler = EarlyRecords()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(INFO)
    try:
        yield notes
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        records = handler.pop_all()
        notes += notes_of(records)
        for record in records:
            # The handler above kept it from the terminal, unless there was another handler.
            if record.levelno >= WARNING and not logger.hasHandlers():
                logger.handle(record)


def notes_of(records: Iterable[LogRecord]) -> list[str]:
    """Return the messages about the data among log records, each once.

    Warnings are left out, as the terminal shows them when they are logged.
    """
    notes = (r for r in records if r.name.startswith(DATA_LOGGERS) and r.levelno < WARNING)
    return list(dict.fromkeys(record.getMessage() for record in notes))


# Steps before the time is estimated. The first is not timed, as a lot is set up in it.
ETA_STEPS = 20


@final
class EtaMessage:
    """Estimates once how long an epoch and the rest of the run will take.

    Args:
        work: the work of the first n steps, see `Screen.bar`.
    """

    def __init__(
        self, step: int, total: int, per_epoch: int, work: Callable[[int], float] = float
    ) -> None:
        self.first = step + 1
        self.total = total
        self.per_epoch = per_epoch
        self.work = work
        self._started = 0.0

    def __call__(self, step: int) -> str | None:
        """Return the message after the 20th step, and None after all other steps."""
        now = time.monotonic()
        if step == self.first:
            self._started = now
        if step + 1 != self.first + ETA_STEPS or step >= self.total:
            return None
        seconds_per_step = (now - self._started) / (ETA_STEPS - 1)
        epoch = format_duration(seconds_per_step * self.per_epoch)
        work_per_step = (self.work(step) - self.work(self.first)) / (ETA_STEPS - 1)
        work_left = self.work(self.total) - self.work(step)
        rest = format_duration(seconds_per_step * work_left / work_per_step)
        return f"about {epoch} for an epoch, done in about {rest}"


def format_duration(seconds: float) -> str:
    """Format seconds in a suitable unit: `45 s`, `12 min`, `3.5 h`, `2.1 days`."""
    if seconds < 90:
        return f"{seconds:.{0 if seconds >= 9.5 else 1}f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
