"""Agents in tasks of Spark, without Spark: a task's actions, and the outcomes of a stage's end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.engines.engine import Launch, parse_engine
from polytempo.engines.on_spark import spark_engine
from polytempo.engines.on_spark.spark_engine import SparkStarter, cause_of
from polytempo.engines.on_spark.task import AgentEnd, run_agent
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.wire.keys import make_keys
from waiting import soon

TICKET = AgentTicket("tcp://10.0.0.1:4242", make_keys())
LONG_S = 20.0


# --- a task


def test_an_agent_reads_its_ticket_and_its_exit_code_is_known(tmp_path: Path) -> None:
    read = f"import sys; open({str(tmp_path / 'ticket')!r}, 'w').write(sys.stdin.readline()); sys.exit(3)"
    assert run_agent([sys.executable, "-c", read], TICKET.to_json()) == 3
    assert AgentTicket.from_json((tmp_path / "ticket").read_text()) == TICKET


def test_an_agent_that_reads_nothing_is_waited_for() -> None:
    assert run_agent([sys.executable, "-c", "import os; os.close(0); os._exit(4)"], "x" * (1 << 20)) == 4


AGENT = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"
TASK = "import sys; from polytempo.engines.on_spark.task import run_agent; run_agent(sys.argv[1:], 'ticket')"


@pytest.mark.process
def test_an_agent_ends_with_its_task_however_that_ends(tmp_path: Path) -> None:
    """Spark kills the tasks of a cancelled stage by SIGKILL."""
    note = tmp_path / "pid"
    task = subprocess.Popen([sys.executable, "-c", TASK, sys.executable, "-c", AGENT, str(note)])
    assert soon(lambda: note.exists() and note.read_text() != "")
    agent = int(note.read_text())
    task.kill()
    task.wait()
    assert soon(lambda: gone(agent))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


# --- stages


class Stage:
    """A stage that runs until the test lets it end."""

    def __init__(self, session: Any, tickets: Sequence[str], module: str) -> None:
        self.num_tasks, self.tickets, self.group = len(tickets), tickets, "polytempo-1"
        self.runs, self.cancelled, self.obeys = True, False, True
        self.ends: list[AgentEnd] | None = None
        self.error: str | None = None

    def wait(self, seconds: float) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled, self.runs, self.error = True, not self.obeys, "cancelled"

    how_ended = spark_engine.BarrierStage.how_ended


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_engine, "BarrierStage", Stage)
    monkeypatch.setattr(spark_engine, "slots", lambda session: 3)


def test_one_stage_holds_all_agents() -> None:
    starter = SparkStarter(None)
    first, second = starter.start([4, 5], TICKET)
    stage: Any = first.stage
    assert [AgentTicket.from_json(text).number for text in stage.tickets] == [4, 5]
    starter.poll()
    assert (first.ended, second.ended) == (None, None)
    stage.runs, stage.ends = False, [AgentEnd(1, 0, "h2"), AgentEnd(0, 137, "h1")]
    starter.poll()
    assert first.ended == "on h1 has ended with exit code 137"
    assert second.ended == "on h2 has ended with exit code 0"


def test_a_failed_stage_ends_all_its_agents() -> None:
    starter = SparkStarter(None)
    agents = starter.start([0, 1], TICKET)
    stage: Any = agents[0].stage
    stage.runs, stage.error = False, "ModuleNotFoundError: No module named 'polytempo'"
    starter.poll()
    said = "has ended with its barrier stage: ModuleNotFoundError: No module named 'polytempo'"
    assert {agent.ended for agent in agents} == {said}


def test_a_stage_that_spark_would_never_start_is_refused() -> None:
    starter = SparkStarter(None)
    starter.start([0, 1], TICKET)
    with pytest.raises(PolytempoError, match="room for 1 more tasks, and 2 agents"):
        starter.start([2, 3], TICKET)
    starter.start([2], TICKET)


def test_stop_cancels_what_does_not_end_by_itself() -> None:
    starter = SparkStarter(None)
    quiet: Any = starter.start([0], TICKET)[0].stage
    quiet.runs, quiet.ends = False, [AgentEnd(0, 0, "h1")]
    stubborn: Any = starter.start([1], TICKET)[0].stage
    starter.stop()
    assert (quiet.cancelled, stubborn.cancelled) == (False, True)
    starter.stop()


def test_a_task_that_spark_does_not_end_is_named() -> None:
    starter = SparkStarter(None)
    stage: Any = starter.start([0], TICKET)[0].stage
    stage.obeys = False
    with pytest.raises(PolytempoError, match="not ended the tasks of polytempo-1"):
        starter.stop()


CAUSES = [
    (
        "An error occurred while calling z:collectAndServe.\n: org.apache.spark.SparkException: Job aborted\n"
        "\tat org.apache.spark.X\nCaused by: org.apache.spark.api.python.PythonException: Traceback\n"
        "ModuleNotFoundError: No module named 'polytempo'\n\n\tat org.apache.spark.Y",
        "ModuleNotFoundError: No module named 'polytempo'",
    ),
    ("An error occurred.\n: org.apache.spark.SparkException: Job 0 cancelled", "Job 0 cancelled"),
    ("the gateway is gone", "the gateway is gone"),
]


@pytest.mark.parametrize(("text", "cause"), CAUSES, ids=["task", "job", "else"])
def test_the_innermost_cause_is_told(text: str, cause: str) -> None:
    assert cause_of(text).endswith(cause)


# --- the setup


def test_the_command_line_names_a_master() -> None:
    assert parse_engine("spark") == pt.engines.spark()
    assert parse_engine("spark:local-cluster[2,1,1024]") == pt.engines.spark(master="local-cluster[2,1,1024]")
    assert parse_engine("spark:spark://head:7077").master == "spark://head:7077"  # type: ignore[attr-defined]


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="agents=0 must be at least 1"):
        pt.engines.spark(agents=0)
    with pytest.raises(ValueError, match="one of session= and master="):
        pt.engines.spark(object(), master="local")
    launch = Launch(lambda role: None, None, dict, 2, 2)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(ImportError, match=r"pip install 'polytempo\[spark\]'"):
        pt.engines.spark().open(launch).__enter__()
