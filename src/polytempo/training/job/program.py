"""The training program: one coroutine that runs a job in either world.

for every batch of every epoch:  take_step ── row of metrics now and then ── checkpoint
at the end of an epoch:          the observer scores and saves   (not after fewer than four steps)
with `eval_every`:               it scores then, and saves at the ends of epochs

An `Observer` scores and saves. The program says when; the engine chooses an observer that changes nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from torch.optim.lr_scheduler import LRScheduler

from polytempo.core import Port
from polytempo.core.system.notice import Preempted
from polytempo.report.status.records import row_of
from polytempo.spec.callbacks.callback import Control
from polytempo.spec.job_calls import next_batch
from polytempo.spec.objective import batch_weight
from polytempo.spec.rates.plateau import Plateau
from polytempo.spec.rates.schedules import has_ended
from polytempo.training.job.context import Moment, Observer, TrainingContext, TrainingSummary
from polytempo.training.job.evaluate import check_goals, check_plateau
from polytempo.training.job.growth import Pieces, follow, grow, next_pieces
from polytempo.training.job.meter import Meter
from polytempo.training.job.sliced_step import BatchSlice, next_slices, weighed_slices
from polytempo.training.job.step_parts import parts_of
from polytempo.training.model.agree import share_of
from polytempo.training.model.epoch_lengths import row_interval
from polytempo.training.model.ports import Ports, ports_of
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.stream_meeting import StreamMeeting
from polytempo.training.observe.user_log import UserLog, unwritten_at, written_to
from polytempo.training.step.guard import check_final, check_score

STEPS_BETWEEN_SCORES = 4
"""An epoch that ends earlier after a score is not scored."""


async def train(port: Port, context: TrainingContext) -> TrainingSummary:
    """Train until the options' end: steps, epochs, or `until`.

    `port` is the world's. By its mesh ranks with the same parameters exchange, and ranks with parts of one model take
    the same batches and draw the same random numbers.
    """
    record = context.record if port.rank == 0 and context.options.out is not None else None
    unwritten = unwritten_at(port) if context.options.out is not None else ""
    log = UserLog(record, context.options.out, lambda: context.replica.step + 1, unwritten=unwritten)
    try:
        return await _trained(port, context, log)
    finally:
        log.end()


async def _trained(port: Port, context: TrainingContext, log: UserLog) -> TrainingSummary:
    has_test, more = context.data.test is not None, context.data.more
    check_goals(context.job, context.options, has_test=has_test, more=more)
    check_plateau(context.spec, context.scheduler, has_test=has_test, more=more)
    ports = ports_of(port)
    clock = _Clock(await port.now(), context.seconds, context.observer)
    meter = Meter(_position(context)[1], context.seconds)
    scored_step = context.replica.step
    context.exchanges.begin(scored_step)
    if context.shard.num_samples is not None:
        await _move_rate(port, context, clock)  # a score that ended with the last group of an elastic run
    while not _over(context):
        begun = _position(context)[0]
        has_trained = await _rest_of_epoch(ports, context, meter, clock, log)
        if context.shard.num_samples is None and _position(context)[0] > begun:  # a stream's end is known only now
            if _scores_at(context, begun):
                await _score(port, context, clock)
            await _move_rate(port, context, clock)
        if not has_trained:
            continue  # resumed at the end of an epoch: nothing was left of it
        over, step = _over(context), context.replica.step
        is_due = over or step - scored_step >= STEPS_BETWEEN_SCORES  # many workers make short epochs
        if is_due:
            scored_step = step
            if context.host is not None if over else context.options.eval_every is None:
                await _score(port, context, clock)  # a checkpoint has the callbacks' states after its evaluation
        if (is_due or _saves_at(context, step)) and context.saved_step != step:
            await _save(port, context, clock)
    if context.stopped and context.saved_step != context.replica.step:
        await _save(port, context, clock)
    if context.average is not None:
        await _score(port, context, clock)
    for loss in await context.holding.finish():
        if port.rank == 0:
            meter.add(loss)
    await port.barrier()  # waiting for the slowest is training time
    if context.replica.noise is not None:
        context.replica.noise.finish()
    if context.replica.pace is not None:
        context.replica.pace.finish()
    moment = await _moment(port, context, clock)
    context.seconds = moment.seconds
    parameters, buffers = await context.holding.whole(port)
    guard = context.replica.guard
    if guard is not None:
        guard.catch_up(port.world_rank)
        check_final(parameters, context.unchecked, moment.step)
    score, reached = await context.observer.finish(port, context, moment, parameters | buffers)
    if guard is not None and score is not None:
        check_score(score.loss, moment.step)
    return TrainingSummary(
        steps=moment.step,
        epochs=moment.epoch,
        samples=moment.samples,
        seconds=moment.seconds,
        score=score,
        train_loss=meter.loss,
        reached=reached,
        parameters=parameters,
        buffers=buffers,
    )


async def _rest_of_epoch(ports: Ports, context: TrainingContext, meter: Meter, clock: _Clock, log: UserLog) -> bool:
    """Train to the end of the epoch or of the run. Returns whether there was a step to take."""
    port, data = ports.whole, ports.data
    grow(context.spec, context.shard)
    a_row_every = row_interval(context.shard, context.options.steps)
    batches = iter(context.shard)
    meeting = StreamMeeting(data, context.shard, context.job, context.spec.seed)
    first_step = context.replica.step
    while not context.observer.over(context.replica.step):
        step = context.replica.step
        if context.leaves(step):
            await _leave(port, context, clock)
        if await _stops(port, context, clock):
            break
        if context.replica.pace is not None:
            context.replica.pace.asks_batch()
        if context.balance is not None:
            context.balance.begins()
        before = _position(context)[0]
        await meeting.hear(step)
        batch = _next(context, batches, data.rank, step)
        if batch is None:
            break
        await meeting.ask(step + 1)
        if context.replica.pace is not None:
            context.replica.pace.has_batch()
        context.observer.begins(port.rank, step)
        context.begins(step)
        await port.mark(step)
        seed_step(context.spec.seed, data.rank, step, "model")
        weighed = await _weighed(data, context, batch)
        loss = await written_to(log, context.take_step(data, *weighed))
        if port.rank == 0:  # for rows and the summary
            meter.add(loss)
            context.note_clients(log, step)
        if context.average is not None:
            with context.replica.in_float32():
                context.average.update()
        if context.scheduler is not None and not isinstance(context.scheduler, Plateau):
            _next_rate(context, context.scheduler)
        if context.balance is not None:
            await context.balance.after_step(ports)
        if context.growth is not None and await context.growth.grows(data, context.shard):
            del batches  # one at a time
            batches = iter(context.shard)
        if (step + 1) % a_row_every == 0:
            await _train_row(port, context, meter, clock)
        if port.rank == 0 and context.host is not None and context.host.sees_steps:
            context.host.stepped(*await _moment(port, context, clock))
        if _scores_at(context, before):
            await _score(port, context, clock)
        if context.shard.num_samples is not None or context.options.eval_every is not None:
            await _move_rate(port, context, clock)
        if _saves_at(context, step + 1) and not (_ends_epoch(context) or _finished(context)):
            await _save(port, context, clock)
        if _finished(context):
            break
    await meeting.end()
    return context.replica.step > first_step


async def _weighed(data: Port, context: TrainingContext, batch: Any) -> tuple[Any, int, float | None]:
    """The batch, the number of its samples, and its share of the global batch."""
    noise, shard = context.replica.noise, context.shard
    pieces = batch if isinstance(batch, Pieces) else None
    if noise is not None:
        noise.samples = shard.local_samples if pieces is None else pieces.samples
    if shard.slices is not None:
        return await _weighed_slices(data, context, shard.slices, batch), shard.batch_samples, 1.0
    if pieces is None:
        return batch, shard.batch_samples, shard.share
    if pieces.weight is None:
        return batch, max(1, pieces.samples), pieces.share
    strategy = context.spec.strategy
    always = strategy.schedule is not None or strategy.one_copy == "together"  # or perhaps in a later step
    share = await share_of(data, pieces.weight) if always or context.replica.exchanges_next() else None
    return batch, max(1, pieces.samples), share


async def _weighed_slices(data: Port, context: TrainingContext, number: int, batch: Any) -> list[BatchSlice]:
    """The slices, with their shares by the job's weight, or of clients by their samples."""
    rounds, job = context.spec.strategy.rounds, context.job
    if rounds is not None:
        counted = context.shard.dataset.counted
        return await weighed_slices(data, number, batch, counted, lambda samples: rounds.shares(samples, rounds.local))
    return await weighed_slices(data, number, batch, None if job.weight is None else partial(batch_weight, job))


