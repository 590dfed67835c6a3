"""`LoopServer`: the process that rank 0 starts beside a loop of one's own. It is the coordinator, and has the shards.

rank 0 ── LoopFacts (JSON, vectors) ──▶ LoopServer ── fork ──▶ copies of shards
every rank ◀── mail: tickets, weights, gradients ──▶ both

Ranks are no children of it: it sees on its own host that one has ended, and deals its batches to the others.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from polytempo.core import PolytempoError
from polytempo.engines.engine import Launch, Role
from polytempo.engines.local_engine import Local
from polytempo.runs.events import RunEvents
from polytempo.runs.served.host_mail import HostMailboxes, KeeperMail
from polytempo.runs.served.mailbox_directory import MailboxDirectory
from polytempo.runs.served.run_served import Launcher
from polytempo.runs.served.run_snapshot import SnapshotSaves
from polytempo.runs.served.served_node import Mailboxes
from polytempo.runs.served.supervisor import ProcessSupervisor
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator
from polytempo.server.coordinator.listeners import Listeners
from polytempo.server.coordinator.nodes import Nodes
from polytempo.server.coordinator.resharding import Reshaper
from polytempo.server.layout import part
from polytempo.server.loop import serve
from polytempo.server.message import Message, Outbox, RunFailed
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.spec.options import RunOptions
from polytempo.training.loop_facts import LoopFacts
from polytempo.training.server_facts import facts_of
from polytempo.wire.keys import Keys
from polytempo.worlds.mail import MailWorld

_MOST_EPOCHS = 1 << 24
_MOST_HELD = 1024
"""A worker asks for one ticket at a time, so it holds as many as its strategy pushes together, and one or two more."""
_GRACE_S = 3.0
"""How long copies may take to end by themselves."""
_LINGER_S = 1.0
"""How long last messages may take to leave."""
_STOPPED_S = 30.0
"""A rank that a signal has stopped is lost after so long."""


class ServerLine(Protocol):
    """The coordinator's mail, or a rank's."""

    def post(self, to: int, message: Message) -> bool:
        """Send without waiting."""

    def take(self, wait_s: float | None = None) -> tuple[int, Message] | None:
        """The next (source, message)."""

    def close(self, linger_s: float = 0.0) -> None:
        """Let what was posted leave, and close."""


def bracketed(host: str) -> str:
    """A host as it stands in an address: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class LoopServer:
    """One loop's server. `order`: the ranks' process ids, the keys, this host; `say(line)` is heard by rank 0.

    `orders`: a descriptor from which rank 0's last word can be read.
    """

    def __init__(
        self, facts: LoopFacts, order: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None], orders: int
    ) -> None:
        self.facts, self._order, self._say, self._orders = facts, order, say, orders
        os.set_blocking(orders, False)
        self.topology, self.incarnation = facts.topology, 1
        self.options = RunOptions(timeout_s=facts.timeout_s)
        self.most_lives = facts.most_lives
        self.events = RunEvents()
        self.events.say = lambda line: print(f"polytempo: parameter server: {line}", file=sys.stderr, flush=True)
        self.on_event: Callable[[tuple[str, int]], None] = lambda event: None
        service = facts.service
        self.scheduler = BatchScheduler(
            batches_per_epoch=facts.batches_per_epoch,
            num_tickets=_MOST_EPOCHS * facts.batches_per_epoch,
            deals=service.deals,
            workers=facts.workers,
            warm_start=service.warm_start,
            most_held=_MOST_HELD,
            rests=service.waits,
            pauses=True,
        )
        self.coordinator = Coordinator(
            Nodes(self.topology.coordinator, self.topology.workers, self.topology.chains),
            self.scheduler,
            facts.timing,
            listeners=Listeners(on_row=self._hear, on_event=lambda event: self.on_event(event)),
            reshaper=Reshaper(facts.parameters, facts.spans),
        )
        self.saves: SnapshotSaves | None = None
        self.out = None
        self._ranks = _Ranks(order["processes"])
        self._zero_s = time.monotonic()

    # ------------------------------------------------------------------ the process's life

    def serve(self) -> dict[str, Any]:
        """Be the server until the loop ends; what there is to say of it."""
        facts = self.facts
        with ExitStack() as stack:
            launch = Launch(self._hold, None, dict, facts.workers, self.most_lives, self._order["threads"])
            engine = stack.enter_context(Local().open(launch))
            home = engine.address.home
            assert home is not None
            self._line, self._mailboxes, address = self._meet(home)
            stack.callback(self._line.close, _LINGER_S)
            supervisor = ProcessSupervisor(engine, self.topology)
            for shard, chain in enumerate(self.topology.chains):
                for node in chain:
                    supervisor.start("copy", node, shard=shard)
            self._say({"ready": str(home), "coordinator": address})
            launcher = Launcher(self, supervisor)
            self._conduct(launcher)
            self.events.restarts = launcher.restarts
            launcher.dismiss()
            supervisor.wait(_GRACE_S)
            engine.stop()
        statistics = [shard for _, shard in sorted(self.coordinator.statistics.items())]
        return {
            **facts_of(facts.service, statistics, [], 0),
            **self.events.facts,
            "done": self.scheduler.done,
            "tickets": [shard.tickets for shard in statistics],
        }

    def _meet(self, home: Path) -> tuple[ServerLine, Mailboxes, str]:
        """The coordinator's line, the mailboxes of the copies, and where ranks of other hosts reach the coordinator."""
        node, most_bytes = self.topology.coordinator, self.facts.mail_bytes
        if self._order["keys"] is None:
            directory = MailboxDirectory(home, "shared", None, most_bytes)
            directory.open()
            return directory.mailbox(node), directory, ""
        keys, host = Keys.from_plain(self._order["keys"]), bracketed(self._order["host"])
        keeper = KeeperMail(node, host, keys, most_bytes)
        return keeper, HostMailboxes(0, host, keys, most_bytes, (node, keeper.address)), keeper.address

    def _conduct(self, launcher: Launcher) -> None:
        world = MailWorld(self.topology.coordinator, self._line, self.facts.node_hosts, zero_s=self._zero_s)
        try:
            world.drive(serve(world.port, launcher))
        except BaseException as error:
            for rank in self.topology.workers:
                self._line.post(
                    rank,
                    RunFailed(
                        f"{error}" if isinstance(error, _LoopEnded) else f"the parameter server has ended: {error}"
                    ),
                )
            raise

    def _hold(self, role: Role) -> Mapping[str, Any]:
        """What a forked process does that is a copy of a shard."""
        facts, view, coordinator = self.facts, self.coordinator.view, self.topology.coordinator
        held = view.spans[role.shard]
        shard = Shard(
            role.shard,
            facts.parameters,
            held,
            part(facts.weights, held).clone(),
            facts.service,
            running=facts.running,
        )
        node = Node(role.node, shard, coordinator, facts.timing, blank=role.blank)
        line = self._mailboxes.mailbox(role.node, own_process=True)
        world = MailWorld(role.node, line, facts.node_hosts, zero_s=self._zero_s, max_events=0)
        try:
            for to, message in node.receive(world.now_s(), coordinator, view):
                line.post(to, message)
            world.drive(serve(world.port, node))
        finally:
            line.close(_LINGER_S)
        return {}

    # ------------------------------------------------------------------ between messages

    def look(self, now_s: float, out: Outbox) -> None:
        """Called now and then: have ranks ended, has rank 0 said something?"""
        self._read_orders()
        for rank, how in self._ranks.gone():
            out += self.coordinator.lose(now_s, rank)
            if not self.coordinator.scheduler.finished:
                self.events.add(f"rank {rank}", how, now_s, "its batches go to the others")
        if not self._ranks.present:
            self.coordinator.finished = True
        for rank in self._ranks.present:
            self.coordinator.failure_detector.note_alive(now_s, rank)

    def _hear(self, row: bytes) -> None:
        told = json.loads(row)
        if told["kind"] == "leave":
            self.scheduler.retire(told["worker"])

    def _read_orders(self) -> None:
        with suppress(BlockingIOError):
            text = os.read(self._orders, 1 << 16)
            reason = json.loads(text)["end"] if text else "it has gone"
            raise _LoopEnded(f"rank 0 has ended, and the parameter server with it: {reason}")


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, _LoopEnded) else f"the parameter server has ended: {error}"


