"""`prepare` is stopped, killed or out of disk at any point, and resumes."""

import errno
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr

from credit_dp import files
from credit_dp.data.rechunk import copy_fields, target
from credit_dp.data.rechunk.copy_fields import RechunkJob, WorkerConfig
from credit_dp.data.sources.opening import open_source
from credit_dp.errors import UserError
from tests.data import stores
from tests.data.rechunk.requests import (
    KILLS,
    ROOT,
    StoppedError,
    after,
    before_the_end,
    config,
    prepared,
    request,
    run,
    tree,
)
from tests.distributed.processes import until
from tests.ranks import TIMEOUT
from tests.tier_cases import tiers

# Stopped and started again


STOPS: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {}


def stop(
    function: Callable[[pytest.MonkeyPatch, int], None],
) -> Callable[[pytest.MonkeyPatch, int], None]:
    STOPS[function.__name__] = function
    return function


def leave_temporaries(patch: pytest.MonkeyPatch) -> None:
    """A killed process removes nothing; an error would."""
    patch.setattr(files, "remove_if_possible", lambda path: None)


@stop
def before_a_shard_has_its_name(patch: pytest.MonkeyPatch, number: int) -> None:
    replacing = after(number, os.replace, then=False)

    def replace(old: Path, new: Path) -> None:
        (replacing if Path(new).match("fields/c.*") else original)(old, new)

    original = os.replace
    patch.setattr(os, "replace", replace)
    leave_temporaries(patch)


@stop
def in_the_middle_of_a_shard(patch: pytest.MonkeyPatch, number: int) -> None:
    count = 0

    def fsync(file: int) -> None:
        nonlocal count
        count += 1
        if count == number + 1:  # one is the disk's test
            os.ftruncate(file, 10)
            raise StoppedError

    patch.setattr(os, "fsync", fsync)
    leave_temporaries(patch)


@stop
def between_metadata(patch: pytest.MonkeyPatch, number: int) -> None:
    create = zarr.Group.create_array
    patch.setattr(zarr.Group, "create_array", after(number, create, then=True))


