"""The speed of the parameter server: a large model on one host, over sockets, with a slow worker, and small messages.

    python benchmarks/parameter_server/main.py [--quick] [--only push_pull wire straggler messages]

Contenders take turns; ratios are medians of the rounds' ratios. Ray takes part where it is installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from crew import Crew, Unavailable, rounds_of
from ours import SGD, Served, node_of, push_and_pull, shard_of
from peers import PEERS
from torch import Tensor

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.bench.turns import Measurement, figure, ratio
from polytempo.core import Port
from polytempo.core.rule import Service
from polytempo.server.message import Message, Pull, Push
from polytempo.server.rules.asynchronous import on_arrival
from polytempo.wire.shared import Arenas

NUMEL = 25_000_000
STEP_S, SLOWED = 0.01, 10
"""The seconds of a worker's step in `straggler`, asleep, and the factor of the slow worker's."""
BOUND = 3
SMALL, MANY = 16, 1000
"""`messages`: parameters and workers."""


def _started(stack: ExitStack, makes: Sequence[Callable[[], Crew]]) -> list[Crew]:
    crews = []
    for make in makes:
        try:
            crew = make()
        except Unavailable as reason:
            print(f"not measured: {reason}")
            continue
        stack.callback(crew.close)
        crews.append(crew)
    return crews


def _served(name: str, wire: Any, workers: int, numel: int) -> Callable[[], Crew]:
    return lambda: Served(name, numel, workers, wire, pt.strategies.async_sgd()).crew(push_and_pull)


# ------------------------------------------------------------------------------------------------- a large model


def push_pull(rounds: int, turn_s: float) -> None:
    """Two workers and one shard on this host: ours, the limit, and the others."""
    with ExitStack() as stack:
        makes = [_served("ours", "shared memory", 2, NUMEL)]
        makes += [lambda peer=peer: peer(NUMEL, 2) for peer in PEERS.values()]  # type: ignore[misc]
        figures = rounds_of(_started(stack, makes), rounds, turn_s)
    ours = figures["ours"]
    rows = [
        (name, f"{1e3 * found.median:.1f} ms", *_both(found, ours), *_both(found, figures["limit"]))
        for name, found in figures.items()
    ]
    columns = ("25 million f32, 2 workers", "push and pull", "of ours", "quartiles", "of the limit", "quartiles")
    print(markdown((columns, list(rows))))


def wire(rounds: int, turn_s: float) -> None:
    """The same over TCP on loopback: payload bytes per second, pushed and pulled, of all workers together."""
    with ExitStack() as stack:
        kinds = [(kind, workers) for kind in ("tcp", "tcp, CURVE") for workers in (1, 2)]
        makes = [_served(f"{kind}, {workers} workers", kind, workers, NUMEL) for kind, workers in kinds]
        figures = rounds_of(_started(stack, makes), rounds, turn_s)
    rows = []
    for (_, workers), (name, found) in zip(kinds, figures.items(), strict=True):
        rate = [2e-9 * 4 * NUMEL * workers / seconds for seconds in found.rounds]
        rows.append((name, f"{1e3 * found.median:.0f} ms", f"{statistics.median(rate):.2f} GB/s"))
    print(markdown((("ZeroMQ on loopback", "push and pull", "payload of all workers"), list(rows))))


def _both(a: Measurement, b: Measurement) -> tuple[str, str]:
    found = ratio(a, b)
    return f"{found.median:.2f}", f"{found.low:.2f} to {found.high:.2f}"


# ------------------------------------------------------------------------------------------------- a slow worker


class TrainingContext:
    """Four workers with steps of `STEP_S` each, asleep; worker 3's are `slowed` times as long."""

    WORKERS, SLOW = 4, 3

    def __init__(self, name: str, strategy: pt.Strategy, slowed: int) -> None:
        self.name, self._slowed = name, slowed
        self._due = 0
        """Steps that were asked for, as each worker's process counts them."""
        shared = Arenas(1, 1 << 20).empty(0, 3 * self.WORKERS, torch.float64)
        self._finished, self._leads, self._rates = shared.split(self.WORKERS)
        self._served = Served(name, 1000, self.WORKERS, "shared memory", strategy)

    def crew(self) -> Crew:
        """The processes."""
        return self._served.crew(self._turn)

    @property
    def rate(self) -> float:
        """Steps per second of the three others, together, in the last turn."""
        return float(self._rates[: self.SLOW].sum())

    @property
    def lead(self) -> int:
        """The largest lead of a worker that had read over the slowest, in steps."""
        return int(self._leads.max())

    async def _turn(self, port: Port, worker: int, gradient: Tensor, calls: int) -> None:
        """`calls` steps; a slow worker's turn is over when the others' are."""
        self._due += calls
        begun, is_slow = time.perf_counter(), worker == self.SLOW and self._slowed > 1
        goal = self._finished[: self.SLOW] if is_slow else self._finished[worker : worker + 1]
        while float(goal.min()) < self._due:
            clock = int(self._finished[worker])
            await port.pull(clock)
            self._leads[worker] = max(float(self._leads[worker]), clock - float(self._finished.min()))
            time.sleep(STEP_S * (self._slowed if is_slow else 1))
            self._finished[worker] = clock + 1  # before anybody can know of it
            await port.push(gradient, clock + 1)
        self._rates[worker] = calls / (time.perf_counter() - begun)


