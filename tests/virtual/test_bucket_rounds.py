"""Runs of workers that reach a bucket alone: the price of `explain --bucket`, and the bits of real rounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from torch import nn

import polytempo as pt
from laws.test_store_catalogue import RUN, Counting, meetings
from polytempo.cli.look.bucket_round import bucket_round
from polytempo.core import Bundle
from polytempo.jobs.digits import job
from polytempo.runs.simulated.bucket_log import SimulatedLog
from polytempo.server.message import Entry, Members
from polytempo.spec.result import parameters_sha256
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.job.start import replica_of
from polytempo.worlds.object_store.round_cost import round_cost
from polytempo.worlds.object_store.store_world import StoreWorld
from store_workers import Crew

WORKERS, STEPS, PERIOD = 4, 8, 4  # a mean of 4 equal models, which the hash is of, is exact
STRATEGIES = [f"{name}(period={PERIOD})" for name in sorted(RUN)] + [
    "diloco(period=4, codec=feedback(top_k(0.1)))",
    "local_sgd(period=4, codec=feedback(int8))",
]
LINK = pt.cluster.bucket(mbit_per_s=100, latency_ms=20)


def attached(strategy: str, world: StoreWorld) -> str:
    """The steps of the job by a loop of one's own; the hash of its parameters."""
    spec = RunSpec.of(job, pt.parse_strategy(strategy), WORKERS, RunOptions(steps=STEPS))
    net, optimizer = replica_of(spec)
    pt.attach(net, optimizer, strategy, world=world)
    for x, y in islice(pt.shard(pt.data.digits().train, batch_size=32, world=world), STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    world.leave()
    return parameters_sha256(net.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_simulated_run_has_the_bits_bytes_and_price_of_real_rounds(strategy: str) -> None:
    crew = Crew(WORKERS)
    crew.objects = objects = Counting()
    for worker in range(WORKERS):
        crew.add(worker, lambda world: attached(strategy, world))
    real = crew.run()
    found, elsewhere = (
        pt.simulate(job, strategy, workers=WORKERS, steps=STEPS, cluster=cluster) for cluster in (LINK, None)
    )
    assert real[0] == found.parameters_sha256 == elsewhere.parameters_sha256
    assert len(set(real)) == 1
    cost = bucket_round(pt.parse_strategy(strategy), job.model(), WORKERS, "bucket(mbit_per_s=100, latency_ms=20)")
    seconds, rounds = cost["bucket"]["seconds"], STEPS // PERIOD
    free = replace(LINK, network=pt.cluster.Link(0.0, 1e30))
    alone = pt.simulate(job, strategy, workers=WORKERS, steps=STEPS, cluster=free)
    end_s = 2 * 0.02 * (WORKERS + 4)  # all wait for each other: an operation without tensors
    assert found.seconds - alone.seconds == pytest.approx(rounds * seconds + end_s, rel=1e-9)
    shorter = pt.simulate(job, strategy, workers=WORKERS, steps=STEPS - PERIOD, cluster=LINK)
    of_a_round = WORKERS * (found.bytes_sent_per_rank - shorter.bytes_sent_per_rank)
    assert of_a_round * rounds == objects.tensor_bytes


@pytest.mark.parametrize(
    ("strategy", "code"), [("sync_sgd", "PT2901"), ("gossip(period=4)", "PT2903"), ("async_sgd", "PT2901")]
)
def test_strategies_that_cannot_meet_in_a_bucket_are_refused(strategy: str, code: str) -> None:
    with pytest.raises(pt.errors.Incompatible, match=code):
        pt.simulate(job, strategy, workers=2, steps=2, cluster=LINK)


def test_a_simulated_log_has_the_bits_of_a_real_one() -> None:
    """A quorum of all adds in the order of workers, so the order of the log does not matter."""
    strategy = "decoupled_diloco(period=4, quorum=4, outer_momentum=0.5)"
    crew = Crew(WORKERS)
    for worker in range(WORKERS):
        crew.add(worker, lambda world: attached(strategy, world))
    real = crew.run()
    found = pt.simulate(job, strategy, workers=WORKERS, steps=STEPS, cluster=LINK)
    assert set(real) == {found.parameters_sha256}


@pytest.mark.parametrize("strategy", ["async_diloco(period=4)", "decoupled_diloco(period=4, quorum=2, grace_s=9.0)"])
def test_pushes_of_one_worker_cost_what_explain_says(strategy: str) -> None:
    cost = bucket_round(pt.parse_strategy(strategy), job.model(), 1, "bucket(mbit_per_s=100, latency_ms=20)")
    free = replace(LINK, network=pt.cluster.Link(0.0, 1e30))
    found, alone = (pt.simulate(job, strategy, 1, steps=STEPS, meta=True, cluster=cluster) for cluster in (LINK, free))
    leave_s = 2 * 2 * 0.02  # a look and an entry
    assert found.seconds - alone.seconds == pytest.approx(STEPS // PERIOD * cost["bucket"]["seconds"] + leave_s)
    assert found.bytes_sent_per_rank == STEPS // PERIOD * cost["bucket"]["sent_bytes"]


def test_workers_that_push_together_try_entries_again_and_read_the_others() -> None:
    """One of four pushes of equal workers is first; the last worker has read three movements and tried four times."""
    strategy = "async_diloco(period=4)"
    found = pt.simulate(job, strategy, WORKERS, steps=PERIOD, meta=True, cluster=LINK)
    free = replace(LINK, network=pt.cluster.Link(0.0, 1e30))
    alone = pt.simulate(job, strategy, WORKERS, steps=PERIOD, meta=True, cluster=free)
    movement_s = found.bytes_sent_per_rank / 12.5e6
    last_s = 4 * movement_s + 2 * 0.02 * (1 + 4 * 2 + 3 * 2)  # a put; looks and tries; entries and movements
    assert found.seconds - alone.seconds >= last_s
    turns = bucket_round(pt.parse_strategy(strategy), job.model(), WORKERS, "bucket(mbit_per_s=100, latency_ms=20)")
    assert turns["bucket"]["seconds"] < last_s


@pytest.mark.parametrize("wait", ["", ", quorum=3", ", quorum=3, delay=2", ", quorum=4", ", quorum=1, grace_s=0.5"])
def test_workers_leave_a_log_at_their_end_and_no_quorum_waits_for_them(wait: str) -> None:
    """Worker 0 needs 45 s for its 12 steps. Worker by worker that is at least the run's time, and no wait of 60 s."""
    slow = replace(LINK, stragglers=pt.cluster.slow_host(0, 3e4), network=pt.cluster.Link(1e-6, 1e12))
    strategy = f"decoupled_diloco(period=4{wait})" if wait else "async_diloco(period=4)"
    run = pt.simulate(job, strategy, WORKERS, epochs=1, cluster=slow)
    assert (run.samples, run.steps) == (1437, 12)
    assert 45.0 < run.seconds < 47.0
    assert run.loss is not None
    assert run.loss < 1.3


@pytest.mark.parametrize("wait", [", quorum=3, delay=2", ", quorum=1, grace_s=9, delay=2"])
def test_no_worker_leaves_a_log_before_its_last_push_is_in(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    left, apply = list[bool](), SimulatedLog._apply

    def seen(self: SimulatedLog, entry: Entry) -> None:
        if isinstance(entry, Members):
            left.append(bool(self._waiting - dict(entry.members).keys()))
        apply(self, entry)

    monkeypatch.setattr(SimulatedLog, "_apply", seen)
    slow = replace(LINK, stragglers=pt.cluster.slow_host(0, 1e4))
    pt.simulate(job, f"decoupled_diloco(period=4{wait})", 3, steps=12, meta=True, cluster=slow)
    assert left == [False] * 4


def test_a_worker_that_the_others_left_out_comes_again() -> None:
    """The others leave it out during the transfer of its push, which takes 40 s."""
    slow = replace(pt.cluster.bucket(0.02, 20), stragglers=pt.cluster.slow_host(0, 1e5))
    run = pt.simulate(job, "decoupled_diloco(period=4, quorum=3)", 3, steps=12, meta=True, cluster=slow)
    assert run.steps == 12


def test_a_run_without_values_has_the_same_price_and_stragglers_are_waited_for() -> None:
    """A round waits for its slowest worker. Seconds of many workers: the merger reads their parts one by one."""
    timed = meetings(pt.parse_strategy("diloco(period=4)"))
    parameters = Bundle({name: p.detach() for name, p in job.model().named_parameters()})
    priced = [
        pt.simulate(job, "diloco(period=4)", workers=workers, steps=8, meta=True, cluster=LINK).seconds
        for workers in (2, 64)
    ]
    costs = [round_cost(timed.meeting, parameters, workers).seconds(12.5e6, 0.02) for workers in (2, 64)]
    assert priced[1] - priced[0] == pytest.approx(2 * (costs[1] - costs[0]), rel=1e-9)
    slow = replace(LINK, stragglers=pt.cluster.slow_host(0, 100.0))
    assert pt.simulate(job, "diloco(period=4)", workers=2, steps=8, meta=True, cluster=slow).seconds > priced[0]
