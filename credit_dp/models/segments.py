"""Models as a row of segments, between which they may be cut: into stages of a pipeline, say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

# What travels from one segment to the next: tensors of floating point, samples first.
SegmentState = tuple[Tensor, ...]


@final
@dataclass(frozen=True)
class Segment:
    """A stretch of a model's forward.

    Attributes:
        name: path of its block, a module that the stretch calls once.
        run: what it makes of the state. What later segments need, it hands on.
        modules: paths of all modules that it uses, its block among them.
    """

    name: str
    run: Callable[[SegmentState], SegmentState]
    modules: tuple[str, ...]


class SegmentedModel(nn.Module, ABC):
    """A model whose forward is its segments, one after the other.

    Attributes:
        part: which of the segments run; all of them, but for a stage of a pipeline.

    Shapes:
        the state of its first segment -> that of its last one; a tensor, where it is only one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active_segments = slice(None)

    @abstractmethod
    def segments(self) -> list[Segment]:
        """Return the stretches of the forward, in order; each parameter is used by one of them."""

    def forward(self, *state: Tensor) -> Tensor | SegmentState:
        """Return what the segments make of the input."""
        for segment in self.segments()[self.active_segments]:
            state = segment.run(state)
        if self.active_segments != slice(None):
            state = tuple(x.contiguous() for x in state)  # what is sent has to be
        return state[0] if len(state) == 1 else state
