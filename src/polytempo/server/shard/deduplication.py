"""The requests and batches that a shard has used: none is used twice.

    sequence   … 4   5   6 │ 7         `AnswerTable`: last = 6
                 └ repeated ┘ └ new    8 and more: ahead, a request before it is on its way
    tickets    0 … 41, 43              `Decisions`: their gradients are in the weights or the sum, or were dropped

A worker has at most `WINDOW` requests under way, so the answers to its last `WINDOW` are enough: an older request that
comes again was repeated by the network, and its answer has arrived.

The push of a host has the requests of several workers, and one sum of their gradients. All are taken, or none is:

    Push(worker 0, sum of 3 gradients, parts = requests of workers 1 and 2)
        every request new, no ticket applied ──▶ one entry, one sum; each worker gets its own answer
        worker 1's is known                  ──▶ worker 1 gets that answer, 0 and 2 get `PushAlone` and push alone

No gradient can be taken out of a sum again, so one refused part refuses the push. The shard then remembers no part of
it, and judges each worker's next message separately, with the same sequence number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from polytempo.core.arithmetic.ranges import Range, Ranges
from polytempo.server.message import (
    COORDINATOR,
    Elapsed,
    Noted,
    Pulled,
    Push,
    PushAlone,
    Pushed,
    PushPart,
    Reply,
    Request,
    Statistics,
    Stranger,
)

WINDOW = 8
"""The number of answers kept for a worker."""


class RequestStatus(NamedTuple):
    """The status of a request.

    "repeated": `replies` has the answer, if there is one yet. "stranger": `replies` has the refusal. "split", of a push
    with parts: `replies` has the reply to each part.
    """

    kind: Literal["new", "repeated", "ahead", "stranger", "split"]
    replies: tuple[Reply, ...] = ()


_NEW, _AHEAD, _NO_ANSWER = RequestStatus("new"), RequestStatus("ahead"), RequestStatus("repeated")


class Known(msgspec.Struct, array_like=True):
    """A worker's life, its last request, and the last answers by the sequence of their requests."""

    incarnation: int
    last: int = 0
    answers: dict[int, Pushed | Pulled | Noted] = {}


class AnswerTable:
    """Memory: `WINDOW` answers for each member. The coordinator is always known; each of its lives begins at
    sequence 1."""

    def __init__(self, shard: int, known: dict[int, Known] | None = None) -> None:
        self._shard = shard
        self.known = {} if known is None else known
        """Worker -> its life, last request and answers."""

    def admit(self, worker: int, incarnation: int) -> None:
        """`worker` is known from now on, in its life `incarnation`, without a request."""
        self.known[worker] = Known(incarnation, 0, {})

    def forget(self, worker: int) -> None:
        """`worker` is a stranger from now on."""
        self.known.pop(worker, None)

    def status_of(self, request: Request) -> RequestStatus:
        """The status of `request`: new, repeated, ahead of its turn, or a stranger's. Changes nothing."""
        known = self.known.get(request.worker)
        if known is not None and known.incarnation == request.incarnation:
            if request.sequence == known.last + 1:
                return _NEW
            if request.sequence > known.last:
                return _AHEAD
            answer = known.answers.get(request.sequence)
            return _NO_ANSWER if answer is None else RequestStatus("repeated", (answer,))
        if request.worker == COORDINATOR and (known is None or request.incarnation > known.incarnation):
            return _NEW if request.sequence == 1 else _AHEAD
        return RequestStatus("stranger", (self._stranger(request, known),))

    def take(self, request: Request) -> None:
        """Note that `request`, which is new, was applied."""
        known = self.known.get(request.worker)
        if known is None or known.incarnation != request.incarnation:
            known = self.known[request.worker] = Known(request.incarnation, 0, {})
        known.last = request.sequence
        if known.answers:
            known.answers.pop(request.sequence - WINDOW, None)

    def answer(self, reply: Pushed | Pulled | Noted) -> None:
        """Keep `reply` in case its request comes again."""
        known = self.known[reply.worker]
        if reply.sequence > known.last - WINDOW:
            known.answers[reply.sequence] = reply

    def settle(self, worker: int, sequences: Iterable[int]) -> None:
        """Forget these answers: the worker has read the tensors that they lend, which may change from now on."""
        answers = self.known[worker].answers
        for sequence in sequences:
            answers.pop(sequence, None)

    def _stranger(self, request: Request, known: Known | None) -> Stranger:
        who = f"worker {request.worker}"
        if known is None:
            reason = f"{who} is not a member; it must come back with a new incarnation"
        else:
            reason = f"{who} is known in its life {known.incarnation}, and this is of life {request.incarnation}"
        return Stranger(self._shard, request.worker, request.incarnation, request.sequence, reason)


