"""`attach` leaves the training loop as it is: synchronous ranks equal the plain loop on the joined batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import polytempo as pt
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import assert_as_alone, batches, close, flat, loop, mine, small, squared, together

pytestmark = pytest.mark.process

STEPS = 5
EXACT = 1e-12


def frozen_first(net: nn.Sequential) -> Optimizer:
    net[0].requires_grad_(False)
    return SGD(net.parameters(), lr=0.1, momentum=0.9)


def two_groups(net: nn.Sequential) -> Optimizer:
    fast: dict[str, Any] = {"params": net[0].parameters(), "lr": 0.3}
    return SGD([fast, {"params": net[2].parameters()}], lr=0.1)


OPTIMIZERS: dict[str, Callable[[nn.Sequential], Optimizer]] = {
    "momentum": lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda net: Adam(net.parameters(), lr=0.05),
    "two groups": two_groups,
    "frozen layer": frozen_first,
    "layer left out": lambda net: SGD(net[2].parameters(), lr=0.1),
}


def test_the_plain_loop_equals_one_rank_on_the_joined_batch() -> None:
    def work(world: ProcessWorld) -> Result:
        found = {}
        for name, make_optimizer in OPTIMIZERS.items():
            net = small()
            optimizer = make_optimizer(net)
            pt.attach(net, optimizer, pt.strategies.sync_sgd())
            loop(net, optimizer, mine(batches(STEPS), world))
            found[name] = flat(net)
        return found

    first, second, third = together(3, work)
    assert first == second == third
    for name, make_optimizer in OPTIMIZERS.items():
        alone = small()
        loop(alone, make_optimizer(alone), batches(STEPS))
        assert close(first[name], flat(alone), EXACT), name


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_dropped_or_zeroed(set_to_none: bool) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        pt.attach(net, optimizer)
        for inputs, targets in mine(batches(STEPS), world):
            optimizer.zero_grad(set_to_none=set_to_none)
            squared(net(inputs), targets).backward()
            optimizer.step()
        return flat(net)

    assert_as_alone(work, STEPS, lr=0.1, momentum=0.9)


def test_shards_of_a_data_set_that_no_batch_size_divides() -> None:
    """11 samples make global batches of 4, 4 and 3: the last is dealt unevenly and weighed by samples."""
    inputs, targets = batches(1)[0]
    samples = TensorDataset(inputs[:11], targets[:11])

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        pt.attach(net, optimizer)
        part = pt.shard(DataLoader(samples, batch_size=4 // world.size, shuffle=True), seed=5)
        for _ in range(2):
            loop(net, optimizer, part)
        return flat(net)

    (alone,) = together(1, work)
    first, second = together(2, work)
    assert first == second
    assert close(first, alone, EXACT)


# --- accumulation: the passes of three inside no_sync

ACCUMULATIONS = {
    "all but the last": (True, True, False),
    "none": (False, False, False),
    "all": (True, True, True),
    "the last": (False, False, True),
}


def accumulated(world: ProcessWorld, quiets: tuple[bool, ...]) -> list[float]:
    """Two steps, each on the sum of three backward passes."""
    net = small()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    pt.attach(net, optimizer)
    whole = list(mine(batches(6), world))
    for first in (0, 3):
        optimizer.zero_grad()
        for quiet, (inputs, targets) in zip(quiets, whole[first : first + 3], strict=True):
            with pt.training.no_sync(net) if quiet else nullcontext():
                (squared(net(inputs), targets) / 3).backward()
        optimizer.step()
    return flat(net)


def test_accumulated_gradients_equal_one_big_batch() -> None:
    alone = small()
    whole = batches(6)
    joined = [
        (torch.cat([x for x, _ in whole[i : i + 3]]), torch.cat([y for _, y in whole[i : i + 3]])) for i in (0, 3)
    ]
    loop(alone, SGD(alone.parameters(), lr=0.1, momentum=0.9), joined)
    first, second = together(2, lambda world: {name: accumulated(world, q) for name, q in ACCUMULATIONS.items()})
    assert first == second
    for name in ACCUMULATIONS:
        assert close(first[name], flat(alone), EXACT), name


@pytest.mark.parametrize("strategy", [pt.strategies.sync_sgd(), pt.strategies.shared_memory()], ids=str)
def test_batches_that_are_dealt_unevenly_accumulate_each_with_its_own_share(strategy: pt.Strategy) -> None:
    """Of global batches of 4, 4 and 3 samples each two are a step; the batch grows to 6 in the third of four epochs."""
    inputs, targets = batches(1)[0]
    samples = TensorDataset(inputs[:11], targets[:11])

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        pt.attach(net, optimizer, strategy)
        part = pt.shard(samples, batch_size=4 // world.size, seed=5)
        number = 0
        for epoch in range(4):
            if epoch == 2:
                part.grow(6 // world.size)
            for x, y in part:
                number += 1
                with pt.training.no_sync(net) if number % 2 else nullcontext():
                    (squared(net(x), y) / 2).backward()
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(net)

    (alone,) = together(1, work)
    first, second = together(2, work)
    assert first == second
    assert close(first, alone, EXACT)


# --- between backward and step


def test_clipping_by_global_norm_sees_the_mean_gradient() -> None:
    def clipped(net: nn.Module, optimizer: Optimizer, data: object) -> float:
        norm = 0.0
        for inputs, targets in data:  # type: ignore[attr-defined]
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
            optimizer.step()
        return norm

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
        pt.attach(net, optimizer)
        return [clipped(net, optimizer, mine(batches(STEPS), world)), *flat(net)]

    alone = small()
    norm = clipped(alone, SGD(alone.parameters(), lr=0.5, momentum=0.9), batches(STEPS))
    assert norm > 0.1
    first, second = together(2, work)
    assert first == second
    assert close(first, [norm, *flat(alone)], EXACT)


def test_a_learning_rate_schedule() -> None:
    def scheduled(net: nn.Module, optimizer: Optimizer, data: object) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for inputs, targets in data:  # type: ignore[attr-defined]
            optimizer.zero_grad()
            squared(net(inputs), targets).backward()
            optimizer.step()
            schedule.step()

    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.5)
        pt.attach(net, optimizer)
        scheduled(net, optimizer, mine(batches(STEPS), world))
        return flat(net)

    alone = small()
    scheduled(alone, SGD(alone.parameters(), lr=0.5), batches(STEPS))
    first, second = together(2, work)
    assert first == second
    assert close(first, flat(alone), EXACT)


def test_bf16_autocast() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small(torch.float32)
        optimizer = Adam(net.parameters(), lr=0.01)
        pt.attach(net, optimizer)
        for inputs, targets in mine(batches(STEPS, torch.float32), world):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = net(inputs)
            assert output.dtype == torch.bfloat16
            squared(output.float(), targets).backward()
            optimizer.step()
        return flat(net)

    alone = small(torch.float32)
    loop(alone, Adam(alone.parameters(), lr=0.01), batches(STEPS, torch.float32))
    first, second = together(2, work)
    assert first == second
    assert close(first, flat(alone), 0.05)


# --- how it begins


def test_everybody_begins_with_what_rank_0_has() -> None:
    def work(world: ProcessWorld) -> Result:
        torch.manual_seed(world.rank)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        optimizer = Adam(net.parameters(), lr=0.01 * (1 + world.rank), betas=(0.8, 0.9 + 0.01 * world.rank))
        if world.rank == 0:  # the others have no optimizer state yet
            loop(net, optimizer, batches(2))
        pt.attach(net, optimizer)
        moments = [float(state[key].sum()) for state in optimizer.state.values() for key in ("step", "exp_avg")]
        settings = [optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]]
        buffers = [value for buffer in net.buffers() for value in buffer.flatten().tolist()]
        before = [flat(net), buffers, moments, settings]
        loop(net, optimizer, mine(batches(2), world))
        return [before, flat(net)]

    first, second = together(2, work)
    assert first == second
    (_, buffers, moments, settings), _ = first
    assert len(moments) == 12
    assert moments[0] == 2.0
    assert settings == [0.01, 0.8, 0.9]
    assert buffers[-1] == 2


def test_attaching_twice_is_refused_and_detaching_ends_it() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        handle = pt.attach(net, optimizer)
        with pytest.raises(ValueError, match=r"attached already; call detach\(\)"):
            pt.attach(net, optimizer)
        loop(net, optimizer, mine(batches(1), world))
        assert handle.step == 1
        handle.detach()
        together_so_far = flat(net)
        loop(net, optimizer, mine(batches(1), world))
        assert handle.step == 1
        with pytest.raises(ValueError, match="not attached"), pt.training.no_sync(net):
            pass
        apart = flat(net)
        pt.attach(net, optimizer)
        return [together_so_far, apart, flat(net)]

    first, second = together(2, work)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2] == first[1]


def test_a_function_in_place_of_its_answer_is_refused() -> None:
    net = small()
    with pytest.raises(TypeError, match=r"function local_sgd at .*; write local_sgd\(\)"):
        pt.attach(net, SGD(net.parameters(), lr=0.1), pt.strategies.local_sgd)  # type: ignore[arg-type]


def test_what_is_no_model_and_no_optimizer_is_refused() -> None:
    net = small()
    optimizer = SGD(net.parameters(), lr=0.1)
    for given, message in (
        ((net, [optimizer]), "got a list; give one optimizer of all parameters"),
        ((net, net.parameters()), r"got a generator; write pt\.attach\(model, torch\.optim\.SGD"),
        ((optimizer, net), "got a SGD as the model"),
        ((nn.Linear, optimizer), "got the class Linear as the model"),
    ):
        with pytest.raises(TypeError, match=message):
            pt.attach(*given)


def test_an_unknown_buffer_rule_is_refused() -> None:
    net = small()
    with pytest.raises(ValueError, match="'average', 'broadcast' or 'leave', got 'mean'"):
        pt.attach(net, SGD(net.parameters(), lr=0.1), buffers="mean")  # type: ignore[arg-type]


def test_an_attached_model_that_nobody_needs_is_freed() -> None:
    net = small()
    optimizer = SGD(net.parameters(), lr=0.1)
    pt.attach(net, optimizer, pt.strategies.delayed_sgd())
    loop(net, optimizer, batches(2))
    gone = weakref.ref(net)
    del net, optimizer
    gc.collect()
    assert gone() is None


# --- parameters that a step leaves out


class Branches(nn.Module):
    """All ranks use `always`, some use `sometimes` by `open`, none uses `never`."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor, opened: bool) -> Tensor:
        out = inputs * self.always
        return (out + inputs * self.sometimes if opened else out).sum()


