"""Messages between CUDA devices: NCCL performs them in batches.

A rank's batches follow each other on one stream, and a batch is over when all of its messages have met their other
ends. Ranks that each receive in one batch and send in the next would wait for each other for ever. So a message is held
until it is awaited; then its batch is, of its channel,

    awaited receive   all held sends, and as many held receives: the awaited one, then the oldest
                      without held sends the awaited one alone: the others may answer what this rank sends later
    awaited send      all held sends

All messages are batches, a single one, too: NCCL gives a batch another communicator than a message without one. Only
the stream waits for a batch, so a launched coroutine goes on to its end, and the next one's batches follow its own.
That every exchange of the library ends this way is a law (`laws/test_batched_messages.py` under `tests/`). One whose
ranks receive from more others than they send to may not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Held:
    """A message that waits for its batch, or is under way. What `PendingOp` needs of torch's Work."""

    __slots__ = ("_batches", "begin", "channel", "is_send", "work")

    def __init__(self, batches: MessageBatches, channel: int, is_send: bool, begin: Callable[[], Any]) -> None:
        self._batches, self.channel, self.is_send, self.begin = batches, channel, is_send, begin
        self.work: Any = None

    def start(self) -> None:
        """Begin the batch that it belongs to, if it is held."""
        if self.work is None:
            self._batches.start(self)

    def wait(self, *limit: Any) -> None:
        """Until its batch is over. On CUDA the stream waits, not the caller."""
        self.start()
        self.work.wait(*limit)


class MessageBatches:
    """The messages of one rank that are held. `backend`: torch's, which begins and ends batches."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._held: dict[int, list[Held]] = defaultdict(list)

    def hold(self, channel: int, is_send: bool, begin: Callable[[], Any]) -> Held:
        """Keep a message until it, or one with it, is awaited. `begin` hands it to torch."""
        held = Held(self, channel, is_send, begin)
        self._held[channel].append(held)
        return held

    def start(self, awaited: Held) -> None:
        """Begin a batch with `awaited` in it."""
        held = self._held.pop(awaited.channel)
        sends = [each for each in held if each.is_send]
        receives = sorted((each for each in held if not each.is_send), key=lambda each: each is not awaited)
        batch = sends if awaited.is_send else sends + receives[: max(len(sends), 1)]
        if len(batch) < len(held):
            self._held[awaited.channel] = [each for each in held if each not in batch]
        self._backend._start_coalescing()
        for each in batch:
            each.begin()
        work = self._backend._end_coalescing()
        for each in batch:
            each.work = work
