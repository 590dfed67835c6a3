"""The rule of a seed, and its promises."""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

from polytempo.chaos.checkers import Promises
from polytempo.core.rule import Action, Arrival, Rule, RuleState, Situation, Update
from polytempo.server.rules.asynchronous import on_arrival, softsync, within
from polytempo.server.rules.synchronous_step import all_but, first, hardsync


class RULES:
    """Rules that bugs are planted in."""

    first = staticmethod(first)
    within = staticmethod(within)


class DrawnRule(NamedTuple):
    """A rule, its promises, how tickets must be dealt for it, and whether it waits for workers."""

    rule: Rule
    promises: Promises
    deals: Literal["freely", "evenly"] = "freely"
    waits: bool = False


def draw_rule(random: Random, workers: int) -> DrawnRule:
    """Draw a rule, with the dealing of the strategy that uses it.

    Give a new rule a number that another one can spare (0 and 5 are `on_arrival`), and leave the range as it is: then
    the seeds that draw the other rules stay the same, and with them the bugs that they find.
    """
    kind = random.randrange(7)
    if kind == 1:
        return DrawnRule(softsync(random.randint(1, workers)), Promises(reads_own=False))
    if kind == 2 and workers > 2:
        rule = random.choice([RULES.first(workers - 1), all_but(1)])
        return DrawnRule(rule, Promises(may_drop=True, fresh=True), waits=True)
    if kind in (3, 6):
        bound = random.randint(0, 2)
        return DrawnRule(RULES.within(bound), Promises(bound=bound), "evenly", waits=True)
    if kind == 4:
        return DrawnRule(hardsync(), Promises(fresh=True), "evenly", waits=True)
    return DrawnRule(on_arrival(), Promises())


def draw_hosts(random: Random, rule: Rule, workers: int) -> tuple[tuple[int, ...], ...]:
    """Draw whether workers of a host push their sum, where the rule takes sums, and who is on which of two hosts."""
    if not rule.adds_sums or random.random() < 0.4:
        return ()
    first = random.randint(2, workers)
    return tuple(range(first)), tuple(range(first, workers))


def undivided(rule: Rule) -> Rule:
    """The same decisions, but every gradient counts 1: then weights are whole numbers that count tickets."""

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        after, actions = rule.receive(state, arrival, situation)
        return after, [action._replace(divisor=1.0) if isinstance(action, Update) else action for action in actions]

    return rule._replace(receive=receive)
