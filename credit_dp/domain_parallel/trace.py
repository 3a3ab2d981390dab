"""Recording the operations of a model's own code, the sharded layers left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from credit_dp.domain_parallel.shape_memo import ShapeMemo, tensors_in
from credit_dp.errors import UserError

# Frames of torch and of this package are not the user's code.
FOREIGN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


# A reshape copies or not, depending on strides, which a band of one row has others of. So copies
# count as the tensor itself, and both ways of reshaping as one.
AS_VIEW: dict[Any, Any] = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}

# Operations that ask or tell something about a tensor and change nothing. Any other is recorded:
# of one that is not torch's own, nobody knows what it does.
QUESTIONS = ("prim", "profiler")


class Ref(NamedTuple):
    """A tensor of a trace and its shape then.

    `number` is its order of appearance, or its identity if it belongs to the model; `value` are the
    entries of a constant, as text.
    """

    number: int
    shape: tuple[int, ...]
    value: str = ""


@dataclass(frozen=True)
class Step:
    """One operation, or (`op` is None) a layer or an end of the model, whose rows are known."""

    op: torch._ops.OpOverload | None
    given: dict[str, Any]
    made: tuple[Ref, ...]
    where: str  # the module that runs and the line of its code

    @property
    def name(self) -> str:
        """The operation without its overload, e.g. `aten.sum`."""
        return "" if self.op is None else str(self.op.overloadpacket)

    @cached_property
    def refs(self) -> list[Ref]:
        """The tensors given, in order."""
        return list(_refs_in(self.given.values()))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What is given beside tensors."""
        return {key: value for key, value in self.given.items() if not any(_refs_in([value]))}


def _refs_in(values: Iterable[Any]) -> Iterator[Ref]:
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, list | tuple):
            yield from _refs_in(value)


@final
class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of one run, in order. Two runs of the same code number tensors alike.

    Args:
        model: whose parameters and buffers are known by identity.
        follow: called with every step as soon as it is recorded.
        memo: of runs with the same fake mode.
    """

    def __init__(
        self,
        model: nn.Module,
        follow: Callable[[Step], None] | None = None,
        memo: ShapeMemo | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = (memo or ShapeMemo()).run
        self.steps: list[Step] = []
        self._follow = follow
        self._of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._numbers: dict[int, int] = {}
        self._fresh = count()
        self._alive: list[Tensor] = []  # ids of collected tensors would be given out again
        self._paused = 0
        self.within: list[str] = []  # the modules that run now, outermost first
        self.fixed: dict[int, str] = {}  # storages that may not change -> whose they are

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while planning: spare every operation torch's check of that."""
        return False

    @property
    def where(self) -> str:
        """The module whose code runs now, and its line."""
        return ", ".join([*self.within[-1:], user_line()])

    def pause(self) -> None:
        """Record nothing until as many calls of `resume`."""
        self._paused += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._paused -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def mark(self, taken: Sequence[Tensor], made: Sequence[Tensor], **settings: Any) -> None:
        """Note what takes bands and makes bands: a layer, a trusted module or an end.

        `settings` must be the same in two runs. Of a layer: `takes` and `makes` say where its rows
        are, one entry per tensor.
        """
        if not self._paused:
            given = {"taken": [self.ref(tensor) for tensor in taken], **settings}
            self._record(Step(None, given, tuple(map(self.ref, made)), self.where))

    def _record(self, step: Step) -> None:
        self.steps.append(step)
        if self._follow is not None:
            self._follow(step)

    def ref(self, tensor: Tensor) -> Ref:
        """Name a tensor in a way that two runs can be compared by."""
        shape = tuple(tensor.shape)
        if id(tensor) in self._of_model:
            return Ref(-id(tensor), shape)
        if id(tensor) not in self._numbers:
            self._name(tensor, next(self._fresh))
        number = self._numbers[id(tensor)]
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return Ref(number, shape)
        with _disable_current_modes():
            return Ref(number, shape, str(tensor.tolist()))

    def _as_refs(self, operand: Any) -> Any:
        """Put refs in the place of tensors."""
        if isinstance(operand, Tensor):
            return self.ref(operand)
        if type(operand) in (list, tuple):
            return type(operand)(map(self._as_refs, operand))
        return operand

    def _name(self, tensor: Tensor, number: int) -> None:
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and note it."""
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # the most frequent question, by far
        kwargs = kwargs or {}
        if self._paused or func.namespace in QUESTIONS:
            return self._run(func, args, kwargs)
        if func is torch.ops.aten.clone.default and own_function() is None:
            copied = self._run(func, args, kwargs)
            self._name(copied, self.ref(args[0]).number)
            return copied
        if self.fixed and func._schema.is_mutable:
            self._check_fixed(args[0])
        names = (argument.name for argument in func._schema.arguments)
        operands = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: self._as_refs(operand) for name, operand in operands.items()}
        result = self._run(func, args, kwargs)
        made = tuple(map(self.ref, tensors_in([result])))
        self._record(Step(AS_VIEW.get(func, func), given, made, self.where))
        return result

    def _check_fixed(self, changed: Any) -> None:
        key = changed.untyped_storage()._cdata if isinstance(changed, Tensor) else None
        if key in self.fixed:
            raise UserError(
                f"{self.where}: {self.fixed[key]} is changed in place, but each rank would change "
                "its own rows only. Change it outside of the model's forward."
            )


def user_line() -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOREIGN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def own_function() -> type | None:
    """Return the `autograd.Function` that runs now, unless it is torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
            kind: type = frame.f_locals["cls"]
            if not kind.__module__.startswith("torch."):
                return kind
        frame = frame.f_back
    return None
