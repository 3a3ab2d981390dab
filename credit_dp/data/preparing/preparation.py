"""Preparing a store from beginning to end: asked, begun or resumed, worked on, verified, named."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from filelock import FileLock, Timeout

from credit_dp.checks import home_replaced
from credit_dp.data.cache import fingerprint, lock_of
from credit_dp.data.preparing.asked import Asked, Question
from credit_dp.data.preparing.chunks import check_domains, chunk_rows
from credit_dp.data.preparing.codecs import (
    AUTO,
    CODECS,
    Measured,
    check_codec,
    disk_speed,
    fastest,
    measure,
)
from credit_dp.data.preparing.target import Target
from credit_dp.data.preparing.verify import verify
from credit_dp.data.preparing.work import (
    ONE_PROCESS,
    Done,
    Task,
    Workers,
    batches,
    blocks_of,
    of_disk,
    run_tasks,
)
from credit_dp.errors import UserError

CODEC = "codec"
CHUNK_ROWS = "rows of a chunk (domains)"


@final
@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        out: path of the prepared store.
        domains: numbers of ranks whose bands the chunks are to fit.
        codec: `auto` or a key of `CODECS`.
        overwrite: whether a prepared store at `out` may be replaced.
    """

    question: Question
    out: str
    domains: tuple[object, ...] = (1, 2, 4, 8)
    codec: str = AUTO
    overwrite: bool = False
    workers: Workers = ONE_PROCESS


@final
@dataclass(frozen=True)
class Estimate:
    """What it will take.

    Attributes:
        codecs: what was measured, by name; the disk's speed with it.
        disk_speed: bytes per second.
        codec: the one that is taken.
        raw, stored: bytes of all fields, before and after compression.
        left: bytes still to be written.
        hours: of all workers.
    """

    codecs: Mapping[str, Measured]
    disk_speed: float
    codec: str
    raw: float
    stored: float
    left: float
    hours: float


@final
class Preparation:
    """One store on its way. Call `begin`, `work`, `verify` and `finish`, inside `alone`.

    Raises:
        UserError: the request can't be met, naming the key to change.
    """

    def __init__(self, request: Request) -> None:
        request.question.check()
        check_codec(request.codec)
        if request.workers.count < 1:
            raise UserError(f"workers: needs 1 or more, got {request.workers.count}")
        if request.workers.scheduler:
            _check_paths(request.question.config.stores)
        self._request = request
        self.target = Target(request.out, request.overwrite)
        self.asked = Asked.open(request.question)
        height = self.asked.shape[2]
        self.rows = chunk_rows(height, check_domains(request.domains, height))
        self._settings = json.loads(
            json.dumps({**self.asked.settings(), CHUNK_ROWS: self.rows, CODEC: request.codec})
        )
        self._found: Mapping[str, Any] | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from preparing the same store meanwhile.

        Raises:
            UserError: another does, or what is there was begun with other settings.
        """
        lock = FileLock(lock_of(self.target.out), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"{self.target.out}: another process is preparing it. Wait for it, or change out."
            ) from None
        try:
            self._found = self._comparable(self.target.settings())
            yield
        finally:
            lock_of(self.target.out).unlink(missing_ok=True)
            lock.release()

    @property
    def resumed(self) -> bool:
        """Whether some of it is there."""
        return self._found is not None

    @property
    def done(self) -> int:
        """Times that are written."""
        return self.asked.shape[0] - len(self._missing()) if self.resumed else 0

    def estimate(self) -> Estimate:
        """Read a block of times, and try how fast it is compressed and read.

        Raises:
            UserError: it would not fit on the disk.
        """
        missing = self._missing() or [0]
        block = next(b for b in blocks_of(self.asked) if b[0] <= missing[0] < b[1])
        start = time.perf_counter()
        fields = self.asked.fields(*block)
        read = (time.perf_counter() - start) / len(fields)
        speed = disk_speed(self.target.out.parent)
        measured = measure(fields[len(fields) // 2], self.rows, self._codecs(), speed)
        chosen = fastest(measured)
        sample = fields[0].nbytes
        seconds = len(self._missing()) * (read + sample * chosen.encode) / self._workers
        raw, left = sample * self.asked.shape[0], sample * len(self._missing())
        stored = raw / chosen.ratio
        estimate = Estimate(
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
                self.target.begin(self.asked, self.rows, codec, settings)
        except OSError as error:
            raise UserError(of_disk(error, str(self.target.out))) from error

    def work(self, done: Done) -> None:
        """Write what is missing; `done` is told how many more times are there."""
        request = self._request
        parts = batches(blocks_of(self.asked), self._workers)
        out = str(self.target.out)
        tasks = [Task(request.question, out, request.overwrite, part) for part in parts]
        left = []
        for task in tasks:
            if self.target.missing(task.blocks[0][0], task.blocks[-1][1]):
                left.append(task)
            else:
                done(task.times)
        run_tasks(left, request.workers, done)

    def verify(self) -> int:
        """Compare random parts with the store; how many."""
        return verify(self.asked, self.target, int(fingerprint(self._settings), 16))

    def finish(self) -> None:
        """Give it its name."""
        self.target.finish()

    @property
    def _workers(self) -> int:
        return 1 if self._request.workers.scheduler else self._request.workers.count

    def _missing(self) -> list[int]:
        return self.target.missing(0, self.asked.shape[0])

    def _codecs(self) -> list[str]:
        if self._found is not None:
            return [str(self._found[CODEC])]
        return list(CODECS) if self._request.codec == AUTO else [self._request.codec]

    def _comparable(self, found: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
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

    def _check_space(self, estimate: Estimate) -> None:
        folder = self.target.out.parent
        free = shutil.disk_usage(folder).free
        if estimate.left > free:
            raise UserError(
                f"{folder}: about {estimate.left / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are "
                "free. Change out, dates, data.levels or data.step."
            )


def _check_paths(stores: Sequence[str]) -> None:
    """Refuse paths that mean something else in another folder: other machines work in theirs."""
    for store in stores:
        if "://" not in store and not home_replaced("data.store", store).is_absolute():
            raise UserError(
                f"store: workers of another machine need a whole path, got {store}. Change "
                "data.store, or leave scheduler out."
            )


def _short(value: object, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."
