"""The samples of a split and the shuffled order in which training sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from credit_dp import checks
from credit_dp.data.calendar import Times
from credit_dp.data.dates import HasTimes, date_interval, split_slice, times_with_steps
from credit_dp.errors import UserError, counted
from credit_dp.random_streams import random_stream


@final
@dataclass(frozen=True)
class RolloutLengths:
    """The number of forecast steps of training rollouts, which may change during training.

    Attributes:
        longest: the largest number; every sample has as many steps, so that the set of samples
            does not change when rollouts get longer.
        at: returns the number of steps of the batch with a given number.
    """

    longest: int = 1
    at: Callable[[int], int] = lambda batch: 1


ONE_STEP = RolloutLengths()


def evenly_spaced_indices(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` evenly spaced indices below `count`, with first and last."""
    return sorted({*np.linspace(0, count - 1, max_count).round().astype(int).tolist()})


def frame_offsets(frames: int, step_hours: int, later: int = 0) -> NDArray[np.timedelta64]:
    """Return the time offsets of `frames` states, oldest first, and of `later` steps after them."""
    return np.arange(1 - frames, later + 1) * np.timedelta64(step_hours, "h")


def sample_times(store: HasTimes, split: str, frames: int = 1, steps: int = 1) -> Times:
    """Return the times of a split's samples, whose states and steps are all in the split.

    A sample has `frames` states, one step apart, of which the last is at the sample's time, and
    the fields of the next `steps` steps. No sample spans a gap in time.

    Returns:
        `(N,)`, rising.

    Raises:
        UserError: the dates are outside the store, or no sample is complete.
    """
    config = store.config
    times = store.times[split_slice(config, split, store.times, store.calendar)]
    samples = times_with_steps(times, config.step_hours, frames - 1, steps)
    if not len(samples) and frames == steps == 1:
        raise UserError(
            f"{config.where}: no two dates of data.dates.{split} are "
            f"{counted(config.step_hours, 'hour')} apart. Change data.step or data.dates.{split}."
        )
    if not len(samples):
        lengths = {"model.frames": frames, "the longest of trainer.rollout": steps}
        remedy = " or ".join(key for key, count in lengths.items() if count > 1)
        raise UserError(
            f"{config.where}: a sample needs {frames + steps} dates of data.dates.{split}, each "
            f"{counted(config.step_hours, 'hour')} after the one before, and there are none. "
            f"Lower {remedy}, or change data.step or data.dates.{split}."
        )
    return samples


def initial_times(
    store: HasTimes,
    split: str,
    lead_hours: Sequence[int],
    stride_hours: int,
    frames: int = 1,
    part: tuple[str, Sequence[str]] | None = None,
) -> Times:
    """Return the initial times of forecasts that can be verified up to the longest lead.

    The `frames` initial states and every step of the forecast are in the split. Initial times are
    at least `stride_hours` apart.

    Args:
        part: key and dates, `[first, last]`, of the part of the split to take; None: all of it.

    Returns:
        `(N,)`, rising.

    Raises:
        UserError: a lead is not a multiple of the step, the part is not within the split, or no
            forecast fits into it.
    """
    config = store.config
    step = config.step_hours
    checks.lead_times(lead_hours, step)
    times = store.times[split_slice(config, split, store.times, store.calendar)]
    key = f"data.dates.{split}"
    if part is not None:
        whole: list[str] = getattr(config.dates, split)
        first, last = (date_interval(key, date, store.calendar) for date in whole)
        key, dates = part
        begin, end = (date_interval(key, date, store.calendar) for date in dates)
        if begin[1] < first[0] or end[0] > last[1]:
            raise UserError(
                f"{key}: needs dates within data.dates.{split}, which are {whole[0]} to "
                f"{whole[1]}, got {dates[0]} to {dates[1]}. Change one of them."
            )
        times = times[(times >= begin[0]) & (times <= end[1])]
    selected: list[np.datetime64] = []
    # Keep each time that is far enough from the last one kept; across a gap the spacing is larger.
    for time in times_with_steps(times, step, frames - 1, max(lead_hours) // step):
        if not selected or time - selected[-1] >= np.timedelta64(stride_hours, "h"):
            selected.append(time)
    if not selected:
        from_frames = f" from {frames} states" if frames > 1 else ""
        lower_frames = " or model.frames" if frames > 1 else ""
        raise UserError(
            f"{config.where}: no forecast of {counted(max(lead_hours), 'hour')}{from_frames} fits "
            f"into {key}. Give it more dates, or lower trainer.evaluate_hours{lower_frames}."
        )
    return np.array(selected)


@final
class SampleSequence:
    """Endless shuffled batches, determined by seed, epoch and data rank alone.

    Each epoch is one permutation of all samples, cut into global batches. An incomplete batch at
    the end of an epoch is dropped, so no batch mixes two epochs. Data rank r takes the r-th of
    `data_size` equal parts of each global batch. The global batch, and so the training, does not
    depend on the number of data ranks.

    Attributes:
        position: number of batches used so far; the caller increments it.
    """

    def __init__(
        self, count: int, batch_size: int, data_rank: int = 0, data_size: int = 1, seed: int = 0
    ) -> None:
        """Shuffle `count` samples into global batches of `batch_size`."""
        if batch_size < 1 or batch_size % data_size:
            raise UserError(
                f"data.batch_size: needs a multiple of the {data_size} data-parallel ranks, but "
                f"got {batch_size}. Change data.batch_size or parallel.data."
            )
        if count < batch_size:
            raise UserError(
                f"data.batch_size: one batch needs {counted(batch_size, 'sample')}, but "
                f"data.dates.train has {count}. Lower data.batch_size or give data.dates.train "
                "more dates."
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
        """Return this rank's samples of global batch `batch`, `(batch_size / data_size,)`."""
        epoch, batch_in_epoch = divmod(batch, self.batches_per_epoch)
        if epoch != self._epoch:
            # Seeded by epoch, so a resumed run needs no generator state, only its position.
            self._order = random_stream(self.seed, epoch).permutation(self.count)
            self._epoch = epoch
        start = batch_in_epoch * self.batch_size
        return self._order[start : start + self.batch_size][self._part]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the settings on which it depends; the mesh is not one of them."""
        return {
            "position": self.position,
            "count": self.count,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position.

        Raises:
            UserError: the state has other samples, another batch size or another seed.
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
