"""The world of production machines and their faults: one heap of events, one clock, one seed.

    machine ── Outbox ──▶ network (drop, repeat, delay, cut) ──▶ heap ──▶ receive of another machine
       ▲                                                                      │
       └──────────────── tick, as soon as wait_s says so ─────────────────────┘

Tensors travel by reference, as they do in shared memory: if a machine writes to a tensor that is lent, the numbers come
out wrong, and the checkers find it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from torch import Tensor

from polytempo.chaos.network import Death, Fault, FaultPlan, FaultyNetwork, LinkCut, ProcessPause
from polytempo.core.errors import PolytempoError
from polytempo.server.message import Message, Outbox

_LAST_EVENTS = 30
_LEAST_WAIT_S = 0.001
_MAX_EVENTS = 200_000


class ChaosMachine(Protocol):
    """The methods of a production machine."""

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """A message has come."""

    def tick(self, now_s: float) -> Outbox:
        """Time has passed."""

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next tick, unless a message comes."""


class Watcher(Protocol):
    """Sees every event, and raises `Violation` where one breaks a promise."""

    def sent(self, now_s: float, source: int, target: int, message: Message) -> None:
        """`source` has handed `message` to the network; whether it arrives is not known."""

    def arriving(self, now_s: float, node: int, source: int, message: Message) -> None:
        """`node` lives and is about to receive `message`."""

    def handled(self, now_s: float, node: int) -> None:
        """`node` has just received or ticked."""

    def gave_up(self, node: int, error: PolytempoError) -> None:
        """The process on `node` ends with the error that its user would see."""


class Violation(Exception):  # a finding of a checker, not an error inside it
    """A machine broke a promise."""


class ChaosProcess:
    """A node, and the machine that runs on it now, if there is one."""

    def __init__(self, make: Callable[[int, float], ChaosMachine], mortal: bool) -> None:
        """`make(incarnation, now_s)` starts it."""
        self.make, self.mortal = make, mortal
        self.machine: ChaosMachine | None = None
        self.incarnation = 0
        self.paused_until_s = 0.0
        self.tick_s = -1.0
        self.starting = False

    def start(self, now_s: float) -> None:
        """Begin the next incarnation, without any state of the one before."""
        self.incarnation += 1
        self.machine = self.make(self.incarnation, now_s)


