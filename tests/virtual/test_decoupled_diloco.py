"""`decoupled_diloco`: a quorum of movements makes an outer step, and a slow or dead worker holds up no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import polytempo as pt
from polytempo import strategies
from polytempo.cluster import Crash, ethernet, slow_host
from polytempo.core import Strategy

DIGITS = pt.jobs.find("digits")


def test_a_quorum_of_one_is_the_asynchronous_diloco_to_the_bit() -> None:
    made = [
        pt.simulate(DIGITS, strategy, 3, ethernet(), steps=20)
        for strategy in (strategies.decoupled_diloco(5, 1), strategies.async_diloco(5))
    ]
    assert made[0].parameters_sha256 == made[1].parameters_sha256
    assert made[0].seconds == made[1].seconds


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_long_window_waits_for_all_to_the_bit(quorum: int) -> None:
    cluster = replace(ethernet(), stragglers=slow_host(0, 2.0))
    found, expected = (
        pt.simulate(DIGITS, strategy, 4, cluster, steps=20)
        for strategy in (strategies.decoupled_diloco(5, quorum, grace_s=1e3), strategies.decoupled_diloco(5, 4))
    )
    assert found.parameters_sha256 == expected.parameters_sha256
    assert found.seconds == expected.seconds


def test_movements_of_like_speed_meet_in_a_window() -> None:
    """A worker of an eighth of the speed is not waited for; the others' movements make fewer steps, of less age."""
    cluster = replace(ethernet(), stragglers=slow_host(0, 8.0))
    results = [
        pt.simulate(
            DIGITS, strategies.decoupled_diloco(5, quorum, grace_s=grace_s), 4, cluster, epochs=1, batch_size=16
        )
        for quorum, grace_s in ((1, 0.0), (1, 1e-4), (4, 0.0))
    ]
    assert [result.samples for result in results] == [1437] * 3
    assert results[1].seconds < 0.5 * results[2].seconds
    at_once, window = (result.server for result in results[:2])
    assert at_once is not None
    assert window is not None
    assert window["updates"] < 0.5 * at_once["updates"]
    assert window["staleness"]["mean"] < 0.2 * at_once["staleness"]["mean"]


@pytest.mark.parametrize("quorum", [4, 9])
def test_a_quorum_of_all_is_diloco(quorum: int) -> None:
    """Each worker has the same whole batches; the order of float32 additions differs."""
    strategy = strategies.decoupled_diloco(5, quorum, outer_momentum=0.3)
    assert strategy.server is not None
    even = replace(strategy, meeting=replace(strategy.server, deals="evenly"))
    found = pt.simulate(DIGITS, even, 4, steps=10)
    expected = pt.simulate(DIGITS, strategies.diloco(5, outer_momentum=0.3), 4, steps=10)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    other = pt.simulate(DIGITS, strategies.diloco(5, outer_momentum=0.2), 4, steps=10)
    assert found.loss != pytest.approx(other.loss, rel=1e-3)


def until_done(strategy: Strategy, **more: object) -> float:
    """Virtual seconds of an epoch; each batch is trained on once."""
    result = pt.simulate(DIGITS, strategy, 4, replace(ethernet(), **more), epochs=1, batch_size=16)
    assert result.samples == 1437
    return result.seconds


def test_a_slow_worker_holds_up_no_quorum_of_others() -> None:
    slow = {"stragglers": slow_host(0, 8.0)}
    seconds = [until_done(strategies.decoupled_diloco(5, quorum), **slow) for quorum in (1, 2, 3, 4)]
    assert max(seconds[:3]) < 0.7 * seconds[3]


def test_workers_that_go_on_hide_the_link_and_the_quorum() -> None:
    """Movements are older then, so the loss is a little higher."""
    link = ethernet(gbit_per_s=1)

    def found(delay: int) -> Any:
        return pt.simulate(DIGITS, strategies.decoupled_diloco(8, 3, delay=delay), 4, link, steps=96)

    waiting, going_on = found(0), found(7)
    assert going_on.seconds < 0.7 * waiting.seconds
    assert going_on.samples == waiting.samples
    assert going_on.bytes_sent_per_rank == pytest.approx(waiting.bytes_sent_per_rank, rel=1e-3)
    assert going_on.loss < 0.2


@pytest.mark.parametrize(("quorum", "delay"), [(2, 0), (4, 0), (4, 3)])
def test_a_worker_that_dies_is_not_waited_for(quorum: int, delay: int) -> None:
    """A quorum of all shrinks with them; the dead worker's batches are trained on by others."""
    cluster = replace(ethernet(), faults=(Crash(rank=1, step=3),))
    result = pt.simulate(DIGITS, strategies.decoupled_diloco(5, quorum, delay=delay), 4, cluster, epochs=1)
    assert result.samples == 1437
    assert result.server is not None
    assert [worker["worker"] for worker in result.server["workers"]] == [0, 2, 3]


def test_a_quorum_has_a_worker() -> None:
    with pytest.raises(ValueError, match="a quorum needs at least 1 worker, got 0"):
        strategies.decoupled_diloco(quorum=0)
