"""A run with a parameter server survives killed and stopped processes; other faults end it with an error.

`benchmarks/parameter_server/harm.py` has the runs with weights that count uses of each ticket, and the harmful
launcher; `faults.py` in the same folder does a hundred times as much of it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import polytempo as pt
from benchmark_module import benchmark
from polytempo.engines.processes.failures import WorkerDied
from polytempo.report.status.rows import read_metrics
from polytempo.runs.served.process_account import ProcessSupervisor
from polytempo.runs.served.served_run import ServedRun
from polytempo.server.coordinator.chains import ShardLost
from polytempo.server.message import Beat, Deal, Message, Outbox, Scored

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("private")]

SEED = random.SystemRandom().randrange(1_000_000)
QUICK = {"beat_s": 0.1, "lost_s": 0.8, "worker_lost_s": 0.8}
"""Instead of seconds: how soon a process that is silent is given up."""


harm = benchmark("parameter_server/harm.py")
Fault, Watching = harm.Fault, harm.Watching


def faulty(*faults: Any, kind: type = Watching) -> Callable[[ServedRun, ProcessSupervisor], Any]:
    """A launcher that does this harm."""
    return lambda run, supervisor: kind(run, supervisor, faults, SEED)


class Striking(Watching):  # type: ignore[misc, valid-type]
    """Kills the worker that gets a certain deal, immediately."""

    def __init__(self, run: ServedRun, supervisor: ProcessSupervisor, is_it: Callable[[Any, Deal], bool]) -> None:
        super().__init__(run, supervisor, (), SEED)
        self._is_it = is_it

    def _noted(self, out: Outbox) -> Outbox:
        super()._noted(out)
        for _, message in out:
            if isinstance(message, Deal) and not self.recoveries and self._is_it(self, message):
                self.strike(Fault(0, "worker", message.worker))
        return out


# --- survived faults


def test_every_process_may_be_killed_once_and_each_ticket_still_counts_once() -> None:
    print(f"seed {SEED}")
    plan = random.Random(SEED)
    victims = [("worker", worker) for worker in range(4)]
    victims += [(copy, shard) for copy in ("head", "tail") for shard in range(2)]
    plan.shuffle(victims)
    points = sorted(plan.randrange(300) for _ in victims)
    story = harm.told(faulty(*(Fault(p, *v) for p, v in zip(points, victims, strict=True))), harm.counting(1000))
    assert story.wrong == []
    assert sorted(recovery.fault[1:3] for recovery in story.launcher.recoveries) == sorted(victims)  # one may overtake
    told = {event["who"]: (event["how"], event["then"]) for event in story.result.server["events"]}
    assert {f"worker-{worker}" for worker in range(4)} <= set(told)
    assert told["worker-0"] == ("was killed by SIGKILL", "started again")


def test_each_ticket_counts_once_where_workers_push_their_sum_and_the_leader_is_killed_too() -> None:
    victims = (("worker", 0), ("head", 0), ("worker", 2), ("worker", 0), ("tail", 1))
    faults = [Fault(60 + 80 * number, *victim) for number, victim in enumerate(victims)]
    story = harm.told(faulty(*faults), harm.counting(800), hierarchical=True)
    assert story.wrong == []
    assert len(story.launcher.recoveries) == len(victims)
    assert story.result.server["updates"] < 800  # of each shard; some were of several tickets


def test_a_stopped_head_and_a_stopped_worker_are_replaced() -> None:
    faults = Fault(40, "head", 0, signal.SIGSTOP), Fault(80, "worker", 2, signal.SIGSTOP)
    story = harm.told(faulty(*faults), harm.counting(400), timing=QUICK)
    assert story.wrong == []
    assert len(story.launcher.recoveries) == 2
    told = {event["who"]: event for event in story.result.server["events"]}
    assert told["shard-0-node-4"]["how"].startswith("was silent for ")
    assert told["shard-0-node-4"]["then"] == "shard 0: the next copy took over"
    assert told["worker-2"]["how"].startswith("was silent for ")
    assert story.result.server["restarts"] == story.launcher.restarts >= 1


def test_a_stopped_worker_is_replaced_before_the_others_give_up_waiting_for_it() -> None:
    story = harm.told(faulty(Fault(80, "worker", 2, signal.SIGSTOP)), harm.counting(400), timeout_s=4.0)
    assert story.wrong == []
    assert [event["who"] for event in story.result.server["events"]] == ["worker-2"]


DEALS: dict[str, Callable[[Any, Deal], bool]] = {
    "the first ticket": lambda launcher, deal: 0 in (ticket.number for ticket in deal.tickets),
    "the last ticket": lambda launcher, deal: 89 in (ticket.number for ticket in deal.tickets),
    "the order to finish": lambda launcher, deal: deal.order == "finish",
}


@pytest.mark.parametrize("what", DEALS)
def test_a_worker_may_be_killed_with(what: str) -> None:
    job = harm.counting(30, tested=True)
    story = harm.told(lambda run, supervisor: Striking(run, supervisor, DEALS[what]), job, epochs=3)
    assert story.wrong == []
    assert len(story.launcher.recoveries) == 1
    assert story.result.loss == -2 * 3


class Unwatched(Watching):  # type: ignore[misc, valid-type]
    """Kills the evaluator when it first says that it lives, and when its first score comes, before that is heard of."""

    def __init__(self, run: ServedRun, supervisor: ProcessSupervisor) -> None:
        super().__init__(run, supervisor, (), SEED)
        self.killed: list[int] = []

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        if source == self.run.evaluator and isinstance(message, (Beat, Scored)[len(self.killed) :][:1]):
            process = self.process(source)
            assert process is not None
            self.killed.append(process)
            os.kill(process, signal.SIGKILL)
            return []
        return super().receive(now_s, source, message)


def test_the_evaluator_may_be_killed_and_no_score_is_lost(tmp_path: Path) -> None:
    story = harm.told(Unwatched, harm.counting(200, tested=True), epochs=2, out=tmp_path)
    assert story.wrong == []
    assert len(set(story.launcher.killed)) == 2
    assert [(event["who"], event["then"]) for event in story.result.server["events"]] == [
        ("evaluator", "started again"),
        ("evaluator.2", "started again"),
    ]
    assert story.result.loss == -2 * 2
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "test"]
    assert [row["step"] for row in rows] == [50, 100]
    assert [row["samples"] for row in rows] == [200, 400]


class Impatient(Watching):  # type: ignore[misc, valid-type]
    """Kills a worker and both tails before anything was said, and stops another worker."""

    def __init__(self, run: ServedRun, supervisor: ProcessSupervisor) -> None:
        super().__init__(run, supervisor, (), SEED)
        for fault in (
            Fault(0, "worker", 1),
            Fault(0, "worker", 3, signal.SIGSTOP),
            Fault(0, "tail", 0),
            Fault(0, "head", 1),
        ):
            self.strike(fault)


def test_processes_may_die_and_stand_still_before_they_have_said_a_word() -> None:
    story = harm.told(Impatient, harm.counting(60), timing=QUICK | {"starting_s": 1.0})
    assert story.wrong == []
    assert {p.role.incarnation for p in story.launcher.supervisor.ended if p.role.node in (1, 3)} == {1, 2}


class Unwelcoming(Watching):  # type: ignore[misc, valid-type]
    """Kills the first two processes that are started to hold a copy: one immediately, and one while it waits for its
    state."""

    def _copy(self, shard: int) -> None:
        super()._copy(shard)
        if self._restarts == 1:
            self.supervisor.kill(self._next_node - 1)

    def _hear(self, event: tuple[str, int]) -> None:
        super()._hear(event)
        if event == ("copied", 0) and self._restarts == 2:
            self.supervisor.kill(self._next_node - 1)


def test_a_new_copy_may_die_before_it_has_its_state() -> None:
    story = harm.told(faulty(Fault(40, "tail", 0), kind=Unwelcoming), harm.counting(500))
    assert story.wrong == []
    assert story.launcher._restarts == 3


def test_a_run_leaves_no_file_open_before_any_garbage_is_collected() -> None:
    """A run in an interpreter of its own: here other tests have files open, and threads that open and close some."""
    program = (
        "import gc, os, runpy, sys\n"
        "found = runpy.run_path(sys.argv[1])\n"
        "gc.collect()\n"
        "gc.disable()\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "found['harm'].performed(found['faulty'](), found['harm'].counting(8))\n"
        "print(sorted(set(os.listdir('/proc/self/fd')) - before))\n"
    )
    here = Path(__file__)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(here)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# --- ends of a run


def ended(
    error: type[BaseException], launch: Callable[[ServedRun, ProcessSupervisor], Any], job: pt.Job, **more: Any
) -> Any:
    """The error of the run's end; nothing of it may be left."""
    launchers = []

    def launched(run: ServedRun, supervisor: ProcessSupervisor) -> Any:
        launchers.append(launch(run, supervisor))
        return launchers[0]

    with pytest.raises(error) as raised:
        harm.performed(launched, job, **more)
    assert harm.left_behind(Path(tempfile.gettempdir()), launchers[0].processes) == []
    return raised.value


