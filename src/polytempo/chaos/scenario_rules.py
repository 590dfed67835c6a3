"""Which rule a seed brings, and what that rule promises."""

from __future__ import annotations

from random import Random
from typing import Literal

from polytempo.chaos.checkers import Promises
from polytempo.core.rule import Action, Arrival, Rule, RuleState, Situation, Update
from polytempo.server.first import first
from polytempo.server.hardsync import hardsync
from polytempo.server.on_arrival import on_arrival
from polytempo.server.softsync import softsync
from polytempo.server.within import within


def draw_rule(random: Random, workers: int) -> tuple[Rule, Promises, Literal["freely", "evenly"]]:
    """A rule, its promises, and how tickets must be dealt for it."""
    kind = random.randrange(6)
    if kind == 1:
        return softsync(random.randint(1, workers)), Promises(reads_own=False), "freely"
    if kind == 2:
        return first(random.randint(max(1, workers - 1), workers)), Promises(may_drop=True, fresh=True), "evenly"
    if kind == 3:
        bound = random.randint(0, 3)
        return within(bound), Promises(bound=bound), "evenly"
    if kind == 4:
        return hardsync(), Promises(fresh=True), "evenly"
    return on_arrival(), Promises(), "freely"


def undivided(rule: Rule) -> Rule:
    """The same decisions, but every gradient counts 1: then weights are whole numbers, and say what was applied."""

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        after, actions = rule.receive(state, arrival, situation)
        return after, [Update(1.0) if isinstance(action, Update) else action for action in actions]

    return rule._replace(receive=receive)
