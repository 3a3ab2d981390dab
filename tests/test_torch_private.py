"""Each use of torch's private interface: what would break if a release of torch changed it."""

import ast
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, distributed, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode

from credit_dp import torch_private
from credit_dp.torch_private import (
    CALL_ATTRIBUTE,
    DISABLED_TORCH_FUNCTION,
    FAKE_IMPLEMENTATIONS,
    FAKE_LOGGER,
    LIKE_CONSTRUCTORS,
    MODULE_TABLES,
    DataDependentOutputException,
    DispatchMode,
    DropoutNd,
    DynamicOutputShapeException,
    FakeModeOfThread,
    FakeTensor,
    FakeTensorMode,
    MovedModule,
    OpOverload,
    UnsupportedOperatorException,
    all_modules,
    apply_to_tensors,
    are_saved_tensors_seen,
    at_end_of_backward,
    backward_pass,
    buffers_of,
    call_with_hooks,
    change_own_shape,
    check_convolution,
    children_of,
    compile_backward_without_autocast,
    constant_when_compiled,
    cpu_backend,
    disable_current_modes,
    disable_torch_dispatch,
    disable_torch_function,
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
    forward_hooks,
    forward_pre_hooks,
    gloo_options,
    gradient_hooks,
    has_backward_hooks,
    has_hooks,
    is_alias,
    is_compiler_imported,
    is_composite,
    is_dispatch_mode_active,
    is_fake_mode_active,
    is_forward_gradient_active,
    is_function_mode_active,
    is_profiling,
    is_transform_active,
    is_view,
    never_compile,
    never_measure,
    new_fake,
    new_fake_mode,
    new_wrapper,
    next_node_number,
    operator_of,
    padding_widths,
    parameters_of,
    remove_hooks,
    replace_flat_weights,
    run_uncompiled,
    running_node_number,
    schema_of,
    set_schedule,
    share_kind_of_backward_hooks,
    show_as_parameter,
    takes_kwargs,
    takes_kwargs_after,
    timeout_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    version_of,
)
from tests.ranks import TIMEOUT

COMPILER = torch_private.COMPILER


class Seen(DispatchMode):
    """Lists the operations of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenCalls(TorchFunctionMode):
    """Lists the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_every_name_is_tested():
    tree = ast.parse(Path(__file__).read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    source = ast.parse(Path(torch_private.__file__).read_text())
    defined = set(torch_private.__all__) - {"__all__"}
    for node in source.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets}
    assert {name for name in defined if name[0] != "_"} <= used


# ---------------------------------------------------------------- modes


