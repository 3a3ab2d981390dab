"""Batches: what they hold, in which order, and what reading them costs."""

import itertools
import logging
import threading
import warnings

import numpy as np
import pytest
import torch

from credit_dp.data import loader as data_loader
from credit_dp.data.limits import all_finite
from credit_dp.data.loader import (
    BatchReader,
    BatchSelection,
    Loader,
    count_samples_across_gaps,
)
from credit_dp.data.normaliser import Normaliser
from credit_dp.data.sampling import RolloutLengths, SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from tests.data import stores
from tests.tables import each

SAMPLES = 7
WHOLE = slice(0, 12)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    path = tmp_path_factory.mktemp("loader") / "store.zarr"
    stores.write(stores.dataset(), path, chunks={"time": 1, "latitude": 4})
    return prepare_training_data(stores.config(path))


def loader(ready, rows=WHOLE, prefetch=2, dtype=torch.float64, sequence=None, frames=1):
    sequence = sequence or SampleSequence(SAMPLES + 1 - frames, 2, seed=3)
    return Loader(ready, "train", rows, sequence, dtype, prefetch, frames=frames)


def take(source, count):
    return [next(source) for _ in range(count)]


def test_batch_is_what_the_store_holds_normalised(ready):
    store, statistics = ready.store, ready.statistics
    sequence = SampleSequence(SAMPLES, 2, seed=3)
    with loader(ready, sequence=sequence) as source:
        batch = next(source)
    assert batch.times.tolist() == stores.times(SAMPLES)[sequence.indices(0)].tolist()
    for sample, time in enumerate(batch.times):
        for side, at in ((batch.state, time), (batch.target, time + stores.STEP)):
            field = store.read_states([at], WHOLE)[0].astype(np.float64)
            wanted = (field - statistics.mean[:, None, None]) / statistics.std[:, None, None]
            assert np.allclose(side[sample].numpy(), wanted, rtol=1e-12, atol=1e-12)
        field = store.read_forcing(time[None], WHOLE)[0] - statistics.forcing_mean[:, None, None]
        wanted = field / statistics.forcing_std[:, None, None]
        assert np.allclose(batch.forcing[sample].numpy(), wanted)
        field = store.read_static(WHOLE) - statistics.static_mean[:, None, None]
        assert np.allclose(batch.static[sample], field / statistics.static_std[:, None, None])


def test_states_before_are_in_front_of_the_newest(ready):
    with loader(ready, frames=3) as source:
        batch = next(source)
    with loader(ready, sequence=SampleSequence(SAMPLES, SAMPLES)) as source:
        every = next(source)
    assert batch.state.shape == (2, 3 * 7, 12, 8)
    assert batch.state.is_contiguous()
    for sample, time in enumerate(batch.times):
        for frame, state in enumerate(batch.state[sample].split(7)):
            (place,) = np.flatnonzero(every.times == time - (2 - frame) * stores.STEP)
            assert torch.equal(state, every.state[place])
        (place,) = np.flatnonzero(every.times == time)
        assert torch.equal(batch.target[sample], every.target[place])
        assert torch.equal(batch.forcing[sample], every.forcing[place])


def test_bands_together_are_the_whole_globe(ready):
    dtype = torch.float32
    bounds = [0, 3, 4, 12]
    bands = []
    for north, south in itertools.pairwise(bounds):
        with loader(ready, slice(north, south), dtype=dtype) as source:
            bands.append(take(source, 4))
    with loader(ready, dtype=dtype) as source:
        whole = take(source, 4)
    for place, batch in enumerate(whole):
        for name in ("state", "forcing", "static", "target"):
            parts = torch.cat([getattr(band[place], name) for band in bands], dim=-2)
            assert parts.dtype == dtype
            assert torch.equal(parts, getattr(batch, name))


@each("band, frames", [(0, 1), (1, 1), (2, 1), (1, 3)])
def test_a_sample_costs_exactly_the_bytes_of_its_band(ready, band, frames):
    store = ready.store
    rows = slice(band * 4, band * 4 + 4)
    with loader(ready, rows, prefetch=0, frames=frames) as source:
        before = store.bytes_read
        next(source)
        first = store.bytes_read - before
        next(source)
        second = store.bytes_read - before - first
    cells = 4 * 8
    # Two samples, each 7 prognostic channels at its times and 1 stored forcing, in float32.
    assert second == 2 * ((frames + 1) * 7 + 1) * cells * 4
    # The 2 statics are read once, with the first batch.
    assert first - second == 2 * cells * 4


