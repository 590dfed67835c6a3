"""FlexRR's peers without a world: literal tables, and numbered stories of messages that cross."""

from __future__ import annotations

from typing import Any

import pytest

from polytempo.flexrr.helping import Helping, Position
from polytempo.flexrr.protocol import Do, Peer
from polytempo.flexrr.reassignment import Reassignment, helpees_of, helpers_of
from polytempo.flexrr.slices import (
    BegunHelping,
    Cancel,
    CancelGranted,
    DoThis,
    Helped,
    Progress,
    Slice,
    closing_of,
    cut,
    ticket_of,
)
from polytempo.server.message import Message, Ticket

TENTHS = Reassignment(helpers=1, grain=0.1, first_offer=0.1, later_offers=0.2, patience=2.0)
HELPEE, HELPER = 0, 1
"""Two workers, each the other's helper."""

AT = Position(1, 5, 0.5)
PIECE = Slice(HELPEE, 1, 5, 9, 90, 100)


def said(messages: list[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]


def sent(outbox: list[tuple[int, Message]], kind: type[Message]) -> list[Any]:
    """The messages of one kind in an outbox."""
    return [message for _, message in outbox if isinstance(message, kind)]


# ----------------------------------------------------------------------------------------------------------- slices


def test_a_share_is_cut_without_gaps() -> None:
    assert [(piece.begin, piece.end) for piece in cut(3, 1, 0, samples=10, slices=4)] == [
        (0, 2),
        (2, 5),
        (5, 7),
        (7, 10),
    ]
    assert [piece.samples for piece in cut(3, 1, 0, samples=2, slices=4)] == [1, 1]
    with pytest.raises(ValueError, match="at least one sample"):
        cut(3, 1, 0, samples=0, slices=4)


def test_slices_of_different_batches_have_different_tickets() -> None:
    tickets = [ticket_of(piece, batch, 4) for batch in range(3) for piece in cut(0, 1, batch, 10, 4)]
    closing = [closing_of(batch, 4) for batch in range(3)]
    assert (tickets, closing) == ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13], [4, 9, 14])
    with pytest.raises(ValueError, match="every worker must cut alike"):
        ticket_of(PIECE, 0, slices=4)


def test_each_worker_helps_as_many_as_help_it() -> None:
    assert helpers_of(6, range(8), 4) == (7, 0, 1, 2)
    assert helpees_of(2, range(8), 4) == (1, 0, 7, 6)
    assert helpers_of(5, (1, 5), 4) == (1,)
    assert all(a in helpees_of(b, range(8), 3) for a in range(8) for b in helpers_of(a, range(8), 3))


# ----------------------------------------------------------------------------------- the helper's table


@pytest.mark.parametrize(
    ("known", "to_do_this", "to_cancel"),
    [
        ("unknown", [], ["CancelGranted"]),
        ("queued", [], ["CancelGranted"]),
        ("begun", ["BegunHelping"], ["BegunHelping"]),
        ("helped", ["Helped"], ["Helped"]),
        ("returned", ["CancelGranted"], ["CancelGranted"]),
        ("of an old clock", [], []),
        ("given to an earlier life", [], []),
    ],
)
def test_what_a_helper_answers(known: str, to_do_this: list[str], to_cancel: list[str]) -> None:
    def helper() -> Helping:
        helping = Helping(incarnation=1, capacity=4)
        if known in ("queued", "begun", "helped"):
            helping.do_this(HELPEE, DoThis(1, (PIECE,)), AT)
        if known in ("begun", "helped"):
            assert helping.begin() == (PIECE, None)
        if known == "helped":
            helping.finish(PIECE)
        if known == "returned":
            helping.cancel(HELPEE, Cancel(1, PIECE), AT)
        if known == "of an old clock":
            helping.at_clock(HELPEE, 1, 6)
        return helping

    life = 0 if known == "given to an earlier life" else 1
    assert said(helper().do_this(HELPEE, DoThis(life, (PIECE,)), AT)) == to_do_this
    cancelled = helper()
    assert said(cancelled.cancel(HELPEE, Cancel(life, PIECE), AT)) == to_cancel
    assert cancelled.begin() is None  # a granted slice is never begun
    assert said(cancelled.do_this(HELPEE, DoThis(life, (PIECE,)), AT)) == to_cancel


def test_a_helper_takes_on_no_more_than_it_can_remember() -> None:
    pieces = cut(HELPEE, 1, 5, 100, 10)
    helping = Helping(incarnation=1, capacity=2)
    (answer,) = helping.do_this(HELPEE, DoThis(1, tuple(pieces[7:])), AT)
    assert isinstance(answer, CancelGranted)
    assert answer.slice == pieces[9]
    assert [helping.begin(), helping.begin(), helping.begin()] == [(pieces[7], None), (pieces[8], None), None]


