"""Every route: messages, steps and virtual time are the formulas'."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log2

import pytest

from helpers import exchanged
from polytempo.cluster import Cluster, Link
from polytempo.collectives import (
    halving_doubling,
    halving_doubling_price,
    hierarchical,
    hierarchical_price,
    invariant,
    native,
    ring,
    ring_price,
    star,
    star_price,
    tree,
    tree_price,
)
from polytempo.core import Price, Route

every_size = pytest.mark.parametrize("num_ranks", range(1, 10))


# ---------------------------------------------------------------------- steps and messages

Messages = Callable[[int], int]


@pytest.mark.parametrize(
    ("route", "price", "from_rank_0", "in_all"),
    [
        (ring, ring_price, lambda n: 2 * (n - 1), lambda n: 2 * n * (n - 1)),
        (tree, tree_price, lambda n: ceil(log2(n)), lambda n: 2 * (n - 1)),
        (star, star_price, lambda n: n - 1, lambda n: 2 * (n - 1)),
    ],
    ids=["ring", "tree", "star"],
)
@every_size
def test_messages(
    route: Route, price: Callable[..., Price], from_rank_0: Messages, in_all: Messages, num_ranks: int
) -> None:
    messages = exchanged(route, num_ranks, 64).trace.messages
    assert messages[0, "send"] == from_rank_0(num_ranks)
    assert sum(messages[rank, "send"] for rank in range(num_ranks)) == in_all(num_ranks)
    assert sum(messages[rank, "recv"] for rank in range(num_ranks)) == in_all(num_ranks)


@pytest.mark.parametrize(("num_ranks", "messages"), [(1, 0), (2, 2), (3, 3), (4, 4), (5, 5), (6, 5), (8, 6), (9, 7)])
def test_halving_doubling_messages_of_rank_0(num_ranks: int, messages: int) -> None:
    """2log₂P, and one more down to a partner beyond P."""
    assert exchanged(halving_doubling, num_ranks, 64).trace.messages[0, "send"] == messages


# ---------------------------------------------------------------------- time

LATENCY_BOUND, BANDWIDTH_BOUND = Link(1e-3, 1e9), Link(1e-6, 1e6)
TIMED = (*range(1, 10), 16, 64)


@pytest.mark.parametrize("link", [LATENCY_BOUND, BANDWIDTH_BOUND], ids=["latency", "bandwidth"])
@pytest.mark.parametrize("num_ranks", TIMED)
@pytest.mark.parametrize(
    ("route", "price"),
    [
        (ring, ring_price),
        (halving_doubling, halving_doubling_price),
        (star, star_price),
        (native, ring_price),
        (invariant(64), ring_price),
    ],
    ids=["ring", "halving_doubling", "star", "native", "invariant"],
)
def test_time_is_the_closed_form(route: Route, price: Callable[..., Price], num_ranks: int, link: Link) -> None:
    numel = 20160  # all of TIMED divide it
    seconds = exchanged(route, num_ranks, numel, link, meta=True).seconds
    assert seconds == pytest.approx(price(num_ranks, 8 * numel, link.latency_s, link.bytes_per_s).seconds, rel=1e-9)


def test_uneven_chunks_take_at_most_the_closed_form_of_the_largest() -> None:
    """K = 1000 among 7: chunks of 143 and 142 elements."""
    seconds = exchanged(ring, 7, 1000, BANDWIDTH_BOUND, meta=True).seconds
    assert seconds == pytest.approx(ring_price(7, 8 * 1000, 1e-6, 1e6).seconds, rel=2e-3)
    assert seconds == pytest.approx(ring_price(7, 8 * 7 * 143, 1e-6, 1e6).seconds, rel=1e-9)


@pytest.mark.parametrize("num_ranks", TIMED)
def test_tree_time(num_ranks: int) -> None:
    """Equal where N is a power of two or bandwidth counts; with latencies only, 2⌊log₂N⌋α instead of 2⌈log₂N⌉α."""
    slow = tree_price(num_ranks, 8 * 5040, BANDWIDTH_BOUND.latency_s, BANDWIDTH_BOUND.bytes_per_s).seconds
    assert exchanged(tree, num_ranks, 5040, BANDWIDTH_BOUND, meta=True).seconds == pytest.approx(slow, rel=1e-3)
    late = tree_price(num_ranks, 8, LATENCY_BOUND.latency_s, LATENCY_BOUND.bytes_per_s).seconds
    measured = exchanged(tree, num_ranks, 1, LATENCY_BOUND, meta=True).seconds
    assert measured <= late * (1 + 1e-9)
    assert measured == pytest.approx(2 * floor(log2(num_ranks)) * 1e-3, rel=1e-3)


@pytest.mark.parametrize(("hosts", "workers_per_host"), [(2, 2), (3, 4), (4, 2), (5, 8)])
def test_hierarchy_time_is_the_sum_of_both_levels(hosts: int, workers_per_host: int) -> None:
    memory = Cluster(BANDWIDTH_BOUND).memory
    within = (memory.latency_s, memory.bytes_per_s)
    between = (BANDWIDTH_BOUND.latency_s, BANDWIDTH_BOUND.bytes_per_s)
    expected = hierarchical_price(hosts, workers_per_host, 8 * 5040, within, between).seconds
    outcome = exchanged(hierarchical(), hosts * workers_per_host, 5040, BANDWIDTH_BOUND, workers_per_host, meta=True)
    assert outcome.seconds == pytest.approx(expected, rel=1e-3)
