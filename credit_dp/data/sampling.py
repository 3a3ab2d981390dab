"""Which samples there are, and in which order training meets them."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.data.dates import one_step_pairs, split_span
from credit_dp.data.prepare import Prepared
from credit_dp.errors import UserError

Times = NDArray[np.datetime64]


def sample_times(prepared: Prepared, split: str) -> Times:
    """All times of a split whose next step lies in the split too: `(N,)`, rising.

    Raises:
        UserError: the dates are outside the store, or no two are one step apart.
    """
    store = prepared.store
    config = store.config
    times = store.times[split_span(config, split, store.times)]
    now, _ = one_step_pairs(times, config.step_hours)
    if not len(now):
        raise UserError(
            f"{config.store}: no two dates of data.{split} are {config.step_hours} hours apart. "
            f"Change data.step_hours or data.{split}."
        )
    return times[now]


def initial_times(
    prepared: Prepared, split: str, lead_hours: Sequence[int], stride_hours: int
) -> Times:
    """Times from which a forecast to the longest lead can be made and judged: `(N,)`, rising.

    Every step on the way is in the split, and neighbours are at least `stride_hours` apart.

    Raises:
        UserError: a lead is not a whole number of steps, or no time has such a window.
    """
    store = prepared.store
    config = store.config
    step = config.step_hours
    checks.leads(lead_hours, step)
    times = store.times[split_span(config, split, store.times)]
    present = set(times.astype(np.int64).tolist())
    steps = np.arange(0, max(lead_hours) + step, step).astype("timedelta64[h]")
    chosen: list[np.datetime64] = []
    for time in times:
        if chosen and time - chosen[-1] < np.timedelta64(stride_hours, "h"):
            continue
        if present.issuperset((time + steps).astype("datetime64[ns]").astype(np.int64).tolist()):
            chosen.append(time)
    if not chosen:
        raise UserError(
            f"{config.store}: no forecast of {max(lead_hours)} hours fits into data.{split}. "
            f"Give data.{split} more dates, or lower trainer.evaluate_hours."
        )
    return np.array(chosen, dtype="datetime64[ns]")


@final
class SampleSequence:
    """Endless shuffled batches: a function of seed, epoch and data rank only.

    Each epoch is one permutation of all samples, cut into global batches; what is left over at its
    end, less than a batch, is dropped, so that no batch mixes two epochs. Data rank r takes the
    r-th of `data_size` equal parts of each global batch, which is why the global batch, and with
    it the training, does not depend on how many ranks share it.

    Attributes:
        position: batches handed out so far. Whoever uses a batch adds one.
    """

    def __init__(
        self, count: int, batch_size: int, data_rank: int = 0, data_size: int = 1, seed: int = 0
    ) -> None:
        """Take `count` samples in global batches of `batch_size`.

        Raises:
            UserError: the batch does not divide among the data ranks, or there are too few samples.
        """
        if batch_size < 1 or batch_size % data_size:
            raise UserError(
                f"data.batch_size: needs a multiple of the {data_size} data-parallel ranks, but "
                f"got {batch_size}. Change data.batch_size or parallel.data."
            )
        if count < batch_size:
            raise UserError(
                f"data.batch_size: one batch needs {batch_size} samples, but data.train has "
                f"{count}. Lower data.batch_size or give data.train more dates."
            )
        self.count = count
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0
        self.batches_per_epoch = count // batch_size
        part = batch_size // data_size
        self._part = slice(data_rank * part, (data_rank + 1) * part)
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def indices(self, batch: int) -> NDArray[np.int64]:
        """This rank's samples of global batch number `batch`: `(batch_size / data_size,)`."""
        epoch, place = divmod(batch, self.batches_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._epoch = epoch
        start = place * self.batch_size
        return self._order[start : start + self.batch_size][self._part]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in. The mesh is not part of it."""
        return {
            "position": self.position,
            "count": self.count,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            UserError: it belongs to other samples, another batch size or another seed.
        """
        keys = {"count": "data.train", "batch_size": "data.batch_size", "seed": "seed"}
        for name, key in keys.items():
            if state[name] != getattr(self, name):
                raise UserError(
                    f"{key}: the checkpoint was made with {name}={state[name]}, but this run has "
                    f"{getattr(self, name)}. Resume with the same {key}, or start a new run."
                )
        self.position = int(state["position"])
