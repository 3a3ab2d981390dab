"""Zarr stores that were extended or changed without consolidating their metadata again."""

import functools
import logging
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr

from credit_dp.data.channels import Channel
from credit_dp.data.sources.opening import open_source
from credit_dp.errors import UserError
from tests.data import anemoi_stores, stores
from tests.data.layouts import consolidate
from tests.tables import each

STEPS = 24
HALF = STEPS // 2
KEPT = ("zarr.json", ".zmetadata")  # where zarr has consolidated metadata


def write_outdated(data: xr.Dataset, path: Path, version: int) -> Path:
    """Write a store whose consolidated metadata are those of its first half."""
    half = path.with_name("half.zarr")
    data["time"].encoding["chunks"] = (HALF,)
    stores.write(data.isel(time=slice(0, HALF)), half, zarr_format=version)
    stores.write(data, path, zarr_format=version)
    return keep_metadata(half, path)


def keep_metadata(half: Path, path: Path) -> Path:
    """Give a store the consolidated metadata of another one."""
    consolidate(half)
    for name in KEPT:
        if (half / name).exists():
            shutil.copy(half / name, path / name)
    return path


def check_all_times(where: str, data: xr.Dataset, cache: Path) -> None:
    source = open_source(stores.config(where, cache=str(cache)))
    np.testing.assert_array_equal(source.times, data["time"].values)
    fields = source.read([Channel("2m_temperature")], slice(0, STEPS), slice(None))[:, 0]
    np.testing.assert_array_equal(fields, data["2m_temperature"].values)


@each("version", [2, 3])
def test_all_times_of_an_extended_store_are_read(version, tmp_path, caplog):
    data = stores.dataset(steps=STEPS)
    path = write_outdated(data, tmp_path / "store.zarr", version)
    assert len(xr.open_zarr(path, consolidated=True)["time"]) == HALF
    with caplog.at_level(logging.WARNING):
        check_all_times(str(path), data, tmp_path)
    assert len(caplog.messages) == 1
    assert "time has the shape (24,), not (12,)" in caplog.text
    assert f"zarr.consolidate_metadata('{path}')" in caplog.text


def test_all_times_of_an_extended_anemoi_dataset_are_read(tmp_path, caplog):
    data = stores.dataset(steps=STEPS)
    half = anemoi_stores.write(data.isel(time=slice(0, HALF)), tmp_path / "half.zarr")
    path = keep_metadata(half, anemoi_stores.write(data, tmp_path / "store.zarr"))
    check_all_times(str(path), data, tmp_path)
    assert "consolidated metadata are out of date" in caplog.text


@each("version", [2, 3])
def test_changed_attributes_are_read(version, tmp_path, caplog):
    data = stores.dataset()
    data["2m_temperature"].attrs["units"] = "degC"
    path = stores.write(data, tmp_path / "store.zarr", zarr_format=version)
    consolidate(path)
    file = path / "2m_temperature" / (".zattrs" if version == 2 else "zarr.json")
    file.write_text(file.read_text().replace("degC", "K"))
    source = open_source(stores.config(path))
    assert source.variables["2m_temperature"].units == "K"
    assert "2m_temperature has other attributes" in caplog.text


@each("version", [2, 3])
def test_no_warning_if_the_metadata_are_up_to_date(version, tmp_path, caplog):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr", zarr_format=version)
    consolidate(path)
    open_source(stores.config(path))
    assert caplog.messages == []


def test_all_times_of_an_extended_remote_store_are_read(tmp_path, caplog):
    data = stores.dataset(steps=STEPS)
    path = write_outdated(data, tmp_path / "store.zarr", 2)
    fsspec.filesystem("memory").put(str(path), "/extended.zarr", recursive=True)
    check_all_times("memory://extended.zarr", data, tmp_path)
    assert "time has the shape (24,), not (12,)" in caplog.text


class WithoutListing(SimpleHTTPRequestHandler):
    """Serves files as a web server does that lists no folders."""

    def list_directory(self, path: object) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(WithoutListing, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_an_extended_store_that_can_not_be_listed_is_refused(address, tmp_path):
    path = write_outdated(stores.dataset(steps=STEPS), tmp_path / "store.zarr", 2)
    where = f"{address}/{path.name}"
    with pytest.raises(UserError) as refusal:
        open_source(stores.config(where, cache=str(tmp_path)))
    recipe = f"Update them by zarr.consolidate_metadata({where!r})."
    assert str(refusal.value).endswith(recipe)
    assert "time has the shape (24,), not (12,)" in str(refusal.value)
    consolidate(path)
    assert len(open_source(stores.config(where, cache=str(tmp_path))).times) == STEPS
