"""`run` with workers that may be lost, leave and join while the training goes on.

launcher   RunMembership ── orders ──▶ the board ──▶ members           chooses the members
           a process has ended ─▶ it is lost            ◀── reports ── members     keep their processes and memory
           a process is stopped ─▶ it is killed

The launcher is this process; its end is the run's end.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from polytempo.collectives.invariant import Invariant
from polytempo.core import PolytempoError
from polytempo.core.system.first_failure import FirstFailure
from polytempo.core.system.notice import Notice, Preempted
from polytempo.core.system.url_path import Place
from polytempo.data.plan import check_global_batch
from polytempo.engines.engine import Engine, EngineProcess, EngineSetup, Launch, Role
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.processes.failures import blame, death_of, died, how
from polytempo.membership.message import Fail, GroupView, Interrupt, Order
from polytempo.membership.run_membership import RunMembership
from polytempo.report.status.progress import Progress
from polytempo.report.status.rows import read_metrics
from polytempo.runs.elastic.conductor import MembershipConductor
from polytempo.runs.elastic.elastic_worker import train_member
from polytempo.runs.elastic.member_board import Formed, LauncherBoard, Row, Said, SaveAndEnd
from polytempo.runs.frame.run_frame import framed_job, torch_threads, with_page
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.elastic.elastic_strategies import check_elastic
from polytempo.training.job.growth import times_by

_CALM_S = 0.05
"""The launcher looks for news at this interval while all train."""
_BUSY_S = 0.005
"""The same while a view is being made."""
_ASK_S = 0.2
"""The interval between two calls of `available`."""
_GRACE_S = 10.0
"""The time that processes have to end after the run."""

Available = Callable[[], int]
"""Returns the number of workers that there is room for now."""


class WorkersLost(PolytempoError):
    """An elastic run cannot go on: too few workers are left, or none that has the training's state."""


def run_elastic(
    spec: RunSpec,
    setup: EngineSetup,
    progress: Progress | None = None,
    available: Available | None = None,
    watch: Callable[[ElasticLauncher], object] = lambda launcher: None,
) -> Result:
    """Train with `spec.workers` workers at first; `available` returns the allowed number, a few times a second.

    `watch` is called with the launcher as often as it looks for news. Errors: `WorkerDied` if a worker raises,
    `WorkersLost` if fewer than `min_workers` are left, `Preempted` if this process got SIGTERM and the run has been
    saved.
    """
    check_elastic_spec(spec)
    options, history = spec.options, MembershipHistory(time.monotonic)
    meetings: list[Rendezvous] = []
    with torch_threads(), framed_job(spec, progress, history) as frame:
        placed = frame.placed(spec)
        launch = Launch(
            work=lambda role: train_member(placed, role.life, meetings[0].url),
            spec=placed,
            setting=lambda: {"rendezvous": meetings[0].url, **frame.given},
            workers=options.max_workers or spec.workers,
            most=(options.max_workers or spec.workers) + options.restarts,
            threads=options.threads or (None if spec.strategy.slices is None else 1),  # else bits change
        )
        engine = frame.opened(setup, launch)
        meetings.append(Rendezvous.held(engine.address.host))
        with closing(meetings[0]):
            frame.keep_rows(_last_step(frame.out) if options.resume else None)
            launcher = ElasticLauncher(
                *(bounds_of(placed), engine, LauncherBoard(meetings[0]), available, wanted_by_growth(placed)),
                history=history,
                record=frame.record,
                note=print_nothing if progress is None else progress.note,
                notice=frame.heed(options.grace_s),
            )
            answer = launcher.conduct(watch)
    return with_page(replace(Result(**answer), membership=history.changes), spec)


def _last_step(out: Place | None) -> int:
    return max((row["step"] for row in ([] if out is None else read_metrics(out))), default=0)


def check_elastic_spec(spec: RunSpec) -> None:
    """ValueError for a run that cannot be elastic."""
    options = spec.options
    check_elastic(spec.strategy)
    bounds_of(spec)
    if (least := spec.strategy.least_ranks) > max(2, options.min_workers or 1):
        raise ValueError(
            f"{spec.strategy} has a merge that needs at least {least} workers, and the run would go on with fewer; use "
            f"min_workers={least} or more, or a merge with smaller numbers"
        )
    most, slices = options.max_workers or spec.workers, spec.strategy.slices
    if slices is not None:
        Invariant(slices).check(most)
    if options.scaling == "global":
        check_global_batch(spec.global_batch_size, slices or most, "workers" if slices is None else "slices")


