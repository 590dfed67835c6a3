"""`MembershipConductor`: stands between `RunMembership` and the processes of an elastic run, for every launcher.

RunMembership ── orders ──▶ MembershipConductor ── messages ──▶ LauncherBoard ──▶ processes
                                     ╰── begin, stop, a new view ──▶ the launcher: of elastic runs, of Horovod's ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from polytempo.engines.engine import EngineProcess
from polytempo.membership.message import Begin, Dismiss, End, GroupView, Interrupt, Kill, Leave, Order, Ready, Report
from polytempo.membership.run_membership import RunMembership
from polytempo.runs.elastic.member_board import LauncherBoard, Said

_STOPPED_S = 0.5
"""A process that a signal has stopped for this long is ended: it counts as lost, and might wake up."""
_LEAVE_S = 30.0
"""A dismissed process that runs for this long is ended."""


class MembershipConductor:
    """Performs the orders of `machine`, and passes messages of processes to it.

    The launcher starts a process for each life in `to_begin`, and puts it into `processes`. `stop` ends a process.
    `on_order` is called before each order is performed, and raises an error where the run cannot go on.
    """

    def __init__(
        self,
        machine: RunMembership,
        board: LauncherBoard,
        stop: Callable[[EngineProcess], object],
        on_order: Callable[[Order], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine, self.board = machine, board
        self._stop, self._on_order, self._clock = stop, on_order, clock
        self.processes: dict[int, EngineProcess] = {}
        """All started processes, by life."""
        self.to_begin: list[int] = []
        """Lives that have no process yet."""
        self.dismissed: dict[int, float] = {}
        """Life → deadline of its process."""
        self._stopped_s: dict[int, float] = {}

    @property
    def members(self) -> tuple[int, ...]:
        """The lives of the present view."""
        return () if self.machine.view is None else self.machine.view.members

    @property
    def running(self) -> list[int]:
        """The lives with a process that has not ended."""
        return [life for life, process in self.processes.items() if process.exit_code is None]

    def tick(self) -> None:
        """Let time pass."""
        self.perform(self.machine.tick(self._clock()))

    def want(self, number: int) -> None:
        """Set the number of wanted processes."""
        self.perform(self.machine.want(self._clock(), number))

    def lose(self, life: int) -> None:
        """Take the end of a process, expected or not."""
        self.perform(self.machine.ended(self._clock(), life))
        self.board.forget(life)

    def hear(self) -> Iterator[Said]:
        """The new messages of all processes. The machine receives each `Ready` and `Report` after the caller."""
        for life in self.machine.alive:
            for message in self.board.heard(life):
                yield message
                if isinstance(message, Ready | Report):
                    self.perform(self.machine.receive(self._clock(), message))

    def stop_late(self) -> None:
        """End processes that a signal has stopped, and dismissed processes that still run."""
        now_s = self._clock()
        for life in self.running:
            process = self.processes[life]
            if not process.stopped:
                self._stopped_s.pop(life, None)
            stopped = process.stopped and now_s - self._stopped_s.setdefault(life, now_s) > _STOPPED_S
            if stopped or now_s > self.dismissed.get(life, float("inf")):
                self._stop(process)

    def perform(self, orders: Iterable[Order]) -> None:
        """Perform orders, in their order."""
        for order in orders:
            self._on_order(order)
            match order:
                case Begin(life):
                    self.to_begin.append(life)
                case Kill(life):
                    self._stop(self.processes[life])
                case GroupView() | Interrupt():
                    self._tell(order, self.members)
                    if isinstance(order, GroupView):  # no process is in the group before it any more
                        self.board.forget_group(order.generation - 1)
                case Leave(life) | Dismiss(life) if life in self.to_begin:
                    self.to_begin.remove(life)
                case Leave(life) | Dismiss(life):
                    self._tell(order, [life])
                    if isinstance(order, Dismiss):
                        self.dismissed[life] = self._clock() + _LEAVE_S
                case End():
                    self._tell(order, self.machine.alive)

    def _tell(self, order: GroupView | Interrupt | Leave | Dismiss | End, lives: Iterable[int]) -> None:
        for life in lives:
            self.board.tell(life, order)
