"""A shard's memory: requests, so that none is done twice; tickets, as ranges."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core.arithmetic.ranges import Ranges
from polytempo.server.message import COORDINATOR, Inquire, Noted, Pull, Pushed, Reply
from polytempo.server.shard.deduplication import WINDOW, AnswerTable, Known


def request(sequence: int, worker: int = 1, incarnation: int = 1) -> Pull:
    return Pull(worker, incarnation, sequence, 0, 0)


def answer(sequence: int, worker: int = 1) -> Pushed:
    return Pushed(0, worker, 1, sequence, 5, 0, "applied")


def table(*workers: int) -> AnswerTable:
    made = AnswerTable(0)
    for worker in workers:
        made.admit(worker, 1)
    return made


def test_requests_are_taken_in_their_order() -> None:
    known = table(1)
    assert [known.status_of(request(s)).kind for s in (1, 2, 9)] == ["new", "ahead", "ahead"]
    known.take(request(1))
    assert [known.status_of(request(s)).kind for s in (1, 2, 3)] == ["repeated", "new", "ahead"]


def test_a_repeat_gets_the_answer_as_soon_as_there_is_one() -> None:
    known = table(1)
    known.take(request(1))
    assert known.status_of(request(1)).replies == ()
    given = answer(1)
    known.answer(given)
    assert known.status_of(request(1)).replies == (given,)


def test_answers_are_kept_for_a_window() -> None:
    known = table(1)
    for sequence in range(1, 100):
        known.take(request(sequence))
        known.answer(answer(sequence))
    assert sorted(known.known[1].answers) == list(range(100 - WINDOW, 100))
    assert known.status_of(request(3)) == ("repeated", ())


def test_answers_that_come_late_or_never_leave_nothing_behind() -> None:
    """Every fifth of 50 requests is answered only when the next five have been taken."""
    known = table(1)
    for sequence in range(1, 51):
        known.take(request(sequence))
        if sequence % 5 == 0 and sequence > 5:
            known.answer(answer(sequence - 5))
    assert len(known.known[1].answers) <= WINDOW


def test_what_was_lent_and_came_back_is_not_given_again() -> None:
    known = table(1)
    for sequence in (1, 2):
        known.take(request(sequence))
        known.answer(answer(sequence))
    known.settle(1, [1])
    assert sorted(known.known[1].answers) == [2]


def refusal(known: AnswerTable, asked: Pull) -> str:
    (reply,) = known.status_of(asked).replies
    assert isinstance(reply, Reply)
    assert (reply.worker, reply.incarnation, reply.sequence) == (asked.worker, asked.incarnation, asked.sequence)
    return str(getattr(reply, "reason", ""))


def test_strangers_learn_why() -> None:
    known = table(1)
    assert refusal(known, request(1, worker=2)) == "worker 2 is not a member; it must come back with a new incarnation"
    known.admit(1, 2)
    assert refusal(known, request(1)) == "worker 1 is known in its life 2, and this is of life 1"
    assert known.status_of(request(1, incarnation=2)).kind == "new"
    known.forget(1)
    assert known.status_of(request(1, incarnation=2)).kind == "stranger"


def test_the_coordinator_is_always_known_and_begins_anew() -> None:
    known = table()
    first, later = Inquire(COORDINATOR, 1, 1), Inquire(COORDINATOR, 2, 1)
    assert known.status_of(first).kind == "new"
    known.take(first)
    known.answer(Noted(0, COORDINATOR, 1, 1))
    assert known.status_of(first).kind == "repeated"
    assert known.status_of(Inquire(COORDINATOR, 2, 2)).kind == "ahead"
    assert known.status_of(later).kind == "new"
    known.take(later)
    assert known.status_of(later) == ("repeated", ())
    assert known.status_of(first).kind == "stranger"


def test_a_table_survives_as_bytes() -> None:
    known = table(1, 2)
    known.take(request(1))
    known.answer(answer(1))
    again = AnswerTable(0, msgspec.msgpack.decode(msgspec.msgpack.encode(known.known), type=dict[int, Known]))
    (reply,) = again.status_of(request(1)).replies
    assert isinstance(reply, Pushed)
    assert (reply.sequence, reply.version, reply.verdict) == (1, 5, "applied")
    assert again.status_of(request(1, worker=2)).kind == "new"


@given(st.lists(st.integers(0, 30), max_size=60))
def test_ranges_are_a_set(numbers: list[int]) -> None:
    ranges = Ranges()
    for number in numbers:
        ranges.add(number)
    assert [n for n in range(-1, 32) if n in ranges] == sorted(set(numbers))
    pairs = ranges.tuples
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(pairs))
    assert Ranges(pairs).tuples == pairs


def test_numbers_nearly_in_order_take_little_room() -> None:
    ranges = Ranges()
    for number in [1, 0, 2, 5, 4, 3, 8]:
        ranges.add(number)
    assert ranges.tuples == ((0, 5), (8, 8))
