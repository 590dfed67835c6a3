"""`run` for strategies in which workers meet each other: each process is one rank, and all must come to the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from polytempo.core.system import files
from polytempo.core.system.notice import noticed
from polytempo.core.system.url_path import UrlPath
from polytempo.engines.collective import collected
from polytempo.engines.engine import EngineSetup, Launch
from polytempo.engines.join.init import init
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.processes.failures import diverged
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.launcher_files import served_files
from polytempo.runs.frame.live_run import LiveRun
from polytempo.runs.frame.run_logs import logs_of
from polytempo.runs.frame.run_page import reported, show_rows
from polytempo.runs.frame.url_follower import UrlFollower
from polytempo.spec.placement import on_hosts
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.trainer import Trainer


def run_collective(spec: RunSpec, setup: EngineSetup, progress: Progress | None = None) -> Result:
    """Train with so many ranks. Errors: `WorkerDied` names the first that failed; `NotFinite` as in `run`."""
    options = spec.options
    out = options.out and options.out.resolve()
    placed = replace(spec, options=replace(options, out=out))

    meetings: list[Rendezvous] = []
    given: dict[str, Any] = {}

    def setting() -> dict[str, Any]:
        if not meetings:
            meetings.append(Rendezvous.held(engine.address.host))
        return {"rendezvous": meetings[0].url, **given}

    launch = Launch(
        work=lambda role: train_rank(placed),
        spec=placed,
        setting=setting,
        workers=spec.workers,
        most=spec.workers,
        threads=options.threads or (None if spec.strategy.slices is None else 1),  # else their number changes bits
    )
    if out is not None:
        files.run_folder(out)
    with LiveRun(out, spec) as live, diverged(), show_rows(progress, spec) as rows, logs_of(out) as logs:
        show = live.noting(rows)
        follower: _Follower | UrlFollower | None = None
        if out is not None:
            metrics = out / "metrics.jsonl"
            if not options.resume:
                files.remove(metrics)
            follower = UrlFollower(metrics, show) if isinstance(metrics, UrlPath) else _Follower(metrics, show)
        try:
            with setup.open(launch._replace(logs=logs)) as engine, ExitStack() as stack:
                topology = on_hosts(spec.topology(), engine.address.num_hosts)
                stack.enter_context(served_files(out, engine.address, given))
                if given:  # metrics are put again and again there, not appended
                    follower = UrlFollower(UrlPath(f"local://{out}/metrics.jsonl"), show, every_s=0.5)
                notice = None if out is None else stack.enter_context(noticed(options.grace_s))
                look = None if follower is None else follower.look
                [answer, *_] = collected(live.watching(engine), topology, look, notice=notice)
        finally:
            for meeting in meetings:
                meeting.close()
        if isinstance(follower, UrlFollower):
            follower.look(last=True)
        elif follower is not None:
            follower.look()
    assert isinstance(answer, dict)
    result = Result(**answer)
    return result if options.out is None else reported(result, options.out)


def train_rank(spec: RunSpec) -> dict[str, Any] | None:
    """Be one rank of the world that this process was started in; rank 0 says how the run went."""
    world = init(timeout_s=spec.options.timeout_s, quiet=True)
    result = Trainer(spec.job, spec.strategy, spec.options, world=world).fit_held()
    return result.as_json() if world.rank == 0 else None


class _Follower:
    """Reads the metrics that rank 0 writes while the run goes on; each line is parsed once.

    The rows that are there when it is made are no news. A resumed run puts a new file in the old one's place:
    the rows that it keeps are shown.
    """

    def __init__(self, metrics: Path, show: Callable[[dict[str, Any]], None]) -> None:
        self._metrics, self._show = metrics, show
        there = metrics.stat() if metrics.exists() else None
        self._file = there and there.st_ino
        self._read_bytes = there.st_size if there else 0

    def look(self) -> None:
        """Show the rows that have come since the last look."""
        try:
            stream = self._metrics.open("rb")
        except FileNotFoundError:
            return
        with stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != self._file or status.st_size < self._read_bytes:
                self._file, self._read_bytes = status.st_ino, 0
            stream.seek(self._read_bytes)
            whole_lines, newline, _ = stream.read().rpartition(b"\n")
        self._read_bytes += len(whole_lines) + len(newline)
        for line in whole_lines.splitlines():
            self._show(json.loads(line))
