"""Lion, Muon and the learning rates of layers: definitions, meshes and checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from credit_dp.config import (
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ParallelConfig,
)
from credit_dp.errors import UserError
from credit_dp.models.unet import UNet
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.optim import (
    build_optimizer,
    has_weight_decay,
    learning_rate_factors,
)
from tests.checkpoints import save_checkpoint
from tests.tables import entry
from tests.training.refusals import assert_refused
from tests.training.runs import alone, built, make_config, make_store
from tests.training.states import small_state, take_step

LR, DECAY, STEPS = 0.02, 0.3, 10
Arrays = dict[str, np.ndarray]


def model() -> nn.Module:
    """Weights that are higher, wider and of more dimensions, biases, and a norm."""
    torch.manual_seed(5)
    layers = nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.Linear(7, 4), nn.Linear(2, 6)
    return nn.Sequential(*layers).double()


def gradients(step: int, parameters: dict[str, nn.Parameter]) -> Arrays:
    random = np.random.default_rng(step)
    return {name: random.normal(size=tuple(p.shape)) for name, p in parameters.items()}


def trained(config: OptimizerConfig) -> Arrays:
    """The parameters after ten steps with random gradients."""
    parameters = dict(model().named_parameters())
    optimizer = build_optimizer(parameters, config)
    for step in range(STEPS):
        for name, gradient in gradients(step, parameters).items():
            parameters[name].grad = torch.from_numpy(gradient)
        optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def by_definition(update: Callable[..., np.ndarray]) -> Arrays:
    """The same with `update(name, value, gradient, step, memory)`, which returns the new value."""
    parameters = dict(model().named_parameters())
    values = {name: p.detach().numpy().copy() for name, p in parameters.items()}
    memory: dict[str, dict[str, Any]] = {name: {} for name in values}
    for step in range(STEPS):
        for name, gradient in gradients(step, parameters).items():
            values[name] = update(name, values[name], gradient, step, memory[name])
    return values


def decay_of(name: str, value: np.ndarray) -> float:
    return DECAY if value.ndim > 1 and not name.endswith("bias") else 0.0


def assert_equal(found: Arrays, wanted: Arrays) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-11, abs=1e-12), name


def test_lion_is_its_definition() -> None:
    def update(
        name: str, value: np.ndarray, gradient: np.ndarray, step: int, memory: dict[str, Any]
    ) -> np.ndarray:
        m = memory.get("m", np.zeros_like(value))
        direction = np.sign(0.8 * m + 0.2 * gradient)
        memory["m"] = 0.95 * m + 0.05 * gradient
        return value - LR * (direction + decay_of(name, value) * value)

    config = LionConfig(lr=LR, weight_decay=DECAY, betas=(0.8, 0.95), warmup_steps=0)
    assert_equal(trained(config), by_definition(update))


def adamw(value: np.ndarray, gradient: np.ndarray, step: int, memory: dict[str, Any]) -> np.ndarray:
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * gradient
    memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * gradient**2
    m, v = memory["m"] / (1 - 0.9 ** (step + 1)), memory["v"] / (1 - 0.95 ** (step + 1))
    return np.asarray(value - LR * m / (np.sqrt(v) + 1e-8))


@pytest.mark.parametrize(("nesterov", "of_adamw"), [(True, []), (False, ["0.*", "2.weight"])])
def test_muon_is_its_definition(nesterov: bool, of_adamw: list[str]) -> None:
    """By singular values: the polynomial acts on each of them alone."""

    def update(
        name: str, value: np.ndarray, gradient: np.ndarray, step: int, memory: dict[str, Any]
    ) -> np.ndarray:
        if not name.endswith("weight") or value.ndim == 1:
            return adamw(value, gradient, step, memory)
        if (of_adamw and name == "0.weight") or name in of_adamw:
            return adamw(value * (1 - LR * DECAY), gradient, step, memory)
        memory["b"] = 0.7 * memory.get("b", 0) + 0.3 * gradient
        direction = 0.3 * gradient + 0.7 * memory["b"] if nesterov else memory["b"]
        matrix = direction.reshape(len(value), -1)
        left, size, right = np.linalg.svd(matrix, full_matrices=False)
        size = size / np.sqrt((size**2).sum())
        for _ in range(5):
            size = 3.4445 * size - 4.7750 * size**3 + 2.0315 * size**5
        step_size = LR * 0.2 * np.sqrt(max(matrix.shape))
        step_taken = ((left * size) @ right).reshape(value.shape)
        return np.asarray(value * (1 - LR * DECAY) - step_size * step_taken)

    config = MuonConfig(
        lr=LR, weight_decay=DECAY, momentum=0.7, nesterov=nesterov, adamw=of_adamw, warmup_steps=0
    )
    assert_equal(trained(config), by_definition(update))


@pytest.mark.exhaustive
def test_muon_is_that_of_torch_up_to_its_bfloat16() -> None:
    """Of matrices, which torch's takes only."""
    torch.manual_seed(1)
    ours, theirs = (nn.Linear(12, 7, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    start = ours.weight.detach().clone()
    mine = build_optimizer(dict(ours.named_parameters()), MuonConfig(lr=LR, weight_decay=DECAY))
    torchs = torch.optim.Muon(
        theirs.parameters(),
        lr=LR,
        weight_decay=DECAY,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(STEPS):
        ours.weight.grad = torch.randn(7, 12)
        theirs.weight.grad = ours.weight.grad.clone()
        mine.step()
        torchs.step()
    moved = (ours.weight - start).norm()
    assert (ours.weight - theirs.weight).norm() < 0.02 * moved


def test_complex_weights_are_two_real_ones() -> None:
    """They have no sign and no matrix of their own: Muon leaves them to AdamW."""
    torch.manual_seed(2)
    for config in (LionConfig(lr=LR), MuonConfig(lr=LR)):
        whole = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))
        parts = nn.Parameter(torch.view_as_real(whole.detach()).clone())
        other = config if isinstance(config, LionConfig) else replace(config, adamw=["*"])
        ours, theirs = build_optimizer({"w": whole}, config), build_optimizer({"w": parts}, other)
        for _ in range(STEPS):
            whole.grad = torch.randn(3, 4, dtype=torch.complex128)
            parts.grad = torch.view_as_real(whole.grad).clone()
            ours.step()
            theirs.step()
        found, wanted = torch.view_as_real(whole.detach()), parts.detach()
        with entry(config.name):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0)


