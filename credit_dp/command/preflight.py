"""What can be refused before any rank starts because several keys do not fit together."""

from credit_dp import checks
from credit_dp.config import Config, DataConfig
from credit_dp.errors import UserError


def check_plan(config: Config) -> None:
    """Refuse a training run that is bound to fail, without torch and without opening any data.

    Raises:
        UserError: more ranks than rows, a checkpoint that is not there, leads between steps, or a
            climate that starts at no date.
    """
    if config.data.name == "quickstart":
        checks.date("data.quickstart.start", config.data.quickstart.start)
    check_rows(config)
    checks.leads(config.trainer.evaluate_hours, config.data.step_hours)
    if config.resume not in (None, "auto"):
        checks.checkpoint_path("resume", str(config.resume))


def check_rows(config: Config) -> None:
    """Refuse more bands than the model's coarsest level has rows, if the grid is known yet."""
    domain = config.parallel.domain
    rows = known_rows(config.data) if domain > 1 else None
    if rows is None:
        return
    coarsest = config.model.coarsest_rows(rows)
    if domain > coarsest:
        raise UserError(
            f"parallel.domain: the model's coarsest level has {coarsest} "
            f"of the grid's {rows} rows, too few for {domain} ranks. "
            f"Lower parallel.domain to {coarsest}{' or less' if coarsest > 1 else ''}."
        )


def known_rows(data: DataConfig) -> int | None:
    """Rows of the grid; None if only the store can tell."""
    if data.grid is not None:
        return int(data.grid.partition("x")[0])
    if data.name != "quickstart":
        return None
    from credit_dp.data.quickstart.spans import resolve_grid  # numpy: not for --help

    return resolve_grid(data.quickstart, None)[0]
