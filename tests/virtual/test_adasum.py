"""Adasum in 16 bits, of huge numbers, and of optimizers' steps, against its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import CLUSTER, flats
from laws.harness import OPTIMIZERS, Setting, flat, joined_batch, loss_of, model, plain_torch, run, shares
from polytempo import strategies
from polytempo.aggregation import adaptive_sum, adasum
from polytempo.core import Bundle, Port
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld
from virtual.test_aggregation import by_definition, tree_of

SIXTEEN = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1000.0])
def test_16_bits_are_rounded_once(dtype: torch.dtype, size: float) -> None:
    """The square of 1000 overflows in float16, and the square of 0.0001 is 0."""
    random = torch.Generator().manual_seed(7)
    a, b = ((size * torch.randn(2000, generator=random)).to(dtype) for _ in range(2))
    b = (b + a / 2).to(dtype)
    expected = by_definition(a.double(), b.double())
    found = adaptive_sum(a, b)
    assert found.dtype == dtype
    # float16 has no numbers between multiples of 6e-8, and an element that nearly cancels is rounded in float32
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=max(1e-7 * size, 6e-8))


@pytest.mark.parametrize(("num_ranks", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (6, 4), (7, 4), (8, 3)])
def test_ranks_beyond_a_power_of_two_take_a_round_before_the_pairs_and_one_after(num_ranks: int, rounds: int) -> None:
    cost = adasum().cost(Bundle({"w": torch.zeros(3)}), num_ranks)
    assert [each.sent.rounds for each in cost.exchanges] == [rounds]


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_large_gradients_that_agree_are_averaged_and_orthogonal_ones_added(dtype: torch.dtype, num_ranks: int) -> None:
    size = 60_000.0 if dtype == torch.float16 else 2.0**70
    equal = [Bundle({"w": torch.full((500,), size).to(dtype)}) for _ in range(num_ranks)]
    orthogonal = [Bundle({"w": (torch.eye(num_ranks)[rank] * size).to(dtype)}) for rank in range(num_ranks)]
    assert {tuple(found.tolist()) for found in flats(adasum(), equal)} == {tuple(equal[0].tensors["w"].tolist())}
    whole = torch.full((num_ranks,), size).to(dtype).tolist()
    assert [found.tolist() for found in flats(adasum(), orthogonal)] == [whole] * num_ranks


def test_a_sum_that_leaves_float16_is_the_largest_number_and_no_infinity() -> None:
    a, b = torch.tensor([60_000.0, 60_000.0]), torch.tensor([60_000.0, -60_000.0])
    assert adaptive_sum(a.half(), b.half()).tolist() == [65_504.0, 0.0]


def test_what_is_no_number_stays_none() -> None:
    assert adaptive_sum(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0])).isnan().any()
    assert not adaptive_sum(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 1.0])).isfinite().all()


# ------------------------------------------------------------------------------------------------------- of updates


def horovods(num_ranks: int, num_steps: int, optimizer: str) -> Tensor:
    """Every rank's own optimizer makes its step from the common model; their movements are merged, layer by layer."""
    nets = [model(torch.float64) for _ in range(num_ranks)]
    optimizers = [OPTIMIZERS[optimizer](net.parameters()) for net in nets]
    for step in range(num_steps):
        before = [parameter.detach().clone() for parameter in nets[0].parameters()]
        for net, own, part in zip(nets, optimizers, shares(num_ranks, uneven=False), strict=True):
            own.zero_grad()
            inputs, targets = joined_batch(step, torch.float64)
            loss_of(net, (inputs[part], targets[part])).backward()
            own.step()
        for each, *own_values in zip(before, *(net.parameters() for net in nets), strict=True):
            moved = tree_of([(each - value.detach()).flatten() for value in own_values])
            for value in own_values:
                value.data.copy_(each - moved.view(each.shape))
    return flat(nets[0])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_updates_are_merged_as_horovod_does(optimizer: str, num_ranks: int) -> None:
    ranks, _ = run(strategies.adasum(of="updates"), num_ranks, 6, Setting(optimizer))
    expected = horovods(num_ranks, 6, optimizer)
    assert all(torch.equal(rank.history[-1], ranks[0].history[-1]) for rank in ranks)
    torch.testing.assert_close(ranks[0].history[-1], expected, rtol=1e-11, atol=1e-12)


class One(nn.Module):
    """One parameter of two elements, at (0, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("optimizer", "moved"),
    [
        (torch.optim.SGD, [0.2, 0.0]),
        (torch.optim.Adam, [0.2, 0.0]),  # of gradients it would be (0.1, 0): Adam divides by their size
        (torch.optim.Adagrad, [0.2, 0.0]),
        (torch.optim.RMSprop, [2.0, 0.0]),  # its first step is ten times the rate
    ],
)
def test_the_length_of_a_sum_is_kept(optimizer: Any, moved: list[float]) -> None:
    """Two ranks with the gradients (1, 1) and (1, -1), which are orthogonal, so the updates add. The rate is 0.1."""
    nets = [One(), One()]
    replicas = [Replica(net, optimizer(net.parameters(), lr=0.1), strategies.adasum(), 2) for net in nets]

    async def program(port: Port) -> None:
        net, replica = nets[port.rank], replicas[port.rank]
        net.w.grad = torch.tensor([1.0, (1.0, -1.0)[port.rank]])
        for bucket in replica.buckets:
            await replica.exchange(port, bucket)
        replica.optimizer.step()
        await replica.finish_step(port)

    VirtualWorld(CLUSTER, 2).run(program)
    assert [net.w.tolist() for net in nets] == [pytest.approx([-x for x in moved])] * 2


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_of_updates_one_rank_is_plain_torch_to_the_bit(optimizer: str) -> None:
    setting = Setting(optimizer, torch.float32)
    (rank,), _ = run(strategies.adasum(of="updates"), 1, 12, setting)
    assert all(torch.equal(a, b) for a, b in zip(rank.history, plain_torch(12, setting), strict=True))


def test_of_plain_sgd_updates_and_gradients_are_the_same() -> None:
    """Adasum is linear in a common factor, and without decay an update is the gradient times the rate."""
    OPTIMIZERS["plain"] = lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    try:
        found = [
            run(strategies.adasum(of=of), 4, 8, Setting("plain"))[0][0].history[-1] for of in ("gradients", "updates")
        ]
    finally:
        del OPTIMIZERS["plain"]
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)
