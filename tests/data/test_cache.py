import multiprocessing
import os
import signal

import pytest

from credit_dp.data.cache import create_once, fingerprint


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
    assert sorted(file.name for file in tmp_path.iterdir()) == ["result", "result.lock"]


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


def test_fingerprint_is_equal_for_equal_parts_only():
    parts = (1, ["geopotential"], {"a": 1, "b": 2})
    assert fingerprint(*parts) == fingerprint(1, ["geopotential"], {"b": 2, "a": 1})
    assert fingerprint(*parts) != fingerprint(2, *parts[1:])
