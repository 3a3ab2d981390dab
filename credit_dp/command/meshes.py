"""Which meshes of so many ranks or fewer a model can use, and what their ranks hold and send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from torch import nn

from credit_dp.command.mesh_budget import RankBudget, model_budget
from credit_dp.config import Config
from credit_dp.domain_parallel.build import declared_converters
from credit_dp.domain_parallel.report import plan_report
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.report import PlanReport

POWERS = 7  # domains of 1, 2, 4 ... 64 ranks, and of as many as the model allows


@final
@dataclass(frozen=True)
class MeshLine:
    """A mesh of `data` x `domain` ranks, each data rank with one sample at a time.

    Attributes:
        rows: of the smallest band at the coarsest level.
        imbalance: rows of the largest band over the mean, at the level where that is most.
        budgets: of its fullest rank, with ddp and fsdp2.
    """

    domain: int
    data: int
    rows: int
    imbalance: float
    budgets: tuple[RankBudget, ...]


@final
@dataclass(frozen=True)
class Meshes:
    """All lines, and why the domain can't be larger than that of the last one."""

    up_to: int
    lines: tuple[MeshLine, ...]
    refused: str


def find_meshes(model: nn.Module, shape: tuple[int, ...], config: Config, up_to: int) -> Meshes:
    """Plan a sample on domains of growing size, with as many data ranks as there are ranks for.

    Args:
        model: not converted; left as it is.
        shape: of a sample of the whole globe, `(1, C, H, W)`.
        up_to: ranks that there are.

    Raises:
        UserError: the config has a mesh already.
    """
    _check(config, up_to)
    most = config.model.coarsest_rows(shape[-2])
    lines: list[MeshLine] = []
    for domain in domain_sizes(min(most, up_to)):
        report = _report(model, shape, domain)
        if report.problems:
            return Meshes(up_to, tuple(lines), report.problems[0])
        lines.append(_line(model, report, config, up_to // domain))
    refused = ""
    if most < up_to:
        refused = next(iter(_report(model, shape, most + 1).problems), "")
    return Meshes(up_to, tuple(lines), refused)


def domain_sizes(most: int, powers: int = POWERS) -> Iterator[int]:
    """Numbers of ranks to compare: so many powers of two, and as many as there can be."""
    yield from (2**power for power in range(powers) if 2**power < most)
    yield most


def _report(model: nn.Module, shape: tuple[int, ...], domain: int) -> PlanReport:
    return plan_report(model, shape, domain, custom_converters=declared_converters(model))


def _line(model: nn.Module, report: PlanReport, config: Config, data: int) -> MeshLine:
    parallel = replace(config.parallel, domain=report.ranks, data=data)
    trainer = replace(config.trainer, accumulate=1)
    of_mesh = replace(config, parallel=parallel, trainer=trainer)
    coarsest = report.levels[-1]
    return MeshLine(
        report.ranks,
        data,
        min(coarsest.bands),
        max(level.imbalance for level in report.levels),
        tuple(model_budget(model, report, of_mesh)),
    )


def _check(config: Config, up_to: int) -> None:
    parallel = config.parallel
    if up_to < 1:
        raise UserError(f"--up-to: needs at least 1 rank, got {up_to}.")
    for key in ("domain", "pipeline"):
        if getattr(parallel, key) > 1:
            raise UserError(
                f"--up-to: tries meshes of data x domain ranks, got parallel.{key}="
                f"{getattr(parallel, key)}. Leave it out."
            )
    if parallel.data is not None:
        raise UserError(
            f"--up-to: gives every mesh all the data ranks it can have, got parallel.data="
            f"{parallel.data}. Leave it out."
        )
