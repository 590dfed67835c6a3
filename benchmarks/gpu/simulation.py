"""The batched simulation of many workers, all gradients in one pass: on the device and on the CPU."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn
from training import crewed

import polytempo as pt
from polytempo.bench.rank import BenchRank
from polytempo.device import device_memory

STRATEGIES = ("sync_sgd()", "local_sgd(period=8)", "gossip()")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


JOB = pt.Job(
    model=net,
    data=lambda folder: pt.Data(*pt.data.digits()),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    lr=0.05,
    batch_size=1,
)


def simulation(device: str, workers: int, steps: int) -> list[dict[str, Any]]:
    """A row for each strategy and place, or its error. The digits have 1,437 samples: one a worker and step."""

    def work(where: str, strategy: str, crew: BenchRank) -> dict[str, Any]:
        pt.simulate(JOB, strategy, workers, batched=True, device=where, steps=2)  # warms up
        begun = time.perf_counter()
        found = pt.simulate(JOB, strategy, workers, batched=True, device=where, steps=steps)
        seconds = time.perf_counter() - begun
        peak = device_memory(torch.device(where, 0)).peak if where != "cpu" else None
        return {"worker_steps_per_s": workers * steps / seconds, "loss": found.loss, "peak_memory_bytes": peak}

    rows = []
    for strategy in STRATEGIES:
        for where in (device, "cpu"):
            facts = {"strategy": strategy, "place": where, "workers": workers, "steps": steps}
            try:
                rows.append(facts | crewed(partial(work, where, strategy), 1)[0])
            except Exception as error:  # the other strategies are measured
                rows.append(facts | {"error": f"{type(error).__name__}: {error}"})
    return rows
