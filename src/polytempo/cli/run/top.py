"""`polytempo top`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from polytempo.cli.look.look_options import TopOptions
from polytempo.core.system.url_path import Place, place
from polytempo.report.runs import as_written, load_result
from polytempo.report.status.live_status import LiveStatus, read_status, status_of_result
from polytempo.report.status.live_view import view
from polytempo.report.status.metrics import read_metrics


def top(asked: TopOptions) -> None:
    """Show a run until it ends, or once."""
    run = place(asked.run)
    status = status_in(run)
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
                status = status_in(run)
    except KeyboardInterrupt:  # the usual way to leave
        pass


def status_in(run: Place) -> LiveStatus:
    """The status of the run in a folder. ValueError without one."""
    if not run.is_dir():
        raise ValueError(f"{run}: there is no such folder; name the folder of a run, such as runs/digits-sync_sgd")
    status = read_status(run)
    if status is not None:
        return status
    if not (run / "result.json").is_file():
        raise ValueError(
            f"{run}: this folder holds neither a live.json nor a result.json, so it is not a run's, or of a run that "
            "has not begun; name the folder that the run was given as --out"
        )
    metrics = run / "metrics.jsonl"
    result, rows = load_result(run), read_metrics(metrics) if metrics.is_file() else []
    with as_written(run / "result.json", "a run's own facts"):
        return status_of_result(result, rows)


def launcher_lives(status: LiveStatus) -> bool | None:
    """True if the launcher's process is there; None if it is on another host, or the run is over."""
    if status.state != "running" or status.launcher_host != socket.gethostname():
        return None
    try:
        os.kill(status.launcher_pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _view(status: LiveStatus, lines: int) -> RenderableType:
    return view(status, now_s=time.time(), launcher_lives=launcher_lives(status), lines=lines)
