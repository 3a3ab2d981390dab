"""Makes a quickstart store: independent runs of the climate, one process each, end to end in time.

`build` creates the store (`create`), starts one `simulation` per run, which writes its own shards
(`write`), consolidates the metadata and renames the folder.
"""

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_dp.config import QuickstartConfig
from credit_dp.data.cache import ProgressCallback, fingerprint
from credit_dp.data.calendar import Times
from credit_dp.data.quickstart.dynamics import LEVELS, TITLE, Array, Physics
from credit_dp.data.quickstart.physical_fields import Synthesis
from credit_dp.errors import UserError
from credit_dp.files import atomic_path, remove_if_possible, temporary_path
from credit_dp.process import usable_cores

VERSION = 2  # to be raised when the content of stores changes
GAP_DAYS = 10
STEPS_PER_DAY = 4
BLOCK_BYTES = 64 * 2**20  # of fields in memory per process
MAX_SHARD_STEPS = 40  # time steps: the index that every read fetches stays small
FIELDS_PER_STEP = 14  # two-dimensional fields in one time step


def store_name(config: QuickstartConfig, grid: tuple[int, int] | None) -> str:
    """Return the store's folder name: it differs whenever the content would."""
    rows, columns = config.grid_or_default(grid)
    digest = fingerprint(asdict(config), asdict(Physics()), rows, columns, VERSION)[:12]
    return f"quickstart-T{config.truncation}-{rows}x{columns}-{digest}.zarr"


@final
@dataclass(frozen=True)
class Run:
    """One independent integration, which fills the time steps `first:first + steps`."""

    index: int
    start: np.datetime64
    first: int
    steps: int

    @property
    def times(self) -> Times:
        """Return the six-hourly times, `(steps,)`."""
        step_hours = 24 // STEPS_PER_DAY
        return np.asarray(self.start + np.arange(self.steps) * np.timedelta64(step_hours, "h"))


def plan_runs(config: QuickstartConfig) -> list[Run]:
    """Return the runs of a store in order of time.

    Raises:
        UserError: the start is not a date.
    """
    try:
        start = np.datetime64(config.start, "h")
        # The store's times count from midnight of this date, and minutes would be dropped.
        is_date = np.datetime64(config.start) == start.astype("M8[D]")
    except ValueError:
        is_date = False
    if not is_date:
        raise UserError(
            f"data.quickstart.start: needs a date like 2001-01-01, but it is {config.start!r}."
        )
    period = np.timedelta64(config.run_days + GAP_DAYS, "D")
    steps = config.run_days * STEPS_PER_DAY
    return [Run(i, start + i * period, i * steps, steps) for i in range(config.runs)]


