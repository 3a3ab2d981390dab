"""Requests that `prepare` refuses, and stores that it never overwrites."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from credit_dp.config.data import VariableConfig
from credit_dp.data.rechunk import copy_fields
from credit_dp.data.rechunk.copy_fields import PrepareJob
from credit_dp.errors import UserError
from tests.data.rechunk.requests import StoppedError, before_the_end, prepared, request
from tests.tables import each

FAHRENHEIT = {"2m_temperature": VariableConfig(convert="degF->degC")}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such folder": ({"out": "/nowhere/at/all.zarr"}, r"there is no such folder.*out"),
    "an address": ({"out": "gs://bucket/out.zarr"}, r"out: needs the path"),
    "no ranks": ({"domains": (0, 2)}, r"from 1 to 9.* got \[0, 2\]. Change domains"),
    "more ranks than rows": ({"domains": (1, 10)}, r"got \[1, 10\]. Change domains"),
    "no domains": ({"domains": ()}, r"domains: needs numbers of ranks.* got \[\]"),
    "another unit": ({"data": {"variables": FAHRENHEIT}}, r"2m_temperature.*degF"),
    "another codec": ({"codec": "zst"}, r"codec: needs one of none.*Did you mean zstd"),
    "no worker": ({"workers": 0}, r"workers: needs 1 or more"),
    "a grid of one row": ({"data": {"grid": "1x4"}}, r"grid: needs at least two rows"),
    "other dates": ({"dates": ("1990-01-01", "1991-01-01")}, r"holds 2000-01-01.*Change dates"),
    "no dates": ({"dates": ("x", "y")}, r"dates: needs \[first, last\]"),
    "a relative path for others": (
        {"store": Path("in.zarr"), "scheduler": "tcp://127.0.0.1:9"},
        r"need an absolute path, got in\.zarr",
    ),
}


@each("name", REFUSED)
def test_refused_in_one_line(small: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    requested = request(**({"store": small, "out": tmp_path / "out.zarr"} | changes))
    with pytest.raises(UserError, match=message) as refused:
        PrepareJob(requested)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@each("overwrite", [False, True])
def test_what_is_no_prepared_store_is_never_removed(small: Path, overwrite: bool) -> None:
    for other in (small, small.parent):
        with pytest.raises(UserError, match=r"Change out\.$"):
            PrepareJob(request(small, other, overwrite=overwrite))
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
        before_the_end(patch)
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


def test_two_at_once_are_refused(small: Path, tmp_path: Path) -> None:
    first, *others = (PrepareJob(request(small, tmp_path / "out.zarr")) for _ in range(3))
    with first.locked():
        for other in others:
            with pytest.raises(UserError, match="another process is preparing it"):
                with other.locked():
                    pass


@pytest.mark.slow
def test_a_missing_scheduler_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("credit_dp.data.streaming.CONNECT_SECONDS", 1)
    with pytest.raises(UserError, match=r"no dask scheduler answers at tcp://127.0.0.1:9"):
        prepared(small, tmp_path / "x.zarr", scheduler="tcp://127.0.0.1:9")
