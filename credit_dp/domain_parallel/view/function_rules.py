"""The rules of functions, and what happens to a function that has none.

`call_function` is what every torch function on a `GlobalTensor` comes to. A function without a
rule, or one whose rule does not fit its arguments (`NoRuleError`), is called whole. Rules decide by
global shapes and layouts, which are the same on all ranks, or by values of the first rank: so all
ranks take the same decisions, and reach the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.transport import message_device
from credit_dp.domain_parallel.view.filling import lay_out
from credit_dp.domain_parallel.view.memory import (
    arguments_of_write,
    as_argument,
    as_new_tensor,
    is_assigned_to_itself,
    note_views,
    writing,
)
from credit_dp.domain_parallel.view.tensor import (
    LEAVES,
    GlobalTensor,
    GlobalView,
    Layout,
    bands_of,
    call_whole,
    cut,
    functions_named,
    gather,
    global_tensors,
    has_few_rows,
    is_band,
    local_of,
    map_values,
    note_whole_call,
    same_random_numbers,
    whole,
    with_whole_gradients,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    NN_FUNCTIONS,
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    is_alias,
    schema_of,
    suggest_memory_format,
    tree_map,
)

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Function, Args, Kwargs], Any]
RULES_FOR_WHOLE: set[Any] = set()  # functions whose rules are for tensors without bands, too
# Functions that leave slices of few rows where they are, as padding across the poles calls, and
# those for which a tensor must be itself. For each call of another function these rows are sent to
# all ranks.
OF_FEW_ROWS: set[Any] = {
    torch.autograd.grad,
    *functions_named(
        "__getitem__", "__setitem__", "narrow", "flip", "roll", "cat", "concat", "concatenate",
        "clone", "contiguous", "detach", "neg", "__neg__", "mul", "__mul__", "__rmul__",
        "register_hook", "retain_grad", "requires_grad_", "detach_", "is_floating_point",
        "is_complex", "is_signed", "element_size", "is_inference", "is_conj", "is_neg",
        "get_device", "is_contiguous", "numpy", "__array__", "__dlpack__",
    ),
}  # fmt: skip


class NoRuleError(Exception):
    """A rule does not fit these arguments: the function is called whole."""


def rule_for(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for torch's functions and methods of these names."""

    def register(rule: Rule) -> Rule:
        for function in functions_named(*names):
            RULES[function] = rule
        return rule

    return register


# How a whole tensor that the model has made is to be cut before a function writes to it.
FindLayout = Callable[[Tensor, Args, Kwargs], Layout | None]
LAYOUTS_BEFORE_WRITE: dict[Any, FindLayout] = {}


def layout_before(*names: str) -> Callable[[FindLayout], FindLayout]:
    """Register how a whole tensor is to be cut before torch's functions of these names write."""

    def register(find: FindLayout) -> FindLayout:
        LAYOUTS_BEFORE_WRITE.update(dict.fromkeys(functions_named(*names), find))
        return find

    return register


# What torch's Python functions call to see whether a tensor computes them itself.
OVERRIDE_CHECKS = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)


@cache
def python_of(func: Function) -> Function:
    """Return one of torch's Python functions with its own code, whatever its arguments are.

    What it calls is computed by rules: a function of other functions needs no rule of its own.
    """
    assert isinstance(func, FunctionType)
    names = func.__globals__ | dict.fromkeys(OVERRIDE_CHECKS, lambda *tensors: False)
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# Other names that torch accepts for its parameters, as numpy has them.
ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "A": "input"}