@pytest.mark.slow
def test_a_plan_would_import_the_compiler():
    code = (
        "import torch\n"
        "from credit_dp.torch_private import DispatchMode, constant_when_compiled\n"
        "from credit_dp.torch_private import is_compiler_imported\n"
        "class Mode(DispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        return func(*args, **(kwargs or {}))\n"
        "constant_when_compiled(lambda: 0)\n"
        "with Mode(): torch.ones(2) + 1\n"
        "assert not is_compiler_imported()\n"
        "import torch._dynamo\n"
        "assert is_compiler_imported()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr


def test_a_plan_would_see_its_own_operations():
    with Seen() as seen:
        with disable_torch_dispatch():
            torch.ones(2)
        with disable_current_modes():
            torch.ones(2)
        assert seen.names == []
        torch.ones(2)
    assert seen.names == ["aten.ones.default"]
    with FakeTensorMode(), disable_torch_dispatch():
        assert type(torch.ones(2)) is Tensor


def test_rules_would_see_their_own_calls():
    with SeenCalls() as seen, disable_torch_function():
        torch.ones(2).add(1)
    assert seen.functions == []


def test_a_plan_would_fill_the_cache_of_constants():
    assert not is_dispatch_mode_active()
    found = []
    with Seen():
        assert is_dispatch_mode_active()
        thread = threading.Thread(target=lambda: found.append(is_dispatch_mode_active()))
        thread.start()
        thread.join()
    assert found == [False]


def test_a_transform_would_fill_the_cache_of_constants():
    assert not is_transform_active()
    found = []
    torch.func.vmap(lambda x: (found.append(is_transform_active()), x)[1])(torch.ones(2))
    assert found == [True]


def test_forward_gradients_would_not_pass_a_layer_in_one_node():
    assert not is_forward_gradient_active()
    with torch.autograd.forward_ad.dual_level():
        assert is_forward_gradient_active()


def test_a_mode_would_not_see_a_layer_in_one_node():
    assert not is_function_mode_active()
    with torch.device("cpu"):
        assert is_function_mode_active()


def test_a_checkpoint_would_not_find_what_it_saved():
    assert not are_saved_tensors_seen()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert are_saved_tensors_seen()


def test_a_plan_would_take_values_for_shapes():
    assert not is_fake_mode_active()
    with FakeTensorMode():
        assert is_fake_mode_active()


def test_a_thread_would_take_the_driver_with_it():
    assert type(new_fake_mode()) is FakeTensorMode
    kinds = []
    thread = threading.Thread(target=lambda: kinds.append(type(new_fake_mode())))
    thread.start()
    thread.join()
    own = FakeTensorMode if torch.cuda.is_available() else FakeModeOfThread
    assert kinds == [own]
    assert not FakeModeOfThread().avoid_device_init


# ---------------------------------------------------------------- tensors


def test_layers_would_share_rows_that_were_written_to():
    x = torch.zeros(3)
    before = version_of(x)
    assert version_of(x[1:]) == before
    x[1:].add_(1)
    assert version_of(x) == before + 1


def test_autograd_would_forbid_writes_to_fetched_rows():
    x = torch.zeros(3)
    assert not is_view(x)
    assert is_view(x[1:])
    assert not is_view(x[1:].detach().clone())


def test_a_write_to_a_view_would_be_lost():
    x = torch.zeros(3)
    assert is_alias(x, x[1:])
    assert not is_alias(x, x.clone())
    assert not is_alias(x, x.to_sparse())


def test_parameters_would_get_gradients_of_the_globe_or_twice_their_share():
    def double(gradient):
        return 2 * gradient

    x = torch.zeros(3, requires_grad=True)
    assert not gradient_hooks(x)
    x.register_hook(double)
    assert list(gradient_hooks(x).values()) == [double]
    del gradient_hooks(x)[next(iter(gradient_hooks(x)))]
    x.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_recurrent_layers_would_copy_their_weights_at_each_call():
    layer = nn.LSTM(2, 2)
    before, x = list(layer._flat_weights), torch.rand(1, 1, 2)
    expected = layer(x)[0]
    new = {id(p): p.detach().clone().mul_(2) for p in layer.parameters()}
    restore = replace_flat_weights(layer, new)
    originals = dict(parameters_of(layer))
    parameters_of(layer).update({name: new[id(p)] for name, p in originals.items()})
    weights = layer._flat_weights
    assert not torch.equal(layer(x)[0], expected)
    assert layer._flat_weights is weights
    parameters_of(layer).update(originals)
    restore()
    assert torch.equal(layer(x)[0], expected)
    assert all(a is b for a, b in zip(layer._flat_weights, before, strict=True))


class Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.full((1,), 7.0)


def test_a_field_would_not_have_the_shape_of_the_globe():
    local = torch.zeros(2, 4, dtype=torch.float64)
    x = new_wrapper(Wrapper, [8, 4], dtype=local.dtype, device=local.device)
    assert (type(x), x.shape, x.dtype, x.device) == (Wrapper, (8, 4), local.dtype, local.device)
    assert torch.neg(x).tolist() == [7]


class Negated(torch.Tensor):
    """Holds a tensor, and changes its own shape as that one does."""

    __torch_function__ = DISABLED_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (x, *others) = args
        if torch.Tag.inplace_view in func.tags:
            func(x.local, *others)
            change_own_shape(func, args, kwargs or {})
            return x
        return func(x.local, *others)


def test_tensors_below_autograd_would_not_be_computed():
    x = new_wrapper(Negated, [2, 3])
    x.local = torch.arange(6.0).view(2, 3)
    assert torch.neg(x).tolist() == [[0, -1, -2], [-3, -4, -5]]
    x.t_()
    assert (x.shape, x.stride()) == ((3, 2), (1, 3))
    assert torch.neg(x).tolist() == [[0, -3], [-1, -4], [-2, -5]]


def test_operators_would_be_computed_by_others_that_are_none():
    assert is_composite(torch.ops.aten.matmul.default)
    assert not is_composite(torch.ops.aten.mm.default)


def test_a_plan_would_make_other_fake_tensors_than_torch():
    mode, cpu = FakeTensorMode(), torch.device("cpu")
    data = torch.empty(2, 3, device="meta")
    first = FakeTensor(mode, data, cpu)
    fake = new_fake(data, cpu, dict(first.__dict__))
    assert type(fake) is FakeTensor
    assert (fake.device, fake.fake_mode, fake.shape) == (cpu, mode, (2, 3))
    with mode:
        total = fake + first
    assert (total.device, total.shape) == (cpu, (2, 3))
    with pytest.raises(RuntimeError, match="data"):
        fake.data_ptr()


def test_a_fake_parameter_would_be_none_to_the_model():
    with FakeTensorMode():
        x = torch.zeros(2)
    assert not isinstance(x, nn.Parameter)
    show_as_parameter(x)
    assert isinstance(x, nn.Parameter)


def test_an_error_of_a_plan_would_come_with_a_traceback(caplog, monkeypatch):
    logger = logging.getLogger(FAKE_LOGGER)
    monkeypatch.setattr(logger, "disabled", False)
    caplog.set_level(logging.ERROR, FAKE_LOGGER)  # plans of other tests set it, too
    logger.addHandler(caplog.handler)
    try:
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.zeros(2) @ torch.zeros(3)
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.name for record in caplog.records} == {FAKE_LOGGER}


