"""The optimizers of this package that torch does not have in the form that sharding needs.

`Lion` updates each entry on its own, so it works on any part of a parameter. `Muon` and `Soap` need
whole matrices: where FSDP2 shards parameters, all of their ranks gather one matrix after the other,
compute the same update, and keep their shards of it. State is saved and resumed as AdamW's is:
tensors of the parameter's shape, and numbers; `Soap` also has square matrices, which all ranks have
whole. `StateLayout` describes the state of any optimizer.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from credit_dp.torch_private import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
)
from credit_dp.training.parameter_shards import is_dtensor
from credit_dp.training.replicas import local_tensor

Groups = Sequence[dict[str, Any]]


@final
@dataclass(frozen=True)
class StateLayout:
    """The tensors that an optimizer keeps of each parameter between steps.

    Attributes:
        scalars: an example of each single number (for instance a step counter), by key.
        moments: the number of tensors with the parameter's shape.
        keys: the sets of keys that a parameter may have; None: any.
        whole: keys of tensors of another shape, which all ranks have whole.
    """

    scalars: Mapping[str, Tensor]
    moments: int
    keys: frozenset[frozenset[str]] | None = None
    whole: frozenset[str] = frozenset()


ADAMW = StateLayout({"step": torch.zeros(())}, moments=2)


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
            updates = foreach_lerp(averages, gradients, 1 - in_update)
            foreach_sign_(updates)
            foreach_mul_(values, 1 - lr * group["weight_decay"])
            foreach_add_(values, updates, alpha=-lr)
            foreach_lerp_(averages, gradients, 1 - kept)


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


ADAMW_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})


class MatrixOptimizer(Optimizer):
    """Base of optimizers that update weights as matrices; other parameters are AdamW's.

    A weight of more than two dimensions is the matrix of its first dimension and all others.

    Args:
        groups: parameter groups with `params`, `lr` and `weight_decay`, and `matrices`: whether
            their parameters are updated as matrices.
        betas, eps: of AdamW.
    """

    def __init__(self, groups: Groups, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(groups, {})

    def state_keys(self, parameter: Tensor) -> frozenset[str]:
        """Return the names of the tensors that are kept of a parameter."""
        for group in self.param_groups:
            if group["matrices"] and any(p is parameter for p in group["params"]):
                return self.matrix_keys(parameter)
        return ADAMW_KEYS

    @abstractmethod
    def matrix_keys(self, parameter: Tensor) -> frozenset[str]:
        """Return the names of the tensors that are kept of a matrix."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; a closure is not called.

        Collective with FSDP2: the parameters come in the same order on all ranks.
        """
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["matrices"]:
                for parameter in parameters:
                    self.update_matrix(
                        parameter, parameter.grad, group["lr"], group["weight_decay"]
                    )
            elif parameters:
                self._update_vectors(parameters, group["lr"], group["weight_decay"])

    @abstractmethod
    def update_matrix(
        self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float
    ) -> None:
        """Update one matrix; collective with FSDP2."""

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


def whole_tensor(x: Tensor) -> Tensor:
    """Return all of a tensor that FSDP2 may have sharded; collective."""
    whole: Tensor = x.full_tensor() if is_dtensor(x) else x
    return whole


def own_shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have, as the parameter is sharded."""
    if not is_dtensor(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # All ranks have the same tensor: each takes its shard, and none sends anything.
    mesh, placements = parameter.device_mesh, parameter.placements
    return local_tensor(distribute_tensor(whole, mesh, placements, src_data_rank=None))


@final
class Muon(MatrixOptimizer):
    """Orthogonalises the averaged gradient of each weight.

    The update has the size of AdamW's, so that both have one learning rate.

    Args:
        groups, betas, eps: see `MatrixOptimizer`.
        momentum: decay of the average of gradients of matrices.
        nesterov: whether the update looks ahead by one gradient.

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
        super().__init__(groups, betas, eps)

    def matrix_keys(self, parameter: Tensor) -> frozenset[str]:
        """See `MatrixOptimizer`."""
        return frozenset({"momentum_buffer"})

    def update_matrix(
        self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float
    ) -> None:
        """See `MatrixOptimizer`."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp(average, self._momentum) if self._nesterov else average
        whole = whole_tensor(update)
        rows = whole.flatten(1)
        size = UPDATE_SIZE * max(rows.shape) ** 0.5
        step = own_shard(orthogonalised(rows).view_as(whole), parameter)
        value = local_tensor(parameter)
        value.mul_(1 - lr * weight_decay).add_(step, alpha=-lr * size)


# Keys of the state of a side of a matrix: the average of products of gradients, and its basis.
SIDES = (("left", "left_basis"), ("right", "right_basis"))
FIRST_ITERATIONS = 10  # of the power iteration from `starting_basis`
SHIFT = 1e-2  # of eigenvalues in the power iteration, in mean eigenvalues


@final
class Soap(MatrixOptimizer):
    """Adam in the basis of Shampoo: the eigenvectors of averaged products of gradients.

    A matrix G is rotated to Q_l^T G Q_r, where Q_l has the eigenvectors of the average of G G^T and
    Q_r those of G^T G. Adam updates it there, and the update is rotated back. The bases are
    computed from the first gradient, which updates nothing else, and then refreshed.

    A gradient of low rank leaves eigenvalues of zero, whose eigenvectors would be those of
    rounding, different on each mesh. Therefore eigenvalues are shifted up, and the first bases come
    from the power iteration, too, not from an eigendecomposition: directions that no gradient tells
    apart stay as they are. It starts from a random basis, the same in every run: unit vectors may
    have no part of a large eigenvector at all, and the iteration would find it in their rounding.

    Args:
        groups, betas, eps: see `MatrixOptimizer`; betas are those of matrices, too, and the second
            one also that of the averaged products.
        every: steps between two refreshes of the bases.
        largest: a side of a matrix that is longer is not rotated.

    Source: Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam"
    (arXiv:2409.11321), algorithms 3 and 4.
    """

    def __init__(
        self, groups: Groups, betas: tuple[float, float], eps: float, every: int, largest: int
    ) -> None:
        self._every, self._largest = every, largest
        super().__init__(groups, betas, eps)

    def matrix_keys(self, parameter: Tensor) -> frozenset[str]:
        """See `MatrixOptimizer`."""
        sides = zip(SIDES, matrix_shape(parameter), strict=True)
        return ADAMW_KEYS.union(*(keys for keys, size in sides if size <= self._largest))

    def update_matrix(
        self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float
    ) -> None:
        """See `MatrixOptimizer`; three gathers with FSDP2."""
        state = self.state[parameter]
        rows = whole_tensor(gradient).flatten(1)
        if not state:
            state.update(
                step=torch.zeros(()),
                exp_avg=torch.zeros_like(parameter),
                exp_avg_sq=torch.zeros_like(parameter),
            )
            self._add_products(state, rows)
            for product, basis in SIDES:
                if product in state:
                    state[basis] = first_basis(state[product])
            return
        state["step"] += 1
        steps = int(state["step"])
        first, second = self._betas
        rotated = rotate(rows, state).view(parameter.shape)
        average, squares = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        average.lerp_(local_tensor(gradient), 1 - first)
        squares.lerp_(own_shard(rotated, parameter).square(), 1 - second)
        # The average is kept unrotated, so that it stays what it is when the bases change.
        towards = rotate(whole_tensor(state["exp_avg"]).flatten(1), state)
        root = (whole_tensor(state["exp_avg_sq"]).flatten(1) / (1 - second**steps)).sqrt_()
        update = rotate(towards / (1 - first**steps) / root.add_(self._eps), state, back=True)
        value = local_tensor(parameter)
        value.mul_(1 - lr * weight_decay)
        value.add_(own_shard(update.view(parameter.shape), parameter), alpha=-lr)
        self._add_products(state, rows)
        if steps % self._every == 0:
            for product, basis in SIDES:
                if product in state:
                    state[basis] = next_basis(state[product], state[basis])

    def _add_products(self, state: dict[str, Tensor], rows: Tensor) -> None:
        """Add a gradient to the averages of products, of the sides that are rotated."""
        for (product, _), side in zip(SIDES, (rows, rows.mT), strict=True):
            if len(side) <= self._largest:
                if product not in state:
                    state[product] = rows.new_zeros(len(side), len(side))
                state[product].lerp_(side @ side.mT, 1 - self._betas[1])


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return the shape of a weight's matrix: its first dimension, and all others."""
    return parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])


