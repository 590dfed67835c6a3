"""The cost of a run's stream: pairs of runs that take turns, with and without it, and with numbers of the user.

python benchmarks/stream/main.py --pairs 8 --steps 3000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.report.status.event_log import EventLog
from polytempo.report.status.live_status import StatusNews
from polytempo.report.status.records import ProcessEvent
from polytempo.training.observe.user_log import UserLog

FEATURES, CLASSES, SAMPLES = 256, 10, 8192


def data(folder: Path) -> pt.Data:
    """Random features with labels that a linear map gives."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES)
    return pt.Data(torch.utils.data.TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES)).argmax(1)), None)


def plain(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return nn.functional.cross_entropy(output, target)


_calls = [0]


def logged(output: Tensor, target: Tensor) -> Tensor:
    """The loss, with two numbers of the user in every tenth step."""
    loss = plain(output, target)
    _calls[0] += 1
    if _calls[0] % 10 == 0:
        pt.log(perplexity=loss.exp(), spread=output.detach().std())
    return loss


JOB = pt.Job(
    model=lambda: nn.Sequential(
        nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ),
    data=data,
    loss=plain,
    optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    batch_size=64,
    lr=0.01,
    epochs=10_000,
)


def seconds(job: pt.Job, steps: int) -> float:
    """Training time of a run of one worker with a folder."""
    with tempfile.TemporaryDirectory() as folder:
        return pt.run(job, pt.strategies.sync_sgd(), 1, steps=steps, threads=1, out=Path(folder) / "run").seconds


def without_stream(job: pt.Job, steps: int) -> float:
    """The same without `events.jsonl` and the search for its news."""
    with patch.object(EventLog, "append", lambda log, record: None), patch.object(StatusNews, "look", lambda n, s: []):
        return seconds(job, steps)


def compared(name: str, first: Callable[[], float], second: Callable[[], float], pairs: int) -> None:
    """Print the median of the pairs' ratios less one, and the middle half."""
    ratios = []
    for number in range(pairs):
        order = [(0, first), (1, second)][:: 1 if number % 2 else -1]
        found = {key: run() for key, run in order}
        ratios.append(100 * (found[1] / found[0] - 1))
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{name}: {middle:+.2f} % of the run's time (middle half {low:+.2f} to {high:+.2f}), {pairs} pairs", flush=True
    )


def each(name: str, call: Callable[[], object], times: int = 2000) -> None:
    """Print the microseconds of a call."""
    begin_s = time.perf_counter()
    for _ in range(times):
        call()
    print(f"{name}: {1e6 * (time.perf_counter() - begin_s) / times:.1f} us a call", flush=True)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with EventLog(Path(folder)) as events:
            each(
                "a fault in events.jsonl", lambda: events.append(ProcessEvent("worker-1", "died", 1.0, "started again"))
            )
        rows = (Path(folder) / "events.jsonl").open("ab", buffering=0)
        log, value = UserLog(lambda row: rows.write(repr(row).encode()), Path(folder)), torch.tensor(1.5)
        each("pt.log of one number", lambda: log.log({"perplexity": value}))
        rows.close()
    seconds(JOB, 50)
    steps, pairs = asked.steps, asked.pairs
    compared("the stream", lambda: without_stream(JOB, steps), lambda: seconds(JOB, steps), pairs)
    talks = replace(JOB, loss=logged)
    compared("two numbers in each tenth step", lambda: seconds(JOB, steps), lambda: seconds(talks, steps), pairs)


if __name__ == "__main__":
    main()