class Thorough(Watching):  # type: ignore[misc, valid-type]
    """Kills all copies of a shard."""

    def strike(self, fault: Any) -> None:
        for node in self.run.coordinator.chains[fault.which]:
            self.supervisor.kill(node)


def test_a_shard_whose_copies_all_die_ends_the_run() -> None:
    error = ended(ShardLost, faulty(Fault(20, "", 1), kind=Thorough), harm.counting(400))
    assert str(error) == "shard 1 is lost with every copy of it; resume from the last snapshot"


class Cruel(Watching):  # type: ignore[misc, valid-type]
    """Kills the only copy that has the state when the next one has just joined it."""

    def _hear(self, event: tuple[str, int]) -> None:
        super()._hear(event)
        if event == ("copied", 0) and self._restarts == 1:
            self.supervisor.kill(self.run.coordinator.chains[0][0])


def test_a_copy_that_never_got_the_state_cannot_replace_the_one_that_had_it() -> None:
    ended(ShardLost, faulty(Fault(20, "head", 0), kind=Cruel), harm.counting(400))


def test_an_error_in_a_worker_ends_the_run_and_is_shown() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.environ["POLYTEMPO_RANK"] == "2":
            raise ArithmeticError("the loss is not a number")
        return output.sum()

    error = ended(WorkerDied, faulty(), harm.counting(400, loss))
    assert str(error).startswith(
        "worker-2 failed: job counting: loss(output, target) raised ArithmeticError: the loss is not a number;"
    )
    assert "the run has ended. The last lines of" in str(error)
    assert (error.rank, error.last_lines[-1].strip()) == (2, 'raise ArithmeticError("the loss is not a number")')
    assert "src/polytempo" not in str(error)


def test_processes_are_not_started_again_for_ever_and_every_life_has_its_log(tmp_path: Path) -> None:
    faults = Fault(20, "worker", 1), Fault(40, "head", 0), Fault(60, "worker", 1)
    error = ended(pt.errors.PolytempoError, faulty(*faults), harm.counting(800), restarts=2, out=tmp_path)
    assert str(error) == (
        "worker-1.2 was killed by SIGKILL, and 2 processes have been started again already; give more restarts if "
        "that is to be expected"
    )
    copies = ["shard-0-node-10", "shard-0-node-4", "shard-0-node-5", "shard-1-node-6", "shard-1-node-7"]
    workers = ["worker-0", "worker-1", "worker-1.2", "worker-2", "worker-3"]
    assert sorted(path.stem for path in (tmp_path / "logs").iterdir()) == copies + workers


class Interrupted(Watching):  # type: ignore[misc, valid-type]
    """The launcher at Ctrl-C."""

    def strike(self, fault: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_all_processes() -> None:
    ended(KeyboardInterrupt, faulty(Fault(50, "", 0), kind=Interrupted), harm.counting(400))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_a_launcher_that_is_killed() -> None:
    _, left = harm.orphaned(signal.SIGKILL, 50, 400)
    assert left == []
