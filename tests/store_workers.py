"""Workers of one object store in threads of one process, by turns under their own clock; and stores with faults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from polytempo.worlds.object_store.object_store import ObjectStore
from polytempo.worlds.object_store.rounds import StoreRounds
from polytempo.worlds.object_store.store_world import StoreWorld


class Killed(BaseException):
    """The end of a worker in a test: nothing catches it, and nothing is said to the others."""


class TurnClock:
    """A clock of threads that run one at a time, by the ends of their sleeps. Time passes in sleeps alone."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._wakes: dict[int, float] = {}
        self._running: int | None = None
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def begin(self, number: int, at_s: float) -> None:
        with self._turn:
            self._wakes[number] = at_s

    def sleep(self, seconds: float) -> None:
        with self._turn:
            number = self._running
            assert number is not None
            self._wakes[number] = self._now_s + seconds
            self._next()
            self._turn.wait_for(lambda: self._running == number)

    def run(self, number: int, work: Callable[[], object]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._running == number)
        try:
            work()
        finally:
            with self._turn:
                self._next()

    def start(self) -> None:
        with self._turn:
            self._next()

    def _next(self) -> None:
        self._running = min(self._wakes, key=lambda n: (self._wakes[n], n)) if self._wakes else None
        if self._running is not None:
            self._now_s = max(self._now_s, self._wakes.pop(self._running))
        self._turn.notify_all()


class MemoryObjects:
    """Objects in a dictionary."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def create(self, name: str, content: bytes) -> None:
        if name in self.content:
            raise FileExistsError(name)
        self.content[name] = content

    def put(self, name: str, content: bytes) -> None:
        self.content[name] = content

    def get(self, name: str) -> bytes:
        if name not in self.content:
            raise FileNotFoundError(name)
        return self.content[name]

    def remove(self, name: str) -> None:
        self.content.pop(name, None)


class Faults:
    """Another store with faults: `fault(number, operation, name)` is called before, with "lost …" after, each one."""

    def __init__(self, inner: Any, fault: Callable[[int, str, str], object]) -> None:
        self._inner, self._fault, self._number = inner, fault, 0

    def _faulty(self, operation: str, name: str, *content: bytes) -> Any:
        self._number += 1
        number = self._number
        self._fault(number, operation, name)
        answer = getattr(self._inner, operation)(name, *content)
        self._fault(number, f"lost {operation}", name)
        return answer

    def create(self, name: str, content: bytes) -> None:
        self._faulty("create", name, content)

    def put(self, name: str, content: bytes) -> None:
        self._faulty("put", name, content)

    def get(self, name: str) -> bytes:
        answer: bytes = self._faulty("get", name)
        return answer

    def remove(self, name: str) -> None:
        self._faulty("remove", name)


Work = Callable[[StoreWorld], object]


class Crew:
    """Workers of a run in one store. `wait_s`: of a round, in the seconds of `clock`."""

    def __init__(self, workers: int, *, wait_s: float = 10.0, timeout_s: float = 1000.0) -> None:
        self.workers, self._wait_s, self._timeout_s = workers, wait_s, timeout_s
        self.clock, self.objects = TurnClock(), MemoryObjects()
        self.answers: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def world(self, worker: int, objects: Any = None) -> StoreWorld:
        store = ObjectStore(objects or self.objects, "memory", deadline_s=30.0, clock=self.clock)
        return StoreWorld(StoreRounds(store, worker, self.workers, wait_s=self._wait_s, timeout_s=self._timeout_s))

    def add(self, worker: int, work: Work, *, at_s: float = 0.0, objects: Any = None) -> None:
        """Start `work` at this time of the clock, with `objects` as its way to the store."""
        number = len(self._threads)
        self.clock.begin(number, at_s)

        def answer() -> None:
            try:
                self.answers[number] = work(self.world(worker, objects))
            except (Exception, Killed) as error:
                self.answers[number] = error

        self._threads.append(threading.Thread(target=lambda: self.clock.run(number, answer), daemon=True))

    def run(self) -> list[Any]:
        """All answers, or errors, in the order of `add`."""
        for thread in self._threads:
            thread.start()
        self.clock.start()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a worker waits for its turn for ever"
        return [self.answers[number] for number in range(len(self._threads))]