UNUSED: list[tuple[tuple[bool, bool], list[float] | None]] = [
    # who uses `sometimes`, its gradient
    ((True, False), [1.0] * 3),
    ((False, True), [1.0] * 3),
    ((False, False), None),
]


def test_unused_parameters() -> None:
    def gradients(opened: bool, bucket_bytes: int) -> list[list[float] | None]:
        net = Branches()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, bucket_bytes=bucket_bytes)
        for now in (True, opened):
            optimizer.zero_grad()
            net(torch.full((3,), 2.0), now).backward()
            optimizer.step()
        return [None if p.grad is None else p.grad.tolist() for p in net.parameters()]

    def work(world: ProcessWorld) -> Result:
        return [gradients(openings[world.rank], bucket_bytes) for openings, _ in UNUSED for bucket_bytes in (1, 2**20)]

    expected = [[[2.0] * 3, sometimes, None] for _, sometimes in UNUSED for _ in range(2)]
    assert together(2, work) == [expected] * 2


def test_a_rank_that_uses_no_parameter_at_all_takes_part_with_zeros() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        optimizer.zero_grad()
        if world.rank == 0:
            squared(net(batches(1)[0][0]), batches(1)[0][1]).backward()
        optimizer.step()
        return flat(net)

    assert_as_alone(work, 1, lr=0.05)


