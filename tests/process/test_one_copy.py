"""`strategies.shared_memory()`: one copy of the parameters and the optimizer's state, trained as sync_sgd trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import polytempo as pt
from polytempo.engines.processes.worker import Result
from polytempo.large_batch import LAMB, LARS
from polytempo.native.library import OFF_VARIABLE, _opened
from polytempo.training.hooks.handle import Handle
from polytempo.worlds import ProcessWorld
from process.crew import batches, loop, mine, small, squared, together

pytestmark = pytest.mark.process

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.05),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "uphill": lambda p: SGD(p, lr=0.0001, maximize=True),
    "adam": lambda p: Adam(p, lr=0.005, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.005),
    "adagrad": lambda p: Adagrad(p, lr=0.05, lr_decay=0.001, initial_accumulator_value=0.1),
    "lars": lambda p: LARS(p, lr=0.05, momentum=0.9, weight_decay=0.01, trust=0.5),
    "lamb": lambda p: LAMB(p, lr=0.01, weight_decay=0.01),
    "lamb without ratios": lambda p: LAMB(p, lr=0.01, adapts=False),
    "lars without momentum": lambda p: LARS(p, lr=0.05, momentum=0.0, weight_decay=0.01, trust=0.5, adapts=True),
}
CLOSE = 1e-5


def attached(net: nn.Module, optimizer: Optimizer, **options: Any) -> Handle:
    """Attach, and see that there is one copy: without it these tests would compare sync_sgd with itself."""
    handle = pt.attach(net, optimizer, pt.strategies.shared_memory(), **options)
    assert handle.one_copy is not None
    return handle


def flat(net: nn.Module) -> list[float]:
    return [float(x) for p in net.parameters() for x in p.detach().flatten()]


def near(a: list[float], b: list[float], tolerance: float = CLOSE) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


def alone(make: Make, data: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """One process on the whole batches."""
    net = small(torch.float32)
    loop(net, make(net.parameters()), data)
    return net


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_over_200_steps_are_those_of_one_process(name: str) -> None:
    data = batches(20, torch.float32) * 10

    def losses(net: nn.Module, optimizer: Optimizer, parts: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
        found = []
        for (inputs, targets), (whole, wanted) in zip(parts, data, strict=True):
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            optimizer.step()
            with torch.no_grad():
                found.append(float(squared(net(whole), wanted)))
        return found

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = OPTIMIZERS[name](net.parameters())
        attached(net, optimizer)
        return losses(net, optimizer, mine(data, world))

    net = small(torch.float32)
    expected = losses(net, OPTIMIZERS[name](net.parameters()), data)
    for found in together(2, work):
        assert near(found, expected)


def test_all_ranks_see_one_memory_and_torchs_own_state() -> None:
    """Rank 1 changes a weight and a moment by hand, and rank 0 sees it."""

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = Adam(net.parameters(), lr=0.01)
        attached(net, optimizer)
        states = [len(optimizer.state)]
        loop(net, optimizer, mine(batches(3, torch.float32), world))
        first = next(net.parameters())
        entries = optimizer.state[first]
        states += sorted(entries)
        if world.rank == 1:
            first.data.view(-1)[0] = 7.0
            entries["exp_avg"].view(-1)[1] = 9.0
        group = world.host_group()
        assert group is not None
        group.barrier()
        return [
            float(first.detach().flatten()[0]),
            float(entries["exp_avg"].flatten()[1]),
            float(entries["step"]),
            states,
        ]

    assert together(2, work) == [[7.0, 9.0, 3.0, [0, "exp_avg", "exp_avg_sq", "step"]]] * 2


def test_uneven_shares() -> None:
    """Rank 0 has 9 of 12 samples."""
    data = batches(10, torch.float32)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1)
        attached(net, optimizer)
        world.shares.give(world.shares.begin(), [], [0.75, 0.25][world.rank])
        part = slice(0, 9) if world.rank == 0 else slice(9, 12)
        loop(net, optimizer, [(x[part], y[part]) for x, y in data])
        return flat(net)

    expected = flat(alone(lambda p: SGD(p, lr=0.1), data))
    for found in together(2, work):
        assert near(found, expected)


def test_a_parameter_that_nobody_uses_is_left_alone_and_one_that_somebody_uses_is_not() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.ParameterList([torch.ones(2), torch.ones(2), torch.ones(2)])
        optimizer = Adam(net.parameters(), lr=0.5, weight_decay=0.1)
        attached(net, optimizer)
        optimizer.zero_grad()
        (net[0].sum() + (net[1].sum() if world.rank == 0 else 0.0)).backward()
        optimizer.step()
        return [[round(p[0].item(), 4) for p in net], len(optimizer.state), net[2].grad is None]

    assert together(2, work) == [[[0.5, 0.5, 1.0], 2, True]] * 2


def test_gradients_accumulate_and_come_back_after_the_step() -> None:
    """Two halves in two backward passes, the first in no_sync; `.grad` is this rank's own, before and after."""
    data = batches(6, torch.float32)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        handle = attached(net, optimizer)
        kept = []
        for inputs, targets in mine(data, world):
            optimizer.zero_grad(set_to_none=world.rank == 0)
            with handle.no_sync():
                (squared(net(inputs[:3]), targets[:3]) / 2).backward()
            (squared(net(inputs[3:]), targets[3:]) / 2).backward()
            before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
            kept.append(all(torch.equal(b, p.grad) for b, p in zip(before, net.parameters(), strict=True)))
        return [flat(net), all(kept)]

    expected = flat(alone(lambda p: SGD(p, lr=0.1, momentum=0.9), data))
    for found, kept in together(2, work):
        assert kept
        assert near(found, expected)


