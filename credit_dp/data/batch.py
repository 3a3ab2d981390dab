"""What training takes a step on: samples on one band of rows."""

from dataclasses import dataclass, fields, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples on one band of rows, normalised.

    Shapes:
        `now`: `(B, frames * C, h, W)`, the states of so many steps, the newest last; `target`, of
        the steps after that: `(B, steps * outputs, h, W)`, in each prognostic channels then
        diagnostic ones; `forcing`, at the newest one's time and the steps after it:
        `(B, steps * F, h, W)`; `static`: `(B, S, h, W)`; `times`, of the newest: `(B,)`
        datetime64[ns].
    """

    now: Tensor
    forcing: Tensor
    static: Tensor
    target: Tensor
    times: NDArray[np.datetime64]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("now", "forcing", "target")
        }
        static = self.static[:1].to(device, non_blocking=True)  # the same for all samples
        return replace(self, **moved, static=static.expand(len(self.times), -1, -1, -1))

    def split(self, parts: int) -> list["Batch"]:
        """The samples in order, in equal parts."""
        if parts == 1:
            return [self]
        size = len(self.times) // parts
        places = [slice(start, start + size) for start in range(0, parts * size, size)]
        names = [field.name for field in fields(self)]
        return [Batch(**{name: getattr(self, name)[place] for name in names}) for place in places]


@final
@dataclass(frozen=True)
class Reads:
    """What of a batch is read; the rest has no channels.

    `inputs`: all that goes into the model. `last`: the newest state, which is among them. `target`:
    what comes after it, as many steps as the rollout has.
    """

    inputs: bool = True
    last: bool = True
    target: bool = True

    def frames(self, frames: int) -> int:
        """How many of a sample's states are read, the newest ones."""
        return frames if self.inputs else int(self.last)


EVERYTHING = Reads()
