"""`Validation`: two traces of one training run step by step, the predicted beside the measured, and by component.

step k of a rank   between the ends of its last operations of steps k-1 and k, without scores and checkpoints
components         each kind of communication, as long as a rank is in it and computes nothing; computing is the rest
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from polytempo.worlds.trace import COMMUNICATION, OFF_THE_CLOCK, Event

COMPUTING = "computing"
_OFF_STEPS = 2
"""Steps at the beginning that do not count: processes warm up."""


class PredictedTime(NamedTuple):
    """Seconds of a step, or of a component of a mean step: the ranks' mean."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Predicted - measured."""
        return self.predicted_s - self.measured_s

    @property
    def error(self) -> float:
        """Predicted / measured - 1; infinite for something that was predicted and did not happen."""
        if not self.measured_s:
            return float("inf") if self.predicted_s else 0.0
        return self.predicted_s / self.measured_s - 1


class Validation(NamedTuple):
    """A prediction beside the measurement."""

    steps: list[PredictedTime]
    """Steps in both traces, in order."""
    whole: PredictedTime
    """The median step."""
    components: list[PredictedTime]
    """Components of the mean step, the one with the largest difference first."""

    @property
    def median_error(self) -> float:
        """Median error of single steps, without its sign."""
        return median(abs(step.error) for step in self.steps)


def validation(predicted: Sequence[Event], measured: Sequence[Event]) -> Validation:
    """Compare two traces. ValueError where they have no step in common."""
    traces = [_steps(events) for events in (predicted, measured)]
    common = sorted(set(traces[0]) & set(traces[1]))[:-1]  # in the last one ranks also wait for the run's end
    if not common:
        raise ValueError("the traces of the run and of its simulation have no step in common; measure a longer run")
    steps = [
        PredictedTime(str(step), *(fmean(sum(parts.values()) for parts in trace[step]) for trace in traces))
        for step in common
    ]
    names = dict.fromkeys(name for trace in traces for step in common for parts in trace[step] for name in parts)
    components = [
        PredictedTime(
            name,
            *(fmean(parts.get(name, 0.0) for step in common for parts in trace[step]) for trace in traces),
        )
        for name in names
    ]
    components.sort(key=lambda each: -abs(each.difference_s))
    whole = PredictedTime(
        "step", *(median(getattr(step, key) for step in steps) for key in ("predicted_s", "measured_s"))
    )
    return Validation(steps, whole, components)


def typical_step_s(events: Iterable[Event], period: int = 8) -> float:
    """Seconds of a step: of steps k, k + `period`, … the median, and the mean of these over k.

    So an event in one of `period` steps counts, and a step that another program on the host has disturbed does not.
    Raises ValueError for a trace of fewer than two whole steps.
    """
    classes: dict[int, list[float]] = defaultdict(list)
    for step, ranks in _steps(events).items():
        classes[step % period].append(fmean(sum(parts.values()) for parts in ranks))
    if not classes:
        raise ValueError("the trace holds no whole step; measure a longer run")
    return fmean(median(each) for each in classes.values())


def steps_of_ranks(events: Iterable[Event]) -> list[list[float]]:
    """Seconds of each step that the trace holds whole, a list for each rank. The last step is left out: ranks wait
    for the run's end."""
    found = _steps(events)
    steps = [[sum(parts.values()) for parts in found[step]] for step in sorted(found)[:-1]]
    return [list(taken) for taken in zip(*steps, strict=True)]


def _steps(events: Iterable[Event]) -> dict[int, list[Mapping[str, float]]]:
    """Parts of each step that the trace holds whole, for every rank, in seconds.

    A rank that is in one step all the time, as a parameter server's is, marks none and is left out.
    """
    of_rank: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        of_rank[event.rank][event.step].append(event)
    of_rank = {rank: steps for rank, steps in of_rank.items() if len(steps) > 1}
    found: dict[int, list[Mapping[str, float]]] = defaultdict(list)
    for steps in of_rank.values():
        first = min(steps)
        for step in sorted(steps):
            if step >= max(first + 1, _OFF_STEPS) and step - 1 in steps:
                begin_s = max(event.end_s for event in steps[step - 1])
                trained = _on_the_clock(steps[step])
                found[step].append(_parts(trained, begin_s, max((event.end_s for event in trained), default=begin_s)))
    return {step: parts for step, parts in found.items() if len(parts) == len(of_rank)}


def _on_the_clock(events: Sequence[Event]) -> Sequence[Event]:
    """Events of training alone. A rank scores and saves at the end of a step."""
    off_s = min((event.start_s for event in events if event.op in OFF_THE_CLOCK), default=None)
    if off_s is None:
        return events
    return [event._replace(end_s=min(event.end_s, off_s)) for event in events if event.start_s < off_s]


def _parts(events: Sequence[Event], begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each kind of communication while its rank does not compute; of several at a time, the kind that began
    first counts."""
    parts: dict[str, float] = defaultdict(float)
    computing = _joined(event for event in events if event.op == "compute")
    free_s = begin_s
    for event in sorted(events, key=lambda event: event.start_s):
        if event.op in COMMUNICATION and event.end_s > free_s:
            parts[event.op] += _outside(computing, max(event.start_s, free_s), event.end_s)
            free_s = event.end_s
    parts[COMPUTING] = max(0.0, end_s - begin_s - sum(parts.values()))
    return dict(parts)


def _joined(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Times with one of the events under way, in order."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start_s):
        if found and event.start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], event.end_s))
        else:
            found.append((event.start_s, event.end_s))
    return found


def _outside(spans: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Seconds from `begin_s` to `end_s` outside the spans, which are in order and apart."""
    left_s = end_s - begin_s
    for i in range(max(0, bisect_right(spans, (begin_s, begin_s)) - 1), len(spans)):
        if spans[i][0] >= end_s:
            break
        left_s -= max(0.0, min(spans[i][1], end_s) - max(spans[i][0], begin_s))
    return left_s
