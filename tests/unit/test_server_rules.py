"""Rules of the parameter server as tables: arrivals, and the rule's actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from polytempo.core.rule import (
    Action,
    Add,
    Answer,
    Arrival,
    Drop,
    DropRegion,
    MergeRegion,
    Mix,
    Rule,
    Situation,
    Staleness,
    Update,
)
from polytempo.server.rules.asynchronous import in_shares, on_arrival, softsync, within
from polytempo.server.rules.corrections import clip, compensate
from polytempo.server.rules.coverage import covered
from polytempo.server.rules.elastic import elastic
from polytempo.server.rules.regional import regional
from polytempo.server.rules.staleness import constant, cutoff, exponential, gate, inverse, power
from polytempo.server.rules.synchronous_step import first, hardsync, quorum

Line = tuple[Arrival, list[Action]]


def push(worker: int, clock: int = 1, basis: int = 0, samples: int = 1) -> Arrival:
    return Arrival("push", worker, clock, basis, samples)


def pull(worker: int, clock: int = 0) -> Arrival:
    return Arrival("pull", worker, clock)


def joined(worker: int) -> Arrival:
    return Arrival("joined", worker)


def left(worker: int) -> Arrival:
    return Arrival("left", worker)


def holds(rule: Rule, members: int, table: list[Line]) -> None:
    """The rule acts as the table says; workers 0 … members-1 joined before."""
    state, version, present = rule.init(), 0, set(range(members))
    for worker in range(members):
        state, actions = rule.receive(state, joined(worker), Situation(0, tuple(range(worker + 1))))
        assert actions == []
    for number, (arrival, expected) in enumerate(table):
        if arrival.kind == "joined":
            present.add(arrival.worker)
        if arrival.kind == "left":
            present.discard(arrival.worker)
        state, actions = rule.receive(state, arrival, Situation(version, tuple(sorted(present))))
        assert actions == expected, f"line {number}: {arrival}"
        version += sum(isinstance(action, Update) for action in actions)


def mean_of(*workers: int) -> list[Action]:
    return [*(Add(worker) for worker in workers), Update(float(len(workers)))]


def answers(*workers: int) -> list[Action]:
    return [Answer(worker) for worker in workers]


def test_on_arrival_every_gradient_is_an_update() -> None:
    holds(
        on_arrival(scale=inverse),
        2,
        [
            (pull(0), answers(0)),
            (pull(1), answers(1)),
            (push(1, basis=0), [Add(1, 1.0), Update(), Answer(1)]),
            (push(1, 2, basis=1), [Add(1, 1.0), Update(), Answer(1)]),
            (push(0, basis=0), [Add(0, rate=0.5), Update(), Answer(0)]),
            (left(0), []),
            (left(1), []),
            (joined(0), []),
            (push(0, basis=0), [Add(0, rate=1 / 3), Update(), Answer(0)]),
        ],
    )


def test_what_counts_nothing_is_dropped_and_makes_no_update() -> None:
    holds(
        on_arrival(scale=cutoff(1)),
        1,
        [
            (push(0, basis=0), [Add(0), Update(), Answer(0)]),
            (push(0, basis=0), [Add(0), Update(), Answer(0)]),
            (push(0, basis=0), [Drop(0, "stale"), Answer(0)]),
        ],
    )


def test_a_quorum_makes_its_share_of_a_step_and_waits_for_no_other() -> None:
    def share(*workers: int) -> list[Action]:
        return [*(Add(worker, rate=len(workers) / 3) for worker in workers), Update(float(len(workers)))]

    holds(
        quorum(2),
        3,
        [
            (push(2), []),
            (pull(2, 1), []),
            (push(0), [*share(0, 2), *answers(0, 2)]),
            (push(0, 2, 1), []),
            (push(0, 3, 1), []),  # of a worker that is ahead: it waits for a step of its own
            (push(1), [*share(0, 1), *answers(0, 1)]),  # late by a step, and not dropped
            (left(2), []),
            (push(1, 2, 2, samples=3), [Add(0, 1 / 3), Add(1, 1.0), Update(4 / 3), *answers(0, 1)]),
            (push(1, 3, 3), []),
            (left(0), [Add(1), Update(), Answer(1)]),  # the last one is a quorum
        ],
    )


def test_a_quorum_with_a_window_waits_for_others_until_it_is_over() -> None:
    def share(*workers: int) -> list[Action]:
        return [*(Add(worker, rate=len(workers) / 3) for worker in workers), Update(float(len(workers)))]

    over = Arrival("elapsed", -1)
    holds(
        quorum(2, grace_s=5.0),
        3,
        [
            (over, []),
            (push(2), []),
            (over, []),  # no quorum yet
            (push(0), []),
            (over, [*share(0, 2), *answers(0, 2)]),
            (push(0, 2, 1), []),
            (push(1), []),
            (push(2, 2, 1), [*share(0, 1, 2), *answers(0, 1, 2)]),  # all are there
            (push(0, 3, 2), []),
            (push(1, 3, 2), []),
            (left(1), []),
            (over, []),  # a quorum no more
            (left(2), [Add(0), Update(), Answer(0)]),
        ],
    )


def test_a_window_is_open_while_a_quorum_waits_for_others() -> None:
    rule = quorum(2, grace_s=5.0)
    assert rule.window_s is not None
    state, found = rule.init(), list[float | None]()
    for arrival in (*map(joined, range(3)), push(2), push(0), left(0), push(1), Arrival("elapsed", -1)):
        situation = Situation(0, (1, 2) if found.count(5.0) else (0, 1, 2))
        state, _ = rule.receive(state, arrival, situation)
        found.append(rule.window_s(state, situation))
    assert found == [None, None, None, None, 5.0, None, None, None]
    assert quorum(2).window_s is None
    with pytest.raises(ValueError, match="grace_s is a finite number of seconds, 0 or more, got inf"):
        quorum(2, float("inf"))


def test_a_quorum_of_one_is_in_shares_and_of_all_is_hardsync() -> None:
    pushes = [push(worker, clock, basis=3 * clock - 3) for clock in (1, 2) for worker in (2, 0, 1)]
    for made, plain in ((quorum(1), in_shares()), (quorum(3), hardsync())):
        table = list[Line]()
        state, version = plain.init(), 0
        for worker in range(3):
            state, _ = plain.receive(state, joined(worker), Situation(0, tuple(range(worker + 1))))
        for arrival in pushes:
            state, actions = plain.receive(state, arrival, Situation(version, (0, 1, 2)))
            version += sum(isinstance(action, Update) for action in actions)
            table.append((arrival, actions))
        holds(made, 3, table)


def test_hardsync_adds_in_the_order_of_workers() -> None:
    holds(
        hardsync(),
        3,
        [
            (pull(2), answers(2)),
            (push(2), []),
            (pull(2, 1), []),
            (push(0), []),
            (push(1), [*mean_of(0, 1, 2), *answers(0, 1, 2)]),
            (pull(0, 1), answers(0)),
        ],
    )


def test_hardsync_keeps_a_second_push_for_the_next_step() -> None:
    holds(
        hardsync(),
        2,
        [
            (push(0, 1), []),
            (push(0, 2), []),
            (push(1, 1), [*mean_of(0, 1), *answers(0, 1)]),
            (pull(0, 2), []),
            (push(1, 2, basis=1), [*mean_of(0, 1), *answers(0, 1)]),
        ],
    )


def test_hardsync_when_workers_come_and_go() -> None:
    holds(
        hardsync(),
        3,
        [
            (push(0), []),
            (joined(3), []),  # amid a step: it counts from the next one
            (pull(3), []),
            (push(1), []),
            (left(2), [*mean_of(0, 1), *answers(0, 1, 3)]),  # the last one missing is gone
            (joined(2), []),  # between two steps: it counts immediately
            (pull(2), answers(2)),
            (push(0, 2, 1), []),
            (push(1, 2, 1), []),
            (push(3, 1, 1), []),
            (push(2, 1, 1), [*mean_of(0, 1, 2, 3), *answers(0, 1, 2, 3)]),
        ],
    )


def test_whoever_pushes_what_is_there_already_has_done_its_part_of_the_step() -> None:
    """One shard of two has a lost worker's batch and the other lacks it: it comes again."""
    had = Arrival("had", 0, 2)
    for rule in (hardsync(), first(2)):
        holds(rule, 2, [(push(1), []), (had, [*mean_of(1), *answers(0, 1)]), (pull(0), answers(0))])
        holds(rule, 2, [(had, []), (pull(0), []), (push(1), [*mean_of(1), *answers(0, 1)])])
        holds(rule, 1, [(had, answers(0))])  # nothing to add, so no update


