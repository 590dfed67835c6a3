"""The training: one model, one data set, one seed, and a contender for each way of exchanging gradients.

All contenders live in the same processes and take turns. Each has a model of its own with the same first weights, and
step s of each sees the same samples.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peers import PEERS, distributed
from torch import Tensor, nn
from torch.nn import functional

import polytempo as pt
from polytempo import data
from polytempo.bench.models import mlp
from polytempo.jobs import chars
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
    """A contender and its step. `period`: steps between exchanges; a turn holds a whole number of periods.

    `peak`, `peak_adam`: its learning rate at the top of the recipe's schedule, with SGD and with AdamW.
    """

    name: str
    momentum: float = MOMENTUM
    lr: float = LR
    period: int = 1
    peak: float = 0.2
    peak_adam: float = 2e-3


@dataclass(frozen=True)
class Recipe:
    """Fewer steps, and cheaper ones, the same for all contenders: a learning rate that rises linearly over a fifth of
    `steps` and falls to 0 at the last, Nesterov's momentum, and matrix products in bfloat16 (autocast; the weights and
    all that is exchanged stay float32)."""

    steps: int

    def rate(self, step: int) -> float:
        """The part of the peak at this step; afterwards it begins again."""
        rising, place = self.steps / 5, step % self.steps
        return min((place + 1) / rising, (self.steps - place) / (self.steps - rising), 1.0)


LATE_MEAN = (
    "streaming_diloco(period={}, fragments=1, delay={}, blend='keep', outer_lr=1, outer_momentum=0, "
    "codec=feedback(one_bit))"
)
"""`local_sgd` with one bit; the mean arrives some steps later."""
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
    Contender("local_sgd(period=8, codec=feedback(one_bit))", period=8, peak=0.15),
    Contender("local_sgd(period=10, codec=feedback(one_bit))", period=10, peak=0.15),
    Contender("local_sgd(period=12, codec=feedback(one_bit))", period=12, peak=0.15),
    Contender("local_sgd(period=16, codec=feedback(one_bit))", period=16, peak=0.15),
    Contender("diloco(period=16, codec=int8)", period=16),
    Contender("diloco(period=16, codec=feedback(one_bit))", period=16, peak=0.15),
    Contender("streaming_diloco(period=16, codec=feedback(one_bit))", period=16, peak=0.15),
    Contender("streaming_diloco(period=16, delay=7, codec=feedback(one_bit))", period=16, peak=0.15),
    Contender("streaming_diloco(period=8, delay=3, codec=feedback(one_bit))", period=8, peak=0.15),
    Contender("streaming_diloco(period=10, delay=4, codec=feedback(one_bit))", period=10, peak=0.15),
    Contender("streaming_diloco(period=12, delay=5, codec=feedback(one_bit))", period=12, peak=0.15),
    Contender("sparse_loco(period=16)", period=16, peak=0.15),
    *(
        Contender(LATE_MEAN.format(period, delay), period=period, peak=0.15)
        for period, delay in ((8, 3), (8, 5), (16, 7))
    ),
)
"""`dgc` keeps the momentum itself."""
CONTENDERS = {each.name: each for each in (Contender(ALONE), *map(Contender, PEERS), *OURS)}


class Task(NamedTuple):
    """Samples in memory, a model, and the score that is wanted: of each test sample, more is better."""

    model: Callable[[], nn.Module]
    adam: bool
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    goal: float
    batch: int
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    def share(self, step: int, rank: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """This rank's part of global batch `step`: an epoch's order comes from its number and the seed."""
        steps_an_epoch = len(self.targets) // self.batch
        epoch, place = divmod(step, steps_an_epoch)
        order = _order(epoch + 1000 * seed, len(self.targets))
        batch = order[place * self.batch : (place + 1) * self.batch][rank::size]
        return self.inputs[batch], self.targets[batch]

    def optimizer(self, model: nn.Module, contender: Contender, *, nesterov: bool) -> torch.optim.Optimizer:
        """AdamW, or SGD with the contender's momentum."""
        if self.adam:
            return torch.optim.AdamW(model.parameters(), contender.peak_adam, fused=True)
        nesterov = nesterov and contender.momentum > 0
        return torch.optim.SGD(model.parameters(), contender.lr, contender.momentum, nesterov=nesterov, fused=True)


@cache
def _order(number: int, samples: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(number))


