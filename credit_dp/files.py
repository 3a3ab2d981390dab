"""Writes files and folders that readers see complete or not at all.

Content is written under a temporary name beside the target, then renamed: a rename within one file
system is atomic. After an error `atomic_path` removes it. A process that is killed can leave it
behind, but never a part of a file under the final name.

Two kinds of temporary names, both with `PARTIAL_SUFFIX`:

- `.NAME.partial`, of `temporary_path`: hidden, worthless without the process that writes it.
- `NAME.partial`, of `partial_path`: output that takes long; another process can find it, to resume
  or to remove it.

A rename alone survives the death of a process, but not that of the machine: the disk may have the
new name before the content. What cost hours to compute is flushed first (`durable`). Errors are
`OSError`; callers turn them into a line that names the config key to change.

`temporary_folder` is another matter: a folder for as long as a process needs one.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
SECONDS_TO_LOCK = 60.0  # in which a process locks the temporary folder that it has created
# The path of a socket has at most 107 bytes on Linux, and 103 on macOS. A temporary folder and
# multiprocessing's name of the socket take 46 of these.
LONGEST_ROOT = 57


def temporary_path(path: Path, unique: bool = False) -> Path:
    """Return a hidden path beside `path`, to be written and then renamed to it.

    Args:
        unique: whether several processes may write `path` at once; each gets another name. By
            default the name is always the same, so that killed processes leave one file at most,
            which the next one overwrites.
    """
    middle = f".{_machine()}-{uuid.uuid4().hex}" if unique else ""
    return path.with_name(f".{path.name}{middle}{PARTIAL_SUFFIX}")


def partial_path(path: Path) -> Path:
    """Return the path of an output that is not complete yet: `NAME.partial`."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


@contextlib.contextmanager
def atomic_path(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path for the block to write; rename it to `path` after the block.

    If the block raises, the temporary is removed and `path` stays as it was.

    Args:
        path: a file, or a folder that does not exist yet.
        temporary: beside `path`; None: `temporary_path(path)`.

    Raises:
        OSError: the rename failed.
    """
    temporary = temporary_path(path) if temporary is None else temporary
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C
        remove_if_possible(temporary)
        raise


def write_bytes_atomic(
    path: Path, content: bytes | memoryview, *, durable: bool = False, unique: bool = False
) -> None:
    """Write a file whose folder exists, so that readers see the old or the new content.

    Args:
        durable: whether the content reaches the disk before the name does, so that this also holds
            if the machine fails.
        unique: whether several processes may write the file at once.

    Raises:
        OSError: the file can't be written.
    """
    with atomic_path(path, temporary_path(path, unique)) as temporary:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())


def write_text_atomic(path: Path, text: str, *, unique: bool = False) -> None:
    """Write a small text file in UTF-8; see `write_bytes_atomic`.

    Raises:
        OSError: the file can't be written.
    """
    write_bytes_atomic(path, text.encode("utf-8"), unique=unique)


def rename_durably(temporary: Path, path: Path) -> None:
    """Rename a file or folder whose content is on disk, and flush its new name to disk.

    The content has to be flushed before, by `fsync_path`, `fsync_tree` or `fsync_folders`.

    Raises:
        OSError: it can't be renamed.
    """
    os.replace(temporary, path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk.

    Raises:
        OSError: it can't be written.
    """
    # A rename or a new file is durable only after an fsync of its folder.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush a folder with all its files to disk.

    Raises:
        OSError: it can't be written.
    """
    for root, _, names in os.walk(folder):
        for name in names:
            fsync_path(Path(root) / name)
        # Flushing a file doesn't flush its name, which is content of the folder.
        fsync_path(Path(root))


def fsync_folders(folder: Path) -> None:
    """Flush the names in a folder and its subfolders to disk, but not the files' content.

    Raises:
        OSError: it can't be written.
    """
    for root, _, _ in os.walk(folder):
        fsync_path(Path(root))


def remove_if_possible(path: Path) -> None:
    """Remove a file, or a folder with its content, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder.

    Only while no other process writes there.

    Raises:
        OSError: the folder can't be read, or a file can't be removed.
    """
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(PARTIAL_SUFFIX):
            Path(entry.path).unlink(missing_ok=True)


def is_special(path: str | Path) -> bool:
    """Whether something is at the path that is no file or folder: opening a pipe may never end.

    /dev/null may be written to, and is none.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # nothing is there
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and str(path) != os.devnull


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder in that for temporary files, and remove it after the block.

    Its path is short enough for sockets. It is locked meanwhile. If the process is killed,
    `remove_abandoned_folders` removes it later. A forked process, which drops what its parent
    holds, doesn't remove it.

    Raises:
        OSError: it can't be created.
    """
    creator = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=_temporary_root()))
    try:
        with locked_folder(folder):
            yield folder
    finally:
        if os.getpid() == creator:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep `remove_abandoned_folders` from a folder of this process, created just now."""
    with _opened_folder(folder) as descriptor:
        # Where a folder can't be locked, as on NFS, that fails in any process: nobody removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def remove_abandoned_folders(path: Path | None = None) -> None:
    """Remove the temporary folders of processes that were killed, of this user on this machine.

    Args:
        path: remove those of `temporary_path(path, unique=True)`; None: those of
            `temporary_folder`.
    """
    root = Path(_temporary_root()) if path is None else path.parent
    start = _prefix() if path is None else f".{path.name}.{_machine()}-"
    for folder in root.glob(f"{glob.escape(start)}*"):
        with contextlib.suppress(OSError), _opened_folder(folder) as descriptor:
            found = os.fstat(descriptor)
            is_old = time.time() - found.st_mtime > SECONDS_TO_LOCK
            if is_old and found.st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is in use
                shutil.rmtree(folder)


def _temporary_root() -> str:
    roots = (tempfile.gettempdir(), "/tmp", "/dev/shm")
    short = (root for root in roots if len(os.fsencode(root)) <= LONGEST_ROOT)
    return next((root for root in short if os.access(root, os.W_OK | os.X_OK)), roots[0])


def _prefix() -> str:
    return f"credit_dp-{_machine()}-"


def _machine() -> str:
    # Machines may share a folder, but see only their own locks.
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


@contextlib.contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
