import subprocess
import sys

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_dp.data.channels import Channel
from credit_dp.data.store import Store
from tests.data import stores
from tests.ranks import TIMEOUT
from tests.tables import each

RENAMED = {"latitude": "lat", "longitude": "lon", "level": "pressure_level"}


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    order=st.sampled_from(stores.ORDERS),
    rising=st.booleans(),
    renamed=st.booleans(),
    levels=st.sampled_from([None, [850], [1000, 500], [500, 1000], [850, 500, 1000]]),
    version=st.sampled_from([2, 3]),
    chunk=st.sampled_from([{"time": 3}, {"time": 5, "latitude": 5}, {"level": 1, "longitude": 3}]),
    cut=st.integers(1, 8),
)
def test_any_layout_reads_as_the_same_fields(
    tmp_path_factory, order, rising, renamed, levels, version, chunk, cut
):
    data = stores.dataset(rows=9, columns=4, steps=9)
    stored = data.sortby("latitude", ascending=rising).transpose(*order)
    if renamed:
        stored = stored.rename(RENAMED)
        chunk = {RENAMED.get(dim, dim): size for dim, size in chunk.items()}
    path = tmp_path_factory.mktemp("any") / "store.zarr"
    stores.write(stored, path, zarr_format=version, chunks=chunk)
    spans = {split: ["2000-01-01", "2000-01-03"] for split in ("train", "valid", "test")}
    config = stores.config(path, levels=levels, **spans)
    store = Store.open(config)
    time = stores.times(9)[7]
    whole = stores.expected(data, config, time)
    assert store.grid == (9, 4)
    assert store.latitude[0] == 90
    assert store.latitude[-1] == -90
    assert np.array_equal(store.longitude, data["longitude"].values)
    assert np.array_equal(store.read_states([time], slice(0, 9))[0], whole)
    bands = [store.read_states([time], rows)[0] for rows in (slice(0, cut), slice(cut, 9))]
    assert np.array_equal(np.concatenate(bands, axis=1), whole)
    statics = data.sortby("latitude", ascending=False)[config.static].to_array().values
    assert np.array_equal(store.read_static(slice(cut, 9)), statics[:, cut:])
    solar = data["solar"].sel(time=time).sortby("latitude", ascending=False).values
    assert np.array_equal(store.read_forcing(time[None], slice(0, cut))[0, 1], solar[:cut])


def test_times_are_read_in_the_requested_order(tmp_path):
    data = stores.dataset()
    config = stores.config(stores.write(data, tmp_path / "s.zarr"))
    store = Store.open(config)
    wanted = stores.times(12)[[5, 2, 2, 11]]
    fields = store.read_states(wanted, slice(3, 7))
    for time, field in zip(wanted, fields, strict=True):
        assert np.array_equal(field, stores.expected(data, config, time)[:, 3:7])


def test_channels_are_named_in_config_order(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "s.zarr")
    store = Store.open(stores.config(path, levels=[850, 500]))
    assert [channel.name for channel in store.channels.prognostic] == [
        "geopotential_850",
        "geopotential_500",
        "2m_temperature",
        "temperature_850",
        "temperature_500",
    ]
    assert (store.channels.fields().inputs, store.channels.num_outputs) == (9, 5)


@each("ranks, rising", [(3, False), (4, True)])
def test_a_band_costs_exactly_its_own_bytes(tmp_path, ranks, rising):
    data = stores.dataset(rows=24).sortby("latitude", ascending=rising)
    rows = 24 // ranks
    path = stores.write(data, tmp_path / "s.zarr", chunks={"time": 1, "latitude": rows})
    store = Store.open(stores.config(path))
    assert store.bytes_read == 0
    for rank in range(ranks):
        before, chunks = store.bytes_read, store.chunk_reads
        store.read_states([stores.START], slice(rank * rows, (rank + 1) * rows))
        assert store.bytes_read - before == 7 * rows * 8 * 4
        assert store.chunk_reads - chunks == 3


def test_of_a_shard_only_the_needed_inner_chunks_are_read(tmp_path):
    path = stores.write(
        stores.dataset(),
        tmp_path / "s.zarr",
        chunks={"time": 1, "latitude": 4},
        shards={"time": 2, "latitude": 12},
    )
    config = stores.config(path, prognostic=["geopotential"])
    store = Store.open(config)
    field = store.read_states([stores.START], slice(4, 8))[0]
    assert np.array_equal(field, stores.expected(stores.dataset(), config, stores.START)[:, 4:8])
    assert store.bytes_read == 3 * 4 * 8 * 4
    assert store.chunk_reads == 1


@pytest.mark.slow
@each("chunk, block_bytes", [(1, 1), (3, 1), (3, 1000), (12, 10**6)])
def test_blocks_cover_the_span_once_and_in_order(tmp_path, monkeypatch, chunk, block_bytes):
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
    data = stores.dataset()
    path = stores.write(data, tmp_path / "s.zarr", chunks={"time": chunk})
    store = Store.open(stores.config(path))
    channels = [Channel("geopotential", level) for level in stores.LEVELS]
    blocks = list(store.blocks(channels, slice(2, 11), slice(1, 5)))
    starts = [start for start, _ in blocks]
    ends = [start + len(block) for start, block in blocks]
    assert (starts[0], ends[-1]) == (2, 11)
    assert starts[1:] == ends[:-1]
    read = np.concatenate([block for _, block in blocks])
    assert np.array_equal(read, data["geopotential"].values[2:11, :, 1:5])


def test_a_store_changes_its_description_when_it_is_written_anew(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "s.zarr")
    first = Store.open(stores.config(path)).description(["geopotential"])
    assert Store.open(stores.config(path)).description(["geopotential"]) == first
    xr.Dataset(attrs={"written": "anew"}).to_zarr(path, mode="a", consolidated=False)
    assert Store.open(stores.config(path)).description(["geopotential"]) != first


@pytest.mark.slow
def test_a_busy_reading_thread_leaves_no_traceback_at_exit() -> None:
    """Without this, zarr waits 0.2 s for its thread, and then prints a traceback."""
    code = """
import asyncio
import time
import zarr.core.sync
import credit_dp.data.sources.storage

zarr.core.sync.sync(asyncio.sleep(0))
zarr.core.sync.loop[0].call_soon_threadsafe(time.sleep, 0.6)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stderr == ""
