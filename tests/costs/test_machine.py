"""`credit-dp plan --machine`: equations computed by hand, effects of each figure, bad files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from credit_dp.config import TrainerConfig
from credit_dp.costs.budget import FsdpUnit
from credit_dp.costs.machine import (
    MACHINES_FOLDER,
    Link,
    Machine,
    machine_names,
    parse_machine,
    read_machine,
)
from credit_dp.costs.prediction import (
    busy_seconds,
    compute_seconds,
    exchange_seconds,
    product_dtype,
    reduction_seconds,
    ring_link,
    sharded_seconds,
    starting_seconds,
)
from credit_dp.domain_parallel.costs.report import plan_report
from credit_dp.domain_parallel.costs.work import (
    OperationCost,
    OperationCounter,
    StepWork,
    step_work,
)
from credit_dp.domain_parallel.count_transport import MessageSize
from credit_dp.errors import UserError
from tests.cli.invocation import SMALL, answer, hide_coarsest_rows, plan

# Four ranks a node; a rank computes 1 GFLOP/s, moves 1 GB/s and starts an operation in 1 ms.
CONTENT: dict[str, Any] = {
    "name": "round figures",
    "source": "none",
    "ranks_per_node": 4,
    "memory_gib": 1,
    "tflops": {"float32": 0.002},
    "tflops_reached": 0.5,
    "memory_gb_per_s": 2,
    "memory_reached": 0.5,
    "overhead_us": 1000,
    "runs_ahead": False,
    "within_node": {"latency_us": 1000, "gb_per_s": 2},
    "between_nodes": {"latency_us": 5000, "gb_per_s": 0.2},
    "links_reached": 0.5,
}
MACHINE = parse_machine(CONTENT, "test")
FAST = replace(MACHINE, tflops={"float32": 0.004})
AHEAD = replace(MACHINE, runs_ahead=True)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-12)


def test_compute_waits_for_arithmetic_or_memory() -> None:
    operations = Counter({OperationCost(3_000_000, 1_000_000): 2, OperationCost(0, 4_000_000): 1})
    # 2 x 3 ms of arithmetic, 4 ms of memory, 3 starts of 1 ms.
    busy, starting = busy_seconds(operations, MACHINE, "float32"), 0.003
    assert compute_seconds(busy, starting, MACHINE) == near(0.013)
    assert busy_seconds(operations, FAST, "float32") == near(0.007)
    assert compute_seconds(busy, starting, AHEAD) == near(0.010)
    assert compute_seconds(busy, 0.015, AHEAD) == near(0.015)


def test_the_host_starts_views_and_messages_too() -> None:
    assert starting_seconds(3, 0, 0, MACHINE) == near(0.003)
    assert starting_seconds(3, 10, 2, MACHINE) == near(0.003 + 0.001 + 0.006)


def test_what_is_computed_meanwhile_hides_messages_on_a_gpu() -> None:
    messages = (MessageSize(0, 1, 3_000_000), MessageSize(1, 0, 3_000_000))
    meanwhile = ((OperationCost(2_000_000, 0), 1),)  # 2 ms
    longer = ((OperationCost(9_000_000, 0), 1),)
    overlaps = Counter({(messages, meanwhile): 2, (messages, longer): 1})
    work = replace(of_messages(2), overlaps=overlaps)
    assert exchange_seconds(work, MACHINE, 1, "float32") == near(3 * 0.004)
    assert exchange_seconds(work, AHEAD, 1, "float32") == near(2 * (0.004 - 0.002))


def test_the_convolution_of_a_large_band_computes_while_rows_travel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1, stride=2))
    work = step_work(model, (1, 3, 256, 256), 2)
    computing = [sum(cost.flops * n for cost, n in costs) for _, costs in work.overlaps.elements()]
    # Forward of the first one; the second one waits. Backward of the second one returns rows.
    assert sorted(flops > 0 for flops in computing) == [False, False, True]
    assert Counter(messages for messages, _ in work.overlaps.elements()) == work.exchanges


class Readers(nn.Module):
    """Two convolutions that share an exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(x) + self.wide(x)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 8, 3, 2, 1), Readers()])
