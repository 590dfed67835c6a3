"""Helpers for tests of batch systems and MPI: runs of digits, and a look at the remains of runs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import polytempo as pt
from polytempo.engines.engine import EngineSetup

DETERMINISTIC = ("sync_sgd()", "local_sgd(period=4)")
SERVED = "downpour(shards=2, replicas=1)"
SAMPLES = 1437
LONG_S = 240.0
SOURCE = Path(pt.__file__).parents[1]
_MARK = "POLYTEMPO_TESTS_MARK"
_PAUSE_S = 0.05


def digits(strategy: str, engine: EngineSetup | None, **options: Any) -> pt.Result:
    """Two epochs of digits, or as `options` say, by two workers."""
    given = {"epochs": 2, "threads": 1, "seed": 7, **options}
    return pt.run(pt.jobs.find("digits"), pt.parse_strategy(strategy), workers=2, engine=engine, **given)


def train(*options: str) -> list[str]:
    """The same as a command, by `sync_sgd`."""
    return [sys.executable, "-m", "polytempo", "train", "digits", "--workers=2", "--threads=1", "--seed=7", *options]


@cache
def hash_here(strategy: str) -> str | None:
    """The hash of this host's engine, in a process of its own: it forks, and here are threads."""
    code = f"from engines.batch_runs import digits; print(digits({strategy!r}, None).parameters_sha256)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=LONG_S)
    return done.stdout.strip()


@contextmanager
def marked() -> Iterator[str]:
    """Marks all processes that are started meanwhile; they find this library and these tests. None may be left."""
    mark, paths = secrets.token_hex(8), [str(SOURCE), str(Path(__file__).parents[1])]
    kept = dict(os.environ)
    os.environ |= {_MARK: mark, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    try:
        yield mark
        awaited(lambda: not processes(mark), "the end of all that a test has started")
    finally:
        for process in processes(mark):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(kept)


def processes(mark: str, words: str = "") -> list[int]:
    """The processes with the mark and with `words` in their command line, oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [int(folder.name)] if line and words in line else []
    return sorted(found)


def agents(mark: str) -> list[int]:
    """The agents. An agent's forks look like it, and have it for a parent; the shell around it only names it."""
    alike = [each for each in processes(mark, "-m polytempo.agent") if _name(each).startswith("python")]
    return [each for each in alike if _parent(each) not in alike]


def _name(process: int) -> str:
    with suppress(OSError):
        return Path(os.readlink(f"/proc/{process}/exe")).name
    return ""


def _parent(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[1])
    return 0


def awaited(condition: Callable[[], Any], what: str, timeout_s: float = LONG_S) -> Any:
    """The value of `condition`, once that is true. The systems tell no event, so it is asked until then."""
    until_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until_s, f"{what} did not come within {timeout_s:g} s"
        time.sleep(_PAUSE_S)
    return found


def rows(out: Path) -> int:
    """The number of a run's rows of metrics."""
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def result(out: Path) -> dict[str, Any]:
    """The result of a run that is over."""
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


@contextmanager
def begun(
    command: list[str], out: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command, once its run in `out` has two rows of metrics."""
    process = subprocess.Popen(
        [*command, f"--out={out}"],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        awaited(lambda: rows(out) >= 2 or process.poll() is not None, "the run's begin")
        assert process.poll() is None, process.communicate()[0]
        yield process
    finally:
        process.kill()
        process.communicate()
