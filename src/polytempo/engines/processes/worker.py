"""A worker process of the local engine, from its first instruction to its last."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

import torch

from polytempo.core.errors import JobFailed, NotFinite
from polytempo.core.system.first_failure import in_short
from polytempo.core.system.notice import Preempted, ignore_hangup
from polytempo.device import first_modes
from polytempo.engines.deaths.verdict import Complaint
from polytempo.engines.engine import Failure, Result
from polytempo.engines.processes import janitor
from polytempo.engines.processes.fork import default_signals, die_with

MAX_RESULT_BYTES = 64 << 20


class RankInfo(NamedTuple):
    """The facts that a worker receives."""

    rank: int
    size: int
    rendezvous: Path
    """A private folder (mode 0700) that ends with the run; the workers' `FileStore` is the file `store` in it."""
    threads: int
    generation: int = 0
    """The number of earlier starts of these workers."""


def serve(work: Callable[[RankInfo], Result], rank_info: RankInfo, log: Path, launcher: int, notes: int) -> None:
    """Do `work` in this freshly forked process, leave its result or failure in a file, and exit."""
    die_with(launcher)
    os.setsid()  # Ctrl-C reaches the launcher alone; children of this worker end with its group
    janitor.begin(notes)
    _redirect(log)
    default_signals()
    ignore_hangup()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    os.environ.update(_environment(rank_info))
    tempfile.tempdir = str(rank_info.rendezvous)
    torch.set_num_threads(rank_info.threads)
    code = _attempt(work, rank_info)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk of the log is full
            stream.flush()
    os._exit(code)


def _attempt(work: Callable[[RankInfo], Result], rank_info: RankInfo) -> int:
    try:
        with first_modes():
            _write(result_path(rank_info.rendezvous, rank_info.rank), work(rank_info))
    except BaseException as error:
        with suppress(OSError):  # each of the two may be on a disk that is full
            _write(failure_path(rank_info.rendezvous, rank_info.rank), list(failure_by(error)))
        show_error(error)
        return exit_code_of(error)
    return 0


def failure_by(error: BaseException) -> Failure:
    """The record of an exception that ends a process."""
    facts = error.facts if isinstance(error, NotFinite) else None
    if isinstance(error, Preempted):
        facts = {"step": error.step}
    return Failure(type(error).__name__, Complaint.of(0, error) is not None, in_short(error), facts)


def show_error(error: BaseException) -> None:
    """Write it into the process's log; of a `JobFailed`, which says where in the job, not the way there."""
    with suppress(OSError):
        if isinstance(error, JobFailed | Preempted):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _environment(rank_info: RankInfo) -> dict[str, str]:
    """The variables that `environment.recognise` and the libraries read."""
    return {
        "POLYTEMPO_RANK": str(rank_info.rank),
        "POLYTEMPO_SIZE": str(rank_info.size),
        "POLYTEMPO_RENDEZVOUS": str(rank_info.rendezvous),
        "POLYTEMPO_GENERATION": str(rank_info.generation),
        "TMPDIR": str(rank_info.rendezvous),  # leftovers of killed workers (multiprocessing: sockets) go with the run
        "OMP_NUM_THREADS": str(rank_info.threads),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _redirect(log: Path) -> None:
    """Read from nothing, write to `log`, and report errors as Python does, not as a test runner would."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    with suppress(FileNotFoundError):
        log.unlink()  # it may be a link
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    for standard, descriptor in enumerate((nothing, written, written)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(written)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def _stream(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    return open(descriptor, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def result_path(home: Path, rank: int) -> Path:
    """The file of the result of the worker of `rank`."""
    return home / f"result-{rank}.json"


def failure_path(home: Path, rank: int) -> Path:
    """The file in which the worker of `rank` reports its failure."""
    return home / f"failure-{rank}.json"


def failure_of(home: Path, rank: int) -> Failure | None:
    """The failure that the worker of `rank` has reported, if it could."""
    path = failure_path(home, rank)
    return Failure(*json.loads(path.read_text())) if path.exists() else None


def _write(path: Path, value: Result) -> None:
    """Complete or not at all."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(encoded(value))
    unfinished.replace(path)


def encoded(value: Result) -> bytes:
    """A result as JSON. ValueError where it is too large."""
    text = json.dumps(value).encode()
    if len(text) > MAX_RESULT_BYTES:
        raise ValueError(
            f"a worker's result may have at most {MAX_RESULT_BYTES} bytes as JSON, and this one has {len(text)}; "
            "write large results to a file and return its path"
        )
    return text
