import json
import multiprocessing
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr

from credit_dp.data import setup
from credit_dp.data.cache import NotComputedError
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.opening import open_source
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE
from tests.data import anemoi_stores, prepared_stores, stores
from tests.ranks import TIMEOUT
from tests.tables import each


@pytest.fixture
def path(tmp_path):
    return stores.write(stores.dataset(), tmp_path / "store.zarr")


def titles_of(config):
    titles = []
    ready = prepare_training_data(config, lambda title, fraction: titles.append((title, fraction)))
    return ready, titles


def same(first, second):
    for name in ("mean", "std", "tendency_std", "forcing_std", "static_mean"):
        assert np.array_equal(getattr(first.statistics, name), getattr(second.statistics, name))
    fields = [ready.climatology.field(stores.START, slice(0, 12)) for ready in (first, second)]
    assert np.array_equal(*fields)


@pytest.mark.slow
def test_a_second_run_computes_nothing_again(path):
    first, titles = titles_of(stores.config(path))
    assert {title for title, _ in titles} == {"statistics and climatology"}
    fractions = [fraction for _, fraction in titles]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1)
    second, titles = titles_of(stores.config(path))
    assert titles == []
    same(first, second)


@pytest.mark.slow
def test_nothing_is_computed_if_that_is_not_allowed(path):
    """Each part in turn is missing, and nothing is written instead."""
    cache = Path(stores.config(path).cache)

    def refused(**changes):
        with pytest.raises(NotComputedError) as caught:
            prepare_training_data(stores.config(path, **changes), compute=False)
        text = str(caught.value)
        assert text.startswith(f"{cache}: has no ")
        return text.removeprefix(f"{cache}: has no ").removesuffix(
            " of these data and training dates"
        )

    assert refused() == "climatology"
    assert list(cache.iterdir()) == []
    first = prepare_training_data(stores.config(path))
    same(first, prepare_training_data(stores.config(path), compute=False))
    for file in cache.glob("statistics-*.json"):
        file.unlink()
    assert refused() == "statistics"
    assert list(cache.glob("statistics-*.json")) == []
    assert refused(name="quickstart", store=None) == "store"


@pytest.mark.slow
@each(
    "change",
    [
        {"train": ["2000-01-01", "2000-01-02T12"]},
        {"levels": [500]},
        {"prognostic": ["temperature"]},
        {"static": []},
        {"forcing": []},
        {"step": "12h", "test": ["2000-01-03T12", "2000-01-03T12"]},
    ],
)
def test_what_statistics_depend_on_makes_new_ones(path, change):
    prepare_training_data(stores.config(path))
    assert titles_of(stores.config(path, **change))[1] != []


@pytest.mark.slow
@each("change", [{"batch_size": 3}, {"test": ["2000-01-02", "2000-01-03"]}])
def test_what_they_do_not_depend_on_makes_none(path, change):
    prepare_training_data(stores.config(path))
    assert titles_of(stores.config(path, **change))[1] == []


@pytest.mark.slow
def test_store_written_anew_makes_new_ones(path):
    before = prepare_training_data(stores.config(path))
    shutil.rmtree(path)
    stores.write(stores.dataset(seed=1), path)
    after = prepare_training_data(stores.config(path))
    assert not np.array_equal(before.statistics.mean, after.statistics.mean)


WARMER = 1.03


def _in_zarr(**options):
    def write(data, path):
        return stores.write(data, path, **options)

    def change(path):
        array = zarr.open_array(path, path="temperature", mode="r+")
        array[...] = array[...] * WARMER

    return write, change


def _in_netcdf():
    def write(data, path):
        file = path.with_suffix(".nc")
        data.to_netcdf(file)
        return file

    def change(path):
        with xr.open_dataset(path) as opened:
            data = opened.load()
        data["temperature"] *= WARMER
        data.to_netcdf(path.with_name("new.nc"))
        path.with_name("new.nc").replace(path)

    return write, change


def _in_anemoi():
    def change(path):
        group = zarr.open_group(path, mode="r+")
        wanted = [name.startswith("t_") for name in group.attrs["variables"]]
        data = group["data"][...]
        data[:, wanted] *= WARMER
        group["data"][...] = data

    return anemoi_stores.write, change


def _in_prepared():
    def change(path):
        group = zarr.open_group(path, mode="r+")
        channels = dict(group.attrs)[METADATA_ATTRIBUTE]["channels"]
        wanted = [channel["variable"] == "temperature" for channel in channels]
        fields = group["fields"][...]
        fields[:, wanted] *= WARMER
        group["fields"][...] = fields

    return prepared_stores.write, change


FORMS = {
    "zarr 2": _in_zarr(zarr_format=2),
    "zarr 3": _in_zarr(),
    "shards": _in_zarr(chunks={"time": 1}, shards={"time": 4}),
    "netCDF": _in_netcdf(),
    "anemoi": _in_anemoi(),
    "prepared": _in_prepared(),
}


