"""A world of ranks that all do the same, or the same with parts of two sizes, by the programs of a few of them.

    ranks    0   1   …   b - 1 │ b   …   N/2   …   N - 1        parts of a vector that N does not divide: the first b
             ▲   ▲             │          ▲          ▲          ranks have one number more
                                                                ▲ these act

All ranks before b have the first ranks' events, and all from b on the last ones'; b is found by halving. Ranks may
compute, and take part in collectives of all ranks. A message, a collective of some ranks, a computation alone, and
ranks that are not equally fast: then all of them have to act.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from polytempo.cluster import Cluster
from polytempo.core import Deadlock, Port
from polytempo.worlds.trace import Event, Trace
from polytempo.worlds.virtual.clockwork import Asymmetric
from polytempo.worlds.virtual.network import Contended
from polytempo.worlds.virtual.virtual_world import Outcome, VirtualWorld

T = TypeVar("T")

_LEAST_RANKS = 8
"""Fewer ranks are not worth it."""


Life = list[tuple[Any, ...]]
"""The events of one rank, without its number."""


def run_priced(
    cluster: Cluster,
    num_ranks: int,
    program: Callable[[Port], Coroutine[Any, Any, T]],
    *,
    seed: int = 0,
    alike: bool = True,
) -> Outcome[T]:
    """The outcome of `VirtualWorld(cluster, num_ranks, seed=seed).run(program)`, by the shortest way that is exact.

    `program` has tensors without values, and may be run more than once. `alike`: ranks may be alike (`run_alike`).
    """
    found = run_alike(cluster, num_ranks, program, seed=seed) if alike else None
    if found is not None:
        return found
    try:
        return VirtualWorld(cluster, num_ranks, seed=seed, whole_sums=True).run(program)
    except (Contended, Deadlock):  # ranks that were held may be needed
        return VirtualWorld(cluster, num_ranks, seed=seed).run(program)


def run_alike(
    cluster: Cluster, num_ranks: int, program: Callable[[Port], Coroutine[Any, Any, T]], *, seed: int = 0
) -> Outcome[T] | None:
    """The outcome of `VirtualWorld(cluster, num_ranks, seed=seed).run(program)`; None where ranks are not alike.

    Times, bytes and events are the same; the results of ranks that do not act are None. For tensors without values.
    Cost: the programs of four ranks, where parts have two sizes log₂N times, and a line in the trace for each event of
    each rank.
    """
    if num_ranks < _LEAST_RANKS or cluster.faults or cluster.servers or cluster.in_bucket:
        return None

    def lives(*acting: int) -> tuple[Outcome[T], list[Life]]:
        outcome = VirtualWorld(cluster, num_ranks, seed=seed, acting=acting, whole_sums=True).run(program)
        if outcome.trace.dropped:
            raise Asymmetric("more events than a trace keeps")
        events = outcome.trace.events
        return outcome, [[event[1:] for event in events if event.rank == rank] for rank in acting]

    try:
        outcome, (first, second, middle, last) = lives(0, 1, num_ranks // 2, num_ranks - 1)
        below, above = 0, num_ranks - 1  # the last rank that is known to be like the first one, and the other way round
        if first == last:
            below = above
        while above - below > 1:
            half = (below + above) // 2
            _, (_, life, _) = lives(0, half, num_ranks - 1)
            if life not in (first, last):
                return None
            below, above = (half, above) if life == first else (below, half)
    except (Asymmetric, Contended, Deadlock):
        return None
    if len(first) != len(last) or [second, middle] != [first if r <= below else last for r in (1, num_ranks // 2)]:
        return None
    return Outcome(outcome.results, outcome.seconds, _of_all(outcome.trace, first, last, below, num_ranks), {}, 0)


def _of_all(acted: Trace, first: Life, last: Life, below: int, num_ranks: int) -> Trace:
    trace = Trace(timed=True)
    for early, late in zip(first, last, strict=True):
        for rank in range(num_ranks):
            trace.add(Event(rank, *(early if rank <= below else late)))
    for (actor, op), count in acted.messages.items():
        if actor in (0, num_ranks - 1):  # a line may stand for several messages
            for rank in range(below + 1) if actor == 0 else range(below + 1, num_ranks):
                trace.messages[rank, op] = count
    return trace
