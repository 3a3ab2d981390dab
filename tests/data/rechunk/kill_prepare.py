"""Kills `prepare` at random moments; `python -m tests.data.rechunk.kill_prepare` calls it.

Its arguments are STORE FOLDER KILLS.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from credit_dp.data.rechunk.copy_fields import RechunkJob
from tests.data.rechunk.requests import request, run, tree


def forked(store: Path, out: Path, kill_at: int | None = None) -> None:
    """Prepare in a child process, killed when `kill_at` files of the copy are there."""
    child = os.fork()
    if child == 0:
        run(RechunkJob(request(store, out)))
        os._exit(0)
    if kill_at is not None:
        partial = partial_copy(out)
        while not out.exists() and count_files(partial) < kill_at:
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if kill_at is None and status:
        raise SystemExit(f"ended with {status}")


def partial_copy(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def main(store: Path, folder: Path, kills: int) -> None:
    undisturbed = folder / "undisturbed.zarr"
    forked(store, undisturbed)
    wanted = tree(undisturbed)
    moments = random.Random(0)
    for number in range(kills):
        out = folder / f"killed{number}.zarr"
        forked(store, out, moments.randrange(len(wanted)))
        state = "whole" if out.exists() else f"{len(tree(partial_copy(out)))} files"
        if not out.exists():
            forked(store, out)
        same = tree(out) == wanted
        alone = not partial_copy(out).exists()
        print(number, state, "equal" if same and alone else "DIFFERENT")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
