import json
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from omegaconf import OmegaConf

from credit_dp.config import DataConfig
from credit_dp.data import setup
from credit_dp.data.cache import NotComputedError
from credit_dp.data.setup import prepare_training_data
from tests.data import stores


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


def test_a_second_run_computes_nothing_again(path):
    first, titles = titles_of(stores.config(path))
    assert {title for title, _ in titles} == {"statistics and climatology"}
    fractions = [fraction for _, fraction in titles]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1)
    second, titles = titles_of(stores.config(path))
    assert titles == []
    same(first, second)


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

    limits = {"solar": None}  # a variable that has no range of its own
    assert refused() == "ranges of values"
    assert refused(limits=limits) == "climatology"
    assert list(cache.iterdir()) == []
    first = prepare_training_data(stores.config(path))
    same(first, prepare_training_data(stores.config(path), compute=False))
    for file in cache.glob("statistics-*.json"):
        file.unlink()
    assert refused() == "statistics"
    assert list(cache.glob("statistics-*.json")) == []
    assert refused(name="quickstart", store=None) == "store"


@pytest.mark.slow
@pytest.mark.parametrize(
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
@pytest.mark.parametrize("change", [{"batch_size": 3}, {"test": ["2000-01-02", "2000-01-03"]}])
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


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", '{"mean": [1.0', "[]", '{"mean": [1.0]}'])
def test_damaged_statistics_are_computed_again(path, tmp_path, content):
    first = prepare_training_data(stores.config(path))
    (file,) = (tmp_path / "cache").glob("statistics-*.json")
    file.write_text(content)
    same(first, prepare_training_data(stores.config(path)))
    assert set(json.loads(file.read_text())) == {"form", "made_from", "channels"}


@pytest.mark.slow
def test_damaged_climatology_is_computed_again(path, tmp_path):
    first = prepare_training_data(stores.config(path))
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
    answers = [queue.get(timeout=60) for _ in jobs]
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
    # Without the few fields of which the range of an unknown variable is sampled.
    ready = prepare_training_data(stores.config(path, limits={"solar": None}))
    # 8 training times of 7 prognostic channels and 1 stored forcing, and 2 statics, in float32; the
    # first time once more, for the digest by which the store is known again.
    assert ready.store.bytes_read == ((8 + 1) * (7 + 1) + 2) * 12 * 8 * 4


@pytest.mark.slow
def test_config_for_a_users_store_fits_the_schema(path):
    file = Path(__file__).parents[2] / "conf" / "data" / "zarr.yaml"
    settings = OmegaConf.load(file)
    assert settings.pop("defaults") == ["schema", "_self_"]
    assert OmegaConf.missing_keys(settings) == {"store"}
    names = ["store", "dates", "prognostic", "static"]
    given = {name: getattr(stores.config(path), name) for name in [*names, "cache"]}
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), settings, given)
    assert (
        prepare_training_data(OmegaConf.to_object(merged)).store.channels.fields().inputs
        == 7 + 2 + 2
    )
