"""Seconds of a shard for a push and the answers to its worker, as samples of the kernel `serve`.

    worker ──frames──▶ decode ─▶ Node.receive: add, step, reply ─▶ encode ──frames──▶
                       └────────────── timed on the thread's clock ─────────────┘

Shards of a simulated run do the work of real ones, by the native optimizer if there is one. The seconds of a pull are
added to the next push: a step has one of each, and only a push is charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from polytempo.cluster import Cluster, Link
from polytempo.cluster.fit import Sample
from polytempo.core import Port
from polytempo.core.arithmetic.kernel_use import KernelUse
from polytempo.native.library import available
from polytempo.runs.simulated.simulate_served import ServedSimulation
from polytempo.server.loop import Machine, serve
from polytempo.server.message import Message, Outbox, Push
from polytempo.spec.job import Data, Job
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import async_sgd
from polytempo.training.served.worker_program import Attendance
from polytempo.wire.frames import FrameLimits, decode, encode

_SIZES = (16, 256, 1024, 2048)
"""The middle of 256 - m - 64: from 5,000 to 660,000 parameters."""
_WORKERS, _STEPS, _WARM_UP = 2, 12, 4
_LIMITS = FrameLimits()


def servers() -> list[Sample]:
    """A sample of each push to one shard, for models of several sizes."""
    return [sample for size in _SIZES for sample in pushes(_job(size))[_WARM_UP:]]


def pushes(job: Job) -> list[Sample]:
    """A sample of each push of a short run by asynchronous SGD."""
    options = RunOptions(steps=_STEPS, epochs=1000, threads=1, batch_size=1)
    spec = RunSpec.of(job, async_sgd(), _WORKERS, options)
    run = ServedSimulation(spec, Cluster(Link(1e-6, 1e10)), native=available())
    found: list[Sample] = []

    async def act(port: Port) -> Attendance | None:
        node = run.nodes.get(port.rank)
        if node is None:
            return await run.act(port)
        await serve(port, _TimedMachine(node, found.append))
        return None

    run.world.run(act)
    return found


class _TimedMachine:
    """A machine that hands out the seconds of each push."""

    def __init__(self, machine: Machine, take: Callable[[Sample], None]) -> None:
        self._machine, self._take, self._pulled_s = machine, take, 0.0

    @property
    def finished(self) -> bool:
        """True if the machine has finished."""
        return self._machine.finished

    def receive(self, now_s: float, source: int, message: Message) -> Outbox:
        """The machine's answer."""
        frames = encode(message)
        begin_s = time.thread_time()
        out = self._machine.receive(now_s, source, decode(frames, _LIMITS))
        for _, answer in out:
            encode(answer)
        self._pulled_s += time.thread_time() - begin_s
        if isinstance(message, Push):
            uses = (KernelUse("serve", 1, message.num_bytes, self.flops(message)),)
            self._take(Sample(uses, self._pulled_s))
            self._pulled_s = 0.0
        return out

    def tick(self, now_s: float) -> Outbox:
        """The machine's tick."""
        return self._machine.tick(now_s)

    def wait_s(self, now_s: float) -> float:
        """The machine's wait."""
        return self._machine.wait_s(now_s)

    def flops(self, message: Message) -> float:
        """The machine's flops."""
        return self._machine.flops(message)


def _job(middle: int) -> Job:
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 256, generator=draw), torch.randint(64, (64,), generator=draw))

    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    return Job(
        name="served",
        model=lambda: nn.Sequential(nn.Linear(256, middle), nn.ReLU(), nn.Linear(middle, 64)),
        data=lambda path: Data(data, None),
        loss=functional.cross_entropy,
        optimizer=optimizer,
        lr=0.01,
        batch_size=1,
    )
