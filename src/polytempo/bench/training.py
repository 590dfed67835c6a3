"""`bench training`: samples per second of one model, trained by one process and by several, in turns.

one_thread      one process with one thread: the base of all comparisons
threads         one process with as many threads as there are workers, and as many times the batch
apart           as many processes as there are workers, that have nothing to do with each other: the limit
ddp_gloo        DistributedDataParallel over gloo          ddp_polytempo   the same over our backend
shared_memory   one copy of the weights                    hogwild         one copy, without locks (sparse models)

All live in the same worker processes, each with a model of its own. While one process computes alone the others sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polytempo import strategies
from polytempo.bench.machine import written
from polytempo.bench.models import MODELS, Batch, Workload
from polytempo.bench.rank import BenchRank, crewed
from polytempo.bench.turns import Contender, Measurement, figure, ratio, slowest, timed, turns
from polytempo.core.strategy import Strategy
from polytempo.native.library import why_not
from polytempo.training.hooks.attach import attach_replica

OURS = ("ddp_polytempo", "shared_memory", "hogwild")
BASES = ("one_thread", "ddp_gloo", "apart")
"""Bases of comparisons."""
_NUM_BATCHES = 8
_MAX_WORKERS = 64


class TrainingPlan(NamedTuple):
    """The plan of the benchmark. `turn_s`: how long a contender's turn lasts, at least three steps."""

    models: Sequence[str]
    workers: int
    rounds: int
    turn_s: float


def training(plan: TrainingPlan) -> dict[str, Any]:
    """Measure; the result as `written` lays it out.

    A row: model, configuration, samples_per_s (median over rounds, quartiles, each round), and the ratios
    to one_thread, to ddp_gloo and to apart, above 1 where it is faster, each with its quartiles over rounds.
    Errors: ValueError for an impossible plan, before anything is started.
    """
    unknown = [name for name in plan.models if name not in MODELS]
    if unknown or not plan.models:
        name = unknown[0] if unknown else ""
        raise ValueError(f"--models: there is no {name!r}; there are: {', '.join(MODELS)}")
    if not 2 <= plan.workers <= _MAX_WORKERS:
        raise ValueError(f"--workers {plan.workers}: from 2 to {_MAX_WORKERS}")
    reason = why_not()
    missing = dict.fromkeys(OURS, reason) if reason else {}
    rows = [row for name in plan.models for row in _rows(plan, name)]
    return written("training", plan._asdict(), missing, rows)


def _rows(plan: TrainingPlan, model: str) -> list[dict[str, Any]]:
    """One model's rows, by a crew of its own: its memory is given back before the next."""
    workload = MODELS[model]

    def work(crew: BenchRank) -> dict[str, list[list[float]]]:
        crew.say(f"{plan.workers} workers: {model}")
        return turns(_contenders(crew, workload), crew, rounds=plan.rounds, turn_s=plan.turn_s)

    seconds = slowest(crewed(work, plan.workers), "mean")
    rates = {name: _rate(each, _samples(workload, name, plan.workers)) for name, each in seconds.items()}
    return [_row(model, name, rates) for name in rates]


def _samples(workload: Workload, name: str, workers: int) -> int:
    """Samples a step, of all workers."""
    return workload.batch_size * (1 if name == "one_thread" else workers)


def _rate(seconds: Measurement, samples: int) -> Measurement:
    return figure([samples / each for each in seconds.rounds])


def _contenders(crew: BenchRank, workload: Workload) -> list[Contender]:
    torch.manual_seed(crew.rank)
    batches = [workload.batch(workload.batch_size) for _ in range(_NUM_BATCHES)]
    found = [
        _alone(crew, "one_thread", workload, batches, threads=1),
        _alone(crew, "threads", workload, [workload.batch(crew.size * workload.batch_size)], threads=crew.size),
        Contender("apart", timed(_step(workload, _made(workload), batches))),
        Contender("ddp_gloo", timed(_step(workload, _distributed(workload, crew.gloo), batches))),
    ]
    if crew.ours is not None:
        found.append(Contender("ddp_polytempo", timed(_step(workload, _distributed(workload, crew.ours), batches))))
        found.append(_attached("shared_memory", workload, batches, strategies.shared_memory()))
        if workload.sparse:
            found.append(_attached("hogwild", workload, batches, strategies.hogwild()))
    return found


def _alone(crew: BenchRank, name: str, workload: Workload, batches: Sequence[Batch], *, threads: int) -> Contender:
    """Rank 0 with so many threads. The others' model is never made, and their turn takes no time."""
    if crew.rank:
        return Contender(name, lambda calls: [0.0])
    run = timed(_step(workload, _made(workload), batches))

    def with_threads(calls: int) -> list[float]:
        torch.set_num_threads(threads)
        try:
            return run(calls)
        finally:
            torch.set_num_threads(1)

    return Contender(name, with_threads)


def _attached(name: str, workload: Workload, batches: Sequence[Batch], strategy: Strategy) -> Contender:
    model = _made(workload)
    optimizer = _optimizer(workload, model)
    attach_replica(model, optimizer, strategy)
    return Contender(name, timed(_step(workload, model, batches, optimizer)))


def _made(workload: Workload) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return workload.make()


def _distributed(workload: Workload, group: Any) -> nn.Module:
    return DistributedDataParallel(_made(workload), process_group=group)


def _optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=workload.lr)


def _step(
    workload: Workload, model: nn.Module, batches: Sequence[Batch], optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """The loop's body as users write it."""
    updates = optimizer or _optimizer(workload, model)
    coming = cycle(batches)

    def step() -> None:
        updates.zero_grad()
        workload.loss(model, next(coming)).backward()
        updates.step()

    return step


def _row(model: str, name: str, rates: dict[str, Measurement]) -> dict[str, Any]:
    return {
        "model": model,
        "configuration": name,
        "samples_per_s": rates[name]._asdict(),
        "ratios": {base: ratio(rates[name], rates[base])._asdict() for base in BASES},
    }
