"""Finds where a NaN or infinity began, by computing the step again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from credit_dp.data.channels import Channel
from credit_dp.data.loader import Batch
from credit_dp.distributed.collectives import all_gather_object
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.torch_private import is_compiler_imported
from credit_dp.training.data_description import DataDescription
from credit_dp.training.forward_backward import ForwardBackward, PrepareForward
from credit_dp.training.parameter_shards import local_tensor
from credit_dp.training.replicas import replica_name
from credit_dp.training.state import TrainingState

NOT_REPRODUCED = (
    "Computed again, everything was finite: look for faulty hardware, and for numbers that are not "
    "drawn from the step's seed. "
)


class NonFiniteFinding(NamedTuple):
    """Something that is not finite. Of the findings of all ranks the smallest came first."""

    order: tuple[int, ...]
    message: str


def diagnose_non_finite(
    state: TrainingState,
    manager: DomainParallelManager,
    forward_backward: ForwardBackward,
    batch: Batch,
    compute_gradients: Callable[[PrepareForward], Tensor],
) -> str:
    """Compute a batch again with hooks on all modules, and return a sentence or two.

    Collective; the same text on every rank. The gradients stay in `.grad`, not clipped.
    `compute_gradients` calls the given function before each forward pass.
    """
    hooks = NonFiniteHooks(manager)
    # Compiled code does not call hooks of modules. If there is any, its compiler is imported.
    compiled = is_compiler_imported()
    stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with hooks.register_hooks(state.parts), stance:
        compute_gradients(hooks.begin_forward)
    names = channel_names(state.data)
    # All four on every rank, for each of them gathers.
    module = earliest_message(hooks.finding)
    gradient = earliest_message(find_non_finite_gradient(state.parts, manager))
    field = earliest_message(find_non_finite_field(batch, names, forward_backward))
    loss = earliest_message(find_non_finite_loss(forward_backward.channel_losses, names["target"]))
    if not any((module, gradient, field, loss)):
        return NOT_REPRODUCED
    # A cause hides its consequence: a gradient follows from an output, a loss from a field.
    sentences = (module or gradient, field or loss)
    return "".join(f"{sentence}. " for sentence in sentences if sentence)


def earliest_message(finding: NonFiniteFinding | None) -> str | None:
    """Return the message of the first finding of all ranks; collective."""
    findings = [other for other in all_gather_object(finding) if other is not None]
    return min(findings).message if findings else None


@final
class NonFiniteHooks:
    """Hooks that record the first module whose output is not finite on this rank."""

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.finding: NonFiniteFinding | None = None
        self.micro = self.calls = 0

    def begin_forward(self, part: nn.Module, micro: int, forecast_step: int) -> None:
        """Remember the number of the micro-batch."""
        self.micro = micro

    @contextmanager
    def register_hooks(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Register the hooks on all modules of these parts, and remove them at the end."""
        with ExitStack() as handles:
            for number, part in enumerate(parts):
                stage = stage_index(number, self.manager)
                for name, module in part.named_modules():
                    hook = partial(self.check_output, name or "the model", stage)
                    handles.callback(module.register_forward_hook(hook).remove)
            yield

    def check_output(
        self, name: str, stage: int, module: nn.Module, inputs: Any, output: Any
    ) -> None:
        """Look at the output of a module; modules inside it were looked at before."""
        self.calls += 1
        if self.finding is None and not all(map(all_finite, iter_tensors(output))):
            manager = self.manager
            rank = replica_name(manager.rank, manager)
            message = f"The first non-finite output comes from {name}, on {rank}"
            self.finding = NonFiniteFinding((self.micro, stage, self.calls, manager.rank), message)


def find_non_finite_gradient(
    parts: Sequence[nn.Module], manager: DomainParallelManager
) -> NonFiniteFinding | None:
    """Return the parameter nearest to the loss whose gradient is not finite."""
    for number, part in reversed([*enumerate(parts)]):
        for index, (name, parameter) in reversed([*enumerate(part.named_parameters())]):
            if parameter.grad is not None and not all_finite(parameter.grad):
                message = (
                    "All outputs are finite; the non-finite gradient nearest to the loss is that "
                    f"of {name}"
                )
                return NonFiniteFinding((-stage_index(number, manager), -index), message)
    return None


def find_non_finite_field(
    batch: Batch, names: Mapping[str, Sequence[str]], forward_backward: ForwardBackward
) -> NonFiniteFinding | None:
    """Return the first variable of a batch that is not finite on this rank's rows."""
    target, points = batch.target, forward_backward.loss.points
    if points is not None and target.shape[1]:
        # A target is NaN where its variable is not defined, as a sea temperature on land.
        steps = target.tensor_split(target.shape[1] // forward_backward.channels, dim=1)
        target = torch.cat([points.zero_invalid(step) for step in steps], dim=1)
    fields = {
        "input": batch.state,
        "forcing": batch.forcing,
        "static field": batch.static,
        "target": target,
    }
    for number, (kind, field) in enumerate(fields.items()):
        indices = (~torch.isfinite(field).all(-1).all(-1)).nonzero().tolist()
        if indices:
            sample, channel = min(indices)
            name = names[kind][channel % len(names[kind])]  # of several frames or targets
            message = f"Variable {name} is not finite in the {kind} of {batch.times[sample]!s:.13}"
            return NonFiniteFinding((number, sample, channel), message)
    return None


def find_non_finite_loss(losses: Tensor, names: Sequence[str]) -> NonFiniteFinding | None:
    """Return the first variable, of `(steps, C)` losses, whose loss is not finite on this rank."""
    indices = (~torch.isfinite(losses)).nonzero().tolist()
    if not indices:
        return None
    step, channel = min(indices)
    message = f"Variable {names[channel]} is not finite in the forecast, or in its error"
    return NonFiniteFinding((step, channel), message)


def channel_names(data: DataDescription) -> dict[str, list[str]]:
    """Return the names of the channels of a batch, by what they are."""
    fields = data["fields"]
    outputs = [Channel(variable, level).name for variable, level in fields["channels"]]
    return {
        "input": outputs[: len(outputs) - fields["diagnostic"]],
        "forcing": data["data.forcing"],
        "static field": data["data.static"],
        "target": outputs,
    }


def stage_index(part: int, manager: DomainParallelManager) -> int:
    """Return which stage of the whole pipeline a part of this rank is."""
    return part * manager.pipeline_parallel_size + manager.pipeline_rank


def iter_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from iter_tensors(part)


def all_finite(value: Tensor) -> bool:
    """Whether all entries, or all those of this rank's shard, are finite."""
    return bool(torch.isfinite(local_tensor(value)).all())
