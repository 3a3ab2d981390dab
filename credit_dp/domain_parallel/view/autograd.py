"""What users do with autograd inside of a model: functions, hooks, gradients, checkpointing.

Autograd sees local tensors only, and a rank's gradient is its share: the sum over ranks counts.
Whatever code of the user's sees a gradient must see all of it, though, as clipping it is not
linear. So gradients are shown through the view: those of bands are bands, those of whole tensors
are summed over the ranks, and what comes back is divided by their number.

torch calls some functions past all subclasses of tensors. `patch_torch` replaces these, once for
the process; they behave as before where no field takes part and no view's model runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook

from credit_dp.domain_parallel.bands.reductions import sum_over_bands
from credit_dp.domain_parallel.planning.trace import functions_of_users
from credit_dp.domain_parallel.rules import RULES
from credit_dp.domain_parallel.view.function_rules import (
    RULES_FOR_WHOLE,
    Args,
    Function,
    Kwargs,
)
from credit_dp.domain_parallel.view.memory import check_graph, note_hook
from credit_dp.domain_parallel.view.running import (
    FunctionBackward,
    RunningMode,
    keep_gradient_mode,
    run_in,
    running_backward,
    running_view,
)
from credit_dp.domain_parallel.view.tensor import (
    TRANSFORM_CURE,
    GlobalTensor,
    GlobalView,
    Layout,
    call_whole,
    global_tensors,
    is_band,
    local_of,
    whole,
    with_layout,
    with_whole_gradients,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    function_of_node,
    is_transform_active,
    replace_backward_hook,
    replace_checkpoint_generator,
    replace_transforms,
    run_as_it_is,
    tree_flatten,
    tree_unflatten,
)

F = TypeVar("F", bound=Callable[..., Any])

# ---------------------------------------------------------------- gradients through the view


class Shown(NamedTuple):
    """How a tensor and its gradient are shown: by a layout and view, or plain and whole."""

    rows: Layout | None
    view: GlobalView
    is_plain: bool


def shown_as(x: Any, view: GlobalView) -> Shown | None:
    """Return how a value is shown inside of a running model; None if it is no tensor."""
    if type(x) is GlobalTensor:
        return Shown(x.rows, x.view_, False)
    return Shown(None, view, True) if isinstance(x, Tensor) else None


def show(local: Any, shown: Shown | None) -> Any:
    """Return a local tensor as it is shown."""
    if shown is None or shown.is_plain or not isinstance(local, Tensor):
        return local
    return GlobalTensor(local, shown.rows, shown.view)


def show_gradient(share: Any, shown: Shown | None) -> Any:
    """Return the gradient of which this rank has a share; a collective if it is whole."""
    if shown is None or not isinstance(share, Tensor):
        return share
    if shown.view.in_plain_pass:
        return show(share, shown)
    if shown.rows is None:
        share = sum_over_bands(share.contiguous(), shown.view.manager.transport)
    return show(_scaled(share, 1 / shown.view.loss_factor), shown)


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1 else gradient * factor


def gradient_share(gradient: Any, shown: Shown | None) -> Any:
    """Return this rank's share of a gradient."""
    if shown is None or not isinstance(gradient, Tensor):
        return gradient
    ranks = shown.view.ranks if shown.rows is None else 1
    factor = 1 if shown.view.in_plain_pass else shown.view.loss_factor / ranks
    if shown.rows is None:
        return _scaled(whole(gradient), factor)
    return _scaled(with_layout(gradient, shown.rows, shown.view), factor)


def is_of_library(function: Any) -> bool:
    """Return whether a function or hook is torch's or ours, which know shares of gradients."""
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    return module.split(".")[0] in ("torch", "credit_dp")


def register_hook(view: GlobalView, x: Tensor, hook: Callable[[Any], Any]) -> Any:
    """Register a hook of a tensor's gradient; backward is collective if the tensor is whole."""
    shown = shown_as(x, view)
    if is_of_library(hook):
        return local_of(x).register_hook(hook)
    if type(x) is GlobalTensor:
        note_hook(x)
    view.has_backward_code = True

    def local_hook(share: Tensor) -> Tensor | None:
        with run_in(view):
            result = hook(show_gradient(share, shown))
            return None if result is None else gradient_share(result, shown)

    local = local_of(x)
    local.grad_fn  # noqa: B018  (torch crashes if it has not noticed that another view was written)
    return local.register_hook(local_hook)