def test_nobody_gives_away_what_is_anothers() -> None:
    helping = Helping(incarnation=1, capacity=4)
    assert helping.do_this(2, DoThis(1, (PIECE,)), AT) == []
    assert helping.begin() is None


# ------------------------------------------------------------------------------------------------ stories of a helpee


def do_own(peer: Peer, count: int, from_s: float = 0.0, seconds: float = 1.0) -> list[int]:
    """Let a peer do `count` slices; their numbers."""
    numbers = []
    for i in range(count):
        do, _ = peer.next(from_s + i * seconds)
        assert do is not None
        peer.finished(from_s + (i + 1) * seconds, do.slice)
        numbers.append(do.slice.number)
    return numbers


def helpee_with_offer(own: int = 2) -> tuple[Peer, Slice]:
    """A helpee that has done `own` slices (until second `own`) and offered its last one to a helper far ahead."""
    peer = Peer(HELPEE, (HELPEE, HELPER), TENTHS)
    peer.start(0.0, 5, 100)
    assert do_own(peer, own) == list(range(own))
    (offer,) = sent(peer.receive(float(own), HELPER, Progress(1, 5, 0.9)), DoThis)
    assert [piece.number for piece in offer.slices] == [9]
    return peer, offer.slices[0]


@pytest.mark.parametrize(
    ("done", "helper_clock", "helper_fraction", "offers"),
    [
        (2, 5, 0.39, 0),  # ahead, but not by 20 %
        (2, 5, 0.45, 1),
        (2, 4, 1.00, 0),  # far ahead, but a clock ago
        (2, 6, 0.00, 1),
        (10, 5, 1.00, 0),
    ],
)
def test_who_is_offered_something(done: int, helper_clock: int, helper_fraction: float, offers: int) -> None:
    peer = Peer(HELPEE, (HELPEE, HELPER), TENTHS)
    peer.start(0.0, 5, 100)
    do_own(peer, done)
    outbox = peer.receive(10.0, HELPER, Progress(1, helper_clock, helper_fraction))
    assert len(sent(outbox, DoThis)) == offers


def test_offers_grow_once_the_helper_has_begun() -> None:
    peer, piece = helpee_with_offer()
    assert peer.receive(2.0, HELPER, Progress(1, 5, 1.0)) == []  # it has one unbegun slice
    (offer,) = sent(peer.receive(2.0, HELPER, BegunHelping(piece, 1, 5, 1.0)), DoThis)
    assert [piece.number for piece in offer.slices] == [8, 7]


def out_of_work(peer: Peer, at_s: float) -> tuple[float, list[Cancel]]:
    """Do all remaining own slices; then ask for the lent ones back."""
    cancels: list[Cancel] = []
    while True:
        cancels += sent(peer.tick(at_s), Cancel)
        do, outbox = peer.next(at_s)
        cancels += sent(outbox, Cancel)
        if do is None:
            return at_s, cancels
        at_s += 1.0
        peer.finished(at_s, do.slice)


@pytest.mark.parametrize(
    ("story", "answers", "does_it", "covered"),
    [
        ("1. cancel arrives before the helper begins", [CancelGranted], "as its own", False),
        ("2. the helper begins while the cancel travels", [BegunHelping], "", False),
        ("3. … and finishes", [BegunHelping, Helped], "", True),
        ("4. … and its messages overtake each other", [Helped, BegunHelping], "", True),
        ("5. the grant comes twice", [CancelGranted, CancelGranted], "as its own", False),
        ("6. nothing is heard", [], "alone", False),
        ("7. begun, then silence", [BegunHelping], "alone", False),
    ],
)
def test_begin_and_cancel_cross(story: str, answers: list[type[Message]], does_it: str, covered: bool) -> None:
    peer, piece = helpee_with_offer()
    now_s, cancels = out_of_work(peer, 2.0)
    assert {cancel.slice for cancel in cancels} == {piece}  # it may repeat itself
    for answer in answers:
        peer.receive(now_s, HELPER, BegunHelping(piece, 1, 5, 1.0) if answer is BegunHelping else answer(piece))
    assert peer.covered is covered
    if does_it == "alone":
        peer.tick(now_s)
        assert peer.next(now_s + 1.9)[0] is None
        now_s += 2.0  # two slices' time: it has lost patience
        peer.tick(now_s)
    do, _ = peer.next(now_s)
    assert do == (Do(piece, None, does_it == "alone") if does_it else None)
    if do is not None:
        peer.finished(now_s + 1, do.slice)
        assert peer.covered
        assert peer.next(now_s + 1)[0] is None  # it does nothing twice


