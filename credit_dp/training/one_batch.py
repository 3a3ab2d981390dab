"""The first batch again and again, which a model that can learn at all learns by heart."""

from collections.abc import Iterator
from itertools import repeat

from credit_dp.data.batch import Batch
from credit_dp.data.loader import Loader


def first_batch(loader: Loader) -> Iterator[Batch]:
    """The loader's first batch without end, in a resumed run too; the loader stays at its start.

    Its rollout is as long as that of the first step.
    """
    start = {**loader.state_dict(), "position": 0}
    loader.load_state_dict(start)
    batch = next(loader)
    loader.load_state_dict(start)
    yield from repeat(batch)
