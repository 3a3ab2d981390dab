"""What is said when a GPU's memory is full: what the plan expects, and the smallest remedy."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal

from credit_dp.config import Config
from credit_dp.data.channel_preview import expected_grid
from credit_dp.distributed import RankInfo
from credit_dp.distributed.report import rank_name
from credit_dp.errors import UserError

MARGIN = 0.9  # of the memory; what operations need while they run comes on top of the plan
MAX_DOMAIN_RANKS = 64  # domain ranks that are tried
PLAN_FUNCTION = (
    "credit_dp.costs.budget",
    "plan_step",
)  # by name: commands are built on top of training


class Change(NamedTuple):
    """Keys to set, and the config with them."""

    description: str
    config: Config


class MemoryNeed(NamedTuple):
    """Bytes that the plan expects on the fullest rank, and how much of it for activations."""

    held: int
    activations: int


@contextmanager
def explain_out_of_memory(config: Config, ranks: RankInfo) -> Iterator[None]:
    """Say in one line that memory ran out meanwhile, and which change would help.

    Costs nothing until it does; planning then takes seconds, or minutes for large models.

    Raises:
        UserError: on the rank whose GPU is full; it is to end the others.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            out_of_memory_message(config, ranks, gpu_memory_usage(), str(error))
        ) from error


def gpu_memory_usage() -> tuple[int, int] | None:
    """Bytes that this process had at most on its GPU, and what the GPU has."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]


def out_of_memory_message(
    config: Config, ranks: RankInfo, used: tuple[int, int] | None, told: str
) -> str:
    """The line: who, how much, what was to be expected, what to change."""
    who = rank_name(ranks.rank, config.parallel.data or 1, config.parallel.domain)
    much = (
        told.partition(". ")[0]
        if used is None
        else f"{decimal(used[0])} of {decimal(used[1])} in use"
    )
    planned = planned_memory(config)
    if planned is None:
        return (
            f"{who}: out of memory ({much}), and the plan can't say what this run needs. Raise "
            "parallel.domain, or set trainer.autocast=bfloat16."
        )
    limit = int(MARGIN * (planned.held if used is None else min(planned.held, used[1])))
    return (
        f"{who}: out of memory ({much}); the plan expects {decimal(planned.held)}, of it "
        f"{decimal(planned.activations)} activations. {smallest_change_message(config, limit)}"
    )


def smallest_change_message(config: Config, limit: int) -> str:
    """The first change after which the plan expects no more than `limit` bytes."""
    for words, changed in candidate_changes(config):
        found = planned_memory(changed)
        if found is not None and found.held <= limit:
            return f"The smallest change that fits: {words} ({decimal(found.held)})."
    return (
        f"No key alone brings it to {decimal(limit)}, nor do all of them: lower "
        "data.batch_size, or choose a smaller model."
    )


def candidate_changes(config: Config) -> Iterator[Change]:
    """From those that cost time alone to those that need more GPUs, each alone; then together."""
    alone = [
        change for change in map(lambda set_: set_(config), SINGLE_CHANGES) if change is not None
    ]
    yield from alone
    yield from with_more_bands(Change("", config))
    together = config
    for saving in SINGLE_CHANGES:
        made = saving(together)
        together = together if made is None else made.config
    if alone:
        words = " ".join(change.description for change in alone)
        yield Change(words, together)
        yield from with_more_bands(Change(f"{words} ", together))


def with_more_bands(change: Change) -> Iterator[Change]:
    """The same with more bands, twice as many each time."""
    parallel = change.config.parallel
    domain, most = 2 * parallel.domain, most_bands(change.config)
    while domain <= most:
        ranks = domain * parallel.pipeline * (parallel.data or 1)
        words = f"{change.description}parallel.domain={domain}, which makes {ranks} ranks"
        yield Change(words, replace(change.config, parallel=replace(parallel, domain=domain)))
        domain *= 2


def most_bands(config: Config) -> int:
    """Domain ranks to try at most: those that have a row each where the model has the fewest."""
    try:
        rows, _ = expected_grid(config.data)
    except UserError:
        return MAX_DOMAIN_RANKS
    return min(MAX_DOMAIN_RANKS, config.model.coarsest_rows(rows))


def recompute_steps(config: Config) -> Change | None:
    """Keep one forecast step of a rollout at a time."""
    if config.trainer.checkpoint_activations or config.trainer.longest_rollout == 1:
        return None
    trainer = replace(config.trainer, checkpoint_activations=True)
    return Change("trainer.checkpoint_activations=true", replace(config, trainer=trainer))


def recompute_blocks(config: Config) -> Change | None:
    """Keep what goes into the model's blocks alone."""
    model: Any = config.model
    if getattr(model, "activation_checkpointing", True):
        return None
    try:
        model = replace(model, activation_checkpointing=True)
    except UserError:  # not with this model's other keys
        return None
    return Change("model.activation_checkpointing=true", replace(config, model=model))


def compute_in_half(config: Config) -> Change | None:
    """Keep activations of half the size."""
    if config.trainer.autocast is not None or config.trainer.dtype != "float32":
        return None
    trainer = replace(config.trainer, autocast="bfloat16")
    return Change("trainer.autocast=bfloat16", replace(config, trainer=trainer))


SINGLE_CHANGES: Sequence[Callable[[Config], Change | None]] = (
    recompute_steps,
    recompute_blocks,
    compute_in_half,
)


def planned_memory(config: Config) -> MemoryNeed | None:
    """What the plan expects; None if it can't tell, or the model can't be sharded so."""
    module, name = PLAN_FUNCTION
    try:
        plan = getattr(importlib.import_module(module), name)(config)
    except UserError:
        return None
    mode = config.parallel.data_mode
    budgets = [b for b in plan.budgets if b.mode == mode] or list(plan.budgets)
    needs = [memory_need_of(training_memory(budget.held, config)) for budget in budgets]
    return max(needs, default=None)


def memory_need_of(held: Mapping[str, int]) -> MemoryNeed:
    """What a rank needs, from its items."""
    return MemoryNeed(sum(held.values()), held["activations"])


def training_memory(held: Mapping[str, int], config: Config) -> dict[str, int]:
    """What a rank holds by item, from what the plan says of one forecast step in full precision.

    A rollout keeps the activations of all its steps; in bfloat16 they take half, and a copy of the
    weights comes on top.
    """
    trainer = config.trainer
    steps = 1 if trainer.checkpoint_activations else trainer.longest_rollout
    activations = steps * held["activations"]
    found = {**held, "activations": activations}
    if trainer.autocast is not None:
        found["activations"] = activations // 2
        found["weights in bfloat16"] = held["weights"] // 2
    if config.optimizer.ema is not None:
        found["averages"] = held["weights"]
    return found
