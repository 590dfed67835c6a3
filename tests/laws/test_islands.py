"""Laws of islands: k islands of m workers are k workers with m times the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polytempo import aggregation, collectives
from polytempo import compression as c
from polytempo import strategies as s
from polytempo.cluster import Cluster, Link
from polytempo.collectives.islands import islands_of
from polytempo.core import Bundle, Port, Strategy
from polytempo.core.bundle import Observed
from polytempo.core.state import anchors, residual_tensors
from polytempo.synchronization import by_loss, by_rate, by_variance, growing
from polytempo.worlds import VirtualWorld

STEPS, SIZE = 7, 3000
TREE = s.sync_sgd(collectives.tree)
OUTER = {
    "diloco": s.diloco(period=3, route=collectives.ring),
    "local": s.local_sgd(period=2, route=collectives.ring),
    "encoded": s.diloco(period=2, codec=c.feedback(c.top_k(0.5))),
    "gossip": s.gossip(period=2),
    "merged": s.diloco(period=3, merge=aggregation.median),
    "growing": s.local_sgd(growing(1, 4, 1)),
    "by loss": s.diloco(by_loss(3)),
    "by variance": s.local_sgd(by_variance(2), route=collectives.ring),
    "by rate": s.slowmo(by_rate(1, 0.15)),
    "slowmo": s.slowmo(period=3, route=collectives.star),
}


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def trained(
    strategy: Strategy, groups: list[list[int]], shares: list[float] | None = None
) -> tuple[list[torch.Tensor], list[Any]]:
    """The parameters and states of ranks that train by SGD. `groups[r]`: the batches that rank r joins into one."""
    found: list[Any] = [None] * len(groups)
    states: list[Any] = [None] * len(groups)

    async def program(port: Port) -> None:
        theta = Bundle({"w": torch.ones(SIZE, dtype=torch.float64)})
        own = [strategy.gradients.init(theta), strategy.parameters.init(theta)]
        for step in range(STEPS):
            mine = torch.stack([gradient(step, batch) for batch in groups[port.rank]]).mean(0)
            bundle = Bundle({"w": mine}, None if shares is None else shares[port.rank])
            merged, own[0] = await strategy.gradients.apply(port, bundle, own[0])
            assert merged is not None
            moved = Bundle({"w": theta.flat - 0.1 * merged.flat})
            moved.observed = Observed(0.1, 1 - 20 * mine.mean())
            theta, own[1] = await strategy.parameters.apply(port, moved, own[1])
        found[port.rank], states[port.rank] = theta.flat, own

    VirtualWorld(Cluster(Link(0.0, 1e12)), len(groups)).run(program)
    return found, states


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_islands_are_workers_with_joined_batches(outer: Strategy) -> None:
    """Two gradients add up alike on an island and in a joined batch, so these are equal to the bit."""
    found, _ = trained(s.islands(TREE, outer, number=3), [[rank] for rank in range(6)])
    expected, _ = trained(outer, [[0, 1], [2, 3], [4, 5]])
    for rank in range(6):
        assert torch.equal(found[rank], expected[rank // 2])


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_islands_of_one_worker_are_the_outer_strategy(outer: Strategy) -> None:
    batches = [[rank] for rank in range(4)]
    for number in (4, 9):
        found, _ = trained(s.islands(TREE, outer, number), batches)
        for mine, expected in zip(found, trained(outer, batches)[0], strict=True):
            assert torch.equal(mine, expected)


def test_one_island_is_the_inner_strategy() -> None:
    batches = [[rank] for rank in range(4)]
    found, _ = trained(s.islands(TREE, s.local_sgd(period=2), number=1), batches)
    for mine, expected in zip(found, trained(TREE, batches)[0], strict=True):
        assert torch.equal(mine, expected)


def test_islands_of_different_sizes_count_the_same_and_batches_within_them_by_their_samples() -> None:
    """Ranks 0 to 2 and ranks 3 and 4. On the first island rank 0's batch has half of the samples, on the second all."""
    shares = [0.2, 0.1, 0.1, 0.6, 0.0]
    found, _ = trained(s.islands(TREE, s.local_sgd(period=1), number=2), [[rank] for rank in range(5)], shares)
    theta = torch.ones(SIZE, dtype=torch.float64)
    for step in range(STEPS):
        first = 0.5 * gradient(step, 0) + 0.25 * gradient(step, 1) + 0.25 * gradient(step, 2)
        theta = theta - 0.1 * (first + gradient(step, 3)) / 2
    for mine in found:
        torch.testing.assert_close(mine, theta, rtol=0, atol=1e-12)


def test_every_worker_has_the_outer_state_and_a_residual_is_held_back_once() -> None:
    """So the parts that are held back add up right where another number of workers goes on."""
    _, states = trained(s.islands(TREE, OUTER["encoded"], number=2), [[rank] for rank in range(4)])
    anchors = [state[1].inner.inner.anchor.flat for state in states]
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    assert [len(list(residual_tensors(state[1]))) for state in states] == [1, 0, 1, 0]


def test_a_meeting_leaves_the_former_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic run may undo it. Processes receive a broadcast in the memory that they give away for it."""
    broadcast = Port.broadcast

    async def in_place(port: Port, buffer: torch.Tensor, source: int = 0) -> torch.Tensor:
        return buffer.copy_(await broadcast(port, buffer.clone(), source))

    monkeypatch.setattr(Port, "broadcast", in_place)
    parameters = s.islands(TREE, s.diloco(period=1), number=2).parameters

    async def program(port: Port) -> None:
        theta = Bundle({"w": torch.ones(SIZE, dtype=torch.float64)})
        state = parameters.init(theta)
        anchor = next(anchors(state))
        _, after = await parameters.apply(port, Bundle({"w": theta.flat * (port.rank + 2)}), state)
        assert torch.equal(anchor.flat, theta.flat)
        assert not torch.equal(next(anchors(after)).flat, theta.flat)

    VirtualWorld(Cluster(Link(0.0, 1e12)), 4).run(program)


def test_islands_have_consecutive_workers_and_sizes_that_differ_by_one_at_most() -> None:
    for size in range(1, 20):
        for number in range(1, 20):
            islands = islands_of(size, number)
            assert [rank for island in islands for rank in island] == list(range(size))
            assert len(islands) == min(size, number)
            assert max(map(len, islands)) - min(map(len, islands)) <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"number": 0}, "at least 1 island"),
        ({"inner": s.local_sgd(period=2)}, "exchanges gradients"),
        ({"inner": s.async_sgd()}, "by messages"),
        ({"inner": s.delayed_sgd()}, "under way"),
        ({"outer": s.sync_sgd()}, "exchange parameters"),
        ({"outer": s.slowmo(inner=s.gossip())}, "has no period"),
        ({"outer": s.parameter_averaging(period=2)}, "exchanges gradients or parameters alone"),
        ({"outer": s.gossip(overlap=True)}, "under way"),
    ],
    ids=lambda given: None,
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        s.islands(**arguments)
