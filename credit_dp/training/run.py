"""One training run, from the config to the files that it leaves: what every rank executes."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from omegaconf import OmegaConf

from credit_dp.config import Config, DatesConfig, as_dict
from credit_dp.config.data import AUTO, SPLITS
from credit_dp.data.cache import ProgressCallback
from credit_dp.data.dates import date_interval
from credit_dp.data.setup import TrainingData, prepare_training_data, with_quickstart_store
from credit_dp.data.store import Store
from credit_dp.distributed import RankInfo
from credit_dp.distributed.collectives import all_gather_object, global_rank, run_on_all_ranks
from credit_dp.distributed.mesh import build_manager, rank_device
from credit_dp.distributed.signals import EXIT_PREEMPTED
from credit_dp.distributed.worker import pop_early_records
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.evaluation.held_out import (
    HeldOutData,
    LastLeadAccumulator,
    LastLeadDiagnostics,
    evaluate,
    example_map,
)
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.scorecard import HeldOutScores
from credit_dp.training.build import Training, build_training, check_plugins
from credit_dp.training.checkpoint import CheckpointSaver, find_checkpoint, load_checkpoint
from credit_dp.training.checkpoint_files import read_metadata
from credit_dp.training.console import Screen, notes_of, screen_for
from credit_dp.training.loggers import Tracker, open_tracker
from credit_dp.training.monitoring import TrainingMonitor, Validation
from credit_dp.training.out_of_memory import explain_out_of_memory
from credit_dp.training.preemption import Preemption
from credit_dp.training.run_folder import (
    RunFolder,
    log_to_file,
    provenance_text,
    resolved_yaml,
    write_text_atomic,
)
from credit_dp.training.shards import translate_read_errors
from credit_dp.training.summary import summary_lines
from credit_dp.training.transfer import load_initial_weights

logger = logging.getLogger(f"{__name__}.dates")  # what it says is shown with the data's notes


def run(config: Config, ranks: RankInfo) -> int:
    """Train, evaluate on held-out dates, and say where everything is.

    Every rank calls this; only rank 0 shows anything, and only checkpoints are written by others.

    Returns:
        The exit code: 0, or `EXIT_PREEMPTED` if the run was told to stop and can go on.

    Raises:
        UserError: the config cannot be run as it is.
    """
    screen, folder = screen_for(ranks.rank), RunFolder(Path(config.run.dir))
    manager = build_manager(config.parallel, ranks)
    check_plugins(config)  # before hours of statistics
    with screen.report() as report:
        if config.data.dates.undetermined:
            settled = resolve_dates(config, folder, report)
            config = replace(config, data=replace(config.data, dates=settled))
        prepared = prepare_training_data(config.data, report)
    with explain_out_of_memory(config, ranks):
        training = build_training(config, prepared, manager, rank_device(config, ranks))
    this = _Run(config, folder, screen, manager, prepared, training)
    dates = HeldOutData(config, prepared, training.rows, training.like)
    this.start_from_checkpoint()
    watch = this.build_monitor()
    # Not before: a run that is refused leaves no folder.
    early = pop_early_records()
    with log_to_file(folder.path, ranks.rank, early):
        this.show_summary(notes_of(early))
        step = training.trainer.state.step
        with open_tracker(config.logger, folder.log, step, as_dict(config), ranks.rank) as tracker:
            with explain_out_of_memory(config, ranks), Preemption(manager) as preemption:
                done = this.train(tracker, watch, preemption)
            if not done:
                return EXIT_PREEMPTED
            scores, last = this.score(dates)
            tracker.summarise(scores.scalars())
        this.report_results(scores, last, dates)
    return 0


def resolve_dates(config: Config, folder: RunFolder, report: ProgressCallback) -> DatesConfig:
    """The dates of a run whose config leaves some of them to the store; collective.

    A run that goes on keeps those of its checkpoint, whatever was added to the store since then.
    Else rank 0 chooses: the store may be growing, and ranks that open it apart would differ.

    Raises:
        UserError: on all ranks; see `find_checkpoint` and `Store.open`.
    """
    path = find_checkpoint(config.resume, folder.checkpoints)
    if path is not None:
        return run_on_all_ranks(lambda: dates_of_checkpoint(path, config.data.dates))

    def choose() -> tuple[DatesConfig, str]:
        store = Store.open(with_quickstart_store(config.data, report))
        return store.config.dates, store.dates_note

    dates, line = all_gather_object(
        run_on_all_ranks(lambda: choose() if global_rank() == 0 else (DatesConfig(), ""))
    )[0]
    if line:
        logger.info("data.dates: %s", line)
    return dates


def dates_of_checkpoint(path: Path, given: DatesConfig) -> DatesConfig:
    """The dates that a checkpoint's run had; those of a split that are given now stay.

    Raises:
        UserError: the checkpoint can't be read, or its dates are not within those that are given
            with a limit.
    """
    numbers = read_metadata("resume", path)
    with translate_read_errors("resume", path):
        saved = OmegaConf.create(numbers["config"]).data.dates
        dates = {split: list(saved[split]) for split in SPLITS}
    fixed = [s for s in SPLITS if s not in given.preset and getattr(given, s) != AUTO]
    for split in fixed:
        if given.limit is None:
            dates[split] = getattr(given, split)
        else:
            check_dates_within(split, dates[split], getattr(given, split))
    return DatesConfig(dates["train"], dates["valid"], dates["test"])


def check_dates_within(split: str, saved: Sequence[str], given: Sequence[str]) -> None:
    """Refuse a checkpoint's dates of a split that are not within those that are given.

    Raises:
        UserError: some are not.
    """
    if (
        date_interval(saved[0])[0] < date_interval(given[0])[0]
        or date_interval(saved[1])[1] > date_interval(given[1])[1]
    ):
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
    prepared: TrainingData
    training: Training

    @property
    def _is_rank_0(self) -> bool:
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
        path = find_checkpoint(config.resume, self.folder.checkpoints)
        if path is not None:
            load_checkpoint(path, state)
            self.screen.show(f"resumed after step {state.step} from {path}")
        elif config.init_from is not None:
            said = load_initial_weights(config.init_from, state, config.model, self.prepared)
            self.screen.show(said)

    def build_monitor(self) -> TrainingMonitor:
        """What this rank looks at while the run trains.

        Raises:
            UserError: there is to be a validation, and the dates for it are not as needed.
        """
        config, training = self.config, self.training
        validation = None
        if config.trainer.validate_every:
            validation = Validation(config, self.prepared, training, self.manager)
        trace = self.folder.trace if config.trainer.profile and self._is_rank_0 else None
        return TrainingMonitor(config, training, self.screen, validation, trace)

    def show_summary(self, notes: Sequence[str]) -> None:
        """Say what is about to be trained and on what data, and note how it can be done again."""
        if self._is_rank_0 and not (self._finished and self.folder.config.exists()):
            text = f"# {self.folder.rerun_command}\n{resolved_yaml(self.config)}"
            write_text_atomic(self.folder.config, text)
            write_text_atomic(self.folder.code, provenance_text())
        if not self._finished:
            for line in summary_lines(self.config, self.prepared, self.training, self.manager):
                self.screen.show(line)
            for note in notes:
                self.screen.show(f"{'note':<11}{note}")

    def train(self, tracker: Tracker, watch: TrainingMonitor, preemption: Preemption) -> bool:
        """Train to the last step, with log, progress bar and checkpoints; False if told to stop."""
        trainer, total = self.training.trainer, self.config.trainer.steps
        if self._finished:
            self.training.loader.close()
            self.screen.show(
                f"nothing to train: the checkpoint is of step {trainer.state.step} and "
                f"trainer.steps is {total}; evaluating only"
            )
            return True
        folder, yaml, stop = self.folder.checkpoints, resolved_yaml(self.config), False
        with (
            self.training.loader,
            self.screen.bar("training", total, trainer.state.step) as bar,
            CheckpointSaver(folder, self.config.trainer, trainer.state.step) as checkpoints,
        ):
            trainer.guard.checkpoint = checkpoints.newest_checkpoint
            for record in watch.steps(trainer.steps(watch.batches())):
                stop = preemption.stop_requested()
                # There may be little time left: then without a validation.
                numbers = watch.on_step_end(record, validates=not stop)
                if numbers:
                    tracker.log(record.step, numbers)
                bar(record.step, watch.note)
                if stop or trainer.should_save(record.step):
                    checkpoints.save(trainer.state, yaml, watch.validation_rmse)
                if stop:
                    break
        # Writing the last checkpoint takes its time, too.
        stop = stop or preemption.stop_requested()
        if stop:
            self.screen.show(preemption.stop_message(trainer.state.step, folder))
            return False
        watch.close()
        waited = trainer.forward_backward.bubble_message()
        if waited:
            self.screen.show(waited)
        return True

    def score(self, dates: HeldOutData) -> tuple[HeldOutScores, LastLeadDiagnostics]:
        """Errors on the held-out dates, and what is drawn of them, with a bar."""
        training, manager = self.training, self.manager
        own = len(dates.initial_times[manager.dp_rank :: manager.dp_world_size])
        size = self.config.data.batch_size
        with training.trainer.state.eval_mode(), self.screen.bar("evaluating", own) as bar:
            sums = LastLeadAccumulator(dates, manager)
            scores = evaluate(training.forecast_step.rollout, dates, manager, size, bar, sums)
            scores.check()
            return scores, sums.result()

    def report_results(
        self, scores: HeldOutScores, last: LastLeadDiagnostics, dates: HeldOutData
    ) -> None:
        """Write and show the scores, draw plots, and say where everything is."""
        # Before the plots: should one fail, the scores are there.
        if self._is_rank_0:
            write_text_atomic(self.folder.scores, scores.to_json(self.training.trainer.state.step))
        for table in scores.tables(self.screen.width):
            self.screen.show(table)
        for line in scores.warnings():
            self.screen.show(f"{'warning':<13}{line}")
        with self.training.trainer.state.eval_mode():
            field = example_map(self.training.forecast_step.rollout, dates, self.manager)
        if self._is_rank_0:
            self.draw(scores, last, field)
        for label, path in self.folder.existing_files().items():
            self.screen.show(f"{label:<13}{path}")
        self.screen.show(f"{'once more':<13}{self.folder.rerun_command}")

    def draw(self, scores: HeldOutScores, last: LastLeadDiagnostics, field: FieldMap) -> None:
        """Draw the plots of a run; matplotlib is imported here, so on rank 0 alone."""
        from credit_dp.evaluation.plots import (
            draw_last_lead_errors,
            draw_map,
            draw_rmse,
            draw_spectra,
        )
        from credit_dp.training.loss_curve import draw_loss

        draw_map(field, self.folder.map_plot)
        draw_loss(self.folder.log, self.folder.loss_plot)
        draw_rmse(scores, last.spectra_channels, self.folder.rmse_plot)
        draw_spectra(scores, last, self.folder.spectra_plot)
        draw_last_lead_errors(scores, last, field.grid, self.folder.errors_plot)