def _register_hook_of_field(func: Function, args: Args, kwargs: Kwargs) -> Any:
    x, hook = (*args, *kwargs.values())
    return register_hook(x.view_, x, hook)


RULES[Tensor.register_hook] = _register_hook_of_field
RULES_FOR_WHOLE.add(Tensor.register_hook)
RunningMode.register_hook = register_hook


# ---------------------------------------------------------------- autograd.grad


def _gradients_of_fields(func: Function, args: Args, kwargs: Kwargs) -> Any:
    return gradients(global_tensors((args, kwargs))[0].view_, *args, **kwargs)


def gradients(view: GlobalView, *args: Any, **kwargs: Any) -> Any:
    """Return gradients inside of a model, as on one process; differentiable if they should be.

    Between plain tensors torch computes them as they are, unless bands lie between.

    Raises:
        UserError: a batch of gradients is wanted.
    """
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    is_plain = not global_tensors((args, kwargs)) and not _lie_bands_between(
        _as_list(arguments["outputs"]), _as_list(arguments["inputs"])
    )
    was_plain, view.in_plain_pass = view.in_plain_pass, is_plain
    try:
        if is_plain:
            return torch.autograd.grad(*args, **kwargs)
        return _sharded_gradients(view, arguments)
    finally:
        view.in_plain_pass = was_plain


