"""Copies of models, those that hold results of operations among them."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model) -> Model:
    """Return a deep copy.

    `copy.deepcopy` alone refuses tensors with a gradient function, which hooks such as
    `weight_norm` leave in their modules until the next forward.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    made = [x for x in attributes if isinstance(x, Tensor) and x.grad_fn is not None]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in made})
