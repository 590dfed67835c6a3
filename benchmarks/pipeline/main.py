"""Two stages of one model on two processes: steps a second, by every schedule, beside torch's and beside one process.

    python benchmarks/pipeline/main.py                      # a perceptron of 8 layers, width 1024
    python benchmarks/pipeline/main.py --model cnn          # a small residual convolutional network

All contenders take turns in one run, one thread a process. `limit`: two processes that train half of the model each and
do not talk; `limit, 8 micro-batches`: the same, with gradients summed over 8 parts of the batch. Beside each schedule
with micro-batches stands its part of the latter and its bubble together, which it cannot beat. torch's schedules come
with the same stages and micro-batches, over gloo and over our backend. Each of our schedules has its time over the
times of its own prediction: the timetable played with each action's time in the same run, without messages; once with
the computing time, once with all time of the stage without waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import polytempo as pt
from polytempo.partition import schedules
from polytempo.partition.cutting import cut
from polytempo.partition.schedules.action import Schedule, turns
from polytempo.partition.schedules.timetable import played
from polytempo.runs.own_loop.pipeline import pipeline
from polytempo.wire.memory import keep_memory
from polytempo.worlds import ProcessWorld, current

MICRO_BATCHES = 8
FILLING = 3
"""Steps that do not count: no gradient here is more than two late."""
SCHEDULES: dict[str, Callable[[], schedules.Schedule]] = {
    "ddg": lambda: schedules.ddg(2),
    "ddg, current parameters": lambda: schedules.ddg(2, weights="current"),
    "features_replay": lambda: schedules.features_replay(2),
    "pipelined_backprop": lambda: schedules.pipelined_backprop(2),
    "pipedream_2bw": lambda: schedules.pipedream_2bw(2, MICRO_BATCHES),
    "one_f_one_b": lambda: schedules.one_f_one_b(2, MICRO_BATCHES),
    "gpipe": lambda: schedules.gpipe(2, MICRO_BATCHES, recompute=False),
    "zero_bubble": lambda: schedules.zero_bubble(2, MICRO_BATCHES),
}
PEERS = {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}
BACKENDS = ("gloo", "polytempo")
MICRO_LIMIT = f"limit, {MICRO_BATCHES} micro-batches"


class Block(nn.Module):
    """Two convolutions and a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (samples, channels, 16, 16)."""
        return torch.relu(x + self.body(x))


def made(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """A model, a batch's inputs and targets, and where the second stage begins."""
    torch.manual_seed(0)
    if name == "cnn":
        model = nn.Sequential(*[Block(48) for _ in range(8)])
        return model, torch.randn(32, 48, 16, 16), torch.randn(32, 48, 16, 16), ["4"]
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)])
    return model, torch.randn(256, 1024), torch.randn(256, 1024), ["4"]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def seconds_of(step: Callable[[], object], steps: int, *, together: bool) -> float:
    """Mean seconds of a step, after the steps that fill a pipeline.

    `together`: of processes that do not talk; they begin and end at one time. Stages wait for each other anyway, and
    have work under way when their steps begin to count.
    """
    for _ in range(FILLING):
        step()
    if together:
        dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(steps):
        step()
    if together:
        dist.barrier()
    return (time.perf_counter() - begin_s) / steps


def plain(name: str, steps: int) -> float:
    """One process."""
    model, x, y, _ = made(name)
    own = optimizer(model.parameters())

    def step() -> None:
        own.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        own.step()

    return seconds_of(step, steps, together=False)


def half(name: str, steps: int, micro_batches: int = 1) -> float:
    """One of two processes that do not talk. It keeps its memory, as stages do."""
    pt.init(quiet=True)
    keep_memory()
    model, x, y, begins = made(name)
    stage = cut(model, sample=x, by=begins).stages[dist.get_rank()].module
    own = optimizer(stage.parameters())

    def step() -> None:
        own.zero_grad()
        for inputs, target in zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True):
            given = inputs.detach().requires_grad_(dist.get_rank() == 1)
            (nn.functional.mse_loss(stage(given)[0], target) / micro_batches).backward()
        own.step()

    return seconds_of(step, steps, together=True)


def ours(name: str, steps: int, schedule: str) -> tuple[float, list[TurnTime]]:
    """A stage by one of our schedules, and the time of each of its turns, from the first step on."""
    pt.init(quiet=True)
    model, x, y, begins = made(name)
    pipe = pipeline(model, optimizer, nn.functional.mse_loss, SCHEDULES[schedule](), sample=x, by=begins)
    times = turns_timed(current())
    seconds = seconds_of(lambda: pipe.step(x, y), steps, together=False)
    taken = list(times)
    pipe.finish()
    return seconds, taken


TurnTime = tuple[float, float]
"""Seconds of one action of a stage: its computing, and its whole time without waiting."""


