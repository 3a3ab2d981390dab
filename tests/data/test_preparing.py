import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from credit_dp.config import DataConfig
from credit_dp.data.bands import balanced_bounds, row_amplification, rows_touched
from credit_dp.data.preparing import codecs, files, preparation, target, work
from credit_dp.data.preparing.asked import Question
from credit_dp.data.preparing.chunks import chunk_rows, worst_excess
from credit_dp.data.preparing.preparation import Preparation, Request
from credit_dp.data.preparing.regrid import Regridder, regular_grid
from credit_dp.data.preparing.work import Workers, batches
from credit_dp.data.schema import Channel
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import PreparedSource
from credit_dp.data_config import VariableConfig
from credit_dp.domain_parallel.partition import RowPartition
from credit_dp.errors import UserError
from tests.data import layouts, stores

ROOT = Path(__file__).parents[2]
ALL = ["1800-01-01", "2200-01-01"]
KILLS = 20
EVERYTHING = {
    "prognostic": ["geopotential", "2m_temperature"],
    "diagnostic": ["temperature"],
    "forcing": ["day_of_year_sin", "solar"],
    "static": ["geopotential_at_surface", "land_sea_mask"],
}


class StoppedError(RuntimeError):
    """What a test raises where a process could have been killed."""


def config(store: Path, **changes: Any) -> DataConfig:
    splits = {"train": ALL, "valid": ALL, "test": ALL}
    return stores.config(store, **(EVERYTHING | splits | changes))


def request(store: Path, out: Path, **changes: Any) -> Request:
    asked = {key: changes.pop(key) for key in ("dates", "grid") if key in changes}
    data = changes.pop("data", {})
    return Request(
        Question(config(store, **data), **asked), str(out), **({"codec": "lz4"} | changes)
    )


def run(of: Preparation) -> Preparation:
    with of.alone():
        of.begin(of.estimate().codec)
        of.work(lambda times: None)
        of.verify()
        of.finish()
    return of


def prepared(store: Path, out: Path, **changes: Any) -> Path:
    run(Preparation(request(store, out, **changes)))
    return out


