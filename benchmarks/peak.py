"""The memory of this process: resident, or allocated on its GPU."""

from pathlib import Path

import torch
from pinned import DEVICE


def resident() -> int:
    """Return the bytes in use now."""
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated()
    return _status("VmRSS")


def peak() -> int:
    """Return the largest number of bytes in use since `forget_peak`."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def forget_peak() -> None:
    """Start a new measurement of the peak."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))
