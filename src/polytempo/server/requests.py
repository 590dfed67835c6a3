"""Requests to one shard, numbered and sent again until they are answered: first in, first out.

    add ─▶ [ 7 | 8 | 9 ] unanswered, oldest first ─▶ the shard's head
                └── after retry_s all of them again, in order; after a new view at once

A `Pull` closes the line until it is answered: what it lends is valid only until the worker's next request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from polytempo.server.message import Pull, Reply, Request
from polytempo.server.shard.answers import WINDOW
from polytempo.server.timing import Timing

R = TypeVar("R", bound=Request)


class Requests:
    """What (worker, incarnation) has asked of one shard. `head` is the node to ask."""

    def __init__(self, worker: int, incarnation: int, head: int, timing: Timing) -> None:
        self.worker, self.incarnation, self.head = worker, incarnation, head
        self._timing = timing
        self._sequence = 0
        self._flying: deque[Request] = deque()
        self._standing: deque[Request] = deque()
        self._retry_at_s = float("inf")
        self._patience_s = timing.retry_s
        self._oldest_s = 0.0

    def beside(self, head: int) -> Requests:
        """The same work_client's requests to another shard, whose first copy is on node `head`."""
        return Requests(self.worker, self.incarnation, head, self._timing)

    @property
    def unanswered(self) -> int:
        """How many requests have no answer yet."""
        return len(self._flying) + len(self._standing)

    def waited_s(self, now_s: float) -> float:
        """How long the oldest request has been waiting; 0 where none is."""
        return now_s - self._oldest_s if self._flying else 0.0

    def add(self, build: Callable[[int, int, int], R]) -> R:
        """Put `build(worker, incarnation, sequence)` in line."""
        self._sequence += 1
        request = build(self.worker, self.incarnation, self._sequence)
        self._standing.append(request)
        return request

    def sendable(self, now_s: float) -> list[Request]:
        """What is to be sent for the first time now."""
        sent = []
        while self._standing:
            if self._flying and isinstance(self._flying[-1], Pull):
                break
            if self._flying and self._standing[0].sequence - self._flying[0].sequence >= WINDOW:
                break  # the shard would forget what it has answered to the oldest
            if not self._flying:
                self._oldest_s = now_s
                self._rest(now_s, self._timing.retry_s)
            self._flying.append(self._standing.popleft())
            sent.append(self._flying[-1])
        return sent

    def answered(self, reply: Reply, now_s: float) -> bool:
        """Take an answer. False: it is a repeat, or of another life."""
        if reply.incarnation != self.incarnation:
            return False
        for place, request in enumerate(self._flying):
            if request.sequence == reply.sequence:
                del self._flying[place]
                if place == 0:
                    self._oldest_s = now_s
                    self._rest(now_s, self._timing.retry_s)
                return True
        return False

    def ask(self, head: int, now_s: float) -> list[Request]:
        """From now on `head` is asked: all that is unanswered, again."""
        self.head = head
        return self._again(now_s, self._timing.retry_s)

    def late(self, now_s: float) -> list[Request]:
        """What is to be sent again, because no answer has come for long; each time the patience doubles."""
        if now_s < self._retry_at_s:
            return []
        return self._again(now_s, min(2 * self._patience_s, self._timing.longest_retry_s))

    def wait_s(self, now_s: float) -> float:
        """How long nothing is to be done unless something arrives."""
        return max(0.0, self._retry_at_s - now_s)

    def _again(self, now_s: float, patience_s: float) -> list[Request]:
        self._rest(now_s, patience_s)
        return list(self._flying)

    def _rest(self, now_s: float, patience_s: float) -> None:
        self._patience_s = patience_s
        self._retry_at_s = now_s + patience_s if self._flying or self._standing else float("inf")
