"""`LoopServer`: the process that rank 0 starts beside a loop of one's own. It is the coordinator, and has the shards.

rank 0 ── LoopFacts (JSON, vectors) ──▶ LoopServer ── fork ──▶ copies of shards
                                                   └─ agents of ranks that serve ── fork ──▶ copies of shards
every rank ◀── mail: tickets, weights, gradients ──▶ both

Ranks are not its children: it looks for the ends of ranks on its own host, and deals their batches to the others.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from polytempo.core import PolytempoError
from polytempo.engines.engine import Engine, Launch, Role
from polytempo.engines.join.init import host_digest
from polytempo.engines.local_engine import Local
from polytempo.engines.processes import janitor
from polytempo.engines.remote.messages import TravellingRun
from polytempo.engines.remote.remote_engine import opened_remote
from polytempo.engines.remote.ticket import AgentTicket, StartedAgent
from polytempo.runs.frame.live_run import RunEvents
from polytempo.runs.own_loop.shard_copy import hold_shard
from polytempo.runs.process.host_mail import HostMailboxes, KeeperMail
from polytempo.runs.process.mailbox_directory import MailboxDirectory, OpenMail
from polytempo.runs.served.process_account import ProcessSupervisor
from polytempo.runs.served.run_served import Launcher
from polytempo.runs.served.run_snapshot import SnapshotSaves
from polytempo.runs.served.served_node import Mailboxes, Setting
from polytempo.server.coordinator.coordinator import Listeners
from polytempo.server.coordinator.saved_schedule import encoded
from polytempo.server.loop import serve
from polytempo.server.message import Outbox, RunFailed
from polytempo.spec.run_options import RunOptions
from polytempo.training.own_loop.loop_facts import LoopFacts
from polytempo.training.served.server_facts import facts_of
from polytempo.wire.keys import Keys, write_keys
from polytempo.worlds.process.mail import MailWorld

_MOST_EPOCHS = 1 << 24
_GRACE_S = 3.0
"""The time that copies have to end."""
_LINGER_S = 1.0
"""The time that last messages have to leave."""
_STOPPED_S = 30.0
"""A rank that a signal has stopped for so long is lost."""


def bracketed(host: str) -> str:
    """A host as a part of an address: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


