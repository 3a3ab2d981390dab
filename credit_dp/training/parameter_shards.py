"""Parameters shared out among the data ranks (FSDP2), alike on all ranks of a domain."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from credit_dp.config import ParallelConfig
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.domain_parallel.layers.base import RowLayer
from credit_dp.domain_parallel.row_tensors import cuts
from credit_dp.errors import UserError
from credit_dp.models.segments import SegmentedModel

# Torch's modules of shares take a second to import: only where parameters are shared out.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_fsdp_module(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether the parameters of this module are gathered while it computes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has made one has imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a rank holds but a share of this parameter, gradient or norm."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def shard_parameters(
    part: nn.Module, mesh: DeviceMesh, parallel: ParallelConfig, dtype: torch.dtype
) -> None:
    """Share out the parameters of a model, or a stage of one, among the data ranks, in place.

    The blocks of its segments are gathered one at a time while they compute, what is left as a
    whole. Gradients are averaged over all ranks of both axes, as DDP does.

    Args:
        part: converted already. Its output keeps `dtype`, whatever the parameters compute in.
        mesh: see `fsdp_mesh`.
        parallel: dtypes and whether parameters wait in the host's memory.
        dtype: of the model's output.

    Raises:
        UserError: a parameter has a row for each of the globe's: bands of it can't be cut from
            what is shared out; or several blocks have it.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    cut = next((cut.path for _, of_owner in cuts(part) for cut in of_owner.values()), None)
    if cut is not None:
        raise UserError(
            f"parallel.data_mode: fsdp2 can't share out {cut}, which has a row for each of the "
            "globe's. Use parallel.data_mode=ddp, or parallel.domain=1."
        )
    policy = MixedPrecisionPolicy(_dtype(parallel.param_dtype), _dtype(parallel.reduce_dtype))
    of_root = replace(policy, output_dtype=dtype)  # blocks hand on what they compute in
    offload = OffloadPolicy()
    if parallel.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in fsdp_blocks(part):
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(part, mesh=mesh, mp_policy=of_root, offload_policy=offload)


def fsdp_blocks(part: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered on their own; a sharded layer is too small to be one."""
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


def _check_tied(part: nn.Module, blocks: list[str]) -> None:
    """Refuse a parameter of several blocks, each of which would share it out on its own."""
    owners: dict[nn.Parameter, str] = {}
    for block in blocks:
        for name, parameter in part.get_submodule(block).named_parameters():
            if owners.setdefault(parameter, block) != block:
                raise UserError(
                    f"parallel.data_mode: fsdp2 can't share out {block}.{name}, which "
                    f"{owners[parameter]} has too. Use parallel.data_mode=ddp."
                )


def fsdp_mesh(manager: DomainParallelManager) -> DeviceMesh | None:
    """Return the mesh (domain, data) of this pipeline rank: replicas first, as torch wants it.

    None if there is nobody to share with. A collective of all ranks, which makes process groups.
    """
    if manager.mesh is None or manager.dp_world_size * manager.domain_world_size == 1:
        return None
    if manager.domain_parallel_size == 1:
        return manager.mesh["data"]
    ranks = manager.mesh.mesh.permute(0, 2, 1)
    axes = ("pipeline", "domain", "data")
    return DeviceMesh(manager.mesh.device_type, ranks, mesh_dim_names=axes)["domain", "data"]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
