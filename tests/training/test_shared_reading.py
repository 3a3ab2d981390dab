import threading

import numpy as np
import pytest
import torch

from credit_dp.bands import unshared_amplification
from credit_dp.data.channels import Channel
from credit_dp.data.loader import BatchSelection, Loader
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.gridded import GriddedSource
from credit_dp.data.sources.shared import ExchangeStoppedError, SharedSource
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.training.shared_reading import build_chunk_exchange
from tests.data import ensemble_stores, stores
from tests.ranks import TIMEOUT, on_processes
from tests.tier_cases import tiers

SAMPLES = 7
CELLS = 12 * 8
STATICS = 2 * CELLS * 4


class ThreadWorld:
    """Ranks that are threads of this process; each may stop to wait for the others."""

    def __init__(self, bounds):
        self.bounds = bounds
        self.meetings = []
        self.changed = threading.Condition()

    def meet(self, trade, number, given):
        """Return what all ranks passed to a meeting, in rank order."""
        ranks = len(self.bounds) - 1
        with self.changed:
            while len(self.meetings) <= number:
                self.meetings.append({})
            found = self.meetings[number]
            found[trade.rank] = given
            self.changed.notify_all()
            assert self.changed.wait_for(
                lambda: len(found) == ranks or trade.stopped, timeout=TIMEOUT
            )
            if len(found) < ranks:
                raise ExchangeStoppedError
            return [found[rank] for rank in range(ranks)]


class ThreadTrade:
    def __init__(self, world, rank):
        self.world, self.rank, self.bounds = world, rank, world.bounds
        self.met = 0
        self.stopped = False

    def meet(self, given):
        self.met += 1
        return self.world.meet(self, self.met - 1, given)

    def gather_problems(self, problem):
        return self.meet(problem)

    def all_to_all(self, parcels, sizes, coming):
        for_each = np.split(parcels, np.cumsum(sizes)[:-1])
        found = [parts[self.rank] for parts in self.meet(for_each)]
        assert [part.size for part in found] == list(coming)
        return found

    def stop(self):
        with self.world.changed:
            self.stopped = True
            self.world.changed.notify_all()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Chunks of one time and the whole globe."""
    path = tmp_path_factory.mktemp("shared") / "store.zarr"
    stores.write(stores.dataset(), path)
    prepare_training_data(stores.config(path))
    return path


BOUNDS = {2: (0, 7, 12), 3: (0, 1, 5, 12), 4: (0, 3, 6, 9, 12)}


def on_trading_threads(ranks, work):
    """Return what `work(rank, trade)` returns or raises on each rank."""
    world = ThreadWorld(BOUNDS[ranks])
    results = [None] * ranks

    def run(rank):
        try:
            results[rank] = work(rank, ThreadTrade(world, rank))
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def take(path, count, rows, prefetch=2, trade=None, frames=1, **changes):
    """Return this number of batches of a rank's rows, and the bytes read for them."""
    ready = prepare_training_data(stores.config(path, **changes))
    sequence = SampleSequence(SAMPLES + 1 - frames, 2, seed=3)
    before = ready.store.bytes_read
    with Loader(
        ready, "train", rows, sequence, torch.float64, prefetch, frames=frames, exchange=trade
    ) as loader:
        batches = [next(loader) for _ in range(count)]
    return batches, ready.store.bytes_read - before


def same(one, other):
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("state", "forcing", "static", "target")
    )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "frames"), tiers([(3, 2)], [], [(2, 1), (3, 1), (4, 1), (4, 2)]))
def test_shared_batches_are_those_of_reading_alone(path, ranks, frames):
    def shared(rank, trade):
        rows = slice(*trade.bounds[rank : rank + 2])
        return take(path, 4, rows, trade=trade, frames=frames)[0]

    for rank, batches in enumerate(on_trading_threads(ranks, shared)):
        rows = slice(*BOUNDS[ranks][rank : rank + 2])
        for batch, wanted in zip(batches, take(path, 4, rows, frames=frames)[0], strict=True):
            assert same(batch, wanted)
            assert batch.times.tolist() == wanted.times.tolist()


@pytest.mark.parametrize("ranks", tiers([(3,)], [], [(2,), (4,)]))
def test_a_group_reads_each_chunk_once(path, ranks):
    def shared(rank, trade):
        rows = slice(*trade.bounds[rank : rank + 2])
        return take(path, 3, rows, prefetch=0, trade=trade)[1]

    sample = (2 * 7 + 1) * CELLS * 4  # states at two times and a stored forcing, in float32
    total = sum(found := on_trading_threads(ranks, shared))
    assert total - ranks * STATICS == 3 * 2 * sample
    # Three variables and a forcing per time, dealt in turn: nobody reads much more than its share.
    assert max(found) - STATICS <= 1.5 * 3 * 2 * sample / ranks