class LoopServer:
    """One loop's server. `order`: the ranks' process ids, the keys, this host, and the ranks that serve.

    `say(line)` sends a line to rank 0; `orders` is the descriptor of rank 0's last message.
    """

    def __init__(
        self, facts: LoopFacts, order: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None], orders: int
    ) -> None:
        self.facts, self._order, self._say, self._orders = facts, order, say, orders
        os.set_blocking(orders, False)
        self.plan = facts.plan
        self.topology, self.incarnation = facts.plan.topology, facts.plan.incarnation
        self.options = RunOptions(timeout_s=facts.timeout_s)
        self.events = RunEvents(lambda line: print(f"polytempo: parameter server: {line}", file=sys.stderr, flush=True))
        self.on_event: Callable[[tuple[str, int]], None] = lambda event: None
        each = facts.batches_per_epoch
        self.scheduler = self.plan.scheduler(each, _MOST_EPOCHS * each, pauses=True, run=facts.in_a_row)
        if facts.epochs_done:
            done = facts.epochs_done * each
            self.scheduler.load(encoded(each, done, ((0, done - 1),)))
        self.coordinator = self.plan.coordinator(
            self.scheduler, Listeners(on_row=self._hear, on_event=lambda event: self.on_event(event))
        )
        self.saves: SnapshotSaves | None = None
        self.out = None
        self._folder: Path | None = None
        self._ranks = _Ranks(order["processes"])
        self._lost = set[int]()
        """The first ranks of lost replicas."""
        self._zero_s = time.monotonic()

    # ------------------------------------------------------------------ the process's life

    def serve(self) -> dict[str, Any]:
        """Be the server until the loop ends; returns its account of the loop."""
        facts = self.facts
        with ExitStack() as stack:
            setting = self._setting if facts.servers else dict
            launch = Launch(self._hold, None, setting, facts.workers, self.plan.most_lives, self._order["threads"])
            engine = stack.enter_context(self._on_servers(launch) if facts.servers else Local().open(launch))
            home = engine.address.home
            self._line, self._mailboxes, address = self._meet(home)
            stack.callback(self._line.close, _LINGER_S)
            supervisor = ProcessSupervisor(engine, self.topology)
            for shard, chain in enumerate(self.topology.chains):
                for node in chain:
                    supervisor.start("copy", node, shard=shard)
            self._say({"ready": str(home or self._folder), "coordinator": address})
            launcher = Launcher(self, supervisor)
            self._conduct(launcher)
            self.events.restarts = launcher.restarts
            launcher.dismiss()
            supervisor.wait(_GRACE_S)
            engine.stop()
        statistics = [shard for _, shard in sorted(self.coordinator.statistics.items())]
        return {
            **facts_of(self.plan.service, statistics, [], 0),
            **self.events.facts,
            "done": self.scheduler.done,
            "tickets": [shard.tickets for shard in statistics],
        }

    @contextmanager
    def _on_servers(self, launch: Launch) -> Iterator[Engine]:
        """The engine for processes on the ranks that serve."""
        order, blobs = self._order["servers"], self.facts.blobs
        home = Path(tempfile.gettempdir()).absolute() / f"polytempo-{secrets.token_hex(4)}"
        run = TravellingRun(json.dumps(self.facts.to_plain()), self.topology, b"".join(blobs))
        shared = Keys.from_plain(self._order["keys"]) if order["have_keys"] else None
        with janitor.swept(home):
            self._folder = home
            if not order["spread"]:
                write_keys(home / "keys", Keys.from_plain(self._order["keys"]))  # for a worker that comes back
            agents = RankAgents(
                order["ranks"],
                lambda text: self._say({"ticket": text}),
                None if order["spread"] else home,
                have_keys=order["have_keys"],
            )
            with opened_remote(
                launch, agents, self.facts.servers, address=self._order["host"], run=run, keys=shared
            ) as engine:
                yield engine

    def _meet(self, home: Path | None) -> tuple[OpenMail, Mailboxes, str]:
        """The coordinator's line, the mailboxes of the copies, and the coordinator's address for other hosts."""
        node, most_bytes = self.topology.coordinator, self.plan.mail_bytes
        if self._order["keys"] is None:
            assert home is not None
            directory = MailboxDirectory(home, "shared", None, most_bytes)
            directory.open()
            return directory.mailbox(node), directory, ""
        keys, host = Keys.from_plain(self._order["keys"]), bracketed(self._order["host"])
        keeper = KeeperMail(node, host, keys, most_bytes)
        return keeper, HostMailboxes(0, host, keys, most_bytes, (node, keeper.address)), keeper.address

    def _conduct(self, launcher: Launcher) -> None:
        world = MailWorld(self.topology.coordinator, self._line, self.plan.hosts, zero_s=self._zero_s)
        try:
            world.drive(serve(world.port, launcher))
        except BaseException as error:
            reason = str(error) if isinstance(error, _LoopEnded) else f"the parameter server has ended: {error}"
            for rank in self.topology.workers:
                self._line.post(rank, RunFailed(reason))
            raise

    def _hold(self, role: Role) -> Mapping[str, Any]:
        return hold_shard(self.facts, role, self.coordinator.view, self._mailboxes, self._zero_s)

    def _setting(self) -> Mapping[str, Any]:
        """Facts for a copy in a process of a rank that serves."""
        assert isinstance(self._line, KeeperMail)
        keeper = [self.topology.coordinator, self._line.address]
        now = Setting(view=self.coordinator.view, zero_s=self._zero_s)
        return {"keeper": keeper, "keys": self._order["keys"], **now.to_plain()}

    # ------------------------------------------------------------------ between messages

    def look(self, now_s: float, out: Outbox) -> None:
        """Look for ended ranks and for an order of rank 0; called now and then."""
        self._read_orders()
        for rank, how in self._ranks.gone():
            out += self._lose(now_s, rank, how)
        if not self._ranks.present:
            self.coordinator.finished = True
        for rank in self._ranks.present:
            self.coordinator.failure_detector.note_alive(now_s, rank)

    def _lose(self, now_s: float, rank: int, how: str) -> Outbox:
        """Take the end of a rank. If it held a stage, the others of its replica cannot go on, and get the reason."""
        replica = self.topology.replica_of(rank)
        if rank != replica[0] and self.coordinator.scheduler.finished:
            return []  # it has left: the first stage, which may still fetch its weights, says goodbye for all
        out = [] if replica[0] in self._lost else self.coordinator.lose(now_s, replica[0])
        if self.coordinator.scheduler.finished or replica[0] in self._lost:
            return out
        self._lost.add(replica[0])
        then = "its batches go to the others"
        if len(replica) > 1:
            then = f"ranks {', '.join(map(str, replica))} held a model together; {then}"
            stage = self.topology.stage_of(rank)
            reason = (
                f"rank {rank}, which held stage {stage} of the model that ranks {', '.join(map(str, replica))} held "
                f"together, {how}; go on from the last training_state(), or make a job of it: pt.run starts it again"
            )
            for other in replica:
                self._line.post(other, RunFailed(reason))
        self.events.add(f"rank {rank}", how, now_s, then)
        return out

    def _hear(self, row: bytes) -> None:
        told = json.loads(row)
        if told["kind"] == "leave":
            self.scheduler.retire(told["worker"])
        elif told["kind"] == "stop":
            self.coordinator.stop()
        elif told["kind"] == "return":
            here = told["host"] == host_digest()
            self._ranks.come_back(told["worker"], told["process"] if here else None)
            self._lost.discard(told["worker"])
            now_s = time.monotonic() - self._zero_s
            self.events.add(f"rank {told['worker']}", "has come back", now_s, "it takes part again")

    def _read_orders(self) -> None:
        with suppress(BlockingIOError):
            text = os.read(self._orders, 1 << 16)
            reason = json.loads(text)["end"] if text else "it has gone"
            raise _LoopEnded(f"rank 0 has ended, and the parameter server with it: {reason}")


