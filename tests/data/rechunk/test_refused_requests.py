"""Requests that `prepare` refuses, and stores that it never overwrites."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from credit_dp.data.rechunk import copy_fields
from credit_dp.data.rechunk.copy_fields import RechunkJob, RechunkRequest, WorkerConfig
from credit_dp.data.rechunk.field_selection import FieldSelection
from credit_dp.errors import UserError
from tests.data.rechunk.requests import (
    StoppedError,
    before_the_end,
    config,
    prepared,
    request,
    tree,
    variable,
)
from tests.tables import each

# Refused


FAHRENHEIT = {"2m_temperature": variable(convert="degF->degC")}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such folder": ({"out": "/nowhere/at/all.zarr"}, r"there is no such folder.*out"),
    "an address": ({"out": "gs://bucket/out.zarr"}, r"out: needs the path"),
    "no ranks": ({"domains": (0, 2)}, r"from 1 to 9.* got 0. Change domains"),
    "more ranks than rows": ({"domains": (1, 10)}, r"got 10. Change domains"),
    "no domains": ({"domains": ()}, r"domains: needs at least one"),
    "another unit": ({"data": {"variables": FAHRENHEIT}}, r"2m_temperature.*degF"),
    "another codec": ({"codec": "zst"}, r"codec: needs one of none.*Did you mean zstd"),
    "no worker": ({"workers": WorkerConfig(0)}, r"workers: needs 1 or more"),
    "a grid of one row": ({"data": {"grid": "1x4"}}, r"grid: needs at least two rows"),
    "other dates": ({"dates": ("1990-01-01", "1991-01-01")}, r"holds 2000-01-01.*Change dates"),
    "no dates": ({"dates": ("x", "y")}, r"dates: needs \[first, last\]"),
}


@each("name", REFUSED)
def test_refused_in_one_line(small: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    out = Path(changes["out"]) if "out" in changes else tmp_path / "out.zarr"
    requested = request(small, out, **{key: x for key, x in changes.items() if key != "out"})
    if "out" in changes:
        requested = RechunkRequest(requested.selection, changes["out"])
    with pytest.raises(UserError, match=message) as refused:
        RechunkJob(requested)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_store_is_never_overwritten_without_the_key(small: Path, tmp_path: Path) -> None:
    out = prepared(small, tmp_path / "out.zarr")
    before = tree(out)
    with pytest.raises(UserError, match=r"exists already.*overwrite=true"):
        RechunkJob(request(small, out))
    assert tree(out) == before
    prepared(small, out, codec="none", overwrite=True)
    assert tree(out) != before


@each("overwrite", [False, True])
def test_what_is_no_prepared_store_is_never_removed(small: Path, overwrite: bool) -> None:
    for other in (small, small.parent):
        with pytest.raises(UserError, match=r"Change out\.$"):
            RechunkJob(request(small, other, overwrite=overwrite))
    assert small.exists()


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"codec": "zstd"}, "codec lz4, now it is zstd"),
    ({"domains": (1,)}, r"rows of a chunk.* 2, now it is 9"),
    ({"dates": ("2000-01-01", "2000-01-01")}, "dates"),
    ({"data": {"levels": [500]}}, "variables"),
    ({"data": {"grid": "8x4"}}, r"grid \[9, 4\], now it is \[8, 4\]"),
    ({"data": {"step": "12h"}}, "dates|step"),
]


def test_another_request_does_not_resume(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        before_the_end(patch, 1)
        with pytest.raises(StoppedError):
            prepared(small, out)
    for changes, key in OTHERS:
        with pytest.raises(UserError, match=key) as refused:
            prepared(small, out, **changes)
        assert "out.zarr.partial" in str(refused.value), changes
        assert "overwrite=true" in str(refused.value), changes
    assert prepared(small, out, **OTHERS[0][0], overwrite=True).exists()


def test_a_full_disk_is_refused_before_writing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(copy_fields.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(UserError, match=r"GB are needed, 0.0 GB are free. Change out"):
        prepared(small, tmp_path / "out.zarr")


def test_a_disk_that_fills_up_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device", "fields/c.0.0.0.0")

    of = RechunkJob(request(small, tmp_path / "out.zarr"))
    with of.locked():
        of.begin()
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left.*resumes where it stopped"):
            of.write_missing(lambda times: None)
    assert not list((tmp_path / "out.zarr.partial" / "fields").glob(".*"))


def test_two_at_once_are_refused(small: Path, tmp_path: Path) -> None:
    first, *others = (RechunkJob(request(small, tmp_path / "out.zarr")) for _ in range(3))
    with first.locked():
        for other in others:
            with pytest.raises(UserError, match="another process is preparing it"):
                with other.locked():
                    pass


def test_a_scheduler_needs_whole_paths(tmp_path: Path) -> None:
    far = WorkerConfig(scheduler="tcp://127.0.0.1:9")
    requested = RechunkRequest(
        FieldSelection(config(Path("in.zarr"))), str(tmp_path / "x.zarr"), workers=far
    )
    with pytest.raises(UserError, match=r"need an absolute path, got in\.zarr"):
        RechunkJob(requested)


@pytest.mark.slow
def test_a_missing_scheduler_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("credit_dp.data.streaming.CONNECT_SECONDS", 1)
    with pytest.raises(UserError, match=r"no dask scheduler answers at tcp://127.0.0.1:9"):
        prepared(small, tmp_path / "x.zarr", workers=WorkerConfig(scheduler="tcp://127.0.0.1:9"))
