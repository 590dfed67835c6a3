"""Learners that compute, push and pull, and a desk that obeys a rule: a shard without tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

from polytempo.core.rule import Action, Add, Answer, Arrival, Mix, Rule, Situation, Update

Average = Callable[[list[tuple[float, Any]], float], None]
"""An update: ((weight times rate, gradient) of all added gradients, divisor)."""


@dataclass
class Request:
    """A push or a pull that waits for its answer. `verdict` "": a push that nothing has become of yet."""

    number: int
    kind: Literal["push", "pull"]
    gradient: Any = None
    verdict: str = ""


@dataclass
class Desk:
    """Holds the rule's state and every worker's requests, and asserts that the rule asks for nothing impossible."""

    rule: Rule
    average: Average = lambda summed, divisor: None
    members: tuple[int, ...] = ()
    version: int = 0
    numbers: int = 0
    """Requests so far; they are named by it."""
    requests: dict[int, deque[Request]] = field(default_factory=dict)
    verdicts: dict[int, str] = field(default_factory=dict)
    """Push -> its verdict: "added", "mixed" or the reason of its drop."""
    summed: list[tuple[float, Any]] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    """All that the rule ever said."""

    def __post_init__(self) -> None:
        self.state = self.rule.init()
        founders, self.members = self.members, ()
        for worker in founders:
            self.join(worker)

    def updates(self) -> int:
        """The number of the rule's updates."""
        return sum(isinstance(action, Update) for action in self.actions)

    def join(self, worker: int) -> list[tuple[int, int]]:
        self.members = tuple(sorted({*self.members, worker}))
        self.requests.setdefault(worker, deque())
        return self.hear(Arrival("joined", worker))

    def leave(self, worker: int) -> list[tuple[int, int]]:
        self.members = tuple(m for m in self.members if m != worker)
        del self.requests[worker]
        return self.hear(Arrival("left", worker))

    def push(
        self, worker: int, clock: int, basis: int, samples: int = 1, gradient: Any = None
    ) -> list[tuple[int, int]]:
        self.numbers += 1
        self.requests[worker].append(Request(self.numbers, "push", gradient))
        return self.hear(Arrival("push", worker, clock, basis, samples))

    def pull(self, worker: int, clock: int) -> list[tuple[int, int]]:
        self.numbers += 1
        self.requests[worker].append(Request(self.numbers, "pull"))
        return self.hear(Arrival("pull", worker, clock))

    def hear(self, arrival: Arrival) -> list[tuple[int, int]]:
        """The (worker, request) that are answered because of it."""
        self.state, actions = self.rule.receive(self.state, arrival, Situation(self.version, self.members))
        self.actions += actions
        return [answer for action in actions for answer in self.perform(action)]

    def perform(self, action: Action) -> list[tuple[int, int]]:
        if isinstance(action, Update):
            assert self.summed, "an update of nothing"
            self.average(self.summed, action.divisor)
            self.summed, self.version = [], self.version + 1
            return []
        if isinstance(action, Answer):
            return [(action.worker, request.number) for request in self.answered(action.worker)]
        request = next(r for r in self.requests[action.worker] if r.kind == "push" and not r.verdict)
        request.verdict = {Add: "added", Mix: "mixed"}.get(type(action), getattr(action, "reason", ""))
        self.verdicts[request.number] = request.verdict
        if isinstance(action, Add):
            self.summed.append((action.weight * action.rate, request.gradient))
        return []

    def answered(self, worker: int) -> list[Request]:
        """The worker's requests, oldest first, up to the first push with a waiting gradient."""
        waiting, found = self.requests[worker], []
        while waiting and (waiting[0].kind == "pull" or waiting[0].verdict):
            found.append(waiting.popleft())
        return found


@dataclass
class Learner:
    """The state of one learner."""

    clock: int = 0
    basis: int = 0
    pull: int = 0
    """The pull that it waits for, or 0."""
    gradient: Any = None
    life: int = 0
    """Counts its computations, so that an abandoned one is known."""


@dataclass
class Run:
    """The results of a simulation."""

    desk: Desk
    seconds: float = 0.0
    staleness: list[int] = field(default_factory=list)
    """τ of every push, in the order of arrival."""


def simulate(
    desk: Desk,
    duration_s: Callable[[int], float],
    over: Callable[[Run], bool],
    gradient: Callable[[], Any] = lambda: None,
    gives_up: bool = False,
) -> Run:
    """Saturated learners without network: pull, compute for `duration_s(worker)`, push, again, until the run is `over`.

    `gradient()` is asked for at each pull. `gives_up`: who hears of a new version stops computing, and pulls.
    """
    learners = {worker: Learner() for worker in desk.members}
    run, ready = Run(desk), list[tuple[float, int, int, int]]()

    def ask(worker: int) -> list[tuple[int, int]]:
        learners[worker].pull = desk.numbers + 1
        return desk.pull(worker, learners[worker].clock)

    def begin(answers: list[tuple[int, int]]) -> None:
        for worker, number in answers:
            learner = learners[worker]
            if number == learner.pull:
                learner.pull, learner.basis, learner.gradient = 0, desk.version, gradient()
                learner.life += 1
                heappush(ready, (run.seconds + duration_s(worker), desk.numbers, worker, learner.life))

    for worker in desk.members:
        begin(ask(worker))
    while not over(run):
        run.seconds, _, worker, life = heappop(ready)
        learner = learners[worker]
        if life != learner.life:
            continue
        version = desk.version
        learner.clock += 1
        run.staleness.append(version - learner.basis)
        answers = desk.push(worker, learner.clock, learner.basis, gradient=learner.gradient)
        begin([*answers, *ask(worker)])
        if gives_up and desk.version > version:
            for other in desk.members:
                if not learners[other].pull and learners[other].basis < desk.version:
                    begin(ask(other))
    return run
