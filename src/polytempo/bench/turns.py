"""Fair turns: contenders run one after another, many times, so that a drifting machine treats them alike.

round 1:  ours  gloo  limit      round 2:  gloo  limit  ours      round 3:  limit  ours  gloo      …

A turn is a number of calls, chosen so that it lasts about `turn_s`. A contender's figure is the median over rounds of
the slowest rank's time. Two contenders are compared round by round, since a disturbance of a round disturbs both: the
median of the rounds' ratios, and their quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

MAX_CALLS = 20_000
_FIRST_CALLS = 3

Statistic = Literal["median", "mean"]
"""Statistic of a turn's calls. The mean is the whole turn's time: work of a later call counts; so does noise."""


class Contender(NamedTuple):
    """A contender to time. `run(calls)` makes that many calls; it returns seconds a call, of each or of parts."""

    name: str
    run: Callable[[int], Sequence[float]]


class TurnBarrier(Protocol):
    """A barrier that keeps ranks in step between turns."""

    def barrier(self) -> None:
        """Wait until all are here, asleep: a waiting rank must not take the time of a measured rank."""

    def agree(self, number: int) -> int:
        """Rank 0's number."""


class Measurement(NamedTuple):
    """A quantity over the rounds: the median, the quartiles, and each round's."""

    median: float
    low: float
    high: float
    rounds: list[float]


class Ratio(NamedTuple):
    """Comparison of two contenders: the median of the ratios of single rounds, and the quartiles."""

    median: float
    low: float
    high: float


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> Callable[[int], list[float]]:
    """A contender's `run` from one call. With `time.process_time` it is the time of this process on its cores, its
    threads included, without its waits, and with little of other programs' computing."""

    def run(calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            begun = clock()
            call()
            seconds.append(clock() - begun)
        return seconds

    return run


def turns(
    contenders: Sequence[Contender], meeting: TurnBarrier, *, rounds: int, turn_s: float, min_calls: int = 3
) -> dict[str, list[list[float]]]:
    """This rank's `[median, mean]` seconds a call, by contender and round. All ranks call it with equal contenders."""
    calls = {each.name: _calls(each, meeting, turn_s, min_calls) for each in contenders}
    seconds: dict[str, list[list[float]]] = {each.name: [] for each in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            meeting.barrier()
            found = contender.run(calls[contender.name])
            seconds[contender.name].append([statistics.median(found), statistics.fmean(found)])
    meeting.barrier()
    return seconds


def _calls(contender: Contender, meeting: TurnBarrier, turn_s: float, min_calls: int) -> int:
    """Number of calls that fill a turn. The calls that find it out also warm up caches and buffers."""
    meeting.barrier()
    first_s = statistics.median(contender.run(_FIRST_CALLS))
    calls = meeting.agree(_fitting(first_s, turn_s / 10, min_calls))
    meeting.barrier()
    typical_s = statistics.median(contender.run(calls))
    return meeting.agree(_fitting(typical_s, turn_s, min_calls))


def _fitting(call_s: float, turn_s: float, min_calls: int) -> int:
    return max(min_calls, min(MAX_CALLS, int(turn_s / max(call_s, 1e-9))))


def slowest(by_rank: Sequence[Mapping[str, Sequence[Sequence[float]]]], statistic: Statistic) -> dict[str, Measurement]:
    """Seconds a call of each contender, from the results of `turns` on every rank: the slowest rank's time counts."""
    column = ("median", "mean").index(statistic)
    found = {}
    for name in by_rank[0]:
        rounds = zip(*(rank[name] for rank in by_rank), strict=True)
        found[name] = figure([max(float(turn[column]) for turn in ranks) for ranks in rounds])
    return found


def figure(rounds: Sequence[float]) -> Measurement:
    """The figure of a quantity that was measured once a round."""
    return Measurement(statistics.median(rounds), *quartiles(rounds), list(rounds))


def ratio(numerator: Measurement, denominator: Measurement) -> Ratio:
    """numerator / denominator."""
    singly = [a / b for a, b in zip(numerator.rounds, denominator.rounds, strict=True)]
    return Ratio(statistics.median(singly), *quartiles(singly))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile; of one value, that value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
