"""Values by which a model decides what to do, in a dry run, where tensors have none.

What depends on neither inputs nor weights is known (`KnownValues`). For anything else a value is
assumed, and the dry run shows the costs of that branch (`Assumptions`). When the model runs, all
ranks decide by the values of the first rank, so that they run the same branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from credit_dp.domain_parallel.band_tensor.tensor import tensors_in
from credit_dp.domain_parallel.planning.trace import map_tensors
from credit_dp.torch_private import FakeTensor, disable_torch_dispatch, schema_of


class UnplannedError(Exception):
    """A model runs, but what it costs can't be known without data."""


class AssumedValue(NamedTuple):
    """A line of a model's code that decides by values of fields or weights, and what was assumed.

    Attributes:
        location: file and line; empty if it is not in the model's code.
        value: the last that the dry run assumed there: a truth value, or a number.
    """

    location: str
    value: bool | float


@final
class _Expression:
    """How a tensor was computed from values that are known.

    Attributes:
        buffers: the storages of the model's tensors that it depends on, by address.
    """

    def __init__(self, buffers: frozenset[int], function: Callable[..., Any], *operands: Any):
        self.buffers = buffers
        self._call = (function, operands)
        self._value: Any = None

    @property
    def value(self) -> Any:
        if self._value is None:
            function, operands = self._call
            self._value = function(*map(_with_values, operands))
        return self._value


def _with_values(operand: Any) -> Any:
    if isinstance(operand, _Expression):
        return operand.value
    if isinstance(operand, torch.device):
        return torch.device("cpu")
    if isinstance(operand, list | tuple):
        return type(operand)(map(_with_values, operand))
    return operand


@final
class KnownValues:
    """The values of what depends on neither inputs nor parameters, as the result of `linspace`.

    They are computed only if the model reads one.
    """

    def __init__(self, buffers: Mapping[str, Tensor], fakes: Mapping[str, Tensor]) -> None:
        # Storages by address, kept as a freed one's address would be reused.
        self._changed: dict[int, torch.UntypedStorage] = {}
        # With the tensor, as the address of a freed one would be reused.
        self._by_tensor: dict[int, tuple[Tensor, _Expression]] = {}
        for name, x in buffers.items():
            fake = fakes[name]
            if type(fake) is FakeTensor and not x.is_meta:
                source = frozenset([id(fake.untyped_storage())])
                self._by_tensor[id(fake)] = (fake, _Expression(source, x.cpu))

    def _expression(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Expression | None:
        found: list[_Expression] = []

        def find(operand: Any) -> Any:
            if isinstance(operand, FakeTensor):
                found.append(self._by_tensor[id(operand)][1])
                return found[-1]
            if isinstance(operand, Tensor):  # with values, as an attribute of the model
                source = frozenset([id(operand.untyped_storage())])
                found.append(_Expression(source, operand.cpu))
                return found[-1]
            if isinstance(operand, list | tuple):
                return type(operand)(map(find, operand))
            return operand

        keys = tuple(kwargs)
        try:
            operands = [*map(find, args), *(find(kwargs[key]) for key in keys)]
        except KeyError:
            return None

        def run(*values: Any) -> Any:
            return func(*values[: len(args)], **dict(zip(keys, values[len(args) :], strict=True)))

        buffers = frozenset().union(*(x.buffers for x in found))
        return _Expression(buffers, run, *operands)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the results of an operation if the values of all operands are known."""
        if schema_of(func).is_mutable:
            self._forget([*args, *kwargs.values()])
            return
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            return
        whole = self._expression(func, args, kwargs)
        if whole is None:
            return
        if isinstance(result, FakeTensor):
            self._by_tensor[id(result)] = (result, whole)
        elif isinstance(result, list | tuple):
            for i, x in enumerate(result):
                if isinstance(x, FakeTensor):
                    part = _Expression(whole.buffers, getitem, whole, i)
                    self._by_tensor[id(x)] = (x, part)

    def _forget(self, operands: Sequence[Any]) -> None:
        storages = [x.untyped_storage() for x in tensors_in(operands)]
        changed = {id(storage): storage for storage in storages}
        self._changed |= changed
        for key, (x, _) in list(self._by_tensor.items()):
            # One that became a field is another tensor now.
            if not isinstance(x, FakeTensor) or id(x.untyped_storage()) in changed:
                del self._by_tensor[key]

    def value_of(self, x: Tensor) -> Tensor | None:
        """Return a tensor with its values, on the CPU; None if they are not known."""
        found = self._by_tensor.get(id(x))
        if found is None or found[1].buffers & self._changed.keys():
            return None
        with disable_torch_dispatch():
            value: Tensor = found[1].value
        return value

    def decide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation whose shape or number depends on data.

        None if an operand is not known, or has changed since.
        """
        expression = self._expression(func, args, kwargs)
        if expression is None or expression.buffers & self._changed.keys():
            return None
        with disable_torch_dispatch():
            value = expression.value
        device = next((x.device for x in tensors_in(args)), torch.device("cpu"))
        if device.type == "cpu":
            return value
        # Values are on the CPU only, so that a GPU's result has its shape, and `note` its values.
        return map_tensors(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), value)


# Operations that return a truth value of tensors.
COMPARISONS = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)


class EndlessLoopError(UnplannedError):
    """A model decided so often that a loop is likely, whose end the assumptions never reach."""


@final
class Assumptions:
    """The values that dry runs assume where a model decides by data.

    A truth value is False, as it usually is where a model checks for NaN, and a number is 1. If a
    run fails, the next one assumes True at the last decision that was False: so a search through
    the branches finds one that runs. In a loop that does not end, one line decides with False only
    `turns` times.
    """

    MOST_DECISIONS = 100  # of a run
    MOST_RUNS = 10
    MOST_TURNS = 4

    def __init__(self) -> None:
        self._values: list[bool] = []
        self._runs = 1
        self._turns: int | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a run, with the values of the last one as far as `change` has left them."""
        self._next = 0
        self._by_location: Counter[str] = Counter()
        self.assumed: dict[str, bool | float] = {}

    def assume(self, func: Any, args: tuple[Any, ...], location: str) -> bool | float | None:
        """Return the value of an operation; None if the shapes of others may depend on it."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            return self.assumed.setdefault(location, 1.0)
        is_truth_value = func is torch.ops.aten._local_scalar_dense.default and (
            args[0].dtype is torch.bool
        )
        if not (is_truth_value or func in COMPARISONS):
            return None
        if self._next == len(self._values):
            if self._next == self.MOST_DECISIONS:
                raise EndlessLoopError(f"{location}: decides by data again and again.")
            turns = self._by_location[location]
            self._values.append(self._turns is not None and turns >= self._turns)
        value = self._values[self._next]
        self._next += 1
        self._by_location[location] += 1
        self.assumed[location] = value
        return value

    def change(self, error: Exception) -> bool:
        """Change an assumption after a run that has failed; return whether that was possible."""
        del self._values[self._next :]
        self._runs += 1
        if self._runs > self.MOST_RUNS:
            return False
        if isinstance(error, EndlessLoopError):
            if self._turns is not None:
                return False
            self._turns = self.MOST_TURNS
            self._values.clear()
            return True
        while self._values and self._values[-1]:
            self._values.pop()
        if not self._values:
            return False
        self._values[-1] = True
        return True
