"""Replays forward and backward of a training step as one CUDA graph.

On a band of a few rows the host takes longer to start the kernels of a step than the GPU to run
them. A CUDA graph holds all kernels of a step, messages between ranks included, and the host starts
it at once. The first steps run as without a graph; then one step is captured, and replayed from
there on. Each replay reads its batch, and the random numbers drawn on the host, from the memory of
the captured step, and leaves its gradients there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields, replace
from operator import add, sub
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.data.loader import Batch
from credit_dp.domain_parallel.transport import Traffic
from credit_dp.errors import UserError
from credit_dp.models.blocks import NoiseModulation, StochasticDepth, layers_with_draws
from credit_dp.training.forward_backward import ForwardBackward, PrepareForward

# Steps before the capture. torch's DDP measures its first ten by events, which a graph can't hold.
WARM_UP = 11
# Returns what runs the work again, on the same memory, and its result there.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
Draws = list[tuple[StochasticDepth | NoiseModulation, Tensor | None]]


def use_own_stream(device: torch.device) -> None:
    """Compute on a stream that can be captured: the default one can't.

    Call it before the model is wrapped in DDP: gradients are added up on the stream of then.
    """
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def captured(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture GPU work of the current stream; nothing is computed before the first replay."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may wait for the device meanwhile: that of nccl, and those that read data.
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        result = work()
    return graph.replay, result


@final
class StepGraph:
    """Forward and backward of batches of one shape: captured once, and then replayed.

    Args:
        forward_backward: to capture.
        parameters: that get gradients.
        traffic: counters of messages; a replay counts as many as the captured step.
        capture: captures the work.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        parameters: Iterable[nn.Parameter],
        traffic: Iterable[Traffic],
        capture: Capture = captured,
    ) -> None:
        self.forward_backward = forward_backward
        self.parameters = list(parameters)
        self.traffic = list(traffic)
        self.capture = capture
        self._shapes: list[torch.Size] = []
        self._steps = 0
        # By the numbers of the micro-batch and the forecast step: the part of the model, and what
        # its layers have drawn.
        self._draws: dict[tuple[int, int], tuple[nn.Module, Draws]] = {}
        self._step: _CapturedStep | None = None

    def __call__(self, batch: Batch, prepare: PrepareForward) -> Tensor:
        """Compute the gradients of a batch, as `forward_backward` does; collective.

        Gradients have to be None before.

        Raises:
            UserError: the step can't be captured.
        """
        if _shapes(batch) != self._shapes:  # at first, and when a rollout becomes longer
            self._shapes, self._steps, self._step = _shapes(batch), 0, None
            self._draws.clear()
        self._steps += 1
        if self._steps <= WARM_UP:
            return self.forward_backward(batch, self._noting_draws(prepare))
        if self._step is None:
            self._step = self._captured(batch)
        for own, new in zip(_tensors(self._step.batch), _tensors(batch), strict=True):
            own.copy_(new)
        for numbers, (part, draws) in self._draws.items():
            prepare(part, *numbers)
            for layer, own_draws in draws:
                if own_draws is not None and layer.draws is not None:
                    own_draws.copy_(layer.draws)
        self._step.replay()
        for parameter, gradient in zip(self.parameters, self._step.gradients, strict=True):
            parameter.grad = gradient
        for traffic, sent in zip(self.traffic, self._step.sent, strict=True):
            _set(traffic, map(add, astuple(traffic), sent))
        self.forward_backward.channel_losses = self._step.channel_losses
        return self._step.share

    def _noting_draws(self, prepare: PrepareForward) -> PrepareForward:
        """Return a function that calls `prepare`, and keeps what it has drawn."""

        def note(part: nn.Module, micro: int, forecast_step: int) -> None:
            prepare(part, micro, forecast_step)
            draws = [(layer, layer.draws) for layer in layers_with_draws(part)]
            self._draws[micro, forecast_step] = part, draws

        return note

    def _captured(self, like: Batch) -> _CapturedStep:
        """Capture a step that reads a batch, and draws, from memory of its own."""
        own: dict[str, Any] = {
            name: x.clone() for name, x in vars(like).items() if isinstance(x, Tensor)
        }
        batch = replace(like, **own)

        def use_own_draws(part: nn.Module, micro: int, forecast_step: int) -> None:
            for layer, own_draws in self._draws[micro, forecast_step][1]:
                layer.draws = own_draws

        before = [astuple(traffic) for traffic in self.traffic]
        try:
            replay, share = self.capture(lambda: self.forward_backward(batch, use_own_draws))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise UserError(
                f"trainer.cuda_graph: this step can't be captured ({reason}). Set "
                "trainer.cuda_graph=false."
            ) from error
        sent = []
        for traffic, counts in zip(self.traffic, before, strict=True):
            sent.append(tuple(map(sub, astuple(traffic), counts)))
            _set(traffic, counts)  # nothing has been sent yet
        return _CapturedStep(
            replay=replay,
            share=share,
            batch=batch,
            gradients=[parameter.grad for parameter in self.parameters],
            channel_losses=self.forward_backward.channel_losses,
            sent=sent,
        )


@final
@dataclass(frozen=True)
class _CapturedStep:
    """A captured step: `replay` reads `batch`, and writes the other tensors.

    Attributes:
        share: of the loss.
        gradients: of each parameter that has one.
        sent: what a step adds to each counter of messages.
    """

    replay: Callable[[], None]
    share: Tensor
    batch: Batch
    gradients: list[Tensor | None]
    channel_losses: Tensor
    sent: list[tuple[int, ...]]


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, Tensor)]


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(batch)]


def _set(traffic: Traffic, counts: Iterable[int]) -> None:
    for field, number in zip(fields(traffic), counts, strict=True):
        setattr(traffic, field.name, number)
