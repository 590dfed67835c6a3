"""Agents that one command starts: the way of the ticket, the words about their ends, and their ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polytempo.engines.processes.fork import held_signals, open_program
from polytempo.engines.remote import command_agents
from polytempo.engines.remote.command_agents import LaunchedAgents, in_shell
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.keys import make_keys

WHERE = ["node n1", "node n2"]
LONG_S = 60.0


@pytest.fixture
def ticket() -> AgentTicket:
    return AgentTicket("tcp://127.0.0.1:4711", make_keys())


@contextmanager
def started(starter: LaunchedAgents, ticket: AgentTicket) -> Iterator[subprocess.Popen[bytes]]:
    """The command's process, once its agents are started; they are ended at the end."""
    agents = starter.start([0, 1], ticket)
    assert [(agent.number, agent.where, agent.ended) for agent in agents] == [
        (0, "node n1", None),
        (1, "node n2", None),
    ]
    assert starter._command.process is not None
    try:
        yield starter._command.process
    finally:
        starter.stop()


def test_the_ticket_is_on_standard_input_and_nowhere_else(ticket: AgentTicket, tmp_path: Path) -> None:
    script = f'cat > {tmp_path}/given; env > {tmp_path}/env; echo "$@" > {tmp_path}/words'
    with started(LaunchedAgents(["sh", "-c", script], WHERE), ticket) as process:
        assert process.wait(LONG_S) == 0
    assert AgentTicket.from_json((tmp_path / "given").read_text()) == ticket
    for name in ("env", "words"):
        assert not any(secret in (tmp_path / name).read_text() for secret in ticket.keys.to_plain().values())


def test_where_standard_input_reaches_one_process_alone_it_is_a_variable(
    ticket: AgentTicket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'cat > {tmp_path}/given; printf %s "$POLYTEMPO_TICKET" > {tmp_path}/variable'
    starter = LaunchedAgents(["sh", "-c", script], WHERE, by_variable=True)
    with started(starter, ticket) as process:
        assert process.wait(LONG_S) == 0
    assert (tmp_path / "given").read_text() == ""
    monkeypatch.setenv("POLYTEMPO_TICKET", (tmp_path / "variable").read_text())
    assert AgentTicket.read() == ticket
    assert "POLYTEMPO_TICKET" not in os.environ  # the agent's processes do not inherit it


def test_when_the_command_ends_all_agents_have_ended_and_it_is_quoted(ticket: AgentTicket) -> None:
    starter = LaunchedAgents(["sh", "-c", "echo no such host: n2 >&2; exit 3"], WHERE)
    with started(starter, ticket) as process:
        process.wait(LONG_S)
        starter.poll()
        ends = {agent.ended for agent in starter._agents}
        assert ends == {"ended when sh did, with exit code 3 and said: no such host: n2"}


def test_one_agent_that_fails_leaves_the_others_and_a_line(ticket: AgentTicket) -> None:
    """The launcher sees a good end of the shell around the agent."""
    both = " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in in_shell(["sh", "-c", "kill -9 $$"]))
    starter = LaunchedAgents(["sh", "-c", f"{both} || exit 1; echo the other goes on"], WHERE)
    with started(starter, ticket) as process:
        assert process.wait(LONG_S) == 0
        starter.poll()
        said = starter._agents[1].ended
        assert said is not None
        assert f"agent on {os.uname().nodename} ended with exit code 137 the other goes on" in said


def test_a_command_that_is_not_there_is_named(ticket: AgentTicket) -> None:
    with pytest.raises(ValueError, match=r"cannot start no-srun \(No such file or directory\)"):
        LaunchedAgents(["no-srun"], WHERE).start([0, 1], ticket)


def test_a_command_that_does_not_end_by_itself_is_ended(ticket: AgentTicket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_agents, "_END_S", 0.05)
    starter = LaunchedAgents(["sleep", "60"], WHERE)
    with started(starter, ticket) as process:
        pass
    assert process.returncode == -signal.SIGTERM
    starter.stop()


def test_a_program_does_not_inherit_that_signals_are_held_back() -> None:
    with held_signals():
        program = open_program(["sleep", "60"])
    program.terminate()
    assert program.wait(LONG_S) == -signal.SIGTERM
