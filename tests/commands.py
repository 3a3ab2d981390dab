"""Commands as a user types them, each in a process forked from one that has imported everything.

A new interpreter spends seconds on importing torch, xarray and zarr before it does anything. What
such an interpreter itself does (imports, signals, its end) is tested in `tests/distributed`,
`tests/docs/test_clean_clone.py` and `tests/training/test_late_imports.py`, with real ones.
"""

import atexit
import json
import os
import re
import runpy
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing import process as processes
from pathlib import Path

from tests.ranks import TIMEOUT, warm_context

SHELL = set("|&;<>$`*?{}~")  # characters that only a shell interprets
LITERAL = re.compile(r"'[^']*'")  # patterns in which they have no meaning
SETTING = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def run_line(
    line: str, folder: Path, environment: Mapping[str, str], timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell: `[NAME=VALUE] python ...` or `credit-dp ...` warm, all else by it."""
    words = [] if SHELL & set(LITERAL.sub("", line)) else shlex.split(line, comments=True)
    settings = {}
    while words and (setting := SETTING.fullmatch(words[0])):
        settings[setting[1]] = setting[2]
        words = words[1:]
    if words[:1] in (["python"], ["credit-dp"]) and words[1:2] not in (["-c"], ["-m"]):
        return run(words, folder, {**environment, **settings}, timeout)
    return subprocess.run(
        line, shell=True, cwd=folder, env=dict(environment), capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def run(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run `python FILE ...`, `python -W error -c CODE` or `credit-dp ...` in a folder.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds.
    """
    context = warm_context()
    forkserver.ensure_running()
    address = forkserver._forkserver._forkserver_address
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        arguments = (list(words), folder, dict(environment), out, err, address)
        process = context.Process(target=_begin, args=arguments)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.terminate()  # it ends its ranks, too
            process.join(10.0)
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, out.read_text(), err.read_text())
        said = (out.read_text(), err.read_text())
        return subprocess.CompletedProcess(words, process.exitcode, *said)


# Commands of a process that the test starts, such as a notebook's kernel


STAND_IN = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    command = [["credit-dp", *sys.argv[1:]], os.getcwd(), dict(os.environ)]
    server.sendall(json.dumps(command).encode() + b"\\n")
    out, err, code = json.load(server.makefile())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@contextmanager
def warm_environment(folder: Path) -> Iterator[Path]:
    """Return a Python like this one, whose `credit-dp` runs commands in warm processes.

    The folder looks like a virtual environment and shares the packages of this one.
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    for name in ("lib", "lib64", "share", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (folder / name).symlink_to(Path(sys.prefix) / name)
    address = str(folder / "commands")
    stand_in = folder / "bin/credit-dp"
    stand_in.write_text(STAND_IN.format(python=sys.executable, address=address))
    stand_in.chmod(0o755)
    # From this thread: the fork server ends with the thread that starts it.
    warm_context()
    forkserver.ensure_running()
    with socketserver.ThreadingUnixStreamServer(address, _Request) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield folder / "bin/python"
        finally:
            server.shutdown()
            thread.join()


class _Request(socketserver.StreamRequestHandler):
    """A command that a stand-in sends."""

    def handle(self) -> None:
        words, folder, environment = json.loads(self.rfile.readline())
        done = run(words, Path(folder), environment, timeout=TIMEOUT)
        reply = json.dumps([done.stdout, done.stderr, done.returncode])
        self.wfile.write(reply.encode())


def _begin(
    words: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path, address: str
) -> None:
    """Replace this process by the command."""
    os.setsid()
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.default_int_handler if kind == signal.SIGINT else signal.SIG_DFL)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Where a new interpreter would look for modules and entry points; its ranks look there too.
    sys.path[1:1] = environment.get("PYTHONPATH", "").split(os.pathsep)
    processes.ORIGINAL_DIR = str(folder)
    if "CREDIT_DP_PLUGINS" in environment:  # read when a rank unpickles its config
        address = _fork_server_of_ranks(out.parent)
    # Otherwise ranks that it starts are forked from the same server as it is itself.
    forkserver._forkserver._forkserver_address = address
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None
    code = _become(words)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _fork_server_of_ranks(folder: Path) -> str:
    """Fork a server with this command's environment, which ends with it, and return its address."""
    listener = socket.socket(socket.AF_UNIX)
    address = str(folder / "ranks")
    listener.bind(address)
    listener.listen()
    alive, command = os.pipe()
    if os.fork() == 0:
        os.close(command)
        try:
            forkserver.main(listener.fileno(), alive, [])
        finally:
            os._exit(0)
    listener.close()
    return address


def _become(words: list[str]) -> int:
    """Run the command in this process, and return its exit code."""
    program, *arguments = words
    try:
        if program == "credit-dp":
            from credit_dp.cli import main

            sys.argv = words
            sys.path.insert(0, os.path.dirname(sys.executable))
            main()
        elif arguments[0] == "-W":
            warnings.simplefilter(arguments[1])
            sys.argv = ["-c"]
            sys.path.insert(0, "")
            with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                file.write(arguments[3])
                file.flush()
                runpy.run_path(file.name, run_name="__main__")
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter that ends
        traceback.print_exc()
        return 1
    return 0
