"""Where a model on tensors of the globe begins and ends: bands go in, bands come out.

`attach_domain` replaces what a model's call runs by a `GlobalCall`. In it, the model, its hooks and
those of its modules see fields of the globe. Hooks of torch's data parallelism stay outside, where
tensors are plain. A call takes these steps:

1. The inputs become tensors of the globe (`Inputs`), the parameters get their edge (`parameters`),
   and all ranks draw the same random numbers (`random`).
2. The model runs, with its hooks.
3. The outputs leave as bands, or whole (`take_outputs`), and the parameters return to the modules.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# Rules are registered when their modules are imported.
from credit_dp.domain_parallel.band_tensor import (  # noqa: F401
    attention,
    convolutions,
    filling,
    gradients,
    indexing,
    interpolation,
    joins,
    losses,
    norms,
    padding,
    pointwise,
    pooling,
    products,
    random,
    recurrent,
    reductions,
    scatters,
    spectral,
    values,
    views,
)
from credit_dp.domain_parallel.band_tensor.moving import is_held_by, whole, with_rows
from credit_dp.domain_parallel.band_tensor.parameters import (
    EnteredTensors,
    add_hook,
    enter_whole,
    gradient_share,
    remove_hook,
    share,
)
from credit_dp.domain_parallel.band_tensor.random import same_random_numbers
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    Band,
    BandTensor,
    Domain,
    Rows,
    is_band,
    is_running,
    write_count,
)
from credit_dp.domain_parallel.halo_exchange import CHANNELS_LAST_FORMATS
from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.partition import FIELD_DIMS, ROW_DIM, is_banded
from credit_dp.domain_parallel.planning.trace import run_uncompiled as functions_uncompiled
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    CALL_ATTRIBUTE,
    all_modules,
    buffers_of,
    call_with_hooks,
    disable_torch_function,
    forward_hooks,
    forward_pre_hooks,
    is_alias,
    parameters_of,
    remove_hooks,
    run_uncompiled,
    takes_kwargs,
    takes_kwargs_after,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

__all__ = ["attach_domain", "attached_domain", "detach_domain"]

DOMAIN_ATTRIBUTE = "_domain"  # of a model, holds its domain


# ---------------------------------------------------------------- the edge of fields


class Enter(torch.autograd.Function):
    """Show what a rank holds as the globe's tensor; its gradient is this rank's share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, domain: Domain) -> BandTensor:
        """Return the tensor of the globe."""
        ctx.rows, ctx.domain = rows, domain
        local = x.detach()
        if not isinstance(rows, Band):
            return BandTensor(local, rows, domain, x.stride(), int(x.storage_offset()))
        # Views of it have to be what they are on one process, which has no gaps between rows.
        memory_format = global_memory_format(x)
        local = local.contiguous(memory_format=memory_format)
        if memory_format is torch.contiguous_format:
            return BandTensor(local, rows, domain)
        sizes = list(x.shape)
        sizes[rows.dim] = rows.size
        like = torch.empty(sizes, device="meta", memory_format=memory_format)
        return BandTensor(local, rows, domain, like.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of the band, or the share of that of a whole tensor."""
        rows, domain = ctx.rows, ctx.domain
        if rows is PARTIAL:  # the ranks' tensors differ, and each has all of the gradient
            return whole(grad), None, None
        if rows is WHOLE:
            return gradient_share(grad, domain), None, None
        local: Tensor = Leave.apply(grad, rows, domain)  # type: ignore[no-untyped-call]
        return _scaled(local, domain.loss_factor), None, None


class Leave(torch.autograd.Function):
    """Return what a rank holds of the globe's tensor; a gradient of a whole one is a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, domain: Domain) -> Tensor:
        """Return the local tensor in memory of its own: the model may have saved what it holds."""
        ctx.rows, ctx.domain = rows, domain
        local = with_rows(x, rows, domain)
        is_shared = local is x or (type(x) is BandTensor and is_held_by(x, local))
        return local.clone() if is_shared else local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient as one of the globe."""
        functions_uncompiled.until_backward_ends()
        rows = ctx.rows if isinstance(ctx.rows, Band) else PARTIAL
        grad = _scaled(grad, 1 / ctx.domain.loss_factor)
        return Enter.apply(grad, rows, ctx.domain), None, None  # type: ignore[no-untyped-call]


def _scaled(grad: Tensor, factor: float) -> Tensor:
    return grad if factor == 1 else grad * factor


def global_memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of a field from that of a band, also of an empty one.

    Contiguous, if dimensions are in another order than in the two formats: that is not seen from a
    band of one row.
    """
    # Not by `is_contiguous`, which is true of both formats if a band is empty.
    channels_last = CHANNELS_LAST_FORMATS.get(x.ndim)
    if channels_last and x.stride(1) == 1 and x.stride(-1) == x.shape[1] > 1:
        return channels_last
    return torch.contiguous_format


def rows_outside(shape: Sequence[int], domain: Domain) -> Rows:
    """Return how ranks hold an output of this global shape outside of the model."""
    if len(shape) < FIELD_DIMS or shape[ROW_DIM] < domain.ranks:
        return WHOLE
    return Band(ROW_DIM, 1, domain.bounds(shape[ROW_DIM]))


# ---------------------------------------------------------------- nested values


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested values with a function's result in place of each tensor, dataclasses too.

    Raises:
        UserError: an object that is none of these holds bands, which would not be converted.
    """
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    leaves, spec = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return tree_unflatten([map_tensors(function, leaf) for leaf in leaves], spec)
    if isinstance(value, dict):  # of a type that torch does not know
        result = _shallow_copy(value)
        _map_entries(function, result, value)
        return result
    if type(value) is SimpleNamespace:
        return SimpleNamespace(**{k: map_tensors(function, x) for k, x in vars(value).items()})
    _check_object(function, value)
    return value


def _map_dataclass(function: Callable[[Tensor], Any], value: Any) -> Any:
    result = _shallow_copy(value)
    if isinstance(value, dict):
        _map_entries(function, result, value)
    for each in dataclasses.fields(value):
        if not hasattr(value, each.name):
            continue
        old = getattr(value, each.name)
        is_entry = isinstance(value, dict) and value.get(each.name) is old and old is not None
        mapped = result[each.name] if is_entry else map_tensors(function, old)
        # Past `__setattr__`, which a frozen dataclass forbids.
        object.__setattr__(result, each.name, mapped)
    return result


def _shallow_copy(value: Any) -> Any:
    try:
        return copy.copy(value)
    except TypeError:  # its class needs arguments, or forbids to set entries
        kind: Any = type(value)
        result = kind.__new__(kind)
        vars(result).update(vars(value))
        return result


def _map_entries(function: Callable[[Tensor], Any], result: Any, value: dict[Any, Any]) -> None:
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    for key, entry in dict.items(value):
        base.__setitem__(result, key, map_tensors(function, entry))


def _check_object(function: Callable[[Tensor], Any], value: Any) -> None:
    """Refuse an object of an unknown type that holds bands."""
    if isinstance(value, (nn.Module, type)):
        return
    for x in tree_leaves(list(getattr(value, "__dict__", {}).values())):
        if isinstance(x, Tensor) and (type(x) is BandTensor or is_band(function(x))):
            raise UserError(
                f"{type(value).__name__}: fields in an object of this type can't enter or leave "
                "the model. Use tensors, mappings, sequences or dataclasses."
            )


# ---------------------------------------------------------------- inputs


@final
class Inputs:
    """The inputs of a model: which are bands, by the planned shapes; samples and rows may differ.

    Args:
        is_stage: whether the model is a stage of a pipeline. Its inputs are then as `take_outputs`
            of the stage before has left them, and each has the shape at its position.
    """

    def __init__(self, domain: Domain, shapes: Sequence[Sequence[int]], is_stage: bool) -> None:
        self.domain = domain
        self.is_stage = is_stage
        self.shapes = [tuple(shape) for shape in shapes if is_stage or is_banded(tuple(shape))]
        self.whole_shapes = [tuple(shape) for shape in shapes if not is_banded(tuple(shape))]

    def _rows_of(self, height: int) -> int:
        return self.domain.manager.partition(height).sizes[self.domain.rank]

    def are_outside(self, arguments: Any) -> bool:
        """Return whether there are bands that are plain, as a hook of another model gets them."""
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        return not any(type(x) is BandTensor for x in tensors) and any(
            is_same_field(x.shape, shape) and x.shape[ROW_DIM] == self._rows_of(shape[ROW_DIM])
            for x in tensors
            for shape in self.shapes
        )

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
        """Return the arguments of the forward, and pairs of a tensor outside and inside.

        Raises:
            UserError: an input is no planned field.
        """
        entered: dict[int, tuple[Tensor, Tensor]] = {}

        def enter(x: Tensor, find_rows: Callable[[Tensor], Rows]) -> Tensor:
            # The same tensor at two positions stays one.
            if type(x) is BandTensor:
                return x
            if id(x) not in entered:
                entered[id(x)] = (x, self._enter(x, find_rows(x)))
            return entered[id(x)][1]

        if self.is_stage:
            pairs = zip(args, self.shapes, strict=True)
            args = tuple(enter(x, partial(self._rows_of_state, shape=shape)) for x, shape in pairs)
        else:
            args, kwargs = map_tensors(partial(enter, find_rows=self._find_rows), (args, kwargs))
            self._check_fields(list(entered.values()))
        return args, kwargs, list(entered.values())

    def _enter(self, x: Tensor, rows: Rows) -> Tensor:
        if isinstance(rows, Band):
            field: Tensor = Enter.apply(x, rows, self.domain)  # type: ignore[no-untyped-call]
            return field
        return enter_whole([x], self.domain)[0] if x.requires_grad else x

    def _find_rows(self, x: Tensor) -> Rows:
        heights = [shape[ROW_DIM] for shape in self.shapes if is_same_field(x.shape, shape)]
        for height in heights:
            if x.shape[ROW_DIM] == self._rows_of(height):
                return Band(ROW_DIM, 1, self.domain.bounds(height))
        if heights:
            raise UserError(
                f"rank {self.domain.rank}: got {x.shape[ROW_DIM]} rows, planned are the bands of "
                f"{', '.join(map(str, heights))} rows. Convert with the input_shape of this call."
            )
        return WHOLE

    def _check_fields(self, entered: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse a band that is no planned field.

        Beside a planned field it has to have the columns of one, too: others may be whole, as those
        of a single row are that were planned.
        """
        is_planned = any(is_band(field) for _, field in entered)
        for x, field in entered:
            is_row = x.ndim >= FIELD_DIMS and x.shape[ROW_DIM] == 1
            if is_row and any(is_same_field(x.shape, shape) for shape in self.whole_shapes):
                continue
            for shape in self.shapes:
                is_like = x.ndim == len(shape) and x.shape[ROW_DIM] == self._rows_of(shape[ROW_DIM])
                has_columns = is_like and x.shape[-1] == shape[-1]
                if not is_band(field) and (has_columns if is_planned else is_like):
                    raise UserError(
                        f"rank {self.domain.rank}: got a band of shape {tuple(x.shape)}, planned "
                        f"are bands of fields of shape {shape}. Convert with the input_shape of "
                        "this call."
                    )

    def _rows_of_state(self, x: Tensor, shape: Sequence[int]) -> Rows:
        rows = rows_outside(shape, self.domain)
        expected = rows.sizes(self.domain.rank) if isinstance(rows, Band) else 0
        if isinstance(rows, Band) and x.shape[ROW_DIM] != expected:
            raise UserError(
                f"rank {self.domain.rank}: got {x.shape[ROW_DIM]} rows, planned is a band of "
                f"{expected}. Build the pipeline with the input_shape of this call."
            )
        return rows


def is_same_field(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes of fields differ in samples and rows only."""
    if len(shape) != len(other):
        return False
    free = {0, len(shape) + ROW_DIM} if len(shape) > FIELD_DIMS else {len(shape) + ROW_DIM}
    return all(d in free or a == b for d, (a, b) in enumerate(zip(shape, other, strict=True)))


def write_inputs_back(entered: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Let inputs that the model has written to be its results, as autograd sees them.

    Their memory has been written already, unless it has gaps.
    """
    for x, field in entered:
        if type(field) is not BandTensor or write_count(field) == 0:
            continue
        if field.requires_grad or not is_alias(field.local, x):
            x.copy_(Leave.apply(field, field.rows, field.domain))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- outputs


def take_outputs(output: Any, domain: Domain, is_stage: bool = False) -> Any:
    """Return the output of a model outside of it: rows of fields as bands, the rest whole."""
    domain.outputs = WeakIdKeyDictionary()
    taken: dict[int, Tensor] = {}

    def take(x: Tensor) -> Tensor:
        # The same tensor at two positions stays one.
        if id(x) not in taken:
            rows = rows_outside(x.shape, domain)
            local = leave(x, rows, domain)
            taken[id(x)] = local.contiguous() if is_stage else local
            domain.outputs[taken[id(x)]] = rows
        return taken[id(x)]

    return map_tensors(take, output)


def leave(x: Tensor, rows: Rows, domain: Domain) -> Tensor:
    """Return what a rank holds of a tensor outside of the model."""
    if type(x) is not BandTensor and rows is WHOLE and not x.requires_grad:
        return x
    local: Tensor = Leave.apply(x, rows, domain)  # type: ignore[no-untyped-call]
    return local


def take_attributes(model: nn.Module, domain: Domain) -> None:
    """Let modules keep as torch's own tensors what the forward has set and all ranks have.

    Also what is in lists and dictionaries that they have. Tensors that share memory still do.
    Buffers that were fields are whole then, as on one process. Other fields stay what they are.
    """
    taken: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, whose id nothing else gets

    def take(x: BandTensor, is_buffer: bool) -> Tensor:
        if id(x) not in taken:
            taken[id(x)] = x, _taken(x, domain, is_buffer)
        return taken[id(x)][1]

    seen: set[int] = set()

    def take_entries(table: Any) -> None:
        if id(table) in seen:
            return
        seen.add(id(table))
        for key, x in table.items() if type(table) is dict else enumerate(table):
            if type(x) is BandTensor:
                table[key] = take(x, False)
            elif type(x) is list or type(x) is dict:
                take_entries(x)

    for module in all_modules(model):
        for table in (parameters_of(module), buffers_of(module)):
            for name, x in table.items():
                if type(x) is BandTensor:
                    table[name] = take(x, True)
        seen.update(id(x) for name, x in vars(module).items() if name in MODULE_ATTRIBUTES)
        take_entries(vars(module))


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes of every module


def _taken(x: BandTensor, domain: Domain, is_buffer: bool) -> Tensor:
    if isinstance(x, nn.Parameter):
        parameter = nn.Parameter(whole(x).clone(), x.requires_grad)

        def pass_on(x: Tensor) -> None:
            grad, x.grad = x.grad, None
            if grad is not None:
                local = share(grad, domain)
                parameter.grad = local if parameter.grad is None else parameter.grad + local

        if x.requires_grad:  # of this forward
            x.register_post_accumulate_grad_hook(pass_on)  # type: ignore[no-untyped-call]
        return parameter
    if x.rows is WHOLE and not x.requires_grad:
        BandTensor.keep_whole(x)
        local: Tensor = whole(x)
        return local.detach()
    return leave(x, WHOLE, domain) if is_buffer else x


# ---------------------------------------------------------------- the call of a model


# The parameters and buffers of the model that runs in this thread, as its modules see them.
_entered_tensors: ContextVar[EnteredTensors | None] = ContextVar("tensors of model", default=None)


@final
class GlobalCall:
    """Calls a model with its hooks on tensors of the globe; `torch.compile` traces none of it."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self.domain = inputs.domain

    @run_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if is_running.get() and not self.inputs.are_outside((args, kwargs)):
            return call_with_hooks(model, args, kwargs)  # everything is of the globe already
        with _without_outer_hooks(model) as (before, after):
            for key, hook in before.items():
                args, kwargs = _run_hook_before(model, key, hook, args, kwargs)
            with ExitStack() as ending:
                args, kwargs, entered = self.start(ending, args, kwargs)
                output = self.finish(call_with_hooks(model, args, kwargs), entered)
            for key, hook in after.items():
                given = (args, kwargs) if takes_kwargs_after(model, key) else (args,)
                result = hook(model, *given, output)
                output = output if result is None else result
        return output

    def start(self, ending: ExitStack, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Start a forward; return its arguments, and pairs of tensors outside and inside.

        Args:
            ending: gets what has to be done when the forward ends or fails.
        """
        model, domain = self.model, self.domain
        ending.enter_context(functions_uncompiled())  # also those that the model has compiled
        token = is_running.set(True)
        ending.callback(is_running.reset, token)
        error: UserError | None = None
        entered: list[tuple[Tensor, Tensor]] = []
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        try:
            args, kwargs, entered = self.inputs.enter(args, kwargs)
        except UserError as caught:
            error = caught
        ending.enter_context(same_random_numbers(domain, model, tensors, error))
        model_tensors = EnteredTensors(domain)
        ending.callback(model_tensors.leave)
        before = _entered_tensors.set(model_tensors)
        ending.callback(_entered_tensors.reset, before)
        for module in all_modules(model):
            model_tensors.enter(module, is_start=True)
        ending.enter_context(filling.open_tensors(domain))
        return args, kwargs, entered

    def finish(self, output: Any, entered: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Return the output of a forward outside of the model."""
        with disable_torch_function():  # none of these are functions of the model
            result = take_outputs(output, self.domain, self.inputs.is_stage)
            take_attributes(self.model, self.domain)
            write_inputs_back(entered)
            return result


def run_rest_of_call(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Let a call that runs its hooks before the forward compute on tensors of the globe from here.

    For a hook that has attached the model's domain: return the arguments for other hooks and for
    the forward.
    """
    call: GlobalCall = model.__dict__[CALL_ATTRIBUTE]
    with ExitStack() as starting:
        args, kwargs, entered = call.start(starting, args, kwargs)
        ending = starting.pop_all()

    def finish(module: nn.Module, args: Any, output: Any) -> Any:
        handle.remove()
        with ending:
            return None if output is None else call.finish(output, entered)

    handle = model.register_forward_hook(finish, always_call=True)
    return args, kwargs


@contextmanager
def _without_outer_hooks(
    model: nn.Module,
) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    tables = forward_pre_hooks(model), forward_hooks(model)
    outer: list[dict[int, Any]] = [
        {key: hook for key, hook in hooks.items() if _sees_plain_tensors(hook)} for hooks in tables
    ]
    if not any(outer):
        yield {}, {}
        return
    for hooks, taken in zip(tables, outer, strict=True):
        for key in taken:
            del hooks[key]
    try:
        yield outer[0], outer[1]
    finally:
        for hooks, taken in zip(tables, outer, strict=True):
            hooks.update(taken)
        for key in reversed(outer[0]):
            tables[0].move_to_end(key, last=False)


def _sees_plain_tensors(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or ""
    return module.startswith(("torch.distributed.", "credit_dp."))


def _run_hook_before(
    model: nn.Module, key: int, hook: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    if takes_kwargs(model, key):
        return hook(model, args, kwargs) or (args, kwargs)
    result = hook(model, args)
    if result is None:
        return args, kwargs
    return result if isinstance(result, tuple) else (result,), kwargs


# ---------------------------------------------------------------- modules called from elsewhere


def enter_module(module: nn.Module, args: Any) -> None:
    """Let a module's parameters have their edge, and check its call: a hook before its forward.

    The parameters of FSDP2 exist only when a module runs.

    Other models may have the module, too, as a default argument `nn.ReLU()` is that of all. Theirs
    is a call that no such model is part of, and so is one of the module by itself.

    Raises:
        UserError: a method of the model calls it past the model's forward, where bands are plain
            tensors; or a model that has no domain calls it while this model runs, and would get
            its parameters as they are inside.
    """
    if torch.compiler.is_compiling():  # another model: one with a domain is not compiled
        return
    model_tensors = _entered_tensors.get()
    if args and type(args[0]) is BandTensor:  # nearly all calls
        if model_tensors is not None:
            model_tensors.enter(module)
        return
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    is_plain = BandTensor not in map(type, tensors)
    if model_tensors is not None:
        model_tensors.enter(module)
        if is_plain and tensors and any(x is not None for x in parameters_of(module).values()):
            _check_caller(module)
        return
    # Without rows, as an embedding of a date, everything is as on one process. When backward
    # computes a module again, fields are those of the globe.
    if not is_plain or not any(x.ndim >= FIELD_DIMS for x in tensors):
        return
    callers, model = _callers()
    if model is not None and model is not module and callers <= set(model.modules()):
        path = next(path for path, each in model.named_modules() if each is module)
        raise UserError(
            f"{path}: called by {type(model).__name__} outside of its forward, where its input "
            "would be a band that it takes for the globe. Call the model, and let its forward call "
            "this."
        )


def _check_caller(module: nn.Module) -> None:
    callers, model = _callers()
    if model is None or not (others := callers - set(model.modules())):
        return
    path = next(path for path, each in model.named_modules() if each is module)
    raise UserError(
        f"{path}: called by {type(others.pop()).__name__}, which is not converted, inside of the "
        f"forward of {type(model).__name__}, which has this module, too. Call it before or after."
    )


def _callers() -> tuple[set[nn.Module], nn.Module | None]:
    callers: set[nn.Module] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            callers.add(module)
            if DOMAIN_ATTRIBUTE in module.__dict__:
                return callers, module
        frame = frame.f_back
    return callers, None


# ---------------------------------------------------------------- attached models


def attach_domain(
    model: nn.Module,
    manager: DomainParallelManager,
    input_shapes: Sequence[Sequence[int]],
    *,
    is_stage: bool = False,
) -> Domain:
    """Let a model compute on tensors of the globe, in place; its parameters keep their names.

    Returns:
        the domain, which counts what runs whole.
    """
    domain = Domain(manager)
    domain.has_model = True
    for path, module in model.named_modules():
        if _has_hook(path, module):
            # After those of FSDP2, whenever these are registered: they come first.
            module.register_forward_pre_hook(enter_module)
    for parameter in model.parameters():
        add_hook(parameter)  # before those of users
    model.__dict__[DOMAIN_ATTRIBUTE] = domain
    model.__dict__[CALL_ATTRIBUTE] = GlobalCall(model, Inputs(domain, input_shapes, is_stage))
    return domain


def attached_domain(model: nn.Module) -> Domain | None:
    """Return the domain on whose tensors a model computes, if there is one."""
    return model.__dict__.get(DOMAIN_ATTRIBUTE)


def detach_domain(model: nn.Module) -> None:
    """Undo `attach_domain`."""
    if model.__dict__.pop(DOMAIN_ATTRIBUTE, None) is None:
        return
    model.__dict__.pop(CALL_ATTRIBUTE, None)
    for parameter in model.parameters():
        remove_hook(parameter)  # if another model has it, too, its next forward adds one
    for path, module in model.named_modules():
        if _has_hook(path, module):  # one for each model with a domain that has the module
            remove_hooks(module, lambda hook: hook is enter_module, at_most=1)


def _has_hook(path: str, module: nn.Module) -> bool:
    """Whether a module of a model gets the hook `enter_module`."""
    # Parametrizations compute weights, whenever these are read.
    computes_weights = "parametrizations" in path.split(".")
    return bool(path) and not computes_weights and not isinstance(module, torch.jit.ScriptModule)
