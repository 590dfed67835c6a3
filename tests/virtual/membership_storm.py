"""A storm over an elastic run: processes die, stop, come and leave at random, and groups break on some members alone.

One event at a time, drawn from a seed. A process's applications are a list of (step, first sample, end), which shows a
step applied by halves, twice, or with another deal of samples.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from polytempo.membership.member import ElasticMember
from polytempo.membership.message import (
    Begin,
    Dismiss,
    End,
    Fail,
    GroupView,
    Interrupt,
    Kill,
    Leave,
    Order,
    Ready,
    Report,
)
from polytempo.membership.run_membership import RunMembership

SAMPLES = 100
Applied = tuple[int, int, int]


class Broken(AssertionError):
    """A check has found something."""


@dataclass
class Gathering:
    """One generation's collectives: the members in each, and the members that asked to stop."""

    members: tuple[int, ...]
    came: dict[tuple[str, int], dict[int, bool]] = field(default_factory=dict)


@dataclass(eq=False)
class Process:
    """One life. `place`: its next action."""

    member: ElasticMember
    place: str = "making"
    alive: bool = True
    stopped: bool = False
    log: list[Applied] = field(default_factory=list)
    inbox: list[Order] = field(default_factory=list)
    view: GroupView | None = None
    interrupted: int = 0
    leaving: bool = False