stop(before_the_end)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("before_a_shard_has_its_name", 4),
        ("in_the_middle_of_a_shard", 1),
        ("between_metadata", 1),
        ("before_the_end", 1),
    ],
)
def test_stopped_and_started_again_equals_undisturbed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        STOPS[name](patch, number)
        with pytest.raises(StoppedError):
            prepared(small, out)
    assert not out.exists()
    again = run(RechunkJob(request(small, out)))
    assert tree(out) == wanted
    assert again.resumed is (name != "between_metadata")
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr", "undisturbed.zarr"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Object at .lock is not recognized")  # zarr's, of a listing
def test_a_lock_file_that_a_kill_left_in_a_complete_store_disturbs_nobody(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody locks it there: processes that write lock the folders of partial names."""
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(target, "remove_lock", lambda out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(small, out)
    assert tree(out) == wanted | {".lock": b""}
    source = open_source(config(out, name="prepared"))
    assert len(source.times) == len(open_source(config(small)).times)
    with pytest.raises(UserError, match=r"exists already.*overwrite=true"):
        RechunkJob(request(small, out))
    assert tree(prepared(small, out, overwrite=True)) == wanted


def test_a_full_disk_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    of = RechunkJob(request(small, tmp_path / "out.zarr"))
    with monkeypatch.context() as patch:
        patch.setattr(target, "_write_static", full)
        with pytest.raises(UserError, match=r"cannot be written or read \(No space left"):
            run(of)
    assert prepared(small, tmp_path / "out.zarr").exists()


def test_written_chunks_are_not_written_again(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        before_a_shard_has_its_name(patch, 4)
        with pytest.raises(StoppedError):
            prepared(small, out)
    written = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(b.name), replace(a, b))[1])
    again = RechunkJob(request(small, out))
    counts: list[int] = []
    with again.locked():
        assert again.num_done == 3
        again.begin()
        again.write_missing(counts.append)
        again.finish()
    assert written == ["c.3.0.0.0", "c.4.0.0.0", "c.5.0.0.0", "c.6.0.0.0", "out.zarr"]
    assert sum(counts) == 7


@pytest.mark.slow
def test_stopped_while_replacing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = prepared(small, tmp_path / "out.zarr", codec="none")
    with monkeypatch.context() as patch:
        patch.setattr(target.shutil, "rmtree", after(2, shutil.rmtree, then=False))
        with pytest.raises(StoppedError):
            prepared(small, out, overwrite=True)
    assert tree(prepared(small, out, overwrite=True)) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr", "undisturbed.zarr"}


@pytest.mark.slow
def test_processes_write_what_one_process_does(small: Path, tmp_path: Path) -> None:
    wanted = tree(prepared(small, tmp_path / "one.zarr"))
    assert tree(prepared(small, tmp_path / "three.zarr", workers=WorkerConfig(3))) == wanted


@pytest.mark.slow
def test_processes_are_not_waited_for_after_ctrl_c(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(futures: object) -> None:
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    slow = WorkerConfig(2, start=partial(time.sleep, 3600.0))
    monkeypatch.setattr(copy_fields, "as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepared(small, tmp_path / "out.zarr", workers=slow)
    assert set(multiprocessing.active_children()) == before
    monkeypatch.undo()
    assert prepared(small, tmp_path / "out.zarr").exists()


@pytest.mark.slow
def test_a_killed_process_is_one_line(small: Path, tmp_path: Path) -> None:
    dying = WorkerConfig(2, start=partial(os._exit, 9))
    with pytest.raises(UserError, match=r"^workers: a process that wrote was killed"):
        prepared(small, tmp_path / "out.zarr", workers=dying)
    assert prepared(small, tmp_path / "out.zarr").exists()


@pytest.mark.slow
def test_a_distributed_scheduler_does_it(small: Path, tmp_path: Path) -> None:
    wanted = tree(prepared(small, tmp_path / "one.zarr"))
    script = (
        "from distributed import LocalCluster; import sys\n"
        "c = LocalCluster(n_workers=1, threads_per_worker=1, processes=False,"
        " dashboard_address=None, protocol='tcp', host='127.0.0.1')\n"
        "print(c.scheduler_address, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=-1, stdout=-1, stderr=-3, text=True
    ) as cluster:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        out = prepared(small, tmp_path / "far.zarr", workers=WorkerConfig(scheduler=address))
        cluster.kill()
    assert tree(out) == wanted


@pytest.mark.slow
def test_killed_at_random_moments_equals_undisturbed(tmp_path: Path) -> None:
    data = stores.dataset(rows=12, columns=8, steps=30)
    store = stores.write(data, tmp_path / "in.zarr")
    folder = tmp_path / "out"
    folder.mkdir()
    kills = KILLS // 2
    command = [sys.executable, "-m", "tests.data.rechunk.kill_prepare", str(store), str(folder)]
    done = subprocess.run(
        [*command, str(kills)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT
    )
    lines = done.stdout.splitlines()
    assert len(lines) == kills, done.stderr
    assert all(line.endswith("equal") for line in lines), done.stdout
    partial = [line for line in lines if re.search(r"\d+ \d+ files", line)]
    assert len(partial) > kills // 2, done.stdout


@pytest.mark.parametrize(
    ("number", "code", "to_workers"),
    tiers(
        [],
        [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, False)],
        [(signal.SIGHUP, 129, True), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)],
    ),
)
def test_a_signal_ends_the_command_and_its_workers_with_one_line_at_most(
    tmp_path: Path, number: signal.Signals, code: int, to_workers: bool
) -> None:
    """As a lost terminal, Ctrl-C and the end of a job send it: to all processes at once."""
    data = stores.dataset(rows=9, columns=4, steps=600)
    store = stores.write(data, tmp_path / "in.zarr", chunks={"time": 50})
    out = tmp_path / "out.zarr"
    keys = [f"store={store}", f"out={out}", "workers=2"]
    keys += ["data.prognostic=[geopotential]", "data.forcing=[]", "data.static=[]"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and inherited
    process = subprocess.Popen(
        [sys.executable, "-m", "credit_dp", "data", "prepare", *keys],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGHUP, before)
    fields = tmp_path / "out.zarr.partial" / "fields"
    while process.poll() is None and not any(fields.glob("c.*")):
        time.sleep(0.005)
    (os.killpg if to_workers else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, said
    assert said.strip() in ("", "interrupted")
    with pytest.raises(ProcessLookupError):  # no worker is left, nor a helper of multiprocessing
        until(lambda: os.killpg(process.pid, 0) is not None)
    assert not out.exists()
    # What has its final name is complete: the same command ends it.
    assert subprocess.run(process.args, cwd=ROOT, capture_output=True).returncode == 0
    written = zarr.open_array(out, path="fields", mode="r")
    assert np.array_equal(written[:], data["geopotential"].values)
