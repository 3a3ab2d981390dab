"""Files that are made once and shared by all ranks and jobs: lock, temporary name, rename."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from credit_dp.checks import expand_home
from credit_dp.errors import UserError

ProgressCallback = Callable[[str, float], None]  # what is being made, and the fraction done


def cache_folder(path: str) -> Path:
    """The cache folder, made if need be.

    Raises:
        UserError: it cannot be made or written in.
    """
    folder = expand_home("data.cache", path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}). Set data.cache.") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: cannot be written in. Set data.cache to a folder of yours.")
    return folder


def fingerprint(*parts: object) -> str:
    """A short name for what a cached result was made from: equal parts, equal name."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def create_once(path: Path, is_whole: Callable[[Path], bool]) -> Iterator[Path | None]:
    """Hold the sole right to make `path`: yields a temporary name to write, or None if it is there.

    However many processes claim it at once, one makes it and the others wait. The temporary name
    becomes `path` when the block ends without error, so that a process that dies on the way leaves
    nothing behind that could be taken for the result.

    Args:
        path: the file or folder, as it is called when whole.
        is_whole: whether it is there and undamaged; what is damaged is removed.
    """
    with FileLock(lock_path(path)):
        if is_whole(path):
            yield None
            return
        temporary = path.with_name(f"{path.name}.partial")
        for leftover in (temporary, path):
            _remove(leftover)
        yield temporary
        os.replace(temporary, path)


def lock_path(path: Path) -> Path:
    """The file whose lock whoever makes `path` must hold."""
    return path.with_name(f"{path.name}.lock")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
