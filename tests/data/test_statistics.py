from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch

from credit_dp.config.data import VariableConfig
from credit_dp.data import streaming
from credit_dp.data.grid import row_weights
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.statistics import (
    NO_QUANTILES,
    Moments,
    Statistics,
    add_moments,
    compute_moments,
    moments_to_statistics,
)
from credit_dp.data.store import Store
from credit_dp.data.streaming import PieceWorkers, TrainingDates
from credit_dp.data.transforms import QuantileMap, sample_quantiles, weighted_quantiles
from credit_dp.errors import UserError
from tests.data import region_stores, stores
from tests.tables import each


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


@each("chunk, block_bytes, step_hours", [(1, 1, 6), (3, 10**6, 12)])
def test_statistics_equal_the_direct_ones(tmp_path, monkeypatch, chunk, block_bytes, step_hours):
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
    data = stores.dataset().sortby("latitude")
    path = stores.write(data, tmp_path / "store.zarr", chunks={"time": chunk})
    config = stores.config(path, step=f"{step_hours}h", test=["2000-01-03T12", "2000-01-03T12"])
    ready = prepare_training_data(config)
    store, found = ready.store, ready.statistics
    weights = row_weights(store.latitude)
    every = step_hours // 6
    fields = np.stack([stores.expected(data, config, time) for time in stores.times(8)[::every]])
    changes = np.diff(fields.astype(np.float64), axis=0)
    mean, std = direct(fields, weights)
    assert np.allclose(found.mean, mean, rtol=1e-12, atol=0)
    assert np.allclose(found.std, std, rtol=1e-12, atol=0)
    assert np.allclose(found.tendency_std, direct(changes, weights)[1], rtol=1e-12, atol=0)
    assert np.array_equal(found.minimum, fields.min(axis=(0, 2, 3)))
    assert np.array_equal(found.maximum, fields.max(axis=(0, 2, 3)))
    solar = data["solar"].sortby("latitude", ascending=False).values[:8:every, None]
    mean, std = direct(solar, weights)
    assert np.allclose(found.forcing_mean, [0, mean[0]], rtol=1e-12)
    assert np.allclose(found.forcing_std, [1, std[0]], rtol=1e-12)
    mean, std = direct(store.read_static(slice(None))[None], weights)
    assert np.allclose(found.static_mean, mean)
    assert np.allclose(found.static_std, std)


def test_neither_gaps_nor_constants_spoil_the_scale(tmp_path):
    """No change is taken across a gap, and a constant forcing or static field keeps its scale."""
    data = stores.dataset().isel(time=[0, 1, 2, 5, 6, 7, 8, 9, 10, 11])
    data["temperature"].values[3:] += 1e6
    data["solar"].values[:] = 3
    data["land_sea_mask"].values[:] = 0
    changes = {"levels": [500], "limits": {"temperature": None}}
    config = stores.config(stores.write(data, tmp_path / "store.zarr"), **changes)
    found = prepare_training_data(config).statistics
    assert found.std[2] > 1e5
    assert found.tendency_std[2] < 10
    assert found.forcing_std[1] == 1
    assert found.static_std[1] == 1


def test_moments_survive_a_mean_far_greater_than_the_spread():
    random = np.random.default_rng(0)
    values = random.normal(size=(40, 3, 4)) * 1e-2 + 1e6
    moments = Moments() + Moments.of(np.empty((0, 3, 4)), np.ones(3))
    for part in np.split(values, 20):
        moments += Moments.of(part, np.ones(3))
    assert np.isclose(moments.squares, np.square(values - values.mean()).sum(), rtol=1e-6)


@pytest.mark.slow
def test_only_the_training_dates_count(tmp_path):
    data = stores.dataset()
    first = stores.write(data, tmp_path / "first.zarr")
    data["temperature"].values[8:] += 500
    second = stores.write(data, tmp_path / "second.zarr")
    found = [prepare_training_data(stores.config(path)).statistics for path in (first, second)]
    assert np.array_equal(found[0].mean, found[1].mean)
    assert len(list((tmp_path / "cache").glob("statistics-*.json"))) == 2


