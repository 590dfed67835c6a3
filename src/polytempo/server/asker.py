"""`Asker`: how a worker comes by its work. One call at a time is open, and it is repeated until it is answered.

ask ──Ask 7──▶ coordinator          posted before the present batch is computed, so that waiting for the answer
deal ◀─Deal 7─                      costs nothing
"""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.core import Port, TimedOut
from polytempo.server.client import Client
from polytempo.server.message import Ask, Deal


class Asker:
    """The calls for work of `client`'s worker. Its mail is what `through` leaves: all that is not the client's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sequence = 0
        self._open: Ask | None = None

    async def ask(self, port: Port, rows: Sequence[bytes] = ()) -> None:
        """Call for work; no call may be open. It says which tickets are done, and carries rows of metrics."""
        assert self._open is None
        self._sequence += 1
        client = self._client
        self._open = Ask(client.worker, client.incarnation, self._sequence, client.taken_done(), tuple(rows))
        await port.post(self._open, client.coordinator)

    async def deal(self, port: Port) -> Deal | None:
        """The answer to the open call; None if the run is over. Raises `TimedOut` where none comes for too long."""
        assert self._open is not None
        client, timing = self._client, self._client.timing
        deadline_s = await port.now() + timing.deadline_s
        while not client.finished:
            taken = await port.take(timing.retry_s)
            message = None if taken is None else taken[1]
            if isinstance(message, Deal) and self._is_answer(message):
                self._open = None
                return message
            if await port.now() > deadline_s:
                raise TimedOut(client.worker, None, "call for work", timing.deadline_s)
            if taken is None:
                await port.post(self._open, client.coordinator)
        return None

    @property
    def is_open(self) -> bool:
        """Whether a call waits for its answer."""
        return self._open is not None

    def _is_answer(self, deal: Deal) -> bool:
        return self._open is not None and (deal.incarnation, deal.sequence) == (
            self._open.incarnation,
            self._open.sequence,
        )