def test_hardsync_when_all_who_had_pushed_leave() -> None:
    holds(
        hardsync(),
        2,
        [
            (push(0), []),
            (joined(2), []),
            (pull(2), []),
            (left(0), answers(2)),  # no step is under way any more, so 2 belongs to this one
            (push(1), []),
            (push(2), [*mean_of(1, 2), *answers(1, 2)]),
            (push(1, 2, 1), []),
            (left(1), []),
            (left(2), []),
            (joined(0), []),
            (joined(0), []),
            (push(0, 1, 1), [*mean_of(0), *answers(0)]),
        ],
    )


def test_hardsync_when_everybody_left_is_ahead() -> None:
    """Leaving may complete more than one step."""
    holds(
        hardsync(),
        2,
        [
            (push(0, 1), []),
            (push(0, 2), []),
            (left(1), [*mean_of(0), *answers(0), *mean_of(0), *answers(0)]),
        ],
    )


def test_softsync_updates_with_every_c_gradients_whoever_they_are_from() -> None:
    holds(
        softsync(2, scale=inverse),
        5,  # c = 5 // 2
        [
            (push(0), [Add(0, 1.0), Answer(0)]),
            (pull(0, 1), answers(0)),
            (push(0, 2), [Add(0, 1.0), Update(2.0), Answer(0)]),
            (push(1), [Add(1, 1.0), Answer(1)]),
            (push(2), [Add(2, 1.0), Update(2.0), Answer(2)]),
            (push(3), [Add(3, rate=0.5), Answer(3)]),
            (push(4, basis=2), [Add(4, 1.0), Update(2.0), Answer(4)]),
        ],
    )


