"""NaN on a device: the refusal names the step, rank and parameter that it names on the CPU, and no step waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import NotFinite, PolytempoError
from polytempo.engines.local_engine import launch
from polytempo.training.step.late_look import LateLook, ValueKind
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

crew = pytest.importorskip("device.crew")
MARK = 7.0
"""The input with a NaN."""


class Marked(nn.Module):
    """The loss of a batch with the mark is NaN, or finite with gradients that are not."""

    def __init__(self, *, finite_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.finite_loss = nn.Linear(3, 4), nn.Linear(4, 2), finite_loss

    def forward(self, x: Tensor) -> Tensor:
        marked = (x == MARK).any()
        hidden = self.first(x).tanh()
        if self.finite_loss:  # the root of 0 has an infinite derivative, times 0
            hidden = hidden + torch.where(marked, 0 * hidden, 1.0).sqrt()
            return self.second(hidden)
        return self.second(hidden) * torch.where(marked, torch.nan, 1.0)


def job(*, finite_loss: bool = False, lr: float = 1e-5, marked: bool = True) -> pt.Job:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    inputs = x.clone()
    if marked:
        inputs[20] = MARK
    return pt.Job(
        model=lambda: Marked(finite_loss=finite_loss),
        data=lambda folder: pt.Data(TensorDataset(inputs, x[:, :2])),
        loss=lambda output, target: 1e3 * (output - target).square().mean(),
        optimizer=lambda parameters, lr: SGD(parameters, lr=lr),
        batch_size=4,
        lr=lr,
    )


JOBS = {"loss": job(), "gradient": job(finite_loss=True), "update": job(lr=1e38, marked=False)}
"""The first value that is not finite."""
STRATEGIES = {
    "sync_sgd()": 2,
    "local_sgd(period=2)": 2,
    "gossip()": 2,
    "gpipe(stages=2, micro_batches=2)": 2,
    "async_sgd()": 1,
    "easgd(period=2)": 1,
}


def refused(run: Any, *arguments: Any, **options: Any) -> list[Any]:
    with pytest.raises(NotFinite) as caught:
        run(*arguments, steps=16, **options)
    error = caught.value
    return [error.step, error.rank, error.parameter, error.where.removeprefix("a value of ")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", JOBS)
def test_a_run_names_what_it_names_on_the_cpu(device: str, strategy: str, bad: str) -> None:
    workers = STRATEGIES[strategy]
    found, expected = (refused(pt.run, JOBS[bad], strategy, workers, device=where) for where in (device, "cpu"))
    if expected[2] is None:  # of a pipeline's loss the CPU knows no gradients
        found[2] = None
    if bad == "update":  # of all ranks in the same step
        found[1] = expected[1]
    assert found == expected


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("options", [{}, {"batched": True}], ids=["each", "batched"])
def test_a_simulation_names_what_it_names_on_the_cpu(device: str, bad: str, options: dict[str, Any]) -> None:
    def found(where: str) -> list[Any]:
        return refused(pt.simulate, JOBS[bad], "sync_sgd()", 2, device=where, **options)

    [there], [here] = (launch(lambda _, where=where: found(where), 1, threads=1) for where in (device, "cpu"))
    assert there == here


def loop(world: ProcessWorld, card: torch.device, *, strategy: pt.Strategy, step: int) -> str:
    """The end of a loop with a NaN on rank 1 at `step`, the last one of six."""
    net = Marked().to(card)
    handle = pt.attach(net, SGD(net.parameters(), lr=0.1), strategy, world=world, allow_nan=False)
    reached = 0
    try:
        for number in range(6):
            reached = number
            x = torch.full((2, 3), MARK if (number, world.rank) == (step, 1) else 1.0, device=card)
            handle.replica.optimizer.zero_grad()
            net(x).square().mean().backward()
            handle.replica.optimizer.step()
        handle.detach()
    except NotFinite as error:
        return f"rank {error.rank} step {error.step} {error.parameter} read in {reached}"
    except PolytempoError:
        return "lost a peer"
    return "finished"


@pytest.mark.parametrize("strategy", ["sync_sgd()", "local_sgd(period=8)"])
def test_a_loop_ends_one_step_later(device: str, strategy: str) -> None:
    def ends(step: int) -> list[str]:
        made = pt.parse_strategy(strategy)
        return crew.together(device, 2, lambda world, card: loop(world, card, strategy=made, step=step))

    assert ends(3)[1].startswith("rank 1 step 3 ")
    assert ends(3)[1].endswith("read in 4")
    assert ends(5)[1].startswith("rank 1 step 5 ")  # by `detach`


def test_a_look_copies_one_number_for_each_tensor_and_waits_for_none(device: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> list[Any]:
        look, tensors = LateLook(), [torch.ones(1000, device=card), torch.zeros(3, dtype=torch.float64, device=card)]
        for step, value in enumerate([1.0, torch.inf, torch.nan]):
            tensors[0][7] = value
            tensors[1][1] = 1e300  # finite
            look.note(
                step,
                0,
                ValueKind.GRADIENT,
                [("a", tensors[0]), ("b", tensors[1]), ("none", torch.empty(0, device=card))],
            )
        tensors[0].zero_()
        copied = sum(each.copy.tensors[0].numel() for each in look._noted)
        return [copied, [[found.step, str(found.bad[ValueKind.GRADIENT])] for found in look.read()], look.read()]

    assert crew.together(device, 1, work) == [[6, [[1, "{'a': inf}"], [2, "{'a': nan}"]], []]]


def test_checks_change_no_bits(device: str) -> None:
    plain = replace(JOBS["update"], lr=1e-5)
    found = [
        pt.run(plain, "local_sgd(period=2)", 2, device=device, steps=6, allow_nan=allowed) for allowed in (False, True)
    ]
    assert found[0].parameters_sha256 == found[1].parameters_sha256
