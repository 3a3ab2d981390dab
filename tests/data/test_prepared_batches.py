"""Samples of prepared stores, read into batches whose memory is used again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from credit_dp.config import VariableConfig
from credit_dp.data.loader import BatchReader, BatchSelection, Loader, Normaliser
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.errors import UserError
from tests.data import prepared_stores, stores
from tests.tables import each, entry

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


BAND = slice(3, 9)


@each("dtype", [torch.float32, torch.bfloat16])
def test_batches_are_the_fields_normalised(path, dtype):
    for name, changes in CONFIGS.items():
        with entry(name):
            ready = prepare_training_data(stores.config(path, **settings(**changes)))
            store, normaliser = ready.store, Normaliser.of(ready, dtype)
            sequence = SampleSequence(TRAIN - 1, 2, seed=3)
            with Loader(ready, "train", BAND, sequence, dtype, prefetch=0) as loader:
                batch = next(loader)
            for sample, time in enumerate(batch.times):
                at = int(np.flatnonzero(store.times == time)[0])
                now, later = store.times[at : at + 1], store.times[at + 1 : at + 2]
                outputs = store.read_channels(store.channels.output_channels, later, BAND)
                expected = {
                    "state": normaliser.normalise_outputs(store.read_states(now, BAND)),
                    "target": normaliser.normalise_outputs(outputs),
                    "forcing": normaliser.normalise_forcing(store.read_forcing(now, BAND)),
                }
                for part, fields in expected.items():
                    assert torch.equal(getattr(batch, part)[sample], fields[0]), part


@each("last_only, length", [(False, 1), (False, 3), (True, 3)])
def test_inputs_of_the_last_times_need_no_target(path, last_only, length):
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
def test_values_are_checked(path, tmp_path, case, last):
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


def test_sums_over_a_step_are_read_from_all_its_times(tmp_path):
    data = stores.dataset(12, 8).rename(solar="total_precipitation")
    data["total_precipitation"] = abs(data["total_precipitation"]) / 1e5
    data["total_precipitation"].attrs["units"] = "m"
    path = prepared_stores.write(data, tmp_path / "sums.zarr")
    names = {"diagnostic": ["total_precipitation"], "forcing": [], "step": "12h"}
    ready = prepare_training_data(stores.config(path, **names))
    with Loader(ready, "train", slice(0, 12), SampleSequence(2, 1), prefetch=0) as loader:
        batch = next(loader)
    end = int(np.flatnonzero(data["time"].values == batch.times[0])[0]) + 2
    rain = data["total_precipitation"].values[end - 1 : end + 1].sum(0)
    scaled = Normaliser.of(ready, torch.float32).normalise_outputs
    place = [c.variable for c in ready.store.channels.output_channels].index("total_precipitation")
    fields = ready.store.read_channels(
        ready.store.channels.output_channels, data["time"].values[end : end + 1], slice(0, 12)
    )
    fields[0, place] = rain
    assert torch.allclose(batch.target[0], scaled(fields)[0], rtol=1e-5)