class _LoopEnded(PolytempoError):
    """Rank 0 has ended before its time."""


class _Ranks:
    """Those ranks that are processes of this host, and whether they run. Of others (None) nothing is seen."""

    def __init__(self, processes: list[int | None]) -> None:
        self._processes = processes
        self.present = set(range(len(processes)))
        """The ranks that are not known to have ended."""
        self._descriptors: dict[int, int] = {}
        self._stopped_s: dict[int, float] = {}
        for rank, process in enumerate(processes):
            if process is not None:
                with suppress(OSError, AttributeError):  # it has ended already; macOS has no pidfd
                    self._descriptors[rank] = os.pidfd_open(process)

    def gone(self) -> list[tuple[int, str]]:
        """(rank, how it was lost) of those that have ended since the last call, or are stopped for too long."""
        lost = [(rank, "has ended") for rank in sorted(self.present) if self._has_ended(rank)]
        now_s = time.monotonic()
        for rank in sorted(self.present - {rank for rank, _ in lost}):
            if not self._is_stopped(rank):
                self._stopped_s.pop(rank, None)
            elif now_s - self._stopped_s.setdefault(rank, now_s) > _STOPPED_S:
                lost.append((rank, f"has been stopped by a signal for {_STOPPED_S:g} s"))
        self.present -= {rank for rank, _ in lost}
        return lost

    def _has_ended(self, rank: int) -> bool:
        process = self._processes[rank]
        if process is None:
            return False
        if rank in self._descriptors:
            return bool(select.select([self._descriptors[rank]], [], [], 0)[0])
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        return False

    def _is_stopped(self, rank: int) -> bool:
        process = self._processes[rank]
        if process is None:
            return False
        with suppress(OSError):
            return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1] == "T"
        return False
