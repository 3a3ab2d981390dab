"""Prepares a store from beginning to end: requested, begun or resumed, written, verified."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import zarr
from dask.base import compute
from dask.callbacks import Callback
from dask.delayed import delayed
from filelock import FileLock, Timeout

from credit_dp.checks import expand_home
from credit_dp.data.cache import fingerprint, lock_path
from credit_dp.data.grid import rows_touched
from credit_dp.data.rechunk.request import FieldSelection, SelectedFields
from credit_dp.data.rechunk.target import (
    AUTO,
    CODECS,
    CodecMeasurement,
    RechunkTarget,
    check_codec,
    choose_codec,
    measure_codecs,
    measure_disk_bandwidth,
)
from credit_dp.data.sources.base import Fields
from credit_dp.errors import UserError

BLOCK_BYTES = 2**29  # of fields that a worker reads at once
TASKS = 1000  # about so many: each opens the store once
SCHEDULER_TIMEOUT = "20s"  # for a scheduler to answer

CountCallback = Callable[[int], None]  # how many times were done
WorkerInitializer = Callable[[], None]  # what a worker process does first


@final
@dataclass(frozen=True)
class WorkerConfig:
    """Who works.

    Attributes:
        count: processes of this machine; one is this process.
        scheduler: address of a distributed scheduler whose workers do it instead; or empty.
        start: called first in each process.
    """

    count: int = 1
    scheduler: str = ""
    start: WorkerInitializer | None = None


ONE_PROCESS = WorkerConfig()


@final
@dataclass(frozen=True)
class RechunkTask:
    """Some blocks of times, `(first, stop)` each, one after the other."""

    selection: FieldSelection
    out: str
    overwrite: bool
    blocks: tuple[tuple[int, int], ...]

    @property
    def times(self) -> int:
        """How many."""
        return self.blocks[-1][1] - self.blocks[0][0]

    def run(self) -> tuple[int, str]:
        """Write the shards that aren't there; how many times are done, and what went wrong."""
        try:
            target = RechunkTarget(self.out, self.overwrite)
            if target.missing(self.blocks[0][0], self.blocks[-1][1]):
                self._write(target)
        except UserError as error:
            return 0, str(error)
        except OSError as error:
            return 0, disk_error_message(error, self.out)
        return self.times, ""

    def _write(self, target: RechunkTarget) -> None:
        asked = SelectedFields.open(self.selection)
        array = target.fields()
        for first, stop in self.blocks:
            missing = target.missing(first, stop)
            if not missing:
                continue
            fields = asked.fields(missing[0], missing[-1] + 1)
            for at in missing:
                array[at : at + 1] = fields[at - missing[0], None]


def disk_error_message(error: OSError, out: str) -> str:
    """What a user is told of a disk that is full or gone."""
    return (
        f"{error.filename or out}: cannot be written or read ({error.strerror or error}). "
        "Mend that, then start again: it goes on where it stopped."
    )


