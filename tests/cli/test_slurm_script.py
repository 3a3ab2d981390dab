"""`credit-dp slurm script`: scripts that fit the mesh, and meshes that fit no nodes."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.invocation import answer

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts/slurm").glob("*.sh"))


def script(*keys: str) -> tuple[int, str, str]:
    return answer(pytest.MonkeyPatch(), "slurm", "script", *keys, program="credit-dp")


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_scripts_are_what_their_second_line_makes(path: Path) -> None:
    command = shlex.split(path.read_text().splitlines()[1].removeprefix("# "))
    assert command[:3] == ["credit-dp", "slurm", "script"]
    assert script(*command[3:]) == (0, path.read_text(), "")
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        (
            ["parallel.domain=8", "nodes=4", "gpus_per_node=8", "cpus_per_node=96"],
            ["--nodes=4", "--ntasks-per-node=8", "--cpus-per-task=12", "--gpus-per-node=8"],
        ),
        (
            ["parallel.domain=4", "parallel.data=3", "device=cpu", "cpus_per_node=8"],
            ["--nodes=3", "--ntasks-per-node=4", "--cpus-per-task=1", "--time=24:00:00"],
        ),
        (
            ["parallel.domain=2", "seed=1,2", "device=cpu", "time=00:05:00", "partition=a"],
            ["--array=0-1", "--nodes=1", "--partition=a", "--signal=B:USR1@60  # s"],
        ),
    ],
)
def test_a_mesh_gets_what_it_needs(keys: list[str], lines: list[str]) -> None:
    code, out, err = script(*keys)
    assert (code, err) == (0, "")
    assert [line for line in lines if f"#SBATCH {line}" not in out] == []
    assert ("gpus" in " ".join(out.splitlines()[2:])) == ("device=cpu" not in keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["parallel.domain=8", "gpus_per_node=4"], "need 8 GPUs, but nodes have 4"),
        (["parallel.domain=4", "device=cpu", "cpus_per_node=2"], "need 4 cores, but nodes have 2"),
        (["parallel.domain=1,2", "run.dir=here"], "run.dir: the jobs of an array"),
        (["parallel.domain=1,2"], "the jobs of a script need one mesh"),
        (["nodes=many"], "nodes: needs a whole number of at least 1, got 'many'"),
        (["start=mpirun"], "start: needs one of srun, torchrun"),
        (["time=tomorrow"], "time: needs HH:MM:SS"),
        (["nods=4"], "nods: no such key"),
        (["resume=."], "resume: each job resumes from its own checkpoint"),
    ],
)
def test_what_cannot_be_placed_is_refused(keys: list[str], words: str) -> None:
    code, out, err = script(*keys)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
