"""Devices, data ranks and threads are chosen before any process starts."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from credit_dp.cli.compose import Composer
from credit_dp.config import ParallelConfig
from credit_dp.config.training import TrainerConfig
from credit_dp.distributed import placement, worker
from credit_dp.distributed.failure_report import mesh_rank_name
from credit_dp.distributed.launcher import Launcher, RankInfo
from credit_dp.distributed.worker import set_precision
from credit_dp.errors import UserError
from credit_dp.training.summary import gpu_precision
from tests.distributed.launch_program import small_config


def under(world: int, local: int | None = None) -> Launcher:
    return Launcher("torchrun", RankInfo(0, world, 0, local or world), "127.0.0.1", 1)


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, device, domain, data, expected in (
        (0, "auto", 3, None, ("cpu", 1)),
        (0, "auto", 1, 2, ("cpu", 2)),
        (8, "auto", 2, None, ("cuda", 4)),
        (8, "auto", 4, 1, ("cuda", 1)),
        (8, "cpu", 4, None, ("cpu", 1)),
        (5, "cuda", 2, None, ("cuda", 2)),
    ):
        monkeypatch.setattr(placement, "count_visible_gpus", lambda gpus=gpus: gpus)
        config = replace(small_config("", domain, data), device=device)
        found = placement.resolve_ranks(config, None)
        assert (found.device, found.parallel.data) == expected, (gpus, device, domain, data)


def test_the_page_of_gpus_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/gpus.md").read_text()
    rows = re.findall(r"^\| (\d) \| (?:`(.*?)`)? ?\| (\w+) \|", page, re.MULTILINE)
    assert len(rows) == 7
    for gpus, keys, ranks in rows:
        monkeypatch.setattr(placement, "count_visible_gpus", lambda gpus=gpus: int(gpus))
        config = Composer("train").compose_config(keys.split())
        if ranks == "refused":
            with pytest.raises(UserError, match=f"need 2 GPUs, but torch sees {gpus}"):
                placement.resolve_ranks(config, None)
            continue
        parallel = placement.resolve_ranks(config, None).parallel
        assert parallel.data is not None
        assert placement.ranks_per_model(parallel) * parallel.data == int(ranks), (gpus, keys)


def test_torch_counts_gpus_only_where_there_can_be_any(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(placement, "GPU_FILES", (str(tmp_path / "driver"),))
    assert placement.count_visible_gpus() == (0 if sys.platform == "linux" else 3)
    (tmp_path / "driver").touch()
    assert placement.count_visible_gpus() == 3


def test_a_launchers_ranks_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement.resolve_ranks(small_config("", 2), under(8)).parallel.data == 4
    assert placement.resolve_ranks(small_config("", 2, 4), under(8)).parallel.data == 4
    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 4)
    config = small_config("", 2)
    config.device = "cuda"
    assert placement.resolve_ranks(config, under(8, 4)).parallel.data == 4


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, device, domain, data, launcher, line in (
        (2, "auto", 4, None, None, "parallel.domain: 4 ranks on this machine need 4 GPUs"),
        (4, "cuda", 2, 3, None, "6 ranks on this machine need 6 GPUs"),
        (0, "cuda", 1, None, None, "device: needs a GPU"),
        (2, "cuda", 4, None, under(4), "sees 2. Let torchrun start at most 2 ranks .* show each"),
        (0, "cpu", 3, None, under(4), "started 4 ranks, .* multiple of 3. Start 3 or 6 ranks"),
        (0, "cpu", 3, None, under(2), "multiple of 3. Start 3 ranks"),
        (0, "cpu", 2, 1, under(4), "parallel.data: torchrun started 4 ranks"),
        (0, "cpu", 1, 3, None, "data.batch_size: needs a multiple of the 3 data ranks, got 4"),
    ):
        monkeypatch.setattr(placement, "count_visible_gpus", lambda gpus=gpus: gpus)
        config = replace(small_config("", domain, data), device=device)
        with pytest.raises(UserError, match=line):
            placement.resolve_ranks(config, launcher)


def test_ranks_that_share_members_count() -> None:
    config = small_config("", 2)
    config.device, config.parallel.ensemble = "cpu", 3
    config.trainer.members, config.loss.name, config.model.noise = 3, "crps", 4
    assert placement.resolve_ranks(config, None).parallel.data == 1
    assert placement.ranks_per_model(config.parallel) == 6
    assert placement.resolve_ranks(config, under(12)).parallel.data == 2
    line = (
        r"x parallel\.ensemble=3 x parallel\.domain=2 needs a multiple of 6\. Start 6 or 12 ranks"
    )
    with pytest.raises(UserError, match=line):
        placement.resolve_ranks(config, under(8))
    assert (
        mesh_rank_name(10, config.parallel) == "rank 10 (pipeline 1, data 0, ensemble 2, domain 0)"
    )
    config.parallel.data = 2
    assert (
        mesh_rank_name(10, config.parallel) == "rank 10 (pipeline 0, data 1, ensemble 2, domain 0)"
    )
    assert placement.mesh_text(config.parallel) == "pipeline 1 x data 2 x ensemble 3 x domain 2"


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(8)))
    for threads, environment, expected in (
        (None, {}, 4),
        (3, {"OMP_NUM_THREADS": "7"}, 3),
        (None, {"OMP_NUM_THREADS": "7"}, 7),
        (None, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 4),
        (None, {"SLURM_CPUS_PER_TASK": "6", "SLURM_STEP_ID": "0"}, 6),
    ):
        config = ParallelConfig(domain=2, threads=threads)
        found = placement.threads_per_rank(config, RankInfo(0, 2, 0, 2), environment)
        assert found == expected, (threads, environment)


def test_a_run_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a sweep's second run would take the first one's threads for a user's setting."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        for given in (None, "3"):
            if given is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", given)
            with worker.limit_threads(2):
                assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == ("2", 2)
            assert os.environ.get("OMP_NUM_THREADS") == given
    finally:
        torch.set_num_threads(before)


def test_settings_of_fsdp2_need_data_ranks() -> None:
    config = small_config("", 1)
    config.parallel = ParallelConfig(pipeline=2, data_mode="fsdp2", cpu_offload=True)
    with pytest.raises(UserError, match=r"parallel\.cpu_offload: needs at least two data or dom"):
        placement.resolve_ranks(config, None)


def test_ranks_see_all_gpus_of_the_node_or_only_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `srun --gpus-per-task=1` each of four ranks sees one GPU, as number 0."""
    config = replace(small_config("", 2), device="auto")
    ranks = [RankInfo(rank, 8, rank % 4, 4, rank // 4) for rank in range(8)]
    for visible, expected in ((4, [0, 1, 2, 3] * 2), (1, [0] * 8)):
        monkeypatch.setattr(placement, "count_visible_gpus", lambda visible=visible: visible)
        found = placement.resolve_ranks(config, under(8, 4))
        assert (found.device, found.parallel.data) == ("cuda", 4)
        assert [placement.gpu_index(found.parallel, rank) for rank in ranks] == expected


def test_two_ranks_with_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a node see one GPU each: another one, unless the node has a single one."""
    gpus = {0: "a", 1: "b"}
    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[index])
    )
    store = HashStore()
    for rank in range(2):
        worker.check_own_gpu(store, ParallelConfig(), RankInfo(rank, 2, rank, 2))
    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 1)
    with pytest.raises(UserError, match=r"device: 2 ranks on this machine .* rank 1 shares GPU a"):
        worker.check_own_gpu(store, ParallelConfig(), RankInfo(1, 2, 1, 2))


def test_gpus_of_a_layout_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "count_visible_gpus", lambda: 4)
    config = small_config("", 1, None)
    config.device = "cuda"
    config.parallel = ParallelConfig(layout={"root": "cuda:0", "decoder": "cuda:1"})
    assert placement.resolve_ranks(config, None).parallel.data == 2
    assert placement.gpu_index(config.parallel, RankInfo(1, 2, 1, 2)) == 2
    config.parallel = ParallelConfig(layout={"root": "cuda:5"})
    with pytest.raises(UserError, match=r"parallel\.layout: counts 6 GPUs .* torch sees 4"):
        placement.resolve_ranks(config, None)


@pytest.fixture
def restored_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # and so removed afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    yield
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("restored_precision")
def test_precision_on_gpus() -> None:
    set_precision(TrainerConfig())
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    set_precision(TrainerConfig(matmul="highest", deterministic=True))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_precision(TrainerConfig())  # the next run of a sweep
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_summary_names_the_precision_on_gpus() -> None:
    assert gpu_precision(TrainerConfig()) == ", products of float32 in TF32"
    exact = TrainerConfig(matmul="highest", deterministic=True)
    assert gpu_precision(exact) == ", products of float32 in float32, deterministic"
    with pytest.raises(UserError, match=r"trainer\.matmul.*highest"):
        TrainerConfig(matmul="tf32")


def test_cpus_always_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "set_precision", lambda trainer: pytest.fail("on a CPU"))
    monkeypatch.setattr(worker, "configure_logging", lambda ranks: None)
    monkeypatch.setattr(worker, "import_function", lambda run: lambda config, ranks: 0)
    config = small_config("runs")  # device=cpu
    assert worker.run_rank(config, RankInfo(), "module:function") == 0
