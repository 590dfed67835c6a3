"""`companion`: the live page beside a command that runs, in a process of its own, so that it holds up no run.

command ── socket, token, root ──▶ python -m polytempo.ui ── reads the run's files ──▶ pages
        └─ standard input, open until the command ends (or is killed) ─▶ the page ends, too
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import msgspec

from polytempo.ui.address import listen

SHARE = 0.005
"""The part of a core that a page takes at most while runs go on."""
_END_S = 8.0
NEEDED = ("starlette", "uvicorn")


class CompanionOrder(msgspec.Struct, frozen=True):
    """The facts that the page's process starts with."""

    root: str
    host: str
    token: str
    descriptor: int


def check_installed() -> None:
    """ValueError where the extra `ui` is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"the live page needs {', '.join(missing)}: pip install 'polytempo[ui]'")


@contextmanager
def companion(root: str, run: str | None = None) -> Iterator[str]:
    """The link to a page of the runs below `root`, while this lasts; the page opens the run named `run`.

    The link is there immediately; pages that open it wait for the process, which loads in seconds. It takes only time
    that no other process wants. Errors: ValueError without the extra `ui`.
    """
    check_installed()
    address = listen()
    link = address.link if run is None else f"{address.link}#/run/{quote(run, safe='')}"
    with address.listening as listening:
        number = listening.fileno()
        order = CompanionOrder(root, address.host, address.token, number)
        process = subprocess.Popen(
            [sys.executable, "-m", "polytempo.ui"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,  # Ctrl-C is for the command
        )
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
        yield link
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)


def quietly() -> None:
    """Give this process and its threads the least part of the cores that others want, as far as the system can."""
    with suppress(OSError, AttributeError):
        os.nice(19)
    with suppress(OSError):  # where each session has a part of the cores, this one's is the least, too
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    with suppress(OSError, AttributeError):  # not SCHED_IDLE: beside cores that are always busy no page would open
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
