"""The program of a worker that has a parameter server. It meets no other worker: any of them may die at any time.

    Ask ──▶ Deal ──▶ batch ──▶ gradient ──▶ strategy.gradients ──▶ local step ──▶ strategy.parameters ──▶ next ticket
     ▲ posted before the batch before is computed, so the answer is there when it is needed

Pushes and pulls happen inside the strategy's transforms; `server.worker.server_calls` performs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.core import Port, Program
from polytempo.core.calls.refusals import refuse
from polytempo.report.status.records import row_of
from polytempo.report.status.row_exchanges import RankTotals, RowExchanges
from polytempo.server.message import Ticket
from polytempo.server.worker.client import Client
from polytempo.server.worker.server_calls import through
from polytempo.server.worker.stage_messages import StageMessages, through_stages
from polytempo.server.worker.stage_work import WorkSource, work_of
from polytempo.server.worker.work_client import WorkClient
from polytempo.spec.job_calls import BATCH, ON_BATCH, called
from polytempo.spec.loss_divisor import in_sum
from polytempo.spec.objective import batch_weight, loss_of, part_weights
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.growth import Pieces
from polytempo.training.job.meter import Meter
from polytempo.training.job.sliced_step import BatchSlice
from polytempo.training.model.epoch_lengths import ROWS_PER_EPOCH
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.run_device import device_of
from polytempo.training.observe.user_log import UserLog, written_to
from polytempo.training.pipeline.served_stage import ServedStage
from polytempo.training.served.served_context import ComputeGradients, ServedContext
from polytempo.training.served.served_worker import ServedWorker
from polytempo.training.served.slices import Reassigned
from polytempo.training.step.guard import check_final
from polytempo.training.step.step_cost import StepCost


class Attendance(NamedTuple):
    """One worker's part of a run."""

    worker: int
    steps: int
    samples: int
    begin_s: float
    end_s: float
    idle_s: float
    """The part of this time that it waited for the server or for work."""
    helped: int = 0
    """Slices of others' batches that it did."""
    given: int = 0
    """Slices of its own batches that others did."""


async def work(
    port: Port,
    context: ServedContext,
    client: Client,
    leaves: Callable[[], bool] = lambda: False,
    stages: Port | None = None,
) -> Attendance:
    """Train on the coordinator's tickets until the run is over. The model holds the final weights then.

    Once `leaves()` is true it ends after the present batch, with all its pushes; its other tickets are dealt to others
    when its process has ended.

    `port`: the group of all workers; run it by `server.worker.server_calls`. Each step reseeds torch from (seed,
    ticket), so a ticket that is dealt again is computed alike.

    In a pipeline, `port` is the group of ranks with the same stage, and `stages` the replica's stages, which take their
    tickets together (`server.worker.stage_work`).
    """
    work_client = work_of(client, stages, 0 if context.stage is None else context.stage.late)
    worker = _TicketWorker(port, context, client, work_client)
    try:
        return await _worked(port, worker, client, work_client, leaves)
    finally:
        worker.log.end()


async def _worked(
    port: Port, worker: _TicketWorker, client: Client, work_client: WorkSource, leaves: Callable[[], bool]
) -> Attendance:
    await work_client.ask(port)
    while True:
        deal = await worker.served.waited(work_client.deal(port))
        if deal is None:
            return worker.attendance
        match deal.order:
            case "train":
                await worker.begin()
                for number, ticket in enumerate(deal.tickets, start=1):
                    if number == len(deal.tickets):
                        await work_client.ask(port, worker.taken_rows())
                    await worker.train(ticket)
                    if leaves():
                        break
            case "wait":
                await worker.push_all()
                client.rest()
            case "finish":
                await worker.push_all()
                client.rest()
                await worker.served.fetch(last=True)
                worker.look_at_final()
                await worker.collect()
                await work_client.ask(port, worker.taken_rows())  # which says goodbye
                return worker.attendance
        if leaves():
            await worker.push_all()
            return worker.attendance
        if not work_client.is_open:
            await work_client.ask(port, worker.taken_rows())


def performed_work(
    port: Port,
    group: Port,
    context: ServedContext,
    client: Client,
    stages: Port | None,
    leaves: Callable[[], bool] = lambda: False,
) -> Program[Attendance]:
    """`work` in the world of `port`, which performs its pushes and pulls, and messages between stages.

    In a pipeline, the process does not leave alone: its replica could not go on.
    """
    guard = context.guard
    check = partial(guard.catch_up, client.worker) if guard is not None else lambda: None
    if stages is None:
        program: Program[Attendance] = work(group, context, client, leaves)
    else:
        messages = StageMessages(port, stages.members, client.incarnation, client.timing)
        program = through_stages(messages, work(group, context, client, stages=stages))
    return through(client, port, program, device_of(context.model), check)


