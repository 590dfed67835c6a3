"""A shard's stories: exactly once, in the same bits everywhere, and nothing lent is written to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from plain_rules import in_pairs, on_arrival
from polytempo import strategies
from polytempo.aggregation import adam
from polytempo.core.rule import (
    Action,
    Add,
    Answer,
    Arrival,
    Drop,
    Mix,
    Modified,
    Rule,
    Service,
    Situation,
    Update,
    UpdateRule,
)
from polytempo.native.library import available
from polytempo.server.layout import Parameter, part, place_, shard_map, with_shard_added
from polytempo.server.message import (
    COORDINATOR,
    Entry,
    Inquire,
    Members,
    Noted,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reply,
    Rows,
    Save,
    Statistics,
    Stranger,
)
from polytempo.server.rules.corrections import compensate
from polytempo.server.rules.staleness import gate
from polytempo.server.shard.shard import Shard
from polytempo.server.snapshots.state import decode

MODEL = (Parameter("w", 40), Parameter("b", 7, group=1), Parameter("v", 53))
NUMEL = 100
SGD = UpdateRule("sgd", lr=0.5)
MOMENTUM = UpdateRule("sgd", momentum=0.9, weight_decay=0.01)

A = TypeVar("A", bound=Reply)
both_ways = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="no native core here"))],
    ids=["torch ops", "kernel"],
)


def together(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    """One gradient of each member makes an update. State: who has pushed, as often as it has."""
    pushed = tuple(w for w in state["pushed"] if w in situation.members)
    if arrival.kind == "push":
        pushed = (*pushed, arrival.worker)
    if pushed and set(pushed) == set(situation.members):
        adds: list[Action] = [Add(w) for w in situation.members]
        rest = list(pushed)
        for worker in situation.members:
            rest.remove(worker)
        return {"pushed": tuple(rest)}, [*adds, Update(len(adds)), *(Answer(w) for w in situation.members)]
    return {"pushed": pushed}, [Answer(arrival.worker)] if arrival.kind == "pull" else []


def elastic(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    return state, [*([Mix(arrival.worker, 0.25)] if arrival.kind == "push" else []), Answer(arrival.worker)]


def late(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
    return state, [*([Drop(arrival.worker)] if arrival.kind == "push" else []), Answer(arrival.worker)]


RULES = {
    "on_arrival": Rule("on_arrival()", int, on_arrival),
    "together": Rule("together()", lambda: {"pushed": ()}, together),
    "in_pairs": Rule("in_pairs()", int, in_pairs),
    "elastic": Rule("elastic()", int, elastic),
    "late": Rule("late()", int, late),
}


def service(rule: str = "on_arrival", optimizer: UpdateRule = SGD, *modifiers: Modified) -> Service:
    return Service(RULES[rule], optimizer, modifiers)


def shard(made: Service | None = None, workers: int = 2, native: bool | None = None) -> Shard:
    """One shard with everything, all weights 1, its members the workers 0, 1, …"""
    found = Shard(0, MODEL, shard_map(MODEL, 1)[0], torch.ones(NUMEL), made or service(), native=native)
    found.apply(members(1, *((worker, 1) for worker in range(workers))))
    return found


def members(sequence: int, *workers: tuple[int, int]) -> Members:
    return Members(COORDINATOR, 1, sequence, workers)


def pull(worker: int, sequence: int, incarnation: int = 1) -> Pull:
    return Pull(worker, incarnation, sequence, 0, 0)


def push(
    worker: int,
    sequence: int,
    gradient: Tensor | float = 1.0,
    *,
    basis: int = 0,
    tickets: Iterable[int] = (),
    incarnation: int = 1,
    lrs: tuple[float, ...] = (0.1, 0.01),
) -> Push:
    values = gradient if isinstance(gradient, Tensor) else torch.full((NUMEL,), gradient)
    return Push(worker, incarnation, sequence, sequence, basis, 1, lrs, tuple(tickets), values)


def only(replies: list[Reply], kind: type[A]) -> A:
    (reply,) = replies
    assert isinstance(reply, kind), reply
    return reply


def pushed(shard: Shard, entry: Push) -> Pushed:
    return only(shard.apply(entry), Pushed)


def asked(shard: Shard, request: Entry) -> list[Reply]:
    """The replies of a shard without copies: it takes new requests only."""
    status = shard.status_of(request)
    return shard.apply(request) if status.kind == "new" else list(status.replies)


def statistics(shard: Shard, sequence: int) -> Statistics:
    return only(shard.apply(Inquire(COORDINATOR, 1, sequence)), Statistics)


# ------------------------------------------------------------------------------------------------- exactly once


def test_a_push_moves_the_weights_and_a_pull_shows_them() -> None:
    server = shard()
    first = only(server.apply(pull(0, 1)), Pulled)
    assert (first.version, first.values[0].item()) == (0, 1.0)
    answer = pushed(server, push(0, 2, 1.0))
    assert (answer.verdict, answer.version, answer.staleness) == ("applied", 1, 0)
    assert only(server.apply(pull(0, 3)), Pulled).values.tolist() == [0.5] * NUMEL


def test_a_repeated_push_is_answered_again_and_not_applied_again() -> None:
    server = shard()
    answer = pushed(server, push(0, 1))
    for _ in range(2):
        assert asked(server, push(0, 1)) == [answer]
    assert (server.version, server.repeated) == (1, 2)


def test_a_gap_waits_for_what_lies_in_it() -> None:
    server = shard()
    assert asked(server, push(0, 2)) == []
    assert server.version == 0
    assert [pushed(server, push(0, s)).version for s in (1, 2)] == [1, 2]


def test_a_push_that_waits_is_answered_once_its_update_is_made() -> None:
    """1 worker 0 pushes, waits; 2 it asks again, and there is no answer yet; 3 worker 1 pushes: both are answered."""
    server = shard(service("together"))
    assert server.apply(push(0, 1, 1.0)) == []
    assert server.status_of(push(0, 1)) == ("repeated", ())
    assert server.apply(pull(0, 2)) == [], "it stands behind the push"
    replies = server.apply(push(1, 1, 3.0))
    assert [(r.worker, r.sequence) for r in replies] == [(0, 1), (0, 2), (1, 1)]
    assert server.weights.tolist() == [0.0] * NUMEL  # 1 - 0.5 · (1 + 3)/2
    assert len(server.status_of(push(0, 1)).replies) == 1


def test_answers_keep_the_order_of_requests() -> None:
    """Worker 0's second push belongs to the next step, and the pull behind it waits with it."""
    server = shard(service("together"))
    server.apply(push(0, 1))
    server.apply(push(0, 2))
    server.apply(pull(0, 3))
    assert [(r.worker, r.sequence) for r in server.apply(push(1, 1))] == [(0, 1), (1, 1)]
    assert [(r.worker, r.sequence) for r in server.apply(push(1, 2))] == [(0, 2), (0, 3), (1, 2)]