def _lie_bands_between(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether gradients of plain outputs by plain inputs pass functions that expect shares.

    What is computed from a band becomes plain by one that all ranks call.
    """
    first, last = (
        [torch.autograd.graph.get_gradient_edge(x).node for x in tensors if x.requires_grad]
        for tensors in (outputs, inputs)
    )
    before: dict[Any, list[Any]] = {}  # the nodes from which the pass gets to each
    while first:
        node = first.pop()
        for following, _ in node.next_functions:
            if following is not None and following not in before:
                first.append(following)
            before.setdefault(following, []).append(node)
    while last:
        for node in before.pop(last.pop(), ()):
            function = function_of_node(node)
            if function is not None and function.__module__.startswith("credit_dp."):
                return True
            last.append(node)
    return False


def _sharded_gradients(view: GlobalView, arguments: Kwargs) -> Any:
    """Return gradients that bands take part in: each rank computes its share of them."""
    if arguments.pop("is_grads_batched", False):
        raise UserError(
            "autograd.grad: batches of gradients of sharded fields can't be computed. Call it once "
            "for each, without is_grads_batched."
        )
    outputs, inputs = _as_list(arguments.pop("outputs")), _as_list(arguments.pop("inputs"))
    grad_outputs = arguments.pop("grad_outputs", None)
    given = [None] * len(outputs) if grad_outputs is None else _as_list(grad_outputs)
    shares = [
        _output_gradient(y, gradient, view) for y, gradient in zip(outputs, given, strict=True)
    ]
    for x in inputs:
        check_graph(x)
    local_inputs = [local_of(x) for x in inputs]
    results = torch.autograd.grad(list(map(local_of, outputs)), local_inputs, shares, **arguments)
    return tuple(_total(x, share, view) for x, share in zip(inputs, results, strict=True))


RULES[torch.autograd.grad] = _gradients_of_fields
RunningMode.gradients = gradients
RULES_FOR_WHOLE.add(torch.autograd.grad)


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _output_gradient(y: Any, gradient: Tensor | None, view: GlobalView) -> Tensor | None:
    """Return this rank's share of the gradient with which a backward pass begins.

    It has the factor of the loss, as functions of the user's in the pass divide by it.
    """
    if gradient is None and y.numel() == 1:
        gradient = local_of(y).new_ones(y.shape)
    if is_band(y) or gradient is None:
        if gradient is None:
            return None
        return _scaled(with_layout(gradient, y.rows, view), view.loss_factor)
    return _scaled(whole(gradient), view.loss_factor / view.ranks)


def _total(x: Tensor, share: Tensor | None, view: GlobalView) -> Tensor | None:
    """Return the gradient of an input of which this rank has a share; differentiable."""
    if share is None:
        return None
    shown = shown_as(x, view)
    if shown is not None and shown.rows is None:
        share = sum_over_bands(share, view.manager.transport)
    return show(_scaled(share, 1 / view.loss_factor), shown)  # type: ignore[no-any-return]


def _refuse_backward(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Refuse a backward pass inside of a forward.

    Raises:
        UserError: always.
    """
    raise UserError(
        "backward: a model can't run a backward pass from a sharded field in its forward. Use "
        "torch.autograd.grad."
    )


for _function in (torch.autograd.backward, Tensor.backward):
    RULES[_function] = _refuse_backward
    RULES_FOR_WHOLE.add(_function)


# ---------------------------------------------------------------- functions of the user's


IN_VIEWS = "_credit_dp_in_views"


def _function_in_view(cls: Any, view: GlobalView) -> Any:
    """Return a user's `autograd.Function` whose backward runs inside of the view.

    There everything is whole, as on one process. The backward may compute modules again, and start
    another backward pass, as reversible blocks do: see `FunctionBackward`.
    """
    if "backward" not in _methods(cls):
        return cls
    # Kept by the class itself, which a forward may define anew at each call.
    if IN_VIEWS not in cls.__dict__:
        setattr(cls, IN_VIEWS, weakref.WeakKeyDictionary())
    functions = cls.__dict__[IN_VIEWS]
    if view not in functions:
        original, known_view = cls.backward, weakref.ref(view)

        def backward(ctx: Any, *grads: Any) -> Any:
            view = known_view()
            assert view is not None
            token = running_backward.set(running_backward.get() or FunctionBackward(view))
            try:
                with run_in(view):
                    return original(ctx, *grads)
            finally:
                running_backward.reset(token)

        body = {"backward": staticmethod(backward), "__module__": cls.__module__}
        functions[view] = type(cls.__name__, (cls,), body)
    return functions[view]


def _methods(cls: Any) -> set[str]:
    """Return what a function's class and its bases define, without torch's defaults."""
    bases = cls.__mro__[: cls.__mro__.index(torch.autograd.Function)]
    return {name for base in bases for name in vars(base)}


def _apply_function(apply: Callable[..., Any], cls: Any, args: Args, kwargs: Kwargs) -> Any:
    """Apply an `autograd.Function` in a model that runs through a view.

    Args:
        apply: `Function.apply` without its class.
        cls: the function.
        args: positional arguments, fields among them or not.
        kwargs: other arguments.
    """
    tensors = global_tensors((args, kwargs))
    if not tensors:
        results = _apply_plain(apply, cls, args, kwargs)
        if cls is CheckpointFunction and global_tensors(results):
            raise UserError(
                "torch.utils.checkpoint: a function with fields that are not its arguments "
                "can't be checkpointed reentrantly. Set use_reentrant=False."
            )
        return results
    if cls is CheckpointFunction:
        return _apply_checkpoint(apply, *args)
    if cls.__module__.startswith("torch."):
        return _apply_identity(apply, cls, args)
    view = tensors[0].view_
    function = partial(apply, _function_in_view(cls, view))
    function.__name__ = cls.__name__  # type: ignore[attr-defined]
    return call_whole(with_whole_gradients(function, view), args, kwargs)


def _apply_plain(apply: Callable[..., Any], cls: Any, args: Args, kwargs: Kwargs) -> Any:
    """Apply a function to tensors that are the same on all ranks, as parameters are."""
    view = running_view()
    is_differentiable = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in args
    )
    if view is None or not is_differentiable or cls.__module__.startswith("torch."):
        return apply(cls, *args, **kwargs)
    function = partial(apply, _function_in_view(cls, view))
    return with_whole_gradients(function, view)(*args, **kwargs)


def _apply_identity(apply: Callable[..., Any], cls: Any, args: Args) -> Any:
    """Apply a function of torch that returns its tensors, as those of hooks and FSDP2 do.

    Raises:
        UserError: it returns something else.
    """
    fields = [x for x in args if isinstance(x, Tensor)]
    results = apply(cls, *map(local_of, args))
    outputs = [results] if isinstance(results, Tensor) else list(results)
    same = len(outputs) == len(fields) and all(
        y.shape == local_of(x).shape for x, y in zip(fields, outputs, strict=True)
    )
    if not same:
        raise UserError(
            f"{cls.__name__}: this function of torch can't be applied to sharded fields. Apply it "
            "outside of the model."
        )
    view = global_tensors(fields)[0].view_
    shown = [show(y, shown_as(x, view)) for x, y in zip(fields, outputs, strict=True)]
    return shown[0] if isinstance(results, Tensor) else tuple(shown)


# ---------------------------------------------------------------- checkpointing


