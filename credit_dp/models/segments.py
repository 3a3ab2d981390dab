"""Models as a sequence of segments, at whose boundaries a pipeline may cut them into stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

# Passed from one segment to the next: floating-point tensors whose first dim is the samples.
SegmentState = tuple[Tensor, ...]


@final
@dataclass(frozen=True)
class Segment:
    """A part of a model's forward.

    Attributes:
        name: path of its main block, a module that the segment calls once; unique in a model.
        run: maps the state before the segment to that after it. The state is all that later
            segments get, so skip connections are part of it.
        modules: paths of all modules that the segment calls, the main block among them.
        is_recomputed: whether backward computes the main block again with `checkpointing`.
    """

    name: str
    run: Callable[[SegmentState], SegmentState]
    modules: tuple[str, ...]
    is_recomputed: bool = False


class SegmentedModel(nn.Module, ABC):
    """A model whose forward runs its segments one after the other.

    Attributes:
        checkpointing: whether the model itself lets backward compute its blocks again.

    Shapes:
        the state before its first segment -> the state after its last one; a state of one tensor is
        returned as a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active_segments = slice(None)
        self.checkpointing = False

    @abstractmethod
    def segments(self) -> list[Segment]:
        """Return the segments in order.

        A parameter is used by one segment; if several use it, `parallel.stages` has to keep them
        in one stage.
        """

    def forward(self, *state: Tensor) -> Tensor | SegmentState:
        """Return the state after the active segments."""
        for segment in self.segments()[self.active_segments]:
            state = segment.run(state)
        if self.active_segments != slice(None):
            # A stage of a pipeline sends its state, and sends need contiguous tensors.
            state = tuple(x.contiguous() for x in state)
        return state[0] if len(state) == 1 else state