def test_tickets_are_applied_once_whoever_pushes_them() -> None:
    server = shard()
    pushed(server, push(0, 1, tickets=(0, 1)))
    again = pushed(server, push(1, 1, tickets=(1,), basis=1))
    assert (again.verdict, again.reason, again.version) == ("dropped", "had already", 1)
    partly = pushed(server, push(1, 2, tickets=(1, 2)))
    assert (partly.verdict, partly.reason) == (
        "refused",
        "worker 1: tickets [1] are applied, the others of (1, 2) are not",
    )
    assert statistics(server, 2).tickets == ((0, 1),)


def test_tickets_of_a_dropped_push_are_free() -> None:
    server = shard(service("late"))
    answer = pushed(server, push(0, 1, tickets=(7,)))
    assert (answer.verdict, answer.reason) == ("dropped", "late")
    found = statistics(server, 2)
    assert (found.tickets, found.dropped, found.staleness) == ((), 1, {})


# ------------------------------------------------------------------------------------------------- membership


def test_strangers_are_turned_away() -> None:
    server = shard()
    assert "not a member" in only(asked(server, push(2, 1)), Stranger).reason
    assert "life 1" in only(asked(server, push(0, 1, incarnation=2)), Stranger).reason
    only(server.apply(members(2, (0, 2), (1, 1))), Noted)
    only(asked(server, push(0, 1)), Stranger)
    assert pushed(server, push(0, 1, incarnation=2)).verdict == "applied"


