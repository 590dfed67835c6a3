"""`StoreRounds`: the rounds of workers that see no address of each other, only an object store.

    RUN/start                              the state of the first worker that came: all begin with it
    RUN/00000012.0.0/worker-2              worker 2 is at the meeting of round 12: its samples, its position in the data
    RUN/00000012.0.0/merger-0              the worker that decides: the first that has created this
    RUN/00000012.0.0/decision              who takes part, and the ledger up to here; immutable, kept for ever
    RUN/00000012.0.1/worker-2              its part of the round's first operation, such as its movement
    RUN/00000012.0.1/merged-3fa85f…        the sum, named by its hash
    RUN/00000012.0.1/decision              that this is the sum, or that a worker was lost and the round is tried again
    RUN/00000012.1.0/…                     the second attempt of round 12, among the workers left
    RUN/finished                           the name of the last state, and its round: no worker is left
    RUN/left                               the same by a worker that has left while others were expected

A merger waits for `wait_s`, then goes on with the present ones. A merger that is silent for so long is followed by the
next one. With several mergers the first decision that is created counts: every worker reads the same one. A worker that
is left out (`MissedRound`) asks to join, gets the state of the newest round, and takes part in the next one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from polytempo.core.calls.refusals import refuse
from polytempo.core.errors import Mismatch, PolytempoError
from polytempo.core.op import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, Op, ReduceScatter
from polytempo.worlds.collective import members_answers
from polytempo.worlds.object_store.object_store import ObjectStore, PatientLooks, StoredObject, StoreFailed, packed

_KEPT = 3
"""Rounds with objects that their creators have not removed yet."""


class RoundBroken(PolytempoError):
    """A worker was lost within a round; the others try the round again."""


class MissedRound(PolytempoError):
    """The others have gone on without this worker."""


class Admitted(NamedTuple):
    """The newest state, for a worker that joins."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


