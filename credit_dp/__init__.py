"""Train global weather models sharded by latitude, equal to the model on one device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from credit_dp.export.forecaster import Forecaster

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str | os.PathLike[str], device: str = "cpu") -> Forecaster:
    """Return the trained model of an exported file, a checkpoint or a run's folder.

    `hf://OWNER/NAME`, of a repository on the Hugging Face hub, is fetched first; with `@REVISION`,
    that revision. The model maps physical fields to those one step later, on one device; see
    `Forecaster`.

    Raises:
        UserError: nothing is there, it can't be read, or its model is unknown.
    """
    from credit_dp.export.forecaster import load as load_model  # torch, which takes seconds

    return load_model(os.fspath(path), device)
