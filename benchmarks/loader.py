"""Measure how fast a rank gets its data: `python benchmarks/loader.py`.

Reads a prepared store from the system's cache. First it compares the throughput of one rank with
one thread with other ways to read the same numbers; the fastest round counts. Then it measures the
bytes per second of one rank with two threads, compares the check of limits with a search for
missing values only, and measures the share of time that training of the tiny U-Net waits for data.
Then it reads the same store with zarr and tensorstore, which check no values and don't normalise.
Last it reads datasets of anemoi on O96, whose rows are interpolated, and on a regular grid.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import tensorstore
import torch
import zarr
from pinned import Contestants, Mesh, on_pinned_ranks, team
from side_by_side import Row
from table import show

from credit_dp.cli.compose import Composer
from credit_dp.config import DataConfig, DatesConfig
from credit_dp.data.channels import Channel
from credit_dp.data.limits import all_finite
from credit_dp.data.loader import Loader
from credit_dp.data.rechunk.copy_fields import choose_chunk_rows
from credit_dp.data.rechunk.target import shard_options
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.setup import prepare_training_data
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE, PreparedMetadata
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.convert import shard_model
from credit_dp.fields import Fields
from credit_dp.models import build_model

DOMAINS = (1, 2, 4)
GRIDS = ((181, 360), (721, 1440))
TIMES = 4
CHANNELS = 20
SURFACE = tuple(Channel(f"field{number}") for number in range(CHANNELS))
ROUNDS = 20
LIMIT_ROUNDS = 60
THREADS, BATCHES, THREAD_ROUNDS = 2, 6, 5
STEPS, FIRST = 20, 3  # the first steps use batches that were read ahead before them
PREFETCH = 2
READERS = ("loader", "zarr", "tensorstore")
CODECS = ("none", "zstd")
READER_ROUNDS = 5
MIB = 2**20


def write_store(
    path: Path,
    grid: tuple[int, int],
    times: int,
    codec: str,
    channels: tuple[Channel, ...] = SURFACE,
) -> DataConfig:
    """Write a prepared store of smooth fields, and the same numbers to a raw file beside it."""
    height, columns = grid
    random = np.random.default_rng(0)
    base = np.cumsum(random.normal(size=(len(channels), *grid)), axis=-1, dtype=np.float32)
    form = PreparedMetadata(channels, (), {}, {}, "benchmark")
    group = zarr.create_group(path, attributes={METADATA_ATTRIBUTE: form.attributes()})
    shape = (times, len(channels), *grid)
    options = shard_options(shape, choose_chunk_rows(height, DOMAINS), codec)
    fields = group.create_array("fields", shape=shape, **options)
    with raw_file(path).open("wb") as raw:
        for time_ in range(times):
            values = np.roll(base, 5 * time_, axis=-1)
            fields[time_] = values
            values.tofile(raw)
    start = np.datetime64("2000-01-01", "h")
    hours = (start - np.datetime64("1900-01-01", "h")).astype(np.int64) + 6 * np.arange(times)
    for name, values in (
        ("time", hours),
        ("latitude", np.linspace(90, -90, height)),
        ("longitude", np.arange(columns) * 360 / columns),
    ):
        group.create_array(name, data=values)
    dates = [str(start), str(start + 6 * (times - 1))]
    return DataConfig(
        name="prepared",
        store=str(path),
        cache=str(path.parent / "cache"),
        prognostic=list(dict.fromkeys(channel.variable for channel in channels)),
        batch_size=1,
        workers=1,
        dates=DatesConfig(train=dates, valid=dates, test=dates),
    )


def raw_file(path: Path) -> Path:
    """Return the path of the raw file with the numbers of a store."""
    return path.with_suffix(".raw")


def speeds(
    manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int], domain: int
) -> dict[str, float]:
    """Return the seconds to read one band of a sample in each way, the fastest of all rounds."""
    ready = prepare_training_data(config)
    samples = len(ready.store.times) - 1
    rows = slice(0, -(-grid[0] // domain))
    with Loader(ready, "train", rows, SampleSequence(samples, 1), prefetch=0) as loader:
        ways = raw_ways(Path(str(config.store)), (samples + 1, CHANNELS, *grid), rows)
        ways["loader"] = lambda _: next(loader)
        return fastest(ways, samples)


def two_threads(manager: DomainParallelManager, config: DataConfig) -> Contestants:
    """Return a function that takes batches from two reading threads, which have read ahead."""
    ready = prepare_training_data(replace(config, workers=THREADS))
    sequence = SampleSequence(TIMES - 1, 1)
    loader = Loader(ready, "train", slice(None), sequence, prefetch=PREFETCH)

    def take() -> None:
        for _ in range(BATCHES):
            next(loader)

    return {"take": take}


def limits_cost(manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int]) -> float:
    """Return the median ratio of the seconds to read a sample with limits and without."""
    free = replace(config, limits={name: None for name in config.prognostic})
    sequence, rows = SampleSequence(TIMES - 1, 1), slice(0, grid[0])
    found = []
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                Loader(prepare_training_data(one), "train", rows, sequence, prefetch=0)
            )
            for one in (config, free)
        ]
        for _ in range(LIMIT_ROUNDS):
            began = time.perf_counter()
            next(loaders[0])
            between = time.perf_counter()
            with patch("credit_dp.data.store.extremes", only_finite):
                next(loaders[1])
            found.append((between - began) / (time.perf_counter() - between))
    return median(found)


def only_finite(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Check for missing values only; replaces `extremes`."""
    if not all_finite(values):
        raise ValueError("the benchmark's fields have all values")
    return (np.zeros(values.shape[:2], np.float32),) * 2


