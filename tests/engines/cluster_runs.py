"""Helpers for tests of engines for clusters: runs of digits, and the agents of one cluster as processes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from engines.batch_runs import awaited
from polytempo.engines.engine import EngineSetup

TESTS = Path(__file__).parents[1]
MARK = "POLYTEMPO_TESTS_MARK"
DETERMINISTIC = ("sync_sgd()", "local_sgd(period=4)")
FAILS = """
import os
from dataclasses import replace
from polytempo.jobs.digits import job as digits

def read(given):
    if "POLYTEMPO_HOST" in os.environ:
        raise OSError("no such data on this node")
    return digits.data(given)

job = replace(digits, name="fails", data=read)
"""
SERVED = "downpour(shards=2, replicas=1)"
LONG_S = 300.0


@contextmanager
def marked(temporary: Path) -> Iterator[str]:
    """Mark all processes that are started inside, so that `agents` finds them.

    They can import the tests, and their files are in `temporary`, where `folders` finds them.
    """
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield mark


def agents(mark: str) -> list[int]:
    """The agents' process ids. An agent's forks look like it, and their parent is an agent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"polytempo.agent" in words and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = parent(int(folder.name))
    return sorted(process for process, its_parent in found.items() if its_parent not in found)


def folders() -> list[Path]:
    """The runs' folders among temporary files."""
    return list(Path(tempfile.gettempdir()).glob("polytempo-*"))


def parent(process: int) -> int:
    """The process id of its parent."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])


def digits(strategy: str, engine: EngineSetup | None, **options: Any) -> pt.Result:
    """Two epochs, or as `options` say, by two workers."""
    given = {"epochs": 2, "threads": 1, "seed": 7, **options}
    return pt.run(pt.jobs.find("digits"), pt.parse_strategy(strategy), workers=2, engine=engine, **given)


def local_hashes() -> dict[str, str | None]:
    """The hashes of the same runs by this host's engine, in a process of its own: it forks, and here are threads."""
    code = (
        "import json; from engines.cluster_runs import DETERMINISTIC, digits\n"
        "print(json.dumps({text: digits(text, None).parameters_sha256 for text in DETERMINISTIC}))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    hashes: dict[str, str | None] = json.loads(done.stdout)
    return hashes


def begun(out: Path, rows: int = 1) -> bool:
    """True if a run has written so many rows of metrics."""
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= rows


@contextmanager
def program(text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs Python's `text`, and ends it also where a test fails: it would keep the cores from later tests."""
    process = subprocess.Popen([sys.executable, "-c", text, *arguments], stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Killer(threading.Thread):
    """Kills a process once a run has written two rows of metrics. `victim` says which, or loses something itself."""

    def __init__(self, out: Path, victim: Callable[[], int | None]) -> None:
        super().__init__(daemon=True)
        self._out, self._victim = out, victim
        self.done = False
        self.start()

    def run(self) -> None:
        """Wait for the rows, and kill."""
        awaited(lambda: begun(self._out, 2), "the run's begin")
        if (victim := self._victim()) is not None:
            os.kill(victim, signal.SIGKILL)
        self.done = True
