"""The mean of gradients over ranks, and clipping by their global norm."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from credit_dp.config import ParallelConfig, StandardLossConfig
from credit_dp.data.loader import Batch
from credit_dp.domain_parallel import DomainParallelManager, gradients
from credit_dp.domain_parallel.planning.model_plan import parameters_outside_graph
from credit_dp.errors import UserError
from credit_dp.training.forecast_step import ForecastStep
from credit_dp.training.forward_backward import (
    ModelForwardBackward,
    average_gradients,
    clip_gradients,
    new_stage_group,
)
from credit_dp.training.loss import WeightedLoss
from credit_dp.training.model_parts import wrap_in_ddp
from tests.ranks import on_processes

SHAPES = [(3, 2), (5,), (), (2, 2, 2), (7,), (4,)]


def parameters_of(rank: int) -> list[nn.Parameter]:
    """Return parameters of two dtypes; some are frozen or lack a gradient on some or all ranks."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for number, shape in enumerate(SHAPES):
        dtype = torch.float32 if number == 3 else torch.float64
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=number != 2)
        if parameter.requires_grad and number != 5 and not (number == 1 and rank == 0):
            parameter.grad = torch.randn(shape, generator=generator, dtype=dtype)
        made.append(parameter)
    return made


BUCKETS = (1, 60, 2**25)


def means(manager: DomainParallelManager) -> list[list[torch.Tensor | None]]:
    """Return the averaged gradients by the size of buckets."""
    found = []
    group = new_stage_group(manager)
    assert group is not None
    for bucket in BUCKETS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradients, "BUCKET", bucket)
            parameters = parameters_of(manager.rank)
            average_gradients(parameters, group)
        found.append([p.grad for p in parameters])
    return found


def test_gradients_are_averaged_over_the_ranks_that_hold_the_same_stage():
    found = on_processes(4, means, domain=1, pipeline=2)
    for rank, (bucket, size), number in product(range(4), enumerate(BUCKETS), range(len(SHAPES))):
        stage = rank // 2
        both = [parameters_of(other)[number].grad for other in (2 * stage, 2 * stage + 1)]
        there = [gradient for gradient in both if gradient is not None]
        averaged = found[rank][bucket][number]
        if not there:
            assert averaged is None, (rank, size, number)
        else:
            same = torch.allclose(averaged, sum(there) / 2, rtol=1e-15)
            assert same, (rank, size, number)


LIMITS = (None, 0.5, 1e6)


def clip(manager: DomainParallelManager) -> list[tuple[float, list[torch.Tensor]]]:
    """Return the norm, and the clipped gradients, by limit."""
    found = []
    for limit in LIMITS:
        parameters = parameters_of(manager.pipeline_rank)
        norm = clip_gradients(parameters, limit, manager)
        found.append((norm.item(), [p.grad for p in parameters if p.grad is not None]))
    return found


def test_the_norm_is_that_of_all_stages():
    found = on_processes(2, clip, domain=1, pipeline=2)
    before = [p.grad for rank in (0, 1) for p in parameters_of(rank) if p.grad is not None]
    norm = torch.cat([gradient.flatten().double() for gradient in before]).norm().item()
    for number, limit in enumerate(LIMITS):
        scale = min(1.0, (limit or 1e9) / norm)
        after = [gradient for of_rank in found for gradient in of_rank[number][1]]
        assert [of_rank[number][0] for of_rank in found] == pytest.approx([norm] * 2, rel=1e-7)
        for a, b in zip(after, before, strict=True):
            assert torch.allclose(a, b * scale, rtol=1e-5), limit


def clip_one_stage(manager: DomainParallelManager) -> list[float]:
    norms = []
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
        if manager.pipeline_rank == 1:
            parameter.grad = torch.tensor([3.0, 4.0], dtype=dtype)
        norms.append(clip_gradients([parameter], 0.5, manager).item())
    return norms


def test_a_stage_in_which_nothing_learns_knows_the_norm():
    assert on_processes(2, clip_one_stage, domain=1, pipeline=2) == [[5.0, 5.0], [5.0, 5.0]]


class Idle(nn.Module):
    """Has a parameter that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Conv2d(1, 1, 1), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def refusals_of_idle(manager: DomainParallelManager) -> list[str]:
    """Take a step of each model with DDP, and return how it is refused."""
    lines = []
    for kind in (Idle, IdleAtLast):
        with pytest.raises(UserError) as error:
            take_step(wrap_in_ddp(kind(), ParallelConfig(data=manager.dp_world_size)))
        lines.append(str(error.value))
    return lines


def take_step(model: nn.Module) -> None:
    """Take a step of two micro-batches."""
    one, nothing = torch.ones(1), torch.zeros(2, 0, 4, 4)
    scale = one.view(1, 1, 1)
    loss = WeightedLoss(StandardLossConfig(), torch.ones(4), one, scale, 4)
    x = torch.ones(2, 1, 4, 4)
    batch = Batch(x, nothing, nothing, 2 * x, np.zeros(2, "datetime64[ns]"))
    ModelForwardBackward(model, ForecastStep(model, scale), loss, 2, 1)(
        batch, lambda part, micro, step: None
    )


def last_measured_pass(manager: DomainParallelManager) -> int:
    """Return the number of the last forward pass that DDP has measured, of 102."""
    model = wrap_in_ddp(nn.Linear(1, 1), ParallelConfig(data=manager.dp_world_size))
    for _ in range(102):
        model(torch.ones(1)).sum().backward()
    return int(model._get_ddp_logging_data()["iteration"])


def test_ddp_measures_its_first_passes_only():
    """A CUDA graph that is captured after them can't hold what it would measure."""
    assert max(on_processes(2, last_measured_pass, domain=1)) <= 10


class Detached(Idle):
    """Returns what autograd knows nothing of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.used(x).detach().numpy())


def test_an_output_that_autograd_does_not_know_is_refused():
    with pytest.raises(UserError, match=r"depends on no parameter that is trained, .*freeze"):
        take_step(Detached())


class IdleAtLast(Idle):
    """Uses all parameters in the first call only."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.used(x) * self.idle.mean() if self.calls == 1 else self.used(x)


def test_a_parameter_that_is_used_in_some_steps_only_is_refused_by_ddp():
    needed = "ddp needs the same parameters in the loss of every step, but idle is only in some"
    for lines in on_processes(2, refusals_of_idle, domain=1):
        assert all(needed in line for line in lines), lines


class RecomputedByHand(torch.autograd.Function):
    """Checkpointing as users write it: the graph does not have the parameters of `block`."""

    @staticmethod
    def forward(ctx: Any, block: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return None, x.grad


class Recomputing(Idle):
    """Has a layer that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RecomputedByHand.apply(self.used, self.first(x))


class IdleInEvaluation(Idle):
    """Uses all parameters in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.used(x)
        return y * self.idle.mean() if self.training else y


def test_only_parameters_without_a_gradient_are_left_out_of_ddp():
    for model, names in (
        (Idle(), ("idle",)),
        (Recomputing(), ()),
        (IdleInEvaluation().eval(), ()),  # built in this mode
    ):
        mode = model.training
        assert parameters_outside_graph(model, 1, (4, 4)) == names, type(model)
        assert model.training is mode, type(model)
