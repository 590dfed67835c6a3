"""The launcher of a run with a parameter server: a process that runs is alive, however long it says nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polytempo.engines.engine import EngineProcess, Failure, Role
from polytempo.engines.processes.failures import WorkerDied
from polytempo.runs.served.run_served import Launcher
from polytempo.server.coordinator.batch_scheduler import BatchScheduler
from polytempo.server.coordinator.coordinator import Coordinator, Listeners, Nodes
from polytempo.server.message import Ask, Beat, Members, Noted, Outbox
from polytempo.server.timing import Timing

HOUR_S = 3600
COPY, COORDINATOR = 2, 9


class Processes:
    """Two workers and one copy of a shard, some of them stopped; they start and end by name only."""

    def __init__(self) -> None:
        self.running = [Role("worker", 0, 0), Role("worker", 1, 1), Role("copy", COPY, 2, shard=0)]
        self.stopped: list[Role] = []
        self.killed: list[int] = []
        self.gone: list[EngineProcess] = []

    def look(self) -> list[EngineProcess]:
        gone, self.gone = self.gone, []
        return gone

    def kill(self, node: int) -> None:
        self.killed.append(node)

    @property
    def alive(self) -> list[EngineProcess]:
        return [EngineProcess(role, Path(f"{role}.log"), stopped=role in self.stopped) for role in self.running]


def launcher_of(processes: Processes, timeout_s: float = 300.0) -> Launcher:
    timing = Timing(deadline_s=timeout_s).of_processes(busy_s=0.0)
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(
            topology=SimpleNamespace(workers=[0, 1], evaluator=4, spares=[], replica_of=lambda worker: (worker,)),
            most_lives=8,
        ),
        incarnation=1,
        options=SimpleNamespace(reshape={}, restarts=3, timeout_s=timeout_s),
        look=lambda now_s, out: None,
    )
    chains, scheduler = [(COPY,)], BatchScheduler(4, 8, "freely", 2)
    run.coordinator = coordinator = Coordinator(
        Nodes(COORDINATOR, [0, 1], chains),
        scheduler,
        timing,
        listeners=Listeners(on_event=lambda event: run.on_event(event)),
    )
    launcher = Launcher(run, processes)  # type: ignore[arg-type]
    for worker in (0, 1):
        answered(launcher, launcher.receive(0.0, worker, Ask(worker, 1, 1, ())))
    assert set(coordinator.members) == {0, 1}
    return launcher


def answered(launcher: Launcher, out: Outbox) -> None:
    """The shard takes notice of any message."""
    for to, message in out:
        if to == COPY and isinstance(message, Members):
            reply = Noted(0, message.worker, message.incarnation, message.sequence)
            answered(launcher, launcher.receive(0.0, COPY, reply))


def pass_time(launcher: Launcher, begin_s: int, end_s: int) -> None:
    """Advance in steps of 0.4 s; the copy beats."""
    for tick in range(begin_s * 5 // 2, end_s * 5 // 2):
        launcher.receive(0.4 * tick, COPY, Beat(COPY, 1, 1))
        launcher.tick(0.4 * tick)


def test_a_worker_may_compute_for_an_hour_without_a_word() -> None:
    processes = Processes()
    pass_time(launcher_of(processes), 0, HOUR_S)
    assert processes.killed == []


def test_a_stopped_worker_is_given_up_after_half_a_minute() -> None:
    processes = Processes()
    processes.stopped = [processes.running[1]]
    launcher = launcher_of(processes)
    pass_time(launcher, 0, 30)
    assert processes.killed == []
    pass_time(launcher, 30, 32)
    assert processes.killed == [1]


def test_and_sooner_than_the_others_give_up_waiting_for_it() -> None:
    processes = Processes()
    processes.stopped = [processes.running[1]]
    pass_time(launcher_of(processes, timeout_s=20.0), 0, 6)
    assert processes.killed == [1]


def test_one_that_gives_up_waiting_tells_whom_it_waited_for(tmp_path: Path) -> None:
    processes = Processes()
    launcher = launcher_of(processes, timeout_s=20.0)
    failure = Failure("TimedOut", True, "call for work")
    processes.gone = [EngineProcess(processes.running[0], tmp_path / "log", exit_code=1, failure=failure)]
    with pytest.raises(WorkerDied, match=r"worker-1 had batches in hand: give a timeout_s of more than 20 where"):
        launcher.tick(1.0)