def test_chunks_that_hold_several_times_are_sent_once(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr", chunks={"time": 12})
    source = GriddedSource.open(str(path))
    channels = Store(source, stores.config(path)).channels.prognostic
    places = np.array([5, 1, 2])

    def shared(rank, trade):
        own = GriddedSource.open(str(path))
        fields = SharedSource(own, trade).read(
            channels, places, slice(*trade.bounds[rank : rank + 2])
        )
        return fields, own.chunk_reads

    parts, reads = zip(*on_trading_threads(2, shared), strict=True)
    whole = source.read(channels, places, slice(0, 12))
    assert np.array_equal(np.concatenate(parts, axis=2), whole)
    assert sum(reads) == 3


def test_chunks_that_fit_the_bands_are_not_traded(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr", chunks={"latitude": 3})

    class NoTrade(ThreadTrade):
        def gather_problems(self, problem):
            raise AssertionError("nothing to tell")

        all_to_all = gather_problems

    trade = NoTrade(ThreadWorld((0, 3, 6, 9, 12)), 1)
    source = GriddedSource.open(str(path))
    channels = Store(source, stores.config(path)).channels.prognostic
    alone = source.read(channels, slice(0, 2), slice(3, 6))
    assert np.array_equal(
        SharedSource(source, trade).read(channels, slice(0, 2), slice(3, 6)), alone
    )


def test_other_rows_than_the_ranks_own_are_refused(path):
    source = GriddedSource.open(str(path))
    channels = Store(source, stores.config(path)).channels.prognostic
    shared = SharedSource(source, ThreadTrade(ThreadWorld((0, 12)), 0))
    with pytest.raises(ValueError, match="rows 0 to 12"):
        shared.read(channels, slice(0, 1), slice(0, 11))


@pytest.mark.slow
def test_an_unreadable_chunk_ends_all_ranks_with_the_same_line(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    prepare_training_data(stores.config(path))
    for chunk in (path / "temperature" / "c").rglob("0"):
        if chunk.is_file():
            chunk.write_bytes(b"short")

    def shared(rank, trade):
        return take(path, 1, slice(*trade.bounds[rank : rank + 2]), trade=trade)

    found = on_trading_threads(3, shared)
    assert all(isinstance(error, UserError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "temperature" in str(found[0])


@pytest.mark.slow
def test_a_gap_in_one_band_ends_all_ranks(tmp_path):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "store.zarr")
    prepare_training_data(stores.config(path))
    data["temperature"].values[:, :, -1] = np.nan  # the last rank's
    data[["temperature"]].to_zarr(path, mode="r+", consolidated=False)

    def shared(rank, trade):
        return take(path, 3, slice(*trade.bounds[rank : rank + 2]), trade=trade)

    for error in on_trading_threads(3, shared):
        assert isinstance(error, UserError)
        assert "temperature has NaN" in str(error)


@pytest.mark.slow
def test_no_rank_begins_a_step_that_another_cannot_take(tmp_path):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "store.zarr")
    ready = prepare_training_data(stores.config(path))
    sequence = SampleSequence(SAMPLES, 1)
    target = sequence.indices(0)[0] + 1
    data["temperature"].values[target, :, -1] = np.nan  # in the last rank's band
    data[["temperature"]].to_zarr(path, mode="r+", consolidated=False)

    def shared(rank, trade):
        rows = slice(*trade.bounds[rank : rank + 2])
        own = SampleSequence(SAMPLES, 1)
        # Nobody reads ahead, as if each rank waited for the others in its first step.
        with Loader(ready, "train", rows, own, prefetch=0, exchange=trade) as loader:
            next(loader)

    found = on_trading_threads(3, shared)
    assert all(isinstance(error, UserError) for error in found)
    assert len({str(error) for error in found}) == 1


def test_an_error_that_is_no_users_names_its_type_elsewhere(path):
    class BrokenError(Exception):
        pass

    def shared(rank, trade):
        source = SharedSource(GriddedSource.open(str(path)), trade)
        channels = Store(source, stores.config(path)).channels.prognostic
        if rank == 1:
            source.fail(BrokenError("oh"))
            source.fail(BrokenError("raised only once"))
        return source.read(channels, slice(0, 1), slice(*trade.bounds[rank : rank + 2]))

    zero, one = on_trading_threads(2, shared)
    assert isinstance(zero, UserError)
    assert str(zero).endswith("BrokenError: oh")
    assert isinstance(one, BrokenError)


def test_members_are_shared_until_a_rank_fails(tmp_path):
    data = ensemble_stores.dataset()
    path = stores.write(data, tmp_path / "members.zarr")
    channels = [Channel("2m_temperature")]

    def shared(rank, trade):
        source = SharedSource(GriddedSource.open(str(path)), trade)
        rows = slice(*trade.bounds[rank : rank + 2])
        members = [source.of_members([number]) for number in source.members]
        fields = [member.read(channels, slice(0, 3), rows) for member in members]
        if rank == 1:
            members[1].fail(UserError("bad member"))
        for member in (members[2], source, members[0]):
            with pytest.raises(UserError, match="bad member"):
                member.read(channels, slice(0, 1), rows)
        return np.concatenate(fields, axis=1)

    found = np.concatenate(on_trading_threads(3, shared), axis=2)
    wanted = data["2m_temperature"].isel(time=slice(0, 3)).transpose("time", "number", ...)
    np.testing.assert_array_equal(found, wanted)


def test_closing_does_not_wait_for_ranks_that_never_come(path):
    ready = prepare_training_data(stores.config(path))
    trade = ThreadTrade(ThreadWorld((0, 7, 12)), 0)
    sequence = SampleSequence(SAMPLES, 2)
    loader = Loader(ready, "train", slice(0, 7), sequence, prefetch=3, exchange=trade)
    loader._read_ahead(3)
    loader.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_state_is_loaded_while_ranks_read_ahead(path):
    def shared(rank, trade):
        ready = prepare_training_data(stores.config(path))
        rows = slice(*trade.bounds[rank : rank + 2])
        with Loader(ready, "train", rows, SampleSequence(SAMPLES, 2), exchange=trade) as loader:
            first = [next(loader) for _ in range(2)]
            loader.load_state_dict({**loader.state_dict(), "position": 0})
            again = [next(loader) for _ in range(2)]
        return all(map(same, first, again))

    assert on_trading_threads(3, shared) == [True] * 3


def test_amplification():
    cases = {
        (12, 12, (0, 6, 12)): 2.0,
        (12, 6, (0, 6, 12)): 1.0,
        (721, 721, (0, 181, 361, 541, 721)): 4.0,
        (10, 4, (0, 4, 10)): 1.4,  # from the south, both bands need the chunk of rows 2 to 5
        (10, 4, (0, 10, 10)): 1.0,
    }
    assert {case: unshared_amplification(*case) for case in cases} == pytest.approx(cases)


def sequence_of(manager):
    return SampleSequence(SAMPLES, 2, manager.dp_rank, manager.dp_world_size, seed=3)


def shared_on_rank(manager, path):
    """Return whether shared batches equal those read alone, and the bytes read."""
    rows = manager.rows(12)
    reads = BatchSelection(inputs=manager.pipeline_rank == 0)
    ready = prepare_training_data(stores.config(path))
    trade = build_chunk_exchange(ready.store, manager)
    before = ready.store.bytes_read
    with Loader(
        ready, "train", rows, sequence_of(manager), prefetch=1, selection=reads, exchange=trade
    ) as loader:
        batches = [next(loader) for _ in range(3)]
    read = ready.store.bytes_read - before
    with Loader(ready, "train", rows, sequence_of(manager), selection=reads) as alone:
        return all(same(batch, next(alone)) for batch in batches), trade is not None, read


def broken_on_rank(manager, path):
    """Return the error of a rank when one chunk can't be read."""
    ready = prepare_training_data(stores.config(path))
    manager.transport.all_gather(torch.tensor(1))  # statistics of a changed store are made anew
    (path / "temperature" / "c" / "3" / "0" / "0" / "0").write_bytes(b"short")
    trade = build_chunk_exchange(ready.store, manager)
    loader = Loader(
        ready, "train", manager.rows(12), SampleSequence(SAMPLES, SAMPLES), exchange=trade
    )
    with loader, pytest.raises(UserError) as caught:
        next(loader)
    return str(caught.value)


@pytest.mark.slow
def test_three_processes_share(path):
    found = on_processes(3, shared_on_rank, path)
    assert [(equal, shared) for equal, shared, _ in found] == [(True, True)] * 3
    sample = (2 * 7 + 1) * CELLS * 4
    most = 4 * 2 * sample + 3 * STATICS  # three batches, and one read ahead
    assert 3 * 2 * sample <= sum(read for _, _, read in found) <= most


@pytest.mark.slow
def test_an_error_in_one_process_arrives_in_the_other(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    prepare_training_data(stores.config(path))
    one, two = on_processes(2, broken_on_rank, path)
    assert one == two
    assert "temperature" in one


@pytest.mark.parametrize(
    ("ranks", "domain", "pipeline"), tiers([], [(4, 2, 2)], [(4, 4, 1), (4, 2, 1)])
)
def test_every_domain_of_a_mesh_shares(path, ranks, domain, pipeline):
    found = on_processes(ranks, shared_on_rank, path, domain=domain, pipeline=pipeline)
    assert [(equal, shared) for equal, shared, _ in found] == [(True, True)] * ranks


def share_on_rank(manager, path):
    return (
        build_chunk_exchange(prepare_training_data(stores.config(path)).store, manager) is not None
    )


@pytest.mark.slow
def test_stores_cut_where_bands_end_are_not_shared(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr", chunks={"latitude": 6})
    prepare_training_data(stores.config(path))
    assert on_processes(2, share_on_rank, path) == [False, False]
