"""Nodes given up for silence: workers, and copies with a stand-in; never the last copy."""

from __future__ import annotations

import pytest

from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator, Listeners, Nodes
from polytempo.server.message import Beat
from polytempo.server.timing import Timing

TIMING = Timing(beat_s=0.1, lost_s=1.0, worker_lost_s=5.0, starting_s=10.0)


def events_of(chain: tuple[int, ...], silent: set[int]) -> tuple[Coordinator, list[tuple[str, int]]]:
    """The events of 8 seconds with beats of all copies, except for the `silent` ones after their first word."""
    events: list[tuple[str, int]] = []
    scheduler, listeners = BatchScheduler(4, 8, "freely", 1), Listeners(on_event=events.append)
    coordinator = Coordinator(Nodes(9, [0], [chain]), scheduler, TIMING, listeners=listeners)
    for tenth in range(80):
        now_s = tenth / 10
        for node in chain:
            if node not in silent or tenth == 0:
                coordinator.receive(now_s, node, Beat(node, 1, coordinator.epoch))
        coordinator.tick(now_s)
    return coordinator, events


def test_the_last_copy_may_be_busy() -> None:
    coordinator, events = events_of((1,), {1})
    assert events == []
    assert coordinator.chains == [(1,)]


@pytest.mark.parametrize("silent", [1, 2])
def test_a_copy_with_another_beside_it_is_given_up(silent: int) -> None:
    coordinator, events = events_of((1, 2), {silent})
    assert ("silent", silent) in events
    assert coordinator.chains == [(3 - silent,)]


def test_both_silent_leaves_one() -> None:
    coordinator, _ = events_of((1, 2), {1, 2})
    assert len(coordinator.chains[0]) == 1


def test_a_new_copy_without_a_state_is_none_to_rely_on() -> None:
    coordinator, _ = events_of((1,), set())
    coordinator.recruit(0, 2)
    coordinator.receive(8.0, 2, Beat(2, 0, 0))
    assert coordinator.chains == [(1, 2)]
    for tenth in range(80, 120):  # the head is silent, the new one beats, still blank
        coordinator.receive(tenth / 10, 2, Beat(2, 0, coordinator.epoch))
        coordinator.tick(tenth / 10)
    assert coordinator.chains == [(1, 2)]
    for tenth in range(120, 160):  # now it has the state
        coordinator.receive(tenth / 10, 2, Beat(2, 1, coordinator.epoch))
        coordinator.tick(tenth / 10)
    assert coordinator.chains == [(2,)]