def test_schedules_clipping_and_closures() -> None:
    data = batches(12, torch.float32)

    def train(net: nn.Module, optimizer: Optimizer, clip: Callable[[], Any], parts: Any) -> list[float]:
        schedule = StepLR(optimizer, 3, gamma=0.5)
        for inputs, targets in parts:

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = squared(net(inputs), targets)
                loss.backward()
                clip()
                return loss

            assert optimizer.step(closure) is not None
            schedule.step()
        return flat(net)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.5)
        handle = attached(net, optimizer)
        return train(net, optimizer, lambda: handle.clip_grad_norm_(0.1), mine(data, world))

    net = small(torch.float32)
    clip = lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # noqa: E731
    expected = train(net, SGD(net.parameters(), lr=0.5), clip, data)
    for found in together(2, work):
        assert near(found, expected)


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_saved_and_loaded_in_the_middle(name: str) -> None:
    """Six steps, state_dict, other values everywhere, load_state_dict, six more: as twelve without a pause."""
    data = batches(12, torch.float32)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = OPTIMIZERS[name](net.parameters())
        attached(net, optimizer)
        loop(net, optimizer, mine(data[:6], world))
        saved = {k: v.clone() for k, v in net.state_dict().items()}
        kept = optimizer.state_dict()
        state = {i: {k: v.clone() for k, v in entries.items()} for i, entries in kept["state"].items()}
        group = world.host_group()
        assert group is not None
        group.barrier()
        loop(net, optimizer, mine(data[:3], world))
        net.load_state_dict(saved)
        optimizer.load_state_dict({"state": state, "param_groups": kept["param_groups"]})
        loop(net, optimizer, mine(data[6:], world))
        return flat(net)

    expected = flat(alone(OPTIMIZERS[name], data))
    for found in together(2, work):
        assert near(found, expected)


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.5), lambda p: Adagrad(p, lr=0.5)], ids=["sgd", "adagrad"])
def test_sparse_embeddings(make: Make) -> None:
    """Rows that occur twice in a batch, in both ranks' batches, and never."""
    words = torch.tensor([[1, 1, 4, 7], [4, 1, 9, 9], [0, 7, 7, 7]])

    def train(parts: Iterable[Tensor], net: nn.Module, optimizer: Optimizer) -> list[float]:
        for part in parts:
            optimizer.zero_grad()
            net(part).square().mean().backward()
            with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch warns without a choice
                optimizer.step()
        return flat(net)

    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(12, 5, sparse=True), nn.Linear(5, 2))

    def work(world: ProcessWorld) -> Result:
        net = table()
        optimizer = make(net.parameters())
        attached(net, optimizer)
        return train([row.chunk(2)[world.rank] for row in words], net, optimizer)

    net = table()
    expected = train(words, net, make(net.parameters()))
    for found in together(2, work):
        assert near(found, expected)