def test_rows_that_stay_are_copied_while_others_travel(layer: nn.Module) -> None:
    work = step_work(nn.Sequential(nn.Conv2d(3, 3, 1), layer), (1, 3, 16, 16), 2)
    band = 3 * 8 * 16 * 4
    meanwhile = [sum(cost.bytes * n for cost, n in costs) for _, costs in work.overlaps.elements()]
    assert len(meanwhile) == 2  # forward and backward
    assert all(size >= 2 * band for size in meanwhile)  # read and written


def test_products_of_float32_take_tf32_where_there_is_one() -> None:
    machine = replace(MACHINE, tflops={"float32": 0.002, "tf32": 0.02})
    trainer = TrainerConfig()
    assert product_dtype(trainer, machine) == "tf32"
    assert product_dtype(replace(trainer, matmul="highest"), machine) == "float32"
    assert product_dtype(replace(trainer, autocast="bfloat16"), machine) == "bfloat16"
    assert product_dtype(trainer, replace(MACHINE, tflops={"float32": 0.002})) == "float32"


def of_messages(ranks: int, *messages: MessageSize, collectives: int = 0) -> StepWork:
    together = Counter({collectives: 1} if collectives else {})
    exchanges = Counter({messages: 2}) if messages else Counter()
    overlaps = Counter({(messages, ()): 2}) if messages else Counter()
    return StepWork(ranks, (Counter(),), (0,), exchanges, overlaps, together, 0)


def test_an_exchange_waits_for_its_busiest_rank() -> None:
    mb = 1_000_000
    messages = (
        MessageSize(0, 1, mb),
        MessageSize(1, 0, mb),
        MessageSize(1, 2, 2 * mb),
        MessageSize(2, 1, mb),
    )
    work = of_messages(3, *messages)
    # Rank 1 sends 3 MB at 1 GB/s, twice, after 1 ms each.
    assert exchange_seconds(work, MACHINE, 1, "float32") == near(2 * (0.001 + 0.003))
    # The second domain is ranks 3, 4 and 5: its first two are on different nodes, 5 ms and
    # 0.1 GB/s apart, and rank 4 sends 1 MB that way and 2 MB within its node.
    assert exchange_seconds(work, MACHINE, 2, "float32") == near(2 * (0.005 + 0.010 + 0.002))


def test_a_collective_goes_round_in_a_ring() -> None:
    work = of_messages(4, MessageSize(0, 1, 0), collectives=1_000_000)
    assert exchange_seconds(work, MACHINE, 1, "float32") == near(2 * 0.001 + 2 * 0.001 + 0.001)
    assert ring_link(4, MACHINE) == Link(1000, 1)
    # As many rings leave a node as it has members.
    assert ring_link(8, MACHINE) == Link(5000, pytest.approx(0.4))
    assert ring_link(2, MACHINE, first=3) == Link(5000, pytest.approx(0.1))
    assert ring_link(5, MACHINE) == Link(5000, pytest.approx(0.1))


def test_gradients_are_added_up_in_buckets() -> None:
    size = 30 * 2**20
    sent = 2 * 3 / 4 * size / 1e9
    check = 2 * 0.001 + 40 / 1e9
    assert reduction_seconds(size, 4, MACHINE) == near(2 * 2 * 0.001 + sent + check)
    assert reduction_seconds(size, 1, MACHINE) == 0
    assert reduction_seconds(0, 4, MACHINE) == near(check)
    bucket = 2 * 0.001 + sent / 2
    assert reduction_seconds(size, 4, MACHINE, backward=9) == near(2 * bucket + check)
    assert reduction_seconds(size, 4, AHEAD, backward=0.001) == near(2 * bucket - 0.001 + check)
    assert reduction_seconds(size, 4, AHEAD, backward=9) == near(bucket + check)


def test_operations_are_counted_as_they_are() -> None:
    conv = nn.Conv2d(4, 8, 3, groups=2, bias=False, device="meta")
    x = torch.empty(1, 4, 6, 6, device="meta", requires_grad=True)
    operations = OperationCounter()
    with operations:
        made = conv(x)
        made.view(8, 16).sum().backward()
    forward = 2 * 8 * 4 * 4 * 2 * 9  # groups of two channels
    by_size = sorted((op.flops, n) for op, n in operations.counts.items() if op.flops)
    assert by_size == [(forward, 1), (2 * forward, 1)]
    reading = 4 * (4 * 36 + 8 * 2 * 9 + 8 * 16)
    assert OperationCost(forward, reading) in operations.counts
    # Only the sum takes memory: views and expanded tensors take none.
    others = [op for op in operations.counts if not op.flops]
    assert OperationCost(0, 4 * 8 * 16 + 4) in others
    assert max(op.bytes for op in others) == 4 * 8 * 16 + 4


