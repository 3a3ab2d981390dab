"""One training run, from the config to the files that it leaves: what every rank executes."""

from pathlib import Path

from credit_dp.config import Config, as_dict
from credit_dp.data.prepare import prepare
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.evaluation.evaluate import evaluate, example
from credit_dp.evaluation.held_out import HeldOut
from credit_dp.evaluation.plots import draw_map
from credit_dp.evaluation.table import Scores
from credit_dp.launch import Ranks
from credit_dp.mesh import build_manager, device_of
from credit_dp.training.build import Training, build_training
from credit_dp.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from credit_dp.training.run_folder import RunFolder, resolved_yaml, write_whole
from credit_dp.training.screen import Screen, screen_for
from credit_dp.training.tracking import Tracker, open_tracker


def run(config: Config, ranks: Ranks) -> int:
    """Train, evaluate on held-out dates, and say where everything is.

    Every rank calls this; only rank 0 shows anything, and only checkpoints are written by others.

    Returns:
        The exit code.

    Raises:
        UserError: the config cannot be run as it is.
    """
    screen, folder = screen_for(ranks.rank), RunFolder(Path(config.run.dir))
    manager = build_manager(config.parallel, ranks)
    with screen.report() as report:
        prepared = prepare(config.data, report)
    training = build_training(config, prepared, manager, device_of(config, ranks))
    dates = HeldOut(config, prepared, training.rows, training.like)
    step = resume(config, folder, training, screen)
    if ranks.rank == 0 and (step < config.trainer.steps or not folder.config.exists()):
        write_whole(folder.config, resolved_yaml(config))
    with open_tracker(config.logger, folder.log, step, as_dict(config), ranks.rank) as tracker:
        train(config, folder, training, screen, tracker)
        scores = score(config, training, dates, screen, manager)
        tracker.summarise(scores.numbers())
    # Before the map: should that fail, the scores are there.
    if ranks.rank == 0:
        write_whole(folder.scores, scores.json(training.trainer.state.step))
    for table in scores.tables(screen.width):
        screen.say(table)
    field = example(training.forecast.rollout, dates, manager)
    if ranks.rank == 0:
        draw_map(field, folder.map)
    show_files(folder, screen)
    return 0


def resume(config: Config, folder: RunFolder, training: Training, screen: Screen) -> int:
    """Go on from a checkpoint if the config says so; the step that training starts after.

    Raises:
        UserError: the checkpoint does not fit, or not all ranks see it.
    """
    path = find_checkpoint(config.resume, folder.checkpoint)
    state = training.trainer.state
    if path is not None:
        load_checkpoint(path, state)
        screen.say(f"resumed after step {state.step} from {path}")
    return state.step


def train(
    config: Config, folder: RunFolder, training: Training, screen: Screen, tracker: Tracker
) -> None:
    """Train to the last step, with log, progress bar and checkpoints."""
    trainer, total = training.trainer, config.trainer.steps
    note = ""
    if trainer.state.step >= total:
        training.loader.close()
        screen.say(
            f"nothing to train: the checkpoint is of step {trainer.state.step} and trainer.steps "
            f"is {total}; evaluating only"
        )
        return
    with training.loader, screen.bar("training", total, trainer.state.step) as bar:
        for record in trainer.steps(training.loader):
            if record.loss is not None:
                tracker.log(record.step, record.numbers())
                note = f"loss {record.loss:.4f}"
            bar(record.step, note)
            if trainer.saves(record.step):
                save_checkpoint(folder.checkpoint, trainer.state, resolved_yaml(config))
    waited = trainer.gradients.waited()
    if waited:
        screen.say(waited)


def score(
    config: Config,
    training: Training,
    dates: HeldOut,
    screen: Screen,
    manager: DomainParallelManager,
) -> Scores:
    """Errors on the held-out dates, with a bar."""
    training.trainer.state.train(False)
    own = len(dates.initial_times[manager.dp_rank :: manager.dp_world_size])
    with screen.bar("evaluating", own) as bar:
        return evaluate(training.forecast.rollout, dates, manager, config.data.batch_size, bar)


def show_files(folder: RunFolder, screen: Screen) -> None:
    """Say where the run's files are."""
    for label, path in (
        ("checkpoint", folder.checkpoint),
        ("metrics", folder.scores),
        ("training log", folder.log),
        ("config", folder.config),
        ("map", folder.map),
    ):
        if path.exists():  # a run that only evaluates another's checkpoint has none of its own
            screen.say(f"{label:<13}{path}")
