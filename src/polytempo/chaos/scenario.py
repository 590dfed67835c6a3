"""One seed's run: its rule, its machines and its faults, from the first call for work to the final checks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polytempo.chaos.checkers import Checkers, Promises
from polytempo.chaos.copies import Copies, counted, new_shard, node_of
from polytempo.chaos.disk import DiskFaults, ScenarioSaves
from polytempo.chaos.draws import Participants, StormLimits, draw_hosts, draw_rule, storm, undivided
from polytempo.chaos.launcher import ChaosLauncher
from polytempo.chaos.network import Death, Fault, FaultPlan, LinkCut
from polytempo.chaos.planted.bugs import planted
from polytempo.chaos.worker import ChaosWorker, Habits, spans
from polytempo.chaos.world import ChaosMachine, Violation, World
from polytempo.core.codec import Codec, PullCodec
from polytempo.core.rule import Rule
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator, Listeners, Nodes
from polytempo.server.coordinator.evaluator import Evaluator
from polytempo.server.shard.node import Node
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.score_snapshots import ScorePoints, ScoreSnapshots, Showing
from polytempo.server.timing import Timing
from polytempo.server.worker.client import Client, VectorFormat

TIMING = Timing(
    retry_s=0.05,
    longest_retry_s=0.4,
    beat_s=0.05,
    lost_s=0.8,
    worker_lost_s=1.2,
    deadline_s=20.0,
    starting_s=5.0,
)
"""Shorter than in production, in proportion, so that fewer events happen between two faults."""

LIMITS = StormLimits(short_s=0.3, lost_s=TIMING.lost_s, long_s=1.3, apart_s=2.0)
_HOSTS = 287
"""A stream of its own for the hosts: the other choices stay, and seeds that find other bugs keep workers apart."""
HEALING_S = 40.0
"""The longest time from the last fault to the end of the run."""


@dataclass(frozen=True)
class Scenario:
    """The choices that follow from a seed."""

    seed: int
    workers: int
    shards: int
    replicas: int
    rule: Rule
    promises: Promises
    deals: Literal["freely", "evenly"]
    waits: bool
    tickets: int
    batches_per_epoch: int
    scores: bool
    """True if snapshots are scored."""
    habits: Habits
    sees_deaths: bool
    plan: FaultPlan
    disk: DiskFaults
    saves: bool
    lingers_s: float
    slowed: float
    """The last worker's step time over the others'."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The workers of each host, where these sum their gradients before they push."""

    def __str__(self) -> str:
        hosts = f" on hosts {self.hosts}, which push sums" if self.hosts else ""
        return (
            f"{self.rule.name}, {self.workers} workers{hosts}, {self.shards} shards with {self.replicas} replicas, "
            f"{self.tickets} tickets dealt {self.deals}, {self.habits}, last one {self.slowed:g} times slower, "
            f"{'scores, ' if self.scores else ''}{'snapshots, ' if self.saves else ''}{self.disk}, "
            f"deaths are {'seen' if self.sees_deaths else 'noticed by silence'}"
        )

    @property
    def cast(self) -> Participants:
        """Workers, then the copies of each shard, then the coordinator."""
        return _cast(self.workers, self.shards, self.replicas)


class ChaosOutcome(NamedTuple):
    """The outcome of a seed; numbers and texts only."""

    seed: int
    violation: str | None
    """The broken promise; None if all were kept."""
    trace: str
    """The trace's hash."""
    num_events: int
    virtual_s: float
    scenario: str
    plan: list[str]
    events: list[str]
    """The last events before the end, or before the violation."""