def test_work_is_what_the_plan_says() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1))
    shape = (1, 3, 13, 16)
    work, report = step_work(model, shape, 3), plan_report(model, shape, 3)
    sent = sum((*report.forward, *report.backward), type(report.forward[0])())
    messages = [m for found, times in work.exchanges.items() for m in found * times]
    assert sum(m.bytes for m in messages) == sent.bytes > 0
    assert len(messages) == sent.messages
    assert 3 * work.collectives.total() == sent.collectives > 0
    assert work.saved_bytes == max(report.saved_bytes)
    alone = sum(op.flops * n for op, n in step_work(model, shape, 1).operations[0].items())
    most = max(sum(op.flops * n for op, n in of.items()) for of in work.operations)
    assert 5 / 13 * alone <= most < 0.5 * alone


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, CONTENT)


def write(folder: Path, content: Any) -> Path:
    path = folder / "machine.yaml"
    text = content if isinstance(content, str | bytes) else yaml.safe_dump(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def predict(monkeypatch: pytest.MonkeyPatch, file: Path | str, *keys: str) -> list[dict[str, Any]]:
    code, out, err = plan(monkeypatch, *SMALL, "--machine", str(file), "--json", *keys)
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)["meshes"]
    return found


@pytest.mark.slow
def test_meshes_and_efficiencies(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    lines = predict(monkeypatch, file, "--up-to", "6")
    meshes = [(line["ranks"], line["domain"], line["data"]) for line in lines]
    assert meshes == [
        *((1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 4), (4, 4, 1)),
        *((6, 1, 6), (6, 2, 3), (6, 6, 1)),
    ]
    alone, weak, strong = lines[:3]
    assert alone["efficiency"] == 1
    assert (alone["exchange"], alone["reduction"]) == (0, 0)
    assert weak["efficiency"] == near(alone["step"] / weak["step"])
    assert weak["samples_per_s"] == near(2 / weak["step"])
    assert strong["efficiency"] == near(alone["step"] / 2 / strong["step"])
    assert strong["step"] == near(strong["compute"] + strong["exchange"] + strong["reduction"])
    assert strong["held_bytes"] < alone["held_bytes"] == weak["held_bytes"]


def test_shards_are_gathered_and_reduced_by_block() -> None:
    mb = 1_000_000
    block, rest = FsdpUnit(8 * mb, 4 * mb, 2), FsdpUnit(4 * mb, 4 * mb, 1)
    # Rings of four ranks at 1 GB/s, each with two latencies of 1 ms: three quarters are sent.
    check = 0.002 + 40e-9
    in_blocks = 2 * (0.002 + 0.006) + (0.002 + 0.003)
    outside = (0.002 + 0.003) + (0.002 + 0.003)
    assert sharded_seconds([block, rest], 4, MACHINE, 1.0) == near(in_blocks + outside + check)
    # Where a GPU computes, blocks travel meanwhile; the rest comes before and after.
    assert sharded_seconds([block, rest], 4, AHEAD, 1.0) == near(outside + check)
    assert sharded_seconds([block, rest], 4, AHEAD, 0.005) == near(
        in_blocks - 0.005 + outside + check
    )
    nothing = FsdpUnit(0, 0, 1)
    assert sharded_seconds([block, nothing], 4, AHEAD, 1.0) == near(check)
    # 128 ranks hold two copies of 64 shards: half a shard goes to the other copy, and comes back.
    alone = sharded_seconds([nothing, block], 64, MACHINE)
    more = sharded_seconds([nothing, block], 128, MACHINE) - alone
    link = MACHINE.link(between=True)
    assert more == near(
        link.latency
        + link.seconds(4 * mb // 64)
        + MACHINE.link(between=True).latency  # of the check, by one rank more in its logarithm
    )


def test_shards_hold_less_and_update_less(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    keys = (*SMALL, "--machine", str(file), "--up-to", "4", "parallel.data=4", "--json")

    def predicted(mode: str) -> dict[str, Any]:
        code, out, _ = plan(monkeypatch, *keys, f"parallel.data_mode={mode}")
        assert code == 0
        mesh: dict[str, Any] = json.loads(out)["meshes"][0]
        return mesh

    ddp, fsdp2 = predicted("ddp"), predicted("fsdp2")
    assert fsdp2["held_bytes"] < ddp["held_bytes"]
    assert fsdp2["update"] == near(ddp["update"] / 4)
    assert fsdp2["reduction"] > ddp["reduction"]
    assert fsdp2["exchange"] == ddp["exchange"]


def test_a_cuda_graph_leaves_the_host_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("h100", "--up-to", "2", "parallel.domain=2", "parallel.data=1")
    [without] = predict(monkeypatch, *keys)
    [graph] = predict(monkeypatch, *keys, "trainer.cuda_graph=true")
    assert graph["starting"] < 0.05 * without["starting"]
    assert graph["compute"] < without["compute"] == without["starting"]
    assert graph["exchange"] == without["exchange"]


FASTER = {
    "links": ({"links_reached": 1.0}, {"exchange", "reduction"}),
    "latency": ({"within_node": {"latency_us": 500, "gb_per_s": 2}}, {"exchange", "reduction"}),
    "memory": ({"memory_reached": 1.0}, {"compute"}),
    "overhead": ({"overhead_us": 500}, {"compute"}),
    "arithmetic": ({"tflops_reached": 1.0}, {"compute"}),
    "the way out": ({"between_nodes": {"latency_us": 1, "gb_per_s": 9}}, set()),
}


@pytest.fixture(scope="module")
def work() -> StepWork:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1))
    return step_work(model, (1, 3, 13, 16), 2)


@pytest.mark.parametrize("case", FASTER.values(), ids=FASTER.keys())
def test_a_faster_part_moves_its_column(
    work: StepWork, case: tuple[dict[str, Any], set[str]]
) -> None:
    changed, moved = case

    def parts(content: dict[str, Any]) -> dict[str, float]:
        machine = parse_machine(content, "test")
        return {
            "compute": compute_seconds(
                busy_seconds(work.operations[0], machine, "float32"),
                starting_seconds(work.operations[0].total(), work.views[0], 0, machine),
                machine,
            ),
            "exchange": exchange_seconds(work, machine, 2, "float32"),
            "reduction": reduction_seconds(10**6, 4, machine),
        }

    before, after = parts(CONTENT), parts(CONTENT | changed)
    assert {part for part in before if after[part] < before[part]} == moved
    assert all(after[part] == before[part] for part in {*before} - moved)


@pytest.mark.slow
def test_what_does_not_fit_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path, CONTENT | {"memory_gib": 0.001})
    code, out, _ = plan(monkeypatch, *SMALL, "--machine", str(file), "--up-to", "2")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line[:5].strip().isdigit()]
    assert [row[:3] + row[4:5] for row in rows] == [
        ["1", "1", "1", "NO"],
        ["2", "1", "2", "NO"],
        ["2", "2", "1", "yes"],
    ]
    assert "Predicted, not measured." in out


