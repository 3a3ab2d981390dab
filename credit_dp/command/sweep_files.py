"""The files that the sweep commands write, each whole or not at all."""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from credit_dp.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png(figure: "Figure") -> bytes:
    """The figure as a PNG file's content."""
    from credit_dp.evaluation.figure_style import figure_style  # matplotlib: not for --help

    held = io.BytesIO()
    with figure_style():
        figure.savefig(held, format="png")
    return held.getvalue()


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files into a folder, over earlier ones of these names; where they are.

    Raises:
        UserError: the folder can't be made or written to.
    """
    written = []
    for name, content in files.items():
        path = folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise UserError(
                f"out: cannot write {path} ({error.strerror}). Give another folder, or free some "
                "space."
            ) from error
        written.append(path)
    return written
