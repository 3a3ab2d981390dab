"""All scores of one variable, collected a forecast at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from torch import Tensor

from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.anomalies import Activity, AnomalyCorrelation
from credit_dp.evaluation.bias import Bias
from credit_dp.evaluation.ensemble import FairCRPS, Spread
from credit_dp.evaluation.metrics import RootMeanSquare
from credit_dp.evaluation.valid_points import ValidPoints
from credit_dp.evaluation.zonal_spectra import ZonalSpectra

# Of which fields there is each score. A climatology has no anomaly; that of the truth is what a
# forecast's activity is compared with.
SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rmse": ("forecast", "persistence", "climatology"),
        "acc": ("forecast", "persistence"),
        "bias": ("forecast", "persistence", "climatology"),
        "activity": ("forecast", "truth"),
        "crps": ("forecast", "persistence", "climatology"),
        "spread": ("forecast",),
    }
)
OF_ENSEMBLES = ("crps", "spread")
SPECTRA_OF = ("forecast", "truth")


@final
@dataclass(frozen=True)
class Globe:
    """The rows that fields have, and what they weigh.

    Shapes:
        rows `(h,)`; bands `(K, h)`; latitude `(h,)` degrees; columns is W.
    """

    rows: Tensor
    bands: Tensor
    latitude: Tensor
    columns: int


@final
class VariableScores:
    """Collects the scores of the C levels of a variable.

    Of an ensemble, the deterministic scores are those of its mean and the spectra those of its
    members, as in WeatherBench 2. What is kept does not grow with the number of initial times.

    Args:
        sizes: lead times and channels.
        members: of the forecast; 1 for none.
        points: those with values, if not all have them.
    """

    def __init__(
        self, sizes: tuple[int, int], members: int, globe: Globe, points: ValidPoints | None
    ) -> None:
        leads, channels = sizes
        shapes = {name: (len(of), leads, channels) for name, of in SOURCES.items()}
        self._rmse = RootMeanSquare(shapes["rmse"], globe.rows, points)
        self._acc = AnomalyCorrelation(shapes["acc"], 1, globe.rows, points)
        self._bias = Bias(shapes["bias"], globe.rows, points)
        self._activity = Activity(shapes["activity"], globe.rows, points)
        self._crps = FairCRPS(shapes["crps"], globe.rows, points)
        self._spread = Spread(shapes["spread"], globe.rows, points)
        self._spectra = ZonalSpectra(
            (len(SPECTRA_OF), leads, channels), globe.bands, globe.latitude, globe.columns, points
        )
        self._ensemble = members > 1

    def add(
        self, leads: slice, members: Tensor, truth: Tensor, guesses: tuple[Tensor, Tensor]
    ) -> None:
        """Add the forecasts from the initial time that is not yet ended, at some lead times.

        Args:
            members: `(M, leads, C, h, W)`, M = 1 without an ensemble.
            truth: `(leads, C, h, W)`.
            guesses: persistence, `(1, C, h, W)`, and climatology, `(leads, C, h, W)`.
        """
        members, truth = members.double(), truth.double()
        persistence, normal = (guess.double() for guess in guesses)
        mean = members.mean(dim=0)
        for source, field in enumerate((mean, persistence, normal)):
            self._rmse.add((source, leads), (field - truth)[None])
            self._bias.add((source, leads), field[None], truth[None])
        for source, field in enumerate((mean, persistence)):
            self._acc.add((source, leads), [0], (field - normal)[None], (truth - normal)[None])
        for source, field in enumerate((mean, truth)):
            self._activity.add((source, leads), (field - normal)[None])
        for source, fields in enumerate((members, truth[None])):
            self._spectra.add((source, leads), fields)
        if self._ensemble:
            constant = persistence.expand_as(truth)
            for source, several in enumerate((members, constant[None], normal[None])):
                self._crps.add((source, leads), several[None], truth[None])
            self._spread.add((0, leads), members[None])

    def end_initial_time(self, leads: slice, manager: DomainParallelManager) -> None:
        """Say that these lead times from one initial time have been added; collective."""
        self._acc.fold(manager, (slice(None), leads))

    def result(self, manager: DomainParallelManager) -> tuple[dict[str, Tensor], Tensor]:
        """Scores by name, `(sources, leads, C)` each, and spectra, `(2, leads, C, K, W // 2 + 1)`.

        Collective.
        """
        found = {
            "rmse": self._rmse.result(manager),
            "acc": self._acc.result(manager),
            "bias": self._bias.result(manager),
            "activity": self._activity.result(manager),
        }
        if self._ensemble:
            found |= {"crps": self._crps.result(manager), "spread": self._spread.result(manager)}
        return found, self._spectra.result(manager)
