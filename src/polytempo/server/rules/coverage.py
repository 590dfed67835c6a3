"""A step waits until every worker's share of it is done, by the worker or by helpers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Add, Answer, Arrival, Rule, RuleState, Situation, Update
from polytempo.server.rules.asynchronous import within
from polytempo.server.rules.synchronous_step import WaitingPushes, in_samples, stepwise

IsPart = Callable[[Arrival], bool]


def covered(slices: int, bound: int = 0) -> Rule:
    """θ ← θ - α Σ mᵢ gᵢ / Σ mᵢ once every member has closed its share; mᵢ = the samples behind gᵢ.

    For workers that hand parts of their share to others: the mean is over all samples, however these were split. The
    shards know a batch by `slices` + 1 numbers (`flexrr.slices`):

    - a push without the last number of any batch is a *part*. The shard adds it to the sum and answers immediately, so
      it outlives its worker. It closes no share, neither its sender's nor another worker's.
    - one with the last number, or without numbers, *closes* its worker's share. It waits as in `hardsync`. Its worker
      sends it when all other parts of the share have been answered.

    With `bound` > 0 every share is an update of its own, when it is closed: its parts are set aside until then. A pull
    waits until all have closed all but the last `bound` steps before it: `within`. Then a gradient is the sum over its
    samples divided by the samples of the whole share. Memory: one more vector for each share that others help with.

    A step does not wait for a worker that has left. A share that it has not closed comes again under the same numbers:
    the shards drop the parts that they have.

    Source: A. Harlap et al., "Addressing the straggler problem for iterative convergent parallel ML" (FlexRR), 2016,
    section 3: a helper's work counts as the helped worker's. There each update is the sum over a share's items.
    """
    if slices < 1 or bound < 0:
        raise ValueError(f"covered needs slices >= 1 and bound >= 0, got slices={slices} and bound={bound}")

    def is_part(arrival: Arrival) -> bool:
        return bool(arrival.tickets) and all(number % (slices + 1) != slices for number in arrival.tickets)

    rule = _bounded(bound, is_part, slices) if bound else _step_by_step(is_part)
    return rule._replace(name=call_name(covered, locals()))


def _bounded(bound: int, is_part: IsPart, slices: int) -> Rule:
    rule = within(bound)

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        worker, batch = arrival.worker, arrival.tickets[0] // (slices + 1) if arrival.tickets else None
        if batch is not None and is_part(arrival):
            return state, [*([Add(worker, part_of=batch)] if arrival.kind == "push" else []), Answer(worker)]
        state, actions = rule.receive(state, arrival, situation)
        return state, [a._replace(including=batch) if isinstance(a, Update) else a for a in actions]

    return rule._replace(receive=receive)


def _step_by_step(is_part: IsPart) -> Rule:
    """State: the state of `stepwise`, and the samples of the parts in the sum."""
    steps = stepwise("", lambda waiting, workers: len(waiting) == workers, _of_one_clock, in_samples)

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        worker, inner, samples = arrival.worker, state["steps"], state["samples"]
        if arrival.kind == "had" and is_part(arrival):
            return state, []
        if arrival.kind == "push" and is_part(arrival) and worker not in inner["waiting"]:
            state = {"steps": inner, "samples": samples + arrival.samples}
            return state, [Add(worker, float(arrival.samples)), Answer(worker)]
        inner, actions = steps.receive(inner, arrival, situation)
        answer = list[Action]()
        for action in actions:
            if isinstance(action, Update):
                action, samples = Update(action.divisor + samples), 0
                if not action.divisor:
                    continue  # all gradients of the step were applied before
            answer.append(action)
        return {"steps": inner, "samples": samples}, answer

    return Rule("", lambda: {"steps": steps.init(), "samples": 0}, receive)


def _of_one_clock(waiting: WaitingPushes) -> WaitingPushes:
    """The worker's oldest pushes, up to the first one with another clock."""
    return tuple(takewhile(lambda push: push[0] == waiting[0][0], waiting))
