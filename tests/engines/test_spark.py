"""Runs with tasks of a barrier stage as agents, on one Spark session with two executors: it takes a minute or two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
from pyspark.sql import SparkSession

import polytempo as pt
from engines import averaging
from engines.batch_runs import awaited
from polytempo.core.errors import PolytempoError
from polytempo.engines.on_spark.spark_engine import slots
from polytempo.interop import map_reduce

DIGITS = pt.jobs.find("digits")
STEPS = 12
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the sockets of py4j
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two executors with a slot each, in JVMs of their own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    patch.setenv("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("spark")))
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
    for name, value in {
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executorEnv.OF_AN_EXECUTOR": "1",
        "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.sql.shuffle.partitions": "2",
    }.items():
        builder = builder.config(name, value)
    found = builder.getOrCreate()
    found.sparkContext.setLogLevel("ERROR")
    yield found
    found.stop()
    patch.undo()


@pytest.fixture(autouse=True)
def nothing_left(session: Any) -> Iterator[None]:
    """No agent is there after a test, and no task of Spark holds a slot."""
    yield
    awaited(lambda: agents() == [], "the end of all agents")
    awaited(lambda: list(session.sparkContext.statusTracker().getActiveStageIds()) == [], "the end of all stages")


def agents() -> list[int]:
    """The agents' processes, and their forks."""
    found = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    mine = [line.split() for line in found.splitlines() if line.endswith("-m polytempo.agent")]
    return [int(words[0]) for words in mine if _environment(words[0]).get("OF_AN_EXECUTOR") is not None]


def _environment(pid: str) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


STRATEGIES = {
    "sync_sgd": pt.strategies.sync_sgd,
    "local_sgd": lambda: pt.strategies.local_sgd(period=4),
    "downpour": lambda: pt.strategies.downpour(shards=2, replicas=1),
}


@cache
def by_local(name: str) -> pt.Result:
    return pt.run(DIGITS, STRATEGIES[name](), workers=2, steps=STEPS, threads=1)


# --- the same run


@pytest.mark.parametrize("name", ["sync_sgd", "local_sgd"])
def test_the_parameters_are_the_local_engines(name: str, session: Any, tmp_path: Path) -> None:
    engine = pt.engines.spark(session)
    found = pt.run(DIGITS, STRATEGIES[name](), workers=2, steps=STEPS, threads=1, engine=engine, out=tmp_path / "run")
    assert found.parameters_sha256 == by_local(name).parameters_sha256
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs == ["rank-0.log", "rank-1.log"]


def test_a_parameter_server_has_its_shards_in_tasks(session: Any) -> None:
    engine = pt.engines.spark(session)
    found = pt.run(DIGITS, STRATEGIES["downpour"](), workers=2, epochs=3, threads=1, engine=engine)
    assert found.accuracy is not None
    assert found.accuracy > 0.8
    assert found.ledger is not None
    assert all(each["twice"] == each["never"] == 0 for each in found.ledger), found.ledger


# --- data


READS = """
from dataclasses import replace
import polytempo as pt
from polytempo.jobs.digits import job as digits

job = replace(digits, name="parts", data=lambda path: pt.Data(pt.data.read_parts(path)), correct=None)
"""


def test_a_data_frame_becomes_what_workers_train_on(session: Any, tmp_path: Path) -> None:
    images, labels = pt.data.digits().train.tensors
    rows = [(image.tolist(), int(label)) for image, label in zip(images, labels, strict=True)]
    frame = session.createDataFrame(rows, "pixels array<float>, digit int").repartition(3, "digit").cache()
    folder = pt.data.from_spark(frame, tmp_path / "digits", inputs="pixels", target="digit", rows_per_part=400)
    found = pt.data.read_parts(folder)
    assert len(found) == len(rows)
    order = [tuple(row) for row in zip(found.tensors[0].tolist(), found.tensors[1].tolist(), strict=True)]
    assert sorted(order, key=str) == sorted(rows, key=str)
    assert max(map(len, (numpy.load(path) for path in (tmp_path / "digits").glob("*.targets.npy")))) <= 400
    (tmp_path / "own.py").write_text(READS)
    job = pt.jobs.find(f"{tmp_path}/own.py:job")
    engine = pt.engines.spark(session)
    options: Any = {"workers": 2, "steps": 4, "threads": 1, "data": tmp_path / "digits"}
    by_spark = pt.run(job, pt.strategies.sync_sgd(), engine=engine, **options)
    assert by_spark.parameters_sha256 == pt.run(job, pt.strategies.sync_sgd(), **options).parameters_sha256