def bounds_of(spec: RunSpec) -> RunMembership:
    """The machine that chooses the members. ValueError for bounds that no run can keep."""
    options = spec.options
    return RunMembership(
        options.min_workers or 1,
        options.max_workers or spec.workers,
        spec.workers,
        restarts=options.restarts,
        answer_s=options.timeout_s,
    )


def wanted_by_growth(spec: RunSpec) -> Callable[[float], int] | None:
    """A function from the epoch to the wanted workers, if batches grow: it keeps the first batch of each worker."""
    growth = spec.options.batch_growth
    return None if not growth else lambda epoch: math.ceil(spec.workers * times_by(growth, epoch))


def print_nothing(text: str) -> None:
    """Note nothing: there is no progress to show."""


class ElasticLauncher:
    """Sees processes end, starts others, and asks how many there may be."""

    def __init__(
        self,
        machine: RunMembership,
        engine: Engine,
        board: LauncherBoard,
        available: Available | None,
        wanted: Callable[[float], int] | None = None,
        *,
        history: MembershipHistory | None = None,
        record: Callable[[dict[str, Any]], None] = lambda row: None,
        note: Callable[[str], object] = print_nothing,
        notice: Notice | None = None,
    ) -> None:
        """`record` takes rows of metrics, and `note` lines of text. `notice` is given when this process has to leave;
        with None, SIGTERM ends this process.
        """
        self._engine, self._available = engine, available
        self._members = MembershipConductor(machine, board, engine.stop, self._heed_order)
        self.processes = self._members.processes
        self._wanted, self._epoch = wanted, 0.0
        self._asked_s = 0.0
        self._rows: set[tuple[Any, ...]] = set()
        self._formed = 0
        self._asked_to_save: set[int] = set()
        self._saved_step: int | None = None
        self._first_lost: FirstFailure | None = None
        """The first loss since the last view: the cause where too few are left."""
        self.history = history or MembershipHistory(time.monotonic)
        self._record, self._note, self._notice = record, note, notice
        self.step = 0
        """The last step that the run is known to have applied."""

    @property
    def view(self) -> GroupView | None:
        """The present view."""
        return self._members.machine.view

    @property
    def is_training(self) -> bool:
        """True if the present view has applied a step."""
        return self.view is not None and self._formed == self.view.generation

    def conduct(self, watch: Callable[[ElasticLauncher], object]) -> Any:
        """Decide and act until the training is over; returns the result of its first member."""
        members = self._members
        while not members.machine.over:
            members.tick()
            while members.to_begin:
                life = members.to_begin.pop(0)
                self.processes[life] = self._engine.start(Role("member", life, life), -1)
            watch(self)
            for process in self._engine.poll(_BUSY_S if self._is_busy else _CALM_S):
                self._end(process)
            members.stop_late()
            for message in members.hear():
                self._hear(message)
            self._ask()
            self._heed_notice()
        return self._answer()

    @property
    def _is_busy(self) -> bool:
        return self.history.broken_s is not None or self.view is None

    def _end(self, process: EngineProcess) -> None:
        life, failure = process.role.life, process.failure
        if life in self._members.dismissed:
            return self._members.board.forget(life)
        if failure is not None and failure.error == Preempted.__name__:
            self._saved_step = (failure.facts or {})["step"]
            return
        if failure is not None or (process.exit_code or 0) > 0:
            raise died([process], len(self.processes))
        self.history.loses(str(process.role), how(process))
        self._first_lost = self._first_lost or death_of(process, str(process.role))
        self._members.lose(life)

    def _hear(self, message: Said) -> None:
        if isinstance(message, Row):
            self._epoch = max(self._epoch, message.row.get("epoch", 0.0))
            key = identity_of(message.row)
            if key not in self._rows:  # a step that was undone is made again
                self._rows.add(key)
                self._record(message.row)
        elif isinstance(message, Formed):
            self._formed = message.generation
            self.history.formed(message.generation)

    def _ask(self) -> None:
        now_s = time.monotonic()
        asked = [] if self._available is None else [self._available]
        if self._wanted is not None:
            asked.append(partial(self._wanted, self._epoch))
        if asked and now_s - self._asked_s >= _ASK_S:
            self._asked_s = now_s
            self._members.want(min(ask() for ask in asked))

    def _heed_notice(self) -> None:
        """Let the members save the same step and end, and end after them, if this process has to leave."""
        if self._notice is None or not self._notice.given:
            return
        self._members.machine.save_and_end()
        for life in self._members.machine.alive:
            if life not in self._asked_to_save:
                self._asked_to_save.add(life)
                self._members.board.tell(life, SaveAndEnd())
        if self._saved_step is not None and not set(self._members.members) & set(self._members.running):
            raise Preempted(self._saved_step)
        if self._notice.expired:
            self._notice.end()

    def _heed_order(self, order: Order) -> None:
        if isinstance(order, Fail):
            lost = f" (lost: {'; '.join(self.history.lost)})" if self.history.lost else ""
            error = WorkersLost(f"{order.reason}{lost}")
            raise error if self._first_lost is None else blame(error, self._first_lost)
        if isinstance(order, Interrupt):
            self.history.breaks()
        if isinstance(order, GroupView):
            self.step, self._first_lost = order.step, None
            if order.generation > 1:
                lost = "".join(f"; {text}" for text in self.history.lost)
                self._note(f"step {order.step}: {len(order.members)} workers go on{lost}")
            self.history.announced(order, {life: str(process.role) for life, process in self.processes.items()})

    def _answer(self) -> Any:
        """The result of the last view's first member. It has the result before it reports that it has finished."""
        first = self.processes[self._members.members[0]]
        until_s = time.monotonic() + _GRACE_S
        while self._members.running and time.monotonic() < until_s:
            self._engine.poll(_CALM_S)
        self._engine.stop()
        self._engine.poll()
        if first.result is None:
            raise died([first], len(self.processes))
        return json.loads(first.result)


