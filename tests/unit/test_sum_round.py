"""A round's secure sum between a server's machine and clients, without sockets: numbered phases, seeds are literals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from laws.test_secure_sum import TOY
from polytempo import federated as fed
from polytempo.core.strategy import InRounds
from polytempo.runs.clients.client_messages import ClientWelcome, SumAsk, SumTell, ordered
from polytempo.runs.clients.open_round import OpenRound, RoundLost
from polytempo.runs.clients.opened_sums import OpenedSums
from polytempo.runs.clients.sum_part import SumPart
from polytempo.runs.clients.sum_phases import SumMoves, sum_in_phases
from polytempo.runs.clients.sum_round import SumRound
from polytempo.training.federated.movement_words import words_of
from polytempo.training.federated.remote_rounds import ClientAnswer, RoundTask, SumTask

CLIENTS, NUMEL = 8, 9
"""Six of eight clients must stay."""
Change = Callable[[SumTell], SumTell]
Lie = Callable[[int, SumAsk], SumAsk]


def rounds_of(bits: Any = 32) -> InRounds:
    found = fed.secure(fed.fed_avg(CLIENTS), bits).rounds
    assert found is not None
    return found


def movements() -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [[torch.randn(shape, generator=random) for shape in ((3,), (2, 3))] for _ in range(CLIENTS)]


class Sum:
    """A sum of eight clients with 1, …, 8 samples, so with the weights 1/36, …, 8/36."""

    def __init__(
        self,
        given: list[list[Tensor]],
        rounds: InRounds,
        opened: list[OpenedSums] | None = None,
        orders: Sequence[str] = ("",) * CLIENTS,
    ) -> None:
        assert rounds.secure is not None
        self.failed: list[int] = []
        self.server = SumRound(3, SumTask(rounds.secure, NUMEL, lambda answers: []), TOY, self.failed)
        self.parts = [
            SumPart(c, c + 1, self.server.draw, "3 mark", each, rounds, TOY, orders[c]) for c, each in enumerate(given)
        ]
        self.opened = opened or [OpenedSums() for _ in given]
        self.samples = {c: c + 1 for c in range(CLIENTS)}
        self.weights = {c: (c + 1) / 36 for c in range(CLIENTS)}
        assert [self.server.joins(c, part.keys) for c, part in enumerate(self.parts)] == [None] * CLIENTS

    def phase(
        self,
        lost: Set[int] = frozenset(),
        change: dict[int, Change] | None = None,
        lie: Lie = lambda client, asked: asked,
    ) -> dict[int, str]:
        """Perform a phase; the problems that the server finds. `change`: other messages of clients. `lie`: others of
        the server."""
        assert self.server.begins(self.samples)
        problems = {}
        for client in sorted(self.server.there - lost):
            asked = self.server.asks(client)
            assert asked is not None
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(lie(client, asked)), type=SumAsk)
            told = self.parts[client].tells(sent, self.opened[client])
            assert self.parts[client].tells(sent, self.opened[client]) is told  # asked again
            problem = self.server.takes(client, (change or {}).get(client, lambda told: told)(told))
            if problem is not None:
                problems[client] = problem
        return problems


@pytest.mark.parametrize("phase", [1, 2, 3])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_quarter_leaves_before_a_phase_and_the_sum_is_of_the_others(phase: int, bits: Any) -> None:
    given, rounds = movements(), rounds_of(bits)
    found = Sum(given, rounds)
    for number in (1, 2, 3):
        assert found.phase({2, 5} if number == phase else set()) == {}
    assert not found.server.begins(found.samples)
    summed, wrong = found.server.ends()
    assert summed is not None
    left = [c for c in range(CLIENTS) if phase == 3 or c not in (2, 5)]
    words = [words_of(given[c], found.weights[c], CLIENTS, rounds) for c in left]
    assert np.array_equal(summed.words, sum(words, np.zeros_like(words[0])))
    assert summed.clients == frozenset(left)
    assert wrong == {}


def test_a_server_that_tells_clients_different_weights_learns_no_sum() -> None:
    """The server wants the movement of client 0. To others it names so many samples that their weights are nearly 0."""
    given, rounds = movements(), rounds_of()
    found, alone = Sum(given, rounds), Sum(given, rounds)

    def others_have_many(client: int, asked: SumAsk) -> SumAsk:
        return replace(asked, samples={c: n if c in (0, client) else 1 << 39 for c, n in asked.samples.items()})

    assert found.phase(lie=lambda client, asked: others_have_many(client, asked) if client else asked) == {}
    for _ in (2, 3):
        assert found.phase() == {}
    summed, _ = found.server.ends()
    assert summed is not None
    wanted = words_of(given[0], found.weights[0], CLIENTS, rounds)
    assert not np.any(np.abs((summed.words - wanted).view("i4")) < 4)
    for _ in range(3):
        alone.phase()
    honest, _ = alone.server.ends()
    assert honest is not None
    assert not np.any(np.abs((summed.words - honest.words).view("i4")) < 4)


@pytest.mark.parametrize("part", ["strategy", "lr", "seed", "model", "rates"])
def test_a_server_that_gives_clients_different_orders_learns_no_sum(part: str) -> None:
    """By its order the others do not move, so without masks the sum would be the movement of client 0."""
    told = {"strategy": "fed_avg()", "lr": 0.1, "seed": 3, "model": "one", "rates": [0.1]}
    other = {"strategy": "fed_avg(epochs=2)", "lr": 0.0, "seed": 4, "model": "two", "rates": [0.0]}
    honest, lie = (
        ordered(ClientWelcome(1, each["strategy"], each["lr"], each["seed"]), each["model"], each["rates"])  # type: ignore[arg-type]
        for each in (told, told | {part: other[part]})
    )
    assert honest != lie
    given, rounds = movements(), rounds_of()
    still = [given[0], *([torch.zeros_like(each) for each in one] for one in given[1:])]
    wanted = words_of(given[0], 1 / 36, CLIENTS, rounds)
    for orders, opens in (([honest] * CLIENTS, True), ([honest, *[lie] * (CLIENTS - 1)], False)):
        found = Sum(still, rounds, orders=orders)
        found.server._order = honest
        for _ in range(3):
            found.phase()
        summed, _ = found.server.ends()
        assert summed is not None
        assert np.any(np.abs((summed.words - wanted).view("i4")) < 4) == opens


LIES: dict[str, tuple[Lie, str]] = {
    "other samples": (lambda c, asked: replace(asked, samples=asked.samples | {c: 99}), "others at the server"),
    "other keys": (lambda c, asked: replace(asked, content=asked.content | {c: bytes(96)}), "others at the server"),
    "no samples": (lambda c, asked: replace(asked, samples={c: c + 1}), "not of the sum's clients"),
    "no sample": (lambda c, asked: replace(asked, samples=asked.samples | {c ^ 1: 0}), "not from 1 to"),
    "too many": (lambda c, asked: replace(asked, samples=asked.samples | {c ^ 1: 1 << 41}), "not from 1 to"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_client_leaves_a_sum_with_false_numbers_of_samples(name: str) -> None:
    lie, why = LIES[name]
    problems = Sum(movements(), rounds_of()).phase(lie=lie)
    assert list(problems) == list(range(CLIENTS))
    assert all(why in each for each in problems.values())


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_too_few_clients_end_a_sum(phase: int) -> None:
    found = Sum(movements(), rounds_of())
    for number in range(1, phase + 1):
        found.phase({2, 5, 6} if number == phase else set())
    assert not found.server.begins(found.samples)
    assert found.server.ends() == (None, {})
    assert (found.server.told, found.server.least) == (5, 6)


WRONG: dict[str, tuple[int, Change, str]] = {
    "no shares": (1, lambda told: replace(told, content={}), "another size"),
    "shares for itself": (1, lambda told: replace(told, content=told.content | {1: bytes(82)}), "another size"),
    "short words": (2, lambda told: replace(told, content={1: bytes(8)}), "another size"),
    "another's words": (2, lambda told: replace(told, content={2: bytes(36)}), "another size"),
    "long shares": (3, lambda told: replace(told, content=dict.fromkeys(range(8), bytes(99))), "another size"),
    "an excuse": (1, lambda told: replace(told, why="no\x1btime"), "it leaves the sum: no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_refused_and_the_sum_goes_on_without_its_client(name: str) -> None:
    phase, change, why = WRONG[name]
    found = Sum(movements(), rounds_of())
    for number in (1, 2, 3):
        problems = found.phase(change={1: change} if number == phase else {})
        assert list(problems) == [1] * (number == phase)
        assert all(why in each and "\x1b" not in each for each in problems.values())
    summed, _ = found.server.ends()
    assert summed is not None
    assert summed.clients == frozenset(range(8)) - ({1} if phase < 3 else set())


def test_keys() -> None:
    found = Sum(movements(), rounds_of())
    [one, other] = (SumPart(9, 1, 0, "", [], rounds_of(), TOY).keys for _ in range(2))
    assert "no keys" in (found.server.joins(9, one[:-1]) or "")
    assert found.server.joins(9, found.parts[2].keys) == "its keys are another client's"
    assert not found.server.has(9)
    assert found.server.joins(9, one) is None
    assert found.server.has(9)
    assert [found.server.contradicts(9, each) for each in (one, other)] == [False, True]

    def degenerate(own: bytes, other: bytes) -> bytes:
        raise ValueError("no shared key")

    task = SumTask(fed.secure(fed.fed_avg(8)).rounds.secure, NUMEL, lambda answers: [])  # type: ignore[union-attr,arg-type]
    assert "no shared key" in (SumRound(3, task, TOY._replace(agree=degenerate)).joins(1, one) or "")


def test_shares_that_no_other_can_open_are_named() -> None:
    """All others leave this sum, and the next sum is made without the named client."""
    found = Sum(movements(), rounds_of())
    found.phase(change={1: lambda told: replace(told, content={c: bytes(82) for c in told.content})})
    problems = found.phase()
    assert sorted(problems) == [0, 2, 3, 4, 5, 6, 7]
    assert not found.server.begins(found.samples)
    summed, wrong = found.server.ends()
    assert summed is None
    assert wrong == {1: "client-0, client-2, client-3, client-4, client-5, client-6, client-7 cannot read its shares"}


def test_a_client_that_accuses_leaves_alone() -> None:
    found = Sum(movements(), rounds_of())
    found.phase()
    assert list(found.phase(change={4: lambda told: replace(told, why="wrong", wrong=[1])})) == [4]
    found.phase()
    summed, wrong = found.server.ends()
    assert summed is not None
    assert summed.clients == frozenset(range(8)) - {4}
    assert wrong == {}


def test_accusations_of_few_are_of_the_accusers() -> None:
    """Three of eight leave and accuse client 1. The others can read its shares; client 7 says nothing."""
    found = Sum(movements(), rounds_of())
    found.phase()
    accusing = dict.fromkeys((2, 4, 6), lambda told: replace(told, why="wrong", wrong=[1, -1, 99]))
    assert list(found.phase({7}, accusing)) == [2, 4, 6]
    assert [found.server.accuses(SumTell(3, 0, 2, why="wrong", wrong=wrong)) for wrong in ([1], [-1, 99], [])] == [
        True,
        False,
        False,
    ]
    assert found.server.silent == {7}
    assert not found.server.begins(found.samples)
    assert found.server.ends() == (None, dict.fromkeys((2, 4, 6), "most clients can read the shares of client-1"))


@pytest.mark.parametrize("phase", [1, 3])
def test_a_client_takes_part_in_no_sum_of_too_few(phase: int) -> None:
    """A server could ask for the sum of a single client."""
    found = Sum(movements(), rounds_of())
    for _ in range(phase - 1):
        found.phase()
    assert found.server.begins(found.samples)
    asked = found.server.asks(0)
    assert asked is not None
    few = replace(asked, content={0: asked.content[0]})
    assert "would tell of one" in found.parts[0].tells(few, found.opened[0]).why


def test_a_share_told_wrong_by_one_of_no_spare_holder_names_no_dealer() -> None:
    """Six of eight are needed and six tell: the wrong one can be the holder as well as the dealer."""
    found = Sum(movements(), rounds_of())
    found.phase()
    found.phase()
    wrong = {1: lambda told: replace(told, content={**told.content, 0: bytes(len(told.content[0]))})}
    assert found.phase({6, 7}, wrong) == {}
    assert found.server.ends() == (None, {})


@pytest.mark.parametrize("liars", [{0}, {3, 6}])
@pytest.mark.parametrize("lost", [set(), {7}])
def test_wrong_shares_are_named_and_left_out(liars: set[int], lost: set[int]) -> None:
    """The first shares are tried first, so client 0 is among them; of 3 and 6 both are wanted."""
    given, rounds = movements(), rounds_of()
    found = Sum(given, rounds)
    found.phase()
    found.phase(lost)
    lies: Change = lambda told: replace(told, content={c: bytes(33) for c in told.content})  # noqa: E731
    if len(liars) > 1 and lost:  # five right shares are too few for six
        found.phase(change=dict.fromkeys(liars, lies))
        assert found.server.ends() == (None, {})
        assert found.failed == [found.server.draw]
        return
    assert found.phase(change=dict.fromkeys(liars, lies)) == {}
    summed, wrong = found.server.ends()
    assert summed is not None
    words = [words_of(given[c], found.weights[c], CLIENTS, rounds) for c in set(range(8)) - lost]
    assert np.array_equal(summed.words, sum(words, np.zeros_like(words[0])))
    assert wrong == dict.fromkeys(liars, "it has told wrong shares of others")


def test_a_client_that_deals_wrong_shares_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a client with a wrong hash stays; the next sum is made without it, and others give shares again."""
    given, rounds = movements(), rounds_of()
    found = Sum(given, rounds)
    monkeypatch.setattr(found.parts[4]._side, "_own", bytes(32))
    for _ in range(3):
        assert found.phase() == {}
    assert found.server.ends() == (None, {4: "its shares do not give its key"})
    assert found.failed == [found.server.draw]
    opened = found.opened[2]
    assert not opened.admits("3 mark", 1, {0, 1, 2}, [])
    assert opened.admits("3 mark", 1, {0, 1, 2}, found.failed)


