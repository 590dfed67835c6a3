"""Uneven numbers of batches: with `handle.join()` no rank hangs, and all ranks end with the same parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import Batch, batches, close, flat, loop, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies


def part(rank: int, num_steps: int) -> list[Batch]:
    """Rank's third of the first `num_steps` global batches."""
    return [(inputs.chunk(3)[rank], targets.chunk(3)[rank]) for inputs, targets in batches(num_steps)]


def joined(world: ProcessWorld, strategy: Strategy, lengths: tuple[int, ...]) -> list[float]:
    """This rank's parameters after `lengths[rank]` steps inside `join`."""
    net = small()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    handle = pt.attach(net, optimizer, strategy)
    with handle.join():
        loop(net, optimizer, part(world.rank, lengths[world.rank]))
    return flat(net)


@pytest.mark.parametrize("lengths", [(2, 5, 3), (5, 2, 0), (4, 4, 4), (0, 0, 0)], ids=str)
def test_synchronous_ranks_that_have_left_count_nothing(lengths: tuple[int, ...]) -> None:
    """Each step's gradient is the mean over the ranks that still have a batch."""
    alone = small()
    optimizer = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(lengths)):
        active = [rank for rank in range(3) if step < lengths[rank]]
        optimizer.zero_grad()
        for rank in active:
            inputs, targets = part(rank, step + 1)[step]
            (squared(alone(inputs), targets) / len(active)).backward()
        optimizer.step()
    first, second, third = together(3, lambda world: joined(world, s.sync_sgd(), lengths))
    assert first == second == third
    assert close(first, flat(alone), 1e-12)


def test_local_sgd_averages_the_models_of_those_who_still_train() -> None:
    """Period 2; rank 0 makes 7 steps, rank 1 two: they meet once, then rank 0's model is the model."""
    nets = [small(), small()]
    optimizers = [SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    for rank in (0, 1):
        loop(nets[rank], optimizers[rank], part(rank, 2))
    with torch.no_grad():
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            a.copy_((a + b) / 2)
    loop(nets[0], optimizers[0], part(0, 7)[2:])
    first, second = together(2, lambda world: joined(world, s.local_sgd(period=2), (7, 2)))
    assert first == second
    assert close(first, flat(nets[0]), 1e-12)


def test_nobody_hangs_and_all_end_equal() -> None:
    strategies = [
        s.delayed_sgd(),
        s.diloco(period=2),
        s.local_sgd(period=3),
        s.parameter_averaging(period=2),
        s.post_local_sgd(switch_step=2, period=2),
    ]
    ends = together(3, lambda world: {str(one): joined(world, one, (5, 0, 3)) for one in strategies})
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0]) == len(strategies)
    assert flat(small()) not in ends[0].values()


@pytest.mark.parametrize("strategy", [s.adasum(), s.gossip(), s.robust_sgd()], ids=str)
def test_a_strategy_that_hears_those_who_have_left_is_refused(strategy: Strategy) -> None:
    net = small()
    handle = pt.attach(net, SGD(net.parameters(), lr=0.1), strategy)
    with pytest.raises(ValueError, match=r"counts every rank alike.*join\(\) cannot be used"), handle.join():
        pass


def test_epoch_after_epoch() -> None:
    """A second `join` begins with all ranks active again."""

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, s.local_sgd(period=2))
        seen = []
        for lengths in ((3, 1), (1, 2)):
            with handle.join():
                loop(net, optimizer, part(world.rank, lengths[world.rank]))
            seen.append(flat(net))
        loop(net, optimizer, part(world.rank, handle.step % 2))  # outside: an ordinary loop
        return [*seen, flat(net), [handle.step]]

    first, second = together(2, work)
    assert first == second
    assert first[0] != first[1]


def test_accumulation_inside_join() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer)
        data = part(world.rank, 4 - 2 * world.rank)
        with handle.join():
            for first, second in zip(data[::2], data[1::2], strict=True):
                optimizer.zero_grad()
                with handle.no_sync():
                    squared(net(first[0]), first[1]).backward()
                squared(net(second[0]), second[1]).backward()
                optimizer.step()
        return [flat(net), handle.step]

    first, second = together(2, work)
    assert first == second
    assert first[1] == 2


def test_batch_norm_statistics_of_those_who_have_left_count_nothing() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer)
        with handle.join():
            loop(net, optimizer, part(world.rank, 1 + world.rank))
        return [next(net.buffers()).tolist()]

    means = [[inputs.mean(0) for inputs, _ in part(rank, 2)] for rank in (0, 1)]
    expected = 0.9 * 0.1 * (means[0][0] + means[1][0]) / 2 + 0.1 * means[1][1]
    first, second = together(2, work)
    assert first == second
    assert close(first[0], expected.tolist(), 1e-12)


@pytest.mark.parametrize("rule", ["average", "broadcast"])
def test_a_rank_that_has_left_with_broken_or_stale_buffers_spoils_nothing(rule: str) -> None:
    """Rank 0 leaves after one step; its statistics are NaN by then, and it has seen fewer batches than rank 1."""

    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, buffers=rule)  # type: ignore[arg-type]
        with handle.join():
            loop(net, optimizer, part(world.rank, 1 + 2 * world.rank))
            if world.rank == 0:
                next(net.buffers()).fill_(torch.nan)
        return [buffer.tolist() for buffer in net.buffers()]

    first, second = together(2, work)
    assert first == second
    assert first[2] == 3
    assert torch.tensor(first[0]).isfinite().all()


def test_running_statistics_end_equal_where_models_differ() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer, s.local_sgd(period=4))
        with handle.join():
            loop(net, optimizer, part(world.rank, 3))
        return [buffer.tolist() for buffer in net.buffers()]

    first, second = together(2, work)
    assert first == second


def test_a_second_exchange_in_a_step_is_refused_inside() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        handle = pt.attach(net, SGD(net.parameters(), lr=0.1))
        inputs, targets = part(world.rank, 1)[0]
        with handle.join():
            squared(net(inputs), targets).backward()
            with pytest.raises(RuntimeError, match=r"a second time before optimizer.step.*no_sync\(\)"):
                squared(net(inputs), targets).backward()
            handle.replica.optimizer.step()
        return None

    together(2, work)


def test_join_alone_is_an_ordinary_loop() -> None:
    net, alone = small(), small()
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = pt.attach(net, optimizer, s.diloco(period=2, outer_lr=1.0, outer_momentum=0.0))
    with handle.join():
        loop(net, optimizer, batches(4))
    loop(alone, SGD(alone.parameters(), lr=0.1), batches(4))
    assert close(flat(net), flat(alone), 1e-12)


def test_an_error_inside_is_not_waited_for() -> None:
    """A rank that fails must not go on taking part; its error ends the run."""

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer)
        with handle.join():
            loop(net, optimizer, part(world.rank, 2))
            if world.rank == 1:
                raise LookupError("no more disks")
            loop(net, optimizer, part(world.rank, 2))
        return None

    with pytest.raises(pt.errors.WorkerDied, match=r"rank 1 of 2 raised LookupError(.|\n)*no more disks"):
        together(2, work)
