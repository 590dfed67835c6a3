"""Agents that are children of this process: each behind a command that starts it on its host, as ssh does."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from polytempo.engines.processes.fork import held_signals, open_program
from polytempo.engines.remote.starter import StartedAgent
from polytempo.engines.remote.ticket import AgentTicket

_END_S = 5.0
_LAST_BYTES = 1000


@dataclass(eq=False)
class _Child(StartedAgent):
    process: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None


class ChildAgents:
    """Starts each agent by a command of its own, with the ticket on its standard input. See `AgentStarter`.

    `commands` are (where, words) by the agents' numbers. Each reads `before_ticket` first. What a command writes is
    quoted where it ends.
    """

    replaces = False

    def __init__(self, commands: Sequence[tuple[str, Sequence[str]]], before_ticket: bytes = b"") -> None:
        self._commands, self._before_ticket = commands, before_ticket
        self._children: list[_Child] = []

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """See `AgentStarter`. ValueError where there is no such command."""
        started = []
        for number in numbers:
            where, words = self._commands[number]
            errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
            child = _Child(number, where, errors=errors)
            with held_signals():  # a process that has been started is known here, too
                try:
                    child.process = open_program(
                        words,
                        stdin=subprocess.PIPE,
                        stdout=errors,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the run in order
                    )
                except OSError as error:
                    errors.close()
                    raise ValueError(f"{where}: cannot start {words[0]} ({error.strerror})") from error
                self._children.append(child)
            started.append(child)
            assert child.process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already: `poll` says how
                child.process.stdin.write(self._before_ticket + ticket.numbered(number).to_json().encode() + b"\n")
                child.process.stdin.flush()
        return started

    def poll(self) -> None:
        """See `AgentStarter`."""
        for child in self._children:
            if child.process is not None and child.ended is None and (code := child.process.poll()) is not None:
                child.ended = f"ended with exit code {code}{quoted(child.errors)}"

    def stop(self) -> None:
        """See `AgentStarter`."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            until_s = time.monotonic() + _END_S
            for child in self._children:
                assert child.process is not None
                if child.process.poll() is None and number is not None:
                    child.process.send_signal(number)
                elif child.process.stdin is not None:
                    with suppress(BrokenPipeError):
                        child.process.stdin.close()
            for child in self._children:
                assert child.process is not None
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, until_s - time.monotonic()))
        self.poll()
        for child in self._children:
            if child.errors is not None:
                child.errors.close()


def quoted(errors: IO[bytes] | None) -> str:
    """The end of what a command has written, as the end of a sentence."""
    if errors is None or errors.closed:
        return ""
    size = errors.seek(0, 2)
    errors.seek(max(0, size - _LAST_BYTES))
    text = " ".join(errors.read().decode(errors="replace").split())
    return f" and said: {text}" if text else ""
