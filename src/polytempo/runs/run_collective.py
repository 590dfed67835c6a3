"""`run` for strategies of workers that meet each other: each process is one rank, and all must come to the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from polytempo.core.system import files
from polytempo.core.system.files import METRICS
from polytempo.core.system.url_path import UrlPath
from polytempo.engines.collective import collected
from polytempo.engines.engine import EngineSetup, Launch
from polytempo.engines.join.init import init
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.engines.local_engine import Local
from polytempo.report.status.progress import Progress
from polytempo.report.status.rows import RowFollower
from polytempo.runs.frame.rows_in_memory import RowsInMemory
from polytempo.runs.frame.run_frame import framed_job, with_page
from polytempo.spec.placement import on_hosts
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.spec.text.plain_text import plain_text
from polytempo.training.model.run_device import may_use_device
from polytempo.training.trainer import Trainer


def run_collective(spec: RunSpec, setup: EngineSetup, progress: Progress | None = None) -> Result:
    """Train with so many ranks. Errors: `WorkerDied` names the first that failed; `NotFinite` as in `run`."""
    options = spec.options
    meetings: list[Rendezvous] = []
    with framed_job(spec, progress) as frame, ExitStack() as stack:
        placed, rows, follower, on_row = frame.placed(spec), None, None, None
        if frame.out is None and progress is not None and isinstance(setup, Local):  # other processes take no function
            rows = stack.enter_context(closing(RowsInMemory(frame.show)))
            on_row = rows.write

        def setting() -> dict[str, Any]:
            if not meetings:
                meetings.append(stack.enter_context(closing(Rendezvous.held(engine.address.host))))
            return {"rendezvous": meetings[0].url, **frame.given}

        launch = Launch(
            work=lambda role: train_rank(placed, on_row),
            spec=placed,
            setting=setting,
            workers=spec.workers,
            most=spec.workers,
            threads=options.threads or (None if spec.strategy.slices is None else 1),  # else their number changes bits
        )
        if frame.out is not None and not options.resume:
            files.remove(frame.out / METRICS)
        if frame.out is not None:
            every_s = 5.0 if isinstance(frame.out, UrlPath) else 0.0
            follower = RowFollower(frame.out, frame.show, every_s, on_broken=_not_shown)
        engine = frame.opened(setup, launch)
        if frame.given:  # metrics are put again and again there, not appended
            follower = RowFollower(UrlPath(f"local://{frame.out}"), frame.show, 0.5, on_broken=_not_shown)
        topology = on_hosts(spec.topology(), engine.address.num_hosts)
        shown = follower or rows
        look = None if shown is None else shown.look
        [answer, *_] = collected(engine, topology, look, notice=frame.heed(options.grace_s))
        if shown is not None:
            shown.look(last=True)
    assert isinstance(answer, dict)
    return with_page(Result(**answer), spec)


def _not_shown(line: bytes, error: Exception) -> None:
    """A broken line in the run's metrics ends no run."""
    shown = line[:80].decode(errors="replace")
    print(f"note: this line of {METRICS} is not shown: {plain_text(shown)} ({error})", file=sys.stderr)


def train_rank(spec: RunSpec, on_row: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any] | None:
    """Be one rank of the world that this process was started in; rank 0 says how the run went, and gives its rows to
    `on_row`."""
    device = spec.options.device if may_use_device(spec.options, spec.strategy) else "cpu"
    world = init(timeout_s=spec.options.timeout_s, device=device, quiet=True)
    result = Trainer(spec, world=world).fit_held(on_row=on_row if world.rank == 0 else None)
    return result.as_json() if world.rank == 0 else None