def turns_timed(world: ProcessWorld) -> list[TurnTime]:
    """A list that gets the times of all that this rank computes from now on."""
    compute, found = world.compute, []
    ended_s, waited_s = world.now_s(), world.waited_s

    def timed(work: Callable[[], Any], name: str = "compute") -> Any:
        nonlocal ended_s, waited_s
        begin_s = world.now_s()
        answer = compute(work, name)
        end_s, until_s = world.now_s(), world.waited_s
        found.append((end_s - begin_s, end_s - ended_s - (until_s - waited_s)))
        ended_s, waited_s = end_s, until_s
        return answer

    world.compute = timed  # type: ignore[method-assign]
    return found


def predicted_s(schedule: Schedule, steps: int, stages: list[list[TurnTime]], which: int) -> float:
    """The time of a step without message times; `which` of each turn's times."""
    taken = {
        (stage, turn): times[which]
        for stage, each in enumerate(stages)
        for turn, times in zip(turns(schedule, stage, steps + FILLING), each, strict=True)
    }
    return played(schedule, steps + FILLING, lambda stage, turn: taken[stage, turn]).mean_step_s


def theirs(name: str, steps: int, peer: str, backend: str) -> float:
    """A stage by one of torch's schedules."""
    pt.init(quiet=True, backend=backend)
    model, x, y, _ = made(name)
    rank = dist.get_rank()
    layers = list(model)
    own_layers = nn.Sequential(*layers[4 * rank : 4 * rank + 4])
    stage = PipelineStage(own_layers, rank, 2, torch.device("cpu"))
    schedule = PEERS[peer](stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    own = optimizer(own_layers.parameters())

    def step() -> None:
        own.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
        own.step()

    return seconds_of(step, steps, together=False)


class Measured(NamedTuple):
    """Seconds of a step: as they were, and as the timetable makes them of each turn's own time (0: it does not)."""

    step_s: float
    computed_s: float = 0.0
    """The prediction from computing times."""
    busy_s: float = 0.0
    """The prediction from times without waiting."""


def with_bubble() -> dict[str, float]:
    """A step of each contender with micro-batches, over `MICRO_LIMIT`, if messages took no time and F = I = W."""
    found = {}
    for name, make in SCHEDULES.items():
        if (schedule := make()).micro_batches > 1:
            found[name] = played(schedule, 4).step_s / (3 * MICRO_BATCHES)
    return found | {f"{peer}, {backend}": found["gpipe"] for peer in PEERS for backend in BACKENDS}


def contenders(name: str, steps: int) -> dict[str, Callable[[], Measured]]:
    """All contenders: a name, and the function that measures it in processes of its own."""

    def launched(work: Callable[[], float], processes: int = 2) -> Callable[[], Measured]:
        return lambda: Measured(max(pt.launch(lambda info: work(), processes, threads=1)))

    def predicted(schedule: str) -> Callable[[], Measured]:
        def measured() -> Measured:
            found = pt.launch(lambda info: ours(name, steps, schedule), 2, threads=1)
            stages = [[(taken[0], taken[1]) for taken in times] for _, times in found]
            each = (predicted_s(SCHEDULES[schedule](), steps, stages, which) for which in (0, 1))
            return Measured(max(seconds for seconds, _ in found), *each)

        return measured

    found = {
        "one process": launched(lambda: plain(name, steps), 1),
        "limit": launched(lambda: half(name, steps)),
        MICRO_LIMIT: launched(lambda: half(name, steps, MICRO_BATCHES)),
    }
    for schedule in SCHEDULES:
        found[schedule] = predicted(schedule)
    for peer in PEERS:
        for backend in BACKENDS:
            measured = launched(lambda peer=peer, backend=backend: theirs(name, steps, peer, backend))
            found[f"{peer}, {backend}"] = measured
    return found


def _median(each: list[Measured]) -> Measured:
    return sorted(each)[len(each) // 2]


def main() -> None:
    """Print a line for each contender: the median time of a step, and the speed relative to one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("perceptron", "cnn"), default="perceptron")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    measured: dict[str, list[Measured]] = {}
    for _ in range(given.rounds):
        for name, measure in contenders(given.model, given.steps).items():
            if not given.only or name in given.only or name in ("one process", MICRO_LIMIT):
                measured.setdefault(name, []).append(measure())
    alone_s = _median(measured["one process"]).step_s
    micro_limit_s = _median(measured[MICRO_LIMIT]).step_s
    bubbles = with_bubble()
    print(f"{given.model}: {given.rounds} rounds of {given.steps} steps, one thread a process")
    for name, each in measured.items():
        median = _median(each)
        beside = ""
        if name in bubbles:
            beside = f"   {bubbles[name] * micro_limit_s / median.step_s:4.2f} of {MICRO_LIMIT}, with its bubble"
        if median.busy_s:
            ratios = (statistics.median(m.step_s / m[which] for m in each) for which in (1, 2))
            beside += "   {:4.2f} of computing alone, {:4.2f} of the stages' whole time".format(*ratios)
        print(f"{name:28}{1e3 * median.step_s:9.1f} ms   {alone_s / median.step_s:5.2f} x{beside}", flush=True)


if __name__ == "__main__":
    main()
