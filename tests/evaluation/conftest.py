"""Stores that forecasts are scored with, and counts of what is read of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from zarr.storage import LocalStore

from credit_dp.data.sources.storage import CountingStore
from tests.evaluation import forecasts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a truth and a climatology."""
    path = tmp_path_factory.mktemp("stores")
    observed = forecasts.truth()
    forecasts.write(observed, path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), path / "climatology.zarr")
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each chunk of a field is read, by its path."""
    found: Counter[str] = Counter()
    get = CountingStore.get

    async def counted(self: CountingStore, key: str, *args: Any, **kwargs: Any) -> Any:
        store = self._store
        if "/c/" in key and not key.startswith(("time", "prediction", "lat", "lon", "level")):
            assert isinstance(store, LocalStore)
            found[f"{store.root.name}/{key}"] += 1
        return await get(self, key, *args, **kwargs)

    monkeypatch.setattr(CountingStore, "get", counted)
    return found