def test_a_chunk_with_all_times_of_a_sample_is_read_once(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr", chunks={"time": 12})
    ready = prepare_training_data(stores.config(path))
    for source in (
        loader(ready, prefetch=0, frames=2),
        rollouts(ready, lambda batch: 3, prefetch=0),
    ):
        with source:
            next(source)
            before = ready.store.chunk_reads
            next(source)
        # Of each of two samples: three prognostic variables, and the stored forcing.
        assert ready.store.chunk_reads - before == 2 * (3 + 1)


@each("prefetch", [0, 5])
def test_order_does_not_depend_on_reading_ahead(ready, prefetch):
    sequence = SampleSequence(SAMPLES, 2, seed=3)
    with loader(ready, prefetch=prefetch) as source:
        for number, batch in enumerate(take(source, 8)):
            wanted = stores.times(SAMPLES)[sequence.indices(number)]
            assert batch.times.tolist() == wanted.tolist()


@each("prefetch", [0, 3])
def test_state_counts_batches_handed_out_not_those_read_ahead(ready, prefetch):
    with loader(ready, prefetch=prefetch) as source:
        take(source, 4)
        state = source.state_dict()
        following = take(source, 3)
    assert state["position"] == 4
    with loader(ready, prefetch=prefetch) as other:
        take(other, 1)
        other.load_state_dict(state)
        for batch, wanted in zip(take(other, 3), following, strict=True):
            assert torch.equal(batch.state, wanted.state)
            assert batch.times.tolist() == wanted.times.tolist()


def test_data_ranks_share_the_global_batch(ready):
    with loader(ready) as source:
        whole = next(source)
    parts = []
    for rank in range(2):
        with loader(ready, sequence=SampleSequence(SAMPLES, 2, rank, 2, seed=3)) as source:
            parts.append(next(source).state)
    assert torch.equal(torch.cat(parts), whole.state)


@pytest.mark.slow
def test_error_of_the_reading_thread_is_raised_as_it_is(tmp_path):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "store.zarr")
    ready = prepare_training_data(stores.config(path))
    data["temperature"].values[..., 5, 3] = np.nan
    data[["temperature"]].to_zarr(path, mode="r+", consolidated=False)
    source = loader(ready)
    for _ in range(2):
        with pytest.raises(UserError, match="temperature has NaN"):
            next(source)
    assert source.state_dict()["position"] == 0
    source.close()


def test_closing_ends_the_thread(ready):
    source = loader(ready, prefetch=4)
    next(source)
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    source.close()
    source.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_a_store_that_does_not_answer_delays_closing_by_seconds_only(ready, monkeypatch):
    monkeypatch.setattr(data_loader, "CLOSE_TIMEOUT", 0.05)
    requested, answer = threading.Event(), threading.Event()
    read = ready.store.source.read

    def slow(*args):
        requested.set()
        answer.wait(60)
        return read(*args)

    monkeypatch.setattr(ready.store.source, "read", slow)
    source = loader(ready)
    source._read_ahead(2)
    assert requested.wait(60)
    source.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    assert left
    assert all(thread.daemon for thread in left)  # the process does not wait for them
    answer.set()
    for thread in left:
        thread.join(60)


def test_nothing_is_read_after_closing(ready):
    source = loader(ready)
    source.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(source)


@each("prefetch, most", [(0, 2), (1, 2), (3, 4)])
def test_no_more_batches_exist_than_prefetch_allows(ready, monkeypatch, prefetch, most):
    made = []
    allocate = BatchReader.allocate
    monkeypatch.setattr(
        BatchReader, "allocate", lambda *args: made.append(batch := allocate(*args)) or batch
    )
    with loader(ready, prefetch=prefetch) as source:
        for number in range(1, 6):
            next(source)
            assert len(made) == number + prefetch <= number - 1 + most


@pytest.mark.slow
def test_several_threads_read_at_once(tmp_path, monkeypatch):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    ready = prepare_training_data(stores.config(path, workers=3, batch_size=3))
    meeting = threading.Barrier(3)
    read = ready.store.read_outputs

    def together(*args):
        meeting.wait(60)  # never, if the threads run one after the other
        return read(*args)

    monkeypatch.setattr(ready.store, "read_outputs", together)
    with loader(ready, sequence=SampleSequence(SAMPLES, 3), prefetch=0) as source:
        next(source)


