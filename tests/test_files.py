"""Atomic writes: what stays on disk after an error, a kill, or a full disk."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from credit_dp import files
from credit_dp.files import (
    SECONDS_TO_LOCK,
    atomic_path,
    fsync_folders,
    fsync_tree,
    is_special,
    partial_path,
    remove_abandoned_folders,
    remove_if_possible,
    remove_temporaries,
    rename_durably,
    temporary_folder,
    temporary_path,
    write_bytes_atomic,
    write_text_atomic,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    for text in ("old", "new, größer"):
        write_text_atomic(path, text)
        assert path.read_text(encoding="utf-8") == text
    write_bytes_atomic(path, memoryview(b"bytes"), durable=True, unique=True)
    assert path.read_bytes() == b"bytes"
    assert names(tmp_path) == {"scores.json"}


def write_half(path: Path, kind: type[BaseException]) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise kind


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyboardInterrupt])
def test_an_error_in_the_block_leaves_the_old_file_only(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    path = tmp_path / "plot.png"
    path.write_text("old")
    with pytest.raises(kind):
        write_half(path, kind)
    assert path.read_text() == "old"
    assert names(tmp_path) == {"plot.png"}


def test_an_error_before_anything_is_written_is_that_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with atomic_path(tmp_path / "plot.png"):
            raise ZeroDivisionError
    with pytest.raises(FileNotFoundError):
        write_text_atomic(tmp_path / "no folder" / "file", "text")
    assert names(tmp_path) == set()


def test_an_error_in_the_rename_leaves_the_old_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


def die_before_the_rename(path: Path, unique: bool) -> None:
    with atomic_path(path, temporary_path(path, unique)) as temporary:
        temporary.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("unique", [False, True])
def test_a_process_killed_before_the_rename_leaves_the_old_file(
    tmp_path: Path, unique: bool
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    process = multiprocessing.get_context("spawn").Process(
        target=die_before_the_rename, args=(path, unique)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 2
    if unique:
        remove_temporaries(tmp_path)
    else:
        write_text_atomic(path, "new")
    assert names(tmp_path) == {"file"}


def write_half_a_folder(path: Path) -> None:
    with atomic_path(path, partial_path(path)) as temporary:
        (temporary / "fields").mkdir(parents=True)
        raise ZeroDivisionError


def test_a_folder_is_renamed_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(ZeroDivisionError):
        write_half_a_folder(path)
    assert names(tmp_path) == set()
    with atomic_path(path) as temporary:
        temporary.mkdir()
        (temporary / "zarr.json").write_text("{}")
    assert names(path) == {"zarr.json"}


def test_content_is_on_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("rename"), replace(*paths)))
    write_bytes_atomic(tmp_path / "a", b"content")
    assert events == ["rename"]
    events.clear()
    write_bytes_atomic(tmp_path / "b", b"content", durable=True)
    assert events == ["fsync", "rename"]
    events.clear()
    rename_durably(tmp_path / "b", tmp_path / "c")
    assert events == ["rename", "fsync"]


def test_flushing_a_tree_reaches_every_file_or_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "one" / "file").touch()
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    folders = {path.stat().st_ino for path in (tmp_path, tmp_path / "one", tmp_path / "one/two")}
    fsync_folders(tmp_path)
    assert flushed == folders
    fsync_tree(tmp_path)
    assert flushed == {*folders, (tmp_path / "one" / "file").stat().st_ino}


def test_threads_that_write_one_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda content: write_bytes_atomic(path, content, unique=True), contents * 4))
    assert path.read_bytes() in contents
    assert names(tmp_path) == {"chunk"}


def test_only_temporaries_are_swept(tmp_path: Path) -> None:
    kept = {"c.0.0", ".hidden", "OUT.partial", "lock"}
    for name in (*kept, temporary_path(Path("c.0.0")).name, ".c.1.3.0.0.0.123.partial"):
        (tmp_path / name).touch()
    remove_temporaries(tmp_path)
    assert names(tmp_path) == kept


def test_a_link_is_removed_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    remove_if_possible(tmp_path / "link")
    remove_if_possible(tmp_path / "nothing")
    assert names(tmp_path) == {"folder"}


def keep_a_folder_and_die() -> None:
    with temporary_folder() as folder:
        (folder / "file").touch()
        grow_old(folder)
        os.kill(os.getpid(), signal.SIGKILL)


def grow_old(folder: Path) -> None:
    then = time.time() - 2 * SECONDS_TO_LOCK
    os.utime(folder, (then, then))


def test_only_temporary_folders_of_killed_processes_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "LONGEST_ROOT", 1000)
    with temporary_folder() as used, temporary_folder() as linked:
        process = multiprocessing.get_context("fork").Process(target=keep_a_folder_and_die)
        process.start()
        process.join(60)
        abandoned = names(tmp_path) - {used.name, linked.name}
        assert len(abandoned) == 1
        young = Path(f"{used}-young")
        young.mkdir()
        link = Path(f"{used}-link")
        link.symlink_to(linked)
        for folder in (used, linked):
            grow_old(folder)
        remove_abandoned_folders()
        assert names(tmp_path) == {path.name for path in (used, linked, young, link)}
    assert names(tmp_path) == {young.name, link.name}


def test_a_forked_process_keeps_the_temporary_folder_of_its_parent() -> None:
    held = [temporary_folder()]
    folder = held[0].__enter__()
    process = multiprocessing.get_context("fork").Process(target=held.clear)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert folder.is_dir()
    held.clear()
    assert not folder.exists()


def test_a_socket_fits_into_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with temporary_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "listener-12345678"))
    assert not folder.exists()


def test_a_pipe_is_special_and_nothing_else_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "file").touch()
    names = ("pipe", "link", "file", "", "nothing", "\0")
    found = [is_special(tmp_path / name) for name in names]
    assert found == [True, True, False, False, False, False]
    assert not is_special(os.devnull)
