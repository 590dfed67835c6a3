"""The address book of a run on several hosts: its readers, and lost and late messages."""

from __future__ import annotations

import random

from polytempo.server.message import Outbox
from polytempo.wire.address_book import AddressBook, Addresses, BookCopy, Here, Place


def place(node: int, life: int = 0, host: int = 0) -> Place:
    return Place(node, life, host, f"tcp://h{host}:{1000 + life}", f"ipc:///h{host}/m{life}")


def told(out: Outbox) -> list[tuple[int, int, int, list[int]]]:
    """(to, since, version, nodes) of each message."""
    plain = []
    for to, message in out:
        assert isinstance(message, Addresses)
        plain.append((to, message.since, message.version, [each.node for each in message.places]))
    return plain


def test_a_newcomer_gets_the_whole_book_and_the_others_get_the_newcomer() -> None:
    book = AddressBook()
    assert told(book.receive(0, Here(place(0), 0))) == [(0, 0, 1, [0])]
    assert told(book.receive(1, Here(place(1, 1), 0))) == [(0, 1, 2, [1]), (1, 0, 2, [0, 1])]
    assert told(book.receive(2, Here(place(2, 2), 0))) == [(0, 2, 3, [2]), (1, 2, 3, [2]), (2, 0, 3, [0, 1, 2])]
    assert told(book.receive(0, Here(place(0), 1))) == [(0, 1, 3, [1, 2])]  # nothing is new but to node 0


def test_a_later_life_takes_the_place_and_an_earlier_one_gets_no_answer() -> None:
    book = AddressBook()
    book.receive(0, Here(place(0), 0))
    book.receive(1, Here(place(1, 1), 0))
    assert told(book.receive(1, Here(place(1, 7, host=3), 0))) == [(0, 2, 3, [1]), (1, 0, 3, [0, 1])]
    assert book.receive(1, Here(place(1, 1), 0)) == []
    assert book.place_of(1) == place(1, 7, host=3)


def test_nobody_speaks_for_another_node() -> None:
    book = AddressBook()
    assert book.receive(5, Here(place(0), 0)) == []
    assert book.place_of(0) is None


def test_which_address_one_writes_to() -> None:
    assert place(4, host=2).seen_from(2) == "ipc:///h2/m0"
    assert place(4, host=2).seen_from(0) == "tcp://h2:1000"
    alone = Place(4, 0, -1, "tcp://h:1")
    assert alone.seen_from(-1) == "tcp://h:1"  # without shared memory two processes of one host are as far as any


def test_copies_equal_the_book_once_they_have_asked_whatever_was_lost_or_late() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        book, copies = AddressBook(), {node: BookCopy() for node in range(5)}
        lives: dict[int, int] = {}
        newest = 0
        late: Outbox = []
        for _ in range(30):
            node = dice.randrange(5)
            if node not in lives or dice.random() < 0.3:
                lives[node], newest, copies[node] = newest, newest + 1, BookCopy()
            late += book.receive(node, Here(place(node, lives[node], lives[node] % 2), copies[node].version))
            dice.shuffle(late)
            for _ in range(dice.randrange(len(late) + 1)):
                to, message = late.pop()
                if dice.random() < 0.7:
                    assert isinstance(message, Addresses)
                    copies[to].receive(message)
        for node, life in lives.items():
            known = book.place_of(node)
            assert known is not None
            for to, message in book.receive(node, Here(known, copies[node].version)):
                assert isinstance(message, Addresses)
                copies[to].receive(message)
            assert known.life == life, f"seed {seed}"
            for other in lives:
                assert copies[node].place_of(other) == book.place_of(other), f"seed {seed}, {node} of {other}"
