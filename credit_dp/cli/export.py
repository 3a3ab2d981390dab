"""The checkpoint command: `credit-dp checkpoint export RUN` writes a trained model to one file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from credit_dp import checks
from credit_dp.cli.arguments import OneLineParser, parse_arguments
from credit_dp.errors import UserError

HELP = """\
{program} export RUN_OR_CHECKPOINT [--output FILE]: writes a trained model to one plain file.

RUN_OR_CHECKPOINT is the folder of a run, whose newest checkpoint is used, or of one checkpoint, of
any mesh. Needs no ranks, no GPU and no data.

  --output FILE   the file; by default model.safetensors in the run's folder
  --help, -h      this text

The file holds the weights by name, the static fields, and, as text, everything else that a forecast
needs: the config, the order and units of the variables, the grid, the step and the statistics. A
model card is written next to it. In Python, credit_dp.load(FILE) returns the model.

Exit code: 0 if both are written, 2 if not.
"""


def checkpoint(arguments: Sequence[str], program: str) -> int:
    """Export a checkpoint; return the exit code.

    Raises:
        UserError: there is no checkpoint, it can't be read, or the file can't be written.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--output")
    parser.add_argument("--help", "-h", action="store_true")
    args = parse_arguments(parser, arguments)
    if args.help:
        sys.stdout.write(HELP.format(program=program))
        return 0
    if len(args.words) != 2 or args.words[0] != "export":
        raise UserError(
            f"{program}: needs `export` and the folder of a run or of a checkpoint, got "
            f"{' '.join(args.words) or 'nothing'}. The file to write is given by --output FILE."
        )
    for path in export(args.words[1], args.output):
        sys.stdout.write(f"{path}\n")
    return 0


def export(source: str, output: str | None) -> tuple[Path, Path]:
    """Write the model and its card; return their paths."""
    # Imported here because torch takes seconds, which --help does not need.
    from credit_dp.export.file import (
        build_card,
        card_path,
        checkpoint_at,
        read_checkpoint,
        write_bytes,
        write_safetensors,
    )
    from credit_dp.training.checkpoint_files import run_folder_of

    checkpoint_folder = checkpoint_at(source)
    run_folder = run_folder_of(checkpoint_folder)
    path = run_folder / "model.safetensors"
    if output:
        path = checks.expand_home("--output", output)
    trained = read_checkpoint(checkpoint_folder)
    card_file = card_path(path)
    card_text = build_card(trained, path, run_folder)
    # Both are checked before either is written.
    for output_file in (path, card_file):
        check_output_path(output_file)
    write_safetensors(trained, path)
    write_bytes(card_file, card_text.encode())
    return path, card_file


def check_output_path(path: Path) -> None:
    """Refuse to replace a folder or device, or to write into a checkpoint's folder.

    A file in a checkpoint's folder would damage the checkpoint.

    Raises:
        UserError: the path is refused.
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
