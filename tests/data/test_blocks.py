"""Samples of prepared stores, read block by block into batches whose memory is used again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.config import VariableConfig
from credit_dp.data.loader import BatchReader, BatchSelection, Loader, Normaliser
from credit_dp.data.sampling import RolloutLengths, SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources import stacked
from credit_dp.data.sources.prepared import PreparedSource
from credit_dp.errors import UserError
from tests.data import prepared_stores, stores
from tests.tables import each

ROWS, COLUMNS, TRAIN = 13, 8, 8
DATA = stores.dataset(ROWS, COLUMNS)
PARTS = ("state", "forcing", "static", "target")
LAND = np.zeros((ROWS, COLUMNS), bool)
LAND[5:, 3:] = True


def masked_dataset():
    data = DATA.copy(deep=True)
    data["2m_temperature"] = data["2m_temperature"].where(~LAND)
    return data


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return prepared_stores.write(masked_dataset(), tmp_path_factory.mktemp("blocks") / "s.zarr")


def settings(**changes):
    return {
        "variables": {"2m_temperature": VariableConfig(fill="mean")},
        "forcing": ["insolation", "solar", "day_of_year_sin"],
    } | changes


CONFIGS = {
    "all channels": {},
    "another order, and channels that are left out": {
        "prognostic": ["temperature", "2m_temperature"],
        "diagnostic": ["geopotential"],
        "levels": [1000, 500],
    },
    "units, transforms and fills": {
        "variables": {
            "2m_temperature": VariableConfig(fill=0.0, convert="degC->K"),
            "geopotential": VariableConfig(convert="gpm->m2 s-2"),
            "solar": VariableConfig(normalise="quantile"),
        },
        "forcing": ["solar"],
        "limits": {"2m_temperature": None, "geopotential": None, "solar": None},
    },
    "no stored forcing": {"forcing": ["day_of_year_sin"]},
    "no forcing": {"forcing": []},
    "forcings only": {"prognostic": ["2m_temperature"], "diagnostic": [], "static": []},
}


def batches(ready, count=3, rows=slice(0, ROWS), dtype=torch.float32, frames=1, longest=1, **more):
    sequence = SampleSequence(TRAIN + 1 - frames - longest, 2, seed=3)
    lengths = RolloutLengths(longest, lambda batch: 1 + batch % longest)
    options = {"prefetch": 0, "frames": frames, "rollout_lengths": lengths, **more}
    with Loader(ready, "train", rows, sequence, dtype, **options) as loader:
        return [next(loader) for _ in range(count)]


def assert_same_without_blocks(ready, monkeypatch, **how):
    """Compare all bits of batches with those of fields that are read whole."""
    found = batches(ready, **how)
    reads = ready.store.chunk_reads
    with monkeypatch.context() as patch:
        patch.setattr(BatchReader, "_read_blocks", lambda *_: False)
        expected = batches(ready, **how)
    assert ready.store.chunk_reads > reads
    for a, b in zip(found, expected, strict=True):
        for name in PARTS:
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.fixture
def only_blocks(monkeypatch):
    """Fail if a sample of this test's first loader is not read block by block."""
    read = BatchReader._read_blocks

    def checked(*args):
        assert read(*args)
        return True

    monkeypatch.setattr(BatchReader, "_read_blocks", checked)


# Parts of a plane, planes of a chunk or parts of one, two chunks, and all chunks.
BLOCK_SIZES = {40: slice(0, ROWS), 300: slice(3, 9), 2500: slice(0, ROWS), 2**20: slice(12, 13)}


@pytest.mark.slow
@each("case", CONFIGS)
def test_blocks_bring_the_same_bits(path, only_blocks, monkeypatch, case):
    ready = prepare_training_data(stores.config(path, **settings(**CONFIGS[case])))
    sizes = [*BLOCK_SIZES.items()]
    block_bytes, rows = sizes[[*CONFIGS].index(case) % len(sizes)]
    monkeypatch.setattr(stacked, "BLOCK_BYTES", block_bytes)
    assert_same_without_blocks(ready, monkeypatch, count=1, rows=rows)


