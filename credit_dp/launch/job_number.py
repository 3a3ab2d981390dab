"""The number by which SLURM's commands know the job that this process is part of."""

from collections.abc import Mapping


def job_number(environment: Mapping[str, str]) -> str | None:
    """`7`, or `7_2` in an array; None outside of SLURM.

    `SLURM_JOB_ID` will not do: that of an array's last job is the number of the whole array, and
    `scontrol requeue` would queue all its jobs again, those that are done too.
    """
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")
