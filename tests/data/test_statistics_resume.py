import random
import shutil
import time
from contextlib import closing

import pytest

from credit_dp.data import statistics, streaming
from credit_dp.data.statistics import StatisticsRun
from credit_dp.data.store import Store
from credit_dp.data.streaming import PieceWorkers
from credit_dp.errors import UserError
from tests.data import stores
from tests.ranks import warm_context

STEPS = 60
PIECES = 4  # of a day, which stands for a year: geopotential, temperatures, solar
FIELDS_OF_DAY = 4 * (7 + 1)
SPANS = {"train": ["2000-01-01", "2000-01-14T18"]}


class PulledPlugError(Exception):
    """Stands for a power failure."""


def opened(path, **changes):
    return Store.open(stores.config(path, **(SPANS | changes)))


def computed(store, out, workers=1, done=lambda _: None):
    with (
        closing(StatisticsRun(store, out)) as run,
        closing(PieceWorkers(store, run.dates, workers)) as pool,
    ):
        run.run(pool, done)
    return out.read_bytes()


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "split_dates", stores.split_by_day)
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", 3000)
    return stores.write(stores.dataset(steps=STEPS), tmp_path / "store.zarr")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_stopped_pass_resumes_to_the_same_bits(path, tmp_path, workers):
    store = opened(path)
    whole = computed(store, tmp_path / "whole.json")
    out = tmp_path / "again" / "stats.json"
    seen = []

    def stop_in_the_second_day(done):
        seen.append(done)
        calls.append(done)
        if len(calls) == PIECES + 3:
            raise PulledPlugError

    for _ in range(50):
        calls = []
        try:
            assert computed(store, out, workers, stop_in_the_second_day) == whole
            break
        except PulledPlugError:
            assert not out.exists()
    assert seen.count(0) == 1  # later runs begin where the one before stopped
    assert len(calls) < len(seen)
    assert [file.name for file in out.parent.iterdir()] == ["stats.json"]


@pytest.mark.slow
def test_a_day_that_was_done_is_not_read_again(path, tmp_path, monkeypatch):
    store = opened(path)
    whole = computed(store, tmp_path / "whole.json")
    read = []
    honest = statistics.compute_moments

    def counted(store, dates, piece, quantiles):
        read.append(piece)
        if len(read) == PIECES + 3:
            raise PulledPlugError
        return honest(store, dates, piece, quantiles)

    monkeypatch.setattr(statistics, "compute_moments", counted)
    with pytest.raises(PulledPlugError):
        computed(store, tmp_path / "stats.json")
    assert computed(store, tmp_path / "stats.json") == whole
    assert len(read) == len(set(map(repr, read))) + 3


@pytest.mark.slow
def test_a_damaged_or_foreign_part_is_computed_again(path, tmp_path):
    store = opened(path)
    whole = computed(store, tmp_path / "whole.json")
    out = tmp_path / "stats.json"

    def stop(done):
        if done > FIELDS_OF_DAY:
            raise PulledPlugError

    for other in (opened(path, train=["2000-01-02", "2000-01-12"]), store):
        with pytest.raises(PulledPlugError):
            computed(other, out, 1, stop)
    parts = sorted(out.with_name("stats.json.parts").glob("*.json"))
    assert len(parts) == 2
    for part in parts:
        part.write_text(part.read_text()[:50])
    assert computed(store, out) == whole


def test_two_at_once_do_not_mix(path, tmp_path):
    store = opened(path)
    run = StatisticsRun(store, tmp_path / "stats.json")
    with pytest.raises(UserError, match="another process is writing it"):
        StatisticsRun(store, tmp_path / "stats.json")
    run.close()
    StatisticsRun(store, tmp_path / "stats.json").close()


def test_pieces_are_removed_while_they_are_locked(path, tmp_path, monkeypatch):
    store = opened(path)
    out = tmp_path / "stats.json"
    remove_tree = shutil.rmtree

    def remove(folder, **options):
        with pytest.raises(UserError, match="another process is writing it"):
            StatisticsRun(store, out)
        remove_tree(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        computed(store, out)
    assert not out.with_name("stats.json.parts").exists()


def test_full_disk_is_one_line(path, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    store = opened(path)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"parts/.*: cannot be written \(No space left on device\)"):
        computed(store, tmp_path / "stats.json")


def _compute(path, out, started, spans):
    streaming.split_dates = stores.split_by_day
    store = opened(path, **spans)
    run = StatisticsRun(store, out)
    started.set()
    run.run(PieceWorkers(store, run.dates, 2), lambda _: None)


def kept_parts(out):
    return len(list(out.with_name(f"{out.name}.parts").glob("*.json")))


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "split_dates", stores.split_by_day)
    path = stores.write(stores.dataset(steps=100), tmp_path / "store.zarr")
    spans = {"train": ["2000-01-01", "2000-01-24"]}
    whole = computed(opened(path, **spans), tmp_path / "whole.json")
    context = warm_context()
    kills, finished, parts = 0, 0, set()
    out = tmp_path / "stats-0.json"
    moments = random.Random(0)
    while kills < 10 or not finished:
        started = context.Event()
        job = context.Process(target=_compute, args=(path, out, started, spans))
        job.start()
        assert started.wait(60)
        if kills < 10:
            # Machines differ in speed: wait for some days, then kill at a random moment.
            wanted = kept_parts(out) + moments.randint(0, 5)
            while job.is_alive() and kept_parts(out) < wanted:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.03))
        else:
            job.join(60)
        if job.is_alive():
            kills += 1
            job.kill()
            job.join()
            parts.add(kept_parts(out))
        else:
            assert job.exitcode == 0
            assert out.read_bytes() == whole
            finished += 1
            out = tmp_path / f"stats-{finished}.json"
    assert len(parts) > 3  # it was killed early and late
