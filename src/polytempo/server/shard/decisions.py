"""`Decisions`: what became of the gradients that were pushed to a shard, by ticket, and their staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from polytempo.core.arithmetic.ranges import Range, Ranges
from polytempo.server.message import Push, Request, Statistics

Verdict = Literal["dropped", "refused"]
"""What becomes of a push that is not used."""


class Decisions:
    """A ticket is decided when its gradient is in the weights, or in the sum, or was dropped by the rule.

    `numbers_per_batch`: by how many ticket numbers one batch is known; it is decided with the last of them.
    """

    def __init__(
        self, numbers_per_batch: int, applied: Sequence[Range] = (), dropped_tickets: Sequence[Range] = ()
    ) -> None:
        self._numbers = numbers_per_batch
        self.applied, self.dropped_tickets = Ranges(applied), Ranges(dropped_tickets)
        """Tickets whose gradients are in the weights or the sum; and tickets that were dropped, so not dealt again."""
        self._has_dropped = bool(dropped_tickets)  # where nothing was dropped, nothing need be looked up
        both = Ranges((*applied, *dropped_tickets))
        self.batches = sum((last + 1) // self._numbers - first // self._numbers for first, last in both.tuples)
        """How many batches are decided."""
        self.batches_before = self.batches
        """The same before the last entry of the log; the shard sets it when it takes an entry."""
        self.staleness: Counter[int] = Counter()
        """Of the gradients that were used."""
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
        """Whether the push is dropped or refused since its tickets are applied, and why; "" if none of them is."""
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
        """The tickets that were applied, and those that were dropped."""
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