def images(folder: Path) -> Task:
    """MNIST from its four files, to 97 % of the test images."""
    train, test = data.mnist(folder / "mnist" if (folder / "mnist").is_dir() else folder)

    def correct(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=1) == targets).double()

    samples = (train.tensors[0].flatten(1), train.tensors[1], test.tensors[0].flatten(1), test.tensors[1])
    return Task(mlp, False, functional.cross_entropy, correct, 0.97, GLOBAL_BATCH, *samples)


def text(folder: Path) -> Task:
    """Tiny Shakespeare, for a transformer of 1.9 million parameters, to a loss of 2.5 a character of the test text."""
    train, test = chars.read(folder / "tinyshakespeare" if (folder / "tinyshakespeare").is_dir() else folder)[:2]
    assert test is not None
    assert hasattr(test, "__len__")

    def model() -> nn.Module:
        return chars.Transformer(chars.VOCABULARY, chars.CONTEXT, 192, 6, 4)

    def gain(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return -losses.double().mean(dim=1)

    def windows(of: Any, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*(of[i] for i in range(0, len(of), step)), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    samples = (*windows(train, 1), *windows(test, -(-len(test) // 512)))
    return Task(model, True, chars.loss, gain, -2.5, 32, *samples)


TASKS = {"mnist": images, "text": text}


class Training:
    """One contender's model on this rank."""

    def __init__(
        self, contender: Contender, world: ProcessWorld, given: Task, recipe: Recipe | None = None, seed: int = 0
    ) -> None:
        self._world, self._task = world, given
        self._recipe, self._seed = recipe, seed
        self._peak = contender.peak_adam if given.adam else contender.peak
        self._handle: Handle | None = None
        torch.manual_seed(seed)
        self._plain = self._model = given.model()
        if contender.name in PEERS:
            self._model = distributed(self._plain, contender.name)
        optimizer = given.optimizer(self._plain, contender, nesterov=recipe is not None)
        if contender.name not in PEERS and contender.name != ALONE:
            handle = pt.attach(self._plain, optimizer, parse_strategy(contender.name), world=world, seed=seed)
            assert isinstance(handle, Handle)
            self._handle = handle
        self._optimizer = optimizer
        self.step = 0

    def run(self, steps: int) -> None:
        """So many steps more."""
        for _ in range(steps):
            inputs, targets = self._task.share(self.step, self._world.rank, self._world.size, self._seed)
            self._optimizer.zero_grad()
            if self._recipe is not None:
                self._optimizer.param_groups[0]["lr"] = self._peak * self._recipe.rate(self.step)
            with torch.autocast("cpu", torch.bfloat16, enabled=self._recipe is not None):
                loss = self._task.loss(self._model(inputs), targets)
            loss.backward()
            self._optimizer.step()
            self.step += 1

    @torch.no_grad()
    def score(self) -> float:
        """Score the mean of the ranks' models on all test samples; each rank scores its part of them."""
        model, world, task = self._plain, self._world, self._task
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        if self._handle is not None and not self._handle.replica.strategy.synchronized:
            tensors = world.drive(self._handle.replica.consensus(world.port))
        mine = slice(world.rank, None, world.size)
        inputs, targets = task.test_inputs[mine], task.test_targets[mine]
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(inputs.split(_TEST_BATCH), targets.split(_TEST_BATCH), strict=True):
            total += task.score(torch.func.functional_call(model, tensors, (x,)), y).sum()
        dist.all_reduce(total)
        return float(total) / len(task.test_targets)


class Reached(NamedTuple):
    """Steps and seconds until a contender had the score; None if it had not. `seconds` count steps alone."""

    steps: int | None
    seconds: float
    score: float


def trained(training: Training, goal: float, most_steps: int, every: int) -> Reached:
    """Train until the score is `goal`, looked at every so many steps, with the clock stopped."""
    seconds, score = 0.0, 0.0
    while training.step < most_steps:
        dist.barrier()
        begun = time.perf_counter()
        training.run(every)
        seconds += time.perf_counter() - begun
        score = training.score()
        if score >= goal:
            return Reached(training.step, seconds, score)
    return Reached(None, seconds, score)


def afresh(
    contender: Contender, world: ProcessWorld, given: Task, recipe: Recipe | None = None, seed: int = 0
) -> Training:
    """A training from its first weights, in memory that the one before has left."""
    gc.collect()
    return Training(contender, world, given, recipe, seed)
