"""A whole training step: sharded against one process, and the framework against the bare model.

`python benchmarks/training_step.py`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from pinned import DEVICE, RANKS, TWO, Contestants, Mesh, team
from side_by_side import Entry, Row, ratio, times
from table import show
from torch import nn

from credit_dp.command.compose import Composer
from credit_dp.config import Config
from credit_dp.data.prepare import prepare
from credit_dp.domain_parallel import DomainParallelManager
from credit_dp.training.build import build_training

MODELS = ("unet", "pangu", "crossformer")
SMALL = ("experiment=fast", "data.grid=64x128", "data.batch_size=1")
KEYS = ("trainer.steps=1000000", "trainer.checkpoint_every=1000000")
ALONE = Mesh(1, 1)


def contestants(manager: DomainParallelManager, config: Config) -> Contestants:
    """What a step is made of.

    `framework`: everything, data included; `update`: without data; `model`: forward and backward
    alone; `plain`: a loop by hand around the model, as a script would have it.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else "cpu"
    training = build_training(config, prepare(config.data), manager, torch.device(device))
    trainer = training.trainer
    batch = next(iter(training.loader))
    training.loader.__enter__()
    steps = trainer.steps(training.loader)
    model = training.forecast.model
    if not isinstance(model, nn.Module):
        raise TypeError(f"the benchmark needs a module, got {type(model).__name__}")
    x = torch.cat([batch.now, batch.forcing, batch.static], dim=1)
    target = torch.zeros_like(batch.target)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)

    def forward_and_backward() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward(target)

    def plain() -> None:
        optimiser.zero_grad(set_to_none=True)
        (model(x) - target).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    return {
        "framework": lambda: next(steps),
        "update": lambda: trainer.update(batch),
        "model": forward_and_backward,
        "plain": plain,
    }


def configured(keys: Sequence[str]) -> Config:
    """A config of one sample at a time, whose data are ready."""
    config = Composer("train").config([*keys, *KEYS])
    prepare(config.data)
    return replace(config, parallel=replace(config.parallel, data=1))


def sharded_row(name: str, keys: Sequence[str], rounds: int) -> Row:
    """Two ranks of one thread against one process of two."""
    config = configured([f"model={name}", *keys])
    with (
        team(contestants, config, mesh=Mesh(1, 1, threads=RANKS)) as whole,
        team(contestants, config) as ranks,
    ):
        found = times(
            [
                Entry("first", whole, "update"),
                Entry("sharded", ranks, "update"),
                Entry("second", whole, "update"),
            ],
            rounds,
        )
    against = ratio(found["sharded"], found["first"], found["second"])
    return Row(
        f"training step, {name} at {config.data.grid or '32x64'}: speed of {RANKS} ranks",
        f"one process x {RANKS} threads",
        1 / against.best,
        1.0,
        1 / against.typical,
        against.spread,
        at_least=True,
        note=f"{1e3 * min(found['sharded']):.0f} ms",
    )


def framework_rows(rounds: int) -> list[Row]:
    """All of a step against the model's part of it, and one rank against a plain loop."""
    config = configured(["model=unet"])
    made = []
    for mesh in (ALONE, TWO):
        with team(contestants, config, mesh=mesh) as ranks:
            entries = [
                Entry(label, ranks, name)
                for label, name in (
                    ("first", "model"),
                    ("framework", "framework"),
                    ("plain first", "plain"),
                    ("update", "update"),
                    ("plain second", "plain"),
                    ("second", "model"),
                )
            ]
            found = times(entries, rounds)
        against = ratio(found["framework"], found["first"], found["second"])
        made.append(
            Row(
                f"training step of the whole framework, unet, domain {mesh.domain}",
                "forward and backward of the model",
                against.best,
                1.10,
                against.typical,
                against.spread,
                note=f"{1e3 * min(found['framework']):.0f} ms",
            )
        )
        if mesh is ALONE:
            against = ratio(found["update"], found["plain first"], found["plain second"])
            made.append(
                Row(
                    "parallel.domain=1, unet",
                    "the plain model in a plain loop",
                    against.best,
                    1.0,
                    against.typical,
                    against.spread,
                )
            )
    return made


def rows(rounds: int) -> list[Row]:
    """All figures of this file."""
    small = [sharded_row(f"{name}_small", SMALL, rounds) for name in MODELS]
    tiny = [sharded_row(name, (), rounds) for name in MODELS]
    return [*small, *tiny, *framework_rows(rounds)]


if __name__ == "__main__":
    show(rows(int(sys.argv[1]) if sys.argv[1:] else 20))
