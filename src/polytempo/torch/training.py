"""The training program: one coroutine that runs a job in either world.

for every batch of every epoch:  take_step ── row of metrics now and then ── checkpoint
at the end of an epoch:          the observer scores and saves   (not after fewer than four steps)

An `Observer` scores and saves. The program says when; the engine chooses an observer that changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Port, Program
from polytempo.data.shard import Shard
from polytempo.torch.evaluate import Score
from polytempo.torch.finite import check_final, check_score
from polytempo.torch.job import Data, Job
from polytempo.torch.options import RunOptions
from polytempo.torch.parts import next_batch
from polytempo.torch.replica import Replica
from polytempo.torch.spec import RunSpec

TakeStep = Callable[[Port, Any, int], Program[Tensor]]
"""One optimizer step on one batch of so many samples; answers the batch's mean loss."""

ROWS_PER_EPOCH = 10
"""How many rows of metrics an epoch leaves."""
_STEPS_BETWEEN_SCORES = 4


class Moment(NamedTuple):
    """A moment of a run: steps, epochs and samples over all ranks and earlier runs, and the training time."""

    step: int
    epoch: float
    samples: int
    seconds: float

    def row(self, kind: str) -> dict[str, Any]:
        """The beginning of a row of metrics."""
        return {"kind": kind, **self._asdict()}


class Observer(Protocol):
    """Scores and saves a run without changing what it computes.

    `score` and `save` are called on every rank at the same steps, when the replica has finished that step.
    """

    @property
    def off_s(self) -> float:
        """Seconds for which training has stood still while it scored and saved."""

    @property
    def off_bytes(self) -> int:
        """Bytes that this rank has sent meanwhile."""

    def begins(self, rank: int, step: int) -> None:
        """`rank` begins `step` now."""

    def over(self, step: int) -> bool:
        """Whether the run ends before `step`, because a score has reached what `until` asks for."""

    async def score(self, port: Port, course: Course, moment: Moment) -> None:
        """Score the model as it is now; perhaps later. Called only where there is a test set."""

    async def save(self, port: Port, course: Course, moment: Moment) -> None:
        """Write a checkpoint of the training state as it is now; perhaps later."""

    async def finish(
        self, port: Port, course: Course, moment: Moment, final: Mapping[str, Tensor]
    ) -> tuple[Score | None, bool | None]:
        """Training is over: finish what is under way. Returns the score of the `final` model, and whether `until`
        was reached (None: nothing was asked for)."""


@dataclass
class Course:
    """Everything that one rank needs for a run."""

    spec: RunSpec
    replica: Replica
    shard: Shard
    data: Data
    take_step: TakeStep
    observer: Observer
    scheduler: LRScheduler | None = None
    seconds: float = 0.0
    """Training time so far, over all runs; a checkpoint carries it."""
    unchecked: frozenset[str] = frozenset()
    """Tensors of the model that were not finite at the beginning, so may stay so."""
    record: Callable[[dict[str, Any]], None] = field(default=lambda row: None)
    """Takes rows of metrics; only rank 0 calls it."""

    @property
    def job(self) -> Job:
        """The run's."""
        return self.spec.job

    @property
    def options(self) -> RunOptions:
        """The run's, as they were given."""
        return self.spec.options


class Summary(NamedTuple):
    """How a run ended on this rank."""

    steps: int
    epochs: float
    samples: int
    """Samples behind us, over all ranks and, after a resume, earlier runs."""
    trained: int
    """Samples of this run alone."""
    seconds: float
    """Training time until all ranks were done, with that of earlier runs."""
    trained_s: float
    """Training time of this run alone."""
    score: Score | None
    """Of the final model; in a virtual world rank 0 has it."""
    train_loss: float | None
    reached: bool | None
    parameters: dict[str, Tensor]
    """The final model: the ranks' mean where they differ."""
    buffers: dict[str, Tensor]
    """The ranks' mean of running statistics, where they differ."""


async def train(port: Port, course: Course) -> Summary:
    """Train until the options' end: steps, epochs, or what `until` asks for."""
    _check(course)
    clock = _Clock(await port.now(), course.seconds, course.observer)
    samples_before, seconds_before = _position(course)[1], course.seconds
    meter = Meter(samples_before, seconds_before)
    scored_step = course.replica.step
    while not _over(course):
        if not await _rest_of_epoch(port, course, meter, clock):
            continue  # resumed at the end of an epoch: nothing was left of it
        over, step = _over(course), course.replica.step
        if step - scored_step < _STEPS_BETWEEN_SCORES and not over:
            continue  # many workers make short epochs
        scored_step = step
        if course.data.test is not None and not over:
            await course.observer.score(port, course, await _moment(port, course, clock))
        if not _saves_at(course, step):
            await _save(port, course, clock)
    await port.barrier()  # waiting for the slowest is training time
    moment = await _moment(port, course, clock)
    course.seconds = moment.seconds
    await course.replica.settle()
    parameters, buffers = await course.replica.consensus(port), await course.replica.consensus_buffers(port)
    guard = course.replica.guard
    if guard is not None:
        guard.catch_up(port.rank)
        check_final(parameters, course.unchecked, moment.step)
    score, reached = await course.observer.finish(port, course, moment, parameters | buffers)
    if guard is not None and score is not None:
        check_score(score.loss, moment.step)
    return Summary(
        steps=moment.step,
        epochs=moment.epoch,
        samples=moment.samples,
        trained=moment.samples - samples_before,
        seconds=moment.seconds,
        trained_s=moment.seconds - seconds_before,
        score=score,
        train_loss=meter.loss,
        reached=reached,
        parameters=parameters,
        buffers=buffers,
    )


