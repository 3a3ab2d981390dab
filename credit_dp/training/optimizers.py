"""The optimizers that torch does not have in the form that sharding needs, and those of plug-ins.

`Lion` updates each entry on its own, so it works on any part of a parameter. `Muon` needs whole
matrices: where FSDP2 shards parameters, all of their ranks gather one matrix after the other,
compute the same update, and keep their shards of it.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from credit_dp.config import OwnOptimizerConfig
from credit_dp.errors import UserError
from credit_dp.plugins import report_plugin_errors
from credit_dp.torch_private import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
)
from credit_dp.training.parameter_shards import is_dtensor, local_tensor, own_shard

# Parameter groups, with `params`, `lr` and `weight_decay`.
Groups = Sequence[Mapping[str, Any]]


@final
class Lion(Optimizer):
    """Steps of one size for all entries, in the direction of the sign of an averaged gradient.

    Weight decay is decoupled, as AdamW's. A third to a tenth of AdamW's learning rate, and as much
    more weight decay, make updates of similar size. The first of `betas` is the decay of the
    average in the update, the second that of the average that is kept.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__([dict(group) for group in groups], {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a closure is not called."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            # On local shards: dispatch through `DTensor` would take longer than the arithmetic.
            values = [real_entries(p) for p in parameters]
            gradients = [real_entries(p.grad) for p in parameters]
            averages = [real_entries(self.state[p]["exp_avg"]) for p in parameters]
            lr, (in_update, kept) = group["lr"], group["betas"]
            updates = foreach_lerp(averages, gradients, 1 - in_update)
            foreach_sign_(updates)
            foreach_mul_(values, 1 - lr * group["weight_decay"])
            foreach_add_(values, updates, alpha=-lr)
            foreach_lerp_(averages, gradients, 1 - kept)


def real_entries(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's local shard, with complex numbers as pairs of real ones."""
    local = local_tensor(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


# Coefficients of the odd polynomial whose iterates map singular values towards 1, and the number of
# iterations. Source: Jordan et al. 2024, as in `torch.optim.Muon`.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SMALLEST_NORM = 1e-7  # by which a matrix is divided, as in `torch.optim.Muon`
UPDATE_SIZE = 0.2  # root-mean-square of updates, as AdamW's usually are


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of the given one, and singular values near 1.

    It is computed in the matrix's dtype. `torch.optim.Muon` computes it in bfloat16, where a last
    digit of the gradient, which depends on the mesh, changes some 0.05 % of the update.

    Shapes:
        `(m, n)` -> `(m, n)`.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = NEWTON_SCHULZ
    # The shorter side first: the products are then as small as they can be.
    flipped = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if flipped else matrix
    # A gradient that has nearly vanished stays small: its norm may underflow, and what is left is
    # rounding.
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if flipped else x


ADAMW_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})


@final
class Muon(Optimizer):
    """Orthogonalises the averaged gradient of each matrix; AdamW updates all other parameters.

    Groups say by `matrices` whether their parameters are matrices. A weight of more than two
    dimensions is the matrix of its first dimension and all others. The update has the size of
    AdamW's, so that both have one learning rate.

    `torch.optim.Muon` takes the same steps, but in bfloat16, and takes no weights of convolutions.

    Source: Jordan et al. 2024; the size of updates: Liu et al. 2025, "Muon is Scalable for LLM
    Training", eq. 4.
    """

    def __init__(
        self,
        groups: Groups,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._momentum, self._nesterov = momentum, nesterov
        self._betas, self._eps = betas, eps
        super().__init__([dict(group) for group in groups], {})

    def state_keys(self, parameter: Tensor) -> frozenset[str]:
        """Return the names of the tensors that are kept for a parameter."""
        for group in self.param_groups:
            if group["matrices"] and any(p is parameter for p in group["params"]):
                return frozenset({"momentum_buffer"})
        return ADAMW_KEYS

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a closure is not called.

        Collective with FSDP2: the parameters come in the same order on all ranks.
        """
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["matrices"]:
                for parameter in parameters:
                    self._update_matrix(
                        parameter, parameter.grad, group["lr"], group["weight_decay"]
                    )
            elif parameters:
                self._update_vectors(parameters, group["lr"], group["weight_decay"])

    def _update_matrix(
        self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp(average, self._momentum) if self._nesterov else average
        whole = update.full_tensor() if is_dtensor(update) else update
        rows = whole.flatten(1)
        size = UPDATE_SIZE * max(rows.shape) ** 0.5
        step = own_shard(orthogonalised(rows).view_as(whole), parameter)
        value = local_tensor(parameter)
        value.mul_(1 - lr * weight_decay).add_(step, alpha=-lr * size)

    def _update_vectors(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(
                    step=torch.zeros(()),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )
        states = [self.state[p] for p in parameters]
        adamw(
            [local_tensor(p) for p in parameters],
            [local_tensor(p.grad) for p in parameters if p.grad is not None],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )


STATE_REQUIREMENT = (
    "Checkpoints hold tensors of the parameter's shape and dtype, and single numbers in tensors, "
    "by keys without dots."
)


def build_plugin_optimizer(config: OwnOptimizerConfig, groups: Groups) -> Optimizer:
    """Return the optimizer that a plug-in builds for these parameter groups.

    After its first step its state is checked, as what checkpoints can't hold would be lost.

    Raises:
        UserError: it can't be built, or does not take all of the parameters; later also if its step
            fails, or its state can't be saved.
    """
    kind = type(config)
    where = f"optimizer: {kind.__name__}.build"
    if kind.build is OwnOptimizerConfig.build:
        raise UserError(
            f"optimizer: {kind.__name__} has no build. It needs a method build(self, groups) that "
            "returns a torch.optim.Optimizer."
        )
    with report_plugin_errors(where):
        # Copies, because torch's optimizers write their defaults into the groups.
        optimizer = config.build([dict(group) for group in groups])
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"{where} has to return a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    given, used = (
        {id(p) for group in parameter_groups for p in group["params"]}
        for parameter_groups in (groups, optimizer.param_groups)
    )
    if given != used:
        raise UserError(f"{where} has to use the parameters of all groups, and no others.")
    is_checked = False
    take_step: Callable[[], object] = optimizer.step

    def step(optimizer: Optimizer) -> None:
        nonlocal is_checked
        try:
            take_step()
        except torch.OutOfMemoryError:  # the run says which keys save memory
            raise
        except Exception:
            with report_plugin_errors(f"optimizer: the optimizer of {kind.__name__}"):
                raise
        if not is_checked:
            check_state_can_be_saved(config.name, optimizer)
            is_checked = bool(optimizer.state)  # a first step that is skipped leaves none

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def check_state_can_be_saved(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state a checkpoint can't hold.

    Raises:
        UserError: it keeps something else than tensors like a parameter and single numbers.
    """
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    if optimizer.state.keys() - parameters:
        raise UserError(
            f"optimizer={name}: keeps state that belongs to no parameter. {STATE_REQUIREMENT}"
        )
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            is_tensor = isinstance(value, Tensor) and value.dtype != torch.bool
            if not isinstance(key, str) or "." in key or not is_tensor:
                kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(
                    f"optimizer={name}: keeps {key!r} of a parameter as {kind}. {STATE_REQUIREMENT}"
                )
            is_like = (value.shape, value.dtype) == (parameter.shape, parameter.dtype)
            if value.ndim and not (is_like and is_dtensor(value) == is_dtensor(parameter)):
                raise UserError(
                    f"optimizer={name}: keeps {key!r} as {tuple(value.shape)} of {value.dtype} for "
                    f"a parameter of {tuple(parameter.shape)} of {parameter.dtype}. "
                    f"{STATE_REQUIREMENT}"
                )
