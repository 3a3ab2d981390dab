"""Fixtures of the tests of `prepare`."""

from pathlib import Path

import pytest

from credit_dp.data.rechunk import target
from tests.data import stores


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return stores.write(stores.dataset(rows=9, columns=4, steps=7), tmp_path / "in.zarr")


@pytest.fixture(autouse=True)
def _small_disk_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "DISK_BYTES", 2**16)
    monkeypatch.setattr(target, "REPEATS", 1)