def test_running_statistics_meet() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = SGD(net.parameters(), lr=0.1)
        attached(net, optimizer)
        loop(net, optimizer, mine(batches(4, torch.float32), world))
        return [float(x) for x in net.state_dict()["1.running_mean"]]

    first, second = together(2, work)
    assert first == second


def test_ranks_may_leave_a_join_at_different_steps() -> None:
    """Rank 1 leaves after 3 of 6 steps: the rest is rank 0's alone."""
    data = batches(6, torch.float32)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        handle = attached(net, optimizer)
        with handle.join():
            loop(net, optimizer, list(mine(data, world))[: 6 if world.rank == 0 else 3])
        return [flat(net), handle.step]

    expected = flat(alone(lambda p: SGD(p, lr=0.1, momentum=0.9), data[:3] + [(x[:6], y[:6]) for x, y in data[3:]]))
    for found, steps in together(2, work):
        assert steps == 6
        assert near(found, expected)


def test_after_detach_every_rank_has_its_own() -> None:
    data = batches(8, torch.float32)

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = Adam(net.parameters(), lr=0.01)
        handle = attached(net, optimizer)
        loop(net, optimizer, mine(data[:4], world))
        handle.detach()
        if world.rank == 1:
            loop(net, optimizer, data[4:])
        return flat(net)

    first, second = together(2, work)
    make: Make = lambda p: Adam(p, lr=0.01)  # noqa: E731
    assert near(first, flat(alone(make, data[:4])))
    assert near(second, flat(alone(make, data)))


class Odd(SGD):
    """An optimizer that only its author knows."""


REFUSED: list[tuple[Make, str]] = [
    (lambda p: Odd(p, lr=0.1), r"this optimizer is Odd; use sync_sgd\(\)"),
    (lambda p: Adam(p, amsgrad=True), r"does not know Adam\(amsgrad=True\); use sync_sgd\(\)"),
    (lambda p: LARS(p, 0.1, corrects_momentum=True), r"does not know LARS\(corrects_momentum=True\)"),
    (lambda p: torch.optim.RMSprop(p), r"Adagrad, LARS and LAMB, and this optimizer is RMSprop; use sync_sgd\(\)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_the_core_does_not_know_is_refused_at_once(make: Make, message: str) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        with pytest.raises(ValueError, match=message):
            pt.attach(net, make(net.parameters()), pt.strategies.shared_memory())
        return True

    assert together(2, work) == [True, True]


def test_bfloat16_is_refused() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.bfloat16)
        with pytest.raises(ValueError, match=r"'0.weight' is torch.bfloat16 on cpu; use sync_sgd\(\)"):
            pt.attach(net, SGD(net.parameters(), lr=0.1), pt.strategies.shared_memory())
        return True

    assert together(2, work) == [True, True]


def test_without_the_core_it_is_sync_sgd_and_rank_0_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF_VARIABLE, "0")
    _opened.cache_clear()

    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = SGD(net.parameters(), lr=0.1)
        with redirect_stderr(StringIO()) as said:
            handle = pt.attach(net, optimizer, pt.strategies.shared_memory())
        loop(net, optimizer, mine(batches(5, torch.float32), world))
        return [handle.one_copy is None, said.getvalue(), flat(net)]

    try:
        first, second = together(2, work)
    finally:
        _opened.cache_clear()
    assert first[0]
    assert first[1].startswith("polytempo: every rank keeps its own copy, as in sync_sgd(): POLYTEMPO_NATIVE=0")
    assert second[:2] == [True, ""]
    assert near(first[2], flat(alone(lambda p: SGD(p, lr=0.1), batches(5, torch.float32))))
