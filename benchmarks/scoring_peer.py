"""Compute the scores of `scoring.py` with WeatherBench 2's own code, in a Python that has it.

`PYTHON scoring_peer.py FORECAST TRUTH CLIMATOLOGY OUT` scores the forecasts, persistence and the
climatology: squared error and bias of all three, anomaly correlation of the first two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import xarray as xr
from weatherbench2 import config, evaluation, metrics


def main(forecast: str, truth: str, climatology: str, out: str) -> None:
    """Write a netCDF file `(metric, lead_time, level)` for each source."""
    normals = evaluation.make_latitude_increasing(xr.open_zarr(climatology))
    plain = {"mse": metrics.MSE(), "bias": metrics.Bias()}
    every = {**plain, "acc": metrics.ACC(climatology=normals)}
    stored = xr.open_zarr(forecast)
    data = config.Data(
        selection=config.Selection(
            variables=list(map(str, stored.data_vars)),
            levels=stored["level"].values.tolist(),
            time_slice=slice(None, None),
        ),
        paths=config.Paths(forecast, truth, out, climatology=climatology),
        by_init=True,
    )
    evaluation.evaluate_in_memory(
        data,
        {
            "forecast": config.Eval(metrics=every),
            "climatology": config.Eval(metrics=plain, evaluate_climatology=True),
        },
    )
    persistence(data, every).to_netcdf(Path(out) / "persistence.nc")


def persistence(data: config.Data, scores: dict[str, metrics.Metric]) -> xr.Dataset:
    """Score persistence as its pipelines do; its evaluation in memory has no persistence."""
    forecast, truth, _ = evaluation.open_forecast_and_truth_datasets(
        data, config.Eval(metrics=scores), use_dask=True
    )
    start = truth.sel(time=forecast.init_time).expand_dims(lead_time=forecast.lead_time)
    start = start.assign_coords(valid_time=forecast.valid_time)
    observed = truth.sel(time=forecast.valid_time)
    found = [metric.compute(forecast=start, truth=observed) for metric in scores.values()]
    return xr.concat(found, "metric", join="exact").assign_coords(metric=list(scores))


if __name__ == "__main__":
    main(*sys.argv[1:])
