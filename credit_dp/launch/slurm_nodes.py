"""Asks SLURM what its nodes have."""

import re
import shutil
import subprocess

from credit_dp.launch.placement import Nodes

PATIENCE = 30.0  # seconds for a command of SLURM's


def slurm_nodes(partition: str | None) -> Nodes:
    """The largest nodes of a partition, by default of the default one; unknown without SLURM."""
    if shutil.which("sinfo") is None:
        return Nodes()
    command = ["sinfo", "--noheader", "--Node", "--format", "%P|%c|%G"]
    command += ["--partition", partition] if partition else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Nodes()
    return largest(done.stdout, partition is not None)


def largest(told: str, of_partition: bool) -> Nodes:
    """The size of the nodes with most GPUs, then most cores, and how many there are."""
    sizes: list[tuple[int, int]] = []
    for line in told.splitlines():
        name, cores, gres = line.split("|", 2)
        if of_partition or name.endswith("*"):  # a star marks the default partition
            sizes.append((count_gpus(gres), int(cores.rstrip("+"))))
    if not sizes:
        return Nodes()
    gpus, cores_each = max(sizes)
    return Nodes(sizes.count((gpus, cores_each)), cores_each, gpus)


def count_gpus(gres: str) -> int:
    """GPUs of a node: `gpu:a100:4(S:0-1),nvme:1` -> 4."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))
