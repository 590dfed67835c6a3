"""The progress that a run shows, and the page that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from polytempo.core.system.files import run_folder
from polytempo.core.system.url_path import Place
from polytempo.report.pages.page import write_report
from polytempo.report.runs import load_run
from polytempo.report.status.event_log import logged
from polytempo.report.status.metrics import MetricsWriter
from polytempo.report.status.progress import Progress
from polytempo.spec.result import Result
from polytempo.spec.run_spec import RunSpec
from polytempo.training.trainer import start_of
from polytempo.worlds import write_chrome_trace
from polytempo.worlds.trace import Trace


def reported(result: Result, out: Place) -> Result:
    """Write the run's `report.html`; the result names it."""
    saved = out / "checkpoint"
    named = replace(result, report=str(out / "report.html"), checkpoint=str(saved) if saved.exists() else None)
    named.write(out)
    title = ": ".join(filter(None, (result.job, result.strategy, result.left)))
    write_report(out / "report.html", [load_run(out)], title=title)
    return named


def simulated(result: Result, trace: Trace, out: Place | None) -> Result:
    """The result of a simulated run; its trace and page are written into `out`, if there is one."""
    if out is None:
        return result
    run_folder(out)
    title = f"{result.job}, {result.strategy}, simulated"
    write_chrome_trace(out / "trace.json", trace.events, title=title, dropped=trace.dropped)
    return reported(result, out)


@contextmanager
def virtual_rows(
    spec: RunSpec, progress: Progress | None, **settings: str
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows rows of a simulated run, and writes them into its folder, if it has one.

    `settings`: settings of the simulation, beside the options of the run.

    The first row begins new files, so a run that is refused before leaves older files as they are.
    """
    out, writers = spec.options.out, list[MetricsWriter]()
    start = start_of(spec, "virtual", **settings)
    with show_rows(progress, spec, "virtual ") as show, ExitStack() as stack:

        def record(row: dict[str, Any]) -> None:
            if out is not None and not writers:
                run_folder(out)
                stack.enter_context(logged(out, start))
                writers.append(stack.enter_context(MetricsWriter(out)))
            for writer in writers:
                writer.write(row)
            show(row)

        yield record


@contextmanager
def show_rows(progress: Progress | None, spec: RunSpec, kind: str = "") -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows rows of metrics as progress, if there is a `progress`. `kind`: "virtual " workers."""
    if progress is None:
        yield lambda row: None
        return
    accuracy: list[float | None] = [None]

    def show(row: dict[str, Any]) -> None:
        if row.get("kind") == "test":
            accuracy[0] = row["accuracy"]
        elif row.get("kind") == "diagnosis":
            progress.note(f"note: {row['text']}")
        elif row.get("kind") == "train":
            progress.update(row["step"], row["loss"], accuracy[0], row["samples_per_s"], epoch=row.get("epoch"))

    description = f"{spec.job.name}, {spec.strategy}, {spec.workers} {kind}workers"
    progress.start(spec.options.steps, description, total_epochs=spec.epochs, at_most=bool(spec.options.until))
    try:
        yield show
        progress.complete()
    finally:
        progress.finish()