def gradients_of(model: nn.Module, spec: RunSpec, cost: StepCost) -> ComputeGradients:
    """Forward and backward for real; a virtual world charges `cost`."""

    def backward(batch: Any, weight: float) -> Tensor:
        loss = loss_of(spec.job, model, batch)
        (loss if weight == 1 else weight * loss).backward()
        return loss.detach()

    def compute(batch: Any) -> Tensor:
        return batch.computed(backward) if isinstance(batch, Pieces) else backward(batch, 1.0)

    async def compute_gradients(port: Port, batch: Any, samples: int) -> Tensor:
        flops, uses = cost.flops_per_sample * samples, cost.gradients(spec.passes(samples))
        return await port.compute(lambda: compute(batch), flops, uses=uses)

    return compute_gradients


def gradients_without_values(spec: RunSpec, cost: StepCost) -> ComputeGradients:
    """Nothing is computed, and no `.grad` is set; a virtual world charges `cost`."""

    loss = _loss_without_value()

    async def compute_gradients(port: Port, batch: Any, samples: int) -> Tensor:
        await port.compute(lambda: None, cost.flops_per_sample * samples, uses=cost.gradients(spec.passes(samples)))
        return loss

    return compute_gradients


@lru_cache(maxsize=1)
def _loss_without_value() -> Tensor:
    return torch.empty((), device="meta")