def rotate(rows: Tensor, state: dict[str, Tensor], back: bool = False) -> Tensor:
    """Rotate a matrix to the bases of its sides, or back from them.

    Shapes:
        `(m, n)` -> `(m, n)`.
    """
    left, right = (state.get(basis) for _, basis in SIDES)
    if left is not None:
        rows = (left if back else left.mT) @ rows
    if right is not None:
        rows = rows @ (right.mT if back else right)
    return rows


def starting_basis(size: int) -> Tensor:
    """Return an orthogonal matrix of random numbers, the same in every process."""
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, size, generator=generator, dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(numbers).Q
    return basis


def first_basis(product: Tensor) -> Tensor:
    """Return approximate eigenvectors of a symmetric matrix as columns, the largest ones first."""
    basis = starting_basis(len(product)).to(product)
    for _ in range(FIRST_ITERATIONS):
        basis = next_basis(product, basis)
    return basis


def next_basis(product: Tensor, basis: Tensor) -> Tensor:
    """Return better eigenvectors by one step of a power iteration (algorithm 4), shifted."""
    # Divided by the mean eigenvalue, so that no gradient at all leaves the basis, too.
    scaled = product / product.diagonal().mean().clamp(min=torch.finfo(product.dtype).tiny)
    refreshed: Tensor = torch.linalg.qr(scaled @ basis + SHIFT * basis).Q
    return refreshed
