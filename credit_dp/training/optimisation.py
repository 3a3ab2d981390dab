"""AdamW with linear warm-up and a cosine, and the seed of each step's random numbers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from credit_dp.config import OptimizerConfig


def build_optimiser(parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> AdamW:
    """AdamW over all parameters, those of `decays` with weight decay."""
    groups = [
        {
            "params": [p for name, p in parameters.items() if decays(name, p) is decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    betas = (config.betas[0], config.betas[1])
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: not on biases and the affine part of norms.

    Told by name and shape, which sharding keeps; module types change on conversion.
    """
    return parameter.ndim > 1 and not name.endswith("bias")


def build_schedule(optimiser: AdamW, config: OptimizerConfig, steps: int) -> LambdaLR:
    """Linear warm-up to `lr` over `warmup_steps`, then half a cosine to `final_lr` at `steps`."""
    lowest = config.final_lr / config.lr

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return LambdaLR(optimiser, factor)


def move_schedule(optimiser: Optimizer, schedule: LambdaLR, saved: dict[str, Any]) -> None:
    """Go to the position of a saved schedule, but take no setting from it: those are the config's.

    Optimiser and schedule come fresh from the config, which may have changed since the save.
    """
    step = saved["last_epoch"]
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [float(base) * factor(step) for base, factor in pairs]
    own = {"base_lrs": schedule.base_lrs, "_last_lr": rates}
    place = {"last_epoch": step, "_step_count": step + 1}
    schedule.load_state_dict({**schedule.state_dict(), **place, **own})
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate


def seed_step(seed: int, step: int, data_rank: int, domain_rank: int) -> None:
    """Seed what one training step draws, so that a resumed run draws the same.

    Ranks draw different numbers, for different samples or rows of dropout; the first domain rank
    of the first data rank draws what one process would.
    """
    state = torch.tensor([seed, step, data_rank, domain_rank], dtype=torch.int64)
    mixed = 0
    for part in state.tolist():
        # The 64-bit finaliser of SplitMix (Steele, Lea & Flood 2014): neighbouring steps and ranks
        # get unrelated seeds.
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    torch.manual_seed(mixed % 2**63)
