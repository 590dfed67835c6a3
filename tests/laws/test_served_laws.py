"""Laws that every strategy with a parameter server obeys, in the virtual world, with the production machines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laws.catalogue import ONE_WORKER, SERVED, Row, label
from laws.definitions import async_diloco, downpour, easgd, halos, stepped
from laws.harness import Setting, flat, model
from laws.served import NUM_BATCHES, Runner, batches_of, data_of, loss, served, serviced
from polytempo import strategies
from polytempo.cluster import Stragglers, constant, exponential, lognormal

__all__ = ["served"]

every_row = pytest.mark.parametrize("row", SERVED, ids=label)
every_row_of_one_worker = pytest.mark.parametrize("row", ONE_WORKER, ids=label)


# ---------------------------------------------------------------------------------------------------------- one worker


@every_row_of_one_worker
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_one_worker_equals_its_definition_bitwise(row: Row, optimizer: str, served: Runner) -> None:
    setting = Setting(optimizer, torch.float32)
    batches = batches_of(13, setting)
    if row.alone == "torch":
        expected = stepped(batches, setting)
    elif row.alone == "downpour":
        expected = downpour(batches, row.pushes_every, setting)
    elif row.alone == "async_diloco":
        expected = async_diloco(batches, row.pushes_every, label(row), setting)
    elif row.alone == "halos":
        expected = halos(batches, row.pushes_every, label(row), setting)
    else:
        expected = easgd(batches, row.pushes_every, 0.9, setting)
    assert torch.equal(served(row.make(), 1, 13, setting).weights, expected)


@every_row_of_one_worker
def test_neither_shards_nor_replicas_change_a_bit_of_one_worker(row: Row, served: Runner) -> None:
    plain = served(row.make(), 1, 8)
    for shards, replicas in ((4, 0), (2, 1)):
        other = served(serviced(row.make(), shards=shards, replicas=replicas), 1, 8)
        assert torch.equal(other.weights, plain.weights), f"{shards=}, {replicas=}"
        assert len(other.statistics) == shards


# --------------------------------------------------------------------------------------------- a synchronous schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_synchronous_step_has_the_same_bits_whoever_is_late_and_wherever_the_parameters_lie(
    dtype: torch.dtype, served: Runner
) -> None:
    def weights(shards: int, replicas: int, stragglers: Stragglers) -> bytes:
        strategy = strategies.backup_workers(backups=0, shards=shards, replicas=replicas)
        return served(strategy, 4, setting=Setting(dtype=dtype), stragglers=stragglers).weights.numpy().tobytes()

    runs = [(1, 0, constant()), (4, 0, constant()), (1, 1, constant()), (4, 0, exponential()), (2, 2, exponential())]
    assert len({weights(*run) for run in runs}) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("learners", [2, 3, 4])
def test_synchronous_learners_equal_one_with_the_joined_batch(learners: int, optimizer: str, served: Runner) -> None:
    setting = Setting(optimizer, torch.float64)
    for row in SERVED:
        if row.joined:
            steps = NUM_BATCHES // learners
            expected = stepped(batches_of(steps, setting, batch_size=learners * 4), setting)
            found = served(row.make(), learners, NUM_BATCHES, setting, exponential()).weights
            assert (found - expected).norm() / expected.norm() <= 1e-12


# -------------------------------------------------------------------------------------------------------- many workers


@every_row
def test_the_same_seed_is_the_same_run_and_another_seed_another(row: Row, served: Runner) -> None:
    first, again, other = (served(row.make(), 4, stragglers=lognormal(), seed=seed) for seed in (5, 5, 6))
    assert first.result.trace_hash == again.result.trace_hash != other.result.trace_hash
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.weights, other.weights)


@every_row
@pytest.mark.parametrize("replicas", [0, 1])
def test_every_batch_counts_once_in_every_shard_or_is_dropped(row: Row, replicas: int, served: Runner) -> None:
    run = served(serviced(row.make(), shards=3, replicas=replicas), 4, 44, stragglers=exponential())
    assert sum(each.steps for each in run.attendances) == 44
    pushes = sum(-(-each.steps // row.pushes_every) for each in run.attendances)
    for shard in run.statistics:
        applied, batches = sum(shard.staleness.values()), sum(last - first + 1 for first, last in shard.tickets)
        assert applied + shard.dropped == pushes
        assert shard.refused == shard.repeated == 0
        if row.drops:
            assert 0 < shard.dropped <= 44 - batches <= shard.dropped * row.pushes_every
        else:
            assert shard.tickets == ((0, 43),)


@every_row
def test_it_learns(row: Row, served: Runner) -> None:
    setting = Setting("sgd", torch.float32)
    before = error_of(flat(model(setting.dtype)))
    assert error_of(served(row.make(), 4, 2 * NUM_BATCHES, setting, exponential()).weights) < 0.7 * before


@torch.no_grad()
def error_of(weights: Tensor) -> float:
    """The mean loss over all samples."""
    net = model(weights.dtype)
    torch.nn.utils.vector_to_parameters(weights, net.parameters())
    inputs, targets = data_of(weights.dtype).tensors
    return float(loss(net(inputs), targets))