@each("dtype", [torch.float64, torch.bfloat16])
def test_blocks_of_other_types(path, only_blocks, monkeypatch, dtype):
    changes = CONFIGS["units, transforms and fills"]
    ready = prepare_training_data(stores.config(path, **settings(**changes)))
    assert_same_without_blocks(ready, monkeypatch, rows=slice(3, 9), dtype=dtype)


@each(
    "frames, longest, selection",
    [
        (1, 3, BatchSelection()),
        (3, 1, BatchSelection()),
        (2, 2, BatchSelection(last=False, target=False)),
        (1, 3, BatchSelection(inputs=False)),
        (3, 1, BatchSelection(inputs=False, last=False)),
    ],
)
def test_rollouts_frames_and_selections(path, only_blocks, monkeypatch, frames, longest, selection):
    names = {"prognostic": ["geopotential", "2m_temperature"], "diagnostic": ["temperature"]}
    ready = prepare_training_data(stores.config(path, **settings(**names)))
    how = {"frames": frames, "longest": longest, "selection": selection, "rows": slice(2, 11)}
    assert_same_without_blocks(ready, monkeypatch, **how)


@each("last_only, length", [(False, 1), (False, 3), (True, 3)])
def test_inputs_of_the_last_times_need_no_target(path, only_blocks, last_only, length):
    ready = prepare_training_data(stores.config(path, **settings()))
    normaliser = Normaliser.of(ready, torch.float32)
    selection = BatchSelection(inputs=not last_only, target=False)
    reader = BatchReader(
        ready.store, normaliser, torch.float32, slice(2, 9), frames=2, selection=selection
    )
    times = ready.store.times
    newest = len(times) - (1 if last_only else length)
    batch = reader.allocate(times[newest : newest + 1], length)
    reader.read_sample(batch, 0, length)
    first = newest if last_only else newest - 1
    states = ready.store.read_states(times[first : newest + 1], slice(2, 9))
    assert torch.equal(batch.state[0].view(states.shape), normaliser.normalise_outputs(states))
    if not last_only:
        forcings = ready.store.read_forcing(times[newest:], slice(2, 9))
        expected = normaliser.normalise_forcing(forcings)
        assert torch.equal(batch.forcing[0].view(forcings.shape), expected)


PLAIN_ROWS = 24
WHOLE = slice(0, PLAIN_ROWS)


def plain_store(folder):
    data = stores.dataset(PLAIN_ROWS, 256)
    return prepared_stores.write(data, folder / "s.zarr", 12)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return prepare_training_data(stores.config(plain_store(tmp_path_factory.mktemp("plain"))))


def count_calls(monkeypatch, owner, name):
    """Count the calls of a function of a module."""
    calls = []
    function = getattr(owner, name)

    def counted(*args):
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.slow
def test_a_byte_is_read_once_in_blocks(plain, monkeypatch):
    channels, checksum = 8, 4
    field = PLAIN_ROWS * 256 * 4
    monkeypatch.setattr(stacked, "BLOCK_BYTES", 2**13)
    reads = count_calls(monkeypatch, stacked, "_fill")
    with Loader(plain, "train", WHOLE, SampleSequence(TRAIN - 1, 1), prefetch=0) as loader:
        for _ in range(3):  # the first batches bring the thread, its buffer and the memory
            next(loader)
        reads.clear()
        for _ in range(3):
            next(loader)
    # Two times of three batches. All channels of the store, as they share a checksum.
    assert sum(len(buffer) for _, buffer in reads) == 6 * (channels * field + 2 * checksum)
    # A chunk of 12 rows has 8 channels of 12 KB: in blocks of up to 8 KB these are two each.
    assert len(reads) == 6 * 2 * channels * 2


