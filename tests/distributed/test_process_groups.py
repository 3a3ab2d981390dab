"""Process groups: their members, options and traces, and the connections of many ranks."""

import os
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zarr
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from credit_dp.config import ParallelConfig
from credit_dp.distributed import process_groups
from credit_dp.distributed.collectives import (
    Outcome,
    gather_on_rank_0,
    result_or_raise,
    run_on_rank_0,
)
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.process_groups import (
    GROUP_TIMEOUT,
    OWN_FILES,
    files_needed,
    join_background_group,
    new_background_group,
    new_group_alone,
    new_group_of,
    new_mesh,
    raise_file_limit,
    trace_collectives,
)
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.transport import all_gather_single, timeout_of
from credit_dp.errors import UserError
from credit_dp.training.forward_backward import new_stage_group
from tests.distributed.processes import begin, finish
from tests.ranks import on_processes
from tests.tier_cases import tiers

WORLD = 1024


def test_a_rank_makes_its_own_groups_only(monkeypatch):
    """With all others' groups, 1,024 ranks in domains of 8 make 1,160."""
    made = []
    make = distributed.new_group

    def recorded(ranks, *args, **kwargs):
        made.append(ranks)
        return make(ranks, *args, **kwargs)

    distributed.init_process_group("fake", store=FakeStore(), rank=17, world_size=WORLD)
    try:
        monkeypatch.setattr(distributed, "new_group", recorded)
        manager = DomainParallelManager(WORLD, 8)
        assert made == [[17], [*range(1, WORLD, 8)], [*range(16, 24)]]
        assert new_stage_group(manager) is distributed.group.WORLD
        found = manager.mesh["domain"].get_group(), manager.mesh["data"].get_group()
        assert found == (manager.domain_group, manager.data_parallel_group)
    finally:
        distributed.destroy_process_group()


def groups_work(manager: DomainParallelManager) -> list[list[int]]:
    """Return the members that this rank meets in groups of each kind."""
    pairs = [[0, 1], [2, 3]]
    mesh = new_mesh(torch.arange(4).view(2, 2).T, ("columns", "rows"))
    groups = [
        new_group_of(pairs),
        new_background_group(pairs),
        new_background_group([range(4)]),
        mesh.get_group("columns"),
        mesh["rows"].get_group(),
    ]
    met = []
    for group in groups:
        members: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(members, manager.rank, group=group)
        met.append(members)
    for group in groups:
        distributed.destroy_process_group(group)
    assert process_groups.LAZY_GLOO not in os.environ
    return met


@pytest.mark.slow
def test_members_of_a_group_meet():
    found = on_processes(4, groups_work)
    for rank, met in enumerate(found):
        pair, other = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert met == [pair, pair, [0, 1, 2, 3], pair, other]


def alone_works(manager: DomainParallelManager) -> None:
    """Use a group of this rank alone, which opens nothing, for every collective of layers."""
    distributed.barrier()
    before = open_descriptors()
    group = new_group_of([[rank] for rank in range(distributed.get_world_size())])
    assert open_descriptors() <= before
    assert timeout_of(group) == GROUP_TIMEOUT.total_seconds()
    values = torch.arange(4.0) + manager.rank
    found = [values.clone() for _ in range(4)]
    distributed.all_reduce(found[0], group=group)
    distributed.broadcast(found[1], src=manager.rank, group=group)
    distributed.all_to_all_single(found[2].zero_(), values, group=group)
    all_gather_single(found[3].zero_(), values, group=group)
    assert all(torch.equal(each, values) for each in found)
    objects = [None]
    distributed.all_gather_object(objects, "one", group=group)
    assert objects == ["one"]
    distributed.barrier(group=group)
    mesh = DeviceMesh.from_group([group], "cpu", [manager.rank], mesh_dim_names=("own",))
    sharded = distribute_tensor(values, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), values)
    distributed.destroy_process_group(group)
    distributed.all_reduce(values)  # in the group whose thread it had
    assert values[0] == sum(range(distributed.get_world_size()))


def test_a_group_of_one_rank_opens_nothing() -> None:
    on_processes(3, alone_works)


def alone_in_another_torch(manager: DomainParallelManager) -> float:
    """Return a sum over a group of one rank in a version of torch that does not share devices."""
    world: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace())
    group = new_group_alone(world)
    value = torch.ones(1) + manager.rank
    distributed.all_reduce(value, group=group)
    assert timeout_of(group) == GROUP_TIMEOUT.total_seconds()
    distributed.destroy_process_group(group)
    return value.item()


def test_a_torch_that_does_not_share_its_devices_makes_new_ones() -> None:
    assert on_processes(3, alone_in_another_torch) == [1, 2, 3]


