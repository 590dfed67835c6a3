"""Processor time of one stage's actions in a step, beside plain torch's passes of the same half of a model.

    python benchmarks/pipeline/actions.py --stage 1 --rounds 32

One process, nothing is sent: the cost of the actions themselves. All contenders take a step each in turns, and
processor times are compared, so that other programs on the machine disturb little; lower quartiles.

    whole batch        forward and backward pass of all samples together
    8 micro-batches    the same in 8 parts, with gradients summed by autograd
    a schedule         its actions of this stage, as the pipeline's executor calls them
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from main import MICRO_BATCHES, SCHEDULES, made, optimizer
from torch import Tensor, nn

from polytempo.partition.cut import Cut
from polytempo.partition.cutting import cut
from polytempo.partition.schedules import Schedule
from polytempo.training.pipeline.late.parameter_versions import ParameterVersions
from polytempo.training.pipeline.micro_batches import MicroBatches
from polytempo.training.pipeline.stage_work import UnderWay, computed
from polytempo.wire.memory import keep_memory

Step = Callable[[], None]
CHOSEN = ("one_f_one_b", "gpipe", "zero_bubble")


class Half:
    """Stage `stage` of two of a model, in memory of its own."""

    def __init__(self, name: str, stage: int) -> None:
        model, self.x, self.y, begins = made(name)
        self.parts: Cut = cut(deepcopy(model), sample=self.x, by=begins)
        self.stage, self.part = stage, self.parts.stages[stage]
        self.optimizer = optimizer(self.part.module.parameters())

    def plain(self, micro_batches: int) -> Step:
        """A pass by autograd alone."""

        def step() -> None:
            self.optimizer.zero_grad()
            pieces = zip(self.x.tensor_split(micro_batches), self.y.tensor_split(micro_batches), strict=True)
            for x, y in pieces:
                [given] = self.part.module(x.detach().requires_grad_(self.stage == 1))
                if self.stage:
                    (nn.functional.mse_loss(given, y) / micro_batches).backward()
                else:
                    given.backward(_gradient(given))
            self.optimizer.step()

        return step

    def scheduled(self, schedule: Schedule) -> Step:
        """A pass by the actions of `schedule`."""
        versions = ParameterVersions(list(self.part.module.parameters()), stashes=True, overtaken=False)
        work = computed(self.part, versions, schedule, lambda number: {})
        batches = MicroBatches(self.parts, schedule, nn.functional.mse_loss, 0, 0)
        taken = self.x.tensor_split(schedule.micro_batches) if self.stage else ()

        def step() -> None:
            each = batches.of((self.x,), self.y, 0)
            for kind, number, _ in schedule.actions(self.stage):
                match kind:
                    case "forward":
                        inputs = self.parts.inputs_of(self.stage, each[number].inputs)
                        head = each[number].head if self.stage else None
                        seeded = partial(each[number].seeded, self.stage)
                        kept = UnderWay(inputs, taken[number : number + 1], versions.current, seeded, head)
                        work.forward(number, kept)
                    case "backward" | "input":
                        work.backward(number, [] if self.stage else [_gradient(each[number].inputs[0])])
                    case "weight":
                        work.weight_gradients(number)
                    case _:
                        versions.update_begins()
                        self.optimizer.step()
                        self.optimizer.zero_grad()

        return step


def _gradient(like: Tensor) -> Tensor:
    return torch.full_like(like, 1e-6)


def main() -> None:
    """Print a line for each contender: milliseconds of a step, and its part of micro-batches in plain torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("perceptron", "cnn"), default="cnn")
    parser.add_argument("--stage", type=int, choices=(0, 1), default=1)
    parser.add_argument("--rounds", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as stages do
    in_parts = f"{MICRO_BATCHES} micro-batches"
    half = partial(Half, given.model, given.stage)
    steps = {"whole batch": half().plain(1), in_parts: half().plain(MICRO_BATCHES)}
    steps |= {name: half().scheduled(SCHEDULES[name]()) for name in CHOSEN}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(3 + given.rounds):
        for name, step in steps.items():
            begin_s = time.process_time()
            step()
            if number >= 3:
                taken[name].append(1e3 * (time.process_time() - begin_s))
    quartiles = {name: statistics.quantiles(each)[0] for name, each in taken.items()}
    print(f"{given.model}, stage {given.stage}: {given.rounds} steps of each, processor time, lower quartiles")
    for name, quartile in quartiles.items():
        print(f"{name:20}{quartile:8.1f} ms   {quartile / quartiles[in_parts]:5.2f}")


if __name__ == "__main__":
    main()
