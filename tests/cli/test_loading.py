"""The line that a run shows on a terminal before anything heavy is imported."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from credit_dp.cli import say_loading
from tests.ranks import TIMEOUT

ROOT = Path(__file__).parents[2]

LINE = "loading, which takes some seconds\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(*arguments: str, screen: io.StringIO | None = None) -> str:
    screen = screen or Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        say_loading(arguments)
    return screen.getvalue()


def test_a_start_says_that_it_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    for started in ([], ["model=unet"], ["-m", "seed=1,2"], ["--check"], ["-cd", "folder"]):
        assert said(*started) == LINE, started
    for shown in (["--help"], ["-h"], ["--cfg", "job"], ["--cfg=job"], ["-sc", "query=bash"]):
        assert said("model=unet", *shown) == "", shown
    assert said(screen=io.StringIO()) == ""  # a file or a pipe
    for variable in ("RANK", "SLURM_PROCID"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert said() == "", variable
            patch.setenv(variable, "0")
            assert said() == LINE, variable


@pytest.mark.slow
@pytest.mark.parametrize("program", [["train.py"], ["-m", "credit_dp", "train"]])
def test_it_is_the_first_line_on_a_terminal(program: list[str]) -> None:
    """Not on stdout, and before a mistake is found."""
    terminal, end = pty.openpty()
    command = [sys.executable, *program, "parallel.domain=9"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=end, check=False, timeout=TIMEOUT
    )
    os.close(end)
    lines = os.read(terminal, 10_000).decode().splitlines()
    os.close(terminal)
    assert (done.returncode, done.stdout) == (2, b"")
    assert lines[0] == LINE.strip()
    assert lines[1].startswith("error: parallel.domain:")
