"""`Calls`: the workers' calls for work: which wait for an answer, and how the others were answered."""

from __future__ import annotations

from polytempo.server.message import Ask, Deal


class Calls:
    """The last call of each worker, and its answer."""

    def __init__(self) -> None:
        self.waiting: dict[int, Ask] = {}
        """Calls that the batch scheduler does not have yet."""
        self.unsaid: dict[int, Deal] = {}
        """Answers that wait until all shards know the worker."""
        self.finishing: dict[int, int] = {}
        """Workers with an order to finish -> the number of the call that it answered."""
        self._said: dict[int, tuple[int, int]] = {}
        self._heard_of: dict[int, tuple[int, int]] = {}

    def begin(self, ask: Ask) -> None:
        """The worker begins its life with this call."""
        self._heard_of[ask.worker] = ask.incarnation, 0

    def is_of_the_past(self, ask: Ask) -> bool:
        """True if that life of the worker, or a later one, has called before."""
        return ask.incarnation <= self._heard_of.get(ask.worker, (0, 0))[0]

    def new_rows(self, ask: Ask) -> tuple[bytes, ...]:
        """The call's rows of metrics, unless they came before: a call may come several times."""
        if ask.sequence <= self._heard_of.get(ask.worker, (0, 0))[1]:
            return ()
        self._heard_of[ask.worker] = ask.incarnation, ask.sequence
        return ask.rows

    def was_answered(self, ask: Ask) -> bool:
        """True if this call was answered already."""
        return self._said.get(ask.worker) == (ask.incarnation, ask.sequence)

    def say(self, worker: int) -> Deal:
        """Take out the answer that goes to the worker now."""
        deal = self.unsaid.pop(worker)
        self._said[worker] = deal.incarnation, deal.sequence
        return deal

    def is_goodbye(self, ask: Ask) -> bool:
        """True if the worker calls again after its order to finish: with this call it goes."""
        finished = self.finishing.get(ask.worker)
        return finished is not None and ask.sequence > finished

    def lose(self, worker: int) -> None:
        """The worker waits for nothing more."""
        self.waiting.pop(worker, None)
        self.unsaid.pop(worker, None)

    @property
    def unknown_tickets(self) -> set[int]:
        """Tickets that were dealt in answers that still wait."""
        return {ticket.number for deal in self.unsaid.values() for ticket in deal.tickets}
