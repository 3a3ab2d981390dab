"""A forecast is the same on every mesh, and equals the one that evaluation computes."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from credit_dp.config import ParallelConfig
from credit_dp.data.setup import prepare_training_data
from credit_dp.evaluation.held_out import EvaluationDates, HeldOutData, run_forecasts
from credit_dp.forecast import make_forecasts, open_sharded
from credit_dp.forecast.stored_forecast import ZarrForecast
from credit_dp.training.checkpoint import load_checkpoint
from tests.forecast.runs import (
    forecast,
    forecast_config,
    on_rank,
    train,
    train_diffusion,
    train_ensemble,
)
from tests.ranks import on_processes
from tests.tier_cases import tiers
from tests.training.runs import (
    alone,
    built,
    tiny_crossformer,
    tiny_unet,
)

# Ranks are threads here, and warnings are settings of the whole process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_same(found: xr.Dataset, wanted: xr.Dataset) -> None:
    """Compare to the last digit or, rarely, the last but one: reductions differ in float64."""
    assert set(found.data_vars) == set(wanted.data_vars)
    for name in wanted.data_vars:
        assert found[name].dims == wanted[name].dims
        a, b = found[name].values, wanted[name].values
        np.testing.assert_allclose(a, b, rtol=1.2e-7, atol=0)
        assert np.mean(a == b) > 0.99
    for name in wanted.coords:
        assert np.array_equal(found[name].values, wanted[name].values)


# 17 rows on 3 ranks do not end at chunk edges.
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_bands_are_those_of_one_process(config, whole, tmp_path, ranks):
    found = forecast(forecast_config(config, tmp_path / "bands.zarr"), ranks)
    high = -(-17 // ranks)
    with xr.open_zarr(found) as data, xr.open_zarr(whole) as wanted:
        assert data["geopotential"].chunksizes["latitude"][0] == high
        assert np.isfinite(wanted["geopotential"].values).all()
        assert_same(data, wanted)


@pytest.mark.slow
def test_files_of_ranks_are_those_of_one_process(config, whole, tmp_path):
    keys = {"format": "netcdf", "lead": "12h", "init": "2000-01-04T12"}
    found = forecast(forecast_config(config, tmp_path / "bands", **keys), ranks=3)
    assert len(list(found.glob("*.nc"))) == 3
    with open_sharded(found) as data, xr.open_zarr(whole) as wanted:
        assert_same(data, wanted.isel(time=[1], prediction_timedelta=[0, 1]))


MESHES = {
    "data": ParallelConfig(data=2),
    "fsdp2": ParallelConfig(data=2, data_mode="fsdp2"),
    "pipeline": ParallelConfig(pipeline=2, data=1),
    "domain": ParallelConfig(domain=2, data=1),
}


@pytest.mark.parametrize(
    "mesh", tiers(fast=[], slow=[("fsdp2",), ("pipeline",)], exhaustive=[("data",), ("domain",)])
)
def test_other_meshes_make_the_same(config, tmp_path, mesh):
    # Three times on two data ranks: one repeats a forecast that does not count.
    keys = {"init": "2000-01-03T12/2000-01-04T12/12h", "lead": "12h"}
    with xr.open_zarr(forecast(forecast_config(config, tmp_path / "one.zarr", **keys))) as wanted:
        on = replace(config, parallel=MESHES[mesh])
        out = tmp_path / "mesh.zarr"
        on_processes(
            2,
            on_rank,
            forecast_config(on, out, **keys),
            domain=on.parallel.domain,
            pipeline=on.parallel.pipeline,
        )
        with xr.open_zarr(out) as found:
            assert_same(found, wanted)


MODELS = {
    "next state of two": tiny_unet(residual=False, frames=2),
    "crossformer": tiny_crossformer(residual=False),
}


@pytest.mark.parametrize(
    "name",
    tiers(fast=[("averages",)], slow=[("next state of two",)], exhaustive=[("crossformer",)]),
)
def test_a_forecast_is_that_of_the_evaluation(config, tmp_path, name):
    if name in MODELS:
        config = train(tmp_path, MODELS[name])
    training = built(config, alone())
    settings = forecast_config(
        config, tmp_path / "f.zarr", init="2000-01-04T12", every="12h", lead="12h"
    )
    load_checkpoint(Path(settings.request.checkpoint), training.trainer.state)
    chosen = EvaluationDates("test", (12,), 6)
    dates = HeldOutData(
        config, prepare_training_data(config.data), slice(None), training.like, chosen
    )
    times = np.array(["2000-01-04T12"], "M8[ns]")
    with torch.no_grad(), training.trainer.state.eval_mode():
        start = dates.initial_states(times)
        *_, last = run_forecasts(training.ensemble.rollout, dates, times, start)
    wanted = dates.denormalise(last[:, 0])[0].float().numpy()
    with xr.open_zarr(forecast(settings)) as found:
        names = dict.fromkeys(c.variable for c in dates.prepared.store.channels.output_channels)
        fields = [found[n].values[0, 0].reshape(-1, *wanted.shape[1:]) for n in names]
    assert np.array_equal(np.concatenate(fields), wanted)


@pytest.mark.slow
def test_members_are_the_same_on_any_mesh(config, tmp_path, bands):
    keys = {"members": 2, "perturb": 0.1, "lead": "12h"}
    one = forecast(forecast_config(config, tmp_path / "one.zarr", **keys))
    two = forecast(forecast_config(config, tmp_path / "two.zarr", **keys), ranks=2)
    with xr.open_zarr(one) as wanted, xr.open_zarr(two) as found, open_sharded(bands) as files:
        assert wanted["2m_temperature"].dims[0] == "number"
        assert_same(found, wanted)
        assert_same(files, wanted)
        spread = wanted["2m_temperature"].isel(prediction_timedelta=0).std("number").mean()
        deviation = wanted["2m_temperature"].std()
        assert 0.01 < float(spread / deviation) < 0.2


# Three members on two data ranks: one repeats a forecast that does not count.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("train_noisy", "mesh"),
    [
        (train_ensemble, "domain"),
        pytest.param(train_ensemble, "data", marks=pytest.mark.slow),
        pytest.param(train_diffusion, "pipeline", marks=pytest.mark.slow),
        pytest.param(train_ensemble, "pipeline", marks=pytest.mark.exhaustive),
        pytest.param(train_diffusion, "data", marks=pytest.mark.exhaustive),
        pytest.param(train_diffusion, "domain", marks=pytest.mark.exhaustive),
    ],
)
def test_members_have_the_noise_of_evaluation_on_any_mesh(tmp_path, train_noisy, mesh):
    noisy = train_noisy(tmp_path)
    training = built(noisy, alone())
    on = replace(noisy, parallel=MESHES[mesh])
    init = "2000-01-04T12"
    keys = {"init": init, "lead": "12h", "members": 3, "perturb_seed": noisy.seed}
    settings = forecast_config(on, tmp_path / "f.zarr", **keys)
    load_checkpoint(Path(settings.request.checkpoint), training.trainer.state)
    chosen = EvaluationDates("test", (6, 12), 6)
    data = prepare_training_data(noisy.data)
    dates = HeldOutData(noisy, data, slice(None), training.like, chosen)
    times = np.array([init], "M8[ns]")
    with torch.no_grad(), training.trainer.state.eval_mode():
        start = dates.initial_states(times)
        *_, last = run_forecasts(training.ensemble.rollout, dates, times, start)
    names = [channel.name for channel in data.store.channels.output_channels]
    wanted = dates.denormalise(last[0])[:, names.index("2m_temperature")].float().numpy()
    assert (wanted.std(axis=0) > 0).all()
    if mesh == "domain":
        forecast(settings, ranks=2)
    else:
        on_processes(2, on_rank, settings, domain=1, pipeline=on.parallel.pipeline)
    with xr.open_zarr(tmp_path / "f.zarr") as found:
        fields = found["2m_temperature"].sel(prediction_timedelta="12h").values[:, 0]
    np.testing.assert_allclose(fields, wanted, rtol=3e-7)


@pytest.mark.slow
def test_only_one_lead_time_is_on_its_way_to_the_disk(config, tmp_path, monkeypatch):
    on_the_way = threading.Semaphore(1)
    counted: list[int] = []
    gather_parts, write = make_forecasts.split_by_variable, ZarrForecast.write

    def begin(*args):
        # A lead time is copied to memory only when the one before is on disk.
        assert on_the_way.acquire(blocking=False)
        counted.append(1)
        return gather_parts(*args)

    def end(*args):
        time.sleep(0.02)
        write(*args)
        on_the_way.release()

    monkeypatch.setattr(make_forecasts, "split_by_variable", begin)
    monkeypatch.setattr(ZarrForecast, "write", end)
    forecast(forecast_config(config, tmp_path / "f.zarr"))
    assert len(counted) == 8
