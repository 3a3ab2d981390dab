"""The folder of checkpoints: file names, metadata and retention.

A checkpoint `step-00000042` is a folder with one or more safetensors files (tensors, see
`checkpoint_shards`) and `state.json` (numbers and text, written by rank 0). All have checksums, and
`state.json` knows by which headers its shards are recognised: a file of another save, whole in
itself, is refused. It is written in this order:

1. `create_temporary_folder`: `.step-00000042.partial`, which no reader takes for a checkpoint.
2. `checkpoint_shards.write_shard`: ranks that have something to write write their parts of tensors.
3. `commit_checkpoint`: `state.json` is written, then the folder gets its final name.
4. `apply_retention`: checkpoints that are no longer needed are removed.

A crash at any point leaves the previous checkpoint untouched, except one of the same step, which is
moved aside before the new one gets its name.

This file does not import torch, which takes seconds: the command line uses it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from yaml import YAMLError  # type: ignore[import-untyped]

from credit_dp import checks
from credit_dp.errors import UserError
from credit_dp.files import (
    atomic_path,
    fsync_path,
    is_special,
    rename_durably,
    temporary_path,
)

FORMAT_VERSION = 6
CHECKPOINTS_FOLDER = "checkpoint"  # inside the folder of a run
METADATA_FILE = "state.json"
SHARD_SUFFIX = ".safetensors"
STEP_PATTERN = re.compile(r"step-\d{8,}")
LEFTOVERS = ".step-*.partial"  # incomplete checkpoints

CHECKSUM_KEY = "checksum"  # in `state.json`, of all other entries

Metadata = dict[str, Any]
# What `state.json` has to have, whatever wrote it.
ENTRIES = {
    "step": int,
    "seed": int,
    "schedule": dict,
    "sampler": dict,
    "data": dict,
    "config": str,
    "tensors": dict,
    "shards": dict,
}

LENGTH_BYTES = 8  # at the start of a safetensors file: the length of its header
MAX_HEADER_BYTES = 100_000_000  # safetensors reads no longer header


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, in order of their steps."""
    if not folder.is_dir():
        return []
    candidates = [path for path in folder.iterdir() if STEP_PATTERN.fullmatch(path.name)]
    return sorted((path for path in candidates if (path / METADATA_FILE).is_file()), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def locate_checkpoint(key: str, value: str) -> Path:
    """Return the checkpoint at a path, or the newest one in a folder of checkpoints or of a run.

    Args:
        key: config key that error messages begin with.
        value: the path that this key has.

    Raises:
        UserError: there is no checkpoint.
    """
    path = checks.checkpoint_path(key, value)
    if path.is_file():
        raise UserError(
            f"{key}: needs the folder of a checkpoint or of a run, but {path} is a file, as "
            "exported models for credit_dp.load are."
        )
    if (path / METADATA_FILE).is_file():
        return path
    steps = list_checkpoints(path) or list_checkpoints(path / CHECKPOINTS_FOLDER)
    if not steps:
        raise UserError(f"{key}: {path} holds no checkpoint of a run.")
    return steps[-1]


def create_temporary_folder(temporary: Path) -> None:
    """Create the folder to write into, and remove the temporary folders of killed runs.

    Raises:
        OSError: the folder can't be created.
    """
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for leftover in temporary.parent.glob(LEFTOVERS):
        shutil.rmtree(leftover)
    temporary.mkdir()


def commit_checkpoint(temporary: Path, path: Path, metadata: Metadata) -> None:
    """Write the metadata of a checkpoint whose shards are written, and give it its final name.

    Raises:
        OSError: it could not be written.
    """
    metadata_file = temporary / METADATA_FILE
    content = {"format": FORMAT_VERSION, **metadata}
    metadata_file.write_text(json.dumps({**content, CHECKSUM_KEY: metadata_checksum(content)}))
    fsync_path(metadata_file)
    # The content reaches the disk before the name does: after a power failure a folder with a
    # checkpoint's name is complete.
    fsync_path(temporary)
    if path.exists():
        # The same step was saved before. A rename can't replace a folder that is not empty, so the
        # old one is moved aside; its new name marks it as a leftover.
        os.replace(path, temporary_path(path.with_name(f"{path.name}-old")))
    rename_durably(temporary, path)


def metadata_checksum(content: Metadata) -> int:
    """Return the checksum (CRC-32) of the content of `state.json`, which reading does not change.

    Python writes numbers such that it reads the same ones, and keeps the order of keys.
    """
    return zlib.crc32(json.dumps(content).encode())


def shard_record(content: bytes, size: int) -> dict[str, Any]:
    """Return what `state.json` says about a shard: its size, and a digest of its header.

    The header has the checksums of all entries, so that a file with another content has another
    header.

    Args:
        content: of the file, at least its header.
        size: of the file.
    """
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return {"bytes": size, "header": hashlib.sha256(content[:end]).hexdigest()}


def read_shard_record(path: Path) -> dict[str, Any]:
    """Return the record of a file on disk, reading its header only.

    Raises:
        OSError: it can't be read.
    """
    if is_special(path):
        raise OSError(errno.EINVAL, "is a pipe, a socket or a device", str(path))
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        header = file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
    return shard_record(length + header, path.stat().st_size)


class _UnusableError(Exception):
    """A checkpoint can't be used; the text continues a sentence that begins with its path."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice  # empty: to take an older checkpoint


def read_metadata(key: str, path: Path, shards: bool = False) -> Metadata:
    """Read `state.json` of a checkpoint, and check that it is as it was written.

    Args:
        key: config key that error messages begin with.
        path: of the checkpoint.
        shards: whether to check the headers of all shards, too; one rank does it for all.

    Raises:
        UserError: the file can't be read, is damaged, or has another format; a shard is missing,
            or with `shards` cut, damaged, or from another step, rank or run.
    """
    try:
        return _read_metadata(path, shards)
    except _UnusableError as error:
        advice = error.advice or older_checkpoint_advice(path)
        raise UserError(f"{key}: {path} {error}. {advice}") from error.__cause__


def older_checkpoint_advice(path: Path) -> str:
    """Return a sentence on what to use instead of a damaged checkpoint."""
    path = path.resolve()  # the path may be the link to the best checkpoint
    older: list[Path] = []
    if STEP_PATTERN.fullmatch(path.name):
        older = [p for p in list_checkpoints(path.parent) if step_of(p) < step_of(path)]
    for candidate in reversed(older):
        with contextlib.suppress(_UnusableError):
            _read_metadata(candidate, shards=True)
            return f"Use {candidate}, the checkpoint before it."
    return "There is no older one beside it: restore it from a copy, or use another."


def _read_metadata(path: Path, shards: bool) -> Metadata:
    try:
        metadata = json.loads((path / METADATA_FILE).read_text())
        names = {file.name for file in path.iterdir() if file.name.endswith(SHARD_SUFFIX)}
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _UnusableError(f"is not a readable checkpoint ({reason})") from error
    version = metadata.get("format") if isinstance(metadata, dict) else None
    if type(version) is not int:
        raise _UnusableError(f"is not a checkpoint of this version (format {FORMAT_VERSION})")
    if version != FORMAT_VERSION:
        raise _UnusableError(
            f"was written by another version of this package (format {version}, this one has "
            f"format {FORMAT_VERSION})",
            "Use that version, which `code.diff` in the run's folder names, or start a new run.",
        )
    if metadata.pop(CHECKSUM_KEY, None) != metadata_checksum(metadata):
        raise _UnusableError(f"is damaged: {METADATA_FILE} is not as it was written (checksum)")
    for name, kind in ENTRIES.items():
        if type(metadata.get(name)) is not kind:
            raise _UnusableError(f"is not a readable checkpoint ({METADATA_FILE} lacks {name})")
    try:
        checks.plain_yaml(metadata["config"])
    except YAMLError as error:
        reason = " ".join(str(error).split())
        raise _UnusableError(f"is not a readable checkpoint (its config: {reason})") from error
    unexpected = sorted(names ^ {*metadata["shards"]})
    if unexpected:
        raise _UnusableError(
            f"is not a readable checkpoint ({unexpected[0]} is missing or does not belong to it)"
        )
    for name, written in metadata["shards"].items() if shards else ():
        _check_shard(path / name, written)
    return dict(metadata)


def _check_shard(path: Path, written: dict[str, Any]) -> None:
    try:
        found = read_shard_record(path)
    except OSError as error:
        reason = f"{path.name}: {error.strerror}"
        raise _UnusableError(f"is not a readable checkpoint ({reason})") from error
    if found["bytes"] != written["bytes"]:
        raise _UnusableError(
            f"is damaged: {path.name} has {found['bytes']} bytes, not the {written['bytes']} that "
            f"were written with its {METADATA_FILE}; it was cut, or is of another step, rank or run"
        )
    if found != written:
        raise _UnusableError(
            f"is damaged: {path.name} is not the file that was written with its {METADATA_FILE}, "
            "but one of another step, rank or run, or changed"
        )


def run_folder_of(path: Path) -> Path:
    """Return the run that wrote a checkpoint, or the folder that a copied checkpoint is in."""
    folder = path.resolve().parent
    return folder.parent if folder.name == CHECKPOINTS_FOLDER else folder


VALIDATION_KEY = "validation"  # in `state.json`: the validation error at this step, or null
# What that error is, if keys of the config say so: see `TrainerConfig.validation_keys`.
VALIDATION_KEYS_KEY = "validation_keys"
BEST_LINK = "best"  # symbolic link to the checkpoint with the lowest validation error


@final
@dataclass(frozen=True)
class RetentionPolicy:
    """How many of the newest checkpoints are kept, and whether the best one is kept, too."""

    keep_newest: int = 1
    keep_best: bool = False


def apply_retention(path: Path, retention: RetentionPolicy) -> None:
    """Remove checkpoints that need not be kept once `path` is complete, and link the best.

    Later steps than that of `path` belong to an abandoned branch of the training and are removed.
    Errors are ignored: the next call tries again.
    """
    folder = path.parent
    candidates = [other for other in list_checkpoints(folder) if step_of(other) <= step_of(path)]
    best = best_checkpoint(candidates) if retention.keep_best else None
    with contextlib.suppress(OSError):  # some file systems have no symbolic links
        update_link(folder / BEST_LINK, best)
    keep = {*candidates[-retention.keep_newest :], best}
    for other in list_checkpoints(folder):
        if other not in keep:
            remove_checkpoint(other)
    for leftover in folder.glob(LEFTOVERS):
        shutil.rmtree(leftover, ignore_errors=True)


def best_checkpoint(paths: list[Path]) -> Path | None:
    """Return the first checkpoint with the lowest validation error; None if none has an error.

    Only checkpoints whose error has the definition of the last one's are compared.
    """
    found = {path: validation_of(path) for path in paths}
    errors = {
        path: error
        for path, (error, keys) in found.items()
        if error is not None and keys == found[paths[-1]][1]
    }
    return min(errors, key=errors.__getitem__, default=None)


def validation_of(path: Path) -> tuple[float | None, dict[str, Any]]:
    """Read the validation error of a checkpoint, and which keys say how it is computed.

    The error is None if there is none, or the checkpoint is not readable.
    """
    try:
        metadata = _read_metadata(path, shards=False)
    except _UnusableError:
        return None, {}
    return finite_or_none(metadata[VALIDATION_KEY]), metadata.get(VALIDATION_KEYS_KEY, {})


def finite_or_none(value: Any) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def update_link(link: Path, target: Path | None) -> None:
    """Let a symbolic link point to a checkpoint in the same folder, atomically; None removes it.

    Raises:
        OSError: the link can't be changed.
    """
    if target is None:
        link.unlink(missing_ok=True)
        return
    if link.is_symlink() and os.readlink(link) == target.name:
        return
    with atomic_path(link) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, renamed first so that a partial one never has a checkpoint's name."""
    aside = temporary_path(path.with_name(f"{path.name}-old"))
    with contextlib.suppress(OSError):
        os.replace(path, aside)
        shutil.rmtree(aside)
