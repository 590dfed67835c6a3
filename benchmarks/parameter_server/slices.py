"""The least batch with a gain of rapid reassignment: virtual steps of `flexrr` against waiting steps, by batch and
grain.

python benchmarks/parameter_server/slices.py [--batches 16 32 64 128 200 400 800]

Eight workers, one at half speed. A sample takes 1.7 ms, a message 0.2 ms and its bytes at 1 GB/s. Each column is the
time of a step over the step of eight even workers that wait for each other.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.cluster import Cluster, Link, slow_host

WORKERS, STEPS = 8, 2
EVEN = Cluster(Link(2e-4, 1e9), flops_per_s=14_400.0)
ONE_SLOW = replace(EVEN, stragglers=slow_host(7, 2.0))
WAITING = pt.strategies.backup_workers(backups=0)
GRAINS = (0.0125, 0.025, 0.05)


def job(batch_size: int) -> pt.Job:
    """A linear model of six numbers."""
    samples = STEPS * WORKERS * batch_size
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(samples, 6, generator=draw), torch.randn(samples, 1, generator=draw))
    return pt.Job(
        name="linear",
        model=lambda: nn.Linear(6, 1),
        data=lambda folder: pt.Data(data, None),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        lr=0.05,
        batch_size=batch_size,
    )


def seconds(strategy: pt.Strategy, cluster: Cluster, batch_size: int) -> float:
    """Virtual, of two steps."""
    return pt.simulate(job(batch_size), strategy, WORKERS, cluster, steps=STEPS, threads=1).seconds


def main() -> None:
    """Print the rows of a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[16, 32, 64, 128, 200, 400, 800])
    print("| batch | waiting |", " | ".join(f"grain {grain}" for grain in GRAINS), "| without stragglers |")
    print("|---|---|", "---|" * (len(GRAINS) + 1))
    for batch in parser.parse_args().batches:
        even_s = seconds(WAITING, EVEN, batch)
        cells = [f"{seconds(WAITING, ONE_SLOW, batch) / even_s:.2f}"]
        for grain in GRAINS:
            made = pt.strategies.flexrr(grain=grain, first_offer=max(grain, 0.025))
            cells.append(f"{seconds(made, ONE_SLOW, batch) / even_s:.3f}")
        cells.append(f"{seconds(pt.strategies.flexrr(), EVEN, batch) / even_s:.4f}")
        print(f"| {batch} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
