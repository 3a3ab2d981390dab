"""The climatology beside forecasts, fitted to dates of the truth where no store has one."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from credit_dp.data.cache import Report, cache_folder, claim
from credit_dp.data.climatology import Climatology, ClimatologyFit, climatology_path
from credit_dp.data.dates import whole
from credit_dp.data.store import Store
from credit_dp.data.streaming import TrainingDates
from credit_dp.data.training_pass import run_training_pass

Times = NDArray[np.datetime64]
YEAR = np.timedelta64(365, "D")


@final
class FittedTo:
    """The dates of the truth that a climatology is fitted to, and their description.

    Those that were asked for; else those before the first forecast if they are a year or more, so
    that climatology knows no more than a forecast; else all, which flatters it.
    """

    def __init__(self, asked: tuple[str, ...], times: Times, first_init: np.datetime64) -> None:
        earlier = times[times < first_init]
        if asked:
            self.span = list(asked)
        elif len(earlier) and first_init - earlier[0] >= YEAR:
            self.span = [_minute(earlier[0]), _minute(earlier[-1])]
        else:
            self.span = [_minute(times[0]), _minute(times[-1])]
        known = whole(self.span[1])[1] >= first_init
        self.description = f"fitted to the truth from {self.span[0]} to {self.span[1]}" + (
            ", which the forecasts' own dates are among" if known else ""
        )


def fitted_climatology(store: Store, cache: str, report: Report) -> Climatology:
    """The climatology of the store's training dates, from the cache or fitted now.

    Raises:
        UserError: a field can't be read, or no two of the dates are a step apart.
    """
    path = climatology_path(store, cache_folder(cache))
    found = Climatology.load(path, store.channels)
    if found is None:
        with claim(path, lambda x: Climatology.load(x, store.channels) is not None) as folder:
            if folder is not None:
                dates = TrainingDates.of(store)
                run_training_pass(store, dates, ClimatologyFit(store, dates, folder), False, report)
        found = Climatology.load(path, store.channels)
    if found is None:
        raise OSError(f"{path}: what was just written cannot be read back")
    return found


def _minute(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]"))
