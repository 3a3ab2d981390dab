"""Random numbers that depend on keys such as seed, step, sample and layer, and on nothing else.

Each stream is numpy's `SeedSequence` of its keys. So a resumed run draws what an uninterrupted one
does, and a mesh what a single process does: nothing depends on how many numbers were drawn before,
or by whom. Only torch's generator is keyed by rank: dropout draws other numbers on another mesh.

| stream | keys | in |
|---|---|---|
| order of the samples in an epoch | seed, epoch | `data/sampling.py` |
| torch's generator in a training step | seed, step, data rank, model rank | `training/optim.py` |
| Python's and NumPy's in a training step | seed, step, data rank | `training/optim.py` |
| stochastic depth of a sample | seed, step, sample, layer | `models/blocks.py` |
| augmentation of a sample | seed, step, sample, 1, 0, 1 | `training/augmentation.py` |
| noise on a row of a sample | seed, step, sample, 2, row, 1 | `training/augmentation.py` |
| noise level of a diffusion's sample | seed, step, sample, 3, 0, 1 | `training/diffusion.py` |
| noise on a row of it | seed, step, sample, 4, row, 1 | `training/diffusion.py` |
| noise on a row in its forecast | those of that forecast, row, draw | `training/diffusion.py` |
| noise of a member in training | seed, step, sample, forecast step, member | `training/` |
| noise of a member in a forecast | seed, minute of the initial time, member, step | `training/` |
| perturbation of an ensemble member | seed, minute of the initial time, member | `forecast/` |
| initial state of a quickstart run | seed, number of the run | `data/quickstart/` |
| rows that `data prepare` compares | fingerprint of its settings | `data/rechunk/` |

A stream (a row above) never changes its number of keys, as `SeedSequence` ignores zeros at the end:
`(5, 1)` and `(5, 1, 0)` are the same. Two streams with equal keys draw the same numbers, which does
no harm as long as they draw for different things.

Source: M. E. O'Neill, "Developing a seed_seq Alternative" (2015), on which `SeedSequence` is based.
"""

import random
from typing import Any

import numpy as np


def random_stream(*keys: int) -> np.random.Generator:
    """Return a new generator at the start of the stream of these keys, none of them negative."""
    return np.random.default_rng(_sequence(keys))


def random_seed(*keys: int) -> int:
    """Return a seed of 64 bits for a generator of another library, such as torch's.

    Seeds of neighbouring keys are as unrelated as those of distant ones.
    """
    return int(_sequence(keys).generate_state(1, np.uint64)[0])


def seed_python(seed: int) -> None:
    """Seed the generators of Python and NumPy that the code of a model may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def time_key(time: np.datetime64) -> int:
    """Return a key for a time: its hours since long before 1970, as keys can't be negative.

    Minutes past the hour count in multiples of 2**41.
    """
    hour = time.astype("M8[h]")
    minute = (time - hour) // np.timedelta64(1, "m")
    return int(hour.astype(np.int64)) + 2**40 + int(minute) * 2**41


def _sequence(keys: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([int(key) for key in keys])


def python_random_state() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the states of Python's and NumPy's generators as integers."""
    _, words, cached = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    floats = np.array([np.nan if cached is None else cached, gauss]).view(np.int64)
    return np.concatenate([words, keys, [position, has_gauss], floats]).astype(np.int64)


def set_python_random_state(state: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Restore what `python_random_state` returned."""
    cached, gauss = state[-2:].copy().view(np.float64)
    position, has_gauss = map(int, state[-4:-2])
    words, keys = np.split(state[:-4], [625])
    gauss_next = None if np.isnan(cached) else float(cached)
    random.setstate((3, tuple(words.tolist()), gauss_next))
    np.random.set_state(("MT19937", keys.astype(np.uint32), position, has_gauss, float(gauss)))