def test_softsync_loses_nothing_when_c_shrinks() -> None:
    holds(
        softsync(1),
        3,
        [
            (push(0), [Add(0), Answer(0)]),
            (push(1), [Add(1), Answer(1)]),
            (left(2), [Update(2.0)]),
            (push(0, 2, 1), [Add(0), Answer(0)]),
            (left(0), [Update(1.0)]),
            (left(1), []),
            (joined(1), []),
            (push(1, 2, 2), [Add(1), Update(1.0), Answer(1)]),
        ],
    )


def test_softsync_with_a_fixed_number_of_workers() -> None:
    holds(
        softsync(1, workers=2),
        1,
        [
            (push(0), [Add(0), Answer(0)]),
            (push(0), [Add(0), Update(2.0), Answer(0)]),
            (push(0), [Add(0), Answer(0)]),
            (left(0), [Update(1.0)]),  # no worker is there to complete it
        ],
    )


def test_first_drops_who_comes_late_and_takes_it_back_at_once() -> None:
    holds(
        first(2),
        3,
        [
            (push(2, 7), []),
            (push(0, 7), [*mean_of(0, 2), *answers(0, 2)]),
            (push(1, 7, basis=0), [Drop(1, "late"), Answer(1)]),
            (pull(1, 7), answers(1)),
            (push(1, 8, basis=1), []),
            (push(2, 8, basis=1), [*mean_of(1, 2), *answers(1, 2)]),
        ],
    )


def test_first_with_fewer_members_waits_for_all() -> None:
    holds(
        first(3),
        3,
        [
            (push(0), []),
            (left(1), []),
            (push(2), [*mean_of(0, 2), *answers(0, 2)]),
            (left(2), []),
            (push(0, 2, 1), [*mean_of(0), *answers(0)]),
        ],
    )


def test_within_answers_a_pull_once_the_slowest_is_near_enough() -> None:
    one = [Update(), Answer(0)]
    holds(
        within(1),
        2,
        [
            (pull(0, 0), answers(0)),
            (pull(1, 0), answers(1)),
            (push(0, 1), [Add(0), *one]),
            (pull(0, 1), answers(0)),  # one ahead
            (push(0, 2, 1), [Add(0), *one]),
            (pull(0, 2), []),  # two ahead
            (push(1, 1), [Add(1), Update(), Answer(1), Answer(0)]),
            (push(0, 3, 3), [Add(0), *one]),
            (pull(0, 3), []),
            (left(1), answers(0)),
        ],
    )


