"""Copies fields into a prepared store: estimated, begun or resumed, written, verified, renamed.

`RechunkJob` is the whole sequence. Its work is cut into `RechunkTask`s, blocks of times that
processes of this machine or the workers of a dask scheduler write independently. Tasks are safe to
repeat: each writes only the shards that do not exist yet, and a shard that exists is complete (see
`target.py`). So a job that was killed needs no journal to resume.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any, final

import numpy as np
import zarr

from credit_dp.bands import rows_touched
from credit_dp.checks import expand_home, one_of
from credit_dp.data.cache import fingerprint, lock_output
from credit_dp.data.grid import FieldArray
from credit_dp.data.rechunk.field_selection import FieldSelection, SelectedFields
from credit_dp.data.rechunk.target import CODECS, RechunkTarget, stored_size
from credit_dp.data.streaming import connect_to_scheduler
from credit_dp.errors import UserError
from credit_dp.random_streams import random_stream

BLOCK_BYTES = 2**29  # of fields that a worker reads together
MAX_TASKS = 1000  # approximately: each task opens the store once
MAX_SETTING_LENGTH = 60  # characters of a setting in error messages

CountCallback = Callable[[int], None]  # is given the number of times that were written
WorkerInitializer = Callable[[], None]  # runs first in a worker process


@final
@dataclass(frozen=True)
class WorkerConfig:
    """The workers that write a prepared store.

    Attributes:
        count: processes of this machine; with 1, the work is done in this process.
        scheduler: address of a dask scheduler whose workers are used instead; or empty.
        start: runs first in each process.
    """

    count: int = 1
    scheduler: str = ""
    start: WorkerInitializer | None = None


ONE_PROCESS = WorkerConfig()


CODEC = "codec"
CHUNK_ROWS = "rows of a chunk (domains)"


@final
@dataclass(frozen=True)
class RechunkRequest:
    """The settings of a rechunking job.

    Attributes:
        selection: the fields to copy.
        out: path of the prepared store.
        domains: numbers of ranks whose bands the chunks should fit.
        codec: a key of `CODECS`.
        overwrite: whether a prepared store at `out` may be replaced.
        workers: who writes.
    """

    selection: FieldSelection
    out: str
    domains: tuple[object, ...] = (1, 2, 4, 8)
    codec: str = "zstd"
    overwrite: bool = False
    workers: WorkerConfig = ONE_PROCESS


@final
@dataclass(frozen=True)
class RechunkEstimate:
    """The estimated costs of a job.

    Attributes:
        raw_bytes, stored_bytes: of all fields, before and after compression.
        remaining_bytes: still to be written.
        hours: of work, with all workers busy.
    """

    raw_bytes: float
    stored_bytes: float
    remaining_bytes: float
    hours: float


@final
class RechunkJob:
    """Writes one prepared store.

    Call `estimate`, `begin`, `write_missing`, `verify` and `finish` in this order, inside `locked`.

    Raises:
        UserError: the request can't be met, naming the key to change.
    """

    def __init__(self, request: RechunkRequest) -> None:
        request.selection.check()
        one_of("codec", request.codec, tuple(CODECS))
        if request.workers.count < 1:
            raise UserError(
                f"workers: needs 1 or more, got {request.workers.count}. Change workers."
            )
        if request.workers.scheduler:
            _check_absolute_paths(request.selection.config.stores)
        self._request = request
        self.target = RechunkTarget(request.out, request.overwrite)
        self.selected = SelectedFields.open(request.selection)
        height = self.selected.shape[2]
        self.chunk_rows = choose_chunk_rows(height, check_domains(request.domains, height))
        # Through JSON, as it is read back from a partial store: tuples become lists.
        self._settings = json.loads(
            json.dumps(
                {**self.selected.settings(), CHUNK_ROWS: self.chunk_rows, CODEC: request.codec}
            )
        )
        self._previous_settings: Mapping[str, Any] | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the target, so that no other process prepares the same store.

        Raises:
            UserError: another process holds the lock, it can't be opened, or a partial store has
                other settings.
        """
        out = self.target.out
        in_use = f"{out}: another process is preparing it. Wait for it, or change out."
        self.target.settings()  # nothing is written to a folder that is something else
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_output(out, in_use))
            except OSError as error:
                raise UserError(disk_error_message(error, str(out))) from error
            self._previous_settings = self._check_resumable(self.target.settings())
            yield

    @property
    def codec(self) -> str:
        """Return the name of what compresses chunks."""
        return self._request.codec

    @property
    def resumed(self) -> bool:
        """Whether a partial store is continued."""
        return self._previous_settings is not None

    @property
    def num_done(self) -> int:
        """Return how many times are written."""
        return self.selected.shape[0] - len(self._missing()) if self.resumed else 0

    def estimate(self) -> RechunkEstimate:
        """Read a block of times, and compress one of them.

        Raises:
            UserError: the store would not fit on the disk.
        """
        missing = self._missing() or [0]
        block = next(
            candidate
            for candidate in time_blocks(self.selected)
            if candidate[0] <= missing[0] < candidate[1]
        )
        start = time.perf_counter()
        fields = self.selected.fields(*block)
        read_seconds = (time.perf_counter() - start) / len(fields)
        start = time.perf_counter()
        stored = stored_size(fields[len(fields) // 2], self.chunk_rows, self._request.codec)
        seconds = read_seconds + time.perf_counter() - start
        times, remaining = self.selected.shape[0], len(self._missing())
        # All workers read and compress; the disk is assumed to keep up.
        estimate = RechunkEstimate(
            raw_bytes=fields[0].nbytes * times,
            stored_bytes=stored * times,
            remaining_bytes=stored * remaining,
            hours=remaining * seconds / self._workers / 3600,
        )
        self._check_space(estimate)
        return estimate

    def begin(self) -> None:
        """Start a partial store, or clean up the one that is continued.

        Raises:
            UserError: it can't be written.
        """
        try:
            if self.resumed:
                self.target.resume()
            else:
                self.target.begin(
                    self.selected, self.chunk_rows, self._request.codec, self._settings
                )
        except OSError as error:
            raise UserError(disk_error_message(error, str(self.target.out))) from error

    def write_missing(self, on_written: CountCallback) -> None:
        """Write all missing times; existing times are reported to `on_written`, too."""
        request = self._request
        groups = group_blocks(time_blocks(self.selected), self._workers)
        out = str(self.target.out)
        tasks = [
            RechunkTask(request.selection, out, request.overwrite, blocks) for blocks in groups
        ]
        remaining = []
        for task in tasks:
            if self.target.missing(task.blocks[0][0], task.blocks[-1][1]):
                remaining.append(task)
            else:
                on_written(task.num_times)
        run_tasks(remaining, request.workers, on_written)

    def verify(self) -> int:
        """Compare random samples with the source; return how many."""
        # The seed is a hash of the settings: the same job compares the same samples.
        return verify_samples(self.selected, self.target, int(fingerprint(self._settings), 16))

    def finish(self) -> None:
        """Rename the complete store from `OUT.partial` to `OUT`."""
        self.target.finish()

    @property
    def _workers(self) -> int:
        return 1 if self._request.workers.scheduler else self._request.workers.count

    def _missing(self) -> list[int]:
        return self.target.missing(0, self.selected.shape[0])

    def _check_resumable(self, previous: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the settings of a partial store that can be continued; None to start over."""
        if previous is None:
            return None
        current = self._settings
        different = [key for key in current if previous.get(key) != current[key]]
        if not different:
            return previous
        if self._request.overwrite:
            return None
        key = different[0]
        raise UserError(
            f"{self.target.partial}: was begun with {key} {_short(previous.get(key))}, now it is "
            f"{_short(current[key])}. Use the same settings to resume, overwrite=true to start "
            "over, or change out."
        )

    def _check_space(self, estimate: RechunkEstimate) -> None:
        folder = self.target.out.parent
        free = shutil.disk_usage(folder).free
        if estimate.remaining_bytes > free:
            raise UserError(
                f"{folder}: about {estimate.remaining_bytes / 1e9:.1f} GB are needed, "
                f"{free / 1e9:.1f} GB are free. Change out, dates, data.levels or data.step."
            )


def _check_absolute_paths(stores: Sequence[str]) -> None:
    """Refuse relative paths, which workers on other machines would resolve differently."""
    for store in stores:
        if "://" not in store and not expand_home("data.store", store).is_absolute():
            raise UserError(
                f"store: workers on another machine need an absolute path, got {store}. Change "
                "data.store, or leave scheduler out."
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SETTING_LENGTH else f"{text[:MAX_SETTING_LENGTH]}..."


@final
@dataclass(frozen=True)
class RechunkTask:
    """Writes adjacent blocks of times, `(first, stop)` each.

    A task is sent to other processes, so it holds a request, not open stores.
    """

    selection: FieldSelection
    out: str
    overwrite: bool
    blocks: tuple[tuple[int, int], ...]

    @property
    def num_times(self) -> int:
        """Return the number of times."""
        return self.blocks[-1][1] - self.blocks[0][0]

    def run(self) -> tuple[int, str]:
        """Write missing shards; return the number of times and an error message, or an empty one.

        Errors are returned, not raised: some exceptions can't be sent between processes.
        """
        try:
            target = RechunkTarget(self.out, self.overwrite)
            if target.missing(self.blocks[0][0], self.blocks[-1][1]):
                self._write(target)
        except UserError as error:
            return 0, str(error)
        except OSError as error:
            return 0, disk_error_message(error, self.out)
        return self.num_times, ""

    def _write(self, target: RechunkTarget) -> None:
        selected = SelectedFields.open(self.selection)
        array = target.fields()
        for first, stop in self.blocks:
            missing = target.missing(first, stop)
            if not missing:
                continue
            # One read for all times of a block: they may share chunks.
            fields = selected.fields(missing[0], missing[-1] + 1)
            for index in missing:
                array[index : index + 1] = fields[index - missing[0], None]


def disk_error_message(error: OSError, out: str) -> str:
    """Return the message for a disk that is full or gone."""
    return (
        f"{error.filename or out}: cannot be written or read ({error.strerror or error}). "
        "Fix this and run the same command again: it resumes where it stopped."
    )


def time_blocks(selected: SelectedFields) -> list[tuple[int, int]]:
    """Return the blocks of times that are read together: as many as `BLOCK_BYTES` allows."""
    _, channels, height, columns = selected.shape
    return selected.blocks(max(1, BLOCK_BYTES // (4 * channels * height * columns)))


def group_blocks(
    blocks: Sequence[tuple[int, int]], workers: int
) -> list[tuple[tuple[int, int], ...]]:
    """Group blocks into tasks: several for each worker, but about `MAX_TASKS` at most."""
    length = max(1, min(len(blocks) // (4 * workers), -(-len(blocks) // MAX_TASKS)))
    return [tuple(blocks[start : start + length]) for start in range(0, len(blocks), length)]


def run_tasks(
    tasks: Sequence[RechunkTask], workers: WorkerConfig, on_written: CountCallback
) -> None:
    """Run all tasks, and report the times of each that succeeded.

    Raises:
        UserError: the message of the first task that failed, or a process was killed.
    """

    def on_result(result: tuple[int, str]) -> None:
        num_times, problem = result
        if problem:
            raise UserError(problem)
        on_written(num_times)

    if workers.scheduler:
        _run_distributed(tasks, workers.scheduler, on_result)
    elif workers.count > 1:
        _run_in_processes(tasks, workers, on_result)
    else:
        for task in tasks:
            on_result(task.run())


def _run_in_processes(
    tasks: Sequence[RechunkTask],
    workers: WorkerConfig,
    on_result: Callable[[tuple[int, str]], None],
) -> None:
    others = {*active_children()}
    pool = ProcessPoolExecutor(workers.count, get_context("spawn"), workers.start)
    try:
        for future in as_completed([pool.submit(task.run) for task in tasks]):
            on_result(future.result())
    except BaseException as error:  # also Ctrl-C
        # What they have begun may take minutes; they leave no part of a shard under its name.
        for process in {*active_children()} - others:
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "workers: a process that wrote was killed (out of memory?). Lower workers; the "
                "same command continues where it stopped."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _run_distributed(
    tasks: Sequence[RechunkTask], address: str, on_result: Callable[[tuple[int, str]], None]
) -> None:
    client = connect_to_scheduler(address)
    from distributed import as_completed

    # Results come as tasks end, in any order: progress is reported, and the first error ends the
    # job.
    with client:
        # pure=False: an equal task that the scheduler still remembers would not run again.
        futures = client.map(RechunkTask.run, tasks, pure=False)
        for _, result in as_completed(futures, loop=client.loop, with_results=True):  # type: ignore[no-untyped-call]
            on_result(result)


# The rows that a rank of N reads, relative to 1/N of the rows: the goal where bands allow it.
MAX_EXCESS = 1.05
# Each inner chunk costs a reader about 0.1 ms, and 16 bytes of a shard's index.
MAX_CHUNKS = 1024


def check_domains(domains: Sequence[object], height: int) -> tuple[int, ...]:
    """Return the numbers of ranks, sorted and without duplicates.

    Raises:
        UserError: the grid's rows can't be split over one of them.
    """
    for ranks in domains:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= height:
            raise UserError(
                f"domains: needs numbers of ranks from 1 to {height}, the rows of the grid, "
                f"got {ranks!r}. Change domains."
            )
    if not domains:
        raise UserError("domains: needs at least one number of ranks, like domains=[1,2,4].")
    return tuple(sorted({int(str(ranks)) for ranks in domains}))


def choose_chunk_rows(height: int, domains: Sequence[int]) -> int:
    """Return the largest number of rows per chunk with which ranks read few rows of others.

    All chunks have one size and bands do not, so not all edges can coincide: of 721 rows, the
    second of 2 ranks starts at row 361. The result is the largest size whose `max_read_excess` is
    at most `MAX_EXCESS`, or, if the smallest size allowed is worse than that, as good as this one.
    """
    smallest = -(-height // MAX_CHUNKS)
    max_excess = max(MAX_EXCESS, max_read_excess(height, domains, smallest))
    candidates = (
        rows
        for rows in range(height, smallest - 1, -1)
        if max_read_excess(height, domains, rows) <= max_excess
    )
    return next(candidates)


def max_read_excess(height: int, domains: Sequence[int], chunk: int) -> float:
    """Return the rows that the worst rank of all `domains` reads, relative to an even share."""
    return max(max(rows_touched(height, ranks, chunk)) * ranks / height for ranks in domains)


VERIFIED_TIMES = 16


def verify_samples(selected: SelectedFields, target: RechunkTarget, seed: int) -> int:
    """Check that all shards exist, and that random rows of some times equal the source.

    Reading them back also verifies the checksums of their chunks. Returns how many times were
    compared.

    Raises:
        UserError: a shard is missing, damaged, or differs from the source.
    """
    missing = target.missing(0, selected.shape[0])
    if missing:
        date = selected.calendar.text(selected.times[missing[0]])
        raise UserError(f"{target.partial}: {date} is missing. Run the same command again.")
    array = target.fields()
    random = random_stream(seed)
    times = random.permutation(selected.shape[0])[:VERIFIED_TIMES]
    for index in map(int, np.sort(times)):
        first = int(random.integers(selected.shape[2]))
        stop = int(random.integers(first, selected.shape[2])) + 1
        _compare(selected, target, array, index, slice(first, stop))
    return len(times)


def _compare(
    selected: SelectedFields,
    target: RechunkTarget,
    array: "zarr.Array[Any]",
    time: int,
    rows: slice,
) -> None:
    try:
        written: FieldArray = np.asarray(array[time : time + 1, :, rows], dtype=np.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise _mismatch_error(selected, target, time, rows, f"cannot be read ({error})") from error
    if not same_bits(written, selected.fields(time, time + 1, rows)):
        raise _mismatch_error(selected, target, time, rows, "differ from what the store holds now")


def same_bits(first: FieldArray, second: FieldArray) -> bool:
    """Whether two arrays are equal bit by bit, including NaN and signs of zero."""
    a, b = (
        np.ascontiguousarray(fields, dtype=np.float32).view(np.uint32) for fields in (first, second)
    )
    return np.array_equal(a, b)


def _mismatch_error(
    selected: SelectedFields, target: RechunkTarget, time: int, rows: slice, problem: str
) -> UserError:
    date = selected.calendar.text(selected.times[time])
    return UserError(
        f"{target.partial}: rows {rows.start} to {rows.stop - 1} at {date} {problem}. "
        f"Check the disk and the store, remove {target.partial}, and start again."
    )
