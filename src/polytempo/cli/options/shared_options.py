"""Options of several commands, mostly rows of the table of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from polytempo.cli.options.command_options import table
from polytempo.cli.options.folder import holds_run
from polytempo.spec.table.option import Count, NumThreads, Positive

OPTIONS = "Options"
"""The heading of options that have no other."""
ARGUMENT = ""

Job = Annotated[str, table()["job"]]
Strategy = Annotated[str, table()["strategy"]]
Workers = Annotated[Count, table()["workers"]]
Cluster = Annotated[str | None, table()["cluster"]]
Stragglers = Annotated[str | None, table()["stragglers"]]
Until = Annotated[dict[str, float], table()["until"]]
Data = Annotated[str | Path | None, table()["data"]]
BatchSize = Annotated[Count | None, table()["batch_size"]]
GlobalBatchSize = Annotated[Count | None, table()["global_batch_size"]]
Seed = Annotated[int, table()["seed"]]
Threads = Annotated[NumThreads | None, table()["threads"]]
Device = Annotated[str, table()["device"]]
Timeout = Annotated[Positive, table()["timeout_s"]]
Json = Annotated[bool, table()["json"]]
Ui = Annotated[bool, table()["ui"]]


def check_shown(asked: object, folder: str, example: str) -> None:
    """ValueError for `--ui` without the option that names the folder or the file that the page shows."""
    if vars(asked)["ui"] and vars(asked)[folder] is None:
        raise ValueError(f"--ui needs --{folder}, to show its files; add --{folder} {example}")


def new_folder(given: Path) -> Path:
    """A folder without a result. ValueError for another one."""
    if given.exists() and not given.is_dir():
        raise ValueError("this is a file; name a folder")
    if holds_run(given):
        raise ValueError("a result is in it; name another folder")
    return given
