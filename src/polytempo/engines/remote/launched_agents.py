"""Agents that one command starts, all at once: `srun`, `mpirun` and their like, which know the hosts.

launcher ── one command ──▶ srun, mpirun ──▶ sh on each host ──▶ agent
                                             └ says on standard error how an agent ended that did not end well
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from polytempo.engines.processes.fork import held_signals, open_program
from polytempo.engines.remote.child_agents import quoted
from polytempo.engines.remote.starter import StartedAgent
from polytempo.engines.remote.ticket import TICKET_VARIABLE, AgentTicket

_END_S = 5.0
_SHELL = '"$@"; code=$?; [ $code = 0 ] || echo "agent on $(uname -n) ended with exit code $code" >&2'


def in_shell(words: Sequence[str]) -> list[str]:
    """The command behind a shell that ends well however the command ends.

    Most launchers end all processes of a run as soon as one of them has failed; here the others go on.
    """
    return ["sh", "-c", _SHELL, "agent", *words]


class LaunchedAgents:
    """Starts all agents by one command; see `AgentStarter`. `where` says for messages where each of them is.

    They get the ticket on their standard input, which is the command's, or, where `by_variable`, in the variable
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
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """See `AgentStarter`. The agents do not know their numbers: the head deals them out."""
        assert self._process is None
        assert len(numbers) == len(self._where)
        self._agents = [StartedAgent(number, self._where[number]) for number in numbers]
        secret = ticket.to_json()
        environment = self._environment | ({TICKET_VARIABLE: secret} if self._by_variable else {})
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        with held_signals():  # a process that has been started is known here, too
            try:
                self._process = open_program(
                    self._words,
                    stdin=subprocess.DEVNULL if self._by_variable else subprocess.PIPE,
                    stdout=self._said,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the run in order
                )
            except OSError as error:
                self._said.close()
                raise ValueError(f"cannot start {self._words[0]} ({error.strerror})") from error
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as stdin:  # one that has ended: `poll` says how
                stdin.write(secret.encode() + b"\n")
        return self._agents

    def poll(self) -> None:
        """See `AgentStarter`. Single ends are not seen here: the head misses the agent."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        for agent in self._agents:
            agent.ended = agent.ended or f"ended when {self._words[0]} did, with exit code {code}{quoted(self._said)}"

    def stop(self) -> None:
        """See `AgentStarter`. The command ends by itself once all agents have."""
        if self._process is None:
            return
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None and self._process.poll() is None:
                self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self.poll()
        if self._said is not None:
            self._said.close()
