"""Which way convolutions of bands take: the bands of tests are small, but both ways are tested."""

import pytest

from credit_dp.domain_parallel.layers import conv

SMALL_BAND_ENTRIES = conv.SMALL_BAND_ENTRIES  # before it is replaced


@pytest.fixture(autouse=True)
def _like_large_bands(monkeypatch):
    """Convolve bands of any size while their halo travels, as large ones are.

    The tests of other folders, of models and trainings, compute small bands as users do.
    """
    monkeypatch.setattr(conv, "SMALL_BAND_ENTRIES", 0)


@pytest.fixture
def small_bands(monkeypatch, _like_large_bands):
    """Fetch the rows of small bands first, as users do."""
    monkeypatch.setattr(conv, "SMALL_BAND_ENTRIES", SMALL_BAND_ENTRIES)


@pytest.fixture(params=[True, False], ids=["overlapped", "fetched first"])
def overlap(request):
    """Run a test in both ways; return whether bands are convolved while their halo travels."""
    if not request.param:
        request.getfixturevalue("small_bands")
    return request.param