def raw_ways(path: Path, shape: tuple[int, ...], rows: slice) -> dict[str, Callable[[int], object]]:
    """Return functions that read the two times of a sample without the loader."""
    raw = np.memmap(raw_file(path), dtype=np.float32, mode="r", shape=shape)
    alone = zarr.open_group(path, mode="r")["fields"]

    def copied(at: int) -> np.ndarray:
        return np.array(raw[at : at + 2, :, rows])

    return {
        "numpy": copied,
        "zarr": lambda at: [alone[t, :, rows] for t in (at, at + 1)],
        "numpy again": copied,
    }


def fastest(ways: Mapping[str, Callable[[int], object]], samples: int) -> dict[str, float]:
    """Return the seconds of a sample by each way, which run in turn."""
    found = dict.fromkeys(ways, float("inf"))
    for number in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            way(number % samples)
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def processor_and_clock(
    manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int], reader: str
) -> tuple[float, float]:
    """Return seconds of processor time and of the clock for a gigabyte, the median of all rounds.

    This process has as many threads as torch may use here.
    """
    threads = torch.get_num_threads()
    with reading(config, grid, reader, threads) as take:
        found = []
        for _ in range(READER_ROUNDS + 1):
            began = time.process_time(), time.perf_counter()
            for sample in range(BATCHES):
                take(sample % (TIMES - 1))
            found.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    gigabytes = BATCHES * 2 * CHANNELS * grid[0] * grid[1] * 4 / 1e9
    # The first round opens files and starts threads.
    processor, clock = (median(seconds) / gigabytes for seconds in zip(*found[1:], strict=True))
    return processor, clock


@contextmanager
def reading(
    config: DataConfig, grid: tuple[int, int], reader: str, threads: int
) -> Iterator[Callable[[int], object]]:
    """Return a function that reads the two times of a sample with some threads."""
    if reader == "loader":
        ready = prepare_training_data(replace(config, workers=threads))
        sequence = SampleSequence(TIMES - 1, 1)
        with Loader(ready, "train", slice(0, grid[0]), sequence, prefetch=PREFETCH) as loader:
            yield lambda _: next(loader)
    elif reader == "zarr":
        with zarr.config.set({"threading.max_workers": threads, "async.concurrency": threads}):
            array = zarr.open_group(config.store, mode="r")["fields"]
            yield lambda at: array[at : at + 2]
    else:
        limits = {"data_copy_concurrency": threads, "file_io_concurrency": threads}
        context = {name: {"limit": limit} for name, limit in limits.items()}
        array = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{config.store}/fields/"}},
            context=tensorstore.Context(context),
            read=True,
        ).result()
        yield lambda at: array[at : at + 2].read().result()


def waiting(manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int]) -> float:
    """Return the share of time that steps of the tiny U-Net wait for their batch."""
    ready = prepare_training_data(config)
    model_config = Composer("train").compose_config(["model=unet_tiny"]).model
    fields = Fields((), tuple(range(CHANNELS)), others=0)
    model = build_model(model_config, fields, grid)
    if manager.domain_parallel_size > 1:
        shard_model(model, manager, (1, fields.inputs, *grid))
    optimiser = torch.optim.AdamW(model.parameters())
    sequence = SampleSequence(len(ready.store.times) - 1, 1)
    waited, began = 0.0, time.perf_counter()
    with Loader(ready, "train", manager.rows(grid[0]), sequence, prefetch=PREFETCH) as loader:
        for step in range(STEPS):
            start = time.perf_counter()
            if step == FIRST:
                waited, began = 0.0, start
            batch = next(loader)
            waited += time.perf_counter() - start
            loss = (model(batch.state) - batch.target).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        return waited / (time.perf_counter() - began)


