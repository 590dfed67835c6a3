"""Which faults a seed brings: the drawing of a `FaultPlan`."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from polytempo.chaos.network import ANYBODY, Cut, Death, Fault, FaultPlan, ProcessPause, Weather


class Participants(NamedTuple):
    """Who can be hit: node numbers. `copies[s]` hold shard s; with one copy a shard cannot be spared for long."""

    workers: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    coordinator: int


class StormLimits(NamedTuple):
    """`short_s`: nobody who is silent for so long is taken for dead. `lost_s`: a copy is. `long_s`: everybody is."""

    short_s: float
    lost_s: float
    long_s: float
    apart_s: float
    """Between two heavy faults of one shard: time enough to have all its copies again."""


def storm(random: Random, cast: Participants, limits: StormLimits, lasts_s: float) -> FaultPlan:
    """Faults within the first `lasts_s` seconds or so, of a few kinds at a time: each seed has its own weather."""
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
    """Fair now and then; mostly something is wrong, seldom everything."""
    jitter_s = random.choice([0.0, 0.002, 0.02, 0.06])
    slow = random.choice([0.0, 0.0, 0.05, 0.15])
    drop = random.choice([0.0, 0.0, 0.02, 0.1])
    duplicate = random.choice([0.0, 0.05, 0.3])
    return Weather(0.001, jitter_s, slow, 0.3, drop, duplicate)


def _deaths_of_workers(random: Random, cast: Participants, lasts_s: float) -> list[Fault]:
    """Here and there; or one worker several times, before the messages of its last life have all arrived."""
    if random.random() < 0.5:
        return [Death(_moment(random, lasts_s), random.choice(cast.workers)) for _ in range(random.randint(1, 4))]
    worker, begin_s = random.choice(cast.workers), _moment(random, lasts_s)
    return [Death(round(begin_s + life * random.uniform(0.08, 0.2), 4), worker) for life in range(5)]


def _short(random: Random, cast: Participants, limits: StormLimits, lasts_s: float) -> list[Fault]:
    """Pauses and cuts that nobody should take for a death."""
    everybody = [*cast.workers, *(node for copies in cast.copies for node in copies), cast.coordinator]
    faults: list[Fault] = []
    for _ in range(random.randint(1, 4)):
        begin_s = _moment(random, lasts_s)
        end_s = round(begin_s + limits.short_s * random.uniform(0.2, 1.0), 4)
        one, other = random.sample(everybody, 2)
        if random.random() < 0.5:
            faults.append(ProcessPause(begin_s, end_s, one))
        else:
            faults.append(Cut(begin_s, end_s, one, other))
            faults += [Cut(begin_s, end_s, other, one)] * (random.random() < 0.5)
    return faults


def _absent_workers(random: Random, cast: Participants, limits: StormLimits, lasts_s: float) -> list[Fault]:
    """Workers that are taken for dead and are not; now and then it is the coordinator that stood still."""
    begin_s = _moment(random, lasts_s)
    end_s = round(begin_s + limits.long_s * random.uniform(1.0, 2.0), 4)
    who = random.choice([*cast.workers, cast.coordinator])
    if who == cast.coordinator or random.random() < 0.5:
        return [ProcessPause(begin_s, end_s, who)]
    return [Cut(begin_s, end_s, who, cast.coordinator)]


def _heavy(
    random: Random, cast: Participants, copies: tuple[int, ...], limits: StormLimits, lasts_s: float
) -> list[Fault]:
    """What costs a shard one of its copies: it dies, or is taken for dead, or cannot reach the other."""
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
                [Cut(begin_s, end_s, node, cast.coordinator)],
                [Cut(begin_s, end_s, cast.coordinator, node)],
                [Cut(begin_s, end_s, node, ANYBODY), Cut(begin_s, end_s, ANYBODY, node)],
                [Cut(begin_s, end_s, copies[0], copies[1])],
                # Who is thought dead goes on answering a worker that does not hear of it.
                *[[Cut(begin_s, end_s, node, cast.coordinator), Cut(late_s, end_s, cast.coordinator, worker)]] * 4,
            ]
        )
        begin_s = round(end_s + limits.apart_s * random.uniform(1.0, 1.5), 4)
    return faults


def _moment(random: Random, lasts_s: float) -> float:
    return round(random.uniform(0.05, lasts_s), 4)
