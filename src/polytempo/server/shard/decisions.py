"""`Decisions`: what became of the gradients that were pushed to a shard: tickets, batches, staleness, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from polytempo.core.ranges import Range, Ranges
from polytempo.server.message import Push, Request, Statistics

Verdict = Literal["dropped", "refused"]
"""What becomes of a push that is not used."""


class Decisions:
    """A ticket is decided when its gradient is in the weights, or in the sum, or was dropped by the rule.

    `numbers_per_batch`: by how many ticket numbers one batch is known; it is decided with the last of them.
    """

    def __init__(self, numbers_per_batch: int, applied: Sequence[Range] = (), let_go: Sequence[Range] = ()) -> None:
        self._numbers = numbers_per_batch
        self.applied, self.let_go = Ranges(applied), Ranges(let_go)
        """In the weights or the sum; and dropped, so not to be dealt again."""
        self._lets_go = bool(let_go)  # where nothing was dropped, nothing need be looked up
        both = Ranges((*applied, *let_go))
        self.batches = sum((last + 1) // self._numbers - first // self._numbers for first, last in both.tuples)
        """How many batches are decided."""
        self.batches_before = self.batches
        """The same before the last entry of the log; whoever takes an entry sets it."""
        self.staleness: Counter[int] = Counter()
        """Of the gradients that were used."""
        self.dropped = self.refused = 0

    def use(self, tickets: Sequence[int], staleness: int) -> None:
        """A gradient of these is in the weights or the sum from now on."""
        self.staleness[staleness] += 1
        self._add(tickets, self.applied, self.let_go)

    def drop(self, tickets: Sequence[int]) -> None:
        """A gradient of these is not used."""
        self.dropped += 1
        self._lets_go = True
        self._add(tickets, self.let_go, self.applied)

    def had(self, push: Push) -> tuple[Verdict, str]:
        """Why the push is not used, or refused, because of what was used already; "" if nothing of it was."""
        had = [ticket for ticket in push.tickets if ticket in self.applied]
        if not had:
            return "refused", ""
        if len(had) == len(push.tickets):
            return "dropped", "had already"
        return "refused", f"worker {push.worker}: tickets {had} are applied, the others of {push.tickets} are not"

    def turn_away(self, verdict: Verdict) -> None:
        """A push was not even looked at by the rule."""
        self.dropped += verdict == "dropped"
        self.refused += verdict == "refused"

    def recall(self, staleness: Mapping[int, int], dropped: int, refused: int) -> None:
        """Go on from these counts."""
        self.staleness.update(staleness)
        self.dropped, self.refused = dropped, refused

    @property
    def tuples(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """What was used, and what was dropped."""
        return self.applied.tuples, self.let_go.tuples

    def statistics(self, shard: int, request: Request, *, version: int, index: int, repeated: int) -> Statistics:
        """The answer to `Inquire`."""
        return Statistics(
            *(shard, request.worker, request.incarnation, request.sequence),
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
            known = into.add(ticket) or (self._lets_go and ticket in other)
            self.batches += not known and ticket % self._numbers == self._numbers - 1
