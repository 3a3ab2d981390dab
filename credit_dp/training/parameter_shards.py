"""Shards parameters with FSDP2 over ranks that hold the same stage: all of its replicas.

`shard_parameters` is called on the converted model in the host's memory. Each block of a segmented
model is one FSDP unit, which is gathered while it computes; the rest of the model is another one.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from credit_dp.config import ParallelConfig
from credit_dp.distributed.process_groups import new_mesh
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel

# Torch's FSDP modules take a second to import: only runs with fsdp2 import them.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_fsdp_module(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP2 manages the parameters of this module."""
    # If nobody has imported torch's FSDP, there can be no such module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a parameter, gradient or norm is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; writing into it changes the parameter."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def own_shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have, as the parameter is sharded."""
    if not is_dtensor(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank each takes its shard of its own copy, and none sends anything.
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def shard_parameters(
    part: nn.Module, mesh: DeviceMesh, parallel: ParallelConfig, dtype: torch.dtype
) -> None:
    """Shard the parameters of a model, or of a pipeline stage, over the ranks of a mesh, in place.

    Units are moved to the device of the mesh one at a time; a rank keeps its shards there. Blocks
    are gathered one at a time while they compute; all other parameters are gathered at once.
    Gradients are averaged over the ranks, as DDP does.

    Args:
        part: the model or stage, converted to this rank's rows.
        mesh: see `fsdp_mesh`.
        parallel: has the dtypes, and whether parameters are offloaded to the host's memory.
        dtype: of the output, whatever the parameters compute in.

    Raises:
        UserError: a parameter has an entry for each row of the globe, so that a band of it can't be
            cut from a shard, no dimensions or complex numbers; or several blocks share a parameter.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    for name, parameter in part.named_parameters():
        _check_kind(name, parameter)
        if not parameter.is_contiguous():  # which FSDP2 needs
            parameter.data = parameter.data.contiguous()
    policy = MixedPrecisionPolicy(_dtype(parallel.param_dtype), _dtype(parallel.reduce_dtype))
    # Only the root casts its output: blocks pass on the dtype that they compute in.
    root_policy = replace(policy, output_dtype=dtype)
    offload = OffloadPolicy()
    if parallel.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # Blocks first: the call on the root takes the parameters that no block has.
    for block in fsdp_blocks(part):
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(part, mesh=mesh, mp_policy=root_policy, offload_policy=offload)


def fsdp_blocks(part: nn.Module) -> list[nn.Module]:
    """Return the modules that are FSDP units of their own; single layers are too small for it."""
    if not isinstance(part, SegmentedModel):
        return []
    names = dict.fromkeys(segment.name for segment in part.segments()[part.active_segments])
    _check_tied(part, list(names))
    blocks = (part.get_submodule(name) for name in names)
    return [
        block
        for block in blocks
        if not isinstance(block, RowLayer) and next(block.parameters(), None) is not None
    ]


def _check_kind(name: str, parameter: nn.Parameter) -> None:
    if not parameter.ndim:
        raise UserError(
            f"parallel.data_mode: fsdp2 can't shard {name}, a single number without a dimension. "
            "Give it one, as torch.ones(1) has, or use parallel.data_mode=ddp."
        )
    if parameter.is_complex():
        raise UserError(
            f"parallel.data_mode: fsdp2 can't shard {name}, whose numbers are complex. Use "
            "parallel.data_mode=ddp."
        )


def _check_tied(part: nn.Module, blocks: list[str]) -> None:
    owners: dict[nn.Parameter, str] = {}
    for block in blocks:
        for name, parameter in part.get_submodule(block).named_parameters():
            if owners.setdefault(parameter, block) != block:
                raise UserError(
                    f"parallel.data_mode: fsdp2 can't shard {block}.{name}, which "
                    f"{owners[parameter]} has too. Use parallel.data_mode=ddp."
                )


def fsdp_mesh(manager: DomainParallelManager) -> DeviceMesh | None:
    """Return the replicas of this pipeline rank's stages, or None if that is a single rank.

    All of them have the same parameters, whichever rows, samples and members they have. They are
    one axis, over which torch shards, or two: torch replicates over the first and shards over the
    second, of consecutive ranks. Collective of all ranks, as process groups are created.
    """
    replicas = manager.replicas
    if manager.mesh is None or replicas == 1:
        return None
    shards = shards_of(replicas)
    # Ranks of the manager's mesh are ordered (pipeline, data, ensemble, domain).
    ranks = manager.mesh.mesh.view(-1, replicas // shards, shards)
    if shards < replicas:
        return new_mesh(ranks, ("pipeline", "copies", "shards"))["copies", "shards"]
    if manager.dp_world_size == replicas:
        return manager.mesh["data"]
    if len(ranks) == 1:  # all ranks of the run, whose group is there already
        return new_mesh(ranks[0, 0], ("shards",))
    return new_mesh(ranks[:, 0], ("pipeline", "shards"))["shards"]


# About the number of shards of a parameter. More save little: with 64 and AdamW in float32 a rank
# holds a quarter of a byte for each entry. But shards are whole rows of the first dimension, and
# what is gathered and reduced is padded to equal shards: a thousand would be mostly padding.
SHARDS = 64


def shards_of(replicas: int) -> int:
    """Return how many of the ranks that hold the same parameters share one copy of them."""
    divisors = (n for n in range(1, replicas + 1) if replicas % n == 0)
    return min(divisors, key=lambda n: abs(math.log(n / SHARDS)))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