class MembershipHistory:
    """The rows of `Result.membership` and `polytempo top`. `clock` returns seconds; the first value counts as zero."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._zero_s = clock, clock()
        self.changes: list[dict[str, Any]] = []
        """Each view: its begin, members, losses, and the seconds until its first step."""
        self.events: list[dict[str, Any]] = []
        """Losses and joins in the order of time, with the keys who, how, at_s, then."""
        self.lost: list[str] = []
        """The losses since the last view."""
        self.broken_s: float | None = None
        """The time of a change, until the first step after it."""

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The views so far."""
        return self.changes

    def loses(self, who: str, how: str) -> None:
        """A process has ended."""
        self.lost.append(f"{who} {how}")
        self.breaks()
        self._note(who, how)

    def breaks(self) -> None:
        """The present group is to end."""
        self.broken_s = self.broken_s or self._clock()

    def announced(self, view: GroupView, names: Mapping[int, str]) -> None:
        """Take a new view; `names` has the name of each life."""
        before = set(self.changes[-1]["members"]) if self.changes else set(view.members)
        for life in view.members:
            if life not in before:
                self._note(names[life], "joined")
        for life in sorted(before - set(view.members)):
            if not any(event["who"] == names[life] and event["how"] != "joined" for event in self.events):
                self._note(names[life], "left")
        for event in self.events:
            event["then"] = event["then"] or f"{len(view.members)} workers go on after step {view.step}"
        self.changes.append(
            {
                "generation": view.generation,
                "step": view.step,
                "members": list(view.members),
                "joined": len(view.members) - view.stateful if view.stateful else 0,
                "lost": self.lost,
                "seconds": None,
            }
        )
        self.lost = []

    def formed(self, generation: int) -> None:
        """The view of that generation has applied a step."""
        if self.changes and self.changes[-1]["generation"] == generation and self.broken_s is not None:
            self.changes[-1]["seconds"] = self._clock() - self.broken_s
            self.broken_s = None

    def _note(self, who: str, how: str) -> None:
        self.events.append({"who": who, "how": how, "at_s": self._clock() - self._zero_s, "then": ""})


def identity_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The kind, the step and the names of a row: a step that was undone is made again, with equal ones."""
    return row["kind"], row["step"], row.get("name"), *sorted(row.get("values", ()))
