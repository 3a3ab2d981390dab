"""Starts a SLURM for the tests: two nodes, emulated on this machine, that share nothing else."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from credit_dp.distributed.peer_monitor import process_has_ended

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
HOST = socket.gethostname()
NODES = (HOST, f"{HOST}-second")  # the ranks of a job look for its first node by name
CORES = 4  # of each node, whatever this machine has
PATIENCE = 300.0

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
MinJobAge=7200
KillWait=10
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
)


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run it, and yield the environment that programs need to use it."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    write_conf(folder)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    try:
        start(folder, {**os.environ, **environment})
        yield environment
    finally:
        stop(folder)


def write_conf(folder: Path) -> None:
    """Settings of the controller and of both nodes, and a key."""
    ports = free_ports(1 + len(NODES))
    nodes = [
        NODE.format(name=name, host=HOST, port=port, cores=CORES)
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    user = os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()
    text = CONF.format(folder=folder, host=HOST, ports=ports, user=user, nodes="\n".join(nodes))
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)


def start(folder: Path, environment: dict[str, str]) -> None:
    """Start all daemons, and wait until both nodes take jobs."""
    munge = [f"--{name}-file={folder}/munge.{end}" for name, end in MUNGE_FILES]
    daemon(["munged", "--force", f"--socket={folder}/munge.socket", *munge], environment)
    daemon(["slurmctld"], environment)
    for node in NODES:
        daemon(["slurmd", "-N", node], environment)
    deadline = time.monotonic() + PATIENCE
    states = ""
    while time.monotonic() < deadline:
        command = ["sinfo", "--noheader", "--Node", "--format", "%t"]
        states = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout
        if states.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-1000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"SLURM does not start: {states}\n{logs}")


MUNGE_FILES = (("key", "key"), ("pid", "pid"), ("log", "log"), ("seed", "seed"))


def daemon(command: list[str], environment: dict[str, str]) -> None:
    """Start a program that goes to the background by itself."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} does not start: {done.stdout}{done.stderr}")


def stop(folder: Path) -> None:
    """End every daemon that wrote its process number, and processes that jobs left behind."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["scancel", "--full", "--signal=KILL", "--partition=debug"], env=environment,
                   capture_output=True, check=False, timeout=PATIENCE)  # fmt: skip
    for path in sorted(folder.glob("*.pid"), reverse=True):  # munge's socket serves the others
        pid = int(path.read_text().strip() or 0)
        if pid:
            end(pid)


def end(pid: int) -> None:
    """End a process and wait until it is gone."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while not process_has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not process_has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
