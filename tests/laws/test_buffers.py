"""Running statistics meet when a strategy's ranks meet, on its own way, and with no other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from laws.catalogue import ROWS, Row, label
from polytempo import aggregation, collectives, strategies
from polytempo.cluster import Cluster, Link
from polytempo.core import Port, Strategy
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld
from polytempo.worlds.trace import COMMUNICATION, WAITING, Event

RANKS, STEPS = 4, 6
CLUSTER = Cluster(Link(1e-5, 1e9), workers_per_host=2)
PARAMETERS, STATISTICS = 4 * 3 + 4 + 4 + 4, 4 + 4


def model(tracks: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=tracks)).double()


def trained(
    strategy: Strategy, tracks: bool = True, steps: int = STEPS, ranks: int = RANKS
) -> tuple[list[nn.Module], list[Event]]:
    """The ranks' models after `steps` steps of plain SGD, each on batches of its own, and their messages."""
    models = [model(tracks) for _ in range(ranks)]
    replicas = [Replica(net, torch.optim.SGD(net.parameters(), lr=0.05), strategy, ranks) for net in models]

    async def program(port: Port) -> None:
        net, replica = models[port.rank], replicas[port.rank]
        random = torch.Generator().manual_seed(port.rank)
        for step in range(steps):
            await port.mark(step)
            replica.optimizer.zero_grad()
            net(torch.randn(5, 3, generator=random, dtype=torch.float64) + port.rank).square().mean().backward()
            for bucket in replica.buckets:
                await replica.exchange(port, bucket)
            replica.optimizer.step()
            await replica.finish_step(port)
        await replica.settle()

    outcome = VirtualWorld(CLUSTER, ranks).run(program)
    assert outcome.unreceived == 0
    return models, outcome.trace.events


def edges(events: list[Event], ranks: int = RANKS) -> Counter[tuple[int, int]]:
    """The sender, receiver and bytes of each message. A collective of the world is between all."""
    found = Counter[tuple[int, int]]()
    for event in events:
        if event.op in COMMUNICATION - WAITING:
            peers = [event.peer] if event.peer >= 0 else [rank for rank in range(ranks) if rank != event.rank]
            found.update({(event.rank, peer): event.bytes for peer in peers})
    return found


def statistics(net: nn.Module) -> Tensor:
    return torch.cat([net[1].running_mean, net[1].running_var])  # type: ignore[index]


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "hogwild"], ids=label)
def test_statistics_meet_those_whom_the_strategy_talks_to_and_no_others(row: Row) -> None:
    with_statistics, without = (edges(trained(row.make(), tracks)[1]) for tracks in (True, False))
    assert with_statistics.keys() == without.keys()
    assert with_statistics.total() > without.total() > 0


PLAIN = [
    *[strategies.sync_sgd(route) for route in (collectives.native, collectives.tree, collectives.star)],
    strategies.parameter_averaging(period=3),
    strategies.local_sgd(period=4, route=collectives.tree),
    strategies.post_local_sgd(switch_step=3, period=2),
    strategies.diloco(period=4),
    strategies.delayed_sgd(),
    strategies.gossip(),
    strategies.gossip(aggregation.exponential_graph),
    strategies.gossip(aggregation.random_pairs(seed=3), period=2),
    strategies.adasum(),
    strategies.adasum(of="updates"),
    strategies.robust_sgd(),
    strategies.diloco(period=4, merge=aggregation.nearest_to_median(1)),
]
"""Strategies that send whole parameters or gradients unencoded."""


@pytest.mark.parametrize("strategy", PLAIN, ids=str)
def test_statistics_cost_their_size_on_every_edge(strategy: Strategy) -> None:
    ranks = 16 if strategy.name.startswith("gossip") else 5
    with_statistics, without = (edges(trained(strategy, tracks, ranks=ranks)[1], ranks) for tracks in (True, False))
    for edge, sent in without.items():
        assert with_statistics[edge] == pytest.approx(sent * (1 + STATISTICS / PARAMETERS), rel=1e-3), edge


def test_gossip_mixes_statistics_by_its_matrix() -> None:
    """Every step mixes by its own graph, which the exponential one changes from step to step."""
    for graph in (aggregation.ring_graph, aggregation.exponential_graph):
        alone = torch.stack([statistics(net) for net in trained(strategies.gossip(graph, period=9), steps=1)[0]])
        mixed = torch.stack([statistics(net) for net in trained(strategies.gossip(graph), steps=1)[0]])
        torch.testing.assert_close(mixed, torch.tensor(graph(0, RANKS), dtype=torch.float64) @ alone)
    net = trained(strategies.gossip(aggregation.complete))[0]
    assert all(torch.allclose(statistics(each), statistics(net[0])) for each in net)


@pytest.mark.parametrize(
    ("strategy", "merged"),
    [
        (strategies.sync_sgd(collectives.ring), lambda rows: rows.mean(0)),
        (strategies.adasum(), lambda rows: rows.mean(0)),
        (strategies.adasum(of="updates"), lambda rows: rows.mean(0)),
        (strategies.local_sgd(period=1), lambda rows: rows.mean(0)),
        (strategies.robust_sgd(), lambda rows: aggregation.median(list(rows))),
        (strategies.local_sgd(period=1, merge=aggregation.median), lambda rows: aggregation.median(list(rows))),
    ],
    ids=lambda value: str(value) if isinstance(value, Strategy) else "",
)
def test_statistics_are_merged_as_the_strategy_says(strategy: Strategy, merged: Callable[[Tensor], Tensor]) -> None:
    """A wrong rank steers the statistics of robust SGD no more than its gradients."""
    alone = torch.stack([statistics(net) for net in trained(strategies.local_sgd(period=9), steps=1)[0]])
    for net in trained(strategy, steps=1)[0]:
        torch.testing.assert_close(statistics(net), merged(alone))
