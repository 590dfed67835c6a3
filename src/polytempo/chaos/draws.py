"""The draws of a seed: its rule with the rule's promises, its hosts, and the faults of its `FaultPlan`."""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

from polytempo.chaos.checkers import Promises
from polytempo.chaos.network import ANY_NODE, Death, Fault, FaultPlan, LinkCut, ProcessPause, Weather
from polytempo.core.rule import Action, Add, Arrival, MergeRegion, Rule, RuleState, Situation, Update
from polytempo.server.rules.asynchronous import on_arrival, softsync, within
from polytempo.server.rules.regional import regional
from polytempo.server.rules.synchronous_step import all_but, first, hardsync, quorum


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


def draw_rule(random: Random, workers: int, shards: int) -> DrawnRule:
    """Draw a rule, with the dealing of the strategy that uses it.

    Give a new rule a number that another one can spare, and leave the range as it is: then the seeds that draw the
    other rules stay the same, and with them the bugs that they find.
    """
    kind = random.randrange(7)
    if kind == 0 and workers > 2 and shards == 1:
        return DrawnRule(regional(2, workers - 1), Promises(reads_own=False))
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
    if kind == 5:
        least = random.randint(1, workers)
        return DrawnRule(quorum(least, grace_s=0.02 * (least % 2)), Promises(), waits=True)
    return DrawnRule(on_arrival(), Promises())


def draw_hosts(random: Random, rule: Rule, workers: int) -> tuple[tuple[int, ...], ...]:
    """Draw the hosts, one or two, with workers that push a sum; none where the rule takes no sums."""
    if not rule.adds_sums or random.random() < 0.4:
        return ()
    first = random.randint(2, workers)
    return tuple(range(first)), tuple(range(first, workers))


def undivided(rule: Rule) -> Rule:
    """The same decisions, but gradients and movements count 1: then weights are whole numbers that count tickets."""

    def receive(state: RuleState, arrival: Arrival, situation: Situation) -> tuple[RuleState, list[Action]]:
        after, actions = rule.receive(state, arrival, situation)
        return after, [_counting_one(action) for action in actions]

    return rule._replace(receive=receive)


class Participants(NamedTuple):
    """The nodes that faults may hit. `copies[s]` hold shard s; a shard with one copy gets short faults only."""

    workers: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    coordinator: int


class StormLimits(NamedTuple):
    """Times of silence. `short_s`: no node is given up. `lost_s`: a copy is given up. `long_s`: any node is."""

    short_s: float
    lost_s: float
    long_s: float
    apart_s: float
    """Time between two heavy faults of one shard: by then it has all its copies again."""


def storm(random: Random, cast: Participants, limits: StormLimits, lasts_s: float) -> FaultPlan:
    """Faults within about the first `lasts_s` seconds, of a few kinds at a time."""
    faults: list[Fault] = []
    if random.random() < 0.6:
        faults += _deaths_of_workers(random, cast, lasts_s)
    if random.random() < 0.5:
        faults += _short(random, cast, limits, lasts_s)
    if random.random() < 0.3:
        faults += _absent_workers(random, cast, limits, lasts_s)
    for copies in cast.copies:
        if len(copies) > 1 and random.random() < 0.8:
            faults += _heavy(random, cast, copies, limits, lasts_s)
    faults.sort(key=lambda fault: fault.begin_s)
    ends = [fault.begin_s if isinstance(fault, Death) else fault.end_s for fault in faults]
    return FaultPlan(weather(random), tuple(faults), max([lasts_s, *ends]))


def weather(random: Random) -> Weather:
    """Draw the network's faults: rarely none, mostly some, rarely all."""
    jitter_s = random.choice([0.0, 0.002, 0.02, 0.06])
    slow = random.choice([0.0, 0.0, 0.05, 0.15])
    drop = random.choice([0.0, 0.0, 0.02, 0.1])
    duplicate = random.choice([0.0, 0.05, 0.3])
    return Weather(0.001, jitter_s, slow, 0.3, drop, duplicate)