def test_what_waits_of_a_worker_that_leaves_is_gone_and_the_others_go_on() -> None:
    server = shard(service("together"), workers=3)
    server.apply(push(2, 1, 100.0, tickets=(5,)))
    server.apply(push(0, 1, 1.0))
    assert len(server.apply(push(1, 1, 1.0))) == 3
    server.apply(push(2, 2, 100.0, tickets=(6,)))
    server.apply(push(0, 2, 1.0, basis=1))
    server.apply(push(1, 2, 1.0, basis=1))
    server.apply(push(2, 3, 100.0, tickets=(7,)))
    server.apply(push(0, 3, 1.0, basis=2))
    before = server.weights.clone()
    replies = server.apply(members(2, (0, 1), (1, 1)))
    assert [type(r) for r in replies] == [Noted]
    replies = server.apply(push(1, 3, 1.0, basis=2))
    assert {r.worker for r in replies} == {0, 1}
    assert torch.equal(server.weights, before - 0.5)
    assert statistics(server, 3).tickets == ((5, 6),)


def test_the_rule_hears_who_leaves_and_who_comes() -> None:
    heard: list[tuple[str, int, tuple[int, ...]]] = []

    def note(state: Any, arrival: Arrival, situation: Situation) -> tuple[Any, list[Action]]:
        heard.append((arrival.kind, arrival.worker, situation.members))
        return state, []

    server = shard(Service(Rule("note()", int, note), SGD))
    server.apply(members(2, (1, 2), (3, 1)))
    assert heard == [
        ("joined", 0, (0,)),
        ("joined", 1, (0, 1)),
        ("left", 0, (1,)),
        ("left", 1, ()),
        ("joined", 1, (1,)),
        ("joined", 3, (1, 3)),
    ]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ((41, math.nan), "worker 1, clock 1: the gradient of b[1] is nan"),
        ((99, -math.inf), "worker 1, clock 1: the gradient of v[52] is -inf"),
    ],
)
@both_ways
def test_what_is_no_number_is_refused_by_name(native: bool, spoiled: tuple[int, float], reason: str) -> None:
    server = shard(native=native)
    gradient = torch.ones(NUMEL)
    gradient[spoiled[0]] = spoiled[1]
    answer = pushed(server, push(1, 1, gradient))
    assert (answer.verdict, answer.reason) == ("refused", reason)
    assert server.version == 0
    assert server.weights.tolist() == [1.0] * NUMEL
    assert statistics(server, 2).refused == 1


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (push(0, 1, torch.ones(99)), r"pushes \(99,\) of torch.float32, but the shard holds \(100,\)"),
        (push(0, 1, torch.ones(10, 10)), r"pushes \(10, 10\)"),
        (push(0, 1, torch.ones(NUMEL, dtype=torch.float64)), r"of torch.float64, but the shard holds"),
        (push(0, 1, basis=1), "version 1, but there are only versions 0 to 0"),
        (push(0, 1, basis=-1), "version -1"),
        (push(0, 1, lrs=(0.1, math.nan)), "learning rates .* are not all finite"),
        (push(0, 1, lrs=(0.1,)), "no learning rate for parameter group 1"),
    ],
)
def test_what_does_not_fit_is_refused(entry: Push, reason: str) -> None:
    server = shard(service("on_arrival", MOMENTUM))
    answer = pushed(server, entry)
    assert answer.verdict == "refused"
    torch.testing.assert_close(server.weights, torch.ones(NUMEL))
    assert re.search(reason, answer.reason), answer.reason


def test_rows_are_refused_where_there_is_no_table() -> None:
    rows = Rows(0, torch.tensor([0]), torch.ones(1, 4))
    entry = Push(0, 1, 1, 1, 0, 1, (0.1, 0.1), (), torch.ones(NUMEL), (rows,))
    assert "no tables" in pushed(shard(), entry).reason


def test_a_service_needs_an_optimizer() -> None:
    with pytest.raises(ValueError, match="names no optimizer"):
        Shard(0, MODEL, shard_map(MODEL, 1)[0], torch.ones(NUMEL), Service(RULES["late"]))


def test_a_rule_that_adds_what_is_not_there_is_named() -> None:
    broken = Rule("broken()", int, lambda state, arrival, situation: (state, [Add(1)]))
    with pytest.raises(RuntimeError, match=r"rule broken\(\) says Add\(worker=1, weight=1.0, rate=1.0, part_of=None\)"):
        shard(Service(broken, SGD))