def test_a_client_gives_shares_of_a_round_for_the_same_clients_alone() -> None:
    """A server that goes on from an earlier checkpoint asks again; two sums of other clients would tell of few."""
    found = Sum(movements(), rounds_of())
    for _ in range(3):
        assert found.phase() == {}
    same, other = (Sum(movements(), rounds_of(), found.opened) for _ in range(2))
    for number in (1, 2, 3):
        assert same.phase() == {}
        assert len(other.phase({5} if number == 2 else set())) == (7 if number == 3 else 0)
    assert same.server.ends()[0] is not None
    assert other.server.ends()[0] is None
    assert (same.server.opened, other.server.opened) == (set(), set(range(CLIENTS)) - {5})


@pytest.mark.parametrize("lost", [True, False])
def test_a_round_knows_whether_a_lost_server_may_have_opened_its_sum(lost: bool) -> None:
    """Three clients are silent in the last phase, and the others give no shares for a second sum; or a lost server has
    their shares."""
    rounds, records = rounds_of(), [OpenedSums() for _ in range(CLIENTS)]
    assert rounds.secure is not None
    if lost:
        for each in records:
            assert each.admits("3 mark", 1, range(CLIENTS - 1), [])
    task = SumTask(rounds.secure, NUMEL, lambda answers: [1.0 for _ in answers])
    opened, parts = OpenRound(RoundTask(3, {}, [], {}, sum=task), CLIENTS), dict[int, SumPart]()

    def train(chosen: Iterable[int]) -> None:
        assert opened.sum is not None
        for c in chosen:
            parts[c] = SumPart(c, c + 1, opened.sum.draw, "3 mark", movements()[c], rounds, TOY)
            assert opened.sum.joins(c, parts[c].keys) is None
            opened.answers[c] = ClientAnswer(c, c + 1, 0.0, {})
            opened.drawn += [] if c in opened.drawn else [c]

    def part(clients: Iterable[int]) -> None:
        assert opened.sum is not None
        for c in clients:
            asked = opened.sum.asks(c)
            assert asked is not None
            if asked.phase < 3 or c < 5:
                opened.sum.takes(c, parts[c].tells(asked, records[c]))

    def draw(first: bool) -> None:
        train(range(CLIENTS) if first else [])

    moves = SumMoves(lambda: range(CLIENTS), train, draw, part, lambda client, why: None)
    with pytest.raises(RoundLost):
        sum_in_phases(opened, task, TOY, fed.RoundRules(draws=2), moves)
    assert opened.opened_before is lost


@pytest.mark.parametrize("value", [1e6, torch.nan])
def test_a_movement_that_is_too_large_makes_its_client_leave_before_its_shares(value: float) -> None:
    """The message has no number of the movement."""
    given = movements()
    given[3][0] = given[3][0] * value
    found = Sum(given, rounds_of())
    why = "it leaves the sum: its movement has NaN, or is too large for the sum's numbers"
    assert found.phase() == {3: why}


def test_an_error_of_a_client_tells_its_kind_alone() -> None:
    found = Sum(movements(), rounds_of())
    assert found.server.begins(found.samples)
    asked = found.server.asks(2)
    assert asked is not None
    told = found.parts[2].tells(replace(asked, content={2: b""}), OpenedSums())
    assert told.why == "it has an error, ValueError"
    assert found.parts[3].tells(replace(asked, phase=2), OpenedSums()).why == "it has no part in this sum"
