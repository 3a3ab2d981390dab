"""Models that share modules: converting one of them leaves the others as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from credit_dp.domain_parallel import (
    DomainParallelManager,
    convert_from_domain_parallel,
    convert_to_domain_parallel,
    gather_tensor,
    shard_tensor,
)
from credit_dp.domain_parallel.band_tensor.boundary import attached_domain
from credit_dp.domain_parallel.transport import ThreadTransport, ThreadWorld
from credit_dp.errors import UserError
from tests.ranks import on_threads, seeded
from tests.tier_cases import every

SHAPE = (2, 3, 11, 8)
WIDTH = 4


class Block(nn.Module):
    """Code of a user's with layers that couple rows and a parameter of columns."""

    def __init__(self, act):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.columns = nn.Parameter(torch.linspace(0, 1, SHAPE[3]))
        self.act = act

    def forward(self, x):
        return self.act(self.conv(x) * self.columns)


class Model(nn.Module):
    def __init__(self, act=nn.GELU(), *, on_globe):  # noqa: B008  (as packages do: one for all)
        super().__init__()
        self.on_globe = on_globe
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.act = act
        self.block = Block(act)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Conv2d(WIDTH, 3, 3, padding=1), act)

    def forward(self, x):
        y = self.act(self.stem(x))
        if self.on_globe:  # what conversion refuses
            y = y * torch.linspace(-1, 1, y.shape[-2])[:, None]
        y = self.norm(self.block(y))
        return self.head(self.mix(y.transpose(1, 3)).transpose(1, 3))


SHARED = {
    "activation": (),  # the default argument
    "layers": ("stem", "norm", "mix"),
    "block": ("block",),
    "containers": ("block", "head"),
}
CASES = [
    ("activation", False),
    ("layers", False),
    ("activation", True),
    ("layers", True),
    ("block", True),
    ("containers", True),
]


def _student_and_teacher(shared, on_globe):
    torch.manual_seed(0)
    student, teacher = (Model(on_globe=on_globe) for _ in range(2))
    for name in SHARED[shared]:
        setattr(teacher, name, getattr(student, name))
    return nn.ModuleList([student, teacher])


def _outputs(pair, x, teacher_x, alone, is_refused):
    """Run the teacher before, during and after a forward of the student, and its parts alone.

    During the forward it `is_refused` if it is not converted and has parameters of the student.
    """
    student, teacher = pair
    outputs = [teacher(teacher_x)]

    def during(*_):
        hook.remove()  # the teacher may have the same module
        if not is_refused:
            outputs.append(teacher(teacher_x))

    hook = student.act.register_forward_hook(during)
    y = student(x)
    outputs.append(teacher(teacher_x))
    if alone:
        outputs.append(teacher.head(teacher.block(teacher.stem(teacher_x))))
    return [y, *outputs]


