"""Memory of a run by its number of clients: the largest resident memory of a worker, in MB.

    python benchmarks/federated/memory.py [--clients 100 1000 10000] [--rounds 20]

100,000 samples of 64 numbers, dealt alike; logistic regression, 100 clients a round, two workers. `scaffold` has a
state for each client that took part: 650 numbers, 2.6 kB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo import federated as fed

SAMPLES, COHORT = 100_000, 100


def job() -> pt.Job:
    """Logistic regression on random numbers."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 64, generator=generator)
    rows = TensorDataset(inputs, inputs[:, :10].argmax(1))
    return pt.Job(
        model=lambda: nn.Linear(64, 10),
        data=lambda path: pt.Data(rows),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    )


def one(name: str, clients: int, rounds: int) -> None:
    """A run in this process: print a row."""
    strategy = {"fed_avg": fed.fed_avg, "scaffold": fed.scaffold}[name](COHORT, batch_size=100)
    begin_s = time.perf_counter()
    pt.run(job(), strategy, workers=2, clients=f"iid({clients})", steps=rounds)
    took_s = time.perf_counter() - begin_s
    workers, launcher = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)
    )
    print(f"| `{name}` | {clients:,} | {workers:.0f} | {launcher:.0f} | {60 * rounds / took_s:.0f} |", flush=True)


def main() -> None:
    """Print the table; each row is of a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        return one(given.one[0], int(given.one[1]), given.rounds)
    print(
        "| strategy | clients | a worker, MB | launcher, MB | rounds per minute, with start |\n|---|---|---|---|---|",
        flush=True,
    )
    for name in ("fed_avg", "scaffold"):
        for clients in given.clients:
            asked = ["--one", name, str(clients), "--rounds", str(given.rounds)]
            subprocess.run([sys.executable, __file__, *asked], check=True)


if __name__ == "__main__":
    main()
