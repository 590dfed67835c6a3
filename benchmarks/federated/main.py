"""Rounds of federated averaging on MNIST beside McMahan et al., Table 2, and rounds per minute of many clients.

    export POLYTEMPO_DATA=…              # a folder with mnist/
    python benchmarks/federated/main.py [--rates 0.05 0.1] [--only iid-10] [--workers 2] [--raw] [--out FOLDER]

100 clients, C = 0.1 (ten a round), scored after each round: to 97 % with E = 1 and the network 784-200-200-10 (199,210
parameters), and to 99 % with E = 5 and the convolutional network (1,663,370 parameters). The published rounds are of
the best learning rate, and so are ours, of `--rates`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.errors import NotFinite
from polytempo.report.runs import has_result, load_result


def dense() -> nn.Module:
    """McMahan's 2NN."""
    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def convolutional() -> nn.Module:
    """McMahan's CNN; its 1,663,370 parameters are of convolutions that keep the pictures' sizes."""
    features = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*features, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))
    return model.to(memory_format=torch.channels_last)  # a step takes a sixth less


class Case(NamedTuple):
    """A cell of the paper's table."""

    clients: str
    batch_size: int | None
    published: int
    """Rounds to the goal."""
    model: Callable[[], nn.Module] = dense
    epochs: int = 1
    goal: float = 0.97


CASES = {
    "iid-10": Case("iid(100)", 10, 87),
    "iid-all": Case("iid(100)", None, 1474),
    "shards-10": Case("shards(100, per_client=2)", 10, 664),
    "shards-all": Case("shards(100, per_client=2)", None, 1796),
    "cnn-iid": Case("iid(100)", 10, 18, convolutional, 5, 0.99),
    "cnn-shards": Case("shards(100, per_client=2)", 10, 206, convolutional, 5, 0.99),
}


def raw(*parts: TensorDataset) -> list[TensorDataset]:
    """Pixels from 0 to 1; the reader's have mean 0 and deviation 1."""
    low, high = parts[0].tensors[0].min(), parts[0].tensors[0].max()
    return [TensorDataset((images - low) / (high - low), labels) for images, labels in (part.tensors for part in parts)]


def job(data: Path | None = None, model: Callable[[], nn.Module] = dense, *, raw_pixels: bool = False) -> pt.Job:
    """MNIST from a folder, or logistic regression on the digits."""
    made = raw if raw_pixels else lambda *parts: parts
    return pt.Job(
        model=model if data else lambda: nn.Linear(64, 10),
        data=lambda path: pt.Data(*(made(*pt.data.mnist(data)) if data else pt.data.digits())),
        loss=functional.cross_entropy,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        correct=lambda output, target: output.argmax(1) == target,
    )


def rounds_to_goal(name: str, rate: float, data: Path, asked: argparse.Namespace) -> tuple[float, float]:
    """Rounds until the test accuracy is the goal, and seconds. ∞: there were too few, or a loss was not finite."""
    begin_s, rounds, case = time.perf_counter(), math.inf, CASES[name]
    out = asked.out and asked.out / f"{name}-{rate:g}"
    if out and has_result(out) and (ended := load_result(out))["reached"]:
        return ended["steps"], ended["seconds"]
    strategy = pt.federated.fed_avg(10, epochs=case.epochs, batch_size=case.batch_size)
    with suppress(NotFinite):
        found = (pt.run if asked.workers > 1 else pt.simulate)(
            *(job(data, case.model, raw_pixels=asked.raw), strategy, asked.workers),
            threads=1,
            clients=case.clients,
            lr=rate,
            steps=min(asked.most, 4 * case.published),
            eval_every=1,
            until={"accuracy": case.goal},
            checkpoint_every=1 if out else None,
            out=out,
            resume=out is not None and out.exists(),
        )
        rounds = found.steps if found.reached else rounds
    return rounds, time.perf_counter() - begin_s


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--only", choices=[*CASES, "many"])
    parser.add_argument("--most", type=int, default=2500, help="rounds at most, and 4 times the published ones")
    parser.add_argument("--workers", type=int, default=1, help="processes that play the clients of a round")
    parser.add_argument("--raw", action="store_true", help="pixels from 0 to 1, not of mean 0 and deviation 1")
    parser.add_argument("--out", type=Path, help="a folder: runs leave their curves there, and go on where they ended")
    asked = parser.parse_args()
    if asked.only != "many" and "POLYTEMPO_DATA" not in os.environ:
        parser.error("name the folder with mnist/ by the variable POLYTEMPO_DATA; --only many needs none")
    data = Path(os.environ.get("POLYTEMPO_DATA", "")) / "mnist"
    torch.set_num_threads(1)
    if asked.only in (None, "many"):
        begin_s = time.perf_counter()
        result = pt.run(job(), pt.federated.fed_avg(100), 2, clients="iid(1000)", steps=100, threads=1)
        seconds = time.perf_counter() - begin_s
        print("1,000 clients, 100 a round, 100 rounds of logistic regression on digits, two workers:")
        print(f"{seconds:.1f} s with starting and scoring, {result.seconds:.1f} s of training, {result.accuracy:.1%}")
    for name, case in CASES.items():
        if asked.only not in (None, name):
            continue
        for rate in asked.rates:
            rounds, seconds = rounds_to_goal(name, rate, data, asked)
            print(f"| {name} | {case.published} | {rounds:g} | {rate:g} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
