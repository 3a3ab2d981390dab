"""Gradients across ranks: their sum where nobody else makes it, their norm, and its limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from credit_dp.constants import constant
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.parameter_shards import is_share

BUCKET = 2**25  # bytes of gradients that are sent at once


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks of a group, as DDP does in backward.

    Collective. A missing gradient counts as zeros, and stays missing where no rank has one.
    """
    size = dist.get_world_size(group)
    for bucket in _buckets(parameters):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        there = [p.grad is not None for p in bucket]
        marks = constant(there, gradients[0].device, gradients[0].dtype)
        total = torch.cat([marks, *(gradient.flatten() for gradient in gradients)]) / size
        dist.all_reduce(total, group=group)
        sizes = [len(bucket), *(gradient.numel() for gradient in gradients)]
        marks, *parts = torch.split(total, sizes)
        for at, (parameter, part) in enumerate(zip(bucket, parts, strict=True)):
            if parameter.grad is not None or marks[at]:
                parameter.grad = gradients[at].copy_(part.view_as(parameter))


def replicas(manager: DomainParallelManager) -> dist.ProcessGroup | None:
    """Return the group of all ranks that hold the same stages; None if this rank is alone there.

    A collective of all ranks: each of these groups is made by everyone.
    """
    size = manager.dp_world_size * manager.domain_world_size
    if size == 1:
        return None
    starts = range(0, manager.world_size, size)
    groups: list[dist.ProcessGroup] = [
        dist.new_group(list(range(start, start + size))) for start in starts
    ]
    return groups[manager.pipeline_rank]


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters that learn, in groups of one dtype and of about `BUCKET` bytes."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        full = sum(p.nbytes for p in bucket) >= BUCKET
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def clip_gradients(
    parameters: Iterable[nn.Parameter], limit: float | None, manager: DomainParallelManager
) -> Tensor:
    """Scale all gradients down to a global norm of `limit`, and return the norm before.

    Gradients are those of the whole globe and batch already: alike on all ranks of the domain and
    data axes, or a share of them with fsdp2; other ranks of the pipeline have other parameters.
    The norm is the same on every rank. Collective over the pipeline, and the shares' ranks.
    """
    learning = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in learning if p.grad is not None])
    if is_share(norm):
        norm = norm.full_tensor()
    if manager.pipeline_parallel_size > 1:
        # In one dtype: a stage in which nothing learns has a norm of another.
        squares = norm.double().square().to(_device(manager))
        dist.all_reduce(squares, group=manager.pipeline_group)
        norm = squares.sqrt()
    if limit is not None and not math.isinf(limit):
        clip_grads_with_norm_(learning, limit, norm)
    return norm


def _device(manager: DomainParallelManager) -> torch.device:
    """Return where tensors have to be for the pipeline's process group."""
    cuda = "nccl" in dist.get_backend(manager.pipeline_group)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
