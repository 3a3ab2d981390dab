"""A check that all ranks of a domain have the same parameters, for training loops of users.

The loop that trains a converted model has to call `sum_gradients`. If it doesn't, each
rank steps by the gradients of its own rows, and its parameters drift away from the others' without
any error. `CompareParameters` therefore compares them at a few early forwards. The trainer of this
package needs none of it: it sums gradients, and compares replicas in `training/replicas.py`.
"""

from __future__ import annotations

import sys
from typing import Any, final

import torch
from torch import Tensor, nn

from credit_dp.domain_parallel.manager import DomainParallelManager
from credit_dp.domain_parallel.planned_run import active_planner
from credit_dp.domain_parallel.transport import message_device
from credit_dp.errors import UserError
from credit_dp.torch_private import (
    backward_pass,
    disable_current_modes,
    is_fake_mode_active,
    remove_hooks,
)

# Entries that are mixed at once, so that no second copy of a large tensor is made.
CHUNK_ENTRIES = 1 << 20
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd factors, whose multiplication modulo 2**64 is reversible: different entries stay different.
POSITION_FACTOR = 0x1E3779B97F4A7C15
MIX_FACTORS = (0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
LOWER_32_BITS = 0xFFFFFFFF

# The second forward follows the first step of most loops, the others that of loops which call the
# model several times for a step: rollouts, members, accumulated gradients.
COMPARED_FORWARDS = (2, 8, 32)


@final
class CompareParameters:
    """A forward pre-hook of a converted model, collective of the domain; removes itself at the end.

    Forwards count that are in training mode, with gradients recorded and not compiled. These are
    the same on all ranks, whatever their rows and gradients are. Only replicated parameters are
    compared: those of FSDP are left out.

    Raises:
        UserError: on all ranks, naming the first parameter that differs.
    """

    def __init__(self, manager: DomainParallelManager) -> None:
        self.manager = manager
        self.forwards = 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Compare the parameters of all ranks, if it is time to."""
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        # Runs without data are no forwards, nor is what activation checkpointing computes again.
        if active_planner() is not None or is_fake_mode_active() or backward_pass() >= 0:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph can't read numbers
        self.forwards += 1
        if self.forwards in COMPARED_FORWARDS:
            with torch.no_grad(), disable_current_modes():  # nor does a running model see it
                self._compare(replicated_parameters(model))
        if self.forwards == COMPARED_FORWARDS[-1]:
            remove_parameter_check(model)

    def _compare(self, parameters: dict[str, Tensor]) -> None:
        group = self.manager.domain_group
        device = torch.device("cpu") if group is None else message_device(group)
        sums = [checksum(parameter).to(device) for parameter in parameters.values()]
        # Of a fixed size, also if a rank should have more parameters than the others.
        table = self._gather([len(sums), int(checksum(torch.stack(sums))) if sums else 0], device)
        if table.count(table[0]) == len(table):
            return
        what = "the numbers of parameters differ"
        if len({number for number, _ in table}) == 1:
            rows = self._gather([int(each) for each in sums], device)
            first = next(
                n for n, values in enumerate(zip(*rows, strict=True)) if len({*values}) > 1
            )
            rank = next(rank for rank, row in enumerate(rows) if row[first] != rows[0][first])
            what = f"{list(parameters)[first]} differs between the domain ranks 0 and {rank}"
        raise UserError(
            f"training forward {self.forwards} of a converted model: {what}, but all ranks of a "
            "domain need the same parameters. Build the model from one seed on every rank, and "
            "between the last backward and the optimizer's step call sum_gradients(model, manager) "
            "of credit_dp.domain_parallel. Or wrap the model in DistributedDataParallel and "
            "multiply the loss by the number of domain ranks."
        )

    def _gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        local = torch.tensor(numbers, dtype=torch.int64, device=device)
        table: list[list[int]] = self.manager.transport.all_gather(local).tolist()
        return table


def add_parameter_check(model: nn.Module, manager: DomainParallelManager) -> None:
    """Compare the parameters of all ranks of a domain at a few training forwards of a model."""
    remove_parameter_check(model)
    model.register_forward_pre_hook(CompareParameters(manager))


def remove_parameter_check(model: nn.Module) -> None:
    """Undo `add_parameter_check`, also of parts of the model."""
    for module in model.modules():
        remove_hooks(module, lambda hook: isinstance(hook, CompareParameters))


def replicated_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a rank holds complete, by name; those without data are left out.

    FSDP2's are of a type of their own. FSDP shows its shards as ordinary parameters.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        return {}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if type(parameter) is nn.Parameter and not parameter.is_meta
    }


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the mixed bits of all entries, modulo 2**64.

    It changes with every single entry, and almost surely if several entries change or are swapped.
    NaNs with the same bits are equal; 0.0 and -0.0 are not.

    Shapes:
        any shape and dtype -> `()` int64, on the same device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(INTEGER_DTYPES[flat.element_size()])
    total = torch.full((), len(words), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHUNK_ENTRIES):
        total += mix_bits(words[start : start + CHUNK_ENTRIES], start).sum()
    return total


def mix_bits(words: Tensor, start: int) -> Tensor:
    """Spread each entry and its position over 64 bits; positions count from `start`.

    The mixing is reversible: two values of an entry never give the same bits. Integer overflow
    wraps around on every device.
    """
    positions = torch.arange(start, start + len(words), device=words.device)
    bits = words.to(torch.int64) ^ (positions * POSITION_FACTOR)
    for factor in MIX_FACTORS:
        bits *= factor
        bits ^= (bits >> 32) & LOWER_32_BITS  # the mask makes the shift one of unsigned integers
    return bits
