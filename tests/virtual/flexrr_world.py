"""A small world for FlexRR: workers, a network that loses and doubles, one shard with a ledger, and a barrier.

It drives the production loop, `flexrr.protocol.covered_step`. Features that `VirtualWorld` lacks: a bad network, and
pauses at any moment.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from polytempo.core import Op, Port, Program, world_port
from polytempo.core.op import Compute, Now, Post, Take
from polytempo.flexrr.protocol import CoveredWork, Do, Peer, covered_step
from polytempo.flexrr.reassignment import Reassignment
from polytempo.flexrr.slices import DoThis, Slice, cut

MOST_EVENTS = 1_000_000

Delays = Callable[[Random], Sequence[float]]
"""The arrival times of copies of one message: none is a loss, two are a doubled message."""


class Hand(Op[None], frozen=True, eq=False):
    """`worker` pushes the gradient of `pieces`; finished when the shard has answered."""

    worker: int
    pieces: tuple[Slice, ...]
    alone: bool


class Pass(Op[None], frozen=True, eq=False):
    """Wait until no worker is so far behind `clock` that its bound forbids to go on."""

    clock: int


@dataclass(frozen=True)
class Scene:
    """One share takes a worker of speed 1 one second. Pauses are (worker, from, seconds)."""

    speeds: tuple[float, ...]
    clocks: int
    samples: int = 400
    slack: int = 0
    pauses: tuple[tuple[int, float, float], ...] = ()
    delays: Delays = lambda random: [random.uniform(0.0002, 0.001)]
    push_s: float = 0.001
    message_s: float = 20e-6
    """A worker's time to send or read one message."""
    slice_s: float = 100e-6
    """The time of one slice other than its samples'."""
    seed: int = 0


