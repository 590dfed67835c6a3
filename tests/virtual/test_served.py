"""Training with a parameter server in the virtual world: real machines, messages and transforms, a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils.data import TensorDataset

from polytempo import strategies
from polytempo.cluster import Crash, ethernet, slow_host
from polytempo.compression import bf16, feedback
from polytempo.core import PolytempoError, Strategy
from polytempo.core.rule import Service, UpdateRule
from polytempo.data.batches import Batches
from polytempo.data.plan import picks
from polytempo.jobs import find
from polytempo.report.status.rows import read_metrics
from polytempo.runs.run import join, run
from polytempo.runs.simulated.simulate import simulate
from polytempo.runs.simulated.simulate_served import simulate_served
from polytempo.server.rules.synchronous_step import hardsync
from polytempo.server.service import served
from polytempo.spec.job import Data, Job
from polytempo.spec.result import parameters_sha256
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.served.server_facts import staleness_of
from polytempo.training.served.shard_rule import parameters_of, update_rule_of

DIGITS = find("digits")
UNTESTED = replace(DIGITS, data=lambda folder: Data(DIGITS.data(folder).train))


def synchronous(shards: int) -> Strategy:
    return served(f"hardsync, {shards} shards", Service(hardsync(), shards=shards, replicas=0, deals="evenly"))


def serial(job: Job, steps: int) -> str:
    """Plain torch on the same batches."""
    torch.manual_seed(0)
    model = job.model()
    optimizer = job.optimizer(model.parameters(), job.lr)
    batches = Batches(job.data(None).train, size=1, batch_size=job.batch_size)
    schedule = job.schedule(optimizer, len(batches)) if job.schedule else None
    for step in range(steps):
        inputs, targets = batches.at(*divmod(step, len(batches)))
        optimizer.zero_grad()
        job.loss(model(inputs), targets).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return parameters_sha256(model.parameters())


# ------------------------------------------------------------------------------------------------------- same as serial


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters, lr: SGD(parameters, lr=lr),
        lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda parameters, lr: Adagrad(parameters, lr=lr, lr_decay=0.01, initial_accumulator_value=0.1),
        lambda parameters, lr: Adam(parameters, lr=lr / 10, weight_decay=1e-3),
        lambda parameters, lr: AdamW(parameters, lr=lr / 10),
    ],
    ids=["sgd", "nesterov", "adagrad", "adam", "adamw"],
)
def test_one_worker_without_delay_is_plain_torch_to_the_bit(optimizer: Any) -> None:
    job = replace(DIGITS, optimizer=optimizer)
    for strategy in (strategies.async_sgd(), strategies.async_sgd(shards=3)):
        assert simulate(job, strategy, 1, steps=12).parameters_sha256 == serial(job, 12)


def test_learning_rates_follow_the_jobs_schedule() -> None:
    def schedule(optimizer: Any, steps_per_epoch: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)

    job = replace(DIGITS, schedule=schedule)
    result = simulate(job, strategies.async_sgd(), 1, steps=12)
    assert result.parameters_sha256 == serial(job, 12) != serial(DIGITS, 12)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_one_shard_and_four_are_the_same_under_a_synchronous_schedule(native: bool) -> None:
    options = RunOptions(steps=6)
    hashes = {
        simulate_served(
            RunSpec.of(DIGITS, synchronous(shards), 3, options), ethernet(), native=native
        ).parameters_sha256
        for shards in (1, 4)
    }
    assert len(hashes) == 1


def test_hardsync_takes_the_batches_that_synchronous_workers_take() -> None:
    batches = Batches(DIGITS.data(None).train, size=4, batch_size=32, deals="evenly")
    for rank in range(4):
        expected = list(picks(batches.num_samples, 0, 4, rank, 32))
        assert [batches.pick(step * 4 + rank) for step in range(len(batches) // 4)] == expected


# ----------------------------------------------------------------------------------------------------------- it learns


@pytest.mark.parametrize(
    ("strategy", "lr"),
    [
        (strategies.downpour(lr=0.02), None),
        (strategies.async_sgd(shards=2), None),
    ],
    ids=str,
)
def test_eight_workers_learn(strategy: Strategy, lr: float | None) -> None:
    result = simulate(DIGITS, strategy, 8, lr=lr)
    assert result.accuracy is not None
    assert result.accuracy >= 0.95
    assert result.samples == 15 * 1437


SERVED = [
    strategies.async_sgd(shards=2, replicas=1),
    strategies.downpour(push_every=3, pull_every=2, warm_start=3),
    strategies.softsync(n=2),
    strategies.staleness_aware(),
    strategies.ssp(),
    strategies.easgd(),
    strategies.backup_workers(backups=1),
    strategies.dc_asgd(),
]


@pytest.mark.parametrize("strategy", SERVED, ids=str)
def test_every_strategy_uses_every_batch_and_repeats_to_the_bit(strategy: Strategy) -> None:
    first, second = (simulate(DIGITS, strategy, 4, epochs=1) for _ in range(2))
    assert (first.trace_hash, first.parameters_sha256) == (second.trace_hash, second.parameters_sha256)
    assert first.samples == 1437
    server = first.server
    assert server is not None
    assert sum(worker["samples"] for worker in server["workers"]) == 1437
    assert server["refused"] == server["repeated"] == 0


def test_evaluating_leaves_the_workers_of_elastic_averaging_apart() -> None:
    strategy = strategies.easgd(period=1)  # so that nothing has to be pushed out of turn before an evaluation
    scored, unscored = simulate(DIGITS, strategy, 1, epochs=2), simulate(UNTESTED, strategy, 1, epochs=2)
    assert scored.accuracy is not None
    assert unscored.accuracy is None
    assert scored.parameters_sha256 == unscored.parameters_sha256


# ------------------------------------------------------------------------------------------------------- results


def test_the_run_leaves_rows_and_facts_about_its_server(tmp_path: Path) -> None:
    result = simulate(DIGITS, strategies.async_sgd(shards=2), 4, epochs=2, lr=0.01, out=tmp_path)
    rows = read_metrics(tmp_path)
    assert {row["worker"] for row in rows if row["kind"] == "train"} == {0, 1, 2, 3}
    scores = [row for row in rows if row["kind"] == "test"]
    assert scores[-1]["accuracy"] == result.accuracy
    server = json.loads((tmp_path / "result.json").read_text())["server"]
    assert server == result.server
    assert sum(count for _, count in server["staleness"]["histogram"]) == 2 * 2 * 45  # epochs, shards, batches
    assert server["updates"] == 90
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Parameter server</h2>" in page
    assert '<table id="workers-table">' in page


def test_a_run_without_a_server_has_no_such_section(tmp_path: Path) -> None:
    result = simulate(DIGITS, strategies.sync_sgd(), 2, steps=2, out=tmp_path)
    assert result.server is None
    assert "Parameter server" not in (tmp_path / "report.html").read_text()


def test_staleness_in_numbers() -> None:
    assert staleness_of({0: 50, 1: 48, 7: 2}) == {
        "mean": 0.62,
        "p50": 0,
        "p99": 7,
        "histogram": [[0, 50], [1, 48], [7, 2]],
    }
    assert staleness_of({}) == {"mean": None, "p50": None, "p99": None, "histogram": []}


def test_a_slow_worker_takes_fewer_batches_and_holds_nobody_up() -> None:
    def run(factor: float) -> list[dict[str, Any]]:
        cluster = ethernet(gflops=0.1, stragglers=slow_host(0, factor))
        server = simulate(UNTESTED, strategies.async_sgd(), 4, cluster, steps=40, lr=0.01).server
        assert server is not None
        workers: list[dict[str, Any]] = server["workers"]
        return workers

    alike, slowed = run(1.0), run(10.0)
    assert slowed[0]["steps"] * 5 < slowed[1]["steps"]
    for before, after in zip(alike[1:], slowed[1:], strict=True):
        assert after["samples_per_s"] >= 0.95 * before["samples_per_s"]


def test_until_ends_the_run_when_a_score_reaches_it() -> None:
    result = simulate(DIGITS, strategies.async_sgd(), 2, lr=0.02, until={"accuracy": 0.9})
    assert result.reached is True
    assert result.accuracy is not None
    assert result.accuracy >= 0.9
    assert result.epochs < 15


# ------------------------------------------------------------------------------------------------------------- crashes


def test_a_worker_that_dies_is_missed_by_nobody() -> None:
    cluster = replace(ethernet(), faults=(Crash(rank=1, step=3),))
    result = simulate(DIGITS, strategies.async_sgd(), 3, cluster, epochs=1)
    assert result.samples == 1437
    assert result.server is not None
    assert [worker["worker"] for worker in result.server["workers"]] == [0, 2]


def test_a_copy_that_dies_takes_nothing_with_it_where_there_is_another() -> None:
    strategy = strategies.async_sgd(shards=2, replicas=1)
    cluster = replace(ethernet(), faults=(Crash(rank=3, at_s=1e-3),))  # ranks 3 and 4 hold shard 0
    result = simulate(DIGITS, strategy, 3, cluster, epochs=1)
    assert result.samples == 1437
    assert result.server is not None
    assert result.server["updates"] == 45


def test_the_death_of_the_only_copy_ends_the_run() -> None:
    cluster = replace(ethernet(), faults=(Crash(rank=2, at_s=1e-3),))
    with pytest.raises(PolytempoError, match="shard 0 is lost with every copy of it; use replicas=1"):
        simulate(DIGITS, strategies.async_sgd(), 2, cluster, epochs=1)


def test_the_death_of_all_workers_ends_the_run() -> None:
    cluster = replace(ethernet(), faults=tuple(Crash(rank=rank, step=2) for rank in range(2)))
    with pytest.raises(PolytempoError, match="every worker is lost"):
        simulate(DIGITS, strategies.async_sgd(), 2, cluster, epochs=1)


# ------------------------------------------------------------------------------------------------------------ refusals


def two_groups(second: dict[str, Any]) -> tuple[nn.Module, SGD]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), **second}]
    return model, SGD(groups, lr=0.1, momentum=0.9)


def test_an_optimizer_becomes_a_rule_and_parameters_a_layout() -> None:
    model, optimizer = two_groups({"lr": 0.5})
    assert update_rule_of(optimizer) == UpdateRule("sgd", momentum=0.9)
    assert [tuple(parameter) for parameter in parameters_of(model, optimizer)] == [
        ("0.weight", 6, 0, 0, (2, 3)),
        ("0.bias", 2, 0, 0, (2,)),
        ("1.weight", 2, 1, 0, (1, 2)),
        ("1.bias", 1, 1, 0, (1,)),
    ]


def test_what_a_shard_cannot_hold_or_apply_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group 1 has weight_decay=0.1 where group 0 has 0"):
        update_rule_of(two_groups({"weight_decay": 0.1})[1])
    linear = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="this optimizer is RMSprop"):
        update_rule_of(torch.optim.RMSprop(linear.parameters()))
    with pytest.raises(ValueError, match=r"does not know Adam\(amsgrad=True\)"):
        update_rule_of(Adam(linear.parameters(), amsgrad=True))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"one vector, and this model has torch.float32 on cpu, torch.float64 on cpu"):
        parameters_of(mixed, SGD(mixed.parameters(), lr=0.1))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_dtype_that_no_shard_holds_is_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2, dtype=dtype)
    with pytest.raises(ValueError, match=rf"this model's parameters are {dtype}; .* model.float\(\)"):
        parameters_of(model, SGD(model.parameters(), lr=0.1))


def test_what_is_no_strategy_is_refused() -> None:
    for engine in (run, join, simulate):
        with pytest.raises(TypeError, match=r"got .*downpour.*; write downpour\(\)"):
            engine(DIGITS, strategies.downpour)  # type: ignore[arg-type]


def test_workers_that_help_each_other_need_a_sample_each() -> None:
    few = TensorDataset(torch.randn(3, 64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 samples cannot be dealt to 4 workers; use at most 3 workers"):
        simulate(replace(DIGITS, data=lambda folder: Data(few)), strategies.flexrr(), 4, steps=1)


def test_a_simulation_with_a_server_refuses_what_it_would_ignore() -> None:
    with pytest.raises(ValueError, match="PT1319"):
        simulate(DIGITS, strategies.flexrr(), 2, meta=True)
    with pytest.raises(ValueError, match="PT1320"):
        simulate(DIGITS, strategies.async_sgd(codec=feedback(bf16())), 2, meta=True)
    with pytest.raises(ValueError, match="until accuracy=… needs a job with an accuracy"):
        simulate(replace(DIGITS, correct=None), strategies.async_sgd(), 2, until={"accuracy": 0.5})
