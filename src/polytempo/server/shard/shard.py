"""`Shard`: one part of the parameters, as a deterministic state machine.

    entry ──▶ answers: new? ──▶ checks ──▶ rule.receive ──▶ actions ──▶ weights, optimizer, sum
                 │                 │                           │
                 └ repeated        └ refused                   └ Answer ──▶ replies

The same entries in the same order give the same bits and the same replies, in every copy and in every repetition:
there is no clock, no randomness, and no sum in any other order than the entries'.

Nothing is copied on its way. A gradient is lent by its worker until its push is answered; the weights of an answered
pull are lent to the worker until its next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from polytempo.core.rule import Action, Add, Answer, Arrival, Mix, RegionAction, Service, Situation, Update
from polytempo.server.layout import Empty, Parameter, Spans, plain_empty
from polytempo.server.message import (
    COORDINATOR,
    Elapsed,
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
from polytempo.server.shard.deduplication import (
    AnswerTable,
    Decisions,
    RequestStatus,
    Verdict,
    requests_in,
    split,
    status_of_all,
)
from polytempo.server.shard.replies import Queues, Waiting, pulled, pushed, refused, waiting_for, waiting_of
from polytempo.server.shard.roster import Roster
from polytempo.server.snapshots.state import State, decode, encode, state_of
from polytempo.server.snapshots.transfer import Likeness, covers, lend, likeness_of, take_over
from polytempo.server.tensors.holder import Admission, HeldElements, Holder, held_elements
from polytempo.server.tensors.moving_average import MovingAverage
from polytempo.server.tensors.optimizer import can_be_native
from polytempo.server.tensors.regions import Regions
from polytempo.server.tensors.running_statistics import RunningStatistics
from polytempo.server.tensors.tables import separate_tables
from polytempo.server.tensors.weights import Weights


class Shard:
    """Shard `number` of the parameters: the ranges `spans` of their flat vector, with the first values `weights`.

    `empty` gives memory for weights, moments and lent tensors (an arena's, so that workers on the host read it in
    place). `native`: the optimizer by the kernel or by torch ops (`server.tensors.optimizer`); by default the kernel
    where there is one. All shards of a run, their copies and its replays must agree on it. `running`: the running
    statistics of the model's norms, float64; each shard keeps all of them. Memory beside moments and sum: a buffer of
    weights for each worker that holds an older version, and two more; elastic averaging lends each worker one more.
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
        """Requests that came again to this copy; no part of the state."""
        all_parameters, all_spans = parameters, spans
        self._tables, parameters, spans, weights = separate_tables(parameters, spans, weights, service)
        self._holder = Holder(parameters, service, empty, native=self.native, tables=self._tables)
        self._spans, self._empty = spans, empty
        self._all_spans, self._all_parameters = all_spans, all_parameters
        self._weights, self._admission = self._holder.outer.hold(spans, weights)
        self._regions = Regions(service.rule.region_size, lambda: self._holder.hold(self._spans, self.weights))
        self._rule = service.rule.init()
        self._roster = Roster()
        self._answers = AnswerTable(number)
        self._queues = Queues(service.rule.name)
        self.decisions = Decisions(service.numbers_per_batch)
        self._running = RunningStatistics(running)
        self._average: MovingAverage | None = None
        if service.average is not None and not weights.is_meta:
            self._average = MovingAverage(service.average, weights)

    @property
    def version(self) -> int:
        """The number of updates of the weights."""
        return self._weights.version

    def version_of(self, worker: int) -> int:
        """The number of updates of the weights that `worker` reads."""
        return self._of(worker)[0].version

    @property
    def weights(self) -> Tensor:
        """The present weights, to be read only, and only until the next entry."""
        return self._weights.present

    @property
    def window_s(self) -> float | None:
        """The length of the window that the rule waits for now, unless other entries end it; None without a window."""
        window_s = self.service.rule.window_s
        return None if window_s is None else window_s(self._rule, Situation(self.version, self._roster.counted))

    def gradient_of(self, push: Push) -> Tensor:
        """The decoded gradient of `push`."""
        return self._admission.gradient_of(push)

    # ------------------------------------------------------------------ entries

    def status_of(self, request: Request) -> RequestStatus:
        """The status of `request`, and the answer to an old one. The head asks: a new request becomes a log's entry."""
        if isinstance(request, Push) and request.parts:
            status = status_of_all(self.number, request, self._answers, self.decisions)
        else:
            status = self._answers.status_of(request)
        if status.kind == "new" and request.worker in self._roster.resting:
            return RequestStatus("ahead")  # its worker rests, and the change that ends the rest is still on its way
        if status.kind == "repeated":
            self.repeated += 1
            if isinstance(request, Inquire):
                return RequestStatus("repeated", (self._statistics(request),))
            if isinstance(request, Lend) and covers(self._spans, request.spans):
                return RequestStatus("repeated", (self._lent(request),))
        return status

    def apply(self, entry: Entry) -> list[Reply]:
        """Take an entry of the log, a request that `status_of` found to be new at the head of the chain.

        Returns the replies to it, and to each request that waited for it.
        """
        self.index += 1
        self.decisions.batches_before = self.decisions.batches
        if isinstance(entry, Push) and entry.parts and not self._can_add(entry):
            return [split(self.number, request) for request in requests_in(entry)]
        for request in requests_in(entry):
            self._answers.take(request)
            for weights in self._lenders(request.worker):
                if request.worker in weights.leases:  # it asks again, so it has read the tensors lent to it
                    self._answers.settle(request.worker, weights.settle(request.worker))
        replies: list[Reply] = []
        if isinstance(entry, Push) and entry.parts:
            self._push_of_host(entry, replies)
        elif isinstance(entry, Push):
            self._push(entry, replies)
        elif isinstance(entry, Pull):
            asked = entry.incarnation, entry.sequence, entry.basis
            self._queues.add(entry.worker, Waiting("pull", *asked, resulting=entry.resulting))
            self._consult(Arrival("pull", entry.worker, entry.clock, entry.basis, last=entry.last), replies)
        elif isinstance(entry, Inquire):
            replies.append(self._statistics(entry))
        elif isinstance(entry, Lend):
            replies.append(self._lent(entry))
        elif isinstance(entry, Elapsed):
            if entry.version == self.version:  # otherwise another entry has ended the window
                self._consult(Arrival("elapsed", COORDINATOR), replies)
        else:
            if isinstance(entry, Members):
                self._change_roster(entry, replies)
            elif isinstance(entry, Reshape):
                self._reshape(entry)
            what = "reshaped" if isinstance(entry, Reshape) else ""
            noted = Noted(self.number, entry.worker, entry.incarnation, entry.sequence, what)
            self._answers.answer(noted)
            replies.append(noted)
        self._weights.keep_sum()
        self._regions.keep_sums()
        if self._tables is not None:
            self._tables.keep_sum()
        return replies

    def _of(self, worker: int) -> tuple[Weights, Admission]:
        """The weights that `worker` reads, and the checks of its pushes: its region's, where there are regions."""
        if not self._regions.size or worker == COORDINATOR:
            return self._weights, self._admission
        return self._regions.of(worker)

    def _lenders(self, worker: int) -> tuple[Weights, ...]:
        """The weights that `worker` may hold: the shard's own, and its region's."""
        return tuple(dict.fromkeys((self._weights, self._of(worker)[0])))

    def _can_add(self, push: Push) -> bool:
        return self._admission.can_add_sum(push, self.version, self.service, self._running)

    def _push_of_host(self, push: Push, replies: list[Reply]) -> None:
        """Add a sum that was checked. It waits as its sender's request; the parts are decided here."""
        self._queues.add(push.worker, waiting_for(push))
        for part in push.parts:
            waiting = waiting_of(part, self.version)
            self._queues.add(part.worker, waiting)
            self.decisions.use(part.tickets, waiting.staleness)
            self._running.add(part.running)
        others = tuple(part.worker for part in push.parts)
        facts = push.clock, push.basis, push.samples, push.tickets
        self._consult(Arrival("push", push.worker, *facts, others), replies)

    def _push(self, push: Push, replies: list[Reply]) -> None:
        verdict: Verdict = "refused"
        weights, admission = self._of(push.worker)
        push, reason = admission.admit(push, weights.version, self._queues.waiting)
        reason = reason or self._running.fault(push, allow_nan=self.service.allow_nan)
        if not reason:
            verdict, reason = self.decisions.earlier_use(push)
        waiting = waiting_for(push)
        if not reason and self._holder.needs_basis:
            waiting.read = weights.read_by(push.worker, push.basis)
            if waiting.read < 0:
                reason = f"worker {push.worker}: version {push.basis} of the weights is gone; pull before you push"
        if reason:
            self._refuse(push, verdict, reason, replies)
            if verdict == "dropped":
                self._consult(Arrival("had", push.worker, push.clock, push.basis, push.samples, push.tickets), replies)
            return
        self._queues.add(push.worker, waiting)
        self._consult(Arrival("push", push.worker, push.clock, push.basis, push.samples, push.tickets), replies)

    def _refuse(self, push: Push, verdict: Verdict, reason: str, replies: list[Reply]) -> None:
        self.decisions.count_unseen(verdict)
        reply = refused(self.number, push, self.version_of(push.worker), verdict, reason)
        self._answers.answer(reply)
        replies.append(reply)

    def _change_roster(self, entry: Members, replies: list[Reply]) -> None:
        for change, worker in self._roster.change(entry.members, entry.resting):
            match change:
                case "removed":
                    self._leave(worker)
                case "added":
                    self._answers.admit(worker, self._roster.members[worker])
                    self._regions.join(worker)
                case "counted":
                    self._consult(Arrival("joined", worker), replies)
                case "uncounted":
                    self._consult(Arrival("left", worker), replies)
        if self._regions.size:
            self._consult(Arrival("settled", COORDINATOR), replies)

    def _leave(self, worker: int) -> None:
        for number in self._queues.leave(worker):
            self._weights.buffers.release(number)
        for weights in self._lenders(worker):
            weights.leave(worker)
        self._answers.forget(worker)

    def _statistics(self, request: Inquire) -> Statistics:
        return self.decisions.statistics(
            self.number, request, version=self.version, index=self.index, repeated=self.repeated
        )

    def _lent(self, request: Lend) -> Lent:
        like = Likeness(self._rule, self._roster.members, self._roster.counted, *self.decisions.tuples)
        return lend(request, self.number, self._weights, self._spans, like, self._running.present)

    def _reshape(self, entry: Reshape) -> None:
        """Hold other elements. No request is under way, and no lent tensor is still being read."""
        for worker in list(self._weights.leases):
            self._answers.settle(worker, self._weights.settle(worker))
        if not self._spans:  # a new shard takes over the state of the givers, too; no worker has asked it yet
            like = likeness_of(entry.pieces[0])
            self._rule, self._roster = like.rule, Roster(like.members, like.workers)
            self.decisions = Decisions(self.service.numbers_per_batch, like.tickets, like.dropped_tickets)
            self._running = RunningStatistics(entry.pieces[0].running)
            for worker, incarnation in like.members.items():
                self._answers.admit(worker, incarnation)
        values, rest = take_over(self._weights, self._spans, entry.spans, entry.pieces, self._holder.multiplied)
        self._spans = self._all_spans = entry.spans
        self._weights, self._admission = self._holder.hold(entry.spans, values)
        rest.put_(self._weights)

    # ------------------------------------------------------------------ the rule and its actions

    def _consult(self, arrival: Arrival, replies: list[Reply]) -> None:
        situation = Situation(self.version_of(arrival.worker), self._roster.counted)
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
        elif isinstance(action, RegionAction):
            if self._regions.perform(action, self._weights):
                self._take_average()
        else:
            self._decide(action.worker, self._queues.oldest(action)[0], "dropped", action.reason)

    def _decide(self, worker: int, waiting: Waiting, verdict: Literal["applied", "dropped"], reason: str = "") -> None:
        waiting.gradient, waiting.verdict, waiting.reason = None, verdict, reason
        waiting.rows, waiting.running, waiting.unused = (), None, ()
        waiting.staleness = self.version_of(worker) - waiting.basis
        if verdict == "applied":
            self.decisions.use(waiting.tickets, waiting.staleness)
        else:
            self.decisions.drop(waiting.tickets)
        if waiting.read >= 0:
            self._weights.buffers.release(waiting.read)
            waiting.read = -1

    def _add(self, action: Add) -> None:
        waiting, gradient = self._queues.oldest(action)
        weights, _ = self._of(action.worker)
        basis = weights.buffers.tensors[waiting.read] if waiting.read >= 0 else None
        multiples = weights.weigh(action, waiting.lrs)
        if self._tables is not None:
            gradient = self._tables.add(waiting.rows, multiples, gradient, self.weights)
        elif not gradient.is_meta:  # there are values
            for modifier in self.service.modifiers:
                own = (weights.moments.second,) if modifier.remembers else ()
                gradient = modifier.apply(gradient, weights.present, basis if modifier.needs_basis else None, *own)
        weights.add(gradient, multiples, action.part_of, waiting.unused)
        self._running.add(waiting.running)
        self._decide(action.worker, waiting, "applied")

    def _update(self, action: Update) -> None:
        weights = self._weights if action.region is None else self._regions.weights_of(action.region)
        rates, divisors = weights.update(action.divisor, action.including)
        self._running.update(len(self._roster.counted))
        if weights is self._weights:
            self._take_average()
        if self._tables is not None:
            self._tables.update(divisors, rates, self._weights.steps, self.version)

    def _mix(self, action: Mix) -> None:
        if self._tables is not None:
            raise RuntimeError(f"{self.service.rule.name} averages parameters, and rows of tables are gradients")
        waiting, theirs = self._queues.oldest(action)
        self._running.mix(waiting.running, action.alpha)
        self._decide(action.worker, waiting, "applied")
        waiting.difference = self._weights.mix(theirs, action.alpha)
        self._take_average()

    def _take_average(self) -> None:
        if self._average is not None:
            self._average.update(self.weights, self.version)

    def _answer(self, worker: int, replies: list[Reply]) -> None:
        for waiting in self._queues.answerable(worker):
            answer = self._pulled(worker, waiting) if waiting.kind == "pull" else self._pushed(worker, waiting)
            self._answers.answer(answer)
            replies.append(answer)

    def _pushed(self, worker: int, waiting: Waiting) -> Pushed:
        difference = None
        if waiting.difference >= 0:
            difference = self._weights.lend(worker, waiting.sequence, waiting.difference)
        return pushed(self.number, worker, waiting, self.version_of(worker), difference)

    def _pulled(self, worker: int, waiting: Waiting) -> Pulled:
        lenders = self._lenders(worker)
        weights = lenders[0 if waiting.resulting else -1]
        for other in lenders:
            if other is not weights:
                other.forget(worker)
        values = weights.lend_present(worker, waiting.sequence, waiting.basis)
        rows = () if self._tables is None else self._tables.changed_after(waiting.basis)
        running = self._running.present
        return pulled(self.number, worker, waiting, weights.version, values, rows=rows, running=running)

    def hold(self) -> HeldElements:
        """The elements of this shard as they are now, or their moving average. They stay so until they are released.

        Cost: no copy and no pass over memory, except for tables, where rows change in place, and for an average.
        """
        if self._average is not None:
            values = self._average.present.to(self.weights.dtype, copy=True)
            return HeldElements(self._all_spans, values, self._running.present, lambda: None)
        return held_elements(self._weights, self._tables, self._all_parameters, self._all_spans, self._running.present)

    # ------------------------------------------------------------------ the whole state

    def dump(self) -> tuple[bytes, tuple[Tensor, ...]]:
        """The whole state in memory of its own, with the gradients that wait and the tensors that are lent."""
        own, waiting = state_of(self._weights, self._queues.waiting)
        state = State(
            weights=own,
            regions=self._regions.dump(),
            index=self.index,
            rule=self._rule,
            members=self._roster.members,
            workers=self._roster.counted,
            known=self._answers.known,
            waiting=waiting,
            tickets=self.decisions.applied.tuples,
            dropped_tickets=self.decisions.dropped_tickets.tuples,
            staleness=dict(self.decisions.staleness),
            dropped=self.decisions.dropped,
            refused=self.decisions.refused,
            tables=[] if self._tables is None else self._tables.dump(),
            running=self._running.present,
            running_total=self._running.total,
            running_count=self._running.count,
            average=None if self._average is None else self._average.present,
        )
        return encode(state)

    def load(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        """Become the shard that `dump` was called on. The memory of this one is used again."""
        weights = self._weights
        spare = [*weights.spare(), *self._regions.spare()]

        def own(tensor: Tensor) -> Tensor:
            memory = spare.pop(0) if spare else self._empty(weights.numel, weights.dtype)
            return memory.copy_(tensor)

        state = decode(data, tensors, weights.numel, weights.dtype, own)
        if self._tables is not None:
            self._tables.load(state.tables)
        if self._average is not None:
            self._average.load(state.average)
        state.weights.put_(weights, spare)
        for number in state.held_by_waiting():
            weights.buffers.hold(number)
        self._regions.load(state.regions)
        self.index, self._rule, self._queues = state.index, state.rule, Queues(self.service.rule.name, state.waiting)
        self._roster = Roster(state.members, state.workers)
        self._answers = AnswerTable(self.number, state.known)
        self.decisions = Decisions(self.service.numbers_per_batch, state.tickets, state.dropped_tickets)
        self._running = RunningStatistics(state.running, state.running_total, state.running_count)
        self.decisions.restore_counts(state.staleness, state.dropped, state.refused)
