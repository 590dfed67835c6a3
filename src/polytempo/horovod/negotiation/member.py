"""`NegotiationMember`: one rank's side of the negotiation. A machine without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from polytempo.horovod.negotiation.message import (
    WHOLE,
    Agreement,
    Conclude,
    Evict,
    Perform,
    Refuse,
    Submission,
    TensorRequest,
    Tune,
    Verdicts,
)


class DuplicateName(ValueError):
    """A rank submits a name that it has already submitted and that still waits."""


class ToPerform(NamedTuple):
    """An operation that all ranks perform now; ranks outside its process set leave it out."""

    agreements: tuple[Agreement, ...]


class ToFail(NamedTuple):
    """This rank's operation under a name cannot be performed."""

    key: tuple[int, str]
    reason: str


class ToEnd(NamedTuple):
    """Nothing will be performed any more."""

    reason: str


class ToTune(NamedTuple):
    """Names wait so long for others from now on."""

    cycle_s: float


ToDo = ToPerform | ToFail | ToEnd | ToTune


class NegotiationMember:
    """The submissions of rank `rank` without a result yet, and the cache as the coordinator described it.

    `waiting` has the keys of submissions without an end; the performer removes them by `finish`.
    """

    def __init__(self, rank: int, size: int, process_sets: Mapping[int, Sequence[int]] | None = None) -> None:
        self.rank = rank
        self.sets: dict[int, tuple[int, ...]] = {WHOLE: tuple(range(size))}
        self.sets |= {number: tuple(sorted(ranks)) for number, ranks in (process_sets or {}).items()}
        self.waiting: set[tuple[int, str]] = set()
        self.closed = ""
        self._cache: dict[int, Agreement] = {}
        self._own: dict[tuple[int, str], tuple[int, TensorRequest]] = {}
        """The slot by key, and this rank's request."""
        self._submitted: dict[tuple[int, str], TensorRequest] = {}
        self._bits = 0
        self._requests: list[TensorRequest] = []
        self._seen = 0

    def submit(self, request: TensorRequest) -> None:
        """Ask for something; `flush` says it. Errors: DuplicateName, and ValueError for a set without this rank."""
        key = request.key
        if key in self.waiting:
            raise DuplicateName(
                f"{request.kind} {request.name!r}: rank {self.rank} has submitted this name, and it is not done yet; "
                "wait for it, or give another name"
            )
        if self.rank not in self.sets.get(request.process_set, ()):
            ranks = self.sets.get(request.process_set)
            what = f"has the ranks {list(ranks)}" if ranks else "does not exist"
            raise ValueError(
                f"{request.kind} {request.name!r}: process set {request.process_set} {what}, so rank {self.rank} "
                "cannot take part"
            )
        self.waiting.add(key)
        known = self._own.get(key)
        if known is not None and (known[1] is request or known[1] == request):
            self._bits |= 1 << known[0]
        else:
            self._requests.append(request)
        self._submitted[key] = request

    @property
    def has_to_say(self) -> bool:
        """True if `flush` would return a message."""
        return bool(self._bits or self._requests)

    def flush(self) -> Submission | None:
        """The requests since the last call."""
        bits, requests = self._bits, self._requests
        if not bits and not requests:
            return None
        self._bits, self._requests = 0, []
        return Submission(self._seen, bits.to_bytes((bits.bit_length() + 7) // 8, "little"), tuple(requests))

    def receive(self, told: Verdicts) -> list[ToDo]:
        """The coordinator has decided. The steps to do, in this order."""
        assert told.number == self._seen + 1, f"verdicts {told.number} after {self._seen}"
        self._seen = told.number
        todo: list[ToDo] = []
        for verdict in told.verdicts:
            match verdict:
                case Perform(entries):
                    known = (self._cache[e] if isinstance(e, int) else self._learnt(e) for e in entries)
                    todo.append(ToPerform(tuple(known)))
                case Refuse(process_set, name, reason):
                    if self.rank in self.sets.get(process_set, ()):
                        todo.append(ToFail((process_set, name), reason))
                case Evict(slots):
                    self._forget(slots)
                case Tune(_, cycle_s):
                    todo.append(ToTune(cycle_s))
                case Conclude(reason):
                    self.closed = reason
                    todo.append(ToEnd(reason))
        return todo

    def finish(self, keys: Iterable[tuple[int, str]]) -> None:
        """Forget the ended operations: their names can be submitted again."""
        for key in keys:
            self.waiting.discard(key)
            self._submitted.pop(key, None)

    def _learnt(self, agreed: Agreement) -> Agreement:
        request = agreed.request
        if agreed.slot >= 0:
            self._cache[agreed.slot] = agreed
            self._own.pop(request.key, None)  # a rank that has joined has not asked, even if it asked before
            if (mine := self._submitted.get(request.key)) is not None:
                self._own[request.key] = (agreed.slot, mine)
        if request.kind == "add_set":
            self.sets[agreed.sizes[0][0]] = tuple(sorted(request.numbers))
        elif request.kind == "remove_set":
            del self.sets[request.numbers[0]]
        return agreed

    def _forget(self, slots: Sequence[int]) -> None:
        """Unsent requests for these slots are spelled out: the coordinator may have forgotten them by then."""
        for slot in slots:
            key = self._cache.pop(slot).request.key
            own = self._own.pop(key, None)
            if own is not None and self._bits >> slot & 1:
                self._bits &= ~(1 << slot)
                self._requests.append(own[1])
