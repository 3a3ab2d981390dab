"""The operators that torch tests itself with, and sample arguments of each.

This is the one module that imports torch's private database of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import hypothesis
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# From the best dtype on: gradients are compared in float64.
DTYPES = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
LARGEST = 20_000  # entries of a tensor


class Sample(NamedTuple):
    """A call of an operator.

    Attributes:
        function: what is called with `args` and `kwargs`.
        in_place: the same, but writing to the first argument; None if there is no such function.
        process: makes of the result what has gradients that are defined.
    """

    operator: str
    number: int
    function: Callable[..., Any]
    in_place: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]

    def __str__(self) -> str:
        arguments = [*map(shown, self.args), *(f"{k}={shown(x)}" for k, x in self.kwargs.items())]
        return f"{self.operator}({', '.join(arguments)}) [{self.number}]"


def shown(x: Any) -> str:
    """Return an argument as a short text, a tensor as its dtype and sizes."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x):
        return f"[{', '.join(map(shown, x))}]"
    text = str(x).removeprefix("torch.")
    return text if len(text) <= 40 else f"{text[:37]}..."


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Undo what the import changes for all tests: hypothesis, and who may set torch's flags."""
    profile = hypothesis.settings.get_current_profile_name()
    flag = "__allow_nonbracketed_mutation_flag"
    allowed = getattr(torch.backends, flag)
    try:
        yield
    finally:
        hypothesis.settings.load_profile(profile)
        setattr(torch.backends, flag, allowed)


@cache
def operators() -> list[Any]:
    """Return all operators, in the order of their names."""
    with _settings_kept():
        from torch.testing._internal.common_methods_invocations import op_db
    return sorted(op_db, key=lambda operator: operator.full_name)


def samples(operator: Any, count: int) -> list[Sample]:
    """Return samples whose arguments differ: at most `count`, none if a CPU can't run the operator.

    Each has a tensor of at least two entries that is not sparse, and none that is large.
    """
    supported = operator.supported_dtypes("cpu")
    if not supported:
        return []
    dtype = next((x for x in DTYPES if x in supported), min(supported, key=str))
    gradients = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found: dict[str, Sample] = {}
    for number, x in enumerate(operator.sample_inputs("cpu", dtype, requires_grad=gradients)):
        args = (x.input, *x.args)
        tensors = [t for t in tree_leaves((args, x.kwargs)) if isinstance(t, Tensor)]
        sizes = [t.numel() for t in tensors if t.layout is torch.strided]
        if 1 < max(sizes, default=0) <= LARGEST:
            sample = Sample(
                *(operator.full_name, number, operator.op, operator.inplace_variant),
                *(args, x.kwargs, x.output_process_fn_grad),
            )
            found.setdefault(str(sample).rpartition(" [")[0], sample)
    chosen = list(found.values())
    step = max(1.0, len(chosen) / count)
    return [chosen[int(i * step)] for i in range(min(count, len(chosen)))]