def bind(names: Sequence[str], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters; without those not passed.

    Raises:
        NoRuleError: the rule does not know a parameter.
    """
    if len(args) > len(names):
        raise NoRuleError
    arguments = dict(zip(names, args, strict=False))
    for keyword, value in kwargs.items():
        name = keyword if keyword in names else ALIASES.get(keyword, keyword)
        if name not in names or name in arguments:
            raise NoRuleError
        arguments[name] = value
    return arguments


def require(arguments: Mapping[str, Any], *names: str) -> list[Any]:
    """Return arguments that have no default.

    Raises:
        NoRuleError: one is not passed.
    """
    if any(name not in arguments for name in names):
        raise NoRuleError
    return [arguments[name] for name in names]


def layout_of(x: Any) -> Layout:
    """Return where the rows of a band are.

    Raises:
        NoRuleError: every rank holds all of `x`.
    """
    if type(x) is not GlobalTensor or x.rows is None:
        raise NoRuleError
    return x.rows


def require_whole(*tensors: Any) -> None:
    """Check that no tensor is a band, as parameters are not.

    Raises:
        NoRuleError: one is.
    """
    if not LEAVES.issuperset(map(type, tensors)) and bands_of(tensors):
        raise NoRuleError


RANDOM = frozenset(
    functions_named(
        "bernoulli", "bernoulli_", "dropout", "dropout1d", "dropout2d", "dropout3d",
        "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout",
        "rand_like", "randn_like", "randint_like",
        "normal", "normal_", "uniform_", "random_", "exponential_", "multinomial",
        "poisson", "rrelu", "gumbel_softmax", "scaled_dot_product_attention", "dropout_",
        "multi_head_attention_forward", "geometric_", "cauchy_", "log_normal_", "rrelu_",
        "_standard_gamma", "_sample_dirichlet", "binomial",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "svd_lowrank", "pca_lowrank",
        "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d", "fractional_max_pool3d_with_indices",
        "alpha_dropout_", "feature_alpha_dropout_",
    )
).union(
    # The others of torch.nn.init are not overridden: what they call is.
    [nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_]
)  # fmt: skip
# Functions of a tensor's memory, which is not the unsharded one's.
OF_MEMORY = frozenset(
    functions_named("as_strided", "as_strided_", "set_", "resize_", "resize_as_", "data_ptr")
)
ASSIGN = Tensor.__setitem__
IN_PLACE_OPERATORS = frozenset(
    [
        "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__imod__",
        "__iand__", "__ior__", "__ixor__", "__setitem__", "__imatmul__", "__ilshift__",
        "__irshift__",
    ]
)  # fmt: skip


def function_name(func: Function) -> str:
    """Return the name of a function, for messages and for what a name says."""
    name: str | None = getattr(func, "__name__", None)
    return str(func) if name is None else name  # `str` takes longer than most other calls here


def is_in_place(func: Function, kwargs: Kwargs) -> bool:
    """Return whether a call changes its first argument."""
    # The functions of torch.nn.functional pass `inplace` on by its name.
    is_named = bool(kwargs) and bool(kwargs.get("inplace"))
    return is_named or _is_in_place_by_name(getattr(func, "__name__", ""))


# Methods with such a name that change no values.
NO_WRITES = frozenset(["requires_grad_", "detach_", "rename_", "share_memory_"])


@cache
def _is_in_place_by_name(name: str) -> bool:
    is_method = name.endswith("_") and not name.endswith("__") and name not in NO_WRITES
    return name in IN_PLACE_OPERATORS or is_method


OPERATORS = (OpOverload, OpOverloadPacket)


@cache
def _function_of_operator(func: Function) -> Function:
    """Return the function that `torch.ops.aten.relu` is, as others call it; itself if none is.

    Only functions in C have the parameters of their operators.
    """
    library, name, *_ = str(func).split(".")
    namespaces = (torch, Tensor, NN_FUNCTIONS) if library == "aten" else ()
    functions = [getattr(namespace, name, None) for namespace in namespaces]
    in_c = (BuiltinFunctionType, MethodDescriptorType)
    return next((each for each in functions if isinstance(each, in_c)), func)


def is_custom_operator(func: Function) -> bool:
    """Return whether a function is an operator of a library, with a backward that may be anything.

    It need not be linear in the gradient, as that of the user's `autograd.Function`s.
    """
    if not isinstance(func, OPERATORS):
        return False
    return str(func).split(".")[0] not in ("aten", "prims", "prim")


def writes_to_arguments(func: Function) -> bool:
    """Return whether an operator of a library says that it changes its arguments."""
    overloads = getattr(func, "overloads", None)  # of a packet of operators
    operators = [getattr(func, name) for name in overloads()] if callable(overloads) else [func]
    schemas = [schema for op in operators if (schema := schema_of(op)) is not None]
    return any(
        argument.alias_info is not None and argument.alias_info.is_write
        for schema in schemas
        for argument in schema.arguments
    )


def call_function(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a torch function on arguments of which some are `GlobalTensor`.

    Raises:
        UserError: the function can't be computed on bands.
    """
    if not args:
        args, kwargs = _first_by_position(kwargs)
    if isinstance(func, OPERATORS):
        func = _function_of_operator(func)
    out = kwargs.pop("out", None) if kwargs else None
    if out is not None:
        return _write_out(out, func, args, kwargs)
    if func in OF_MEMORY:
        raise UserError(
            f"{function_name(func)}: writes or reads the memory of a tensor, which is not that of "
            "the globe where rows are sharded. Use functions that return new tensors."
        )
    if func is ASSIGN and is_assigned_to_itself(*args):
        return None
    for x in args:
        if type(x) is GlobalTensor and x.memory is not None:
            x.local  # noqa: B018  (what is outdated is computed before a rule reads it)
    if not args or not is_in_place(func, kwargs):
        tensors = global_tensors(args, kwargs)
        view = tensors[0].view_ if tensors else None
        lost_orders = view and view.lost_orders
        results = as_argument(func, _compute(func, args, kwargs, tensors), args)
        has_one_order = type(results) is GlobalTensor and func in OF_ONE_ORDER
        if has_one_order:
            results = as_new_tensor(results, args[0])
        if lost_orders != (view and view.lost_orders) or any(map(HAS_LOST_ORDER, tensors)):
            _lose_order(func, results, tensors)
        elif has_one_order and not _is_in_order(func, results):
            results.has_order, results.has_lost_order = False, True
        note_views(func, results, args, kwargs)
        return results
    args, kwargs = arguments_of_write(func, args, kwargs)
    if func in LAYOUTS_BEFORE_WRITE:
        lay_out(args, kwargs, partial(_layout_before, func, args, kwargs))
    with writing(args[0]):
        return _compute(func, args, kwargs, global_tensors(args, kwargs))


HAS_LOST_ORDER = attrgetter("has_lost_order")
# Functions whose results have the usual order in memory, whatever that of their arguments is.
OF_USUAL_ORDER = frozenset(
    functions_named(
        "linear", "layer_norm", "contiguous", "index_select", "softmax", "log_softmax", "softmin",
        "instance_norm",
    )
)  # fmt: skip
# Functions whose results have it, too, but for that of `torch.channels_last`, which they keep.
OF_IMAGE_ORDER = frozenset(
    functions_named(
        "roll", "pad", "cat", "concat", "stack", "group_norm", "batch_norm", "pixel_shuffle",
        "pixel_unshuffle", "channel_shuffle", "interpolate", "upsample",
        *(
            f"{name}{dims}d"
            for name in ("conv", "conv_transpose", "avg_pool", "max_pool", "adaptive_avg_pool",
                         "adaptive_max_pool", "lp_pool")
            for dims in (1, 2, 3)
        ),
    )
)  # fmt: skip
# Those that may compute another order here, as their argument has its rows in other dimensions.
OF_ONE_ORDER = (OF_USUAL_ORDER | OF_IMAGE_ORDER) - frozenset(functions_named("contiguous"))


def _is_in_order(func: Function, result: Any) -> bool:
    """Return whether a result has the order that it has on one process, as far as a band shows."""
    if func not in OF_ONE_ORDER or type(result) is not GlobalTensor:
        return True
    local = result.local
    if local.is_contiguous():
        return True
    is_image = func not in OF_USUAL_ORDER
    return is_image and local.is_contiguous(memory_format=suggest_memory_format(local))


def _lose_order(func: Function, results: Any, tensors: Sequence[GlobalTensor]) -> None:
    """Note that results may have another order of dimensions in memory than on one process."""
    is_usual = func in OF_USUAL_ORDER or (
        func in OF_IMAGE_ORDER and not any(map(_may_be_image, tensors))
    )
    for x in global_tensors(results):
        is_new = all(x is not other for other in tensors)
        if is_new and not (is_usual and _is_in_order(func, x)):
            x.has_order, x.has_lost_order = False, True


def _may_be_image(x: GlobalTensor) -> bool:
    """Return whether channels may be the last dimension in memory."""
    if x.ndim not in (4, 5):
        return False
    return x.has_lost_order or suggest_memory_format(x.local) is not torch.contiguous_format


def _compute(func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[GlobalTensor]) -> Any:
    """Return the results of a function by its rule, or of one that runs whole.

    `tensors` are those among the arguments.
    """
    rule = RULES.get(func)
    if rule is None and function_name(func) in ("__get__", "__set__"):
        return _attribute(func, args, kwargs)
    bands = [x for x in tensors if x.rows is not None]
    if bands and func not in OF_FEW_ROWS and any(map(has_few_rows, bands)):
        return _with_few_rows_everywhere(func, args, kwargs, list(filter(has_few_rows, bands)))
    if rule is not None and (bands or func in RULES_FOR_WHOLE):
        transport = tensors[0].view_.manager.transport
        calls = transport.calls
        try:
            return rule(func, args, kwargs)
        except NoRuleError:
            pass
        except UNFORESEEN:
            # After messages a rule computes with bands: the error may be that of this rank.
            if transport.calls != calls:
                raise
    # Not while an exception is handled: it would keep tensors of the rule alive.
    return _whole(func, args, kwargs)


def _with_few_rows_everywhere(
    func: Function, args: Args, kwargs: Kwargs, few: Sequence[GlobalTensor]
) -> Any:
    """Call a function with slices of few rows on every rank; a collective."""
    if is_in_place(func, kwargs) and any(x is args[0] for x in few):
        return _whole(func, args, kwargs)
    gathered = {id(x): gather(x) for x in few}
    args, kwargs = map_values(lambda x: gathered.get(id(x), x), (args, kwargs))
    results = _compute(func, args, kwargs, global_tensors(args, kwargs))
    for y in global_tensors(results):
        y.is_view |= any(is_alias(y.local, x.local) for x in gathered.values())
    # A function may return its argument as it is.
    arguments = {id(gathered[id(x)].local): x for x in few}
    return map_values(lambda y: arguments.get(id(local_of(y)), y), results)


def _write_out(out: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Write the results of a function to tensors that exist.

    Raises:
        UserError: they have another shape or type, which torch would change or convert.
    """
    results = func(*args, **kwargs)
    targets = [out] if isinstance(out, Tensor) else list(out)
    values = [results] if isinstance(results, Tensor) else list(results)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*targets, *values)):
        raise UserError(
            f"{function_name(func)}: out= can't be differentiated. Use the result that the "
            "function returns."
        )
    for target, value in zip(targets, values, strict=True):
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise UserError(
                f"{function_name(func)}: out= has shape {tuple(target.shape)} and {target.dtype}, "
                f"the result {tuple(value.shape)} and {value.dtype}. Make both the same."
            )
        target.copy_(value)
    return out


def _first_by_position(kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return a call's arguments with the first parameter by position, whatever its name."""
    for name in ("condition", "input", "self", "tensor", "tensors", *ALIASES):
        if isinstance(kwargs.get(name), Tensor) or (name == "tensors" and name in kwargs):
            return (kwargs[name],), {k: x for k, x in kwargs.items() if k != name}
    return (), kwargs


GlobalTensor.call_function = staticmethod(call_function)
# What a rule raises on arguments that it does not foresee: on all ranks alike as long as it reads
# shapes and layouts only. If they are wrong, the function itself says so when it is called whole.
UNFORESEEN = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def _layout_before(func: Function, args: Args, kwargs: Kwargs) -> Layout | None:
    """Return how the first argument is to be cut before a write; None if that does not fit."""
    try:
        return LAYOUTS_BEFORE_WRITE[func](args[0], args, kwargs)
    except (NoRuleError, *UNFORESEEN):
        return None


def _whole(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a function whole, and cut its results again."""
    tensors = global_tensors(args, kwargs)
    if is_in_place(func, kwargs) or writes_to_arguments(func):
        # Of lists and of custom operators it is not known which tensors change.
        if not args or not isinstance(args[0], Tensor) or not is_in_place(func, kwargs):
            raise UserError(
                f"{function_name(func)}: changes tensors in place, which can't be done where rows "
                "are sharded. Use a function that returns new tensors."
            )
        return _whole_in_place(func, args, kwargs)
    view = tensors[0].view_
    args, kwargs = _agreed(func, args, kwargs)
    with _random_numbers(func, view, tensors[0].device, kwargs.get("generator")):
        call = with_whole_gradients(func, view) if is_custom_operator(func) else func
        results = call_whole(call, args, kwargs)
    bands = [x for x in bands_of(tensors) if not has_few_rows(x)]
    if not bands:
        return results
    return tree_map(lambda x: _cut_again(x, bands), results)


def _random_numbers(
    func: Function, view: GlobalView, device: torch.device, generator: torch.Generator | None
) -> AbstractContextManager[None]:
    """Return the context in which a function draws the same numbers on all ranks, if it does."""
    return same_random_numbers(view, device, generator) if func in RANDOM else nullcontext()


def _whole_in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a function in place on the gathered tensor, and copy this rank's part of it."""
    name = function_name(func)
    args, kwargs = _agreed(func, args, kwargs)
    target, *others = args
    tensors = global_tensors(args, kwargs)
    view = tensors[0].view_
    with note_whole_call(view, name, tensors):
        # A tensor of the model, such as a buffer, becomes the same on all ranks.
        changed: Tensor = whole(target)
        if is_band(target):
            changed = changed.clone()
        others, kwargs = tree_map(whole, (others, kwargs))
        with _random_numbers(func, view, changed.device, kwargs.get("generator")):
            func(changed, *others, **kwargs)
    if is_band(target):
        target.local.copy_(cut(changed, target.rows, view))
    return None if name == "__setitem__" else target


def _cut_again(x: Any, bands: Sequence[GlobalTensor]) -> Any:
    """Cut the result of a whole call like one of its arguments, to hold and compute less.

    Where rows are in the result is not known, and need not be: a tensor may be cut along any
    dimension, as its layout says which. A dimension as large as the rows are is the likeliest one.
    """
    if type(x) is not GlobalTensor or x.rows is not None:
        return x
    for band in bands:
        layout = layout_of(band)
        candidates = [d for d in range(x.ndim) if x.shape[d] == layout.size]
        if candidates:
            from_end = layout.dim - band.ndim
            near = min(candidates, key=lambda d: (d != layout.dim, d - x.ndim != from_end))
            layout = layout.at(near)
            part = GlobalTensor(cut(x.local, layout, x.view_), layout, x.view_)
            part.has_order, part.is_view = x.has_order, x.is_view
            return part
    return x


# ---------------------------------------------------------------- values that decide

# How many entries they select or take depends on the values of masks.
SELECTED_BY_MASK = frozenset(
    functions_named(
        "masked_select", "masked_scatter", "masked_scatter_", "__getitem__", "__setitem__"
    )
)
# The shapes of their results depend on the values of integers.
SIZED_BY_VALUES = frozenset(
    functions_named("one_hot", "bincount", "repeat_interleave", "tensor_split", "where")
)
WHERE = frozenset(functions_named("where"))
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _agreed(func: Function, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return arguments with the first rank's values where these decide about shapes."""
    if func in SELECTED_BY_MASK:
        first, *others = args
        others, kwargs = tree_map(
            lambda x: of_first_rank(x) if _is_of(x, torch.bool, torch.uint8) else x,
            (others, kwargs),
        )
        return (first, *others), kwargs
    # With three arguments `where` chooses entries.
    if func in SIZED_BY_VALUES and (func not in WHERE or len(args) + len(kwargs) == 1):
        return tree_map(  # type: ignore[no-any-return]
            lambda x: of_first_rank(x) if _is_of(x, torch.bool, *INTEGERS) else x, (args, kwargs)
        )
    return args, kwargs


def _is_of(x: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(x, Tensor) and x.dtype in dtypes


def of_first_rank(x: Any) -> Any:
    """Return a whole tensor as the first rank has computed it, and anything else unchanged.

    On a GPU ranks that compute the same may differ by the last bit, and so would what is decided by
    it: shapes, messages, which code runs. A collective for whole tensors.
    """
    if type(x) is not GlobalTensor or x.rows is not None:
        return x
    local, manager = x.local.detach().resolve_conj().resolve_neg(), x.view_.manager
    # As bytes, since not every type can be sent, and on the device of messages.
    message = local.reshape(-1).contiguous().view(torch.uint8)
    if isinstance(local, FakeTensor) or local.is_meta:
        manager.transport.all_gather(message)
        return x
    if manager.domain_group is not None:
        message = message.to(message_device(manager.domain_group))
    first = manager.transport.all_gather(message)[0].to(local.device)
    return GlobalTensor(first.view(local.dtype).view(local.shape), None, x.view_)


@rule_for(
    "item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "is_nonzero",
    "equal", "allclose", "nonzero", "argwhere", "unique", "unique_consecutive", "__contains__",
)  # fmt: skip
def read_values(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Read values, by which a model may decide what to do: all ranks read those of the first."""
    args, kwargs = tree_map(of_first_rank, (args, kwargs))
    return _whole(func, args, kwargs)


@rule_for("numpy", "__array__")
def read_array(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return values as NumPy's array, of the first rank; what is written there must not be lost.

    On one process an array shares the memory of its tensor, and so does that of a whole tensor
    here. The array of a band is one of a copy, which NumPy then refuses to write to.
    """
    x, *others = args
    array = _whole(func, (of_first_rank(x), *others), kwargs)
    if is_band(x):
        array.setflags(write=False)
        return array
    own = func(local_of(x), *others, **kwargs)
    if own.tobytes() != array.tobytes():
        own[...] = array  # on a GPU the last bits may differ
    return own


@rule_for("__dlpack__")
def share_memory(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Refuse: what others write to a copy would be lost, and they need not heed a read-only mark.

    Raises:
        UserError: always.
    """
    raise UserError(
        "__dlpack__: shares the memory of a tensor, which is not that of the globe where rows are "
        "sharded. Use numpy() to read values."
    )


@rule_for("__format__")
def format_value(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return a value of the first rank as text, as in an f-string; none in a dry run."""
    x, *others = args
    if isinstance(x.local, FakeTensor) and x.ndim == 0:
        of_first_rank(x)
        return ""
    return _whole(func, (of_first_rank(x), *others), kwargs)


VALUES = (read_values, read_array, format_value)
RULES_FOR_WHOLE.update(func for func, rule in RULES.items() if rule in VALUES)

# ---------------------------------------------------------------- attributes


@rule_for(
    "is_floating_point", "is_complex", "is_signed", "element_size", "is_inference", "is_conj",
    "is_neg", "get_device",
)  # fmt: skip
def query(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Answer what is the same for the globe and for a band."""
    local_args, local_kwargs = tree_map(local_of, (args, kwargs))
    return func(*local_args, **local_kwargs)


@rule_for("is_contiguous")
def is_contiguous(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Return whether the bands of all ranks are contiguous; a collective.

    Part of a field may be contiguous on some ranks only, but control flow may depend on it.
    """
    x, *others = args
    layout_of(x)
    is_here: bool = func(x.local, *others, **kwargs)
    mine = torch.tensor([is_here], dtype=torch.uint8, device=x.device)
    everyone = x.view_.manager.transport.all_gather(mine)
    if isinstance(mine, FakeTensor) or mine.is_meta:
        return is_here
    return bool(everyone.all())


@rule_for("retain_grad")
def retain_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Refuse: `grad` would be that of a band, or of a rank.

    Raises:
        UserError: always.
    """
    raise UserError("retain_grad: the gradient of a sharded field can't be kept. Use a hook.")


RULES_FOR_WHOLE.update(functions_named("register_hook", "retain_grad"))


# Attributes that are the same for the globe and for a band.
SHARED_ATTRIBUTES = frozenset(
    [
        "dtype", "device", "layout", "ndim", "is_sparse", "is_nested", "is_meta", "is_quantized",
        "is_mkldnn", "is_cpu", "is_xla", "is_mps", "itemsize", "names", "requires_grad", "grad",
        "_grad", "retains_grad", "grad_fn", "is_leaf", "_version",
    ]
)  # fmt: skip


def _attribute(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Read or set an attribute of the local tensor; shapes are answered by the class.

    Raises:
        UserError: the local tensor's is not the globe's.
    """
    x = args[0]
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if func.__name__ == "__set__" and name == "data":
        raise UserError(
            "data: can't be set where rows are sharded. Use functions that return new tensors."
        )
    if name == "T":
        return x.permute(*reversed(range(x.ndim)))
    if name == "mT":
        return x.transpose(-1, -2)
    if name in ("H", "mH"):
        return x.adjoint()
    if name == "data":
        # Unlike `data` it counts changes with the tensor: rows of other bands would be outdated.
        return GlobalTensor(x.local.detach(), x.rows, x.view_)
    if name in ("real", "imag") and func.__name__ == "__get__":
        return GlobalTensor(func(x.local), x.rows, x.view_)
    if name == "_base" and func.__name__ == "__get__":
        # The tensor that it is a view of on one process; FSDP2 asks whether there is one.
        base = None if x.memory is None else x.memory.tensors[0]()
        return None if base is x else base
    if name in SHARED_ATTRIBUTES:
        return func(x.local, *args[1:], **kwargs)
    raise UserError(
        f"{name or 'attribute'}: that of a sharded field is not the globe's. Use functions of "
        "torch that return tensors."
    )
