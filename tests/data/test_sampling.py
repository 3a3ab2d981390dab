import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_dp.data.sampling import SampleSequence, initial_times, sample_times
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

HOUR = np.timedelta64(1, "h")


def opened(tmp_path, present, **changes):
    data = stores.dataset(steps=40, rows=3, columns=4).isel(time=present)
    path = stores.write(data, tmp_path / "store.zarr")
    spans = {"train": ["2000-01-01", "2000-01-04"], "valid": ["2000-01-05T06", "2000-01-07"]}
    spans["test"] = ["2000-01-08", "2000-01-09"]
    return Store.open(stores.config(path, **(spans | changes)))


def hours(times):
    return ((times - stores.START) / HOUR).astype(int).tolist()


def test_samples_span_no_gap_and_stay_in_their_split(tmp_path):
    store = opened(tmp_path, [0, 1, 2, 4, 5, *range(12, 40)])
    assert hours(sample_times(store, "train")) == [0, 6, 24, 72, 78, 84]
    assert hours(sample_times(store, "valid"))[:2] == [102, 108]
    assert hours(sample_times(store, "valid"))[-1] == 6 * 26


@pytest.mark.slow
def test_samples_of_a_longer_step(tmp_path):
    store = opened(tmp_path, list(range(40)), step="12h")
    assert hours(sample_times(store, "train")) == [12 * i for i in range(7)]


def test_samples_of_several_states_have_them_all_in_their_split(tmp_path):
    store = opened(tmp_path, [0, 1, 2, 4, 5, *range(12, 40)])
    assert hours(sample_times(store, "train", 2)) == [6, 78, 84]
    assert hours(sample_times(store, "train", 3)) == [84]
    # The split begins at hour 102, though the store has the states before.
    assert hours(sample_times(store, "valid", 2))[:2] == [108, 114]
    assert hours(sample_times(store, "valid", 2))[-1] == 6 * 26


def test_samples_have_all_steps_of_the_longest_rollout_in_their_split(tmp_path):
    store = opened(tmp_path, [0, 1, 2, 4, 5, *range(12, 40)])
    assert hours(sample_times(store, "train", 1, 2)) == [0, 72, 78]
    assert hours(sample_times(store, "train", 2, 2)) == [78]
    assert hours(sample_times(store, "valid", 1, 3))[-1] == 6 * 24
    with pytest.raises(
        UserError, match=r"6 dates of .*Lower the longest of trainer\.rollout, or change data\.step"
    ):
        sample_times(store, "train", 1, 5)
    with pytest.raises(UserError, match=r"Lower model\.frames or the longest of trainer\.rollout"):
        sample_times(store, "train", 2, 4)


def test_more_states_than_dates_in_a_row(tmp_path):
    store = opened(tmp_path, [0, 1, 2, 4, 5, *range(12, 40)])
    with pytest.raises(
        UserError, match=r"6 dates of data\.dates\.train.*Lower model\.frames"
    ) as caught:
        sample_times(store, "train", 5)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        UserError, match=r"from 11 states fits into data\.dates\.valid.*model\.frames"
    ):
        initial_times(store, "valid", [6], 6, 11)


def test_forecasts_start_where_all_their_states_are(tmp_path):
    store = opened(tmp_path, [i for i in range(40) if i != 24])
    assert hours(initial_times(store, "valid", [6, 12], 6, 2)) == [108, 114, 120, 126]
    assert hours(initial_times(store, "valid", [6, 12], 12, 3)) == [114, 126]


def test_initial_times_have_their_whole_window(tmp_path):
    store = opened(tmp_path, [i for i in range(40) if i != 24])
    # The split holds hours 102 to 162 without hour 144.
    assert hours(initial_times(store, "valid", [6, 12], 6)) == [102, 108, 114, 120, 126, 150]
    assert hours(initial_times(store, "valid", [6, 12], 12)) == [102, 114, 126, 150]
    assert hours(initial_times(store, "valid", [24], 6)) == [102, 108, 114]


def test_lead_that_is_no_whole_number_of_steps(tmp_path):
    store = opened(tmp_path, list(range(40)))
    for lead in (7, 0, -6):
        with pytest.raises(UserError, match=r"trainer\.evaluate_hours"):
            initial_times(store, "valid", [6, lead], 6)


@pytest.mark.slow
def test_lead_that_fits_nowhere(tmp_path):
    store = opened(tmp_path, list(range(40)))
    with pytest.raises(UserError, match=r"data\.dates\.valid"):
        initial_times(store, "valid", [72], 6)


@given(
    count=st.integers(8, 60),
    parts=st.integers(1, 2),
    size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**32),
    batch=st.integers(0, 50),
)
def test_global_batch_is_the_same_however_many_ranks_share_it(count, parts, size, seed, batch):
    one = SampleSequence(count, 4 * parts, seed=seed)
    ranks = [SampleSequence(count, 4 * parts, rank, size, seed) for rank in range(size)]
    shares = [rank.indices(batch) for rank in ranks]
    assert {len(share) for share in shares} == {4 * parts // size}
    assert np.concatenate(shares).tolist() == one.indices(batch).tolist()


@given(count=st.integers(3, 30), batch=st.integers(1, 3), seed=st.integers(0, 99))
def test_an_epoch_meets_no_sample_twice_and_leaves_out_less_than_a_batch(count, batch, seed):
    sequence = SampleSequence(count, batch, seed=seed)
    per_epoch = sequence.batches_per_epoch
    epochs = [
        np.concatenate([sequence.indices(e * per_epoch + k) for k in range(per_epoch)])
        for e in range(2)
    ]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == len(epoch) > count - batch
        assert set(epoch.tolist()) <= set(range(count))


def test_epochs_and_seeds_differ():
    def epoch(seed, number):
        return SampleSequence(50, 50, seed=seed).indices(number).tolist()

    assert epoch(0, 0) == epoch(0, 0)
    assert len({tuple(epoch(seed, number)) for seed in (0, 1) for number in (0, 1)}) == 4


def test_state_resumes_on_another_mesh():
    first = SampleSequence(20, 4, seed=5)
    first.position = 7
    second = SampleSequence(20, 4, 1, 2, seed=5)
    second.load_state_dict(first.state_dict())
    assert second.position == 7
    assert second.indices(7).tolist() == first.indices(7)[2:].tolist()


@each(
    "other, key",
    [
        ({"count": 21}, "data.dates.train and the longest of trainer.rollout"),
        ({"batch_size": 2}, "data.batch_size"),
        ({"seed": 1}, "seed"),
    ],
)
def test_state_of_other_samples_is_refused(other, key):
    settings = {"count": 20, "batch_size": 4, "seed": 0}
    state = SampleSequence(**settings).state_dict()
    with pytest.raises(UserError, match=key):
        SampleSequence(**(settings | other)).load_state_dict(state)


@each("batch, size", [(3, 2), (2, 4), (0, 1)])
def test_batch_that_does_not_divide(batch, size):
    with pytest.raises(UserError, match=r"data\.batch_size") as caught:
        SampleSequence(20, batch, 0, size)
    assert str(size) in str(caught.value)


def test_batch_larger_than_the_dates():
    with pytest.raises(UserError, match=r"data\.batch_size.*data\.dates\.train has 3"):
        SampleSequence(3, 4)