def expected_mean(data, settings):
    """The mean of 1000 hPa's temperature over the training dates, weighted by area."""
    fields = data["temperature"].sel(level=1000, time=slice(*settings.dates.train))
    sines = np.sin(np.deg2rad(data["latitude"].values))
    edges = np.concatenate(
        [[1], np.sin(np.arcsin(sines[:-1]) / 2 + np.arcsin(sines[1:]) / 2), [-1]]
    )
    return np.average(fields.mean(["time", "longitude"]), weights=-np.diff(edges))


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [x if x == "zarr 3" else pytest.param(x, marks=pytest.mark.slow) for x in FORMS]
)
def test_values_changed_in_place_make_new_ones(form, tmp_path):
    write, change = FORMS[form]
    data = stores.dataset()
    path = write(data, tmp_path / "store.zarr")
    settings = stores.config(path, forcing=[], static=[])
    for factor in (1, WARMER):
        ready, titles = titles_of(settings)
        assert titles != []
        channel = [x.name for x in ready.store.channels.prognostic].index("temperature_1000")
        mean = factor * expected_mean(data, settings)
        assert ready.statistics.mean[channel] == pytest.approx(mean, rel=1e-6)
        assert titles_of(settings)[1] == []
        if factor == 1:
            change(path)


@pytest.mark.slow
def test_a_change_of_a_few_chunks_is_noticed_by_sizes_and_ages_alone(tmp_path, monkeypatch):
    """No chunk is read, and of many chunks a sample is compared."""
    path = stores.write(stores.dataset(steps=300), tmp_path / "store.zarr")
    source = open_source(stores.config(path))
    before = source.description(["temperature"])
    assert source.description(["temperature"]) == before
    others = source.description(["solar"])
    for chunk in (path / "temperature" / "c").iterdir():
        if 100 <= int(chunk.name) < 110:
            for file in filter(Path.is_file, chunk.rglob("*")):
                file.write_bytes(file.read_bytes())
    assert source.description(["temperature"]) != before
    assert source.description(["solar"]) == others
    assert source.bytes_read == 0


def test_other_metadata_of_a_remote_store_are_noticed(tmp_path):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "store.zarr")
    system = fsspec.filesystem("memory")
    system.put(str(path), "/changed.zarr", recursive=True)
    settings = stores.config("memory://changed.zarr", cache=str(tmp_path))
    before = open_source(settings).description(["temperature"])
    assert open_source(settings).description(["temperature"]) == before
    zarr.open_group(path)["temperature"].attrs["history"] = "written again"
    system.put(str(path / "temperature"), "/changed.zarr/", recursive=True)
    assert open_source(settings).description(["temperature"]) != before


@pytest.mark.slow
def test_damaged_statistics_and_climatology_are_computed_again(path, tmp_path):
    first = prepare_training_data(stores.config(path))
    (file,) = (tmp_path / "cache").glob("statistics-*.json")
    for content in ("", '{"mean": [1.0', "[]", '{"mean": [1.0]}'):
        file.write_text(content)
        same(first, prepare_training_data(stores.config(path)))
        assert set(json.loads(file.read_text())) == {"form", "made_from", "channels"}, content
    (folder,) = (tmp_path / "cache").glob("climatology-*.zarr")
    (folder / "zarr.json").write_text("{")
    same(first, prepare_training_data(stores.config(path)))
    shutil.rmtree(folder / "temperature")
    same(first, prepare_training_data(stores.config(path)))


def _prepare_and_tell(path, ready, queue):
    ready.wait()
    titles = []
    done = prepare_training_data(stores.config(path), lambda title, _: titles.append(title))
    queue.put((sorted(set(titles)), done.statistics.mean.tolist()))


@pytest.mark.slow
def test_of_two_jobs_at_once_one_builds(path, tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, queue = context.Barrier(2), context.Queue()
    jobs = [context.Process(target=_prepare_and_tell, args=(path, ready, queue)) for _ in "ab"]
    for job in jobs:
        job.start()
    answers = [queue.get(timeout=TIMEOUT) for _ in jobs]
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0]
    built = [title for titles, _ in answers for title in titles]
    assert built == ["statistics and climatology"]
    assert answers[0][1] == answers[1][1]
    assert not list((tmp_path / "cache").glob("*.partial"))


class FakeQuickstart:
    """Stands for the generator, of which only the two names and the file matter here."""

    def __init__(self):
        self.built = []

    def store_name(self, settings, grid):
        return f"quickstart-{settings.truncation}-{grid}.zarr"

    def build(self, settings, grid, path, report):
        self.built.append(grid)
        report("quickstart data", 1.0)
        stores.write(stores.dataset(), path)


@pytest.mark.slow
def test_quickstart_is_built_once_under_the_cache(tmp_path, monkeypatch):
    fake = FakeQuickstart()
    monkeypatch.setattr(setup, "quickstart", fake)
    config = stores.config(tmp_path / "unused", name="quickstart", grid="12x8")
    config.store = None
    first, titles = titles_of(config)
    assert titles[0] == ("quickstart data", 1.0)
    prepare_training_data(config)
    assert fake.built == [(12, 8)]
    assert first.store.grid == (12, 8)
    assert config.store is None


def test_climatology_lies_in_chunks_of_rows(path, tmp_path):
    prepare_training_data(stores.config(path))
    (folder,) = (tmp_path / "cache").glob("climatology-*.zarr")
    array = zarr.open_group(folder, mode="r")["temperature"]
    assert array.chunks[3] == 1
    assert array.shape == (4, 3, 1, 12, 8)


@pytest.mark.slow
def test_the_pass_reads_every_training_byte_once(path):
    ready = prepare_training_data(stores.config(path))
    # 8 training times of 7 prognostic channels and 1 stored forcing, and 2 statics, in float32.
    assert ready.store.bytes_read == (8 * (7 + 1) + 2) * 12 * 8 * 4
