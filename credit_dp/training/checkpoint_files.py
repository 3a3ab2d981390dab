"""The folder of a checkpoint: `checkpoint/step-00000200` with shards of tensors and `state.json`.

It is written under another name and renamed when whole. Nothing in it is ever executed: the shards
are safetensors, the rest is JSON.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from credit_dp import checks
from credit_dp.errors import UserError

FORMAT = 4
FOLDER = "checkpoint"  # of a run, its checkpoints are in
STATE = "state.json"
SHARD = ".safetensors"
STEP = re.compile(r"step-\d{8,}")

Numbers = dict[str, Any]

LARGEST = 2**63 - 1  # of what torch takes for an integer

# What `state.json` has to have.
CONTENT = {
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


def unfinished_folder(path: Path) -> Path:
    """What the checkpoint is called while it is written."""
    return path.with_name(f".{path.name}.part")


def whole_steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP.fullmatch(path.name)]
    return sorted((path for path in found if (path / STATE).is_file()), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(path.name.removeprefix("step-"))


def locate(key: str, value: str) -> Path:
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
    if (path / STATE).is_file():
        return path
    steps = whole_steps(path) or whole_steps(path / FOLDER)
    if not steps:
        raise UserError(f"{key}: {path} holds no checkpoint of a run.")
    return steps[-1]


def begin(part: Path) -> None:
    """Make the folder to write into; what an earlier, killed run left there goes.

    Raises:
        OSError: it can't be made.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    for leftover in part.parent.glob(".step-*.part"):
        shutil.rmtree(leftover)
    part.mkdir()


def finish(part: Path, path: Path, numbers: Numbers) -> None:
    """Complete a checkpoint whose shards are written, and give it its name.

    Raises:
        OSError: it could not be written.
    """
    with (part / STATE).open("w") as file:
        json.dump({"format": FORMAT, **numbers}, file)
        file.flush()
        os.fsync(file.fileno())
    sync(part)
    if path.exists():  # the same step once more: a folder can't be replaced in one go
        os.replace(path, unfinished_folder(path.with_name(f"{path.name}-old")))
    os.replace(part, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make sure that the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def abandon(part: Path) -> None:
    """Remove what was written of a checkpoint that won't be completed."""
    shutil.rmtree(part, ignore_errors=True)


def shard_names(path: Path) -> list[str]:
    """The files of tensors in a folder."""
    return sorted(file.name for file in path.iterdir() if file.name.endswith(SHARD))


def read_numbers(key: str, path: Path) -> Numbers:
    """What `finish` wrote; the shards that belong to it are there.

    Raises:
        UserError: it can't be read, is of another program, or not all of it is there.
    """
    try:
        numbers = json.loads((path / STATE).read_text())
        shards = shard_names(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}: {path} is not a readable checkpoint ({reason}).") from error
    if not is_whole(numbers):
        raise UserError(f"{key}: {path} is not a checkpoint of this program (format {FORMAT}).")
    odd = sorted(set(shards) ^ set(numbers["shards"]))
    if odd:
        raise UserError(
            f"{key}: {path} is not a readable checkpoint ({odd[0]} is missing or does not belong "
            "to it)."
        )
    return dict(numbers)


def is_whole(numbers: Any) -> bool:
    """Whether all of `CONTENT` is there, and is what everyone may take it for."""
    return (
        isinstance(numbers, dict)
        and numbers.get("format") == FORMAT
        and all(type(numbers.get(name)) is kind for name, kind in CONTENT.items())
        and all(0 <= numbers[name] <= LARGEST for name in ("step", "seed"))
        and all(type(name) is str for name in numbers["shards"])
        and all(map(is_shape, numbers["tensors"].values()))
    )


def is_shape(value: object) -> bool:
    """Whether it is a list of sizes."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def run_of(path: Path) -> Path:
    """The folder of the run that wrote a checkpoint, or else the one that it is in."""
    folder = path.resolve().parent
    return folder.parent if folder.name == FOLDER else folder
