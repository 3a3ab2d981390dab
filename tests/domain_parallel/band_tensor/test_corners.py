"""What models do beside calling functions of torch, on tensors of the globe.

Operators and functions of users, compiled and scripted code, transforms, checkpoints, gradients
within the model, hooks, and writes past autograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from credit_dp.domain_parallel import DomainParallelManager, gather_tensor, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import Enter, attach_domain
from credit_dp.domain_parallel.band_tensor.moving import cut, whole
from credit_dp.domain_parallel.band_tensor.tensor import Band, BandTensor, Domain
from credit_dp.errors import UserError
from tests.domain_parallel.band_tensor import functions
from tests.domain_parallel.band_tensor.functions import Model
from tests.ranks import on_processes, on_threads, seeded
from tests.tables import each

# torch's, of scripts and of what its compiler looks at.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")


def channels(m: Model) -> Tensor:
    """Return a parameter with an entry for each channel."""
    return m.scale[:, None, None]


def mixed(m: Model, x: Tensor) -> Tensor:
    """Return a function of neighbours and of all rows."""
    y = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1)
    return torch.tanh(y * channels(m) - x.mean((2, 3), keepdim=True))


# ---------------------------------------------------------------- operators of users


@torch.library.custom_op("credit_dp_tests::wave", mutates_args=())
def wave(x: Tensor, speed: float) -> Tensor:
    return torch.sin(x * speed) + x.flip(-2)


@wave.register_fake
def _(x: Tensor, speed: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.speed = inputs[1]


def _wave_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * ctx.speed * torch.cos(x * ctx.speed) + grad.flip(-2), None


wave.register_autograd(_wave_gradient, setup_context=_keep)


@torch.library.custom_op("credit_dp_tests::largest_row", mutates_args=())
def largest_row(x: Tensor) -> Tensor:
    """Return what no other operator knows the shape of: it has no fake one."""
    return x[:, :, int(x.sum((0, 1, 3)).argmax()) % x.shape[2] :].mean((2, 3), keepdim=True)


@torch.library.custom_op("credit_dp_tests::halve_", mutates_args=("x",))
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


def with_custom_operator(m: Model, x: Tensor) -> Any:
    return [wave(x * channels(m), 1.5), wave(x.mT, 0.5)]


def with_operator_of_unknown_shape(m: Model, x: Tensor) -> Tensor:
    return x * largest_row(x.detach()) * channels(m)


def with_operator_that_writes(m: Model, x: Tensor) -> Tensor:
    y = x.detach().clone()
    halve_(y)
    halve_(y[:, :, 2:7])
    return x * y * channels(m)


# ---------------------------------------------------------------- compiled and scripted functions


def to_script(x: Tensor, scale: Tensor) -> Tensor:
    y = x
    for _ in range(2):
        y = torch.tanh(y * scale) + y.mean(2, keepdim=True)
    return y


def with_script(m: Model, x: Tensor) -> Tensor:
    script = torch.jit.script(to_script)  # type: ignore[no-untyped-call]
    return script(x, channels(m))


def with_trace(m: Model, x: Tensor) -> Tensor:
    traced = torch.jit.trace(
        lambda y: torch.tanh(y) * y.amax(2, keepdim=True), torch.ones(2, 8, 4, 6)
    )
    return traced(x) * channels(m)


def with_compiled_function(m: Model, x: Tensor) -> Tensor:
    compiled = torch.compile(
        lambda y, scale: torch.tanh(y * scale) + y.mean(2, True), backend="eager"
    )
    return compiled(x, channels(m))


# ---------------------------------------------------------------- transforms


def with_vmap(m: Model, x: Tensor) -> Any:
    over_samples = torch.func.vmap(lambda y: mixed(m, y[None])[0])(x)
    over_rows = torch.func.vmap(lambda y: y - y.mean(), in_dims=2, out_dims=2)(x)
    return [over_samples, over_rows * channels(m)]


def with_function_gradient(m: Model, x: Tensor) -> Any:
    grad = torch.func.grad(lambda y: mixed(m, y).square().sum())(x)
    of_samples = torch.func.vmap(torch.func.grad(lambda y: y.sin().mean() * m.scale[0]))(x)
    return [grad * channels(m), of_samples]


def with_products_of_jacobians(m: Model, x: Tensor) -> Any:
    y, pull = torch.func.vjp(lambda y: mixed(m, y), x)
    return [y, pull(y * 2)[0]]


def with_functional_call(m: Model, x: Tensor) -> Tensor:
    layer = nn.Linear(8, 8, dtype=x.dtype)
    weights = {"weight": m.matrix, "bias": m.scale}
    return torch.func.functional_call(layer, weights, x.movedim(1, -1)).movedim(-1, 1)


# ---------------------------------------------------------------- functions with a backward


class Gate(torch.autograd.Function):
    """A function of a field and a parameter, whose gradient is cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        gate = scale.sigmoid()
        of_scale = (grad * x * gate * (1 - gate)).sum_to_size(scale.shape)
        return (grad * gate).clamp(-0.5, 0.5), of_scale


