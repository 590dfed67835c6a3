"""A loop's parameter server in the process of the loop itself: the same machines, fed one message after the other."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import polytempo.runs.own_loop.attach
from polytempo.runs.own_loop.loop_server import LoopServer
from polytempo.server.message import Message
from polytempo.training.own_loop.loop_facts import LoopFacts
from polytempo.worlds import ProcessWorld

_PAUSE_S = 0.05


class InProcess:
    """Starts the server, is the link to it, and is its mail: see `ServerStart`, `ServerLink` and `Mail`."""

    def __init__(self, world: ProcessWorld) -> None:
        assert world.size == 1
        self.mail = self
        self.greeting: tuple[bytes, ...] = ()
        self.epochs_behind = 0
        self.account: dict[str, Any] | None = None
        self._now_s = 0.0
        self._inbox: deque[tuple[int, Message]] = deque()
        self._under_way: deque[tuple[int, int, Message]] = deque()

    def link(self, world: ProcessWorld, facts: LoopFacts) -> InProcess:
        text = facts.to_plain()
        facts = LoopFacts.from_plain(text, *facts.blobs)  # the sent bytes
        orders, self._orders = os.pipe()
        server = LoopServer(facts, {"processes": [os.getpid()], "keys": None}, lambda line: None, orders)
        plan = facts.plan
        self.server, self._at = server, plan.topology.coordinator
        self._machines: dict[int, Any] = {self._at: server.coordinator}
        for number, chain in enumerate(plan.topology.chains):
            for node in chain:
                self._machines[node] = plan.copy(node, plan.shard(number))
                self._deliver(self._at, node, server.coordinator.view)
        return self

    def cancel(self) -> None:
        pass

    def close(self, *, wait_s: float = 0.0, reason: str = "") -> None:
        for _ in range(100):
            self._tick()
        statistics = [shard for _, shard in sorted(self.server.coordinator.statistics.items())]
        self.account = {
            "done": self.server.scheduler.done,
            "tickets": [shard.tickets for shard in statistics],
            "reason": reason,
        }

    def post(self, to: int, message: Message) -> bool:
        self._under_way.append((0, to, message))
        self._deliver_all()
        return True

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        for _ in range(200):
            if self._inbox:
                return self._inbox.popleft()
            self._tick()
            if wait_s is not None and wait_s <= _PAUSE_S:
                return self._inbox.popleft() if self._inbox else None
        return None

    def _tick(self) -> None:
        self._now_s += _PAUSE_S
        for node, machine in self._machines.items():
            self._under_way += [(node, to, message) for to, message in machine.tick(self._now_s)]
            self._deliver_all()

    def _deliver_all(self) -> None:
        while self._under_way:
            self._deliver(*self._under_way.popleft())

    def _deliver(self, source: int, to: int, message: Message) -> None:
        if to in self._machines:
            out = self._machines[to].receive(self._now_s, source, message)
            self._under_way += [(to, other, answer) for other, answer in out]
        else:
            self._inbox.append((source, message))


@contextmanager
def in_process() -> Iterator[None]:
    """Inside, `attach` starts servers in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polytempo.runs.own_loop.attach, "LoopServerStart", InProcess)
        yield
