"""Test accuracy of pipelines with activations and gradients between stages in 16 and in 8 bits.

    POLYTEMPO_DATA=… python benchmarks/pipeline/accuracy.py [--jobs digits mnist] [--seeds 3]

Three stages on three processes, a linear layer each, so that all that the model computes crosses both cuts. Every
run of a job has the same batches, learning rate and number of epochs; a seed draws the parameters and the batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo import compression as c
from polytempo.bench.tables import markdown
from polytempo.core import Codec
from polytempo.engines.processes.worker import RankInfo
from polytempo.partition.schedules import one_f_one_b
from polytempo.runs.own_loop.pipeline import pipeline

STAGES, MICRO_BATCHES, SAMPLES = 3, 4, 128
EPOCHS = {"digits": 40, "mnist": 2}
CODECS: dict[str, tuple[Callable[[], Codec] | None, Callable[[], Codec] | None]] = {
    "as they are": (None, None),
    "`bf16()` both ways": (c.bf16, c.bf16),
    "`int8()`, gradients `bf16()`": (c.int8, c.bf16),
    "`int8()` both ways": (c.int8, c.int8),
    "`qsgd(levels=127)` both ways": (lambda: c.qsgd(levels=127), lambda: c.qsgd(levels=127)),
}


def data(job: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and labels for training and for the test; a row a sample."""
    if job == "digits":
        train, test = pt.data.digits()
        return (*train.tensors, *test.tensors)
    train, test = pt.data.mnist(Path(os.environ["POLYTEMPO_DATA"]) / "mnist")
    return (train.tensors[0].flatten(1), train.tensors[1], test.tensors[0].flatten(1), test.tensors[1])


def model(inputs: int, seed: int) -> nn.Sequential:
    """784 (64) - 256 - 128 - 10."""
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def trained(job: str, name: str, seed: int) -> tuple[float, float]:
    """Test accuracy, and megabytes that a stage sends in an epoch."""

    def work(info: RankInfo) -> tuple[float, float]:
        pt.init(quiet=True)
        x, y, test_x, test_y = data(job)
        activations, gradients = (None if make is None else make() for make in CODECS[name])
        net = model(x.shape[1], seed)
        pipe = pipeline(
            net,
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            nn.functional.cross_entropy,
            one_f_one_b(STAGES, MICRO_BATCHES),
            sample=x[:SAMPLES],
            by=["2", "4"],
            activations=activations,
            gradients=gradients,
        )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS[job]):
            for chosen in torch.randperm(len(x), generator=generator).split(SAMPLES):
                pipe.step(x[chosen], y[chosen])
        pipe.finish()
        plain = model(x.shape[1], seed)
        plain.load_state_dict(pipe.state_dict())
        correct = (plain(test_x).argmax(1) == test_y).double().mean()
        sent = sum(pipe.sent_bytes(x[:SAMPLES], y[:SAMPLES])) * len(x) / SAMPLES / STAGES / 1e6
        return 100 * float(correct), sent

    return pt.launch(work, STAGES, threads=1)[0]


def main() -> None:
    """Print a table a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for job in given.jobs:
        rows = []
        first: float | None = None
        for name in CODECS:
            found = [trained(job, name, seed) for seed in range(given.seeds)]
            mean = statistics.mean(accuracy for accuracy, _ in found)
            first = mean if first is None else first
            each = ", ".join(f"{accuracy:.2f}" for accuracy, _ in found)
            rows.append((name, f"{mean:.2f} %", f"{mean - first:+.2f}", each, f"{found[0][1]:.2f} MB"))
        print(f"\n{job}, {EPOCHS[job]} epochs, {given.seeds} seeds\n")
        heads = ("activations and gradients", "accuracy", "points", "seeds", "a stage sends, an epoch")
        print(markdown((heads, rows)), flush=True)


if __name__ == "__main__":
    main()
