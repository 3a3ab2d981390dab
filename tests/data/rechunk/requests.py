"""Requests that rechunk small stores with `prepare`, and ways to run and stop them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credit_dp.config import DataConfig
from credit_dp.config.data import VariableConfig
from credit_dp.data.rechunk import copy_fields
from credit_dp.data.rechunk.copy_fields import RechunkJob, RechunkRequest
from credit_dp.data.rechunk.field_selection import FieldSelection
from tests.data import stores

ROOT = Path(__file__).parents[3]
ALL = ["1800-01-01", "2200-01-01"]
KILLS = 20
EVERYTHING = {
    "prognostic": ["geopotential", "2m_temperature"],
    "diagnostic": ["temperature"],
    "forcing": ["day_of_year_sin", "solar"],
    "static": ["geopotential_at_surface", "land_sea_mask"],
}


class StoppedError(RuntimeError):
    """Raised at a point at which a process could be killed."""


def config(store: Path, **changes: Any) -> DataConfig:
    splits = {"train": ALL, "valid": ALL, "test": ALL}
    return stores.config(store, **(EVERYTHING | splits | changes))


def request(store: Path, out: Path, **changes: Any) -> RechunkRequest:
    selection = {"dates": changes.pop("dates")} if "dates" in changes else {}
    data = changes.pop("data", {})
    return RechunkRequest(
        FieldSelection(config(store, **data), **selection), str(out), **({"codec": "lz4"} | changes)
    )


def run(of: RechunkJob) -> RechunkJob:
    with of.locked():
        of.estimate()
        of.begin()
        of.write_missing(lambda times: None)
        of.verify()
        of.finish()
    return of


def prepared(store: Path, out: Path, **changes: Any) -> Path:
    run(RechunkJob(request(store, out, **changes)))
    return out


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files by path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def bits(fields: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(fields, dtype="f4").view("u4")


def variable(**settings: Any) -> VariableConfig:
    return VariableConfig(**settings)


def after(calls: int, work: Callable[..., Any], then: bool) -> Callable[..., Any]:
    """Return `work` so that it stops at call number `calls`, before or after the call."""
    count = 0

    def stopping(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == calls and not then:
            raise StoppedError
        result = work(*arguments, **options)
        if count == calls:
            raise StoppedError
        return result

    return stopping


def before_the_end(patch: pytest.MonkeyPatch, number: int) -> None:
    patch.setattr(copy_fields, "verify_samples", after(1, lambda *given: 0, then=False))
