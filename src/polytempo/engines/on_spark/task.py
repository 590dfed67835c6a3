"""One task of a barrier stage: it starts an agent on its executor, and ends with it.

It is imported on executors, and loads nothing that is slow.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

AGENT = "polytempo.agent"

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2


class AgentEnd(NamedTuple):
    """The end of a task's agent."""

    task: int
    exit_code: int
    host: str


def agent_task(tickets: Sequence[str], module: str = AGENT) -> Callable[[Iterable[int]], Iterator[AgentEnd]]:
    """The function of a task. The tickets, by the number of the task, travel as Spark's tasks do."""

    def run(_: Iterable[int]) -> Iterator[AgentEnd]:
        from pyspark import BarrierTaskContext

        number = BarrierTaskContext.get().partitionId()
        code = run_agent([sys.executable, "-P", "-m", module], tickets[number])
        yield AgentEnd(number, code, socket.gethostname())

    return run


def run_agent(command: list[str], ticket: str) -> int:
    """Start the agent, hand it the ticket, and wait for its end; its exit code.

    The agent's output goes to the executor's log. Spark kills a task that is cancelled, by SIGKILL: then the kernel
    sends SIGTERM to the agent, which ends its workers.
    """
    parent = os.getpid()
    agent = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of ours
        command,
        stdin=subprocess.PIPE,
        stdout=_STANDARD_ERROR,
        start_new_session=True,
        preexec_fn=lambda: _end_with(parent),
    )
    assert agent.stdin is not None
    try:
        with agent.stdin as stdin:
            stdin.write(ticket.encode())
    except BrokenPipeError:
        pass  # it has ended already
    return agent.wait()


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the task's process dies, however that happens."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
