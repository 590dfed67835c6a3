"""Every route: the sum is right, all ranks hold the same bits, and bytes, messages and time are the formulas'."""

from __future__ import annotations

from math import ceil, floor, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import exchanged, values
from polytempo.cluster import Cluster, Link
from polytempo.collectives import (
    halving_doubling,
    hierarchical,
    invariant,
    native,
    ring,
    star,
    tree,
)
from polytempo.core import Port, Route
from polytempo.worlds import Outcome, VirtualWorld
from some_cases import examples

ROUTES = [
    native,
    ring,
    tree,
    halving_doubling,
    star,
    hierarchical(),
    hierarchical(tree),
    hierarchical(halving_doubling),
    invariant(slices=64),
]
SIZES = [0, 1, 2, 3, 7, 64, 1000]

every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
every_size = pytest.mark.parametrize("num_ranks", range(1, 10))


def assert_right(outcome: Outcome[Tensor], num_ranks: int, numel: int) -> None:
    """The sum, to rounding; the same bits everywhere; nothing left over."""
    first, *others = (result for result in outcome.results if result is not None)
    expected = torch.stack([values(rank, numel) for rank in range(num_ranks)]).sum(0)
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)
    assert len(others) == num_ranks - 1
    assert all(torch.equal(first, other) for other in others)
    assert outcome.unreceived == 0


@every_route
@every_size
def test_the_sum_is_right_and_bitwise_equal_on_all_ranks(route: Route, num_ranks: int) -> None:
    for numel in SIZES:
        for workers_per_host in (1, 2, 3):  # 3 on a host: hosts of 3, 3 and fewer
            assert_right(exchanged(route, num_ranks, numel, workers_per_host=workers_per_host), num_ranks, numel)


@settings(max_examples=examples(60))
@given(st.sampled_from(ROUTES), st.integers(1, 33), st.integers(0, 40), st.integers(1, 5))
def test_also_for_other_numbers(route: Route, num_ranks: int, numel: int, workers_per_host: int) -> None:
    assert_right(exchanged(route, num_ranks, numel, workers_per_host=workers_per_host), num_ranks, numel)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]])
def test_hierarchy_with_hosts_that_are_not_in_the_order_of_ranks(order: list[int]) -> None:
    """Hosts of 4 and 2 ranks; the group names the ranks in `order`."""

    async def program(port: Port) -> Tensor:
        return await hierarchical()(port.among(order), values(port.rank, 5))

    outcome = VirtualWorld(Cluster(Link(1e-5, 1e9), workers_per_host=4), 6).run(program)
    assert_right(outcome, 6, 5)


# ---------------------------------------------------------------------- bytes (elements of 8 bytes)


def sent(outcome: Outcome[Tensor], num_ranks: int) -> list[int]:
    """Elements that each rank has sent."""
    return [outcome.trace.bytes_sent[rank] // 8 for rank in range(num_ranks)]


@every_size
@pytest.mark.parametrize("numel", SIZES)
def test_ring_bytes(num_ranks: int, numel: int) -> None:
    """Rank r sends 2K - c(r+1) - c(r+2); all ranks together 2(N-1)K."""
    counted = sent(exchanged(ring, num_ranks, numel), num_ranks)
    chunk = [len(c) for c in torch.zeros(numel).tensor_split(num_ranks)]
    if num_ranks == 1:
        assert counted == [0]
        return
    assert counted == [2 * numel - chunk[(r + 1) % num_ranks] - chunk[(r + 2) % num_ranks] for r in range(num_ranks)]
    assert sum(counted) == 2 * (num_ranks - 1) * numel


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_ring_bytes_where_n_divides_k(num_ranks: int) -> None:
    """Exactly 2(N-1)/N · K from every rank."""
    numel = 12 * num_ranks
    assert sent(exchanged(ring, num_ranks, numel), num_ranks) == [2 * (num_ranks - 1) * 12] * num_ranks


@every_size
@pytest.mark.parametrize("numel", SIZES)
def test_invariant_bytes(num_ranks: int, numel: int) -> None:
    """Rank r sends all stripes but its own, and that one N-1 times; all ranks together 2(N-1)K."""
    counted = sent(exchanged(invariant(slices=9), num_ranks, numel), num_ranks)
    stripe = [len(c) for c in torch.zeros(numel).tensor_split(num_ranks)]
    assert counted == [
        numel - stripe[r] + (num_ranks - 1) * stripe[r] if num_ranks > 1 else 0 for r in range(num_ranks)
    ]
    assert sum(counted) == 2 * (num_ranks - 1) * numel


@every_size
def test_tree_bytes(num_ranks: int) -> None:
    """K up from all but the root; K down to each child: ⌈log₂N⌉K from the root; 2(N-1)K together."""
    children = [sum(1 for d in (1, 2, 4, 8) if r % (2 * d) == 0 and r + d < num_ranks) for r in range(num_ranks)]
    counted = sent(exchanged(tree, num_ranks, 7), num_ranks)
    assert counted == [7 * (children[r] + (r > 0)) for r in range(num_ranks)]
    assert counted[0] == 7 * ceil(log2(num_ranks))
    assert sum(counted) == 2 * (num_ranks - 1) * 7


@every_size
def test_star_bytes(num_ranks: int) -> None:
    """(N-1)K from the root, K from every other rank."""
    assert sent(exchanged(star, num_ranks, 7), num_ranks) == [7 * (num_ranks - 1)] + [7] * (num_ranks - 1)


@every_size
def test_halving_doubling_bytes(num_ranks: int) -> None:
    """2(P-1)/P · K from each of the first P ranks, K more from ranks with a partner beyond P, K from the partner."""
    power = 2 ** floor(log2(num_ranks))
    counted = sent(exchanged(halving_doubling, num_ranks, 40), num_ranks)
    extra = num_ranks - power
    swapped = 2 * (power - 1) * 40 // power
    assert counted == [swapped + 40 * (r < extra) for r in range(power)] + [40] * extra


@pytest.mark.parametrize(("num_ranks", "workers_per_host"), [(6, 3), (8, 4), (7, 3), (9, 2), (4, 8)])
def test_hierarchy_bytes_between_hosts_are_the_rings(num_ranks: int, workers_per_host: int) -> None:
    hosts = -(-num_ranks // workers_per_host)
    outcome = exchanged(hierarchical(), num_ranks, 60, workers_per_host=workers_per_host)
    crossing = [
        e for e in outcome.trace.events if e.op == "send" and e.rank // workers_per_host != e.peer // workers_per_host
    ]
    assert sum(event.bytes for event in crossing) == 8 * 2 * (hosts - 1) * 60
    assert {event.rank for event in crossing} <= {host * workers_per_host for host in range(hosts)}
    assert sum(outcome.trace.bytes_sent.values()) == 8 * 2 * (num_ranks - 1) * 60


@every_size
def test_native_is_counted_as_a_ring(num_ranks: int) -> None:
    counted = sent(exchanged(native, num_ranks, 2520), num_ranks)
    assert counted == [2 * (num_ranks - 1) * 2520 // num_ranks] * num_ranks
