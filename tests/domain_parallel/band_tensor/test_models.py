"""Models that compute on tensors of the globe: equal to the unsharded model."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import convert_from_domain_parallel, decide
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.decide import counting_manager
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.function_tables import FAMILIES
from tests.domain_parallel.band_tensor.functions import CHANNELS, COLUMNS, HEIGHTS
from tests.domain_parallel.band_tensor.models import WIDTH, Model, check, convert
from tests.domain_parallel.equality import Clip
from tests.tables import each
from tests.tier_cases import every


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def _inverts(model, x):
    return x + torch.linalg.pinv(x).mT


def _filter(model, x):
    return torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]) * x


# Taken when the module is imported, as models of other packages do.
_clip_gradient = Clip.apply


@torch.library.custom_op("credit_dp_tests::clip", mutates_args=())
def _clip(x: torch.Tensor) -> torch.Tensor:
    return x * 1


_clip.register_fake(torch.empty_like)
_clip.register_autograd(lambda ctx, grad: grad / (1 + grad.norm()))


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


def _set_data(model, x):
    x.data = x * 2
    return x


def _backward(model, x):
    """Return the field times the gradient of a loss within the forward."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (leaf.roll(1, 2) * leaf).sum().backward()
    return x * leaf.grad


def _batch_of_gradients(model, x):
    with torch.enable_grad():
        x = x * 1 if x.requires_grad else x.requires_grad_()
        y = x.square().mean((2, 3))
        weights = torch.arange(3.0, dtype=x.dtype)[:, None, None].expand(3, *y.shape)
        batch = torch.autograd.grad(y, x, weights, is_grads_batched=True, create_graph=True)
    return batch[0].sum(0)


FUNCTIONS = {
    "clipped gradients": lambda m, x: Clip.apply(x) * Clip.apply(m.linear.bias)[:, None, None],
    "autograd.grad of a shared parameter": _gradient_of_a_shared_parameter,
    "hooks of tensors without rows": _hook_tensors_without_rows,
    "checkpoint within another": _checkpoint_within,
    "checkpoint": lambda m, x: checkpoint(m.block, x, use_reentrant=False),
    "data that is set": _set_data,
    "batch of gradients": _batch_of_gradients,
}
OTHERS = {
    "clipped gradients of a field": lambda m, x: _clip_gradient(x.flip(2)) * x,
    "custom operator": lambda m, x: _clip(x) * _clip(m.linear.bias)[:, None, None],
    "autograd.grad": _penalty,
    "autograd.grad of layers": _penalty_of_layers,
    "autograd.grad of a parameter": _gradient_of_a_parameter,
    "hooks of tensors": _hook_tensors,
    "hooks of modules": _hook_modules,
    "checkpoint, reentrant": lambda m, x: checkpoint(m.block, x, use_reentrant=True),
    "backward in the forward": _backward,
    "strides": lambda m, x: x * x[:, :, 1:].stride(1),
    "autograd function": lambda m, x: _Square.apply(m.block(x)),
}


# The model runs without gradients first, to see whether it is random.
RUNS_WITHOUT = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@RUNS_WITHOUT
@each("function", FUNCTIONS.values())
def test_functions_equal_those_of_the_unsharded_model(function):
    check(lambda: Model(function))


@pytest.mark.slow
@RUNS_WITHOUT
@each("function", OTHERS.values())
def test_other_functions_equal_those_of_the_unsharded_model(function):
    check(lambda: Model(function))


@pytest.mark.exhaustive
@RUNS_WITHOUT
@each("function", (FUNCTIONS | OTHERS).values())
def test_functions_of_models_that_are_evaluated(function):
    check(lambda: Model(function, trains=False))


@pytest.mark.parametrize("family", every(9, FAMILIES))
def test_functions_of_all_families_can_be_planned(family):
    shape = (2, CHANNELS, HEIGHTS[3], COLUMNS)
    model = functions.Model(lambda m, x: [f(m, x) for f in FAMILIES[family].values()]).double()
    decision = decide.decide_on_globe(
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
    check(lambda: Model(lambda m, x: sum(function(m, x) for function in functions)))


def _hooks(model):
    names = [name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))]
    names += ["_forward_hooks_always_called"]
    return [key for m in model.modules() for name in names for key in vars(m)[name]]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")
def test_scripted_layers_run_whole():
    class Scripted(Model):
        def __init__(self):
            super().__init__(lambda m, x: m.script(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
            self.script = torch.jit.script(nn.Linear(WIDTH, WIDTH))

    check(Scripted)


def test_parameter_names_stay_and_conversion_can_be_undone():
    model = Model(_filter)
    names = list(model.state_dict())
    hooks = _hooks(model)
    converted = convert(model)
    assert converted is model
    assert attached_domain(model) is not None
    assert list(model.state_dict()) == names
    assert _hooks(model) != hooks
    restored = convert_from_domain_parallel(model)
    assert attached_domain(restored) is None
    assert _hooks(restored) == hooks
    assert restored(torch.randn(2, 3, 14, 8)).shape == (2, 3, 14, 8)


def test_refuses_unless_allowed():
    convert(Model(_filter), whole_ops="refuse")
    with pytest.raises(UserError, match=r"^parallel.whole_ops=refuse: .*linalg_pinv runs whole"):
        convert(Model(_inverts), whole_ops="refuse")


def test_ranks_with_most_and_with_fewest_rows_are_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(decide, "dry_run", _recorded(decide.dry_run, tried))
    convert(Model(_filter), (2, 3, 13, 8))
    assert tried == [0, 1]  # of 7 and 6 rows


def _recorded(dry_run, tried):
    def run(*args, **kwargs):
        tried.append(kwargs["rank"])
        return dry_run(*args, **kwargs)

    return run


def test_other_heights_are_refused():
    model = convert(Model(_filter))
    with pytest.raises(UserError, match="got 5 rows"):
        model(torch.randn(2, 3, 5, 8))


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

    check(Compiled)
    graphs.clear()
    shift(torch.ones(1, 2, 3))  # elsewhere it is compiled as before
    assert len(graphs) == 1


def _transforms(model, x):
    """Return the field times gradients by functions of `torch.func`, of fields and parameters."""
    of_field = torch.func.grad(lambda y: (y**3).sum())(x)
    of_bias = torch.func.grad(lambda bias: (bias * x.mean()).exp().sum())(model.linear.bias)
    return of_field * of_bias.sum() + torch.func.vjp(torch.sin, x)[1](x)[0]


def test_transforms_are_exact_but_their_costs_are_unknown(caplog):
    assert attached_domain(convert(Model(_transforms))).decision.run is None
    assert "torch does not say what its functions of torch.func save" in caplog.text
    check(lambda: Model(_transforms))


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
    check(_Sparse)


def test_libraries_find_that_fields_are_computed_by_torch():
    """As opt_einsum does: by the first part of the name of a type's module."""

    def multiply(model, x):
        library = importlib.import_module(type(x).__module__.split(".")[0])
        return library.einsum("bchw,dc->bdhw", (x, model.linear.weight))

    check(lambda: Model(multiply))


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
    convert(model)
    assert model.count == 0
    assert torch.equal(model.by_name["list"][0], torch.ones(2))
    check(_Counts)
    check(lambda: _Counts(decide=True))
