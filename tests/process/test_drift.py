"""Ranks that promise equal models and differ: found while they train, named, and no checkpoint is written of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Drifted
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import batches, flat, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies
CULPRIT = 1
STEPS = 6
MAX_STEPS = 258
"""256 until all has been looked at, and two until all have heard."""


def flip(tensor: torch.Tensor, bit: int = 40) -> None:
    tensor.detach().view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)


def loaded(net: nn.Module, optimizer: Optimizer) -> None:
    net.load_state_dict({name: value * 1.5 for name, value in net.state_dict().items()})


def other_state(net: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state_dict()
    for entries in state["state"].values():
        entries["exp_avg"] = entries["exp_avg"] * 2
    optimizer.load_state_dict(state)


def other_lr(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def nothing(net: nn.Module, optimizer: Optimizer) -> None:
    """The fault is elsewhere."""


FAULTS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "a flipped bit in a weight": (lambda net, o: flip(net[0].weight), "parameter '0.weight'"),
    "a flipped bit in a bias": (lambda net, o: flip(net[2].bias), "parameter '2.bias'"),
    "a flipped bit in a moment": (lambda net, o: flip(o.state[net[0].bias]["exp_avg_sq"]), "parameter '0.bias'"),
    "another count of steps": (lambda net, o: o.state[net[0].bias]["step"].add_(1), "parameter '0.bias'"),
    "parameters that one rank loads": (loaded, "parameter '0.bias'"),
    "optimizer state that one rank loads": (other_state, "parameter '0.bias'"),
    "a learning rate": (other_lr, "option 'lr' of parameter group 0 is 0.01 on ranks 0, 2, 0.02 on rank 1"),
    "a step that one rank leaves out": (nothing, "number of optimizer steps is"),
}
"""A fault on one rank, and the error's words."""


def trained(
    world: ProcessWorld, name: str, num_steps: int = STEPS, **options: Any
) -> tuple[nn.Module, pt.training.Handle, int]:
    """The model after so many steps, with a fault on one rank after the third, and how many there were."""
    net = small()
    optimizer = Adam(net.parameters(), lr=0.01)
    handle = pt.attach(net, optimizer, **options)
    world.begin()
    world.step = 0
    data = list(mine(batches(STEPS), world))
    for step in range(num_steps):
        inputs, targets = data[step % STEPS]
        optimizer.zero_grad()
        squared(net(inputs), targets).backward()
        hit = step == 2 and world.rank == CULPRIT and name in FAULTS
        if not (hit and "leaves out" in name):
            optimizer.step()
        if hit:
            FAULTS[name][0](net, optimizer)
    return net, handle, num_steps


@cache
def told() -> list[dict[str, list[Any]]]:
    """The errors of three ranks at each fault when the state is about to be saved."""

    def work(world: ProcessWorld) -> Result:
        found = {}
        for name in FAULTS:
            with pytest.raises(Drifted) as error:
                trained(world, name)[1].state_dict()
            found[name] = [str(error.value), error.value.ranks]
        return found

    return together(3, work)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_of_three_ranks_is_named(name: str) -> None:
    first, *others = (said[name] for said in told())
    assert others == [first, first]
    text, ranks = first
    assert ranks == [CULPRIT]
    assert re.match(r"step \d+: rank 1 drifted from ranks 0, 2: ", text)
    assert FAULTS[name][1] in text
    assert 'on_drift="restore"' in text


def test_two_ranks_have_no_majority_and_both_hashes_are_shown() -> None:
    def work(world: ProcessWorld) -> Result:
        with pytest.raises(Drifted) as error:
            trained(world, "a flipped bit in a weight", on_drift="restore")[1].state_dict()
        return [str(error.value), error.value.ranks]

    first, second = together(2, work)
    assert first == second
    assert first[1] == []
    assert "ranks 0, 1 have drifted apart, and no majority says which of them is right" in first[0]
    assert re.search(r"parameter '0.weight' is [0-9a-f]{16} on rank 0, [0-9a-f]{16} on rank 1", first[0])


def test_a_run_that_nobody_saves_ends_within_the_bound() -> None:
    def work(world: ProcessWorld) -> Result:
        for name in ("a flipped bit in a weight", "a step that one rank leaves out"):
            with pytest.raises(Drifted, match="rank 1 drifted"):
                trained(world, name, num_steps=3 + MAX_STEPS)
        return None

    together(3, work)


def test_the_minority_takes_over_the_state_of_the_others() -> None:
    def work(world: ProcessWorld) -> Result:
        found = {}
        for name in FAULTS:
            net, handle, _ = trained(world, name, on_drift="restore")
            handle.state_dict()
            rates = [group["lr"] for group in handle.replica.optimizer.param_groups]
            moments = [float(state["exp_avg"].sum()) for state in handle.replica.optimizer.state.values()]
            found[name] = [flat(net), rates, moments, handle.step]
            handle.detach()
        return found

    first, second, third = together(3, work)
    assert first == second == third
    assert all(state[1] == [0.01] and state[3] == STEPS for state in first.values())


def test_looking_changes_nothing_and_stands_in_no_trace() -> None:
    def work(world: ProcessWorld) -> Result:
        found = []
        for on_drift in ("stop", "ignore"):
            net, handle, _ = trained(world, "", num_steps=20, on_drift=on_drift)
            found.append([flat(net), world.trace.hash, world.trace.bytes_sent[world.rank]])
            assert (handle.replica.drift is None) == (on_drift == "ignore")
            handle.detach()
        return found

    for with_, without in together(2, work):
        assert with_ == without


def test_faults_are_ignored_where_that_is_asked_for_and_refused_otherwise() -> None:
    def work(world: ProcessWorld) -> Result:
        trained(world, "a flipped bit in a weight", on_drift="ignore")[1].state_dict()
        with pytest.raises(ValueError, match="on_drift must be 'stop', 'restore' or 'ignore', got 'warn'"):
            trained(world, "", on_drift="warn")
        return None

    together(2, work)


def test_the_run_ends_before_a_checkpoint_of_it_is_written(tmp_path: Path) -> None:
    def work(world: ProcessWorld) -> Result:
        calls = 0

        def loss(model: Any, batch: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 5 and world.rank == CULPRIT:
                flip(model[0].weight)
            return squared(model(batch[0]), batch[1])

        drawn = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 4, generator=drawn).double(), torch.randn(64, 3, generator=drawn).double())
        job = pt.Job(
            model=small,
            data=lambda folder: pt.Data(data),
            loss=pt.of_batch(loss),
            optimizer=lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9),
        )
        with pytest.raises(Drifted, match=r"parameter '0\.weight'"):
            pt.Trainer(job, s.sync_sgd(), steps=12, batch_size=4, out=tmp_path, checkpoint_every=3, world=world).fit()
        return None

    together(2, work)
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-00000003"]