def test_a_helper_that_finishes_in_time_ends_a_contest() -> None:
    """1. Impatient, the helpee contests. 2. Before it begins, the helper is done after all. 3. No worker does the
    slice again."""
    peer, piece = helpee_with_offer()
    now_s, _ = out_of_work(peer, 2.0)
    peer.tick(now_s)
    peer.tick(now_s + 2.0)
    peer.receive(now_s + 2.0, HELPER, Helped(piece))
    assert peer.covered
    assert peer.next(now_s + 2.0)[0] is None


def test_what_a_lost_helper_had_pushed_is_contested() -> None:
    peer, piece = helpee_with_offer()
    now_s, _ = out_of_work(peer, 2.0)
    peer.receive(now_s, HELPER, Helped(piece))
    assert peer.covered
    peer.lost(HELPER)
    assert not peer.covered
    assert peer.next(now_s)[0] == Do(piece, None, alone=True)


def test_an_answer_of_another_life_or_worker_changes_nothing() -> None:
    peer = Peer(HELPEE, range(4), TENTHS)
    peer.start(0.0, 5, 100)
    do_own(peer, 2)
    (offer,) = sent(peer.receive(2.0, HELPER, Progress(1, 5, 0.9)), DoThis)
    now_s, _ = out_of_work(peer, 2.0)
    peer.receive(now_s, 3, CancelGranted(offer.slices[0]))
    peer.receive(now_s, 2, Helped(offer.slices[0]))
    assert not peer.covered
    assert peer.next(now_s)[0] is None


def test_unanswered_offers_are_repeated_ever_more_seldom() -> None:
    peer, _ = helpee_with_offer()
    times = [i / 100 for i in range(200, 300) if sent(peer.tick(i / 100), DoThis)]
    assert times == pytest.approx([2.05, 2.15, 2.35, 2.75])


def test_a_batch_that_is_dealt_again_goes_slice_by_slice() -> None:
    """Helpers of its first owner may have pushed some of it, so no push may hold two."""
    peer = Peer(HELPEE, (HELPEE, HELPER), TENTHS)
    again = Ticket(7, 0, 7, again=True)
    peer.start(0.0, 5, 100, again)
    assert peer.next(0.0)[0] == Do(cut(HELPEE, 1, 5, 100, 10)[0], again, alone=True)


def test_start_comes_once_a_clock_and_after_covering() -> None:
    peer = Peer(HELPEE, (HELPEE, HELPER), TENTHS)
    peer.start(0.0, 5, 100)
    with pytest.raises(ValueError, match="clock 5 is not covered"):
        peer.start(0.0, 6, 100)


# ------------------------------------------------------------------------------------------------------- both together


def test_a_helper_does_the_slice_for_the_helpees_clock_before_its_own() -> None:
    helper = Peer(HELPER, (HELPEE, HELPER), TENTHS)
    helper.start(0.0, 6, 100)
    helper.receive(0.0, HELPEE, DoThis(1, (PIECE,), Ticket(3, 0, 3)))
    do, outbox = helper.next(0.0)
    assert do == Do(PIECE, Ticket(3, 0, 3), alone=True)
    assert said([message for _, message in outbox]) == ["BegunHelping"]
    (begun,) = sent(outbox, BegunHelping)
    assert (begun.clock, begun.fraction) == (6, 0.0)  # helping does not advance its own clock
    assert said([message for _, message in helper.finished(1.0, PIECE)]) == ["Helped"]
    assert do_own(helper, 1) == [0]


@pytest.mark.parametrize(("slack", "heard", "may"), [(0, 0.9, False), (0, 1.0, True), (1, 0.9, True)])
def test_who_waits_for_its_helpee(slack: int, heard: float, may: bool) -> None:
    helper = Peer(
        HELPER, (HELPEE, HELPER), Reassignment(helpers=1, grain=0.1, first_offer=0.1, later_offers=0.2, slack=slack)
    )
    helper.start(0.0, 5, 100)
    do_own(helper, 10)
    helper.receive(10.0, HELPEE, Progress(1, 5, heard))
    assert helper.may_go_on(10.0) is may
    assert helper.may_go_on(12.1)  # a silent helpee is not waited for
    assert bool(sent(helper.tick(11.0), Progress)) is not may


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"behind": 0.0}, r"behind is a part of a worker's batch, above 0 and at most 1, got 0\.0"),
        ({"grain": 0.1}, r"grain <= first_offer <= later_offers; got grain=0\.1, first_offer=0\.025"),
        ({"later_offers": 0.01}, r"first_offer=0\.025, later_offers=0\.01"),
        ({"patience": 0.0}, r"patience must be above 0, got 0\.0"),
        ({"helpers": -1}, "helpers must not be negative, got -1"),
    ],
)
def test_impossible_constants_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Reassignment(**wrong)
