"""A worker's line at one shard: first in, first out, and never more than the shard remembers."""

from __future__ import annotations

from polytempo.server.message import Noted, Pull, Save
from polytempo.server.requests import Requests
from polytempo.server.shard.deduplication import WINDOW
from polytempo.server.timing import Timing

TIMING = Timing(retry_s=1.0, longest_retry_s=4.0)


def line(count: int) -> Requests:
    asked = Requests(0, 1, 5, TIMING)
    for _ in range(count):
        asked.add(lambda worker, life, sequence: Save(worker, life, sequence, 0))
    return asked


def answer(sequence: int) -> Noted:
    return Noted(0, 0, 1, sequence)


def test_no_more_are_under_way_than_the_shard_keeps_answers() -> None:
    asked = line(WINDOW + 3)
    assert [request.sequence for request in asked.sendable(0.0)] == list(range(1, WINDOW + 1))
    for sequence in range(2, WINDOW + 1):  # the oldest one's answer is lost
        assert asked.answered(answer(sequence), 0.5)
    assert asked.sendable(0.5) == []
    assert [request.sequence for request in asked.late(1.0)] == [1]  # its patience is its own
    assert asked.waited_s(1.0) == 1.0
    assert asked.answered(answer(1), 1.1)
    assert [request.sequence for request in asked.sendable(1.1)] == [WINDOW + 1, WINDOW + 2, WINDOW + 3]


def test_a_pull_closes_the_line_until_it_is_answered() -> None:
    asked = line(1)
    asked.add(lambda worker, life, sequence: Pull(worker, life, sequence, 0, -1))
    asked.add(lambda worker, life, sequence: Save(worker, life, sequence, 0))
    assert [request.sequence for request in asked.sendable(0.0)] == [1, 2]
    assert asked.answered(answer(1), 0.0)
    assert asked.sendable(0.0) == []
    assert asked.answered(answer(2), 0.0)
    assert [request.sequence for request in asked.sendable(0.0)] == [3]


def test_patience_doubles_up_to_its_limit() -> None:
    asked = line(1)
    asked.sendable(0.0)
    assert [time_s for time_s in range(12) if asked.late(float(time_s))] == [1, 3, 7, 11]


def test_repeats_and_answers_to_another_life_are_no_answers() -> None:
    asked = line(1)
    asked.sendable(0.0)
    assert not asked.answered(Noted(0, 0, 2, 1), 0.0)
    assert asked.answered(answer(1), 0.0)
    assert not asked.answered(answer(1), 0.0)
