"""Facts of a run for its page: settings, environment, hashes, and the command that repeats it."""

from __future__ import annotations

import shlex
from typing import Any

from polytempo.core.system.url_path import Place
from polytempo.report.runs import load_result

_SETTINGS = ("job", "strategy", "world", "workers", "steps", "epochs", "batch_size", "seed", "threads")
_HASHES = ("parameters_sha256", "trace_hash")
_OUTCOME = (
    *("samples", "seconds", "samples_per_s", "loss", "accuracy", "train_loss", "bytes_sent_per_rank"),
    *("communication_share", "reached", "resumed_at", "diverged", "left", "started_from"),
)


def facts(folder: Place, row: dict[str, Any]) -> dict[str, Any]:
    """The facts of the run in `folder`; `row` is its row in the list of runs. A run that goes on has fewer."""
    result: dict[str, Any] = {}
    if row.get("ended"):
        try:
            result = load_result(folder)
        except (ValueError, OSError):
            result = {}
    known = {**{name: row.get(name) for name in _SETTINGS}, **{name: result.get(name) for name in _SETTINGS}}
    settings = {name: known[name] if known[name] is not None else row.get(name) for name in _SETTINGS}
    server = result.get("server") if isinstance(result.get("server"), dict) else None
    return {
        "settings": {name: value for name, value in settings.items() if value not in (None, "")},
        "outcome": {name: result[name] for name in _OUTCOME if result.get(name) is not None},
        "hashes": {name: result[name] for name in _HASHES if result.get(name) is not None},
        "server": None
        if server is None
        else {key: server.get(key) for key in ("rule", "shards", "updates", "dropped")},
        "ledger": result.get("ledger"),
        "stages": result.get("stages"),
        "folder": str(folder),
        "command": command(settings, result),
    }


def command(settings: dict[str, Any], result: dict[str, Any]) -> str:
    """The command that begins a run with these settings. Options that a run does not record are not in it."""
    if not settings.get("job") or not settings.get("strategy"):
        return ""
    verb = "simulate" if settings.get("world") == "virtual" else "train"
    words = ["polytempo", verb, str(settings["job"]), "--strategy", str(settings["strategy"])]
    options = [("workers", settings.get("workers"))]
    if result.get("epochs"):
        options.append(("epochs", f"{result['epochs']:g}"))
    elif settings.get("epochs"):
        options.append(("epochs", f"{settings['epochs']:g}"))
    else:
        options.append(("steps", settings.get("steps")))
    options += [("batch-size", settings.get("batch_size")), ("seed", settings.get("seed"))]
    for name, value in options:
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def differences(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """The settings of several runs as rows: a name, True where they differ, and each run's value."""
    found = []
    for name in _SETTINGS:
        values = [run["settings"].get(name) for run in runs]
        if any(value is not None for value in values):
            found.append([name, len({str(value) for value in values}) > 1, *values])
    return found