def test_a_late_gradient_reaches_a_parameter_that_the_present_step_leaves_out() -> None:
    def work(world: ProcessWorld) -> Result:
        net = Branches()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, pt.strategies.delayed_sgd(delay=1))
        gradients = []
        for opened in (True, False, False):
            optimizer.zero_grad()
            net(torch.full((3,), 1.0 + world.rank), opened).backward()
            gradients.append(None if net.sometimes.grad is None else net.sometimes.grad.tolist())
            optimizer.step()
        return gradients

    for num_ranks, mean in ((1, 1.0), (2, 1.5)):
        assert together(num_ranks, work) == [[None, [mean] * 3, None]] * num_ranks


def test_optimizer_state_is_averaged_though_a_rank_does_not_use_a_parameter() -> None:
    """A missing gradient counts as zero there, so that all ranks' states have one layout."""

    def work(world: ProcessWorld) -> Result:
        net = Branches()
        optimizer = Adam(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, pt.strategies.parameter_averaging(period=2))
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.full((3,), 2.0), world.rank == 0).backward()
            optimizer.step()
        moments = [optimizer.state[parameter]["exp_avg"].tolist() for parameter in net.parameters()]
        return [flat(net), moments]

    first, second = together(2, work)
    assert first == second
    assert first[1][2] == [0.0] * 3
