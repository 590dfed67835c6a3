"""An agent as the child of a process that another system has started and may end: a Ray actor, a dask worker.

    Ray, dask ──▶ their process, with threads of theirs ──▶ python -m polytempo.agent ── fork ──▶ processes of the run
                                                  ticket on standard input

A process with gRPC's or Tornado's threads must not fork, so the agent is a new interpreter. It ends when its parent is
gone, however that ended. Nothing here loads torch: a process that holds an agent stays small.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO

AGENT = "polytempo.agent"
_END_S = 10.0
"""An agent may take so long to end its processes and remove its files."""
_SAID_BYTES = 2000


class HeldAgent:
    """An agent that runs as this process's child. OSError where it cannot be started.

    `module` is the module that Python runs. Its standard output and error are read once it has ended.
    """

    def __init__(self, ticket: str, module: str = AGENT) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `how` closes it
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of ours
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,  # a Ctrl-C at its parent's terminal is its parent's alone
            )
        except OSError:
            self._said.close()
            raise
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # where it has ended already, `how` says so
            stdin.write(ticket.encode() + b"\n")

    def wait(self, wait_s: float | None = None) -> bool:
        """True if it has ended within `wait_s`. None: wait until it has."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def ended_well(self) -> bool:
        """True if it has ended, with exit code 0."""
        return self._process.poll() == 0

    def end(self) -> None:
        """End it and all that it has started: politely, then for certain."""
        self._process.terminate()
        if not self.wait(_END_S):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its children in other groups die with it
            self.wait()

    def how(self) -> str:
        """The end in words, with the last line of its output. It waits for its end; call it once."""
        code = self._process.wait()
        with self._said as said:
            said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_BYTES))
            lines = said.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{ended} and said: {last}" if last else ended


class AgentHolder:
    """Holds one agent: `hold` returns when it has ended, and another thread may call `end` meanwhile."""

    def __init__(self, module: str = AGENT) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._agent: HeldAgent | None = None
        self._over = False

    def hold(self, ticket: str, look_s: float | None = None) -> str:
        """Start the agent and wait for its end; how it ended, in words.

        It raises nothing: systems log the arguments of a function that has raised, and the ticket is a secret. With
        `look_s`, it asks `unwanted` that often, and ends the agent where that is true.
        """
        try:
            with self._lock:
                if self._over:
                    return "was ended before it began"
                agent = self._agent = HeldAgent(ticket, self._module)
        except OSError as error:
            return f"could not be started: {error}"
        while not agent.wait(look_s):
            if self.unwanted():
                agent.end()
        return agent.how()

    def unwanted(self) -> bool:
        """True if the system that runs this process has given the agent up."""
        return False

    def end(self) -> None:
        """End the agent, or see that it does not begin. It may be called twice."""
        with self._lock:
            self._over = True
        if self._agent is not None:
            self._agent.end()
