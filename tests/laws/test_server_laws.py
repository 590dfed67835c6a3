"""Laws that every rule of the parameter server obeys, under any events in any order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.rule import Rule
from polytempo.server.rules.asynchronous import on_arrival, softsync, within
from polytempo.server.rules.coverage import covered
from polytempo.server.rules.elastic import elastic
from polytempo.server.rules.staleness import cutoff, inverse
from polytempo.server.rules.synchronous_step import first, hardsync, quorum
from some_cases import examples
from virtual.learners import Desk

WORKERS = 4
RULES = [
    on_arrival(),
    on_arrival(cutoff(2)),
    hardsync(),
    softsync(1),
    softsync(2, inverse),
    softsync(1, workers=3),
    first(1),
    first(2),
    first(9),
    within(0),
    within(2),
    elastic(0.3),
    quorum(1),
    quorum(2),
    quorum(9),
    quorum(1, grace_s=1.0),
    covered(2),
    covered(2, bound=1),
]

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))

happenings = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "help", "step ahead", "pull", "leave", "join"]),
        st.integers(0, WORKERS - 1),
    ),
    max_size=60,
)


class Crew:
    """Workers as their clients would be: a push is followed by a pull, and a worker's knowledge comes from its
    pulls."""

    def __init__(self, rule: Rule) -> None:
        self.desk = Desk(forgetful(rule), members=(0, 1))
        self.clocks = dict.fromkeys(range(WORKERS), 0)
        self.bases = dict.fromkeys(range(WORKERS), 0)
        self.open: dict[int, tuple[int, str, int]] = {}
        """Requests without an answer: number -> (worker, kind, clock)."""
        self.lost: set[int] = set()
        """Pushes of workers that left before any decision."""
        self.pushes: set[int] = set()
        self.slack: list[int] = []
        """The lead of each answered pull over the slowest member, in steps."""

    def happen(self, what: str, worker: int) -> None:
        desk, member = self.desk, worker in self.desk.members
        if what == "join" and not member:
            others = [self.clocks[m] for m in desk.members]
            self.clocks[worker] = min(others, default=0)
            self.take(desk.join(worker))
            self.ask(worker, "pull")
        elif what == "leave" and member:
            for number, (owner, kind, _) in list(self.open.items()):
                if owner == worker:
                    del self.open[number]
                    if kind == "push" and number not in desk.verdicts:
                        self.lost.add(number)
            self.take(desk.leave(worker))
        elif what == "pull" and member:
            self.ask(worker, "pull")
        elif member and (what in ("step ahead", "help") or (what == "step" and not self.waits(worker))):
            self.clocks[worker] += what != "help" or not self.clocks[worker]  # help: one more push of the same step
            self.ask(worker, "push")
            self.ask(worker, "pull")

    def waits(self, worker: int) -> bool:
        return any(owner == worker for owner, _, _ in self.open.values())

    def ask(self, worker: int, kind: str) -> None:
        desk, clock = self.desk, self.clocks[worker]
        self.open[desk.numbers + 1] = (worker, kind, clock)
        version, updates = desk.version, desk.updates()
        if kind == "push":
            self.pushes.add(desk.numbers + 1)
            self.take(desk.push(worker, clock, self.bases[worker]))
        else:
            self.take(desk.pull(worker, clock))
        assert desk.version - version == desk.updates() - updates

    def take(self, answers: list[tuple[int, int]]) -> None:
        for worker, number in answers:
            owner, kind, clock = self.open.pop(number)  # fails if it had been answered already
            assert owner == worker
            if kind == "pull":
                self.bases[worker] = self.desk.version
                self.slack.append(clock - min(self.clocks[m] for m in self.desk.members))

    def finish(self) -> None:
        """All workers are back, and the free one furthest behind makes a step, until none waits."""
        for worker in range(WORKERS):
            self.happen("join", worker)
        for _ in range(400):
            if not self.open:
                return
            self.happen("step", min((m for m in range(WORKERS) if not self.waits(m)), key=lambda m: self.clocks[m]))


def forgetful(rule: Rule) -> Rule:
    """The rule with a state that is written and read again each time, as a snapshot does."""

    def receive(state, arrival, situation):  # type: ignore[no-untyped-def]
        return rule.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(state)), arrival, situation)

    return rule._replace(receive=receive)


@every_rule
@settings(max_examples=examples(50), deadline=None)
@given(story=happenings)
def test_every_gradient_counts_or_is_dropped_once_and_every_request_is_answered_once(
    rule: Rule, story: list[tuple[str, int]]
) -> None:
    crew = Crew(rule)
    for what, worker in story:
        crew.happen(what, worker)
    crew.finish()
    assert not crew.open
    assert crew.pushes == set(crew.desk.verdicts) | crew.lost
    assert not set(crew.desk.verdicts) & crew.lost


@pytest.mark.parametrize("bound", [0, 1, 3])
@settings(max_examples=examples(100), deadline=None)
@given(story=happenings)
def test_nobody_reads_who_is_further_ahead_than_the_bound(bound: int, story: list[tuple[str, int]]) -> None:
    crew = Crew(within(bound))
    for what, worker in story:
        crew.happen(what, worker)
    crew.finish()
    assert max(crew.slack, default=0) <= bound


@settings(max_examples=examples(100), deadline=None)
@given(story=happenings)
def test_enough_backups_are_hardsync_action_by_action(story: list[tuple[str, int]]) -> None:
    """The workers wait for their answers; a push ahead of a step is late where there are backups."""
    crews = Crew(hardsync()), Crew(first(WORKERS))
    for what, worker in story:
        for crew in crews:
            crew.happen("step" if what in ("step ahead", "help") else what, worker)
    assert crews[0].desk.actions == crews[1].desk.actions
