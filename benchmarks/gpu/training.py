"""Samples a second and memory of a step: plain torch, DistributedDataParallel, `pt.attach` with each family."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import polytempo as pt
from polytempo.bench.models import Batch, Workload
from polytempo.bench.rank import BenchRank
from polytempo.bench.turns import Contender, figure, ratio, slowest, turns
from polytempo.device import device_memory, forget_peak, with_backend
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo

FAMILIES = (
    "sync_sgd()",
    "local_sgd(period=8)",
    "diloco(period=8)",
    "slowmo(period=8)",
    "gossip()",
    "delayed_sgd()",
    "adasum()",
    "bf16_sgd()",
    "int8_sgd()",
    "top_k_sgd(0.01)",
    "one_bit_sgd()",
    "qsgd()",
    "power_sgd()",
)
_NUM_BATCHES = 4
RUN_S = 300.0
"""The most that the processes of a section may take."""


class Plan(NamedTuple):
    """The number of turns of each contender, and the length of a turn."""

    device: str
    rounds: int
    turn_s: float
    families: Sequence[str] = FAMILIES


class Loop:
    """A user's loop on the device, with batches that are there."""

    def __init__(self, plan: Plan, workload: Workload, card: torch.device, wrap: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.card, self.workload = card, workload
        net = workload.make().to(card)
        self.optimizer = torch.optim.SGD(net.parameters(), workload.lr, momentum=0.0 if workload.sparse else 0.9)
        self.net, self.detach = wrap(net, self.optimizer)
        batches = [workload.batch(workload.batch_size) for _ in range(_NUM_BATCHES)]
        self.batches = cycle([(x.to(card), y.to(card)) for x, y in batches])

    def run(self, calls: int) -> list[float]:
        """Seconds a step; the host awaits the last step alone."""
        torch.accelerator.synchronize(self.card)
        begun = time.perf_counter()
        for _ in range(calls):
            self._step(next(self.batches))
        torch.accelerator.synchronize(self.card)
        return [(time.perf_counter() - begun) / calls]

    def _step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.workload.loss(self.net, batch).backward()
        self.optimizer.step()


def plain(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Callable[[], object]]:
    return net, lambda: None


def distributed(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Callable[[], object]]:
    return DistributedDataParallel(net), lambda: None


def attached(family: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Callable[[], object]]:
    handle = pt.attach(net, optimizer, pt.parse_strategy(family))
    return net, handle.detach


def training(plan: Plan, workload: Workload, workers: int) -> list[dict[str, Any]]:
    """A row for each contender, or its error; several workers share the devices there are."""

    def work(crew: BenchRank) -> dict[str, Any]:
        card = torch.device(plan.device, torch.accelerator.current_device_index())
        makers = {"plain": plain, "ddp": distributed, **{name: partial(attached, name) for name in plan.families}}
        loops, memory, errors = dict[str, Loop](), dict[str, int](), dict[str, str]()
        for name, wrap in makers.items():
            try:
                loop, memory[name] = _begun(plan, workload, card, wrap)
                loops[name] = loop
            except Exception as error:  # the other contenders are measured
                errors[name] = f"{type(error).__name__}: {error}"
        contenders = [Contender(name, loop.run) for name, loop in loops.items()]
        seconds = turns(contenders, crew, rounds=plan.rounds, turn_s=plan.turn_s) if contenders else {}
        group = dist.get_backend_config()
        for loop in loops.values():
            loop.detach()
        return {"seconds": seconds, "memory": memory, "errors": errors, "group": str(group)}

    found = crewed(work, workers)
    seconds = slowest([each["seconds"] for each in found], "mean")
    facts = {"workers": workers, "batch_size": workload.batch_size, "group": found[0]["group"]}
    samples = workers * workload.batch_size
    rows = []
    for name, measured in seconds.items():
        rate = figure([samples / each for each in measured.rounds])
        beside = ratio(seconds["plain"], measured)
        peak = max(each["memory"][name] for each in found)
        rows.append(
            {"contender": name, **facts, "samples_per_s": rate, "beside_plain": beside, "peak_memory_bytes": peak}
        )
    return rows + [{"contender": name, **facts, "error": error} for name, error in found[0]["errors"].items()]


def crewed(work: Callable[[BenchRank], Any], workers: int) -> list[Any]:
    """The value of `work(crew)` on each of `workers` processes. One has a group, too: DistributedDataParallel asks."""

    def serve(rank_info: RankInfo) -> Any:
        if workers == 1:
            store = dist.FileStore(str(rank_info.rendezvous / "alone"), 1)
            dist.init_process_group(with_backend("gloo"), store=store, rank=0, world_size=1)
        return work(BenchRank(rank_info, print))

    return launch(serve, workers, threads=1, timeout_s=RUN_S)


def _begun(plan: Plan, workload: Workload, card: torch.device, wrap: Callable[..., Any]) -> tuple[Loop, int]:
    """A loop that has run three steps, and the most bytes that it has held on the device in these."""
    gc.collect()
    torch.accelerator.synchronize(card)
    before = device_memory(card).allocated
    forget_peak(card)
    loop = Loop(plan, workload, card, wrap)
    loop.run(3)
    return loop, device_memory(card).peak - before


def parameters(workload: Workload) -> int:
    """The model's number of parameters."""
    return sum(p.numel() for p in workload.make().parameters())


def median_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a call: the median of some calls, each awaited, after a first call to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        torch.accelerator.synchronize(device)
        begun = time.perf_counter()
        run()
        torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])
