"""A cache of computed files that all ranks and jobs share.

`load_or_create` has a file or folder created exactly once: with a lock, and atomically.
`lock_output` guards what a command writes outside of the cache.
`fingerprint` gives the name under which a result is stored.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from credit_dp.checks import expand_home
from credit_dp.errors import UserError
from credit_dp.files import atomic_path, partial_path

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"  # in the folder of an output that is not complete

ProgressCallback = Callable[[str, float], None]  # title of the work, fraction done


class NotComputedError(UserError):
    """The cache lacks a result, which may not be computed now; the line names both."""


def check_may_compute(compute: bool, result: str, folder: Path) -> None:
    """Refuse to compute a result that the cache lacks, unless `compute`.

    Raises:
        NotComputedError: naming the result and the folder.
    """
    if not compute:
        raise NotComputedError(f"{folder}: has no {result} of these data and training dates")


def cache_folder(path: str) -> Path:
    """Return the cache folder, creating it if it does not exist."""
    folder = expand_home("data.cache", path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created ({error.strerror}). Set data.cache."
        ) from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: is not writable. Set data.cache to another folder.")
    return folder


def fingerprint(*parts: object) -> str:
    """Return a short hash of the inputs of a cached result; equal inputs have equal hashes."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Loaded = TypeVar("Loaded")


def load_or_create(
    path: Path,
    load: Callable[[Path], Loaded | None],
    create: Callable[[Path], None],
    result: str,
    compute: bool = True,
) -> Loaded:
    """Return what is at a path in the cache, which is created first if it is not there.

    Args:
        load: reads it; returns None if it is absent or damaged.
        create: writes it to another path, which is then renamed.

    Raises:
        UserError: another user's files are in the way.
        NotComputedError: it would have to be created.
        OSError: what was written can't be read back.
    """
    found = load(path)
    if found is None:
        check_may_compute(compute, result, path.parent)
        # One of several processes creates it; the others wait and get no path.
        with create_once(path, lambda file: load(file) is not None) as new:
            if new is not None:
                create(new)
        found = load(path)
    if found is None:
        raise OSError(f"{path}: was just written but cannot be read back")
    return found


@contextmanager
def create_once(path: Path, is_complete: Callable[[Path], bool]) -> Iterator[Path | None]:
    """Let one process at a time create `path`; yield the temporary path to write, or None.

    None means that `path` is complete already. If several processes enter at once, one of them
    writes and the others wait for it. The temporary path is renamed to `path` when the block ends
    without an error, so a process that dies early leaves no file that looks like the result.

    Args:
        is_complete: whether a path exists and is undamaged; a damaged one is removed.
    """
    with lock_cached(path):
        # Only with the lock: the process that held it until now may have completed the path.
        if is_complete(path):
            yield None
            return
        # Holding the lock, leftovers can only be those of a process that died while it wrote.
        temporary = partial_path(path)
        with explain_cache_errors(path):
            for leftover in (temporary, path):
                _remove(leftover)
        with atomic_path(path, temporary):
            yield temporary


@contextmanager
def lock_cached(path: Path) -> Iterator[None]:
    """Hold the lock file of a path in the cache; wait for a process that holds it."""
    lock = FileLock(path.with_name(f"{path.name}.lock"))
    with explain_cache_errors(path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def explain_cache_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system in the cache into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be written ({error.strerror}). If users share the "
            "cache, they need umask 002 and one group; remove this, or set data.cache."
        ) from error


@contextmanager
def lock_output(out: Path, message: str) -> Iterator[None]:
    """Hold the lock file in `OUT.partial`, or in `OUT.new.partial`, where a new one is made.

    It is in the folder that a killed process leaves anyway, and is renamed with it. What is left of
    `OUT.new.partial` is removed at the end.

    Raises:
        UserError: with this message; another process holds the lock.
        OSError: the lock file can't be opened.
    """
    new, partial = new_path(out), partial_path(out)
    folder = partial if partial.exists() else new
    if folder == new:
        with suppress(FileExistsError):  # another process may remove it at once
            new.mkdir()
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # the folder has just been renamed
        raise UserError(message) from None
    try:
        try:
            _lock(descriptor, path)
            # Until it was locked, another process may have renamed or removed the folder.
            is_there = os.path.samestat(os.fstat(descriptor), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        if not is_there:
            raise UserError(message)
        try:
            if folder == new and partial.exists():  # begun since the check above
                raise UserError(message)
            yield
        finally:
            with suppress(OSError):  # it may be that of another process by now
                if os.path.samestat(os.fstat(descriptor), (new / LOCK_NAME).stat()):
                    shutil.rmtree(new, ignore_errors=True)
    finally:
        os.close(descriptor)
        # NFS keeps a removed file in its folder while it is open.
        for emptied in (new, partial):
            with suppress(OSError):
                emptied.rmdir()


def _lock(descriptor: int, path: Path) -> None:
    """Lock an open file, or warn that the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        logger.warning(
            "%s: the file system has no locks (%s): start one command at a time for this output",
            path.parent,
            error.strerror,
        )


def new_path(out: Path) -> Path:
    """Return the folder in which `OUT.partial` is made, under the lock of `lock_output`."""
    return partial_path(out.with_name(f"{out.name}.new"))


def clear_new(out: Path) -> Path:
    """Return `new_path(out)` without the files of a killed process, but with its lock file."""
    new = new_path(out)
    new.mkdir(exist_ok=True)
    for leftover in new.iterdir():
        if leftover.name != LOCK_NAME:
            _remove(leftover)
    return new


def remove_lock(out: Path) -> None:
    """Remove the lock file from a complete output."""
    (out / LOCK_NAME).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
