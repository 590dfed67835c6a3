"""ACCO and provisional steps: the simpler strategies they reduce to, and an undone step gives all back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import polytempo as pt
from laws.harness import HOST
from polytempo import strategies as s
from polytempo.aggregation import mean
from polytempo.core import Port, Strategy
from polytempo.synchronization import every
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld

NUM_RANKS = 2
Slopes = Callable[[int, int, Tensor], Tensor]
"""(step, rank, weights) -> the gradient there."""

MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.3),
    "dampened": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.3, amsgrad=True),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), lr=0.1),
    "rprop": lambda net: torch.optim.Rprop(net.parameters(), lr=0.1),
}


def weights() -> nn.Module:
    """Three numbers."""
    net = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, 1.0)
    return net


def trained(strategy: Strategy, make: Callable[[nn.Module], Optimizer], num_steps: int, slopes: Slopes) -> Tensor:
    """The weights after so many steps of two ranks."""
    nets = [weights() for _ in range(NUM_RANKS)]

    async def program(port: Port) -> None:
        net = nets[port.rank]
        optimizer = make(net)
        replica = Replica(net, optimizer, strategy, port.size)
        for step in range(num_steps):
            net.weight.grad = slopes(step, port.rank, net.weight.detach())
            await replica.exchange(port, replica.buckets[0])
            optimizer.step()
            await replica.finish_step(port)
        await replica.settle()

    VirtualWorld(HOST, NUM_RANKS).run(program)
    assert nets[0].weight.equal(nets[1].weight)
    return nets[0].weight.detach()


def drawn(step: int, rank: int, at: Tensor) -> Tensor:
    """Slopes of a plane, another one in each step and on each rank."""
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(at.shape, generator=random, dtype=at.dtype)


@pytest.mark.parametrize("name", MAKE)
def test_on_a_plane_it_is_synchronous_sgd_with_joined_pairs_of_batches(name: str) -> None:
    """So all that a provisional step changes returns: weights, moments, counts of steps, and at first no state."""
    found = trained(s.acco(), MAKE[name], 9, drawn)
    net = weights()
    optimizer = MAKE[name](net)
    for step in range(0, 8, 2):
        net.weight.grad = sum(drawn(step + half, rank, net.weight) for half in (0, 1) for rank in (0, 1)) / 4
        optimizer.step()
    torch.testing.assert_close(found, net.weight.detach(), rtol=0, atol=1e-12)


def bowl(step: int, rank: int, at: Tensor) -> Tensor:
    """The slope of a bowl of curvature 1."""
    return at.clone()


def test_it_is_stable_up_to_the_rate_of_synchronous_sgd() -> None:
    """A delay of a step is stable up to half of that rate."""
    fast: Callable[[nn.Module], Optimizer] = lambda net: torch.optim.SGD(net.parameters(), lr=1.5)  # noqa: E731
    assert trained(s.acco(), fast, 60, bowl).abs().max() < 1e-3
    assert trained(s.sync_sgd(), fast, 60, bowl).abs().max() < 1e-3
    assert trained(s.delayed_sgd(), fast, 60, bowl).abs().max() > 1e3


def test_it_is_the_delayed_mean_of_two_batches_where_the_estimate_stays_behind() -> None:
    """With no rate in provisional steps both halves are of the weights before the last update."""

    def halting(net: nn.Module) -> Optimizer:
        optimizer, step = torch.optim.SGD(net.parameters(), lr=0.1), -1

        def rate(*_: object) -> None:
            nonlocal step
            step += 1
            optimizer.param_groups[0]["lr"] = 0.0 if step % 2 else 0.1

        optimizer.register_step_pre_hook(rate)
        return optimizer

    found = trained(s.acco(), halting, 11, bowl)
    weight, before = 1.0, 1.0
    for _ in range(5):  # a is of the weights before, b of the present ones
        weight, before = weight - 0.1 * (before + weight) / 2, weight
    torch.testing.assert_close(found, torch.full_like(found, weight), rtol=0, atol=1e-12)


def test_refusals() -> None:
    net = weights()
    with pytest.raises(ValueError, match="takes several gradients in one"):
        Replica(net, torch.optim.LBFGS(net.parameters()), s.acco(), 2)
    both = Strategy("both", s.acco().gradients, every(2, mean()))
    with pytest.raises(ValueError, match="and with them an exchange of parameters"):
        Replica(net, torch.optim.SGD(net.parameters(), lr=0.1), both, 2)
    with pytest.raises(ValueError, match="does not see gradients of divided layers"):
        s.hybrid("0", inner=s.acco())
    for outer in (s.slowmo, s.codistillation):
        with pytest.raises(ValueError, match="undoes every second step"):
            outer(inner=s.acco())


def loop_of_three(meanwhile: Callable[[nn.Module], None]) -> float:
    """A weight after three steps by a slope of 1; `meanwhile` is called after the second one, which is provisional."""
    net = weights()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = pt.attach(net, optimizer, s.acco())
    for step in range(3):
        optimizer.zero_grad()
        net.weight.sum().backward()
        optimizer.step()
        if step == 1:
            assert net.weight[0, 0].item() == pytest.approx(0.9)
            meanwhile(net)
    handle.detach()
    return float(net.weight.detach()[0, 0])


def test_loaded_parameters_are_not_undone() -> None:
    """Others that a loop evaluates for a while, as an average's, change nothing."""
    other = {"weight": torch.full((1, 3), 5.0, dtype=torch.float64)}

    def there_and_back(net: nn.Module) -> None:
        own = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        net.load_state_dict(other)
        net.load_state_dict(own)

    assert loop_of_three(lambda net: None) == pytest.approx(0.9)
    assert loop_of_three(there_and_back) == pytest.approx(0.9)
    assert loop_of_three(lambda net: net.load_state_dict(other) and None) == pytest.approx(4.9)
