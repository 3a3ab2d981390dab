"""One pass over the training dates for all that must see every one of them.

A store may be far larger than memory: each block is read once and shown to both.
"""

from credit_dp.data.cache import Report
from credit_dp.data.climatology import ClimatologyFit
from credit_dp.data.statistics import Pair, Table, add_window, merged, nothing_seen
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates, all_pieces, stream

TITLE = "statistics and climatology"


def run_training_pass(
    store: Store, dates: TrainingDates, fit: ClimatologyFit, measured: bool, report: Report
) -> Table | None:
    """Fit the climatology; also the statistics of the same dates if they are to be `measured`.

    Raises:
        UserError: a field cannot be read, or is not as needed.
    """
    work = all_pieces(store, dates, fit.bands)
    total = sum(len(piece.channels) * (piece.stop - piece.first) for piece in work)
    done = 0
    found: list[list[Pair]] = []
    for piece in work:
        if piece.first == 0:
            fit.begin(piece.channels, piece.rows)
        pairs = nothing_seen(piece)
        for window in stream(store, dates, piece):
            fit.add(window)
            if measured:
                pairs = add_window(store, piece, window, pairs)
            done += len(piece.channels) * len(window.dates)
            report(TITLE, done / total)
        if piece.stop == len(dates.chosen):
            fit.end()
        found.append(pairs)
    return merged(store, work, found) if measured else None
