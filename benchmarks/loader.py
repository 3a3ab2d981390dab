"""How fast a rank gets its data, and what that costs: `python benchmarks/loader.py`.

A store as `credit-dp data prepare` writes it, in the system's cache. First, megabytes per second of
one rank with one thread, in four ways in turn; the best of several rounds counts, by the clock and
by the processor's time, which tells more on a machine that does other things. Then the share of its
time for which the training of the tiny U-Net waits for data. Then a rank's memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorstore
import torch
import zarr
from peak import forget_peak, peak, resident
from pinned import on_pinned_ranks

from credit_dp.command.compose import Composer
from credit_dp.config import DataConfig, DatesConfig
from credit_dp.data.loader import Loader
from credit_dp.data.prepare import prepare
from credit_dp.data.prepared_form import ATTRIBUTE, EPOCH, PreparedForm
from credit_dp.data.preparing.chunks import chunk_rows
from credit_dp.data.preparing.codecs import shard_options
from credit_dp.data.sampling import SampleSequence
from credit_dp.data.schema import Channel
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.build import shard_model
from credit_dp.fields import Fields
from credit_dp.models import build_model

DOMAINS = (1, 2, 4)
CHANNELS = 20
ROUNDS = 5
PREFETCH = 2
MIB = 2**20


def write_store(path: Path, grid: tuple[int, int], times: int, codec: str) -> DataConfig:
    """A prepared store of smooth fields, and the same numbers raw beside it."""
    height, columns = grid
    random = np.random.default_rng(0)
    base = np.cumsum(random.normal(size=(CHANNELS, *grid)), axis=-1, dtype=np.float32)
    channels = tuple(Channel(f"field{number}") for number in range(CHANNELS))
    form = PreparedForm(channels, (), {}, {}, "benchmark")
    group = zarr.create_group(path, attributes={ATTRIBUTE: form.attributes()})
    shape = (times, CHANNELS, *grid)
    options = shard_options(shape, chunk_rows(height, DOMAINS), codec)
    fields = group.create_array("fields", shape=shape, **options)
    with raw_file(path).open("wb") as raw:
        for time_ in range(times):
            values = np.roll(base, 5 * time_, axis=-1)
            fields[time_] = values
            values.tofile(raw)
    start = np.datetime64("2000-01-01", "h")
    hours = (start - EPOCH).astype(np.int64) + 6 * np.arange(times)
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
        prognostic=[channel.variable for channel in channels],
        batch_size=1,
        workers=1,
        dates=DatesConfig(train=dates, valid=dates, test=dates),
    )


def raw_file(path: Path) -> Path:
    """Where the same numbers are, raw."""
    return path.with_suffix(".raw")


def speeds(manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int]) -> None:
    """Print megabytes per second of one band of each domain size, in every way."""
    ready = prepare(config)
    samples = len(ready.store.times) - 1
    for domain in DOMAINS:
        rows = slice(0, -(-grid[0] // domain))
        megabytes = 2 * CHANNELS * rows.stop * grid[1] * 4 / MIB
        with Loader(ready, "train", rows, SampleSequence(samples, 1), prefetch=0) as loader:
            ways = {**raw_ways(Path(str(config.store)), (samples + 1, CHANNELS, *grid), rows)}
            ways["loader"] = lambda _, loader=loader: next(loader)
            found = {name: fastest(way, samples) for name, way in ways.items()}
        speed = {name: (megabytes / a, megabytes / b) for name, (a, b) in found.items()}
        print(f"{grid[0]:4} x {grid[1]:<5}  1/{domain} " + columns_of(speed), flush=True)


def raw_ways(path: Path, shape: tuple[int, ...], rows: slice) -> dict[str, Callable[[int], object]]:
    """Reading the two times of a sample without the loader."""
    raw = np.memmap(raw_file(path), dtype=np.float32, mode="r", shape=shape)
    alone = zarr.open_group(path, mode="r")["fields"]
    other = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/fields/"}},
        context=tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}}),
        read=True,
    ).result()
    return {
        "numpy": lambda at: np.array(raw[at : at + 2, :, rows]),
        "zarr": lambda at: [alone[t, :, rows] for t in (at, at + 1)],
        "tensorstore": lambda at: [other[t, :, rows].read().result() for t in (at, at + 1)],
    }


def fastest(way: Callable[[int], object], samples: int) -> tuple[float, float]:
    """Seconds of a sample, by the clock and by the processor."""
    clock = processor = float("inf")
    for number in range(ROUNDS * samples):
        began, worked = time.perf_counter(), time.process_time()
        way(number % samples)
        clock = min(clock, time.perf_counter() - began)
        processor = min(processor, time.process_time() - worked)
    return clock, processor


def columns_of(pairs: dict[str, tuple[float, ...]]) -> str:
    """Speeds by the clock and by the processor, and the loader's relative to the others."""
    shown = "".join(f"{clock:8.0f} {cpu:6.0f}" for clock, cpu in pairs.values())
    own = pairs["loader"][1]
    return shown + "".join(f"{own / pairs[name][1]:8.2f}" for name in list(pairs)[:-1])