def test_memory_would_be_counted_twice():
    x = torch.zeros(4, requires_grad=True)
    y = x * 2
    storages = {id(t.untyped_storage()) for t in (y, y[1:], y.detach(), y.view(2, 2))}
    assert len(storages) == 1
    key, reference = id(y.untyped_storage()), weakref.ref(y.untyped_storage())
    z = y * y  # autograd alone holds `y` now
    del y
    assert reference() is not None
    assert id(z.grad_fn._saved_self.untyped_storage()) == key
    del z
    assert reference() is None
    with FakeTensorMode():
        fake = torch.zeros(4)
        assert fake.untyped_storage() is fake[1:].untyped_storage()


def test_a_plan_would_not_say_why_it_fails():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(2).sum().item()
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        torch.zeros(2).nonzero()
    library = torch.library.Library("credit_dp_test", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", lambda x: x.clone(), "CPU")
    with FakeTensorMode(), pytest.raises(UnsupportedOperatorException):
        torch.ops.credit_dp_test.unknown(torch.zeros(2))


# ---------------------------------------------------------------- operators


def test_a_plan_would_not_see_what_is_written():
    (first, *_) = schema_of(torch.ops.aten.add_.Tensor).arguments
    assert (first.name, first.alias_info.is_write) == ("self", True)
    schema = schema_of(torch.ops.aten.add.Tensor)
    assert not schema.is_mutable
    assert [result.alias_info for result in schema.returns] == [None]
    assert schema_of(torch.add) is None


def test_rules_for_custom_operators_would_not_be_found():
    @torch.library.custom_op("credit_dp_test::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    operator = operator_of(double)
    assert operator is torch.ops.credit_dp_test.double.default
    assert operator_of(operator) is operator
    assert isinstance(operator, OpOverload)
    assert operator.overloadpacket is torch.ops.credit_dp_test.double
    names = [str(operator), str(operator.overloadpacket)]
    assert [name.split(".")[0] for name in names] == ["credit_dp_test"] * 2


def test_a_plan_would_accept_wrong_channels():
    x, weight = torch.empty(1, 3, 4, 4, device="meta"), torch.empty(2, 3, 3, 3, device="meta")
    settings = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    check_convolution(x, weight, *settings)
    with pytest.raises(RuntimeError, match="channels"):
        check_convolution(x, weight[:, :2], *settings)


def test_meta_kernels_would_be_used_where_torch_has_others():
    assert torch.ops.aten.nonzero.default in FAKE_IMPLEMENTATIONS
    assert torch.ops.aten.zeros_like.default in LIKE_CONSTRUCTORS
    assert torch.ops.aten.add.Tensor not in FAKE_IMPLEMENTATIONS


def test_the_lion_optimizer_would_compute_something_else():
    a, b = [torch.tensor([1.0, -2.0])], [torch.tensor([3.0, 2.0])]
    assert foreach_lerp(a, b, 0.25)[0].tolist() == [1.5, -1.0]
    foreach_lerp_(a, b, 0.5)
    assert a[0].tolist() == [2.0, 0.0]
    foreach_mul_(b, 2.0)
    assert b[0].tolist() == [6.0, 4.0]
    foreach_add_(a, b, alpha=-0.5)
    assert a[0].tolist() == [-1.0, -2.0]
    foreach_sign_(a)
    assert a[0].tolist() == [-1.0, -1.0]


# ---------------------------------------------------------------- nested values


def test_nested_values_would_not_be_walked_through():
    tree = {"b": [1, (2, None)], "a": torch.zeros(1)}
    leaves, structure = tree_flatten(tree)
    assert len(leaves) == 4
    again = tree_unflatten(leaves, structure)
    assert again["b"] == [1, (2, None)]
    assert tree_leaves([1, {"x": 2}, (3,)]) == [1, 2, 3]
    assert tree_map(lambda x: x + 1, {"x": [1, (2,)]}) == {"x": [2, (3,)]}
    assert tree_map_only(int, lambda x: -x, [1, "a", 2.0]) == [-1, "a", 2.0]


# ---------------------------------------------------------------- modules


def test_a_sharded_layer_would_lose_an_attribute_of_its_layer():
    tables = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)}
    assert tables == set(MODULE_TABLES)