# ------------------------------------------------------------------------------------------------- lent


@both_ways
@pytest.mark.parametrize("rule", ["on_arrival", "elastic"])
def test_lent_weights_stay_until_their_worker_asks_again(rule: str, native: bool) -> None:
    server = shard(service(rule, MOMENTUM), workers=3, native=native)
    lent = {w: only(server.apply(pull(w, 1)), Pulled).values for w in (0, 1)}
    kept = {w: values.clone() for w, values in lent.items()}
    for sequence in range(1, 6):
        only(server.apply(push(2, sequence, torch.randn(NUMEL), basis=0)), Pushed)
        assert all(torch.equal(lent[w], kept[w]) for w in lent)
    assert not torch.equal(server.weights, kept[0])


def test_a_pull_that_comes_again_shows_the_same_weights() -> None:
    server = shard()
    first = only(server.apply(pull(0, 1)), Pulled)
    pushed(server, push(1, 1))
    assert server.status_of(pull(0, 1)).replies == (first,)
    assert first.values.tolist() == [1.0] * NUMEL


def test_memory_is_used_again() -> None:
    """Three workers pull and push in turn: one buffer for each, one for the weights, one to write to."""
    taken: list[int] = []

    def empty(numel: int, dtype: torch.dtype) -> Tensor:
        taken.append(numel)
        return torch.empty(numel, dtype=dtype)

    server = Shard(0, MODEL, shard_map(MODEL, 1)[0], torch.ones(NUMEL), service(), empty=empty)
    server.apply(members(1, *((w, 1) for w in range(3))))
    for sequence in range(1, 40, 2):
        for worker in range(3):
            server.apply(pull(worker, sequence))
            server.apply(push(worker, sequence + 1))
    assert len(taken) <= 5
    server.apply(members(2, (0, 2), (1, 2), (2, 2)))
    for worker in range(3):
        server.apply(pull(worker, 1, incarnation=2))
        server.apply(push(worker, 2, incarnation=2))
    assert len(taken) <= 5, "who has left holds nothing"


@both_ways
def test_gradients_are_only_lent(native: bool) -> None:
    """A sum over entries does not depend on answered pushes' gradients; and no gradient is ever written to."""
    server, gradient = shard(service("in_pairs"), native=native), torch.full((NUMEL,), 2.0)
    pushed(server, push(0, 1, gradient))
    assert gradient.tolist() == [2.0] * NUMEL
    gradient.fill_(1e9)
    pushed(server, push(1, 1, 4.0))
    assert server.weights.tolist() == [0.25] * NUMEL  # 1 - 0.5 · (0.5·2 + 0.5·4)/2


def test_elastic_averaging_draws_both_together() -> None:
    """d = (5 - 1)/4 = 1: the server goes from 1 to 2, and the worker subtracts 1."""
    server = shard(service("elastic"))
    first = pushed(server, push(0, 1, 5.0))
    assert first.difference is not None
    assert (first.difference.tolist(), server.weights.tolist()) == ([1.0] * NUMEL, [2.0] * NUMEL)
    for sequence in (1, 2, 3):
        pushed(server, push(1, sequence, 100.0))
    assert first.difference.tolist() == [1.0] * NUMEL, "lent until worker 0 asks again"
    assert server.version == 4


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_a_modifier_remembers_is_in_a_copy_of_the_state(momentum: float) -> None:
    """Adaptive compensation: v = (v + g²)/2 of the gradients 1, 2, 3 and 4 is 10.8125."""
    server, copy = (
        shard(service("on_arrival", replace(SGD, momentum=momentum), compensate(0.5, mean_square=0.5)))
        for _ in range(2)
    )
    pushed(server, push(1, 1, 1.0, basis=0))
    pushed(server, push(1, 2, 2.0, basis=1))
    server.apply(pull(0, 1))
    copy.load(*server.dump())
    for each in (server, copy):
        pushed(each, push(1, 3, 3.0, basis=2))
        pushed(each, push(0, 2, 4.0, basis=2))
        remembered = decode(*each.dump(), NUMEL, torch.float32, Tensor.clone).weights.second
        assert remembered is not None
        assert remembered.tolist() == [10.8125] * NUMEL
    assert torch.equal(server.weights, copy.weights)


