"""Buffers of batches, and the check that their values are finite."""

import warnings

import numpy as np
import pytest
import torch

from credit_dp.data.loader import empty_with_large_pages
from credit_dp.data.store import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 0, 4, 5)])
def test_buffers_of_any_type_and_size(dtype, shape):
    room = empty_with_large_pages(shape, dtype)
    assert (room.shape, room.dtype, room.device.type) == (shape, dtype, "cpu")
    assert room.is_contiguous()
    assert torch.equal(room.fill_(3), torch.full(shape, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, 2.0], True),
        ([3e38, 3e38], True),  # their sum is not
        ([3e38, 3e38, np.nan], False),
        ([1.0, np.inf], False),
        ([np.inf, -np.inf], False),
    ],
)
def test_sums_that_overflow_are_checked_again(values, finite):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_finite(np.array(values, dtype=np.float32)) is finite