def shard_steps(steps: int, grid: tuple[int, int]) -> int:
    """Return the time steps per shard: the most that fit in memory and divide a run evenly.

    So no shard is shared by two runs, whose processes write at the same time.
    """
    per_step = FIELDS_PER_STEP * 4 * grid[0] * grid[1]
    max_steps = max(1, min(MAX_SHARD_STEPS, BLOCK_BYTES // per_step))
    return max(
        steps_per_shard
        for steps_per_shard in range(1, max_steps + 1)
        if steps % steps_per_shard == 0
    )


def day_of_year(time: np.datetime64) -> float:
    """Return the days since the first midnight of the year."""
    return float((time - time.astype("datetime64[Y]")) / np.timedelta64(1, "D"))


WORKER = "credit_dp.data.quickstart.simulation"
# Read by BLAS libraries. Workers get one thread each, as there is up to one worker per core.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def build(
    config: QuickstartConfig,
    grid: tuple[int, int] | None,
    path: Path,
    progress: ProgressCallback | None = None,
) -> None:
    """Integrate the climate and write it to `path`, which appears complete or not at all.

    The bytes depend on `config` and `grid` only, not on the number of cores. The caller holds a
    lock, so that a path is built once at a time.

    Raises:
        UserError: a setting is out of range, or a run failed, for example as the disk is full.
    """
    resolved_grid = config.grid_or_default(grid)
    runs = plan_runs(config)
    title = f"{TITLE}, T{config.truncation}, seed {config.seed}"
    # The caller's lock makes sure that no other process is writing it.
    remove_if_possible(temporary_path(path))  # what a killed build left
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            create(temporary, Synthesis(config.truncation, resolved_grid), runs, title)
            _integrate(
                config, resolved_grid, temporary, runs, progress or (lambda _message, _share: None)
            )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Consolidated metadata")
                zarr.consolidate_metadata(temporary, zarr_format=3)  # then one file opens the store
    except OSError as error:
        raise UserError(
            f"quickstart climate: {path} could not be written ({error.strerror or error}). "
            f"Free some space or point data.cache at another folder."
        ) from error


def _integrate(
    config: QuickstartConfig,
    grid: tuple[int, int],
    path: Path,
    runs: list[Run],
    progress: ProgressCallback,
) -> None:
    total = sum(run.steps for run in runs)
    num_done = 0
    ticks: queue.Queue[int] = queue.Queue()
    started: list[subprocess.Popen[str]] = []
    progress("making the quickstart climate", 0.0)
    with ThreadPoolExecutor(min(usable_cores(), len(runs))) as pool:
        try:
            common_job = {"config": asdict(config), "grid": grid, "path": str(path)}
            jobs = [common_job | {"run": run.index} for run in runs]
            futures = [pool.submit(_one_run, job, ticks, started) for job in jobs]
            while num_done < total:
                # A timeout, so that failures are noticed while no worker reports progress.
                with suppress(queue.Empty):
                    num_done += ticks.get(timeout=0.2)
                    progress("making the quickstart climate", num_done / total)
                # A run that failed ends the wait: its remaining steps never come.
                for future in filter(Future.done, futures):
                    future.result()
            for future in futures:
                future.result()
        finally:
            # Threads of the pool wait for their workers: they end when these are killed.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:  # also after an error or Ctrl-C
                process.kill()


def _one_run(
    job: Mapping[str, object], ticks: "queue.Queue[int]", started: list[subprocess.Popen[str]]
) -> None:
    environment = os.environ | dict.fromkeys(THREADS, "1")
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    # A file for stderr: nobody reads it before stdout ends, and a worker whose warnings fill a pipe
    # would stop.
    with (
        tempfile.TemporaryFile("w+", dir=Path(str(job["path"])).parent) as stderr,
        subprocess.Popen(
            # -P: a file in the working folder must not shadow a package.
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        ) as process,
    ):
        started.append(process)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker process has no pipes")
        # stdin stays open while the worker runs: the worker ends itself when it is closed.
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            ticks.put(int(line))
        if process.wait() != 0:
            stderr.seek(0)
            errors = stderr.read().strip().splitlines()
            reason = errors[-1] if errors else f"exit code {process.returncode}"
            raise UserError(
                f"quickstart climate: run {job['run']} failed: {reason}. "
                f"If the disk is full, point data.cache at another folder."
            )


LEVEL_VARIABLES = {
    "geopotential": ("geopotential", "m**2 s**-2"),
    "temperature": ("air_temperature", "K"),
    "u_component_of_wind": ("eastward_wind", "m s**-1"),
    "v_component_of_wind": ("northward_wind", "m s**-1"),
}
SURFACE_VARIABLES = {
    "mean_sea_level_pressure": ("air_pressure_at_mean_sea_level", "Pa"),
    "2m_temperature": ("air_temperature", "K"),
}
STATIC_VARIABLES = {
    "geopotential_at_surface": ("surface_geopotential", "m**2 s**-2"),
    "land_sea_mask": ("land_area_fraction", "1"),
}
# Chunks along latitude, for ranks that read their bands: at most so many, and none of fewer bytes,
# as a small chunk takes as long to find as a larger one takes to read.
BANDS = 4
CHUNK_BYTES = 16 * 2**10


def create(path: Path, synthesis: Synthesis, runs: list[Run], title: str) -> None:
    """Create the store at `path` with coordinates and static fields; all other arrays are empty."""
    group = zarr.create_group(
        path, zarr_format=3, attributes={"title": title, "Conventions": "CF-1.11"}
    )
    _write_coordinates(group, synthesis, np.concatenate([run.times for run in runs]))
    grid = (len(synthesis.latitude), len(synthesis.longitude))
    for name, values in synthesis.statics().items():
        standard_name, units = STATIC_VARIABLES[name]
        _write_array(group, name, values, ("latitude", "longitude"), standard_name, units)
    times = sum(run.steps for run in runs)
    shard_length = shard_steps(runs[0].steps, grid)
    for name, (standard_name, units) in (LEVEL_VARIABLES | SURFACE_VARIABLES).items():
        levels = (len(LEVELS),) if name in LEVEL_VARIABLES else ()
        field_bytes = 4 * math.prod((*levels, *grid))
        band = -(-grid[0] // max(1, min(BANDS, field_bytes // CHUNK_BYTES)))
        group.create_array(
            name,
            shape=(times, *levels, *grid),
            chunks=(1, *levels, band, grid[1]),
            shards=(shard_length, *levels, band * -(-grid[0] // band), grid[1]),
            dtype=np.float32,
            fill_value=np.nan,
            compressors=None,
            dimension_names=("time", *(("level",) if levels else ()), "latitude", "longitude"),
            attributes={"standard_name": standard_name, "long_name": name, "units": units},
        )


def write(path: Path, first: int, fields: dict[str, Array]) -> None:
    """Write complete shards, of `fields` that begin at time step `first`."""
    group = zarr.open_group(path, mode="r+", zarr_format=3, use_consolidated=False)
    for name, values in fields.items():
        array = group[name]
        if not isinstance(array, zarr.Array):
            raise TypeError(f"{path / name} is not an array")
        array[first : first + len(values)] = values


def _write_coordinates(group: zarr.Group, synthesis: Synthesis, times: Times) -> None:
    hours = (times - times[0]) // np.timedelta64(1, "h")
    time_units = f"hours since {np.datetime_as_string(times[0], unit='D')}"
    time = _write_array(group, "time", hours.astype(np.int64), ("time",), "time", time_units)
    time.attrs["calendar"] = "proleptic_gregorian"
    level = np.array(LEVELS, np.int64)
    _write_array(group, "level", level, ("level",), "air_pressure", "hPa").attrs["positive"] = (
        "down"
    )
    for name, units in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
        _write_array(group, name, getattr(synthesis, name), (name,), name, units)


def _write_array(
    group: zarr.Group,
    name: str,
    values: NDArray[Any],
    dims: tuple[str, ...],
    standard_name: str,
    units: str,
) -> zarr.Array[Any]:
    attributes: dict[str, Any] = {"standard_name": standard_name, "long_name": name, "units": units}
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=values.shape,
        dtype=values.dtype,
        compressors=None,
        dimension_names=dims,
        attributes=attributes,
    )
    array[...] = values
    return array
