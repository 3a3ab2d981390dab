"""The work of preparing, cut into tasks that write whole shards each, and run by dask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from dask.base import compute
from dask.callbacks import Callback
from dask.delayed import delayed

from credit_dp.data.preparing.asked import Asked, Question
from credit_dp.data.preparing.target import Target
from credit_dp.errors import UserError

BLOCK_BYTES = 2**29  # of fields that a worker reads at once
TASKS = 1000  # about so many: each opens the store once
PATIENCE = "20s"  # for a scheduler to answer

Done = Callable[[int], None]  # how many times were done
Starter = Callable[[], None]  # what a worker process does first


@final
@dataclass(frozen=True)
class Workers:
    """Who works.

    Attributes:
        count: processes of this machine; one is this process.
        scheduler: address of a distributed scheduler whose workers do it instead; or empty.
        start: called first in each process.
    """

    count: int = 1
    scheduler: str = ""
    start: Starter | None = None


ONE_PROCESS = Workers()


@final
@dataclass(frozen=True)
class Task:
    """Some blocks of times, `(first, stop)` each, one after the other."""

    question: Question
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
            target = Target(self.out, self.overwrite)
            if target.missing(self.blocks[0][0], self.blocks[-1][1]):
                self._write(target)
        except UserError as error:
            return 0, str(error)
        except OSError as error:
            return 0, of_disk(error, self.out)
        return self.times, ""

    def _write(self, target: Target) -> None:
        asked = Asked.open(self.question)
        array = target.fields()
        for first, stop in self.blocks:
            missing = target.missing(first, stop)
            if not missing:
                continue
            fields = asked.fields(missing[0], missing[-1] + 1)
            for time in missing:
                array[time : time + 1] = fields[time - missing[0], None]


def of_disk(error: OSError, out: str) -> str:
    """What a user is told of a disk that is full or gone."""
    return (
        f"{error.filename or out}: cannot be written or read ({error.strerror or error}). "
        "Mend that, then start again: it goes on where it stopped."
    )


def blocks_of(asked: Asked) -> list[tuple[int, int]]:
    """What is read at once: as many times as fit."""
    _, channels, height, columns = asked.shape
    return asked.blocks(max(1, BLOCK_BYTES // (4 * channels * height * columns)))


def batches(blocks: Sequence[tuple[int, int]], workers: int) -> list[tuple[tuple[int, int], ...]]:
    """The blocks in batches, a task each: a few for each worker, and not too many in all."""
    length = max(1, min(len(blocks) // (4 * workers), -(-len(blocks) // TASKS)))
    return [tuple(blocks[start : start + length]) for start in range(0, len(blocks), length)]


def run_tasks(tasks: Sequence[Task], workers: Workers, done: Done) -> None:
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
    with _Told(finished):
        compute(*calls, optimize_graph=False, **options)  # type: ignore[no-untyped-call]


@final
class _Told(Callback):
    """Hands on the result of each task as it ends."""

    def __init__(self, finished: Callable[[tuple[int, str]], None]) -> None:
        super().__init__(posttask=self._after)  # type: ignore[no-untyped-call]
        self._finished = finished

    def _after(self, key: object, result: object, *rest: object) -> None:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str):
            self._finished(result)


def _run_distributed(
    tasks: Sequence[Task], address: str, finished: Callable[[tuple[int, str]], None]
) -> None:
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise UserError(
            "scheduler: needs the package distributed. Install it, or leave scheduler out."
        ) from None
    try:
        client = Client(address, timeout=PATIENCE, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"scheduler: no dask scheduler answers at {address} ({reason}). Change scheduler."
        ) from None
    with client:
        futures = client.map(Task.run, tasks, pure=False)
        for _, result in as_completed(futures, loop=client.loop, with_results=True):  # type: ignore[no-untyped-call]
            finished(result)