def test_modifiers_see_what_the_gradient_was_computed_on() -> None:
    def apply(gradient: Tensor, weights: Tensor, basis: Tensor | None) -> Tensor:
        assert basis is not None
        return gradient + (weights - basis)

    server = shard(service("on_arrival", SGD, Modified("drift()", apply, needs_basis=True)))
    server.apply(pull(0, 1))
    pushed(server, push(1, 1, 2.0))  # θ = 1 - 0.5·2 = 0
    pushed(server, push(0, 2, 2.0, basis=0))  # θ = 0 - 0.5·(2 + (0 - 1)) = -0.5
    assert server.weights.tolist() == [-0.5] * NUMEL
    pushed(server, push(0, 3, 2.0, basis=0))  # the same basis: θ = -0.5 - 0.5·(2 + (-0.5 - 1)) = -0.75
    assert server.weights.tolist() == [-0.75] * NUMEL
    gone = pushed(server, push(1, 2, 2.0, basis=1))
    assert (gone.verdict, gone.reason) == (
        "refused",
        "worker 1: version 1 of the weights is gone; pull before you push",
    )


# ------------------------------------------------------------------------------------------------- the same bits


def story(numel: int = NUMEL, spans: tuple[Any, ...] = shard_map(MODEL, 1)[0]) -> list[Entry]:
    """Three workers pull, push, one leaves and one comes back: 80 entries for the part `spans` of the model."""
    generator = torch.Generator().manual_seed(7)
    sequences, lives, versions = [0, 0, 0], [1, 1, 1], [0, 0, 0]
    entries: list[Entry] = []
    for number in range(80):
        if number == 50:
            entries.append(members(2, (0, 1), (2, 1)))
            entries.append(members(3, (0, 1), (1, 2), (2, 1)))
            sequences[1], lives[1] = 0, 2
        worker = int(torch.randint(3, (1,), generator=generator))
        flat = torch.randn(numel, generator=generator)
        sequences[worker] += 1
        facts = (worker, lives[worker], sequences[worker])
        if number % 3:
            facts_of_push = (number, versions[worker], 1, (0.1, 0.05 / (1 + number)), (number,))
            entries.append(Push(*facts, *facts_of_push, part(flat, spans)))
        else:
            entries.append(Pull(*facts, number, 0))
    return entries


def outcome(replies: list[Reply]) -> list[Any]:
    """Replies as plain values."""
    return [
        (
            type(reply).__name__,
            *(x.tolist() if isinstance(x, Tensor) else x for x in (getattr(reply, f) for f in reply.__struct_fields__)),
        )
        for reply in replies
    ]


def run(server: Shard, entries: list[Entry]) -> list[Any]:
    return [outcome(server.apply(entry)) for entry in entries]


@both_ways
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_a_shard_that_is_dumped_and_loaded_goes_on_in_the_same_bits(kind: Any, rule: str, native: bool) -> None:
    optimizer = MOMENTUM if kind == "sgd" else UpdateRule(kind)
    made, entries = service(rule, optimizer), story()
    one = shard(made, workers=3, native=native)
    for cut in (0, 17, 41, 79):
        other = shard(made, workers=0, native=native)
        if cut == 41:
            run(other, story()[:5])  # it has been something else
        one = shard(made, workers=3, native=native)
        run(one, entries[:cut])
        other.load(*one.dump())
        assert run(other, entries[cut:]) == run(one, entries[cut:])
        assert torch.equal(other.weights, one.weights)
        assert [t.tolist() for t in other.dump()[1]] == [t.tolist() for t in one.dump()[1]]
    assert rule == "late" or one.version > 5


def test_a_dump_has_memory_of_its_own_and_knows_what_was_answered() -> None:
    server = shard(service("together"))
    server.apply(pull(0, 1))
    gradient = torch.ones(NUMEL)
    server.apply(push(0, 2, gradient, tickets=(3,)))
    data, tensors = server.dump()
    gradient.fill_(77.0)
    server.apply(push(1, 1, 5.0))
    other = shard(service("together"), workers=0)
    other.load(data, tensors)
    for tensor in tensors:
        tensor.fill_(math.nan)
    assert outcome(other.apply(push(0, 2))) == []
    replies = other.apply(push(1, 1, 1.0))
    assert [(r.worker, r.sequence) for r in replies] == [(0, 2), (1, 1)]
    assert other.weights.tolist() == [0.5] * NUMEL


