"""What one forward and backward makes, and how far that of several bands is from the globe's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

# A tensor whose entries are all below this share of the largest one of its kind is zero by theory
# and noise in practice: its errors are taken relative to that share.
NOISE = 1e-3
SMALLEST = 1e-300  # divides where everything is zero
Tensors = dict[str, Tensor]
Cotangents = Callable[[list[Tensor]], list[Tensor]]


@final
@dataclass(frozen=True)
class Step:
    """What a model makes of one input and its outputs' cotangents, by name."""

    outputs: Tensors
    input_gradients: Tensors
    gradients: Tensors
    buffers: Tensors


def run_step(model: nn.Module, inputs: Sequence[Tensor], cotangents: Cotangents) -> Step:
    """Run a model forward and backward on copies of `inputs`.

    `cotangents` gets the outputs that have gradients, and returns as many tensors of their shapes.
    """
    fields = [x.clone().requires_grad_() for x in inputs]
    outputs = named_tensors(model(*fields))
    differentiable = [y for y in outputs.values() if y.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, cotangents(differentiable))
    of_parameters = {n: _gradient(p) for n, p in model.named_parameters() if p.requires_grad}
    return Step(
        {name: y.detach() for name, y in outputs.items()},
        {f"input {i}": _gradient(x) for i, x in enumerate(fields)},
        of_parameters,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def named_tensors(made: object) -> Tensors:
    """The tensors of an output, by where they are in it: `output`, `output[1]`, `output['u']`."""
    leaves, _ = tree_flatten_with_path(made)
    return {f"output{keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _gradient(x: Tensor) -> Tensor:
    """The gradient; zeros where none came."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def step_errors(whole: Step, bands: Sequence[Step]) -> dict[str, dict[str, float]]:
    """The relative error of every tensor, by the field of `Step` that it is in and by name.

    An output or buffer without rows is the same on all ranks, and the worst one counts; gradients
    of what all ranks share add up.
    """
    largest = {**whole.input_gradients, **whole.gradients}
    kinds: list[tuple[str, bool, Tensors]] = [
        ("outputs", False, whole.outputs),
        ("input_gradients", True, largest),
        ("gradients", True, largest),
        ("buffers", False, whole.buffers),
    ]
    errors = {}
    for kind, summed, scale in kinds:
        floor = NOISE * max((_largest(x) for x in scale.values()), default=0.0)
        parts = [getattr(band, kind) for band in bands]
        errors[kind] = _errors(getattr(whole, kind), parts, summed, floor)
    return errors


def _errors(
    whole: Tensors, bands: Sequence[Mapping[str, Tensor]], summed: bool, floor: float
) -> dict[str, float]:
    names = dict.fromkeys([*whole, *(name for band in bands for name in band)])
    errors = {}
    for name in names:
        if name not in whole or any(name not in band for band in bands):
            errors[name] = math.inf
            continue
        candidates = joined([band[name] for band in bands], whole[name].shape, summed)
        found = (relative_error(x, whole[name], floor) for x in candidates)
        errors[name] = max(found, key=severity)
    return errors


def joined(parts: Sequence[Tensor], shape: Sequence[int], summed: bool) -> list[Tensor]:
    """The whole tensor made of what the ranks have; several where each of them has a whole one."""
    differing = [d for d, (a, b) in enumerate(zip(parts[0].shape, shape, strict=False)) if a != b]
    if len(differing) == 1:
        return [torch.cat(list(parts), differing[0])]
    return [torch.stack(list(parts)).sum(0)] if summed else list(parts)


def relative_error(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest finite entry of `b`, or to `floor` if larger.

    Infinite if the shapes differ. Equal infinities, as masks have, are no difference; NaN is.
    """
    if a.shape != b.shape:
        return math.inf
    a, b = _wide(a), _wide(b)
    difference = torch.where(a == b, 0.0, (a - b).abs())
    return _largest(difference) / max(_largest(b[b.isfinite()]), floor, SMALLEST)


def severity(error: float) -> float:
    """What errors are compared by: NaN is as bad as can be."""
    return math.inf if math.isnan(error) else error


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float64))


def _largest(x: Tensor) -> float:
    return _wide(x).abs().max().item() if x.numel() else 0.0
