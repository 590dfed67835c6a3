"""The measurements of one process, together with the others of its world, as plain data."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from polytempo.cluster.fit import Sample
from polytempo.collectives import ring
from polytempo.core import Port, Strategy
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.core.port import barrier
from polytempo.core.system.folder_lock import machine_identity
from polytempo.device import HOST, current_device
from polytempo.engines.join.init import init
from polytempo.native.arena import shared_empty
from polytempo.runs.calibration.device_samples import device_answer
from polytempo.runs.calibration.kernel_samples import around, operators, transforms
from polytempo.runs.calibration.link_samples import collectives, links
from polytempo.runs.calibration.probe import flops_per_s
from polytempo.runs.calibration.server_samples import servers
from polytempo.spec.job import Data, Job
from polytempo.spec.run_options import RunOptions
from polytempo.strategies import local_sgd, one_bit_sgd, power_sgd, sync_sgd
from polytempo.training.trainer import Trainer
from polytempo.worlds import ProcessWorld

T = TypeVar("T")
CALIBRATION = "calibration"
"""The kind of such a process's role."""
_TIMEOUT_S = 300.0
_STEPS, _BATCH = 300, 32
_QUANTILES = 20
_FEW = 5
_TURNS, _TURNS_S = 6, 20.0
"""The most turns, and the most seconds for all of them."""


_COMPUTING = "import time\nend_s = time.monotonic() + 30\nwhile time.monotonic() < end_s: sum(range(10_000))"
"""A program that ends after 30 s, also if this process was killed."""


