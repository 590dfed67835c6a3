"""`run`, `compare` and `join`: a job on real worker processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

from polytempo.core import NotFinite, Strategy, files
from polytempo.data.plan import check_enough
from polytempo.engines.arguments import check_strategy
from polytempo.engines.capacity import batch_notes, check_memory, check_processes, cores_notes
from polytempo.engines.diverged import diverged_result
from polytempo.engines.folder import began
from polytempo.engines.folder_names import slug
from polytempo.engines.init import init
from polytempo.engines.local import launch
from polytempo.engines.rehearsal import rehearse
from polytempo.engines.run_page import reported, show_rows
from polytempo.engines.run_served import num_processes, run_served
from polytempo.engines.worker import RankInfo
from polytempo.engines.worker_processes import diverged
from polytempo.report.page import write_report
from polytempo.report.picture import write_picture
from polytempo.report.progress import Progress
from polytempo.report.runs import load_run
from polytempo.spec.job import Job
from polytempo.spec.options import OptionKeywords, RunOptions, with_keywords
from polytempo.spec.result import Result
from polytempo.training.trainer import Trainer


def run(
    job: Job,
    strategy: Strategy,
    workers: int = 2,
    options: RunOptions | None = None,
    *,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> Result:
    """Train `job` by `strategy` with `workers` processes of this host.

        result = pt.run(job, pt.strategies.local_sgd(period=8), workers=2, epochs=3, out=Path("runs/first"))

    Options are those of `RunOptions`, as an object or by name. With `out`, the folder holds `metrics.jsonl`,
    `trace.json`, `checkpoint/`, `result.json`, `logs/` and `report.html` afterwards.

    Errors: `NotFinite` names the step, the rank and the parameter where a loss, a gradient or a parameter was NaN or
    infinite. `WorkerDied` names the first worker that failed and quotes its log. With a parameter server, workers may
    be killed and the run goes on (see `run_served`).
    """
    check_strategy(strategy)
    options = with_keywords(options, more)
    _prepare(job, [strategy], workers, options)
    return _performed(job, strategy, workers, options, progress)


def _prepare(job: Job, strategies: Sequence[Strategy], workers: int, options: RunOptions) -> None:
    """Refuse, before anything is started or written, what cannot become a run; say what may surprise."""
    for strategy in strategies:
        check_strategy(strategy)
    check_processes(max(num_processes(strategy, workers) for strategy in strategies), workers)
    import_module("torch._dynamo")  # optimizers need it: a second here instead of in each worker
    found = rehearse(job, strategies, options)
    if found.samples is not None:
        check_enough(found.samples, workers)
    check_memory(found.private_bytes, workers)
    notes = [*found.warned, *batch_notes(found.samples, workers, options.batch_size or job.batch_size)]
    for note in [*cores_notes(workers), *notes]:
        print(f"note: {note}", file=sys.stderr)


def _performed(job: Job, strategy: Strategy, workers: int, options: RunOptions, progress: Progress | None) -> Result:
    """The run itself."""
    with began(options.out):
        if strategy.server is not None:
            return run_served(job, strategy, workers, options, progress)
        out = options.out and options.out.resolve()
        given = replace(options, out=out)

        def work(rank_info: RankInfo) -> dict[str, Any] | None:
            world = init(timeout_s=options.timeout_s, quiet=True)
            result = Trainer(job, strategy, given, world=world).fit()
            return result.as_json() if rank_info.rank == 0 else None

        with diverged(), show_rows(progress, options, f"{job.name}, {strategy}, {workers} workers") as show:
            if out is None:
                [answer, *_] = launch(work, workers, threads=options.threads)
            else:
                files.run_folder(out)
                metrics = out / "metrics.jsonl"
                if not options.resume:
                    metrics.unlink(missing_ok=True)
                follower = _Follower(metrics, show)
                [answer, *_] = launch(work, workers, threads=options.threads, logs=out / "logs", tick=follower.look)
                follower.look()
        assert isinstance(answer, dict)
        result = Result(**answer)
        return result if options.out is None else reported(result, options.out)


def join(
    job: Job,
    strategy: Strategy,
    options: RunOptions | None = None,
    *,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> Result:
    """Train `job` as one worker of the world that this process was started in (torchrun, Slurm, …)."""
    check_strategy(strategy)
    options = with_keywords(options, more)
    world = init(timeout_s=options.timeout_s)
    shown = progress if world.rank == 0 else None
    with show_rows(shown, options, f"{job.name}, {strategy}, {world.size} workers") as show:
        result = Trainer(job, strategy, options, world=world).fit(on_row=show)
    return reported(result, options.out) if options.out is not None and world.rank == 0 else result


def compare(
    job: Job,
    strategies: Sequence[Strategy],
    workers: int = 2,
    options: RunOptions | None = None,
    *,
    progress: Progress | None = None,
    **more: Unpack[OptionKeywords],
) -> list[Result]:
    """Train `job` with one strategy after the other, and report them side by side in `out`.

    A strategy that diverges (`NotFinite`) does not end the others: `diverged` of its result says what was not finite.
    """
    options = with_keywords(options, more)
    if not strategies:
        raise ValueError("compare needs at least one strategy; give some, such as [pt.strategies.sync_sgd()]")
    _prepare(job, strategies, workers, options)
    results, folders = [], []
    for number, strategy in enumerate(strategies, start=1):
        folder = None if options.out is None else options.out / f"{number:02d}-{slug(str(strategy))}"
        folders.append(folder)
        own = replace(options, out=folder)
        try:
            results.append(_performed(job, strategy, workers, own, progress))
        except NotFinite as error:
            results.append(diverged_result(job, strategy, workers, own, error))
    if options.out is not None:
        report_together(options.out, [folder for folder in folders if folder], results, f"{job.name}: strategies")
    return results


def report_together(out: Path, folders: Sequence[Path], results: Sequence[Result], title: str) -> None:
    """One page, one picture and one JSON list over several runs."""
    runs = [load_run(folder) for folder in folders]
    write_report(out / "report.html", runs, title=title)
    write_picture(out / "compare.png", runs)
    listed = json.dumps([result.as_json() for result in results], indent=2)
    files.replace(out / "compare.json", listed + "\n")


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