def _apply_checkpoint(apply: Callable[..., Any], function: Any, preserve: bool, *args: Any) -> Any:
    """Checkpoint a function of fields, reentrantly: autograd sees the local tensors.

    They are shown through the view again where the function runs, in forward and in backward.
    """
    view = global_tensors(args)[0].view_
    fields = [shown_as(x, view) for x in args]
    results: list[Any] = []

    def run(*local: Any) -> Any:
        with run_in(view):
            leaves, spec = tree_flatten(function(*map(show, local, fields)))
            results[:] = [spec, [shown_as(x, view) for x in leaves]]
            return tuple(map(local_of, leaves))  # what is written to them may be pending

    local_outputs = apply(CheckpointFunction, run, preserve, *map(local_of, args))
    spec, kinds = results
    return tree_unflatten(list(map(show, local_outputs, kinds)), spec)


def _recompute_in_view(original: Callable[..., Any], count: int | None) -> Callable[..., Any]:
    """Return a generator of torch's checkpointing that computes again inside of the view.

    It saves its arguments as autograd does, which must not see fields: only their local tensors.

    Args:
        original: torch's.
        count: of torch's options before the arguments; None if they are a tuple and a dictionary.
    """

    @wraps(original)  # whose parameters another replacement counts
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        view = running_view()
        if view is None:
            return original(function, *args, **kwargs)
        if count is not None:
            options, arguments = args[:count], (args[count:], kwargs)
            recompute, local = _local_call(view, function, arguments)
            return original(recompute, *options, *local)
        recompute, local = _local_call(view, function, args)
        return original(recompute, tuple(local), {}, **kwargs)

    return generator