def test_numeric_columns_stand_side_by_side(session: Any, tmp_path: Path) -> None:
    rows = [(1, 2.5, True, 0.5), (3, 4.5, False, 1.5)]
    frame = session.createDataFrame(rows, "a int, b double, c boolean, y double").coalesce(1)
    folder = pt.data.from_spark(frame, tmp_path / "set", inputs=["a", "b", "c"], target="y")
    inputs, targets = pt.data.read_parts(folder).tensors
    assert inputs.tolist() == [[1.0, 2.5, 1.0], [3.0, 4.5, 0.0]]
    assert targets.tolist() == [0.5, 1.5]
    with pytest.raises(ValueError, match="holds a data set already"):
        pt.data.from_spark(frame, tmp_path / "set", inputs=["a"], target="y")
    with pytest.raises(ValueError, match="no column z; it has a, b, c, y"):
        pt.data.from_spark(frame, tmp_path / "other", inputs=["z"], target="y")


WRONG = [
    ("array(1, null)", "arrays with nulls"),
    ("if(id = 0, array(1), array(1, 2))", "arrays of different lengths"),
    ("if(id = 0, null, array(1))", "column x has nulls"),
    ("'text'", "column x is of type string"),
]


@pytest.mark.parametrize(("x", "message"), WRONG, ids=[message for _, message in WRONG])
def test_columns_that_are_no_numbers_are_named(x: str, message: str, session: Any, tmp_path: Path) -> None:
    frame = session.range(2).coalesce(1).selectExpr(f"{x} as x", "id as y")
    with pytest.raises(ValueError, match=message):
        pt.data.from_spark(frame, tmp_path / "set", inputs="x", target="y")
    assert not (tmp_path / "set" / "index.json").exists()


def test_partitions_that_do_not_fit_are_named(session: Any, tmp_path: Path) -> None:
    frame = session.range(0, 2, 1, 2).selectExpr("if(id = 0, array(1), array(1, 2)) as x", "id as y")
    with pytest.raises(ValueError, match="different types or shapes"):
        pt.data.from_spark(frame, tmp_path / "set", inputs="x", target="y")
    assert not (tmp_path / "set" / "index.json").exists()


# --- map and reduce


def test_rounds_on_an_rdd_equal_rounds_on_lists(session: Any) -> None:
    rdd = session.sparkContext.parallelize(averaging.rows(), 4)
    found = map_reduce(averaging.JOB, rdd, rounds=3)
    averaging.check(found, map_reduce(averaging.JOB, rdd.glom().collect(), rounds=3))


def test_a_partition_that_fails_and_a_data_frame_are_named(session: Any) -> None:
    rdd = session.sparkContext.parallelize([(1, 2, 3)], 2)
    with pytest.raises(Exception, match=r"loss\(output, target\) needs batches that are pairs"):
        map_reduce(averaging.JOB, rdd)
    with pytest.raises(ValueError, match=r"frame\.rdd"):
        map_reduce(averaging.JOB, session.range(2))
    with pytest.raises(ValueError, match="no partition has a sample"):
        map_reduce(averaging.JOB, rdd.filter(lambda _: False))


# --- failures


FAILS = """
import os
from dataclasses import replace
from polytempo.jobs.digits import job as digits

def read(given):
    if "OF_AN_EXECUTOR" not in os.environ:
        return digits.data(given)
    print("this is in the log", flush=True)
    raise OSError("no such data")

job = replace(digits, name="fails", data=read)
"""


def test_an_error_comes_back(session: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    job = pt.jobs.find(f"{tmp_path}/own.py:job")
    with pytest.raises(Exception, match="no such data"):
        pt.run(job, pt.strategies.sync_sgd(), workers=2, steps=2, engine=pt.engines.spark(session))


def test_more_agents_than_room_are_refused(session: Any) -> None:
    """Spark itself would wait for ten minutes."""
    assert slots(session) == 2
    with pytest.raises(PolytempoError, match="room for 2 more tasks, and 3 agents"):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=3, steps=2, engine=pt.engines.spark(session, agents=3))


def interrupted(by: Callable[[], object]) -> threading.Thread:
    """Does it, once both agents have a worker each."""

    def wait() -> None:
        awaited(lambda: len(agents()) >= 4, "the run's begin")
        by()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_cancelled_stage_ends_the_run(session: Any) -> None:
    thread = interrupted(session.sparkContext.cancelAllJobs)
    with pytest.raises(PolytempoError):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=2, epochs=10_000, engine=pt.engines.spark(session))
    thread.join()


def test_control_c_ends_the_stage(session: Any) -> None:
    thread = interrupted(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=2, epochs=10_000, engine=pt.engines.spark(session))
    thread.join()
    assert slots(session) == 2


def test_a_stopped_session_is_named() -> None:
    class Connect:
        pass

    with pytest.raises(ValueError, match=r"Connect is not a running classic Spark session"):
        pt.run(DIGITS, pt.strategies.sync_sgd(), workers=2, steps=2, engine=pt.engines.spark(Connect()))
