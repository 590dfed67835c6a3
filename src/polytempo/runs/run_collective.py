"""`run` for strategies of workers that meet each other: each process is one rank, and all must come to the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from io import BytesIO
from typing import IO, Any

from polytempo.core.system import files
from polytempo.core.system.files import MAX_JSON_BYTES
from polytempo.core.system.url_path import Place, UrlPath
from polytempo.engines.collective import collected
from polytempo.engines.engine import EngineSetup, Launch
from polytempo.engines.join.init import init
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.report.status.progress import Progress
from polytempo.runs.frame.run_frame import framed_job, with_page
from polytempo.spec.placement import on_hosts
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.trainer import Trainer


def run_collective(spec: RunSpec, setup: EngineSetup, progress: Progress | None = None) -> Result:
    """Train with so many ranks. Errors: `WorkerDied` names the first that failed; `NotFinite` as in `run`."""
    options = spec.options
    meetings: list[Rendezvous] = []
    with framed_job(spec, progress) as frame, ExitStack() as stack:
        placed = frame.placed(spec)

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
        follower = None
        if frame.out is not None:
            every_s = 5.0 if isinstance(frame.out, UrlPath) else 0.0
            follower = MetricsFollower(frame.out / "metrics.jsonl", frame.show, every_s)
        engine = frame.opened(setup, launch)
        if frame.given:  # metrics are put again and again there, not appended
            metrics = UrlPath(f"local://{frame.out}/metrics.jsonl")
            follower = MetricsFollower(metrics, frame.show, every_s=0.5)
        topology = on_hosts(spec.topology(), engine.address.num_hosts)
        look = None if follower is None else follower.look
        [answer, *_] = collected(engine, topology, look, notice=frame.heed(options.grace_s))
        if follower is not None:
            follower.look(last=True)
    assert isinstance(answer, dict)
    return with_page(Result(**answer), spec)


def train_rank(spec: RunSpec) -> dict[str, Any] | None:
    """Be one rank of the world that this process was started in; rank 0 says how the run went."""
    world = init(timeout_s=spec.options.timeout_s, quiet=True)
    result = Trainer(spec, world=world).fit_held()
    return result.as_json() if world.rank == 0 else None


class MetricsFollower:
    """Shows each row of a run's metrics once, while the run goes on.

    Rows from before this object are not shown. A resumed run replaces the file: the rows that it keeps are shown. At a
    URL the file is read whole, at most every `every_s`, and only after its size has changed.
    """

    def __init__(self, metrics: Place, show: Callable[[dict[str, Any]], None], every_s: float = 0.0) -> None:
        self._metrics, self._show, self._every_s = metrics, show, every_s
        self._file, self._read_bytes, self._look_at_s = 0, 0, 0.0
        with suppress(OSError), self._opened() as (stream, self._file):
            self._read_bytes = stream.seek(0, os.SEEK_END)

    def look(self, *, last: bool = False) -> None:
        """Show the rows since the last look. `last`: look now, without waiting for `every_s`."""
        now_s = time.monotonic()
        if now_s < self._look_at_s and not last:
            return
        self._look_at_s = now_s + self._every_s
        with suppress(OSError), self._opened() as (stream, file):  # the next look comes soon
            if file != self._file or stream.seek(0, os.SEEK_END) < self._read_bytes:
                self._file, self._read_bytes = file, 0
            stream.seek(self._read_bytes)
            whole_lines, newline, _ = stream.read().rpartition(b"\n")
            self._read_bytes += len(whole_lines) + len(newline)
            for line in whole_lines.splitlines():
                self._show(json.loads(line))

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], int]]:
        """The file, and a number that is another one after it was replaced."""
        if isinstance(self._metrics, UrlPath):
            unchanged = self._metrics.size() == self._read_bytes
            yield BytesIO(bytes(self._read_bytes) if unchanged else self._metrics.read(MAX_JSON_BYTES)), 0
            return
        with self._metrics.open("rb") as stream:
            yield stream, os.fstat(stream.fileno()).st_ino
