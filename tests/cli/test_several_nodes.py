"""Runs on several nodes: what one process would compute while all others wait is refused."""

import shlex
from pathlib import Path

import pytest

from credit_dp.cli import check_run, slurm_array
from credit_dp.cli.check_run import preparation_command
from credit_dp.cli.compose import Composer
from credit_dp.cli.overrides import parse_overrides
from credit_dp.cli.sweep_jobs import Job
from credit_dp.config import Config
from credit_dp.config.launchers import SlurmLauncherConfig
from credit_dp.data.cache import NotComputedError
from credit_dp.data.setup import prepare_training_data
from credit_dp.distributed import placement
from credit_dp.distributed.launcher import RankInfo
from credit_dp.distributed.placement import ClusterNodes
from credit_dp.errors import UserError
from credit_dp.training import run as training_run
from tests.cli.invocation import answer, refusal, store_overrides
from tests.data import stores

RANK = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
TWO_NODES = {**RANK, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node1"}
ONE_NODE = {**RANK, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def under(environment: dict[str, str]) -> pytest.MonkeyPatch:
    """Return a patch of the environment, which the command undoes."""
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)
    return patch


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    path = stores.write(stores.dataset(), tmp_path / "store.zarr")
    return [*store_overrides(path), "data.limits={solar: null}"]


def composed(keys: list[str]) -> Config:
    """Return the config that a command composes, which rewrites some of the texts first."""
    texts = [str(override.input_line) for override in parse_overrides(keys)]
    return Composer("train").compose_config(texts)


def test_a_rank_names_the_command_that_fills_the_cache(keys: list[str]) -> None:
    """After that command nothing is missing."""
    config = composed(keys)
    cache = Path(config.data.cache)
    with pytest.raises(NotComputedError) as caught:
        prepare_training_data(config.data, compute=False)
    line = check_run.explain_refusal(config, keys, caught.value)
    assert line.startswith("data.fit_in_job: on several nodes all ranks would wait for one")
    assert f"{cache}: has no climatology of these data" in line
    command = line.partition("Run first: ")[2].partition(". Or set data.fit_in_job=true")[0]
    assert not list(cache.glob("*.json"))
    program, *arguments = shlex.split(command)
    code, out, err = answer(under({}), *arguments, program=program)
    assert (code, err) == (0, "")
    assert out.endswith(f"{cache}: training with the same data and data.cache finds all here\n")
    assert len(list(cache.glob("*.json"))) == 1
    prepare_training_data(config.data, compute=False)
    assert check_run.explain_refusal(config, keys, UserError("data: other")) == "data: other"


def test_ranks_on_several_nodes_compute_nothing_unless_the_job_may(keys: list[str]) -> None:
    computes: list[bool] = []

    def prepare(*_: object, compute: bool) -> None:
        computes.append(compute)
        raise UserError("so far")

    for ranks_of_node, more in ((1, []), (1, ["data.fit_in_job=true"]), (2, [])):
        ranks = RankInfo(world_size=2, local_world_size=ranks_of_node)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training_run, "build_manager", lambda *_: None)
            patch.setattr(training_run, "prepare_training_data", prepare)
            with pytest.raises(UserError, match="so far"):
                training_run.run(composed([*keys, *more]), ranks)
    assert computes == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_check_says_what_is_missing_if_it_knows_of_several_nodes(
    keys: list[str], monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "slurm_nodes", lambda _: ClusterNodes(4, 8, gpus))
        patch.setattr(placement, "count_visible_gpus", lambda: 0)
        mesh = [key for key in keys if key != "device=cpu"]
        code, out, err = answer(monkeypatch, "--check", *mesh)
        assert (code, err) == (0, "")
        lines = [text for text in out.splitlines() if text.startswith("fit  ")]
        assert len(lines) == (gpus < 2)
        assert all("Run first: credit-dp data stats climatology=true" in text for text in lines)
    assert refusal(under(TWO_NODES), "--check", *keys).startswith("data.fit_in_job: on several")


def test_a_sweep_is_refused_before_it_is_submitted(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed([key for key in keys if "run.dir" not in key])
    job = Job(tmp_path / "sweep/0", tuple(keys), config, is_finished=False)
    monkeypatch.setattr(slurm_array, "slurm_nodes", lambda _: ClusterNodes(4, 1, 0))
    monkeypatch.setattr(slurm_array, "submit_array", lambda *_: pytest.fail("was submitted"))
    settings = SlurmLauncherConfig(nodes=2, tasks_per_node=1, cpus_per_task=1)
    with pytest.raises(UserError, match=r"on several nodes .* Run first: credit-dp data stats"):
        slurm_array.submit([job], [], settings, tmp_path / "sweep")


def test_the_command_has_the_keys_of_the_data() -> None:
    for overrides, command in (
        (["model=unet", "seed=1"], "data=quickstart"),
        (["data=weatherbench2", "+data.levels=[500]"], "data=weatherbench2 '+data.levels=[500]'"),
        (["data.store=a b", "experiment=fast"], "'data.store=a b' experiment=fast"),
    ):
        expected = f"credit-dp data stats climatology=true {command}"
        assert preparation_command(composed([]), overrides) == expected


def test_dates_of_a_checkpoint_are_in_the_command(
    keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dates = [key for key in keys if "data.dates" in key]
    config = composed([key for key in keys if key not in dates])
    resolved = composed(keys)
    monkeypatch.setattr(check_run, "resolve_resume", lambda _: (resolved, None))
    missing = check_run.missing_preparation(config, [])
    assert missing is not None
    assert shlex.join(dates) in missing