def _check(shared, on_globe, converted, ranks):
    """Compare a student and a teacher, one or both converted, with the unsharded ones."""
    pair = _student_and_teacher(shared, on_globe).double()
    alone = converted == 1
    is_refused = alone and on_globe and shared != "activation"
    x, *weights = torch.randn(6, *SHAPE, generator=seeded(1), dtype=torch.float64)
    plain = copy.deepcopy(pair)
    whole_x = x.clone().requires_grad_()
    wanted = _outputs(plain, whole_x, whole_x, alone, is_refused)
    torch.autograd.backward(wanted, weights[: len(wanted)])

    def on_rank(manager):
        models = copy.deepcopy(pair)
        for model in models[:converted]:
            settings = {} if on_globe else {"whole_ops": "refuse"}
            convert_to_domain_parallel(model, manager, input_shape=SHAPE, **settings)
            assert (attached_domain(model) is not None) == on_globe
        models = copy.deepcopy(models, {id(manager): manager})
        band = shard_tensor(x, manager=manager).requires_grad_()
        other_x = x.clone().requires_grad_()
        outputs = _outputs(models, band, other_x if alone else band, alone, is_refused)
        cuts = [True] + [not alone] * (len(outputs) - 1)
        # Every rank computes what is not cut: each backward gets its share.
        cotangents = [
            shard_tensor(w, manager=manager) if is_cut else w / ranks
            for w, is_cut in zip(weights, cuts, strict=False)
        ]
        torch.autograd.backward(outputs, cotangents)
        gradient = gather_tensor(band.grad, manager=manager)
        if alone:
            gradient = gradient + manager.transport.all_reduce(other_x.grad)
        gradients = [manager.transport.all_reduce(p.grad) for p in models.parameters()]
        whole = [
            gather_tensor(y.detach(), manager=manager) if is_cut else y.detach()
            for y, is_cut in zip(outputs, cuts, strict=True)
        ]
        assert torch.equal(copy.deepcopy(models[1])(other_x if alone else band), outputs[1])
        for model in models:
            convert_from_domain_parallel(model)
        return [*whole, gradient, *gradients, models[0](x).detach(), models[1](x).detach()]

    expected = [y.detach() for y in wanted]
    expected += [whole_x.grad, *(p.grad for p in plain.parameters()), expected[0], expected[1]]
    for results in on_threads(ranks, on_rank):
        torch.testing.assert_close(results, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("shared", "on_globe"), every(2, [*CASES[1:], CASES[0]]))
def test_an_unconverted_model_stays_as_it_is(shared, on_globe):
    _check(shared, on_globe, 1, 3)


@pytest.mark.parametrize(("shared", "on_globe"), every(3, CASES))
def test_both_models_are_converted(shared, on_globe):
    _check(shared, on_globe, 2, 3)


def test_refuses_an_unconverted_model_inside_of_the_forward_of_another():
    def on_rank(manager):
        pair = copy.deepcopy(_student_and_teacher("block", on_globe=True))
        convert_to_domain_parallel(pair[0], manager, input_shape=SHAPE)
        x = torch.ones(SHAPE)
        with pytest.raises(UserError, match=r"^block: called by Model, which is not converted, in"):
            _outputs(pair, shard_tensor(x, manager=manager), x, alone=True, is_refused=False)

    on_threads(2, on_rank)


@pytest.mark.parametrize("shared", every(2, ["containers", "block"]))
def test_a_copy_is_converted_beside_models_that_share_containers(shared):
    """Layers are replaced in the containers themselves."""
    pair = _student_and_teacher(shared, on_globe=False).double()
    x = torch.randn(SHAPE, generator=seeded(1), dtype=torch.float64)
    expected = [model(x).detach() for model in copy.deepcopy(pair)]

    def on_rank(manager):
        models = copy.deepcopy(pair)
        settings = {"input_shape": SHAPE, "whole_ops": "refuse"}
        sharded = convert_to_domain_parallel(copy.deepcopy(models[0]), manager, **settings)
        band = shard_tensor(x, manager=manager)
        before = [model(x).detach() for model in models]
        y = gather_tensor(sharded(band).detach(), manager=manager)
        after = [model(x).detach() for model in models]
        convert_to_domain_parallel(models[0], manager, **settings)
        with pytest.raises(UserError, match="if a model that is not converted shares this layer"):
            models[1](x)
        return y, before, after

    for y, before, after in on_threads(3, on_rank):
        torch.testing.assert_close(y, expected[0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close([*before, *after], [*expected, *expected], rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("converted", [1, 2])
@pytest.mark.parametrize("on_globe", [False, True], ids=["layers", "globe"])
def test_other_numbers_of_ranks(ranks, on_globe, converted):
    _check("layers", on_globe, converted, ranks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's of its own code, which it traces
def test_an_unconverted_model_compiles_to_one_graph():
    student, teacher = _student_and_teacher("layers", on_globe=True)
    x = torch.randn(SHAPE, generator=seeded(1))
    wanted = teacher(x)
    manager = DomainParallelManager(2, 2, transport=ThreadTransport(ThreadWorld(2), 0))
    convert_to_domain_parallel(student, manager, input_shape=SHAPE)
    compiled = torch.compile(teacher, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)
