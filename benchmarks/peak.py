"""Resident memory of this process, for the benchmarks beside this file."""

from pathlib import Path


def resident() -> int:
    """Return the bytes that are resident now."""
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes that were resident since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Forget the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
