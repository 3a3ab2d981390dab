"""Makes a quickstart store: starts one process per run, all cores at work, and shows progress."""

import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from credit_dp.config import QuickstartConfig
from credit_dp.data.cache import Report
from credit_dp.data.quickstart import layout
from credit_dp.data.quickstart.planet import TITLE
from credit_dp.data.quickstart.spans import Run, resolve_grid, runs
from credit_dp.data.quickstart.synthesis import Synthesis
from credit_dp.errors import UserError

WORKER = "credit_dp.data.quickstart.worker"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def build(
    config: QuickstartConfig,
    grid: tuple[int, int] | None,
    path: Path,
    report: Report | None = None,
) -> None:
    """Integrates the climate and writes it to `path`, which appears whole or not at all.

    The bytes depend on `config` and `grid` only, not on the number of cores. One build of a path at
    a time: the caller holds a lock.

    Raises:
        UserError: a setting makes no sense, or a run failed (a full disk, say).
    """
    shape = resolve_grid(config, grid)
    members = runs(config)
    title = f"{TITLE}, T{config.truncation}, seed {config.seed}"
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed build left
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        layout.create(partial, Synthesis(config.truncation, shape), members, title)
        _integrate(config, shape, partial, members, report or (lambda _message, _share: None))
        layout.finish(partial)
        partial.rename(path)
    except OSError as error:
        raise UserError(
            f"quickstart climate: {path} could not be written ({error.strerror or error}). "
            f"Free some space or point data.cache at another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _integrate(
    config: QuickstartConfig,
    grid: tuple[int, int],
    path: Path,
    members: list[Run],
    report: Report,
) -> None:
    total, done = sum(run.steps for run in members), 0
    ticks: queue.Queue[int] = queue.Queue()
    started: list[subprocess.Popen[str]] = []
    report("making the quickstart climate", 0.0)
    with ThreadPoolExecutor(min(_cores(), len(members))) as pool:
        try:
            shared = {"config": asdict(config), "grid": grid, "path": str(path)}
            jobs = [shared | {"run": run.index} for run in members]
            futures = [pool.submit(_one_run, job, ticks, started) for job in jobs]
            while done < total:
                with suppress(queue.Empty):
                    done += ticks.get(timeout=0.2)
                    report("making the quickstart climate", done / total)
                _raise_first(futures)
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.kill()


def _raise_first(futures: list[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


def _one_run(
    job: Mapping[str, object], ticks: "queue.Queue[int]", started: list[subprocess.Popen[str]]
) -> None:
    environment = os.environ | dict.fromkeys(THREADS, "1")
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        started.append(process)
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("a worker without pipes")
        # Its input stays open while it works: closing it is what ends a worker.
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            ticks.put(int(line))
        complaint = process.stderr.read().strip().splitlines()
        if process.wait() != 0:
            last = complaint[-1] if complaint else f"exit code {process.returncode}"
            raise UserError(
                f"quickstart climate: run {job['run']} failed: {last}. "
                f"If the disk is full, point data.cache at another folder."
            )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
