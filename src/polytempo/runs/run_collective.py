"""`run` for strategies in which workers meet each other: each process is one rank, and all must come to the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.collective import collected
from polytempo.engines.engine import EngineSetup, Launch
from polytempo.engines.join.init import init
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.run_frame import framed, with_page
from polytempo.runs.frame.url_follower import UrlFollower
from polytempo.spec.placement import on_hosts
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.trainer import Trainer


def run_collective(spec: RunSpec, setup: EngineSetup, progress: Progress | None = None) -> Result:
    """Train with so many ranks. Errors: `WorkerDied` names the first that failed; `NotFinite` as in `run`."""
    options = spec.options
    meetings: list[Rendezvous] = []
    with framed(spec, progress) as frame, ExitStack() as stack:
        placed = frame.spec

        def setting() -> dict[str, Any]:
            if not meetings:
                meetings.append(stack.enter_context(closing(Rendezvous.held(engine.address.host))))
            return {"rendezvous": meetings[0].url, **frame.given}

        launch = Launch(
            work=lambda role: train_rank(placed),
            spec=placed,
            setting=setting,
            workers=spec.workers,
            most=spec.workers,
            threads=options.threads or (None if spec.strategy.slices is None else 1),  # else their number changes bits
        )
        if frame.out is not None and not options.resume:
            files.remove(frame.out / "metrics.jsonl")
        follower = None if frame.out is None else _follower(frame.out, frame.show)
        engine = frame.opened(setup, launch)
        if frame.given:  # metrics are put again and again there, not appended
            metrics = UrlPath(f"local://{frame.out}/metrics.jsonl")
            follower = UrlFollower(metrics, frame.show, every_s=0.5)
        topology = on_hosts(spec.topology(), engine.address.num_hosts)
        look = None if follower is None else follower.look
        [answer, *_] = collected(engine, topology, look, notice=frame.heed())
        if isinstance(follower, UrlFollower):
            follower.look(last=True)
        elif follower is not None:
            follower.look()
    assert isinstance(answer, dict)
    return with_page(Result(**answer), spec)


def _follower(out: Place, show: Callable[[dict[str, Any]], None]) -> _Follower | UrlFollower:
    metrics = out / "metrics.jsonl"
    return UrlFollower(metrics, show) if isinstance(metrics, UrlPath) else _Follower(metrics, show)


def train_rank(spec: RunSpec) -> dict[str, Any] | None:
    """Be one rank of the world that this process was started in; rank 0 says how the run went."""
    world = init(timeout_s=spec.options.timeout_s, quiet=True)
    result = Trainer(spec, world=world).fit_held()
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
