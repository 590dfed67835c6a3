"""Layers in parts of 16 bits, which exchange by codecs that draw: the four laws, on two ranks, to the bit.

Looking changes nothing; the same step written in other ways is the same step; an interrupted run goes on as it was;
and learning rate, momentum and weight decay are the optimizer's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

s, c = pt.strategies, pt.compression
CODECS: dict[str, Any] = {"activations": c.qsgd(127, 16), "gradients": c.int8(16)}
STEPS = 4


def whole() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.1), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))


def on_two(kind: str, work: Callable[[ProcessWorld], Any]) -> list[Any]:
    """The function's value on two ranks with one model in split layers."""

    def serve(_: RankInfo) -> Any:
        return work(pt.init(quiet=True, mesh={"model": 2} if kind == "split" else None))

    return launch(serve, 2, threads=1, timeout_s=60)


def parted(kind: str, world: ProcessWorld) -> Any:
    if kind == "hybrid":
        return pt.hybrid(whole(), ["0", "3"], exchange="slices", **CODECS)
    return pt.split(whole(), {"0": "column", "2": "column", "3": "row"}, **CODECS)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.05)


Step = Callable[[Any, Any, Callable[[], Tensor]], None]
"""(model, its optimizer, the function that makes the loss) -> None."""


def plain(net: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def looked_at(net: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    found = loss()
    found.backward()
    net.full_gradients()
    optimizer.step()
    net.eval()
    with torch.no_grad():
        net(torch.ones(4, 6))
    net.train()
    copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()), net.full_parameters(), float(found.detach())


def dropped_first(net: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    state = torch.get_rng_state()
    loss().backward()
    torch.set_rng_state(state)
    plain(net, optimizer, loss)


def zeroed_behind(net: Any, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def parameters_of(kind: str, world: ProcessWorld, step: Step) -> dict[str, list[float]]:
    """The whole model after some steps, each made so."""
    net = parted(kind, world)
    optimizer = sgd(net.parameters())
    handle: Any = pt.attach(net, optimizer, precision="bf16")
    random = torch.Generator().manual_seed(5)
    torch.manual_seed(11)
    for _ in range(STEPS):
        x, y = torch.randn(8, 6, generator=random), torch.randn(8, 3, generator=random)
        if kind == "hybrid":
            x, y = x.chunk(2)[world.rank], y.chunk(2)[world.rank]
        step(net, optimizer, lambda x=x, y=y: (net(x) - y).square().mean())  # type: ignore[misc]
    handle.detach()
    return {name: tensor.flatten().tolist() for name, tensor in net.full_parameters().items()}


@pytest.mark.parametrize("kind", ["split", "hybrid"])
def test_looking_and_other_loops_change_nothing(kind: str) -> None:
    def work(world: ProcessWorld) -> list[Any]:
        return [parameters_of(kind, world, step) for step in (plain, looked_at, dropped_first, zeroed_behind)]

    for ways in on_two(kind, work):
        for found in ways[1:]:
            assert found == ways[0]


@pytest.mark.parametrize("kind", ["split", "hybrid"])
def test_without_a_gradient_steps_are_the_optimizer_s_own(kind: str) -> None:
    """Weight decay and momentum move the float32 masters as they move a plain model, at any learning rate."""
    own = whole()
    optimizer = sgd(own.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(STEPS):
        for parameter in own.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedule.step()

    def work(world: ProcessWorld) -> dict[str, list[float]]:
        net = parted(kind, world)
        stepped = sgd(net.parameters())
        rates = torch.optim.lr_scheduler.ExponentialLR(stepped, 0.5)
        pt.attach(net, stepped, precision="bf16")
        for _ in range(STEPS):
            plain(net, stepped, lambda: 0 * net(torch.ones(4, 6)).sum())
            rates.step()
        return {name: tensor.flatten().tolist() for name, tensor in net.full_parameters().items()}

    expected = {name: tensor.flatten().tolist() for name, tensor in own.named_parameters()}
    assert on_two(kind, work) == [expected, expected]


@pytest.mark.parametrize("kind", ["split", "hybrid"])
def test_runs_that_are_saved_and_interrupted_are_runs(kind: str, tmp_path: Path) -> None:
    job = pt.jobs.find("digits")
    strategy = s.split(**CODECS) if kind == "split" else s.hybrid("0, 2", "turns", **CODECS)
    options: dict[str, Any] = {"threads": 1, "precision": "bf16"}
    alone = pt.simulate(job, strategy, 2, steps=8, **options)
    out = tmp_path / "run"
    saved_often = pt.run(job, strategy, 2, steps=8, out=tmp_path / "whole", checkpoint_every=1, **options)
    pt.run(job, strategy, 2, steps=4, out=out, checkpoint_every=4, **options)
    again = pt.run(job, strategy, 2, steps=8, out=out, resume=True, **options)
    assert {saved_often.parameters_sha256, again.parameters_sha256} == {alone.parameters_sha256}
    saved = pt.training.checkpoint_model(tmp_path / "whole")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