def test_within_no_answer_overtakes_a_pull_that_waits() -> None:
    holds(
        within(0),
        2,
        [
            (push(0, 1), [Add(0), Update(), Answer(0)]),
            (pull(0, 1), []),
            (
                push(0, 2),
                [Add(0), Update()],
            ),  # computed on older weights meanwhile; its answer stands behind the pull's
            (push(1, 1), [Add(1), Update(), Answer(1), Answer(0)]),
        ],
    )


@pytest.mark.parametrize("begins", [0, 5, 1_000])
def test_within_who_joins_stands_where_the_slowest_stands_whatever_it_counts(begins: int) -> None:
    holds(
        within(1),
        1,
        [
            *((push(0, clock, clock - 1), [Add(0), Update(), Answer(0)]) for clock in range(1, 6)),
            (joined(1), []),
            (pull(1, begins), answers(1)),
            (push(0, 6, 5), [Add(0), Update(), Answer(0)]),
            (pull(0, 6), answers(0)),
            (push(0, 7, 6), [Add(0), Update(), Answer(0)]),
            (pull(0, 7), []),  # worker 1 stands at 5
            (push(1, begins + 1, 5), [Add(1), Update(), Answer(1), Answer(0)]),
            (left(1), []),
            (joined(1), []),  # comes back
            (pull(1, begins), answers(1)),
        ],
    )


def test_elastic_mixes() -> None:
    holds(
        elastic(0.25),
        2,
        [
            (pull(1), answers(1)),
            (push(0), [Mix(0, 0.25), Answer(0)]),
            (left(0), []),
            (joined(0), []),
        ],
    )


CLOSING = 4
"""Batches in four slices: the numbers of batch b are 5 b … 5 b + 4."""


def part(worker: int, *tickets: int, samples: int, clock: int = 1) -> Arrival:
    return Arrival("push", worker, clock, 0, samples, tickets)


def test_covered_counts_samples_whoever_computed_them() -> None:
    """Worker 1 is slow and does 2 of its 8 samples; worker 0 does two slices of it, then closes its own batch."""
    holds(
        covered(4),
        2,
        [
            (part(0, 5 + 3, samples=2), [Add(0, 2.0), Answer(0)]),
            (part(0, 5 + 2, samples=4), [Add(0, 4.0), Answer(0)]),
            (part(0, 0, 1, 2, 3, CLOSING, samples=8), []),
            (pull(0, 1), []),
            (part(1, 5, 5 + CLOSING, samples=2), [Add(0, 8.0), Add(1, 2.0), Update(16.0), Answer(0), Answer(1)]),
            (pull(1, 1), answers(1)),
            (push(1, 2, 1, samples=16), []),
            (push(0, 2, 1, samples=8), [Add(0, 8.0), Add(1, 16.0), Update(24.0), Answer(0), Answer(1)]),
        ],
    )


def test_covered_parts_outlive_their_worker_and_count_in_the_step_under_way() -> None:
    holds(
        covered(4),
        3,
        [
            (part(2, 0, samples=3), [Add(2, 3.0), Answer(2)]),
            (part(0, 1, 2, 3, CLOSING, samples=1), []),
            (left(2), []),
            (part(1, 5, 6, 7, 8, 5 + CLOSING, samples=4), [Add(0), Add(1, 4.0), Update(8.0), Answer(0), Answer(1)]),
        ],
    )


def test_covered_makes_no_update_of_what_was_there_before() -> None:
    """Both do batches of lost workers over again, and the shards had every slice."""
    had = Arrival("had", 0, 1, 0, 8, (0,))
    zero = [Add(0, 0.0), Add(1, 0.0), Answer(0), Answer(1)]
    holds(covered(4), 2, [(had, []), (part(0, CLOSING, samples=0), []), (part(1, 5 + CLOSING, samples=0), zero)])


