"""What a process shows when its screen or its file fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from credit_dp.process import AppendedFile


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_report_that_nobody_reads_ends_quietly(options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *options, "-m", "credit_dp", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_screen_is_no_error() -> None:
    code = "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", code, sys.executable, "-m", "credit_dp", "--help"]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_does_not_fit_into_a_file_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = AppendedFile(str(tmp_path / "none" / "job.log"))
    file.write("a line\n")
    assert capsys.readouterr() == ("", "a line\n")
    (tmp_path / "none").mkdir()
    file.write("another\n")
    assert capsys.readouterr().err == ""
    assert (tmp_path / "none" / "job.log").read_text() == "another\n"
