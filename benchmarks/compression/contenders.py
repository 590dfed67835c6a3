"""The training: one model, one data set, one seed, and a contender for each way of exchanging gradients.

All contenders live in the same processes and take turns. Each has a model of its own with the same first weights, and
step s of each sees the same samples.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from peers import PEERS, distributed
from torch import Tensor
from torch.nn import functional

import polytempo as pt
from polytempo import data
from polytempo.bench.models import mlp
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.training.hooks.handle import Handle
from polytempo.worlds import ProcessWorld

GLOBAL_BATCH, LR, MOMENTUM = 256, 0.1, 0.9
"""Tuned for uncompressed SGD (0.05 to 0.3 were tried), and the same for every synchronous contender."""
SIZES = (784, 2048, 2048, 10)
PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in pairwise(SIZES))
_TEST_BATCH = 1000
ALONE = "no exchange (limit)"


@dataclass(frozen=True)
class Contender:
    """A contender and its step. `period`: steps between exchanges; a turn holds a whole number of periods."""

    name: str
    momentum: float = MOMENTUM
    lr: float = LR
    period: int = 1


OURS = (
    Contender("sync_sgd()"),
    Contender("bf16_sgd()"),
    Contender("int8_sgd()"),
    Contender("one_bit_sgd()"),
    Contender("threshold_sgd(density=0.01)"),
    Contender("top_k_sgd(0.01)"),
    Contender("dgc(0.01)", momentum=0.0),
    Contender("dgc(0.001)", momentum=0.0),
    Contender("power_sgd(rank=1)"),
    Contender("power_sgd(rank=4)"),
    Contender("qsgd()"),
    Contender("terngrad()"),
    Contender("local_sgd(period=8)", period=8),
    Contender("local_sgd(period=8, codec=int8)", period=8),
    Contender("local_sgd(period=8, codec=feedback(one_bit))", period=8),
    Contender("local_sgd(period=16, codec=feedback(one_bit))", period=16),
    Contender("diloco(period=16, codec=int8)", period=16),
)
"""`dgc` keeps the momentum itself."""
CONTENDERS = {each.name: each for each in (Contender(ALONE), *map(Contender, PEERS), *OURS)}


class Images(NamedTuple):
    """MNIST in memory: inputs (samples, 784), and classes."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def share(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """This rank's part of global batch `step`: an epoch's order comes from its number."""
        steps_an_epoch = len(self.targets) // GLOBAL_BATCH
        epoch, place = divmod(step, steps_an_epoch)
        order = _order(epoch, len(self.targets))
        batch = order[place * GLOBAL_BATCH : (place + 1) * GLOBAL_BATCH][rank::size]
        return self.inputs[batch], self.targets[batch]


@cache
def _order(epoch: int, samples: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))


def images(folder: Path) -> Images:
    """MNIST from its four files."""
    train, test = data.mnist(folder)
    return Images(train.tensors[0].flatten(1), train.tensors[1], test.tensors[0].flatten(1), test.tensors[1])


class Training:
    """One contender's model on this rank."""

    def __init__(self, contender: Contender, world: ProcessWorld, given: Images) -> None:
        self._world, self._images = world, given
        self._handle: Handle | None = None
        torch.manual_seed(0)
        self._plain = self._model = mlp()
        if contender.name in PEERS:
            self._model = distributed(self._plain, contender.name)
        optimizer = torch.optim.SGD(self._plain.parameters(), lr=contender.lr, momentum=contender.momentum, fused=True)
        if contender.name not in PEERS and contender.name != ALONE:
            self._handle = pt.attach(self._plain, optimizer, parse_strategy(contender.name), world=world, seed=0)
        self._optimizer = optimizer
        self.step = 0

    def run(self, steps: int) -> None:
        """So many steps more."""
        for _ in range(steps):
            inputs, targets = self._images.share(self.step, self._world.rank, self._world.size)
            self._optimizer.zero_grad()
            functional.cross_entropy(self._model(inputs), targets).backward()
            self._optimizer.step()
            self.step += 1

    @torch.no_grad()
    def accuracy(self) -> float:
        """The mean of the ranks' models on all test images; each rank scores its part of them."""
        model, world = self._plain, self._world
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        if self._handle is not None and not self._handle.replica.strategy.synchronized:
            tensors = world.drive(self._handle.replica.consensus(world.port))
        mine = slice(world.rank, None, world.size)
        inputs, targets = self._images.test_inputs[mine], self._images.test_targets[mine]
        correct = torch.zeros((), dtype=torch.long)
        for x, y in zip(inputs.split(_TEST_BATCH), targets.split(_TEST_BATCH), strict=True):
            correct += (torch.func.functional_call(model, tensors, (x,)).argmax(dim=1) == y).sum()
        dist.all_reduce(correct)
        return int(correct) / len(self._images.test_targets)


class Reached(NamedTuple):
    """The time at which a contender had the accuracy; None if it had not. `seconds` count steps alone."""

    steps: int | None
    seconds: float
    accuracy: float


def trained(training: Training, goal: float, most_steps: int, every: int) -> Reached:
    """Train until the accuracy is `goal`, looked at every so many steps, with the clock stopped."""
    seconds, accuracy = 0.0, 0.0
    while training.step < most_steps:
        dist.barrier()
        begun = time.perf_counter()
        training.run(every)
        seconds += time.perf_counter() - begun
        accuracy = training.accuracy()
        if accuracy >= goal:
            return Reached(training.step, seconds, accuracy)
    return Reached(None, seconds, accuracy)


def afresh(contender: Contender, world: ProcessWorld, given: Images) -> Training:
    """A training from its first weights, in memory that the one before has left."""
    gc.collect()
    return Training(contender, world, given)
