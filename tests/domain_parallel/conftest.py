"""Which way layers take: bands of tests are small, but the ways of large ones are tested, too."""

import pytest

from credit_dp.domain_parallel.layers import base
from tests.domain_parallel.equality import SMALL_BAND_ENTRIES


@pytest.fixture(autouse=True)
def _like_large_bands(monkeypatch):
    """Treat bands of any size as large ones: convolve them while their halo travels.

    The tests of other folders, of models and trainings, compute small bands as users do.
    """
    monkeypatch.setattr(base, "SMALL_BAND_ENTRIES", 0)


@pytest.fixture
def small_bands(monkeypatch, _like_large_bands):
    """Treat small bands as such: fetch their rows first."""
    monkeypatch.setattr(base, "SMALL_BAND_ENTRIES", SMALL_BAND_ENTRIES)


@pytest.fixture(params=[True, False], ids=["overlapped", "fetched first"])
def overlap(request):
    """Run a test in both ways; return whether bands are convolved while their halo travels."""
    if not request.param:
        request.getfixturevalue("small_bands")
    return request.param
