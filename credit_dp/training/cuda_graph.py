"""Replays forward and backward of a training step as one CUDA graph.

On a band of a few rows the host takes longer to start the kernels of a step than the GPU to run
them. A CUDA graph holds all kernels of a step, messages between ranks included, and the host starts
it at once. The first steps run as without a graph; then one step is captured, and replayed from
there on. Each replay reads its batch, and the random numbers drawn on the host, from the memory of
the captured step, and leaves its gradients there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from operator import add, sub
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import run_on_all_ranks
from credit_dp.domain_parallel.transport import Traffic
from credit_dp.errors import UserError
from credit_dp.models.blocks import NoiseModulation, StochasticDepth, layers_with_draws
from credit_dp.torch_private import buffers_of, parameters_of, version_of
from credit_dp.training.forward_backward import ForwardBackward, PrepareForward
from credit_dp.training.parameter_shards import local_tensor

# Steps before the capture. torch's DDP measures its first ten by events, which a graph can't hold.
WARM_UP = 11
# Returns what runs the work again, on the same memory, and its result there.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
Draws = list[tuple[StochasticDepth | NoiseModulation, Tensor | None]]


def use_own_stream(device: torch.device) -> None:
    """Compute on a stream that can be captured: the default one can't.

    Call it before the model is wrapped in DDP: gradients are added up on the stream of then.
    """
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return  # an earlier run of this process has changed it
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Streams do not wait for each other: what was computed so far has to be there.
    stream.wait_stream(current)
    torch.cuda.set_stream(stream)


def captured(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture GPU work of the current stream; nothing is computed before the first replay."""
    graph = torch.cuda.CUDAGraph()
    # Meanwhile the threads of nccl and of the loader may use the device.
    with torch.cuda.graph(
        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        result = work()
    return graph.replay, result


@final
class StepGraph:
    """Forward and backward of batches of one shape: captured once, and then replayed.

    A replay runs no Python. A step that changes something on the host is refused: numbers that the
    model counts, for example, would stay those of the captured step.

    Args:
        parameters: that get gradients.
        traffic: counters of messages; a replay counts as many as the captured step.
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

    def __call__(self, batch: Batch, prepare_forward: PrepareForward) -> Tensor:
        """Compute the gradients of a batch, as `forward_backward` does; collective.

        Gradients have to be None before.

        Raises:
            UserError: the step can't be captured, on all ranks alike.
        """
        # At first, when a rollout becomes longer, and if weights are in other memory than before.
        if _shapes(batch) != self._shapes or (self._step is not None and self._step.memory_moved()):
            self.release()
            self._shapes = _shapes(batch)
        self._steps += 1
        if self._steps <= WARM_UP:
            return self.forward_backward(batch, self._noting_draws(prepare_forward))
        if self._step is None:
            # What one rank alone refuses, all refuse: nothing is sent before the first replay.
            self._step = run_on_all_ranks(lambda: self._captured(batch))
        for own, new in zip(_tensors(self._step.batch), _tensors(batch), strict=True):
            own.copy_(new)
        for numbers, (part, draws) in self._draws.items():
            prepare_forward(part, *numbers)
            for layer, own_draws in draws:
                _copy_draws(own_draws, layer.draws)
        self._step.replay()
        for parameter, gradient in zip(self.parameters, self._step.gradients, strict=True):
            parameter.grad = gradient
        for traffic, sent in zip(self.traffic, self._step.sent, strict=True):
            _set(traffic, map(add, astuple(traffic), sent))
        self.forward_backward.channel_losses = self._step.channel_losses
        return self._step.share

    def release(self) -> None:
        """Free the memory of the captured step; later steps run as at first."""
        self._shapes, self._steps, self._step = [], 0, None
        self._draws.clear()

    def _parts(self) -> Iterator[tuple[str, object]]:
        """Yield the modules, and the user's loss, whose Python code the step runs, with names."""
        for part in {id(part): part for part, _ in self._draws.values()}.values():
            model = part.module if isinstance(part, DistributedDataParallel) else part
            yield from model.named_modules()
        error = self.forward_backward.loss.plugin_error
        error = getattr(error, "__self__", error)  # of a method
        yield from (
            error.named_modules(prefix="loss")
            if isinstance(error, nn.Module)
            else [("loss", error)]
        )

    def _noting_draws(self, prepare_forward: PrepareForward) -> PrepareForward:
        """Return a function that calls `prepare_forward`, and keeps what it has drawn."""

        def note(part: nn.Module, micro: int, forecast_step: int) -> None:
            prepare_forward(part, micro, forecast_step)
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
        parts = list(self._parts())
        host = _HostState.read(parts, batch.state.device)
        try:
            replay, share = self.capture(lambda: self.forward_backward(batch, use_own_draws))
        except RuntimeError as error:
            origin = _origin(error)
            if isinstance(origin, torch.OutOfMemoryError | UserError):
                raise origin from None
            raise _refusal(str(origin).partition("\n")[0].rstrip(".")) from error
        changed = host.first_difference(_HostState.read(parts, batch.state.device))
        if changed:
            raise _refusal(f"it changes {changed} on the host, which a replay does not")
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
            memory=[
                (table, name, local_tensor(tensor).data_ptr())
                for _, module in parts
                if isinstance(module, nn.Module)
                for table in (parameters_of(module), buffers_of(module))
                for name, tensor in table.items()
                if tensor is not None
            ],
        )


