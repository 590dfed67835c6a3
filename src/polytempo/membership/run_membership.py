"""`RunMembership`: chooses the members of an elastic run. A machine without I/O: messages and time in, orders out.

    no view ──all begun are ready──▶ a view ──a member lost, left, or stopped for newcomers──▶ reports are collected
                                       ▲                                                             │
                                       └───────────── the next view, with the next generation ◀──────┘

Reports are collected until each member has reported or its process has ended. A member that does neither within
`answer_s` is killed. Then this machine knows everything about the present step, and nothing changes any more:

    a survivor has applied step s       every other one holds the answer of s (`membership.member`): all finish it
    no survivor has applied s           all undo it; its samples are dealt again
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

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

Place = Literal["begun", "waiting", "member", "gone"]


class RunMembership:
    """See the module. `wanted` processes are begun; between `minimum` and `maximum` of them train together.

    Lost processes are replaced, at most `restarts` of them; after that the run goes on with the remaining processes.
    `answer_s` bounds the wait for a member's report, and the run's wait for `minimum` members.
    `step`: steps that all members of a resumed run have applied at its beginning.
    """

    def __init__(
        self, minimum: int, maximum: int, wanted: int, *, restarts: int = 20, answer_s: float = 300.0, step: int = 0
    ) -> None:
        if not 1 <= minimum <= wanted <= maximum:
            raise ValueError(
                f"an elastic run has 1 <= min_workers <= workers <= max_workers, got {minimum}, {wanted} and {maximum}"
            )
        self._minimum, self._maximum, self._wanted = minimum, maximum, wanted
        self._restarts, self._answer_s, self._step = restarts, answer_s, step
        self._places: dict[int, Place] = {}
        self._next_life = 0
        self._losses = 0
        self._asked: set[int] = set()
        """Members that were asked to leave."""
        self._reports: dict[int, Report] = {}
        self._ending = False
        """True if all members save the run now, also members that want to leave."""
        self._interrupted = self._broken = False
        """True if the members of the view have to stop; True if their group cannot go on."""
        self._since_s: float | None = None
        """The time since which reports are collected."""
        self._lacking_since_s: float | None = None
        """The time since which all have reported, and are too few."""
        self.view: GroupView | None = None
        self.over = False
        """True if the training has come to its end, or cannot go on."""

    # ------------------------------------------------------------------ events

    def receive(self, now_s: float, message: Ready | Report) -> list[Order]:
        """Take a message of a process."""
        life = message.life
        if isinstance(message, Ready):
            if self._places.get(life) == "begun":
                self._places[life] = "waiting"
        elif self._places.get(life) == "member" and self.view and message.generation == self.view.generation:
            self._reports[life] = message
        return self.tick(now_s)

    def ended(self, now_s: float, life: int) -> list[Order]:
        """Take the end of a process, for any reason."""
        if self._places.get(life, "gone") != "gone":
            self._losses += 1
            if self._places[life] == "member" and self._since_s is None:
                self._since_s = now_s
            self._places[life] = "gone"
        self._reports.pop(life, None)
        return self.tick(now_s)

    def want(self, now_s: float, wanted: int) -> list[Order]:
        """Set the number of wanted processes, within the run's bounds."""
        self._wanted = min(max(wanted, self._minimum), self._maximum)
        return self.tick(now_s)

    def send_away(self, lives: Iterable[int]) -> list[Order]:
        """Send processes away, members at the next border of steps."""
        orders: list[Order] = []
        for life in lives:
            if life in self._asked or self._places.get(life, "gone") == "gone":
                continue
            self._asked.add(life)
            if self._places[life] == "member":
                orders.append(Leave(life))
            else:
                self._places[life] = "gone"
                orders.append(Dismiss(life))
        return orders

    def save_and_end(self) -> None:
        """Begin no more processes, and let no member leave before the others."""
        self._ending = True

    def tick(self, now_s: float) -> list[Order]:
        """Let time pass; returns the orders of this moment."""
        if self.over:
            return []
        orders = self._population()
        if self.view is None:
            return orders + self._first(now_s)
        if self._since_s is None and (self._reports or len(self._members()) < len(self.view.members)):
            self._since_s = now_s
        if self._since_s is None:
            return orders + self._admit(self.view)
        return orders + self._regroup(now_s, self.view, self._since_s)

    # ------------------------------------------------------------------ who is there

    @property
    def alive(self) -> list[int]:
        """Processes that have been begun, and have neither ended nor been dismissed."""
        return [life for life, place in self._places.items() if place != "gone"]

    def _at(self, place: Place) -> list[int]:
        return [life for life, its in self._places.items() if its == place]

    def _members(self) -> list[int]:
        assert self.view is not None
        return [life for life in self.view.members if self._places[life] == "member"]

    def _population(self) -> list[Order]:
        """Begin missing processes, and ask surplus processes to leave, the newest first."""
        if self._ending:
            return []
        going = self._asked | {life for life, report in self._reports.items() if report.leaving}
        staying = [life for life in self.alive if life not in going]
        orders: list[Order] = []
        first = self._next_life < self._wanted and self.view is None
        if len(staying) < self._wanted and (first or self._losses <= self._restarts):
            for _ in range(self._wanted - len(staying)):
                self._places[self._next_life] = "begun"
                orders.append(Begin(self._next_life))
                self._next_life += 1
        return orders + self.send_away(reversed(staying[self._wanted :]))

    # ------------------------------------------------------------------ views

    def _first(self, now_s: float) -> list[Order]:
        """The first view: when all processes are ready, or some of them after `answer_s`."""
        self._since_s = now_s if self._since_s is None else self._since_s
        waiting = self._at("waiting")
        late = now_s - self._since_s > self._answer_s
        if len(waiting) >= self._minimum and (late or not self._at("begun")):
            return [self._announce(waiting[: self._maximum], 0, self._step)]
        if not self.alive or late:
            return self._fail(f"only {len(waiting)} of {self._wanted} processes came to the beginning")
        return []

    def _admit(self, view: GroupView) -> list[Order]:
        """Interrupt the members if others wait and there is room."""
        room = self._maximum - len(view.members)
        if self._interrupted or not self._at("waiting") or room <= 0:
            return []
        self._interrupted = True
        return [Interrupt(view.generation)]

    def _regroup(self, now_s: float, view: GroupView, since_s: float) -> list[Order]:
        members = self._members()
        late = now_s - since_s > self._answer_s
        if silent := [life for life in members if life not in self._reports]:
            return [*self._stop(view, members), *(Kill(life) for life in silent if late)]
        if self._lacking_since_s is None:
            self._lacking_since_s = now_s
        reports = [self._reports[life] for life in members]
        if reports and reports[0].life == view.members[0] and reports[0].finished:
            self.over = True
            return [End()]
        return self._next(view, reports, late=now_s - self._lacking_since_s > self._answer_s)

    def _stop(self, view: GroupView, members: list[int]) -> list[Order]:
        """Let the other members stop; immediately if they wait for a lost member."""
        broken = len(members) < len(view.members) or any(not each.finished for each in self._reports.values())
        known = (self._interrupted, self._broken)
        self._interrupted, self._broken = True, self._broken or broken
        return [] if (self._interrupted, self._broken) == known else [Interrupt(view.generation, self._broken)]

    def _next(self, view: GroupView, reports: list[Report], late: bool) -> list[Order]:
        """The view after `view`, after the reports of all its living members."""
        stateful = [report for report in reports if report.stateful]
        if not stateful and (view.stateful or not reports):
            return self._fail("all workers that had the training's state were lost; go on from its last checkpoint")
        step = max((report.applied for report in stateful), default=self._step)
        behind = [r for r in stateful if r.applied != step and not (r.holds and r.applied + r.holds == step)]
        if behind:
            return self._fail(f"step {step} was applied, and these members neither have it nor can finish it: {behind}")
        stateful.sort(key=lambda report: report.applied != step)  # the first one knows all of the step
        staying = [r.life for r in stateful if not r.leaving or self._ending]
        if stateful and not staying:
            staying = [stateful[0].life]  # it stays until another one has its state
        others = [r.life for r in reports if not r.stateful and (not r.leaving or self._ending)]
        newcomers = [*others, *self._at("waiting")]
        chosen = [*staying, *newcomers][: self._maximum]
        handed_over = not stateful or not all(r.leaving for r in stateful) or len(chosen) > 1 or self._ending
        enough = len(chosen) >= (1 if self._ending else self._minimum)
        if not enough or not handed_over:
            few = f"{len(chosen)} workers are left, and at least {self._minimum} are needed"
            return self._fail(few) if late or self._hopeless(chosen) else []
        gone = [report.life for report in reports if report.life not in chosen]
        for life in gone:
            self._places[life] = "gone"
        return [self._announce(chosen, min(len(staying), len(chosen)), step), *(Dismiss(life) for life in gone)]

    def _hopeless(self, chosen: Iterable[int]) -> bool:
        """True if no other process can still join `chosen`."""
        return not set(self.alive) - set(chosen) - self._asked and self._losses > self._restarts

    def _announce(self, members: list[int], stateful: int, step: int) -> GroupView:
        for life in members:
            self._places[life] = "member"
        generation = 1 if self.view is None else self.view.generation + 1
        self.view = GroupView(generation, tuple(members), stateful, step)
        self._reports, self._interrupted, self._broken = {}, False, False
        self._since_s = self._lacking_since_s = None
        return self.view

    def _fail(self, reason: str) -> list[Order]:
        self.over = True
        return [Fail(reason)]