def test_tensors_in_a_model_would_not_be_replaced():
    layer = nn.BatchNorm2d(2)
    layer.inner = nn.Linear(2, 2)
    assert list(parameters_of(layer)) == ["weight", "bias"]
    assert list(buffers_of(layer)) == ["running_mean", "running_var", "num_batches_tracked"]
    assert children_of(layer) == {"inner": layer.inner}
    layers = nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer.inner), layer)
    assert all_modules(layers) == list(layers.modules())
    parameters_of(layer)["weight"] = plain = torch.zeros(2)
    buffers_of(layer)["running_mean"] = other = torch.ones(2)
    children_of(layer)["inner"] = child = nn.ReLU()
    assert layer.weight is plain
    assert layer.running_mean is other
    assert layer.inner is child


def test_hooks_of_a_copied_model_would_stay():
    def keep(*_):
        calls.append("keep")

    def remove(*_, **__):
        calls.append("remove")

    calls: list[str] = []
    layer = nn.Identity()
    assert not has_hooks(layer)
    layer.register_forward_pre_hook(remove, with_kwargs=True)
    layer.register_forward_pre_hook(keep)
    layer.register_forward_hook(remove, always_call=True)
    layer.register_forward_hook(remove, with_kwargs=True)
    assert has_hooks(layer)
    assert [takes_kwargs(layer, key) for key in forward_pre_hooks(layer)] == [True, False]
    assert [takes_kwargs_after(layer, key) for key in forward_hooks(layer)] == [False, True]
    remove_hooks(layer, lambda hook: hook is remove, at_most=1)
    assert list(forward_pre_hooks(layer).values()) == [keep]
    assert list(forward_hooks(layer).values()) == [remove]
    remove_hooks(layer, lambda hook: hook is remove)
    layer(torch.zeros(1))
    assert calls == ["keep"]