@final
@dataclass(frozen=True)
class _CapturedStep:
    """A captured step: `replay` reads `batch`, and writes the other tensors.

    Attributes:
        share: of the loss.
        gradients: of each parameter that has one.
        sent: what a step adds to each counter of messages.
        memory: where parameters and buffers were, which the replay reads and writes.
    """

    replay: Callable[[], None]
    share: Tensor
    batch: Batch
    gradients: list[Tensor | None]
    channel_losses: Tensor
    sent: list[tuple[int, ...]]
    memory: list[tuple[dict[str, Any], str, int]]

    def memory_moved(self) -> bool:
        """Whether a parameter or a buffer is in other memory than when the step was captured."""
        tensors = ((table.get(name), pointer) for table, name, pointer in self.memory)
        return any(x is None or local_tensor(x).data_ptr() != at for x, at in tensors)


@final
@dataclass(frozen=True)
class _HostState:
    """What a step may have changed on the host, by its name.

    Attributes:
        numbers: attributes of modules that are numbers, texts or None; states of random numbers.
        tensors: attributes of modules, with the memory of parameters and buffers, and the number of
            changes of those on another device.
    """

    numbers: dict[str, object]
    tensors: dict[str, tuple[Tensor, int, int]]

    @classmethod
    def read(cls, parts: Iterable[tuple[str, object]], device: torch.device) -> _HostState:
        """Return the present state of modules on a device, and of random numbers."""
        _, *of_numpy = np.random.get_state()
        numbers: dict[str, object] = {
            "random numbers of Python": random.getstate(),
            "random numbers of NumPy": [np.asarray(x).tobytes() for x in of_numpy],
            "random numbers of torch": torch.get_rng_state().numpy().tobytes(),
        }
        tensors: dict[str, tuple[Tensor, int, int]] = {}
        for path, module in parts:
            own = dict(getattr(module, "__dict__", {}))
            held: dict[str, Any] = {}
            if isinstance(module, nn.Module):
                held = parameters_of(module) | buffers_of(module)
            if isinstance(module, StochasticDepth | NoiseModulation):
                own.pop("draws")  # set for each step
            for key, value in (own | held).items():
                name = f"{path}.{key}".lstrip(".")
                if isinstance(value, bool | int | float | complex | str | None):
                    numbers[name] = value
                # A tensor with a gradient belongs to one step: no later one can use it.
                elif isinstance(value, Tensor) and value.is_leaf:
                    on_host = value.device != device and not value.is_inference()
                    memory = local_tensor(value).data_ptr() if key in held else 0
                    tensors[name] = value, memory, version_of(value) if on_host else 0
        return cls(numbers, tensors)

    def first_difference(self, later: _HostState) -> str | None:
        """Return the name of what has changed, or None."""
        for name in self.numbers | later.numbers:
            if name not in self.numbers or self.numbers[name] != later.numbers.get(name, ...):
                return name
        for name, (tensor, *numbers) in later.tensors.items():
            before, *old_numbers = self.tensors.get(name, (None,))
            if before is not tensor or old_numbers != numbers:
                return name
        return None


def _origin(error: BaseException) -> BaseException:
    """Return the first error: if one ends the work, torch raises another as it ends the capture."""
    while isinstance(error.__context__, RuntimeError | UserError):
        error = error.__context__
    return error


def _refusal(reason: str) -> UserError:
    return UserError(
        f"trainer.cuda_graph: this step can't be captured ({reason}). Set trainer.cuda_graph=false."
    )


def _copy_draws(own: Tensor | None, new: Tensor | None) -> None:
    """Copy a layer's random numbers of this step to where the graph reads them."""
    if own is not None and new is not None and own.shape == new.shape:
        own.copy_(new)
    elif own is not None or new is not None:
        raise RuntimeError("trainer.cuda_graph: a layer has other draws than when it was captured")


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, Tensor)]


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in _tensors(batch)]


def _set(traffic: Traffic, counts: Iterable[int]) -> None:
    for field, number in zip(fields(traffic), counts, strict=True):
        setattr(traffic, field.name, number)
