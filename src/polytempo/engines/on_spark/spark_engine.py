"""The Spark engine: agents as tasks of a barrier stage of a session that is there.

    pt.run(job, strategy, workers=4, engine=pt.engines.spark(session))

start ─▶ a thread: parallelize(range(n), n).barrier().mapPartitions(agent_task)    a stage, in a job group of its own
poll  ─▶ asks how the stage has ended
stop  ─▶ waits for the tasks, which end with their agents; then cancels the job group
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.engines.engine import Launch
from polytempo.engines.extras import missing
from polytempo.engines.on_spark.task import AGENT, AgentEnd, agent_task
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote
from polytempo.engines.remote.ticket import AgentTicket, StartedAgent


@dataclass(frozen=True)
class Spark:
    """The executors of a classic Spark session, each task with one agent, which starts the run's processes there.

    `agents`: the number of tasks; None: one for each worker, or as many as there is room for. They keep their slots for
    the whole run. `address`: where executors reach this process; None: as they reach Spark's driver. Executors need
    polytempo installed, and the job's file where the driver has it.

    The run's keys travel to the tasks as Spark's tasks do: set spark.authenticate and spark.network.crypto.enabled on
    networks that others share. Spark keeps no task of it in its event log.

    Errors: ImportError without the extra `spark`; ValueError for a session of Spark Connect, or none; PolytempoError
    where the executors have no room, or agents are not there within `wait_s`.
    """

    session: Any = None
    agents: int | None = None
    address: str | None = None
    master: str | None = None
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse numbers that no run could use."""
        if self.agents is not None and self.agents < 1:
            raise ValueError(f"agents={self.agents} must be at least 1")
        if self.session is not None and self.master is not None:
            raise ValueError("a session has its master already; give one of session= and master=")

    @classmethod
    def from_address(cls, address: str) -> Spark:
        """The engine of the command line's `spark` (the session of spark-submit), or `spark:MASTER`."""
        return cls(master=address or None)

    @contextmanager
    def open(self, launch: Launch) -> Iterator[RemoteEngine]:
        """See `EngineSetup`. A session that is made here ends with the run."""
        with _session(self) as session:
            agents = self.agents or max(1, min(launch.workers, slots(session)))
            address = self.address or _driver_address(session)
            starter = SparkStarter(session)
            with opened_remote(launch, starter, agents, address=address, wait_s=self.wait_s) as engine:
                yield engine


@contextmanager
def _session(setup: Spark) -> Iterator[Any]:
    builder = _classic_session()
    if setup.session is not None:
        _check_classic(setup.session)
        yield setup.session
        return
    active = builder.getActiveSession()
    if active is not None and setup.master is None:
        _check_classic(active)
        yield active
        return
    making = builder.builder.appName("polytempo")
    session = (making if setup.master is None else making.master(setup.master)).getOrCreate()
    try:
        _check_classic(session)
        yield session
    finally:
        session.stop()


def _classic_session() -> Any:
    """The class of sessions. Raises ImportError that names the remedy."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise missing(error, "spark") from None
    return SparkSession


def _check_classic(session: Any) -> None:
    try:
        session.sparkContext._jsc.sc()
    except Exception:
        raise ValueError(
            f"{type(session).__module__}.{type(session).__name__} is not a running classic Spark session; sessions of "
            "Spark Connect have no barrier stages: make one with SparkSession.builder.master(…).getOrCreate()"
        ) from None


def _driver_address(session: Any) -> str:
    """The driver's address for executors."""
    host = session.sparkContext.getConf().get("spark.driver.host")
    return socket.gethostbyname(host)


_POLITE_S = 5.0
_CERTAIN_S = 30.0
_CAUSE = re.compile(r"^(?:(?:Caused by)?: )?([\w.]*(?:Error|Exception)): (.*)$", re.MULTILINE)


def slots(session: Any) -> int:
    """The number of tasks that the present executors can run at the same time."""
    scala = session.sparkContext._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    return int(scala.maxNumConcurrentTasks(profile))


