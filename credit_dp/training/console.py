"""What a run shows while it works, and how long it is going to take."""

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

DATA_LOGGERS = (
    "credit_dp.data",
    "credit_dp.training.run.dates",
)  # the loggers of the data and their dates
LINE_INTERVAL_SECONDS = 10.0  # between two lines where there is no terminal


class ProgressBar(Protocol):
    """Shows how much of something is done."""

    def __call__(self, done: int, note: str = "") -> None:
        """Show that `done` of the total are done, with a remark."""


@final
class Screen:
    """Where rank 0 tells what happens; the other ranks hold one without a console."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    @property
    def width(self) -> int:
        """Columns that fit on a line."""
        return self.console.width if self.console is not None else 80

    def show(self, what: RenderableType) -> None:
        """Show a line, a table or anything else that rich can render."""
        if self.console is not None:
            # Paths stay on one line, so that they can be copied, and are not taken for markup.
            self.console.print(what, soft_wrap=isinstance(what, str), markup=False)

    @contextmanager
    def bar(self, label: str, total: int, done: int = 0) -> Iterator[ProgressBar]:
        """A bar from `done` to `total`, to be called with how much is done and a note."""
        if self.console is None:
            yield lambda done, note="": None
        elif self.console.is_terminal:
            with live_progress(self.console) as progress:
                task = progress.add_task(label, total=total, completed=done, note="")
                yield LiveBar(progress, task)
        else:
            yield ProgressLines(self.show, label, total, done)

    @contextmanager
    def report(self) -> Iterator[Callable[[str, float], None]]:
        """Show work in several named parts, each told as a fraction done.

        On every rank: the one that does the work, while the others wait for it, tells of it.
        """
        console = self.console or Console()
        if not console.is_terminal:
            yield TaskLines(Screen(console).show)
            return
        progress = live_progress(console, counts=False)
        try:
            yield TaskBars(progress)
        finally:
            progress.stop()


@final
class LiveBar:
    """A bar that is redrawn in place."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress = progress
        self.task = task

    def __call__(self, done: int, note: str = "") -> None:
        """Move the bar."""
        self.progress.update(self.task, completed=done, note=note)


@final
class ProgressLines:
    """A line every few seconds and one at the end, for logs and pipes."""

    def __init__(self, say: Callable[[str], None], label: str, total: int, done: int) -> None:
        self.show = say
        self.label = label
        self.total = total
        self.started, self.first = time.monotonic(), done
        self.last_shown = self.started

    def __call__(self, done: int, note: str = "") -> None:
        """Show a line if the last one is long ago, or if all is done."""
        now = time.monotonic()
        if done < self.total and now - self.last_shown < LINE_INTERVAL_SECONDS:
            return
        self.last_shown = now
        speed = (done - self.first) / max(now - self.started, 1e-9)
        left = (self.total - done) / speed if speed > 0 else 0.0
        parts = [f"{self.label} {done}/{self.total}", note, f"{speed:.2f}/s", f"{left:.0f} s left"]
        self.show("  ".join(part for part in parts if part))


@final
class TaskLines:
    """Named parts as lines: when one begins, and every few seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.show = say
        self.label = ""
        self.last_shown = 0.0

    def __call__(self, label: str, fraction: float) -> None:
        """Show a line if a part begins, or if the last line is long ago."""
        now = time.monotonic()
        if label == self.label and now - self.last_shown < LINE_INTERVAL_SECONDS:
            return
        self.label, self.last_shown = label, now
        self.show(f"{label} {100 * fraction:.0f} %")


@final
class TaskBars:
    """Named parts as one bar each."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, fraction: float) -> None:
        """Move the part's bar, which is made when the part begins."""
        if label not in self.tasks:
            self.progress.start()
            self.tasks[label] = self.progress.add_task(label, total=1.0, note="")
        self.progress.update(self.tasks[label], completed=fraction)


@final
class SpeedColumn(ProgressColumn):
    """Steps per second."""

    def render(self, task: Task) -> Text:
        """The speed, or nothing before there is one."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")


def live_progress(console: Console, counts: bool = True) -> Progress:
    """A progress display with bar, counts, note, speed and time left."""
    columns: list[str | ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if counts:
        columns += [MofNCompleteColumn(), TextColumn("{task.fields[note]}"), SpeedColumn()]
    return Progress(*columns, TimeRemainingColumn(), console=console)


def screen_for(rank: int) -> Screen:
    """The screen of one rank: only rank 0 shows anything but preparations."""
    return Screen(Console() if rank == 0 else None)


@contextmanager
def collect_data_notes() -> Iterator[list[str]]:
    """Collect what a user should know of the data, of what is logged meanwhile; see `notes_of`."""
    found: list[str] = []
    logger, handler = getLogger("credit_dp"), EarlyRecords()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        found += notes_of(handler.pop_all())


def notes_of(records: Iterable[LogRecord]) -> list[str]:
    """What a user should know of the data, of what was logged while they were prepared; each once.

    Warnings are left out, for they have been shown.
    """
    shown = (r for r in records if r.name.startswith(DATA_LOGGERS) and r.levelno < WARNING)
    return list(dict.fromkeys(record.getMessage() for record in shown))


ETA_STEPS = 20  # after which it is told; before the first of them a lot is set up


@final
class EtaMessage:
    """Says once how long an epoch takes, and all that is left.

    Args:
        step: after which training starts.
        total: steps of the run.
        per_epoch: steps of an epoch.
    """

    def __init__(self, step: int, total: int, per_epoch: int) -> None:
        self.first = step + 1
        self.total = total
        self.per_epoch = per_epoch
        self._began = 0.0

    def __call__(self, step: int) -> str | None:
        """Hear that a step has been taken; the line, after the 20th."""
        now = time.monotonic()
        if step == self.first:
            self._began = now
        if step + 1 != self.first + ETA_STEPS or step >= self.total:
            return None
        pace = (now - self._began) / (ETA_STEPS - 1)
        epoch, left = pace * self.per_epoch, pace * (self.total - step)
        return f"about {format_duration(epoch)} for an epoch, done in about {format_duration(left)}"


def format_duration(seconds: float) -> str:
    """Seconds in the unit that suits: `45 s`, `12 min`, `3.5 h`, `2.1 days`."""
    if seconds < 90:
        return f"{seconds:.{0 if seconds >= 9.5 else 1}f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
