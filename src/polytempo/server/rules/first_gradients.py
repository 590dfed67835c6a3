"""Backup workers: a step waits for the first n gradients only."""

from __future__ import annotations

from polytempo.core.calls.call_name import call_name
from polytempo.core.rule import Action, Answer, Arrival, Drop, Rule, RuleState, Situation
from polytempo.server.rules.synchronous_step import stepwise


def first(n: int) -> Rule:
    """θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ over the first n gradients of the step, gᵢ of mᵢ samples; later ones are dropped.

    A gradient is of the present step if it was computed on the present version of the weights (its basis), and late
    if that version is older; the worker's own clock does not matter. So a worker whose gradient was late pulls and is
    in the present step again, whatever number its next push has. With several shards each decides for its own part.

    With n members or fewer it is `hardsync`, to the bit. The worker's time for a late gradient is lost, and so are
    its samples: if slow batches are slow because of what is in them, the model sees less of it.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio and R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016,
    section 3. There n + b workers are started, so that the batch stays as large as without backups.
    """
    if n < 1:
        raise ValueError(f"first needs n >= 1 gradients, got {n}")
    steps = stepwise(call_name(first, locals()), lambda waiting, workers: len(waiting) >= min(n, workers))

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        if arrival.kind == "push" and arrival.basis < situation.version:
            return state, [Drop(arrival.worker, "late"), Answer(arrival.worker)]
        if arrival.kind == "had" and arrival.basis < situation.version:
            return state, []
        return steps.receive(state, arrival, situation)

    return steps._replace(receive=receive, needs_newest=True)