class Storm:
    """`commit`: whether members have a commit point; without one the storm must find it. `steps`: of a round."""

    def __init__(
        self, seed: int, machine: type[RunMembership] = RunMembership, *, commit: bool = True, steps: int = 1
    ) -> None:
        self.random, self.commit, self.steps = random.Random(seed), commit, steps
        self.calm = False
        wanted = self.random.randint(2, 4)
        self.machine = machine(self.random.randint(1, 2), 5, wanted, restarts=40, answer_s=30.0)
        self.processes: dict[int, Process] = {}
        self.gatherings: dict[int, Gathering] = {}
        self.outbox: list[Ready | Report | int] = []
        """Messages on their way to the machine; a number is an ended process."""
        self.now_s = 0.0
        self.ended_well = False
        self.failed = ""
        self.views: list[GroupView] = []

    def run(self, events: int = 4000) -> None:
        """Until the run is over. The storm lasts for a part of the time."""
        self._perform(self.machine.tick(0.0))
        for number in range(events):
            self.calm = number > 400
            self.now_s += 0.05
            self._happen()
            if self.machine.over:
                break
        if self.failed and "state were lost" in self.failed:
            return
        if not self.ended_well:
            raise Broken(f"the run does not end: {self.failed or self.machine.view}")
        done = [p for p in self.processes.values() if p.alive and p.place == "done"]
        if not done:
            raise Broken("it ended, and no process has the result")
        for process in done:
            self._check_log(process)

    # ------------------------------------------------------------------ events

    def _happen(self) -> None:
        draw = self.random.random()
        running = [p for p in self.processes.values() if p.alive]
        if not self.calm and running and draw < 0.008:
            self._kill(self.random.choice(running))
        elif not self.calm and running and draw < 0.012:
            self.random.choice(running).stopped = True
        elif 0.02 <= draw < 0.04 and (stopped := [p for p in running if p.stopped]):
            self._wake_or_kill(self.random.choice(stopped))
        elif not self.calm and 0.04 <= draw < 0.05:
            self._perform(self.machine.want(self.now_s, self.random.randint(2, 5)))
        elif not self.calm and running and 0.05 <= draw < 0.055:
            self.random.choice(running).leaving = True
        elif self.outbox and draw < 0.5:
            self._deliver()
        else:
            able = [p for p in running if not p.stopped]
            if able:
                self._advance(self.random.choice(able))
        self._perform(self.machine.tick(self.now_s))

    def _kill(self, process: Process) -> None:
        process.alive = False
        self.outbox.append(process.member.life)

    def _wake_or_kill(self, process: Process) -> None:
        """The launcher gives up a process that is stopped; or it goes on just before."""
        if self.random.random() < 0.5:
            process.stopped = False
        else:
            self._kill(process)

    def _deliver(self) -> None:
        """Messages of one process keep their order; messages of several do not."""
        said = self.random.choice(self.outbox)
        life = said if isinstance(said, int) else said.life
        first = next(m for m in self.outbox if (m if isinstance(m, int) else m.life) == life)
        self.outbox.remove(first)
        if isinstance(first, int):
            self._perform(self.machine.ended(self.now_s, first))
        else:
            self._perform(self.machine.receive(self.now_s, first))

    def _perform(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Begin(life):
                    self.processes[life] = Process(ElasticMember(life))
                case Kill(life):
                    if self.processes[life].alive:
                        self._kill(self.processes[life])
                case Fail(reason):
                    self.failed = reason
                case End():
                    self.ended_well = True
                case GroupView():
                    self.views.append(order)
                    self.gatherings[order.generation] = Gathering(order.members)
                    for life in order.members:
                        self.processes[life].inbox.append(order)
                case Interrupt():
                    for process in self.processes.values():
                        process.inbox.append(order)
                case Leave(life) | Dismiss(life):
                    self.processes[life].inbox.append(order)

    # ------------------------------------------------------------------ one process

    def _advance(self, process: Process) -> None:
        if process.inbox and (process.place in ("waiting", "done") or self.random.random() < 0.5):
            self._hear(process, process.inbox.pop(0))
            return
        if process.place == "making":
            process.place = "waiting"
            self.outbox.append(Ready(process.member.life))
        elif process.place in ("sync", "exchange", "commit"):
            self._meet(process)

    def _hear(self, process: Process, order: Order) -> None:
        if isinstance(order, GroupView):
            self._enter(process, order)
        elif isinstance(order, Interrupt):
            process.interrupted = max(process.interrupted, order.generation)
        elif isinstance(order, Leave):
            process.leaving = True
        elif isinstance(order, Dismiss):
            process.place, process.alive = "dismissed", False

    def _enter(self, process: Process, view: GroupView) -> None:
        verdict = process.member.enter(view)
        if verdict == "finish":
            self._apply(process, process.view)
        process.view = view
        if verdict != "take over" and len(process.log) * self.steps != view.step:
            raise Broken(f"{process.member.life} has {len(process.log)} steps at the beginning of {view}")
        if verdict == "take over" and view.stateful == 0:
            process.member.taken_over(view.step)
        process.place = "sync"

    def _meet(self, process: Process) -> None:
        """Come to the next collective, or look whether all have come."""
        view = process.view
        assert view is not None
        life = process.member.life
        gathering = self.gatherings[view.generation]
        which = (process.place, process.member.applied if process.place != "sync" else -1)
        came = gathering.came.setdefault(which, {})
        stops = process.leaving or process.interrupted == view.generation
        if life not in came:
            came[life] = stops
            return
        lost = [m for m in gathering.members if not self._is_member(m, view)]
        whole = len(came) == len(gathering.members)
        if lost and (not whole or self.random.random() < 0.5):
            self._report(process)
        elif whole:
            self._passed(process, view, any(came.values()))

    def _is_member(self, life: int, view: GroupView) -> bool:
        other = self.processes[life]
        entered = other.view is not None and other.view.generation == view.generation
        return other.alive and (not entered or other.place in ("sync", "exchange", "commit"))

    def _passed(self, process: Process, view: GroupView, stop: bool) -> None:
        if process.place == "sync":
            source = self.processes[view.members[0]]
            if not process.member.stateful:
                if not source.member.stateful or source.member.applied != view.step:
                    raise Broken(f"{view} takes the state from a member that has it not")
                process.log = list(source.log)
                process.member.taken_over(view.step)
            self._next(process, False)
        elif process.place == "exchange":
            process.member.exchanged(self.steps)
            process.place = "commit"
            if not self.commit:
                self._apply(process, view)
                self._next(process, stop)
        else:
            self._apply(process, view)
            self._next(process, stop)

    def _next(self, process: Process, stop: bool) -> None:
        process.place = "exchange"
        if process.log and process.log[-1][2] >= SAMPLES:
            self._report(process, finished=True)
            process.place = "done"
        elif stop:
            self._report(process)

    def _apply(self, process: Process, view: GroupView | None) -> None:
        """The members of `view`, the view at the step's begin, have dealt two samples each."""
        assert view is not None
        begin = process.log[-1][2] if process.log else 0
        process.log.append((process.member.applied // self.steps, begin, min(SAMPLES, begin + 2 * len(view.members))))
        process.member.stepped()

    def _report(self, process: Process, *, finished: bool = False) -> None:
        process.place = "waiting"
        self.outbox.append(process.member.report(leaving=process.leaving, finished=finished))

    def _check_log(self, process: Process) -> None:
        begin = 0
        for number, (step, first, end) in enumerate(process.log):
            if step != number or first != begin or end <= first:
                raise Broken(f"life {process.member.life}: samples lost or dealt twice: {process.log}")
            begin = end
        if begin != SAMPLES:
            raise Broken(f"life {process.member.life}: {begin} of {SAMPLES} samples: {process.log}")
        others = [p.log for p in self.processes.values() if p.alive and p.place == "done"]
        if any(log != process.log for log in others):
            raise Broken("members ended with different steps")
