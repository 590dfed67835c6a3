"""`polytempo.horovod.ray.RayExecutor` and `polytempo.horovod.spark.run` on Ray and Spark on this host."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from pyspark.sql import SparkSession

from polytempo.core.errors import PolytempoError
from polytempo.horovod import spark
from polytempo.horovod.ray import RayExecutor

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]


def work(factor: int, fails: bool = False) -> list[Any]:
    """Every rank's work: its place, and a sum over all."""
    import polytempo.horovod.torch as hvd

    hvd.init()
    if fails and hvd.rank() == 1:
        raise KeyError("no such thing")
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    return [hvd.rank(), hvd.local_rank(), os.environ["HOROVOD_LOCAL_RANK"], os.environ.get("MINE"), factor * total]


class Holder:
    """An executable class."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def test_actors_that_are_late_are_an_error_with_a_remedy(cluster: None) -> None:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=0.001), num_workers=2)
    with pytest.raises(PolytempoError, match=r"2 actors .* within 0\.001 s.*timeout_s="):
        executor.start()


def test_actors_of_ray_are_ranks(cluster: None) -> None:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
    with pytest.raises(ValueError, match="has not been started"):
        executor.run(work)
    executor.start(executable_cls=Holder, executable_args=[7], extra_env_vars={"MINE": "yes"})
    try:
        assert executor.run(work, args=[10]) == [[0, 0, "0", "yes", 20.0], [1, 1, "1", "yes", 20.0]]
        assert ray.get(executor.run_remote(work, kwargs={"factor": 1}))[1][-1] == 2.0
        assert executor.execute(lambda held: held.value + 1) == [8, 8]
        assert executor.execute_single(lambda held: held.value) == 7
        with pytest.raises(ray.exceptions.RayTaskError, match=r"no such thing|is lost|shut down"):
            executor.run(work, args=[1, True])
    finally:
        executor.shutdown()
    assert executor.num_workers == 2


def test_nodes_with_several_ranks_each(cluster: None) -> None:
    options: dict[str, Any] = {"cpus_per_worker": 0.5, "use_gpu": False, "use_current_placement_group": False}
    executor = RayExecutor(num_hosts=1, num_workers_per_host=2, **options)
    executor.start()
    try:
        assert [answer[:2] for answer in executor.run(work, args=[1])] == [[0, 0], [1, 1]]
    finally:
        executor.shutdown()


def test_what_ray_cannot_place_and_what_is_refused_is_named(cluster: None) -> None:
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=50)
    with pytest.raises(PolytempoError, match="Ray has no room for 50 times"):
        executor.start()
    for arguments, words in (
        ({}, "give num_workers or num_hosts"),
        ({"num_workers": 1, "num_hosts": 1}, "give num_workers or num_hosts"),
        ({"num_workers": 1, "max_workers": 2}, "give min_workers, too"),
        ({"num_hosts": 1, "min_workers": 1}, "leave num_hosts"),
        ({"num_workers": 1, "min_workers": 2}, "min-np <= np"),
        ({"min_workers": 1, "cooldown_range": [3]}, "two numbers"),
        ({"min_workers": 1, "reset_limit": 0}, "reset-limit 0"),
        ({"min_workers": 1, "override_discovery": False}, "override_discovery"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "set use_gpu=True"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, "at least one rank"),
    ):
        with pytest.raises(ValueError, match=words):
            RayExecutor(**arguments)
    elastic = RayExecutor(min_workers=1)
    with pytest.raises(ValueError, match="has not been started"):
        elastic.run(work)
    elastic.start()
    for call in (lambda: elastic.run_remote(work), lambda: elastic.execute_single(work)):
        with pytest.raises(ValueError, match="come and go"):
            call()
    with pytest.raises(ValueError, match="executable_cls"):
        elastic.execute(work)


def lives(marker: str) -> list[int]:
    """The work of every process of an elastic run: 30 commits. One is killed at the tenth, once."""
    import polytempo.horovod.torch as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> list[int]:
        while state.batch < 30:
            ranks = int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="ranks").item())
            assert ranks == hvd.size()
            if state.batch == 10 and hvd.rank() == 1 and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.batch += 1
            state.commit()
        return [state.batch, int(os.environ["MINE"])]

    return train(hvd.elastic.ObjectState(batch=0))


def held_by_a_rank(held: Holder) -> int:
    """An elastic run: only ranks of a group are asked."""
    import polytempo.horovod.torch as hvd

    hvd.init()
    return held.value


def test_an_elastic_executor_goes_on_when_an_actor_is_killed(cluster: None, tmp_path: Path) -> None:
    executor = RayExecutor(num_workers=2, min_workers=1, max_workers=2, cooldown_range=[0.1, 0.2], elastic_timeout=120)
    executor.start(extra_env_vars={"MINE": "7"}, executable_cls=Holder, executable_args=[3])
    try:
        found = executor.run(lives, args=[str(tmp_path / "killed")])
        assert (tmp_path / "killed").exists()
        assert found in ([[30, 7]], [[30, 7], [30, 7]])
        assert set(executor.execute(held_by_a_rank)) == {3}
        with pytest.raises(ValueError, match="no process has called"):
            executor.execute(lambda held: held.value)
    finally:
        executor.shutdown()


def test_tasks_of_spark_are_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="no active Spark session"):
        spark.run(work)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.memory", "512m").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        found = spark.run(work, args=(10,), num_proc=2, env={"MINE": "yes"})
        assert found == [[0, 0, "0", "yes", 20.0], [1, 1, "1", "yes", 20.0]]
        with pytest.raises(PolytempoError, match=r"a rank of 2 has failed on Spark: .*no such thing"):
            spark.run(work, args=(1, True), num_proc=2)
    finally:
        session.stop()
