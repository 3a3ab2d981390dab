"""What is looked at while a run trains: its numbers, the validation, the pace, and a trace."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

from credit_dp.config import Config
from credit_dp.data.batch import Batch
from credit_dp.training.build import Training
from credit_dp.training.one_batch import first_batch
from credit_dp.training.outlook import Outlook
from credit_dp.training.profiling import Trace, named_data
from credit_dp.training.screen import Screen
from credit_dp.training.summary import steps_per_epoch
from credit_dp.training.trainer import Record
from credit_dp.training.validation import Validation


@final
class Watch:
    """Follows the steps of a run, the same on every rank.

    Args:
        screen: this rank's.
        validation: if there is any.
        trace: where this rank's trace goes, if it makes one.

    Attributes:
        validation_rmse: found after the step that was followed last, or None.
        note: for the progress bar.
    """

    def __init__(
        self,
        config: Config,
        training: Training,
        screen: Screen,
        validation: Validation | None,
        trace: Path | None,
    ) -> None:
        self.config = config
        self.training = training
        self.screen = screen
        self.validation = validation
        self.trace = None if trace is None else Trace(trace)
        self.validation_rmse: float | None = None
        self.note = ""
        self._loss = self._validated = ""
        step, total = training.trainer.state.step, config.trainer.steps
        self._outlook = Outlook(step, total, steps_per_epoch(config, training))

    def batches(self) -> Iterator[Batch]:
        """Those that the run is to train on."""
        loader = self.training.loader
        return named_data(first_batch(loader) if self.config.trainer.one_batch else loader)

    def steps(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records, with a trace of some of the steps if one is made."""
        return iter(records) if self.trace is None else self.trace.steps(records)

    def follow(self, record: Record, validates: bool = True) -> Mapping[str, float]:
        """The numbers to log of a step, with the validation's if it is due; collective then."""
        line = self._outlook(record.step)
        if line is not None:
            self.screen.say(line)
        if record.loss is None:
            self.validation_rmse = None
            return {}
        numbers = record.numbers()
        self._loss = f"loss {record.loss:.4f}"
        self.validation_rmse = self._validate(record.step) if validates else None
        if self.validation_rmse is not None:
            numbers["validation_rmse"] = self.validation_rmse
            self._validated = f"validation {self.validation_rmse:.4f}"
        self.note = "  ".join(part for part in (self._loss, self._validated) if part)
        return numbers

    def close(self) -> None:
        """Say what is missing."""
        if self.trace is not None and not self.trace.written:
            self.screen.say("no trace: trainer.profile needs at least 3 steps to record one")

    def _validate(self, step: int) -> float | None:
        due = self.validation is not None and self.validation.due(step)
        return self.validation() if due and self.validation is not None else None
