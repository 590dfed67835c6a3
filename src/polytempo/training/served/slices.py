"""A worker's share of a step where workers help each other (FlexRR): its batch in slices, by any worker.

    own slices ──▶ summed ────────────────────────────────▶ the push that closes the share, left to the strategy
    slices of others, contested ones ──▶ each pushed directly, a part (`server.rules.coverage`)

All workers can read all data, so a helper takes the helpee's samples by the ticket of their batch. Each slice reseeds
torch from (seed, ticket, slice), so it is the same work on every worker. A slice is collated alone, so batches may be
of any form; padding, which looks at a batch as a whole, sees a slice instead. Batch norms are refused
(`training.requirements`), and a loss must be a mean over samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.core import Bundle, Port
from polytempo.core.op import Parcel
from polytempo.data.batches import Samples
from polytempo.flexrr.protocol import CoveredWork, Do, Peer, covered_step
from polytempo.flexrr.reassignment import Reassignment
from polytempo.flexrr.slices import Slice, closing_of, cut, ticket_of
from polytempo.server.message import Ticket
from polytempo.server.step_rates import common
from polytempo.server.worker.client import Client
from polytempo.server.worker.work_client import WorkClient
from polytempo.training.model.randomness import seed_step
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.served.served_context import ServedContext

RatesAt = Callable[[Ticket], tuple[float, ...]]
"""The learning rates of each parameter group at a ticket's place in the run."""


class Done(NamedTuple):
    """One worker's work in one step, for itself and for others."""

    loss: Tensor | None
    """The mean over its samples; None if it had none to do."""
    samples: int
    busy_s: float


class _Share:
    def __init__(self, ticket: Ticket, samples: int, clock: int) -> None:
        self.ticket, self.samples, self.clock = ticket, samples, clock
        self.own: list[Slice] = []
        self.own_alone = 0
        self.sums: list[Tensor] = []
        self.unused: tuple[str, ...] | None = None
        """The parameters without a gradient in all own slices."""
        self.losses: Tensor | None = None
        self.computed = self.counted = 0
        """Samples with a gradient of this worker, and the part of them that the shards did not have already."""
        self.busy_s = 0.0