def test_memory_of_batches_is_used_again_when_nothing_refers_to_them(plain):
    sequence = SampleSequence(TRAIN - 1, 1, seed=3)
    with Loader(plain, "train", WHOLE, sequence, prefetch=2) as loader:
        weight = torch.ones((), requires_grad=True)
        kept, copies, losses = [], [], []
        for number in range(12):
            batch = next(loader)
            if number % 3 == 0:
                # A view, what autograd keeps for backward, and numpy's array.
                kept.append((batch.state[:, 2:3], batch.target.numpy()))
                losses.append((batch.forcing * weight).square().sum())
                square = batch.forcing.double().square().sum()
                copies.append((batch.state[:, 2:3].clone(), batch.target.clone(), square))
        del batch
    for (view, array), (state, target, _) in zip(kept, copies, strict=True):
        assert torch.equal(view, state)
        assert np.array_equal(array, target.numpy())
    for loss, (*_, square) in zip(losses, copies, strict=True):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert torch.allclose(gradient.double(), 2 * square)


DAMAGES = {
    "a bit that limits can't notice": (
        lambda content: content[:1024] + bytes([content[1024] ^ 1]) + content[1025:],
        "the checksum of a chunk is wrong",
    ),
    "a file that shrank": (lambda content: content[:-9000], "c.2.0.0.0"),
    "an empty file": (lambda content: b"", "c.2.0.0.0"),
}


def first_batch(ready, rows):
    with Loader(ready, "train", rows, SampleSequence(TRAIN - 1, TRAIN - 1)) as loader:
        return next(loader)


@each("damage", DAMAGES)
def test_damage_is_an_error_of_one_line(plain, damage):
    change, expected = DAMAGES[damage]
    path = Path(plain.store.source.where)
    file = path / "fields" / "c.2.0.0.0"
    intact = file.read_bytes()
    file.write_bytes(change(intact))
    with pytest.raises(UserError, match=expected) as caught:
        first_batch(plain, slice(0, 12))
    assert str(caught.value).startswith(f"{path}: fields/c.2.0.0.0")
    assert "\n" not in str(caught.value)
    file.write_bytes(intact)
    first_batch(plain, slice(0, 12))


VALUES = {
    "missing": (np.nan, "temperature has NaN"),
    "infinite": (np.inf, "temperature has infinite values"),
    "too large": (1e9, "temperature on level 850 is 1e\\+09"),
    "missing in a field with a fill": (np.nan, "2m_temperature has NaN"),
}


@pytest.mark.slow
@each("case, last", [("missing", False), ("infinite", True), ("too large", True),
                     ("missing in a field with a fill", False)])  # fmt: skip
def test_values_are_checked_in_blocks_as_in_fields(path, tmp_path, case, last):
    value, message = VALUES[case]
    data = masked_dataset()
    at = (5, 4, 2) if last else (5, 0, 0)
    if "fill" in case:
        data["2m_temperature"].values[at] = value
    else:
        data["temperature"].values[at[0], 1, *at[1:]] = value
    names = {"prognostic": ["2m_temperature"], "diagnostic": ["temperature"], "forcing": []}
    ready = prepare_training_data(stores.config(path, **settings(**names)))
    other = prepared_stores.write(data, tmp_path / "other.zarr") / "fields" / "c.5.0.0.0"
    file = path / "fields" / "c.5.0.0.0"
    intact = file.read_bytes()
    file.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match=message):
        first_batch(ready, slice(0, 5))
    first_batch(ready, slice(6, ROWS))  # other bands have no such value
    file.write_bytes(intact)


def test_what_no_block_can_hold_is_read_whole(tmp_path):
    source = PreparedSource.open(str(plain_store(tmp_path)))
    channels = prepared_stores.channels_of(stores.dataset())
    assert source.block_reader(channels, WHOLE) is not None
    data = stores.dataset(12, 8).rename(solar="total_precipitation")
    data["total_precipitation"] = abs(data["total_precipitation"]) / 1e5
    data["total_precipitation"].attrs["units"] = "m"
    path = prepared_stores.write(data, tmp_path / "sums.zarr")
    names = {"diagnostic": ["total_precipitation"], "forcing": [], "step": "12h"}
    ready = prepare_training_data(stores.config(path, **names))
    assert ready.store.block_reader(ready.store.channels.output_channels, slice(0, 12)) is None
    with Loader(ready, "train", slice(0, 12), SampleSequence(2, 1), prefetch=0) as loader:
        assert next(loader).target.shape[1] == 8