class BarrierStage:
    """One barrier stage with tasks that run agents, and its end."""

    def __init__(self, session: Any, tickets: Sequence[str], module: str) -> None:
        self._context, self._tickets, self._module = session.sparkContext, tickets, module
        self.num_tasks = len(tickets)
        self.group = f"polytempo-{secrets.token_hex(4)}"
        """The name of its job group."""
        self.ends: list[AgentEnd] | None = None
        """The ends of the agents, once the stage has ended well."""
        self.error: str | None = None
        """The reason for the stage's failure, once it has failed."""
        self._thread = threading.Thread(target=self._run, name=self.group, daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """True until it has ended."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for its end at most this long."""
        self._thread.join(seconds)

    def cancel(self) -> None:
        """Let Spark kill its tasks."""
        self._context.cancelJobGroup(self.group)

    def how_ended(self, task: int) -> str:
        """The end of a task's agent, in words, once the stage has ended."""
        if self.ends is None:
            return f"has ended with its barrier stage: {self.error}"
        return next(f"on {end.host} has ended with exit code {end.exit_code}" for end in self.ends if end.task == task)

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self.group, "agents of polytempo", interruptOnCancel=True)
            numbers = self._context.parallelize(range(self.num_tasks), self.num_tasks)
            found = numbers.barrier().mapPartitions(agent_task(self._tickets, self._module)).collect()
            self.ends = [AgentEnd(*each) for each in found]
        except Exception as error:
            self.error = cause_of(str(error))


def cause_of(text: str) -> str:
    """The innermost error that Spark's text names: the error of a task, rather than its consequences."""
    found = [": ".join(match.groups()) for match in _CAUSE.finditer(text)]
    return found[-1] if found else text.strip().splitlines()[0]


@dataclass(eq=False)
class TaskAgent(StartedAgent):
    """An agent in a task of Spark."""

    stage: BarrierStage | None = None
    task: int = 0


class SparkStarter:
    """See `AgentStarter`. `module`: the module that `python -m` starts."""

    replaces = True

    def __init__(self, session: Any, module: str = AGENT) -> None:
        self._session, self._module = session, module
        self._stages: list[BarrierStage] = []
        self._agents: list[TaskAgent] = []

    def start(self, numbers: Sequence[int], ticket: AgentTicket) -> list[TaskAgent]:
        """See `AgentStarter`. PolytempoError where Spark has no room: it would wait for ever."""
        free = slots(self._session) - sum(stage.num_tasks for stage in self._stages if stage.runs)
        if free < len(numbers):
            raise PolytempoError(
                f"Spark has room for {max(0, free)} more tasks, and {len(numbers)} agents were to start; "
                "give fewer agents=, or more executors"
            )
        stage = BarrierStage(self._session, [ticket.numbered(number).to_json() for number in numbers], self._module)
        self._stages.append(stage)
        started = [TaskAgent(number, f"task {i} of Spark", stage=stage, task=i) for i, number in enumerate(numbers)]
        self._agents += started
        return started

    def poll(self) -> None:
        """See `AgentStarter`. An agent's own end is known here when its whole stage has ended."""
        for agent in self._agents:
            assert agent.stage is not None
            if agent.ended is None and not agent.stage.runs:
                agent.ended = agent.stage.how_ended(agent.task)

    def stop(self) -> None:
        """See `AgentStarter`. PolytempoError where Spark does not end its tasks."""
        for wait_s, cancels in ((_POLITE_S, False), (_CERTAIN_S, True)):
            until_s = time.monotonic() + wait_s
            for stage in self._stages:
                if cancels and stage.runs:
                    stage.cancel()
            for stage in self._stages:
                stage.wait(max(0.0, until_s - time.monotonic()))
        if left := [stage.group for stage in self._stages if stage.runs]:
            raise PolytempoError(f"Spark has not ended the tasks of {', '.join(left)}; cancel them in its page")
        self.poll()
