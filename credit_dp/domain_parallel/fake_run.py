"""Running a model on fake tensors, which have shapes only, and leaving it as it was."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from credit_dp.domain_parallel.trace import FOREIGN
from credit_dp.errors import UserError

# What a run raises that decides by what a tensor holds.
DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)
# What an attribute of a module may be and a run may change.
CONTAINERS = (dict, list, set)


@final
class Before:
    """A model as it is now: modes, attributes, what these hold, and which buffers there are."""

    def __init__(self, model: nn.Module) -> None:
        modules = [m for module in model.modules() for m in (module, vars(module).get("wrapped"))]
        attributes = [m.__dict__ for m in modules if m is not None]
        held = [v for of in attributes for v in of.values() if isinstance(v, CONTAINERS)]
        self._saved = [(container, _copied(container)) for container in (*attributes, *held)]

    def restore(self) -> None:
        """Undo what runs have left in the model since."""
        for container, before in self._saved:
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a run leaves in the model."""
    before = Before(model)
    try:
        yield
    finally:
        before.restore()


def _copied(container: Any) -> dict[Any, Any] | list[Any] | set[Any]:
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else set(container)


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Run on fake tensors, without gradients or autocast; restore values and random state."""
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    plain = torch.autocast(dtype_and_device(model)[1].type, enabled=False)
    loud = logging.getLogger("torch._subclasses.fake_tensor")
    level = loud.level
    loud.setLevel(logging.CRITICAL)  # it logs a traceback for what is told in one line below
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, plain, torch.no_grad(), torch.random.fork_rng(devices=[]), _stand_ins(model):
            yield
    except DEPENDS_ON_DATA as error:
        raise UserError(
            f"{code_line(error)}: control flow or shapes that depend on data can't be planned. "
            "Decide from shapes or configuration instead."
        ) from None
    finally:
        loud.setLevel(level)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Put fake tensors in the place of a model's own; those on the meta device are of the CPU then.

    Real ones would be faked again by every operation. A model's own constants are on the CPU, and
    could not be joined with tensors on meta.
    """
    made: dict[Tensor, Tensor] = {}  # one for all places where a tensor is used
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in holders:
                for name, tensor in held.items():
                    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                        continue
                    if tensor not in made:
                        made[tensor] = _fake(tensor)
                    replaced.append((held, name, tensor))
        for held, name, tensor in replaced:
            held[name] = made[tensor]
        yield
    finally:
        for held, name, tensor in replaced:
            held[name] = tensor


def _fake(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def code_line(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(FOREIGN)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "model"


def dtype_and_device(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Return those of a model's parameters; the CPU where they are on the meta device."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            on_meta = parameter.device.type == "meta"
            return parameter.dtype, torch.device("cpu") if on_meta else parameter.device
    return torch.get_default_dtype(), torch.device("cpu")
