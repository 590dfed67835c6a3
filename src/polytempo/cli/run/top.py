"""`polytempo top`."""

from __future__ import annotations

import json
import sys
import time

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from polytempo.cli.look.look_options import TopOptions
from polytempo.core.system.url_path import Place, place
from polytempo.report.status.live_status import LiveStatus, launcher_lives
from polytempo.report.status.live_view import view
from polytempo.report.status.records import line_of
from polytempo.report.status.stream import RunStream, follow, status_in


def top(asked: TopOptions) -> None:
    """Show a run until it ends, or once."""
    run = place(asked.run)
    if asked.records:
        for record in RunStream(run).look() if asked.once else follow(run, asked.every_s):
            print(line_of(record), flush=True)
        return
    status = _status_of(run)
    if asked.json:
        print(json.dumps(msgspec.to_builtins(status) | {"launcher_lives": launcher_lives(status)}))
        return
    console = Console()
    if asked.once or not sys.stdout.isatty():
        console.print(_view(status, sys.maxsize))
        return
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(_view(status, console.size.height), refresh=True)
                if status.state != "running" or launcher_lives(status) is False:
                    break
                time.sleep(asked.every_s)
                status = _status_of(run)
    except KeyboardInterrupt:  # the usual way to leave
        pass


def _status_of(run: Place) -> LiveStatus:
    """The status of the run in a folder. ValueError without one."""
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; name the folder of a run, such as runs/digits-sync_sgd")
    status = status_in(run)
    if status is None:
        raise ValueError(
            f"{run}: this folder holds neither a live.json nor a result.json nor an events.jsonl, so it is not a "
            "run's, or of a run that has not begun; name the folder that the run was given as --out"
        )
    return status


def _view(status: LiveStatus, lines: int) -> RenderableType:
    return view(status, now_s=time.time(), launcher_lives=launcher_lives(status), lines=lines)
