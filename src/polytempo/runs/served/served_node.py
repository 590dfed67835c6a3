"""One process of a run with a parameter server: a worker, a copy of a shard, or the evaluator.

    RunSpec + Role + Setting + mail ──▶ act(…) ──▶ its trace and its account

It has no other inputs. Forked processes have these in memory; other engines send them as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct, structs
from torch import Tensor

from polytempo.core import NotFinite, world_port
from polytempo.core.system.folder_lock import machine_identity
from polytempo.core.system.notice import Notice, noticed
from polytempo.core.system.url_path import Place
from polytempo.engines.engine import Role
from polytempo.runs.process.mailbox_directory import OpenMail
from polytempo.runs.served.lost_launcher import SAVE_AND_LEAVE, LeavingCopy
from polytempo.runs.served.recording import CopyRecorder
from polytempo.runs.served.served_program import ServedProgram
from polytempo.server.coordinator.evaluator import Evaluator
from polytempo.server.layout import Parameter, Spans, describe, flat_index
from polytempo.server.loop import Machine, serve
from polytempo.server.message import Entry as ShardEntry
from polytempo.server.message import View
from polytempo.server.pieces import split, without_tables
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.score_snapshots import ScoreSnapshots, Showing
from polytempo.server.snapshots.snapshot import SnapshotWriter, WrittenSnapshot, read, snapshot_errors
from polytempo.server.worker.host.lent_gradients import LentGradients
from polytempo.spec.run_options import RunOptions
from polytempo.training.model.run_device import run_device
from polytempo.training.served.server_plan import ServerPlan
from polytempo.training.served.worker_program import performed_work
from polytempo.wire.shared import Arenas
from polytempo.worlds import MOST_WRITTEN
from polytempo.worlds.process.mail import MailWorld
from polytempo.worlds.trace_tail import tail_of

_LINGER_S = 1.0
"""The time that a process has for its last messages."""
_LONGEST_WRITE_S = 300.0


class Setting(Struct, frozen=True):
    """Facts about the run at the start of a process."""

    view: View
    """The present chains and spans."""
    zero_s: float
    """The run's begin on this host's monotonic clock: the zero of all processes' clocks."""
    record: str | None = None
    """The path of the copies' records."""
    snapshot: int | None = None
    """Copies begin with this snapshot in the run's folder; None: with the job's own weights."""
    if_lost: int | None = None
    """Copies save this snapshot if the launcher is lost; None: they end with it."""
    hosts: tuple[int, ...] = ()
    """Each node's host, if there are several."""

    def to_plain(self) -> dict[str, Any]:
        """The facts for JSON. Another machine's monotonic clock has another zero, and its wall clock may be wrong, so
        it gets the time of this clock.
        """
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain | {"clock": [machine_identity(), time.monotonic()]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Setting:
        """The facts of `to_plain`; on another machine the clock lacks the time of their travel."""
        found, (machine, then_s) = msgspec.convert(plain, cls), plain["clock"]
        if machine == machine_identity():
            return found
        return structs.replace(found, zero_s=found.zero_s + time.monotonic() - then_s)


class Mailboxes(Protocol):
    """Gives each process its mailbox."""

    def mailbox(self, node: int, *, own_process: bool = False) -> OpenMail:
        """The mailbox of `node`, in the node's process.

        `own_process`: this process is only that node, and may keep its memory (see `wire.memory`). The coordinator's
        process is the user's own.
        """


@contextmanager
def joined_mail(
    mail: Mailboxes, node: int, plan: ServerPlan, zero_s: float, *, out: Place | None = None, max_events: int = 20_000
) -> Iterator[tuple[OpenMail, MailWorld]]:
    """The mailbox of this process, which is `node`, and the world of its messages. Last messages may take a second.

    `out`: the run's folder, which has the last operations while the run goes on.
    """
    line = mail.mailbox(node, own_process=True)
    try:
        world = MailWorld(node, line, plan.hosts, zero_s=zero_s, max_events=max_events)
        world.trace.show_in(tail_of(out, node))
        yield line, world
    finally:
        line.close(_LINGER_S)


def act(
    program: ServedProgram, role: Role, setting: Setting, mail: Mailboxes, arenas: Arenas | None = None
) -> Mapping[str, Any] | None:
    """Be `role` until the run is over. `arenas`: memory that all processes share, one for each life."""
    part = _Part(program, role, setting, mail, arenas)
    # SIGTERM, which all processes may get, ends neither a copy nor the evaluator: first the run is saved
    with noticed(program.spec.options.grace_s) as notice:
        if role.kind == "evaluator":
            part.evaluate()
            return None
        return part.train(_Leaving(notice)) if role.kind == "worker" else part.hold()


class _Leaving:
    """True if a worker has to leave; `left`: the worker has asked, and the answer was True."""

    def __init__(self, notice: Notice) -> None:
        self._notice, self.left = notice, False

    def __call__(self) -> bool:
        self.left = self._notice.given
        return self.left


class _Part:
    def __init__(
        self, program: ServedProgram, role: Role, setting: Setting, mail: Mailboxes, arenas: Arenas | None
    ) -> None:
        self._program, self._role, self._setting, self._arenas = program, role, setting, arenas
        self._plan, self._topology = program.plan, program.plan.topology
        self._chains = setting.view.chains
        self._mail = mail

    def train(self, leaving: _Leaving) -> Mapping[str, Any]:
        """Be a worker; returns the hash of its model, and its account."""
        role, arenas = self._role, self._arenas
        memory = None if arenas is None else LentGradients(self._empty, lambda one: arenas.reference(one) is not None)
        peers = self._plan.peers_of(role.node)
        client = self._plan.client(role.node, role.incarnation, self._chains, memory=memory, peers=peers)
        port = world_port(role.node, self._plan.hosts)
        group, stages = port.among(self._topology.beside(role.node)), None
        if self._program.stages is not None:
            stages = port.among(self._topology.replica_of(role.node))
        spec, hosts = self._program.spec, self._plan.hosts
        run_device(spec.options, spec.strategy, local=hosts[: role.node].count(hosts[role.node]))
        context = self._program.context(stages=stages)
        with self._joined() as (_, world):
            context.exchanged = world.trace.exchanged
            attendance = world.drive(performed_work(world.port, group, context, client, stages, leaving))
        return self._told(world) | {
            "attendance": list(attendance),
            # a worker that came after the end, or left before it, does not have the final weights
            "sha256": None if client.finished or leaving.left else context.sha256(),
            "stage": None if context.stage is None else context.stage.report(),
            "left": leaving.left,
            "threads": torch.get_num_threads(),
        }

    def evaluate(self) -> None:
        """Be the evaluator: score the shards' snapshots."""
        scorer = self._program.scorer()

        def score(number: int, seconds: float, flat: Tensor, running: Tensor | None) -> bytes:
            return json.dumps(scorer.row(number, seconds, flat, running)).encode()

        node, coordinator = self._role.node, self._topology.coordinator
        held = scorer.numel, self._program.dtype
        evaluator = Evaluator(
            *(node, coordinator, self._chains, *held, score, self._plan.timing), running_of=self._program.running_of
        )
        with self._joined() as (_, world):
            world.drive(serve(world.port, evaluator))

    def hold(self) -> Mapping[str, Any]:
        """Be a copy of a shard."""
        role, program, setting = self._role, self._program, self._setting
        present, options = setting.view.spans, program.spec.options
        shard = self._plan.shard(role.shard, present, empty=None if self._arenas is None else self._empty)
        if setting.snapshot is not None and options.out is not None and not role.blank:
            checkpoint = options.out.absolute() / "checkpoint"
            saved = read(checkpoint, setting.snapshot, role.shard)
            with snapshot_errors(checkpoint, setting.snapshot, role.shard):
                shard.load(saved.state, saved.tensors)
        recorder = CopyRecorder(None if setting.record is None else Path(setting.record), shard, role.node)
        snapshots = ScoreSnapshots(shard, program.points) if program.scores else None
        spans = present[role.shard] if role.shard < len(present) else ()
        saves = shard_saves(role.shard, self._plan.parameters, spans, options)

        def on_entry(index: int, entry: ShardEntry) -> None:
            recorder.on_entry(index, entry)
            if snapshots is not None:
                snapshots.on_entry(index, entry)
            if saves is not None:
                saves.look()

        on_save = None if saves is None else saves.on_save
        node = self._plan.copy(role.node, shard, blank=role.blank, on_entry=on_entry, on_save=on_save)
        machine: Machine = node if snapshots is None else Showing(node, snapshots)
        if saves is not None and setting.if_lost is not None:
            machine = self._leaving(machine, node, saves, setting.if_lost)
        with self._joined() as (line, world), closing(recorder):
            for to, message in machine.receive(world.now_s(), self._topology.coordinator, setting.view):
                line.post(to, message)
            world.drive(serve(world.port, machine))
        if saves is not None:
            saves.close()
        return self._told(world)

    def _leaving(self, machine: Machine, node: Node, saves: ShardSaves, number: int) -> LeavingCopy:
        """The copy, which saves snapshot `number` and leaves on the agent's signal."""
        assert self._program.spec.options.out is not None
        folder = self._program.spec.options.out.absolute() / "checkpoint"
        leaving = LeavingCopy(machine, node, folder, number, lambda: saves.on_save(number, node.shard))
        signal.signal(SAVE_AND_LEAVE, leaving.order)
        return leaving

    def _joined(self) -> AbstractContextManager[tuple[OpenMail, MailWorld]]:
        out = None if self._role.kind == "evaluator" else self._program.spec.options.out
        return joined_mail(self._mail, self._role.node, self._plan, self._setting.zero_s, out=out)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._arenas is not None
        return self._arenas.empty(self._role.life, numel, dtype)

    def _told(self, world: MailWorld) -> dict[str, Any]:
        """A process's part of the trace."""
        return {
            **world.trace.excerpt(MOST_WRITTEN // self._topology.coordinator + 1),
            "bytes": world.trace.bytes_sent[world.rank],
        }


class ShardSaves:
    """The parts of the run's snapshots of a shard with `spans` of `parameters`, written in the background.

    `on_save` is for its `Node`. A part that is not finite is never written; without `allow_nan` it raises NotFinite.
    """

    def __init__(
        self, folder: Place, shard: int, parameters: Sequence[Parameter], spans: Spans, *, allow_nan: bool
    ) -> None:
        self._snapshots, self._allow_nan = SnapshotWriter(folder, shard), allow_nan
        self._parameters, self._spans = without_tables(parameters), split(parameters, spans).dense

    def on_save(self, number: int, shard: Shard) -> None:
        """Begin snapshot `number`, after the end of a snapshot that is still under way."""
        state, tensors = shard.dump()
        self.look()
        if not self._snapshots.begin(number, state, tensors):
            self.close()
            self._snapshots.begin(number, state, tensors)

    def look(self) -> None:
        """Take the end of the snapshot that is under way, if it is done."""
        self._say(self._snapshots.poll())

    def close(self) -> None:
        """Wait for the snapshot that is under way."""
        self._say(self._snapshots.close(_LONGEST_WRITE_S))

    def _say(self, saved: WrittenSnapshot | None) -> None:
        if saved is None or not saved.error:
            return
        error = saved.not_finite
        if error is None or self._allow_nan:
            print(saved.error, file=sys.stderr)  # into the log of this copy
            return
        if error.index is None or error.index >= sum(span.numel for span in self._spans):
            raise error
        name = describe(self._parameters, flat_index(self._spans, error.index))
        where = f"{name} ({error.where})"
        raise NotFinite.from_facts(error.facts | {"parameter": name, "index": None, "where": where}) from error


def shard_saves(shard: int, parameters: Sequence[Parameter], spans: Spans, options: RunOptions) -> ShardSaves | None:
    """The parts of a copy of `shard`; None if the run has no folder."""
    if options.out is None:
        return None
    folder = options.out.absolute() / "checkpoint"
    return ShardSaves(folder, shard, parameters, spans, allow_nan=options.allow_nan)
