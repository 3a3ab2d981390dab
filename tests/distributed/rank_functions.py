"""Functions that ranks run in the launch tests; the launcher imports them by name."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
from torch import distributed

from credit_dp.config import Config
from credit_dp.distributed.collectives import gather_on_rank_0, run_on_rank_0
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.mesh import build_manager
from credit_dp.distributed.process_groups import join_background_group, new_background_group
from credit_dp.distributed.signals import EXIT_PREEMPTED
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from credit_dp.training.run import Preemption


def meet(config: Config, ranks: RankInfo) -> int:
    """All ranks add up their numbers; each leaves what it saw in the run folder."""
    total = torch.tensor([ranks.rank + 1.0])
    if ranks.world_size > 1:
        distributed.all_reduce(total)
    seen = [
        int(total),
        ranks.world_size,
        torch.get_num_threads(),
        config.parallel.data,
        distributed.is_initialized(),
    ]
    Path(config.run.dir, f"rank{ranks.rank}").write_text(" ".join(map(str, seen)))
    return 0


def refuse(config: Config, ranks: RankInfo) -> int:
    """The last rank finds a mistake of the user's, the others wait for it."""
    if ranks.rank == ranks.world_size - 1:
        raise UserError("data.store: needs a store,\n got none")
    return wait_for_others(config, ranks)


def refuse_everywhere(config: Config, ranks: RankInfo) -> int:
    """Every rank finds the same mistake."""
    raise UserError("data.store: needs a store, got none")


def crash(config: Config, ranks: RankInfo) -> int:
    """The last rank fails, the others wait for it."""
    if ranks.rank == ranks.world_size - 1:
        raise RuntimeError("a mistake of ours")
    return wait_for_others(config, ranks)


def wait_for_others(config: Config, ranks: RankInfo) -> int:
    """Wait in a collective that one rank never reaches; it may raise, which must not be shown."""
    distributed.all_reduce(torch.zeros(1))
    return 0


LOCKS = []


def fail_check(config: Config, ranks: RankInfo) -> int:
    """Return an exit code, which is no crash; a lock that is still held is no leak."""
    LOCKS.append(multiprocessing.Lock())
    return 1


def hang(config: Config, ranks: RankInfo) -> int:
    """Write the process id, then never end."""
    Path(config.run.dir, f"pid{ranks.rank}").write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def train(config: Config, ranks: RankInfo) -> int:
    """Take steps together until a signal asks to stop; each rank leaves how many it took."""
    folder = Path(os.environ.get("SEEN", config.run.dir))
    with Preemption(build_manager(config.parallel, ranks)) as preemption:
        (folder / f"pid{ranks.rank}").write_text(str(os.getpid()))
        step = 1
        while not (number := preemption.agree_on_signal()):
            step += 1
            time.sleep(0.01 * ranks.rank)
    message = preemption.stop_message(number, step, Path("here"), "resume=auto")
    (folder / f"steps{ranks.rank}").write_text(message)
    return EXIT_PREEMPTED


def train_and_show(config: Config, ranks: RankInfo) -> int:
    """Train as above, then print to the terminal, which may be gone."""
    code = train(config, ranks)
    print("stopped", flush=True)
    return code


def train_for_ever(config: Config, ranks: RankInfo) -> int:
    """Take one step that never ends."""
    with Preemption(build_manager(config.parallel, ranks)):
        return hang(config, ranks)


def share_folder(config: Config, ranks: RankInfo) -> int:
    """Write the run folder that this rank got beside the test's files."""
    Path(os.environ["SEEN"], f"rank{ranks.rank}").write_text(config.run.dir)
    return 0


def wait_for_rank_0(config: Config, ranks: RankInfo) -> int:
    """Rank 0 writes a file and never joins; the others wait for it in C++."""
    if ranks.rank == 0:
        Path(os.environ["SEEN"]).touch()
        time.sleep(600)
    return wait_for_others(config, ranks)


