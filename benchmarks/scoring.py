"""Measure the cost of scoring a store of forecasts: `python benchmarks/scoring.py`.

With `BENCH_WEATHERBENCH2=PYTHON`, a Python that can import `weatherbench2`, WeatherBench 2's own
code computes the same scores of the same stores in turn, for comparison.
"""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import xarray as xr
from side_by_side import Row, ratio
from table import show

from credit_dp.cli.evaluate import open_forecast
from credit_dp.evaluation.alignment import ScoreRequest, align
from credit_dp.evaluation.forecast_blocks import read_blocks

PEER = os.environ.get("BENCH_WEATHERBENCH2", "")
ROUNDS = 3
ROWS, COLUMNS, LEVELS = 32, 64, (300, 500, 700, 850)
# Means of the fields, close to real ones: implausible values would be refused.
ON_LEVELS = {"geopotential": (9e4, 5.5e4, 3e4, 1.4e4), "temperature": (225, 250, 270, 280)}
AT_SURFACE = {"2m_temperature": 280, "mean_sea_level_pressure": 1e5, "10m_u_component_of_wind": 0}
STEP = np.timedelta64(6, "h").astype("m8[ns]")
STARTS, APART, LEADS = 13, 8, 20  # forecasts, steps from one start to the next, and lead times
TIMES = (STARTS - 1) * APART + LEADS + 1
WAVES = 10  # zonal wavenumbers in fields
TOGETHER = 40  # times in a chunk of the truth, days in one of the climatology
SAME = 1e-6  # largest difference from the peer's scores, which are of order one
WHAT = f"{STARTS} x {LEADS} forecasts of 11 fields at {ROWS}x{COLUMNS}"


def rows() -> list[Row]:
    """Return the chunks that the command reads, and its processor time relative to the peer's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_stores(folder)
        chunks = len(ON_LEVELS | AT_SURFACE) * -(-TIMES // TOGETHER)
        what = f"chunks of the truth that scoring {WHAT} reads"
        found = [Row(what, "each once", chunk_reads(folder) / chunks, 1.0)]
        own, first, second = spent(folder)
        what = f"processor time of scoring {WHAT}"
        if not PEER:
            return [*found, Row(what, "", min(own), None, median(own), unit="s")]
        check_same(folder)
        best, typical, spread = ratio(own, first, second)
        note = f"{median(own):.1f} s against {median([*first, *second]):.1f} s"
        against = "the same scores by WeatherBench 2's code"
        return [*found, Row(what, against, best, 1.0, typical, spread, note=note)]


def spent(folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of processor time of each round: ours once, the peer's twice."""
    stores = [str(folder / f"{name}.zarr") for name in ("forecast", "truth", "climatology")]
    keys = [
        f"{key}={store}"
        for key, store in zip(("forecast", "truth", "climatology"), stores, strict=True)
    ]
    peer = [PEER, str(Path(__file__).with_name("scoring_peer.py")), *stores, str(folder)]
    own: list[float] = []
    peers: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        ours = [sys.executable, "-m", "credit_dp", "evaluate", *keys, f"out={folder / str(number)}"]
        own.append(processor_time(ours))
        for times in peers if PEER else ():
            times.append(processor_time(peer))
    return own, *peers


def processor_time(command: Sequence[str]) -> float:
    """Return the processor time of a program and of all processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def chunk_reads(folder: Path) -> int:
    """Return the number of chunks of the truth that scoring reads."""
    request = ScoreRequest(
        forecast=str(folder / "forecast.zarr"),
        truth=(str(folder / "truth.zarr"),),
        cache=str(folder),
        climatology=str(folder / "climatology.zarr"),
    )
    aligned = align(request, open_forecast(request.forecast), lambda what, part: None)
    for _ in read_blocks(aligned, None):
        pass
    return aligned.truth.chunk_reads


def check_same(folder: Path) -> None:
    """Check that both programs computed the same scores, so that their costs are comparable."""
    with (folder / "0" / "scores.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["score"] in ("rmse", "acc", "bias")]
    peers = {of: xr.open_dataset(folder / f"{of}.nc") for of in {line["of"] for line in lines}}
    for line in lines:
        metric = {"rmse": "mse"}.get(line["score"], line["score"])
        wanted = peers[line["of"]][line["variable"]].sel(metric=metric)
        if line["level"]:
            wanted = wanted.sel(level=int(line["level"]))
        value = float(wanted.sel(lead_time=np.timedelta64(int(line["lead_hours"]), "h")))
        value = value**0.5 if metric == "mse" else value
        if abs(float(line["value"]) - value) > SAME:
            raise SystemExit(f"the peer has {value} for {line}")


def make_stores(folder: Path) -> None:
    """Write forecasts, truth and climatology in WeatherBench 2's form: smooth random fields."""
    times = np.datetime64("2020-01-01", "ns") + np.arange(TIMES) * STEP
    truth = normals() + anomalies({"time": times})
    store(truth, folder / "truth.zarr", time=TOGETHER)
    leads = np.arange(1, LEADS + 1) * STEP
    starts = times[: (STARTS - 1) * APART + 1 : APART]
    valid = xr.DataArray(starts, dims="time") + xr.DataArray(leads, dims="prediction_timedelta")
    labels = {"time": starts, "prediction_timedelta": leads}
    forecast = truth.sel(time=valid).assign_coords(labels) + 0.3 * anomalies(labels)
    store(forecast, folder / "forecast.zarr", time=1, prediction_timedelta=1)
    days = {"hour": np.arange(0, 24, 6), "dayofyear": np.arange(1, 367)}
    store(normals() + anomalies(days), folder / "climatology.zarr", hour=1, dayofyear=TOGETHER)


def normals() -> xr.Dataset:
    """Return the mean of each variable."""
    on_levels = {
        name: xr.DataArray(np.array(values, "f4"), {"level": np.array(LEVELS)})
        for name, values in ON_LEVELS.items()
    }
    return xr.Dataset({**on_levels, **{name: np.float32(x) for name, x in AT_SURFACE.items()}})


def anomalies(labels: dict[str, np.ndarray]) -> xr.Dataset:
    """Return random fields of all variables, with these dims, latitude and longitude."""
    random = np.random.default_rng(0)
    latitude = 90 - (np.arange(ROWS) + 0.5) * 180 / ROWS
    grid = {"latitude": latitude, "longitude": np.arange(COLUMNS) * 360 / COLUMNS}
    found = {}
    for name in (*ON_LEVELS, *AT_SURFACE):
        coords = {**labels, **({"level": np.array(LEVELS)} if name in ON_LEVELS else {}), **grid}
        shape = [len(values) for values in coords.values()]
        waves = random.normal(size=(*shape[:-1], WAVES)) * np.exp(2j * np.pi * random.random(WAVES))
        fields = 100 * np.fft.irfft(waves, COLUMNS)
        found[name] = xr.DataArray(fields.astype("f4"), coords, list(coords))
    return xr.Dataset(found)


def store(data: xr.Dataset, path: Path, **chunks: int) -> None:
    """Write a store whose chunks span the globe and all levels."""
    encoding = {
        name: {"chunks": tuple(chunks.get(str(dim), array.sizes[dim]) for dim in array.dims)}
        for name, array in data.data_vars.items()
    }
    data.drop_encoding().to_zarr(path, encoding=encoding, consolidated=False)


if __name__ == "__main__":
    show(rows())
