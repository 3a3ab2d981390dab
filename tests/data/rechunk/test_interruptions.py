"""`prepare` is stopped, killed or out of disk at any point, and resumes."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import zarr

from credit_dp import files
from credit_dp.data.rechunk import copy_fields
from credit_dp.data.rechunk.copy_fields import PrepareJob
from credit_dp.data.sources.opening import open_source
from credit_dp.errors import UserError
from tests.data import stores
from tests.data.rechunk.requests import (
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
from tests.tables import each
from tests.tier_cases import tiers


def leave_temporaries(patch: pytest.MonkeyPatch) -> None:
    """A killed process removes nothing; an error would."""
    patch.setattr(files, "remove_if_possible", lambda path: None)


def before_the_fourth_shard_has_its_name(patch: pytest.MonkeyPatch) -> None:
    replacing = after(4, os.replace, then=False)

    def replace(old: Path, new: Path) -> None:
        (replacing if Path(new).match("fields/c.*") else original)(old, new)

    original = os.replace
    patch.setattr(os, "replace", replace)
    leave_temporaries(patch)


def in_the_middle_of_a_shard(patch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        os.ftruncate(file, 10)
        raise StoppedError

    patch.setattr(os, "fsync", fsync)
    leave_temporaries(patch)


def between_metadata(patch: pytest.MonkeyPatch) -> None:
    create = zarr.Group.create_array
    patch.setattr(zarr.Group, "create_array", after(1, create, then=True))


@pytest.mark.parametrize(
    ("stop", "is_begun"),
    [
        (between_metadata, False),
        (in_the_middle_of_a_shard, True),
        (before_the_fourth_shard_has_its_name, True),
        (before_the_end, True),
    ],
)
def test_stopped_and_started_again_equals_undisturbed(
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[pytest.MonkeyPatch], None],
    is_begun: bool,
) -> None:
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        stop(patch)
        with pytest.raises(StoppedError):
            prepared(small, out)
    assert not out.exists()
    again = PrepareJob(request(small, out))
    with again.locked():
        assert again.begun is is_begun
    run(again)
    assert tree(out) == wanted
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
        patch.setattr(copy_fields, "remove_lock", lambda out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(small, out)
    assert tree(out) == wanted | {".lock": b""}
    source = open_source(config(out, name="prepared"))
    assert len(source.times) == len(open_source(config(small)).times)
    with pytest.raises(UserError, match=r"exists already.*overwrite=true"):
        PrepareJob(request(small, out))
    assert tree(prepared(small, out, overwrite=True)) == wanted


def raise_full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@each("module, function", [(copy_fields, "create_store"), (os, "fsync")])
def test_a_full_disk_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
) -> None:
    """At the beginning, and when a shard is written."""
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(module, function, raise_full_disk)
        with pytest.raises(UserError, match=r"\(No space left.* it resumes") as caught:
            prepared(small, out)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("fields/.*"))
    assert prepared(small, out).exists()


def test_written_chunks_are_not_written_again(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        before_the_fourth_shard_has_its_name(patch)
        with pytest.raises(StoppedError):
            prepared(small, out)
    written = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(b.name), replace(a, b))[1])
    again = PrepareJob(request(small, out))
    counts: list[int] = []
    with again.locked():
        assert again.missing() == [3, 4, 5, 6]
        again.write(counts.append)
        again.finish()
    assert written == ["c.3.0.0.0", "c.4.0.0.0", "c.5.0.0.0", "c.6.0.0.0", "out.zarr"]
    assert counts[-1] == 7


@pytest.mark.slow
def test_stopped_while_replacing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = prepared(small, tmp_path / "out.zarr", codec="none")
    with monkeypatch.context() as patch:
        patch.setattr(copy_fields.shutil, "rmtree", after(2, shutil.rmtree, then=False))
        with pytest.raises(StoppedError):
            prepared(small, out, overwrite=True)
    assert tree(prepared(small, out, overwrite=True)) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr", "undisturbed.zarr"}


@pytest.mark.slow
def test_processes_write_what_one_process_does(small: Path, tmp_path: Path) -> None:
    wanted = tree(prepared(small, tmp_path / "one.zarr"))
    assert tree(prepared(small, tmp_path / "three.zarr", workers=3)) == wanted


@pytest.mark.slow
def test_processes_are_not_waited_for_after_ctrl_c(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(futures: object) -> None:
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    monkeypatch.setattr(copy_fields, "as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(PrepareJob(request(small, tmp_path / "out.zarr", workers=2)), partial(time.sleep, 3600))
    assert set(multiprocessing.active_children()) == before
    monkeypatch.undo()
    assert prepared(small, tmp_path / "out.zarr").exists()


@pytest.mark.slow
def test_a_killed_process_is_one_line(small: Path, tmp_path: Path) -> None:
    job = PrepareJob(request(small, tmp_path / "out.zarr", workers=2))
    with pytest.raises(UserError, match=r"^workers: a process that wrote was killed"):
        run(job, partial(os._exit, 9))
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
        out = prepared(small, tmp_path / "far.zarr", scheduler=address)
        cluster.kill()
    assert tree(out) == wanted


@pytest.mark.parametrize(
    ("number", "code", "to_workers"),
    tiers(
        [],
        [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, False), (signal.SIGKILL, -9, False)],
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
