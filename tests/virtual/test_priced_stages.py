"""Pipelines that are only priced (`meta=True`): the times and bytes of a simulation that computes, at any scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.catalogue import STAGED, Row, label
from polytempo.jobs.digits import job as digits
from staged_job import job, plain, points

s = pt.strategies
CLUSTER = pt.cluster.ethernet(gbit_per_s=1, gflops=0.1)
MORE = {
    "codecs": s.ddg(2, activations=pt.compression.int8(), gradients=pt.compression.bf16()),
    "replicas": s.one_f_one_b(2, 2, inner=s.int8_sgd()),
    "replicas that average": s.pipedream(2, inner=s.local_sgd(period=2)),
}


def untested() -> pt.Job:
    """Equal batches in every step."""
    return replace(job(tested=False), data=lambda _: pt.Data(points(96, 0)), schedule=None)


def check(strategy: pt.Strategy, workers: int) -> None:
    computed, priced = (
        pt.simulate(untested(), strategy, workers, CLUSTER, steps=4, threads=1, meta=meta) for meta in (False, True)
    )
    assert priced.seconds == pytest.approx(computed.seconds, rel=1e-3)  # without the messages for rows of metrics
    assert computed.stages is not None
    assert priced.stages is not None
    for ours, expected in zip(priced.stages, computed.stages, strict=True):
        same = ("stage", "layers", "parameters", "updates", "delay", "most_delay", "held", "versions")
        assert [ours[key] for key in same] == [expected[key] for key in same]
    assert (priced.steps, priced.loss, priced.parameters_sha256) == (4, None, None)


@pytest.mark.parametrize("row", STAGED, ids=label)
def test_a_priced_pipeline_takes_the_time_of_one_that_computes(row: Row) -> None:
    check(row.make(), row.make().stages)


@pytest.mark.parametrize("name", MORE)
def test_codecs_and_replicas_are_priced_too(name: str) -> None:
    check(MORE[name], 4 if "replicas" in name else 2)


def test_estimators_with_labels_are_priced() -> None:
    strategy = s.synthetic_gradients(2, classes=10)
    assert pt.simulate(digits, strategy, 2, CLUSTER, steps=3, meta=True).seconds > 0


SERVED = {
    "asynchronous": s.one_f_one_b(2, 3, inner=s.async_sgd(shards=2)),
    "late": s.ddg(2, inner=s.async_sgd()),
    "held back": s.gpipe(2, 2, inner=s.downpour(push_every=2, pull_every=2)),
    "elastic": s.interleaved(2, 2, inner=s.easgd(period=2)),
    "waiting": s.pipedream(2, inner=s.ssp(bound=1)),
    "estimated": s.synthetic_gradients(2, inner=s.async_sgd()),
}


@pytest.mark.parametrize("name", SERVED)
def test_stages_with_parameter_servers_are_priced(name: str) -> None:
    check(SERVED[name], 4)


def test_many_replicas_of_stages_with_servers() -> None:
    """Twice as many workers at servers with the link as bottleneck take about twice as long for a step of each."""
    narrow = pt.cluster.ethernet(gbit_per_s=0.01, latency_us=0, gflops=0.1)
    times = [
        pt.simulate(untested(), SERVED["asynchronous"], workers, narrow, steps=3, meta=True).seconds
        for workers in (64, 128)
    ]
    assert times[1] == pytest.approx(2 * times[0], rel=0.02)


def test_more_workers_than_samples() -> None:
    """256 replicas of 2 stages, of 4 samples in all."""
    few = replace(plain(), data=lambda _: pt.Data(TensorDataset(*points(4, 0).tensors)), batch_size=2)
    found = pt.simulate(few, s.one_f_one_b(2, 2), 512, CLUSTER, steps=2, meta=True)
    assert found.steps == 2
