"""The paces of virtual ranks: the slow one, and the bound of the run, by the same rules as of real ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polytempo.cluster import Cluster
from polytempo.diagnosis.bound import UsedLink
from polytempo.diagnosis.pace import RankTimes
from polytempo.report.status.row_exchanges import RankTotals
from polytempo.training.job.context import TrainingContext, TrainingSummary
from polytempo.training.job.run_bound import bound_of
from polytempo.training.step.pace_watch import MemoryBoard, PaceMeeting, PaceWatch
from polytempo.worlds import Outcome, VirtualWorld
from polytempo.worlds.trace import COMMUNICATION


class VirtualClock:
    """The times of a virtual rank. A rank that does not compute waits."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def now_s(self) -> float:
        """See `PaceClock`."""
        return self._world.now_s

    def busy_s(self) -> float:
        """See `PaceClock`."""
        return self._world.computed_s(self._rank)

    def waited_s(self) -> float:
        """See `PaceClock`."""
        return self.now_s() - self.busy_s()


def watch_paces(contexts: Mapping[int, TrainingContext], world: VirtualWorld) -> None:
    """Let rank 0 compare the ranks that act, by their virtual seconds. The other ranks are like one of them."""
    board, first = MemoryBoard(len(contexts)), contexts[0]
    for rank, context in contexts.items():
        if context.balance is not None and context.spec.strategy.slices is not None:
            context.replica.pace = PaceWatch(None, VirtualClock(world, rank))
        elif context.spec.strategy.slices is None:
            stage = context.holding.stage_report()
            who = f"rank {rank}" if stage is None else f"stage {stage['stage']} (rank {rank})"
            meeting = PaceMeeting(board, rank, len(contexts), who=who)
            context.replica.pace = PaceWatch(meeting, VirtualClock(world, rank))
        context.exchanged = partial(_totals, world, rank)
    if first.replica.pace is not None:
        first.replica.pace.tell = lambda row: first.record(row)


def _totals(world: VirtualWorld, rank: int) -> RankTotals:
    return RankTotals(world.trace.exchanged(rank), VirtualClock(world, rank).waited_s())


def bound_of_outcome(
    cluster: Cluster, context: TrainingContext, summary: TrainingSummary, outcome: Outcome[Any]
) -> dict[str, Any] | None:
    """`Result.bound` of a simulation, by its trace and its cluster's links."""
    workers, trace = len(outcome.results), outcome.trace
    busy_s = dict.fromkeys(range(workers), 0.0)
    for (rank, op), seconds in trace.seconds.items():
        busy_s[rank] += seconds if op not in COMMUNICATION else 0.0
    hosts = len(set(cluster.hosts(workers)))
    link = cluster.network if hosts > 1 else cluster.memory
    return bound_of(
        context,
        summary,
        [RankTimes(outcome.seconds, busy, max(0.0, outcome.seconds - busy), 0.0) for busy in busy_s.values()],
        messages=sum(number for (_, op), number in trace.messages.items() if op in COMMUNICATION) / workers,
        sent_bytes=sum(trace.bytes_sent.values()) / workers,
        hosts=hosts,
        link=UsedLink(link.latency_s, link.bytes_per_s, assumed=False),
        virtual=True,
    )
