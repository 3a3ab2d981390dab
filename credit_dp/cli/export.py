"""The checkpoint command: `credit-dp checkpoint export RUN` makes one plain file of a model."""

import sys
from collections.abc import Sequence
from pathlib import Path

from credit_dp import checks
from credit_dp.cli.arguments import OneLineParser, parse_arguments
from credit_dp.errors import UserError

HELP = """\
{program} export RUN_OR_CHECKPOINT [--output FILE]: makes one plain file of a trained model.

RUN_OR_CHECKPOINT is the folder of a run, whose newest checkpoint is taken, or of one checkpoint, of
any mesh. Needs no ranks, no GPU and no data.

  --output FILE   the file; model.safetensors in the run's folder unless given
  --help, -h      this text

The file holds the weights by name, the static fields, and as text all that its use needs: the
config, the order and units of the variables, the grid, the step and the statistics. A model card is
written beside it. In Python, credit_dp.load(FILE) is the model.

Exit code: 0 if both are written, 2 if not.
"""


def checkpoint(arguments: Sequence[str], program: str) -> int:
    """Export a checkpoint; the exit code.

    Raises:
        UserError: there is none, it can't be read, or the file can't be written.
    """
    using = OneLineParser(add_help=False, allow_abbrev=False)
    using.add_argument("words", nargs="*")
    using.add_argument("--output")
    using.add_argument("--help", "-h", action="store_true")
    args = parse_arguments(using, arguments)
    if args.help:
        sys.stdout.write(HELP.format(program=program))
        return 0
    if len(args.words) != 2 or args.words[0] != "export":
        raise UserError(
            f"{program}: needs `export` and the folder of a run or of a checkpoint, got "
            f"{' '.join(args.words) or 'nothing'}."
        )
    for path in export(args.words[1], args.output):
        sys.stdout.write(f"{path}\n")
    return 0


def export(source: str, output: str | None) -> tuple[Path, Path]:
    """Write the file and its card; where they are.

    Raises:
        UserError: there is no checkpoint, it can't be read, or nothing can be written there.
    """
    # Here, for torch takes seconds: not for --help.
    from credit_dp.export.card import build_card, card_path
    from credit_dp.export.file import checkpoint_at, read_checkpoint, write_bytes, write_safetensors
    from credit_dp.training.checkpoint_files import run_folder_of

    checkpoint = checkpoint_at(source)
    run = run_folder_of(checkpoint)
    path = output_path(output) if output else run / "model.safetensors"
    trained = read_checkpoint(checkpoint)
    card, text = card_path(path), build_card(trained, path, run)
    for file in (path, card):
        check_output_path(file)
    write_safetensors(trained, path)
    write_bytes(card, text.encode())
    return path, card


def output_path(output: str) -> Path:
    """Where the user wants the file, with `~` replaced."""
    return checks.expand_home("--output", output)


def check_output_path(path: Path) -> None:
    """Refuse to replace what is no file, or to add to a checkpoint, which would be damaged by it.

    Raises:
        UserError: it is such a place.
    """
    from credit_dp.training.checkpoint_files import METADATA_FILE

    try:
        if path.exists() and not path.is_file():
            raise UserError(
                f"--output: needs the name of a file, but {path} is a folder or a device."
            )
        if (path.parent / METADATA_FILE).exists():
            raise UserError(f"--output: {path} would be part of a checkpoint. Give another folder.")
    except OSError as error:
        raise UserError(f"--output: {path} can't be written ({error.strerror}).") from error