def test_hooks_of_a_view_would_run_in_another_order():
    layer, calls = nn.Identity(), []
    first = layer.register_forward_hook(lambda *_: calls.append("first"))
    layer.register_forward_hook(lambda *_: calls.append("second"))
    forward_hooks(layer).move_to_end(first.id)
    layer(torch.zeros(1))
    assert calls == ["second", "first"]


@pytest.mark.filterwarnings("ignore:.*non-full backward hook")
def test_old_backward_hooks_would_not_be_refused():
    full, plain = nn.Identity(), nn.Identity()
    full.register_full_backward_hook(lambda *_: None)
    for name in MODULE_TABLES:
        plain.__dict__[name] = full.__dict__[name]
    share_kind_of_backward_hooks(plain, full)
    assert has_backward_hooks(full)
    assert not has_backward_hooks(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="Cannot use both"):
        plain.register_backward_hook(lambda *_: None)


def test_circular_padding_would_have_another_width():
    conv = nn.Conv2d(1, 1, (3, 5), padding=(1, 2), padding_mode="circular")
    assert padding_widths(conv) == (2, 2, 1, 1)
    assert padding_widths(nn.Conv2d(1, 1, (4, 3), padding="same")) == (1, 1, 1, 2)
    assert padding_widths(nn.ConvTranspose2d(1, 1, 3, padding=1)) == (1, 1, 1, 1)


def test_parts_of_a_model_would_stay_on_their_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    apply_to_tensors(model, lambda x: x.double() if x.is_floating_point() else x)
    assert {x.dtype for x in model.parameters()} == {torch.float64}
    assert model[1].running_mean.dtype is torch.float64
    model.extra = nn.Linear(1, 1)
    apply_to_tensors(model, lambda x: x.to("meta"), recurse=False)
    assert not model.extra.weight.is_meta


def test_numbers_of_fixers_would_be_rounded():
    class Kept(MovedModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("number", torch.ones(1, dtype=torch.float64))

        def move(self, apply) -> None:
            before = self.number
            apply()
            assert self.number.dtype is torch.float16
            self.number = before

    model = nn.Sequential(Kept(), nn.Linear(1, 1)).half()
    assert (model[0].number.dtype, model[1].weight.dtype) == (torch.float64, torch.float16)


def test_dropout_would_draw_while_a_model_is_verified():
    kinds = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d]
    kinds += [nn.AlphaDropout, nn.FeatureAlphaDropout]
    assert all(issubclass(kind, DropoutNd) for kind in kinds)


def test_a_model_in_a_view_would_be_compiled():
    layer, calls = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: calls.append("hook"))

    def call(*args, **kwargs):
        calls.append("call")
        return call_with_hooks(layer, args, kwargs)

    layer.__dict__[CALL_ATTRIBUTE] = call
    layer(torch.zeros(1, 2))
    assert calls == ["call", "hook"]


# ---------------------------------------------------------------- autograd


def test_a_recomputation_would_be_taken_for_a_forward():
    passes = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda gradient: passes.append(backward_pass()))
        y.backward()
    assert backward_pass() == -1
    assert -1 not in passes
    assert passes[0] != passes[1]


def test_messages_of_a_backward_would_be_counted_for_another_module():
    numbers = []
    x = torch.ones(1, requires_grad=True)
    first = next_node_number()
    y = x * 2
    second = next_node_number()
    y.register_hook(lambda gradient: numbers.append(running_node_number()))
    (y * 3).backward()
    assert first < second
    assert running_node_number() == -1
    assert numbers == [first]


