"""Runs a command inside this process and gives what it said."""

import sys
from io import StringIO

import pytest

from credit_dp.cli.entry import dispatch, run_command
from credit_dp.cli.train import train


def answer(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, program: str = "train"
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python train.py ARGUMENTS` or `credit-dp ARGUMENTS`."""
    out, err = StringIO(), StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    code = run_command(train if program == "train" else dispatch, arguments, program)
    monkeypatch.undo()
    return code, out.getvalue(), err.getvalue()


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The one line of a refused command line, without `error: `."""
    code, out, err = answer(monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("error: ").rstrip()
