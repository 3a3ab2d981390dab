"""Stores that forecasts are scored with."""

from pathlib import Path

import pytest

from tests.evaluation import forecasts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a truth and a climatology."""
    path = tmp_path_factory.mktemp("stores")
    observed = forecasts.truth()
    forecasts.write(observed, path / "truth.zarr")
    forecasts.write(forecasts.climatology(observed), path / "climatology.zarr")
    return path
