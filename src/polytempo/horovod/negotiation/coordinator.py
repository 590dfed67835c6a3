"""`NegotiationCoordinator`: decides the operations of all ranks, and their order. A machine without I/O.

    ranks submit names in any order ──▶ a name that all ranks of its process set have submitted is ready
                                        ready all-reduces are fused ──▶ verdicts, to all ranks the same

The first time, ranks submit a name with all that is to be known of it; the answer gives it a slot of a cache. From then
on they submit one bit, and the bitwise AND of the members' bits is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import msgspec

from polytempo.horovod.negotiation.cache import ResponseCache, slots_of
from polytempo.horovod.negotiation.matching import agreement, fused, refusal, with_joined
from polytempo.horovod.negotiation.message import (
    WHOLE,
    Agreement,
    Conclude,
    Evict,
    Farewell,
    Perform,
    Refuse,
    TensorRequest,
    Tune,
    Verdict,
    Verdicts,
    Word,
)


@dataclass
class StallLimits:
    """The limits in seconds of a partly submitted name, until a warning and until the negotiation's end. 0: never."""

    warn_s: float = 60.0
    end_s: float = 300.0


@dataclass
class PartlySubmitted:
    """Since when some ranks wait for the others."""

    since_s: float
    warned: bool = False

    def is_over(self, now_s: float, limits: StallLimits) -> bool:
        """True if the others had time enough."""
        return 0 < limits.end_s <= now_s - self.since_s

    def to_warn(self, now_s: float, limits: StallLimits) -> bool:
        """True when the warning is due, which comes once."""
        due = not self.warned and 0 < limits.warn_s <= now_s - self.since_s
        self.warned |= due
        return due


def description(name: str, there: Sequence[int], missing: Sequence[int], seconds: float, elsewhere: str) -> str:
    """The ranks with and without `name` among their submissions. `elsewhere`: other process sets with the same name
    waiting."""
    return (
        f"tensor {name!r} was submitted by ranks {list(there)} and not by ranks {list(missing)} for {seconds:.0f} s; "
        f"all ranks of a process set must submit the same names{elsewhere}"
    )


_Key = tuple[int, str]


