"""Rules for periods: literal tables, the integers that they reduce to, and ranks that agree on numbers of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite, nan

import pytest
import torch
from torch import Tensor

import polytempo as pt
from laws.harness import HOST, Rank, Setting, run
from polytempo import federated
from polytempo import strategies as s
from polytempo.aggregation import mean
from polytempo.collectives import invariant
from polytempo.compression import feedback, top_k
from polytempo.core import Bundle, Port, Strategy
from polytempo.core.state import Clock, OwnNumbers, Saved, restored, saved
from polytempo.jobs.digits import job
from polytempo.synchronization import PeriodRule, by_loss, by_rate, by_time, by_variance, every, growing
from polytempo.synchronization.every import RoundState, apply_at_once
from polytempo.synchronization.period_rules import EndedRound
from polytempo.training.step.parameter_exchange import ParameterExchange, noted
from polytempo.worlds import VirtualWorld

CONSTANT: list[PeriodRule] = [
    growing(4, 4),
    by_rate(4, longest=4),
    by_time(inf, 4, 4),
    by_loss(4, shortest=4),
    by_variance(4, slack=inf),
]


def meetings(
    rule: PeriodRule,
    num_steps: int,
    *,
    rate: Callable[[int], float] = lambda step: 0.1,
    loss: Callable[[int, int], float] = lambda step, rank: 1.0,
    flops: Callable[[int], float] = lambda rank: 0.0,
    move: Callable[[int, int], float] = lambda step, rank: 0.0,
) -> list[int]:
    """The steps, from 1, with a meeting of three ranks. All ranks have the same."""

    async def program(port: Port) -> list[int]:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        exchange = ParameterExchange(s.local_sgd(rule), optimizer, {"w": weight})
        found = []
        for step in range(1, num_steps + 1):
            optimizer.param_groups[0]["lr"] = rate(step)
            exchange.note(torch.tensor(loss(step, port.rank)))
            await port.compute(lambda: None, flops(port.rank))
            with torch.no_grad():
                weight += move(step, port.rank)
            if await exchange.exchange(port, None) is not None:
                found.append(step)
        return found

    first, *others = VirtualWorld(HOST, 3).run(program).results
    assert all(found == first for found in others)
    return first


def following(rule: PeriodRule, seen: list[float]) -> list[int]:
    """The steps of each round by the numbers that the rule sees."""
    assert rule.following is not None
    period, reference, found = rule.first, 0.0, []
    number = 0
    for each in seen:
        number += isfinite(each)
        period, reference = rule.following(EndedRound(number, period, each, reference))
        found.append(period)
    return found


# ---------------------------------------------------------------------- tables


def test_rounds_double() -> None:
    assert meetings(growing(1, 4, 2), 20) == [1, 2, 4, 6, 10, 14, 18]
    assert meetings(growing(3, 6, 1), 20) == [3, 9, 15]


def test_rounds_grow_by_the_square_as_the_rate_falls() -> None:
    assert following(by_rate(2, 0.5, longest=50), [0.5, 0.25, 0.125, 0.0625, 0.0]) == [2, 4, 16, 50, 50]


def test_a_round_has_the_length_of_its_first_rate() -> None:
    rates = {1: 0.5, 2: 0.25, 3: 0.5, 4: 0.5}
    assert meetings(by_rate(1, 0.5), 12, rate=lambda step: rates.get(step, 0.25)) == [1, 5, 9]


def test_rounds_take_about_so_many_seconds() -> None:
    """Ranks need 0.5, 1 and 1.5 s a step; after a meeting they have waited for the last one, too.

    round      1    2    3    4      5
    steps      2    6    5    4      4
    mean, s    2    7    8    6.5    6        2 · 6/2 = 6; 6 · 6/7 = 5.1; 5 · 6/8 = 3.8; 4 · 6/6.5 = 3.7; 4
    """
    found = meetings(by_time(6.0, first=2), 25, flops=lambda rank: HOST.flops_per_s * (rank + 1) / 2)
    assert found == [2, 8, 13, 17, 21, 25]


def test_rounds_are_short_where_the_loss_is_small() -> None:
    assert following(by_loss(8, shortest=2), [4.0, 4.0, 1.0, 0.25, 0.0, 9.0]) == [8, 8, 4, 2, 2, 8]


def test_ranks_agree_on_the_mean_of_their_losses() -> None:
    """The mean is 4 in the first round, then 1: periods of 4, then 2."""
    losses = {0: 1.0, 1: 4.0, 2: 7.0}
    found = meetings(by_loss(4), 13, loss=lambda step, rank: losses[rank] / (1 if step <= 4 else 4))
    assert found == [4, 8, 10, 12]


def test_a_round_s_loss_is_the_mean_over_its_steps() -> None:
    found = meetings(by_loss(4), 10, loss=lambda step, rank: {4: 13.0, 8: 1.0}.get(step, 1.0))
    assert found == [4, 8, 10]  # 4 in the first round, 1 in the second


def test_rounds_grow_while_models_stay_near() -> None:
    rule = by_variance(8, longest=10, samples=2, slack=0.5)
    assert following(rule, [3.0, 1.0, 0.9, 0.9, 0.9, 2.0, 3.1, 9.0]) == [8, 8, 9, 10, 10, 10, 9, 8]


def test_models_that_differ_more_meet_more_often() -> None:
    """Rank r moves by r - 1 a step: ‖θᵢ - θ‖² is 2 H² (r - 1)²; from step 5 on twice that."""
    far = meetings(by_variance(4, samples=1), 16, move=lambda step, rank: (rank - 1) * (1 if step <= 4 else 2))
    near = meetings(by_variance(4, samples=1), 16, move=lambda step, rank: (rank - 1) * (1 if step <= 4 else 0.5))
    assert far == [4, 8, 11, 13, 15]
    assert near == [4, 8, 13]


def test_numbers_that_are_not_finite_teach_nothing() -> None:
    """The first finite mean is F₀; squares and quotients of extreme numbers have bounds."""
    assert following(by_loss(8), [nan, inf, 4.0, 1.0, inf, 1.0, nan, 1e308]) == [8, 8, 8, 4, 8, 4, 8, 8]
    assert following(by_loss(8), [1e-320, 1e308, 0.0]) == [8, 8, 1]
    assert following(by_rate(2, 0.1, longest=50), [1e-160, inf, nan, 5e-324, -1.0]) == [50, 2, 2, 50, 50]
    assert following(by_time(1.0, 4, longest=50), [5e-324, 0.0, 1e308]) == [50, 50, 1]
    assert following(by_variance(8, samples=1), [nan, 1.0, nan, 0.1, inf, 0.1]) == [8, 8, 8, 9, 9, 10]


def test_a_round_without_a_rate_leaves_the_variance_s_period() -> None:
    """Rank r moves by r - 1 a step; rates of 0 are in the first round, and later."""
    found = meetings(
        by_variance(4, samples=1),
        22,
        rate=lambda step: 0.0 if step in {4, 12} else 0.1,
        move=lambda step, rank: (rank - 1) * (1 if step <= 8 else 0.25),
    )
    assert found == [4, 8, 12, 16, 21]


@pytest.mark.parametrize("rule", [by_variance(2), by_rate(2)], ids=str)
def test_a_rule_without_its_rate_is_refused(rule: PeriodRule) -> None:
    async def program(port: Port) -> None:
        transform = every(rule, mean())
        bundle = Bundle({"w": torch.ones(2)})
        state = transform.init(bundle)
        for _ in range(2):
            _, state = await transform.apply(port, bundle.copy(), state)

    with pytest.raises(ValueError, match="needs a learning rate"):
        VirtualWorld(HOST, 2).run(program)


def test_the_time_before_a_process_s_first_step_is_not_counted() -> None:
    """Steps take 1 s; the process begins with 100 s, and another one takes over after step 5."""

    async def program(port: Port) -> list[int]:
        transform = every(by_time(3.0, 2), mean())
        bundle = Bundle({"w": torch.ones(2)})
        state, found = transform.init(bundle), []
        for step in range(1, 12):
            await port.compute(lambda: None, HOST.flops_per_s * (100 if step in {1, 6} else 1))
            if step == 6:
                state = restored(transform.init(bundle), saved(state, "p"), "p", bundle)
            _, state = await transform.apply(port, bundle.copy(), state)
            found += [step] if state.step == 0 else []
        return found

    assert VirtualWorld(HOST, 1).run(program).results == [[2, 5, 8, 11]]


# ---------------------------------------------------------------------- reduce to


@pytest.mark.parametrize("rule", CONSTANT, ids=str)
def test_a_constant_rule_has_the_bits_of_the_number(rule: PeriodRule) -> None:
    if rule.sees == "loss":  # of a job: the catalogue's loop hands over no losses
        found, number = (pt.simulate(job, s.local_sgd(each), 3, steps=11, batch_size=8).loss for each in (rule, 4))
        assert found == number
        return
    pairs: list[tuple[Strategy, Strategy]] = [
        (s.local_sgd(rule), s.local_sgd(4)),
        (s.diloco(rule), s.diloco(4)),
        (s.local_sgd(rule, codec=feedback(top_k(0.1))), s.local_sgd(4, codec=feedback(top_k(0.1)))),
        (s.parameter_averaging(rule), s.parameter_averaging(4)),
        (s.post_local_sgd(3, rule), s.post_local_sgd(3, 4)),
        (s.slowmo(rule, inner=s.gossip()), s.slowmo(4, inner=s.gossip())),
        (s.islands(outer=s.local_sgd(rule)), s.islands(outer=s.local_sgd(4))),
    ]
    for one, other in pairs:
        for a, b in zip(run(one, 4, 13, Setting("adam"))[0], run(other, 4, 13, Setting("adam"))[0], strict=True):
            assert torch.equal(a.history[-1], b.history[-1]), one


def test_a_job_s_losses_reach_the_rule() -> None:
    """Digits: the loss falls, so ranks meet more often than in 16 steps; computed together or not."""
    together, separate, constant = (
        pt.simulate(job, strategy, 3, steps=64, batch_size=8, lr=0.05, batched=batched)
        for strategy, batched in (
            (s.local_sgd(by_loss(16)), True),
            (s.local_sgd(by_loss(16)), False),
            (s.local_sgd(16), False),
        )
    )
    assert separate.bytes_sent_per_rank > 1.2 * constant.bytes_sent_per_rank
    assert together.bytes_sent_per_rank == separate.bytes_sent_per_rank


# ---------------------------------------------------------------------- state, cost, refusals


@pytest.mark.parametrize("rule", [by_loss(4), by_time(3.0, 4), by_variance(4, samples=1), by_rate(3, 0.3)], ids=str)
def test_a_rule_s_state_is_saved(rule: PeriodRule) -> None:
    transform = every(rule, mean())
    bundle = Bundle({"w": torch.ones(3)})
    begun = transform.init(bundle)
    own = OwnNumbers(1.5, 2, Clock(9.0)) if rule.asks else ()
    state = RoundState(3, begun.inner, 7, 2, 0.25, own)
    tensors, scalars = saved(state, "p")
    found = restored(begun, Saved(tensors, scalars), "p", bundle)
    assert found == (state._replace(own=OwnNumbers(1.5, 2)) if rule.asks else state)


def test_a_round_that_ends_early_changes_no_period() -> None:
    """A rank is lost in an elastic run: its numbers belong to a part of a round."""

    async def program(port: Port) -> RoundState:
        transform = every(by_time(1.0, 5), mean())
        bundle = Bundle({"w": torch.full((2,), float(port.rank))})
        _, state = await transform.apply(port, bundle.copy(), transform.init(bundle))
        answer, state = await apply_at_once(transform, port, bundle.copy(), state, 1)
        assert answer is not None
        assert answer.flat.tolist() == [1.0, 1.0]
        assert isinstance(state, RoundState)
        return state

    for state in VirtualWorld(HOST, 3).run(program).results:
        assert (state.step, state.period, state.number) == (0, 5, 0)


def test_growing_rounds_are_priced_to_the_byte_and_others_say_what_is_not_known() -> None:
    grown = pt.explain(s.local_sgd(growing(2, 8, 3)), 4, 1000)
    assert [str(each.exchange.steps) for each in grown.exchanges] == [
        "every 2 steps, up to step 6",
        "every 4 steps, from step 10 on, up to step 18",
        "every 8 steps, from step 26 on",
    ]
    assert [grown.at(step).bytes > 0 for step in range(1, 11)] == [step in {2, 4, 6, 10} for step in range(1, 11)]
    loss = pt.explain(s.local_sgd(by_loss(16)), 4, 1000)
    model, number = (each.exchange for each in loss.exchanges)
    assert str(model.steps) == "every 16 steps at first, and then as by_loss(first=16, shortest=1) decides"
    assert (number.sums[0].numel, number.tensors) == (1, "the rule's number")


@pytest.mark.parametrize("rule", [*map(str, CONSTANT), "by_loss", "growing(first=2)"])
def test_rules_have_names(rule: str) -> None:
    made = pt.parse_strategy(f"local_sgd(period={rule})")
    assert str(pt.parse_strategy(str(made))) == str(made)


def lossless() -> None:
    """A loop that hands over no losses."""
    run(s.local_sgd(by_loss(4)), 2, 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: growing(3, 8), "a multiple of the first"),
        (lambda: by_rate(scale=0.0), "over 0"),
        (lambda: by_time(0.0), "over 0"),
        (lambda: by_loss(4, shortest=5), "the fewest and the most"),
        (lambda: by_variance(samples=0), "samples >= 1"),
        (lambda: every(by_loss(), every(2, mean())), "no period inside"),
        (lambda: s.gossip(period=by_loss()), "a whole number"),  # type: ignore[arg-type]  # refused where it is called
        (lambda: pt.parse_strategy("local_sgd(period=by_luck)"), "there is no period 'by_luck'"),
        (lossless, "handle.scaled(loss).backward()"),
        (lambda: s.split("up: row", inner=s.local_sgd(by_loss())), "PT1707"),
        (lambda: s.split("up: row", inner=s.post_local_sgd(3, by_time())), "PT1707"),
        (lambda: s.gpipe(inner=s.diloco(by_variance())), "PT1716"),
        (lambda: s.pipedream(inner=s.islands(outer=s.local_sgd(by_time()))), "PT1716"),
        (lambda: s.hybrid("up", inner=s.local_sgd(by_loss())), "PT1707"),
        (lambda: federated.dp_sgd(inner=s.local_sgd(by_loss())), "PT2521"),
    ],
)
def test_impossible_rules_are_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        make()


def test_stages_and_parts_may_meet_by_rules_that_all_ranks_know() -> None:
    for rule in (growing(), by_rate()):
        s.gpipe(inner=s.local_sgd(rule))
        s.split("up: row", inner=s.local_sgd(rule))


def test_slices_have_a_mean_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with two slices each note means of the same size as four ranks with one, and not sums."""
    noted: list[float] = []
    note = ParameterExchange.note

    def recorded(exchange: ParameterExchange, loss: Tensor) -> None:
        noted.append(float(loss))
        note(exchange, loss)

    monkeypatch.setattr(ParameterExchange, "note", recorded)
    strategy = replace(s.sync_sgd(route=invariant(4)), parameters=every(by_loss(4), mean()))
    for workers in (2, 4):
        pt.simulate(job, strategy, workers, steps=1, batch_size=16 // workers)
    assert len(noted) == 2 + 4
    assert sum(noted[:2]) / 2 == pytest.approx(sum(noted[2:]) / 4)


def test_an_own_loop_hands_over_its_loss() -> None:
    ranks = [Rank(s.local_sgd(by_loss(4)), rank, 2, Setting(), uneven=False) for rank in range(2)]

    async def program(port: Port) -> Tensor:
        rank = ranks[port.rank]
        for step in range(8):
            rank.optimizer.zero_grad()
            loss: Tensor = rank.model(torch.ones(2, 5, dtype=torch.float64)).square().mean()
            noted(rank.replica.parameters, loss if step < 4 else loss / 100).backward()
            rank.optimizer.step()
            await rank.replica.finish_step(port)
        assert rank.replica.parameters is not None
        (state,) = rank.replica.parameters.states
        return torch.tensor(state.period)

    assert [int(each) for each in VirtualWorld(HOST, 2).run(program).results] == [1, 1]