def of_pieces(store, every=1, workers=1, quantiles=NO_QUANTILES):
    """Return the statistics merged from pieces."""
    dates = streaming.TrainingDates.of(store, every)
    pieces = streaming.all_pieces(store, dates)
    process = partial(compute_moments, quantiles=quantiles)
    total = {}
    with closing(PieceWorkers(store, dates, workers)) as pool:
        for moments in pool.run(process, pieces):
            add_moments(total, moments)
    return Statistics.of(moments_to_statistics(store, total, quantiles), store, "here"), pieces


@each("every, chunk", [(1, 1), (3, 2)])
def test_any_pieces_and_any_every_equal_the_direct_ones(tmp_path, monkeypatch, every, chunk):
    monkeypatch.setattr(streaming, "split_dates", stores.split_by_day)
    monkeypatch.setattr(streaming, "TIME_BYTES", 4 * 3 * 5 * 8)
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", 1)
    data = stores.dataset(steps=24)
    spans = {"train": ["2000-01-01", "2000-01-05"], "valid": ["2000-01-06"] * 2}
    config = stores.config(
        stores.write(data, tmp_path / "store.zarr", chunks={"time": chunk}), **spans
    )
    store = Store.open(config)
    found, pieces = of_pieces(store, every, workers=2)
    assert len({piece.rows.start for piece in pieces}) > 1
    fields = np.stack([stores.expected(data, config, time) for time in stores.times(20)])
    fields = fields.astype(np.float64)
    weights = row_weights(store.latitude)
    mean, std = direct(fields[::every], weights)
    assert np.allclose(found.mean, mean, rtol=1e-12, atol=0)
    assert np.allclose(found.std, std, rtol=1e-12, atol=0)
    changes = np.diff(fields, axis=0)[::every]
    assert np.allclose(found.tendency_std, direct(changes, weights)[1], rtol=1e-12, atol=0)


def test_threads_do_not_change_a_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "split_dates", stores.split_by_day)
    store = Store.open(stores.config(stores.write(stores.dataset(), tmp_path / "store.zarr")))
    one, three = (of_pieces(store, workers=workers)[0] for workers in (1, 3))
    for name in ("mean", "std", "tendency_std", "minimum", "forcing_std"):
        assert np.array_equal(getattr(one, name), getattr(three, name))


def test_points_without_values_have_no_weight(tmp_path):
    data = stores.dataset()
    land = np.random.default_rng(3).random((12, 8)) < 0.4
    land[2:4] = True
    data["2m_temperature"].values[:, land] = np.nan
    data["2m_temperature"].values[5:, 0, 0] = 1e6  # inside the mask
    data["2m_temperature"].values[:5, 0, 0] = np.nan
    data["solar"].values[:, land] = np.nan
    data["land_sea_mask"].values[land] = np.nan
    land[0, 0] = True
    names = ("2m_temperature", "solar", "land_sea_mask")
    variables = {name: VariableConfig(fill="mean") for name in names}
    config = stores.config(stores.write(data, tmp_path / "store.zarr"), variables=variables)
    found = prepare_training_data(config).statistics
    weights = np.where(land, 0, row_weights(np.linspace(90, -90, 12))[:, None])

    def moments(fields):
        fields = np.nan_to_num(fields.astype(np.float64))
        every = np.broadcast_to(weights, fields.shape)
        mean = np.average(fields, weights=every)
        return mean, np.sqrt(np.average((fields - mean) ** 2, weights=every))

    values = data["2m_temperature"].values[:8]
    assert np.allclose((found.mean[3], found.std[3]), moments(values), rtol=1e-12)
    changes = np.diff(values.astype(np.float64), axis=0)
    assert np.isclose(found.tendency_std[3], moments(changes)[1], rtol=1e-12)
    assert found.maximum[3] == values[:, ~land].max()
    mask = data["land_sea_mask"].values
    weights = np.where(np.isnan(mask), 0, row_weights(np.linspace(90, -90, 12))[:, None])
    assert np.isclose(found.static_mean[1], moments(mask[None])[0], rtol=1e-12)
    assert np.isclose(found.forcing_mean[1], moments(data["solar"].values[:8])[0], rtol=1e-12)


