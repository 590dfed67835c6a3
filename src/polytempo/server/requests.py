"""Requests to one shard, numbered and sent again until they are answered: first in, first out.

    add ─▶ [ 7 | 8 | 9 ] unanswered, oldest first ─▶ the shard's head
                └── after retry_s all of them again, in order; after a new view immediately

A `Pull` closes the queue until it is answered: its answer lends weights, which are valid until the next request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from polytempo.server.message import Pull, Reply, Request
from polytempo.server.shard.deduplication import WINDOW
from polytempo.server.timing import Timing

R = TypeVar("R", bound=Request)


class Requests:
    """The requests of (worker, incarnation) to one shard, with its first copy on the node `head`."""

    def __init__(self, worker: int, incarnation: int, head: int, timing: Timing) -> None:
        self.worker, self.incarnation, self.head = worker, incarnation, head
        self._timing = timing
        self._sequence = 0
        self._sent: list[Request] = []
        self._queued: list[Request] = []
        self._retry_at_s = float("inf")
        self._patience_s = timing.retry_s
        self._oldest_s = 0.0
        self._handed_over = 0
        """The sequence of the request that another message brings to the shard; 0: none."""
        self._closes = False

    def beside(self, head: int) -> Requests:
        """Requests of the same worker to another shard, with its first copy on node `head`."""
        return Requests(self.worker, self.incarnation, head, self._timing)

    @property
    def unanswered(self) -> int:
        """The number of requests without an answer."""
        return len(self._sent) + len(self._queued)

    @property
    def queues(self) -> bool:
        """True if a request has not been sent."""
        return bool(self._queued)

    def is_due(self, now_s: float) -> bool:
        """True if `late` has something to send again."""
        return now_s >= self._retry_at_s

    def waited_s(self, now_s: float) -> float:
        """The age of the oldest request under way; 0 where there is none."""
        return now_s - self._oldest_s if self._sent else 0.0

    def add(self, build: Callable[[int, int, int], R]) -> R:
        """Queue `build(worker, incarnation, sequence)`."""
        self._sequence += 1
        request = build(self.worker, self.incarnation, self._sequence)
        self._queued.append(request)
        return request

    def sendable(self, now_s: float) -> list[Request]:
        """The requests that are sent for the first time now."""
        sent = []
        while self._queued:
            if self._sent and (isinstance(self._sent[-1], Pull) or (self._handed_over and self._closes)):
                break
            if self._sent and self._queued[0].sequence - self._sent[0].sequence >= WINDOW:
                break  # the shard would forget its answer to the oldest
            if not self._sent:
                self._oldest_s = now_s
                self._rest(now_s, self._timing.retry_s)
            self._sent.append(self._queued.pop(0))
            sent.append(self._sent[-1])
        return sent

    @property
    def last(self) -> int:
        """The sequence of the last request; 0: there was none."""
        return self._sequence

    def hand_over(self, now_s: float, patience_s: float, *, closes: bool) -> None:
        """The only request under way reaches the shard in another message. It is sent only if no answer comes in time.

        `closes`: the queue is closed until it is answered, or sent, for nothing here says when it reaches the shard.
        """
        assert not self._sent
        assert len(self._queued) == 1
        self._sent.append(self._queued.pop(0))
        self._handed_over, self._closes = self._sent[0].sequence, closes
        self._oldest_s = now_s
        self._rest(now_s, patience_s)

    def alone(self, now_s: float, sequence: int | None = None) -> list[Request]:
        """The other message does not bring its request: the requests to send now; none where that was answered.

        `sequence`: that request's, where it is known.
        """
        if not self._handed_over or sequence not in (None, self._handed_over):
            return []
        return self._again(now_s, self._timing.retry_s)

    def answered(self, reply: Reply, now_s: float) -> bool:
        """Take an answer. False: it is a repeat, or of another life."""
        if reply.incarnation != self.incarnation:
            return False
        for place, request in enumerate(self._sent):
            if request.sequence == reply.sequence:
                del self._sent[place]
                if reply.sequence == self._handed_over:
                    self._handed_over = 0
                if place == 0:
                    self._oldest_s = now_s
                    self._rest(now_s, self._timing.retry_s)
                return True
        return False

    def ask(self, head: int, now_s: float) -> list[Request]:
        """Send to `head` from now on; the answer is all unanswered requests, to be sent again."""
        self.head = head
        return self._again(now_s, self._timing.retry_s)

    def late(self, now_s: float) -> list[Request]:
        """The requests to send again, because no answer has come for long; the waiting time doubles each time."""
        if not self.is_due(now_s):
            return []
        return self._again(now_s, min(2 * self._patience_s, self._timing.longest_retry_s))

    def wait_s(self, now_s: float) -> float:
        """The time until the next `late`, unless a message arrives."""
        return max(0.0, self._retry_at_s - now_s)

    def _again(self, now_s: float, patience_s: float) -> list[Request]:
        self._rest(now_s, patience_s)
        self._handed_over = 0
        return list(self._sent)

    def _rest(self, now_s: float, patience_s: float) -> None:
        self._patience_s = patience_s
        self._retry_at_s = now_s + patience_s if self._sent or self._queued else float("inf")