def gathered(manager: DomainParallelManager, late: bool) -> tuple[list[Any], list[int]]:
    """Return what a background group gathers on rank 0, and the sockets that a rank opens for it.

    Args:
        late: whether the group is one that connects late, as beside nccl.
    """
    ranks = distributed.get_world_size()
    distributed.barrier()  # of the group of all ranks, whose connections are then old
    before = open_sockets()
    group = new_background_group([range(ranks)]) if late else join_background_group()
    own_socket = len(open_sockets() - before)  # it listens
    distributed.barrier()  # so that no rank connects for the gather before
    outcomes = gather_on_rank_0(
        lambda: f"of rank {manager.rank}" * (1 + manager.rank * 1000), group
    )
    distributed.barrier()
    after_gathering = open_sockets()
    assert run_on_rank_0(lambda: 7, group) == 7
    distributed.barrier()
    opened = [len(after_gathering - before), len(open_sockets() - before)]
    return [result_or_raise(each) for each in outcomes], [each - own_socket for each in opened]


def open_sockets() -> set[str]:
    """Return each open socket."""
    return {link for link in open_descriptors() if link.startswith("socket:")}


def open_descriptors() -> set[str]:
    """Return what each is of: other groups' may close at any time, so counts say too little."""
    links = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which the folder is read
            links.add(str(entry.readlink()))
    return links


@pytest.mark.parametrize(
    ("ranks", "late"),
    tiers(
        [(3, True), (3, False)],
        [(7, True)],
        [(7, False), (2, True), (2, False), (4, True), (4, False)],
    ),
)
def test_rank_0_gathers_over_few_connections(ranks: int, late: bool) -> None:
    found = on_processes(ranks, gathered, late)
    expected = [f"of rank {rank}" * (1 + rank * 1000) for rank in range(ranks)]
    assert [values for values, _ in found] == [expected, *[[]] * (ranks - 1)]
    # Ranks 1, 2 and 4 send to rank 0, of 1,024 ranks 10; what it broadcasts goes the same ways.
    opened = (ranks - 1).bit_length() if late else 0
    assert found[0][1] == [opened] * 2


def refused_on_rank_1(manager: DomainParallelManager) -> None:
    """Refuse on one rank what all do in the background; then on all what rank 0 does."""
    group = join_background_group()

    def refuse() -> int:
        if manager.rank == 1:
            raise UserError("run.dir: no space")
        return manager.rank

    def complain() -> None:
        raise UserError("run.dir: gone")

    outcomes = gather_on_rank_0(refuse, group)
    expected = [Outcome(0), Outcome(None, "run.dir: no space"), Outcome(2)]
    assert outcomes == (expected if manager.rank == 0 else [])
    with pytest.raises(UserError, match="gone"):
        run_on_rank_0(complain, group)


def test_a_refusal_in_the_background_reaches_rank_0() -> None:
    on_processes(3, refused_on_rank_1)


def both_threads_communicate(manager: DomainParallelManager) -> None:
    """Sum in the group of training while a thread gathers, in another order on each rank."""
    group, ranks = join_background_group(), distributed.get_world_size()
    rounds, values = 20, torch.empty(1000)

    def gather() -> list[int]:
        found = []
        for turn in range(rounds):
            time.sleep(0.001 * ((turn + manager.rank) % 3))
            outcomes = gather_on_rank_0(lambda turn=turn: turn + manager.rank, group)
            total = sum(map(result_or_raise, outcomes))
            found.append(run_on_rank_0(lambda total=total: total, group))
        return found

    with ThreadPoolExecutor(1) as executor:
        sums = executor.submit(gather)
        before, after = (manager.rank - 1) % ranks, (manager.rank + 1) % ranks
        for turn in range(4 * rounds):
            distributed.all_reduce(values.fill_(turn + manager.rank))
            assert torch.all(values == ranks * turn + sum(range(ranks)))
            received = torch.empty(1000)
            work = distributed.irecv(received, before)
            distributed.send(values.fill_(turn + manager.rank), after)
            work.wait()
            assert torch.all(received == turn + before)
    assert sums.result() == [ranks * turn + sum(range(ranks)) for turn in range(rounds)]


def test_threads_beside_training_share_its_group() -> None:
    on_processes(3, both_threads_communicate)


def groups_of_others_exist(manager: DomainParallelManager, folder: Path) -> bool:
    """Whether rank 0, which is slow, has made its groups once this rank has its mesh."""
    made = folder / "made"
    make = process_groups.new_group_of

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        group = make(*args, **kwargs)
        made.touch()
        return group

    if manager.rank == 0:
        process_groups.new_group_of = slow
    try:
        new_mesh(torch.arange(2).view(2, 1), ("all", "own"))
    finally:
        process_groups.new_group_of = make
    return made.exists()


@pytest.mark.slow
def test_no_rank_goes_on_before_all_are_connected(tmp_path):
    assert on_processes(2, groups_of_others_exist, tmp_path) == [True, True]


