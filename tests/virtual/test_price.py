"""Closed forms of cost against the literature's numbers, against each other, and against the simulated clock."""

from __future__ import annotations

from math import log2

import pytest
import torch
from torch import Tensor

from polytempo.cluster import Cluster, Link
from polytempo.collectives import halving_doubling_price, hierarchical_price, ring, ring_price, star_price, tree_price
from polytempo.core import Port, Price, Strategy
from polytempo.jobs import find
from polytempo.runs.simulated.simulate import simulate
from polytempo.strategies import local_sgd, sync_sgd
from polytempo.worlds import VirtualWorld

GB = 1e9


def test_gibiansky_2017_gathering_at_one_of_ten_gpus() -> None:
    """300 million parameters, 1.2 GB, at 1 GB/s: 1.2 s for 2 GPUs, 10.8 s for 10: one way of a star, (N-1)K/B."""
    assert star_price(2, 1.2 * GB, 0, 1 * GB).seconds / 2 == pytest.approx(1.2)
    assert star_price(10, 1.2 * GB, 0, 1 * GB).seconds / 2 == pytest.approx(10.8)


def test_the_virtual_clock_agrees_about_the_gathering() -> None:
    async def program(port: Port) -> None:
        gradient = torch.empty(300_000_000, device="meta")
        if port.rank:
            return await port.send(gradient, 0)
        for source in range(1, 10):
            await port.recv(gradient, source)

    assert VirtualWorld(Cluster(Link(0, 1 * GB)), 10).run(program).seconds == pytest.approx(10.8)


def test_gibiansky_2017_ring() -> None:
    """2.4 GB through each link at 6 GB/s: 400 ms; that is 2(N-1)/N · 1.2 GB for any large number of GPUs."""
    assert ring_price(10**6, 1.2 * GB, 0, 6 * GB).seconds == pytest.approx(0.4, rel=1e-5)
    assert ring_price(10**6, 1.2 * GB, 0, 6 * GB).busiest_bytes == pytest.approx(2.4 * GB, rel=1e-5)
    assert ring_price(40, 1.2 * GB, 0, 6 * GB).seconds == pytest.approx(0.39)


def test_goyal_2017_peak_rate() -> None:
    """100 MB of gradients pass twice through each link, hidden by a back-propagation of 125 ms, or of 120."""
    passed = ring_price(10**6, 0.1 * GB, 0, 1 * GB).busiest_bytes
    assert 8 * passed / 0.125 / 1e9 == pytest.approx(12.8, rel=1e-5)
    assert 8 * passed / 0.120 / 1e9 == pytest.approx(13.3, abs=0.05)


@pytest.mark.parametrize("period", [1, 2, 4, 8, 16])
def test_local_sgd_sends_one_hth_of_the_bytes(period: int) -> None:
    """The bytes of synchronous SGD, among 8 workers in 16 steps, divided by h."""

    def sent(strategy: Strategy) -> float:
        return simulate(find("digits"), strategy, 8, steps=16, batch_size=4, meta=True).bytes_sent_per_rank

    assert period * sent(local_sgd(period)) == sent(sync_sgd())


def test_firecaffe_2016_server_against_tree_among_128() -> None:
    """One way: the server takes p·K/B and the tree log₂(p)·K/B: 128/7 = 18.3; with a root that is a worker, 127/7."""
    tree_one_way = tree_price(128, 1.0, 0, 1.0).seconds / 2
    assert 128 / tree_one_way == pytest.approx(18.3, abs=0.02)
    assert star_price(128, 1.0, 0, 1.0).seconds / 2 / tree_one_way == pytest.approx(127 / 7)


