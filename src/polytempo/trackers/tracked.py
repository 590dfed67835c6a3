"""`tracked`: the trackers of a run, from its launcher's side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from polytempo.core.system import files
from polytempo.core.system.files import METRICS
from polytempo.core.system.url_path import Place
from polytempo.report.status.event_log import finish_of
from polytempo.report.status.records import RunFinished, RunStarted
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.tracker_call import TrackerCall
from polytempo.trackers.feed import TrackerFeed
from polytempo.trackers.tracker import TrackedRun
from polytempo.trackers.tracker_program import TrackersOrder

LONGEST_CALL_S, FINISH_S = 60.0, 20.0
"""The longest call of a tracker, and the time that all have to finish after the run."""
_MODULE = "polytempo.trackers.tracker_program"
_END_S = 2.0


@contextmanager
def tracked(spec: RunSpec, world: str) -> Iterator[None]:
    """Feed the trackers of the run's options while the context is open, from the run's folder.

    Trackers by name run in a process beside this one, of low priority; objects run in a thread of this process. The end
    is held up for at most `FINISH_S`. No error of a tracker is raised here: it is a note on standard error.
    """
    trackers, out = spec.options.trackers, spec.options.out
    if not trackers or out is None:
        yield
        return
    with tracking(facts_of(spec, out, world), trackers, out):
        yield


@contextmanager
def tracked_loop(start: RunStarted, trackers: Sequence[Any], out: Place, *, resumed: bool) -> Iterator[None]:
    """The same for a loop of one's own, from the folder that it logs into."""
    if not trackers:
        yield
        return
    settings: dict[str, str | int | float | bool] = {
        "job": start.job,
        "strategy": start.strategy,
        "workers": start.workers,
    }
    with tracking(_facts(start, out, settings, resumed=resumed), trackers, out):
        yield


@contextmanager
def tracking(run: TrackedRun, trackers: Sequence[Any], out: Place) -> Iterator[None]:
    """Feed the trackers of `run`; see `tracked`."""
    if not run.resumed:
        files.remove(out / METRICS)  # of another run; trackers must not read it
    with _Tracking(run, _by_name(trackers), _log(out)) as feeds:
        try:
            yield
        except BaseException as error:
            feeds.finish = finish_of(error)
            raise
        feeds.finish = finish_of(None)


def facts_of(spec: RunSpec, out: Place, world: str) -> TrackedRun:
    """The facts of a job's run for its trackers."""
    options = spec.options
    settings = {
        name: value
        for name, value in options.as_plain().items()
        if isinstance(value, str | int | float | bool) and value != ""
    }
    settings |= {"job": spec.job.name, "strategy": str(spec.strategy), "workers": spec.workers}
    settings |= {"lr": spec.lr, "batch_size": spec.batch_size, "global_batch_size": spec.global_batch_size}
    settings |= {} if spec.epochs is None else {"epochs": spec.epochs}
    for name in ("resume", "out"):
        settings.pop(name, None)
    start = RunStarted(
        job=spec.job.name,
        strategy=str(spec.strategy),
        world=world,
        workers=spec.workers,
        steps=options.steps,
        epochs=spec.epochs,
    )
    return _facts(start, out, settings, resumed=options.resume)


def _facts(
    start: RunStarted, out: Place, settings: dict[str, str | int | float | bool], *, resumed: bool
) -> TrackedRun:
    folder = out.absolute() if isinstance(out, Path) else out
    return TrackedRun(
        name=folder.name,
        folder=str(folder),
        job=start.job,
        strategy=start.strategy,
        world=start.world,
        workers=start.workers,
        settings=settings,
        began_s=time.time(),
        steps=start.steps,
        epochs=start.epochs,
        resumed=resumed,
    )


class _Tracking:
    """The process of the trackers by name, and the threads of others."""

    def __init__(self, run: TrackedRun, trackers: dict[str, Any], log: str) -> None:
        self.finish: RunFinished
        named = {name: str(each) for name, each in trackers.items() if isinstance(each, TrackerCall)}
        self._order = TrackersOrder(run, named, log, LONGEST_CALL_S, FINISH_S) if named else None
        self._feeds = [
            TrackerFeed(name, lambda each=each: each, run, _note)  # type: ignore[misc]  # mypy sees no lambda's default
            for name, each in trackers.items()
            if name not in named
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Tracking:
        if self._order is not None:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a module of ours
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=dict(os.environ) | {"OMP_NUM_THREADS": "1"},
                process_group=0,
            )
            self._send(self._order)
        for feed in self._feeds:
            feed.begin()
        return self

    def __exit__(self, *error: object) -> None:
        for feed in self._feeds:
            feed.end(self.finish)
        self._send(self.finish)
        until_s = time.monotonic() + FINISH_S
        for feed in self._feeds:
            if not feed.join(max(0.0, until_s - time.monotonic())):
                feed.drop(f"has not finished within {FINISH_S:g} s")
        if self._process is not None:
            self._await_end(self._process, until_s + _END_S)

    def _send(self, line: msgspec.Struct) -> None:
        """A line for the process; if it has ended, `__exit__` says so."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(msgspec.json.encode(line) + b"\n")
                self._process.stdin.flush()

    def _await_end(self, process: subprocess.Popen[bytes], until_s: float) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        if code != 0:
            assert self._order is not None
            _note(
                f"note: the process of {', '.join(self._order.trackers)} "
                f"{'did not end in time' if code is None else f'ended with exit code {code}'}; look into "
                f"{self._order.log or 'its output'}"
            )


def _by_name(trackers: Sequence[Any]) -> dict[str, Any]:
    """Trackers by their names in notes and bookmarks: a second one of a name is NAME-2."""
    found, seen = dict[str, Any](), Counter[str]()
    for each in trackers:
        name = each.name if isinstance(each, TrackerCall) else type(each).__name__
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name}-{seen[name]}"] = each
    return found


def _log(out: Place) -> str:
    """The file for the output of libraries; "" at a URL."""
    if not isinstance(out, Path):
        return ""
    files.run_folder(out)
    return str(files.made(out.absolute() / "logs") / "trackers.log")


def _note(text: str) -> None:
    print(text, file=sys.stderr)
