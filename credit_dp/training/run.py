"""One training run, from the config to the files that it leaves: what every rank executes."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from omegaconf import OmegaConf

from credit_dp.config import Config, DatesConfig, as_dict
from credit_dp.config.data import AUTO, SPLITS
from credit_dp.data.cache import Report
from credit_dp.data.dates import whole
from credit_dp.data.setup import Prepared, prepare, with_quickstart
from credit_dp.data.store import Store
from credit_dp.distributed import Ranks
from credit_dp.distributed.collectives import gather, own_rank, together
from credit_dp.distributed.mesh import build_manager, device_of
from credit_dp.distributed.signals import PREEMPTED
from credit_dp.distributed.worker import early_records
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import HeldOut, LastLead, LastLeadSums, evaluate, example
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.scorecard import Scores
from credit_dp.training.build import Training, build_training, try_plugins
from credit_dp.training.checkpoint import Checkpoints, find_checkpoint, load_checkpoint
from credit_dp.training.checkpoint_files import read_numbers, readable
from credit_dp.training.console import Screen, notes_of, screen_for
from credit_dp.training.loggers import Tracker, open_tracker
from credit_dp.training.monitoring import Validation, Watch
from credit_dp.training.out_of_memory import out_of_memory
from credit_dp.training.preemption import Preemption
from credit_dp.training.run_folder import (
    RunFolder,
    code_text,
    log_to_file,
    resolved_yaml,
    write_whole,
)
from credit_dp.training.summary import summary
from credit_dp.training.transfer import load_initial_weights

logger = logging.getLogger(f"{__name__}.dates")  # what it says is shown with the data's notes


def run(config: Config, ranks: Ranks) -> int:
    """Train, evaluate on held-out dates, and say where everything is.

    Every rank calls this; only rank 0 shows anything, and only checkpoints are written by others.

    Returns:
        The exit code: 0, or `PREEMPTED` if the run was told to stop and can go on.

    Raises:
        UserError: the config cannot be run as it is.
    """
    screen, folder = screen_for(ranks.rank), RunFolder(Path(config.run.dir))
    manager = build_manager(config.parallel, ranks)
    try_plugins(config)  # before hours of statistics
    with screen.report() as report:
        if config.data.dates.open:
            settled = settle_dates(config, folder, report)
            config = replace(config, data=replace(config.data, dates=settled))
        prepared = prepare(config.data, report)
    with out_of_memory(config, ranks):
        training = build_training(config, prepared, manager, device_of(config, ranks))
    this = _Run(config, folder, screen, manager, prepared, training)
    dates = HeldOut(config, prepared, training.rows, training.like)
    this.start_from_checkpoint()
    watch = this.watch()
    # Not before: a run that is refused leaves no folder.
    early = early_records()
    with log_to_file(folder.path, ranks.rank, early):
        this.introduce(notes_of(early))
        step = training.trainer.state.step
        with open_tracker(config.logger, folder.log, step, as_dict(config), ranks.rank) as tracker:
            with out_of_memory(config, ranks), Preemption(manager) as preemption:
                done = this.train(tracker, watch, preemption)
            if not done:
                return PREEMPTED
            scores, last = this.score(dates)
            tracker.summarise(scores.numbers())
        this.show(scores, last, dates)
    return 0


def settle_dates(config: Config, folder: RunFolder, report: Report) -> DatesConfig:
    """The dates of a run whose config leaves some of them to the store; collective.

    A run that goes on keeps those of its checkpoint, whatever was added to the store since then.
    Else rank 0 chooses: the store may be growing, and ranks that open it apart would differ.

    Raises:
        UserError: on all ranks; see `find_checkpoint` and `Store.open`.
    """
    path = find_checkpoint(config.resume, folder.checkpoint)
    if path is not None:
        return together(lambda: dates_as_in(path, config.data.dates))

    def choose() -> tuple[DatesConfig, str]:
        store = Store.open(with_quickstart(config.data, report))
        return store.config.dates, store.chosen_dates

    dates, line = gather(together(lambda: choose() if own_rank() == 0 else (DatesConfig(), "")))[0]
    if line:
        logger.info("data.dates: %s", line)
    return dates


def dates_as_in(path: Path, given: DatesConfig) -> DatesConfig:
    """The dates that a checkpoint's run had; those of a split that are given now stay.

    Raises:
        UserError: the checkpoint can't be read, or its dates are not within those that are given
            with a limit.
    """
    numbers = read_numbers("resume", path)
    with readable("resume", path):
        saved = OmegaConf.create(numbers["config"]).data.dates
        dates = {split: list(saved[split]) for split in SPLITS}
    fixed = [s for s in SPLITS if s not in given.preset and getattr(given, s) != AUTO]
    for split in fixed:
        if given.limit is None:
            dates[split] = getattr(given, split)
        else:
            check_within(split, dates[split], getattr(given, split))
    return DatesConfig(dates["train"], dates["valid"], dates["test"])


def check_within(split: str, saved: Sequence[str], given: Sequence[str]) -> None:
    """Refuse a checkpoint's dates of a split that are not within those that are given.

    Raises:
        UserError: some are not.
    """
    if whole(saved[0])[0] < whole(given[0])[0] or whole(saved[1])[1] > whole(given[1])[1]:
        raise UserError(
            f"data.dates.{split}: the checkpoint has {saved[0]} to {saved[1]}, which is not within "
            f"{given[0]} to {given[1]}. Leave it out, or start a new run."
        )


@final
@dataclass(frozen=True)
class _Run:
    """What the parts of a run have in common."""

    config: Config
    folder: RunFolder
    screen: Screen
    manager: DomainParallelManager
    prepared: Prepared
    training: Training

    @property
    def _first(self) -> bool:
        return self.manager.rank == 0

    @property
    def _finished(self) -> bool:
        return self.training.trainer.state.step >= self.config.trainer.steps

    def start_from_checkpoint(self) -> None:
        """Go on from a checkpoint, or take another run's weights, if the config says so.

        Raises:
            UserError: the checkpoint does not fit, or not all ranks see it.
        """
        config, state = self.config, self.training.trainer.state
        path = find_checkpoint(config.resume, self.folder.checkpoint)
        if path is not None:
            load_checkpoint(path, state)
            self.screen.say(f"resumed after step {state.step} from {path}")
        elif config.init_from is not None:
            said = load_initial_weights(config.init_from, state, config.model, self.prepared)
            self.screen.say(said)

    def watch(self) -> Watch:
        """What this rank looks at while the run trains.

        Raises:
            UserError: there is to be a validation, and the dates for it are not as needed.
        """
        config, training = self.config, self.training
        validation = None
        if config.trainer.validate_every:
            validation = Validation(config, self.prepared, training, self.manager)
        trace = self.folder.trace if config.trainer.profile and self._first else None
        return Watch(config, training, self.screen, validation, trace)

    def introduce(self, notes: Sequence[str]) -> None:
        """Say what is about to be trained and on what data, and note how it can be done again."""
        if self._first and not (self._finished and self.folder.config.exists()):
            text = f"# {self.folder.again}\n{resolved_yaml(self.config)}"
            write_whole(self.folder.config, text)
            write_whole(self.folder.code, code_text())
        if not self._finished:
            for line in summary(self.config, self.prepared, self.training, self.manager):
                self.screen.say(line)
            for note in notes:
                self.screen.say(f"{'note':<11}{note}")

    def train(self, tracker: Tracker, watch: Watch, preemption: Preemption) -> bool:
        """Train to the last step, with log, progress bar and checkpoints; False if told to stop."""
        trainer, total = self.training.trainer, self.config.trainer.steps
        if self._finished:
            self.training.loader.close()
            self.screen.say(
                f"nothing to train: the checkpoint is of step {trainer.state.step} and "
                f"trainer.steps is {total}; evaluating only"
            )
            return True
        folder, yaml, stop = self.folder.checkpoint, resolved_yaml(self.config), False
        with (
            self.training.loader,
            self.screen.bar("training", total, trainer.state.step) as bar,
            Checkpoints(folder, self.config.trainer, trainer.state.step) as checkpoints,
        ):
            trainer.guard.checkpoint = checkpoints.newest
            for record in watch.steps(trainer.steps(watch.batches())):
                stop = preemption.asked()
                # There may be little time left: then without a validation.
                numbers = watch.follow(record, validates=not stop)
                if numbers:
                    tracker.log(record.step, numbers)
                bar(record.step, watch.note)
                if stop or trainer.saves(record.step):
                    checkpoints.save(trainer.state, yaml, watch.validation_rmse)
                if stop:
                    break
        # Writing the last checkpoint takes its time, too.
        stop = stop or preemption.asked()
        if stop:
            self.screen.say(preemption.words(trainer.state.step, folder))
            return False
        watch.close()
        waited = trainer.gradients.waited()
        if waited:
            self.screen.say(waited)
        return True

    def score(self, dates: HeldOut) -> tuple[Scores, LastLead]:
        """Errors on the held-out dates, and what is drawn of them, with a bar."""
        training, manager = self.training, self.manager
        own = len(dates.initial_times[manager.dp_rank :: manager.dp_world_size])
        size = self.config.data.batch_size
        with training.trainer.state.forecasting(), self.screen.bar("evaluating", own) as bar:
            sums = LastLeadSums(dates, manager)
            scores = evaluate(training.forecast.rollout, dates, manager, size, bar, sums)
            scores.check()
            return scores, sums.result()

    def show(self, scores: Scores, last: LastLead, dates: HeldOut) -> None:
        """Write and show the scores, draw plots, and say where everything is."""
        # Before the plots: should one fail, the scores are there.
        if self._first:
            write_whole(self.folder.scores, scores.json(self.training.trainer.state.step))
        for table in scores.tables(self.screen.width):
            self.screen.say(table)
        for line in scores.warnings():
            self.screen.say(f"{'warning':<13}{line}")
        with self.training.trainer.state.forecasting():
            field = example(self.training.forecast.rollout, dates, self.manager)
        if self._first:
            self.draw(scores, last, field)
        for label, path in self.folder.shown().items():
            self.screen.say(f"{label:<13}{path}")
        self.screen.say(f"{'once more':<13}{self.folder.again}")

    def draw(self, scores: Scores, last: LastLead, field: FieldMap) -> None:
        """Draw the plots of a run; matplotlib is imported here, so on rank 0 alone."""
        from credit_dp.evaluation.plots import draw_errors_of, draw_map, draw_rmse, draw_spectra
        from credit_dp.training.loss_curve import draw_loss

        draw_map(field, self.folder.map)
        draw_loss(self.folder.log, self.folder.loss)
        draw_rmse(scores, last.shown, self.folder.rmse)
        draw_spectra(scores, last, self.folder.spectra)
        draw_errors_of(scores, last, field.grid, self.folder.errors)
