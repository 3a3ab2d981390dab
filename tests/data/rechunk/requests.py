"""Requests to prepare small stores, and ways to run and stop them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credit_dp.config import DataConfig
from credit_dp.data.rechunk.copy_fields import PrepareJob, PrepareRequest
from tests.data import stores

ROOT = Path(__file__).parents[3]
ALL = ["1800-01-01", "2200-01-01"]
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


def request(store: Path, out: Path | str, **changes: Any) -> PrepareRequest:
    data = changes.pop("data", {})
    return PrepareRequest(config(store, **data), str(out), **({"codec": "lz4"} | changes))


def run(job: PrepareJob, start_worker: Callable[[], None] | None = None) -> None:
    with job.locked():
        job.stored_bytes()
        job.write(lambda times: None, start_worker)
        job.verify()
        job.finish()


def prepared(store: Path, out: Path, **changes: Any) -> Path:
    run(PrepareJob(request(store, out, **changes)))
    return out


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files by path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def bits(fields: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(fields, dtype="f4").view("u4")


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


def before_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrepareJob, "verify", after(1, PrepareJob.verify, then=False))
