"""FlexRR under a virtual clock: the gain and the cost of reassignment, and that every sample counts once.

Training by it is in `test_flexrr_training`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from polytempo.cluster import Cluster, Link, slow_host
from polytempo.core import Port
from polytempo.flexrr.protocol import CoveredWork, Do, Peer, covered_step
from polytempo.flexrr.reassignment import Reassignment
from polytempo.flexrr.slices import Slice
from polytempo.worlds import VirtualWorld
from virtual.flexrr_world import Delays, Scene, World

ONE_SLOW = (1.0,) * 7 + (0.5,)
FLEXRR = Reassignment()


def per_clock_s(scene: Scene, reassignment: Reassignment | None) -> float:
    """Seconds an iteration, after checking that every slice was applied once."""
    world = World(scene, reassignment).run()
    assert_once(world)
    return world.seconds / scene.clocks


def assert_once(world: World) -> None:
    assert set(world.ledger) == world.shares, f"seed {world.scene.seed}"
    assert set(world.ledger.values()) == {1}, f"seed {world.scene.seed}"


# ---------------------------------------------------------------------------------------------------- the gain


def test_one_worker_of_eight_at_half_speed() -> None:
    """Ideal is 8 / 7.5 = 1.067 with help from all, and 5 / 4.5 = 1.111 with help from four."""
    assert per_clock_s(Scene(ONE_SLOW, clocks=4), None) == pytest.approx(2.0, abs=0.01)
    assert 8 / 7.5 < per_clock_s(Scene(ONE_SLOW, clocks=4), FLEXRR) <= 1.15
    assert 8 / 7.5 < per_clock_s(Scene(ONE_SLOW, clocks=4), replace(FLEXRR, helpers=7)) <= 1.115


def test_without_stragglers_it_costs_at_most_2_percent_and_nobody_gives_anything_away() -> None:
    scene = Scene((1.0,) * 8, clocks=3)
    world = World(scene, FLEXRR).run()
    assert world.offers == 0
    assert world.seconds <= 1.02 * World(scene, None).run().seconds


@pytest.mark.parametrize("seed", [0, 1])
def test_short_pauses_hurt_less_with_slack_and_least_with_reassignment_too(seed: int) -> None:
    random = Random(seed)
    pauses = tuple((random.randrange(8), random.uniform(0, 10), random.uniform(0.3, 1.0)) for _ in range(10))
    scene = Scene((1.0,) * 8, clocks=10, pauses=pauses)
    bsp = per_clock_s(scene, None)
    ssp = per_clock_s(replace(scene, slack=1), None)
    flexrr = per_clock_s(replace(scene, slack=1), replace(FLEXRR, slack=1))
    assert flexrr < 0.98 * ssp < 0.98 * bsp


def test_the_production_loop_in_the_virtual_world() -> None:
    """The same loop, driven by `VirtualWorld`: one host of eight takes twice as long."""
    cluster = Cluster(Link(2e-4, 1e9), flops_per_s=400.0, stragglers=slow_host(host=7))

    async def program(port: Port) -> set[Slice]:
        peer = Peer(port.rank, port.members, FLEXRR)
        done: set[Slice] = set()

        async def compute(do: Do) -> None:
            await port.compute(lambda: done.add(do.slice), float(do.slice.samples))

        async def push(pieces: list[Slice]) -> None:
            assert all(piece.helpee == port.rank for piece in pieces)

        for clock in range(2):
            await covered_step(port, peer, clock, 400, CoveredWork(compute, push, compute))
            await port.barrier()
        return done

    outcome = VirtualWorld(cluster, 8).run(program)
    done = [piece for result in outcome.results if result is not None for piece in result]
    assert len(done) == len(set(done)) == 8 * 2 * FLEXRR.slices
    assert 8 / 7.5 < outcome.seconds / 2 <= 1.15


# ------------------------------------------------------------------------------------------------------ exactly once


def bad(random: Random) -> list[float]:
    """Every sixth message is lost, every sixth doubled; delays are as long as several slices and in any order."""
    return [random.expovariate(1 / 0.04) for _ in range(random.choice([0, 1, 1, 1, 1, 2]))]


def slow(random: Random) -> list[float]:
    """Everything arrives, in any order."""
    return [random.expovariate(1 / 0.04)]


COARSE = Reassignment(grain=0.05, first_offer=0.05, later_offers=0.1, helpers=3, silence_s=0.5)


def test_every_slice_counts_once_whatever_the_network_does() -> None:
    """More than 10⁴ random delays. The shards drop doubled work; `World` refuses a half-known push."""
    messages, twice = 0, 0
    for seed in range(55):
        random = Random(seed)
        speeds = tuple(random.choice([1.0, 1.0, 0.5, 0.2]) for _ in range(5))
        pauses = tuple((random.randrange(5), random.uniform(0, 3), random.uniform(0.1, 1.0)) for _ in range(3))
        slack = seed % 3
        scene = Scene(speeds, clocks=2, samples=45, slack=slack, pauses=pauses, delays=bad, seed=seed)
        world = World(scene, replace(COARSE, slack=slack)).run()
        assert_once(world)
        messages += world.messages
        twice += world.dropped
    assert messages > 10_000
    assert twice > 0  # else the shards' part was never tried


@pytest.mark.parametrize("delays", [slow, bad], ids=["reordered", "lost and doubled too"])
def test_the_peers_alone_execute_every_slice_once_while_nobody_loses_patience(delays: Delays) -> None:
    reassigned = 0
    for seed in range(12):
        scene = Scene((1.0, 0.2, 1.0, 0.5), clocks=2, samples=45, delays=delays, seed=seed)
        world = World(scene, replace(COARSE, patience=1e6, silence_s=10.0)).run()
        assert_once(world)
        assert Counter(piece for piece, _ in world.executed.elements()) == Counter(world.shares), f"seed {seed}"
        reassigned += sum(alone for _, alone in world.executed)
    assert reassigned > 50
