"""Own loops on a stream without a length, where some ranks' shards end before others': a batch that stands in for
samples adds nothing to a step, alone and among other micro-batches.

rank 0    0  1  2  3 │ 4  5  6  7 │ 8  9  .  .       micro-batches of 4 a step; . stands in for samples
rank 1    0  1  2  . │ .  .  .  . │ .  .  .  .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_unsized_jobs import BATCH, InParts, X
from polytempo.data.shard import DataShard
from polytempo.data.streams.stream_pieces import RowsHeard
from polytempo.worlds import ProcessWorld
from process.crew import together

PARTS = (range(37), range(37, 48), range(48, 50))
"""The first batch of 4 ends at 40; rank 2 has half a batch in all."""
Micro = list[Tensor | None]
"""The samples' numbers of each rank in a micro-batch; None: a stand-in."""


def stream() -> InParts:
    return InParts(*PARTS)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def loss(net: nn.Module, numbers: Tensor) -> Tensor:
    x: Tensor = X[numbers.long()]
    return ((net(x).squeeze(1) - numbers.sin()) ** 2).mean()


def micro_batches(ranks: int) -> list[Micro]:
    heard, found = RowsHeard(), []
    shards = [DataShard(stream(), rank=rank, size=ranks, batch_size=BATCH, agree=heard) for rank in range(ranks)]
    readers = [iter(shard) for shard in shards]
    while True:
        heard.rows = [shard.pieces.row(0) for shard in shards if shard.pieces is not None] or [(0, 0, 0)]
        batches = [next(reader, None) for reader in readers]
        if batches[0] is None:
            return found
        found.append([batch[1] if shard.local_samples else None for batch, shard in zip(batches, shards, strict=True)])


def plain(ranks: int, accumulate: int, gradient: Callable[[nn.Module, Sequence[Micro]], None]) -> list[float]:
    net, micro = model(), micro_batches(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for begin in range(0, len(micro), accumulate):
        gradient(net, micro[begin : begin + accumulate])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return nn.utils.parameters_to_vector(net.parameters()).tolist()  # type: ignore[no-any-return]


def mean_of_means(net: nn.Module, step: Sequence[Micro]) -> None:
    for micro in step:
        loss(net, torch.cat([each for each in micro if each is not None])).backward()


def mean(net: nn.Module, step: Sequence[Micro]) -> None:
    loss(net, torch.cat([each for micro in step for each in micro if each is not None])).backward()


def own(rank: int, *, whole: bool = False) -> Callable[[nn.Module, Sequence[Micro]], None]:
    def gradient(net: nn.Module, step: Sequence[Micro]) -> None:
        real = [each for micro in step if (each := micro[rank]) is not None]
        for numbers in [torch.cat(real)] if whole and real else real:
            loss(net, numbers).backward()

    return gradient


def trained(world: ProcessWorld, strategy: str, accumulate: int, *, weighs: bool, views: bool) -> list[float]:
    """`views`: the model gets inputs that no batch is recognised by."""
    net = nn.Sequential(nn.Flatten(0, -2), model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    handle = pt.attach(net, optimizer, strategy)
    weight = (lambda batch: len(batch[1])) if weighs else None
    batches = list(range(len(micro_batches(world.size))))
    for number, (x, y) in zip(batches, pt.shard(stream(), batch_size=BATCH, weight=weight), strict=True):
        last = number % accumulate == accumulate - 1 or number == batches[-1]
        with nullcontext() if last else handle.no_sync():
            output = net(x[None]) if views else net(x)
            ((output.squeeze(1) - y.sin()) ** 2).mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    found: list[float] = nn.utils.parameters_to_vector(net.parameters()).tolist()
    handle.detach()
    return found


CASES = [
    (strategy, accumulate, weighs, views)
    for weighs in (False, True)  # a world in which a loop has weighed batches once weighs all
    for strategy in ("sync_sgd()", "top_k_sgd(ratio=1.0)", "shared_memory()", "local_sgd(period=100)")
    for accumulate in (1, 4)
    for views in (False, True)
]


def expected(ranks: int, rank: int, strategy: str, accumulate: int, weighs: bool) -> list[float]:
    if strategy.startswith("local"):
        return plain(ranks, accumulate, own(rank, whole=weighs))
    return plain(ranks, accumulate, mean if weighs else mean_of_means)


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_steps_gradient_is_the_joined_samples(ranks: int) -> None:
    def work(world: ProcessWorld) -> list[list[float]]:
        return [trained(world, strategy, n, weighs=weighs, views=views) for strategy, n, weighs, views in CASES]

    for rank, found in enumerate(together(ranks, work)):
        for (strategy, accumulate, weighs, views), parameters in zip(CASES, found, strict=True):
            theirs = expected(ranks, rank, strategy, accumulate, weighs)
            assert parameters == pytest.approx(theirs, abs=1e-12, rel=0), (rank, strategy, accumulate, weighs, views)
