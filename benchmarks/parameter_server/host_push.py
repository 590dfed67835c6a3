"""Pushes of two hosts with two workers each, each worker's own or a host's sum: bytes on the link, and samples/s.

    python benchmarks/parameter_server/host_push.py --namespaces h0 h1 --address 10.0.0.1 [--rounds 5]

Run it as root in the first of two network namespaces. `unshare` gives each host processes of its own, so that no memory
is shared between hosts. The shard is on the first host, so the second host's link sends its workers' pushes, and
receives their pulls. Bytes are the link's count, for each batch of its workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.bench.tables import markdown
from polytempo.jobs import find

WORKERS, WIDTH, SAMPLES, BATCH = 4, 1000, 3200, 16
GRADIENT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def data(folder: Path | None) -> pt.Data:
    """Noise: nothing is to be learned."""
    random = torch.Generator().manual_seed(0)
    return pt.Data(TensorDataset(*(torch.randn(SAMPLES, WIDTH, generator=random) for _ in range(2))))


job = pt.Job(
    model=lambda: nn.Linear(WIDTH, WIDTH),
    data=data,
    loss=nn.functional.mse_loss,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    lr=0.01,
    batch_size=BATCH,
    epochs=1,
    name="noise",
)


class Measured(NamedTuple):
    """One run."""

    batches: int
    """The batches of the second host's workers."""
    pushed_bytes: int
    pulled_bytes: int
    samples_per_s: float


def measured(strategy: pt.Strategy, namespaces: Sequence[str], address: str) -> Measured:
    """Run it, and look at the second host's link before and after."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
    command = ["ip", "netns", "exec", "{host}", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    engine = pt.engines.ssh(
        hosts=list(namespaces),
        command=command,
        python=sys.executable,
        address=address,
        environment=kept | {"OMP_NUM_THREADS": "1"},
    )
    before = [_counted(namespaces[1], way) for way in ("tx_bytes", "rx_bytes")]
    result = pt.run(find(f"{Path(__file__).absolute()}:job"), strategy, workers=WORKERS, engine=engine)
    after = [_counted(namespaces[1], way) for way in ("tx_bytes", "rx_bytes")]
    facts: Any = result.server
    pushed, pulled = (b - a for a, b in zip(before, after, strict=True))
    batches = sum(each["steps"] for each in facts["workers"] if each["worker"] >= WORKERS // 2)
    return Measured(batches, pushed, pulled, SAMPLES / result.seconds)


def _counted(namespace: str, way: str) -> int:
    words = ["ip", "netns", "exec", namespace, "cat", f"/sys/class/net/eth0/statistics/{way}"]
    return int(subprocess.run(words, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespaces", nargs=2, required=True)
    parser.add_argument("--address", required=True, help="of the first")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    strategies = {
        "async_sgd": pt.strategies.async_sgd,
        "downpour, pulls every 4": partial(
            pt.strategies.downpour, push_every=1, pull_every=4, optimizer="sgd", lr=0.01
        ),
    }
    rows = []
    for name, strategy in strategies.items():
        found: dict[bool, list[Measured]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for hierarchical, runs in found.items():
                runs.append(measured(strategy(hierarchical=hierarchical), arguments.namespaces, arguments.address))
        for hierarchical, runs in found.items():
            pushed = statistics.median(each.pushed_bytes / each.batches for each in runs)
            pulled = statistics.median(each.pulled_bytes / each.batches for each in runs)
            pairs = zip(found[False], runs, strict=True)
            ratio = statistics.median(ours.samples_per_s / each.samples_per_s for each, ours in pairs)
            rows.append(
                (
                    f"{name}, {'the sum of a host' if hierarchical else 'each its own'}",
                    f"{pushed / 1e6:.2f} MB",
                    f"{GRADIENT_BYTES / (1e6 * (WORKERS // 2 if hierarchical else 1)):.2f} MB",
                    f"{pulled / 1e6:.2f} MB",
                    f"{statistics.median(each.samples_per_s for each in runs):.0f}",
                    f"{ratio:.2f}",
                )
            )
    names = ("pushes", "pushed a batch", "predicted", "pulled a batch", "samples/s", "median ratio")
    print(markdown((names, rows)))


if __name__ == "__main__":
    main()