def _local_call(
    view: GlobalView, function: Callable[..., Any], arguments: Args
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a call that shows local tensors to a function as fields, and these tensors.

    Args:
        view: in which it runs.
        function: that is called.
        arguments: positional ones, and those given by keyword. Torch saves positional tensors only,
            not those in containers or given by keyword: so all of them are returned in one list.
    """
    leaves, structure = tree_flatten(arguments)
    shown = [shown_as(x, view) for x in leaves]

    def call(*local: Any) -> Any:
        fields = list(map(show, local, shown))
        for x in global_tensors(fields):
            x.hooks = shown  # of outside, as in the forward: not those of this computation
        positional, keywords = tree_unflatten(fields, structure)
        with run_in(view):
            return function(*positional, **keywords)

    return call, list(map(local_of, leaves))


# ---------------------------------------------------------------- backward hooks of modules


@final
class ViewBackwardHook(BackwardHook):
    """Shows the hooks of a module whole gradients and the globe's shapes."""

    def __init__(self, module: nn.Module, user_hooks: Any, user_pre_hooks: Any) -> None:
        # In the backward of a function gradients are whole already.
        view = running_view() if running_backward.get() is None else None
        self.view = view
        self.inputs: list[Shown | None] = []
        self.outputs: list[Shown | None] = []
        if view is not None:
            view.has_backward_code = True
            user_hooks = [self._show_to(hook, view) for hook in user_hooks]
            user_pre_hooks = [self._show_before(hook, view) for hook in user_pre_hooks]
        super().__init__(module, user_hooks, user_pre_hooks)

    def setup_input_hook(self, args: Any) -> Any:
        """Begin to watch the gradients of a module's inputs."""
        if self.view is not None:
            self.inputs = [shown_as(x, self.view) for x in args]
        return super().setup_input_hook(args)  # type: ignore[no-untyped-call]

    def setup_output_hook(self, args: Any) -> Any:
        """Begin to watch the gradients of a module's outputs."""
        if self.view is not None:
            outputs = args if isinstance(args, tuple) else (args,)
            taken = self.view.outputs or {}  # of the root
            self.outputs = [
                taken[x] if isinstance(x, Tensor) and x in taken else shown_as(x, self.view)
                for x in outputs
            ]
        return super().setup_output_hook(args)  # type: ignore[no-untyped-call]

    def _show_to(self, hook: Callable[..., Any], view: GlobalView) -> Callable[..., Any]:
        """Return a backward hook that is called with whole gradients."""
        if is_of_library(hook):
            return hook

        def shown(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> Any:
            with run_in(view):
                result = hook(
                    module,
                    tuple(map(show_gradient, grad_inputs, self.inputs)),
                    tuple(map(show_gradient, grad_outputs, self.outputs)),
                )
                return self._shares(result, self.inputs)

        return shown

    def _show_before(self, hook: Callable[..., Any], view: GlobalView) -> Callable[..., Any]:
        """Return a hook before the backward of a module that is called with whole gradients."""
        if is_of_library(hook):
            return hook

        def shown(module: nn.Module, grad_outputs: Any) -> Any:
            with run_in(view):
                result = hook(module, tuple(map(show_gradient, grad_outputs, self.outputs)))
                return self._shares(result, self.outputs)

        return shown

    def _shares(self, gradients: Any, shown: Sequence[Shown | None]) -> Any:
        if gradients is None:
            return None
        if len(gradients) != len(shown):  # torch says what is wrong
            return gradients
        return tuple(map(gradient_share, gradients, shown))


# ---------------------------------------------------------------- functions past subclasses


def _refuse_transform(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the implementation of a transform of `torch.func`, which models in a view can't use.

    Of fields it would see one rank's band without its neighbours' rows.
    """

    @wraps(original)
    def transform(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or running_view() is None:
            return original(*args, **kwargs)
        # vmap of other tensors makes masks of attention; the function it gets must use no field.
        if name != "vmap" or global_tensors((args, kwargs)):
            raise UserError(f"torch.func.{name}: {TRANSFORM_CURE}")
        return original(*args, **kwargs)

    return transform


def _whole_script(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of scripted functions, which are compiled for plain tensors."""

    @wraps(original)
    def call_script(self: Any, *args: Any, **kwargs: Any) -> Any:
        if running_view() is None or not global_tensors((args, kwargs)):
            return original(self, *args, **kwargs)
        call = partial(original, self)
        call.__name__ = getattr(self, "name", "scripted function")  # type: ignore[attr-defined]
        return call_whole(call, args, kwargs)

    return call_script


def _applied_in_view(original: Any) -> Callable[..., Any]:
    """Return `Function.apply`, which does not ask subclasses of tensors, for fields too.

    Args:
        original: as it stands in the class: a method in Python or, since torch 2.14, one in C.
    """

    @run_as_it_is  # torch 2.14 can't trace `__get__` of a method in C
    def apply_to_plain(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs:  # torch looks for their names in the code of `forward`, which may be replaced
            context = (None,) * _has_context(cls)
            bound = signature(cls.forward).bind(*context, *args, **kwargs)
            bound.apply_defaults()
            args = bound.args[len(context) :]
        return original.__get__(None, cls)(*args)

    @run_as_it_is
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        view = running_view()
        # Ours get local tensors. In a transform there are no fields.
        is_ours = cls.__module__.startswith("credit_dp.")
        if is_ours or view is None or is_transform_active():
            return apply_to_plain(cls, *args, **kwargs)
        with keep_gradient_mode(view):
            if running_backward.get() is not None:
                return apply_to_plain(_function_in_view(cls, view), *args, **kwargs)
            return _apply_function(apply_to_plain, cls, args, kwargs)

    return apply


def _forward_of_kept_apply(function: Any) -> Callable[..., Any]:
    """Return the `forward` of a function that was defined before torch's `apply` was replaced.

    A module may have kept its `apply`, as `clip = Clip.apply`. That one gets here with fields, and
    without gradients; the new one never does so, as it gets local tensors from them.
    """
    original = function.forward
    has_context = _has_context(function)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        view = None if torch.compiler.is_compiling() else running_view()
        if view is None:
            return original(*args, **kwargs)
        with keep_gradient_mode(view):
            if not global_tensors(args):
                return original(*args, **kwargs)
            with torch.set_grad_enabled(view.has_gradients):
                return function.apply(*args[has_context:], **kwargs)

    return forward


def _has_context(function: Any) -> bool:
    """Return whether `forward` of a function gets the context."""
    return function.setup_context is torch.autograd.Function.setup_context


_patch_lock = threading.Lock()
_patched: list[bool] = []


def patch_torch() -> None:
    """Replace the functions of torch that do not ask subclasses of tensors; once for the process.

    They are looked up when they are called, so that modules imported before use the new ones.
    Of `apply` a module may have kept the old one: see `_forward_of_kept_apply`.
    """
    with _patch_lock:  # ranks may be threads
        if not _patched:
            _replace_functions()
            _patched.append(True)


def _replace_functions() -> None:
    for function in functions_of_users():
        if not is_of_library(function):
            function.forward = _forward_of_kept_apply(function)
    apply = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(_applied_in_view(apply))  # type: ignore[method-assign, assignment]
    replace_checkpoint_generator(_recompute_in_view)
    replace_backward_hook(ViewBackwardHook)
    replace_transforms(_refuse_transform)
    script = torch.jit.ScriptFunction
    script.__call__ = _whole_script(script.__call__)  # type: ignore[method-assign]
