"""Elastic averaging whose strength is divided among the workers."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Arrival, Rule, RuleState, Situation
from polytempo.server.rules.elastic import elastic, elastic_actions


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
