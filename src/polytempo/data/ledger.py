"""`Ledger`: the proof that every sample of an epoch was used exactly once, or which were not, and why.

    epoch's order   0 1 2 3 4 5 6 7 8 9 10          places; the sample at a place is the permutation's matter
    batches        [0 1 2 3][4 5 6 7][8 9 10]       edges 0, 4, 8, 11
    shard 0         used 0…10                        every place once
    shard 1         used 0…3, 8…10                   4…7 never: "late"

A place is *used once* if every shard has taken its gradient exactly once: into its weights or into its sum. It may be
dealt, reassigned, sent and refused as often as it likes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, final

from polytempo.core.arithmetic.ranges import Range, Ranges

NEVER_DEALT = "never dealt"
NEVER_APPLIED = "dealt, but never answered"


class Found(NamedTuple):
    """Places `first … last` of an epoch's order, of tickets `tickets` (first, last), as shard `shard` has them."""

    first: int
    last: int
    tickets: Range
    shard: int
    reason: str

    @property
    def samples(self) -> int:
        """The number of places."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        low, high = self.tickets
        tickets = f"ticket {low}" if low == high else f"tickets {low} to {high}"
        return f"places {self.first} to {self.last} ({tickets}) at shard {self.shard}: {self.reason}"


class Verdict(NamedTuple):
    """The number of uses of an epoch's samples. Where shards disagree, a sample may count as never and as twice
    used."""

    epoch: int
    num_samples: int
    once: int
    never: int
    twice: int
    unused: tuple[Found, ...]
    """Samples with the reason why the shard did not use them."""
    repeated: tuple[Found, ...]
    """Used twice or more often."""
    again: int
    """Tickets that were dealt more than once: their first owner was lost."""
    reassigned: int
    """Samples that another worker took over from a living one."""
    refused: int
    """Repeats that a shard recognised, and did not use again."""

    @property
    def exact(self) -> bool:
        """True if every sample was used exactly once."""
        return self.once == self.num_samples

    def __str__(self) -> str:
        counts = f"{self.num_samples} samples: {self.once} used once, {self.never} never, {self.twice} twice"
        events = (
            f"tickets dealt again {self.again}, samples reassigned {self.reassigned}, repeats refused {self.refused}"
        )
        return "\n  ".join([f"epoch {self.epoch}: {counts} ({events})", *map(str, self.unused + self.repeated)])


class _Page:
    """The notes of one epoch."""

    def __init__(self, num_shards: int) -> None:
        self.dealt = Ranges()  # places
        self.used = [Ranges() for _ in range(num_shards)]
        self.twice = [Ranges() for _ in range(num_shards)]
        self.dropped: list[dict[str, Ranges]] = [{} for _ in range(num_shards)]
        self.again = self.reassigned = self.refused = 0


@final
class Ledger:
    """Notes the fate of each ticket, and sums them up by epoch.

        ledger = Ledger(edges=[0, 4, 8, 11], num_shards=1)
        for ticket in 0, 1:
            ledger.dealt(ticket)
        ledger.applied(0, ticket=0)
        ledger.dropped(0, ticket=1, reason="late")
        print(ledger.verdict(0))      # 4 used once; 4…7 "late"; 8…10 "never dealt"

    Ticket n is batch n mod B of epoch n div B, and batch b has the places `edges[b] … edges[b + 1] - 1`. A `part` of a
    batch (begin, end), counted from the batch's first sample, end excluded, was given to a helper.

    Memory: a range for each gap; an epoch that is used up takes one a shard. An event costs a binary search.
    """

    def __init__(self, edges: Sequence[int], num_shards: int) -> None:
        if len(edges) < 2 or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
            raise ValueError(
                f"the edges of an epoch's batches rise from 0 to the number of samples, got {[*edges[:9]]} …"
            )
        if num_shards < 1:
            raise ValueError(f"a ledger needs at least one shard, got {num_shards}")
        self._edges, self._num_shards = list(edges), num_shards
        self._pages: dict[int, _Page] = {}

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self._edges[-1]

    # -------------------------------------------------------------------------------------------------------- events

    def dealt(self, ticket: int) -> None:
        """A worker has the right to train on the batch."""
        page, (first, last) = self._find(ticket, None)
        page.again += bool(page.dealt.add(first, last))

    def reassigned(self, ticket: int, part: tuple[int, int] | None = None) -> None:
        """Another worker does it, or a part of it, though its owner lives."""
        page, (first, last) = self._find(ticket, part)
        page.reassigned += last - first + 1

    def applied(self, shard: int, ticket: int, part: tuple[int, int] | None = None) -> None:
        """The shard took the gradient into its weights or its sum."""
        page, (first, last) = self._find(ticket, part)
        for overlap in page.used[self._shard(shard)].add(first, last):
            page.twice[shard].add(*overlap)

    def dropped(self, shard: int, ticket: int, reason: str, part: tuple[int, int] | None = None) -> None:
        """The shard did not use the gradient, for `reason`. The reason of a sample that is used after all does not
        count."""
        page, place = self._find(ticket, part)
        page.dropped[self._shard(shard)].setdefault(reason, Ranges()).add(*place)

    def refused(self, shard: int, ticket: int) -> None:
        """The shard had applied the ticket before, and dropped the push."""
        self._shard(shard)
        self._find(ticket, None)[0].refused += 1

    # ------------------------------------------------------------------------------------------------------- verdict

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs with at least one note."""
        return tuple(sorted(self._pages))

    def verdict(self, epoch: int) -> Verdict:
        """The number of uses of each sample of `epoch`."""
        page = self._pages.get(epoch) or _Page(self._num_shards)
        shards = range(self._num_shards)
        unused = tuple(found for shard in shards for found in self._unused(epoch, page, shard))
        repeated = tuple(
            self._found(epoch, place, shard, "used more than once") for shard in shards for place in page.twice[shard]
        )
        return Verdict(
            epoch,
            self.num_samples,
            once=self.num_samples - _count([*unused, *repeated]),
            never=_count(unused),
            twice=_count(repeated),
            unused=unused,
            repeated=repeated,
            again=page.again,
            reassigned=page.reassigned,
            refused=page.refused,
        )

    def _unused(self, epoch: int, page: _Page, shard: int) -> list[Found]:
        """The gaps of one shard, cut where the reason changes. The first reason that was given stands."""
        explained, found = Ranges(page.used[shard]), []
        reasons = [*page.dropped[shard].items(), (NEVER_APPLIED, page.dealt), (NEVER_DEALT, Ranges([self._whole]))]
        for reason, places in reasons:
            for first, last in places:
                gaps = explained.missing(first, last)
                found += [self._found(epoch, gap, shard, reason) for gap in gaps]
                explained.add(first, last)
        return sorted(found)

    @property
    def _whole(self) -> Range:
        return 0, self.num_samples - 1

    def _found(self, epoch: int, place: Range, shard: int, reason: str) -> Found:
        base = epoch * (len(self._edges) - 1)
        low, high = (base + bisect_right(self._edges, edge) - 1 for edge in place)
        return Found(*place, (low, high), shard, reason)

    def _find(self, ticket: int, part: tuple[int, int] | None) -> tuple[_Page, Range]:
        """The epoch's page and the places of a ticket or a part of it."""
        if ticket < 0:
            raise ValueError(f"tickets count from 0, got {ticket}")
        epoch, batch = divmod(ticket, len(self._edges) - 1)
        start, stop = self._edges[batch], self._edges[batch + 1]
        begin, end = part or (0, stop - start)
        if not 0 <= begin < end <= stop - start:
            raise ValueError(
                f"ticket {ticket} has the samples 0 to {stop - start - 1}, and no part {begin} to {end - 1}"
            )
        if epoch not in self._pages:
            self._pages[epoch] = _Page(self._num_shards)
        return self._pages[epoch], (start + begin, start + end - 1)

    def _shard(self, shard: int) -> int:
        if not 0 <= shard < self._num_shards:
            raise ValueError(f"the shards are 0 to {self._num_shards - 1}, got {shard}")
        return shard


def _count(found: Iterable[Found]) -> int:
    """The distinct places."""
    return len(Ranges((place.first, place.last) for place in found))
