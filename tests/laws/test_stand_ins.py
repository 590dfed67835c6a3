"""Own loops on a stream without a length, where some ranks' shards end before others': a batch that stands in for
samples adds nothing to a step, alone and among other micro-batches.

rank 0    0  1  2  3 │ 4  5  6  7 │ 8  9  .  .       micro-batches of 4 a step; . stands in for samples
rank 1    0  1  2  . │ .  .  .  . │ .  .  .  .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import polytempo as pt
from laws.test_unsized_jobs import BATCH, InParts, X
from polytempo.core.calls.refusals import Incompatible
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


def plain(
    ranks: int, accumulate: int, gradients: Sequence[Callable[[nn.Module, Sequence[Micro]], None]]
) -> list[float]:
    """`gradients`: of each epoch."""
    net, micro = model(), micro_batches(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for gradient in gradients:
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


def trained(world: ProcessWorld, case: Case) -> list[float]:
    """The parameters after the loop of the case."""
    net = nn.Sequential(nn.Flatten(0, -2), model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    handle = pt.attach(net, optimizer, case.strategy)
    for weight in case.weights:
        losses: list[Tensor] = []
        batches = list(range(len(micro_batches(world.size))))
        for number, (x, y) in zip(batches, pt.shard(stream(), batch_size=BATCH, weight=weight), strict=True):
            outputs = [net(each) for each in ([x] if case.passes == "one" else PASSES[case.passes](x))]
            losses.append(sum(((output.squeeze(1) - y.sin()) ** 2).mean() for output in outputs) / len(outputs))  # type: ignore[arg-type]
            last = number % case.accumulate == case.accumulate - 1 or number == batches[-1]
            if case.passes != "deferred" or last:
                with nullcontext() if last else handle.no_sync():
                    sum(losses).backward()  # type: ignore[union-attr]
                losses = []
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    found: list[float] = nn.utils.parameters_to_vector(net.parameters()).tolist()
    handle.detach()
    return found


PASSES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "view": lambda x: [x[None]],  # no batch is recognised by it
    "two": lambda x: [x, x[None]],
    "deferred": lambda x: [x],  # one backward pass of all micro-batches
}


class Case(NamedTuple):
    """A loop, with the weights of its epochs."""

    strategy: str
    accumulate: int
    passes: str
    weights: tuple[Callable[[Any], int] | None, ...] = (None,)


def samples(batch: Any) -> int:
    return len(batch[1])


LOCAL = "local_sgd(period=100)"
STRATEGIES = ("sync_sgd()", "top_k_sgd(ratio=1.0)", "shared_memory()", LOCAL)
CASES = [
    *(Case(each, number, way) for each in STRATEGIES for number in (1, 4) for way in ("one", "view", "two")),
    *(Case(each, 4, "deferred") for each in STRATEGIES),
    *(Case(each, 4, way, (samples,)) for each in STRATEGIES for way in ("one", "view", "deferred")),
    *(Case(each, 4, way, (samples, None, samples)) for each in STRATEGIES for way in ("one", "deferred")),
]


def expected(ranks: int, rank: int, case: Case) -> list[float]:
    def gradient(weight: object) -> Callable[[nn.Module, Sequence[Micro]], None]:
        if case.strategy == LOCAL:
            return own(rank, whole=weight is not None)
        return mean_of_means if weight is None else mean

    return plain(ranks, case.accumulate, [gradient(weight) for weight in case.weights])


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_steps_gradient_is_the_joined_samples(ranks: int) -> None:
    parameters = together(ranks, lambda world: [trained(world, case) for case in CASES])
    for rank, found in enumerate(parameters):
        for case, each in zip(CASES, found, strict=True):
            assert each == pytest.approx(expected(ranks, rank, case), abs=1e-12, rel=0), (rank, case)


@pytest.mark.process
@pytest.mark.parametrize("weights", [(samples, None), (None, samples)])
def test_a_step_of_weighed_and_other_batches_is_refused(weights: tuple[Callable[[Any], int] | None, ...]) -> None:
    def work(world: ProcessWorld) -> list[str]:
        net = model()
        handle = pt.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "sync_sgd()")
        first, second = (iter(pt.shard(stream(), batch_size=BATCH, weight=weight)) for weight in weights)
        net(next(first)[0])
        x = next(second)[0]
        with torch.no_grad():  # scores may
            net(x)
        with pytest.raises(Incompatible) as refused:
            net(x)
        handle.detach()
        return [refused.value.code]

    assert together(1, work) == [["PT1115"]]
