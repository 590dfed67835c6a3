"""Predictions of each schedule for a model that is cut: the second table of `polytempo cut`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from polytempo.partition import schedules
from polytempo.partition.schedules import Schedule
from polytempo.partition.schedules.facts import facts
from polytempo.partition.schedules.timetable import LinkSeconds, StageTimes, played
from polytempo.report.pages.summary import human_seconds

_MAKES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": lambda stages, micro_batches: schedules.gpipe(stages, micro_batches),
    "one_f_one_b": schedules.one_f_one_b,
    "zero_bubble": schedules.zero_bubble,
    "ddg": lambda stages, _: schedules.ddg(stages),
    "features_replay": lambda stages, _: schedules.features_replay(stages),
    "pipelined_backprop": lambda stages, _: schedules.pipelined_backprop(stages),
    "pipedream": lambda stages, _: schedules.pipedream(stages),
    "pipedream_2bw": schedules.pipedream_2bw,
    "synthetic_gradients": lambda stages, _: schedules.synthetic_gradients(stages),
}
COLUMNS = ("schedule", "step", "speed-up", "bubble", "held", "late")


class Prediction(NamedTuple):
    """A schedule on stages of given times."""

    schedule: str
    step_s: float
    speed_up: float
    """Ratio to one worker that takes all stages' times."""
    bubble: float
    held: int
    """Micro-batches that the first stage holds."""
    delay: int
    """Delay of the first stage's gradients, in updates."""

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table."""
        late = f"{self.delay} updates" if self.delay > 1 else "1 update" if self.delay else "-"
        return (
            *(self.schedule, human_seconds(self.step_s), f"{self.speed_up:.2f} x"),
            *(f"{100 * self.bubble:.0f} %", str(self.held), late),
        )


def predictions(seconds: Sequence[float], micro_batches: int, link_s: LinkSeconds = 0.0) -> list[Prediction]:
    """Predictions of every schedule, if a batch takes stage k `seconds[k]`, both passes, and messages `link_s`.

    A third of it is taken for the forward pass. Schedules without a flush take a batch whole, the others in so many
    micro-batches, and their messages take as much less. Computations of estimators of gradients are not counted.
    """
    stages, total_s = len(seconds), sum(seconds)
    found = []
    for name, make in _MAKES.items():
        schedule = make(stages, max(micro_batches, stages))
        each = [StageTimes(s / 3, 2 * s / 3, s / 3) for s in (t / schedule.micro_batches for t in seconds)]
        message_s = _of_part(link_s, schedule.micro_batches)
        timetable, first = played(schedule, 8 * stages, each, link_s=message_s), facts(schedule, 0)
        step_s = timetable.step_s
        found.append(Prediction(name, step_s, total_s / step_s, timetable.bubble, first.held, first.delay))
    return found


def _of_part(link_s: LinkSeconds, count: int) -> LinkSeconds:
    """Seconds of one of `count` micro-batches' messages, if the whole batch's take `link_s`."""
    if callable(link_s):
        return lambda source, target: link_s(source, target) / count
    return link_s / count