def draw(seed: int) -> Scenario:
    """Draw all choices of a run from its seed."""
    random = Random(seed)
    workers, shards, replicas = random.randint(2, 4), random.randint(1, 2), random.choice([0, 1, 1])
    drawn = draw_rule(random, workers, shards)
    epochs = random.randint(1, 3)
    per_epoch = -(-random.randint(20, 60) // (workers * epochs)) * workers
    least_s = random.choice([0.01, 0.03])
    habits = Habits(
        least_s=least_s,
        most_s=least_s * random.choice([1.0, 2.0, 6.0]),
        push_every=1 if drawn.waits else random.choice([1, 1, 2]),
        overlap=not drawn.waits and random.random() < 0.6,
        asks_ahead=random.random() < 0.5,
    )
    cast = _cast(workers, shards, replicas)
    return Scenario(
        seed=seed,
        workers=workers,
        shards=shards,
        replicas=replicas,
        rule=undivided(drawn.rule),
        promises=drawn.promises,
        deals=drawn.deals,
        waits=drawn.waits,
        tickets=per_epoch * epochs,
        batches_per_epoch=per_epoch,
        scores=random.random() < 0.5,
        habits=habits,
        sees_deaths=random.random() < 0.6,
        plan=storm(random, cast, LIMITS, lasts_s=random.choice([0.8, 1.5, 3.0])),
        disk=DiskFaults(random.choice([0.0, 0.02]), random.choice([0.0, 0.05]), random.choice([0.0, 0.1])),
        saves=random.random() < 0.5,
        lingers_s=random.choice([0.0, 0.4, 0.8]),
        slowed=random.choice([1.0, 4.0]),
        hosts=draw_hosts(Random(seed + _HOSTS), drawn.rule, workers),
    )


def _cast(workers: int, shards: int, replicas: int) -> Participants:
    copies = tuple(tuple(workers + s * (replicas + 1) + r for r in range(replicas + 1)) for s in range(shards))
    return Participants(tuple(range(workers)), copies, workers + shards * (replicas + 1))


def run(
    seed: int, bug: str | None = None, codec: Codec | None = None, pull_codec: PullCodec | None = None
) -> ChaosOutcome:
    """Run a seed, with a planted bug or none. Pushes travel by `codec`, pulls by `pull_codec`, both lossless."""
    with planted(bug).planted() if bug is not None else nullcontext():
        scenario = draw(seed)
        world = ScenarioRun(scenario, codec, pull_codec)
        try:
            world.perform()
        except Violation as violation:
            return world.outcome(str(violation))
        return world.outcome(None)


class ScenarioRun:
    """The machines of one scenario in their world."""

    def __init__(self, scenario: Scenario, codec: Codec | None = None, pull_codec: PullCodec | None = None) -> None:
        self.scenario, cast = scenario, scenario.cast
        self._codec, self._pull_codec = codec, pull_codec
        self.world = World(scenario.plan, scenario.seed)
        self.copies = Copies(cast.workers, cast.copies, self.world)
        self.checkers = Checkers(self.world, self.copies, scenario.tickets, scenario.promises)
        self.world.watcher = self.checkers
        self.world.allows = self._allows
        self._random = Random(scenario.seed + 1)
        self._spans = spans(scenario.shards, scenario.tickets)
        self._blank: set[int] = set()
        self._joined: set[int] = set()
        self._saves = ScenarioSaves(scenario.disk, Random(scenario.seed + 2))
        self._heavy = [(-1.0, 0.0)] * scenario.shards
        for node in cast.workers:
            self.world.place(node, self._maker(node, self._worker))
        for copies in cast.copies:
            for node in copies:
                self.world.place(node, self._maker(node, self._node))
        self.launcher = self._launcher()
        self.world.place(cast.coordinator, lambda incarnation, now_s: self.launcher, mortal=False)
        if scenario.scores:
            self.world.place(cast.coordinator + 1, lambda incarnation, now_s: self._evaluator(), mortal=False)

    def perform(self) -> None:
        """Run from the beginning to the end, or to a `Violation`."""
        self.world.begin()
        by_s = self.scenario.plan.healed_s + HEALING_S
        if not self.world.run(lambda: self.launcher.finished, by_s):
            raise Violation(f"not finished {HEALING_S:g} s after the last fault: {self._state()}")
        self.checkers.ended(self.launcher.coordinator.statistics, scores=self.scenario.scores)
        number = self._saves.check([self._shard(shard) for shard in range(self.scenario.shards)])
        self.world.note("the newest whole snapshot is", number)

    def outcome(self, violation: str | None) -> ChaosOutcome:
        """The outcome, as values."""
        world = self.world
        return ChaosOutcome(
            seed=self.scenario.seed,
            violation=violation,
            trace=world.trace_hash(),
            num_events=world.events,
            virtual_s=round(world.now_s, 3),
            scenario=str(self.scenario),
            plan=self.scenario.plan.lines() if violation else [],
            events=world.last_events() if violation else [],
        )

    def _maker(self, node: int, make: Callable[[int, int], ChaosMachine]) -> Callable[[int, float], ChaosMachine]:
        return lambda incarnation, now_s: make(node, incarnation)

    def _worker(self, node: int, incarnation: int) -> ChaosWorker:
        scenario = self.scenario
        chains, coordinator = self.launcher.coordinator.chains, scenario.cast.coordinator
        codec, parameters = self._codec, counted(scenario.shards, scenario.tickets)
        client = Client(
            node,
            incarnation,
            self._spans,
            chains,
            coordinator,
            TIMING,
            VectorFormat(parameters=parameters, codec=codec, pull_codec=self._pull_codec),
            peers=next((host for host in scenario.hosts if node in host), ()) if codec is None else (),
        )
        factor = scenario.slowed if node == scenario.workers - 1 else 1.0
        habits = scenario.habits.slowed(factor)
        return ChaosWorker(client, scenario.tickets, habits, self._random, self.checkers.read)

    def _node(self, node: int, incarnation: int) -> ChaosMachine:
        shard = self._shard(self.copies.shard_of(node))
        coordinator, blank = self.scenario.cast.coordinator, node in self._blank
        if not self.scenario.scores:
            return Node(node, shard, coordinator, TIMING, blank=blank, on_save=self._saves.save)
        scenario = self.scenario
        snapshots = ScoreSnapshots(shard, ScorePoints(scenario.batches_per_epoch, scenario.tickets))
        return Showing(
            Node(
                node,
                shard,
                coordinator,
                TIMING,
                blank=blank,
                on_entry=snapshots.on_entry,
                on_save=self._saves.save,
            ),
            snapshots,
        )

    def _evaluator(self) -> Evaluator:
        scenario, coordinator = self.scenario, self.scenario.cast.coordinator

        def score(number: int, seconds: float, flat: Tensor, running: Tensor | None) -> bytes:
            together = scenario.workers * (scenario.habits.push_every if scenario.hosts else 1)
            self.checkers.scored(number, flat, max(scenario.habits.push_every, together))
            return b"{}"

        chains, numel = scenario.cast.copies, scenario.tickets * scenario.shards
        return Evaluator(coordinator + 1, coordinator, chains, numel, torch.float32, score, TIMING)

    def _shard(self, number: int) -> Shard:
        scenario = self.scenario
        codecs = self._codec, self._pull_codec
        return new_shard(number, scenario.shards, scenario.tickets, scenario.rule, *codecs)

    def _launcher(self) -> ChaosLauncher:
        scenario, cast = self.scenario, self.scenario.cast
        scheduler = BatchScheduler(
            batches_per_epoch=scenario.batches_per_epoch,
            num_tickets=scenario.tickets,
            deals=scenario.deals,
            workers=scenario.workers,
            rests=scenario.waits,
        )
        coordinator = Coordinator(
            Nodes(
                coordinator=cast.coordinator,
                workers=cast.workers,
                chains=cast.copies,
                evaluator=cast.coordinator + 1 if scenario.scores else None,
            ),
            scheduler,
            TIMING,
            listeners=Listeners(on_event=self._on_event),
        )
        self.copies.coordinator = coordinator
        return ChaosLauncher(
            coordinator,
            scenario.workers,
            list(cast.copies),
            self.world,
            scenario.sees_deaths,
            lambda shard, node: self._blank.add(node),
            self.scenario.saves,
            self.scenario.lingers_s,
        )

    def _on_event(self, event: tuple[str, int]) -> None:
        self.world.note(*event)
        kind, who = event
        self.checkers.worker_lost |= kind == "lost" or (kind == "joined" and who in self._joined)
        if kind == "joined":
            self._joined.add(who)
        if kind == "saved":
            self.launcher.saved(who)

    def _allows(self, fault: Fault) -> bool:
        """A fault that may cost a shard a copy needs all its copies: the server does not promise to bear two losses."""
        nodes = (fault.source, fault.target) if isinstance(fault, LinkCut) else (fault.node,)
        hit = [shard for shard, copies in enumerate(self.scenario.cast.copies) if any(node in copies for node in nodes)]
        end_s = fault.begin_s if isinstance(fault, Death) else fault.end_s
        long = isinstance(fault, Death) or end_s - fault.begin_s > LIMITS.short_s
        for shard in hit:
            began_s, until_s = self._heavy[shard]
            if began_s != fault.begin_s and (self.world.now_s < until_s or not self.copies.whole(shard)):
                return False
        for shard in hit if long else ():
            self._heavy[shard] = fault.begin_s, max(end_s, self.world.now_s + TIMING.lost_s) + LIMITS.short_s
        return True

    def _state(self) -> str:
        coordinator = self.launcher.coordinator
        lines = [f"epoch {coordinator.epoch}, chains {coordinator.chains}, members {coordinator.members}"]
        lines.append(
            f"done {coordinator.scheduler.done} of {self.scenario.tickets}, held {coordinator.scheduler.holders()}"
        )
        for node in self.world.processes:
            machine = self.world.machine(node)
            if (copy := node_of(machine)) is not None:
                lines.append(
                    f"node {node}: epoch {copy.epoch}, entry {copy.index}, committed {copy.committed}"
                    + (", blank" if copy.blank else "")
                )
            if isinstance(machine, ChaosWorker):
                lines.append(f"worker {node}: life {machine.client.incarnation}, waits in {machine.waits_in}")
        return "; ".join(lines)
