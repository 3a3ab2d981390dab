"""One training run, from the config to the files that it leaves: what every rank executes.

`run` has the order of a run, `_Run.train` that of its loop, `Trainer.train_step` that of a step.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import torch
from omegaconf import OmegaConf
from rich.filesize import decimal

from credit_dp.config import Config, DatesConfig, as_dict
from credit_dp.config.data import AUTO, SPLITS
from credit_dp.config.training import build_callbacks
from credit_dp.data.cache import ProgressCallback
from credit_dp.data.calendar import STANDARD, Calendar
from credit_dp.data.dates import date_interval, times_needed
from credit_dp.data.setup import TrainingData, prepare_training_data, with_quickstart_store
from credit_dp.data.store import Store
from credit_dp.distributed.collectives import run_on_rank_0
from credit_dp.distributed.failure_report import mesh_rank_name
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.mesh import build_manager, rank_device
from credit_dp.distributed.signals import EXIT_PREEMPTED, handle_stop, signal_name
from credit_dp.distributed.slurm import TimeLimit, job_time_limit
from credit_dp.distributed.worker import pop_early_records
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError, counted
from credit_dp.evaluation.drawing import draw_or_warn
from credit_dp.evaluation.held_out import (
    HeldOutData,
    LastLeadAccumulator,
    LastLeadDiagnostics,
    evaluate,
    example_map,
)
from credit_dp.evaluation.maps import FieldMap
from credit_dp.evaluation.scorecard import HeldOutScores
from credit_dp.training.build_training import Training, build_training
from credit_dp.training.checkpoint import CheckpointSaver, find_checkpoint, load_checkpoint
from credit_dp.training.checkpoint_files import VALIDATION_KEYS_KEY, read_metadata
from credit_dp.training.console import Screen, notes_of, screen_for
from credit_dp.training.data_description import calendar_of_fields
from credit_dp.training.loggers import Tracker, open_tracker
from credit_dp.training.monitoring import (
    CallbackRun,
    Callbacks,
    TrainingMonitor,
    Validation,
    check_validation_scores,
)
from credit_dp.training.run_folder import (
    RunFolder,
    log_to_file,
    provenance_text,
    resolved_yaml,
    write_run_file,
)
from credit_dp.training.start_checks import (
    check_start,
    check_without_data,
    start_notes,
    with_validation,
)
from credit_dp.training.state import ValidationHistory
from credit_dp.training.summary import summary_lines
from credit_dp.training.trainer import agree_on_signal
from credit_dp.training.transfer import load_initial_weights

if TYPE_CHECKING:
    from credit_dp.training.live_page import LivePage

logger = logging.getLogger(f"{__name__}.dates")  # shown with the notes on data


def run(config: Config, ranks: RankInfo) -> int:
    """Train, evaluate on held-out dates, and say where everything is.

    Every rank calls this. Only rank 0 shows the run; preparations are shown by the rank that does
    them. Every rank writes its log and its part of checkpoints.

    Returns:
        The exit code: 0, or `EXIT_PREEMPTED` if a signal stopped the run and it can be resumed.

    Raises:
        UserError: the config cannot be run.
    """
    screen = screen_for(ranks.rank)
    folder = RunFolder(Path(config.run.dir))

    # 1. Process groups, then the data: store, statistics and climatology are on disk afterwards.
    manager = build_manager(config.parallel, ranks)
    check_without_data(config)
    check_validation_scores(config.trainer)
    # On several nodes all ranks would wait for the one that computes.
    compute = config.data.fit_in_job or not ranks.on_several_nodes
    with screen.report() as report:
        if config.data.dates.undetermined:
            dates = resolve_dates(config, folder, report, compute=compute)
            config = replace(config, data=replace(config.data, dates=dates))
        resume = find_checkpoint(config.resume, folder.checkpoints)

        def check(store: Store) -> None:
            # Before hours of statistics.
            run_on_rank_0(lambda: check_start(config, store, manager.dp_world_size, resume))

        data = prepare_training_data(config.data, report, check, compute=compute)
        static = list(data.store.channels.static)
        config = replace(config, data=replace(config.data, static=static, optional_static=[]))
        # A validation is collective: one rank says whether there is one, and when.
        trainer = run_on_rank_0(lambda: with_validation(config, data.store).trainer)
        config = replace(config, trainer=trainer)

    # 2. Model, loss, optimizer and loader; then weights and state from a checkpoint.
    with explain_out_of_memory(config, ranks):
        training = build_training(config, data, manager, rank_device(config, ranks))
    session = _Run(config, folder, screen, manager, data, training)
    held_out = HeldOutData(config, data, training.rows, training.like)
    session.load_weights()
    monitor, callbacks = session.build_monitor(), session.callbacks()

    # 3. Only now is there a folder: a run that is refused leaves none.
    early_records = pop_early_records()
    with log_to_file(folder.path, ranks.rank, early_records):
        session.show_summary(notes_of(early_records))
        step = training.trainer.state.step
        with open_tracker(config.logger, folder.log, step, as_dict(config), ranks.rank) as tracker:
            page = session.open_page(tracker)
            # 4. Train to the last step, or until a signal asks to stop.
            with explain_out_of_memory(config, ranks), Preemption(manager) as preemption:
                finished = session.train(tracker, monitor, preemption, callbacks, page)
            if not finished:
                return EXIT_PREEMPTED
            if page is not None:
                page.show_scoring()
            # 5. Score forecasts of held-out dates, draw, and say where everything is.
            scores, last_lead = session.score(held_out)
            tracker.summarise(scores.scalars())
        session.report_results(scores, last_lead, held_out, page)
        callbacks.on_end(scores.scalars())
    return 0


@final
class Preemption:
    """Stops training on SIGTERM, SIGUSR1, SIGHUP and at the end of a job's time.

    A signal may reach one rank only, or each rank during another step: it is recorded here, and
    travels with the loss (`reduce_step` in `training/trainer.py`), so that all ranks stop after the
    same step, with a checkpoint of it. A SIGTERM that comes more than 2 seconds after the first
    ends the process.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        # The signal that reached this rank, or the parent of local ranks.
        self.local_signal = 0
        self.time_limit = TimeLimit(None)
        self.handlers = ExitStack()

    def __enter__(self) -> Self:
        if self.manager.rank == 0:
            self.time_limit = job_time_limit()
        self.handlers.enter_context(handle_stop(self.record_signal))
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.handlers.close()

    def record_signal(self, number: int) -> None:
        """Remember the number of a signal that reached this rank."""
        self.local_signal = number

    def pending_signal(self) -> int:
        """Return the signal for which this rank has to stop, or 0; not collective.

        The end of the job's time, which rank 0 watches, counts as SIGUSR1.
        """
        if not self.local_signal and self.time_limit.reached():
            return int(signal.SIGUSR1)
        return self.local_signal

    def agree_on_signal(self) -> int:
        """Return the signal for which all ranks have to stop, or 0; the same on every rank.

        Collective. For use outside of steps, which agree on it themselves.
        """
        return agree_on_signal(self.pending_signal(), self.manager)

    def stop_message(self, number: int, step: int, checkpoint: Path, keys: str) -> str:
        """Return one line on why training stopped, and with which keys the command resumes it."""
        time_is_up = not self.local_signal and self.time_limit.reached()
        name = "the job's time is over" if time_is_up else signal_name(number)
        return (
            f"{name}: stopped after step {step}, which is saved in {checkpoint}; the same command "
            f"with {keys} continues from there"
        )


