"""Who does the pieces of a pass: threads of this process, or the workers of a dask cluster."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, final

from credit_dp.config import DataConfig
from credit_dp.data.limits import Range
from credit_dp.data.sources.opening import open_source
from credit_dp.data.store import Store
from credit_dp.data.streaming import Piece, TrainingDates
from credit_dp.errors import UserError

T = TypeVar("T")
Work = Callable[[Store, TrainingDates, Piece], T]

CONNECT_SECONDS = 30


class Workers(ABC):
    """Does pieces at once, as many as there are workers, and hands the results out in order.

    Attributes:
        count: how many pieces are done at once.
    """

    count: int

    @abstractmethod
    def run(self, work: Work[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """The result of each piece, in order."""

    def close(self) -> None:  # noqa: B027
        """Let go of what was opened."""


@final
class Threads(Workers):
    """Threads of this process, that share the open store."""

    def __init__(self, store: Store, dates: TrainingDates, count: int) -> None:
        self.count = count
        self._store, self._dates = store, dates

    def run(self, work: Work[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """See `Workers`."""
        with ThreadPoolExecutor(self.count) as threads:
            one = partial(work, self._store, self._dates)
            for start in range(0, len(pieces), self.count):  # few results at once wait to be taken
                yield from threads.map(one, pieces[start : start + self.count])


@final
class Cluster(Workers):
    """The workers of a running `dask.distributed` scheduler; each opens the store itself."""

    def __init__(self, store: Store, dates: TrainingDates, address: str) -> None:
        """Connect.

        Raises:
            UserError: nobody answers there, it has no workers, or `distributed` is not installed.
        """
        self._config, self._ranges, self._dates = store.config, store.limits.sampled, dates
        self._client = _connect(address)
        self.count = sum(self._client.nthreads().values())
        if not self.count:
            self.close()
            raise UserError(
                f"{address}: the scheduler has no workers. Start some, or drop scheduler."
            )

    def run(self, work: Work[T], pieces: Sequence[Piece]) -> Iterator[T]:
        """See `Workers`."""
        for start in range(0, len(pieces), self.count):
            tasks = [
                _task(_opening, work, self._config, self._ranges, self._dates, piece)
                for piece in pieces[start : start + self.count]
            ]
            yield from self._client.gather(self._client.compute(tasks))

    def close(self) -> None:
        """Leave the scheduler."""
        self._client.close()


def _task(function: Callable[..., Any], *arguments: Any) -> Any:
    from dask.delayed import delayed

    # Bound and not traversed: dask would take a piece apart to look for tasks in it.
    return delayed(partial(function, *arguments), pure=False, traverse=False)()


def _opening(
    work: Work[T],
    config: DataConfig,
    ranges: Mapping[str, Range],
    dates: TrainingDates,
    piece: Piece,
) -> T:
    return work(Store(open_source(config), config, ranges), dates, piece)


def _connect(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError("scheduler: needs the package distributed. Install it.") from error
    try:
        return Client(address, timeout=CONNECT_SECONDS)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise UserError(f"scheduler={address}: can't be reached ({error}).") from error
