"""The edge between a model's parameters and what it computes: gradients of the globe, and shares.

Inside of a model a gradient is that of the globe. Outside, data parallelism and optimizers expect
a share of each rank, whose sum is the gradient: also of a parameter that the loss uses past the
model, as one that decays its weights. So while a model runs, its modules have other tensors in
place of their parameters, with the same memory, whose gradients turn into shares.

What gets at a parameter past its module, as a scripted layer or a function that is computed again
in the backward pass, has gradients of the globe up to the parameter, where a hook of its gradient
turns them into shares. Autograd has then added shares of what is outside of the model to them, if
there are any: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from credit_dp.domain_parallel.band_tensor.moving import among_zeros, refresh
from credit_dp.domain_parallel.band_tensor.tensor import (
    PARTIAL,
    WHOLE,
    BandTensor,
    Domain,
)
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    FakeTensor,
    buffers_of,
    gradient_hooks,
    is_alias,
    parameters_of,
    replace_flat_weights,
    show_as_parameter,
)


def share(grad: Tensor, domain: Domain) -> Tensor:
    """Return this rank's share of a gradient of the globe: the ranks' sum is the gradient."""
    factor = domain.loss_factor
    if type(grad) is not BandTensor:  # made from tensors that every rank has
        return grad * (factor / domain.ranks)
    refresh(grad)
    if grad.rows is PARTIAL:
        return grad.local if factor == 1 else grad.local * factor
    if grad.rows is WHOLE:
        return grad.local * (factor / domain.ranks)
    result = among_zeros(grad.local, grad.band, domain.rank)
    return result if factor == 1 else result.mul_(factor)


class ShareTensor(BandTensor):
    """This rank's share of a parameter's gradient, on its way to the parameter.

    Autograd adds it to gradients of what uses the parameter elsewhere: outside of the model these
    are shares, too, and plain, while those from inside are gradients of the globe.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        domain = next(x.domain for x in args if type(x) is ShareTensor)
        result = func(*(_local_share(x) for x in args), **(kwargs or {}))
        return ShareTensor(result, PARTIAL, domain) if isinstance(result, Tensor) else result


def _local_share(x: Any) -> Any:
    if type(x) is ShareTensor:
        return x.local
    return share(x, x.domain) if type(x) is BandTensor else x


class Share(torch.autograd.Function):
    """Return this rank's share of a gradient of the globe; in turn differentiable."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, domain: Domain) -> Tensor:
        """Return the share."""
        ctx.domain = domain
        return share(grad, domain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of the globe, which is the same on all ranks."""
        grad = grad * (ctx.domain.loss_factor / ctx.domain.ranks)
        return BandTensor(grad.detach(), PARTIAL, ctx.domain), None


def gradient_share(grad: Tensor, domain: Domain) -> Tensor:
    """Return this rank's share of a gradient; differentiable if the backward pass is."""
    if torch.is_grad_enabled() and grad.requires_grad:
        result: Tensor = Share.apply(grad, domain)  # type: ignore[no-untyped-call]
        return result
    return share(grad, domain)


def take_share(grad: Tensor) -> Tensor | None:
    """Let a parameter get a share, as a hook of its gradient; others are plain already."""
    if type(grad) is ShareTensor:
        return grad.local
    if type(grad) is BandTensor and grad.has_plain:
        raise UserError(
            f"a parameter of shape {tuple(grad.shape)}: the model uses it past the module that has "
            "it, as a scripted layer or another name does, and so does the loss. Compute this term "
            "of the loss in the model's forward, or let the model use the module's attribute."
        )
    return gradient_share(grad, grad.domain) if type(grad) is BandTensor else None


def add_hook(parameter: Tensor) -> None:
    """Let a parameter get shares, if it does not yet."""
    if parameter.requires_grad and take_share not in gradient_hooks(parameter).values():
        parameter.register_hook(take_share)  # type: ignore[no-untyped-call]


def remove_hook(parameter: Tensor) -> None:
    """Undo `add_hook`."""
    hooks = gradient_hooks(parameter)
    for key in [key for key, hook in hooks.items() if hook is take_share]:
        del hooks[key]


unserializable_hook(take_share)  # type: ignore[no-untyped-call]


def _in_model(x: Tensor) -> Tensor:
    """Return a tensor without history, as a module has it while the model runs."""
    return x.detach()


