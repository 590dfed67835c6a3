"""Asynchronous SGD: every gradient is an update, as it arrives."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Add, Answer, Arrival, Rule, RuleState, Situation, Staleness, Update
from polytempo.server.rules.staleness import constant, weighed


def on_arrival(scale: Staleness = constant) -> Rule:
    """θ ← θ - s(τ) η g with each push, τ = the updates since the version that g was computed on; pulls at once.

    That is for plain SGD; any optimizer makes a step with the learning rate s(τ) η on g.

    No worker waits for another. With λ workers of one speed the mean of τ is λ - 1.

    Source: J. Dean et al., "Large scale distributed deep networks", 2012, section 4.1 (Downpour's server). It has no
    s(τ); `inverse` makes it staleness-aware (Zhang et al., 2016).
    """

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        if arrival.kind == "push":
            return state, [*applied(arrival, situation, scale), *map(Answer, (arrival.worker, *arrival.others))]
        return state, [Answer(arrival.worker)] if arrival.kind == "pull" else []

    return Rule(call_name(on_arrival, locals()), dict, receive, adds_sums=scale is constant)


def applied(arrival: Arrival, situation: Situation, scale: Staleness) -> list[Action]:
    """An update by this one gradient, or none if its rate is 0."""
    action = weighed(arrival, situation, scale)
    return [action, Update(1.0)] if isinstance(action, Add) else [action]