@dataclass
class World:
    """Runs a scene. `ledger` counts the applications of each slice, `seconds` is the time of the last worker's end."""

    scene: Scene
    reassignment: Reassignment | None
    now_s: float = 0.0
    seconds: float = 0.0
    ledger: Counter[Slice] = field(default_factory=Counter)
    executed: Counter[tuple[Slice, bool]] = field(default_factory=Counter)
    """The number of computations of each slice (alone or not)."""
    applied: list[tuple[int, tuple[Slice, ...]]] = field(default_factory=list)
    """Pushes as the shard took them: (worker, slices)."""
    dropped: int = 0
    messages: int = 0
    offers: int = 0

    def __post_init__(self) -> None:
        size = len(self.scene.speeds)
        self._random = Random(self.scene.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._mail: list[deque[tuple[int, Any]]] = [deque() for _ in range(size)]
        self._takers: dict[int, tuple[int, Program[None]]] = {}
        self._passing: list[tuple[int, Program[None], int]] = []
        self._left = [size * self.scene.samples] * self.scene.clocks
        self._first_open = 0
        self._serial = 0

    def run(self) -> World:
        """Until every worker has finished."""
        for worker in range(len(self.scene.speeds)):
            self._resume(self._program(worker), worker)
        while self._heap:
            assert self._serial < MOST_EVENTS, f"seed {self.scene.seed}: no end in sight at {self.now_s} s"
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        assert self._first_open == self.scene.clocks, f"seed {self.scene.seed}: not finished at {self.now_s} s"
        return self

    @property
    def shares(self) -> set[Slice]:
        """Every slice that there is."""
        slices = self.reassignment.slices if self.reassignment else 1
        each = [(w, c) for w in range(len(self.scene.speeds)) for c in range(self.scene.clocks)]
        return {piece for w, c in each for piece in cut(w, 1, c, self.scene.samples, slices)}

    # ------------------------------------------------------------------ workers

    async def _program(self, worker: int) -> None:
        port = world_port(worker, [0] * len(self.scene.speeds))
        peer = Peer(worker, port.members, self.reassignment) if self.reassignment else None
        for clock in range(self.scene.clocks):
            await Pass(clock)
            if peer is None:
                whole = Do(*cut(worker, 1, clock, self.scene.samples, 1), None, False)
                await self._compute(port, whole)
                await Hand(worker, (whole.slice,), False)
            else:
                await covered_step(port, peer, clock, self.scene.samples, self._work(port))
        await Pass(self.scene.clocks + self.scene.slack)

    def _work(self, port: Port) -> CoveredWork:
        async def push(pieces: list[Slice]) -> None:
            await Hand(port.rank, tuple(pieces), False)

        async def alone(do: Do) -> None:
            await self._compute(port, do)
            await Hand(port.rank, (do.slice,), True)

        return CoveredWork(lambda do: self._compute(port, do), push, alone)

    async def _compute(self, port: Port, do: Do) -> None:
        self.executed[do.slice, do.alone] += 1
        await port.compute(lambda: None, do.slice.samples / self.scene.samples)

    # ------------------------------------------------------------------ the world's actions

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (time_s, self._serial, action))

    def _resume(self, program: Program[None], worker: int, value: Any = None) -> None:
        try:
            op = program.send(value)
        except StopIteration:
            self.seconds = max(self.seconds, self.now_s)
            return
        match op:
            case Now():
                self._resume(program, worker, self.now_s)
            case Compute(flops=share):
                self._at(self._computed_s(worker, share), lambda: self._resume(program, worker))
            case Post(message, to):
                self._post(worker, to, message)
                self._at(self.now_s + self.scene.message_s, lambda: self._resume(program, worker))
            case Take(wait_s):
                self._take(program, worker, wait_s or 0.0)
            case Hand():
                self._at(self.now_s + self.scene.push_s / 2, lambda: self._apply(op))
                self._at(self.now_s + self.scene.push_s, lambda: self._resume(program, worker))
            case Pass(clock) if self._open(clock):
                self._resume(program, worker)
            case Pass(clock):
                self._passing.append((clock, program, worker))
            case _:
                raise TypeError(f"no such operation here: {op!r}")

    def _computed_s(self, worker: int, share: float) -> float:
        """The time of its end, if it begins now: pauses in between make it longer."""
        end_s = self.now_s + share / self.scene.speeds[worker] + (self.scene.slice_s if self.reassignment else 0.0)
        for paused, from_s, seconds in sorted(self.scene.pauses, key=lambda pause: pause[1]):
            if paused == worker and from_s < end_s and from_s + seconds > self.now_s:
                end_s += from_s + seconds - max(from_s, self.now_s)
        return end_s

    def _post(self, source: int, to: int, message: Any) -> None:
        self.messages += 1
        self.offers += isinstance(message, DoThis)
        for delay_s in self.scene.delays(self._random):
            self._at(self.now_s + delay_s, lambda: self._arrive(source, to, message))

    def _arrive(self, source: int, to: int, message: Any) -> None:
        self._mail[to].append((source, message))
        if to in self._takers:
            _, program = self._takers.pop(to)
            self._hand_over(program, to)

    def _take(self, program: Program[None], worker: int, wait_s: float) -> None:
        if self._mail[worker]:
            return self._hand_over(program, worker)
        if wait_s <= 0:
            return self._resume(program, worker, None)
        serial = self._serial
        self._takers[worker] = (serial, program)

        def give_up() -> None:
            if self._takers.get(worker, (None,))[0] == serial:
                del self._takers[worker]
                self._resume(program, worker, None)

        self._at(self.now_s + wait_s, give_up)

    def _hand_over(self, program: Program[None], worker: int) -> None:
        letter = self._mail[worker].popleft()
        self._at(self.now_s + self.scene.message_s, lambda: self._resume(program, worker, letter))

    # ------------------------------------------------------------------ the shard

    def _apply(self, push: Hand) -> None:
        """A shard's rule for tickets: a push is dropped when all of its tickets have been applied."""
        known = [piece for piece in push.pieces if self.ledger[piece]]
        if len(known) == len(push.pieces):
            self.dropped += 1
            return
        assert push.alone or not known, f"seed {self.scene.seed}: {known} were applied before"
        self.applied.append((push.worker, push.pieces))
        for piece in push.pieces:
            self.ledger[piece] += 1
            self._left[piece.clock] -= piece.samples
        while self._first_open < self.scene.clocks and not self._left[self._first_open]:
            self._first_open += 1
        passing, self._passing = self._passing, []
        for clock, program, worker in passing:
            if self._open(clock):
                self._resume(program, worker)
            else:
                self._passing.append((clock, program, worker))

    def _open(self, clock: int) -> bool:
        return self._first_open >= min(clock - self.scene.slack, self.scene.clocks)
