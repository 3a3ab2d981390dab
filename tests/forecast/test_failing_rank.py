"""One of several ranks fails: all end, one reports it, and no forecast looks complete."""

import subprocess
import sys
from pathlib import Path

import pytest

from credit_dp.forecast.check import check_forecast
from tests.ranks import TIMEOUT

pytestmark = pytest.mark.slow
# Every process of a run executes this; the rank that has the south fails at its second lead time.
SCRIPT = """
import errno, os, sys
from credit_dp.cli.entry import main
from credit_dp.forecast.stored_forecast import ZarrForecast
write = ZarrForecast.write
def some(self, job, lead, rows, fields):
    if rows.start > 0 and lead == 1:
        raise {error}
    write(self, job, lead, rows, fields)
ZarrForecast.write = some
if __name__ == "__main__":
    main()
"""
FULL = "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"


def started(config, folder: Path, error: str) -> subprocess.CompletedProcess[str]:
    """Start a forecast on two ranks, of which the second fails."""
    script = folder / "start.py"
    script.write_text(SCRIPT.replace("{error}", error))
    words = ["forecast", f"checkpoint={config.run.dir}", "init=2000-01-04/2000-01-04T12/12h"]
    words += ["lead=24h", f"out={folder / 'f'}", "device=cpu", "parallel.domain=2"]
    return subprocess.run(
        [sys.executable, str(script), *words],
        check=False, timeout=TIMEOUT, capture_output=True, text=True,
    )  # fmt: skip


def check_what_is_there(folder: Path) -> None:
    """Check that no store looks complete."""
    assert not (folder / "f").exists()
    finding = check_forecast(str(folder / "f"))
    assert not finding.complete
    assert finding.missing
    assert finding.damaged == ([], 0)


def test_a_full_disk_of_one_rank(config, tmp_path):
    done = started(config, tmp_path, FULL)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "f: can't be written (No space left on device)" in line
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr
    check_what_is_there(tmp_path)


def test_a_crash_of_one_rank(config, tmp_path):
    done = started(config, tmp_path, "ValueError('broken')")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: broken") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    check_what_is_there(tmp_path)
