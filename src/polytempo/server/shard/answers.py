"""`AnswerTable`: the requests to a shard and its answers, so that no request is performed twice.

    sequence   … 4   5   6 │ 7         last = 6
                 └ repeated ┘ └ new      8 and more: ahead, something before it is still on its way

A worker has at most `WINDOW` requests under way, so the answers to its last `WINDOW` are enough: an older request that
comes again was repeated by the network, and its answer has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from polytempo.server.message import COORDINATOR, Noted, Pulled, Pushed, Reply, Request, Stranger

WINDOW = 8
"""How many of a worker's answers are kept."""


class RequestStatus(NamedTuple):
    """How a request stands to those before it.

    "repeated": `replies` has the answer, if there is one yet. "stranger": `replies` has the refusal. "split", of a push
    with parts: `replies` has what becomes of each part.
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
    """Memory: `WINDOW` answers for each member. The coordinator is always known; each life of it begins anew."""

    def __init__(self, shard: int, known: dict[int, Known] | None = None) -> None:
        self._shard = shard
        self.known = {} if known is None else known
        """Worker -> its life, last request and answers."""

    def admit(self, worker: int, incarnation: int) -> None:
        """From now on `worker` is known, in its life `incarnation`, and has asked nothing yet."""
        self.known[worker] = Known(incarnation, 0, {})

    def forget(self, worker: int) -> None:
        """`worker` is a stranger from now on."""
        self.known.pop(worker, None)

    def status_of(self, request: Request) -> RequestStatus:
        """Whether `request` is new, repeated, ahead of its turn, or of a stranger. Changes nothing."""
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
            reason = f"{who} is no member; it must come back with a new incarnation"
        else:
            reason = f"{who} is known in its life {known.incarnation}, and this is of life {request.incarnation}"
        return Stranger(self._shard, request.worker, request.incarnation, request.sequence, reason)
