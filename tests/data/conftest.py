"""Fixtures of the tests of `prepare`."""

from pathlib import Path

import pytest

from tests.data import stores


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return stores.write(stores.dataset(rows=9, columns=4, steps=7), tmp_path / "in.zarr")
