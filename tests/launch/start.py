"""A program that launches: `python -m tests.launch.start FUNCTION DOMAIN DATA PIPELINE FOLDER`."""

import os
import sys
from pathlib import Path

from credit_dp import config as c
from credit_dp.command.entry import guarded
from credit_dp.launch import launch


def a_config(folder: str, domain: int = 1, data: int | None = None, **parallel: int) -> c.Config:
    """The smallest config that launches."""
    return c.Config(
        model=c.UNetConfig(),
        data=c.DataConfig(name="quickstart", prognostic=["z"], batch_size=4),
        parallel=c.ParallelConfig(domain=domain, data=data, **parallel),
        trainer=c.TrainerConfig(steps=1),
        loss=c.StandardLossConfig(),
        optimizer=c.AdamWConfig(),
        logger=c.LoggerConfig(),
        run=c.RunConfig(dir=folder),
        device="cpu",
    )


def start(arguments: list[str], program: str) -> int:
    function, domain, data, pipeline, folder = arguments
    if "RANK" in os.environ:  # ranks of a launcher may disagree on the folder
        folder = str(Path(folder) / f"of-rank-{os.environ['RANK']}")
    config = a_config(folder, int(domain), int(data) or None, pipeline=int(pipeline))
    return launch(config, f"tests.launch.runs:{function}")


if __name__ == "__main__":
    sys.exit(guarded(start, sys.argv[1:], "start"))