Verdict = Literal["dropped", "refused"]
"""The verdict on a push that is not used."""


class Decisions:
    """A ticket is decided when its gradient is in the weights, or in the sum, or was dropped by the rule.

    `numbers_per_batch`: by how many ticket numbers one batch is known; it is decided with the last of them.
    """

    def __init__(
        self, numbers_per_batch: int, applied: Sequence[Range] = (), dropped_tickets: Sequence[Range] = ()
    ) -> None:
        self._numbers = numbers_per_batch
        self.applied, self.dropped_tickets = Ranges(applied), Ranges(dropped_tickets)
        """Tickets with gradients in the weights or the sum; and dropped tickets, which are not dealt again."""
        self._has_dropped = bool(dropped_tickets)  # where nothing was dropped, nothing need be looked up
        both = Ranges((*applied, *dropped_tickets))
        self.batches = sum((last + 1) // self._numbers - first // self._numbers for first, last in both.tuples)
        """The number of decided batches."""
        self.batches_before = self.batches
        """The same before the last entry of the log; the shard sets it when it takes an entry."""
        self.staleness: Counter[int] = Counter()
        """The staleness of used gradients."""
        self.dropped = self.refused = 0

    def use(self, tickets: Sequence[int], staleness: int) -> None:
        """A gradient of these tickets is in the weights or the sum from now on."""
        self.staleness[staleness] += 1
        self._add(tickets, self.applied, self.dropped_tickets)

    def drop(self, tickets: Sequence[int]) -> None:
        """A gradient of these tickets was dropped."""
        self.dropped += 1
        self._has_dropped = True
        self._add(tickets, self.dropped_tickets, self.applied)

    def earlier_use(self, push: Push) -> tuple[Verdict, str]:
        """The verdict and reason for a push with applied tickets; "" if none of them is applied."""
        applied = [ticket for ticket in push.tickets if ticket in self.applied]
        if not applied:
            return "refused", ""
        if len(applied) == len(push.tickets):
            return "dropped", "had already"
        return "refused", f"worker {push.worker}: tickets {applied} are applied, the others of {push.tickets} are not"

    def count_unseen(self, verdict: Verdict) -> None:
        """Count a push that the rule does not see."""
        self.dropped += verdict == "dropped"
        self.refused += verdict == "refused"

    def restore_counts(self, staleness: Mapping[int, int], dropped: int, refused: int) -> None:
        """Go on from these counts."""
        self.staleness.update(staleness)
        self.dropped, self.refused = dropped, refused

    @property
    def tuples(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """The applied tickets, and the dropped ones."""
        return self.applied.tuples, self.dropped_tickets.tuples

    def statistics(self, shard: int, request: Request, *, version: int, index: int, repeated: int) -> Statistics:
        """The answer to `Inquire`."""
        return Statistics(
            shard=shard,
            worker=request.worker,
            incarnation=request.incarnation,
            sequence=request.sequence,
            version=version,
            index=index,
            staleness=dict(sorted(self.staleness.items())),
            dropped=self.dropped,
            refused=self.refused,
            repeated=repeated,
            tickets=self.applied.tuples,
        )

    def _add(self, tickets: Sequence[int], into: Ranges, other: Ranges) -> None:
        for ticket in tickets:
            known = into.add(ticket) or (self._has_dropped and ticket in other)
            self.batches += not known and ticket % self._numbers == self._numbers - 1


def requests_in(entry: Request | Elapsed) -> Iterator[Request]:
    """The requests in an entry: in a host's push one for each worker, the sender's first."""
    if isinstance(entry, Request):
        yield entry
    if isinstance(entry, Push):
        yield from entry.parts


def status_of_all(shard: int, push: Push, answers: AnswerTable, decisions: Decisions) -> RequestStatus:
    """ "new" if all requests in `push` are new, and none of their tickets is applied; otherwise "split". No change."""
    parts: tuple[Push | PushPart, ...] = (push, *push.parts)
    found = [(request, answers.status_of(request)) for request in parts]
    tickets = [ticket for request in parts for ticket in request.tickets]
    apart = len({request.worker for request in parts}) == len(parts) and len(set(tickets)) == len(tickets)
    had = any(ticket in decisions.applied for ticket in tickets)
    if apart and not had and all(status.kind == "new" for _, status in found):
        return _NEW
    replies = [
        reply
        for request, status in found
        for reply in (status.replies if status.kind in ("repeated", "stranger") else (split(shard, request),))
    ]
    return RequestStatus("split", tuple(replies))


def split(shard: int, request: Request) -> PushAlone:
    """The reply to a request that must come alone."""
    return PushAlone(shard, request.worker, request.incarnation, request.sequence)
