"""Which operators of one family run whole; those of others have tests of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.band_tensor.boundary import attach


class WholeCalls:
    """Names of the operators of a family that have run whole so far."""

    def __init__(self, counts: dict[str, int], is_of_family: Callable[[str], bool]) -> None:
        self.counts = counts
        self.is_of_family = is_of_family

    def __iter__(self) -> Iterator[str]:
        return filter(self.is_of_family, self.counts)


def computing(is_of_family: Callable[[str], bool]) -> Callable[..., Any]:
    """Return what lets a model compute on tensors of the globe, for `functions.check`."""

    def compute_on_bands(
        model: nn.Module, manager: DomainParallelManager, shapes: Sequence[tuple[int, ...]]
    ) -> WholeCalls:
        return WholeCalls(attach(model, manager, shapes).whole_calls, is_of_family)

    return compute_on_bands
