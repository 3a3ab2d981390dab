"""Random numbers on tensors of the globe: of bands, and of what has no rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import DomainParallelManager, shard_tensor
from credit_dp.domain_parallel.band_tensor import random as draws
from credit_dp.domain_parallel.band_tensor.boundary import attach_domain
from credit_dp.domain_parallel.thread_ranks import RankError
from tests.ranks import cpu_only, on_processes, on_threads
from tests.tables import entry

SHAPE = (2, 8, 7, 6)


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def attached(
    manager: DomainParallelManager, function: Callable[[Any, Tensor], Any]
) -> tuple[Model, Tensor]:
    """Return a model and a band, on ranks whose generators are in other states."""
    for _ in range(manager.domain_rank + 1):
        seed = 17 * manager.domain_rank
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
    model = Model(function)
    model.generator.manual_seed(seed)
    attach_domain(model, manager, [SHAPE])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model, shard_tensor(x, manager=manager).clone()


AS_ON_ONE_PROCESS = {
    "pool": lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5)),
    "pool of a mean": lambda x: F.fractional_max_pool2d(x.mean(1), 2, output_ratio=(0.5, 0.5)),
    "normal": lambda x: nn.init.normal_(torch.empty(8)),
    "kaiming": lambda x: nn.init.kaiming_uniform_(torch.empty(8, 8)),
    "uniform": lambda x: nn.init.uniform_(x.mean((2, 3)).detach()),
    "orthogonal": lambda x: nn.init.orthogonal_(torch.empty(4, 4)),
    "svd": lambda x: torch.svd_lowrank(x.mean(2).detach(), 2)[0].abs(),
    "dropout of a mean": lambda x: F.dropout(x.mean((2, 3))),
    "dropout of channels": lambda x: F.dropout2d(x),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x, training=True),
    "stochastic depth": lambda x: x * torch.rand(2, 1, 1, 1).round(),
    "order": lambda x: torch.randperm(9).double(),
    "choice": lambda x: torch.multinomial(x.mean((2, 3)).softmax(1), 3).double(),
    "choice of a field": lambda x: torch.multinomial(x.exp().flatten(2)[0], 3).double(),
    "of Python": lambda x: torch.tensor([random.random(), np.random.rand()]),
}


def _draw(model: Model, x: Tensor) -> dict[str, Tensor]:
    return {name: draw(x).flatten() for name, draw in AS_ON_ONE_PROCESS.items()}


def _draw_on_bands(manager: DomainParallelManager) -> dict[str, Tensor]:
    model, band = attached(manager, _draw)
    return model(band)  # type: ignore[no-any-return]


def test_what_has_no_rows_is_drawn_as_on_one_process() -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = _draw(Model(_draw), x)
    for drawn in on_processes(3, _draw_on_bands):
        for name, values in expected.items():
            with entry(name):
                assert drawn[name].shape == values.shape
                torch.testing.assert_close(drawn[name], values)


DRAWS_OF_BANDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "rand_like": lambda x, g: torch.rand_like(x),
    "randn_like": lambda x, g: torch.randn_like(x),
    "randint_like": lambda x, g: torch.randint_like(x, 2**30),
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x, g: x.clone().bernoulli_(0.5),
    "bernoulli_ of a field": lambda x, g: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal_": lambda x, g: x.clone().normal_(),
    "normal_ of a generator": lambda x, g: x.clone().normal_(generator=g),
    "normal": lambda x, g: torch.normal(x, x.exp()),
    "uniform_": lambda x, g: nn.init.uniform_(x.clone()),
    "exponential_": lambda x, g: torch.empty_like(x).exponential_(generator=g),
    "others in place": lambda x, g: x.clone().cauchy_() + x.clone().log_normal_(),
    "geometric_": lambda x, g: torch.empty_like(x).geometric_(0.01),
    "random_": lambda x, g: torch.empty_like(x).random_(),
    "poisson": lambda x, g: torch.poisson(1000 + x.exp(), generator=g),
    "dropout": lambda x, g: F.dropout(x + 9),
    "alpha dropout": lambda x, g: F.alpha_dropout(x, training=True),
    "native dropout": lambda x, g: torch.native_dropout(x + 9, 0.5, True)[0],
    "rrelu": lambda x, g: F.rrelu(-x.exp(), training=True),
    "gumbel": lambda x, g: F.gumbel_softmax(x),
    "view": lambda x, g: x.clone().flatten(1).normal_().view(x.shape),
    "noise of rows": lambda x, g: torch.nn.init.trunc_normal_(x[0, 0].clone())[None, None],
}


def _draw_bands_and_others(manager: DomainParallelManager) -> Any:
    def function(model: Model, x: Tensor) -> Any:
        drawn = {}
        for name, draw in DRAWS_OF_BANDS.items():
            y = draw(x.detach(), model.generator)
            numbers = torch.rand(2), torch.rand(2, generator=model.generator)
            drawn[name] = y, *numbers
        return drawn

    model, band = attached(manager, function)
    first, second = model(band), model(band)
    with torch.inference_mode():
        model(band)
    # The first rank goes on from where it is, others from where they were.
    after = torch.get_rng_state()
    torch.manual_seed(17 * manager.domain_rank)
    is_restored = torch.equal(after, torch.get_rng_state())
    return first, second, is_restored


def test_bands_differ_between_ranks_and_nothing_else_does() -> None:
    results = on_processes(3, _draw_bands_and_others)
    assert [is_restored for *_, is_restored in results] == [False, True, True]
    for name in DRAWS_OF_BANDS:
        with entry(name):
            for forward in (0, 1):
                bands, *others = zip(*(result[forward][name] for result in results), strict=True)
                for numbers in others:
                    assert torch.equal(numbers[0], numbers[1])
                    assert torch.equal(numbers[0], numbers[2])
                assert not torch.equal(bands[1], bands[2])
            assert not torch.equal(results[0][0][name][0], results[0][1][name][0])


def _draw_again(manager: DomainParallelManager) -> list[bool]:
    """Return whether what backward computes again has the numbers of the forward."""
    results = []
    for use_reentrant in (True, False):

        def function(model: Model, x: Tensor, use_reentrant: bool = use_reentrant) -> Tensor:
            def block(x: Tensor) -> Tensor:
                y = F.dropout2d(F.dropout(x, 0.4), 0.2) * torch.rand(8, 1, 1)
                return y * (1 + F.dropout(y.detach().mean((2, 3), keepdim=True)).abs())

            torch.rand(1)
            y = checkpoint(block, x, use_reentrant=use_reentrant)
            torch.randn_like(x)
            return y  # type: ignore[no-any-return]

        model, band = attached(manager, function)
        y = model(band.requires_grad_())
        torch.rand(3 + manager.domain_rank)
        y.sum().backward()
        assert band.grad is not None
        results.append(torch.allclose(band.grad * band, y))
    return results


@cpu_only("its blocks draw on the CPU, too")
def test_backward_draws_the_numbers_of_forward() -> None:
    assert on_processes(3, _draw_again) == [[True, True]] * 3


def test_numbers_have_the_wanted_distribution() -> None:
    def drawn(manager: DomainParallelManager) -> list[float]:
        def function(model: Model, x: Tensor) -> Tensor:
            ones = x.new_ones(200, 3, 7, 60) + 0 * x[:1, :1, :, :1]
            return torch.stack([F.dropout(ones, 0.25), torch.randn_like(ones)]).mean((1, 2, 3, 4))

        model, band = attached(manager, function)
        return model(band).tolist()  # type: ignore[no-any-return]

    for dropped, noise in on_threads(3, drawn):
        assert dropped == pytest.approx(1, abs=0.01)
        assert noise == pytest.approx(0, abs=0.01)


DROP_NOTHING = {
    "evaluation": lambda x: F.dropout2d(x, 0.5, False),
    "nothing dropped": lambda x: F.dropout2d(x, 0.0),
    "torch": lambda x: torch.feature_dropout(x, 0.5, False),
    "alpha": F.alpha_dropout,
    "module": lambda x: nn.Dropout().eval()(x),
}


def test_a_dropout_that_drops_nothing_returns_its_argument() -> None:
    def function(model: Model, x: Tensor) -> list[Tensor]:
        results = []
        for dropout in DROP_NOTHING.values():
            z = x + 0
            y = dropout(z)
            y += 1
            results.append(z + y)
        return results

    def on_rank(manager: DomainParallelManager) -> list[bool]:
        model, band = attached(manager, function)
        return [torch.equal(y, 2 * (band + 1)) for y in model(band)]

    assert on_threads(3, on_rank) == [[True] * len(DROP_NOTHING)] * 3


def test_ranks_that_are_threads_agree_on_whole_tensors() -> None:
    def on_rank(manager: DomainParallelManager) -> Tensor:
        def function(model: Model, x: Tensor) -> Tensor:
            mean = x.mean((2, 3)).detach()
            return torch.cat([torch.rand_like(mean), mean.normal_(), mean.sigmoid().bernoulli()])

        model, band = attached(manager, function)
        return model(band)  # type: ignore[no-any-return]

    first, *others = on_threads(3, on_rank)
    assert all(torch.equal(first, other) for other in others)


def _fail_on_one_rank(manager: DomainParallelManager) -> None:
    model, band = attached(manager, lambda model, x: x * torch.rand(1))
    model(band if manager.domain_rank != 1 else band.repeat(1, 1, 2, 1))


def test_an_error_of_one_rank_is_one_of_all() -> None:
    with pytest.raises(RankError, match="rank 1"):
        on_processes(3, _fail_on_one_rank)


def _gathers_of_a_forward(manager: DomainParallelManager) -> list[int]:
    """Return how often a forward gathers, by itself and while a CUDA graph is captured."""
    model, band = attached(manager, lambda model, x: 2 * x)
    counts = []
    for captured in (False, True):
        gather = mock.Mock(wraps=manager.transport.all_gather)
        with (
            mock.patch.object(draws, "is_captured", lambda device, captured=captured: captured),
            mock.patch.object(manager.transport, "all_gather", gather),
        ):
            model(band)
        counts.append(gather.call_count)
    return counts


def test_a_captured_forward_exchanges_no_numbers_of_python() -> None:
    """The host would wait for them, which a CUDA graph can't hold."""
    assert on_processes(3, _gathers_of_a_forward) == [[1, 0]] * 3
