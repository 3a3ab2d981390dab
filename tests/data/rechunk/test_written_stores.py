"""Stores that `prepare` writes: chunk rows, channels, dates, units, codecs; and their check."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit_dp.bands import balanced_bounds, row_amplification, rows_touched
from credit_dp.config.data import VariableConfig
from credit_dp.data.channels import Channel
from credit_dp.data.grid import Grid
from credit_dp.data.rechunk import copy_fields
from credit_dp.data.rechunk.copy_fields import PrepareJob, choose_chunk_rows, max_read_excess
from credit_dp.data.rechunk.selected_fields import SelectedFields
from credit_dp.data.regrid import CellLayout, Regridder, regular_grid
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import PreparedSource
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from tests.data import layouts, stores
from tests.data.rechunk.requests import bits, config, prepared, request, tree
from tests.tables import each
from tests.tier_cases import tiers

# Chunks that fit bands


@each("height, ranks", [(721, 8), (181, 4), (7, 7), (32, 1)])
def test_bands_are_those_of_the_ranks(height: int, ranks: int) -> None:
    assert balanced_bounds(height, ranks) == RowPartition.balanced(height, ranks).bounds


def test_rows_touched_by_counting() -> None:
    for height, ranks, chunk in [(721, 8, 3), (12, 5, 4), (32, 4, 8), (10, 3, 10)]:
        bands = RowPartition.balanced(height, ranks)
        for south in (False, True):
            counted = []
            for rank in range(ranks):
                rows = [height - 1 - r if south else r for r in range(height)][bands.rows(rank)]
                counted.append(chunk * len({row // chunk for row in rows}))
            found = rows_touched(height, ranks, chunk, south)
            assert (found[::-1] if south else found) == counted


@pytest.mark.slow
def test_amplification_of_whole_globes_is_the_number_of_ranks() -> None:
    assert row_amplification(32, 4, 32) == 4
    assert row_amplification(32, 4, 8) == 1


@pytest.mark.slow
def test_a_rank_of_a_quarter_degree_reads_few_other_rows() -> None:
    rows = choose_chunk_rows(721, (1, 2, 4, 8))
    assert rows > 1
    assert max_read_excess(721, (1, 2, 4, 8), rows) <= 1.05
    assert all(max_read_excess(721, (1, 2, 4, 8), more) > 1.05 for more in range(rows + 1, 722))


@each(
    "height, domains, rows",
    [(32, (1, 2, 4, 8), 4), (32, (1,), 32), (721, (1,), 721), (9, (9,), 1), (35, (1, 7), 5)],
)
def test_as_few_chunks_as_bands_allow(height: int, domains: tuple[int, ...], rows: int) -> None:
    assert choose_chunk_rows(height, domains) == rows


@pytest.mark.slow
def test_chunks_are_not_countless() -> None:
    assert -(-3601 // choose_chunk_rows(3601, (1, 2, 4, 8))) <= 1024


# What is written


@each("codec", ["lz4", "none"])
def test_layout_of_the_prepared_form(small: Path, tmp_path: Path, codec: str) -> None:
    out = prepared(small, tmp_path / "out.zarr", codec=codec, domains=(1, 3))
    group = zarr.open_group(out, mode="r")
    fields = group["fields"]
    assert isinstance(fields, zarr.Array)
    assert fields.metadata.zarr_format == 3
    assert fields.shape == (7, 8, 9, 4)
    assert fields.chunks == (1, 8, 3, 4)
    assert fields.shards == (1, 8, 9, 4)
    assert fields.metadata.dimension_names == ("time", "channel", "latitude", "longitude")
    text = (out / "fields" / "zarr.json").read_text()
    assert text.count("crc32c") == 2  # of chunks, and of the index
    names = {path.name for path in (out / "fields").iterdir()}
    assert names == {"zarr.json", *(f"c.{time}.0.0.0" for time in range(7))}
    opened = xr.open_zarr(out, consolidated=False)
    assert opened["time"].values.tolist() == stores.times(7).tolist()


@pytest.mark.slow
def test_rows_are_padded_to_whole_chunks(small: Path, tmp_path: Path) -> None:
    out = prepared(small, tmp_path / "out.zarr", domains=(2,))
    fields = zarr.open_group(out, mode="r")["fields"]
    assert isinstance(fields, zarr.Array)
    assert fields.chunks == (1, 8, 5, 4)
    assert fields.shards == (1, 8, 10, 4)


def test_channels_are_in_order_and_forcings_that_are_computed_are_left_out(
    small: Path, tmp_path: Path
) -> None:
    out = prepared(small, tmp_path / "out.zarr", data={"levels": [850, 500]})
    source = PreparedSource.open(str(out))
    assert list(source.variables) == [
        *("geopotential", "2m_temperature", "temperature", "solar"),
        *("geopotential_at_surface", "land_sea_mask"),
    ]
    assert source.variables["temperature"].levels == (850, 500)


FAST, SLOW = ["weatherbench2 64x32"], ["climate data store", "packed zarr"]
OTHERS = [name for name in layouts.LAYOUTS if name not in (*FAST, *SLOW)]


@pytest.mark.parametrize("name", tiers(zip(FAST), zip(SLOW), zip(OTHERS)))
def test_each_layout_comes_out_bit_by_bit(name: str, tmp_path: Path) -> None:
    layout = layouts.LAYOUTS[name]
    data = layout.canonical()
    store = layout.write(data, tmp_path / f"in{layout.suffix}")
    levels = list(layout.levels[:2])
    canonical = ("geopotential", "sea_surface_temperature", "2m_temperature")
    names = {layout.renamed.get(name, name): name for name in canonical}
    variables = {
        "prognostic": list(names),
        "diagnostic": [],
        "forcing": [],
        "static": [layout.renamed.get("geopotential_at_surface", "geopotential_at_surface")],
        "levels": levels,
        "limits": dict.fromkeys(names),  # noise is not as in nature
    }
    before = open_source(config(store, **variables))
    out = prepared(store, tmp_path / "out.zarr", data=variables)
    after = PreparedSource.open(str(out))
    assert np.array_equal(before.times, after.times)
    assert np.array_equal(before.latitude, after.latitude)
    assert np.array_equal(before.longitude, after.longitude)
    channels = [
        Channel(name, level) for name in names for level in after.variables[name].levels or (None,)
    ]
    height = len(after.latitude)
    for rows in (slice(0, height), slice(height // 3, height // 2 + 1), slice(height - 1, height)):
        for channel in channels:
            one = before.read([channel], slice(0, 3), rows)
            other = after.read([channel], slice(0, 3), rows)
            assert np.array_equal(bits(one), bits(other))
            if not layout.packed:
                given = data[names[channel.variable]]
                given = given if channel.level is None else given.sel(level=channel.level)
                wanted = given.transpose("time", "latitude", "longitude").values[:, rows]
                assert np.array_equal(bits(wanted), bits(other[:, 0]))


def test_missing_values_stay_missing(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=5)
    data["temperature"][:, :, 1:] = np.nan
    data["solar"][2, 3:5] = np.nan
    data["land_sea_mask"][0] = np.nan
    store = stores.write(data, tmp_path / "in.zarr")
    source = PreparedSource.open(str(prepared(store, tmp_path / "out.zarr")))
    temperature = source.read([channel_of(source, "temperature")], slice(0, 5), slice(0, 9))
    assert np.array_equal(bits(temperature[:, 0]), bits(data["temperature"].values[:, 0]))
    solar = source.read([channel_of(source, "solar")], slice(0, 5), slice(0, 9))[:, 0]
    assert np.array_equal(bits(solar), bits(data["solar"].values))
    mask = source.read([channel_of(source, "land_sea_mask")], slice(0, 1), slice(0, 9))[0, 0]
    assert np.array_equal(bits(mask), bits(data["land_sea_mask"].values))


def channel_of(source: PreparedSource, name: str) -> Channel:
    levels = source.variables[name].levels
    return Channel(name, levels[0] if levels else None)


@pytest.mark.slow
def test_a_time_without_any_value_is_a_shard_too(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=4)[["2m_temperature"]]
    data["2m_temperature"][-1] = np.nan
    store = tmp_path / "in.nc"  # zarr would leave the chunk out
    data.to_netcdf(store)
    none: dict[str, list[str]] = {"diagnostic": [], "forcing": [], "static": []}
    only = {"prognostic": ["2m_temperature"], "levels": None, **none}
    out = prepared(store, tmp_path / "out.zarr", data=only)
    shards = sorted(path.name for path in (out / "fields").glob("c.*"))
    assert shards == [f"c.{time}.0.0.0" for time in range(4)]


def test_dates_step_and_units_are_those_of_the_request(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=12)
    data["2m_temperature"] -= 273.15
    data["2m_temperature"].attrs["units"] = "degC"
    store = stores.write(data, tmp_path / "in.zarr")
    changes = {
        "step": "12h",
        "variables": {"2m_temperature": VariableConfig(convert="degC->K")},
    }
    out = prepared(
        store, tmp_path / "out.zarr", data=changes, dates=("2000-01-01T06", "2000-01-02")
    )
    source = PreparedSource.open(str(out))
    assert source.times.astype("M8[h]").astype(str).tolist() == [
        "2000-01-01T12",
        "2000-01-02T00",
        "2000-01-02T12",
    ]
    assert source.variables["2m_temperature"].units == "K"
    found = source.read([channel_of(source, "2m_temperature")], slice(0, 3), slice(0, 9))
    np.testing.assert_allclose(
        found[:, 0], data["2m_temperature"].values[2:7:2] + 273.15, rtol=1e-6
    )


@pytest.mark.slow
def test_times_keep_their_minutes(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=4)
    data = data.assign_coords(time=data["time"] + np.timedelta64(30, "m"))
    out = prepared(stores.write(data, tmp_path / "in.zarr"), tmp_path / "out.zarr")
    assert np.array_equal(PreparedSource.open(str(out)).times, data["time"].values)
    with xr.open_zarr(out, consolidated=False) as found:
        assert np.array_equal(found["time"].values, data["time"].values)


def test_sums_over_the_step_are_stored(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=24)
    data = data.assign_coords(time=stores.START + np.arange(24) * np.timedelta64(1, "h"))
    store = stores.write(data, tmp_path / "in.zarr")
    sums = {"solar": VariableConfig(accumulated=True)}
    out = prepared(store, tmp_path / "out.zarr", data={"variables": sums})
    source = PreparedSource.open(str(out))
    found = source.read([channel_of(source, "solar")], slice(0, 1), slice(0, 9))[0, 0]
    assert str(source.times[0].astype("M8[h]")) == "2000-01-01T06"
    np.testing.assert_allclose(found, data["solar"].values[1:7].sum(axis=0), rtol=1e-5)


def test_regridded_on_the_way(small: Path, tmp_path: Path) -> None:
    grid = "5x12"
    out = prepared(small, tmp_path / "out.zarr", data={"grid": grid}, domains=(1, 2))
    source = PreparedSource.open(str(out))
    rows, columns = map(int, grid.split("x"))
    target = regular_grid(rows, columns)
    assert np.array_equal(source.latitude, target.latitude)
    assert np.array_equal(source.longitude, target.longitude)
    data = stores.dataset(rows=9, columns=4, steps=7)
    grid = Grid(data["latitude"].values, data["longitude"].values)
    using = Regridder(CellLayout.of(grid), target)
    found = source.read([channel_of(source, "solar")], slice(0, 7), slice(1, 3))[:, 0]
    assert np.array_equal(found, using(data["solar"].values.reshape(7, -1))[:, 1:3])
    static = source.read([channel_of(source, "land_sea_mask")], slice(0, 1), slice(0, rows))
    assert np.array_equal(static[0, 0], using(data["land_sea_mask"].values.ravel()))


def test_a_store_of_any_chunks_is_cut_at_their_ends(tmp_path: Path) -> None:
    store = stores.write(stores.dataset(9, 4, 20), tmp_path / "in.zarr", chunks={"time": 6})
    fields = SelectedFields(config(store), ("2000-01-02", "2000-01-05"))
    assert fields.blocks(100) == [(0, 16)]
    assert fields.blocks(7) == [(0, 2), (2, 8), (8, 14), (14, 16)]
    assert fields.blocks(4) == [(0, 2), (2, 6), (6, 8), (8, 12), (12, 16)]
    assert fields.blocks(1) == [(n, n + 1) for n in range(16)]


def test_tasks_of_several_blocks_write_the_same(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tree(prepared(small, tmp_path / "one.zarr"))
    monkeypatch.setattr(copy_fields, "BLOCK_BYTES", 1)
    monkeypatch.setattr(copy_fields, "MAX_TASKS", 2)
    assert tree(prepared(small, tmp_path / "two.zarr")) == wanted


# Verified


def damage(fields: Path) -> None:
    shard = fields / "c.0.0.0.0"
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)


def swap(fields: Path) -> None:
    (fields / "c.0.0.0.0").rename(fields / "x")
    (fields / "c.1.0.0.0").rename(fields / "c.0.0.0.0")
    (fields / "x").rename(fields / "c.1.0.0.0")


def lose(fields: Path) -> None:
    (fields / "c.3.0.0.0").unlink()


@each(
    "fault, message",
    [(damage, "cannot be read"), (swap, "differ from what the store"), (lose, "is missing")],
)
def test_verification_detects_faults(
    small: Path, tmp_path: Path, fault: Callable[[Path], None], message: str
) -> None:
    job = PrepareJob(request(small, tmp_path / "out.zarr", codec="none", domains=(1,)))
    with job.locked():
        job.write(lambda times: None)
        fault(tmp_path / "out.zarr.partial" / "fields")
        with pytest.raises(UserError, match=message) as refused:
            job.verify()
    assert "\n" not in str(refused.value)