class SmallRun(NamedTuple):
    """The training of a small job."""

    strategy: Strategy
    batch_size: int
    sizes: tuple[int, int] = (64, 64)
    """Inputs, and hidden units."""
    steps: int = 300
    """Counted steps; between slow hosts each takes up to a second."""

    @property
    def job(self) -> Job:
        """The small job."""
        return small_job(*self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return 4 * sum(p.numel() for p in self.job.model().parameters())

    def options(self, steps: int) -> RunOptions:
        """The options of a run of so many steps."""
        return RunOptions(steps=steps, epochs=1000, threads=1, batch_size=self.batch_size, device="cpu")


NO_EXCHANGE = local_sgd(period=1 << 20)
"""A strategy that exchanges nothing in a run."""
SMALL_RUNS = {
    "step": SmallRun(NO_EXCHANGE, 4),
    "sample": SmallRun(NO_EXCHANGE, 64),
    "exchange": SmallRun(sync_sgd(), 4),
}
"""Kernel -> the run that gives it, after the kernels before."""
SMALL_SIZES = {"small": (64, 64), "large": (512, 2048)}
"""Sizes of models of 5,000 parameters and of a million."""
WHOLE_RUNS = {
    name: SmallRun(strategy, 4, SMALL_SIZES[name.split()[0]], 30)
    for name, strategy in {
        "small alone": NO_EXCHANGE,
        "small ring": sync_sgd(route=ring),
        "large alone": NO_EXCHANGE,
        "large native": sync_sgd(),
        "large ring": sync_sgd(route=ring),
        "large one_bit": one_bit_sgd(),
        "large power_sgd": power_sgd(2),
    }.items()
}
"""Runs without an exchange, with the world's own sum, with messages, and with codecs."""
CODED = {"large one_bit": ("encode ", "decode "), "large power_sgd": ("low_rank ",)}
"""Run -> beginnings of the names of kernels; the run gives their slowdown within steps of training."""


def calibration(device: str = "cpu") -> dict[str, Any]:
    """Measure together with the other processes of the world: the host, then `device`."""
    world = init(timeout_s=_TIMEOUT_S, device="cpu", quiet=True)
    port = world.port
    torch.manual_seed(port.rank)
    cores = len(os.sched_getaffinity(0))
    empty = shared_empty if world.reads_arenas else torch.zeros
    talk = world.drive(links(port)) if port.size > 1 else []
    meetings = world.drive(collectives(port, empty)) if port.size > 1 else []
    samples = [sample for each in meetings for sample in each.on_processor]
    for measure in (operators, transforms, around, servers):
        world.drive(barrier(port))
        samples += measure()
    speed, (steps, on_processor) = _in_turns(world, cores, lambda: (flops_per_s(), step_seconds()))
    busy, on_busy_processor = _in_turns(world, cores, lambda: _beside_another(step_seconds))
    small = {kernel: median(step_times(run, time.thread_time)) for kernel, run in SMALL_RUNS.items()}
    world.drive(barrier(port))
    whole = _turns(world, WHOLE_RUNS, time.perf_counter)
    apart = len(set(port.hosts)) > 1
    on_processor_s = _turns(world, ("large alone", *CODED), time.process_time) if apart else []
    world.drive(barrier(port))
    of_device = device_answer(device, port.hosts[: port.rank].count(port.hosts[port.rank]))
    if of_device is not None:
        of_device["collectives"] = _between_devices(world, of_device)
    return {
        "name": socket.gethostname(),
        "host": list(dict.fromkeys(port.hosts)).index(port.hosts[port.rank]),
        "links": [each.figures() for each in talk],
        "collectives": [(each.kind, each.taken) for each in meetings],
        "samples": [([list(use) for use in sample.uses], sample.seconds) for sample in samples],
        "flops_per_s": speed,
        "steps": [step / median(on_processor) for step in steps],
        "busy_steps": [step / median(on_busy_processor) for step in busy],
        "small": small,
        "whole": whole,
        "on_processor": on_processor_s,
        "cores": cores,
        "device": of_device,
        "machine": machine_identity(),
    }


def _between_devices(world: ProcessWorld, of_device: Mapping[str, Any]) -> list[tuple[str, list[tuple[int, float]]]]:
    """Seconds of collectives between devices, where each process has a device of its own; else nothing."""
    port = world.port
    apart = bool(of_device["backend"]) and max(Counter(port.hosts).values()) <= of_device["devices"]
    if port.size < 2 or not all(map(bool, world.drive(_gathered(port, torch.tensor([int(apart)]))))):
        return []
    device = current_device() or HOST
    found = world.drive(collectives(port, partial(torch.zeros, device=device), device))
    return [(each.kind, each.taken) for each in found]


def _in_turns(world: ProcessWorld, cores: int, measure: Callable[[], T]) -> T:
    """The answer of `measure`, while at most as many ranks of this machine measure as it has cores.

    A wait for a core must not count as a straggler, because shared cores are counted separately.
    """
    port, found = world.port, list[T]()
    machine = int.from_bytes(hashlib.sha256(machine_identity().encode()).digest()[:7], "big")
    machines = [int(each) for each in world.drive(_gathered(port, torch.tensor([machine])))]
    mine = machines[: port.rank].count(machine) // cores
    turns = 1 + int(max(world.drive(_gathered(port, torch.tensor([mine])))))
    for turn in range(turns):
        world.drive(barrier(port))
        if turn == mine:
            found.append(measure())
    world.drive(barrier(port))
    return found[0]


def _beside_another(measure: Callable[[], T]) -> T:
    """The answer of `measure` while another process computes without end, on the same cores."""
    other = subprocess.Popen([sys.executable, "-PS", "-c", _COMPUTING])  # noqa: S603 - this interpreter
    try:
        return measure()
    finally:
        other.kill()
        other.wait()


async def _gathered(port: Port, value: Tensor) -> list[Tensor]:
    return await port.all_gather(value)


def _turns(world: ProcessWorld, runs: Iterable[str], clock: Callable[[], float]) -> list[dict[str, float]]:
    """Seconds of a step of each whole run, some times one after the other, but between slow hosts only once."""
    turns, begin_s = list[dict[str, float]](), time.perf_counter()
    while len(turns) < _TURNS:
        turns.append({name: median(step_times(WHOLE_RUNS[name], clock)) for name in runs})
        taken_s = world.drive(_of_rank_0(world.port, time.perf_counter() - begin_s))
        if taken_s * (len(turns) + 1) / len(turns) > _TURNS_S:
            break
    return turns


async def _of_rank_0(port: Port, value: float) -> float:
    return float((await port.broadcast(torch.tensor([value])))[0])


def samples_of(plain: list[Any]) -> list[Sample]:
    """The samples that a process has told."""
    return [Sample(tuple(KernelUse(*use) for use in uses), float(seconds)) for uses, seconds in plain]


def small_job(inputs: int = 64, hidden: int = 64) -> Job:
    """A perceptron on noise, without a test set: its steps have the same seconds beyond their kernels as any step."""
    draw = torch.Generator().manual_seed(0)
    samples, target = torch.randn(4096, inputs, generator=draw), torch.randint(10, (4096,), generator=draw)
    return Job(
        name="small",
        model=lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
        data=lambda path: Data(TensorDataset(samples, target), None),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        lr=0.01,
    )


def step_times(run: SmallRun, clock: Callable[[], float]) -> list[float]:
    """Seconds by the clock that this rank takes for each step of a small job, together with the others."""
    trainer = Trainer(run.job, run.strategy, run.options(_FEW + run.steps))
    begun_s, take_step = list[float](), trainer.context.take_step

    async def timed(port: Port, batch: Any, samples: int, share: float | None) -> Any:
        begun_s.append(clock())
        return await take_step(port, batch, samples, share)

    trainer.context.take_step = timed
    trainer.fit()
    return [end_s - begin_s for begin_s, end_s in pairwise(begun_s[_FEW:])]


def step_seconds() -> tuple[list[float], list[float]]:
    """One step of training after another, forward, backward and update of a perceptron: its seconds, and the seconds
    on its processor."""
    model = nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, target = torch.randn(_BATCH, 512), torch.randint(10, (_BATCH,))
    taken, on_processor = [], []
    for _ in range(_STEPS):
        begin_s, processor_s = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        taken.append(time.perf_counter() - begin_s)
        on_processor.append(time.thread_time() - processor_s)
    return taken[_STEPS // 10 :], on_processor[_STEPS // 10 :]


def quantiles_of(factors: list[float]) -> tuple[float, ...]:
    """The least factor, and quantiles at equal distances. The last one is chosen so that a straight line to it has the
    mean of the last part: the largest factor, of a single step ten times as long, would double the mean."""
    ordered, last = sorted(factors), len(factors) - 1
    places = [round(i * last / _QUANTILES) for i in range(_QUANTILES)]
    before = ordered[places[-1]]
    return (*(ordered[place] for place in places), 2 * fmean(ordered[places[-1] :]) - before)


def correlation_of(factors: list[float]) -> float:
    """The correlation of a step's factor with the next step's factor, by their normal scores, from 0 to 0.99."""
    order = sorted(range(len(factors)), key=lambda i: factors[i])
    normal, scores = NormalDist(), [0.0] * len(factors)
    for place, i in enumerate(order):
        scores[i] = normal.inv_cdf((place + 0.5) / len(factors))
    power = fmean(score**2 for score in scores)
    if not power:
        return 0.0
    return min(0.99, max(0.0, fmean(a * b for a, b in pairwise(scores)) / power))


def spread_of(values: list[float]) -> float:
    """(90th percentile - 10th percentile) / median."""
    ordered = sorted(values)
    return (ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]) / ordered[
        len(ordered) // 2
    ]
