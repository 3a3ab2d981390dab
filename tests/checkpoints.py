"""Writes checkpoints for tests, with the functions that training uses."""

from pathlib import Path

from credit_dp.config import TrainerConfig
from credit_dp.training.checkpoint import CheckpointSaver
from credit_dp.training.checkpoint_files import step_folder
from credit_dp.training.state import TrainingState


def save_checkpoint(folder: Path, state: TrainingState, config: str) -> Path:
    """Write a checkpoint into `folder`, with the config (YAML), and return its own folder."""
    with CheckpointSaver(folder, TrainerConfig(checkpoint_async=False)) as saver:
        saver.save(state, config)
    return step_folder(folder, state.step)
