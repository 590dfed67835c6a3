"""`handle.state_dict()` beside the model's and the optimizer's: going on equals never having stopped, bitwise."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.worlds import ProcessWorld
from process.crew import Batch, batches, flat, loop, mine, small, together

pytestmark = pytest.mark.process

s = pt.strategies

STRATEGIES = [
    s.acco(),
    s.adasum(),
    s.delayed_sgd(delay=2),
    s.diloco(period=4),
    s.gossip(pt.aggregation.random_pairs(seed=1), period=2),
    s.local_sgd(period=4),
    s.parameter_averaging(period=4),
    s.post_local_sgd(switch_step=3, period=2),
    s.robust_sgd(),
    s.sync_sgd(),
]


MakeOptimizer = Callable[[nn.Module], Optimizer]


def momentum(net: nn.Module) -> Optimizer:
    return SGD(net.parameters(), lr=0.1, momentum=0.9)


def adam(net: nn.Module) -> Optimizer:
    return Adam(net.parameters(), lr=0.01)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_going_on_equals_never_having_stopped(strategy: Strategy) -> None:
    """Ten steps, cut after the sixth, inside every period; the second part has other buckets."""

    def begin(make: MakeOptimizer, bucket_bytes: int) -> tuple[nn.Module, Optimizer, pt.training.Handle]:
        net = small()
        optimizer = make(net)
        return net, optimizer, pt.attach(net, optimizer, strategy, bucket_bytes=bucket_bytes)

    def stop_and_go_on(data: list[Batch], make: MakeOptimizer) -> None:
        straight, optimizer, _ = begin(make, 2**20)
        loop(straight, optimizer, data)
        first, optimizer, handle = begin(make, 2**20)
        loop(first, optimizer, data[:6])
        saved = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "strategy": handle.state_dict()}
        saved = through_a_file(saved)
        loop(first, optimizer, data[6:])  # saving changes nothing, and saved values do not change
        second, optimizer, handle = begin(make, 1)
        second.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["strategy"])
        assert handle.step == 6
        loop(second, optimizer, data[6:])
        assert handle.step == 10
        assert flat(first) == flat(straight)
        assert flat(second) == flat(straight)

    def work(world: ProcessWorld) -> Result:
        for make in (momentum, adam):
            stop_and_go_on(list(mine(batches(10), world)), make)
        return None

    together(2, work)


def test_a_state_of_another_strategy_is_refused() -> None:
    net = small()
    handle = pt.attach(net, momentum(net), s.local_sgd(period=8))
    state = handle.state_dict()
    handle.detach()
    other = pt.attach(net, momentum(net), s.local_sgd(period=4))
    with pytest.raises(pt.errors.Incompatible, match=r"by local_sgd\(period=8.*but local_sgd\(period=4") as caught:
        other.load_state_dict(state)
    assert caught.value.code == "PT1118"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state | {"version": 7, "polytempo": "9.1"}, r"version 7 of Polytempo 9\.1.*reads version"),
        (lambda state: {"strategy": state["strategy"], "tensors": {}, "scalars": {"step": 3}}, "no version"),
        (lambda state: {"model": {}, "handle": state}, r"no version \(model, handle\)"),
        (lambda state: {}, r"no version \(nothing\)"),
    ],
    ids=["a later one", "one before versions", "a whole checkpoint", "nothing"],
)
def test_a_state_of_another_version_is_refused(change: Callable[[dict[str, Any]], dict[str, Any]], said: str) -> None:
    net = small()
    handle = pt.attach(net, momentum(net), s.diloco(period=8))
    with pytest.raises(pt.errors.Incompatible, match=said) as caught:
        handle.load_state_dict(change(handle.state_dict()))
    assert caught.value.code == "PT1117"
    handle.load_state_dict(handle.state_dict())


def test_a_state_of_other_ranks_is_refused_where_there_is_something_in_it() -> None:
    def work(world: ProcessWorld) -> Result:
        for strategy, code in ((s.diloco(period=8), "PT1119"), (s.local_sgd(period=8), None)):
            net = small()
            handle = pt.attach(net, momentum(net), strategy)
            state = handle.state_dict() | {"ranks": 3}
            if code is None:
                handle.load_state_dict(state)
                continue
            with pytest.raises(pt.errors.Incompatible, match=r"one of 3 ranks.*there are 2") as caught:
                handle.load_state_dict(state)
            assert caught.value.code == code
        return None

    together(2, work)


def test_a_state_of_another_model_is_refused() -> None:
    def work(world: ProcessWorld) -> Result:
        net, other = small(), nn.Linear(4, 3).double()
        state = pt.attach(net, momentum(net), s.diloco()).state_dict()
        with pytest.raises(ValueError, match="no parameters/0/1/0/weight; was it saved for another model"):
            pt.attach(other, momentum(other), s.diloco()).load_state_dict(state)
        return None

    together(2, work)
