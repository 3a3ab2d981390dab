"""The checkpoints that a run leaves on its way, written while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self, final

import torch.distributed as dist
from torch import Tensor

from credit_dp.training.agreement import grouped, together
from credit_dp.training.checkpoint import newest
from credit_dp.training.checkpoint_files import step_folder
from credit_dp.training.checkpoint_writing import Snapshot, constants_of, write
from credit_dp.training.checkpoints_kept import Kept
from credit_dp.training.shards import alone_or_not
from credit_dp.training.state import TrainingState
from credit_dp.training_config import TrainerConfig

# Disks are slower on some ranks than on others, and a rank may start to write long after another.
LONGEST = timedelta(days=1)
LAST_WAIT = 10.0  # seconds for what is being written when the user wants the run to end at once


@final
class Checkpoints:
    """Saves a run's states into a folder; of those before only some stay.

    With `trainer.checkpoint_async` a save copies what this rank has into the host's memory, and a
    thread writes it while training goes on, one checkpoint at a time. The threads of all ranks meet
    in a process group of their own: none of their messages can mix with those of training.

    Collective: all ranks of the run make one, enter it, save and leave it at the same steps.

    Args:
        folder: of the run's checkpoints.
        config: whether to wait for the disk, and what stays.
        step: after which training starts; that state need not be saved.
    """

    def __init__(self, folder: Path, config: TrainerConfig, step: int | None = None) -> None:
        self.folder = folder
        self._behind = config.checkpoint_async
        self._kept = Kept(config.keep_checkpoints, config.keep_best)
        self._step = step
        self._constants: dict[str, Tensor] | None = None
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[None] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        import torch.distributed.checkpoint  # noqa: F401 - not first by a thread beside training

        self._open.enter_context(alone_or_not())
        if self._behind and grouped():
            self._group = dist.new_group(timeout=LONGEST, backend="gloo")
        return self

    def save(self, state: TrainingState, config: str, error: float | None = None) -> None:
        """Save what the state is now, unless it was saved after this step already.

        Args:
            state: of this rank.
            config: the resolved one, as YAML.
            error: found on the validation dates at this step, if any was.

        Raises:
            UserError: on all ranks, if this checkpoint or the one before could not be written.
        """
        self.wait()
        if state.step == self._step:
            return
        if self._constants is None:  # they need no copy, and no second reading
            self._constants = constants_of(state)
        snapshot, constants = self._snapshot(state, config, error), self._constants
        path, kept, group = step_folder(self.folder, state.step), self._kept, self._group
        self._step = state.step
        if self._behind:
            self._writing = in_thread(lambda: write(path, snapshot, constants, kept, group))
        else:
            write(path, snapshot, constants, kept)

    def wait(self) -> None:
        """Wait until all that was saved is on disk.

        Raises:
            UserError: on all ranks, if it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def newest(self) -> Path | None:
        """The newest on disk, once what is being written is there; for one rank to ask."""
        if self._writing is not None:
            wait_for([self._writing])  # whether it could be written is asked elsewhere
        return newest(self.folder)

    def _snapshot(self, state: TrainingState, config: str, error: float | None) -> Snapshot:
        snapshot = together(lambda: Snapshot.of(state, config, error))
        return snapshot.copied() if self._behind else snapshot

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            if error is None:
                self.wait()
                if self._group is not None:
                    dist.destroy_process_group(self._group)
            elif self._writing is not None:
                # What ended the run is told; that this failed as well would not be of use.
                wait_for([self._writing], None if isinstance(error, Exception) else LAST_WAIT)


def in_thread(act: Callable[[], None]) -> Future[None]:
    """Do something in a thread that does not keep the program from ending."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return outcome