def rows(codec: str = "none") -> list[Row]:
    """Return the throughput of the loader, and the share of time that training waits for it."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        configs = {}
        for grid in GRIDS:
            path = Path(folder) / f"{grid[0]}x{grid[1]}.zarr"
            configs[grid] = write_store(path, grid, TIMES, codec)
            prepare_training_data(configs[grid])
        for grid, config in configs.items():
            made += [throughput_row(grid, config, domain) for domain in DOMAINS]
            made.append(threads_row(grid, config))
            (cost,) = on_pinned_ranks(limits_cost, config, grid, ranks=1)
            what = f"loader's throughput with limits of values, {grid[0]}x{grid[1]}"
            made.append(
                Row(what, "looking for missing values alone", 1 / cost, 0.98, at_least=True)
            )
        made += reader_rows(Path(folder), GRIDS[-1])
        made += cells_rows(Path(folder))
        for ranks in (1, 2):
            share = max(on_pinned_ranks(waiting, configs[GRIDS[0]], GRIDS[0], ranks=ranks))
            what = f"unet_tiny at {GRIDS[0][0]}x{GRIDS[0][1]}, {ranks} ranks: wait for data"
            made.append(Row(what, "time of training", share, 0.05))
    return made


def throughput_row(grid: tuple[int, int], config: DataConfig, domain: int) -> Row:
    """Compare the loader's throughput on one band with numpy's."""
    (found,) = on_pinned_ranks(speeds, config, grid, domain, ranks=1)
    numpy = found["numpy"], found["numpy again"]
    band = 2 * CHANNELS * -(-grid[0] // domain) * grid[1] * 4 / MIB
    return Row(
        f"loader's throughput, uncompressed, {grid[0]}x{grid[1]}, 1/{domain} of the rows, "
        f"{CHANNELS} channels",
        "numpy copying the same bytes from the cache",
        min(numpy) / found["loader"],
        None,
        spread=max(numpy) / min(numpy),
        note=f"{band / found['loader']:.0f} MiB/s; {found['zarr'] / found['loader']:.2f} x zarr's",
    )


def threads_row(grid: tuple[int, int], config: DataConfig) -> Row:
    """Return the bytes per second of one rank with two reading threads, on two cores."""
    with team(two_threads, config, mesh=Mesh(1, 1, threads=THREADS)) as rank:
        found = sorted(rank.seconds("take") for _ in range(THREAD_ROUNDS))
    gigabytes = BATCHES * 2 * CHANNELS * grid[0] * grid[1] * 4 / 1e9
    what = f"loader with {THREADS} threads on {THREADS} cores, {grid[0]}x{grid[1]}"
    speeds = gigabytes / found[0], gigabytes / found[len(found) // 2]
    return Row(what, "", speeds[0], None, speeds[1], unit="GB/s")


def reader_rows(folder: Path, grid: tuple[int, int]) -> list[Row]:
    """Return what reading a store costs with the loader, zarr and tensorstore."""
    made = []
    for codec in CODECS:
        config = write_store(folder / f"{codec}.zarr", grid, TIMES, codec)
        config = replace(config, cache=str(folder / f"cache of {codec}"))
        prepare_training_data(config)
        for threads, reader in product((1, THREADS), READERS):
            processor, clock = on_pinned_ranks(
                processor_and_clock, config, grid, reader, ranks=1, threads=threads
            )[0]
            what = f"{reader} reads {grid[0]}x{grid[1]}, codec {codec}, {threads} threads"
            cost = f"{processor:.2f} s/GB of processor time"
            made.append(Row(what, cost, 1 / clock, None, unit="GB/s"))
    return made


def cells_rows(folder: Path) -> list[Row]:
    """Return what reading datasets on O96 and on a regular grid as large costs."""
    made = []
    north = [20 + 4 * row for row in range(96)]
    for name, lengths in (("O96", north + north[::-1]), ("a regular grid", [400] * 192)):
        config = write_cells(folder / f"{name}.zarr", lengths)
        processor, clock = on_pinned_ranks(
            processor_and_clock, config, (192, 400), "loader", ranks=1
        )[0]
        what = f"loader reads a dataset of anemoi on {name} as 192x400"
        cost = f"{processor:.2f} s/GB of processor time"
        made.append(Row(what, cost, 1 / clock, None, unit="GB/s"))
    return made


def write_cells(path: Path, lengths: Sequence[int]) -> DataConfig:
    """Write a dataset of anemoi of smooth fields, on rows of so many cells."""
    latitude = np.degrees(np.arcsin(np.polynomial.legendre.leggauss(len(lengths))[0]))[::-1]
    names = [channel.name for channel in SURFACE]
    fields = np.cumsum(
        np.random.default_rng(0).normal(size=(TIMES, CHANNELS, 1, sum(lengths))), axis=-1
    )
    start = np.datetime64("2000-01-01T00", "s")
    group = zarr.create_group(path, zarr_format=2, attributes={"variables": names})
    for name, values in (
        ("data", fields.astype(np.float32)),
        ("dates", start + np.timedelta64(6, "h") * np.arange(TIMES)),
        ("latitudes", np.repeat(latitude, lengths)),
        ("longitudes", np.concatenate([np.arange(count) * 360 / count for count in lengths])),
    ):
        chunks = (1, *values.shape[1:]) if name == "data" else values.shape
        options = {"shape": values.shape, "dtype": values.dtype, "chunks": chunks}
        group.create_array(name, compressors=None, **options)[...] = values
    dates = [str(start), str(start + np.timedelta64(6, "h") * (TIMES - 1))]
    return DataConfig(
        name="anemoi",
        store=str(path),
        cache=str(path.parent / f"cache of {path.stem}"),
        prognostic=names,
        batch_size=1,
        workers=1,
        dates=DatesConfig(train=dates, valid=dates, test=dates),
    )


if __name__ == "__main__":
    show(rows())
