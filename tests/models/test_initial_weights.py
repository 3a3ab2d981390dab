"""Initial weights that are computed one by one: the bits of a model that is built as usual."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from credit_dp.models import initial_weights
from credit_dp.models.initial_weights import build_on_meta, build_without_weights
from tests.ranks import cpu_only

pytestmark = cpu_only("initial weights are drawn there, whatever computes with them")


@pytest.fixture(autouse=True)
def keep_nothing(monkeypatch):
    """Release each parameter as soon as another one is used."""
    monkeypatch.setattr(initial_weights, "KEPT_BYTES", 0)


class Drawn(nn.Module):
    """Initialised in place, again and again, by parts, and from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 7)
        self.scaled = nn.Parameter(0.02 * torch.randn(5, 7))
        self.second = nn.Embedding(9, 7, padding_idx=2)
        generator = torch.Generator().manual_seed(4)
        nn.init.normal_(self.first.bias, generator=generator)
        self.own = nn.Parameter(torch.rand(7, generator=generator))
        self.first.apply(lambda layer: nn.init.xavier_normal_(layer.weight))
        with torch.no_grad():
            self.second.weight[3:].mul_(2).add_(self.first.bias)
            self.own.copy_(self.own.flip(0))
            self.own.copy_(self.own)
        self.first.weight.data = self.first.weight.data.double()


class Copied(nn.Module):
    """Of copies, of shared parameters, and of some that are held elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = layer.linear1.weight
        self.recurrent = nn.LSTM(4, 4)
        self.held = [layer.linear2.weight, layer.linear1.weight.detach()]


class Read(nn.Module):
    """Whose weights are read, by torch and by others, and written to by others."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 9))
        self.weights = nn.utils.parametrizations.weight_norm(nn.Linear(7, 9))
        self.cut = nn.Linear(7, 9)
        nn.init.trunc_normal_(self.cut.weight, std=0.4, a=-0.4, b=0.4)
        if self.cut.weight.max() > self.normal.bias[0].item():
            nn.init.orthogonal_(self.weights.parametrizations.weight.original1)
        self.cut.bias.detach().numpy()[2:] = 7
        self.cut.bias.data.mul_(2)
        self.from_numpy = nn.Parameter(torch.from_numpy(torch.rand(4, 5).numpy()))
        self.from_list = nn.Parameter(torch.tensor([1.5, 2.5]))
        sparse = self.cut.weight.detach().to_sparse()
        self.from_sparse = nn.Parameter((2 * sparse).to_dense())
        self.register_buffer("sum", torch.tensor(self.cut.weight.tolist()).sum())


class Sine(nn.Module):
    """Built in another dtype than the rest."""

    def __init__(self) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3) for _ in range(3))
        torch.set_default_dtype(before)
        self.last = nn.BatchNorm2d(3)
        self.layers[1].weight.requires_grad_(False)


# An operator that draws numbers without the tag that says so.
LIBRARY = torch.library.Library("initial_weights_test", "DEF")
LIBRARY.define("draw_like(Tensor x) -> Tensor")
LIBRARY.impl("draw_like", torch.randn_like, "CPU")


class Unusual(nn.Module):
    """Of conjugates, which are views in torch, of a custom operator, and of a tensor that grows."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(4, 4, dtype=torch.complex64)
        self.product = nn.Parameter(x.conj().T @ x)
        self.conjugate = nn.Parameter(x.conj().clone())
        self.imaginary = nn.Parameter(x.conj().imag.clone())  # a negative view
        self.custom = nn.Parameter(torch.ops.initial_weights_test.draw_like(torch.ones(3)))
        self.grown = nn.Parameter(torch.empty(0))
        torch.randn(3, 4, out=self.grown.data)
        self.last = nn.Linear(3, 3)
        with torch.no_grad():
            self.grown.mul_(2)
        self.after = nn.Linear(3, 3)


class Threaded(nn.Module):
    """Whose weights are written to by another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(nn.init.constant_, self.first.weight, 3.0).result()
        self.last = nn.Linear(3, 3)


def test_the_weights_are_those_of_the_usual_model():
    for build in (Drawn, Copied, Read, Sine, Unusual, Threaded):
        check_weights(build)


def check_weights(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    usual = build()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model, weights = build_without_weights(build)
    assert torch.equal(torch.get_rng_state(), state), build
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = dict(usual.named_parameters(remove_duplicate=False))
    assert parameters.keys() == wanted.keys(), build
    for name, parameter in wanted.items():
        found, value, where = parameters[name], weights.value(name), (build, name)
        assert found.is_meta, where
        assert found.requires_grad == parameter.requires_grad, where
        assert torch.equal(value, parameter), where
        assert found.dtype == value.dtype == parameter.dtype, where
        assert found.stride() == value.stride() == parameter.stride(), where
    for (name, buffer), found in zip(usual.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(found, buffer), (build, name)
    assert len({*model.parameters()}) == len({*usual.parameters()})  # shared ones stay shared
    assert torch.equal(torch.get_rng_state(), state), build
    if build is Copied:  # parameters that are held elsewhere have values there
        assert all(torch.equal(*pair) for pair in zip(model.held, usual.held, strict=True))


def test_a_model_that_reads_weights_is_built_on_meta():
    assert all(parameter.is_meta for parameter in build_on_meta(Read).parameters())
    assert all(parameter.is_meta for parameter in build_on_meta(Sine).parameters())
    # Torch has a TypeError for this one.
    numbers = build_on_meta(lambda: nn.Linear(int(nn.Linear(2, 3).weight.detach().numpy().size), 1))
    assert numbers.weight.is_meta