def straggler(rounds: int, turn_s: float) -> None:
    """Four workers, one of them slowed: the others' speed, and their lead."""
    all_well = TrainingContext("async_sgd, all well", pt.strategies.async_sgd(), 1)
    free = TrainingContext("async_sgd, one slowed", pt.strategies.async_sgd(), SLOWED)
    bound = TrainingContext(f"ssp(bound={BOUND}), one slowed", pt.strategies.ssp(BOUND), SLOWED)
    courses = (all_well, free, bound)
    rates: dict[str, list[float]] = {course.name: [] for course in courses}
    steps = max(10, round(turn_s / STEP_S))
    with ExitStack() as stack:
        crews = _started(stack, [course.crew for course in courses])
        for number in range(rounds):
            order = list(zip(courses, crews, strict=True))
            for course, crew in (*order[number % 3 :], *order[: number % 3]):
                crew.turn(max(10, steps // SLOWED) if course is bound else steps)
                rates[course.name].append(course.rate)
        leads = [str(course.lead) for course in courses]
    figures = {name: figure(found) for name, found in rates.items()}
    rows = [
        (name, f"{found.median:.0f}", *_both(found, figures[all_well.name]), lead)
        for (name, found), lead in zip(figures.items(), leads, strict=True)
    ]
    columns = ("4 workers", "steps/s of three", "of all well", "quartiles", "most steps ahead of the slowest")
    print(markdown((columns, list(rows))))


# ------------------------------------------------------------------------------------------------- small messages


def messages(rounds: int, turn_s: float) -> None:
    """Small messages through the server's code in one process: no sockets, no frames, 1,000 workers."""
    pushes, pairs = [], []
    for _ in range(rounds):
        pushes.append(_per_second(False, turn_s))
        pairs.append(_per_second(True, turn_s))
    rows = [
        ("push", f"{figure(pushes).median:,.0f}", f"{1e6 / figure(pushes).median:.1f} µs"),
        ("push and pull", f"{figure(pairs).median:,.0f}", f"{1e6 / figure(pairs).median:.1f} µs"),
    ]
    print(markdown((("16 parameters, 1,000 workers", "per second", "each"), list(rows))))


def _per_second(pulls: bool, turn_s: float) -> float:
    """Pushes (each with a pull behind it) that a node takes in a second of its process's own time."""
    node = node_of(shard_of(SMALL, Service(on_arrival(), SGD)), MANY)
    repeats = max(1, int(turn_s * 20_000 / MANY))
    requests: list[Message] = []
    gradients = [torch.randn(SMALL) for _ in range(MANY)]
    for repeat in range(repeats):
        for worker in range(MANY):
            first = 1 + repeat * (1 + pulls)
            requests.append(Push(worker, 1, first, repeat, 0, 1, (1e-3,), (repeat * MANY + worker,), gradients[worker]))
            if pulls:
                requests.append(Pull(worker, 1, first + 1, repeat, -1))
    answered = 0
    begun = time.process_time()
    for request in requests:
        answered += len(node.receive(0.0, request.worker, request))  # type: ignore[attr-defined]
    seconds = time.process_time() - begun
    assert answered == len(requests), "on arrival everything is answered immediately"
    assert node.shard.version == repeats * MANY, "every push was an update"
    return repeats * MANY / seconds


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {part.__name__: part for part in (push_pull, wire, straggler, messages)}
    parser.add_argument("--quick", action="store_true", help="a rough look")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for part in arguments.only:
        parts[part](*(3, 0.4) if arguments.quick else (11, 1.0))


if __name__ == "__main__":
    main()
