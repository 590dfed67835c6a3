"""The Spark engine: agents as tasks of a barrier stage of a session that is there.

pt.run(job, strategy, workers=4, engine=pt.engines.spark(session))
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polytempo.engines.engine import Launch
from polytempo.engines.extras import missing
from polytempo.engines.on_spark.starter import SparkStarter, slots
from polytempo.engines.remote.remote_engine import RemoteEngine, opened_remote


@dataclass(frozen=True)
class Spark:
    """The executors of a classic Spark session, each task with one agent, which starts the run's processes there.

    `agents`: how many tasks; None: one for each worker, or as many as have room at once. They keep their slots for the
    whole run. `address`: where executors reach this process; None: as they reach Spark's driver. Executors need
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
        """From the command line's `spark`, whose session is spark-submit's, or `spark:MASTER`."""
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
            f"{type(session).__module__}.{type(session).__name__} is no classic Spark session that runs; those of "
            "Spark Connect have no barrier stages: make one with SparkSession.builder.master(…).getOrCreate()"
        ) from None


def _driver_address(session: Any) -> str:
    """Where executors reach the driver."""
    host = session.sparkContext.getConf().get("spark.driver.host")
    return socket.gethostbyname(host)