@pytest.mark.slow
def test_a_domain_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    keys = ("--machine", str(file), "parallel.domain=20", "parallel.whole_ops=refuse")
    with hide_coarsest_rows():
        code, out, err = plan(monkeypatch, *SMALL, *keys)
    assert (code, err) == (1, "")
    assert "Lower parallel.domain to 12 or less." in out
    code, out, err = plan(monkeypatch, *SMALL, *keys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "Lower parallel.domain to 12 or less." in err


@pytest.mark.parametrize("name", machine_names())
def test_machines_of_the_package(name: str) -> None:
    machine = read_machine(name)
    assert isinstance(machine, Machine)
    assert "float32" in machine.tflops
    assert read_machine(str(MACHINES_FOLDER / f"{name}.yaml")) == machine


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONTENT.items() if name != key}


FILES = {
    "no table": ([1, 2], "needs the keys name, source, ranks_per_node"),
    "nothing": ("", "got nothing"),
    "no YAML": ("name: [", "is not valid YAML at line"),
    "a program": ("!!python/object/apply:os.getcwd []", "is not valid YAML at line 1"),
    "an unknown key": (CONTENT | {"memry_gib": 1}, "'memry_gib'. Allowed: name, source"),
    "a missing key": (without("overhead_us"), "needs overhead_us too"),
    "a text": (
        CONTENT | {"memory_gib": "80 GiB"},
        "memory_gib: needs a number from 1e-09 to 1e+15, got '80",
    ),
    "zero": (
        CONTENT | {"overhead_us": 0},
        "overhead_us: needs a number from 1e-09 to 1e+15, got 0",
    ),
    "no number": (
        CONTENT | {"memory_gib": float("nan")},
        "memory_gib: needs a number from 1e-09 to 1e+15",
    ),
    "a truth": (
        CONTENT | {"memory_gib": True},
        "memory_gib: needs a number from 1e-09 to 1e+15, got True",
    ),
    "no truth": (CONTENT | {"runs_ahead": 1}, "runs_ahead: needs true or false, got 1"),
    "half a rank": (CONTENT | {"ranks_per_node": 0.5}, "ranks_per_node: needs an integer of at"),
    "a huge number": (
        yaml.safe_dump(without("overhead_us")) + f"overhead_us: 0x{'f' * 5000}\n",
        "1e+15, got a huge number",
    ),
    "hardly a number": (CONTENT | {"overhead_us": 5e-324}, "from 1e-09 to 1e+15, got 5e-324"),
    "too large a share": (CONTENT | {"links_reached": 2}, "needs a share above 0 and at most 1"),
    "no rates": (CONTENT | {"tflops": {}}, "tflops: needs at least one of float64, float32"),
    "an unknown dtype": (CONTENT | {"tflops": {"float8": 1}}, "Did you mean float64?"),
    "half a link": (CONTENT | {"within_node": {"gb_per_s": 1}}, "within_node: needs latency_us"),
    "no name": (CONTENT | {"name": " "}, "name: needs a text, got ' '"),
    "a number too large": (CONTENT | {"memory_gib": 10**400}, "1e+15, got a huge number"),
    "not a text file": (b"\xff\xfe\x00", "can't be read"),
}


