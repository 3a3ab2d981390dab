"""The command `credit-dp import credit`.

It reads a config of miles-credit, writes an experiment with the same data, model and training, and
prints a line for each key that has no counterpart. The keys are translated in `miles_credit/`; here
the files are checked and written.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from credit_dp import checks
from credit_dp.cli.arguments import OneLineParser, parse_arguments, run_subcommand
from credit_dp.cli.compose import Composer
from credit_dp.errors import UserError
from credit_dp.files import write_text_atomic
from credit_dp.miles_credit.foreign_config import Experiment, ForeignConfig
from credit_dp.miles_credit.translation import read_credit
from credit_dp.plugins import PLUGINS_VARIABLE, one_line_message

HELP = """\
credit-dp import COMMAND: continues here what was set up with another package.

  credit-dp import credit CONFIG.yml [CHECKPOINT]   a config, and a model, of miles-credit

`credit-dp import COMMAND --help` says more.
"""

WORDS = "CONFIG.yml [CHECKPOINT]"
COMMAND_HELP = """\
{program} {words}: writes an experiment from a config of miles-credit.

Their CrossFormer becomes the one of this package, with new weights. With CHECKPOINT (a file, or the
folder that has checkpoint.pt) the model stays theirs: a plug-in file builds it with the installed
package miles-credit, and starts it from these weights. So do all other models of theirs.

  --name NAME       of the experiment; by default that of the config file
  --output FOLDER   writes FOLDER/experiment/NAME.yaml; by default in ./conf, where
                    `experiment=NAME` of every command finds it
  --help, -h        this text

Prints a line for each key that has no counterpart, or another meaning here. The lines are also at
the top of the experiment. Code and classes that the config names are never imported.

Exit code: 0 if the experiment is written, 2 if not.
"""


def check_composes(experiment: Experiment, name: str) -> None:
    """Refuse an experiment that this version can't compose, before anything is written.

    A plug-in's model is left out: its file does not exist yet.
    """
    checks.no_interpolation("experiment", experiment.keys)
    checked = experiment
    if experiment.plugin is not None:
        keys = {k: v for k, v in experiment.keys.items() if not k.startswith("model.")}
        choices = {group: c for group, c in experiment.choices.items() if group != "model"}
        checked = Experiment(choices, keys)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "experiment" / f"{name}.yaml"
        path.parent.mkdir()
        path.write_text(checked.text([]), encoding="utf-8")
        Composer("train", folder).compose_config([f"experiment={name}"])


def import_credit(arguments: Sequence[str], program: str) -> int:
    """Write the experiment of a config of miles-credit, and print its lines; return the exit code.

    Raises:
        UserError: the config can't be read or used, or the files exist or can't be written.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--name")
    parser.add_argument("--output", default="conf")
    parser.add_argument("--help", "-h", action="store_true")
    args = parse_arguments(parser, arguments)
    if args.help:
        sys.stdout.write(COMMAND_HELP.format(program=program, words=WORDS))
        return 0
    if not 1 <= len(args.files) <= 2:
        raise UserError(f"{program}: needs {WORDS}, got {' '.join(args.files) or 'none'}.")
    config = ForeignConfig.load(checks.expand_home(program, args.files[0]))
    name = args.name or re.sub(r"[^A-Za-z0-9_-]", "_", config.path.stem)
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"--name: needs letters, digits, _ and -, got {name!r}.")
    checkpoint = args.files[1] if len(args.files) > 1 else None
    try:
        experiment, lines = read_credit(config, name, checkpoint)
    # What a text or a table in the place of a number raises, where it has no message of its own.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{config.path}: a value has not the form that miles-credit documents "
            f"({type(error).__name__}: {one_line_message(error)})."
        ) from error
    check_composes(experiment, name)
    folder = checks.expand_home("--output", args.output) / "experiment"
    written = write_experiment(experiment, folder, name, lines)
    for line in lines:
        sys.stdout.write(f"{line}\n")
    for path in written:
        sys.stdout.write(f"wrote {path}\n")
    variable = f"{PLUGINS_VARIABLE}={written[-2]} " if experiment.plugin is not None else ""
    place = "" if args.output == "conf" else f" --config-dir {args.output}"
    sys.stdout.write(f"train it: {variable}credit-dp train{place} experiment={name}\n")
    return 0


def write_experiment(
    experiment: Experiment, folder: Path, name: str, lines: Sequence[str]
) -> list[Path]:
    """Write weights, plug-in and experiment, each complete or not at all; return their paths.

    The experiment comes last: where it is, everything that it needs is, too.

    Raises:
        UserError: a file exists already, or can't be written.
    """
    weights, plugin, config = (folder / f"{name}{end}" for end in (".safetensors", ".py", ".yaml"))
    writes: list[tuple[Path, Callable[[Path], None]]] = []
    if experiment.write_weights is not None:
        writes.append((weights, experiment.write_weights))
    if experiment.plugin is not None:
        source = experiment.plugin
        writes.append((plugin, lambda path: write_text_atomic(path, source)))
    head = ["From a config of miles-credit, by `credit-dp import`. Of its keys:", *lines]
    writes.append((config, lambda path: write_text_atomic(path, experiment.text(head))))
    for path, _ in writes:
        if path.exists():
            raise UserError(f"--name: {path} exists. Remove it, or give another --name.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, write in writes:
            write(path)
    except OSError as error:
        raise UserError(f"--output: {folder} can't be written to ({error.strerror}).") from error
    return [path for path, _ in writes]


def imports(arguments: Sequence[str], program: str) -> int:
    """Run the import command named by the first argument; return the exit code."""
    return run_subcommand({"credit": import_credit}, arguments, program, HELP)