def waiting(manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int]) -> float:
    """The share of a few steps of the tiny U-Net that they wait for the next batch."""
    ready = prepare(config)
    model_config = Composer("train").config(["model=unet_tiny"]).model
    fields = Fields((), tuple(range(CHANNELS)), others=0)
    model = build_model(model_config, fields, grid)
    if manager.domain_parallel_size > 1:
        shard_model(model, manager, (1, fields.inputs, *grid))
    optimiser = torch.optim.AdamW(model.parameters())
    sequence = SampleSequence(len(ready.store.times) - 1, 1)
    waited, began = 0.0, time.perf_counter()
    with Loader(ready, "train", manager.rows(grid[0]), sequence, prefetch=PREFETCH) as loader:
        for step in range(6):
            asked = time.perf_counter()
            batch = next(loader)
            if step == 0:  # nothing was read ahead of the first
                began = asked = time.perf_counter()
            waited += time.perf_counter() - asked
            loss = (model(batch.now) - batch.target).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        return waited / (time.perf_counter() - began)


def memory(
    manager: DomainParallelManager, config: DataConfig, grid: tuple[int, int]
) -> tuple[int, int, int]:
    """Bytes of a rank: all at its peak, what the loader adds to it, and one batch."""
    ready = prepare(config)
    rows = manager.rows(grid[0])
    ready.store.read(ready.store.times[0], slice(rows.start, rows.start + 1))  # opens what it needs
    before = resident()
    forget_peak()
    sequence = SampleSequence(len(ready.store.times) - 1, 1)
    with Loader(ready, "train", rows, sequence, prefetch=PREFETCH) as loader:
        for _ in range(6):
            batch = next(loader)
            time.sleep(0.2)  # for what is read ahead
        held = sum(x.nbytes for x in (batch.now, batch.target, batch.forcing))
        return peak(), peak() - before, held


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--grids", nargs="*", default=["181x360", "721x1440"], metavar="ROWSxCOLUMNS"
    )
    parser.add_argument("--times", type=int, default=4, help="of the store")
    parser.add_argument("--codec", default="none", help="none, lz4, zstd")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for text in arguments.grids:
            rows, columns = map(int, text.split("x"))
            path = Path(folder) / f"{text}.zarr"
            made[rows, columns] = write_store(
                path, (rows, columns), arguments.times, arguments.codec
            )
            prepare(made[rows, columns])
        print("MiB/s by the clock and by the processor; then the loader relative to each\n")
        names = ("numpy", "zarr", "tensorstore", "loader")
        heads = "".join(f"{name:>15}" for name in names)
        print(f"{'grid':<13}band" + heads + "".join(f"{'/' + name[:6]:>8}" for name in names[:-1]))
        for grid, config in made.items():
            on_pinned_ranks(speeds, config, grid, ranks=1)
        small = min(made)
        for ranks in (1, 2):
            share = max(on_pinned_ranks(waiting, made[small], small, ranks=ranks))
            print(
                f"\ntiny U-Net, {small[0]} x {small[1]}, {ranks} ranks: waits {share:.1%}", end=""
            )
        print("\n\ngrid          ranks  MiB of a rank  the loader's  batches of it")
        # From here on freed memory goes back to the system at once: what is resident is what is
        # held. Read by the C library as a process starts, so by the ranks; it makes them slow.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
        for grid, config in made.items():
            for ranks in DOMAINS:
                whole, own, batch = max(on_pinned_ranks(memory, config, grid, ranks=ranks))
                print(
                    f"{grid[0]:4} x {grid[1]:<6} {ranks:5} {whole / MIB:14.0f} {own / MIB:13.0f} "
                    f"{(PREFETCH + 1) * batch / MIB:14.0f}"
                )


if __name__ == "__main__":
    main()