@pytest.mark.slow
def test_transform_comes_before_the_moments(tmp_path):
    data = stores.dataset()
    rain = np.abs(np.random.default_rng(0).normal(size=(12, 12, 8))).astype("f4") * 1e-3
    data["rain"] = (("time", "latitude", "longitude"), rain)
    variables = {"rain": VariableConfig(normalise="log1p(1e-5)")}
    path = stores.write(data, tmp_path / "store.zarr")
    names = ["geopotential", "rain", "temperature"]
    found = prepare_training_data(
        stores.config(path, prognostic=names, variables=variables)
    ).statistics
    values = rain[:8].astype(np.float64)[:, None]
    values = np.log1p(values / 1e-5)
    weights = row_weights(np.linspace(90, -90, 12))
    mean, std = direct(values, weights)
    assert np.allclose((found.mean[3], found.std[3]), (mean[0], std[0]), rtol=1e-6)
    change = direct(np.diff(values, axis=0), weights)[1]
    assert np.isclose(found.tendency_std[3], change[0], rtol=1e-6)
    assert np.isclose(found.maximum[3], values.max(), rtol=1e-6)


@pytest.mark.slow
def test_diagnostic_channels_come_after_the_prognostic_ones(tmp_path):
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    all_of_them = prepare_training_data(stores.config(path)).statistics
    roles = {"prognostic": ["temperature"], "diagnostic": ["2m_temperature", "geopotential"]}
    found = prepare_training_data(stores.config(path, **roles)).statistics
    order = [4, 5, 6, 3, 0, 1, 2]
    for name in ("mean", "std", "tendency_std", "minimum", "maximum"):
        assert np.array_equal(getattr(found, name), getattr(all_of_them, name)[order])


@pytest.mark.slow
@each(
    "role, normalise, allowed",
    [
        ("prognostic", "standard", False),
        ("diagnostic", "none", True),
    ],
)
def test_constant_channels_are_refused_where_they_would_divide(tmp_path, role, normalise, allowed):
    data = stores.dataset()
    data["2m_temperature"].values[:] = 280
    roles = {"prognostic": ["temperature"], "diagnostic": []}
    roles[role] = [*roles[role], "2m_temperature"]
    variables = {"2m_temperature": VariableConfig(normalise=normalise)}
    config = stores.config(
        stores.write(data, tmp_path / "store.zarr"), variables=variables, **roles
    )
    if allowed:
        assert prepare_training_data(config).statistics.std[-1] == 0
        return
    with pytest.raises(UserError, match=f"2m_temperature is constant .* data.{role}"):
        prepare_training_data(config)


QUANTILE = {
    name: VariableConfig(normalise="quantile") for name in ("temperature", "solar", "land_sea_mask")
}


def test_moments_are_of_values_mapped_by_quantiles(tmp_path):
    data = stores.dataset()
    path = stores.write(data, tmp_path / "store.zarr")
    found = prepare_training_data(stores.config(path, variables=QUANTILE)).statistics
    plain = prepare_training_data(stores.config(path)).statistics
    assert not plain.quantiles.size
    assert found.quantiles.shape == (7, 129)
    of_temperature = np.isfinite(found.quantiles).all(axis=1)
    names = [c.variable for c in Store.open(stores.config(path)).channels.output_channels]
    assert of_temperature.tolist() == [name == "temperature" for name in names]
    assert np.isnan(found.quantiles[~of_temperature]).all()
    assert (found.mean == plain.mean).tolist() == (~of_temperature).tolist()
    weights = row_weights(np.linspace(90, -90, 12))
    fields = data["temperature"].transpose("level", "time", "latitude", "longitude").values[:, :8]
    for channel, values in zip(np.flatnonzero(of_temperature), fields, strict=True):
        rows = values.transpose(1, 0, 2).reshape(12, -1)
        quantiles = weighted_quantiles(rows, weights)
        assert np.array_equal(found.quantiles[channel], quantiles)
        mapped = QuantileMap(quantiles)(torch.tensor(values, dtype=torch.float64)).numpy()
        mean, std = direct(mapped[:, None], weights)
        assert np.allclose((found.mean[channel], found.std[channel]), (mean[0], std[0]), rtol=1e-9)
        assert abs(std[0] - 1) < 0.05
        change = direct(np.diff(mapped, axis=0)[:, None], weights)[1]
        assert np.isclose(found.tendency_std[channel], change[0], rtol=1e-9)
        assert found.maximum[channel] == mapped.max()
    assert np.isfinite(found.forcing_quantiles[1]).all()
    assert np.isnan(found.forcing_quantiles[0]).all()  # computed
    mask = data["land_sea_mask"].values
    assert np.array_equal(found.static_quantiles[1], weighted_quantiles(mask, weights))


