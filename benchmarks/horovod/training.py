"""`hvd.DistributedOptimizer` beside DistributedDataParallel over gloo, our own `attach`, and no exchange: four models.

All contenders live in the same 2 processes of one thread and take turns; a figure is the median over rounds of the
slower rank's time a step. Real Horovod, where it is installed, runs in processes of its own afterwards.

    python benchmarks/horovod/training.py [--rounds 9] [--turn 1.0] [--processor] [--models mlp cnn …]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt
import polytempo.horovod.torch as hvd
from polytempo.bench.models import MODELS, Batch, Workload
from polytempo.bench.rank import BenchRank, crewed
from polytempo.bench.turns import Contender, ratio, slowest, timed, turns


def stepped(workload: Workload, model: nn.Module, optimizer: Any, batches: Sequence[Batch]) -> Callable[[], None]:
    """The loop's body as users write it."""
    coming = cycle(batches)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, next(coming)).backward()
        optimizer.step()

    return step


def made(workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and plain SGD, alike on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = workload.make()
    return model, torch.optim.SGD(model.parameters(), lr=workload.lr)


def contenders(crew: BenchRank, workload: Workload, clock: Callable[[], float]) -> list[Contender]:
    """One step of each."""
    torch.manual_seed(crew.rank)
    batches = [workload.batch(workload.batch_size) for _ in range(8)]
    steps: dict[str, Callable[[], None]] = {"limit": stepped(workload, *made(workload), batches)}
    model, optimizer = made(workload)
    steps["ddp"] = stepped(workload, DistributedDataParallel(model, process_group=crew.gloo), optimizer, batches)
    model, optimizer = made(workload)
    pt.attach(model, optimizer, pt.strategies.sync_sgd())
    steps["attach"] = stepped(workload, model, optimizer, batches)
    model, optimizer = made(workload)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    steps["hvd"] = stepped(workload, model, distributed, batches)
    return [Contender(name, timed(step, clock)) for name, step in steps.items()]


def measured(name: str, rounds: int, turn_s: float, clock: Callable[[], float]) -> None:
    """Print one model's line."""

    def work(crew: BenchRank) -> dict[str, list[list[float]]]:
        hvd.init()
        return turns(contenders(crew, MODELS[name], clock), crew, rounds=rounds, turn_s=turn_s)

    found = slowest(crewed(work, 2), "mean")
    times = " | ".join(f"{1e3 * found[each].median:.2f}" for each in ("hvd", "ddp", "attach", "limit"))
    against = [ratio(found[each], found["hvd"]) for each in ("ddp", "attach")]
    speeds = " | ".join(f"{each.median:.3f} ({each.low:.3f} to {each.high:.3f})" for each in against)
    print(f"| {name} | {times} | {speeds} |", flush=True)


def alone(module: str, models: Sequence[str], turn_s: float) -> None:
    """Any module with Horovod's API, in a process of its launcher: print seconds a step by model."""
    other = importlib.import_module(module)
    other.init()
    torch.set_num_threads(1)
    answer = {}
    for name in models:
        workload = MODELS[name]
        torch.manual_seed(other.rank())
        batches = [workload.batch(workload.batch_size) for _ in range(8)]
        model, optimizer = made(workload)
        distributed = other.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        run = timed(stepped(workload, model, distributed, batches))
        first_s = other.allreduce(torch.tensor(median(run(5))), name=f"first.{name}").item()
        answer[name] = median(run(max(5, int(turn_s / first_s))))
    if other.rank() == 0:
        print(json.dumps(answer))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=1.0, help="seconds")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--processor", action="store_true", help="processes' time on their cores, not the wall's")
    parser.add_argument("--alone", metavar="MODULE", help="measure that module alone, in a process that is started")
    arguments = parser.parse_args()
    if arguments.alone:
        alone(arguments.alone, arguments.models, arguments.turn)
        return
    clock = time.process_time if arguments.processor else time.perf_counter
    print("| model | hvd, ms | DDP over gloo, ms | attach, ms | limit, ms | DDP / hvd | attach / hvd |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.models:
        measured(name, arguments.rounds, arguments.turn, clock)
    if importlib.util.find_spec("horovod") is None:
        print("Horovod itself is not installed here, and not measured.")
        return
    command = [sys.executable, __file__, "--alone", "horovod.torch", "--turn", "10", "--models", *arguments.models]
    subprocess.run(["horovodrun", "-np", "2", "--gloo", *command], check=True)


if __name__ == "__main__":
    main()
