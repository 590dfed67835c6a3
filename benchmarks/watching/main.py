"""Measure the cost of watching a run: trackers, an idle callback, the tail of a trace, and the live page's looks.

Figures are processor time, which holds beside other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import polytempo as pt
from polytempo.report.status.event_log import EventLog
from polytempo.report.status.records import RunFinished, RunStarted
from polytempo.spec.callbacks.reading import Callbacks
from polytempo.spec.tracker_call import parse_tracker
from polytempo.trackers import TrackedRun, table
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.ui.hub import Hub, LookPace
from polytempo.ui.page_view import PageView
from polytempo.worlds.trace import Event, Line, Trace
from polytempo.worlds.trace_tail import EVERY_S, TraceTail

STEP_S = 2e-3
"""The step that shares are of, as long as the step of benchmarks/stream."""
ROWS, EVENTS_A_STEP = 2_000, 20
ROW = {"train/loss": 0.5, "train/samples_per_s": 6400.0, "train/lr": 0.1, "epoch": 1.5, "samples": 6400.0}


def used_s(call: Callable[[], object]) -> float:
    """Processor seconds of this process in a call."""
    begin_s = time.process_time()
    call()
    return time.process_time() - begin_s


def share(spent_s: float, every_s: float) -> str:
    """A part of a core."""
    return f"{100 * spent_s / every_s:.3f} %"


def trackers(names: list[str]) -> None:
    """Print the time of a row in each tracker's own process; `log` and the library's threads together."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder, at(folder):
            tracker = table.made(parse_tracker(name.replace("FOLDER", folder)))
            tracker.start(
                TrackedRun(
                    name="run",
                    folder=folder,
                    job="digits",
                    strategy="sync_sgd()",
                    world="process",
                    workers=2,
                    settings={"lr": 0.1},
                    began_s=time.time(),
                    identity="a1b2c3d4",
                )
            )

            def rows(tracker: pt.trackers.Tracker = tracker) -> None:
                for step in range(ROWS):
                    tracker.log(ROW, step)
                tracker.finish(RunFinished(state="finished"))

            row_s = used_s(rows) / ROWS
        print(f"| a row in {name.partition(':')[0]} | {1e6 * row_s:,.0f} µs | {share(row_s, 1.0)} |", flush=True)


@contextmanager
def at(folder: str) -> Iterator[None]:
    """Inside, libraries write below this folder."""
    before = Path.cwd()
    os.chdir(folder)
    os.environ["TRACKIO_DIR"] = folder
    try:
        yield
    finally:
        os.chdir(before)


class Idle(pt.callbacks.Callback):
    """Sees each step, and asks for nothing."""

    def on_step(self, facts: pt.callbacks.CallbackFacts) -> None:
        """Look away."""


def callbacks() -> None:
    """Print the time of a step in a callback that does nothing."""
    host = CallbackHost(Callbacks([Idle()]), None)

    def steps() -> None:
        for step in range(10 * ROWS):
            host.stepped(step, 0.1, 64 * step, 0.1)
            host.take()

    step_s = used_s(steps) / (10 * ROWS)
    print(f"| a step with an idle callback | {1e6 * step_s:.1f} µs | {share(step_s, STEP_S)} |", flush=True)


def tails() -> None:
    """Print the time of a tail, and of an event with a look at the clock of its tail."""
    events: list[Line] = [(0, step, "send", 4096, 0.001 * step, 0.001 * step + 5e-4, 1) for step in range(500)]
    with tempfile.TemporaryDirectory() as folder:
        tail = TraceTail(Path(folder, "trace", "0.json"), 500)
        tail_s = used_s(lambda: [tail.show([Event(*each) for each in events]) for _ in range(200)]) / 200
        print(
            f"| the tail of a trace, 500 operations | {1e6 * tail_s:,.0f} µs | {share(tail_s, EVERY_S)} |", flush=True
        )

        def adds(trace: Trace) -> float:
            return min(used_s(lambda: [trace.add(each) for _ in range(100) for each in events]) for _ in range(5)) / 5e4

        plain, watched = Trace(timed=False), Trace(timed=False)
        watched.show_in(TraceTail(Path(folder, "trace", "1.json"), 500))
        more_s = max(0.0, adds(watched) - adds(plain)) * EVENTS_A_STEP
    print(f"| {EVENTS_A_STEP} operations in a trace with one | {1e6 * more_s:.1f} µs | {share(more_s, STEP_S)} |")


def write_run(folder: Path, rows: int, *, ended: bool = True) -> None:
    """A run of so many rows."""
    folder.mkdir(parents=True)
    known = {"job": "digits", "strategy": "sync_sgd()", "world": "process", "workers": 2, "steps": 2 * rows}
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(1, rows + 1):
            row = {"kind": "train", "step": step, "epoch": step / 30, "samples": 64 * step, "seconds": 0.01 * step}
            stream.write(json.dumps(row | {"loss": 1 / step, "samples_per_s": 6400.0}) + "\n")
    with EventLog(folder, fresh=True) as events:
        start = msgspec.convert({"kind": "start", **known}, RunStarted)
        events.append(msgspec.structs.replace(start, began_s=time.time(), host=socket.gethostname(), pid=os.getpid()))
        if ended:
            events.append(RunFinished(state="finished"))
            (folder / "result.json").write_text(json.dumps(known | {"loss": 0.1}))


def page(runs: int, rows: int) -> None:
    """Print the times of the page's looks at a list of runs, and at a long run."""
    with tempfile.TemporaryDirectory() as home:
        root = Path(home)
        for number in range(runs):
            write_run(root / f"run-{number}", 100)
        write_run(root / "long", rows, ended=False)
        hub = Hub(root, LookPace(None))
        for look in ("first", "later"):
            list_s = used_s(lambda: hub.rows(fresh=True))
            print(f"| list of {runs + 1} runs, {look} look | {1e3 * list_s:,.1f} ms | |", flush=True)
        view = PageView(kind="run", runs=("long",), axis="step", pixels=600)

        def curves(seen: PageView) -> None:
            hub._curves(seen)

        def whole() -> None:
            while True:
                curves(view)
                watch = hub._watch("long")
                if not watch.columns.behind:
                    return
                watch.looked_s = -1e9

        print(f"| {rows:,} rows, until all are read | {1e3 * used_s(whole):,.0f} ms | |", flush=True)
        with (root / "long" / "metrics.jsonl").open("a") as stream:
            stream.write('{"kind": "train", "step": 9999999, "loss": 0.1, "seconds": 1e6}\n')
        hub._watch("long").looked_s = -1e9
        print(f"| {rows:,} rows, a later look | {1e3 * used_s(lambda: curves(view)):,.1f} ms | |", flush=True)
        near = PageView(kind="run", runs=("long",), axis="step", pixels=600, begin=rows / 2, end=rows / 2 + 1000)
        print(f"| {rows:,} rows, a zoom into 1,000 | {1e3 * used_s(lambda: curves(near)):,.1f} ms | |", flush=True)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trackers", nargs="*", default=["tensorboard"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    asked = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}\n\n| quantity | processor time | of a core |\n|---|---|---|")
    callbacks()
    tails()
    page(100, asked.rows)
    trackers(asked.trackers)


if __name__ == "__main__":
    main()
