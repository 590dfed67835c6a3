"""Runs on Ray, two nodes of this host: the same bits as here, lost actors and nodes, errors, Ctrl-C, Ray Train.

`make test-engines` runs it, in a venv with the extra `ray`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import polytempo as pt
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
from polytempo.core.errors import PolytempoError
from polytempo.engines.on_ray.train import RayTorchConfig
from polytempo.engines.processes.failures import WorkerDied

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

NODES, CPUS = 2, 6
STORE_BYTES = 100 << 20
INTERRUPTED = """
import sys
from pathlib import Path
from engines.cluster_runs import digits
import polytempo as pt
digits("sync_sgd()", pt.engines.ray(sys.argv[1]), epochs=100_000, out=Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def expected() -> dict[str, str | None]:
    return local_hashes()


@pytest.fixture(scope="module")
def mark(expected: dict[str, str | None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with marked(tmp_path_factory.mktemp("t")) as mark:
        yield mark


@pytest.fixture(scope="module")
def cluster(mark: str) -> Iterator[Cluster]:
    """Two nodes; "extra" is on the second one alone. Their files are in a folder with a short name, as sockets need."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="r")
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        try:
            started(cluster, num_cpus=CPUS, include_dashboard=False)
            started(cluster, num_cpus=CPUS, resources={"extra": 1})
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def started(cluster: Cluster, **options: Any) -> Any:
    """One more node. Ray gives up after 30 s, which a busy machine may need: then it is tried again."""
    for _ in range(3):
        try:
            return cluster.add_node(object_store_memory=STORE_BYTES, **options)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    raise AssertionError("no Ray node has started within 90 s; try again when this machine is less busy")


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster, mark: str) -> Iterator[None]:
    assert folders() == []
    yield
    awaited(lambda: not agents(mark), "the end of all agents")
    awaited(lambda: not folders(), "the end of their folders")


@pytest.fixture
def connected(cluster: Cluster) -> Iterator[None]:
    """Inside a Ray job the process is connected already, and still so afterwards. All that was reserved is free
    again."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        awaited(lambda: sum(node["Alive"] for node in ray.nodes()) == NODES, "the end of nodes that tests have killed")
        awaited(lambda: ray.cluster_resources().get("CPU") == NODES * CPUS, "the end of their resources")
        yield
        assert ray.is_initialized()
        awaited(lambda: ray.available_resources().get("CPU") == NODES * CPUS, "the end of all reservations")
    finally:
        ray.shutdown()


# --- runs


@pytest.mark.parametrize("strategy", DETERMINISTIC)
def test_the_parameters_are_those_of_the_local_engine(
    connected: None, expected: dict[str, str | None], strategy: str, tmp_path: Path
) -> None:
    """Two nodes, and a process that is connected to Ray."""
    result = digits(strategy, pt.engines.ray(strategy="STRICT_SPREAD"), out=tmp_path / "run")
    assert result.parameters_sha256 == expected[strategy]
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert (tmp_path / "run" / "report.html").exists()


def test_a_ray_task_can_be_the_launcher(connected: None, expected: dict[str, str | None]) -> None:
    def launcher() -> str | None:
        import polytempo as pt
        from engines.cluster_runs import digits

        return digits("sync_sgd()", pt.engines.ray(actors=1)).parameters_sha256

    assert ray.get(ray.remote(launcher).remote(), timeout=LONG_S) == expected["sync_sgd()"]


def test_a_run_outlives_an_actor(cluster: Cluster, mark: str, tmp_path: Path) -> None:
    """Two workers, two shards of two copies, the evaluator, an actor each; Ray's process of one of them is killed."""
    killer = Killer(tmp_path / "run", lambda: parent(agents(mark)[0]))
    result = digits(SERVED, pt.engines.ray(cluster.address), epochs=8, out=tmp_path / "run")
    assert killer.done
    check_served(result)
    assert not ray.is_initialized()


def test_a_run_outlives_a_node(cluster: Cluster, tmp_path: Path) -> None:
    """A node that has room for one process of five, and is killed, actor and all."""
    small = started(cluster, num_cpus=1, resources={"place": 1})
    roomy = started(cluster, num_cpus=5, resources={"place": 5})
    engine = pt.engines.ray(cluster.address, resources={"place": 1}, strategy="SPREAD")

    def victim() -> None:
        cluster.remove_node(small, allow_graceful=False)

    killer = Killer(tmp_path / "run", victim)
    try:
        check_served(digits("downpour(shards=1, replicas=1)", engine, epochs=8, out=tmp_path / "run"))
        assert killer.done
    finally:
        cluster.remove_node(roomy)


def check_served(result: pt.Result) -> None:
    """A process was replaced, every sample was used once an epoch, and the model has learnt."""
    assert result.server is not None
    assert result.server["restarts"] > 0
    assert result.ledger is not None
    assert [(part["twice"], part["never"]) for part in result.ledger] == [(0, 0)] * len(result.ledger)
    assert result.accuracy is not None
    assert result.accuracy > 0.9


def test_what_ray_cannot_place_ends_with_what_is_missing(connected: None) -> None:
    engine = pt.engines.ray(resources={"extra": 1}, wait_s=5)  # for two workers
    with pytest.raises(PolytempoError, match=r"'extra': 1.0\} by strategy SPREAD, and the 2 nodes"):
        digits("sync_sgd()", engine)


def test_a_job_that_fails_says_why(connected: None, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS)
    job = pt.jobs.find(f"{tmp_path}/own.py:job")
    with pytest.raises(WorkerDied, match="no such data on this node"):
        pt.run(job, pt.strategies.sync_sgd(), workers=2, engine=pt.engines.ray(actors=1), epochs=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_launcher_leaves_nothing(cluster: Cluster, number: signal.Signals, tmp_path: Path) -> None:
    with program(INTERRUPTED, cluster.address, str(tmp_path / "run")) as process:
        awaited(lambda: begun(tmp_path / "run"), "the run's begin")
        os.kill(process.pid, number)
        process.communicate(timeout=LONG_S)
    assert process.returncode != 0


def test_without_a_cluster_the_remedy_is_named() -> None:
    with pytest.raises(ValueError, match="ray start --head"):
        digits("sync_sgd()", pt.engines.ray("127.0.0.1:1"))


# --- Ray Train


def train(config: dict[str, Any]) -> None:
    """A training function as Ray Train calls it on each worker."""
    import json
    import os

    import torch
    import torch.distributed as dist

    import polytempo as pt

    world = pt.init(quiet=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pt.attach(model, optimizer, pt.strategies.sync_sgd())
    for step in range(3):
        torch.manual_seed(10 * step + world.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    facts = [world.rank, world.size, dist.get_world_size(), os.environ["MASTER_ADDR"], model.weight.tolist()]
    with open(f"{config['out']}/{world.rank}", "w", encoding="ascii") as file:
        json.dump(facts, file)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_ray_train_are_ranks_of_a_world(connected: None, workers: int, tmp_path: Path) -> None:
    by_value: Callable[..., None] = train
    by_value.__module__ = "__main__"  # its module is this test's, which workers cannot import
    trainer = TorchTrainer(
        by_value,
        train_loop_config={"out": str(tmp_path)},
        torch_config=RayTorchConfig(timeout_s=60),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(tmp_path / "storage"), name="run"),
    )
    assert trainer.fit().error is None
    facts = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(workers)]
    assert [fact[:4] for fact in facts] == [[rank, workers, workers, "127.0.0.1"] for rank in range(workers)]
    assert all(fact[4] == facts[0][4] for fact in facts), "the ranks' gradients did not meet"