@contextmanager
def explain_out_of_memory(config: Config, ranks: RankInfo) -> Iterator[None]:
    """Say in one line that a GPU's memory is full, and which keys lower what a step needs.

    Raises:
        UserError: on the rank whose GPU is full; it ends the others.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_message(config, ranks, str(error))) from error


def out_of_memory_message(config: Config, ranks: RankInfo, error: str) -> str:
    """Return the line: which rank, how much memory was in use, and which keys to change."""
    rank = mesh_rank_name(ranks.rank, config.parallel)
    used = error.partition(". ")[0]
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]
        used = f"{decimal(torch.cuda.max_memory_reserved())} of {decimal(total)} in use"
    keys = []
    if config.trainer.longest_rollout > 1 and config.trainer.checkpoint_activations == "false":
        keys.append("trainer.checkpoint_activations=step")
    spectral_norm = getattr(config.model, "spectral_norm", False)  # which refuses checkpointing
    by_itself = getattr(config.model, "activation_checkpointing", None)  # None: another's model
    if by_itself is False and not spectral_norm:
        keys.append("model.activation_checkpointing=true")
    one_part = config.parallel.pipeline == 1 and not config.compile
    if by_itself is None and one_part and config.trainer.checkpoint_activations != "blocks":
        keys.append("trainer.checkpoint_activations=blocks")
    if config.trainer.autocast is None and config.trainer.dtype == "float32":
        keys.append("trainer.autocast=bfloat16")
    raised = f"parallel.domain above {config.parallel.domain}"
    advice = f"Set {' or '.join(keys)}, or set {raised}" if keys else f"Set {raised}"
    return (
        f"{rank}: out of memory ({used}). {advice}, or a smaller data.batch_size; "
        "`--check` with the same keys prints the memory of a rank."
    )


def resolve_dates(
    config: Config, folder: RunFolder, report: ProgressCallback, *, compute: bool = True
) -> DatesConfig:
    """Return the dates of a run whose config leaves some of them to the store; collective.

    A resumed run keeps the dates of its checkpoint, whatever was added to the store since then.
    Otherwise rank 0 chooses: the store may be growing, and ranks that open it separately would
    differ.

    Raises:
        UserError: on all ranks; see `find_checkpoint` and `Store.open`.
        NotComputedError: the quickstart's store is missing, and `compute` is False.
    """
    path = find_checkpoint(config.resume, folder.checkpoints)
    if path is not None:
        dates = run_on_rank_0(lambda: dates_of_checkpoint(path, config.data.dates))
        if config.trainer.validate_every and dates.valid == dates.test:
            raise UserError(
                "trainer.validate_every: the checkpoint's run had no validation, and its dates of "
                "valid are those of test. Set trainer.validate_every=0, or data.dates.valid."
            )
        return dates

    data = with_quickstart_store(config.data, report, compute=compute)

    def choose() -> tuple[DatesConfig, str]:
        store = Store.open(data, times_needed(config))
        return store.config.dates, store.dates_note

    dates, line = run_on_rank_0(choose)
    if line:
        logger.info("data.dates: %s", line)
    return dates


def dates_of_checkpoint(path: Path, given: DatesConfig) -> DatesConfig:
    """Return the dates of a checkpoint's run, but those of a split that the config gives now.

    Raises:
        UserError: the checkpoint can't be read, or its dates are not within the dates that are
            given with a limit.
    """
    numbers = read_metadata("resume", path)
    saved: Any = OmegaConf.to_container(OmegaConf.create(numbers["config"]))
    dates = {split: list(saved["data"]["dates"][split]) for split in SPLITS}
    fixed = [s for s in SPLITS if s not in given.preset and getattr(given, s) != AUTO]
    for split in fixed:
        if given.limit is None:
            dates[split] = getattr(given, split)
        else:
            calendar = calendar_of_fields(numbers["data"]["fields"])
            check_dates_within(split, dates[split], getattr(given, split), calendar)
    return DatesConfig(dates["train"], dates["valid"], dates["test"])


def check_dates_within(
    split: str, saved: Sequence[str], given: Sequence[str], calendar: Calendar = STANDARD
) -> None:
    """Refuse a checkpoint's dates of a split that are not within the given dates.

    Raises:
        UserError: some are not.
    """
    key = f"data.dates.{split}"
    first, last = (
        [date_interval(key, dates[end], calendar)[end] for dates in (saved, given)]
        for end in (0, 1)
    )
    if first[0] < first[1] or last[0] > last[1]:
        raise UserError(
            f"{key}: the checkpoint has {saved[0]} to {saved[1]}, which is not within "
            f"{given[0]} to {given[1]}. Leave it out, or start a new run."
        )


@final
@dataclass(frozen=True)
class _Run:
    """What the parts of a run share."""

    config: Config
    folder: RunFolder
    screen: Screen
    manager: DomainParallelManager
    data: TrainingData
    training: Training

    @property
    def _is_rank_0(self) -> bool:
        return self.manager.rank == 0

    @property
    def _finished(self) -> bool:
        """Whether all steps are taken, or the validation error has stopped falling.

        The same on all ranks, as they have the same validation errors.
        """
        return self._trained_all_steps or self._out_of_patience

    @property
    def _trained_all_steps(self) -> bool:
        return self.training.trainer.state.step >= self.config.trainer.steps

    @property
    def _out_of_patience(self) -> bool:
        patience = self.config.trainer.patience
        return patience is not None and self._validations.without_lower >= patience

    @property
    def _validations(self) -> ValidationHistory:
        return self.training.trainer.state.validations

    def _patience_message(self) -> str:
        lowest = self._validations.lowest
        than = "a finite error" if lowest is None else f"a lower error than {lowest:.4f}"
        count = counted(self._validations.without_lower, "validation")
        return f"trainer.patience: {count} without {than}"

    def load_weights(self) -> None:
        """Resume from a checkpoint, or take another run's weights, if the config says so.

        Raises:
            UserError: the checkpoint does not fit, or not all ranks see it.
        """
        config, state = self.config, self.training.trainer.state
        path = find_checkpoint(config.resume, self.folder.checkpoints)
        if path is not None:
            load_checkpoint(path, state)
            saved = read_metadata("resume", path).get(VALIDATION_KEYS_KEY, {})
            if saved != config.trainer.validation_keys:  # errors of another kind
                state.validations = ValidationHistory()
            self.screen.show(f"resumed after step {state.step} from {path}")
        elif config.init_from is not None:
            summary = load_initial_weights(config.init_from, state, config.model, self.data)
            self.screen.show(summary)

    def build_monitor(self) -> TrainingMonitor:
        """Return this rank's monitor of the training.

        Raises:
            UserError: the dates of the validation are not as needed.
        """
        config, training = self.config, self.training
        validation = None
        if config.trainer.validate_every:
            try:
                validation = Validation(config, self.data, training, self.manager)
            except UserError as error:  # perhaps nobody has asked for it
                raise UserError(f"{error} Or validate never: trainer.validate_every=0.") from error
        trace = self.folder.trace if config.trainer.profile and self._is_rank_0 else None
        return TrainingMonitor(config, training, self.screen, validation, trace)

    def show_summary(self, notes: Sequence[str]) -> None:
        """Show what is going to be trained and on what data; write the config and the versions."""
        if self._is_rank_0 and not (self._finished and self.folder.config.exists()):
            text = f"# {self.folder.rerun_command}\n{resolved_yaml(self.config)}"
            write_run_file(self.folder.config, text)
            write_run_file(self.folder.code, provenance_text())
        if not self._finished:
            for line in summary_lines(self.config, self.data, self.training, self.manager):
                self.screen.show(line)
            self.screen.show(f"{'page':<11}{self.folder.page}")
            for note in [*notes, *start_notes(self.config)]:
                self.screen.show(f"{'note':<11}{note}")

    def open_page(self, tracker: Tracker) -> "LivePage | None":
        """Open the page of the run, and let it show what is logged; on rank 0 alone."""
        if not self._is_rank_0:
            return None
        from credit_dp.training.live_page import LivePage

        page = LivePage(self.folder, self.config, self.training.trainer.state.step)
        tracker.sinks.append(page.sink)
        return page

    def callbacks(self) -> Callbacks:
        """Return the user's callbacks, new ones for this run."""
        run = CallbackRun(self.config, self.folder.path, self.manager, self.training.trainer.state)
        return Callbacks(build_callbacks(self.config.trainer.callbacks), run)

    def train(
        self,
        tracker: Tracker,
        monitor: TrainingMonitor,
        preemption: Preemption,
        callbacks: Callbacks,
        page: "LivePage | None",
    ) -> bool:
        """Train to the last step; False if a signal stopped the run before.

        All ranks go through this loop together: a batch, a step (`Trainer.train_step`), which also
        agrees on a stop signal, a validation if it is due, the log, a checkpoint if it is due, the
        user's callbacks. The last step may come earlier, see `_finished`.
        """
        trainer, steps = self.training.trainer, self.config.trainer.steps
        state = trainer.state
        if self._finished:
            self.training.loader.close()
            why = f"trainer.steps is {steps}"
            if not self._trained_all_steps:
                why = self._patience_message()
            self.screen.show(
                f"nothing to train: the checkpoint is of step {state.step} and {why}; evaluating "
                "only"
            )
            return True
        folder, yaml, stop = self.folder.checkpoints, resolved_yaml(self.config), 0
        with (
            self.training.loader,
            self.screen.bar("training", steps, state.step, monitor.work) as bar,
            CheckpointSaver(folder, self.config.trainer, state.step) as checkpoints,
            monitor.profiling(),
        ):
            trainer.start(checkpoints.newest_checkpoint)
            callbacks.on_start()
            batches = monitor.batches()
            while not self._finished and not stop:
                batch = trainer.throughput.next_batch(batches)
                record = trainer.train_step(batch, preemption.pending_signal)
                stop = record.stop_signal  # the same on all ranks
                # There may be little time left: then without a validation.
                metrics = monitor.on_step_end(record, validate=not stop)
                if metrics:
                    tracker.log(record.step, metrics)
                if page is not None and monitor.map is not None:
                    page.show_map(record.step, monitor.map)
                bar(record.step, monitor.note)
                if stop or self._finished or trainer.should_save(record.step):
                    checkpoints.save(state, yaml, monitor.validation_error)
                callbacks.on_step(metrics, monitor.scores)
                monitor.end_step()
        if trainer.graph is not None:
            # Its memory is for forecasts then, and nccl's communicators must not end before it.
            trainer.graph.release()
        # Writing the last checkpoint takes time: a signal may have come meanwhile.
        stop = stop or preemption.agree_on_signal()
        if stop:
            keys = self.folder.resume_keys(self.config.run)
            message = preemption.stop_message(stop, state.step, folder, keys)
            self.screen.show(message)
            logging.getLogger(__name__).info(message)  # the terminal may be gone
            return False
        if not self._trained_all_steps:
            self.screen.show(f"{self._patience_message()}; stopped after step {state.step}")
        monitor.show_missing_trace()
        bubble = trainer.forward_backward.bubble_message()
        if bubble:
            self.screen.show(bubble)
        return True

    def score(self, dates: HeldOutData) -> tuple[HeldOutScores, LastLeadDiagnostics]:
        """Return the scores on the held-out dates, and what plots show of them; collective."""
        training, manager = self.training, self.manager
        times = dates.initial_times[manager.dp_rank :: manager.dp_world_size]
        count = len(dates.members) * len(times)
        batch_size = self.config.data.batch_size
        with training.trainer.state.eval_mode(), self.screen.bar("evaluating", count) as bar:
            last_lead = LastLeadAccumulator(dates, manager)
            rollout, members = training.ensemble.rollout, self.config.trainer.scored_members
            scores = evaluate(rollout, dates, manager, batch_size, bar, last_lead, members)
            scores.check()
            return scores, last_lead.result()

    def report_results(
        self,
        scores: HeldOutScores,
        last: LastLeadDiagnostics,
        dates: HeldOutData,
        page: "LivePage | None",
    ) -> None:
        """Write and show the scores, draw the plots, and show where everything is; collective."""
        # Before the plots: the scores stay if a plot fails.
        if self._is_rank_0:
            write_run_file(self.folder.score_table, scores.to_csv())
            # The last: a run that has it is finished.
            write_run_file(self.folder.scores, scores.to_json(self.training.trainer.state.step))
        for table in scores.tables(self.screen.width):
            self.screen.show(table)
        for line in scores.warnings():
            self.screen.show(f"{'warning':<13}{line}")
        with self.training.trainer.state.eval_mode():
            field = example_map(self.training.ensemble.rollout, dates, self.manager)
        if self._is_rank_0:
            draw_or_warn("plots", self.draw, scores, last, field)
        if page is not None:
            page.report(scores)
        for line in self.folder.last_lines():
            self.screen.show(line)

    def draw(self, scores: HeldOutScores, last: LastLeadDiagnostics, field: FieldMap) -> None:
        """Draw the plots of a run; matplotlib is imported here, so on rank 0 alone."""
        from credit_dp.evaluation.map_plots import draw_last_lead_errors, draw_map
        from credit_dp.evaluation.metrics import has_spectra
        from credit_dp.evaluation.score_plots import draw_rmse, draw_spectra
        from credit_dp.training.live_page import persistence_loss
        from credit_dp.training.loss_curve import draw_loss

        plots: dict[Path, Callable[[Path], None]] = {
            self.folder.map_plot: partial(draw_map, field),
            self.folder.loss_plot: partial(
                draw_loss, self.folder.log, persistence=persistence_loss(self.config)
            ),
            self.folder.rmse_plot: partial(draw_rmse, scores, last.spectra_channels),
            self.folder.errors_plot: partial(draw_last_lead_errors, scores, last, field),
        }
        if has_spectra(field.grid.cells):
            plots[self.folder.spectra_plot] = partial(draw_spectra, scores, last)
        for path, draw in plots.items():
            draw_or_warn(path.name, draw, path)
