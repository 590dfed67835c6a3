"""A step waits for its samples, whoever computed them."""

from __future__ import annotations

from itertools import takewhile

from polytempo.core.rule import Action, Arrival, Rule, RuleState, Situation
from polytempo.core.strategy import spelled
from polytempo.server.step import Waiting, stepwise


def covered(samples: int) -> Rule:
    """θ ← θ - α Σ mᵢ gᵢ / Σ mᵢ once the gradients of the step are of `samples` samples; mᵢ = those behind gᵢ.

    What a step needs when workers hand parts of their share to helpers: it does not matter how the samples were
    split, the mean is over all of them. A worker's pushes with one clock are of one step: its own part, and the parts
    that it did for others. One with a later clock waits for the next step.

    Every step must be of `samples` samples: leave out an epoch's last, smaller batch. A worker that leaves takes its
    waiting gradients with it, so others must push those samples; one that joins counts at once, as it may be them.

    Source: A. Harlap et al., "Addressing the straggler problem for iterative convergent parallel ML" (FlexRR), 2016,
    section 3: a helper's work counts as the helped worker's.
    """
    if samples < 1:
        raise ValueError(f"covered needs samples >= 1 a step, got {samples}")

    def all_there(waiting: dict[int, Waiting], workers: int) -> bool:
        return sum(size for pushes in waiting.values() for _, size in _of_one_clock(pushes)) >= samples

    steps = stepwise(spelled("covered", samples=samples), all_there, _of_one_clock, float)

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        return (state, []) if arrival.kind == "joined" else steps.receive(state, arrival, situation)

    return steps._replace(receive=receive)


def _of_one_clock(waiting: Waiting) -> Waiting:
    """The worker's oldest pushes, up to the first one with another clock."""
    return tuple(takewhile(lambda push: push[0] == waiting[0][0], waiting))