@pytest.mark.parametrize("case", FILES.values(), ids=FILES.keys())
def test_bad_files(tmp_path: Path, case: tuple[Any, str]) -> None:
    content, needed = case
    file = write(tmp_path, content)
    with pytest.raises(UserError) as error:
        read_machine(str(file))
    assert needed in str(error.value)
    assert str(error.value).startswith(f"--machine {file}: ")
    assert "\n" not in str(error.value)


def test_a_machine_without_the_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path, CONTENT | {"tflops": {"bfloat16": 1}})
    refused(monkeypatch, ["--machine", str(file)], "trainer.dtype=float32 needs its own")


ARGUMENTS = {
    "no file": (["--machine", "h10"], "'h10' is neither. Did you mean h100?"),
    "a folder": (["--machine", "/"], "needs a YAML file, or one of a100"),
    "memory": (["--machine", "h100", "--memory", "8"], "--memory: has no effect with --machine"),
    "no ranks": (["--machine", "h100", "--up-to", "0"], "--up-to: needs at least 1 rank"),
    "too few": (["--machine", "h100", "--up-to", "2", "parallel.domain=4"], "at least the 4 ranks"),
    "a pipeline": (["--machine", "h100", "parallel.pipeline=2"], "parallel.pipeline=1 only, got 2"),
    "offloaded shares": (
        ["--machine", "h100", "parallel.data_mode=fsdp2", "parallel.cpu_offload=true"],
        "parallel.cpu_offload=False only, got True",
    ),
    "cast shares": (
        ["--machine", "h100", "parallel.data_mode=fsdp2", "parallel.param_dtype=bfloat16"],
        "parallel.param_dtype=null only, got bfloat16",
    ),
    "a rollout": (["--machine", "h100", "trainer.rollout={0: 2}"], "trainer.rollout=1 only, got 2"),
}


@pytest.mark.parametrize("case", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, case: tuple[list[str], str]) -> None:
    refused(monkeypatch, *case)


def refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], needed: str) -> None:
    code, out, err = answer(monkeypatch, "plan", *SMALL, *arguments, program="credit-dp")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert needed in err
