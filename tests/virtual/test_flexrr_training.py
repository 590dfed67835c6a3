"""Training by `flexrr` in the virtual world: the result of synchronous SGD, in less time, and every sample once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from laws.catalogue import HELPED, Row, label
from laws.definitions import stepped
from laws.harness import Setting
from laws.served import BATCH, Runner, batches_of, served
from polytempo import strategies
from polytempo.cluster import Cluster, Crash, Link, exponential, lognormal, slow_host
from polytempo.core import Strategy
from polytempo.data.batches import Batches
from polytempo.data.ledger import Verdict
from polytempo.data.plan import permutation
from polytempo.runs.simulated.simulate_served import ServedSimulation
from polytempo.spec.job import Data, Job
from polytempo.spec.result import Result
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from slices import verdicts

__all__ = ["served"]

WORKERS, SHARE, EPOCH_STEPS = 8, 400, 2
EVEN = Cluster(Link(2e-4, 1e9), flops_per_s=14_400.0)
"""A share takes about 0.7 s."""
ONE_SLOW = replace(EVEN, stragglers=slow_host(7, 2.0))
SYNCHRONOUS = strategies.backup_workers(backups=0)


def dataset(samples: int) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    features = torch.randn(samples, 6, dtype=torch.float64, generator=random)
    return TensorDataset(features, torch.randn(samples, 1, dtype=torch.float64, generator=random))


def job(samples: int = EPOCH_STEPS * WORKERS * SHARE, dropout: float = 0.0) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Dropout(dropout), nn.Linear(6, 1)).double(),
        data=lambda folder: Data(dataset(samples)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        lr=0.05,
        batch_size=SHARE,
    )


class Ran(NamedTuple):
    """The results of a run."""

    result: Result
    weights: Tensor
    verdicts: list[Verdict]
    """The verdicts of each epoch, from the tickets that the shards have applied."""

    @property
    def server(self) -> dict[str, Any]:
        assert self.result.server is not None
        return self.result.server

    def total(self, what: str) -> int:
        return sum(worker[what] for worker in self.server["workers"])


def trained(strategy: Strategy, cluster: Cluster = EVEN, steps: int = 2, of: Job | None = None) -> Ran:
    run = ServedSimulation(RunSpec.of(of or job(), strategy, WORKERS, RunOptions(steps=steps)), cluster)
    outcome = run.world.run(run.act)
    result = run.finish(outcome)
    survivor = next(rank for rank, attendance in enumerate(outcome.results) if attendance is not None)
    weights = torch.cat([p.detach().flatten() for p in run.contexts[survivor].model.parameters()])
    assert strategy.server is not None
    return Ran(result, weights, verdicts(strategy, run.program.batches, run.coordinator.statistics))


# ------------------------------------------------------------------------------- synchronous SGD, and how long it takes


def test_one_of_eight_at_half_speed() -> None:
    """A step takes up to 1.15 of one without stragglers, where others wait for 2, and the weights are the same."""
    even, waiting = trained(SYNCHRONOUS), trained(SYNCHRONOUS, ONE_SLOW)
    assert waiting.result.seconds / even.result.seconds > 1.9
    for shards in 1, 2:
        helped = trained(strategies.flexrr(shards=shards), ONE_SLOW)
        assert helped.result.seconds / even.result.seconds <= 1.15
        assert (helped.weights - even.weights).norm() / even.weights.norm() < 1e-12
        assert helped.total("slices_given") == helped.total("slices_helped") > 50
        assert helped.total("samples") == helped.result.samples == 2 * WORKERS * SHARE
        assert (helped.server["updates"], helped.server["dropped"], helped.server["refused"]) == (2, 0, 0)


def test_without_stragglers_it_costs_at_most_2_percent() -> None:
    even, reassigning = trained(SYNCHRONOUS), trained(strategies.flexrr())
    assert reassigning.result.seconds / even.result.seconds <= 1.02
    assert reassigning.total("slices_given") == 0
    assert (reassigning.weights - even.weights).norm() / even.weights.norm() < 1e-12


def test_whoever_computes_a_slice_draws_the_same_random_numbers() -> None:
    """Dropout, and batches of unequal size at the end of an epoch."""
    random = job(samples=WORKERS * SHARE + 1003, dropout=0.5)
    strategy = strategies.flexrr(grain=0.025)
    alone, helped = (trained(strategy, cluster, of=random) for cluster in (EVEN, ONE_SLOW))
    assert alone.total("slices_given") == 0 < helped.total("slices_given")
    assert (helped.weights - alone.weights).norm() / alone.weights.norm() < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_a_bound_a_batch_is_one_step_of_the_optimizer_whoever_helped(optimizer: str) -> None:
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    of = replace(job(), optimizer=lambda parameters, lr: made(parameters, lr=lr))
    run = trained(strategies.flexrr(bound=1, grain=0.025, shards=2), ONE_SLOW, of=of)
    assert run.total("slices_helped") > 20
    assert run.server["updates"] == 2 * WORKERS


def test_with_a_bound_a_slow_worker_is_helped_too() -> None:
    ssp = trained(strategies.ssp(bound=1), ONE_SLOW)
    flexrr = trained(strategies.flexrr(bound=1, grain=0.025), ONE_SLOW)
    assert flexrr.result.seconds < 0.65 * ssp.result.seconds
    assert [verdict.exact for verdict in flexrr.verdicts] == [True]


# --------------------------------------------------------------------------------------------------------- exactly once


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("dies", [0, 7], ids=["a helper dies", "a helpee dies"])
def test_every_sample_counts_once_when_a_worker_dies_in_the_middle_of_a_step(dies: int, bound: int) -> None:
    cluster = replace(ONE_SLOW, faults=(Crash(rank=dies, at_s=0.55),))
    run = trained(strategies.flexrr(grain=0.025, bound=bound, shards=2), cluster)
    assert [str(verdict) for verdict in run.verdicts if not verdict.exact] == []
    assert len(run.verdicts) == 1
    assert run.total("slices_helped") > 0
    assert run.server["refused"] == 0


def test_the_death_of_a_copy_loses_no_slice() -> None:
    cluster = replace(ONE_SLOW, faults=(Crash(rank=WORKERS, at_s=0.55),))
    run = trained(strategies.flexrr(grain=0.025, replicas=1), cluster)
    assert [verdict.exact for verdict in run.verdicts] == [True]
    assert (run.weights - trained(SYNCHRONOUS).weights).norm() / run.weights.norm() < 1e-12


# ------------------------------------------------------------------------------------------------------- as plain torch


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_one_worker_is_plain_torch_and_learners_are_one_with_the_joined_batch(optimizer: str, served: Runner) -> None:
    """Equal to the bit where a batch is one slice, else to rounding."""
    setting = Setting(optimizer, torch.float64)
    for row in HELPED:
        expected = stepped(batches_of(13, setting), setting)
        found = served(row.make(), 1, 13, setting).weights
        assert torch.equal(found, expected) if row.exact else torch.allclose(found, expected, rtol=1e-12)
        if row.joined:
            expected = stepped(batches_of(6, setting, batch_size=4 * BATCH), setting)
            found = served(row.make(), 4, 24, setting, exponential()).weights
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", HELPED, ids=label)
def test_the_same_seed_is_the_same_run_and_another_seed_another(row: Row, served: Runner) -> None:
    first, again, other = (served(row.make(), 4, stragglers=lognormal(), seed=seed) for seed in (5, 5, 6))
    assert first.result.trace_hash == again.result.trace_hash != other.result.trace_hash
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.weights, other.weights)


# ----------------------------------------------------------------------------------------------- whole batches, or none


def normed(frozen: bool = False) -> Job:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=frozen), nn.Linear(4, 1)).double()
        net[1].train(not frozen)
        return net

    return replace(job(), model=model)


def test_a_batch_norm_would_see_slices_and_is_refused() -> None:
    remedy = (
        r"flexrr\(.*\) computes a batch in up to 80 slices, and BatchNorm1d '1' would normalise each "
        r"slice separately; .*flexrr\(grain=1.0, first_offer=1.0, later_offers=1.0\).*GroupNorm.*"
        r"backup_workers\(backups=0\)"
    )
    for strategy in (strategies.flexrr(), strategies.flexrr(bound=1)):
        with pytest.raises(ValueError, match=remedy):
            trained(strategy, of=normed())


def test_a_batch_norm_that_is_frozen_or_sees_whole_batches_trains_as_without_help() -> None:
    whole = strategies.flexrr(grain=1.0, first_offer=1.0, later_offers=1.0)
    for strategy, of in (
        (whole, normed()),
        (strategies.flexrr(grain=0.1, first_offer=0.1, later_offers=0.1), normed(frozen=True)),
    ):
        helped, alone = trained(strategy, ONE_SLOW, of=of), trained(SYNCHRONOUS, of=of)
        assert (helped.weights - alone.weights).norm() / alone.weights.norm() < 1e-12


# --------------------------------------------------------------------------------------------------------------- slices


class Ragged(Dataset[Any]):
    """Sample i is a dict with i + 1 numbers, and a word."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": [index] * (index + 1), "word": "abcde"[index]}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(sample["row"]) for sample in samples)
    rows = [sample["row"] + [-1] * (longest - len(sample["row"])) for sample in samples]
    return {"rows": torch.tensor(rows), "words": [sample["word"] for sample in samples]}


def test_a_slice_is_collated_by_itself_so_a_batch_may_be_anything() -> None:
    batches = Batches(Data(Ragged(), None, padded).training(), size=1, batch_size=5)
    order = permutation(5, 0, 0).tolist()
    samples = batches.samples(0, 0)
    whole = samples.collated()
    assert whole["words"] == ["abcde"[i] for i in order]
    assert whole["rows"].shape == (5, 5)
    slice_ = samples.collated(3, 5)
    assert slice_["words"] == ["abcde"[i] for i in order[3:]]
    assert slice_["rows"].shape == (2, max(order[3:]) + 1), "padded to its own longest"
    table = torch.arange(10).reshape(5, 2)
    first, second, third = Batches(TensorDataset(table, table[:, 0], table), size=1, batch_size=5).samples(0, 0).held
    assert (first.shape, second.shape, third.shape) == ((5, 2), (5,), (5, 2))
