"""Rounds of federated averaging to 97 % of MNIST beside McMahan et al., Table 2, and rounds per minute of many clients.

    export POLYTEMPO_DATA=…              # a folder with mnist/
    python benchmarks/federated/main.py [--rates 0.05 0.1 0.2] [--only iid-10] [--most 2000] [--raw]

100 clients, C = 0.1 (ten a round), E = 1, the network 784-200-200-10 (199,210 parameters), scored after each round. The
published rounds are of the best learning rate, and so are ours, of `--rates`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polytempo as pt

PUBLISHED = {  # partition, B, rounds to 97 %
    "iid-10": ("iid(100)", 10, 87),
    "iid-all": ("iid(100)", None, 1474),
    "shards-10": ("shards(100, per_client=2)", 10, 664),
    "shards-all": ("shards(100, per_client=2)", None, 1796),
}


def network() -> nn.Module:
    """McMahan's 2NN."""
    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def raw(*parts: TensorDataset) -> list[TensorDataset]:
    """Pixels from 0 to 1; the reader's have mean 0 and deviation 1."""
    low, high = parts[0].tensors[0].min(), parts[0].tensors[0].max()
    return [TensorDataset((images - low) / (high - low), labels) for images, labels in (part.tensors for part in parts)]


def job(data: Path | None = None, *, raw_pixels: bool = False) -> pt.Job:
    """MNIST from a folder, or the digits."""
    made = raw if raw_pixels else lambda *parts: parts
    return pt.Job(
        model=network if data else lambda: nn.Linear(64, 10),
        data=lambda path: pt.Data(*(made(*pt.data.mnist(data)) if data else pt.data.digits())),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target,
    )


def rounds_to_97(case: str, rate: float, most: int, data: Path, *, raw_pixels: bool) -> tuple[float, float]:
    """Rounds until the test accuracy is 97 %, ∞ if `most` are too few, and seconds."""
    clients, batch_size, _ = PUBLISHED[case]
    begin_s = time.perf_counter()
    found = pt.simulate(
        *(job(data, raw_pixels=raw_pixels), pt.federated.fed_avg(10, epochs=1, batch_size=batch_size), 1),
        clients=clients,
        lr=rate,
        steps=most,
        eval_every=1,
        until={"accuracy": 0.97},
    )
    return found.steps if found.reached else math.inf, time.perf_counter() - begin_s


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--only", choices=[*PUBLISHED, "many"])
    parser.add_argument("--most", type=int, default=2500, help="rounds at most")
    parser.add_argument("--raw", action="store_true", help="pixels from 0 to 1, not of mean 0 and deviation 1")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.only in (None, "many"):
        begin_s = time.perf_counter()
        result = pt.run(job(), pt.federated.fed_avg(100), 2, clients="iid(1000)", steps=100, threads=1)
        seconds = time.perf_counter() - begin_s
        print(
            f"1,000 clients, 100 a round, 100 rounds of logistic regression on digits, two workers: {seconds:.1f} s, "
        )
        print(f"with starting and scoring; {result.seconds:.1f} s of training; accuracy {result.accuracy:.1%}")
    for case in [asked.only] if asked.only else PUBLISHED:
        if case == "many":
            continue
        data = Path(os.environ["POLYTEMPO_DATA"]) / "mnist"
        for rate in asked.rates:
            rounds, seconds = rounds_to_97(case, rate, asked.most, data, raw_pixels=asked.raw)
            print(f"| {case} | {PUBLISHED[case][2]} | {rounds:g} | {rate:g} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
