"""A user's optimizers: they resume exactly, or their first step is refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from credit_dp.config import AdamWConfig, LionConfig, OwnOptimizerConfig
from credit_dp.data.store import Store
from credit_dp.errors import UserError
from credit_dp.training import start_checks
from credit_dp.training.checkpoint import load_checkpoint
from credit_dp.training.optim import build_optimizer, moments_per_parameter
from credit_dp.training.start_checks import check_start
from tests.checkpoints import save_checkpoint
from tests.training.plugins import TorchOptimizerConfig
from tests.training.refusals import assert_refused
from tests.training.runs import make_config, make_store
from tests.training.states import (
    TiedAndUnused,
    same_tensors,
    small_state,
    state_of_model,
    take_step,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
}


def parameters() -> dict[str, nn.Parameter]:
    return dict(TiedAndUnused().named_parameters())


def test_optimizers_of_torch_resume_bit_by_bit(tmp_path):
    for kind, options in OPTIMIZERS.items():
        config = TorchOptimizerConfig(kind=kind, options=options, warmup_steps=2)
        saved, loaded = small_state(seed=1, config=config), small_state(seed=2, config=config)
        take_step(saved)
        save_checkpoint(tmp_path / kind, saved, "")
        load_checkpoint(tmp_path / kind, loaded)
        assert same_tensors(saved, loaded), kind
        take_step(saved)
        take_step(loaded)
        assert same_tensors(saved, loaded), kind


def test_a_parameter_that_was_frozen_starts_with_its_first_state(tmp_path):
    config = TorchOptimizerConfig(kind="Adagrad", options={"initial_accumulator_value": 0.5})
    saved = small_state(config=config)
    frozen = saved.parts[0][0].weight
    frozen.requires_grad_(False)
    del saved.optimizer.state[frozen]
    take_step(saved)
    save_checkpoint(tmp_path, saved, "")
    loaded = small_state(seed=2, config=config)
    load_checkpoint(tmp_path, loaded)
    first, second = (loaded.optimizer.state[conv.weight]["sum"] for conv in loaded.parts[0])
    assert (first == 0.5).all()
    assert (second > 0.5).all()
    take_step(loaded)


def test_a_plugin_has_the_groups_and_the_rates_of_ours():
    own, ours = (
        build_optimizer(parameters(), config)
        for config in (TorchOptimizerConfig(lr=0.2, weight_decay=0.3), AdamWConfig(lr=0.2))
    )
    assert [len(group["params"]) for group in own.param_groups] == [
        len(group["params"]) for group in ours.param_groups
    ]
    assert [(group["lr"], group["weight_decay"]) for group in own.param_groups] == [
        (0.2, 0.3),
        (0.2, 0.0),
    ]


def test_another_optimizer_or_another_state_does_not_resume(tmp_path):
    save_checkpoint(tmp_path / "other", small_state(), "")
    other = small_state(config=TorchOptimizerConfig())
    with pytest.raises(UserError, match=r"with optimizer=adamw, the config has of_torch\. Set opt"):
        load_checkpoint(tmp_path / "other", other)
    saved = small_state(config=TorchOptimizerConfig(kind="Adam"))
    take_step(saved)
    save_checkpoint(tmp_path, saved, "")
    other = small_state(config=TorchOptimizerConfig(kind="Adam", options={"amsgrad": True}))
    load_checkpoint(tmp_path, other)
    with pytest.raises(UserError, match=r"Config fails at .*\(KeyError: 'max_exp_avg"):
        take_step(other)
    weight = next(iter(saved.parameters.values()))
    saved.optimizer.state[weight]["left"] = torch.eye(3)
    save_checkpoint(tmp_path / "matrices", saved, "")
    with pytest.raises(UserError, match=r"has exp_avg, exp_avg_sq, left, step of 0\.bias, wh"):
        load_checkpoint(tmp_path / "matrices", small_state(config=TorchOptimizerConfig()))


def test_a_parameter_without_dimensions_comes_back(tmp_path):
    config = TorchOptimizerConfig()
    saved, loaded = (state_of_model(TiedAndUnused(), seed, config) for seed in (1, 2))
    for state in (saved, loaded):
        for parameter in state.trainable_parameters.values():
            parameter.grad = torch.rand_like(parameter)
        state.optimizer.step()
    save_checkpoint(tmp_path, saved, "")
    load_checkpoint(tmp_path, loaded)
    assert same_tensors(saved, loaded)


Update = Callable[["Plain", nn.Parameter, dict[str, Any]], None]


class Plain(Optimizer):
    """Calls a function for each parameter."""

    def __init__(self, groups: Sequence[dict[str, Any]], update: Update) -> None:
        super().__init__(groups, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(self, parameter, self.state[parameter])


@dataclass
class Made(OwnOptimizerConfig):
    name: str = "made"
    step: Any = None

    def build(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        return Plain(groups, self.step)


def first_step(config: OwnOptimizerConfig) -> None:
    weights = parameters()
    optimizer = build_optimizer(weights, config)
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def descend(p: nn.Parameter, by: torch.Tensor | float) -> None:
    assert p.grad is not None
    p.sub_(p.grad * by)


def counts(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
    state["count"] = state.get("count", 0) + 1
    descend(p, 0.1)


def keeps_rows(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
    state["rows"] = torch.zeros(7)
    descend(p, 0.1)


def keeps_half(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
    state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)


def keeps_dots(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
    state["a.b"] = torch.zeros_like(p)


def keeps_more(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
    optimizer.state["all"] = {}


def fails(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
    raise RuntimeError("no\nway")


BAD_STEPS = [
    (counts, r"optimizer=made: keeps 'count' of a parameter as int\. Checkpoints hold tensors"),
    (keeps_rows, r"keeps 'rows' as \(7,\) of torch\.float32 for a parameter of \(4, 4, 3, 3\)"),
    (keeps_half, r"keeps 'mean' as \(4, 4, 3, 3\) of torch\.bfloat16 for a parameter of"),
    (keeps_dots, r"keeps 'a\.b' of a parameter as torch\.float32\. .* by keys without dots"),
    (keeps_more, r"optimizer=made: keeps state that belongs to no parameter\. Checkpoints"),
    (fails, r"optimizer: the optimizer of Made fails at .*:\d+ \(RuntimeError: no way\)\.$"),
]
BAD_KINDS = [  # of torch
    ("LBFGS", r"optimizer: TorchOptimizerConfig\.build fails at .*\(ValueError: LBFGS doesn't"),
    ("SparseAdam", r"the optimizer of TorchOptimizerConfig fails at .*dense gradients"),
    ("Adafactor", r"keeps 'row_var' as \(4, 4, 3, 1\) of torch\.float32 for a parameter of"),
    ("Lion", r"TorchOptimizerConfig\.build fails at .*plugins\.py:\d+ \(AttributeError: module"),
]


def test_what_checkpoints_do_not_hold_is_refused():
    configs = [(Made(step=update), expected) for update, expected in BAD_STEPS]
    configs += [(TorchOptimizerConfig(kind=kind), expected) for kind, expected in BAD_KINDS]
    assert_refused((partial(first_step, config), expected) for config, expected in configs)


def test_full_memory_is_left_to_the_run():
    def full(optimizer: Plain, p: nn.Parameter, state: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        first_step(Made(step=full))


def test_memory_of_plugins_is_estimated_as_that_of_adamw():
    configs = [AdamWConfig(), TorchOptimizerConfig(), LionConfig()]
    assert [moments_per_parameter(config) for config in configs] == [2, 2, 1]


@dataclass
class Unfinished(OwnOptimizerConfig):
    name: str = "unfinished"


@dataclass
class NoOptimizer(Unfinished):
    def build(self, groups: Sequence[dict[str, Any]]) -> Any:
        return groups


@dataclass
class Few(Unfinished):
    def build(self, groups: Sequence[dict[str, Any]]) -> Any:
        return torch.optim.SGD([groups[0]])


BAD_BUILDS = [
    (Unfinished(), r"optimizer: Unfinished has no build\. It needs a method build\(self, gro"),
    (NoOptimizer(), r"NoOptimizer\.build has to return a torch\.optim\.Optimizer, got list\."),
    (Few(), r"optimizer: Few\.build has to use the parameters of all groups, and no others\."),
]


def test_a_build_that_is_none_is_one_line():
    assert_refused(
        (partial(build_optimizer, parameters(), config), expected)
        for config, expected in BAD_BUILDS
    )


@dataclass
class Strict(OwnOptimizerConfig):
    """Needs matrices of true sizes, and has a step of its own."""

    name: str = "strict"

    def build(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        assert max(min(p.shape, default=0) for group in groups for p in group["params"]) > 1
        optimizer = torch.optim.SGD(groups)
        take = optimizer.step

        def double() -> None:
            take()
            take()

        optimizer.step = double  # type: ignore[method-assign, assignment]
        return optimizer


def test_a_step_that_a_plugin_sets_is_taken():
    weights = {"weight": nn.Parameter(torch.zeros(3, 2))}
    optimizer = build_optimizer(weights, Strict(lr=0.5, weight_decay=0.0))
    weights["weight"].grad = torch.ones(3, 2)
    optimizer.step()
    assert (weights["weight"] == -1).all()


def test_a_check_builds_a_plugin_on_true_shapes_and_never_where_ranks_wait(tmp_path, monkeypatch):
    path = make_store(tmp_path, 17)
    config = replace(make_config(path, tmp_path), optimizer=Strict())
    built = []
    build = Strict.build
    monkeypatch.setattr(
        Strict, "build", lambda self, groups: (built.append(1), build(self, groups))[1]
    )
    check_start(config, Store.open(config.data), 1)
    assert built == [1]
    # Only rank 0 checks: a plug-in that communicates would wait for the others.
    monkeypatch.setattr(start_checks, "has_process_group", lambda: True)
    check_start(config, Store.open(config.data), 1)
    assert built == [1]