def test_covered_with_a_bound_is_within_for_what_closes_and_makes_one_update_of_a_batch() -> None:
    holds(
        covered(4, bound=1),
        2,
        [
            (pull(0), answers(0)),
            (part(0, 5 + 3, samples=2), [Add(0, part_of=1), Answer(0)]),
            (part(0, 0, CLOSING, samples=2), [Add(0), Update(including=0), Answer(0)]),
            (pull(0, 1), answers(0)),
            (part(0, 10, 10 + CLOSING, samples=2, clock=2), [Add(0), Update(including=2), Answer(0)]),
            (pull(0, 2), []),
            (part(1, 5 + 2, samples=2), [Add(1, part_of=1), Answer(1)]),
            (part(1, 5, 5 + CLOSING, samples=2), [Add(1), Update(including=1), Answer(1), Answer(0)]),
        ],
    )


@pytest.mark.parametrize(
    ("scale", "name", "factors"),
    [
        (constant, "constant", (1, 1, 1, 1)),
        (inverse, "inverse", (1, 1, 1 / 2, 1 / 4)),
        (power(0.5), "power(p=0.5)", (1, 1, 2**-0.5, 1 / 2)),
        (power(1), "power(p=1.0)", (1, 1, 1 / 2, 1 / 4)),
        (power(2), "power(p=2.0)", (1, 1, 1 / 4, 1 / 16)),
        (exponential(0.5), "exponential(rate=0.5)", (1, math.exp(-0.5), math.exp(-1), math.exp(-2))),
        (cutoff(2), "cutoff(limit=2)", (1, 1, 1, 0)),
        (gate(0, 4), "gate(decay=0.0, limit=4)", (1, (1 + 2**-0.5) / 2, 1 / 2, 0)),
        (gate(0.5, 3), "gate(decay=0.5, limit=3)", (1, 0.75 * math.exp(-0.5), 0.25 * math.exp(-1), 0)),
        (gate(2, 1), "gate(decay=2.0, limit=1)", (1, 0, 0, 0)),
    ],
)
def test_functions_of_staleness(scale: Staleness, name: str, factors: tuple[float, ...]) -> None:
    assert [scale(tau) for tau in (0, 1, 2, 4)] == pytest.approx(factors)
    assert on_arrival(scale).name == f"on_arrival(scale={name})"


@pytest.mark.parametrize(
    ("p", "factors"), [(1, (1, 1, 1 / 2, 1 / 5)), (2, (1, 1, 1 / 4, 1 / 25)), (3, (1, 1, 1 / 8, 1 / 125))]
)
def test_whole_powers_are_exact(p: int, factors: tuple[float, ...]) -> None:
    assert tuple(power(p)(tau) for tau in (0, 1, 2, 5)) == factors


def test_the_first_power_is_the_inverse_to_the_bit() -> None:
    """τ ** -1.0 is not 1/τ for 27 of these."""
    assert all(power(1)(tau) == inverse(tau) for tau in range(20_000))


def test_a_factor_that_no_float_holds_drops_the_gradient() -> None:
    assert power(300)(5) > 0
    assert power(500)(5) == 0
    _, actions = on_arrival(power(500)).receive({}, push(1), Situation(9, (0, 1)))
    assert actions == [Drop(1, "stale"), Answer(1)]


def test_a_gate_is_exactly_0_from_its_limit_on_and_falls_until_then() -> None:
    factors = [gate(0.1, 8)(tau) for tau in range(20)]
    assert factors[0] == 1
    assert all(a > b > 0 for a, b in pairwise(factors[:8]))
    assert set(factors[8:]) == {0}
    _, actions = on_arrival(gate(0.1, 8)).receive({}, push(1), Situation(8, (0, 1)))
    assert actions == [Drop(1, "stale"), Answer(1)]


def test_clip_shortens_what_is_longer() -> None:
    apply, weights = clip(5.0).apply, torch.zeros(2)
    assert apply(torch.tensor([3.0, 4.0]), weights, None).tolist() == [3.0, 4.0]
    assert apply(torch.tensor([6.0, 8.0]), weights, None).tolist() == [3.0, 4.0]
    assert apply(torch.tensor([0.0, 0.0]), weights, None).tolist() == [0.0, 0.0]


