"""Divided layers on real processes: a virtual world's bits; attached, one process's training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_hybrid_laws import batch, images, loss, made, on_ranks
from polytempo.partition.hybrid.traffic import EXCHANGES
from polytempo.worlds import ProcessWorld
from process.crew import together

pytestmark = pytest.mark.process

s, c = pt.strategies, pt.collectives
LAYERS = ["7", "9", "11"]


def numbers(rank: int, exchange: Any, **place: Any) -> list[Any]:
    net = pt.hybrid(made(images, torch.float32), LAYERS, exchange=exchange, **place)
    mine = batch("images", 7, torch.float32).split((3, 2, 2))[rank]
    output = net(mine)
    loss(output, mine).backward()
    return [output.tolist(), {name: g.tolist() for name, g in net.full_gradients().items()}]


def test_both_worlds_compute_the_same_bits() -> None:
    def everything(rank: int, **place: Any) -> list[Any]:
        return [numbers(rank, exchange, **place) for exchange in EXCHANGES]

    virtual = on_ranks(3, lambda port: everything(port.rank, port=port)).results
    assert together(3, lambda world: everything(world.rank, world=world)) == virtual


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Fifteen images: a step of eight, and one of seven."""

    def __init__(self) -> None:
        self.images = batch("images", 15, torch.float64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.images[index]


def trained(world: ProcessWorld | None, num_ranks: int) -> list[Any]:
    """Two epochs of an ordinary loop with clipping and accumulated gradients: the whole parameters, and the norms."""
    net: Any = made(images)
    if world is not None:
        net = pt.hybrid(net, LAYERS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    handle = pt.attach(net, optimizer, s.sync_sgd(c.ring), bucket_bytes=256)
    shard, norms = pt.shard(Samples(), batch_size=8 // num_ranks), []
    for epoch in range(2):
        for mine, _ in shard:
            optimizer.zero_grad()
            with handle.no_sync():  # type: ignore[union-attr]
                (loss(net(mine), mine) / 2).backward()
            (loss(net(mine), mine) / 2).backward()
            clipped = partial(nn.utils.clip_grad_norm_, net.parameters()) if epoch else handle.clip_grad_norm_
            norms.append(float(clipped(0.5)))
            optimizer.step()
    whole = net.full_parameters() if world is not None else dict(net.named_parameters())
    return [norms, {name: tensor.tolist() for name, tensor in whole.items()}]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_attached_hybrid_trains_as_one_process(num_ranks: int) -> None:
    """Shards have uneven sizes at the end of an epoch."""
    norms, whole = together(1, lambda world: trained(None, 1))[0]
    for found_norms, found in together(num_ranks, lambda world: trained(world, num_ranks)):
        assert found_norms == pytest.approx(norms, rel=1e-9)
        for name, values in whole.items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(values), rtol=1e-7, atol=1e-9), name


def test_what_does_not_go_with_divided_layers_is_refused() -> None:
    def work(world: ProcessWorld) -> None:
        net = pt.hybrid(made(images), LAYERS)
        for strategy in (s.local_sgd(period=2), s.downpour(), s.shared_memory(), s.gossip()):
            with pytest.raises(ValueError, match=r"PT1723: .* workers make each step of a divided layer together"):
                pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), strategy)
        with pytest.raises(ValueError, match="looks at whole layers, of which this rank has parts"):
            pt.attach(net, torch.optim.LBFGS(net.parameters()))
        with pytest.raises(ValueError, match="takes a rank's model from another"):
            pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), on_drift="restore")
        handle: Any = pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="a rank that has left join"), handle.join():
            pass
        job = pt.Job(
            model=lambda: pt.hybrid(nn.Sequential(nn.Linear(4, 4)), ["0"]),
            data=lambda folder: pt.Data([]),
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        )
        with pytest.raises(ValueError, match="splits its model's layers"):
            pt.Trainer(job)

    together(2, work)


def test_a_model_of_which_all_layers_are_divided_exchanges_no_gradient() -> None:
    def work(world: ProcessWorld) -> list[Any]:
        torch.manual_seed(0)
        net = pt.hybrid(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), ["0", "2"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        net(torch.full((2, 4), 1.0 + world.rank)).square().mean().backward()
        optimizer.step()
        return [tensor.tolist() for tensor in net.full_parameters().values()]

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    whole(torch.tensor([1.0, 1.0, 2.0, 2.0]).unsqueeze(1).expand(4, 4)).square().mean().backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for found in together(2, work):
        for tensor, values in zip(whole.parameters(), found, strict=True):
            assert torch.allclose(tensor.detach(), torch.tensor(values), rtol=1e-5, atol=1e-6)
