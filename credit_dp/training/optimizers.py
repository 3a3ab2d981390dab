"""The optimizers of this package that torch does not have in the form that sharding needs.

`Lion` updates each entry on its own, so it works on any part of a parameter. `Muon` needs whole
matrices: where FSDP2 shards parameters, all of their ranks gather one matrix after the other,
compute the same update, and keep their shards of it. Both keep only tensors of the parameter's
shape and numbers, so that their state is saved and resumed as AdamW's is.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from credit_dp.training.parameter_shards import is_dtensor
from credit_dp.training.replicas import local_tensor

Groups = Sequence[dict[str, Any]]


@final
class Lion(Optimizer):
    """Steps of one size for all entries, in the direction of the sign of an averaged gradient.

    Weight decay is decoupled, as AdamW's. A third to a tenth of AdamW's learning rate, and as much
    more weight decay, make updates of similar size.

    Args:
        groups: parameter groups with `params`, `lr` and `weight_decay`.
        betas: decay of the average in the update, and of the average that is kept.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

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
            updates = torch._foreach_lerp(averages, gradients, 1 - in_update)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
            torch._foreach_add_(values, updates, alpha=-lr)
            torch._foreach_lerp_(averages, gradients, 1 - kept)


def real_entries(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's local shard, with complex numbers as pairs of real ones."""
    local = local_tensor(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


# Of the odd polynomial whose iterates map singular values towards 1, and the number of iterations.
# Source: Jordan et al. 2024, as in `torch.optim.Muon`.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SMALLEST_NORM = 1e-7  # by which a matrix is divided, as in `torch.optim.Muon`
UPDATE_SIZE = 0.2  # root-mean-square of updates, as AdamW's usually are


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of the given one, and singular values near 1.

    Computed in the matrix's dtype. `torch.optim.Muon` computes in bfloat16, whose rounding would
    make the update depend on the mesh.

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


@final
class Muon(Optimizer):
    """Orthogonalises the averaged gradient of each weight; other parameters are AdamW's.

    A weight of more than two dimensions is the matrix of its first dimension and all others. The
    update has the size of AdamW's, so that both have one learning rate.

    Args:
        groups: parameter groups with `params`, `lr` and `weight_decay`, and `matrices`: whether
            their parameters are orthogonalised.
        momentum: decay of the average of gradients of matrices.
        nesterov: whether the update looks ahead by one gradient.
        betas, eps: of AdamW.

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
        self._momentum, self._nesterov, self._eps = momentum, nesterov, eps
        self._betas = betas
        super().__init__(groups, {})

    def state_keys(self, parameter: Tensor) -> frozenset[str]:
        """Return the names of the tensors that are kept of a parameter."""
        for group in self.param_groups:
            if group["matrices"] and any(p is parameter for p in group["params"]):
                return frozenset({"momentum_buffer"})
        return frozenset({"step", "exp_avg", "exp_avg_sq"})

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
        step = orthogonalised(rows).view_as(whole)
        if is_dtensor(parameter):
            from torch.distributed.tensor import distribute_tensor

            # All ranks have the same update: each takes its shard, and none sends anything.
            mesh, placements = parameter.device_mesh, parameter.placements
            step = distribute_tensor(step, mesh, placements, src_data_rank=None)
        value = local_tensor(parameter)
        value.mul_(1 - lr * weight_decay).add_(local_tensor(step), alpha=-lr * size)

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
