"""Kills `prepare` at random moments; `python -m tests.data.rechunk.kill_prepare` calls it.

Its arguments are STORE FOLDER KILLS.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from credit_dp.data.rechunk.run import RechunkJob
from tests.data.rechunk.requests import request, run, tree


def forked(store: Path, out: Path, patience: float | None = None) -> float:
    """Prepare in a child process, killed after `patience` seconds; return how long it ran."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        run(RechunkJob(request(store, out)))
        os._exit(0)
    if patience is not None:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if patience is None and status:
        raise SystemExit(f"ended with {status}")
    return time.monotonic() - start


def main(store: Path, folder: Path, kills: int) -> None:
    undisturbed = folder / "undisturbed.zarr"
    whole = forked(store, undisturbed)
    wanted = tree(undisturbed)
    moments = random.Random(0)
    for number in range(kills):
        out = folder / f"killed{number}.zarr"
        forked(store, out, moments.uniform(0.1, 1.0) * whole)
        if out.exists():  # too late: a whole run is quicker by now than the first one was
            whole *= 0.9
        state = "whole" if out.exists() else f"{len(tree(folder / f'{out.name}.partial'))} files"
        if not out.exists():
            forked(store, out)
        same = tree(out) == wanted
        alone = not (folder / f"{out.name}.partial").exists()
        print(number, state, "equal" if same and alone else "DIFFERENT")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
