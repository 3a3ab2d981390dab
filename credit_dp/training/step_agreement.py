"""What all ranks agree on in a training step: the loss, the gradient norm and a signal to stop.

A signal may reach one rank only, or each rank during another step. It travels in the message that
adds up the loss, so that it costs no message of its own: a rank puts a 1 there for the signal that
reached it, and all ranks read the same sum.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from credit_dp.constants import constant_tensor
from credit_dp.distributed.signals import STOP_SIGNALS
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import message_device


@final
class AgreedStep(NamedTuple):
    """The same on all ranks.

    Attributes:
        loss: of the global batch.
        grad_norm: of the global gradient before clipping.
        stop_signal: the signal for which all ranks stop after this step; 0: none.
    """

    loss: float
    grad_norm: float
    stop_signal: int

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "AgreedStep":
        """Read what `reduce_step` returned."""
        loss, grad_norm, *marks = numbers
        return cls(loss, grad_norm, marked_signal(marks))


def reduce_step(
    share: Tensor, norm: Tensor, pending_signal: int, manager: DomainParallelManager
) -> Tensor:
    """Return the numbers of an `AgreedStep`, on the device and in float64; collective.

    All travel in one message of all ranks: two ranks never see different numbers, and a step waits
    for the device at most once.

    Args:
        share: this rank's share of the loss; zero where it has none, as on early pipeline stages.
        norm: of the global gradient; the same on all ranks.
        pending_signal: the signal for which this rank has to stop; 0: none.
        manager: this rank's coordinates on the mesh.

    Shapes:
        -> `(2 + stop signals,)`.
    """
    share = share.detach().double()
    numbers = torch.stack([share, norm.detach().to(share)])
    total = torch.cat([numbers, signal_marks(pending_signal, share)])
    if manager.mesh is not None:
        dist.all_reduce(total)
    else:
        total = manager.transport.all_reduce(total)
    sizes = [manager.dp_world_size, manager.world_size, *[1] * len(STOP_SIGNALS)]
    return total / constant_tensor(sizes, total.device, total.dtype)


def agree_on_signal(pending_signal: int, manager: DomainParallelManager) -> int:
    """Return the signal for which all ranks have to stop, or 0, outside of a step; collective."""
    distributed = manager.mesh is not None
    device = message_device() if distributed else torch.device("cpu")
    marks = signal_marks(pending_signal, torch.zeros(0, device=device))
    if distributed:
        dist.all_reduce(marks)
    return marked_signal(marks.tolist())


def signal_marks(number: int, like: Tensor) -> Tensor:
    """Return a 1 for a signal, and zeros for all other stop signals; for 0 only zeros.

    Shapes:
        -> `(stop signals,)`, on the device and in the dtype of `like`.
    """
    marks = like.new_zeros(len(STOP_SIGNALS))
    if number:  # a number from the host makes it wait for a GPU
        marks[[int(each) for each in STOP_SIGNALS].index(number)] = 1
    return marks


def marked_signal(marks: Sequence[float]) -> int:
    """Return the largest signal that is marked in the sum of all ranks' marks; 0: none."""
    return max(
        (int(number) for number, mark in zip(STOP_SIGNALS, marks, strict=True) if mark), default=0
    )
