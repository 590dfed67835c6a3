"""Split models trained by strategies along the other axis of the mesh become the whole model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.cluster import one_host
from polytempo.core import Port, Strategy
from polytempo.core.suspension import drive, suspendable
from polytempo.large_batch.layer_wise import LARS
from polytempo.one_host.hogwild import Updates
from polytempo.partition.tensor import SplitModel
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.model.parted_parameters import clip_grad_norm_, counted_elsewhere
from polytempo.training.model.ports import ports_of
from polytempo.training.step.replica import Replica
from polytempo.training.step.step_cost import StepCost
from polytempo.training.virtual.virtual_step import priced_step
from polytempo.worlds import VirtualWorld
from split_models import RULES, SEQUENCE_RULES, VOCABULARY, Transformer, made, on_ranks

s, c = pt.strategies, pt.collectives


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }


def loss(output: Any, target: Tensor) -> Tensor:
    """The loss of whole or divided logits, as the model says (`Scored`)."""
    return output.cross_entropy(target)  # type: ignore[no-any-return]


class Scored(nn.Module):
    """A model with the facts for its loss in its answer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, indices: Tensor) -> Any:
        net, logits = self.net, self.net(indices)

        class Answer:
            @staticmethod
            def cross_entropy(target: Tensor) -> Tensor:
                if isinstance(net, SplitModel):
                    return net.cross_entropy(logits, target)
                return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())

        return Answer


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    indices = torch.randint(0, VOCABULARY, (2, 8), generator=random)
    return indices[:, :-1], indices[:, 1:]


def trained(
    strategy: Strategy, optimizer: str, model: int, *, data: int = 2, steps: int = 3, sequence: bool = False
) -> list[list[Any]]:
    """`data` ranks of `model` ranks each: each rank's view of the whole model, and the part that all its ranks hold."""
    job = pt.Job(
        model=Transformer,
        data=lambda folder: pt.Data([]),
        loss=loss,
        optimizer=lambda parameters, lr: optimizers()[optimizer](parameters),
        name="split",
    )

    async def program(port: Port) -> list[Any]:
        place = port.meshed(data=data, model=model)
        others = ports_of(place).data
        rules = SEQUENCE_RULES if sequence else RULES
        whole = made(lambda: Transformer(0.2, blocks=1))
        net = whole if model == 1 else await suspendable(lambda: pt.split(whole, rules, sequence=sequence, port=place))
        scored = Scored(net)
        replica = Replica(scored, optimizers()[optimizer](scored.parameters()), strategy, others.size)
        step = priced_step(replica, RunSpec.of(job, replica.strategy, 1, RunOptions()), StepCost(100.0), Updates(None))
        for number in range(steps):
            await port.mark(number)
            torch.manual_seed(10 * number + others.rank)
            await step(others, batch(number, others.rank), 2, None)
        await replica.settle()
        if not isinstance(net, SplitModel):
            return [{n: p.detach() for n, p in net.named_parameters()}, []]
        return [await suspendable(net.full_parameters), [p.detach() for p in net.replicated()]]

    outcome = VirtualWorld(one_host(data * model), data * model).run(program)
    assert outcome.unreceived == 0
    return outcome.results  # type: ignore[return-value]


EXACT = [
    (s.sync_sgd(c.ring), "sgd", 2),
    (s.diloco(period=2), "sgd", 2),
    (s.local_sgd(period=2), "adamw", 3),
    (s.delayed_sgd(delay=1), "adamw", 3),
]
"""Strategies that treat each element separately, so that all is as with the whole model."""


@pytest.mark.parametrize(("strategy", "optimizer", "model"), EXACT, ids=str)
def test_a_split_model_trains_as_the_whole_one(strategy: Strategy, optimizer: str, model: int) -> None:
    expected = trained(strategy, optimizer, 1)
    for rank, (found, _) in enumerate(trained(strategy, optimizer, model, sequence=model == 2)):
        for name, tensor in expected[rank // model][0].items():
            assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-10), (rank, name)


def test_what_all_ranks_of_a_model_hold_stays_equal_where_a_strategy_looks_at_whole_gradients() -> None:
    """Krum takes one data rank's gradient, and may take another one's on each rank of the model."""
    found = trained(s.robust_sgd(pt.aggregation.krum()), "sgd", 2, data=5, steps=1)
    for rank in range(0, 10, 2):
        assert found[rank][1]
        assert all(torch.equal(a, b) for a, b in zip(found[rank][1], found[rank + 1][1], strict=True))


@pytest.mark.parametrize("sequence", [False, True])
def test_clipping_is_by_the_norm_of_the_whole_gradient(sequence: bool) -> None:
    indices, targets = batch(0, 0)

    def gradients(net: nn.Module) -> Tensor:
        torch.manual_seed(5)
        loss(Scored(net)(indices), targets).backward()
        return torch.zeros(())

    whole = made(Transformer)
    gradients(whole)
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)

    def work(port: Port) -> Any:
        net = pt.split(made(Transformer), SEQUENCE_RULES if sequence else RULES, sequence=sequence, port=port)
        gradients(net)
        again = counted_elsewhere([net])
        found = drive(clip_grad_norm_(port.along("model"), list(net.parameters()), 0.1, again))
        return found, net.full_gradients()

    for found, clipped in on_ranks(3, work):
        assert float(found) == pytest.approx(float(norm), rel=1e-12)
        for name, parameter in whole.named_parameters():
            assert torch.allclose(clipped[name], parameter.grad, rtol=1e-9, atol=1e-14), name  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Muon, LARS], ids=str)
def test_optimizers_of_whole_layers_are_refused(optimizer: Any) -> None:
    def work(port: Port) -> str:
        net = pt.split(nn.Sequential(nn.Linear(4, 4, bias=False)), {"0": "row"}, port=port)
        with pytest.raises(ValueError, match="looks at whole layers, of which this rank has parts") as error:
            Replica(net, optimizer(net.parameters(), lr=0.1), s.sync_sgd(), 1)
        return str(error.value)

    assert all(on_ranks(2, work))
