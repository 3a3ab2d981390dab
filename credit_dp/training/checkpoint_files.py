"""The folder of checkpoints: its files, and which of them are kept. No torch in here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from credit_dp import checks
from credit_dp.errors import UserError

FORMAT_VERSION = 4
CHECKPOINTS_FOLDER = "checkpoint"  # of a run, its checkpoints are in
METADATA_FILE = "state.json"
SHARD_SUFFIX = ".safetensors"
STEP_PATTERN = re.compile(r"step-\d{8,}")

Metadata = dict[str, Any]

MAX_INT64 = 2**63 - 1  # of what torch takes for an integer

# What `state.json` has to have.
METADATA_TYPES = {
    "step": int,
    "seed": int,
    "schedule": dict,
    "sampler": dict,
    "data": dict,
    "config": str,
    "tensors": dict,
    "shards": list,
}


def step_folder(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"step-{step:08d}"


def temporary_folder(path: Path) -> Path:
    """What the checkpoint is called while it is written."""
    return path.with_name(f".{path.name}.part")


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP_PATTERN.fullmatch(path.name)]
    return sorted((path for path in found if (path / METADATA_FILE).is_file()), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(path.name.removeprefix("step-"))


def locate_checkpoint(key: str, value: str) -> Path:
    """The checkpoint at a path: its own, that of the folder it is in, or that of a run.

    Raises:
        UserError: there is none.
    """
    path = checks.checkpoint_path(key, value)
    if path.is_file():
        raise UserError(
            f"{key}: needs the folder of a checkpoint or of a run, but {path} is a file, as "
            "checkpoints of earlier versions were."
        )
    if (path / METADATA_FILE).is_file():
        return path
    steps = list_checkpoints(path) or list_checkpoints(path / CHECKPOINTS_FOLDER)
    if not steps:
        raise UserError(f"{key}: {path} holds no checkpoint of a run.")
    return steps[-1]


def create_temporary_folder(part: Path) -> None:
    """Make the folder to write into; what an earlier, killed run left there goes.

    Raises:
        OSError: it can't be made.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    for leftover in part.parent.glob(".step-*.part"):
        shutil.rmtree(leftover)
    part.mkdir()


def commit_checkpoint(part: Path, path: Path, numbers: Metadata) -> None:
    """Complete a checkpoint whose shards are written, and give it its name.

    Raises:
        OSError: it could not be written.
    """
    with (part / METADATA_FILE).open("w") as file:
        json.dump({"format": FORMAT_VERSION, **numbers}, file)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(part)
    if path.exists():  # the same step once more: a folder can't be replaced in one go
        os.replace(path, temporary_folder(path.with_name(f"{path.name}-old")))
    os.replace(part, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make sure that the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary_folder(part: Path) -> None:
    """Remove what was written of a checkpoint that won't be completed."""
    shutil.rmtree(part, ignore_errors=True)


def shard_names(path: Path) -> list[str]:
    """The files of tensors in a folder."""
    return sorted(file.name for file in path.iterdir() if file.name.endswith(SHARD_SUFFIX))


def read_metadata(key: str, path: Path) -> Metadata:
    """What `finish` wrote; the shards that belong to it are there.

    Raises:
        UserError: it can't be read, is of another program, or not all of it is there.
    """
    try:
        numbers = json.loads((path / METADATA_FILE).read_text())
        shards = shard_names(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}: {path} is not a readable checkpoint ({reason}).") from error
    if not is_valid_metadata(numbers):
        raise UserError(
            f"{key}: {path} is not a checkpoint of this program (format {FORMAT_VERSION})."
        )
    odd = sorted(set(shards) ^ set(numbers["shards"]))
    if odd:
        raise UserError(
            f"{key}: {path} is not a readable checkpoint ({odd[0]} is missing or does not belong "
            "to it)."
        )
    return dict(numbers)


def is_valid_metadata(numbers: Any) -> bool:
    """Whether all of `METADATA_TYPES` is there, and is what everyone may take it for."""
    return (
        isinstance(numbers, dict)
        and numbers.get("format") == FORMAT_VERSION
        and all(type(numbers.get(name)) is kind for name, kind in METADATA_TYPES.items())
        and all(0 <= numbers[name] <= MAX_INT64 for name in ("step", "seed"))
        and all(type(name) is str for name in numbers["shards"])
        and all(map(is_shape, numbers["tensors"].values()))
    )


def is_shape(value: object) -> bool:
    """Whether it is a list of sizes."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def run_folder_of(path: Path) -> Path:
    """The folder of the run that wrote a checkpoint, or else the one that it is in."""
    folder = path.resolve().parent
    return folder.parent if folder.name == CHECKPOINTS_FOLDER else folder


VALIDATION_KEY = "validation"  # in `state.json`: the error that was found at this step, or null
BEST_LINK = "best"  # a link beside the checkpoints


@final
@dataclass(frozen=True)
class RetentionPolicy:
    """How many of the newest stay, and whether the one with the lowest validation error does."""

    keep_newest: int = 1
    keep_best: bool = False


def apply_retention(path: Path, kept: RetentionPolicy) -> None:
    """Remove what does not stay now that `path` is whole, and say which one is the best.

    Later steps than that of `path` are of a training that was gone back on: they go, too. What
    can't be removed is left to the next time.
    """
    folder = path.parent
    steps = [other for other in list_checkpoints(folder) if step_of(other) <= step_of(path)]
    best = best_checkpoint(steps) if kept.keep_best else None
    with contextlib.suppress(OSError):  # a file system may have no links
        update_link(folder / BEST_LINK, best)
    stay = {*steps[-kept.keep_newest :], best}
    for other in list_checkpoints(folder):
        if other not in stay:
            remove_checkpoint(other)
    for leftover in folder.glob(".step-*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def best_checkpoint(steps: list[Path]) -> Path | None:
    """The one with the lowest validation error, of equal ones the first; None if none has one."""
    errors = {path: error for path in steps if (error := validation_error_of(path)) is not None}
    return min(errors, key=errors.__getitem__, default=None)


def validation_error_of(path: Path) -> float | None:
    """The error that a checkpoint was saved with."""
    try:
        numbers = json.loads((path / METADATA_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return finite_or_none(numbers.get(VALIDATION_KEY)) if isinstance(numbers, dict) else None


def finite_or_none(value: Any) -> float | None:
    """A number that can be compared, or None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def update_link(name: Path, target: Path | None) -> None:
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


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that half of one never bears its name."""
    aside = temporary_folder(path.with_name(f"{path.name}-old"))
    with contextlib.suppress(OSError):
        os.replace(path, aside)
        shutil.rmtree(aside)


# `torch.distributed.checkpoint` takes a second to import: only where something is saved or read.
