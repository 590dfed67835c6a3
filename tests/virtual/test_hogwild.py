"""Hogwild! under the virtual clock: one copy of the parameters, and interleavings that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from polytempo import cluster, strategies
from polytempo.cluster import Cluster, Link
from polytempo.core import Port, TimedOut
from polytempo.data.shard import DataShard
from polytempo.one_host.hogwild import Updates, share_storage
from polytempo.runs.simulated.simulate import simulate
from polytempo.spec.job import Data, Job
from polytempo.spec.result import parameters_sha256
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.virtual_step import priced_step
from polytempo.worlds import VirtualWorld

HOST = Cluster(Link(0.0, 1e12), memory=Link(0.0, 1e12), workers_per_host=8, flops_per_s=1000.0)
PAIRS = replace(HOST, workers_per_host=2)


def _data() -> TensorDataset:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(96, 4, generator=random)
    return TensorDataset(x, (x @ torch.tensor([1.0, -2.0, 0.5, 3.0])).unsqueeze(1))


JOB = Job(
    name="line",
    model=lambda: nn.Linear(4, 1),
    data=lambda folder: Data(_data()),
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: SGD(parameters, lr=lr),
    lr=0.02,
    batch_size=2,
    epochs=4,
)


# ---------------------------------------------------------------------------------------------- being alone


def alone_spans(world_cluster: Cluster, seconds: list[float]) -> list[tuple[int, float, float]]:
    """(rank, start, end) of the computations of ranks that want to be alone at the same time."""

    async def program(port: Port) -> None:
        await port.alone(lambda: None, 1000.0 * seconds[port.rank])

    trace = VirtualWorld(world_cluster, len(seconds)).run(program).trace
    return [(e.rank, e.start_s, e.end_s) for e in trace.events]


def test_ranks_of_a_host_are_let_in_one_after_the_other_in_the_order_of_asking() -> None:
    assert alone_spans(HOST, [2.0, 1.0, 4.0]) == [(0, 0.0, 2.0), (1, 2.0, 3.0), (2, 3.0, 7.0)]


def test_hosts_do_not_wait_for_each_other() -> None:
    assert alone_spans(PAIRS, [2.0, 1.0, 4.0]) == [(0, 0.0, 2.0), (1, 2.0, 3.0), (2, 0.0, 4.0)]


def test_the_work_is_done_when_its_turn_comes() -> None:
    seen: list[list[int]] = []
    log: list[int] = []

    def work(rank: int) -> None:
        log.append(rank)
        seen.append(list(log))

    async def program(port: Port) -> None:
        await port.compute(lambda: None, 100.0 * (3 - port.rank))
        await port.alone(lambda: work(port.rank), 5000.0)

    VirtualWorld(HOST, 3).run(program)
    assert seen == [[2], [2, 1], [2, 1, 0]]


def test_who_gives_up_waiting_is_passed_over() -> None:
    done: list[int] = []

    async def program(port: Port) -> str:
        try:
            await port.within(1.5 if port.rank == 1 else 100.0).alone(lambda: done.append(port.rank), 2000.0)
        except TimedOut as late:
            return str(late)
        return "done"

    results = VirtualWorld(HOST, 3).run(program).results
    assert results == ["done", "rank 1, step 0: timed out: alone did not finish within 1.5 s", "done"]
    assert done == [0, 2]


@pytest.mark.parametrize("inside", [True, False], ids=["the one inside dies", "a waiting rank dies"])
def test_the_others_go_on_when_a_rank_dies(inside: bool) -> None:
    dies = 0 if inside else 1
    faulty = replace(HOST, faults=(cluster.Crash(rank=dies, at_s=0.5),))
    done: list[int] = []

    async def program(port: Port) -> None:
        await port.alone(lambda: done.append(port.rank), 1000.0)

    VirtualWorld(faulty, 3).run(program)
    assert done == ([0, 1, 2] if inside else [0, 2])


def test_an_error_inside_is_raised_at_the_await_and_lets_the_next_one_in() -> None:
    async def program(port: Port) -> str:
        try:
            await port.alone(lambda: 1 // port.rank, 1000.0)
        except ZeroDivisionError:
            return "refused"
        return "fine"

    assert VirtualWorld(HOST, 3).run(program).results == ["refused", "fine", "fine"]


# ---------------------------------------------------------------------------------------------- interleavings


def trained(update: Any, num_ranks: int, num_steps: int, seed: int = 0) -> tuple[Tensor, list[int]]:
    """The one copy after `num_steps` steps of each rank, and the ranks of all updates in their order."""
    strategy, models = strategies.hogwild(update), [model() for _ in range(num_ranks)]
    spec = RunSpec.of(JOB, strategy, num_ranks, RunOptions())
    share_storage(models)
    replicas = [Replica(m, JOB.optimizer(m.parameters(), JOB.lr), strategy, num_ranks) for m in models]
    updates = [Updates(strategy.one_copy, Random(f"{seed}/{rank}")) for rank in range(num_ranks)]
    order: list[int] = []
    for rank, replica in enumerate(replicas):
        replica.optimizer.register_step_post_hook(lambda *_, rank=rank: order.append(rank))

    async def program(port: Port) -> None:
        batches = shard(port.rank, num_ranks)
        step = priced_step(replicas[port.rank], spec, StepCost(100.0), updates[port.rank])
        for number in range(num_steps):
            await port.mark(number)
            await step(port, next(batches), 2, None)
        await updates[port.rank].settle()

    assert VirtualWorld(HOST, num_ranks).run(program).unreceived == 0
    assert all(torch.equal(flat(m), flat(models[0])) for m in models)
    return flat(models[0]), order


def model() -> nn.Module:
    torch.manual_seed(0)
    return JOB.model()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()


def shard(rank: int, num_ranks: int) -> Iterator[Any]:
    return iter(DataShard(_data(), rank=rank, size=num_ranks, batch_size=2, seed=0))


def late_by(delay: int, num_ranks: int, num_steps: int) -> Tensor:
    """Sequential SGD in the order of ranks, each gradient taken where the parameters were `delay` updates before."""
    net = model()
    optimizer, batches = JOB.optimizer(net.parameters(), JOB.lr), [shard(r, num_ranks) for r in range(num_ranks)]
    history = [flat(net)]
    for number in range(num_ranks * num_steps):
        vector_to_parameters(history[max(0, number - delay)].clone(), net.parameters())
        optimizer.zero_grad()
        inputs, targets = next(batches[number % num_ranks])
        JOB.loss(net(inputs), targets).backward()
        vector_to_parameters(history[-1].clone(), net.parameters())
        optimizer.step()
        history.append(flat(net))
    return history[-1]


@pytest.mark.parametrize("update", ["free", "atomic", "locked", "in_turn"])
def test_one_worker_is_serial_descent_to_the_bit(update: str) -> None:
    assert torch.equal(trained(update, 1, 12)[0], late_by(0, 1, 12))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_in_turn_is_sequential_descent_whose_gradients_are_a_round_old(num_ranks: int) -> None:
    for seed in (0, 1):
        parameters, order = trained("in_turn", num_ranks, 8, seed)
        assert order == list(range(num_ranks)) * 8
        assert torch.equal(parameters, late_by(num_ranks - 1, num_ranks, 8)), f"seed {seed}"


@pytest.mark.parametrize("update", ["free", "atomic", "locked"])
def test_a_seed_is_an_interleaving(update: str) -> None:
    first, again, other = (trained(update, 4, 12, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]
    assert first[1] != other[1]
    assert not torch.equal(first[0], other[0])
    assert sorted(first[1]) == sorted(list(range(4)) * 12)


@pytest.mark.parametrize("update", ["free", "atomic", "locked", "in_turn"])
def test_a_simulation_repeats_and_learns(update: Any) -> None:
    first, again, other = (simulate(JOB, strategies.hogwild(update), 4, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.trace_hash != other.trace_hash
    assert first.strategy == f"hogwild(update='{update}')"
    before = simulate(JOB, strategies.sync_sgd(), 1, steps=1).train_loss
    assert first.train_loss is not None
    assert before is not None
    assert first.train_loss < 0.1 * before


def test_a_simulation_of_turns_is_the_sequence_whatever_the_stragglers() -> None:
    stragglers = cluster.one_host(stragglers=cluster.lognormal(0.5))
    result = simulate(JOB, strategies.hogwild("in_turn"), 4, stragglers, steps=12)
    torch.manual_seed(0)
    net = JOB.model()
    vector_to_parameters(late_by(3, 4, 12), net.parameters())
    assert result.parameters_sha256 == parameters_sha256(net.parameters())


def test_the_step_size_shrinks_by_a_schedule() -> None:
    shrinking = replace(JOB, schedule=lambda optimizer, steps: LambdaLR(optimizer, lambda step: 0.0 ** (step // steps)))
    one, four = (simulate(shrinking, strategies.hogwild(), 2, epochs=epochs) for epochs in (1, 4))
    assert one.parameters_sha256 == four.parameters_sha256  # after the first epoch the step size is 0


def test_only_the_time_of_a_large_run() -> None:
    free, locked = (simulate(JOB, strategies.hogwild(u), 32, meta=True, steps=5) for u in ("free", "locked"))
    assert 0 < free.seconds < locked.seconds
    assert simulate(JOB, strategies.hogwild("in_turn"), 8, meta=True, steps=5).steps == 5


def test_it_needs_one_host() -> None:
    with pytest.raises(ValueError, match=r"one copy of the parameters .* 4 workers are on 4 hosts; use .* one_host"):
        simulate(JOB, strategies.hogwild(), 4, cluster.ethernet())
    with pytest.raises(ValueError, match="expected 'free' or 'atomic' or 'locked' or 'in_turn', not 'often'"):
        strategies.hogwild("often")  # type: ignore[arg-type]


def test_one_copy_updated_together_is_synchronous_descent() -> None:
    together = simulate(JOB, strategies.shared_memory(), 4, cluster.one_host(), steps=10)
    apart = simulate(JOB, strategies.sync_sgd(), 4, cluster.one_host(), steps=10)
    assert together.parameters_sha256 == apart.parameters_sha256
    assert together.trace_hash == apart.trace_hash
