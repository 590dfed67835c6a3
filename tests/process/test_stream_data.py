"""Data in shards on real processes: elastic, resumed with other workers, and with a parameter server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import polytempo as pt
from polytempo.runs.elastic.run_elastic import ElasticLauncher
from polytempo.runs.run_collective import run_collective
from polytempo.worlds import ProcessWorld
from process.crew import together
from process.elastic_stories import harmed, trains_with
from process.test_elastic import job, spec_of, told

pytestmark = pytest.mark.process


def sharded(path: Path | None) -> pt.Data:
    """The 95 samples of the elastic tests, in four files."""
    samples = list(job().data(None).train)  # type: ignore[call-overload]
    files = [samples[start : start + 27] for start in range(0, 95, 27)]
    shards = pt.data.InMemoryShards(files).shuffled(buffer=24, interleave=2)
    return pt.Data(shards, shards.in_order())


def test_workers_are_killed_and_join_and_the_weights_are_the_calm_runs(tmp_path: Path) -> None:
    """Lanes of slices do not depend on the number of workers."""
    wanted, hurry = [3], tmp_path / "hurry"

    def story(launcher: ElasticLauncher) -> Iterator[None]:
        yield from trains_with(launcher, 3)
        yield from harmed(launcher, 0, signal.SIGKILL)
        for size in (4, 2):
            wanted.append(size)
            yield from trains_with(launcher, size)

    strategy = "sync_sgd(route=invariant(slices=5))"
    calm = run_collective(spec_of(replace(job(), data=sharded), strategy), pt.engines.local())
    spec = spec_of(replace(job(hurry), data=sharded), strategy, min_workers=1, max_workers=4, out=tmp_path / "run")
    result = told(story, spec, hurry, wanted)
    assert result.parameters_sha256 == calm.parameters_sha256
    assert [(row["once"], row["never"]) for row in result.ledger or []] == [(95, 0)]


def test_rounds_of_local_steps_lose_a_worker_and_no_sample(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"

    def story(launcher: ElasticLauncher) -> Iterator[None]:
        yield from trains_with(launcher, 3)
        yield from harmed(launcher, 1, signal.SIGKILL)
        yield from trains_with(launcher, 3)

    spec = spec_of(replace(job(hurry), data=sharded), "local_sgd(period=5)", min_workers=1, max_workers=3)
    result = told(story, spec, hurry)
    assert [(row["once"], row["never"]) for row in result.ledger or []] == [(95, 0)]


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_other_workers(tmp_path: Path) -> None:
    made = replace(job(), data=sharded)
    samples = []
    for workers, steps in ((4, 3), (3, 5), (5, 8)):
        result = pt.run(
            made, "sync_sgd", workers, steps=steps, out=tmp_path / "run", resume=steps > 3, threads=1, seed=1
        )
        samples.append(result.samples)
    assert samples == [48, 72, 95 + 40], "the last 23 samples of the first epoch are one step of five workers"
    assert result.ledger is not None
    assert all(row["once"] + row["never"] == 95 and not row["twice"] for row in result.ledger)


@pytest.mark.parametrize("strategy", ["async_sgd", "ssp(bound=2)"])
def test_a_parameter_server_deals_each_sample_once(strategy: str) -> None:
    result = pt.run(replace(job(), data=sharded), strategy, 2, epochs=2, threads=1)
    assert [(row["once"], row["last_epoch"]) for row in result.ledger or []] == [(95, 1)]


def test_processes_have_the_numbers_of_the_simulation() -> None:
    made = replace(job(), data=sharded)
    real = pt.run(made, "sync_sgd", 2, epochs=1, threads=1, seed=4)
    virtual = pt.simulate(made, "sync_sgd", 2, epochs=1, seed=4)
    assert (real.steps, real.samples) == (virtual.steps, virtual.samples)
    assert real.loss == pytest.approx(virtual.loss, rel=1e-5)


def test_a_trainer_and_a_loop_on_ranks_that_a_launcher_has_started() -> None:
    def work(world: ProcessWorld) -> list[float]:
        result = pt.Trainer(replace(job(), data=sharded), "sync_sgd", epochs=1, seed=4, world=world).fit()
        batches = pt.shard(sharded(None).train, batch_size=4, seed=4, world=world)
        return [result.steps, result.samples, result.loss or 0.0, sum(float(x.sum()) for x, _ in batches)]

    ranks = together(2, work)
    virtual = pt.simulate(replace(job(), data=sharded), "sync_sgd", 2, epochs=1, seed=4)
    assert [each[:2] for each in ranks] == [[virtual.steps, virtual.samples]] * 2
    assert ranks[0][2] == pytest.approx(virtual.loss, rel=1e-5)
    everything = sum(float(x.sum()) for x, _ in job().data(None).train)  # type: ignore[attr-defined]
    assert sum(each[3] for each in ranks) == pytest.approx(everything, abs=1e-3)