class _LoopEnded(PolytempoError):
    """Rank 0 has ended before its time."""


class _Ranks:
    """The ranks that are processes of this host. Ranks on other hosts (None) count as present."""

    def __init__(self, processes: list[int | None]) -> None:
        self._processes = processes
        self.present = set(range(len(processes)))
        """The ranks without a known end."""
        self._descriptors: dict[int, int] = {}
        self._stopped_s: dict[int, float] = {}
        for rank, process in enumerate(processes):
            if process is not None:
                with suppress(OSError, AttributeError):  # it has ended already; macOS has no pidfd
                    self._descriptors[rank] = os.pidfd_open(process)

    def come_back(self, rank: int, process: int | None) -> None:
        """Take a new process in the place of an ended one."""
        self._processes[rank] = process
        self.present.add(rank)
        if (before := self._descriptors.pop(rank, None)) is not None:
            os.close(before)
        if process is not None:
            with suppress(OSError, AttributeError):
                self._descriptors[rank] = os.pidfd_open(process)

    def gone(self) -> list[tuple[int, str]]:
        """(rank, reason) of the ranks that have ended since the last call, or are stopped for too long."""
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


class RankAgents:
    """The agents of ranks that serve (see `AgentStarter`): they wait for a ticket, and rank 0 hands it on.

    `hand_over(text)` reaches all of `ranks`, and `engines.join.server_ranks` reads it.

    `folder`: a private folder of this host, if all ranks are on it; else the ticket travels, or only the head's
    address if the ranks `have_keys`.
    """

    replaces = False

    def __init__(
        self, ranks: Sequence[int], hand_over: Callable[[str], None], folder: Path | None, *, have_keys: bool
    ) -> None:
        self._ranks, self._hand_over, self._folder, self._have_keys = ranks, hand_over, folder, have_keys

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> Sequence[StartedAgent]:
        """See `AgentStarter`."""
        self._hand_over(self._text(ticket))
        return [StartedAgent(number, f"server (rank {self._ranks[number]})") for number in numbers]

    def poll(self) -> None:
        """Nothing: the head notices the end of an agent."""

    def stop(self) -> None:
        """Nothing: agents end on the head's order, or after its end."""

    def _text(self, ticket: AgentTicket) -> str:
        if self._have_keys:
            return ticket.head
        if self._folder is None:
            return ticket.to_json()
        path = self._folder / "ticket"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(ticket.to_json())
        return str(path)
