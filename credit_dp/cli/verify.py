"""The verify and doctor commands: is the sharded model the model, here?"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from credit_dp.cli.compose import check_rows
from credit_dp.cli.output import format_table
from credit_dp.cli.train import read_config_arguments
from credit_dp.config import Config
from credit_dp.distributed import launch
from credit_dp.errors import UserError

if TYPE_CHECKING:
    from credit_dp.domain_parallel.verify import VerifyReport


VERIFY_HELP = """\
{program} KEY=VALUE ...: is the sharded model the model?

Runs the configured model sharded and unsharded, forward and backward, on the same random numbers in
float64, and compares outputs, input gradient, the gradient of every parameter, and buffers. The
ranks are threads of this process. The grid is the quickstart's, 32x64, or data.grid:
  model=unet parallel.domain=3 data.grid=45x90

  --json        all errors as JSON
  --help, -h    this text

Exit code: 0 if all errors are at most 1e-11, 1 if not, 2 if the keys are wrong.
"""

BATCH = 2  # samples: one could hide what is folded into the batch
SHOWN = 5  # parameters in the table


def verify(arguments: Sequence[str], program: str) -> int:
    """Compare the configured model on some ranks with itself on one; the exit code.

    Raises:
        UserError: the config is not as needed, or the model can't be sharded so.
    """
    question = read_config_arguments(arguments, program, VERIFY_HELP)
    if question is None:
        return 0
    report = verify_model(question.config)
    show = as_json if question.json else as_text
    sys.stdout.write(show(report, question.config))
    return 0 if report.passed else 1


def verify_model(config: Config) -> "VerifyReport":
    """Build the model on a small grid, and compare.

    Raises:
        UserError: as above.
    """
    ranks = config.parallel.domain
    if ranks == 1:
        raise UserError(
            "parallel.domain: one rank is the plain model, nothing to verify. "
            "Give it 2 or more, like parallel.domain=3."
        )
    check_rows(config)
    import torch  # takes seconds: not for --help

    from credit_dp.data.channel_preview import expected_channels, quickstart_grid
    from credit_dp.domain_parallel.build import declared_converters
    from credit_dp.domain_parallel.verify import verify_domain_parallel
    from credit_dp.models import build_model
    from credit_dp.models.blocks import draw_stochastic_depths

    grid = quickstart_grid(config.data)
    fields = expected_channels(config.data).fields(config.model.frames)
    torch.manual_seed(config.seed)
    model = build_model(config.model, fields, grid)
    draw_stochastic_depths(model, config.seed, 0, range(BATCH))
    shape, rules = (BATCH, fields.inputs, *grid), declared_converters(model)
    return verify_domain_parallel(
        lambda: model, shape, ranks, custom_converters=rules, seed=config.seed
    )


def as_text(report: "VerifyReport", config: Config) -> str:
    """Outputs, inputs, the worst parameters, and a verdict."""
    shape = " x ".join(map(str, report.input_shapes[0]))
    first = len(report.outputs) + len(report.input_gradients)
    listed = list(report.errors.items())
    rest = sorted(listed[first:], key=lambda item: -item[1])
    rows = [(name, f"{error:.1e}") for name, error in (*listed[:first], *rest[:SHOWN])]
    name, error = report.worst
    verdict = "ok" if report.passed else "FAILED"
    lines = [
        f"{config.model.name} on {report.ranks} ranks against one, input {shape}, float64",
        *format_table(("", "relative error"), rows, left=1),
        *([f"and {len(rest) - SHOWN} others that are no larger"] if len(rest) > SHOWN else []),
        f"{verdict}: the largest error is {error:.1e} ({name}), {report.tolerance:.0e} passes",
    ]
    return "\n".join([*lines, ""])


def as_json(report: "VerifyReport", config: Config) -> str:
    """Errors by kind and name, the worst one, and the verdict."""
    name, error = report.worst
    content = {
        "model": config.model.name,
        **vars(report),
        "worst": {"name": name, "error": error},
        "passed": report.passed,
    }
    return json.dumps(json_safe(content), indent=2) + "\n"


def json_safe(content: Any) -> Any:
    """JSON has no NaN or infinity: these become text."""
    if isinstance(content, Mapping):
        return {key: json_safe(value) for key, value in content.items()}
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content


DOCTOR_HELP = """\
{program} KEY=VALUE ...: checks that sharding works on this machine, within a minute.

Prints versions, devices, back end and threads, and compares an exchange of rows, a reduction and
one step of a sharded U-Net with the unsharded answers, and what the data and pipeline axes send,
on the ranks that these keys ask for:
  parallel.domain=4 parallel.data=2 parallel.pipeline=2 parallel.threads=1 device=cpu

  --json        the report as JSON
  --help, -h    this text

Exit code: 0 if all checks passed, 1 if one failed, 2 if the keys are wrong.
"""


def doctor(arguments: Sequence[str], program: str) -> int:
    """Check the machine; the exit code.

    Raises:
        UserError: anything that is wrong before the first process starts.
    """
    question = read_config_arguments(arguments, program, DOCTOR_HELP)
    if question is None:
        return 0
    function = "check_json" if question.json else "check"
    return launch(question.config, f"credit_dp.costs.sharding_checks:{function}")
