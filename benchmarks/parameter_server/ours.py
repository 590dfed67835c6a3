"""Ours: the classes of a run on real processes, without a coordinator: no process dies here.

worker    Client ── through ── MailWorld ── Mailbox      tensors in an arena (ipc), or as frames (tcp)
server    Shard ── Node ── serve ── MailWorld ── Mailbox
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from crew import Attend, Crew, RankInfo
from torch import Tensor

from polytempo.core import Port, Program, Strategy
from polytempo.core.rule import Service, UpdateRule
from polytempo.server.layout import Parameter, shard_map
from polytempo.server.loop import serve
from polytempo.server.message import COORDINATOR, Members, Message, View
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client
from polytempo.server.worker.host.lent_gradients import LentGradients
from polytempo.server.worker.server_calls import through
from polytempo.wire.keys import Keys, make_keys
from polytempo.wire.shared import Arenas
from polytempo.wire.zeromq import Mailbox
from polytempo.worlds.process.mail import MailWorld

Wire = Literal["shared memory", "tcp", "tcp, CURVE"]
SGD = UpdateRule("sgd", lr=1e-3)
_TIMING = Timing(retry_s=10.0, longest_retry_s=10.0)
"""Nothing is lost here; a request that is sent again would be measured as well."""


class Mail:
    """A mailbox that finds the others by their numbers: each writes its address into a file."""

    def __init__(self, node: int, home: Path, wire: Wire, arenas: Arenas, keys: Keys | None) -> None:
        local = wire == "shared memory"
        address = f"ipc://{home}/n{node}" if local else "tcp://127.0.0.1:*"
        self._mailbox = Mailbox(node, address, keys, references=arenas if local else None, keeps_memory=not local)
        self._home, self._known = home, set[int]()
        written = home / f"{node}.new"
        written.write_text(self._mailbox.address, encoding="ascii")
        written.rename(home / f"{node}.address")

    def post(self, to: int, message: Message) -> bool:
        """Send; without a receiver, drop."""
        if to not in self._known:
            try:
                self._mailbox.connect(to, (self._home / f"{to}.address").read_text(encoding="ascii"))
            except FileNotFoundError:
                return False
            self._known.add(to)
        return self._mailbox.post(to, message)

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message)."""
        return self._mailbox.take(wait_s)

    def wait_for(self, node: int) -> None:
        """Until that node can be found, at most a minute."""
        until_s = time.monotonic() + 60
        while not (self._home / f"{node}.address").exists():
            if time.monotonic() > until_s:
                raise TimeoutError(f"node {node} has not come")
            time.sleep(0.01)


def shard_of(numel: int, service: Service, empty: Callable[[int, torch.dtype], Tensor] | None = None) -> Shard:
    """One shard with all of `numel` parameters, updated by plain SGD."""
    parameters = (Parameter("weights", numel),)
    more = {} if empty is None else {"empty": empty}
    whole = replace(service, optimizer=SGD)
    return Shard(0, parameters, shard_map(parameters, 1)[0], torch.zeros(numel), whole, **more)


def node_of(shard: Shard, workers: int) -> Node:
    """The only copy of `shard`, on node `workers`, with all workers its members."""
    node = Node(workers, shard, workers + 1, _TIMING)
    members = tuple((worker, 1) for worker in range(workers))
    node.receive(0.0, workers + 1, View(1, ((workers,),), members))
    node.receive(0.0, workers + 1, Members(COORDINATOR, 1, 1, members))
    return node


Work = Callable[[Port, int, Tensor, int], Program[None]]


class Served:
    """A parameter server's processes: `workers` of them run `program`, one is the shard."""

    def __init__(self, name: str, numel: int, workers: int, wire: Wire, strategy: Strategy) -> None:
        assert strategy.server is not None
        self.numel, self.workers, self._wire, self._service = numel, workers, wire, strategy.server
        self._arenas = Arenas(workers + 1, (workers + 6) * 4 * numel + (64 << 20))
        self._folder = tempfile.TemporaryDirectory(prefix="polytempo-speed-")
        self._home = Path(self._folder.name)
        self._keys = make_keys() if wire == "tcp, CURVE" else None
        self.name = name

    def crew(self, program: Work) -> Crew:
        """The processes. `program(port, worker, gradient, calls)` is a worker's turn."""
        return Crew(self.name, [self._seat(worker, program) for worker in range(self.workers)], [self._serve])

    def _mail(self, node: int) -> Mail:
        return Mail(node, self._home, self._wire, self._arenas, self._keys)

    def _serve(self) -> None:
        def empty(numel: int, dtype: torch.dtype) -> Tensor:
            return self._arenas.empty(self.workers, numel, dtype)

        node = node_of(shard_of(self.numel, self._service, empty), self.workers)
        world = MailWorld(self.workers, self._mail(self.workers), [0] * (self.workers + 2))
        world.drive(serve(world.port, node))

    def _seat(self, worker: int, program: Work) -> RankInfo:
        def work(attend: Attend) -> None:
            def empty(numel: int, dtype: torch.dtype) -> Tensor:
                return self._arenas.empty(worker, numel, dtype)

            spans = shard_map((Parameter("weights", self.numel),), 1)
            memory = LentGradients(empty, lambda one: self._arenas.reference(one) is not None)
            client = Client(worker, 1, spans, ((self.workers,),), self.workers + 1, _TIMING, memory=memory)
            mail = self._mail(worker)
            mail.wait_for(self.workers)
            world = MailWorld(worker, mail, [0] * (self.workers + 2))
            gradient = empty(self.numel, torch.float32).fill_(1e-3)

            def run(calls: int) -> Any:
                turn = program(world.port, worker, gradient, calls)
                return world.drive(through(client, world.port, turn))

            attend(run)

        return work


async def push_and_pull(port: Port, worker: int, gradient: Tensor, calls: int) -> None:
    """The transforms `push` and `pull` do the same: begin a push, pull behind it, wait for both.

    The pulled weights have been copied into the worker's own memory.
    """
    for call in range(calls):
        push = await port.start(port.push(gradient, call))
        await port.pull(call)
        await push
