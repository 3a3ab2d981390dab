"""Copies fields into a prepared store, in parallel.

`OUT.partial` is a store that is not complete yet. `PrepareJob` creates it with everything but its
fields, has processes of this machine or the workers of a dask scheduler write the times that are
missing, compares a sample with the source, and renames it to `OUT`. Each time is one file, which
gets its name when it is complete: so a killed command leaves complete times, and the same command
writes the others.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, final

import numpy as np

from credit_dp import checks
from credit_dp.bands import rows_touched
from credit_dp.config import DataConfig
from credit_dp.data.cache import clear_new, fingerprint, lock_output, new_path, remove_lock
from credit_dp.data.rechunk.selected_fields import SelectedFields
from credit_dp.data.rechunk.target import (
    CODECS,
    SETTINGS,
    create_store,
    open_fields,
    read_attributes,
    shard_name,
    stored_size,
)
from credit_dp.data.sources.prepared import METADATA_ATTRIBUTE
from credit_dp.data.streaming import connect_to_scheduler
from credit_dp.errors import UserError
from credit_dp.files import PARTIAL_SUFFIX, partial_path, remove_temporaries
from credit_dp.random_streams import random_stream

BLOCK_BYTES = 2**29  # of fields that a worker reads together
MAX_TASKS = 1000  # each task opens the store once
VERIFIED_TIMES = 16

Callback = Callable[[int], None]  # is given a number of times


@final
@dataclass(frozen=True)
class PrepareRequest:
    """The keys of `credit-dp data prepare`.

    Attributes:
        config: store, variables, levels, step and units.
        out: path of the prepared store.
        dates: the first and the last to copy; empty for all.
        domains: numbers of ranks whose bands the chunks should fit.
        codec: a key of `CODECS`.
        overwrite: whether a prepared store at `out` may be replaced.
        workers: processes of this machine that write; with 1, this process does.
        scheduler: address of a dask scheduler whose workers write instead; or empty.
    """

    config: DataConfig
    out: str
    dates: tuple[str, ...] = ()
    domains: tuple[int, ...] = (1, 2, 4, 8)
    codec: str = "zstd"
    overwrite: bool = False
    workers: int = 1
    scheduler: str = ""


@final
class PrepareJob:
    """Writes one prepared store: call `write`, `verify` and `finish`, inside `locked`.

    Attributes:
        begun: whether `OUT.partial` exists with these settings.

    Raises:
        UserError: the request can't be met, naming the key to change.
    """

    def __init__(self, request: PrepareRequest) -> None:
        if request.dates:
            checks.date_range("dates", request.dates)
        checks.one_of("codec", request.codec, tuple(CODECS))
        if request.workers < 1:
            raise UserError(f"workers: needs 1 or more, got {request.workers}. Change workers.")
        if request.scheduler:
            _check_absolute_paths(request.config.stores)
        self.out = _output_path(request.out, request.overwrite)
        self.partial = partial_path(self.out)
        self.request = request
        self.selected = SelectedFields(request.config, request.dates)
        height = self.selected.shape[2]
        if not request.domains or not all(1 <= ranks <= height for ranks in request.domains):
            raise UserError(
                f"domains: needs numbers of ranks from 1 to {height}, the rows of the grid, "
                f"got {list(request.domains)}. Change domains."
            )
        self.chunk_rows = choose_chunk_rows(height, request.domains)
        settings = {
            **self.selected.settings(),
            "rows of a chunk (domains)": self.chunk_rows,
            "codec": request.codec,
        }
        # Through JSON, as it is read back from a partial store: tuples become lists.
        self._settings: Mapping[str, Any] = json.loads(json.dumps(settings))
        self.begun = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from preparing the same store.

        Raises:
            UserError: one does already, the lock file can't be opened, or a partial store has other
                settings.
        """
        in_use = f"{self.out}: another process is preparing it. Wait for it, or change out."
        self._can_resume()  # nothing is written to a folder that is something else
        with ExitStack() as stack:
            with explain_disk_errors(self.out):
                stack.enter_context(lock_output(self.out, in_use))
            self.begun = self._can_resume()
            yield

    def _can_resume(self) -> bool:
        if not self.partial.exists():
            return False
        attributes = read_attributes(self.partial)
        if SETTINGS not in attributes:
            raise UserError(
                f"{self.partial}: is not a partial prepared store. Move it, or change out."
            )
        before, now = attributes[SETTINGS], self._settings
        different = [key for key in now if before.get(key) != now[key]]
        if different and not self.request.overwrite:
            key = different[0]
            raise UserError(  # the settings may be long lists
                f"{self.partial}: was begun with {key} {before.get(key)!s:.60}, now it is "
                f"{now[key]!s:.60}. Use the same settings to resume, overwrite=true to start over, "
                "or change out."
            )
        return not different

    def missing(self) -> list[int]:
        """Return the times that are not written yet."""
        folder = self.partial / "fields"
        written = {path.name for path in folder.glob("c.*")} if self.begun else ()
        return [time for time in range(self.selected.shape[0]) if shard_name(time) not in written]

    def stored_bytes(self) -> int:
        """Compress one time; return about how many bytes all times take.

        Raises:
            UserError: the missing times would not fit on the disk.
        """
        missing = self.missing()
        time = missing[0] if missing else 0
        fields = self.selected.fields(time, time + 1)[0]
        per_time = stored_size(fields, self.chunk_rows, self.request.codec)
        needed, folder = per_time * len(missing), self.out.parent
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{folder}: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free. "
                "Change out, dates, data.levels or data.step."
            )
        return per_time * self.selected.shape[0]

    def write(self, on_written: Callback, start_worker: Callable[[], None] | None = None) -> None:
        """Write the missing times; `on_written` gets the total number of written times.

        Processes of this machine call `start_worker` first.

        Raises:
            UserError: a time can't be read or written, or a process was killed.
        """
        with explain_disk_errors(self.out):
            self._begin()
        missing = self.missing()
        num_done = self.selected.shape[0] - len(missing)

        def on_result(num_times: int) -> None:
            nonlocal num_done
            num_done += num_times
            on_written(num_done)

        request = self.request
        write = partial(write_times, request.config, request.dates, self.partial)
        tasks = [partial(write, blocks) for blocks in self._split(missing)]
        if request.scheduler:
            _run_distributed(tasks, request.scheduler, on_result)
        elif request.workers > 1:
            _run_in_processes(tasks, request.workers, start_worker, on_result)
        else:
            for task in tasks:
                on_result(task())

    def _begin(self) -> None:
        """Create the partial store, or remove what a killed process left in the one there is."""
        if self.begun:
            remove_temporaries(self.partial / "fields")
            return
        if self.partial.exists():  # with other settings; the lock file in it is kept
            shutil.rmtree(new_path(self.out), ignore_errors=True)
            os.replace(self.partial, new_path(self.out))
        new = clear_new(self.out)
        create_store(new, self.selected, self.chunk_rows, self.request.codec, self._settings)
        # Only now may the store be resumed: all but its fields is complete.
        os.replace(new, self.partial)
        self.begun = True

    def _split(self, missing: Sequence[int]) -> list[list[list[int]]]:
        """Split times into tasks of several blocks; the times of a block are read together."""
        _, channels, height, columns = self.selected.shape
        block_times = max(1, BLOCK_BYTES // (4 * channels * height * columns))
        left = set(missing)
        blocks = [sorted(left.intersection(range(*b))) for b in self.selected.blocks(block_times)]
        blocks = [times for times in blocks if times]
        size = max(1, -(-len(blocks) // MAX_TASKS))
        return [blocks[start : start + size] for start in range(0, len(blocks), size)]

    def verify(self) -> int:
        """Compare random rows of some times with the source; return of how many.

        Reading them back also verifies the checksums of their chunks.

        Raises:
            UserError: a time is missing, damaged, or differs from the source.
        """
        num_times, _, height, _ = self.selected.shape
        calendar, dates = self.selected.calendar, self.selected.times
        if missing := self.missing():
            date = calendar.text(dates[missing[0]])
            raise UserError(f"{self.partial}: {date} is missing. Run the same command again.")
        array = open_fields(self.partial)
        # The same job compares the same samples.
        random = random_stream(int(fingerprint(self._settings), 16))
        times = np.sort(random.permutation(num_times)[:VERIFIED_TIMES])
        for time in map(int, times):
            first = int(random.integers(height))
            stop = int(random.integers(first, height)) + 1
            problem = ""
            try:
                written = np.asarray(array[time : time + 1, :, first:stop], np.float32)
            except (OSError, ValueError, RuntimeError) as error:
                problem = f"cannot be read ({error})"
            else:
                fields = np.asarray(
                    self.selected.fields(time, time + 1, slice(first, stop)), np.float32
                )
                # Bit by bit, including NaN and signs of zero.
                if not np.array_equal(written.view(np.uint32), fields.view(np.uint32)):
                    problem = "differ from what the store holds now"
            if problem:
                raise UserError(
                    f"{self.partial}: rows {first} to {stop - 1} at {calendar.text(dates[time])} "
                    f"{problem}. Check the disk and the store, remove {self.partial}, and start "
                    "again."
                )
        return len(times)

    def finish(self) -> None:
        """Give the complete store the name `OUT`, and remove a store that it replaces."""
        # A folder can't replace another one in one rename: the old store makes way first.
        old = self.out.with_name(f"{self.out.name}.old{PARTIAL_SUFFIX}")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.out, old)
        os.replace(self.partial, self.out)
        remove_lock(self.out)
        shutil.rmtree(old, ignore_errors=True)


def _check_absolute_paths(stores: Sequence[str]) -> None:
    """Refuse relative paths, which workers on other machines would resolve differently."""
    for store in stores:
        if "://" not in store and not checks.expand_home("data.store", store).is_absolute():
            raise UserError(
                f"store: workers on another machine need an absolute path, got {store}. Change "
                "data.store, or leave scheduler out."
            )


def _output_path(out: str, overwrite: bool) -> Path:
    """Return the absolute path of a store that may be written."""
    if not out or "://" in out:
        raise UserError(f"out: needs the path of a store to write, got {out!r}. Change out.")
    path = checks.expand_home("out", out).absolute()
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: there is no such folder. Make it, or change out.")
    is_prepared = METADATA_ATTRIBUTE in read_attributes(path)
    if path.exists() and not (overwrite and is_prepared):
        advice = ", or say overwrite=true" if is_prepared else ""
        raise UserError(f"{path}: exists already. Change out{advice}.")
    return path


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn an error of a disk that is full or gone into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be written or read ({error.strerror or error}). "
            "Fix this and run the same command again: it resumes where it stopped."
        ) from error


def write_times(
    config: DataConfig, dates: Sequence[str], store: Path, blocks: Sequence[Sequence[int]]
) -> int:
    """Copy blocks of times into a partial store; return how many times they have.

    Other processes run this, so it gets what opens the source, not the open source.
    """
    with explain_disk_errors(store):
        selected = SelectedFields(config, dates)
        array = open_fields(store)
        for times in blocks:
            # One read for all times of a block: they may share chunks.
            fields = selected.fields(times[0], times[-1] + 1)
            for time in times:
                array[time : time + 1] = fields[time - times[0], None]
    return sum(map(len, blocks))


def _run_in_processes(
    tasks: Sequence[Callable[[], int]],
    workers: int,
    start_worker: Callable[[], None] | None,
    on_result: Callback,
) -> None:
    others = {*active_children()}
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker)
    try:
        for future in as_completed([pool.submit(task) for task in tasks]):
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


def _run_distributed(tasks: Sequence[Callable[[], int]], address: str, on_result: Callback) -> None:
    client = connect_to_scheduler(address)
    from distributed import as_completed as completed

    with client:
        # pure=False: an equal task that the scheduler still remembers would not run again.
        futures = [client.submit(task, pure=False) for task in tasks]
        for _, result in completed(futures, loop=client.loop, with_results=True):  # type: ignore[no-untyped-call]
            on_result(result)


# The rows that a rank of N reads, relative to 1/N of the rows: the goal where bands allow it.
MAX_EXCESS = 1.05
# Each inner chunk costs a reader about 0.1 ms, and 16 bytes of a shard's index.
MAX_CHUNKS = 1024


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
