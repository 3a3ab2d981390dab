"""Streams of random numbers: the same for equal keys in any version, unrelated for others."""

from itertools import pairwise

import numpy as np
import pytest

from credit_dp.random_streams import random_seed, random_stream, time_key

KEYS = [(0,), (5, 1), (5, 1, 0, 3), (2**63 - 1, 7), (3, 2**40 + 12, 1)]


def test_a_stream_is_numpys_of_the_list_of_keys() -> None:
    for keys in KEYS:
        of_numpy = np.random.default_rng([*keys]).random(4).tolist()
        assert random_stream(*keys).random(4).tolist() == of_numpy, keys


def test_the_numbers_never_change() -> None:
    # Checkpoints, quickstart stores and ensembles of earlier versions depend on them.
    assert random_stream(5, 1, 2, 3).integers(2**32, size=3).tolist() == [
        90449603,
        3126027003,
        1524204497,
    ]
    assert random_seed(5, 1, 2, 3) == 11870798798537686043


def test_keys_of_numpy_are_the_same_as_pythons() -> None:
    keys = np.array([5, 1, 2], dtype=np.int64)
    assert random_seed(*keys) == random_seed(5, 1, 2)


def test_every_order_of_keys_has_a_stream_of_its_own() -> None:
    keys = [(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    assert len({random_seed(*key) for key in keys}) == len(keys)
    assert len({random_stream(*key).random() for key in keys}) == len(keys)


def test_seeds_of_neighbouring_steps_differ_in_half_of_their_bits() -> None:
    seeds = [random_seed(0, step, 0, 0) for step in range(1000)]
    bits = [(one ^ other).bit_count() for one, other in pairwise(seeds)]
    assert np.mean(bits) == pytest.approx(32, abs=0.5)
    assert max(seeds) < 2**64
    assert max(seeds).bit_length() == 64


def test_negative_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        random_stream(-1)


def test_each_minute_has_a_key() -> None:
    times = np.datetime64("2000-01-01T00:00") + np.arange(300)
    keys = [time_key(time) for time in times]
    assert len(set(keys)) == len(times)
    assert keys[60] == keys[0] + 1 == 262969 + 2**40  # as in earlier versions
