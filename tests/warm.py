"""Run Python programs from a process that has loaded torch already: most of a short command is its start.

A program here stands for `python program.py …` or `python -m package …`: a process of its own with its own arguments,
folder, environment and ends, and an interpreter that ends as always. It differs in the others' packages that are there
before its first line (none of ours), and in variables that are read while torch loads.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SOURCES = str(Path(__file__).parents[1] / "src")
LOADED = ("torch", "torch._dynamo", "matplotlib.figure", "rich.console", "typer", "msgspec", "zmq")


def run(arguments: list[str], cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """The end of `python *arguments` in the folder `cwd`. Raises TimeoutExpired, with nothing left running."""
    with TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        order = {"arguments": arguments, "cwd": str(cwd), "out": str(out), "error": str(error), "timeout": timeout}
        code = _asked({**order, "environment": dict(os.environ)})
        if code is None:
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), error.read_text())
        return subprocess.CompletedProcess(arguments, code, out.read_text(), error.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """The process ends when no caller can ask any more, and its programs end with it."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait()
    server.stdout.close()


def _asked(order: dict[str, Any]) -> int | None:
    """The exit code; None where the time was over."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        print(json.dumps(order), file=server.stdin, flush=True)
        answer: int | None = json.loads(server.stdout.readline())
    except BaseException:  # no caller waits for a late answer
        _server.cache_clear()
        _end(server)
        raise
    return answer


def _serve() -> dict[str, Any] | None:
    """Answer orders; returns in every child, with its program."""
    for name in LOADED:
        import_module(name)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return order
        print(json.dumps(_ended(child, order["timeout"])), flush=True)
    return None


def _ended(child: int, timeout: float) -> int | None:
    """The exit code as subprocess counts, or None for a program that had to be killed."""
    process = os.pidfd_open(child)
    try:
        if process not in select.select([process, sys.stdin], [], [], timeout)[0]:  # or who asked is gone
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(process)


def _become(order: dict[str, Any]) -> None:
    """Be that program, down to how the interpreter ends."""
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"], PYTHONPATH=SOURCES, OMP_NUM_THREADS="1")
    for descriptor, path in enumerate((os.devnull, order["out"], order["error"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    first, *others = order["arguments"]
    if first == "-m":
        sys.path[0] = order["cwd"]
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv = order["arguments"]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    order = _serve()
    if order is not None:
        _become(order)
