"""Launches ranks: `python -m tests.distributed.launch_program`.

Its arguments are FUNCTION DOMAIN DATA PIPELINE FOLDER. A rank waits in a collective for
GROUP_SECONDS if they are set.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

from credit_dp import config as credit_dp_config
from credit_dp.cli.entry import run_command
from credit_dp.distributed import process_groups, worker
from credit_dp.distributed.launch import launch


def small_config(
    folder: str, domain: int = 1, data: int | None = None, **parallel: int
) -> credit_dp_config.Config:
    """Return the smallest config that launches."""
    return credit_dp_config.Config(
        model=credit_dp_config.UNetConfig(),
        data=credit_dp_config.DataConfig(name="quickstart", prognostic=["z"], batch_size=4),
        parallel=credit_dp_config.ParallelConfig(domain=domain, data=data, **parallel),
        trainer=credit_dp_config.TrainerConfig(steps=1),
        loss=credit_dp_config.StandardLossConfig(),
        optimizer=credit_dp_config.AdamWConfig(),
        logger=credit_dp_config.LoggerConfig(),
        run=credit_dp_config.RunConfig(dir=folder),
        device="cpu",
    )


def start(arguments: list[str], program: str) -> int:
    function, domain, data, pipeline, folder = arguments
    if seconds := os.environ.get("GROUP_SECONDS"):
        worker.GROUP_TIMEOUT = process_groups.GROUP_TIMEOUT = timedelta(seconds=float(seconds))
    if "RANK" in os.environ:  # ranks of a launcher may disagree on the folder
        folder = str(Path(folder) / f"of-rank-{os.environ['RANK']}")
    config = small_config(folder, int(domain), int(data) or None, pipeline=int(pipeline))
    return launch(config, f"tests.distributed.rank_functions:{function}")


if __name__ == "__main__":
    sys.exit(run_command(start, sys.argv[1:], "start"))
