"""`StepProfiler`: operations of one rank in some steps, as `torch.profiler` sees them, on the clock of the trace.

steps    … 18   19 │ 20   21  …  29 │ 30 …
                 start             stop ─▶ profile/rank-R.json: slices of torch, and the rank's exchanges

A mark with a known time of the world's clock gives the profiler's zero. The world's clocks of all ranks have one zero:
on one host the same clock, between hosts agreed on by a broadcast when the run began.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.spec.text.profiled_steps import ProfiledSteps
from polytempo.worlds import ProcessWorld

FOLDER = "profile"
MOST_SLICES = 100_000
_MARK = "polytempo: clock"


class StepProfiler:
    """Records the steps of `steps` on this rank, if it is one of their ranks, and leaves them in the folder `out`.

    Call `begins` before each step, and `close` at the end. ValueError for ranks that are not there. Cost outside of
    these steps: a comparison of two numbers a step; inside: torch's own, some microseconds an operation. It changes no
    bit.
    """

    def __init__(self, world: ProcessWorld, steps: ProfiledSteps, out: Place) -> None:
        steps.check(world.size)
        self._world, self._steps, self._out = world, steps, out
        self._recorder: Any = None
        self._first, self._begin_s = steps.first, 0.0
        self._over = not steps.has(world.rank)

    def begins(self, step: int) -> None:
        """Start or stop before `step`, the number of steps so far."""
        if self._over:
            return
        if self._recorder is not None:
            if step >= self._steps.last:
                self._stop(step)
        elif self._steps.first <= step < self._steps.last:
            self._start(step)

    def close(self, step: int | None = None) -> None:
        """Stop, if the run ends within the steps. `step`: the steps of a loop. Its first rank tells of missing ones."""
        if self._recorder is not None:
            self._stop(self._world.step + 1)
        if step is not None and self._world.rank == 0 and (missed := self._steps.missed(0, step)) is not None:
            print(f"note: {missed}", file=sys.stderr)
        self._over = True

    def _start(self, step: int) -> None:
        self._first = step
        self._recorder = profile(activities=supported_activities(), acc_events=True)
        self._recorder.__enter__()
        self._begin_s = self._world.now_s()
        with record_function(_MARK):
            pass

    def _stop(self, step: int) -> None:
        self._over, recorder, self._recorder = True, self._recorder, None
        end_s = self._world.now_s()
        recorder.__exit__(None, None, None)
        events = [event for event in self._world.trace.events if self._first <= event.step < step]
        slices, dropped = _slices(recorder.events(), self._begin_s)
        part = {
            "rank": self._world.rank,
            "host": socket.gethostname(),
            "first": self._first,
            "last": step,
            "begin_s": self._begin_s,
            "end_s": end_s,
            "slices": slices,
            "dropped": dropped,
            "events": [list(event) for event in events if event.end_s >= self._begin_s],
        }
        folder = self._out / FOLDER
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
        files.replace(folder / f"rank-{self._world.rank}.json", json.dumps(part))


def _slices(events: Any, begin_s: float) -> tuple[list[list[Any]], int]:
    """Name, thread ("device" for work there), begin and duration in seconds of each operation, the longest ones."""
    zero_us = next((event.time_range.start for event in events if event.name == _MARK), 0.0)
    found = []
    for event in events:
        if event.name == _MARK:
            continue
        on_host = event.device_type == torch.autograd.DeviceType.CPU  # type: ignore[attr-defined]
        thread = f"thread {event.thread}" if on_host else f"device {event.device_index}"
        start_s = begin_s + (event.time_range.start - zero_us) / 1e6
        found.append([event.name, thread, start_s, max(0.0, event.time_range.elapsed_us() / 1e6)])
    dropped = max(0, len(found) - MOST_SLICES)
    if dropped:
        found = sorted(found, key=lambda each: -each[3])[:MOST_SLICES]
    return sorted(found, key=lambda each: (each[1], each[2], -each[3])), dropped
