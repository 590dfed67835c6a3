"""The effect of late and estimated gradients on training: test errors of every pipeline against back-propagation's.

    python benchmarks/pipeline/convergence.py limits             # digits: errors by learning rate and number of stages
    python benchmarks/pipeline/convergence.py digits             # digits, four stages, as papers on delay have it
    python benchmarks/pipeline/convergence.py mnist              # 10,000 images of MNIST, four stages; DNI and cDNI too

Every contender sees the same batches for the same epochs from the same initial parameters, in the virtual world, which
computes the bits of real processes. MNIST is read from $POLYTEMPO_DATA.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import polytempo as pt
from polytempo.core import Port
from polytempo.data.readers.idx import mnist
from polytempo.partition import schedules
from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut
from polytempo.partition.schedules import Schedule
from polytempo.training.pipeline.late.estimators import estimators_of
from polytempo.training.pipeline.late.late_stage import late_stage
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.stage_program import StageProgram
from polytempo.worlds import VirtualWorld

Make = Callable[[int], Schedule]
MICRO_BATCHES = 4
LATE: dict[str, Make] = {
    "back-propagation": lambda stages: schedules.one_f_one_b(1, 1),
    "ddg": schedules.ddg,
    "ddg, current parameters": lambda stages: schedules.ddg(stages, weights="current"),
    "features_replay": schedules.features_replay,
    "pipelined_backprop": schedules.pipelined_backprop,
    "pipedream, vertical sync": lambda stages: schedules.pipedream(stages, vertical_sync=True),
    "pipelined_backprop, pipemare": lambda stages: schedules.pipelined_backprop(
        stages, correction=schedules.pipemare(anneal_steps=450, decay=0.135)
    ),
    "pipelined_backprop, spectrain": lambda stages: schedules.pipelined_backprop(
        stages, correction=schedules.spectrain()
    ),
    "pipedream_2bw": lambda stages: schedules.pipedream_2bw(stages, MICRO_BATCHES),
}
"""`pipedream` without vertical sync is `ddg` to the bit."""
ESTIMATED: dict[str, Make] = {
    "synthetic_gradients, labels": lambda stages: schedules.synthetic_gradients(stages, classes=10, lr=0.003),
    "synthetic_gradients": lambda stages: schedules.synthetic_gradients(stages, lr=0.003),
}


class Data(NamedTuple):
    """Vectors and labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class Setting(NamedTuple):
    """The trained model, and its training."""

    data: Callable[[], Data]
    layers: tuple[int, ...]
    """Features before, between and after the linear layers."""
    batch: int
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer]


@functools.cache
def digits() -> Data:
    """1,437 digits to train on, 360 to test with."""
    split = pt.data.digits()
    return Data(split.train.tensors, split.test.tensors)


@functools.cache
def ten_thousand() -> Data:
    """The first 10,000 images of MNIST to train on, and its 10,000 test images."""
    split = mnist(Path(os.environ["POLYTEMPO_DATA"]) / "mnist")
    (x, y), (test_x, test_y) = split.train.tensors, split.test.tensors
    return Data((x[:10_000].flatten(1), y[:10_000]), (test_x.flatten(1), test_y))