class Options:
    """Options of nccl, which a torch for CPUs does not have."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=1)


@pytest.fixture
def splits(monkeypatch) -> list[tuple[Any, ...]]:
    """Pretend that rank 2 of 4 runs on a GPU, and return the splits that it makes."""
    made: list[tuple[Any, ...]] = []
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0))

    def split_group(parent, parts, timeout, options):
        assert parent is None
        made.append((parts, timeout, options._timeout, options.is_high_priority_stream))
        return SimpleNamespace(name=f"group {len(made)}")

    monkeypatch.setattr(distributed, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(distributed, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(distributed, "split_group", split_group)
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", nccl, raising=False)
    return made


def test_nccl_splits_its_communicator_with_all_ranks(splits):
    assert new_group_of([[0, 1], [2, 3]]).name == "group 1"
    new_group_of([[0, 1], [2, 3]], urgent=True)
    assert new_group_of([[0, 1, 2, 3]]) is distributed.group.WORLD
    new_group_of([[0, 1, 2, 3]], urgent=True)  # its stream is not that of gradients
    pairs, times = [[0, 1], [2, 3]], (GROUP_TIMEOUT, GROUP_TIMEOUT)
    assert splits == [
        (pairs, *times, False),
        (pairs, *times, True),
        ([[0, 1, 2, 3]], *times, True),
    ]


def test_nccl_writes_a_trace_unless_the_user_has_another(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    trace_collectives(tmp_path)
    assert os.environ == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl_trace_rank_",
    }


@pytest.mark.slow
def test_too_few_files_are_one_line_before_the_ranks_meet(tmp_path: Path) -> None:
    """Of three ranks each needs two connections; with one file more they start."""
    few, enough = OWN_FILES + 1, OWN_FILES + 2
    code, _, err = finish(begin("connect", tmp_path, 3, files=few))
    assert code == 2
    assert re.fullmatch(
        rf"error: ulimit -n: rank \d of 3 on \S+ needs {enough} open files and connections, but "
        rf"may have {few}\. Raise the hard limit \(ulimit -Hn\) on that node, or start fewer "
        r"ranks\.\n",
        err,
    ), err
    assert list(tmp_path.iterdir()) == []
    code, _, err = finish(begin("connect", tmp_path, 3, files=enough))
    assert (code, err) == (0, "")


def test_files_of_1024_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 128 nodes: two connections of each rank to the store, and others."""
    parallel, rank_0 = ParallelConfig(domain=8, data=128), RankInfo(0, 1024, 0, 8)
    own = process_groups.OWN_FILES + process_groups.STORE_FILES + 2
    assert files_needed(parallel, rank_0, gloo=False, launched=True) == 2 * 1024 + own
    # A group of all ranks, one of 8 and one of 128.
    gloo = 1023 + 7 + 4 + 127 + 4
    assert files_needed(parallel, rank_0, gloo=True, launched=True) == 2 * 1024 + own + gloo
    assert files_needed(parallel, rank_0, gloo=True, launched=False) == OWN_FILES + gloo
    # Groups of 64, 2 and 8, and one of the 512 that have the same stage.
    stages = replace(parallel, data=64, pipeline=2)
    gloo = 1023 + 63 + 1 + 7 + 511 + 4 * 4
    assert files_needed(stages, rank_0, gloo=True, launched=False) == OWN_FILES + gloo
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(resource, "setrlimit", lambda *given: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2048, 4096))
    with pytest.raises(UserError, match=r"^ulimit -n: torchrun on \S+ .* 1024 ranks .* have 2048"):
        raise_file_limit(rank_0)
    raise_file_limit(RankInfo(8, 1024, 0, 8, 1))  # of another agent
    assert files_needed(parallel, rank_0, gloo=False, launched=True) == OWN_FILES + 2


def test_the_limit_of_open_files_is_raised(monkeypatch):
    limits = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    raise_file_limit(RankInfo())
    assert limits == [(resource.RLIMIT_NOFILE, (4096, 4096))]
    assert os.environ == {}


def test_zarr_opens_one_file_at_a_time_where_files_are_few(monkeypatch):
    """Though it was imported before, as by a program that has set up the run."""
    monkeypatch.setattr(resource, "setrlimit", lambda *given: None)
    for files, before, after in ((64, None, 1), (64, 3, 3), (4096, None, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        with zarr.config.set({"threading.max_workers": before}):
            raise_file_limit(RankInfo())
            assert zarr.config.get("threading.max_workers") == after, (files, before)


@pytest.mark.exhaustive
def test_many_ranks_start_with_few_files(tmp_path: Path):
    """Each has a connection to each other rank: a second group of that kind would need 27 more."""
    code, _, err = finish(begin("connect", tmp_path, 24, OMP_NUM_THREADS="1", files=64))
    assert (code, err) == (0, "")
    assert len([int(path.read_text()) for path in tmp_path.iterdir()]) == 24


@pytest.mark.exhaustive
def test_torch_may_compare_the_messages_of_all_ranks(tmp_path: Path):
    """It counts those of a background thread, too, of which each rank has another number."""
    code, _, err = finish(begin("connect", tmp_path, 3, TORCH_DISTRIBUTED_DEBUG="DETAIL"))
    assert code == 0, err
