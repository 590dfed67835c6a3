"""`polytempo tune threads`: the division of the cores for the most samples a second of a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from shlex import quote
from typing import Any

from polytempo.bench.thread_grid import GridPlan, GridSetting, thread_grid
from polytempo.cli.bench.bench_options import TuneThreadsOptions
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import figure, notes_on_stderr, show_json, show_table
from polytempo.runs.frame.rehearsal import rehearse

_COLUMNS = ("workers", "threads", "inter", "samples/s", "quartiles", "to one thread")


def tune_threads(asked: TuneThreadsOptions) -> None:
    """Measure the grid, and show it, the best division first."""
    with notes_on_stderr():
        assert asked.cores is not None
        plan = GridPlan(
            *(found_job(asked.job), asked.data, asked.cores, asked.batch_size, asked.global_batch_size),
            *(asked.rounds, asked.turn_s),
        )
        rehearse([plan.spec(GridSetting(1, 1, 1))])
        result = thread_grid(plan, lambda line: print(line, file=sys.stderr))
    if asked.json:
        show_json(result)
        return
    show_table(_COLUMNS, [_row(row) for row in result["rows"]])
    print()
    print(*verdict(asked.job, result), sep="\n")


def verdict(job: str, result: Mapping[str, Any]) -> list[str]:
    """Lines below the table: the best division, its margin, and the divisions that were left out."""
    best = GridSetting(*(result["best"][name] for name in GridSetting._fields))
    said = [f"best: polytempo train {quote(job)} {best.arguments}"]
    if (margin := result["margin"]) is not None:
        sure = "" if margin["low"] > 1 else "; rounds differ by as much, so either may be the best"
        percent = 100 * (margin["median"] - 1)
        said.append(f"{percent:.1f} % more samples a second than the next{sure}")
    said += [f"not measured: --inter-threads above 1: {reason}" for reason in result["missing"].values()]
    return said


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    rate = row["samples_per_s"]
    return (
        *(str(row[name]) for name in GridSetting._fields),
        figure("", rate["median"]),
        f"{figure('', rate['low'])} … {figure('', rate['high'])}",
        f"{row['to_one_thread']['median']:.2f}",
    )
