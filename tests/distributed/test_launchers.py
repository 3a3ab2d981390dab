"""Ranks that a launcher starts: read from the environment, joined, in one folder."""

import errno
import os
import re
import socket
import subprocess
import sys
import zlib
from itertools import product
from pathlib import Path

import pytest
from torch.distributed import FileStore

from credit_dp.cli.entry import launcher_rank
from credit_dp.distributed.launcher import (
    Launcher,
    RankInfo,
    expand_counts,
    find_launcher,
    first_host,
    likely_rank,
    rendezvous_host,
)
from credit_dp.distributed.worker import share_run_folder
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.errors import UserError
from tests.distributed.launch_program import small_config
from tests.ranks import TIMEOUT, on_processes
from tests.tier_cases import tiers

ROOT = Path(__file__).parents[2]
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def launcher_of(environment: dict[str, str]) -> Launcher:
    launcher = find_launcher(environment)
    assert launcher is not None
    return launcher


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launcher = launcher_of({**env, "MASTER_ADDR": "node1", "MASTER_PORT": "4000"})
    assert launcher == Launcher("torchrun", RankInfo(5, 8, 1, 4, node=1), "node1", 4000)


def test_srun_on_two_nodes() -> None:
    launcher = launcher_of(SRUN)
    assert (launcher.name, launcher.ranks) == ("srun", RankInfo(3, 4, 1, 2, node=1))
    assert launcher.address == "gpu003"
    assert launcher.port == launcher_of({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    assert launcher.port != launcher_of({**SRUN, "SLURM_JOB_ID": "8"}).port


def test_ports_of_jobs_are_not_those_of_outgoing_connections() -> None:
    for job, step in product((1, 1_499, 1_500, 2_499, 4_294_967_295), (0, 7, 8)):
        port = launcher_of({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        assert 20_000 <= port < 32_768, (job, step)


def test_srun_on_one_node_meets_on_loopback() -> None:
    one = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "laptop"}
    assert launcher_of({**SRUN, **one}).address == "127.0.0.1"


def test_an_empty_variable_counts_as_not_set() -> None:
    empty = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "FLUX_TASK_RANK", "SLURM_NODELIST"), "")
    assert launcher_of({**empty, **SRUN}) == launcher_of(SRUN)


# What the ranks of each site's launcher find in their environment, as far as it matters here: the
# last rank of two nodes with four ranks each. `NODES` stands for a file with the first host.
CRAY_PMI = {"PMI_RANK": "7", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "3", "PMI_LOCAL_SIZE": "4"}
CRAY_PALS = {"PALS_RANKID": "7", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "3", "PALS_APID": "a-b"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
PBS = {"PBS_JOBID": "12.server", "PBS_NODEFILE": "NODES", "PBS_ENVIRONMENT": "PBS_BATCH"}
PALS = {**PBS, **CRAY_PALS, "PALS_LOCAL_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "7",
    "PMIX_NAMESPACE": "prterun-a-12@1",
}
HYDRA = {"PMI_RANK": "7", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
FLUX = {
    "FLUX_JOB_ID": "f2",
    "FLUX_TASK_RANK": "7",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_LOCAL_ID": "3",
    "PMI_RANK": "7",
    "PMI_SIZE": "8",
}
# The daemons of an mpirun: one task on each node but the one where it was started.
DAEMON = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n2"}
IN_SLURM = {**DAEMON, "SLURM_JOB_NODELIST": "n[1-2]"}
OMPI_ONLY = {name: value for name, value in OPEN_MPI.items() if "OMPI" in name}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OMPI_ONLY.items()}
JSRUN = {
    name.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): value for name, value in OMPI_ONLY.items()
}
# With `srun --gpus-per-task=1` each task sees its GPU as number 0.
ONE_GPU = {"SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_GPUS": "3", "ROCR_VISIBLE_DEVICES": "0"}
SITES = {
    "Perlmutter": (
        {**STEP, **CRAY_PALS, **CRAY_PMI, "SLURM_STEP_NODELIST": "nid[001000-001001]"},
        ("srun", "nid001000"),
    ),
    "Frontier": (
        {**STEP, **ONE_GPU, "SLURM_STEP_NODELIST": "frontier[00013,00027]"},
        ("srun", "frontier00013"),
    ),
    "LUMI": (
        {**STEP, **ONE_GPU, **CRAY_PALS, **CRAY_PMI, "SLURM_STEP_NODELIST": "nid[005002,007001]"},
        ("srun", "nid005002"),
    ),
    "JUWELS": (
        {**STEP, "PMI_RANK": "7", "PMI_SIZE": "8", "SLURM_STEP_NODELIST": "jwb[0033-0034]"},
        ("srun", "jwb0033"),
    ),
    "srun with PMIx": (
        {**STEP, "PMIX_RANK": "7", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_NODELIST": "a1"},
        ("srun", "a1"),
    ),
    "two brackets": ({**STEP, "SLURM_STEP_NODELIST": "c1-[1-2]n[3-4]"}, ("srun", "c1-1n3")),
    "Derecho, Polaris, Aurora": ({**PALS, **CRAY_PMI}, ("mpiexec", "node1")),
    "Polaris, in an array": (
        {**PALS, **CRAY_PMI, "PBS_JOBID": "12[3].server", "PBS_ARRAY_INDEX": "3"},
        ("mpiexec", "node1"),
    ),
    "Aurora, with PMIx": ({**PALS, "PMIX_RANK": "7", "WORLD_SIZE": "8"}, ("mpiexec", "node1")),
    "Open MPI under PBS": ({**OPEN_MPI, **PBS}, ("mpirun", "node1")),
    "Open MPI under SLURM": ({**IN_SLURM, **OPEN_MPI}, ("mpirun", "n1")),
    "Open MPI under SLURM, its daemons": (
        {**IN_SLURM, **OPEN_MPI, "SLURM_STEP_NUM_TASKS": "2"},
        ("mpirun", "n1"),
    ),
    "MPICH under PBS": ({**HYDRA, **PBS}, ("mpiexec", "node1")),
    "MPICH under SLURM": ({**IN_SLURM, **HYDRA, "SLURM_STEP_NUM_TASKS": "2"}, ("mpiexec", "n1")),
    "MVAPICH": ({**MVAPICH, "MASTER_ADDR": "node1"}, ("mpiexec", "node1")),
    "Intel MPI under PBS": ({**HYDRA, **PBS, "I_MPI_HYDRA_BOOTSTRAP": "pbs"}, ("mpiexec", "node1")),
    "jsrun": (
        {**JSRUN, "PMIX_RANK": "7", "MASTER_ADDR": "node1"},
        ("jsrun", "node1"),
    ),
    "Flux": ({**FLUX, **CRAY_PALS, "MASTER_ADDR": "node1"}, ("flux run", "node1")),
    "Flux that jsrun started": (
        {**FLUX, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
        ("flux run", "node1"),
    ),
    "by hand": (
        {
            "RANK": "7",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node1",
        },
        ("torchrun", "node1"),
    ),
}


def test_ranks_of_every_launcher(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    for site, (environment, (name, host)) in SITES.items():
        if "PBS_NODEFILE" in environment:
            environment = {**environment, "PBS_NODEFILE": str(tmp_path / "nodes")}
        launcher = launcher_of(environment)
        assert (launcher.name, launcher.address) == (name, host), site
        numbered = name in ("torchrun", "srun") or (
            name == "mpiexec" and "PALS_NODEID" in environment
        )
        node = 1 if numbered else zlib.crc32(socket.gethostname().encode())
        assert launcher.ranks == RankInfo(7, 8, 3, 4, node), site
        ports = [29_500] if name == "torchrun" else range(20_000, 32_000)
        assert launcher.port in ports, site
        assert launcher_of({**environment, "MASTER_PORT": "4000"}).port == 4000, site
        for port in (0, 70_000):
            line = f"MASTER_PORT={port} is no port: it has to be 1 to"
            with pytest.raises(UserError, match=line):
                launcher_of({**environment, "MASTER_PORT": str(port)})


def test_ranks_of_one_node_meet_on_loopback() -> None:
    for environment in (OPEN_MPI, HYDRA, MVAPICH, {**PALS, **CRAY_PMI}):
        sizes = {k: "8" for k in environment if "LOCAL_SIZE" in k or "LOCALNRANKS" in k}
        launcher = launcher_of({**environment, **sizes})
        assert (launcher.address, launcher.ranks.on_several_nodes) == ("127.0.0.1", False)


def test_ports_of_programs_differ_if_the_launcher_numbers_them() -> None:
    other = {"PALS_APID": "a-c"}
    environment = {**PALS, **CRAY_PMI}
    assert launcher_of(environment).port != launcher_of({**environment, **other}).port


def test_ranks_of_mpirun_know_their_node_however_they_are_dealt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for expected in ([0, 1, 2, 3] * 2, [0, 0, 1, 1, 2, 2, 3, 3]):
        nodes = []
        for rank, node in enumerate(expected):
            monkeypatch.setattr(socket, "gethostname", lambda node=node: f"node{node}")
            local = expected[:rank].count(node)
            numbers = {"RANK": rank, "SIZE": 8, "LOCAL_RANK": local, "LOCAL_SIZE": 2}
            environment = {f"OMPI_COMM_WORLD_{name}": str(n) for name, n in numbers.items()}
            launcher = launcher_of({**environment, "MASTER_ADDR": "node0"})
            nodes.append(launcher.ranks.node)
        first = list(dict.fromkeys(nodes))
        assert [first.index(node) for node in nodes] == expected


def test_a_script_for_torchruns_variables_may_leave_the_ranks_of_a_node_to_srun() -> None:
    given = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "node1"}
    assert launcher_of({**STEP, **given}).ranks == RankInfo(7, 8, 3, 4, node=1)
    assert launcher_of({**OPEN_MPI, **given}).ranks == RankInfo(7, 8, 3, 4, node=1)
    first = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"}
    assert launcher_of({**OPEN_MPI, **first}).ranks.local_world_size == 4
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE"):
        launcher_of(given)


def test_runs_of_mpiexec_without_a_queue_have_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = set()
    for parent in (1, 2):
        monkeypatch.setattr("os.getppid", lambda parent=parent: parent)
        ports.add(launcher_of({**HYDRA, "MPI_LOCALNRANKS": "8"}).port)
    assert len(ports) == 2


def test_flux_tells_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flux").write_text('#!/bin/sh\n[ "$*" = "hostlist --nth=0 f3" ] && echo elcap7\n')
    (tmp_path / "flux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert launcher_of({**FLUX, "FLUX_JOB_ID": "f3"}).address == "elcap7"
    assert launcher_of({**FLUX, "FLUX_JOB_ID": "f4"}).address is None


def test_flux_tasks_that_are_not_dealt_evenly_are_refused() -> None:
    with pytest.raises(UserError, match="8 tasks are not dealt evenly to FLUX_JOB_NNODES=3 nodes"):
        find_launcher({**FLUX, "FLUX_JOB_NNODES": "3"})
    with pytest.raises(UserError, match="not dealt evenly"):
        find_launcher({**FLUX, "FLUX_TASK_LOCAL_ID": "4"})


SINGLE_PROCESSES: dict[str, dict[str, str]] = {
    "no launcher": {},
    "qsub -I": {**PBS, "PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
    "salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
    "sbatch": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    "inside sbatch, no step": {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},
    "srun --pty bash": {**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0", "PALS_RANKID": "0"},
    "mpirun -n 1": {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    "mpiexec -n 1": {"PMI_RANK": "0", "PMI_SIZE": "1"},
    "flux run -n 1": {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
    "flux alloc": {"FLUX_URI": "local:///run/flux", "FLUX_ENCLOSING_ID": "f2"},
    "a RANK that may be anything": {"RANK": "0"},
    "settings for a later torchrun": {"WORLD_SIZE": "8"},
}


def test_a_single_process_starts_its_own_ranks() -> None:
    for name, environment in SINGLE_PROCESSES.items():
        assert find_launcher(environment) is None, name


def test_ranks_that_are_not_understood_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would train alone; the line says what to set, and rank 0 prints it first."""
    for environment, variable, rank in (
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3", 3),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0", 0),
        ({**PALS, "PMIX_RANK": "7"}, "PALS_RANKID=7, PMIX_RANK=7", 7),
        ({"PMI_ID": "1", "PMI_PORT": "n1:80"}, "PMI_ID=1", 1),
        ({"RANK": "2"}, "RANK=2", 2),
        ({**HYDRA, "MPI_LOCALNRANKS": ""}, "missing .*or MPI_LOCALNRANKS or", 7),
        ({"RANK": "", "WORLD_SIZE": "2"}, "malformed .*''", 0),
        ({"RANK": "0", "WORLD_SIZE": ""}, "malformed .*''", 0),
        ({"PMI_RANK": "7", "PMI_SIZE": "8"}, "PALS_LOCAL_RANKID or PMI_LOCAL_RANK or", 7),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, "FLUX_JOB_NNODES", 1),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE", 5),
        ({k: v for k, v in SRUN.items() if k != "SLURM_PROCID"}, "SLURM_PROCID", 0),
    ):
        with pytest.raises(UserError, match=variable) as refused:
            find_launcher(environment)
        assert "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR" in str(
            refused.value
        )
        assert "\n" not in str(refused.value)
        assert likely_rank(environment) == rank, environment
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert launcher_rank() == rank, environment


def test_an_unknown_host_of_rank_0_is_refused_when_ranks_have_to_meet() -> None:
    for environment in (
        OPEN_MPI,  # without a queue
        {**HYDRA, **PBS},  # the nodes are in a file that is not here
        {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
    ):
        launcher = launcher_of(environment)
        with pytest.raises(UserError, match=r"MASTER_ADDR: needs the host of rank 0, .* MASTER_P"):
            rendezvous_host(launcher, environment)
        given = {**environment, "MASTER_ADDR": "node1"}
        assert rendezvous_host(launcher_of(given), given) == "node1"


def test_rank_0_on_another_host_than_expected_is_refused() -> None:
    launcher = Launcher("mpirun", RankInfo(0, 8, 0, 4), "192.0.2.1", 20_000)  # of no machine
    with pytest.raises(UserError, match=r"MASTER_ADDR: rank 0 runs on .*, not on 192\.0\.2\.1"):
        rendezvous_host(launcher, {})
    assert rendezvous_host(launcher, {"MASTER_ADDR": "192.0.2.1"}) == "192.0.2.1"
    other = Launcher("mpirun", RankInfo(1, 8, 1, 4), "192.0.2.1", 20_000)
    assert rendezvous_host(other, {}) == "192.0.2.1"


def test_a_host_without_an_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def unknown(host: str, *arguments: object, **more: object) -> object:
        if host == "no-such-host":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in ("no-such-host", "a..b"):
        launcher = Launcher("srun", RankInfo(0, 8, 0, 4), name, 20_000)
        line = f"^MASTER_ADDR: the name {re.escape(name)} is unknown on"
        with pytest.raises(UserError, match=line):
            rendezvous_host(launcher, {"MASTER_ADDR": name})
        other = Launcher("srun", RankInfo(1, 8, 1, 4), name, 20_000)
        assert rendezvous_host(other, {"MASTER_ADDR": name}) == name


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", *(["::1"] if has_ipv6() else [])])
def test_a_port_in_use_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        launcher = Launcher("mpirun", RankInfo(0, 2, 0, 2), host, port)
        for environment in ({}, {"MASTER_ADDR": host}):
            with pytest.raises(UserError, match=f"MASTER_PORT: port {port} of {host} is in use"):
                rendezvous_host(launcher, environment)
    assert rendezvous_host(launcher, {}) == host

    def unknown_name(*_: object) -> None:
        raise OSError(errno.ENOENT, "unknown name")

    monkeypatch.setattr(socket.socket, "bind", unknown_name)  # torch reports it
    assert rendezvous_host(launcher, {}) == host


def test_submitit_on_this_machine() -> None:
    env = {
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALRANK": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_JOB_ID": "11",
    }
    assert launcher_of(env).ranks == RankInfo(1, 2, 1, 2)


def test_lists_of_slurm_are_expanded() -> None:
    for nodes, host in {
        "a1": "a1",
        "a1,b2": "a1",
        "gpu[003-005,9],x": "gpu003",
        "n[7]": "n7",
        "r[1-2]-ib,z": "r1-ib",
        "c1-[1-2]n[3-4],x": "c1-1n3",
        "rack[02,4-5]n[008]i": "rack02n008i",
    }.items():
        assert first_host(nodes) == host
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


def under_torchrun(ranks: int, function: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a function of `rank_functions` on ranks of torchrun, in bands of two."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.distributed.launch_program", function, "2", "0", "1", str(folder)]
    return subprocess.run(
        [sys.executable, *command, *program],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "SEEN": str(folder / "seen"),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.mark.slow
def test_ranks_of_an_mpirun_meet(tmp_path: Path) -> None:
    """The test stands in for mpirun: nothing but their environment joins the processes."""
    (tmp_path / "seen").mkdir()
    arguments = ["tests.distributed.launch_program", "share_folder", "2", "0", "1", str(tmp_path)]
    common = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    environment = {**os.environ, **common, "PMIX_NAMESPACE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={
                **environment,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "SEEN": str(tmp_path / "seen"),
            },
        )
        for rank in range(2)
    ]
    assert [process.wait(240) for process in processes] == [0, 0]
    seen = [path.read_text() for path in (tmp_path / "seen").iterdir()]
    assert len(seen) == 2
    assert len(set(seen)) == 1


def folder_of_rank_0(manager: DomainParallelManager, folder: str, store: Path) -> str:
    config = small_config(folder if manager.rank == 0 else "other")
    ranks = RankInfo(manager.rank, manager.world_size)
    return share_run_folder(config, ranks, FileStore(str(store), manager.world_size)).run.dir


def test_all_ranks_get_the_run_folder_of_rank_0(tmp_path: Path) -> None:
    for length in (0, 10, 10_000):
        folder = "é" * length
        store = tmp_path / f"store{length}"
        assert on_processes(3, folder_of_rank_0, folder, store) == [folder] * 3


@pytest.mark.parametrize("function", tiers([], [("refuse",)], [("refuse_everywhere",)]))
def test_one_rank_speaks_for_all(tmp_path: Path, function: str) -> None:
    """Rank 0 reports if it has failed too, otherwise the rank that has."""
    done = under_torchrun(2, function, tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: data.store: needs a store, got none\n") == 1, done.stderr
