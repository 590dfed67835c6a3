"""`WorkClient`: asks the coordinator for work. One call at a time is open, and it is repeated until it is answered.

ask ──Ask 7──▶ coordinator          posted before the present batch is computed, so that waiting for the answer
deal ◀─Deal 7─                      costs nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from polytempo.core import Port, TimedOut
from polytempo.core.op import Parcel
from polytempo.server.message import Ask, Beat, Deal
from polytempo.server.worker.client import Client

_MOST_LETTERS = 1024


class WorkClient:
    """The calls for work of `client`'s worker. It takes the mail that is not for the client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sequence = 0
        self._open: Ask | None = None
        self._early: Deal | None = None
        self.letters: deque[tuple[int, Parcel]] = deque(maxlen=_MOST_LETTERS)
        """(sender, message) of mail that came while this waited for an answer, and is for others."""

    async def ask(self, port: Port, rows: Sequence[bytes] = (), done: Sequence[int] | None = None) -> None:
        """Call for work; no call may be open. It says which tickets are done, and carries rows of metrics.

        `done` None: the batches that the client's shards have acknowledged.
        """
        assert self._open is None
        self._sequence += 1
        client = self._client
        self._open = Ask(
            client.worker,
            client.incarnation,
            self._sequence,
            client.taken_done() if done is None else tuple(done),
            tuple(rows),
        )
        await port.post(self._open, client.coordinator)

    def drop(self) -> None:
        """Wait no more for the answer to the open call, if there is one: the next call takes its place."""
        self._open = self._early = None

    async def deal(self, port: Port) -> Deal | None:
        """The answer to the open call; None if the run is over. Raises `TimedOut` where none comes for too long.

        An answer of a layout that this worker does not know yet is dropped; the worker asks for the view, and calls
        again.
        """
        assert self._open is not None
        client, timing = self._client, self._client.timing
        deadline_s = None
        while self._early is not None or not client.finished:
            if self._early is not None:
                deal, self._early = self._early, None
                if deal.layout <= client.layout:
                    self._open = None
                    return deal
                await port.post(Beat(client.worker, client.incarnation, client.epoch), client.coordinator)
            if deadline_s is None:
                deadline_s = await port.now() + timing.deadline_s
            taken = await port.take(timing.retry_s)
            if taken is not None:
                self.sort(*taken)
            if self._early is None and await port.now() > deadline_s:
                raise TimedOut(client.worker, None, "call for work", timing.deadline_s)
            if taken is None:
                await port.post(self._open, client.coordinator)
        return None

    def sort(self, source: int, message: Parcel) -> None:
        """Sort a message of the mailbox, whichever part of the program took it: an answer, or a letter for others."""
        if not isinstance(message, Deal):
            self.letters.append((source, message))
        elif self._is_answer(message):
            self._early = message

    @property
    def is_open(self) -> bool:
        """True if a call waits for its answer."""
        return self._open is not None

    def _is_answer(self, deal: Deal) -> bool:
        return self._open is not None and (deal.incarnation, deal.sequence) == (
            self._open.incarnation,
            self._open.sequence,
        )
