"""`hydra/launcher=local`: a sweep's jobs on this machine, as many at once as there is room for."""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from credit_dp.command.job_process import JobProcess, job_environment, train_command
from credit_dp.command.sweep_jobs import Job, note_job
from credit_dp.command.tell import tell
from credit_dp.errors import UserError
from credit_dp.launch.layout import visible_gpus
from credit_dp.launch.placement import Nodes, Placement, Wish, place
from credit_dp.launch.signals import ASKING, PREEMPTED, heeding, held

LOOK = 0.1  # seconds between two looks at what runs
GRACE = 15.0  # seconds in which jobs end after Ctrl-C


@final
@dataclass
class Room:
    """The cores and GPUs of this machine that no job has."""

    cores: int
    gpus: list[str] = field(default_factory=list)

    def holds(self, placement: Placement) -> bool:
        """Whether a job can start."""
        cores = placement.ranks * placement.cpus_per_task
        return cores <= self.cores and placement.gpus_per_node <= len(self.gpus)

    def take(self, placement: Placement) -> list[str]:
        """Give a job its cores, and its GPUs, by number."""
        self.cores -= placement.ranks * placement.cpus_per_task
        taken = self.gpus[: placement.gpus_per_node]
        self.gpus = self.gpus[placement.gpus_per_node :]
        return taken

    def give_back(self, placement: Placement, gpus: Sequence[str]) -> None:
        """Take back what a job had."""
        self.cores += placement.ranks * placement.cpus_per_task
        self.gpus += gpus


@final
@dataclass(frozen=True)
class Running:
    """A job that runs, and what it has of the machine."""

    job: Job
    process: JobProcess
    placement: Placement
    gpus: list[str]


def run_locally(jobs: Sequence[Job], dashes: Sequence[str], cores: int) -> int:
    """Run all jobs; the exit code of the first one in their order that failed, or 0.

    Raises:
        UserError: a job needs more than this machine has, or its folder cannot be written to;
            nothing has started.
        KeyboardInterrupt: all jobs are gone by then.
    """
    room = room_here(jobs, cores)
    has = Nodes(1, room.cores, len(room.gpus))
    waiting = [(job, place(job.config, has, Wish(nodes=1))) for job in jobs]
    for job in jobs:
        note_job(job)
    return Sweep(room, dashes).run(waiting)


def room_here(jobs: Sequence[Job], cores: int) -> Room:
    """What this machine has for a sweep; it is not asked for GPUs that no job would use."""
    if not isinstance(cores, int) or cores < 0:
        raise UserError(f"hydra.launcher.cores: needs a whole number, 0 for all, got {cores!r}")
    asks = any(job.config.device != "cpu" for job in jobs)
    count = visible_gpus() if asks else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = named or [str(number) for number in range(count)]
    return Room(cores or len(os.sched_getaffinity(0)), gpus[:count])


@final
class Sweep:
    """Jobs that run at once, and those that wait for room."""

    def __init__(self, room: Room, dashes: Sequence[str]) -> None:
        self.room = room
        self.dashes = dashes
        self.running: list[Running] = []
        self.codes: dict[int, int] = {}
        self.asked = False

    def run(self, waiting: list[tuple[Job, Placement]]) -> int:
        """Start jobs as room comes free, until none is left; see `run_locally`."""
        with heeding(self.ask), self.ending_all():
            while self.running or (waiting and not self.asked):
                for entry in [] if self.asked else list(waiting):
                    if self.room.holds(entry[1]):
                        waiting.remove(entry)
                        self.start(*entry)
                time.sleep(LOOK)
                self.collect()
        failed = [code for _, code in sorted(self.codes.items()) if code not in (0, PREEMPTED)]
        stopped = PREEMPTED in self.codes.values() or self.asked
        tell(f"{len(self.codes)} jobs ended, {len(failed)} of them failed")
        return failed[0] if failed else PREEMPTED if stopped else 0

    def start(self, job: Job, placement: Placement) -> None:
        """Start one job in its share of the machine."""
        gpus = self.room.take(placement)
        command = [*train_command(job.folder, job.overrides), *self.dashes]
        environment = share_of_machine(os.environ, placement, gpus)
        with held((*ASKING, signal.SIGINT)):  # none is started that would be forgotten
            if self.asked:
                return
            process = JobProcess(job.folder, job.overrides, command, environment)
            self.running.append(Running(job, process, placement, gpus))
        ranks = f"{placement.ranks} rank{'s' if placement.ranks > 1 else ''}"
        tell(f"#{job.number} started with {ranks}: {' '.join(job.overrides)}")

    def collect(self) -> None:
        """Note which jobs have ended, and take back what they had."""
        for entry in list(self.running):
            code = entry.process.poll()
            if code is None:
                continue
            self.running.remove(entry)
            self.room.give_back(entry.placement, entry.gpus)
            self.codes[entry.job.number] = code
            why = f" ({entry.process.cause()})" if code not in (0, PREEMPTED) else ""
            tell(f"#{entry.job.number} ended with exit code {code}{why}")

    def ask(self, number: int) -> None:
        """Hand a signal on to all jobs, and start no more."""
        self.asked = True
        for entry in self.running:
            entry.process.send(number)

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """Leave no job behind, however this ends."""
        try:
            yield
        except BaseException:
            self.ask(signal.SIGINT)
            deadline = time.monotonic() + GRACE
            while self.running and time.monotonic() < deadline:
                time.sleep(LOOK)
                self.collect()
            raise
        finally:
            for entry in self.running:
                entry.process.kill()
                entry.process.wait()


def share_of_machine(
    environment: Mapping[str, str], placement: Placement, gpus: Sequence[str]
) -> dict[str, str]:
    """What a job is to take for the whole machine."""
    own = {"OMP_NUM_THREADS": str(placement.cpus_per_task)}
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**job_environment(environment), **own}