class Reassigned:
    """A worker's state between steps: its peers, their batches, and how often it helped and was helped."""

    def __init__(self, port: Port, context: ServedContext, client: Client, work_client: WorkClient) -> None:
        service = context.strategy.server
        assert service is not None
        assert isinstance(service.reassigns, Reassignment)
        self._port, self._context, self._client, self._work_client = port, context, client, work_client
        self._constants = service.reassigns
        self._parameters = trainable(context.model, context.optimizer)
        self._peer = Peer(client.worker, port.members, self._constants, client.incarnation)
        self._work = CoveredWork(self._accumulate, self._keep, self._push_alone, self._taken)
        self._lives: dict[int, int] = {}
        self._batches: dict[int, Samples] = {}
        self._clock = -1
        self._share = _Share(Ticket(-1, 0, 0), 0, 0)
        self._rates_at: RatesAt = lambda ticket: ()
        self.given = self.helped = 0
        """Slices of its own that others did, and slices of others that this worker did."""

    async def gradients(self, ticket: Ticket, rates_at: RatesAt, step: int) -> Done:
        """Do the batch of `ticket` together with others. This worker's sum is on the parameters' `.grad` then, and its
        numbers are with the client, for the push that closes the share of its step number `step`.

        Each slice is pushed with the rates of its own ticket, on whichever worker.
        """
        samples = self._context.batches.pick(ticket.batch).local_samples
        self._rates_at = rates_at
        share = self._share = _Share(ticket, samples, step)
        clock = self._global_clock(ticket)
        if clock > self._clock:
            self._clock = clock
            await covered_step(self._port, self._peer, clock, samples, self._work, ticket)
        else:  # its peers know that this clock is covered, so none would help
            await self._by_itself(clock, ticket, samples)
        self._close(share)
        loss = None if share.losses is None else share.losses / share.computed
        return Done(loss, share.counted, share.busy_s)

    def _global_clock(self, ticket: Ticket) -> int:
        """The clock for comparisons between peers: the version if all take steps together, else the
        step of the batch."""
        return ticket.number // self._context.batches.size if self._is_apart else self._client.versions[0]

    @property
    def _is_apart(self) -> bool:
        """True if each batch is an update of its own (bounded staleness)."""
        return self._constants.slack > 0

    async def _by_itself(self, clock: int, ticket: Ticket, samples: int) -> None:
        for piece in cut(self._client.worker, self._client.incarnation, clock, samples, self._constants.slices):
            await (self._push_alone if ticket.again else self._accumulate)(Do(piece, ticket, ticket.again))

    # ------------------------------------------------------------------ slices

    async def _accumulate(self, do: Do) -> None:
        share = self._share
        gradients, unused = await self._compute(do)
        share.unused = common(share.unused, unused)
        if share.sums:
            torch._foreach_add_(share.sums, gradients, alpha=do.slice.samples)
        else:
            share.sums = gradients
            torch._foreach_mul_(share.sums, do.slice.samples)
        share.own.append(do.slice)
        share.counted += do.slice.samples

    async def _keep(self, pieces: list[Slice]) -> None:
        """The push that closes the share has the sum."""

    async def _push_alone(self, do: Do) -> None:
        """A part. It has its answer when it ends, so a caller may then close the share."""
        assert do.ticket is not None
        share, client = self._share, self._client
        gradients, unused = await self._compute(do)
        flat = Bundle(dict(zip(self._parameters, gradients, strict=True))).flat
        if self._is_apart:
            flat.mul_(do.slice.samples / self._context.batches.pick(do.ticket.batch).local_samples)
        number = ticket_of(do.slice, do.ticket.number, self._constants.slices)
        dropped = client.dropped
        client.begin((number,), self._rates_at(do.ticket), do.slice.samples, done=())
        client.note_unused(unused)
        await self._port.push(flat, share.clock)
        share.counted += do.slice.samples if client.dropped == dropped else 0
        if do.slice.helpee == client.worker:
            share.own_alone += 1
        else:
            self.helped += 1

    async def _compute(self, do: Do) -> tuple[list[Tensor], list[str]]:
        """The slice's mean gradient, in memory of its own, and the parameters without one."""
        assert do.ticket is not None
        share, port, parameters = self._share, self._port, self._parameters
        samples = self._samples(do.ticket)
        before_s = await port.now()
        seed_step(self._context.seed, 0, do.ticket.number, f"slice {do.slice.number}")
        part = samples.collated(do.slice.begin, do.slice.end)
        loss = await self._context.compute_gradients(port, part, do.slice.samples)
        if (guard := self._context.guard) is not None:
            step = do.ticket.number // self._context.batches.size
            guard.loss(loss, step, self._client.worker)
            guard.gradients(step, self._client.worker)
        loss = loss * do.slice.samples
        share.busy_s += await port.now() - before_s
        share.losses = loss if share.losses is None else share.losses + loss
        share.computed += do.slice.samples
        unused = [name for name, p in parameters.items() if p.grad is None]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
        for parameter in parameters.values():
            parameter.grad = None
        return gradients, unused

    def _samples(self, ticket: Ticket) -> Samples:
        """The samples of the whole batch; the most recently used are kept."""
        if ticket.number not in self._batches:
            while len(self._batches) > self._constants.helpers:
                del self._batches[next(iter(self._batches))]
            seed_step(self._context.seed, 0, ticket.number, "data")
            self._batches[ticket.number] = self._context.batches.samples(ticket.epoch, ticket.batch)
        return self._batches[ticket.number]

    def _close(self, share: _Share) -> None:
        """All other slices are with the shards: hand the rest to the next push."""
        own, slices = sum(piece.samples for piece in share.own), self._constants.slices
        if own:
            torch._foreach_div_(share.sums, share.samples if self._is_apart else own)
            for (name, parameter), gradient in zip(self._parameters.items(), share.sums, strict=True):
                parameter.grad = None if name in (share.unused or ()) else gradient
        number = share.ticket.number
        numbers = [ticket_of(piece, number, slices) for piece in share.own]
        self._client.begin((*numbers, closing_of(number, slices)), self._rates_at(share.ticket), own, done=(number,))
        self.given += min(share.samples, slices) - len(share.own) - share.own_alone

    # ------------------------------------------------------------------ peers

    async def _taken(self, wait_s: float) -> tuple[int, Parcel] | None:
        """The next letter of a peer. The coordinator's answer may come meanwhile, and is put aside."""
        self._regroup()
        letters = self._work_client.letters
        while not letters:
            taken = await self._port.take(wait_s)
            if taken is None:
                return None
            self._work_client.sort(*taken)
        return letters.popleft()

    def _regroup(self) -> None:
        """Tell the peer who takes part, as far as the coordinator has said it."""
        lives = dict(self._client.members)
        if not lives or lives == self._lives:
            return
        for worker, life in self._lives.items():
            if lives.get(worker, life) != life and worker in self._peer.helpers:
                self._peer.lost(worker)  # `regroup` finds lost peers
        self._lives = lives
        self._peer.regroup([*(lives.keys() | {self._client.worker})])
