"""n-softsync: an update with every c = ⌊λ/n⌋ gradients, of any workers."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Add, Answer, Arrival, Rule, RuleState, Situation, Staleness, Update
from polytempo.server.rules.staleness import constant, weighed


def softsync(n: int, scale: Staleness = constant, workers: int | None = None) -> Rule:
    """θ ← θ - (1/c) Σ s(τᵢ) ηᵢ gᵢ as soon as c = ⌊λ/n⌋ gradients are there; each rate is scaled by its own τᵢ.

    That is for plain SGD. Any optimizer makes a step with the rate η̄ = (1/c) Σ s(τᵢ) ηᵢ on Σ s(τᵢ) ηᵢ gᵢ / (c η̄), the
    mean in which each gradient counts by its rate; ηᵢ is the job's learning rate at the batch that gᵢ is of.

    λ is `workers`, or the number of members at the time. n = 1 is not hardsync: a fast worker may be in an update
    twice, a slow one not at all. n = λ is `on_arrival`, and so is n above the number of members: c is at least 1. Mean
    staleness (λ - 1)/c if every worker is always busy.

    No worker waits: a push is answered once it is in the sum. When the last member leaves, the sum becomes an update,
    and when λ changes the sum is divided by the number of its gradients: no acknowledged gradient is lost or counts
    twice. But while workers stay, up to c - 1 gradients wait in the sum for the next one: also when the model is
    scored, and at the end of a run.

    Source: S. Gupta, W. Zhang and F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning",
    2015, section 3 (Rudra's protocols); s(τ) inside the sum: Zhang et al., 2016, section 3.
    """
    if n < 1:
        raise ValueError(f"softsync needs n >= 1, got {n}")
    if workers is not None and workers < n:
        raise ValueError(f"softsync(n={n}) needs at least {n} workers, got {workers}; c = ⌊λ/n⌋ would be 0")

    def receive(state: int, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        if arrival.kind == "pull":
            return state, [Answer(arrival.worker)]
        actions: list[Action] = []
        if arrival.kind == "push":
            actions.append(weighed(arrival, situation, scale))
        summed = state + sum(1 + len(arrival.others) for action in actions if isinstance(action, Add))
        learners = (workers or len(situation.members)) if situation.members else 0
        if summed >= max(1, learners // n):
            actions.append(Update(float(summed)))
            summed = 0
        if arrival.kind == "push":
            actions += map(Answer, (arrival.worker, *arrival.others))
        return summed, actions

    return Rule(call_name(softsync, locals()), int, receive, adds_sums=scale is constant)
