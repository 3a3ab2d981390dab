"""One pass over the training dates, shared by all that must see every one of them.

A store may be far larger than memory: each block is read once and shown to every consumer.
"""

from collections.abc import Sequence
from typing import Protocol

from credit_dp.data.cache import Report
from credit_dp.data.dates import split_span
from credit_dp.data.sources.source import Fields
from credit_dp.data.store import Store


class Consumer(Protocol):
    """What a pass feeds: for each prognostic variable `begin`, many times `add`, then `end`."""

    def begin(self, variable: str, levels: int) -> None:
        """Expect blocks of another variable."""

    def add(self, first: int, block: Fields) -> None:
        """Take in `(T, levels, H, W)`, whose first time is number `first` of the training dates."""

    def end(self) -> None:
        """All training dates of the variable have been seen."""


def run_training_pass(store: Store, consumers: Sequence[Consumer], report: Report) -> None:
    """Show all prognostic fields of the training dates to the consumers, variable by variable."""
    span = split_span(store.config, "train", store.times)
    length = span.stop - span.start
    variables = store.channels.variables
    for done, variable in enumerate(variables):
        levels = len(store.channels.prognostic[store.channels.of(variable)])
        for consumer in consumers:
            consumer.begin(variable, levels)
        channels = store.channels.prognostic[store.channels.of(variable)]
        for start, block in store.blocks(channels, span, slice(None)):
            first = start - span.start
            for consumer in consumers:
                consumer.add(first, block)
            fraction = (first + len(block)) / length
            report("statistics and climatology", (done + fraction) / len(variables))
        for consumer in consumers:
            consumer.end()