# N, K bytes, α, B  ->  steps, bytes from the busiest rank, seconds
@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (ring_price(1, 8, 1, 1), (0, 0, 0)),
        (ring_price(4, 8, 1, 1), (6, 12, 6 + 12)),
        (tree_price(1, 8, 1, 1), (0, 0, 0)),
        (tree_price(4, 8, 1, 1), (4, 16, 4 * 9)),
        (tree_price(5, 8, 1, 1), (6, 24, 6 * 9)),
        (star_price(1, 8, 1, 1), (0, 0, 0)),
        (star_price(4, 8, 1, 1), (2, 24, 2 + 48)),
        (halving_doubling_price(1, 8, 1, 1), (0, 0, 0)),
        (halving_doubling_price(4, 8, 1, 1), (4, 12, 4 + 12)),
        (halving_doubling_price(5, 8, 1, 1), (6, 12 + 8, 6 + 12 + 20)),
        (hierarchical_price(4, 1, 8, (5, 5), (1, 1)), (6, 12, 18)),
        (hierarchical_price(1, 4, 8, (1, 1), (5, 5)), (4, 16, 36)),
        (hierarchical_price(4, 4, 8, (1, 1), (1, 1)), (10, 28, 54)),
    ],
)
def test_prices(price: Price, expected: tuple[int, float, float]) -> None:
    assert price == Price(*expected)


def test_a_tree_overtakes_a_ring_as_ranks_are_added_and_a_ring_a_tree_as_bytes_are() -> None:
    """1 MB, 50 µs, 1.25 GB/s: the ring wins among few, the tree among many; with 1 GB the ring wins among 1024 too."""
    link = (50e-6, 1.25 * GB)
    ring_is_faster = [ring_price(2**k, 1e6, *link).seconds < tree_price(2**k, 1e6, *link).seconds for k in range(2, 12)]
    assert ring_is_faster == [True] * 5 + [False] * 5, "they cross once, between 64 and 128 ranks"
    assert ring_price(1024, 1e9, *link).seconds < tree_price(1024, 1e9, *link).seconds


@pytest.mark.parametrize("num_ranks", [2, 4, 32, 1024])
def test_halving_doubling_has_the_rings_bytes_in_fewer_steps(num_ranks: int) -> None:
    fast, round_about = halving_doubling_price(num_ranks, 1e6, 1e-5, 1e9), ring_price(num_ranks, 1e6, 1e-5, 1e9)
    assert fast.busiest_bytes == pytest.approx(round_about.busiest_bytes)
    assert (fast.steps, round_about.steps) == (2 * log2(num_ranks), 2 * (num_ranks - 1))


def test_all_routes_cost_the_same_between_two() -> None:
    link = (1e-4, 1e9)
    assert ring_price(2, 1e6, *link).seconds == halving_doubling_price(2, 1e6, *link).seconds
    assert tree_price(2, 1e6, *link).seconds == star_price(2, 1e6, *link).seconds


def simulated_ring(num_ranks: int, num_bytes: int, link: Link) -> float:
    async def program(port: Port) -> Tensor:
        return await ring(port, torch.empty(num_bytes // 4, device="meta"))

    return VirtualWorld(Cluster(link), num_ranks).run(program).seconds


def test_the_closed_form_of_a_4_gb_ring_equals_the_simulation_among_64_and_reaches_1024() -> None:
    link = Link(5e-6, 12.5 * GB)
    expected = ring_price(64, 2**32, link.latency_s, link.bytes_per_s).seconds
    assert simulated_ring(64, 2**32, link) == pytest.approx(expected, rel=1e-9)
    large = ring_price(1024, 2**32, link.latency_s, link.bytes_per_s)
    assert large.steps == 2046
    assert large.seconds == pytest.approx(2046 * (5e-6 + 2**22 / 12.5e9), rel=1e-12)


def test_a_native_all_reduce_among_1024_is_priced_without_simulating_its_messages() -> None:
    async def program(port: Port) -> Tensor:
        return await port.all_reduce(torch.empty(2**30, device="meta"))

    link = Link(5e-6, 12.5 * GB)
    outcome = VirtualWorld(Cluster(link), 1024).run(program)
    assert outcome.seconds == pytest.approx(ring_price(1024, 2**32, 5e-6, 12.5 * GB).seconds, rel=1e-12)
    assert set(outcome.trace.bytes_sent.values()) == {2 * 1023 * 2**22}
    assert len(outcome.trace.events) == 1024
