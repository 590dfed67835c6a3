"""A command as a process of a run: a program of the user's, with output that comes back line by line.

engine ── fork ──▶ a process of the run ── start ──▶ the command
                        ◀── its lines ──┘            "[2]<stdout>:a line"  into the log of the process of the run
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from polytempo.engines.processes.fork import die_with, sleep_until_ended
from polytempo.engines.processes.worker import MAX_RESULT_BYTES
from polytempo.engines.processes.worker_processes import held_path

COMMAND_FORMAT = "polytempo.command/1"
ANSWER_FILE = "POLYTEMPO_ANSWER_FILE"
"""The variable that names the file where a command may leave an answer."""
_NOT_STARTED = 127
_LINE_BYTES = 64 << 10
"""Longer lines are cut into several."""
_LOOK_S = 0.1
"""The interval between looks for a signal that holds the command."""
_REST_S = 1.0
"""The output is read for so long after the end of a command with children that hold it open."""


class CommandRun(NamedTuple):
    """A command that each rank runs, as it travels to other hosts."""

    words: tuple[str, ...]
    folder: str
    """The working folder; a host that does not have the folder says so."""
    environment: Mapping[str, str]
    """Variables in addition to the host's own environment."""
    input: str = ""
    """The text of its standard input."""

    def to_json(self) -> str:
        """The run as JSON."""
        return json.dumps({"format": COMMAND_FORMAT, **self._asdict()})

    @classmethod
    def from_plain(cls, text: Mapping[str, Any]) -> CommandRun:
        """The run of a text that `to_json` wrote."""
        return cls(tuple(text["words"]), text["folder"], text["environment"], text["input"])


def is_command(text: Mapping[str, Any]) -> bool:
    """True for an agent's `Welcome` to a command, not to a job."""
    return text.get("format") == COMMAND_FORMAT


def perform_command(run: CommandRun, name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run it to its end, in a process that an engine has started. `name` begins each of its lines: `[name]<stdout>:`.

    Returns its exit code, negative for a signal, and the answer that it has left, if any. SIGTERM is passed on.
    """
    answer = Path(tempfile.gettempdir()) / f"answer-{secrets.token_hex(4)}"
    given = {**os.environ, **run.environment, **environment, ANSWER_FILE: str(answer)}
    own = os.getpid()
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's command
            run.words,
            cwd=run.folder,
            env=given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: die_with(own),
        )
    except OSError as error:
        _say(f"[{name}]<stderr>:cannot run {run.words[0]} in {run.folder}: {error}\n".encode())
        return {"code": _NOT_STARTED}
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    relays = [
        _Relay(stream, f"[{name}]<{kind}>:".encode())
        for stream, kind in ((process.stdout, "stdout"), (process.stderr, "stderr"))
    ]
    signal.signal(signal.SIGTERM, lambda number, frame: _pass_on(process, number, relays))
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(run.input.encode())
    code = _watched(process, held_path(Path(tempfile.gettempdir()), own))
    for relay in relays:
        relay.join(_REST_S)
    return {"code": code, **_answer(answer)}


def _watched(process: subprocess.Popen[bytes], held: Path) -> int:
    """The exit code, once it has ended. As long as a signal holds it, there is the file `held`: the engine sees this
    process alone."""
    while (code := process.poll()) is None:
        if not _is_held(process.pid):
            held.unlink(missing_ok=True)
        else:
            held.touch()
        sleep_until_ended([process.pid], _LOOK_S)
    return code


def _is_held(process: int) -> bool:
    """True while a signal holds it, or its only child: a shell waits for a script."""
    with suppress(OSError, ValueError):  # no /proc, a process that has just ended, or several processes
        while Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "T":
            (process,) = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        return True
    return False


def _answer(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_RESULT_BYTES // 2:
            raise ValueError(f"a rank's answer may have at most {MAX_RESULT_BYTES // 2} bytes")
        return {"answer": path.read_text(encoding="ascii")}
    finally:
        path.unlink()


class _Relay(threading.Thread):
    """Forwards the output of a command by lines, from a thread of its own, which it starts."""

    def __init__(self, stream: IO[bytes], prefix: bytes) -> None:
        super().__init__(daemon=True)
        self._stream, self._prefix = stream, prefix
        self._rest, self._ended = b"", False
        self._lock = threading.RLock()  # a signal may arrive in `empty`
        os.set_blocking(stream.fileno(), False)
        self._text = select.poll()
        self._text.register(stream)
        self.start()

    def run(self) -> None:
        """Forward lines until the command has closed its output."""
        while not self._ended:
            self._text.poll()
            self._take()
        self._stream.close()

    def empty(self) -> None:
        """Forward all that the command has written, also half a line: this process may be killed soon."""
        with self._lock:
            while not self._ended and self._take():
                pass
            self._say_rest()

    def _take(self) -> bool:
        """Forward the whole lines of the next text; False if there is none."""
        with self._lock:
            text = None
            with suppress(BlockingIOError):  # the other thread has read it
                text = os.read(self._stream.fileno(), _LINE_BYTES)
            *lines, self._rest = (self._rest + (text or b"")).split(b"\n")
            for line in lines:
                _say(self._prefix + line + b"\n")
            self._ended = text == b""
            if self._ended or len(self._rest) >= _LINE_BYTES:
                self._say_rest()
            return bool(text)

    def _say_rest(self) -> None:
        if self._rest:
            _say(self._prefix + self._rest + b"\n")
            self._rest = b""


def _pass_on(process: subprocess.Popen[bytes], number: int, relays: Sequence[_Relay]) -> None:
    for relay in relays:
        relay.empty()
    with suppress(ProcessLookupError):
        process.send_signal(number)


def _say(line: bytes) -> None:
    with suppress(OSError):  # the disk of the log is full
        os.write(sys.stdout.fileno(), line)
