"""Lets torchvision be imported where its compiled operators can't be loaded.

The wheel of torchvision for a torch with CUDA does not load beside a torch for CPUs, and its import
then fails at two operators for which it has fake kernels. No model of the zoo calls them: they are
declared, without a kernel.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# The operators last as long as the library that declares them.
_libraries = []


def declare_operators(library: Path) -> None:
    """Declare the operators, unless the compiled library of torchvision can be loaded."""
    import torch

    try:
        torch.ops.load_library(library)
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            declared.define(operator)
        _libraries.append(declared)


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators when torchvision is imported first."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                declare_operators(Path(spec.origin).with_name("_C.so"))
        return None


def prepare_torchvision() -> None:
    """Declare the operators as soon as torchvision is imported."""
    is_prepared = any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not is_prepared:
        sys.meta_path.insert(0, _BeforeTorchvision())
