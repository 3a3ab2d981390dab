import numpy as np
import pytest

from credit_dp.data.grid import row_weights
from credit_dp.data.moments import Moments
from credit_dp.data.prepare import prepare
from tests.data import stores


def direct(fields, weights):
    """Area-weighted mean and std over all but the channels: `(T, C, H, W)` -> two of `(C,)`."""
    fields = fields.astype(np.float64)
    every = np.broadcast_to(weights[:, None], fields.shape[-2:])
    means, stds = [], []
    for channel in range(fields.shape[1]):
        values = fields[:, channel]
        mean = np.average(values, weights=np.broadcast_to(every, values.shape))
        square = np.average((values - mean) ** 2, weights=np.broadcast_to(every, values.shape))
        means.append(mean)
        stds.append(np.sqrt(square))
    return np.array(means), np.array(stds)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("block_bytes", [1, 10**6])
@pytest.mark.parametrize("step_hours", [6, 12])
def test_statistics_equal_the_direct_ones(tmp_path, monkeypatch, chunk, block_bytes, step_hours):
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
    data = stores.dataset().sortby("latitude")
    path = stores.write(data, tmp_path / "store.zarr", chunks={"time": chunk})
    config = stores.config(path, step=f"{step_hours}h")
    ready = prepare(config)
    store, found = ready.store, ready.statistics
    weights = row_weights(store.latitude)
    training = stores.times(8)
    fields = np.stack([stores.expected(data, config, time) for time in training])
    offset = step_hours // 6
    changes = fields[offset:].astype(np.float64) - fields[:-offset]
    mean, std = direct(fields, weights)
    assert np.allclose(found.mean, mean, rtol=1e-12, atol=0)
    assert np.allclose(found.std, std, rtol=1e-12, atol=0)
    assert np.allclose(found.tendency_std, direct(changes, weights)[1], rtol=1e-12, atol=0)
    solar = data["solar"].sortby("latitude", ascending=False).values[:8, None]
    mean, std = direct(solar, weights)
    assert np.allclose(found.forcing_mean, [0, mean[0]], rtol=1e-12)
    assert np.allclose(found.forcing_std, [1, std[0]], rtol=1e-12)
    mean, std = direct(store.static(slice(None))[None], weights)
    assert np.allclose(found.static_mean, mean)
    assert np.allclose(found.static_std, std)


def test_no_change_is_taken_across_a_gap(tmp_path):
    data = stores.dataset().isel(time=[0, 1, 2, 5, 6, 7, 8, 9, 10, 11])
    data["temperature"].values[3:] += 1e6
    config = stores.config(stores.write(data, tmp_path / "store.zarr"), levels=[500])
    found = prepare(config).statistics
    assert found.std[2] > 1e5
    assert found.tendency_std[2] < 10


def test_constant_forcing_and_static_keep_their_scale(tmp_path):
    data = stores.dataset()
    data["solar"].values[:] = 3
    data["land_sea_mask"].values[:] = 0
    found = prepare(stores.config(stores.write(data, tmp_path / "store.zarr"))).statistics
    assert found.forcing_std[1] == 1
    assert found.static_std[1] == 1


def test_moments_survive_a_mean_far_greater_than_the_spread():
    random = np.random.default_rng(0)
    values = random.normal(size=(40, 3, 4)) * 1e-2 + 1e6
    moments = Moments(np.ones(3))
    moments.add(np.empty((0, 3, 4)))
    for part in np.split(values, 20):
        moments.add(part)
    assert np.isclose(moments._squares, np.square(values - values.mean()).sum(), rtol=1e-6)


def test_only_the_training_dates_count(tmp_path):
    data = stores.dataset()
    first = stores.write(data, tmp_path / "first.zarr")
    data["temperature"].values[8:] += 500
    second = stores.write(data, tmp_path / "second.zarr")
    found = [prepare(stores.config(path)).statistics for path in (first, second)]
    assert np.array_equal(found[0].mean, found[1].mean)
    assert len(list((tmp_path / "cache").glob("statistics-*.json"))) == 2