def _next_rate(context: TrainingContext, scheduler: LRScheduler) -> None:
    """Step the schedule. A pipeline's step may have had no update yet; torch's warning about that is ignored."""
    if context.options.batch_growth:
        follow(scheduler, _position(context)[0], context.first_steps)
        return
    if has_ended(scheduler):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)
        scheduler.step()


def _next(context: TrainingContext, batches: Iterator[Any], rank: int, step: int) -> Any:
    """The batch of a step, or its slices; None at the end of the epoch."""
    if context.shard.slices is not None:
        return next_slices(context.job, context.shard, batches, context.spec.seed, step)
    if len(context.shard.own) > 1 or context.options.accumulate > 1 or context.job.weight is not None:
        return next_pieces(context.job, context.shard, batches, context.spec.seed, step)
    if not context.shard.in_memory:
        seed_step(context.spec.seed, rank, step, "data")
    return next_batch(context.job, batches)


def _saves_at(context: TrainingContext, step: int) -> bool:
    every = context.options.checkpoint_every
    return every is not None and step % every == 0


def _ends_epoch(context: TrainingContext) -> bool:
    """True if the epoch's score comes next."""
    return context.shard.used == context.shard.num_samples


def _scores_at(context: TrainingContext, before: float) -> bool:
    """True for a score by `eval_every`. The run's end has its own, which all ranks make together."""
    every = context.options.eval_every
    return (
        every is not None and not _over(context) and every.is_due(context.replica.step, before, _position(context)[0])
    )


