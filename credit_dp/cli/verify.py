"""The verify and doctor commands: check that sharding gives the same results as one rank."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from credit_dp.cli.compose import check_rows
from credit_dp.cli.output import format_table
from credit_dp.cli.train import read_config_arguments
from credit_dp.config import Config
from credit_dp.distributed.launch import launch
from credit_dp.errors import UserError
from credit_dp.fields import GridShape

if TYPE_CHECKING:
    from credit_dp.domain_parallel.verify import VerifyReport


VERIFY_HELP = """\
{program} KEY=VALUE ...: compares the sharded model with the unsharded one.

Runs the configured model sharded and unsharded, forward and backward, on the same random input in
float64, and compares outputs, input gradient, the gradient of every parameter, and buffers. The
ranks are threads of this process. The grid has the quickstart's size, 32x64, or data.grid's; it is
a region if that of data.store is one:
  model=unet parallel.domain=3 data.grid=45x90

  --json        all errors as JSON
  --help, -h    this text

Exit code: 0 if all errors are at most 1e-11, 1 if not, 2 if the keys are wrong.
"""

BATCH = 2  # samples; with one, a dim folded into the batch by mistake would not show
PARAMETERS_SHOWN = 5  # in the table


def verify(arguments: Sequence[str], program: str) -> int:
    """Compare the configured model on several ranks with itself on one; return the exit code."""
    parsed = read_config_arguments(arguments, program, VERIFY_HELP)
    if parsed is None:
        return 0
    report = verify_model(parsed.config)
    render = as_json if parsed.json else as_text
    sys.stdout.write(render(report, parsed.config))
    return 0 if report.passed else 1


def verify_model(config: Config) -> "VerifyReport":
    """Build the model on a small grid, and compare it sharded and unsharded."""
    ranks = config.parallel.domain
    if ranks == 1:
        raise UserError(
            "parallel.domain: with one rank the model is not sharded. "
            "Give it 2 or more, like parallel.domain=3."
        )
    check_rows(config)
    import torch  # takes seconds: not for --help

    from credit_dp.data.setup import expected_data, quickstart_grid
    from credit_dp.domain_parallel.verify import verify_domain_parallel
    from credit_dp.models import build_model
    from credit_dp.models.blocks import draw_noise, draw_stochastic_depths
    from credit_dp.training.model_parts import check_planned_model

    channels, own = expected_data(config.data)
    # Small, but a region if the store is one.
    grid = GridShape(quickstart_grid(config.data), own.is_global, own.is_periodic)
    fields = channels.fields(config.model.frames, config.model.denoises)
    torch.manual_seed(config.seed)
    model = build_model(config.model, fields, grid)
    check_planned_model(model, config.model, fields, grid)
    # The draws depend on seed and sample, so sharded and unsharded model drop the same branches,
    # and have the same noise.
    draw_stochastic_depths(model, config.seed, 0, range(BATCH))
    draw_noise(model, [(config.seed, 0, sample) for sample in range(BATCH)])
    shape = (BATCH, fields.inputs, *grid)
    return verify_domain_parallel(
        lambda: model,
        shape,
        ranks,
        whole_ops=config.parallel.whole_ops,
        seed=config.seed,
    )


def as_text(report: "VerifyReport", config: Config) -> str:
    """Return errors of outputs, inputs and the worst parameters, and the verdict."""
    shape = " x ".join(map(str, report.input_shapes[0]))
    shown_always = len(report.outputs) + len(report.input_gradients)
    errors = list(report.errors.items())
    parameters = sorted(errors[shown_always:], key=lambda item: -item[1])
    rows = [
        (name, f"{error:.1e}")
        for name, error in (*errors[:shown_always], *parameters[:PARAMETERS_SHOWN])
    ]
    name, error = report.worst
    verdict = "ok" if report.passed else "FAILED"
    lines = [
        f"{config.model.name} on {report.ranks} ranks against one, input {shape}, float64",
        *format_table(("", "relative error"), rows, left=1),
        *(
            [f"and {len(parameters) - PARAMETERS_SHOWN} others with smaller or equal errors"]
            if len(parameters) > PARAMETERS_SHOWN
            else []
        ),
        f"{verdict}: the largest error is {error:.1e} ({name}), {report.tolerance:.0e} passes",
    ]
    return "\n".join([*lines, ""])


def as_json(report: "VerifyReport", config: Config) -> str:
    """Return errors by kind and name, the worst one, and the verdict, as JSON."""
    name, error = report.worst
    content = {
        "model": config.model.name,
        **vars(report),
        "worst": {"name": name, "error": error},
        "passed": report.passed,
    }
    return json.dumps(json_safe(content), indent=2) + "\n"


def json_safe(content: Any) -> Any:
    """Return the content with NaN and infinity as texts, for JSON has neither."""
    if isinstance(content, Mapping):
        return {key: json_safe(value) for key, value in content.items()}
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content


DOCTOR_HELP = """\
{program} KEY=VALUE ...: checks that sharding works on this machine, within a minute.

Prints versions, devices, backend and threads. Compares an exchange of rows, a reduction, one step
of a sharded U-Net, and messages on the axes data, ensemble and pipeline with known results, on the
ranks that these keys set:
  parallel.domain=4 parallel.data=2 parallel.pipeline=2 parallel.threads=1 device=cpu
  parallel.domain=2 parallel.ensemble=2 loss=crps trainer.members=2 model.noise=32

  --json        the report as JSON
  --help, -h    this text

Exit code: 0 if all checks passed, 1 if one failed, 2 if the keys are wrong.
"""


def doctor(arguments: Sequence[str], program: str) -> int:
    """Check this machine; return the exit code.

    Raises:
        UserError: something is wrong, and no process has been started.
    """
    parsed = read_config_arguments(arguments, program, DOCTOR_HELP)
    if parsed is None:
        return 0
    if parsed.json:
        return launch(parsed.config, "credit_dp.costs.sharding_checks:check_json")
    return launch(parsed.config, "credit_dp.costs.sharding_checks:check")