class NegotiationCoordinator:
    """See the module. `process_sets`: their ranks by number, without the set of all ranks, which has number 0.

    Cost of a warm name with N ranks: one bit from each, and N - 1 operations on bit vectors for all that are ready.
    """

    def __init__(
        self,
        size: int,
        process_sets: Mapping[int, Sequence[int]] | None = None,
        *,
        fusion_bytes: int = 128 << 20,
        fuse_groups: bool = True,
        cache_capacity: int = 1024,
        stalls: StallLimits | None = None,
    ) -> None:
        self.size = size
        self.sets: dict[int, tuple[int, ...]] = {WHOLE: tuple(range(size))}
        self.sets |= {number: tuple(sorted(ranks)) for number, ranks in (process_sets or {}).items()}
        self.warnings: list[str] = []
        """Lines for the log; who drives the machine takes them out."""
        self.closed = ""
        """Why the negotiation is over."""
        self._fusion_bytes, self._fuse_groups = fusion_bytes, fuse_groups
        self._stalls = stalls or StallLimits()
        self._cache = ResponseCache(cache_capacity)
        self._asked = [0] * size
        """The slots that each rank has submitted and that are not ready yet, as bits."""
        self._pending: dict[_Key, dict[int, TensorRequest]] = {}
        """Requests that were spelled out, by rank."""
        self._partly: dict[_Key, PartlySubmitted] = {}
        self._joined: list[int] = []
        self._seen = [0] * size
        self._number = 0
        self._next_set = max(self.sets) + 1

    # ------------------------------------------------------------------ events

    def receive(self, rank: int, word: Word) -> Verdicts | None:
        """A rank has said something. The message to all ranks, if there is one."""
        if self.closed:
            return None
        if isinstance(word, Farewell):
            return self._close(f"rank {rank} has shut down{word.reason and ': '}{word.reason}")
        self._seen[rank] = max(self._seen[rank], word.seen)
        self._cache.seen_by_all(min(self._seen))
        touched: list[_Key] = []
        self._ask(rank, int.from_bytes(word.bits, "little"), touched)
        for request in word.requests:
            self._submit(rank, request, touched)
            if request.kind == "join":
                touched = list(self._pending)
        return self._answer(touched)

    def asked(self, rank: int, word: Word) -> list[TensorRequest]:
        """The requests of a rank in `word` that `receive` has not had yet. It changes nothing."""
        if self.closed or isinstance(word, Farewell):
            return []
        cached = (self._cache.entry(slot).requests for slot in slots_of(int.from_bytes(word.bits, "little")))
        return [*word.requests, *(requests[rank] for requests in cached)]

    def retune(self, fusion_bytes: int, cycle_s: float) -> Verdicts | None:
        """Fuse up to so many bytes from here on, and have all ranks gather names for so long."""
        if self.closed:
            return None
        self._fusion_bytes = fusion_bytes
        self._number += 1
        return Verdicts(self._number, (Tune(fusion_bytes, cycle_s),))

    def lost(self, rank: int, reason: str) -> Verdicts | None:
        """A rank's process has ended."""
        return None if self.closed else self._close(f"rank {rank} is lost ({reason})")

    def tick(self, now_s: float) -> Verdicts | None:
        """Time passes: names that only some ranks have submitted are looked at. A name's time begins with a tick."""
        if self.closed:
            return None
        there = {key: sorted(requests) for key, requests in self._pending.items()}
        for slot in slots_of(reduce(or_, self._asked)):
            key = self._cache.entry(slot).agreed.request.key
            there[key] = [rank for rank in range(self.size) if self._asked[rank] >> slot & 1]
        self._partly = {key: self._partly.get(key) or PartlySubmitted(now_s) for key in there}
        for key, partly in self._partly.items():
            seconds = now_s - partly.since_s
            if partly.is_over(now_s, self._stalls):
                return self._close(self._missing(key, there, seconds))
            if partly.to_warn(now_s, self._stalls):
                self.warnings.append(self._missing(key, there, seconds))
        return None

    def _missing(self, key: _Key, there: Mapping[_Key, Sequence[int]], seconds: float) -> str:
        number, name = key
        missing = [rank for rank in self.sets[number] if rank not in there[key] and rank not in self._joined]
        others = [other for other, same in there if same == name and other != number]
        elsewhere = f"; the same name waits in process sets {others} of ranks {[self.sets[o] for o in others]}"
        return description(name, there[key], missing, seconds, elsewhere if others else "")

    # ------------------------------------------------------------------ requests

    def _ask(self, rank: int, bits: int, touched: list[_Key]) -> None:
        """`rank` asks for slots again. Where others ask for such a name in other words, it is spelled out, too."""
        if not self._pending and self._cache.has_all(bits):
            self._asked[rank] |= bits
            return
        for slot in slots_of(bits):
            entry = self._cache.entry(slot)
            if not self._cache.has_all(1 << slot) or entry.agreed.request.key in self._pending:
                bits &= ~(1 << slot)
                self._submit(rank, entry.requests[rank], touched)
        self._asked[rank] |= bits

    def _submit(self, rank: int, request: TensorRequest, touched: list[_Key]) -> None:
        if request.kind == "join":
            self._joined.append(rank)
            return
        key = request.key
        requests = self._pending.setdefault(key, {})
        requests[rank] = request
        slot = self._cache.slot(key)
        if slot is not None:
            for other, asked in enumerate(self._asked):
                if asked >> slot & 1:
                    self._asked[other] &= ~(1 << slot)
                    requests[other] = self._cache.entry(slot).requests[other]
        touched.append(key)

    # ------------------------------------------------------------------ ready names

    def _answer(self, keys: Sequence[_Key]) -> Verdicts | None:
        verdicts: list[Verdict] = []
        fresh: set[int] = set()
        ready = self._warm(verdicts)
        for key in dict.fromkeys(keys):
            if key in self._pending and (agreed := self._cold(key, verdicts)):
                ready.append(agreed)
                fresh.add(agreed.slot)
        if self._joined and len(self._joined) == self.size:
            ready.append(Agreement(TensorRequest("join", "join", lasting=False), ((self._joined[-1],),)))
            self._joined = []
        for group in fused(ready, self._fusion_bytes, groups_too=self._fuse_groups):
            entries = (each if each.slot < 0 or each.slot in fresh else each.slot for each in group)
            verdicts.append(Perform(tuple(entries)))
        for agreed in ready:
            if agreed.request.kind == "remove_set":
                self._remove_set(agreed.request.numbers[0], verdicts)
        if self._cache.is_over and (freed := self._cache.overflow(self._number + 1, reduce(or_, self._asked))):
            verdicts.append(Evict(tuple(freed)))
        if not verdicts:
            return None
        self._number += 1
        return Verdicts(self._number, tuple(verdicts))

    def _warm(self, verdicts: list[Verdict]) -> list[Agreement]:
        """Agreements that all members have asked for by their bits."""
        ready: list[Agreement] = []
        for number, ranks in self.sets.items():
            joined = [rank for rank in ranks if rank in self._joined] if self._joined else []
            bits = self._cache.mask(number) if len(joined) < len(ranks) else 0
            for rank in ranks:
                if rank not in joined:
                    bits &= self._asked[rank]
            if not bits:
                continue
            for rank in ranks:
                self._asked[rank] &= ~bits
            for slot in slots_of(bits):
                agreed = self._cache.use(slot)
                if joined and (reason := with_joined(agreed.request, joined)):
                    verdicts.append(Refuse(number, agreed.request.name, reason))
                else:
                    ready.append(agreed)
        return ready

    def _cold(self, key: _Key, verdicts: list[Verdict]) -> Agreement | None:
        """The agreement of spelled-out requests, once all members have sent them; None, and perhaps a refusal,
        otherwise."""
        requests, ranks = self._pending[key], self.sets.get(key[0], ())
        if any(rank not in requests and rank not in self._joined for rank in ranks):
            return None
        del self._pending[key]
        first = requests[min(requests)]
        joined = [rank for rank in ranks if rank in self._joined]
        reason = "" if ranks else f"process set {key[0]} has been removed"
        reason = reason or refusal(requests, ranks) or self._refused_set(first)
        if reason := reason or (with_joined(first, joined) if joined else ""):
            verdicts.append(Refuse(*key, reason))
            return None
        agreed = agreement(requests, ranks)
        if first.kind == "add_set":
            agreed = msgspec.structs.replace(agreed, sizes=((self._next_set,),))
            self.sets[self._next_set] = tuple(sorted(first.numbers))
            self._next_set += 1
        return self._cache.put(agreed, requests)

    # ------------------------------------------------------------------ process sets

    def _refused_set(self, request: TensorRequest) -> str:
        """The reason why a process set cannot be added or removed."""
        if request.kind == "add_set":
            ranks = request.numbers
            if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
                return f"a process set has some of the ranks 0 to {self.size - 1}, each once, got {list(ranks)}"
            if tuple(sorted(ranks)) in self.sets.values():
                return f"there is a process set of ranks {sorted(ranks)} already"
        if request.kind == "remove_set" and (request.numbers[0] not in self.sets or request.numbers[0] == WHOLE):
            return f"there is no process set {request.numbers[0]} that could be removed"
        return ""

    def _remove_set(self, number: int, verdicts: list[Verdict]) -> None:
        """Forget a process set. Requests that wait in it are refused before: ranks know the set until it is removed."""
        del self.sets[number]
        names = [name for other, name in self._pending if other == number]
        slots = self._cache.drop_set(number, self._number + 1)
        gone, asked = reduce(or_, (1 << slot for slot in slots), 0), reduce(or_, self._asked)
        names += [self._cache.entry(slot).agreed.request.name for slot in slots_of(gone & asked)]
        self._asked = [bits & ~gone for bits in self._asked]
        for name in names:
            self._pending.pop((number, name), None)
        verdicts[:0] = [Refuse(number, name, f"{name!r}: process set {number} has been removed") for name in names]
        if slots:
            verdicts.append(Evict(tuple(slots)))

    def _close(self, reason: str) -> Verdicts:
        self.closed = reason
        self._number += 1
        return Verdicts(self._number, (Conclude(reason),))
