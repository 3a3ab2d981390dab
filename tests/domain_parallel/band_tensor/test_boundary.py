"""The boundary of a model on tensors of the globe: what goes in and out, and how it is called."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from credit_dp.domain_parallel import convert_to_domain_parallel, shard_tensor
from credit_dp.domain_parallel.band_tensor.boundary import (
    attach_domain,
    detach_domain,
    run_rest_of_call,
)
from credit_dp.domain_parallel.thread_ranks import RankError
from credit_dp.errors import UserError
from credit_dp.torch_private import forward_hooks
from tests.ranks import on_processes, on_threads, seeded

SHAPE = (2, 3, 7, 8)
RANKS = 3


@dataclass(frozen=True)
class Fields:
    y: Tensor
    name: str = "fields"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Frozen(OrderedDict):
    """A mapping that forbids changes, as configurations of other packages do."""

    def update(self, *args, **kwargs):
        raise TypeError

    def clear(self):
        raise TypeError


@dataclass
class Output(OrderedDict):
    """A dataclass that is a mapping as well, as outputs of other packages are."""

    sample: Tensor

    def __post_init__(self):
        dict.__setitem__(self, "sample", self.sample)


class Model(nn.Module):
    """Centred fields between two convolutions: not what one band alone can compute."""

    def __init__(self, forward=None):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 3, 1)
        self.settings = Frozen(width=4)
        self.cache = None
        self.register_buffer("mean", torch.zeros(4))
        self.function = forward

    def core(self, x):
        y = self.stem(x)
        return self.head((y - y.mean()) * torch.linspace(0, 1, y.shape[-2])[:, None])

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs) if self.function else self.core(*args)


def compare(model, call, prepare=lambda model: model, shape=SHAPE, ranks=RANKS):
    """Check that a call of the model on bands equals that of the unsharded one."""
    torch.set_default_dtype(torch.float64)
    try:
        _compare(model.double(), call, prepare, shape, ranks)
    finally:
        torch.set_default_dtype(torch.float32)


def _compare(model, call, prepare, shape, ranks):
    generator = seeded(0)
    x = torch.randn(shape, generator=generator)
    unsharded = prepare(copy.deepcopy(model))
    whole_x = x.clone().requires_grad_()
    outputs = call(unsharded, whole_x)
    weights = [torch.randn(y.shape, generator=generator) for y in outputs]
    sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()

    def on_rank(manager):
        converted = copy.deepcopy(model)
        attach_domain(converted, manager, (shape,))
        converted = prepare(converted)
        local_x = shard_tensor(x, manager=manager).clone().requires_grad_()
        local = call(converted, local_x)
        total = 0
        for y, w in zip(local, weights, strict=True):
            assert type(y) is Tensor
            share = w / ranks if y.shape == w.shape else shard_tensor(w, manager=manager)
            total = total + (y * share).sum()
        total.backward()
        return local, local_x.grad, [p.grad for p in converted.parameters()], converted

    results = on_threads(ranks, on_rank)
    for i, y in enumerate(outputs):
        parts = [local[i].detach() for local, *_ in results]
        torch.testing.assert_close(
            parts[0] if parts[0].shape == y.shape else torch.cat(parts, -2), y.detach()
        )
    torch.testing.assert_close(torch.cat([r[1] for r in results], -2), whole_x.grad)
    for i, p in enumerate(unsharded.parameters()):
        shares = [r[2][i] for r in results if r[2][i] is not None]
        if p.grad is not None:
            torch.testing.assert_close(sum(shares), p.grad)
    for converted in (r[3] for r in results):
        for buffer, other in zip(converted.buffers(), unsharded.buffers(), strict=True):
            torch.testing.assert_close(buffer.detach(), other.detach())


def _keep(model, x):
    y = model.core(x)
    result = y if model.cache is None else y + model.cache
    model.cache = y
    return result


def _replace_buffer(model, x):
    model.mean = model.stem(x).mean((0, 2, 3)).detach()
    return model.core(x) * model.mean.sum()


def _set_buffer(model, x):
    model.mean.data = model.stem(x).mean((0, 2, 3)).detach()
    return model.core(x) * model.mean.sum()


def _same_twice(model, x):
    y = model.core(x)
    return y, y


def _without_gradients(model, x):
    with torch.inference_mode():
        values = model(x.detach())
    with torch.no_grad():
        assert torch.equal(values, model(x))
    return [model(x) * values.clone()]


def _with_default_device(model, x):
    torch.set_default_device("cpu")
    try:
        return [model(x)]
    finally:
        torch.set_default_device(None)


def _kept_on_the_cpu(model, x):
    with torch.autograd.graph.save_on_cpu():
        return [model(x)]


def _half(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        y = model.core(x)
    return x * (y.dtype is torch.float32) + x.float().double()


def _write(model, x):
    """Write to the input, and to a part of it."""
    x.mul_(model.stem.bias[:3, None, None])
    x[:, :, 2:4].add_(1)
    x[:, :1, 3].zero_()
    return model.core(x)


def _written(model, x):
    x = x * 1
    return [model(x) + x]


CASES = {
    "dataclass in": (lambda m, b: m.core(b.y), lambda m, x: [m(Fields(x))]),
    "frozen mapping in": (lambda m, b: m.core(b["x"]), lambda m, x: [m(Frozen(x=x))]),
    "keyword and others in": (
        lambda m, a, b, *, x, c: m.core(x) * b,
        lambda m, x: [m(None, 2, x=x, c="name")],
    ),
    "input twice": (lambda m, a, b: m.core(a) + b, lambda m, x: [m(x, x)]),
    "whole input": (
        lambda m, x, c: m.core(x) * c.mean() * c.shape[0],
        lambda m, x: [m(x, torch.arange(6.0).view(2, 3))],
    ),
    "dataclass out": (lambda m, x: Fields(m.core(x)), lambda m, x: [m(x).y]),
    "named tuple out": (
        lambda m, x: Pair(m.core(x), m.core(2 * x).mean((2, 3))),
        lambda m, x: list(m(x)),
    ),
    "mapping out": (lambda m, x: Frozen(y=m.core(x)), lambda m, x: [m(x)["y"]]),
    "dataclass and mapping out": (
        lambda m, x: Output(m.core(x)),
        lambda m, x: [m(x)["sample"], m(x).sample],
    ),
    "same twice out": (_same_twice, lambda m, x: list(m(x))),
    "channels last out": (lambda m, x: m.core(x).permute(0, 2, 3, 1), lambda m, x: [m(x)]),
    "tokens out": (lambda m, x: m.core(x).flatten(2).transpose(1, 2), lambda m, x: [m(x)]),
    "scalar out": (lambda m, x: m.core(x).square().mean(), lambda m, x: [m(x)]),
    "sample out": (lambda m, x: m.core(x)[0, 0], lambda m, x: [m(x)]),
    "rollout": (None, lambda m, x: [m(m(m(x)))]),
    "siamese": (None, lambda m, x: [m(x) * m(x.roll(1, 3))]),
    "field in an attribute": (_keep, lambda m, x: [m(x), m(2 * x)]),
    "buffer": (_replace_buffer, lambda m, x: [m(x)]),
    "data of a buffer": (_set_buffer, lambda m, x: [m(x)]),
    "functional_call": (
        None,
        lambda m, x: [
            torch.func.functional_call(m, {k: 2 * p for k, p in m.named_parameters()}, (x,))
        ],
    ),
    "without gradients": (None, _without_gradients),
    "default device": (None, _with_default_device),
    "saved on the CPU": (None, _kept_on_the_cpu),
    "autocast": (_half, lambda m, x: [m(x)]),
    "input that is written": (_write, _written),
    "vmap": (lambda m, x: torch.vmap(lambda y: y.cumsum(1), 2, 2)(m.core(x)), lambda m, x: [m(x)]),
    "vmap of parameters": (
        lambda m, x: m.core(x) + torch.vmap(lambda w: w * x.mean())(m.head.bias).sum(),
        lambda m, x: [m(x)],
    ),
    "grad": (
        lambda m, x: m.core(torch.func.grad(lambda y: (y**3).mean((2, 3)).sum())(x)),
        lambda m, x: [m(x)],
    ),
    "vjp": (lambda m, x: m.core(torch.func.vjp(torch.sin, x)[1](x)[0]), lambda m, x: [m(x)]),
    "jacrev": (lambda m, x: x * m.core(torch.func.jacrev(torch.mean)(x)), lambda m, x: [m(x)]),
    "parameter out": (lambda m, x: (m.core(x), m.head.bias, m.mean), lambda m, x: list(m(x))[:2]),
    "deep copy": (None, lambda m, x: [copy.deepcopy(m)(x).detach() + m(x)]),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsharded_model(name):
    forward, call = CASES[name]
    compare(Model(forward), call)


def test_a_call_that_attaches_its_model_computes_on_bands_from_there_on():
    x = torch.randn(SHAPE, generator=seeded(0))
    torch.manual_seed(0)
    model = Model()

    def on_rank(manager):
        def attach(module, args, kwargs):
            handle.remove()
            attach_domain(module, manager, [SHAPE])
            return run_rest_of_call(module, args, kwargs)

        converted = copy.deepcopy(model)
        handle = converted.register_forward_pre_hook(attach, with_kwargs=True)
        band = shard_tensor(x, manager=manager)
        outputs = [converted(band), converted(band)]
        for y in outputs:
            y.square().sum().backward()
        assert not forward_hooks(converted)
        return [y.detach() for y in outputs], converted.stem.weight.grad

    results = on_threads(RANKS, on_rank)
    expected = model(x)
    (2 * expected.square().sum()).backward()
    for i in (0, 1):
        found = torch.cat([outputs[i] for outputs, _ in results], -2)
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(sum(grad for _, grad in results), model.stem.weight.grad)


def test_stages_of_a_pipeline_pass_on_what_is_in_bands():
    x = torch.randn(SHAPE, generator=seeded(0))

    def first(model, x):
        y = x.cumsum(2)
        return y, y.mT.flip(2), y.mean((2, 3)), y.amax((0, 1))

    def second(model, *state):
        y, turned, mean, largest = state
        return y.flip(2) + turned.mT * mean[..., None, None] + largest

    def on_rank(manager):
        stages = [Model(first), Model(second)]
        band = shard_tensor(x, manager=manager)
        attach_domain(stages[0], manager, [SHAPE], is_stage=True)
        shapes = [tuple(y.shape) for y in first(None, x)]
        attach_domain(stages[1], manager, shapes, is_stage=True)
        state = stages[0](band)
        assert all(y.is_contiguous() for y in state)
        with pytest.raises(UserError, match="planned is a band of"):
            stages[1](state[0][:, :, :1], *state[1:])
        return [y.shape for y in state], stages[1](*state)

    results = on_threads(RANKS, on_rank)
    assert [tuple(shape) for shape in results[0][0]] == [(2, 3, 3, 8), (2, 3, 3, 7), (2, 3), (7, 8)]
    found = torch.cat([y for _, y in results], -2)
    torch.testing.assert_close(found, second(None, *first(None, x)))


def test_few_rows():
    for rows, ranks in ((3, 3), (5, 4)):
        compare(Model(), lambda m, x: [m(x)], shape=(1, 3, rows, 8), ranks=ranks)


def _add_root_hooks(model):
    model.register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(),))
    model.register_forward_hook(lambda m, args, y: y - y.mean((2, 3), keepdim=True))
    model.register_full_backward_hook(lambda m, gi, go: (gi[0] / (1 + gi[0].norm()),))
    model.register_full_backward_pre_hook(lambda m, go: (go[0] / (1 + go[0].norm()),))
    return model


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_hooks_of_the_root_see_the_globe(is_before):
    call = lambda m, x: [m(1 * x)]  # noqa: E731
    if is_before:
        compare(_add_root_hooks(Model()), call)
    else:
        compare(Model(), call, _add_root_hooks)


def test_a_model_may_be_part_of_another_one():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            y = self.inner(x - x.mean())
            return y / y.std()

    compare(Outer(Model()), lambda m, x: [m(x)])

    model, x = Model(), torch.randn(SHAPE)

    def on_rank(manager):
        inner = copy.deepcopy(model)
        attach_domain(inner, manager, (SHAPE,))
        outer = Outer(inner)
        attach_domain(outer, manager, (SHAPE,))
        band = shard_tensor(x, manager=manager)
        return outer(band).detach(), inner(band).detach()

    results = on_threads(RANKS, on_rank)
    for i, y in enumerate((Outer(model)(x), model(x))):
        torch.testing.assert_close(torch.cat([result[i] for result in results], -2), y.detach())


class _Object:
    def __init__(self, x):
        self.x = x


REFUSED = {
    "method": (None, lambda m, x: m.core(x), "stem: called by Model outside of its forward"),
    "forward": (None, lambda m, x: m.forward(x), "stem: called by Model outside of its forward"),
    "attribute": (_keep, lambda m, x: m(x) + m.cache, "used outside of its forward"),
    "object in": (lambda m, o: m.core(o.x), lambda m, x: m(_Object(x)), "_Object: fields"),
    "object out": (lambda m, x: _Object(m.core(x)), lambda m, x: m(x), "_Object: fields"),
}


def test_refuses_fields_that_enter_or_leave_unseen():
    for name, (forward, call, message) in REFUSED.items():

        def on_rank(manager, forward=forward, call=call):
            model = Model(forward)
            attach_domain(model, manager, (SHAPE,))
            call(model, shard_tensor(torch.randn(SHAPE), manager=manager))

        with pytest.raises(RankError) as error:
            on_threads(RANKS, on_rank)
        assert message in str(error.value), name
        assert isinstance(error.value.__cause__, UserError), name


def test_a_model_that_failed_can_run_again():
    def fail(model, x):
        raise ValueError

    def on_rank(manager):
        model = Model(fail)
        attach_domain(model, manager, (SHAPE,))
        x = shard_tensor(torch.randn(SHAPE), manager=manager)
        with pytest.raises(ValueError, match=r"^$"):
            model(x)
        model.function = None
        return model(x).shape

    assert on_threads(RANKS, on_rank) == [(2, 3, rows, 8) for rows in (3, 2, 2)]


def test_a_mapping_that_forbids_changes_is_planned():
    def on_rank(manager):
        model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1))
        model.settings = Frozen(width=3)
        convert_to_domain_parallel(model, manager, input_shape=SHAPE)
        return list(model.settings.items())

    assert on_threads(RANKS, on_rank) == [[("width", 3)]] * RANKS


def _call_with_other_columns(manager):
    model = Model()
    attach_domain(model, manager, [SHAPE])
    model(torch.randn(*SHAPE[:2], manager.partition(SHAPE[2]).sizes[manager.domain_rank], 5))


def test_a_band_with_other_columns_is_refused():
    with pytest.raises(RankError, match="planned are bands of fields of shape"):
        on_threads(3, _call_with_other_columns)


def _call_with_other_channels(manager):
    model = Model(lambda model, x, y: x * y.mean())
    attach_domain(model, manager, (SHAPE, SHAPE))
    x = shard_tensor(torch.randn(SHAPE), manager=manager)
    model(x, torch.randn(2, 5, 3, 4))  # is whole
    model(x, x[:, :2])


def test_a_band_with_other_channels_is_refused_beside_one_that_fits():
    with pytest.raises(RankError, match=r"a band of shape \(2, 2, ., 8\), planned are bands of"):
        on_threads(3, _call_with_other_channels)


@pytest.mark.parametrize(
    "rows", [4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 7))]
)
def test_a_planned_field_of_one_row_is_whole_beside_bands_of_one_row(rows):
    x, row = torch.randn(2, 3, rows, 8), torch.randn(2, 5, 1, 8)

    def on_rank(manager):
        model = Model(lambda model, x, row: x * row.sum() + x.cumsum(-2))
        attach_domain(model, manager, (x.shape, row.shape))
        return model(shard_tensor(x, manager=manager), row)

    found = torch.cat(on_threads(3, on_rank), -2)
    torch.testing.assert_close(found, x * row.sum() + x.cumsum(-2))


def _call_with_wrong_rows(manager):
    model = Model()
    attach_domain(model, manager, [SHAPE])
    x = shard_tensor(torch.randn(SHAPE), manager=manager)
    with pytest.raises(UserError) as error:
        model(x.repeat(1, 1, 2, 1) if manager.domain_rank == 1 else x)
    return str(error.value), model(x).shape[-2]


def test_all_ranks_refuse_what_one_of_them_can_not_take():
    messages, rows = zip(*on_processes(3, _call_with_wrong_rows), strict=True)
    assert rows == (3, 2, 2)
    assert messages[1].startswith("rank 1: got 4 rows, planned are the bands of 7 rows.")
    assert {messages[0], messages[2]} == {"rank 1 of the domain can't run: see its message."}


def _compiles_nothing(manager):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    inner = torch.compile(lambda x: x.flip(-2) * x.sigmoid(), backend=backend, fullgraph=True)
    model = Model(lambda m, x: m.core(inner(x)))
    whole, x = copy.deepcopy(model), torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    attach_domain(model, manager, [SHAPE])
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    band = shard_tensor(x, manager=manager).clone().requires_grad_()
    outputs = [each(band) for each in (model, compiled)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.sum().backward()
    assert torch.equal(model.stem.weight.grad, compiled.stem.weight.grad)
    assert not graphs
    detach_domain(model)
    assert "_call_impl" not in vars(model)
    whole(x).sum().backward()
    assert graphs
    return outputs[0].detach(), model.stem.weight.grad, whole.stem.weight.grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's of its own code, which it traces
def test_torch_compiles_neither_a_model_nor_what_it_calls():
    results = on_processes(2, _compiles_nothing)
    torch.testing.assert_close(sum(grad for _, grad, _ in results), results[0][2])


def _find_errors(manager):
    """Run a step in which torch looks for NaN, which all ranks have to do together."""
    model = Model()
    attach_domain(model, manager, [SHAPE])
    band = shard_tensor(torch.ones(SHAPE), manager=manager)
    with torch.autograd.detect_anomaly(check_nan=True):
        model(band).sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (model(band) * float("nan")).sum().backward()
    return True


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_ranks_look_for_nan_together():
    assert on_processes(2, _find_errors) == [True, True]