@pytest.mark.slow
def test_samples_that_span_a_gap_are_counted(tmp_path, caplog):
    data = stores.dataset(steps=12).isel(time=[0, 1, 2, 4, 5, 6, 8, 9, 10, 11])
    path = stores.write(data, tmp_path / "store.zarr")
    config = stores.config(path, train=["2000-01-01", "2000-01-02"])
    ready = prepare_training_data(config)
    # Of the times 0, 1, 2, 4, 5 and 6, the 2 has nothing after it; 6 is the last.
    assert count_samples_across_gaps(ready.store, "train", 1, 4) == 1
    # Of three states and a target, 4 and 5 lack one; 0, 1 and 6 would reach out of the dates.
    assert count_samples_across_gaps(ready.store, "train", 3, 0) == 3
    with caplog.at_level(logging.INFO, "credit_dp"):
        Loader(ready, "train", WHOLE, SampleSequence(4, 2)).close()
    assert "4 samples; skipped across gaps in time: 1 more" in caplog.text


def rollouts(ready, at, longest=3, prefetch=2, frames=1, **settings):
    count = SAMPLES + 2 - longest - frames
    settings = {"sequence": SampleSequence(count, 2, seed=3), **settings}
    lengths = RolloutLengths(longest, at)
    return Loader(
        ready,
        "train",
        WHOLE,
        dtype=torch.float64,
        prefetch=prefetch,
        frames=frames,
        rollout_lengths=lengths,
        **settings,
    )


def assert_steps_of_the_store(ready, batch, length, frames=1):
    """The targets and forcings of a batch, from the store field by field."""
    normaliser = Normaliser.of(ready, torch.float64)
    outputs, forced = ready.store.channels.num_outputs, len(ready.store.channels.forcing)
    assert batch.target.shape[1] == length * outputs
    assert batch.forcing.shape[1] == length * forced
    for sample, time in enumerate(batch.times):
        for step in range(length):
            at = time + step * stores.STEP
            found = batch.target[sample, step * outputs : (step + 1) * outputs]
            fields = ready.store.read_outputs(np.array([at + stores.STEP]), WHOLE)[0]
            assert torch.equal(found, normaliser.normalise_outputs(fields))
            found = batch.forcing[sample, step * forced : (step + 1) * forced]
            assert torch.equal(
                found, normaliser.normalise_forcing(ready.store.read_forcing(at[None], WHOLE)[0])
            )
        for back, state in enumerate(reversed(batch.state[sample].tensor_split(frames))):
            fields = ready.store.read_states([time - back * stores.STEP], WHOLE)[0]
            assert torch.equal(state, normaliser.normalise_outputs(fields))