class StoreRounds:
    """One worker's part in the rounds of a run. `workers`: their number, with the present ones and the lost ones.

    `facts`: compared between workers in each round (`Mismatch`).
    """

    def __init__(self, store: ObjectStore, worker: int, workers: int, *, wait_s: float, timeout_s: float) -> None:
        self.store, self.worker, self.workers = store, worker, workers
        self.wait_s, self.timeout_s = wait_s, timeout_s
        self.facts = ""
        self.life = secrets.token_hex(8)
        self.round, self.members = -1, tuple(range(workers))
        """The present round, and the workers that take part in it."""
        self.expected = self.members
        """The workers that meet in the next round."""
        self.ledger: dict[str, dict[str, Any]] = {}
        """Each worker's samples that count, position in the data after them, and the round."""
        self.tokens: dict[str, str] = {}
        """Each worker's last request to join that was granted."""
        self._known: tuple[dict[str, dict[str, Any]], dict[str, str]] = ({}, {})
        """Ledger and requests before the part of the round that may be tried again."""
        self._attempt = self._number = 0
        self._merger = -1
        self._mine: dict[str, Any] = {}
        self._created: deque[tuple[int, str]] = deque()
        self.inside = False
        """True within a round."""
        self.begun = False
        """True while this worker has the run's state, so that others wait for it."""
        self.state: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]] = lambda: ({}, {})
        """The newest state, of the model and all that belongs to it."""

    # ------------------------------------------------------------------ the beginning

    def begin_alike(self, state: tuple[dict[str, Tensor], dict[str, Any]]) -> StoredObject | None:
        """The state that all begin with; None where the run has gone on without this worker.

        Worker 0 gives its own `state`, another one where it has not come within `wait_s`.
        """
        store, looks = self.store, PatientLooks(self.store)
        from_s = store.clock.now()
        while store.get(f"{_place(0, 0, 0)}/decision") is None:
            if (start := store.get("start")) is not None:
                self.check(start.about["facts"])
                return StoredObject(start.tensors, start.about["state"])
            if self.worker == 0 or store.clock.now() - from_s >= self.wait_s:
                self._create(0, "start", packed(state[0], {"facts": self.facts, "state": state[1]}))
            else:
                looks.pause(from_s + self.wait_s)
        return None

    def check(self, facts: str) -> None:
        """`Mismatch` for a run with other facts than this worker's."""
        if facts != self.facts:
            raise Mismatch(f"{self.store.url} has a run of {facts}, and worker {self.worker} has {self.facts}")

    # ------------------------------------------------------------------ rounds

    def begin(self, mine: dict[str, Any]) -> None:
        """Meet for the next round: afterwards `members` are the workers that take part.

        `mine`: this worker's `samples` so far, and its `place` in the data. Raises `MissedRound`, `Mismatch`, and
        `StoreFailed` (PT2906, PT2907).
        """
        self.round, self._attempt, self._mine = self.round + 1, 0, mine
        self._collect()
        self.keep()
        self._meet(self.expected)
        self.inside = True

    def keep(self) -> None:
        """Let exchanges so far count, also where a worker is lost in the rest of the round."""
        self._known = self.ledger, self.tokens

    def again(self) -> None:
        """Meet once more for the same round, after `RoundBroken`."""
        self._attempt += 1
        self._meet(self.members)

    def _meet(self, expected: Sequence[int]) -> None:
        self._number, self.members, self._merger = 0, tuple(expected), -1
        decision = self._decided(packed({}, self._about(kind="meeting", mine=self._mine)), None)
        self.members, self.expected = tuple(decision["members"]), tuple(decision["expected"])
        self.ledger, self.tokens, self._merger = decision["ledger"], decision["tokens"], decision["merger"]
        self._number = 1

    @property
    def newcomers(self) -> dict[int, str]:
        """Workers that meet in the next round and have no state yet, with their requests."""
        return {worker: self.tokens[str(worker)] for worker in self.expected if worker not in self.members}

    def leave(self, *, done: bool = True) -> None:
        """Tell the others that this worker comes to no further round.

        The last worker keeps its state in the store, if it is `done`: a worker that the last round left out
        goes on from it, alone. So does each one where a worker is left out, because others may be killed before.
        """
        if not self.begun or self.worker not in self.expected:
            return
        self.begun = False
        place = f"{_place(self.round + 1, 0, 0)}/worker"
        self.store.create(f"{place}-{self.worker}", packed({}, self._about(kind="leaves")))
        others = [self.store.get(f"{place}-{worker}") for worker in self.expected if worker != self.worker]
        is_last = all(other is not None and other.about["kind"] == "leaves" for other in others)
        if done and (is_last or len(self.expected) < self.workers) and self.round >= 0:
            token = secrets.token_hex(8)
            self.give(token, *self.state())
            self.store.put("finished" if is_last else "left", packed({}, {"token": token, "round": self.round}))

    # ------------------------------------------------------------------ joining

    def join(self) -> Admitted:
        """Ask for the newest state until a worker gives it. After `timeout_s` take a state that one has left.

        `StoreFailed` (PT2907) where there is none.
        """
        store, looks = self.store, PatientLooks(self.store)
        from_s = asked_s = store.clock.now()
        tokens: list[str] = []
        while True:
            now_s = store.clock.now()
            is_late = now_s - from_s > self.timeout_s
            if not tokens or now_s - asked_s > 4 * self.wait_s:
                asked_s = now_s
                tokens.append(secrets.token_hex(8))
                store.put(f"joins/{self.worker}", packed({}, {"token": tokens[-1]}))
            for token in tokens:
                if (state := store.get(f"admitted/{token}")) is not None:
                    store.remove(f"joins/{self.worker}")
                    return self._admitted(state)
            if (state := self._finished("left" if is_late else "finished")) is not None:
                store.remove(f"joins/{self.worker}")
                admitted, self.expected = self._admitted(state), (self.worker,)
                return admitted
            if is_late:
                self.fail("answers a request to join")
            looks.pause()

    def _finished(self, name: str) -> StoredObject | None:
        """The state that a worker has left under this name, unless another one has gone on from it."""
        found = self.store.get(name)
        if found is None or self.store.get(f"{_place(found.about['round'] + 1, 0, 0)}/decision") is not None:
            return None
        return self.store.get(f"admitted/{found.about['token']}")

    def _admitted(self, state: StoredObject) -> Admitted:
        at = state.about["rounds"]
        self.check(at["facts"])
        self.life = secrets.token_hex(8)
        self.round, self.expected = at["round"], tuple(at["expected"])
        self.members = tuple(at["members"])
        self.ledger, self.tokens = at["ledger"], at["tokens"]
        return Admitted(state.tensors, state.about["state"])

    def give(self, token: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Give this worker's state after the present round to the worker that asked by `token`."""
        at = {
            "round": self.round,
            "members": list(self.members),
            "expected": list(self.expected),
            "ledger": self.ledger,
            "tokens": self.tokens,
            "facts": self.facts,
        }
        self._create(self.round, f"admitted/{token}", packed(tensors, {"rounds": at, "state": about}))

    # ------------------------------------------------------------------ operations

    def check_inside(self, op: Op[Any]) -> None:
        """`Incompatible` (PT2904) between rounds, where it is not known who is there."""
        if not self.inside:
            refuse({"object store", "outside a round"}, what=str(op))

    def perform(self, op: Collective[Any]) -> Any:
        """The answer to a collective of the present members. Raises `RoundBroken` and `MissedRound`."""
        self.check_inside(op)
        if set(op.members) != set(self.members):
            refuse({"object store", "messages"}, what=str(op))
        if len(op.members) == 1:
            return members_answers([op])[0]
        position = op.members.index(self.worker)
        decision = self._decided(packed(sent_tensors(op, self.worker), self._about(kind=op.kind)), op)
        place = _place(self.round, self._attempt, self._number)
        self._number += 1
        match op:
            case AllReduce(buffer):
                return buffer.copy_(self._read(f"{place}/{decision['merged']}").tensors["0"].view_as(buffer))
            case ReduceScatter():
                total = self._read(f"{place}/{decision['merged']}").tensors["0"]
                return total.chunk(len(op.members))[position].to(op.buffer.device)
            case AllGather(buffer):
                return [self._part(place, member, buffer) for member in op.members]
            case Broadcast(buffer, source):
                return self._part(place, source, buffer)
            case AllToAll(pieces, _):
                return [self._part(place, member, pieces[0], position) for member in op.members]
            case Barrier():
                return None
        raise TypeError(f"{op!r} is not a collective of a world")

    def _part(self, place: str, member: int, like: Tensor, number: int = 0) -> Tensor:
        return self._read(f"{place}/worker-{member}").tensors[str(number)].to(like.device)

    def _read(self, name: str) -> StoredObject:
        found = self.store.get(name)
        if found is None:
            raise MissedRound(f"worker {self.worker}: {name} has been removed, so the others are several rounds ahead")
        return found

    # ------------------------------------------------------------------ decisions

    def _about(self, **more: Any) -> dict[str, Any]:
        return {"worker": self.worker, "life": self.life, "facts": self.facts, **more}

    def _decided(self, own: bytes, op: Collective[Any] | None) -> dict[str, Any]:
        """Put this worker's part, and return the common decision."""
        place = _place(self.round, self._attempt, self._number)
        if not self._create(self.round, f"{place}/worker-{self.worker}", own):
            raise MissedRound(f"another process is worker {self.worker} in round {self.round}")
        decision = self._awaited(place, op)
        if "differ" in decision:
            raise Mismatch(f"workers {decision['differ']} differ in strategy, model or operation from the others")
        if self.worker not in decision["members"]:
            raise MissedRound(f"round {self.round} goes on without worker {self.worker}")
        if decision["kind"] == "again":
            self.members = tuple(decision["members"])
            raise RoundBroken(f"round {self.round} goes on among {self.members}")
        return decision

    def _awaited(self, place: str, op: Collective[Any] | None) -> dict[str, Any]:
        """The decision: made here where this worker is the merger, or read."""
        store, looks = self.store, PatientLooks(self.store)
        from_s, since_s, tried = store.clock.now(), store.clock.now(), 0
        if self._merger < 0:
            merges = self._create(self.round, f"{place}/merger-{tried}", packed({}, self._about()))
        else:
            merges = self._merger == self.worker
        while True:
            if (found := store.get(f"{place}/decision")) is not None:
                return found.about
            now_s = store.clock.now()
            if merges:
                self._decide(place, op, since_s + self.wait_s)
                continue
            if now_s - from_s > self.timeout_s:
                self.fail(f"decides on {place}")
            if now_s - since_s > 2 * self.wait_s:
                tried, since_s = tried + 1, now_s - self.wait_s
                merges = self._create(self.round, f"{place}/merger-{tried}", packed({}, self._about()))
                continue
            looks.pause(since_s + 2 * self.wait_s)

    def _decide(self, place: str, op: Collective[Any] | None, until_s: float) -> None:
        parts, gone = self._gathered(place, until_s)
        present = [member for member in self.members if member in parts]
        own = parts[self.worker].about
        alike = [m for m in present if all(parts[m].about[key] == own[key] for key in ("facts", "kind"))]
        content: dict[str, Any]
        if alike != present:
            content = {"kind": "differ", "members": present, "differ": [m for m in present if m not in alike]}
        elif op is None:
            content = self._meeting(parts, present)
        elif present != list(self.members):
            content = {"kind": "again", "members": present, "lost": gone}
        else:
            content = {"kind": "complete", "members": present}
            if isinstance(op, AllReduce | ReduceScatter):
                content |= {"kind": "merged", "merged": self._merged(place, op, parts)}
        name, packed_content = f"{place}/decision", packed({}, content)
        if op is None:
            self.store.create(name, packed_content)
        else:
            self._create(self.round, name, packed_content)

    def _gathered(self, place: str, until_s: float) -> tuple[dict[int, StoredObject], list[int]]:
        """The parts of members, and the members that are missing when all others are there or the time is over."""
        parts, leaving = dict[int, StoredObject](), set[int]()
        looks = PatientLooks(self.store)
        while True:
            for member in self.members:
                if member in parts or member in leaving:
                    continue
                if (found := self.store.get(f"{place}/worker-{member}")) is not None:
                    if found.about["kind"] == "leaves":
                        leaving.add(member)
                    else:
                        parts[member] = found
            missing = [member for member in self.members if member not in parts]
            if set(missing) <= leaving or self.store.clock.now() >= until_s:
                return parts, missing
            looks.pause(until_s)

    def _meeting(self, parts: dict[int, StoredObject], present: list[int]) -> dict[str, Any]:
        """The decision on who takes part, with the ledger and the workers that join the next round."""
        ledger = dict(self._known[0])
        for member in present:
            ledger[str(member)] = parts[member].about["mine"] | {"round": self.round}
        tokens, joining = dict(self._known[1]), list[int]()
        for worker in range(self.workers):
            if worker in present or (asked := self.store.get(f"joins/{worker}")) is None:
                continue
            if asked.about["token"] != tokens.get(str(worker)):
                tokens[str(worker)] = asked.about["token"]
                joining.append(worker)
        return {
            "kind": "meeting",
            "round": self.round,
            "members": present,
            "lost": [member for member in self.members if member not in present],
            "expected": sorted([*present, *joining]),
            "merger": self.worker,
            "ledger": ledger,
            "tokens": tokens,
        }

    def _merged(self, place: str, op: AllReduce | ReduceScatter, parts: dict[int, StoredObject]) -> str:
        """The name of the sum, added in the members' order as in all worlds."""
        alike = [AllReduce(parts[member].tensors["0"], members=op.members) for member in op.members]
        content = packed({"0": members_answers(alike)[0]}, {})
        name = f"merged-{hashlib.sha256(content).hexdigest()[:16]}"
        self._create(self.round, f"{place}/{name}", content)
        return name

    # ------------------------------------------------------------------ old objects

    def _create(self, number: int, name: str, content: bytes) -> bool:
        """Create an object that this worker removes when it is old."""
        created = self.store.create(name, content)
        if created:
            self._created.append((number, name))
        return created

    def _collect(self) -> None:
        while self._created and self._created[0][0] < self.round - _KEPT:
            self.store.remove(self._created.popleft()[1])

    def fail(self, what: str) -> None:
        """Raise `StoreFailed` (PT2907): no other worker does `what`."""
        values = {"url": self.store.url, "what": what, "seconds": f"{self.timeout_s:g}", "worker": self.worker}
        raise StoreFailed(frozenset({"object store", "no worker"}), **values)


def history(store: ObjectStore) -> Iterator[dict[str, Any]]:
    """The decisions on who took part, round by round: `round`, `members`, `lost`, and the `ledger` after it."""
    number = 0
    while True:
        attempt, last = 0, None
        while (found := store.get(f"{_place(number, attempt, 0)}/decision")) is not None:
            attempt, last = attempt + 1, found.about
        if last is None:
            return
        yield last
        number += 1


def _place(number: int, attempt: int, operation: int) -> str:
    return f"{number:08d}.{attempt}.{operation}"


def sent_tensors(op: Collective[Any], worker: int) -> dict[str, Tensor]:
    """The tensors in a worker's part of an operation."""
    match op:
        case AllReduce(buffer) | ReduceScatter(buffer) | AllGather(buffer):
            return {"0": buffer}
        case Broadcast(buffer, source):
            return {"0": buffer} if source == worker else {}
        case AllToAll(pieces, _):
            return {str(i): piece for i, piece in enumerate(pieces)}
    return {}
