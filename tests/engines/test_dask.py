"""Runs on dask, two worker processes of this host: the same bits as here, lost workers, cancelled tasks, Ctrl-C.

`make test-engines` runs it, in a venv with the extra `dask`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import dask
import dask.bag
import pytest
from distributed import Client, Future, LocalCluster

import polytempo as pt
from engines import averaging
from engines.cluster_runs import (
    DETERMINISTIC,
    FAILS,
    LONG_S,
    SERVED,
    Killer,
    agents,
    awaited,
    begun,
    digits,
    folders,
    local_hashes,
    marked,
    parent,
    program,
)
from polytempo.engines.on_dask.dask_engine import DaskStarter
from polytempo.engines.processes.failures import WorkerDied
from polytempo.engines.remote.ticket import AgentTicket
from polytempo.interop import map_reduce
from polytempo.wire.keys import make_keys

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

NOWHERE = "tcp://127.0.0.1:1"
INTERRUPTED = """
import sys
from pathlib import Path
from engines.cluster_runs import digits
import polytempo as pt
digits("sync_sgd()", pt.engines.dask(sys.argv[1]), epochs=100_000, out=Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def expected() -> dict[str, str | None]:
    return local_hashes()


@pytest.fixture(scope="module")
def mark(expected: dict[str, str | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with marked(tmp_path_factory.mktemp("t")) as mark:
        yield mark


@pytest.fixture(scope="module")
def client(mark: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = str(tmp_path_factory.mktemp("dask"))
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=folder
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(client: Client, mark: str) -> Iterator[None]:
    assert folders() == []
    yield
    awaited(lambda: not agents(mark), "the end of all agents")
    awaited(lambda: not folders(), "the end of their folders")
    awaited(lambda: not any(client.processing().values()), "the end of their tasks")


@pytest.mark.parametrize("strategy", DETERMINISTIC)
def test_the_parameters_are_those_of_the_local_engine(
    client: Client, expected: dict[str, str | None], strategy: str, tmp_path: Path
) -> None:
    result = digits(strategy, pt.engines.dask(client), out=tmp_path / "run")
    assert result.parameters_sha256 == expected[strategy]
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert (tmp_path / "run" / "report.html").exists()


def test_a_scheduler_is_named_by_its_address(client: Client, expected: dict[str, str | None]) -> None:
    """One worker of two, over a connection of the run's own."""
    [first, _] = client.nthreads()
    result = digits("sync_sgd()", pt.engines.dask(client.scheduler.address, workers=[first]))
    assert result.parameters_sha256 == expected["sync_sgd()"]


def test_a_job_that_fails_says_why(client: Client, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    job = pt.jobs.find(f"{tmp_path}/own.py:job")
    with pytest.raises(WorkerDied, match="no such data on this node"):
        pt.run(job, pt.strategies.sync_sgd(), workers=2, engine=pt.engines.dask(client), epochs=1)


@pytest.mark.parametrize("scheduler", ["distributed", "threads"])
def test_rounds_on_a_bag_equal_rounds_on_lists(client: Client, scheduler: str) -> None:
    """Tasks run on the client's workers, or on threads of this process."""
    bag = dask.bag.from_sequence(averaging.rows(), npartitions=5)
    lists = [part.compute() for part in bag.to_delayed()]
    with dask.config.set(scheduler=scheduler):
        found = map_reduce(averaging.JOB, bag, rounds=3)
    averaging.check(found, map_reduce(averaging.JOB, lists, rounds=3))
    with pytest.raises(ValueError, match="to_bag"):
        map_reduce(averaging.JOB, dask.delayed(averaging.rows)())


def test_a_cancelled_task_ends_its_agent(client: Client, mark: str) -> None:
    """A person cancels it, or the scheduler does because the client that wanted it is gone."""
    starter = DaskStarter(client)
    [agent] = starter.start([0], AgentTicket(NOWHERE, make_keys()))
    awaited(lambda: agents(mark), "the begin of the agent")
    [[key]] = [keys for keys in client.processing().values() if keys]
    Future(key, client).cancel()
    awaited(lambda: not agents(mark), "the end of the agent")
    starter.poll()
    assert agent.ended == "was lost by dask (its task is cancelled)"
    starter.stop()


def test_ctrl_c_leaves_nothing(client: Client, tmp_path: Path) -> None:
    with program(INTERRUPTED, client.scheduler.address, str(tmp_path / "run")) as process:
        awaited(lambda: begun(tmp_path / "run"), "the run's begin")
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode != 0
    assert b"nterrupt" in errors  # before its first step, or after it has saved


def test_a_killed_launcher_leaves_nothing(client: Client, tmp_path: Path) -> None:
    with program(INTERRUPTED, client.scheduler.address, str(tmp_path / "run")):
        awaited(lambda: begun(tmp_path / "run"), "the run's begin")


def test_a_wrong_address_is_refused() -> None:
    engine = pt.engines.dask(NOWHERE)
    with pytest.raises(ValueError, match="no dask scheduler answers at 'tcp:"):
        digits("sync_sgd()", engine)


def test_a_run_outlives_a_dask_worker(client: Client, mark: str, tmp_path: Path) -> None:
    """Two workers, two shards of two copies and the evaluator, on two dask workers: one of these is killed.

    It comes last: on a busy machine dask takes its time to start another one.
    """
    killer = Killer(tmp_path / "run", lambda: parent(agents(mark)[0]))
    result = digits(SERVED, pt.engines.dask(client), epochs=8, out=tmp_path / "run")
    assert killer.done
    assert result.server is not None
    assert result.server["restarts"] > 0
    assert result.ledger is not None
    assert [(part["twice"], part["never"]) for part in result.ledger] == [(0, 0)] * len(result.ledger)
    assert result.accuracy is not None
    assert result.accuracy > 0.9
