"""What a family of models is, and all families of the zoo.

Each has one small model: few channels, 32 to 64 rows, one or two samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Family:
    """A model of the zoo and what is expected of it.

    Attributes:
        name: its name in the tables.
        package: who wrote it; `own` for those written here.
        build: returns the model.
        shape: the shape of its global input.
        others: returns the arguments after the input, which are the same on all ranks.
        tolerance: the largest relative error.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    others: Callable[[], tuple[Any, ...]] = tuple
    tolerance: float = 1e-11


def all_families() -> dict[str, Family]:
    """Return the families by name."""
    from tests.zoo import forms, packages, timm_models, weather

    families = [
        *packages.FAMILIES,
        *timm_models.FAMILIES,
        *weather.FAMILIES,
        *forms.FAMILIES,
    ]
    by_name = {family.name: family for family in families}
    if len(by_name) != len(families):
        raise ValueError("two families have the same name")
    return by_name
