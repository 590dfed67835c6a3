"""`polytempo cut`: a job's model in stages, with their computing, memory and messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, cast

import torch
from torch import nn

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.predict.prediction_options import CutOptions
from polytempo.core import Codec
from polytempo.partition import schedules
from polytempo.partition.cut import Cut, StageCost, unbalanced
from polytempo.partition.cutting import cut as cut_model
from polytempo.partition.schedules import Schedule
from polytempo.partition.schedules.facts import facts
from polytempo.partition.schedules.timetable import LinkSeconds, StageTimes, played
from polytempo.partition.wires import AS_THEY_ARE, Wires, message_bytes
from polytempo.report.pages.summary import human_seconds
from polytempo.spec.job import Job
from polytempo.spec.job_calls import data_of, model_of, optimizer_of
from polytempo.spec.text.catalogue import NAMES
from polytempo.training.parts.staged_training import sample_of

MICRO_BATCHES = 8
"""Number of micro-batches in a batch, for the table of schedules."""
_COLUMNS = ("stage", "layers", "parameters", "time", "share", "memory", "in", "out", "back")


def cut(asked: CutOptions) -> None:
    """Cut the job's model, measure its stages, and show them."""
    job, wires = found_job(asked.job), wires_of(asked)
    with notes_on_stderr():
        model = model_of(job)
        sample = sample_of(job, data_of(job, asked.data), asked.batch_size or job.batch_size)
        state = state_per_parameter(job)
        found = cut_model(
            model,
            asked.stages or (2 if isinstance(asked.by, str) else None),
            sample=sample,
            by=asked.by,
            state_per_parameter=state,
            measure=True,
        )
    sent = message_bytes(found, found.layouts(*sample), wires)
    seconds = [_seconds(cost) for cost in found.costs]
    foreseen = predictions(seconds, MICRO_BATCHES, _link_s(sent, asked.gbit_per_s)) if len(seconds) > 1 else []
    crossing = [Crossing.of(sent, stage) for stage in range(len(seconds))]
    memory = [cost.memory_bytes(state) for cost in found.costs]
    if asked.json:
        stages = [
            asdict(cost) | {"memory_bytes": each} | own._asdict()
            for cost, each, own in zip(found.costs, memory, crossing, strict=True)
        ]
        values = [asdict(value) for value in found.values]
        plain = {"job": job.name, "begins": found.begins, "stages": stages, "values": values, "shared": found.shared}
        link = {"between_stages": str(wires), "gbit_per_s": asked.gbit_per_s}
        show_json(plain | link | {"schedules": [each._asdict() for each in foreseen]})
    else:
        show_table(_COLUMNS, [_row(found, index, each, crossing[index]) for index, each in enumerate(memory)])
        print(*notes(found), sep="\n")
        if wires != AS_THEY_ARE:
            plain_bytes = sum(message_bytes(found, found.layouts(*sample), AS_THEY_ARE).values())
            print(f"{wires}: stages send {size(sum(sent.values()))} a batch, {size(plain_bytes)} without codecs")
        if foreseen:
            speed = "take no time here" if asked.gbit_per_s is None else f"pass at {asked.gbit_per_s:g} Gbit/s"
            print(f"\nin {MICRO_BATCHES} micro-batches, or whole where gradients are late; messages {speed}:")
            show_table(_SCHEDULE_COLUMNS, [each.row for each in foreseen])
    if warning := unbalanced(found.costs, [_seconds(cost) for cost in found.costs]):
        print(f"warning: {warning}; take fewer stages, another --by, or divide that layer", file=sys.stderr)


def state_per_parameter(job: Job) -> float:
    """Numbers that the job's optimizer keeps for each parameter, tried with a small matrix."""
    probe = nn.Linear(16, 16, bias=False)
    optimizer = optimizer_of(job, probe)
    probe.weight.grad = torch.ones_like(probe.weight)
    optimizer.step()
    kept = [each for each in optimizer.state[probe.weight].values() if isinstance(each, torch.Tensor)]
    return sum(each.numel() for each in kept if each.numel() > 1) / probe.weight.numel()


def notes(found: Cut) -> list[str]:
    """Lines below the table."""
    said = ["time and memory are of a batch, forward and backward, on one thread; back: gradients of the inputs"]
    if found.begins:
        said.append(f"the same by hand: --by {','.join(found.begins)}")
    said += [
        f"{name} is used by stages {', '.join(map(str, stages))}: their gradients are summed"
        for name, stages in found.shared.items()
    ]
    return said


class Crossing(NamedTuple):
    """Messages of a stage for a batch, in bytes."""

    bytes_in: int
    """Activations that it receives."""
    bytes_out: int
    """Activations that it sends."""
    bytes_back: int
    """Gradients of its inputs, which it sends back."""

    @classmethod
    def of(cls, sent: Mapping[tuple[int, int], int], stage: int) -> Crossing:
        """`sent`: bytes from stage to stage."""
        return cls(
            sum(count for (a, b), count in sent.items() if a < b == stage),
            sum(count for (a, b), count in sent.items() if stage == a < b),
            sum(count for (a, b), count in sent.items() if stage == a > b),
        )


def wires_of(asked: CutOptions) -> Wires:
    """The codecs of the options. ValueError for a codec that cannot serve between stages."""
    activations, gradients = (None if t is None else NAMES.codec(t) for t in (asked.activations, asked.gradients))
    return Wires(cast("Codec | None", activations), cast("Codec | None", gradients))


def _link_s(sent: Mapping[tuple[int, int], int], gbit_per_s: float | None) -> LinkSeconds:
    """Seconds that a batch's messages occupy the link from one stage to another."""
    if gbit_per_s is None:
        return 0.0
    return lambda source, target: 8e-9 * sent.get((source, target), 0) / gbit_per_s


def _row(found: Cut, index: int, memory: float, crossing: Crossing) -> tuple[str, ...]:
    cost = found.costs[index]
    total = sum(_seconds(each) for each in found.costs)
    return (
        str(index),
        cost.shown,
        f"{cost.parameters:,}",
        human_seconds(_seconds(cost)),
        f"{100 * _seconds(cost) / total:.0f} %",
        size(memory),
        *(size(count) if count else "-" for count in crossing),
    )


def _seconds(cost: StageCost) -> float:
    assert cost.seconds is not None, "times were measured"
    return cost.seconds


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
_SCHEDULE_COLUMNS = ("schedule", "step", "speed-up", "bubble", "held", "late")


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