class World:
    """Processes, the network between them, and the clock."""

    def __init__(self, plan: FaultPlan, seed: int) -> None:
        """The network draws from `seed` alone."""
        self.plan = plan
        self.now_s = 0.0
        self.events = 0
        self.processes: dict[int, ChaosProcess] = {}
        self.watcher: Watcher
        self.allows: Callable[[Fault], bool] = lambda fault: True
        """False for a fault that is left out, because the servers promise nothing under it."""
        self.network = FaultyNetwork(plan, Random(seed))  # a stream of its own: the scenario's draws do not shift it
        self._heap: list[tuple[float, int, str, int, Any]] = []
        self._pushed = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._last: deque[tuple[Any, ...]] = deque(maxlen=_LAST_EVENTS)

    def place(self, node: int, make: Callable[[int, float], ChaosMachine], *, mortal: bool = True) -> None:
        """Start `node` when the world begins. `mortal`: its process may end when it has finished, or raises an error
        for its user."""
        self.processes[node] = ChaosProcess(make, mortal)

    def machine(self, node: int) -> Any:
        """The machine of `node`; None while it is dead."""
        return self.processes[node].machine

    def begin(self) -> None:
        """Start every process, and plan the faults."""
        for node in self.processes:
            self._at(0.0, "start", node)
        for fault in self.plan.faults:
            self._at(fault.begin_s, "fault", next(iter(self.processes)), fault)

    def alive(self, node: int) -> bool:
        """True while a process runs on `node`."""
        return self.processes[node].machine is not None

    def kill(self, node: int) -> None:
        """End the process on `node`; its planned ticks are cancelled."""
        process = self.processes[node]
        process.machine, process.paused_until_s, process.tick_s = None, 0.0, -1.0

    def restart(self, node: int, after_s: float) -> None:
        """Start another process on `node`, unless one lives by then."""
        if not self.processes[node].starting:
            self.processes[node].starting = True
            self._at(self.now_s + after_s, "start", node)

    def run(self, ended: Callable[[], bool], until_s: float) -> bool:
        """Perform events until `ended`; False if it has not ended by `until_s`."""
        while not ended():
            if not self._heap or self._heap[0][0] > until_s:
                return False
            if self.events >= _MAX_EVENTS:
                raise Violation(f"{_MAX_EVENTS} events and no end: some machine sends without pause")
            self._step()
        return True

    def note(self, *event: Any) -> None:
        """Add an event to the trace and its hash."""
        self._last.append((self.now_s, *event))
        self._hash.update(repr((self.now_s, event)).encode())

    def trace_hash(self) -> str:
        """The hash of all events so far."""
        return self._hash.hexdigest()

    def last_events(self) -> list[str]:
        """The end of the trace, as text."""
        return [f"{when:9.4f}  " + " ".join(str(part) for part in event) for when, *event in self._last]

    def _at(self, when_s: float, kind: str, node: int, what: Any = None) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (when_s, self._pushed, kind, node, what))

    def _step(self) -> None:
        when_s, _, kind, node, what = heapq.heappop(self._heap)
        process = self.processes[node]
        if kind == "tick" and process.tick_s != when_s:
            return  # put off meanwhile
        self.now_s = max(self.now_s, when_s)
        self.events += 1
        if kind in ("deliver", "tick") and self.now_s < process.paused_until_s:
            if kind == "tick":
                process.tick_s = process.paused_until_s
            self._at(process.paused_until_s, kind, node, what)
        elif kind == "deliver":
            self._deliver(node, process, *what)
        elif kind == "tick":
            process.tick_s = -1.0
            self._act(node, process, "tick", self.now_s)
        elif kind == "start":
            process.starting = False
            if process.machine is None:
                process.start(self.now_s)
                self.note("start", node, process.incarnation)
                self._handle(node, process, [])
        elif self.allows(what):
            self._fault(what)

    def _fault(self, fault: Fault) -> None:
        self.note(str(fault))
        match fault:
            case LinkCut():
                self.network.cuts.append(fault)
            case ProcessPause():
                self.processes[fault.node].paused_until_s = fault.end_s
            case Death():
                self.kill(fault.node)

    def _deliver(self, node: int, process: ChaosProcess, source: int, message: Message) -> None:
        self.note("→", node, "from", source, *summary(message))
        if process.machine is not None:
            self.watcher.arriving(self.now_s, node, source, message)
            self._act(node, process, "receive", self.now_s, source, message)

    def _act(self, node: int, process: ChaosProcess, what: str, *arguments: Any) -> None:
        """Let a machine receive or tick. An error that its user would see ends its process, as in a real run."""
        if process.machine is None:
            return
        try:
            outbox = getattr(process.machine, what)(*arguments)
        except PolytempoError as error:
            self.note("ends", node, str(error))
            self.watcher.gave_up(node, error)
            self.kill(node)
            return
        except Violation:
            raise
        except Exception as error:  # no fault may make a machine raise anything else
            raise Violation(f"node {node} raised {error!r}") from error
        self._handle(node, process, outbox)
        if process.mortal and getattr(process.machine, "finished", False):
            self.note("ends", node)
            self.kill(node)

    def _handle(self, node: int, process: ChaosProcess, outbox: Outbox) -> None:
        """Send a machine's messages, let the watcher look, and plan its next tick."""
        for target, message in outbox:
            self.watcher.sent(self.now_s, node, target, message)
            for arrives_s in self.network.arrivals(self.now_s, node, target):
                self._at(arrives_s, "deliver", target, (node, message))
        self.watcher.handled(self.now_s, node)
        if process.machine is not None:
            wake_s = self.now_s + max(_LEAST_WAIT_S, process.machine.wait_s(self.now_s))
            if process.tick_s < 0 or wake_s != process.tick_s:
                process.tick_s = wake_s
                self._at(wake_s, "tick", node)


def summary(message: Message) -> tuple[Any, ...]:
    """A message's class and its numbers, without tensors and long tuples."""
    return (type(message).__name__, *(_short(getattr(message, name)) for name in message.__struct_fields__))


def _short(value: Any) -> Any:
    match value:
        case Message():
            return summary(value)
        case bytes():
            return f"{len(value)} bytes"
        case Tensor():
            return "…"
        case tuple() if len(value) > 4 or any(isinstance(part, Tensor) for part in value):
            return f"{len(value)} of them"
    return value
