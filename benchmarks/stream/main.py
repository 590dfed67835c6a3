"""The cost of a run's stream: pairs of runs that take turns, with and without it, and with numbers of the user.

python benchmarks/stream/main.py --pairs 8 --steps 3000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import polytempo as pt
from polytempo.engines.engine import EngineProcess, Role
from polytempo.report.status.event_log import EventLog
from polytempo.report.status.live_status import StatusNews
from polytempo.report.status.records import ProcessEvent
from polytempo.runs.frame.live_run import LiveRun, RunEvents, ShownRun
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


def logged(output: Tensor, target: Tensor, every: int = 10) -> Tensor:
    """The loss, with two numbers of the user in every tenth step."""
    loss = plain(output, target)
    _calls[0] += 1
    if _calls[0] % every == 0:
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


def share(name: str, job: pt.Job, steps: int) -> None:
    """Print the stream's share of the processor time of a run in this process."""
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*given: Any, **named: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                spent[0] += time.thread_time() - begin_s

        return within

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for place, method in ((EventLog, "append"), (EventLog, "__init__"), (UserLog, "log")):
            stack.enter_context(patch.object(place, method, timed(getattr(place, method))))
        begin_s = time.process_time()
        pt.Trainer(job, pt.strategies.sync_sgd(), steps=steps, threads=1, out=Path(folder) / "run").fit()
        total_s = time.process_time() - begin_s
    print(f"{name}: {100 * spent[0] / total_s:.3f} % of {1000 * total_s / steps:.2f} ms a step", flush=True)


def launcher_share(workers: int) -> None:
    """Print the share of a second that a launcher's look at its processes takes, once a second."""
    with tempfile.TemporaryDirectory() as folder:
        live = LiveRun(Path(folder), ShownRun("job", "s()", workers), RunEvents())
        with live:
            for node in range(workers):
                live.started(EngineProcess(Role("rank", node, node), Path("log")))
            begin_s = time.thread_time()
            for _ in range(200):
                live._tell(live.status("running"))
            spent_s = (time.thread_time() - begin_s) / 200
    print(f"the launcher's look for news, {workers} workers: {100 * spent_s:.3f} % of its second", flush=True)


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
    parser.add_argument("--pairs", type=int, default=0)
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
    steps, pairs = asked.steps, asked.pairs
    seconds(JOB, 50)
    pt.init(quiet=True)
    share("the stream", JOB, steps)
    share("the stream, and two numbers in each tenth step", replace(JOB, loss=logged), steps)
    share("the stream, and two numbers in each step", replace(JOB, loss=partial(logged, every=1)), steps)
    for workers in (4, 64):
        launcher_share(workers)
    if not pairs:
        return
    compared("the stream", lambda: without_stream(JOB, steps), lambda: seconds(JOB, steps), pairs)
    talks = replace(JOB, loss=logged)
    compared("two numbers in each tenth step", lambda: seconds(JOB, steps), lambda: seconds(talks, steps), pairs)


if __name__ == "__main__":
    main()