class Doubled(torch.autograd.Function):
    """A function that writes to its argument, and returns what has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        x.mul_(2).clamp_(-1, 1)
        ctx.mark_dirty(x)
        is_inside = x.abs() < 1
        ctx.mark_non_differentiable(is_inside)
        ctx.save_for_backward(is_inside)
        return x, is_inside

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0]


class Shifted(torch.autograd.Function):
    """A function of the newer style, which `vmap` may call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int) -> Tensor:
        return x.roll(rows, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.roll(-ctx.rows, -2), None


def with_own_backward(m: Model, x: Tensor) -> Any:
    y = x * 1
    doubled, is_inside = Doubled.apply(y)
    return [Gate.apply(x, channels(m)), doubled * channels(m), y * is_inside]


def with_own_backward_in_vmap(m: Model, x: Tensor) -> Any:
    return [Shifted.apply(x, 3) * channels(m), torch.func.vmap(lambda y: Shifted.apply(y, 2))(x)]


# ---------------------------------------------------------------- computed again


def with_checkpoints(m: Model, x: Tensor) -> Any:
    y = checkpoint(lambda z: mixed(m, z), x, use_reentrant=False)
    return [y, checkpoint(lambda z: mixed(m, z) * z, y, use_reentrant=False)]


def with_reentrant_checkpoints(m: Model, x: Tensor) -> Tensor:
    y = checkpoint(lambda z: mixed(m, z), x, use_reentrant=True)
    return checkpoint(lambda z: mixed(m, z) * z, y, use_reentrant=True)


def with_saved_tensors_elsewhere(m: Model, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        y = mixed(m, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda z: z.neg(), lambda z: z.neg()):
        return mixed(m, y) * y


# ---------------------------------------------------------------- gradients within a model


def with_gradient_penalty(m: Model, x: Tensor) -> Any:
    y = mixed(m, x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return [grad * channels(m), second, y * grad.flatten(1).norm(dim=1)[:, None, None, None]]


def with_gradients_of_parameters(m: Model, x: Tensor) -> Tensor:
    y = F.linear(x.movedim(1, -1), m.matrix).movedim(-1, 1)
    of_matrix, of_scale = torch.autograd.grad(
        (y * channels(m)).sin().sum(), (m.matrix, m.scale), create_graph=True
    )
    return y * of_scale[:, None, None] + of_matrix.square().mean()


def with_backward_of_its_own(m: Model, x: Tensor) -> Tensor:
    y = mixed(m, x)
    y.retain_grad()
    (y * y).sum().backward(retain_graph=True, inputs=[y])
    grad, y.grad = y.grad, None
    return y * channels(m) + grad.mean((0, 2, 3))[:, None, None]


# ---------------------------------------------------------------- hooks


def with_hooks_of_tensors(m: Model, x: Tensor) -> Tensor:
    y = mixed(m, x)
    y.register_hook(lambda grad: grad / (1 + grad.abs().mean()))
    z = torch.sin(y) * channels(m)
    z.grad_fn.register_hook(lambda grads, _: tuple(grad.clamp(-1, 1) for grad in grads))
    z.grad_fn.register_prehook(lambda grads: tuple(grad * (grad > 0) for grad in grads))
    return z


def with_hooks_of_modules(m: Model, x: Tensor) -> Tensor:
    layer = m.encoder.linear1
    handles = [
        layer.register_forward_hook(lambda module, args, output: output * 1.5),
        layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] + 1,)),
        layer.register_full_backward_hook(lambda module, grads, _: (grads[0] * grads[0].norm(),)),
    ]
    y = layer(x.movedim(1, -1)).movedim(-1, 1)
    for handle in handles[:1]:
        handle.remove()
    return y * channels(m)


# ---------------------------------------------------------------- values and memory


def with_writes_past_autograd(m: Model, x: Tensor) -> Tensor:
    y = x * 1
    z = y * 2
    y.detach()[:, :, 3:8].mul_(3)
    y.data.add_(0.5)
    with torch.no_grad():
        y[:, :, -1].zero_()
        mean = y.mean((2, 3), keepdim=True)
    return y * mean + z * y.data * channels(m)


def with_shapes_changed_in_place(m: Model, x: Tensor) -> Tensor:
    y = (x * channels(m)).transpose_(1, 2).unsqueeze_(0)
    y.mul_(2)
    return y.squeeze_(0).transpose(1, 2)


