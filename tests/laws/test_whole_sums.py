"""Laws of sums that pass together: their times and bytes are their messages'."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from polytempo import collectives
from polytempo.cluster import Cluster, Link
from polytempo.core import Port
from polytempo.worlds import Outcome, VirtualWorld
from polytempo.worlds.virtual.symmetry import run_priced

ROUTES = [
    collectives.ring,
    collectives.halving_doubling,
    collectives.invariant(slices=64),
    collectives.star,
    collectives.tree,
    collectives.hierarchical(),
]


def links(random: Random) -> Cluster:
    """Fast and slow ones, short and long ones, one worker a host or several."""
    network = Link(random.choice([0.0, 1e-6, 1e-3]), 10 ** random.uniform(5, 10))
    memory = Link(random.choice([0.0, 1e-7]), 10 ** random.uniform(8, 10))
    return Cluster(network, memory, workers_per_host=random.choice([1, 1, 2, 3, 32]))


def summed(route: Any, cluster: Cluster, num_ranks: int, numel: int, late: dict[int, float], *, whole: bool) -> Outcome:
    """Two sums, one after the other; the first begins on `late` ranks so many seconds later."""

    async def program(port: Port) -> float:
        await port.compute(lambda: None, cluster.flops_per_s * late.get(port.rank, 1.0))
        await route(port, torch.empty(numel, device="meta"))
        await port.barrier()
        await route(port, torch.empty(numel, device="meta"))
        return await port.now()

    if not whole:
        return VirtualWorld(cluster, num_ranks).run(program)
    return run_priced(cluster, num_ranks, program)


def totals(outcome: Outcome) -> tuple[Any, ...]:
    """A trace's messages, over all events."""
    counts = {key: n for key, n in outcome.trace.messages.items() if key[1] in ("send", "recv") and n}
    return dict(outcome.trace.bytes_sent), counts, outcome.unreceived


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_a_sum_at_once_takes_as_long_as_its_messages(route: Any, seed: int) -> None:
    random = Random(seed)
    num_ranks, numel = random.choice([2, 3, 4, 5, 7, 8, 16, 17]), random.choice([0, 1, 5, 1000, 12_345, 100_000])
    late = {rank: random.choice([1.0, 1.5, 1.0 + random.random() * 1e-3]) for rank in range(num_ranks)}
    late = late if random.random() < 0.5 else {}
    given = (route, links(random), num_ranks, numel, late)
    apart, whole = summed(*given, whole=False), summed(*given, whole=True)
    assert whole.seconds == pytest.approx(apart.seconds, rel=1e-9)
    if whole.results[0] is not None and None not in whole.results:  # where ranks are alike, four of them act
        assert whole.results == pytest.approx(apart.results, rel=1e-9)
    assert totals(whole) == totals(apart)


@pytest.mark.parametrize("route", ROUTES[:4], ids=lambda route: route.__name__)
def test_sums_of_equal_ranks_pass_at_once(route: Any) -> None:
    """Otherwise the law above would hold of messages alone."""
    outcome = summed(route, Cluster(Link(1e-5, 1e9)), 8, 1000, {}, whole=True)
    assert len([event for event in outcome.trace.events if event.op == "send"]) == 2 * 8
    assert not [event for event in outcome.trace.events if event.op == "recv"]