def test_muon_takes_gradients_that_have_nearly_vanished() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = build_optimizer({"weight": weight}, MuonConfig(lr=0.1))
    for size in (1e-22, 1e-30, 0.0):
        weight.grad = torch.full((4, 3), size)
        optimizer.step()
        assert weight.isfinite().all()


def test_muon_resumes_with_the_same_matrices_only(tmp_path: Path) -> None:
    saved = small_state(config=MuonConfig())
    take_step(saved)
    save_checkpoint(tmp_path, saved, "")
    other = small_state(config=MuonConfig(adamw=["*"]))
    with pytest.raises(UserError, match=r"^resume: the checkpoint has momentum_buffer of "):
        load_checkpoint(tmp_path, other)


@pytest.mark.slow
def test_earlier_segments_learn_more_slowly(tmp_path: Path) -> None:
    config = make_config(make_store(tmp_path, 9), tmp_path / "run")
    config = replace(config, optimizer=replace(config.optimizer, layer_decay=0.5))
    training = built(config, alone())
    (part,) = training.trainer.state.parts
    assert isinstance(part, UNet)
    names = [segment.name for segment in part.segments()]
    factors = learning_rate_factors([part], config.optimizer)
    assert factors.keys() == training.trainer.state.parameters.keys()
    assert factors["head.weight"] == factors["norm.weight"] == 1
    for index, name in enumerate(names):
        wanted = 0.5 ** (len(names) - 1 - index)
        inside = [f for key, f in factors.items() if key.startswith(f"{name}.")]
        assert inside == [wanted] * len(inside)
        assert inside
    rates = {}
    for group in training.trainer.state.optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter)] = group["initial_lr"], group["weight_decay"]
    for name, parameter in training.trainer.state.parameters.items():
        decay = config.optimizer.weight_decay if has_weight_decay(name, parameter) else 0
        assert rates[id(parameter)] == (config.optimizer.lr * factors[name], decay)
    lr = float(training.trainer.state.schedule.get_last_lr()[0])
    assert lr == pytest.approx(config.optimizer.lr / 3)  # of the last segment, warming up


OFFLOADED = ParallelConfig(data=2, data_mode="fsdp2", cpu_offload=True)
WRONG_KEYS: list[tuple[Callable[[], object], str]] = [
    (lambda: LionConfig(betas=(0.9, 1.0)), "^optimizer.betas: "),
    (lambda: LionConfig(name="adam"), "^optimizer.name: needs one of lion, got 'adam'"),
    (lambda: MuonConfig(momentum=1.0), "^optimizer.momentum: "),
    (lambda: MuonConfig(eps=0.0), "^optimizer.eps: "),
    (
        lambda: replace(
            make_config(Path("s"), Path("r")), optimizer=MuonConfig(), parallel=OFFLOADED
        ),
        "^optimizer=muon: needs whole matrices.* Set parallel.cpu_offload=false",
    ),
    (lambda: LionConfig(layer_decay=0.0), "^optimizer.layer_decay: .* above 0"),
    (lambda: LionConfig(layer_decay=1.5), "^optimizer.layer_decay: "),
    (
        lambda: learning_rate_factors([nn.Linear(2, 2)], LionConfig(layer_decay=0.5)),
        "^optimizer.layer_decay: needs a model with segments.*Linear has none",
    ),
]


def test_wrong_keys_are_refused_in_one_line() -> None:
    assert_refused(WRONG_KEYS)