async def _score(port: Port, context: TrainingContext, clock: _Clock) -> None:
    """Score, unless that has been done or there is no test set."""
    if context.data.test is not None and context.scored_step != context.replica.step:
        context.scored_step = context.replica.step
        await context.observer.score(port, context, await _moment(port, context, clock))


async def _move_rate(port: Port, context: TrainingContext, clock: _Clock) -> None:
    """Show a plateau the score of this step, once, where one is due; a checkpoint then has its state after it."""
    plateau, step, epoch = context.scheduler, context.replica.step, _position(context)[0]
    if not isinstance(plateau, Plateau):
        return
    if plateau.is_due(step, epoch, context.options.eval_every, STEPS_BETWEEN_SCORES):
        await _score(port, context, clock)
        plateau.see((await context.observer.agreed_score(port, context, step)).row(), step, epoch)


async def _stops(port: Port, context: TrainingContext, clock: _Clock) -> bool:
    """Follow the requests of callbacks; True if the run ends before the next step."""
    asked = context.asks(context.replica.step).joined(context.wish)
    context.wish = Control()
    if asked.evaluate:
        await _score(port, context, clock)
    if asked.save and context.saved_step != context.replica.step:
        await _save(port, context, clock)
    context.stopped = context.stopped or asked.joined(context.wish).stop
    return context.stopped


async def _save(port: Port, context: TrainingContext, clock: _Clock) -> None:
    if context.options.out is not None:
        if context.replica.guard is not None:
            context.replica.guard.catch_up(port.world_rank)
        moment = await _moment(port, context, clock)
        context.seconds, context.saved_step = moment.seconds, moment.step
        await context.observer.save(port, context, moment)


async def _leave(port: Port, context: TrainingContext, clock: _Clock) -> NoReturn:
    """Save, unless that has been done, and end the run here."""
    if context.saved_step != context.replica.step:
        await _save(port, context, clock)
    await context.observer.leave(port)
    error = Preempted(context.replica.step, str(context.options.out))
    if port.rank == 0:
        print(f"polytempo: {error}", file=sys.stderr)
    raise error


async def _moment(port: Port, context: TrainingContext, clock: _Clock) -> Moment:
    epoch, samples = _position(context)
    return Moment(context.replica.step, epoch, samples, clock.training_s(await port.now()))


async def _train_row(port: Port, context: TrainingContext, meter: Meter, clock: _Clock) -> None:
    held = await context.holding.row()
    if port.rank:
        return
    moment, observer = await _moment(port, context, clock), context.observer
    loss, rate = meter.since_last(moment.samples, moment.seconds)
    noise = {} if context.replica.noise is None else context.replica.noise.row
    grown = {} if context.scheduler is None else {"lr": float(context.scheduler.get_last_lr()[0])}
    grown |= {} if context.growth is None else {"global_batch_size": context.growth.global_batch_size}
    grown |= {} if context.balance is None else context.balance.row
    now = context.exchanged()
    parts = parts_of(context.replica, now, context.resumed_at, observer.off_s, observer.off_bytes) | context.replica.row
    context.record(moment.row("train") | {"loss": loss, "samples_per_s": rate} | held | noise | grown | parts)
    exchanged = context.exchanges.since_last(moment.step, now)
    if exchanged is not None:
        context.record(row_of(exchanged))


def _position(context: TrainingContext) -> tuple[float, int]:
    """Epochs and samples behind us, over all ranks and earlier runs."""
    return context.shard.epochs, context.spec.strategy.groups * context.shard.samples


def _over(context: TrainingContext) -> bool:
    return _finished(context) or context.stopped or context.wish.stop or context.observer.over(context.replica.step)


def _finished(context: TrainingContext) -> bool:
    steps, epochs = context.options.steps, context.spec.epochs
    if steps is not None and context.replica.step >= steps:
        return True
    if epochs is None or context.shard.epoch + 1 < epochs:  # the present epoch is not the last one
        return False
    return _position(context)[0] >= epochs - 1e-9


class _Clock:
    """Training time: the world's time without scores and checkpoints, plus earlier runs' time."""

    def __init__(self, begin_s: float, earlier_s: float, observer: Observer) -> None:
        self._zero_s, self._observer = begin_s - earlier_s, observer

    def training_s(self, now_s: float) -> float:
        """Seconds of training until `now_s`."""
        return now_s - self._zero_s - self._observer.off_s
