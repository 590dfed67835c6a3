"""`Shard`: one part of the parameters, as a deterministic state machine.

    entry ──▶ table: new? ──▶ checks ──▶ rule.receive ──▶ actions ──▶ weights, optimizer, sum
                 │               │                           │
                 └ repeated      └ refused                   └ Answer ──▶ replies

The same entries in the same order give the same bits and the same replies, in every copy and in every repetition:
there is no clock, no randomness, and no sum in any other order than the entries'.

Nothing is copied on its way. A gradient is lent by its worker until its push is answered; the weights of an answered
pull are lent to the worker until its next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from polytempo.core.rule import Action, Add, Answer, Arrival, Mix, Service, Situation, Update
from polytempo.server.layout import Parameter, Spans
from polytempo.server.message import (
    Entry,
    Inquire,
    Lend,
    Lent,
    Members,
    Noted,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reply,
    Request,
    Reshape,
    Statistics,
)
from polytempo.server.shard.answers import Look, Table
from polytempo.server.shard.buffers import Empty, plain_empty
from polytempo.server.shard.decisions import Decisions, Verdict
from polytempo.server.shard.holder import HeldElements, Holder, held_now
from polytempo.server.shard.optimizer import Moments, can_be_native
from polytempo.server.shard.queues import Queues
from polytempo.server.shard.running_statistics import RunningStatistics
from polytempo.server.shard.state import State, Waiting, decode, encode, renumbered, waiting_for
from polytempo.server.shard.tables import held
from polytempo.server.shard.transfer import Likeness, covers, lent, likeness_of, moved


class Shard:
    """Shard `number` of the parameters: what `spans` name of their flat vector, which begins as `weights`.

    `empty` gives memory for weights, moments and what is lent (an arena's, so that workers on the host read it in
    place). `native`: the optimizer by the kernel or by torch ops (`server.shard.optimizer`); by default the kernel
    where there is one. All shards of a run, their copies and its replays must agree on it. `running`: the running
    statistics of the model's norms, float64, of which each shard keeps all. Memory beside moments and sum: a buffer
    of weights for each worker that holds an older version, and two more; elastic averaging lends each worker one more.
    """

    def __init__(
        self,
        number: int,
        parameters: tuple[Parameter, ...],
        spans: Spans,
        weights: Tensor,
        service: Service,
        *,
        empty: Empty = plain_empty,
        native: bool | None = None,
        running: Tensor | None = None,
    ) -> None:
        if service.optimizer is None:
            raise ValueError("the service names no optimizer; put the job's own into it: replace(service, optimizer=…)")
        self.number, self.service = number, service
        self.native = can_be_native(weights.dtype) if native is None else native
        self.index = 0
        """Entries applied."""
        self.repeated = 0
        """Requests that came again, as this copy saw it; no part of the state."""
        all_parameters, all_spans = parameters, spans
        self._tables, parameters, spans, weights = held(parameters, spans, weights, service)
        self._holder = Holder(parameters, service, empty, native=self.native, tables=self._tables)
        self._spans, self._empty = spans, empty
        self._all_spans, self._all_parameters = all_spans, all_parameters
        self._weights, self._admission = self._holder.hold(spans, weights)
        self._rule = service.rule.init()
        self._members: dict[int, int] = {}
        self._workers: tuple[int, ...] = ()
        self._resting: frozenset[int] = frozenset()
        self._table = Table(number)
        self._queues = Queues(service.rule.name)
        self.decided = Decisions(service.numbers_per_batch)
        self._running = RunningStatistics(running)

    @property
    def version(self) -> int:
        """How often the weights have changed."""
        return self._weights.version

    @property
    def weights(self) -> Tensor:
        """The present weights, to be read only, and only until the next entry."""
        return self._weights.present

    def gradient_of(self, push: Push) -> Tensor:
        """What `push` carries, decoded."""
        return self._admission.gradient_of(push)

    # ------------------------------------------------------------------ entries

    def look(self, request: Request) -> Look:
        """Whether `request` is new, and the answer if it is not. Only what is new belongs into the log."""
        look = self._table.look(request)
        if look.kind == "new" and request.worker in self._resting:
            return Look("ahead")  # it rests, so the change that says otherwise is still on its way
        if look.kind == "repeated":
            self.repeated += 1
            if isinstance(request, Inquire):
                return Look("repeated", (self._statistics(request),))
            if isinstance(request, Lend) and covers(self._spans, request.spans):
                return Look("repeated", (self._lent(request),))
        return look

    def apply(self, entry: Entry) -> list[Reply]:
        """Take an entry of the log; the replies, to this request and to any that waited for it."""
        self.index += 1
        self.decided.batches_before = self.decided.batches
        look = self._table.look(entry)
        if look.kind != "new":
            return list(look.replies)
        self._table.take(entry)
        if entry.worker in self._weights.leases:  # it asks again, so it has read what it was lent
            self._table.settle(entry.worker, self._weights.settle(entry.worker))
        replies: list[Reply] = []
        if isinstance(entry, Push):
            self._push(entry, replies)
        elif isinstance(entry, Pull):
            self._queues.add(entry.worker, Waiting("pull", entry.incarnation, entry.sequence, entry.basis))
            self._hear(Arrival("pull", entry.worker, entry.clock, entry.basis), replies)
        elif isinstance(entry, Inquire):
            replies.append(self._statistics(entry))
        elif isinstance(entry, Lend):
            replies.append(self._lent(entry))
        else:
            if isinstance(entry, Members):
                self._meet(dict(entry.members), frozenset(entry.resting), replies)
            elif isinstance(entry, Reshape):
                self._reshape(entry)
            what = "reshaped" if isinstance(entry, Reshape) else ""
            noted = Noted(self.number, entry.worker, entry.incarnation, entry.sequence, what)
            self._table.answer(noted)
            replies.append(noted)
        self._weights.keep_sum()
        if self._tables is not None:
            self._tables.keep_sum()
        return replies

    def _push(self, push: Push, replies: list[Reply]) -> None:
        verdict: Verdict = "refused"
        push, reason = self._admission.admit(push, self.version, self._queues.waiting)
        reason = reason or self._running.fault(push, allow_nan=self.service.allow_nan)
        if not reason:
            verdict, reason = self.decided.had(push)
        waiting = waiting_for(push)
        if not reason and self._holder.needs_basis:
            waiting.read = self._weights.read_by(push.worker, push.basis)
            if waiting.read < 0:
                reason = f"worker {push.worker}: version {push.basis} of the weights is gone; pull before you push"
        if reason:
            self._refuse(push, verdict, reason, replies)
            if verdict == "dropped":
                self._hear(Arrival("had", push.worker, push.clock, push.basis, push.samples, push.tickets), replies)
            return
        self._queues.add(push.worker, waiting)
        self._hear(Arrival("push", push.worker, push.clock, push.basis, push.samples, push.tickets), replies)

    def _refuse(self, push: Push, verdict: Verdict, reason: str, replies: list[Reply]) -> None:
        self.decided.turn_away(verdict)
        reply = Pushed(
            *(self.number, push.worker, push.incarnation, push.sequence),
            *(self.version, self.version - push.basis, verdict, reason),
        )
        self._table.answer(reply)
        replies.append(reply)

    def _meet(self, members: dict[int, int], resting: frozenset[int], replies: list[Reply]) -> None:
        """First those go who are no members any more, or rest, then the others come, each for itself."""
        before = self._members
        for worker in [worker for worker in sorted(before) if members.get(worker) != before[worker]]:
            self._members = {w: life for w, life in self._members.items() if w != worker}
            self._leave(worker)
            self._hear_left(worker, replies)
        for worker in self._workers:
            if worker in resting:
                self._hear_left(worker, replies)
        for worker in [worker for worker in sorted(members) if worker not in self._members]:
            self._members = dict(sorted({**self._members, worker: members[worker]}.items()))
            self._table.admit(worker, members[worker])
        for worker in [worker for worker in self._members if worker not in resting and worker not in self._workers]:
            self._workers = tuple(sorted((*self._workers, worker)))
            self._hear(Arrival("joined", worker), replies)
        self._resting = resting

    def _hear_left(self, worker: int, replies: list[Reply]) -> None:
        """The rule counts `worker` no more, if it did."""
        if worker in self._workers:
            self._workers = tuple(other for other in self._workers if other != worker)
            self._hear(Arrival("left", worker), replies)

    def _leave(self, worker: int) -> None:
        for number in self._queues.leave(worker):
            self._weights.buffers.release(number)
        self._weights.leave(worker)
        self._table.forget(worker)

    def _statistics(self, request: Inquire) -> Statistics:
        return self.decided.statistics(
            self.number, request, version=self.version, index=self.index, repeated=self.repeated
        )

    def _lent(self, request: Lend) -> Lent:
        like = Likeness(self._rule, self._members, self._workers, *self.decided.tuples)
        return lent(request, self.number, self._weights, self._spans, like, self._running.present)

    def _reshape(self, entry: Reshape) -> None:
        """Hold other elements. Nobody has anything under way, and what was lent has been read."""
        for worker in list(self._weights.leases):
            self._table.settle(worker, self._weights.settle(worker))
        if not self._spans:  # a new shard knows what those know whose elements it takes over; nobody has asked it yet
            like = likeness_of(entry.pieces[0])
            self._rule, self._members, self._workers = like.rule, like.members, like.workers
            self._resting = frozenset(self._members) - frozenset(self._workers)
            self.decided = Decisions(self.service.numbers_per_batch, like.tickets, like.let_go)
            self._running = RunningStatistics(entry.pieces[0].running)
            for worker, incarnation in self._members.items():
                self._table.admit(worker, incarnation)
        values, rest = moved(self._weights, self._spans, entry.spans, entry.pieces, self._holder.multiplied)
        self._spans = self._all_spans = entry.spans
        self._weights, self._admission = self._holder.hold(entry.spans, values)
        rest.put_(self._weights)

    # ------------------------------------------------------------------ the rule and its actions

    def _hear(self, arrival: Arrival, replies: list[Reply]) -> None:
        situation = Situation(self.version, self._workers)
        self._rule, actions = self.service.rule.receive(self._rule, arrival, situation)
        for action in actions:
            self._perform(action, replies)

    def _perform(self, action: Action, replies: list[Reply]) -> None:
        if isinstance(action, Add):
            self._add(action)
        elif isinstance(action, Update):
            self._update(action)
        elif isinstance(action, Answer):
            self._answer(action.worker, replies)
        elif isinstance(action, Mix):
            self._mix(action)
        else:
            self._decided(self._queues.oldest(action)[0], "dropped", action.reason)

    def _decided(self, waiting: Waiting, verdict: Literal["applied", "dropped"], reason: str = "") -> None:
        waiting.gradient, waiting.verdict, waiting.reason = None, verdict, reason
        waiting.rows, waiting.running = (), None
        waiting.staleness = self.version - waiting.basis
        if verdict == "applied":
            self.decided.use(waiting.tickets, waiting.staleness)
        else:
            self.decided.drop(waiting.tickets)
        if waiting.read >= 0:
            self._weights.buffers.release(waiting.read)
            waiting.read = -1

    def _add(self, action: Add) -> None:
        waiting, gradient = self._queues.oldest(action)
        basis = self._weights.buffers.tensors[waiting.read] if waiting.read >= 0 else None
        multiples = self._weights.weigh(action, waiting.lrs)
        if self._tables is not None:
            gradient = self._tables.add(waiting.rows, multiples, gradient, self.weights)
        else:
            for modifier in self.service.modifiers:
                gradient = modifier.apply(gradient, self.weights, basis if modifier.needs_basis else None)
        self._weights.add(gradient, multiples, action.part_of)
        self._running.add(waiting.running)
        self._decided(waiting, "applied")

    def _update(self, action: Update) -> None:
        rates, divisors = self._weights.update(action.divisor, action.including)
        self._running.update(len(self._workers))
        if self._tables is not None:
            self._tables.update(divisors, rates, self._weights.steps, self.version)

    def _mix(self, action: Mix) -> None:
        if self._tables is not None:
            raise RuntimeError(f"{self.service.rule.name} averages parameters, and rows of tables are gradients")
        waiting, theirs = self._queues.oldest(action)
        self._running.mix(waiting.running, action.alpha)
        self._decided(waiting, "applied")
        waiting.difference = self._weights.mix(theirs, action.alpha)

    def _answer(self, worker: int, replies: list[Reply]) -> None:
        for waiting in self._queues.answerable(worker):
            answer = self._pulled(worker, waiting) if waiting.kind == "pull" else self._pushed(worker, waiting)
            self._table.answer(answer)
            replies.append(answer)

    def _pushed(self, worker: int, waiting: Waiting) -> Pushed:
        difference = None
        if waiting.difference >= 0:
            difference = self._weights.lend(worker, waiting.sequence, waiting.difference)
        return Pushed(
            *(self.number, worker, waiting.incarnation, waiting.sequence, self.version),
            *(waiting.staleness, waiting.verdict, waiting.reason, difference),
        )

    def _pulled(self, worker: int, waiting: Waiting) -> Pulled:
        values = self._weights.lend_present(worker, waiting.sequence)
        rows = () if self._tables is None else self._tables.changed_after(waiting.basis)
        return Pulled(
            self.number,
            worker,
            waiting.incarnation,
            waiting.sequence,
            self.version,
            values,
            rows,
            self._running.present,
        )

    def hold(self) -> HeldElements:
        """All that this shard holds now, to stay as it is until it is released.

        No copy and no pass over memory, but for tables, whose rows change in place.
        """
        return held_now(self._weights, self._tables, self._all_parameters, self._all_spans, self._running.present)

    # ------------------------------------------------------------------ the whole state

    def dump(self) -> tuple[bytes, tuple[Tensor, ...]]:
        """The whole state, gradients that wait and what is lent included, in memory of its own."""
        weights = self._weights
        numbers, leases, reads, waiting = renumbered(
            weights.current, weights.leases, weights.reads, self._queues.waiting
        )
        state = State(
            buffers=[weights.buffers.tensors[number] for number in numbers],
            first=weights.moments.first,
            second=weights.moments.second,
            total=weights.total if weights.summed else None,
            aside=dict(weights.aside),
            version=self.version,
            steps=weights.steps,
            index=self.index,
            rule=self._rule,
            members=self._members,
            workers=self._workers,
            known=self._table.known,
            waiting=waiting,
            leases=leases,
            reads=reads,
            rates=weights.rates,
            tickets=self.decided.applied.tuples,
            let_go=self.decided.let_go.tuples,
            staleness=dict(self.decided.staleness),
            dropped=self.decided.dropped,
            refused=self.decided.refused,
            tables=[] if self._tables is None else self._tables.dump(),
            running=self._running.present,
            running_total=self._running.total,
            running_count=self._running.count,
        )
        return encode(state)

    def load(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        """Become the shard that `dump` was called on. Memory that this one has is used again."""
        weights = self._weights
        spare = weights.spare()

        def own(tensor: Tensor) -> Tensor:
            memory = spare.pop(0) if spare else self._empty(weights.numel, weights.dtype)
            return memory.copy_(tensor)

        state = decode(data, tensors, weights.numel, weights.dtype, own)
        if self._tables is not None:
            self._tables.load(state.tables)
        weights.restore(state.buffers, Moments(state.first, state.second), state.total, state.aside, spare)
        weights.version, weights.steps, weights.rates = state.version, state.steps, state.rates
        weights.leases, weights.reads = state.leases, state.reads
        for number in state.held():
            weights.buffers.hold(number)
        self.index, self._rule, self._queues = state.index, state.rule, Queues(self.service.rule.name, state.waiting)
        self._members, self._workers = state.members, state.workers
        self._resting = frozenset(state.members) - frozenset(state.workers)
        self._table = Table(self.number, state.known)
        self.decided = Decisions(self.service.numbers_per_batch, state.tickets, state.let_go)
        self._running = RunningStatistics(state.running, state.running_total, state.running_count)
        self.decided.recall(state.staleness, state.dropped, state.refused)
