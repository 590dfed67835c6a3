"""`ResponseCache`: agreements that the coordinator and all ranks remember by a small number, their slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from polytempo.horovod.negotiation.message import Agreement, TensorRequest


class CachedRequests(NamedTuple):
    """An agreement, and the requests that it was made of."""

    agreed: Agreement
    requests: dict[int, TensorRequest]
    """The requests by rank; ranks that had joined are not among them."""


class ResponseCache:
    """The coordinator's cache. The least recently used entries give way where there are more than `capacity`.

    A rank may have asked for an entry before it learns that it has gone, so an entry that has given way is remembered,
    and its slot not given to another, until all ranks have said that they know.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[int, CachedRequests] = OrderedDict()
        self._slots: dict[tuple[int, str], int] = {}
        self._masks: dict[int, int] = {}
        """The slots of each process set's entries, as bits."""
        self._gone: dict[int, tuple[int, CachedRequests]] = {}
        """The number of the verdicts with the eviction, and the entry, by slot."""
        self._free: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def mask(self, process_set: int) -> int:
        """The slots of a process set's entries, as bits."""
        return self._masks.get(process_set, 0)

    def slot(self, key: tuple[int, str]) -> int | None:
        """The slot of the entry of that set and name."""
        return self._slots.get(key)

    def entry(self, slot: int) -> CachedRequests:
        """The entry at `slot`, or the evicted entry there."""
        return self._entries[slot] if slot in self._entries else self._gone[slot][1]

    def has_all(self, bits: int) -> bool:
        """True if no entry at these slots was evicted."""
        return not (self._gone and any(bits >> slot & 1 for slot in self._gone))

    def use(self, slot: int) -> Agreement:
        """The agreement at `slot`, which is now the most recently used."""
        self._entries.move_to_end(slot)
        return self._entries[slot].agreed

    def put(self, agreed: Agreement, requests: dict[int, TensorRequest]) -> Agreement:
        """Remember it; the answer has its slot."""
        key = agreed.request.key
        if not self._capacity or not agreed.request.lasting:
            return agreed
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else self._next
            self._next = max(self._next, slot + 1)
            self._slots[key] = slot
            self._masks[key[0]] = self._masks.get(key[0], 0) | 1 << slot
        placed = msgspec.structs.replace(agreed, slot=slot)
        self._entries[slot] = CachedRequests(placed, requests)
        self._entries.move_to_end(slot)
        return placed

    @property
    def is_over(self) -> bool:
        """True if there are more entries than the capacity."""
        return len(self._entries) > self._capacity

    def overflow(self, number: int, in_use: int) -> list[int]:
        """The slots that give way with verdicts `number`; none of `in_use` (bits) does."""
        excess = len(self._entries) - self._capacity
        if excess <= 0:
            return []
        chosen = [slot for slot in self._entries if not in_use >> slot & 1][:excess]
        for slot in chosen:
            self._retire(slot, number)
        return chosen

    def drop_set(self, process_set: int, number: int) -> list[int]:
        """All slots of a process set, which are evicted with verdicts `number`."""
        chosen = list(slots_of(self.mask(process_set)))
        for slot in chosen:
            self._retire(slot, number)
        return chosen

    def _retire(self, slot: int, number: int) -> None:
        entry = self._entries.pop(slot)
        key = entry.agreed.request.key
        del self._slots[key]
        self._masks[key[0]] &= ~(1 << slot)
        self._gone[slot] = (number, entry)

    def seen_by_all(self, number: int) -> None:
        """All ranks have seen the verdicts up to `number`: entries evicted with them can be forgotten."""
        if not self._gone:
            return
        for slot in [slot for slot, (gone, _) in self._gone.items() if gone <= number]:
            del self._gone[slot]
            self._free.append(slot)


def slots_of(bits: int) -> Iterator[int]:
    """The positions of the bits that are set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
