"""Python runs this when it starts, if the folder is on its path: torchvision can be imported."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "torchvision_operators", Path(__file__).parents[1] / "torchvision_operators.py"
)
if _spec is not None and _spec.loader is not None:
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.prepare_torchvision()