@pytest.mark.parametrize(
    ("chunks", "frames"), [(12, 2), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_a_rollout_has_the_fields_of_all_its_steps(tmp_path, chunks, frames):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr", chunks={"time": chunks})
    changes = {"prognostic": ["temperature"], "diagnostic": ["geopotential"]}
    ready = prepare_training_data(stores.config(path, **changes))
    with rollouts(ready, lambda batch: 3, frames=frames) as source:
        batch = next(source)
    assert_steps_of_the_store(ready, batch, 3, frames)
    # Diagnostic channels are in the target only.
    assert batch.state.shape[1:] == (3 * frames, 12, 8)
    assert batch.target.shape[1:] == (6 * 3, 12, 8)


@pytest.mark.slow
def test_lengths_follow_the_place_in_the_sequence_however_far_is_read_ahead(ready):
    lengths = [1, 1, 2, 3, 1, 2]
    for prefetch in (0, 1, 5):
        with rollouts(ready, lambda batch: lengths[batch % 6], prefetch=prefetch) as source:
            for length in lengths[:5]:
                assert_steps_of_the_store(ready, next(source), length)
            state = source.state_dict()
        with rollouts(ready, lambda batch: lengths[batch % 6], prefetch=prefetch) as source:
            next(source)
            source.load_state_dict(state)
            assert_steps_of_the_store(ready, next(source), 2)


def test_a_step_of_a_rollout_costs_the_bytes_of_its_fields(ready):
    with rollouts(ready, lambda batch: 1 + batch, prefetch=0) as source:
        next(source)
        read = []
        for _ in range(2):
            before = ready.store.bytes_read
            next(source)
            read.append(ready.store.bytes_read - before)
    # Two samples, each 7 prognostic channels and 1 stored forcing more, in float32.
    assert read[1] - read[0] == 2 * (7 + 1) * 12 * 8 * 4


@each(
    "reads, state, forcing, target",
    [
        (BatchSelection(last=False, target=False), 7, 3 * 2, 0),
        (BatchSelection(inputs=False), 7, 0, 3 * 7),
        (BatchSelection(inputs=False, last=False), 0, 0, 3 * 7),
    ],
)
def test_a_rollout_reads_no_more_than_is_wanted(ready, reads, state, forcing, target):
    with rollouts(ready, lambda batch: 3, selection=reads) as source:
        batch = next(source)
    shapes = [x.shape[1] for x in (batch.state, batch.forcing, batch.target)]
    assert shapes == [state, forcing, target]
    with rollouts(ready, lambda batch: 3) as source:
        whole = next(source)
    for name in ("state", "forcing", "target"):
        found = getattr(batch, name)
        assert not found.shape[1] or torch.equal(found, getattr(whole, name))


def test_batches_move_to_a_device_and_static_fields_once(ready, monkeypatch):
    moves = []
    move = torch.Tensor.to

    def counted(tensor, *args, **kwargs):
        moves.extend(arg for arg in args if arg == torch.device("meta"))
        return move(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    sequence = SampleSequence(SAMPLES, 2)
    with Loader(ready, "train", WHOLE, sequence, device=torch.device("meta")) as source:
        batches = take(source, 3)
    parts = [part for b in batches for part in (b.state, b.forcing, b.static, b.target)]
    assert {part.device.type for part in parts} == {"meta"}
    assert [len(b.times) for b in batches] == [2, 2, 2]
    assert len(moves) == 1 + 3 * len(batches)  # static; state, forcing and target of each batch


class CopyStream:
    """Stands for a stream of a GPU, and records what waits for it."""

    def __init__(self, events):
        self.events = events

    def __enter__(self):
        self.events.append("copy")

    def __exit__(self, *error):
        self.events.append("copied")

    def wait_stream(self, other):
        assert other is not self
        self.events.append("wait")


@pytest.fixture
def copy_events(monkeypatch):
    """Let batches be copied on a stream that is none, and return what happens, in order."""
    events = []
    copies, computing = CopyStream(events), CopyStream(events)
    monkeypatch.setattr(data_loader, "new_copy_stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    record = lambda tensor, stream: events.append("used" if stream is computing else "?")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return events


def test_the_next_batch_is_copied_while_the_present_one_computes(ready, copy_events):
    sequence = SampleSequence(SAMPLES, 2)
    with loader(ready, dtype=torch.float32, sequence=SampleSequence(SAMPLES, 2)) as plain:
        wanted = take(plain, 3)
    with Loader(ready, "train", WHOLE, sequence, device=torch.device("cpu")) as source:
        source._read_ahead(2)
        for pending in source._prefetched:
            pending.result()  # both are read
        found = [next(source)]
        copy, use = ["copy", "copied"], ["wait", *["used"] * 4]
        assert copy_events == [*copy, *use, *copy]
        copy_events.clear()
        found.append(next(source))
        assert copy_events[:5] == use  # it has been copied before
        state = source.state_dict()
        source.load_state_dict(state)  # drops what was read and copied ahead
        found.append(next(source))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.state, b.state)
        assert torch.equal(a.target, b.target)
        assert torch.equal(a.static, b.static)


def test_a_batch_that_fails_is_not_copied_ahead(ready, copy_events, monkeypatch):
    read = BatchReader.read_sample

    def failing(reader, batch, index, length=1):
        if batch.times[0] != first:
            raise UserError("a field is missing")
        read(reader, batch, index, length)

    sequence = SampleSequence(SAMPLES, 2)
    first = stores.times(SAMPLES)[sequence.indices(0)][0]
    monkeypatch.setattr(BatchReader, "read_sample", failing)
    with Loader(ready, "train", WHOLE, sequence, device=torch.device("cpu")) as source:
        next(source)
        for _ in range(2):
            with pytest.raises(UserError, match="a field is missing"):
                next(source)
    assert copy_events.count("copy") == 1


def test_normalising_and_inverting(ready):
    normaliser = Normaliser.of(ready, torch.float64)
    field = ready.store.read_states([stores.START], WHOLE)[0]
    state = normaliser.normalise_outputs(field)
    assert np.allclose(normaliser.denormalise(state).numpy(), field, rtol=1e-12)
    scale = ready.statistics.tendency_std / ready.statistics.std
    assert np.allclose(normaliser.tendency_scale[:, 0, 0].numpy(), scale)


@each(
    "values, finite",
    [
        ([1.0, 2.0], True),
        ([3e38, 3e38], True),  # their sum is not
        ([3e38, 3e38, np.nan], False),
        ([1.0, np.inf], False),
        ([np.inf, -np.inf], False),
    ],
)
def test_sums_that_overflow_are_checked_again(values, finite):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_finite(np.array(values, dtype=np.float32)) is finite