def connect(config: Config, ranks: RankInfo) -> int:
    """Make all groups of a run, use each, and write how many files this rank has open then."""
    manager = build_manager(config.parallel, ranks)
    talk(manager)
    domains = torch.arange(ranks.world_size).view(-1, config.parallel.domain).tolist()
    gather_on_rank_0(lambda: ranks.rank, join_background_group())
    group = new_background_group(domains)
    found: list[int | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, ranks.rank, group=group)
    count = len(list(Path("/proc/self/fd").iterdir()))
    Path(config.run.dir, f"files{ranks.rank}").write_text(str(count))
    distributed.barrier()
    return 0


def count_connections(config: Config, ranks: RankInfo) -> int:
    """Communicate, gather as a checkpoint does, and write what is open then.

    That is of this process, and of the one that serves the store.
    """
    manager = build_manager(config.parallel, ranks)  # its connections are open until the end
    talk(manager)
    group = join_background_group()
    gather_on_rank_0(lambda: ranks.rank, group)
    run_on_rank_0(lambda: None, group)
    distributed.barrier()
    files = len(list(Path("/proc/self/fd").iterdir()))
    counts = {"files": files, "served": connections(int(os.environ["MASTER_PORT"]))}
    Path(config.run.dir, f"counted{ranks.rank}").write_text(json.dumps(counts))
    distributed.barrier()
    return 0


def connections(port: int) -> int:
    """How many connections the process that listens at a port of this machine has."""
    listed = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()
    ]
    return sum(words[1].endswith(f":{port:04X}") and words[3] == "01" for words in listed)


def step_until_one_fails(config: Config, ranks: RankInfo) -> int:
    """Communicate over all three axes for ever; in its third round rank VICTIM fails by WAY."""
    manager = build_manager(config.parallel, ranks)
    for turn in range(1_000_000):
        if turn == 3 and ranks.rank == int(os.environ["VICTIM"]):
            Path(os.environ["SEEN"]).write_text(str(time.time()))
            if os.environ["WAY"] == "raise":
                raise RuntimeError("a mistake of ours")
            os.kill(os.getpid(), signal.SIGKILL)
        talk(manager)
    return 0


def communicate(config: Config, ranks: RankInfo) -> int:
    """Communicate for ever; after some rounds write the process id into the folder SEEN."""
    manager = build_manager(config.parallel, ranks)
    for turn in range(1_000_000):
        if turn == 3:
            folder = Path(os.environ["SEEN"])
            folder.joinpath(f"new{ranks.rank}").write_text(str(os.getpid()))
            folder.joinpath(f"new{ranks.rank}").rename(folder / f"pid{ranks.rank}")
        talk(manager)
    return 0


def wait_in_ring(config: Config, ranks: RankInfo) -> int:
    """Wait for a message of the next rank, which never comes: one rank waits for a killed one."""
    distributed.barrier()
    folder = Path(os.environ["SEEN"])
    folder.joinpath(f"new{ranks.rank}").write_text(str(os.getpid()))
    folder.joinpath(f"new{ranks.rank}").rename(folder / f"pid{ranks.rank}")
    distributed.recv(torch.zeros(1), src=(ranks.rank + 1) % ranks.world_size)
    return 0


def talk(manager: DomainParallelManager) -> None:
    """Reduce over the domain and over data, and send down and up the pipeline."""
    value = torch.ones(1)
    distributed.all_reduce(value, group=manager.domain_group)
    distributed.all_reduce(value, group=manager.data_parallel_group)
    stage, group = manager.pipeline_rank, manager.pipeline_group
    if manager.pipeline_parallel_size == 1:
        return
    for sender, receiver in ((0, 1), (1, 0)):
        if stage == sender:
            distributed.send(value, group=group, group_dst=receiver)
        else:
            distributed.recv(value, group=group, group_src=sender)