class EnterWhole(torch.autograd.Function):
    """Return tensors that all ranks have, in the same memory; their gradients become shares."""

    @staticmethod
    def forward(ctx: Any, domain: Domain, *tensors: Tensor) -> Any:
        """Return the tensors."""
        ctx.domain = domain
        ctx.are_leaves = [x.is_leaf for x in tensors]
        ctx.set_materialize_grads(False)
        return tuple(map(_in_model, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return this rank's shares of the gradients."""
        shares: list[Tensor | None] = [None]
        for grad, is_leaf in zip(grads, ctx.are_leaves, strict=True):
            result = None if grad is None else gradient_share(grad, ctx.domain)
            if result is not None and is_leaf and not result.requires_grad:
                result = ShareTensor(result, PARTIAL, ctx.domain)
            shares.append(result)
        return tuple(shares)


def enter_whole(tensors: list[Tensor], domain: Domain) -> tuple[Tensor, ...]:
    """Return tensors that all ranks have, as the model sees them: see `EnterWhole`."""
    for x in tensors:
        if x.is_leaf:
            add_hook(x)
    entered: tuple[Tensor, ...] = EnterWhole.apply(domain, *tensors)  # type: ignore[no-untyped-call]
    return entered


ORIGINAL = "_outside_of_model"  # of a tensor that a module has: the parameter that it stands for


class _Replaced(NamedTuple):
    """An entry of a table of a module, and what the table has in place of it."""

    table: dict[str, Any]
    name: str
    original: Tensor
    entered: Tensor


@final
class EnteredTensors:
    """What modules have in place of their parameters and buffers while a model runs."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self._replaced: list[_Replaced] = []
        self._entered: dict[int, Tensor] = {}  # by id of the parameter
        self._inside: set[int] = set()  # the ids of these tensors
        self._flat_weights: list[Callable[[], None]] = []

    def enter(self, module: nn.Module, is_start: bool = False) -> None:
        """Replace the own tensors of a module, before the forward starts or when it calls this one.

        Parameters with a gradient by those of one node of autograd for each module: gradients are
        accumulated once those of all its parameters are there, and data parallelism sends them
        while others are computed.
        """
        parameters: Any = parameters_of(module)
        buffers = buffers_of(module)
        if not parameters and not buffers:
            return
        if not isinstance(parameters, dict):  # those of a script are not
            return
        found = [
            (name, x)
            for name, x in parameters.items()
            if x is not None and id(x) not in self._inside and _is_local(x)
            # What the model has computed, as for `functional_call`, is inside already.
            if is_start or isinstance(x, nn.Parameter)
        ]
        if found:
            # Another model that runs may have the module, too: the parameter itself, not what that
            # one has in place of it.
            own: list[Any] = [getattr(x, ORIGINAL, x) for _, x in found]
            self._enter_parameters({id(x): x for x in own if id(x) not in self._entered})
            for (name, shown), parameter in zip(found, own, strict=True):
                self._replace(parameters, name, shown, self._entered[id(parameter)])
            if isinstance(module, nn.RNNBase):
                self._flat_weights.append(replace_flat_weights(module, self._entered))
        for name, buffer in buffers.items():
            if type(buffer) is Tensor and buffer.layout is torch.strided:
                self._replace(buffers, name, buffer, _in_model(buffer))

    def _enter_parameters(self, parameters: dict[int, Tensor]) -> None:
        learning = {key: x for key, x in parameters.items() if x.requires_grad}
        entered = {key: _in_model(x) for key, x in parameters.items() if not x.requires_grad}
        if learning:
            with torch.enable_grad():  # the model may turn them on by itself
                every = enter_whole(list(learning.values()), self.domain)
            entered.update(zip(learning, every, strict=True))
        for key, x in entered.items():
            show_as_parameter(x)
            setattr(x, ORIGINAL, parameters[key])
            self._entered[key] = x
            self._inside.add(id(x))

    def _replace(self, table: dict[str, Any], name: str, original: Tensor, new: Tensor) -> None:
        self._replaced.append(_Replaced(table, name, original, new))
        table[name] = new

    def leave(self) -> None:
        """Put the parameters and buffers back, but where the model has set another one.

        What the model has set as the data of one it keeps.
        """
        for table, name, original, entered in self._replaced:
            if table.get(name) is entered:
                table[name] = original
                if not is_alias(entered, original):
                    original.data = entered.detach()
        for restore in self._flat_weights:
            restore()
        self._replaced.clear()
        self._entered.clear()
        self._inside.clear()
        self._flat_weights.clear()


def _is_local(x: Tensor) -> bool:
    """Return whether an entry of a module's parameters is a tensor of this rank's.

    Those of FSDP2 are not, until a module runs.
    """
    kind: Any = type(x)
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(x, FakeTensor)