def _deaths_of_workers(random: Random, cast: Participants, lasts_s: float) -> list[Fault]:
    """Deaths of some workers; or of one several times, while messages of its last life are still under way."""
    if random.random() < 0.5:
        return [Death(_moment(random, lasts_s), random.choice(cast.workers)) for _ in range(random.randint(1, 4))]
    worker, begin_s = random.choice(cast.workers), _moment(random, lasts_s)
    return [Death(round(begin_s + life * random.uniform(0.08, 0.2), 4), worker) for life in range(5)]


def _short(random: Random, cast: Participants, limits: StormLimits, lasts_s: float) -> list[Fault]:
    """Pauses and cuts that are too short for a node to be given up."""
    nodes = [*cast.workers, *(node for copies in cast.copies for node in copies), cast.coordinator]
    faults: list[Fault] = []
    for _ in range(random.randint(1, 4)):
        begin_s = _moment(random, lasts_s)
        end_s = round(begin_s + limits.short_s * random.uniform(0.2, 1.0), 4)
        one, other = random.sample(nodes, 2)
        if random.random() < 0.5:
            faults.append(ProcessPause(begin_s, end_s, one))
        else:
            faults.append(LinkCut(begin_s, end_s, one, other))
            faults += [LinkCut(begin_s, end_s, other, one)] * (random.random() < 0.5)
    return faults


def _absent_workers(random: Random, cast: Participants, limits: StormLimits, lasts_s: float) -> list[Fault]:
    """Workers that are given up though they live; sometimes it is the coordinator that stands still."""
    begin_s = _moment(random, lasts_s)
    end_s = round(begin_s + limits.long_s * random.uniform(1.0, 2.0), 4)
    who = random.choice([*cast.workers, cast.coordinator])
    if who == cast.coordinator or random.random() < 0.5:
        return [ProcessPause(begin_s, end_s, who)]
    return [LinkCut(begin_s, end_s, who, cast.coordinator)]


def _heavy(
    random: Random, cast: Participants, copies: tuple[int, ...], limits: StormLimits, lasts_s: float
) -> list[Fault]:
    """Faults that cost a shard one of its copies: it dies, or is given up, or cannot reach the other."""
    faults: list[Fault] = []
    begin_s = _moment(random, lasts_s / 2)
    while begin_s < lasts_s:
        node = random.choice(copies)
        end_s = round(begin_s + limits.long_s * random.uniform(1.0, 1.6), 4)
        late_s = round(begin_s + limits.lost_s * random.uniform(0.9, 1.0), 4)
        worker = random.choice(cast.workers)
        faults += random.choice(
            [
                [Death(begin_s, node)],
                [Death(begin_s, node)],
                [ProcessPause(begin_s, end_s, node)],
                [LinkCut(begin_s, end_s, node, cast.coordinator)],
                [LinkCut(begin_s, end_s, cast.coordinator, node)],
                [LinkCut(begin_s, end_s, node, ANY_NODE), LinkCut(begin_s, end_s, ANY_NODE, node)],
                [LinkCut(begin_s, end_s, copies[0], copies[1])],
                # A copy that was given up goes on answering a worker that does not learn of it.
                *[[LinkCut(begin_s, end_s, node, cast.coordinator), LinkCut(late_s, end_s, cast.coordinator, worker)]]
                * 4,
            ]
        )
        begin_s = round(end_s + limits.apart_s * random.uniform(1.0, 1.5), 4)
    return faults


def _moment(random: Random, lasts_s: float) -> float:
    return round(random.uniform(0.05, lasts_s), 4)


def _counting_one(action: Action) -> Action:
    if isinstance(action, Add | MergeRegion):
        return action._replace(rate=1.0)
    return action._replace(divisor=1.0) if isinstance(action, Update) else action