def test_compensate_adds_the_square_of_the_gradient_times_the_way_of_the_weights() -> None:
    """g + λ g g (θ - θ at the basis), element by element."""
    modified = compensate(0.5)
    gradient, weights, basis = torch.tensor([2.0, -1.0]), torch.tensor([1.5, 3.0]), torch.tensor([1.0, 1.0])
    assert modified.needs_basis
    assert modified.apply(gradient, weights, basis).tolist() == [2.0 + 0.5 * 4.0 * 0.5, -1.0 + 0.5 * 1.0 * 2.0]
    assert gradient.tolist() == [2.0, -1.0]  # lent, so not written to


def test_compensation_adapts_to_the_size_of_gradients() -> None:
    """λ / √(v + 1e-7) element by element, v = 0.75 v + 0.25 g²."""
    modified = compensate(0.5, mean_square=0.75)
    gradient, weights, basis = torch.tensor([2.0, 0.0]), torch.tensor([1.5, 3.0]), torch.tensor([1.0, 1.0])
    squares = torch.tensor([4.0, 0.0])
    assert modified.remembers
    found = modified.apply(gradient, weights, basis, squares)
    assert squares.tolist() == [4.0, 0.0]
    assert found.tolist() == pytest.approx([2.0 + 0.5 * 4.0 * 0.5 / (4.0 + 1e-7) ** 0.5, 0.0])
    modified.apply(torch.tensor([0.0, 4.0]), weights, basis, squares)
    assert squares.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: softsync(0), "n >= 1, got 0"),
        (lambda: softsync(4, workers=3), r"softsync\(n=4\) needs at least 4 workers, got 3"),
        (lambda: first(0), "n >= 1 gradients, got 0"),
        (lambda: within(-1), "bound >= 0 steps, got -1"),
        (lambda: elastic(1.0), "0 < alpha < 1, got 1.0"),
        (lambda: covered(0), "slices >= 1 and bound >= 0, got slices=0 and bound=0"),
        *[(lambda p=p: power(p), f"finite p > 0, got {p}") for p in (-1, 0, math.inf, math.nan)],
        (lambda: exponential(-1), "rate >= 0, got -1"),
        (lambda: cutoff(-1), "limit >= 0 updates, got -1"),
        *[(lambda a=a: gate(a, 4), f"finite decay >= 0, got {a}") for a in (-1, math.inf, math.nan)],
        (lambda: gate(0.1, 0), "limit >= 1 update, got 0"),
        *[(lambda n=n: gate(0.1, n), f"limit must be a whole number, got {n}") for n in (1.5, math.nan, True)],
        (lambda: gate(True, 4), "decay must be a number, got True"),
        (lambda: clip(0), "norm > 0, got 0"),
        (lambda: compensate(-1), "strength >= 0, got -1"),
        (lambda: compensate(1, mean_square=1), "0 <= mean_square < 1, got 1"),
    ],
)
def test_wrong_arguments_are_refused_when_a_rule_is_built(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_regions_step_by_each_push_and_give_every_third_on() -> None:
    """Workers 0 and 1 are one region, worker 2 is another."""
    settled = Arrival("settled", -1)
    holds(
        regional(2, 3, 0.25),
        3,
        [
            (settled, []),
            (pull(0), answers(0)),
            (push(0), [Add(0, rate=0.5), Update(1.0, region=0), Answer(0)]),
            (push(1), [Add(1, rate=0.5), Update(1.0, region=0), Answer(1)]),
            (push(2), [Add(2, rate=1.0), Update(1.0, region=1), Answer(2)]),
            (push(0, 2), [Add(0, rate=0.5), Update(1.0, region=0), MergeRegion(0, 0.25, 0.5), Answer(0)]),
            (left(1), []),
            (settled, []),
            (push(0, 3), [Add(0, rate=1.0), Update(1.0, region=0), Answer(0)]),
            (left(2), []),
            (settled, [MergeRegion(1, 0.25, 0.5), DropRegion(1)]),
            (joined(3), []),
            (left(3), []),
            (settled, [DropRegion(1)]),
            (left(0), []),
            (joined(0), []),
            (settled, []),
            (Arrival("pull", 0, last=True), answers(0)),
            (left(0), []),
            (settled, []),  # the run is over
            (joined(2), []),
            (settled, [MergeRegion(0, 0.25, 0.5), DropRegion(0)]),  # it is not
        ],
    )
