"""`polytempo schedule`: a scheduled program, and how far it came in each sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

from polytempo.cli.options.show import notes_on_stderr, show_json, show_table, size
from polytempo.cli.run.schedule_options import ScheduleOptions
from polytempo.partition.scheduled import ScheduledJob, SweepReport
from polytempo.report.pages.summary import human_seconds
from polytempo.runs.programs.run_schedule import schedule as scheduled
from polytempo.spec.text.catalogue import NAMES, parse_cluster

_SHOWN = 20


def schedule(asked: ScheduleOptions) -> None:
    """Perform the program, and show its measures."""
    program = cast(ScheduledJob, NAMES.program(asked.program))
    cluster = None if asked.cluster is None else parse_cluster(asked.cluster, asked.stragglers)
    with notes_on_stderr():
        fit = scheduled(
            program,
            cast(Sequence[object], NAMES.data_of_program(asked.program, asked.data)),
            asked.workers,
            sweeps=asked.sweeps,
            tolerance=asked.tolerance,
            cluster=cluster,
            seed=asked.seed or 0,
            timeout_s=asked.timeout_s,
        )
    if asked.json:
        shown = {"program": fit.program, "world": fit.world, "workers": fit.workers, "converged": fit.converged}
        rows = [report._asdict() for report in fit.sweeps]
        show_json({**shown, "bytes_sent_per_rank": fit.bytes_sent_per_rank, "trace": fit.trace_hash, "sweeps": rows})
        return
    print(f"{fit.program}, {fit.workers} workers, {fit.world}")
    columns = ("sweep", "rounds", "updates", "seconds", "objective", "error")
    show_table(columns, [_row(report) for report in _some(fit.sweeps)])
    print(f"each worker sent {size(fit.bytes_sent_per_rank)}")
    if fit.converged is False:
        print(
            f"not converged: after {fit.last.sweep} sweeps the error is {fit.last.error:.2g}, above the tolerance of "
            f"{asked.tolerance:g}; allow more sweeps, --sweeps {2 * asked.sweeps} for example",
            file=sys.stderr,
        )


def _some(reports: Sequence[SweepReport]) -> list[SweepReport]:
    """Evenly spread ones, the first and the last among them, where there are many."""
    step = max(1, -(-len(reports) // _SHOWN))
    return [report for report in reports if report.sweep % step == 0 or report is reports[-1]]


def _row(report: SweepReport) -> tuple[str, ...]:
    error = "-" if report.error is None else f"{report.error:.2g}"
    numbers = (f"{report.sweep}", f"{report.rounds:,}", f"{report.updates:,}")
    return (*numbers, human_seconds(report.seconds), f"{report.objective:.7g}", error)