def momentum(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    """SGD with momentum 0.9."""
    return SGD(parameters, lr=lr, momentum=0.9)


DIGITS = Setting(digits, (64, *[48] * 7, 10), 32, momentum)
MNIST = Setting(ten_thousand, (784, 256, 256, 256, 10), 100, lambda parameters, lr: Adam(parameters, lr=lr))


def model_of(setting: Setting, seed: int) -> nn.Sequential:
    """Linear layers with ReLU between, begun as K. He et al. have it: without that eight layers learn nothing."""
    torch.manual_seed(seed)
    sizes = pairwise(setting.layers)
    model = nn.Sequential(*[m for a, b in sizes for m in (nn.Linear(a, b), nn.ReLU())][:-1])
    for layer in model[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return model


class Trained(NamedTuple):
    """A model after training, its parts, and their optimizers."""

    model: nn.Sequential
    parts: Cut
    stages: list[StageProgram]


def trained_by(setting: Setting, schedule: Schedule, lr: float, epochs: int, seed: int) -> Trained:
    """Train by `schedule`; stages are of as many linear layers each."""
    data, model = setting.data(), model_of(setting, seed)
    x, y = data.train
    linear = [str(number) for number, layer in enumerate(model) if isinstance(layer, nn.Linear)]
    each = len(linear) // schedule.stages
    begins = linear[each::each][: schedule.stages - 1]
    parts = cut(model, sample=x[: setting.batch], by=begins) if begins else cut(model, 1, sample=x[: setting.batch])
    batches = MicroBatches(parts, schedule, nn.functional.cross_entropy, seed, 0)
    stages = [_stage(parts, schedule, rank, setting, lr, seed) for rank in range(schedule.stages)]

    async def program(port: Port) -> None:
        stage = stages[port.rank]
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
            for chosen in order.split(setting.batch):
                await stage.step(port, batches.of((x[chosen],), y[chosen], stage.step_number))

    VirtualWorld(pt.cluster.ethernet(gbit_per_s=100), schedule.stages).run(program)
    return Trained(model, parts, stages)


@functools.cache
def error_of(setting: Setting, schedule: Schedule, lr: float, epochs: int, seed: int) -> float:
    """Train by `schedule`; the part of the test samples that the whole model then gets wrong."""
    data, model = setting.data(), trained_by(setting, schedule, lr, epochs, seed).model
    with torch.no_grad():
        return float((model(data.test[0]).argmax(dim=1) != data.test[1]).float().mean())


def _stage(parts: Cut, schedule: Schedule, rank: int, setting: Setting, lr: float, seed: int) -> StageProgram:
    module = parts.stages[rank].module
    optimizer = setting.optimizer(module.parameters(), lr)

    async def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    late = late_stage(schedule, rank, list(module.parameters()), optimizer)
    return StageProgram(parts, schedule, rank, update, estimators=estimators_of(schedule, rank, seed), late=late)


def errors(setting: Setting, make: Make, stages: int, lr: float, epochs: int, seeds: int) -> list[float]:
    """Percents, seed by seed."""
    return [100 * error_of(setting, make(stages), lr, epochs, seed) for seed in range(seeds)]


def row(name: str, found: list[float]) -> str:
    """Median, worst, and every seed's."""
    return f"{name:30}{statistics.median(found):7.1f}{max(found):7.1f}    {' '.join(f'{each:.1f}' for each in found)}"


def compare(setting: Setting, makes: dict[str, Make], stages: int, lr: float, epochs: int, seeds: int) -> None:
    """A row for each contender, at equal epochs and one learning rate."""
    print(f"{stages} stages, learning rate {lr}, {epochs} epochs, {seeds} seeds\n{'':30}{'median':>7}{'worst':>7}")
    for name, make in makes.items():
        print(row(name, errors(setting, make, stages, lr, epochs, seeds)), flush=True)


def limits(makes: dict[str, Make], rates: list[float], epochs: int, seeds: int) -> None:
    """Median errors of digits by learning rate, for two and for four stages."""
    print(f"{epochs} epochs, median of {seeds} seeds\n{'learning rate':30}", *(f"{r:8}" for r in [*rates, *rates]))
    for name, make in makes.items():
        for_all = [errors(DIGITS, make, stages, rate, epochs, seeds) for stages in (2, 4) for rate in rates]
        print(f"{name:30}", *(f"{statistics.median(found):8.1f}" for found in for_all), flush=True)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("limits", "digits", "mnist"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--only", nargs="*", default=[], help="contenders by their names")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: make for name, make in (LATE | ESTIMATED).items() if not given.only or name in given.only}
    late = {name: make for name, make in chosen.items() if name in LATE}
    match given.table:
        case "limits":
            limits(late, [0.003, 0.01, 0.03], given.epochs or 30, given.seeds)
        case "digits":
            compare(DIGITS, late, 4, 0.003, given.epochs or 60, given.seeds)
        case "mnist":
            by_adam = {name: make for name, make in chosen.items() if "spectrain" not in name}  # which wants SGD
            compare(MNIST, by_adam, 4, 0.001, given.epochs or 10, given.seeds)


if __name__ == "__main__":
    main()
