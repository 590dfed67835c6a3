"""Split models on real processes: a virtual world's bits; attached, the whole model's training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.join.init import init
from polytempo.partition.tensor import SplitModel
from polytempo.worlds import ProcessWorld
from process.crew import together
from split_models import RULES, SEQUENCE_RULES, VOCABULARY, Transformer, made, on_ranks, split_pass

pytestmark = pytest.mark.process

s, c = pt.strategies, pt.collectives


def in_mesh(num_ranks: int, work: Callable[[ProcessWorld], Any], **mesh: int) -> list[Any]:
    """The value of `work(world)` on each of `num_ranks` processes in this layout."""
    return together(num_ranks, lambda world: work(init(mesh=mesh, quiet=True)))


def indices() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sequence", [False, True])
def test_both_worlds_compute_the_same_bits(sequence: bool) -> None:
    rules = SEQUENCE_RULES if sequence else RULES

    def numbers(**place: Any) -> list[Any]:
        found = split_pass(lambda: Transformer(0.2), rules, indices(), torch.float32, sequence=sequence, **place)
        return [found.loss.item(), found.output.tolist(), {n: g.tolist() for n, g in found.gradients.items()}]

    virtual = on_ranks(3, lambda port: numbers(port=port))
    assert in_mesh(3, lambda world: numbers(world=world), model=3) == virtual


def trained(world: ProcessWorld, strategy: Strategy, *, split: bool) -> list[Any]:
    """Two epochs of an ordinary loop, with clipping and accumulated gradients: the whole parameters, and the norms."""
    data = world.port.coordinates["data"] if split else world.rank
    net: Any = made(lambda: Transformer(0.2, blocks=1))
    if split:
        net = pt.split(net, SEQUENCE_RULES, sequence=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    handle = pt.attach(net, optimizer, strategy, bucket_bytes=4096)
    random = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCABULARY, (12, 8), generator=random)
    shard, norms = pt.shard(torch.utils.data.TensorDataset(text), batch_size=2), []
    for epoch in range(2):
        torch.manual_seed(10 * epoch + data)
        for (batch,) in shard:
            logits, target = net(batch[:, :-1]), batch[:, 1:]
            cross_entropy = net.cross_entropy if isinstance(net, SplitModel) else torch.nn.functional.cross_entropy
            loss = cross_entropy(logits if split else logits.transpose(1, 2), target)
            with handle.no_sync():
                (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()
            clipped = partial(torch.nn.utils.clip_grad_norm_, net.parameters()) if epoch else handle.clip_grad_norm_
            norms.append(float(clipped(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    with handle.consensus():
        whole = net.full_parameters() if split else dict(net.named_parameters())
    return [norms, {name: tensor.tolist() for name, tensor in whole.items()}]


@pytest.mark.parametrize("strategy", [s.sync_sgd(c.ring), s.local_sgd(period=2)], ids=str)
def test_an_attached_split_model_trains_as_the_whole_one(strategy: Strategy) -> None:
    norms, whole = together(2, lambda world: trained(world, strategy, split=False))[0]
    for found_norms, found in in_mesh(4, lambda world: trained(world, strategy, split=True), data=2, model=2):
        if strategy.synchronized:
            assert found_norms == pytest.approx(norms, rel=1e-9)
        for name, values in whole.items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(values), rtol=1e-7, atol=1e-9), name


def test_ranks_that_split_differently_are_told_so() -> None:
    def work(world: ProcessWorld) -> str:
        rules = RULES if world.rank else {**RULES, "*.up": "row"}
        with pytest.raises(pt.errors.Mismatch, match="ranks disagree about rules") as error:
            pt.split(made(Transformer), rules)
        return str(error.value)

    assert in_mesh(2, work, model=2) == ["ranks disagree about rules.*.up: rank 0 has 'row', rank 1 has 'column'"] * 2


def test_a_job_with_a_split_model_is_refused_by_the_trainer() -> None:
    job = pt.Job(
        model=lambda: pt.split(made(Transformer), RULES),
        data=lambda folder: pt.Data([]),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        name="texts",
    )
    with pytest.raises(ValueError, match=r"job texts splits its model's layers in model\(\); .* pt\.strategies\.split"):
        pt.Trainer(job, steps=1)


def test_a_mesh_without_the_axis_is_refused() -> None:
    def work(world: ProcessWorld) -> str:
        with pytest.raises(ValueError, match="along the axis 'model' of the mesh, and this one is") as error:
            pt.split(made(Transformer), RULES)
        return str(error.value)

    assert "call pt.init(mesh=" in in_mesh(2, work, data=2)[0]