def with_places_in_memory(m: Model, x: Tensor) -> Any:
    y = x * channels(m)
    height = x.shape[2]
    sizes = (2, 8, (height - 1) // 3, 3, 6)  # windows of three rows, from the second row on
    windows = y.as_strided(sizes, (8 * height * 6, height * 6, 18, 6, 1), 6)
    windows.mul_(2)
    return [y, windows.sum(3)]


def with_conjugates_written_to(m: Model, x: Tensor) -> Any:
    y = torch.complex(x * 1, x.sin()) * channels(m)
    y.conj().mul_(1 + 2j)
    y.conj().imag[:, :, 2:7].add_(1)
    y.real.mul_(3)
    return [y, y.conj() @ y.mT, torch.view_as_real(y * 1j)[..., 0]]


def with_joint_writes(m: Model, x: Tensor) -> Any:
    """Write to several views of one field in which rows are elsewhere, and to the field."""
    y = x * channels(m)
    tokens, windows = y.flatten(2).mT, y.reshape(2, 8, 1, -1, 2, 3)
    columns, row, corner = y.movedim(-1, 0), y[:, :, 3], y[0, :, 1:8, 1:3].diagonal(0, 1, 2)
    windows[..., 1, :].mul_(2)
    tokens[:, ::5].add_(row.mean())
    corner.copy_(columns[0, 0, :, :2])
    y.mul_(windows.mean())
    row.add_(corner.sum())
    return [y, tokens, windows.sum(4), columns, row[:, :, None], corner]


def with_loop_on_values(m: Model, x: Tensor) -> Tensor:
    y = x * channels(m)
    while y.detach().abs().max() > 0.5:
        y = y / 2
    is_same = torch.equal(y, x) or torch.equal(y, y[:1]) or torch.allclose(x, x[0])
    return y if not is_same and bool((y.sum() != 0).item()) else x


def with_shapes_by_values(m: Model, x: Tensor) -> Any:
    y = x * channels(m)
    return [y[y > 0.5].sum() * x, y.flatten()[torch.nonzero(x.flatten() > 0.3)[:, 0]].mean() * x]


def with_results_written_to(m: Model, x: Tensor) -> Tensor:
    y = (x * channels(m)).detach()
    z = torch.empty_like(y)
    torch.add(y, 1, out=z)
    torch.mul(z, y.mean((2, 3), keepdim=True), out=z)
    torch.cumsum(z, 2, out=z)
    return x * z * channels(m)


CORNERS = {
    name.removeprefix("with_").replace("_", " "): function
    for name, function in list(globals().items())
    if name.startswith("with_")
}


def tangents(manager: DomainParallelManager, x: Tensor) -> list[Tensor]:
    """Return a function of a field and its derivative along the field, in forward mode."""
    band, domain = Band(-2, 1, manager.partition(x.shape[-2]).bounds), Domain(manager)
    field = Enter.apply(cut(x, band, domain.rank), band, domain)  # type: ignore[no-untyped-call]
    results = torch.func.jvp(lambda y: y.sin() - y.mean(2, True), (field,), (field * 2,))
    return [whole(y.detach()) for y in results]


@pytest.mark.slow
def test_forward_mode_on_processes() -> None:
    # Not on threads: torch counts the levels of forward mode for all of them together.
    x = torch.randn(2, 8, 7, 6, dtype=torch.float64, generator=seeded(0))
    expected = [x.sin() - x.mean(2, True), 2 * x * x.cos() - 2 * x.mean(2, True)]
    for found in on_processes(2, tangents, x):
        for y, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- refused


def memory_beyond_a_slice(x: Tensor) -> Any:
    return x[:, :, 2:5].as_strided((2, 3), (2, 1))


def memory_of_every_other_column(x: Tensor) -> Any:
    return x[..., ::2].as_strided((2, 3), (2, 1))


def another_size_in_place(x: Tensor) -> Any:
    return (x * 1).resize_(3, 2)


def another_shape_of_a_copied_view(x: Tensor) -> Any:
    return (x * 1).view(2, 8, 4, 3 * 6).transpose_(0, 1)


def views_of_what_has_another_shape(x: Tensor) -> Any:
    y = x * 1
    windows = y.view(2, 8, 4, 3 * 6)
    y.transpose_(0, 1).mul_(2)
    return windows + 1


def results_in_a_tensor_of_another_shape(x: Tensor) -> Any:
    return torch.cumsum(x, 2, out=(x * 1)[..., :2].clone())


REFUSED = (
    memory_beyond_a_slice,
    memory_of_every_other_column,
    another_size_in_place,
    another_shape_of_a_copied_view,
    views_of_what_has_another_shape,
    results_in_a_tensor_of_another_shape,
)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@each("function", REFUSED)
def test_what_has_no_answer_is_refused(function: Any) -> None:
    def on_rank(manager: DomainParallelManager) -> None:
        band, domain = Band(-2, 1, manager.partition(12).bounds), Domain(manager)
        rows = band.sizes(domain.rank)
        with pytest.raises(UserError, match=r"field|globe"), torch.no_grad():
            function(BandTensor(torch.ones(2, 8, rows, 6), band, domain))

    on_threads(3, on_rank)


def test_corners() -> None:
    functions.check_table(CORNERS, 3, whole=None)


@pytest.mark.slow
def test_corners_with_a_row_for_each_rank() -> None:
    functions.check_table(CORNERS, 4, whole=None)


# ---------------------------------------------------------------- what models keep and make


def with_computed_weights(m: Model, x: Tensor) -> list[Tensor]:
    """Call layers with weights that others of the model's are, or make."""
    layer, rows = m.encoder.linear1, x.transpose(1, 3)
    made = {"weight": layer.weight * 2, "bias": layer.bias * rows.mean()}
    return [
        torch.func.functional_call(layer, values, (rows,))
        for values in (made, {"weight": layer.weight.detach() * m.scale.sum()})
    ]


def by_keyword(m: Model, x: Tensor) -> Tensor:
    return m.encoder.linear1(input=x.transpose(1, 3))


def frozen_before_a_write(m: Model, x: Tensor) -> Tensor:
    layer, y = nn.Linear(x.shape[1], 3, dtype=x.dtype), x.transpose(1, 3) * 1
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.requires_grad_(False).fill_(0.5)
    z = layer(y)
    y += 1
    return y.sum(-1, keepdim=True) * z


def created_in_other_ways(m: Model, x: Tensor) -> list[Tensor]:
    buffer = torch.ones(3, dtype=x.dtype).cumsum(0)
    torch.zeros(3, out=buffer, dtype=x.dtype).add_(2)
    sparse = torch.zeros(1, x.shape[-1], layout=torch.sparse_coo, dtype=x.dtype)
    y = [x * 1, x * 2]
    torch._foreach_add_(y, 1.0)
    return [x * buffer[1], x + sparse.to_dense(), *y]


def written_past_autograd(m: Model, x: Tensor) -> list[Tensor]:
    """Read parts of a field, write to its data, and read them again."""
    y = (x * 1).detach()
    parts = [y[:, :, 3], y[:, :, ::2], y.unbind(2)[1], y.reshape(2, -1, 6)]
    before = [part.sum() for part in parts]
    y.data.add_(1)
    return [y * x, *((part * part).sum() - old for part, old in zip(parts, before, strict=True))]


def channels_in_bands(m: Model, x: Tensor) -> list[Tensor]:
    y = x[:, 0]
    return [F.group_norm(y, 1), F.batch_norm(y, None, None, training=True)]


KEPT = (
    with_computed_weights,
    by_keyword,
    frozen_before_a_write,
    created_in_other_ways,
    written_past_autograd,
    channels_in_bands,
)


def test_what_models_make_of_their_own() -> None:
    functions.check_table({function.__name__: function for function in KEPT}, 3, whole=None)


class Keeping(nn.Module):
    """Keeps in one forward what it uses in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.scale.original = torch.zeros(6)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.first = torch.zeros(6, dtype=x.dtype)
            self.kept = {"same": self.first, "parts": [self.first[1:]]}
            self.made = nn.Parameter(torch.ones(6, dtype=x.dtype))
        self.first += 1
        return x * self.scale * self.made * self.kept["same"] + self.kept["parts"][0].sum()


def test_what_a_model_keeps_is_the_same_memory_and_learns() -> None:
    x = torch.randn(1, 2, 7, 6, generator=seeded(0), dtype=torch.float64)

    def two_steps(model: Keeping, x: Tensor) -> list[Tensor]:
        outputs = []
        for _ in range(2):
            outputs.append(model(x))
            outputs[-1].sum().backward()
        assert float(model.kept["same"].sum()) == 12
        assert model.made.grad is not None
        assert model.scale.grad is not None
        return [y.detach() for y in outputs] + [model.made.grad, model.scale.grad]

    def on_rank(manager: DomainParallelManager) -> list[Tensor]:
        model = Keeping()
        attach_domain(model, manager, [tuple(x.shape)])
        found = two_steps(model, shard_tensor(x, manager=manager))
        outputs = [gather_tensor(y, manager=manager) for y in found[:2]]
        return outputs + [manager.transport.all_reduce(grad) for grad in found[2:]]

    expected = two_steps(Keeping(), x)
    for found in on_threads(3, on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
