"""Agents behind commands that this process starts: a command for each host, as ssh, or one for all, as srun and mpirun.

launcher ─┬ ssh n1 ──▶ agent             launcher ── srun, mpirun ──▶ sh on each host ──▶ agent
          └ ssh n2 ──▶ agent                              └ says on standard error how an agent ended that failed
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from polytempo.engines.processes.fork import held_signals, open_program
from polytempo.engines.remote.ticket import TICKET_VARIABLE, AgentTicket, StartedAgent

AGENT_WORDS = ("-P", "-m", "polytempo.agent")
"""The words after `python` that start an agent."""
_END_S = 5.0
_LAST_BYTES = 1000
_SHELL = '"$@"; code=$?; [ $code = 0 ] || echo "agent on $(uname -n) ended with exit code $code" >&2'


class _Command:
    """A started command, its output kept for a message. Errors: ValueError if it cannot be started.

    Make it inside `held_signals` and keep it there, so that a process that has been started is known.
    """

    def __init__(
        self, words: Sequence[str], where: str, *, reads: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        try:
            self.process = open_program(
                words,
                stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the run in order
            )
        except OSError as error:
            self._said.close()
            raise ValueError(f"{where}cannot start {words[0]} ({error.strerror})") from error

    def write(self, text: bytes) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended already: `ended` says how
                self.process.stdin.write(text)
                self.process.stdin.flush()

    def close_input(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    @property
    def ended(self) -> str | None:
        """The exit code, and the end of the command's output, as the end of a sentence; None while it runs."""
        if (code := self.process.poll()) is None:
            return None
        if self._said.closed:
            return f"exit code {code}"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = " ".join(self._said.read().decode(errors="replace").split())
        return f"exit code {code} and said: {text}" if text else f"exit code {code}"

    def close(self) -> None:
        self._said.close()


def _end(commands: Sequence[_Command]) -> None:
    """Close the commands' input and wait; end the remaining commands: politely, then for certain."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + _END_S
        for command in commands:
            if number is not None and command.process.poll() is None:
                command.process.send_signal(number)
            else:
                command.close_input()
        for command in commands:
            with suppress(subprocess.TimeoutExpired):
                command.process.wait(max(0.0, until_s - time.monotonic()))


@dataclass(eq=False, kw_only=True)
class _Child(StartedAgent):
    command: _Command


class ChildAgents:
    """Starts each agent by a command of its own, with the ticket on its standard input. See `AgentStarter`.

    `commands` are (where, words) by the agents' numbers. Each reads `before_ticket` first. The end of a command's
    output is quoted when it ends.
    """

    replaces = False

    def __init__(self, commands: Sequence[tuple[str, Sequence[str]]], before_ticket: bytes = b"") -> None:
        self._commands, self._before_ticket = commands, before_ticket
        self._children: list[_Child] = []

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """See `AgentStarter`. Errors: ValueError for a command that does not exist."""
        started = []
        for number in numbers:
            where, words = self._commands[number]
            with held_signals():
                command = _Command(words, f"{where}: ")
                self._children.append(_Child(number, where, command=command))
            command.write(self._before_ticket + ticket.numbered(number).to_json().encode() + b"\n")
            started.append(self._children[-1])
        return started

    def poll(self) -> None:
        """See `AgentStarter`."""
        for child in self._children:
            if child.ended is None and (how := child.command.ended) is not None:
                child.ended = f"ended with {how}"

    def stop(self) -> None:
        """See `AgentStarter`."""
        commands = [child.command for child in self._children]
        _end(commands)
        self.poll()
        for command in commands:
            command.close()


def in_shell(words: Sequence[str]) -> list[str]:
    """The command behind a shell that ends well however the command ends.

    Most launchers end all processes of a run as soon as one of them has failed; here the others go on.
    """
    return ["sh", "-c", _SHELL, "agent", *words]


class LaunchedAgents:
    """Starts all agents by one command; see `AgentStarter`. `where` names the place of each of them in messages.

    They get the ticket on their standard input, which is the command's, or, with `by_variable`, in the variable
    `POLYTEMPO_TICKET` of its environment. `environment` is added to this process's.
    """

    replaces = False

    def __init__(
        self,
        words: Sequence[str],
        where: Sequence[str],
        *,
        by_variable: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._words, self._where, self._by_variable = words, where, by_variable
        self._environment = {**os.environ, **(environment or {})}
        self._agents: list[StartedAgent] = []
        self._command: _Command | None = None

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """See `AgentStarter`. The agents do not know their numbers: the head deals them out."""
        assert self._command is None
        assert len(numbers) == len(self._where)
        self._agents = [StartedAgent(number, self._where[number]) for number in numbers]
        secret = ticket.to_json()
        environment = self._environment | ({TICKET_VARIABLE: secret} if self._by_variable else {})
        with held_signals():
            self._command = _Command(self._words, "", reads=not self._by_variable, environment=environment)
        self._command.write(secret.encode() + b"\n")
        self._command.close_input()
        return self._agents

    def poll(self) -> None:
        """See `AgentStarter`. Single ends are not seen here: the head misses the agent."""
        if self._command is None or (how := self._command.ended) is None:
            return
        for agent in self._agents:
            agent.ended = agent.ended or f"ended when {self._words[0]} did, with {how}"

    def stop(self) -> None:
        """See `AgentStarter`. The command ends on its own once all agents have."""
        if self._command is not None:
            _end([self._command])
            self.poll()
            self._command.close()