def test_quantiles_depend_neither_on_chunks_nor_on_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("credit_dp.data.transforms.QUANTILE_VALUES", 12 * 20)
    found, sampled = [], []
    for chunk, block_bytes, workers in ((1, 10**6, 1), (3, 1, 3)):
        monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(streaming, "TIME_BYTES", 10**6 if chunk == 1 else 700)
        path = stores.write(stores.dataset(), tmp_path / f"{chunk}.zarr", chunks={"time": chunk})
        store = Store.open(stores.config(path, variables=QUANTILE))
        sampled.append(sample_quantiles(store, TrainingDates.of(store)))
        found.append(of_pieces(store, workers=workers, quantiles=sampled[-1])[0])
    first, second = sampled
    assert list(first) == ["temperature_500", "temperature_850", "temperature_1000", "solar"]
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert np.allclose(found[0].mean, found[1].mean, rtol=1e-9, atol=1e-12)
    assert np.allclose(found[0].std, found[1].std, rtol=1e-12)
    # A part of the columns of each date: 64 values would be 8 x 12 x 8.
    fields = stores.dataset()["temperature"].isel(level=0).values[:8]
    columns = [fields[date, :, date % 4 :: 4] for date in range(8)]
    wanted = weighted_quantiles(
        np.concatenate(columns, axis=1), row_weights(np.linspace(90, -90, 12))
    )
    assert np.array_equal(first["temperature_500"], wanted)


@each("kind, block_bytes", [("box", 1), ("lambert", 10**6)])
def test_the_rim_of_a_region_has_no_weight(kind, block_bytes, tmp_path, monkeypatch):
    """Far-off values at the edges change neither moments, nor ranges, nor quantiles.

    A static field that is constant inside keeps the spread that it has with them.
    """
    monkeypatch.setattr("credit_dp.data.store.BLOCK_BYTES", block_bytes)
    data, inside = region_stores.dataset(kind), (..., slice(3, -3), slice(3, -3))
    names = ("2m_temperature", "mean_sea_level_pressure")
    for name in (*names, "land_sea_mask"):
        field = data[name].values
        inner = field[inside].copy()
        field += 40
        field[inside] = inner
    path = tmp_path / "region.zarr"
    data.to_zarr(path, zarr_format=2)
    config = stores.config(
        path, prognostic=["2m_temperature"], forcing=["mean_sea_level_pressure"],
        static=["land_sea_mask"], limits={"land_sea_mask": None}, boundary=3,
        variables={"mean_sea_level_pressure": VariableConfig(normalise="quantile")},
        train=["2019-12-28", "2020-01-02"], valid=["2020-01-03", "2020-01-04"],
        test=["2020-01-05", "2020-01-06"],
    )  # fmt: skip
    found = prepare_training_data(config).statistics
    north_up = slice(None, None, -1 if kind == "lambert" else 1)
    areas = region_stores.areas(kind)
    weights = areas[inside]

    def moments(values, weights=weights):
        full = np.broadcast_to(weights, values.shape)
        mean = np.average(values, weights=full)
        return mean, np.sqrt(np.average((values - mean) ** 2, weights=full))

    inner = {name: data[name].values[..., north_up, :][inside].astype(float) for name in names}
    states = inner["2m_temperature"][:24]
    mean, std = moments(states)
    assert found.mean[0] == pytest.approx(mean, rel=1e-9)
    assert found.std[0] == pytest.approx(std, rel=1e-6)
    assert found.tendency_std[0] == pytest.approx(moments(np.diff(states, axis=0))[1], rel=1e-6)
    assert (found.minimum[0], found.maximum[0]) == (states.min(), states.max())
    mean, std = moments(data["land_sea_mask"].values[north_up].astype(float), areas)
    assert std > 10
    assert (found.static_mean[0], found.static_std[0]) == pytest.approx((mean, std), rel=1e-4)
    forcing = inner["mean_sea_level_pressure"][:24].reshape(-1, weights.size)
    tiled = np.broadcast_to(weights.ravel(), forcing.shape)
    assert np.array_equal(found.forcing_quantiles[0], weighted_quantiles(forcing, tiled))
    assert found.forcing_quantiles[0].max() <= forcing.max()
