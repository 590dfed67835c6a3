"""The remote engine's places for processes: their agent, and the fate of processes that wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import polytempo as pt
from polytempo.engines.engine import Launch, Role
from polytempo.engines.remote import remote_engine
from polytempo.engines.remote.messages import (
    AgentBeat,
    Bye,
    Close,
    Ended,
    FromAgent,
    Hello,
    StartProcess,
    StopProcess,
    ToAgent,
    Welcome,
)
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote
from polytempo.engines.remote.ticket import AgentTicket, StartedAgent
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.wire.channel import ChannelClient

LONG_S = 30.0


class Pretended:
    """An agent that says hello, notes its orders, and starts nothing."""

    def __init__(self, ticket: AgentTicket, number: int, host: str) -> None:
        self.started: list[str] = []
        self.stopped: list[int] = []
        self.closed = False
        self._line: ChannelClient[Any, Any] = ChannelClient(ticket.head, ticket.keys, ToAgent)  # type: ignore[arg-type]
        self._line.send(Hello(number, host, host, "127.0.0.1", 4))

    def read(self, least: int = 0) -> list[str]:
        """The roles that it is to start; waits until there are so many."""
        while (message := self._line.take(LONG_S if len(self.started) < least else 0.0)) is not None:
            if isinstance(message, StartProcess):
                self.started.append(str(Role(**message.role)))
            elif isinstance(message, StopProcess):
                self.stopped.append(message.life)
            else:
                assert isinstance(message, Welcome | Close)
                self.closed = self.closed or isinstance(message, Close)
        return self.started

    def say(self, message: FromAgent) -> None:
        self._line.send(message)

    def leave(self) -> None:
        self._line.send(Bye())
        self._line.close(1.0)


class Starter:
    """Starts pretended agents on the hosts that are named, by number; beyond them, agents that end without a word."""

    def __init__(self, *hosts: str, replaces: bool = False) -> None:
        self.hosts, self.replaces = hosts, replaces
        self.agents: list[Pretended] = []
        self.begun: list[StartedAgent] = []

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> list[StartedAgent]:
        new = [StartedAgent(number, f"host {number}") for number in numbers]
        for agent in new:
            if agent.number < len(self.hosts):
                self.agents.append(Pretended(ticket, agent.number, self.hosts[agent.number]))
            else:
                agent.ended = "ended with exit code 1 and said: no torch"
        self.begun += new
        return new

    def poll(self) -> None:
        pass

    def stop(self) -> None:
        while self.agents:
            self.agents.pop().leave()


@contextmanager
def opened(starter: Starter, agents: int, slots: int | None = None) -> Iterator[RemoteEngine]:
    spec = RunSpec.of(pt.jobs.find("digits"), pt.strategies.downpour(replicas=1), 2, RunOptions(steps=1))
    launch = Launch(lambda role: None, spec, dict, 2, 9)
    with opened_remote(launch, starter, agents, address="127.0.0.1", slots=slots, wait_s=LONG_S) as engine:
        try:
            yield engine
        finally:
            starter.stop()


def copy(node: int) -> Role:
    return Role("copy", node, node, shard=0)


def test_copies_of_a_shard_are_on_different_hosts_and_otherwise_on_different_agents() -> None:
    starter = Starter("n1", "n1", "n2")
    with opened(starter, 3) as engine:
        assert engine.address.num_hosts == 2
        for node in (2, 3, 4):
            engine.start(copy(node), host=0)
        assert [agent.read(1) for agent in starter.agents] == [
            ["shard-0-node-2"],
            ["shard-0-node-4"],
            ["shard-0-node-3"],
        ]


def test_what_waits_for_room_has_one_agent_each_started() -> None:
    """Two wait; the first agent that comes takes one of them, and no third agent is started for the other."""
    starter = Starter("n1", "n2", "n3", replaces=True)
    with opened(starter, 1, slots=1) as engine:
        for worker in range(3):
            engine.start(Role("worker", worker, worker))
        for _ in range(100):
            engine.poll(0.05)
            if sum(len(agent.read()) for agent in starter.agents) == 3:
                break
        assert [len(agent.read(1)) for agent in starter.agents] == [1, 1, 1]
        assert [agent.number for agent in starter.begun] == [0, 1, 2]


def test_it_is_given_up_where_agents_end_without_a_word() -> None:
    starter = Starter("n1", replaces=True)
    with opened(starter, 1, slots=1) as engine:
        engine.start(Role("worker", 0, 0))
        waiting = engine.start(Role("worker", 1, 1))
        assert engine.poll(LONG_S) == [waiting]
        assert waiting.failed
        assert "no agent came to start it: host 3 ended with exit code 1 and said: no torch" in waiting.log.read_text()


def test_one_that_waits_can_be_stopped() -> None:
    starter = Starter("n1", replaces=True)
    with opened(starter, 1, slots=1) as engine:
        engine.start(Role("worker", 0, 0))
        waiting = engine.start(Role("worker", 1, 1))
        engine.stop(waiting)
        assert engine.poll() == [waiting]


def until(engine: RemoteEngine, agent: Pretended, condition: Callable[[], bool]) -> None:
    """Let both listen until the condition holds."""
    for _ in range(500):
        engine.poll(0.02)
        agent.read()
        if condition():
            return
    pytest.fail("it never happened")


def test_orders_that_a_broken_connection_has_lost_are_given_again() -> None:
    starter = Starter("n1")
    with opened(starter, 1) as engine:
        (agent,) = starter.agents
        process = engine.start(Role("worker", 0, 0))
        assert agent.read(1) == ["worker-0"]
        agent.say(AgentBeat(running=(0,)))
        agent.say(AgentBeat())
        until(engine, agent, lambda: len(agent.started) == 2)
        agent.say(AgentBeat(running=(0, 7)))  # it was not heard that the head has given up life 7
        until(engine, agent, lambda: agent.stopped == [7])
        engine.stop(process)
        until(engine, agent, lambda: agent.stopped == [7, 0])
        agent.say(AgentBeat(running=(0,)))
        until(engine, agent, lambda: agent.stopped == [7, 0, 0])
        agent.say(Ended(0, -9))
        assert engine.poll(LONG_S) == [process]
        assert len(agent.started) == 2


def test_an_agent_that_was_taken_for_lost_and_comes_back_is_ended() -> None:
    starter = Starter("n1", "n2")
    with opened(starter, 2) as engine:
        agent = starter.agents[0]
        agent.say(Bye())
        until(engine, agent, lambda: agent.closed)
        agent.closed = False  # as if that had been lost
        agent.say(AgentBeat())
        until(engine, agent, lambda: agent.closed)


def test_an_agent_that_comes_long_before_the_last_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent says nothing until it is welcome: here for 20 s, while the other one loads torch."""
    admit, ahead_s = RemoteEngine._admit, [0.0]

    def admitted(engine: RemoteEngine, peer: bytes, hello: Hello) -> None:
        admit(engine, peer, hello)
        ahead_s[0] = 20.0

    monkeypatch.setattr(RemoteEngine, "_admit", admitted)
    monkeypatch.setattr(remote_engine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0]))
    starter = Starter("n1", "n2")
    with opened(starter, 2) as engine:
        for worker in range(2):
            engine.start(Role("worker", worker, worker), host=worker)
        assert engine.poll() == []
        assert sorted(agent.read(1) for agent in starter.agents) == [["worker-0"], ["worker-1"]]
        assert [agent.lost for agent in engine._agents] == [None, None]


def test_without_room_and_without_another_agent_it_ends() -> None:
    starter = Starter("n1")
    with opened(starter, 1, slots=1) as engine:
        engine.start(Role("worker", 0, 0))
        ended = engine.start(Role("worker", 1, 1))
        assert engine.poll() == [ended]
        assert "no agent is left" in ended.log.read_text()


def test_agents_that_do_not_come_are_named() -> None:
    with (
        pytest.raises(
            pt.errors.PolytempoError, match="0 of 1 agents have joined the run: host 0 ended with exit code 1"
        ),
        opened(Starter(), 1),
    ):
        pass