async def _rest_of_epoch(port: Port, course: Course, meter: Meter, clock: _Clock) -> bool:
    """Train to the end of the epoch or of the run. Returns whether there was a step to take."""
    a_row_every = max(1, len(course.shard) // ROWS_PER_EPOCH)
    batches = iter(course.shard)
    first_step = course.replica.step
    while not course.observer.over(course.replica.step):
        step = course.replica.step
        seed_step(course.spec.seed, port.rank, step, "data")
        batch = next_batch(course.job, batches)
        if batch is None:
            break
        course.observer.begins(port.rank, step)
        await port.mark(step)
        seed_step(course.spec.seed, port.rank, step, "model")
        course.replica.share = course.shard.share
        meter.add(await course.take_step(port, batch, course.shard.batch_samples))
        if course.scheduler is not None:
            course.scheduler.step()
        if (step + 1) % a_row_every == 0:
            await _train_row(port, course, meter, clock)
        if _saves_at(course, step + 1):
            await _save(port, course, clock)
        if _finished(course):
            break
    return course.replica.step > first_step


def _saves_at(course: Course, step: int) -> bool:
    every = course.options.checkpoint_every
    return every is not None and step % every == 0


async def _save(port: Port, course: Course, clock: _Clock) -> None:
    if course.options.out is not None:
        if course.replica.guard is not None:
            course.replica.guard.catch_up(port.rank)
        moment = await _moment(port, course, clock)
        course.seconds = moment.seconds
        await course.observer.save(port, course, moment)


async def _moment(port: Port, course: Course, clock: _Clock) -> Moment:
    epoch, samples = _position(course)
    return Moment(course.replica.step, epoch, samples, clock.training_s(await port.now()))


async def _train_row(port: Port, course: Course, meter: Meter, clock: _Clock) -> None:
    if port.rank:
        return
    moment = await _moment(port, course, clock)
    loss, rate = meter.since_last(moment.samples, moment.seconds)
    course.record(moment.row("train") | {"loss": loss, "samples_per_s": rate})


def _position(course: Course) -> tuple[float, int]:
    """Epochs and samples behind us, over all ranks and earlier runs."""
    shard, length = course.shard, check_length(course.shard)
    return shard.epoch + shard.consumed / length, shard.epoch * length + shard.consumed


def _over(course: Course) -> bool:
    return _finished(course) or course.observer.over(course.replica.step)


def _finished(course: Course) -> bool:
    steps, epochs = course.options.steps, course.spec.epochs
    if steps is not None and course.replica.step >= steps:
        return True
    return epochs is not None and _position(course)[0] >= epochs - 1e-9


def _check(course: Course) -> None:
    """Refuse before the first step what could only fail later."""
    check_length(course.shard)
    check_goals(course.job, course.options, has_test=course.data.test is not None)


def check_goals(job: Job, options: RunOptions, *, has_test: bool) -> None:
    """Raises ValueError where `until` asks for what the job does not measure."""
    if options.until and not has_test:
        raise ValueError("until needs a test set, and this job has none; use epochs or steps")
    if "accuracy" in options.until and job.correct is None:
        raise ValueError("until accuracy=… needs a job with an accuracy, and this one has none; use until loss=…")


def check_length(shard: Shard) -> int:
    """Samples of an epoch. Raises ValueError for a stream, which has no end to train to."""
    if shard.num_samples is None:
        raise ValueError("a job needs data with a length; for a stream write the loop yourself with pt.shard")
    return shard.num_samples


def meets(score: Score | None, options: RunOptions) -> bool | None:
    """Whether a score is what `until` asks for; None where it asks for nothing."""
    if not options.until:
        return None
    assert score is not None
    measured = {"loss": -score.loss, "accuracy": score.accuracy or 0.0}
    return all(measured[name] >= (-target if name == "loss" else target) for name, target in options.until.items())


def seed_step(seed: int, rank: int, step: int, purpose: str) -> None:
    """Seed torch for one step of one rank, so a resumed run and a virtual rank draw what a real one draws."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}/{purpose}".encode(), digest_size=7).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little"))


class _Clock:
    """Training time: the world's time without that of standing still, on top of earlier runs' time."""

    def __init__(self, begin_s: float, earlier_s: float, observer: Observer) -> None:
        self._zero_s, self._observer = begin_s - earlier_s, observer

    def training_s(self, now_s: float) -> float:
        """Seconds of training until `now_s`."""
        return now_s - self._zero_s - self._observer.off_s


class Meter:
    """The mean loss and the rate since the last row."""

    def __init__(self, samples: int, seconds: float) -> None:
        self._last_loss: float | None = None
        self._sum: Tensor | None = None
        self._count = 0
        self._samples = samples
        self._seconds = seconds

    def add(self, loss: Tensor) -> None:
        """One more step's loss."""
        detached = loss.detach()
        self._sum = detached.clone() if self._sum is None else self._sum.add_(detached)
        self._count += 1

    @property
    def loss(self) -> float | None:
        """The mean loss since the last row, or of the last row; None before the first step."""
        return self._last_loss if self._sum is None else float(self._sum) / self._count

    def since_last(self, samples: int, seconds: float) -> tuple[float | None, float]:
        """Mean loss and samples a second up to here; what comes next counts from here."""
        loss = self.loss
        rate = (samples - self._samples) / max(seconds - self._seconds, 1e-9)
        self._sum, self._count, self._samples, self._seconds = None, 0, samples, seconds
        self._last_loss = loss
        return loss, rate
