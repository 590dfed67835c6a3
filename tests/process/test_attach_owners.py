"""An attached model is moved by its own optimizer alone; other movements are refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import Batch, assert_as_alone, batches, flat, loop, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies

STRATEGIES = [s.sync_sgd(), s.local_sgd(period=2), s.gossip(), s.delayed_sgd(), s.top_k_sgd(0.2), s.shared_memory()]
STRATEGIES += [s.hogwild("in_turn")]
Steps = Iterable[Batch]


def made_anew(net: nn.Module, strategy: Strategy, data: Steps) -> None:
    """A warm restart makes it again."""
    optimizer = SGD(net.parameters(), lr=0.1)
    pt.attach(net, optimizer, strategy)
    loop(net, optimizer, [next(iter(data))])
    optimizer = SGD(net.parameters(), lr=0.01)
    loop(net, optimizer, data)


def one_for_matrices_and_one_for_the_rest(net: nn.Module, strategy: Strategy, data: Steps) -> None:
    """Muon is used like this."""
    matrices = SGD([p for p in net.parameters() if p.ndim > 1], lr=0.1)
    others = Adam([p for p in net.parameters() if p.ndim < 2], lr=0.1)
    pt.attach(net, matrices, strategy)
    for inputs, targets in data:
        squared(net(inputs), targets).backward()
        matrices.step()
        others.step()


def one_for_each_parameter(net: nn.Module, strategy: Strategy, data: Steps) -> None:
    """Steps inside the backward pass."""
    optimizer = SGD(net.parameters(), lr=0.1)
    pt.attach(net, optimizer, strategy)

    def step(parameter: Tensor) -> None:
        SGD([parameter], lr=0.1).step()
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for inputs, targets in data:
        squared(net(inputs), targets).backward()


class Around(Optimizer):
    """Wraps an optimizer, as SAM does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def the_inner_one_steps(net: nn.Module, strategy: Strategy, data: Steps) -> None:
    """SAM's second step."""
    optimizer = Around(SGD(net.parameters(), lr=0.1))
    pt.attach(net, optimizer, strategy)
    for inputs, targets in data:
        squared(net(inputs), targets).backward()
        optimizer.inner.step()


MOVES = [made_anew, one_for_matrices_and_one_for_the_rest, one_for_each_parameter, the_inner_one_steps]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_another_optimizers_step_is_refused(move: Callable[[nn.Module, Strategy, Steps], None]) -> None:
    def work(world: ProcessWorld) -> Result:
        for strategy in STRATEGIES:
            if "shared_memory" in str(strategy) and move is the_inner_one_steps:
                continue  # which refuses the wrapper itself
            with pytest.raises(RuntimeError, match=r"has moved .* attach the optimizer that makes the steps"):
                move(small(torch.float32), strategy, list(mine(batches(2, torch.float32), world)))
        return None

    together(2, work)


@pytest.mark.parametrize("attached", ["inner", "outer"])
def test_a_wrapper_and_what_it_wraps_are_one(attached: str) -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        inner = SGD(net.parameters(), lr=0.1)
        outer = Around(inner)
        handle = pt.attach(net, inner if attached == "inner" else outer, s.gossip())
        loop(net, outer, mine(batches(4), world))
        assert handle.step == 4
        return flat(net)

    assert_as_alone(work, 4, lr=0.1)


def test_after_detach_any_optimizer_may() -> None:
    def work(world: ProcessWorld) -> Result:
        net = small()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer).detach()
        loop(net, SGD(net.parameters(), lr=0.1), batches(1))
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        loop(net, optimizer, mine(batches(1), world))
        return flat(net)

    first, second = together(2, work)
    assert first == second


class Lookahead(Optimizer):
    """timm's: it does not call the constructor of Optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_that_calls_no_hooks_is_refused() -> None:
    net = small()
    optimizer = Lookahead(SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"Lookahead\.step\(\) calls no hooks.*attach the optimizer that it wraps"):
        pt.attach(net, optimizer)
    pt.attach(net, optimizer.inner)
    loop(net, optimizer, batches(1))


# --- parameters that are others than at attach


def other_layer(net: nn.Sequential, optimizer: Optimizer) -> None:
    net[2] = nn.Linear(5, 3).double()
    optimizer.param_groups[0]["params"] = list(net.parameters())


def other_dtype(net: nn.Sequential, optimizer: Optimizer) -> None:
    net.bfloat16().double()
    net.float()


def other_memory(net: nn.Sequential, optimizer: Optimizer) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


CHANGES: list[tuple[Any, str, list[Strategy]]] = [
    (other_layer, r"the optimizer was given other parameters", STRATEGIES),
    (other_dtype, r"another dtype than at attach", [s.sync_sgd(), s.local_sgd(), s.gossip(), s.power_sgd(1)]),
    (other_memory, r"a parameter was given other memory", [s.hogwild(), s.hogwild("atomic"), s.hogwild("in_turn")]),
]


@pytest.mark.parametrize(("change", "message", "strategies"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_parameters_that_were_exchanged_are_refused(change: Any, message: str, strategies: list[Strategy]) -> None:
    def work(world: ProcessWorld) -> Result:
        for strategy in strategies:
            net = small()
            optimizer = SGD(net.parameters(), lr=0.1)
            handle = pt.attach(net, optimizer, strategy)
            loop(net, optimizer, mine(batches(1), world))
            change(net, optimizer)
            dtype = next(net.parameters()).dtype
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=rf"{message}.*detach\(\)"):
                loop(net, optimizer, mine(batches(1, dtype), world))
            assert handle.step == 1
        return None

    together(2, work)