@pytest.mark.parametrize("fails", [False, True])
def test_models_would_stay_uncompiled_after_backward(fails):
    def ends():
        calls.append("end")

    def hook(gradient):
        nonlocal ends
        weakref.finalize(ends, calls.append, "freed")
        at_end_of_backward(ends)
        del ends
        calls.append("hook")
        if fails:
            raise ValueError

    calls = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    with pytest.raises(ValueError) if fails else nullcontext():
        y.backward()
    del x, y
    assert calls == ["hook", *([] if fails else ["end"]), "freed"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_profile_would_show_no_regions():
    assert not is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiling()
    assert not is_profiling()


# ---------------------------------------------------------------- compiler


@pytest.mark.filterwarnings("ignore:Guards may run slower")
def test_plans_would_be_traced_by_the_compiler():
    class Layer:
        @constant_when_compiled
        def number(self) -> int:
            return len(sys._getframe().f_code.co_name)  # which the compiler can't trace

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.number()

    compiled = torch.compile(Layer(), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [6, 6]
    assert is_compiler_imported()
    assert COMPILER in sys.modules


@pytest.mark.filterwarnings("ignore:Guards may run slower")
def test_the_call_of_a_model_would_be_traced_by_the_compiler():
    @run_uncompiled
    def uncompiled(x: Tensor) -> Tensor:
        found.append(torch.compiler.is_compiling())
        return inner(x)

    def inner(x: Tensor) -> Tensor:
        found.append(torch.compiler.is_compiling())
        return x + 1

    found: list[bool] = []
    compiled = torch.compile(lambda x: uncompiled(x * 2), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert found == [False, False]


def test_operators_of_a_subclass_would_be_compiled():
    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    def inner(x: Tensor) -> Tensor:
        return x + 1

    @never_compile
    def outer(x: Tensor) -> Tensor:
        found.append(torch.compiler.is_compiling())
        return inner(x * 2)

    graphs: list[object] = []
    found: list[bool] = []
    assert torch.compile(outer, backend=backend)(torch.ones(2)).tolist() == [3, 3]
    assert (found, graphs) == ([False], [])


def test_compiled_backward_passes_would_round_gradients():
    from torch._functorch import config

    before = config.backward_pass_autocast
    try:
        compile_backward_without_autocast()
        assert config.backward_pass_autocast == "off"
    finally:
        config.backward_pass_autocast = before


# ---------------------------------------------------------------- distributed


@pytest.fixture
def gloo() -> Iterator[distributed.ProcessGroup]:
    seconds = timedelta(seconds=77)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=seconds)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def test_a_hang_would_not_end_in_time(gloo):
    assert cpu_backend(gloo).name() == "gloo"
    assert isinstance(cpu_backend(gloo), distributed.ProcessGroupGloo)
    assert timeout_of(gloo) == 77


def test_each_group_would_open_its_own_sockets(gloo):
    options = gloo_options(gloo, timedelta(seconds=5))
    assert len(options._devices) == 1
    alone = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, options)
    x = torch.ones(2)
    alone.allreduce([x]).wait()
    assert x.tolist() == [1, 1]
    assert alone.options._timeout == timedelta(seconds=5)
    without = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=None))
    assert gloo_options(without, timedelta(seconds=5)) is None


def test_ddp_would_measure_passes_in_a_cuda_graph(gloo):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    never_measure(model)
    model(torch.ones(1)).backward()
    assert model.module.weight.grad.tolist() == [[1]]


# ---------------------------------------------------------------- optimization


def test_a_resumed_run_would_have_another_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    set_schedule(schedule, 3, [0.5])
    assert schedule.last_epoch == 3
    assert schedule.get_last_lr() == [0.5]
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [2.0 / 5]
