"""The training program: one coroutine that runs a job in either world.

for every batch of every epoch:  take_step ── row of metrics now and then ── checkpoint
at the end of an epoch:          evaluate  ── reached what was asked for?    (not after fewer than four steps)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Port, Program
from polytempo.data.shard import Shard
from polytempo.torch.evaluate import Score, evaluate
from polytempo.torch.job import Data, Job
from polytempo.torch.options import RunOptions
from polytempo.torch.replica import Replica

TakeStep = Callable[[Port, Any], Program[Tensor]]
"""One optimizer step on one batch; answers the batch's mean loss."""

ROWS_PER_EPOCH = 10
"""How many rows of metrics an epoch leaves."""
_STEPS_BETWEEN_SCORES = 4


@dataclass
class Course:
    """Everything that one rank needs for a run."""

    job: Job
    options: RunOptions
    replica: Replica
    shard: Shard
    data: Data
    take_step: TakeStep
    flops_per_sample: float = 0.0
    scheduler: LRScheduler | None = None
    seconds: float = 0.0
    """Training time so far, over all runs; a checkpoint carries it."""
    record: Callable[[dict[str, Any]], None] = field(default=lambda row: None)
    """Takes rows of metrics; only rank 0 calls it."""
    save: Callable[[Port], Program[None]] | None = None
    """Writes a checkpoint; all ranks call it at the same step."""


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
    train_loss: float | None
    reached: bool | None
    parameters: dict[str, Tensor]
    """The final model: the ranks' mean where they differ."""
    buffers: dict[str, Tensor]
    """The ranks' mean of running statistics, where they differ."""


async def train(port: Port, course: Course) -> Summary:
    """Train until the options' end: steps, epochs, or what `until` asks for."""
    _check(course)
    clock = _Clock(await port.now(), course.seconds)
    samples_before, seconds_before = _position(course)[1], course.seconds
    meter = Meter(samples_before, seconds_before)
    score, reached, scored_step = None, None, course.replica.step
    scored = False
    while not _finished(course) and not reached:
        if not await _rest_of_epoch(port, course, meter, clock):
            continue  # resumed at the end of an epoch: nothing was left of it
        if course.replica.step - scored_step < _STEPS_BETWEEN_SCORES and not _finished(course):
            continue  # many workers make short epochs
        scored_step = course.replica.step
        score = await clock.outside(port, _evaluate(port, course, clock))
        reached, scored = _reached(score, course.options), True
        if not _saves_at(course, scored_step):
            await _save(port, course, clock)
    if not scored:  # a resumed run that was finished already
        score = await clock.outside(port, _evaluate(port, course, clock))
        reached = _reached(score, course.options)
    course.seconds = clock.training_s(await port.now())
    await course.replica.settle()
    epochs, samples = _position(course)
    return Summary(
        steps=course.replica.step,
        epochs=epochs,
        samples=samples,
        trained=samples - samples_before,
        seconds=course.seconds,
        trained_s=course.seconds - seconds_before,
        score=score,
        train_loss=meter.loss,
        reached=reached,
        parameters=await course.replica.consensus(port),
        buffers=await course.replica.consensus_buffers(port),
    )


async def _rest_of_epoch(port: Port, course: Course, meter: Meter, clock: _Clock) -> bool:
    """Train to the end of the epoch or of the run. Returns whether there was a step to take."""
    a_row_every = max(1, len(course.shard) // ROWS_PER_EPOCH)
    batches = iter(course.shard)
    first_step = course.replica.step
    while True:
        step = course.replica.step
        seed_step(course.options.seed, port.rank, step, "data")
        batch = next(batches, None)
        if batch is None:
            return course.replica.step > first_step
        await port.mark(step)
        seed_step(course.options.seed, port.rank, step, "model")
        course.replica.share = course.shard.share
        meter.add(await course.take_step(port, batch))
        if course.scheduler is not None:
            course.scheduler.step()
        if (step + 1) % a_row_every == 0:
            await _train_row(port, course, meter, clock)
        if _saves_at(course, step + 1):
            await _save(port, course, clock)
        if _finished(course):
            return True


def _saves_at(course: Course, step: int) -> bool:
    every = course.options.checkpoint_every
    return every is not None and step % every == 0


async def _save(port: Port, course: Course, clock: _Clock) -> None:
    if course.save is not None:
        course.seconds = clock.training_s(await port.now())
        await clock.outside(port, course.save(port))


async def _train_row(port: Port, course: Course, meter: Meter, clock: _Clock) -> None:
    if port.rank:
        return
    seconds = clock.training_s(await port.now())
    epoch, samples = _position(course)
    loss, rate = meter.since_last(samples, seconds)
    course.record(
        {
            "kind": "train",
            "step": course.replica.step,
            "epoch": epoch,
            "samples": samples,
            "seconds": seconds,
            "loss": loss,
            "samples_per_s": rate,
        }
    )


async def _evaluate(port: Port, course: Course, clock: _Clock) -> Score | None:
    seconds = clock.training_s(await port.now())
    if course.data.test is None:
        return None
    agreed = None
    if not course.replica.strategy.in_step and port.size > 1:
        agreed = await course.replica.consensus(port) | await course.replica.consensus_buffers(port)
    score = await evaluate(
        port,
        course.replica.model,
        agreed,
        course.data.test,
        course.job.loss,
        course.job.correct,
        course.flops_per_sample / 3,
    )
    if port.rank == 0:
        epoch, samples = _position(course)
        row = {"kind": "test", "step": course.replica.step, "epoch": epoch, "samples": samples, "seconds": seconds}
        course.record(row | {"loss": score.loss, "accuracy": score.accuracy})
    return score


def _position(course: Course) -> tuple[float, int]:
    """Epochs and samples behind us, over all ranks and earlier runs."""
    shard = course.shard
    assert shard.num_samples is not None
    return shard.epoch + shard.consumed / shard.num_samples, shard.epoch * shard.num_samples + shard.consumed


def _finished(course: Course) -> bool:
    options = course.options
    if options.steps is not None and course.replica.step >= options.steps:
        return True
    if options.epochs is None and options.steps is not None:
        return False
    default = course.job.epochs * (10 if options.until else 1)
    return _position(course)[0] >= (options.epochs or default) - 1e-9


def _check(course: Course) -> None:
    """Refuse before the first step what could only fail later."""
    until = course.options.until
    if course.shard.num_samples is None:
        raise ValueError("a job needs data with a length; for a stream write the loop yourself with pt.shard")
    if until and course.data.test is None:
        raise ValueError("until needs a test set, and this job has none; use epochs or steps")
    if "accuracy" in until and course.job.correct is None:
        raise ValueError("until accuracy=… needs a job with an accuracy, and this one has none; use until loss=…")


def _reached(score: Score | None, options: RunOptions) -> bool | None:
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
    """Training time: the world's time without what is not training, on top of earlier runs' time."""

    def __init__(self, begin_s: float, earlier_s: float) -> None:
        self._zero_s = begin_s - earlier_s

    def training_s(self, now_s: float) -> float:
        """Seconds of training until `now_s`."""
        return now_s - self._zero_s

    async def outside(self, port: Port, what: Program[Any]) -> Any:
        """Do `what` off the clock. It begins when all ranks are here: waiting for the slowest is training time."""
        await port.barrier()
        before_s = await port.now()
        answer = await what
        self._zero_s += await port.now() - before_s
        return answer


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