def tree(folder: Path) -> dict[str, bytes]:
    """All files by their path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def bits(fields: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(fields, dtype="f4").view("u4")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return stores.write(stores.dataset(rows=9, columns=4, steps=7), tmp_path / "in.zarr")


@pytest.fixture(autouse=True)
def _small_disk_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "DISK_BYTES", 2**16)
    monkeypatch.setattr(codecs, "REPEATS", 1)


# Chunks that fit bands


@pytest.mark.parametrize(("height", "ranks"), [(721, 8), (181, 4), (7, 7), (32, 1)])
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


def test_amplification_of_whole_globes_is_the_number_of_ranks() -> None:
    assert row_amplification(32, 4, 32) == 4
    assert row_amplification(32, 4, 8) == 1


def test_a_rank_of_a_quarter_degree_reads_little_but_its_own() -> None:
    rows = chunk_rows(721, (1, 2, 4, 8))
    assert rows > 1
    assert worst_excess(721, (1, 2, 4, 8), rows) <= 1.05
    assert all(worst_excess(721, (1, 2, 4, 8), more) > 1.05 for more in range(rows + 1, 722))


@pytest.mark.parametrize(
    ("height", "domains", "rows"),
    [(32, (1, 2, 4, 8), 4), (32, (1,), 32), (721, (1,), 721), (9, (9,), 1), (35, (1, 7), 5)],
)
def test_as_few_chunks_as_bands_allow(height: int, domains: tuple[int, ...], rows: int) -> None:
    assert chunk_rows(height, domains) == rows


def test_chunks_are_not_countless() -> None:
    assert -(-3601 // chunk_rows(3601, (1, 2, 4, 8))) <= 1024


# What is written


@pytest.mark.parametrize("codec", codecs.CODECS)
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


FAST_LAYOUTS = ("weatherbench2 64x32", "climate data store", "grib")


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST_LAYOUTS else pytest.param(name, marks=pytest.mark.slow)
        for name in layouts.LAYOUTS
    ],
)
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


def test_dates_step_and_units_are_as_asked(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=12)
    data["2m_temperature"].attrs["units"] = "degC"
    store = stores.write(data, tmp_path / "in.zarr")
    changes = {
        "step": "12h",
        "variables": {"2m_temperature": variable(convert="degC->K")},
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


def variable(**settings: Any) -> VariableConfig:
    return VariableConfig(**settings)


def test_sums_over_the_step_are_stored(tmp_path: Path) -> None:
    data = stores.dataset(rows=9, columns=4, steps=24)
    data = data.assign_coords(time=stores.START + np.arange(24) * np.timedelta64(1, "h"))
    store = stores.write(data, tmp_path / "in.zarr")
    out = prepared(
        store, tmp_path / "out.zarr", data={"variables": {"solar": variable(accumulated=True)}}
    )
    source = PreparedSource.open(str(out))
    found = source.read([channel_of(source, "solar")], slice(0, 1), slice(0, 9))[0, 0]
    assert str(source.times[0].astype("M8[h]")) == "2000-01-01T06"
    np.testing.assert_allclose(found, data["solar"].values[1:7].sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("grid", ["8x6", "5x12"])
def test_regridded_on_the_way(small: Path, tmp_path: Path, grid: str) -> None:
    out = prepared(small, tmp_path / "out.zarr", grid=grid, domains=(1, 2))
    source = PreparedSource.open(str(out))
    rows, columns = map(int, grid.split("x"))
    latitude, longitude = regular_grid(rows, columns)
    assert np.array_equal(source.latitude, latitude)
    assert np.array_equal(source.longitude, longitude)
    data = stores.dataset(rows=9, columns=4, steps=7)
    using = Regridder(data["latitude"].values, data["longitude"].values, latitude, longitude)
    found = source.read([channel_of(source, "solar")], slice(0, 7), slice(1, 3))[:, 0]
    assert np.array_equal(found, using(data["solar"].values)[:, 1:3])
    static = source.read([channel_of(source, "land_sea_mask")], slice(0, 1), slice(0, rows))
    assert np.array_equal(static[0, 0], using(data["land_sea_mask"].values))


def test_a_store_of_any_chunks_is_cut_at_their_ends(tmp_path: Path) -> None:
    store = stores.write(stores.dataset(9, 4, 20), tmp_path / "in.zarr", chunks={"time": 6})
    asked = preparation.Asked.open(Question(config(store), ("2000-01-02", "2000-01-05")))
    assert asked.blocks(100) == [(0, 16)]
    assert asked.blocks(7) == [(0, 2), (2, 8), (8, 14), (14, 16)]
    assert asked.blocks(4) == [(0, 2), (2, 6), (6, 8), (8, 12), (12, 16)]
    assert asked.blocks(1) == [(n, n + 1) for n in range(16)]


def test_batches_hold_all_blocks_once() -> None:
    blocks = [(n, n + 1) for n in range(5003)]
    for workers in (1, 3, 2000):
        parts = batches(blocks, workers)
        assert [block for part in parts for block in part] == blocks
        assert len(parts) <= 1000 or workers == 2000


# Codecs


def test_all_codecs_are_measured_and_the_fastest_taken() -> None:
    measured = codecs.measure(
        np.random.default_rng(0).normal(size=(3, 9, 8)).astype("f4"), 3, list(codecs.CODECS), 1e9
    )
    assert list(measured) == list(codecs.CODECS)
    assert all(one.read > one.decode > 0 for one in measured.values())
    assert measured["none"].ratio == pytest.approx(1, abs=0.2)


def test_the_smaller_of_two_that_are_about_as_fast() -> None:
    one = codecs.Measured("none", 1.0, 1.0, 1.0, read=1.00)
    other = codecs.Measured("lz4", 1.5, 1.0, 1.0, read=1.04)
    slow = codecs.Measured("zstd", 2.0, 1.0, 1.0, read=1.20)
    assert codecs.fastest({"a": one, "b": other, "c": slow}) is other
    assert codecs.fastest({"a": one, "c": slow}) is one


# Stopped and started again


STOPS: dict[str, Callable[[pytest.MonkeyPatch, int], None]] = {}


def stop(
    function: Callable[[pytest.MonkeyPatch, int], None],
) -> Callable[[pytest.MonkeyPatch, int], None]:
    STOPS[function.__name__] = function
    return function


def after(calls: int, work: Callable[..., Any], then: bool) -> Callable[..., Any]:
    """`work`, which stops at the call number `calls`, before it or after it."""
    count = 0

    def stopping(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls and not then:
            raise StoppedError
        result = work(*arguments, **options)
        if count == calls:
            raise StoppedError
        return result

    return stopping


@stop
def before_a_shard_has_its_name(patch: pytest.MonkeyPatch, number: int) -> None:
    replacing = after(number, os.replace, then=False)

    def replace(old: Path, new: Path) -> None:
        (replacing if Path(new).match("fields/c.*") else original)(old, new)

    original = os.replace
    patch.setattr(os, "replace", replace)


@stop
def in_the_middle_of_a_shard(patch: pytest.MonkeyPatch, number: int) -> None:
    count = 0

    def fsync(file: int) -> None:
        nonlocal count
        count += 1
        if count == number + 1:  # one is the disk's test
            os.ftruncate(file, 10)
            raise StoppedError

    patch.setattr(os, "fsync", fsync)


@stop
def between_metadata(patch: pytest.MonkeyPatch, number: int) -> None:
    create = zarr.Group.create_array
    patch.setattr(zarr.Group, "create_array", after(number, create, then=True))


@stop
def before_the_end(patch: pytest.MonkeyPatch, number: int) -> None:
    patch.setattr(preparation, "verify", after(1, lambda *given: 0, then=False))


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("name", STOPS)
def test_stopped_and_started_again_equals_undisturbed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        STOPS[name](patch, number)
        with pytest.raises(StoppedError):
            prepared(small, out)
    assert not out.exists()
    again = run(Preparation(request(small, out)))
    assert tree(out) == wanted
    assert again.resumed is (name != "between_metadata")
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr", "undisturbed.zarr"}


def test_a_full_disk_is_told_in_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    of = Preparation(request(small, tmp_path / "out.zarr"))
    with monkeypatch.context() as patch:
        patch.setattr(target, "_write_static", full)
        with pytest.raises(UserError, match=r"cannot be written or read \(No space left"):
            run(of)
    assert prepared(small, tmp_path / "out.zarr").exists()


def test_what_is_there_is_not_written_again(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        before_a_shard_has_its_name(patch, 4)
        with pytest.raises(StoppedError):
            prepared(small, out)
    written = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (written.append(b.name), replace(a, b))[1])
    again = Preparation(request(small, out))
    told: list[int] = []
    with again.alone():
        assert again.done == 3
        again.begin("lz4")
        again.work(told.append)
        again.finish()
    assert written == ["c.3.0.0.0", "c.4.0.0.0", "c.5.0.0.0", "c.6.0.0.0", "out.zarr"]
    assert sum(told) == 7


def test_stopped_while_replacing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tree(prepared(small, tmp_path / "undisturbed.zarr"))
    out = prepared(small, tmp_path / "out.zarr", codec="none")
    with monkeypatch.context() as patch:
        patch.setattr(target.shutil, "rmtree", after(4, shutil.rmtree, then=False))
        with pytest.raises(StoppedError):
            prepared(small, out, overwrite=True)
    assert tree(prepared(small, out, overwrite=True)) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"in.zarr", "out.zarr", "undisturbed.zarr"}


@pytest.mark.slow
def test_processes_write_what_one_process_does(small: Path, tmp_path: Path) -> None:
    wanted = tree(prepared(small, tmp_path / "one.zarr"))
    assert tree(prepared(small, tmp_path / "three.zarr", workers=Workers(3))) == wanted


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
        out = prepared(small, tmp_path / "far.zarr", workers=Workers(scheduler=address))
        cluster.kill()
    assert tree(out) == wanted


@pytest.mark.slow
def test_killed_at_random_moments_equals_undisturbed(tmp_path: Path) -> None:
    data = stores.dataset(rows=12, columns=8, steps=30)
    store = stores.write(data, tmp_path / "in.zarr")
    folder = tmp_path / "out"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.data.killed_prepare", str(store), str(folder)]
    done = subprocess.run(
        [*command, str(KILLS)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    lines = done.stdout.splitlines()
    assert len(lines) == KILLS, done.stderr
    assert all(line.endswith("equal") for line in lines), done.stdout
    partial = [line for line in lines if re.search(r"\d+ \d+ files", line)]
    assert len(partial) > KILLS // 2, done.stdout


# Refused


FAHRENHEIT = {"2m_temperature": variable(convert="degF->degC")}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such folder": ({"out": "/nowhere/at/all.zarr"}, r"there is no such folder.*out"),
    "an address": ({"out": "gs://bucket/out.zarr"}, r"out: needs the path"),
    "no ranks": ({"domains": (0, 2)}, r"from 1 to 9.* got 0. Change domains"),
    "more ranks than rows": ({"domains": (1, 10)}, r"got 10. Change domains"),
    "no domains": ({"domains": ()}, r"domains: needs at least one"),
    "another unit": ({"data": {"variables": FAHRENHEIT}}, r"2m_temperature.*degF"),
    "another codec": ({"codec": "zst"}, r"codec: needs one of auto, none.*Did you mean zstd"),
    "no worker": ({"workers": Workers(0)}, r"workers: needs 1 or more"),
    "a grid of one row": ({"grid": "1x4"}, r"grid: needs at least two rows"),
    "no grid": ({"grid": "12"}, r"grid: needs ROWSxCOLUMNS"),
    "other dates": ({"dates": ("1990-01-01", "1991-01-01")}, r"holds 2000-01-01.*Change dates"),
    "no dates": ({"dates": ("x", "y")}, r"dates: needs \[first, last\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(small: Path, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    out = Path(changes["out"]) if "out" in changes else tmp_path / "out.zarr"
    asked = request(small, out, **{key: x for key, x in changes.items() if key != "out"})
    if "out" in changes:
        asked = Request(asked.question, changes["out"])
    with pytest.raises(UserError, match=message) as refused:
        Preparation(asked)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.zarr"]


def test_what_is_there_is_never_overwritten_unasked(small: Path, tmp_path: Path) -> None:
    out = prepared(small, tmp_path / "out.zarr")
    before = tree(out)
    with pytest.raises(UserError, match=r"is there already.*overwrite=true"):
        Preparation(request(small, out))
    assert tree(out) == before
    prepared(small, out, codec="none", overwrite=True)
    assert tree(out) != before


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_prepared_store_is_never_removed(
    small: Path, tmp_path: Path, overwrite: bool
) -> None:
    for other in (small, tmp_path):
        with pytest.raises(UserError, match=r"Change out\.$"):
            Preparation(request(small, other, overwrite=overwrite))
    assert small.exists()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"codec": "zstd"}, "codec lz4, now it is zstd"),
        ({"domains": (1,)}, r"rows of a chunk.* 2, now it is 9"),
        ({"dates": ("2000-01-01", "2000-01-01")}, "dates"),
        ({"data": {"levels": [500]}}, "variables"),
        ({"grid": "8x4"}, "grid"),
        ({"data": {"step": "12h"}}, "dates|step"),
    ],
)
def test_another_request_does_not_go_on(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, key: str
) -> None:
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        before_the_end(patch, 1)
        with pytest.raises(StoppedError):
            prepared(small, out)
    with pytest.raises(UserError, match=key) as refused:
        prepared(small, out, **changes)
    assert "out.zarr.partial" in str(refused.value)
    assert "overwrite=true" in str(refused.value)
    assert prepared(small, out, **changes, overwrite=True).exists()


def test_any_codec_goes_on_with_the_one_that_was_begun(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        before_the_end(patch, 1)
        with pytest.raises(StoppedError):
            prepared(small, out, codec="zstd3")
    prepared(small, out, codec="auto")
    assert '"zstd"' in (out / "fields" / "zarr.json").read_text()


def test_a_full_disk_is_told_before(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda folder: free)
    with pytest.raises(UserError, match=r"GB are needed, 0.0 GB are free. Change out"):
        prepared(small, tmp_path / "out.zarr")


def test_a_disk_that_fills_up_is_one_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device", "fields/c.0.0.0.0")

    of = Preparation(request(small, tmp_path / "out.zarr"))
    with of.alone():
        of.begin("none")
        monkeypatch.setattr(files.os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left.*goes on where it stopped"):
            of.work(lambda times: None)
    assert not list((tmp_path / "out.zarr.partial" / "fields").glob(".*"))


def test_two_at_once_are_refused(small: Path, tmp_path: Path) -> None:
    first, *others = (Preparation(request(small, tmp_path / "out.zarr")) for _ in range(3))
    with first.alone():
        for other in others:
            with pytest.raises(UserError, match="another process is preparing it"):
                with other.alone():
                    pass


def test_a_scheduler_needs_whole_paths(tmp_path: Path) -> None:
    far = Workers(scheduler="tcp://127.0.0.1:9")
    asked = Request(Question(config(Path("in.zarr"))), str(tmp_path / "x.zarr"), workers=far)
    with pytest.raises(UserError, match=r"need a whole path, got in\.zarr"):
        Preparation(asked)


def test_a_scheduler_that_is_not_there(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "PATIENCE", "1s")
    with pytest.raises(UserError, match=r"no dask scheduler answers at tcp://127.0.0.1:9"):
        prepared(small, tmp_path / "x.zarr", workers=Workers(scheduler="tcp://127.0.0.1:9"))


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


@pytest.mark.parametrize(
    ("fault", "message"),
    [(damage, "cannot be read"), (swap, "differ from what the store"), (lose, "is missing")],
)
def test_faults_are_found_at_the_end(
    small: Path, tmp_path: Path, fault: Callable[[Path], None], message: str
) -> None:
    of = Preparation(request(small, tmp_path / "out.zarr", codec="none", domains=(1,)))
    with of.alone():
        of.begin("none")
        of.work(lambda times: None)
        fault(tmp_path / "out.zarr.partial" / "fields")
        with pytest.raises(UserError, match=message) as refused:
            of.verify()
    assert "\n" not in str(refused.value)