class _TicketWorker:
    def __init__(self, port: Port, context: ServedContext, client: Client, work_client: WorkSource) -> None:
        self._port, self._context, self._client = port, context, client
        server = context.strategy.server
        self._reassigned = None
        if server is not None and server.reassigns is not None:
            assert isinstance(work_client, WorkClient), "stages do not help each other"
            self._reassigned = Reassigned(port, context, client, work_client)
        self.served = ServedWorker(
            *(port, client, context.model, context.optimizer, context.strategy),
            masters=context.masters,
            decay=context.decay,
            guard=context.guard,
            stage=context.stage,
            trained=context.trained,
        )
        self._steps = 0
        self._samples = 0
        self._idle_at_end_s = 0.0
        self._end_s = 0.0
        self._meter = Meter(0, 0.0)
        self._rows: list[bytes] = []
        self._step_under_way = 1
        self._position: dict[str, float] = {"step": 0, "epoch": 0.0, "samples": 0}
        batches = context.batches
        self._a_row_every = max(1, len(batches) // batches.size // ROWS_PER_EPOCH)
        self._record = context.record or (lambda row: self._rows.append(json.dumps(row).encode()))
        self._exchanges = RowExchanges(client.worker)
        record = None if context.out is None else self._record
        self.log = UserLog(record, context.out, lambda: self._step_under_way, client.worker)
        """Takes the values that the job's functions log."""

    @property
    def attendance(self) -> Attendance:
        """This worker's part of the run so far."""
        begin_s = self._end_s if self.served.begun_s is None else self.served.begun_s
        fared = Attendance(self._client.worker, self._steps, self._samples, begin_s, self._end_s, self._idle_at_end_s)
        helps = self._reassigned
        return fared if helps is None else fared._replace(helped=helps.helped, given=helps.given)

    def _finished(self) -> int:
        return int(self._position["step"])

    async def begin(self) -> None:
        """There is work: see `ServedWorker.begin`."""
        await self.served.begin()
        self._end_s = self._end_s or self.served.begun_s or 0.0

    async def collect(self) -> None:
        """Bring the stages' final weights together, in a pipeline."""
        if self._context.stage is not None:
            await self._context.stage.collected()

    def look_at_final(self) -> None:
        """Refuse final weights that are not finite."""
        if self._context.guard is not None:
            self._context.guard.catch_up(self._client.worker)
            check_final(self.served.replica.values, (), max(1, int(self._position["step"])))

    async def train(self, ticket: Ticket) -> None:
        """One step on the ticket's batch. A batch that was lost with another worker is pushed separately."""
        if ticket.again:
            await self.push_all()
        self._client.alone = ticket.again
        await self._step(ticket)
        if ticket.again:
            await self.push_all()

    async def _step(self, ticket: Ticket) -> None:
        port = self._port
        await port.mark(self._steps)
        self._step_under_way = self.served.step_of(ticket) + 1
        if not self._steps:
            self._exchanges.begin(self.served.step_of(ticket))
        if self._context.stage is None:
            batch = self._alone(ticket) if self._reassigned is None else self._helped(self._reassigned, ticket)
            samples = await written_to(self.log, batch)
            await self.served.step()
        else:
            samples = await written_to(self.log, self._staged(self._context.stage, ticket))
        if self._context.guard is not None and self.served.replica.is_apart:
            self._context.guard.parameters(self.served.step_of(ticket), self._client.worker)
        self._steps += 1
        self._samples += samples
        self._end_s, self._idle_at_end_s = await port.now(), self.served.idle_s
        self._remember(ticket)

    async def _alone(self, ticket: Ticket) -> int:
        """The gradient of the ticket's batch; how many samples it is of."""
        context, batch = self._context, self._batch(ticket)
        samples = context.batches.pick(ticket.batch).num_samples
        self._client.begin((ticket.number,), self._rates_at(ticket), self._weight_of(batch, samples))
        loss = await context.compute_gradients(self._port, batch, samples)
        if context.guard is not None:
            context.guard.loss(loss, self.served.step_of(ticket), self._client.worker)
            context.guard.gradients(self.served.step_of(ticket), self._client.worker)
        if context.noise is not None:
            context.noise.look(self._steps, batch, samples)
        context.clip()
        self._meter.add(loss if context.reads else None)
        return samples

    def _batch(self, ticket: Ticket) -> Any:
        context = self._context
        if not context.reads:
            return None
        seed_step(context.seed, 0, ticket.number, "data")
        batch = called(context.job, BATCH, self._read, ticket, facts=lambda: ON_BATCH)
        seed_step(context.seed, 0, ticket.number, "model")
        return batch

    def _read(self, ticket: Ticket) -> Any:
        """The ticket's batch; in micro-batches where gradients are accumulated."""
        context, place = self._context, (ticket.epoch, ticket.batch)
        passes = context.passes(context.batches.pick(ticket.batch).num_samples)
        if context.stage is not None or (len(passes) == 1 and context.job.weight is None):
            return context.batches.at(*place)
        samples, ends, total = context.batches.samples(*place), list(accumulate(passes, initial=0)), sum(passes)
        found = [samples.collated(*bounds) for bounds in pairwise(ends)]
        pieces = [BatchSlice(i, *one, one[1] / total) for i, one in enumerate(zip(found, passes, strict=True))]
        if context.job.weight is None:
            return Pieces(pieces, part_weights(context.job, found))
        each = [batch_weight(context.job, batch) for batch in found]
        return Pieces(pieces, in_sum(each), sum(each))

    def _weight_of(self, batch: Any, samples: int) -> int:
        """The batch's weight among the workers' gradients, where a rule of the shards counts by it."""
        weight = batch.weight if isinstance(batch, Pieces) else None
        if weight is None:
            return samples
        if not weight.is_integer():
            refuse({"server", "weight", "no whole number"}, job=self._context.job.name, weight=weight)
        return int(weight)

    async def _staged(self, stage: ServedStage, ticket: Ticket) -> int:
        """The ticket's batch through this stage, with the exchange of the gradient that is then there, which may be of
        an older batch or none; how many samples the ticket is of."""
        batch = self._batch(ticket)
        samples = self._context.batches.pick(ticket.batch).num_samples
        self._rates_at(ticket)
        loss = await stage.step(batch, ticket, samples)
        if self._context.guard is not None and loss is not None:
            self._context.guard.loss(loss, self.served.step_of(ticket), self._client.worker)
        self._meter.add(loss if self._context.reads else None)
        return samples

    async def _helped(self, reassigned: Reassigned, ticket: Ticket) -> int:
        """The same with the help of others, and with help for them; how many samples this worker did."""
        before_s = await self._port.now()
        done = await reassigned.gradients(ticket, self._rates_at, self._steps + 1)
        self.served.idle_s += await self._port.now() - before_s - done.busy_s
        if done.loss is not None:
            self._meter.add(done.loss if self._context.reads else None)
        return done.samples

    async def push_all(self) -> None:
        """Push all that is under way or held back; other workers of the host have none to add now."""
        self._client.alone = True
        for loss in await self.served.drain():
            self._meter.add(loss if self._context.reads else None)
        await self.served.push_held()

    def _rates_at(self, ticket: Ticket) -> tuple[float, ...]:
        """The learning rates for the server at the ticket's place in the run; the optimizer has them from now on."""
        schedule = self._context.schedule
        if schedule is not None:
            schedule.go_to(schedule.step_of(ticket.epoch, ticket.batch))
        return self.served.rates

    # ------------------------------------------------------------------ rows of metrics

    def taken_rows(self) -> list[bytes]:
        """The rows of metrics that have not been taken yet."""
        rows, self._rows = self._rows, []
        return rows

    def _remember(self, ticket: Ticket) -> None:
        """Note the run's position, as far as this worker knows, and now and then write a row about it."""
        batches = self._context.batches
        stop = batches.pick(ticket.batch).stop
        self._position = {
            "step": self.served.step_of(ticket) + 1,
            "epoch": ticket.epoch + stop / batches.num_samples,
            "samples": ticket.epoch * batches.num_samples + stop,
        }
        if self._steps % self._a_row_every:
            return
        lived_s = self._end_s - (self.served.begun_s or 0.0)
        loss, rate = self._meter.since_last(self._samples, lived_s)
        # The clock of the world, not of this life: rows of a worker that was started again go on where it was.
        facts = {"kind": "train", **self._position, "seconds": self._end_s, "loss": loss, "samples_per_s": rate}
        told = self._client.staleness
        staleness = sum(told) / len(told) if told else None
        told.clear()
        measured = self._context.noise
        noise = measured.row if measured is not None and measured.sends else {}
        if self._context.schedule is not None:
            facts["lr"] = float(self._context.optimizer.param_groups[0]["lr"])
        waits = {"idle_share": self.served.idle_s / max(lived_s, 1e-9), "staleness": staleness}
        self._rows.append(json.dumps(facts | waits | noise | {"worker": self._client.worker}).encode())
        totals = RankTotals(self._context.exchanged(self._client.worker), self.served.idle_s)
        exchanged = self._exchanges.since_last(self._finished(), totals)
        if exchanged is not None:
            self._record(row_of(exchanged))
