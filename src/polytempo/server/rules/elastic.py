"""Elastic averaging: the server's parameters and each worker's move towards each other."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Answer, Arrival, Mix, Rule, RuleState, Situation


def elastic(alpha: float) -> Rule:
    """d = α (x - x̃); x̃ ← x̃ + d here, x ← x - d at the worker. A push carries the worker's parameters x.

    x̃ is the centre variable, at this server; d is the push's answer. The momentum form (EAMSGD) differs in the
    worker's own steps only (see `strategies.easgd`). Stable with p workers if p α ≤ 1; the paper takes α = 0.9/p.

    Source: S. Zhang, A. Choromanska and Y. LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, algorithms
    1 and 2.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"elastic needs 0 < alpha < 1, got {alpha}; the paper takes 0.9 divided by the workers")

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        return state, elastic_actions(arrival, alpha)

    return Rule(call_name(elastic, locals()), dict, receive)


def elastic_actions(arrival: Arrival, alpha: float) -> list[Action]:
    """The actions for `arrival`: move towards each other by `alpha` of the distance."""
    if arrival.kind == "push":
        return [Mix(arrival.worker, alpha), Answer(arrival.worker)]
    return [Answer(arrival.worker)] if arrival.kind == "pull" else []


def elastic_share(beta: float) -> Rule:
    """`elastic(alpha)` with α = β/λ, λ = the members at the time: all together move the center by β of its distance.

    Source: S. Zhang, A. Choromanska and Y. LeCun, "Deep learning with elastic averaging SGD", NIPS 2015, section 2
    (β = p α) and section 5 (β = 0.9).
    """
    if not 0 < beta < 1:
        raise ValueError(f"elastic averaging needs 0 < beta < 1, got {beta}; the paper takes 0.9")

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        return state, elastic_actions(arrival, beta / max(1, len(situation.members)))

    return elastic(beta)._replace(name=call_name(elastic_share, locals()), receive=receive)
