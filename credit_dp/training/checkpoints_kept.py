"""Which checkpoints of a run stay when a new one is whole: the newest, and the best."""

import contextlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from credit_dp.training.checkpoint_files import STATE, step_of, unfinished_folder, whole_steps

VALIDATION = "validation"  # in `state.json`: the error that was found at this step, or null
BEST = "best"  # a link beside the checkpoints


@final
@dataclass(frozen=True)
class Kept:
    """How many of the newest stay, and whether the one with the lowest validation error does."""

    newest: int = 1
    best: bool = False


def tidy(path: Path, kept: Kept) -> None:
    """Remove what does not stay now that `path` is whole, and say which one is the best.

    Later steps than that of `path` are of a training that was gone back on: they go, too. What
    can't be removed is left to the next time.
    """
    folder = path.parent
    steps = [other for other in whole_steps(folder) if step_of(other) <= step_of(path)]
    best = best_of(steps) if kept.best else None
    with contextlib.suppress(OSError):  # a file system may have no links
        link(folder / BEST, best)
    stay = {*steps[-kept.newest :], best}
    for other in whole_steps(folder):
        if other not in stay:
            remove(other)
    for leftover in folder.glob(".step-*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def best_of(steps: list[Path]) -> Path | None:
    """The one with the lowest validation error, of equal ones the first; None if none has one."""
    errors = {path: error for path in steps if (error := validation_of(path)) is not None}
    return min(errors, key=errors.__getitem__, default=None)


def validation_of(path: Path) -> float | None:
    """The error that a checkpoint was saved with."""
    try:
        numbers = json.loads((path / STATE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return as_error(numbers.get(VALIDATION)) if isinstance(numbers, dict) else None


def as_error(value: Any) -> float | None:
    """A number that can be compared, or None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def link(name: Path, target: Path | None) -> None:
    """Have `name` lead to a checkpoint beside it, in one go, or not be there.

    Raises:
        OSError: it can't.
    """
    if target is None:
        name.unlink(missing_ok=True)
        return
    if name.is_symlink() and os.readlink(name) == target.name:
        return
    temporary = name.with_name(f".{name.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, name)


def remove(path: Path) -> None:
    """Remove a checkpoint so that half of one never bears its name."""
    aside = unfinished_folder(path.with_name(f"{path.name}-old"))
    with contextlib.suppress(OSError):
        os.replace(path, aside)
        shutil.rmtree(aside)
