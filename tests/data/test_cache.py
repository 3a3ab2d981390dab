import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from credit_dp.data.cache import clear_new, create_once, fingerprint, lock_output
from credit_dp.errors import UserError


def _die_while_building(path):
    with create_once(path, lambda _: False) as temporary:
        temporary.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_killed_while_building_leaves_nothing_behind_that_counts(tmp_path):
    path = tmp_path / "result"
    job = multiprocessing.get_context("spawn").Process(target=_die_while_building, args=(path,))
    job.start()
    job.join(60)
    assert job.exitcode == -signal.SIGKILL
    assert not path.exists()

    with create_once(path, lambda file: file.exists()) as temporary:
        temporary.write_text("whole")
    with create_once(path, lambda file: file.exists()) as temporary:
        assert temporary is None
    assert path.read_text() == "whole"
    # Some releases of filelock keep the lock file.
    assert {file.name for file in tmp_path.iterdir()} - {"result.lock"} == {"result"}


def _fail_while_building(path):
    with create_once(path, lambda file: file.exists()) as temporary:
        temporary.mkdir()
        raise ZeroDivisionError


def test_an_error_while_building_leaves_the_next_to_build(tmp_path):
    path = tmp_path / "result"
    with pytest.raises(ZeroDivisionError):
        _fail_while_building(path)
    assert not path.exists()
    with create_once(path, lambda file: file.exists()) as temporary:
        assert not temporary.exists()
        temporary.mkdir()
    assert path.is_dir()


def test_an_output_is_locked_by_one_at_a_time(tmp_path):
    path = tmp_path / "store.zarr"
    holders = []
    most = []

    def write(number):
        # Each release removes the lock file that others may have opened already.
        for _ in range(200):
            with suppress(UserError), lock_output(path, "in use"):
                holders.append(number)
                most.append(len(holders))
                holders.remove(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert max(most) == 1
    with (
        lock_output(path, ""),
        pytest.raises(UserError, match="in use"),
        lock_output(path, "in use"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def _die_while_writing(path, begins):
    with lock_output(path, "in use"):
        (clear_new(path) / "field").write_text("half")
        if begins:
            clear_new(path).rename(f"{path}.partial")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("begins", [False, True])
def test_a_killed_writer_leaves_partial_names_only(tmp_path, begins):
    path = tmp_path / "store.zarr"
    job = multiprocessing.get_context("spawn").Process(
        target=_die_while_writing, args=(path, begins)
    )
    job.start()
    job.join(60)
    assert job.exitcode == -signal.SIGKILL
    left = "store.zarr.partial" if begins else "store.zarr.new.partial"
    assert [file.name for file in tmp_path.iterdir()] == [left]

    with lock_output(path, "in use"):
        assert not list(clear_new(path).glob("[!.]*"))
    assert [file.name for file in tmp_path.iterdir()] == ([left] if begins else [])


def test_the_lock_is_held_when_the_output_has_begun(tmp_path):
    path = tmp_path / "store.zarr"
    with lock_output(path, ""):
        clear_new(path).rename(tmp_path / "store.zarr.partial")
        with pytest.raises(UserError, match="in use"), lock_output(path, "in use"):
            pass
    with lock_output(path, "in use"):
        pass


def test_an_output_that_another_process_has_begun_meanwhile_stays(tmp_path):
    """A lock goes away with its folder: others may write before the process that had it is done."""
    path = tmp_path / "store.zarr"
    with lock_output(path, ""):
        clear_new(path).rename(path)
        second = lock_output(path, "in use")
        second.__enter__()
        (clear_new(path) / "field").touch()
    assert (tmp_path / "store.zarr.new.partial/field").exists()
    with pytest.raises(UserError, match="in use"), lock_output(path, "in use"):
        pass
    second.__exit__(None, None, None)
    assert [file.name for file in tmp_path.iterdir()] == ["store.zarr"]


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_output(tmp_path / "store.zarr", "in use"):
        assert clear_new(tmp_path / "store.zarr").is_dir()
    [line] = caplog.messages
    assert "the file system has no locks (Function not implemented): start one" in line
    assert not list(tmp_path.iterdir())


def test_fingerprint_is_equal_for_equal_parts_only():
    parts = (1, ["geopotential"], {"a": 1, "b": 2})
    assert fingerprint(*parts) == fingerprint(1, ["geopotential"], {"b": 2, "a": 1})
    assert fingerprint(*parts) != fingerprint(2, *parts[1:])


def _create(path):
    with create_once(path, lambda file: file.exists()) as temporary:
        temporary.touch()


@pytest.mark.slow
def test_another_users_files_are_one_line(tmp_path, monkeypatch):
    # In place of a file without permission, which the superuser could open.
    (tmp_path / "result.lock").mkdir()
    with pytest.raises(UserError, match=r"result\.lock: cannot be written \(Is a directory\)\. If"):
        _create(tmp_path / "result")
    (tmp_path / "other.partial").mkdir()

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError, match=r"other\.partial: cannot be written \(Permission denied\)"):
        _create(tmp_path / "other")