def time_blocks(asked: SelectedFields) -> list[tuple[int, int]]:
    """What is read at once: as many times as fit."""
    _, channels, height, columns = asked.shape
    return asked.blocks(max(1, BLOCK_BYTES // (4 * channels * height * columns)))


def group_blocks(
    blocks: Sequence[tuple[int, int]], workers: int
) -> list[tuple[tuple[int, int], ...]]:
    """The blocks in batches, a task each: a few for each worker, and not too many in all."""
    length = max(1, min(len(blocks) // (4 * workers), -(-len(blocks) // TASKS)))
    return [tuple(blocks[start : start + length]) for start in range(0, len(blocks), length)]


def run_tasks(tasks: Sequence[RechunkTask], workers: WorkerConfig, done: CountCallback) -> None:
    """Run all; `done` is told of each.

    Raises:
        UserError: what the first task that failed says.
    """

    def finished(result: tuple[int, str]) -> None:
        times, problem = result
        if problem:
            raise UserError(problem)
        done(times)

    if workers.scheduler:
        _run_distributed(tasks, workers.scheduler, finished)
        return
    calls = [delayed(task.run, pure=False)() for task in tasks]
    options: dict[str, Any] = {"scheduler": "synchronous"}
    if workers.count > 1:
        options = {
            "scheduler": "processes",
            "num_workers": workers.count,
            "chunksize": 1,
            "initializer": workers.start,
        }
    with _ResultCallback(finished):
        compute(*calls, optimize_graph=False, **options)  # type: ignore[no-untyped-call]


@final
class _ResultCallback(Callback):
    """Hands on the result of each task as it ends."""

    def __init__(self, finished: Callable[[tuple[int, str]], None]) -> None:
        super().__init__(posttask=self._after)  # type: ignore[no-untyped-call]
        self._finished = finished

    def _after(self, key: object, result: object, *rest: object) -> None:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str):
            self._finished(result)


def _run_distributed(
    tasks: Sequence[RechunkTask], address: str, finished: Callable[[tuple[int, str]], None]
) -> None:
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise UserError(
            "scheduler: needs the package distributed. Install it, or leave scheduler out."
        ) from None
    try:
        client = Client(address, timeout=SCHEDULER_TIMEOUT, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"scheduler: no dask scheduler answers at {address} ({reason}). Change scheduler."
        ) from None
    with client:
        futures = client.map(RechunkTask.run, tasks, pure=False)
        for _, result in as_completed(futures, loop=client.loop, with_results=True):  # type: ignore[no-untyped-call]
            finished(result)


# A rank of N reads at most this share of 1/N of a sample, where the bands allow it.
LARGEST_EXCESS = 1.05
# Each inner chunk costs a reader about 0.1 ms, and 16 bytes of a shard's index.
MOST_CHUNKS = 1024


def check_domains(domains: Sequence[object], height: int) -> tuple[int, ...]:
    """The rank counts, each once, rising.

    Raises:
        UserError: one is no number of ranks that this many rows can be split over.
    """
    for count in domains:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= height:
            raise UserError(
                f"domains: needs numbers of ranks from 1 to {height}, the rows of the grid, "
                f"got {count!r}. Change domains."
            )
    if not domains:
        raise UserError("domains: needs at least one number of ranks, like domains=[1,2,4].")
    return tuple(sorted({int(str(count)) for count in domains}))


def choose_chunk_rows(height: int, domains: Sequence[int]) -> int:
    """The most rows per chunk with which no rank of any of `domains` reads much that isn't its own.

    Chunks are of one size, bands are not, so edges can't always meet: 721 rows over 2 ranks begin
    at 361. The fewest chunks win whose `max_read_excess` is at most `LARGEST_EXCESS`, or at most
    that of the smallest chunks allowed where even those are above it.
    """
    smallest = -(-height // MOST_CHUNKS)
    bearable = max(LARGEST_EXCESS, max_read_excess(height, domains, smallest))
    fitting = (
        rows
        for rows in range(height, smallest - 1, -1)
        if max_read_excess(height, domains, rows) <= bearable
    )
    return next(fitting)


def max_read_excess(height: int, domains: Sequence[int], chunk: int) -> float:
    """Rows that a rank reads over an even share of the rows, of the worst rank of all `domains`."""
    return max(max(rows_touched(height, ranks, chunk)) * ranks / height for ranks in domains)


SAMPLES = 16


def verify_samples(asked: SelectedFields, target: RechunkTarget, seed: int) -> int:
    """Check that all shards are there, and some rows of some times; how many of those.

    Reading them back also checks the checksums of their chunks.

    Raises:
        UserError: something is missing or not what the store holds.
    """
    missing = target.missing(0, asked.shape[0])
    if missing:
        date = asked.times[missing[0]].astype("M8[m]")
        raise UserError(f"{target.partial}: {date} is missing. Start again: it will be written.")
    array = target.fields()
    random = np.random.default_rng(seed)
    times = random.permutation(asked.shape[0])[:SAMPLES]
    for at in map(int, np.sort(times)):
        first = int(random.integers(asked.shape[2]))
        stop = int(random.integers(first, asked.shape[2])) + 1
        _compare(asked, target, array, at, slice(first, stop))
    return len(times)


def _compare(
    asked: SelectedFields, target: RechunkTarget, array: "zarr.Array[Any]", time: int, rows: slice
) -> None:
    try:
        read: Fields = np.asarray(array[time : time + 1, :, rows], dtype=np.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise _mismatch_error(asked, target, time, rows, f"cannot be read ({error})") from error
    if not same_bits(read, asked.fields(time, time + 1, rows)):
        raise _mismatch_error(asked, target, time, rows, "differ from what the store holds now")


def same_bits(one: Fields, other: Fields) -> bool:
    """Whether two arrays are equal, NaN and signs of zero too."""
    a, b = (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) for x in (one, other))
    return np.array_equal(a, b)


def _mismatch_error(
    asked: SelectedFields, target: RechunkTarget, time: int, rows: slice, what: str
) -> UserError:
    date = asked.times[time].astype("M8[m]")
    return UserError(
        f"{target.partial}: rows {rows.start} to {rows.stop - 1} at {date} {what}. "
        f"Remove {target.partial}, see to the disk and the store, and start again."
    )


CODEC = "codec"
CHUNK_ROWS = "rows of a chunk (domains)"


@final
@dataclass(frozen=True)
class RechunkRequest:
    """What a user asks for.

    Attributes:
        out: path of the prepared store.
        domains: numbers of ranks whose bands the chunks are to fit.
        codec: `auto` or a key of `CODECS`.
        overwrite: whether a prepared store at `out` may be replaced.
    """

    selection: FieldSelection
    out: str
    domains: tuple[object, ...] = (1, 2, 4, 8)
    codec: str = AUTO
    overwrite: bool = False
    workers: WorkerConfig = ONE_PROCESS


@final
@dataclass(frozen=True)
class RechunkEstimate:
    """What it will take.

    Attributes:
        codecs: what was measured, by name; the disk's speed with it.
        disk_speed: bytes per second.
        codec: the one that is taken.
        raw, stored: bytes of all fields, before and after compression.
        left: bytes still to be written.
        hours: of all workers.
    """

    codecs: Mapping[str, CodecMeasurement]
    disk_bandwidth: float
    codec: str
    raw: float
    stored: float
    remaining_bytes: float
    hours: float


@final
class RechunkJob:
    """One store on its way. Call `begin`, `work`, `verify` and `finish`, inside `alone`.

    Raises:
        UserError: the request can't be met, naming the key to change.
    """

    def __init__(self, request: RechunkRequest) -> None:
        request.selection.check()
        check_codec(request.codec)
        if request.workers.count < 1:
            raise UserError(f"workers: needs 1 or more, got {request.workers.count}")
        if request.workers.scheduler:
            _check_absolute_paths(request.selection.config.stores)
        self._request = request
        self.target = RechunkTarget(request.out, request.overwrite)
        self.selected = SelectedFields.open(request.selection)
        height = self.selected.shape[2]
        self.rows = choose_chunk_rows(height, check_domains(request.domains, height))
        self._settings = json.loads(
            json.dumps({**self.selected.settings(), CHUNK_ROWS: self.rows, CODEC: request.codec})
        )
        self._previous_settings: Mapping[str, Any] | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from preparing the same store meanwhile.

        Raises:
            UserError: another does, or what is there was begun with other settings.
        """
        lock = FileLock(lock_path(self.target.out), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"{self.target.out}: another process is preparing it. Wait for it, or change out."
            ) from None
        try:
            self._previous_settings = self._check_resumable(self.target.settings())
            yield
        finally:
            lock_path(self.target.out).unlink(missing_ok=True)
            lock.release()

    @property
    def resumed(self) -> bool:
        """Whether some of it is there."""
        return self._previous_settings is not None

    @property
    def done(self) -> int:
        """Times that are written."""
        return self.selected.shape[0] - len(self._missing()) if self.resumed else 0

    def estimate(self) -> RechunkEstimate:
        """Read a block of times, and try how fast it is compressed and read.

        Raises:
            UserError: it would not fit on the disk.
        """
        missing = self._missing() or [0]
        block = next(b for b in time_blocks(self.selected) if b[0] <= missing[0] < b[1])
        start = time.perf_counter()
        fields = self.selected.fields(*block)
        read = (time.perf_counter() - start) / len(fields)
        speed = measure_disk_bandwidth(self.target.out.parent)
        measured = measure_codecs(fields[len(fields) // 2], self.rows, self._codecs(), speed)
        chosen = choose_codec(measured)
        sample = fields[0].nbytes
        seconds = len(self._missing()) * (read + sample * chosen.encode) / self._workers
        raw, left = sample * self.selected.shape[0], sample * len(self._missing())
        stored = raw / chosen.ratio
        estimate = RechunkEstimate(
            measured, speed, chosen.name, raw, stored, left / chosen.ratio, seconds / 3600
        )
        self._check_space(estimate)
        return estimate

    def begin(self, codec: str) -> None:
        """Start a store with this codec, or clean up the one that was begun.

        Raises:
            UserError: it can't be written.
        """
        settings = {**self._settings, CODEC: codec}
        try:
            if self.resumed:
                self.target.resume()
            else:
                self.target.begin(self.selected, self.rows, codec, settings)
        except OSError as error:
            raise UserError(disk_error_message(error, str(self.target.out))) from error

    def write_missing(self, done: CountCallback) -> None:
        """Write what is missing; `done` is told how many more times are there."""
        request = self._request
        parts = group_blocks(time_blocks(self.selected), self._workers)
        out = str(self.target.out)
        tasks = [RechunkTask(request.selection, out, request.overwrite, part) for part in parts]
        left = []
        for task in tasks:
            if self.target.missing(task.blocks[0][0], task.blocks[-1][1]):
                left.append(task)
            else:
                done(task.times)
        run_tasks(left, request.workers, done)

    def verify(self) -> int:
        """Compare random parts with the store; how many."""
        return verify_samples(self.selected, self.target, int(fingerprint(self._settings), 16))

    def finish(self) -> None:
        """Give it its name."""
        self.target.finish()

    @property
    def _workers(self) -> int:
        return 1 if self._request.workers.scheduler else self._request.workers.count

    def _missing(self) -> list[int]:
        return self.target.missing(0, self.selected.shape[0])

    def _codecs(self) -> list[str]:
        if self._previous_settings is not None:
            return [str(self._previous_settings[CODEC])]
        return list(CODECS) if self._request.codec == AUTO else [self._request.codec]

    def _check_resumable(self, found: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The settings of a partial store if it can be gone on with; None to begin anew."""
        if found is None:
            return None
        wanted = dict(self._settings)
        if wanted[CODEC] == AUTO:
            wanted[CODEC] = found.get(CODEC)
        different = [key for key in wanted if found.get(key) != wanted[key]]
        if not different:
            return found
        if self._request.overwrite:
            return None
        key = different[0]
        raise UserError(
            f"{self.target.partial}: was begun with {key} {_short(found.get(key))}, now it is "
            f"{_short(wanted[key])}. Ask for the same again, say overwrite=true to begin anew, or "
            "change out."
        )

    def _check_space(self, estimate: RechunkEstimate) -> None:
        folder = self.target.out.parent
        free = shutil.disk_usage(folder).free
        if estimate.remaining_bytes > free:
            raise UserError(
                f"{folder}: about {estimate.remaining_bytes / 1e9:.1f} GB are needed, "
                f"{free / 1e9:.1f} GB are "
                "free. Change out, dates, data.levels or data.step."
            )


def _check_absolute_paths(stores: Sequence[str]) -> None:
    """Refuse paths that mean something else in another folder: other machines work in theirs."""
    for store in stores:
        if "://" not in store and not expand_home("data.store", store).is_absolute():
            raise UserError(
                f"store: workers of another machine need a whole path, got {store}. Change "
                "data.store, or leave scheduler out."
            )


def _short(value: object, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."
