"""Which samples there are, and in which order training meets them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.data.dates import HasTimes, Times, split_slice, times_with_steps
from credit_dp.errors import UserError


@final
@dataclass(frozen=True)
class RolloutLengths:
    """How many forecast steps the rollouts of training have: `at` the number of a batch.

    `longest` of them says which samples there are, so that these stay the same all along.
    """

    longest: int = 1
    at: Callable[[int], int] = lambda batch: 1


ONE_STEP = RolloutLengths()


def frame_offsets(frames: int, step_hours: int, later: int = 0) -> NDArray[np.timedelta64]:
    """What is added to a time to get those of its states, oldest first, and of `later` steps."""
    return np.arange(1 - frames, later + 1) * np.timedelta64(step_hours, "h")


def sample_times(store: HasTimes, split: str, frames: int = 1, ahead: int = 1) -> Times:
    """All times of a split whose states and next steps lie in the split too: `(N,)`, rising.

    A sample has the states of `frames` times, each one step after the other, the last one at its
    own, and the fields of `ahead` steps after it. None spans a gap, for a gap is a step that is
    missing.

    Raises:
        UserError: the dates are outside the store, or no time has its steps.
    """
    config = store.config
    times = store.times[split_slice(config, split, store.times)]
    found = times_with_steps(times, config.step_hours, frames - 1, ahead)
    if not len(found) and frames == ahead == 1:
        raise UserError(
            f"{config.store}: no two dates of data.dates.{split} are {config.step_hours} "
            f"hours apart. Change data.step or data.dates.{split}."
        )
    if not len(found):
        longer = {"model.frames": frames, "the longest of trainer.rollout": ahead}
        remedy = " or ".join(key for key, steps in longer.items() if steps > 1)
        raise UserError(
            f"{config.store}: a sample needs {frames + ahead} dates of data.dates.{split}, each "
            f"{config.step_hours} hours after the one before, and there are none. "
            f"Lower {remedy}, or change data.step or data.dates.{split}."
        )
    return found


def initial_times(
    store: HasTimes,
    split: str,
    lead_hours: Sequence[int],
    stride_hours: int,
    frames: int = 1,
) -> Times:
    """Times from which a forecast to the longest lead can be made and judged: `(N,)`, rising.

    The `frames` states it starts from and every step on the way are in the split, and neighbours
    are at least `stride_hours` apart.

    Raises:
        UserError: a lead is not a whole number of steps, or no time has such a window.
    """
    config = store.config
    step = config.step_hours
    checks.lead_times(lead_hours, step)
    times = store.times[split_slice(config, split, store.times)]
    chosen: list[np.datetime64] = []
    for time in times_with_steps(times, step, frames - 1, max(lead_hours) // step):
        if not chosen or time - chosen[-1] >= np.timedelta64(stride_hours, "h"):
            chosen.append(time)
    if not chosen:
        states, fewer = (f" from {frames} states", " or model.frames") if frames > 1 else ("", "")
        raise UserError(
            f"{config.store}: no forecast of {max(lead_hours)} hours{states} fits into "
            f"data.dates.{split}. Give it more dates, or lower trainer.evaluate_hours{fewer}."
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
                f"data.batch_size: one batch needs {batch_size} samples, but data.dates.train has "
                f"{count}. Lower data.batch_size or give data.dates.train more dates."
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
        keys = {
            "count": "data.dates.train and the longest of trainer.rollout",
            "batch_size": "data.batch_size",
            "seed": "seed",
        }
        for name, key in keys.items():
            if state[name] != getattr(self, name):
                raise UserError(
                    f"{key}: the checkpoint was made with {name}={state[name]}, but this run has "
                    f"{getattr(self, name)}. Resume with the same {key}, or start a new run."
                )
        self.position = int(state["position"])
