"""A schedule's timetable: it is played with given times, without a world.

It predicts a run: the time of a step and the part of it that is a bubble; and it draws the pictures of the schedules.
Runs in the virtual world and on processes are measured against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polytempo.partition.schedules.action import Kind, Passed, Schedule, Turn, makes, part_of, turns, waits_for


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one part of a stage takes for one micro-batch."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 1.0
    """Part of `backward_s`: the parameters' gradient."""
    update_s: float = 0.0
    learn_s: float = 0.0
    """Training of an estimator by one batch."""

    def of(self, kind: Kind, *, recomputes: bool = False) -> float:
        """Seconds of an action of this kind."""
        match kind:
            case "forward":
                return self.forward_s
            case "backward":
                return self.backward_s + (self.forward_s if recomputes else 0.0)
            case "input":
                return self.backward_s - self.weight_s
            case "weight":
                return self.weight_s
            case "update":
                return self.update_s
            case "learn":
                return self.learn_s


TurnSeconds = Callable[[int, Turn], float]
"""(stage, turn) -> its seconds."""

LinkSeconds = float | Callable[[int, int], float]
"""See `played`."""


class TimetableEntry(NamedTuple):
    """One turn of one stage, with its time."""

    stage: int
    turn: Turn
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timetable:
    """All turns of every stage in so many steps."""

    entries: tuple[TimetableEntry, ...]
    stages: int
    steps: int
    bunches: bool = False
    """True if messages stand in line, so that steps may differ from each other."""

    @property
    def seconds(self) -> float:
        """The end of the last action."""
        return max(entry.end_s for entry in self.entries)

    @property
    def step_s(self) -> float:
        """Seconds of a step once the pipeline is full: between the last two updates of the slowest stage.

        Where updates come in bunches, because messages take longer than a step, it is the mean over the last half.
        """
        ends = [[e.end_s for e in self.of(stage) if e.turn.action.kind == "update"] for stage in range(self.stages)]
        if not self.bunches:
            return max(last - before for *_, before, last in ends)
        return max(_mean_difference(each[(len(each) - 1) // 2 :]) for each in ends)

    @property
    def mean_step_s(self) -> float:
        """Mean seconds from update to update of the slowest stage; for turns that do not all take the same."""
        ends = [[e.end_s for e in self.of(stage) if e.turn.action.kind == "update"] for stage in range(self.stages)]
        return max(_mean_difference(each) for each in ends)

    @property
    def bubble(self) -> float:
        """The share of idle time in the last step; the mean over stages."""
        busy_s = sum(e.end_s - e.start_s for e in self.entries if e.turn.step == self.steps - 1)
        return 1 - busy_s / (self.stages * self.step_s)

    def of(self, stage: int) -> list[TimetableEntry]:
        """The turns of `stage`, in its order."""
        return [entry for entry in self.entries if entry.stage == stage]

    def drawn(self, unit_s: float = 1.0, width: int | None = None) -> list[str]:
        """A line a stage: each action at its time, one column of `width` characters a `unit_s`; dots for bubbles."""
        widest = 1 + max(len(str(e.turn)) / max(1, round((e.end_s - e.start_s) / unit_s)) for e in self.entries)
        return [self._line(stage, unit_s, width or math.ceil(widest)) for stage in range(self.stages)]

    def _line(self, stage: int, unit_s: float, width: int) -> str:
        line, column = "", 0
        for entry in self.of(stage):
            begin, end = round(entry.start_s / unit_s), round(entry.end_s / unit_s)
            line += "".join(".".ljust(width) for _ in range(begin - column))
            line += str(entry.turn).ljust(width * max(end - begin, 1)) if end > begin else ""
            column = end
        return line.rstrip()


def played(
    schedule: Schedule,
    steps: int,
    times: StageTimes | Sequence[StageTimes] | TurnSeconds = StageTimes(),
    *,
    link_s: LinkSeconds = 0.0,
) -> Timetable:
    """The timetable of so many steps. `times`: for all stages, for each stage, or for each turn, as it was measured.

    `link_s`: seconds from the end of a pass until another stage has its result. It takes no time from either stage. A
    function of the part of the model that has made it and the part that uses it gives the seconds that a message
    occupies the link between them, one way; messages behind it wait (`partition.wires.message_bytes` has the bytes).

    Raises ValueError where the stages wait for each other for ever. Cost: linear in the number of actions.
    """
    if callable(times):
        return _Play(schedule, steps, times, link_s).to_the_end()
    each = list(times) if isinstance(times, Sequence) else [times] * schedule.stages
    if len(each) != schedule.stages:
        raise ValueError(f"times of {len(each)} stages were given for {schedule.stages}")

    def seconds(stage: int, turn: Turn) -> float:
        return each[stage].of(turn.action.kind, recomputes=schedule.recomputes)

    return _Play(schedule, steps, seconds, link_s).to_the_end()


class _Play:
    def __init__(self, schedule: Schedule, steps: int, seconds: TurnSeconds, link_s: LinkSeconds) -> None:
        self._schedule, self._steps, self._seconds, self._link_s = schedule, steps, seconds, link_s
        self._left = [list(turns(schedule, stage, steps))[::-1] for stage in range(schedule.stages)]
        self._free_s = [0.0] * schedule.stages
        self._passed_s: dict[Passed, float] = {}
        self._ended_s: dict[int, float] = {}
        """Step -> the end of the last stage so far."""
        self._entries: list[TimetableEntry] = []
        self._arrived: dict[tuple[Passed, int], float] = {}
        """(pass, part) -> the time that the part has the result."""
        self._free_link_s: dict[tuple[int, int], float] = {}
        """(part, part) -> the time when the link between them, one way, is free again."""

    def to_the_end(self) -> Timetable:
        while any(self._left):
            if not sum([self._advanced(stage) for stage in range(self._schedule.stages)]):
                waiting = {stage: str(left[-1]) for stage, left in enumerate(self._left) if left}
                raise ValueError(f"{self._schedule} waits for ever; the next action of each stage is {waiting}")
        self._entries.sort(key=lambda entry: (entry.stage, entry.start_s))
        return Timetable(tuple(self._entries), self._schedule.stages, self._steps, callable(self._link_s))

    def _advanced(self, stage: int) -> int:
        """Let `stage` take all turns that it can; returns their number."""
        before = len(self._left[stage])
        while self._left[stage] and (begin_s := self._begin_s(stage, self._left[stage][-1])) is not None:
            turn = self._left[stage].pop()
            self._free_s[stage] = begin_s + self._seconds(stage, turn)
            self._ended_s[turn.step] = max(self._ended_s.get(turn.step, 0.0), self._free_s[stage])
            self._entries.append(TimetableEntry(stage, turn, begin_s, self._free_s[stage]))
            if (passed := makes(self._schedule, stage, turn)) is not None:
                self._passed_s[passed] = self._free_s[stage]
        return before - len(self._left[stage])

    def _begin_s(self, stage: int, turn: Turn) -> float | None:
        """The begin of the turn in seconds; None: it is not known yet."""
        if self._schedule.lockstep and any(left and left[-1].step < turn.step for left in self._left):
            return None
        needs = waits_for(self._schedule, stage, turn)
        if any(need not in self._passed_s for need in needs):
            return None
        together_s = self._ended_s.get(turn.step - 1, 0.0) if self._schedule.lockstep else 0.0
        part = part_of(self._schedule, stage, turn.action)
        return max([together_s, self._free_s[stage], *(self._arrived_s(part, need) for need in needs)])

    def _arrived_s(self, part: int, passed: Passed) -> float:
        if (passed.part - part) % self._schedule.stages == 0:
            return self._passed_s[passed]
        if not callable(self._link_s):
            return self._passed_s[passed] + self._link_s
        if (passed, part) not in self._arrived:
            lane = passed.part, part
            begin_s = max(self._passed_s[passed], self._free_link_s.get(lane, 0.0))
            self._arrived[passed, part] = self._free_link_s[lane] = begin_s + self._link_s(*lane)
        return self._arrived[passed, part]


def _mean_difference(ascending: Sequence[float]) -> float:
    return (ascending[-1] - ascending[0]) / (len(ascending) - 1)