def test_a_loaded_shard_answers_a_pull_that_comes_again() -> None:
    server = shard()
    server.apply(pull(0, 1))
    pushed(server, push(1, 1))
    other = shard(workers=0)
    other.load(*server.dump())
    (reply,) = other.status_of(pull(0, 1)).replies
    assert isinstance(reply, Pulled)
    assert (reply.version, reply.values.tolist()) == (0, [1.0] * NUMEL)
    for sequence in (2, 3):
        pushed(other, push(1, sequence))
    assert reply.values.tolist() == [1.0] * NUMEL, "still lent"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01\xc4\x01\x00", b"nonsense"])
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a shard's state"):
        shard().load(data, (torch.ones(NUMEL),))


def test_a_state_of_another_size_is_refused() -> None:
    data, tensors = shard().dump()
    with pytest.raises(ValueError, match=r"holds 100 elements of torch.float32, and the state \(3,\)"):
        shard().load(data, (torch.ones(3), *tensors[1:]))
    with pytest.raises(ValueError, match="names tensor 0, and 0 came with it"):
        shard().load(data, ())


@both_ways
@pytest.mark.parametrize("rule", ["on_arrival", "together", "in_pairs", "elastic"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_one_shard_has_the_bits_of_four(kind: Any, rule: str, native: bool) -> None:
    """The same entries in each; the fifth was added later, so the others have more than one range."""
    optimizer = MOMENTUM if kind == "sgd" else UpdateRule(kind)
    whole = shard(service(rule, optimizer), workers=3, native=native)
    run(whole, story())
    joined = torch.full((NUMEL,), math.nan)
    for number, spans in enumerate(with_shard_added(MODEL, shard_map(MODEL, 3))):
        weights = part(torch.ones(NUMEL), spans)
        server = Shard(number, MODEL, spans, weights, service(rule, optimizer), native=native)
        server.apply(members(1, *((w, 1) for w in range(3))))
        run(server, story(spans=spans))
        place_(joined, spans, server.weights)
    assert torch.equal(joined, whole.weights)
    assert whole.version > 5


def test_statistics_tell_how_stale_gradients_were() -> None:
    server = shard()
    for sequence, basis in enumerate((0, 0, 2, 1), 1):
        pushed(server, push(0, sequence, basis=basis))
    found = statistics(server, 2)
    assert found.staleness == {0: 2, 1: 1, 2: 1}
    assert (found.version, found.index) == (4, 6)
    assert server.status_of(Inquire(COORDINATOR, 1, 2)).replies != ()


def test_a_snapshot_is_noted() -> None:
    assert only(shard().apply(Save(COORDINATOR, 1, 2, 9)), Noted).sequence == 2


@pytest.mark.parametrize("outer", [{"outer_momentum": 0.5}, {"outer_optimizer": adam()}], ids=["momentum", "adam"])
def test_a_movement_beyond_the_gate_changes_nothing_but_the_counts(outer: dict[str, Any]) -> None:
    """Weights, moments and version stay to the bit. The next fresh movement steps as if it had not been."""
    made = strategies.async_diloco(scale=gate(0.1, 2), **outer).server
    assert made is not None
    gated, plain = shard(made), shard(made)
    for each in (gated, plain):
        each.apply(push(0, 1, 1.0, tickets=[0]))
        each.apply(push(0, 2, 2.0, basis=1, tickets=[1]))
    before = gated.weights.clone()
    (reply,) = gated.apply(push(1, 1, 9.0, basis=0, tickets=[2, 3]))
    assert isinstance(reply, Pushed)
    assert (reply.verdict, reply.reason, reply.staleness) == ("dropped", "stale", 2)
    assert torch.equal(gated.weights, before)
    assert (gated.version, gated.decisions.dropped, gated.decisions.tuples) == (2, 1, (((0, 1),), ((2, 3),)))
    for each in (gated, plain):
        each.apply(push(0, 3, 1.0, basis=2, tickets=[4]))
    assert not torch.equal(gated.weights, before)
    assert torch.equal(gated.weights, plain.weights)
