"""Models whose layers can't be converted, through the global view: equal to the unsharded model."""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    decide,
    shard_tensor,
    verify_domain_parallel,
)
from credit_dp.domain_parallel.decide import assumption_line, counting_manager
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.domain_parallel.view import running
from credit_dp.domain_parallel.view.attach import attached_view
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor.function_tables import FAMILIES
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, HEIGHTS, RANKS, Model
from tests.domain_parallel.equality import Clip
from tests.ranks import DEVICE, cpu_only, on_processes
from tests.tier_cases import every, tiers

WIDTH = 8


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class _Block(nn.Module):
    """A residual block that draws random numbers, without effect."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        # The thread of a GPU's backward, in which it may run again, has no default device.
        factor = torch.rand(x.shape[0], 1, 1, 1, device=x.device).mul(0).add(1)
        return x + F.gelu(self.norm(self.conv(x))) * factor


class _Model(nn.Module):
    """A function of fields between two convolutions, beside modules that it may call.

    Multiplying by coordinates made from the height is what conversion refuses.
    """

    def __init__(self, function, trains=True):
        super().__init__()
        self.function = function
        self.trains = trains
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.block = _Block()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Conv2d(WIDTH, 3, 1)

    def train(self, mode=True):
        return super().train(mode and self.trains)

    def forward(self, x):
        x = self.stem(x)
        x = x * torch.linspace(-1, 1, x.shape[-2], dtype=x.dtype)[:, None]
        return self.head(self.function(self, x))


def _filter(model, x):
    return torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]) * x


# Taken when the module is imported, as models of other packages do.
_clip_gradient = Clip.apply


@torch.library.custom_op("credit_dp_tests::clip", mutates_args=())
def _clip(x: torch.Tensor) -> torch.Tensor:
    return x * 1


_clip.register_fake(torch.empty_like)
_clip.register_autograd(lambda ctx, grad: grad / (1 + grad.norm()))


def _flip(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x.flip(2) * factor


@cache
def _scripted():
    with warnings.catch_warnings():  # a DeprecationWarning or FutureWarning
        warnings.filterwarnings("ignore", "`torch.jit.script")
        return torch.jit.script(_flip)


def _penalty(model, x):
    with torch.enable_grad():
        x = x * 1 if x.requires_grad else x.requires_grad_()
        y = (model.linear(x.transpose(1, 3)) ** 2).sum() + x.roll(1, 2).mul(x).mean()
        return x + torch.autograd.grad(y, x, create_graph=True)[0]


def _penalty_of_layers(model, x):
    """Return the field and the gradient of what layers of all kinds make of it."""
    with torch.enable_grad():
        x = x * 1 if x.requires_grad else x.requires_grad_()
        weight = model.block.conv.weight
        y = F.conv2d(x, weight, padding=1) * F.conv2d(x, weight, padding=2, dilation=2)
        y = F.group_norm(y, 1).softmax(2) + x.amax(2, True) * F.layer_norm(y, y.shape[1:])
        return x + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


def _gradient_of_a_parameter(model, x):
    with torch.enable_grad():
        bias = model.linear.bias * 1
        y = (x * bias[:, None, None]).square().mean((2, 3))
        return x + torch.autograd.grad(y, bias, y, create_graph=True)[0][:, None, None]


def _gradient_of_a_shared_parameter(model, x):
    """Return the field times gradients of parameters that the inputs of their layers depend on."""
    with torch.enable_grad():
        weight, bias = model.block.conv.weight * 1, model.linear.bias * 1
        y = F.conv2d(F.conv2d(x, weight, padding=1), weight, padding=1) * bias[:, None, None]
        y = F.batch_norm(F.group_norm(y, 1, bias), None, None, bias.exp(), training=True)
        loss = y.pow(3).mean()
        gradients = torch.autograd.grad(loss, (weight, bias), create_graph=True)
        return x * sum(gradient.square().sum() for gradient in gradients)


def _hook_tensors(model, x):
    if x.requires_grad:
        x = x * 1
        x.register_hook(lambda grad: grad / (1 + grad.norm()))
        bias = model.linear.bias * 1
        bias.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return x * bias[:, None, None]
    return x * model.linear.bias[:, None, None]


def _hook_tensors_without_rows(model, x):
    """Return the field times gradients of plain tensors, which hooks that are not linear change."""
    if not x.requires_grad:
        return x
    bias, filled = model.linear.bias * 1, torch.zeros(x.shape[1], 1, x.shape[3], dtype=x.dtype)
    filled[:] = x[0, :, :1]
    for y in (bias, filled):
        y.register_hook(lambda grad: grad.clamp(-0.1, 0.1) + grad**2)
    (of_bias,) = torch.autograd.grad(bias.exp().sum(), bias, create_graph=True)
    (of_filled,) = torch.autograd.grad((filled**3).sum(), filled, create_graph=True)
    return x * of_bias[:, None, None] * of_filled


def _hook_modules(model, x):
    handles = [
        model.linear.register_full_backward_hook(lambda m, gi, go: (gi[0] * go[0].mean(),)),
        model.linear.register_full_backward_pre_hook(lambda m, go: (go[0] / (1 + go[0].norm()),)),
    ]
    y = model.linear(x.transpose(1, 3)).transpose(1, 3)
    pooled = model.linear(x.mean((2, 3)))
    for handle in handles:
        handle.remove()
    return y * pooled[:, :, None, None]


def _checkpoint_within(model, x):
    def inner(y):
        return y.roll(1, 2) * model.linear.bias[:, None, None] * Clip.apply(y)

    def outer(y):
        return checkpoint(inner, y.sin(), use_reentrant=False) * y

    return checkpoint(outer, x, use_reentrant=False)


FUNCTIONS = {
    "clipped gradients of a field": lambda m, x: _clip_gradient(x.flip(2)) * x,
    "clipped gradients": lambda m, x: Clip.apply(x) * Clip.apply(m.linear.bias)[:, None, None],
    "custom operator": lambda m, x: _clip(x) * _clip(m.linear.bias)[:, None, None],
    "scripted function": lambda m, x: _scripted()(x, factor=3) + x,
    "vmap of parameters": lambda m, x: x * torch.vmap(lambda y: y * 2)(m.linear.bias).sum(),
    "autograd.grad": _penalty,
    "autograd.grad of layers": _penalty_of_layers,
    "autograd.grad of a parameter": _gradient_of_a_parameter,
    "autograd.grad of a shared parameter": _gradient_of_a_shared_parameter,
    "hooks of tensors": _hook_tensors,
    "hooks of tensors without rows": _hook_tensors_without_rows,
    "hooks of modules": _hook_modules,
    "checkpoint within another": _checkpoint_within,
    "checkpoint": lambda m, x: checkpoint(m.block, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m.block, x, use_reentrant=True),
    "autograd function": lambda m, x: _Square.apply(m.block(x)),
}


# The model runs without gradients first, to see whether it is random.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "trains",
    [pytest.param(True, id="train"), pytest.param(False, id="eval", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_the_unsharded_model(name, trains):
    _check(lambda: _Model(FUNCTIONS[name], trains))


@pytest.mark.parametrize("family", every(3, FAMILIES))
def test_functions_of_all_families_can_be_planned(family):
    shape = (2, CHANNELS, HEIGHTS[3], COLUMNS)
    model = Model(lambda m, x: [f(m, x) for f in FAMILIES[family].values()]).double()
    decision = decide.decide_view(
        model, counting_manager(3), [shape], decide.Wanted(limit=None), ["as the test wants"]
    )
    assert not decision.problems


def _plain_gradient(change, through=torch.sin):
    """Return a model: the field times a gradient by a plain tensor, which hooks of nodes change."""

    def function(model, x):
        with torch.enable_grad():
            bias = model.linear.bias * 1
            y, doubled = through(bias), bias * 2
            seen = change(y, bias, doubled)
            (gradient,) = torch.autograd.grad((y + doubled**2).sum(), bias, create_graph=True)
        return x * (gradient.sum() + sum(grad.sum() for grad in seen))

    return function


def _hook_node(y, bias, doubled):
    y.grad_fn.register_hook(lambda inputs, outputs: tuple(g.clamp(-0.1, 0.1) for g in inputs))
    return []


def _hook_before_node(y, bias, doubled):
    y.grad_fn.register_prehook(lambda grads: tuple(g.clamp(-0.3, 0.3) for g in grads))
    return []


def _hook_several(y, bias, doubled):
    seen = []
    torch.autograd.graph.register_multi_grad_hook([bias, doubled], seen.extend)
    return seen


def _hook_in_turn(y, bias, doubled):
    """Hook a plain tensor; in its hook the gradient of another one is computed, which has one."""

    def outer(grad):
        inner = bias.detach().requires_grad_()
        between = inner * 1
        between.register_hook(lambda g: g.clamp(-0.2, 0.2))
        return grad.clamp(-0.1, 0.1) + torch.autograd.grad(between.square().sum(), inner)[0]

    y.register_hook(outer)
    return []


def _batched_gradients(model, x):
    with torch.enable_grad():
        bias = model.linear.bias * 1
        rows = torch.eye(len(bias), dtype=bias.dtype, device=bias.device)
        (jacobian,) = torch.autograd.grad(bias.softmax(0), bias, rows, is_grads_batched=True)
        return x * jacobian[:, 1:2, None]


def _gradient_of_a_gradient(model, x):
    """Return the field times a gradient between plain tensors with a field in between."""
    with torch.enable_grad():
        bias = model.linear.bias * 1
        loss = (x * bias[:, None, None]).pow(3).mean()
        (first,) = torch.autograd.grad(loss, bias, create_graph=True)
        bias.register_hook(lambda grad: grad.clamp(-0.1, 0.1) + grad**2)
        (second,) = torch.autograd.grad(first.exp().sum(), bias, create_graph=True)
        return x * second[:, None, None]


PLAIN_GRADIENTS = {
    "hook of a node": _plain_gradient(_hook_node),
    "hook before a node": _plain_gradient(_hook_before_node),
    "hook of several tensors": _plain_gradient(_hook_several),
    "gradient in a hook": _plain_gradient(_hook_in_turn),
    "hook, and a function of the user's": _plain_gradient(_hook_in_turn, Clip.apply),
    "batch of gradients": _batched_gradients,
    "field in between": _gradient_of_a_gradient,
}


def test_gradients_between_plain_tensors():
    functions = PLAIN_GRADIENTS.values()
    _check(lambda: _Model(lambda m, x: sum(function(m, x) for function in functions)))


def _check(build_model, ranks=3):
    shape = (2, 3, 13, 8)
    report = verify_domain_parallel(build_model, shape, ranks, whole_ops="allow", device=DEVICE)
    assert report.passed, report.worst


def _convert(model, shape=(2, 3, 14, 8), whole_ops="allow"):
    """Return the converted model of the first of two ranks, and its manager."""
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    return convert_to_domain_parallel(model, manager, input_shape=shape, whole_ops=whole_ops)


def _hooks(model):
    names = [name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))]
    names += ["_forward_hooks_always_called"]
    return [key for m in model.modules() for name in names for key in vars(m)[name]]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")
def test_scripted_layers_run_whole():
    class Scripted(_Model):
        def __init__(self):
            super().__init__(lambda m, x: m.script(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
            self.script = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    _check(Scripted)


def test_parameter_names_stay_and_conversion_can_be_undone():
    model = _Model(_filter)
    names = list(model.state_dict())
    hooks = _hooks(model)
    converted = _convert(model)
    assert converted is model
    assert attached_view(model) is not None
    assert list(model.state_dict()) == names
    assert _hooks(model) != hooks
    restored = convert_from_domain_parallel(model)
    assert attached_view(restored) is None
    assert _hooks(restored) == hooks
    assert restored(torch.randn(2, 3, 14, 8)).shape == (2, 3, 14, 8)


def test_refuses_unless_allowed():
    with pytest.raises(UserError, match="linspace"):
        _convert(_Model(_filter), whole_ops="refuse")


def test_ranks_with_most_and_with_fewest_rows_are_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(decide, "dry_run", _recorded(decide.dry_run, tried))
    _convert(_Model(_filter), (2, 3, 13, 8))
    assert tried == [0, 1]  # of 7 and 6 rows


def _recorded(dry_run, tried):
    def run(*args, **kwargs):
        tried.append(kwargs["rank"])
        return dry_run(*args, **kwargs)

    return run


class _Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


COMPILED = {
    "function": lambda x: Clip.apply(x.sin()).cos(),
    "function that is not traced": lambda x: _Untraceable.apply(x.sin()).cos(),
    "vmap": torch.vmap(lambda y: y.sin() * 2),
    "grad": lambda x: torch.func.grad(lambda y: (y**3).sum())(x),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's of its own code, which it traces
def test_torch_compiles_what_it_does_without_views():
    _convert(_Model(_filter))
    for name, function in COMPILED.items():
        x = torch.randn(3, 4, requires_grad=True)
        compiled = torch.compile(function, backend="eager", fullgraph="traced" not in name)
        wanted, found = (torch.autograd.grad(f(x).sum(), x)[0] for f in (function, compiled))
        assert torch.equal(found, wanted), name


def _set_data(model, x):
    x.data = x * 2
    return x


def _backward(model, x):
    with torch.enable_grad():
        (x.detach().requires_grad_() * 2).sum().backward()
    return x


def _batch_of_gradients(model, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = x.mean((2, 3))
        torch.autograd.grad(y, x, torch.ones(3, *y.shape), is_grads_batched=True)
    return x


def _hook_old(model, x):
    model.linear.register_backward_hook(lambda m, gi, go: None)
    return model.linear(x.transpose(1, 3)).transpose(1, 3)


def _scale_by_gradient(model, x):
    gradient = torch.func.grad(lambda weight: (weight * x.mean()).sum())
    return x * gradient(model.linear.bias).sum()


TRANSFORM = r"torch\.func.*write the batch.*use torch\.autograd\.grad"
REFUSED = {
    "data": (_set_data, "data: can't be set"),
    "strides": (lambda m, x: x * x[:, :, 1:].stride(1), "stride"),
    "backward": (_backward, "backward"),
    "old hook": (_hook_old, r"linear \(Linear\), .*: Linear: register_backward_hook"),
    "batch of gradients": (_batch_of_gradients, "batches"),
    "vmap": (lambda m, x: torch.vmap(lambda y: y.sin() * 2)(x), TRANSFORM),
    "vmap of a plain tensor": (
        lambda m, x: x + torch.vmap(lambda weight: weight * x.mean())(m.linear.bias).sum(),
        TRANSFORM,
    ),
    "grad": (lambda m, x: torch.func.grad(lambda y: (y**3).sum())(x), TRANSFORM),
    "grad of a plain tensor": (_scale_by_gradient, TRANSFORM),
    "vjp": (lambda m, x: torch.func.vjp(torch.sin, x)[1](x)[0], TRANSFORM),
    "jvp": (lambda m, x: torch.func.jvp(torch.sin, (x,), (x,))[1], TRANSFORM),
    "jacrev": (lambda m, x: x + torch.func.jacrev(torch.mean)(x), TRANSFORM),
    "jacfwd": (lambda m, x: x + torch.func.jacfwd(torch.mean)(x), TRANSFORM),
    "hessian": (lambda m, x: x + torch.func.hessian(torch.mean)(x).mean(), TRANSFORM),
}


def test_refuses_what_can_not_be_as_on_one_process():
    for name, (function, message) in REFUSED.items():
        with pytest.raises(UserError) as error:
            _convert(_Model(function))
        assert re.search(message, str(error.value)), name


def test_other_heights_are_refused():
    model = _convert(_Model(_filter))
    with pytest.raises(UserError, match="got 5 rows"):
        model(torch.randn(2, 3, 5, 8))


def _check_for_nan(model, x):
    if torch.isnan(x).any():
        raise ValueError("NaN")
    assert torch.isfinite(x).all()
    return x * 2


def _branch(model, x):
    return (
        x.cumsum(-2)
        if x.mean() > 0
        else x.flip(-2) + model.linear(x.mT.flip(-1)[..., :WIDTH]).sum()
    )


def _rescale(model, x):
    while not x.abs().amax() < 0.3:
        x = x.roll(1, -2) * 0.5
    return x / x.abs().max().item()


def _compare(model, x):
    return x.sort(-2)[0] if torch.allclose(x, x.clone()) and not torch.equal(x, x + 1) else x


DECIDING = {  # and what a plan assumes, by the order of lines
    _check_for_nan: [False, True],
    _branch: [False],
    _rescale: [True, 1.0],
    _compare: [False],
}


# A plan runs a loop hundreds of times before it gives up an assumption.
DECISIONS = [
    pytest.param(function, marks=pytest.mark.slow) if function is _rescale else function
    for function in DECIDING
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("function", DECISIONS)
def test_a_model_may_decide_by_values_of_fields(function, ranks):
    _check(lambda: _Model(function), ranks)


@pytest.mark.parametrize("function", DECISIONS)
def test_a_plan_says_where_a_model_decides_and_what_it_assumes(function):
    run = attached_view(_convert(_Model(function))).decision.run
    assert [assumed.value for assumed in run.decisions] == DECIDING[function]
    lines = [line for line in map(assumption_line, run.decisions) if "test_view.py:" in line]
    assert len(lines) == len(DECIDING[function])


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + len(torch.where(x > 0)[0]),
        lambda m, x: x + x[x > x.mean()].sum() * int((x > 0).sum()),
        pytest.param(
            lambda m, x: x * float(x.detach().numpy().mean()),
            marks=cpu_only("NumPy has no arrays on GPUs"),
        ),
        lambda m, x: x * x.detach().flatten().tolist()[0],
    ],
)
def test_shapes_may_depend_on_fields_but_costs_are_then_unknown(function, caplog):
    assert attached_view(_convert(_Model(function))).decision.run is None
    assert "costs are not known before training: model (_Model), " in caplog.text
    assert "test_view.py:" in caplog.text
    _check(lambda: _Model(function))


def test_a_model_that_fails_in_every_branch_shows_its_first_error():
    def fail(model, x):
        if x.mean() > 0:
            raise ValueError("second")
        raise ValueError("first")

    with pytest.raises(UserError, match=r"test_view.py:\d+: fails .*ValueError: first"):
        _convert(_Model(fail))


class _Decides(nn.Module):
    """Decides by coordinates that it makes from the height, and by those in a buffer."""

    def __init__(self, change=None):
        super().__init__()
        self.change = change
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.register_buffer("longitude", torch.linspace(0, 350, 8))

    def forward(self, x):
        if self.change == "before":
            self.longitude.mul_(1)
        latitude = torch.linspace(90, -90, x.shape[-2], dtype=x.dtype)
        if not (torch.all(latitude[1:] - latitude[:-1] < 0) and self.longitude.max() < 360):
            raise ValueError("the grid is not a globe")
        cells = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"))
        northern = (latitude > 0).nonzero()[:, 0]
        _, south = latitude.split([3, x.shape[-2] - 3])
        factor = int(cells.amax().item()) + len(northern) + float(south.max())
        if self.change == "after":
            self.longitude.add_(1)
        return self.conv(x) * factor + latitude[:, None]


@pytest.mark.parametrize(
    ("change", "has_same_bits"),
    tiers(
        [(None, True), ("before", True), ("after", False)],
        [],
        [(None, False), ("before", False), ("after", True)],
    ),
)
def test_values_that_do_not_depend_on_the_input_may_decide(change, has_same_bits, monkeypatch):
    """Also where they change, and where their last bits differ between ranks, as on GPUs."""
    if not has_same_bits:
        monkeypatch.setattr(running, "SAME_BITS", ())
    _check(lambda: _Decides(change))


def test_a_plan_counts_what_ranks_send_to_decide_alike(monkeypatch):
    def sent():
        return attached_view(_convert(_Decides())).decision.run.forward[""][0].collective_bytes

    monkeypatch.setattr(running, "SAME_BITS", (DEVICE,))
    without = sent()
    monkeypatch.setattr(running, "SAME_BITS", ())
    # Two truth values, which of 14 rows are northern, the largest index, and a latitude.
    assert sent() - without == 1 + 1 + 14 + 8 + 4


def test_a_plan_knows_values_on_a_gpu():
    def weigh(model, x):
        longitude = torch.arange(9, device="cuda")
        eastern = longitude.masked_select(longitude > 2)
        return x * (eastern + torch.arange(len(eastern), device="cuda")).sum().item()

    run = attached_view(_convert(_Model(weigh))).decision.run
    assert run.decisions == ()


class _Counts(nn.Module):
    """Counts its calls in tensors that are not registered."""

    def __init__(self, decide=False):
        super().__init__()
        self.decide = decide
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.count = torch.zeros(())
        self.by_name = {"list": [torch.ones(2)]}

    def forward(self, x):
        self.count += 1
        self.by_name["list"][0].mul_(2)
        if self.decide and self.count.item() > 1:
            x = self.conv(x)
        return self.conv(x) * self.count + self.by_name["list"][0].sum()


def test_a_plan_changes_no_tensor_of_the_model():
    model = _Counts()
    _convert(model)
    assert model.count == 0
    assert torch.equal(model.by_name["list"][0], torch.ones(2))
    _check(_Counts)
    _check(lambda: _Counts(decide=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's of its own code, which it traces
def test_functions_that_a_model_compiles_run_uncompiled_in_it():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    shift = torch.compile(lambda x: x.roll(1, 2) * x.sigmoid(), backend=backend, fullgraph=True)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.compile(nn.Conv2d(3, 3, 3, padding=1), backend=backend)

        def forward(self, x):
            return checkpoint(shift, self.conv(x), use_reentrant=False)

    _check(Compiled)
    graphs.clear()
    shift(torch.ones(1, 2, 3))  # elsewhere it is compiled as before
    assert len(graphs) == 1


def _compiles_nothing(manager):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    whole, x = _Model(lambda _, x: x.flip(-2)).double(), torch.randn(2, 3, 13, 8).double()
    model = convert_to_domain_parallel(whole, manager, input_shape=x.shape)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    band = shard_tensor(x, manager=manager)
    outputs = [each(band) for each in (model, compiled)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.sum().backward()
    assert torch.equal(model.stem.weight.grad, compiled.stem.weight.grad)
    assert not graphs
    convert_from_domain_parallel(model)
    assert "_call_impl" not in vars(model)


@pytest.mark.slow
def test_compiling_a_model_of_the_view_compiles_nothing():
    """On processes: threads share the stance in which the other one runs uncompiled."""
    on_processes(2, _compiles_nothing)


class _Sparse(nn.Module):
    """Multiplies by sparse matrices: one that is a buffer, and one that is not registered."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        indices = torch.tensor([[0, 20, 50, 103], [9, 9, 77, 0]])
        matrix = torch.sparse_coo_tensor(indices, torch.arange(1.0, 5.0), (104, 104))
        self.register_buffer("matrix", matrix.coalesce())
        self.matrix_of_rows = matrix.coalesce().double()

    def forward(self, x):
        points = self.conv(x).flatten(1).reshape(-1, 104).T
        points = points + self.matrix @ points
        return torch.sparse.mm(self.matrix_of_rows, points).T.reshape(x.shape)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_matrices_equal_the_unsharded_model():
    _check(_Sparse)


def test_libraries_find_that_fields_are_computed_by_torch():
    """As opt_einsum does: by the first part of the name of a type's module."""

    def multiply(model, x):
        library = importlib.import_module(type(x).__module__.split(".")[0])
        return library.einsum("bchw,dc->bdhw", (x, model.linear.weight))

    _check(lambda: _Model(multiply))
