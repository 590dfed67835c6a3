"""`WorkerDied`: a run ends because one of its processes did. The error tells how."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from polytempo.core.errors import JobFailed, NotFinite, PolytempoError
from polytempo.core.system.first_failure import FirstFailure
from polytempo.engines.deaths.exit_cause import signal_name
from polytempo.engines.engine import EngineProcess
from polytempo.native.address_space import address_space_advice
from polytempo.spec.text.plain_text import plain_text

_LAST_LINES = 20
_LITTLE_BYTES = 64 << 10
_LAST_BYTES = 64 << 10


class WorkerDied(PolytempoError):
    """A worker ended without a result, and so did the run.

    `exit_code` is None where a signal killed it, and `signal` its name, like "SIGKILL", else None. `last_lines` are the
    last of its log. `not_finite` is its `NotFinite`, if it raised one.
    """

    not_finite: NotFinite | None = None

    def __init__(self, message: str, rank: int, exit_code: int | None, killed_by: str | None, last_lines: list[str]):
        self.rank, self.exit_code, self.signal, self.last_lines = rank, exit_code, killed_by, last_lines
        super().__init__(message)


def died(
    failed: Sequence[EngineProcess],
    size: int,
    who: str | None = None,
    why: str = "",
    holding: tuple[EngineProcess, str] | None = None,
) -> WorkerDied:
    """The error that names the first cause: a process that ended on its own rather than because a peer was gone.

    `who` names it if it has another name than its rank; `why` is a sentence about its wait. `holding`: the process
    that it waited for, and the cause in words, if it only ended because of a wait.
    """

    def order(worker: EngineProcess) -> tuple[bool, int, bool, int]:
        symptom = worker.failure is not None and worker.failure.symptom
        return symptom, worker.ended, worker.failure is not None, worker.role.node

    cause, *others = sorted(failed, key=order)
    rank, code, lines = cause.role.node, cause.exit_code or 0, last_lines(cause.log, "Fatal Python error:")
    why += "" if cause.failure is not None and lines else _full_disks(cause.log.parent, Path(tempfile.gettempdir()))
    failure = cause.failure
    advice = "" if failure is None else address_space_advice(f"{failure.error}: {failure.message}")
    why += f" {advice}" if advice else ""
    quoted = quote(f"The last lines of {who or f'rank {rank}'}", lines)
    message = f"{who or f'rank {rank} of {size}'} {how(cause)}; the run has ended.{why} {quoted}"
    if others:
        message += "\nAlso: " + "; ".join(f"rank {worker.role.node} {how(worker)}" for worker in others)
    killed_by = signal_name(-code) if code < 0 else None
    error = WorkerDied(message, rank, None if killed_by else code, killed_by, lines)
    if cause.failure is not None and cause.failure.facts and "codec" in cause.failure.facts:
        error.not_finite = NotFinite.from_facts(cause.failure.facts)
    if holding is not None and cause.failure is not None and cause.failure.symptom:
        waited_for, reason = holding
        name = str(waited_for.role) if who else f"rank {waited_for.role.node} of {size}"
        return blame(error, death_of(waited_for, name, f"{reason}: {who or f'rank {rank}'} {how(cause)}"))
    return blame(error, death_of(cause, who or f"rank {rank} of {size}"))


Error = TypeVar("Error", bound=PolytempoError)


def blame(error: Error, death: FirstFailure) -> Error:
    """The error with the first failure as its `death`, and the line as its note: the last line of a traceback."""
    if error.death is None:
        error.death = death
        error.add_note(str(death))
    return error


def death_of(process: EngineProcess, who: str, cause: str = "") -> FirstFailure:
    """The death of a process of an engine; `cause`, if it is another one than its end."""
    rank = process.role.node if process.role.kind in ("rank", "worker", "member") else None
    log = str(process.log) if is_kept(process.log) else "its last lines above"
    return FirstFailure(who, cause or how(process), rank, process.host or socket.gethostname(), log)


def is_kept(log: Path) -> bool:
    """True for a log that stays after the run."""
    temporary = Path(tempfile.gettempdir()).absolute()
    return not (log.is_relative_to(temporary) and log.relative_to(temporary).parts[0].startswith("polytempo-"))


@contextmanager
def diverged() -> Generator[None]:
    """Raise the `NotFinite` of a worker that has ended with one: it names the step, the rank and the parameter."""
    try:
        yield
    except WorkerDied as error:
        if error.not_finite is None:
            raise
        not_finite = error.not_finite
        raise (not_finite if error.death is None else blame(not_finite, error.death)) from error


def _full_disks(*folders: Path) -> str:
    """A sentence about those folders where nothing can be written any more."""
    with suppress(OSError):
        full = [str(folder) for folder in folders if shutil.disk_usage(folder).free < _LITTLE_BYTES]
        return f" The disk of {' and '.join(full)} is full: free space there." if full else ""
    return ""


def how(worker: EngineProcess) -> str:
    """The end of a process, in words."""
    code = worker.exit_code or 0
    if worker.why:
        return worker.why
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if failure := worker.failure:
        if failure.error == JobFailed.__name__:
            return f"failed: {plain_text(failure.message)} (exit code {code})"
        said = f": {failure.message}" if failure.message else ""
        return plain_text(f"raised {failure.error}{said} (exit code {code})")
    return f"ended without a result (exit code {code})"


def quote(title: str, lines: Sequence[str]) -> str:
    """Lines of a log under a title."""
    return f"{title}:" + "".join(f"\n    | {line}" for line in lines or ["(nothing)"])


def last_lines(log: Path, stack: str) -> list[str]:
    """The last lines of a log, or the first ones from `stack` on: faulthandler begins with the innermost frame."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = [plain_text(line) for line in file.read().decode(errors="replace").splitlines()]
    begin = max((i for i, line in enumerate(lines) if stack in line), default=max(0, len(lines) - _LAST_LINES))
    return lines[begin : begin + _LAST_LINES]
