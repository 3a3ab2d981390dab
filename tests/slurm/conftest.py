"""One SLURM for all tests of this folder. Where there is none, they fail and say why."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import running_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """The environment that programs need to use it."""
    # Short: a socket's path may have no more than about 100 letters.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        with running_slurm(Path(folder)) as environment:
            yield environment
