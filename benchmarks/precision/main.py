"""The cost of 16-bit parameters with float32 masters in accuracy, and their saving of memory.

    export POLYTEMPO_DATA=…              # a folder with mnist/
    python benchmarks/precision/main.py accuracy [--seeds 3] [--epochs 3] [--jobs digits] [--families stages,split]
    python benchmarks/precision/main.py memory [--parameters 100e6]

`accuracy`: digits (10 epochs) and MNIST, two workers; synchronous SGD in each precision; then two stages, layers split
over two workers, and layers divided over them, with messages in 32, 16 and 8 bits; then a parameter server. `memory`: a
process for each precision trains three steps by SGD without momentum, alone; it prints the peak beyond the memory
before the model was made.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polytempo as pt
from polytempo.bench.machine import machine
from polytempo.bench.tables import markdown
from polytempo.core import Strategy

PRECISIONS = (None, "bf16", "fp16(loss_scale=dynamic)")
_BITS = [(f", activations={codec}, gradients={codec}", "bf16") for codec in ("bf16", "int8")]
FAMILIES: dict[str, tuple[str, list[tuple[str, str | None]]]] = {
    "synchronous": ("sync_sgd()", [("", each) for each in PRECISIONS[1:]]),
    "stages": ("gpipe(stages=2{})", _BITS),
    "split": ("split('auto', parts=2{})", [(_BITS[1][0], None), *_BITS]),
    "gathered": ("split('0: column(gather=True), 2: column(gather=True)', parts=2{})", _BITS),
    "divided": ("hybrid('auto'{})", [(_BITS[1][0], None), *_BITS]),
    "server": ("async_sgd({})", [("", "bf16"), ("codec=bf16, pull_codec=bf16", "bf16")]),
}
"""Name -> a strategy with room for codecs, as it is measured in float32 first, and the codecs and precisions then."""
DIGITS_EPOCHS = 10.0
LAYERS, BATCH, STEPS = 12, 8, 3
_KIB, _MIB = 1024, 2**20
_RUN_S = 600.0


def accuracy(seeds: int, epochs: float, jobs: Sequence[str], families: Sequence[str]) -> str:
    """A row for each job and setting: mean test accuracy over seeds, and its difference to float32's."""
    rows = []
    for job in jobs:
        for family in families:
            begin, between = FAMILIES[family]
            settings = [(begin, None), *[(begin.format(codecs) if codecs else begin, p) for codecs, p in between]]
            base: list[float] = []
            base_bytes = 1.0
            for text, precision in settings:
                strategy = pt.parse_strategy(text.format(""))
                found, sent = scores(job, strategy, precision, seeds, DIGITS_EPOCHS if job == "digits" else epochs)
                base, base_bytes = (base, base_bytes) if base else (found, sent)
                rows.append(row(job, text.format(""), precision, found, base, sent / base_bytes))
                print(" | ".join(rows[-1]), file=sys.stderr)
    return markdown(
        (["job", "strategy", "precision", "accuracy, %", "spread", "difference, points", "bytes sent"], rows)
    )


def scores(job: str, strategy: Strategy, precision: str | None, seeds: int, epochs: float) -> tuple[list[float], float]:
    """The accuracy in percent of each seed, and the bytes that a worker sent."""
    found, sent = [], 0.0
    data = Path(os.environ["POLYTEMPO_DATA"]) / job if job == "mnist" else None
    options: dict[str, Any] = {"precision": precision, "data": data, "epochs": epochs, "threads": 1}
    for seed in range(seeds):
        result = pt.run(pt.jobs.find(job), strategy, workers=2, seed=seed, **options)
        assert result.accuracy is not None
        found.append(100 * result.accuracy)
        sent = result.bytes_sent_per_rank
    return found, sent


def row(
    job: str, strategy: str, precision: str | None, found: Sequence[float], base: Sequence[float], sent: float
) -> list[str]:
    """One line of the table."""
    mean, difference = statistics.mean(found), statistics.mean(found) - statistics.mean(base)
    spread = f"{min(found):.2f} to {max(found):.2f}"
    return [job, f"`{strategy}`", precision or "float32", f"{mean:.2f}", spread, f"{difference:+.2f}", f"{sent:.2f} x"]


def memory(parameters: float) -> str:
    """A row for each precision, each measured in a process of its own."""
    peaks = {}
    for precision in PRECISIONS:
        command = [sys.executable, __file__, "peak", "--parameters", str(parameters), "--precision", str(precision)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_RUN_S)
        numel, peak = (int(number) for number in answer.stdout.split())
        peaks[precision] = peak - (0 if precision is None else 4 * numel), peak, numel
    base = peaks[None][0]
    rows = [
        [precision or "float32", f"{numel / 1e6:.1f}", f"{peak / _MIB:.0f}", f"{own / _MIB:.0f}", f"{own / base:.2f} x"]
        for precision, (own, peak, numel) in peaks.items()
    ]
    columns = ["precision", "million parameters", "peak, MiB", "without masters, MiB", "beside float32"]
    return markdown((columns, rows))


def peak_of(parameters: float, precision: str | None) -> tuple[int, int]:
    """Parameters of a model, and the bytes by which training it raised this process's peak."""
    width = round((parameters / LAYERS) ** 0.5)
    pt.init()
    warm_up(precision)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    train(model, precision, width)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sum(parameter.numel() for parameter in model.parameters()), (peak - before) * _KIB


def warm_up(precision: str | None) -> None:
    """Loads torch's and its libraries' late imports, which are not the model's memory."""
    train(nn.Sequential(nn.Linear(64, 64, bias=False)), precision, 64)


def train(model: nn.Module, precision: str | None, width: int) -> None:
    """Three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = pt.attach(model, optimizer, precision=precision)
    for _ in range(STEPS):
        optimizer.zero_grad()
        handle.scaled(model(torch.randn(BATCH, width)).square().mean()).backward()
        optimizer.step()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "memory", "peak"))
    parser.add_argument("--jobs", type=lambda text: text.split(","), default=["digits", "mnist"])
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--precision", default="None")
    asked = parser.parse_args()
    if asked.what == "peak":
        print(*peak_of(asked.parameters, None if asked.precision == "None" else asked.precision))
        return
    if asked.what == "accuracy":
        print(accuracy(asked.seeds, asked.epochs, asked.jobs, asked.families))
    else:
        print(memory(asked.parameters))
    print(f"\n{machine()}", Path(__file__).name)


if __name__ == "__main__":
    main()
